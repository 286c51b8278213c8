"""Hooks of mkdocs: the home page from the README, and pages for files outside ``docs/``.

The pages link to each other as on GitHub. A page or a program outside ``docs/`` that a page links
to gets a page of its own below ``repository/``, and the links are rewritten to it.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[1]
HOME = "index.md"
# Sections of the README that the site has as pages, or that only the checkout needs.
LEFT_OUT = {
    "Train a model, step by step": "docs/tutorials/pirate.md",
    "All pages": "",
    "Tests": "",
}
LINK = re.compile(r"\]\(([^)#:\s]*)(#[^)\s:]*)?\)")
FENCE = re.compile(r"^(`{3,}).*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"<code>.*?</code>", re.DOTALL)
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
SHELL = re.compile(r'(<div class="language-(?:bash|console) .*?<code>)(.*?</code>)', re.DOTALL)
LINE = re.compile(r"^(?!</code>)(.+?)(?=$|</code>)", re.MULTILINE)
_COMMAND = r'<span class="command">\1</span>'
ROLE = re.compile(r":(?:class|func|meth|mod|data):(?=<code>)")
# The home page is alone in its part; records and programs are read, not searched.
NO_MENU = "---\nhide: [navigation]\n---\n"
NOT_SEARCHED = "---\nsearch:\n  exclude: true\n---\n"
LANGUAGES = {".py": "python", ".json": "json", ".sbatch": "bash"}
# The checkout's path of each page, by its path on the site.
_origins: dict[str, str] = {}


def on_files(files: Any, config: Any) -> Any:
    """Add the home page, and a page for each file outside ``docs/`` to which a page links."""
    _origins.clear()
    waiting = ["CONTRIBUTING.md", "CHANGELOG.md", "README.md"]
    for file in files.documentation_pages():
        _origins[file.src_uri] = f"docs/{file.src_uri}"
        waiting += _linked(file.content_string, f"docs/{file.src_uri}")
    while waiting:
        path = waiting.pop()
        uri = site_uri(path)
        if uri in _origins or not (ROOT / path).exists():
            continue
        _origins[uri] = path
        content = page_of(path)
        files.append(File.generated(config, uri, content=content))
        if path.endswith(".md"):
            waiting += _linked(content, path)
    return files


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Rewrite links between files of the checkout to links between pages of the site."""
    uri = page.file.src_uri
    done, end = [], 0
    for fence in [*FENCE.finditer(markdown), None]:
        text = markdown[end : fence.start() if fence else None]
        text = COMMENT.sub("", text)
        done.append(LINK.sub(lambda found: _rewritten(found, _origins[uri], uri), text))
        if fence:
            done.append(fence[0])
            end = fence.end()
    return "".join(done)


def on_page_content(html: str, **_: Any) -> str:
    """Remove the roles of reStructuredText from docstrings, and mark commands and flags for the
    style sheet, which wraps them.
    """
    html = CODE.sub(lambda code: FLAG.sub(r'<span class="flag">\g<0></span>', code[0]), html)
    return SHELL.sub(lambda block: block[1] + LINE.sub(_COMMAND, block[2]), ROLE.sub("", html))


def site_uri(path: str) -> str:
    """Return the place on the site of a file of the checkout."""
    if path == "README.md":
        return HOME
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"repository/{path}" if path.endswith(".md") else f"repository/{path}.md"


def page_of(path: str) -> str:
    """Return the Markdown of the page about a file or a directory outside ``docs/``."""
    place = ROOT / path
    if place.is_dir():
        lines = [f"- [{file.name}]({file.name})" for file in sorted(place.glob("*.py"))]
        return f"# {path}\n\n" + "\n".join(lines) + "\n"
    text = place.read_text(encoding="utf-8")
    if path == "README.md":
        return home(text)
    if path.endswith(".md"):
        return NOT_SEARCHED + text if path.startswith("benchmarks/results") else text
    fence = f"```` {LANGUAGES.get(place.suffix, 'text')}\n{text.rstrip()}\n````\n"
    return f"{NOT_SEARCHED}# {path}\n\n{fence}"


def home(readme: str) -> str:
    """Return the README without the sections that are pages of the site.

    Raises:
        ValueError: a section that is to be left out is not there.
    """
    parts = re.split(r"^(?=## )", readme, flags=re.MULTILINE)
    titles = [part.partition("\n")[0].removeprefix("## ") for part in parts]
    if missing := set(LEFT_OUT) - set(titles):
        raise ValueError(f"README.md has no section {missing}: change LEFT_OUT in {__file__}")
    kept = [part for part, title in zip(parts, titles, strict=True) if title not in LEFT_OUT]
    return NO_MENU + "".join(kept)


def _linked(markdown: str, path: str) -> list[str]:
    """Return the files of the checkout outside ``docs/`` to which a page links."""
    text = FENCE.sub("", markdown)
    found = [_target(match[1], path) for match in LINK.finditer(text) if match[1]]
    return [target for target in found if not target.startswith("docs/")]


def _target(link: str, path: str) -> str:
    """Return the checkout's path of a relative link in the file ``path``."""
    base = path if (ROOT / path).is_dir() else posixpath.dirname(path)
    return posixpath.normpath(posixpath.join(base, link))


def _rewritten(found: re.Match[str], path: str, uri: str) -> str:
    link, anchor = found[1], found[2] or ""
    target = _target(link, path) if link else path
    moved = {f"#{_slug(title)}": page for title, page in LEFT_OUT.items()}
    if target == "README.md" and moved.get(anchor):
        target, anchor = moved[anchor], ""
    elif not link:
        return found[0]
    place = target.removeprefix("docs/") if target.startswith("docs/images/") else site_uri(target)
    return f"]({posixpath.relpath(place, posixpath.dirname(uri) or '.')}{anchor})"


def _slug(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
