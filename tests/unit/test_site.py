"""The site of the pages: what is built, and how it looks and works in a real browser."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from test_report_browser import CHROMIUM, playwright

import allhands

ROOT = Path(__file__).parents[2]
WIDTHS = (1280, 390)
# Pages whose pictures are kept.
SHOWN = ("index.html", "tutorials/pirate.html", "configuration.html", "reference/api.html")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("mkdocs") is None, reason="no mkdocs here: pip install '.[docs]'"
    ),
]
needs_browser = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium here: scripts/install_test_tools.sh installs it"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; the build fails at a broken link."""
    place = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(place)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return place


def article(page: Path) -> str:
    """The text of a page without its code, as HTML."""
    (found,) = re.findall(r"<article.*?</article>", page.read_text(encoding="utf-8"), re.DOTALL)
    return re.sub(r"<(pre|code)\b.*?</\1>", "", found, flags=re.DOTALL)


def test_every_page_is_rendered_as_markdown(site: Path) -> None:
    pages = [page for page in site.rglob("*.html") if page.name != "404.html"]
    assert len(pages) > 30
    for page in pages:
        assert not re.search(r"<p>[|`]|^[-*|] |\]\(|^:::|\*\*\w", article(page), re.MULTILINE), page


def test_home_is_the_readme_without_what_other_pages_say(site: Path) -> None:
    titles = re.findall(r'<h2 id="([^"]+)"', (site / "index.html").read_text(encoding="utf-8"))
    assert {"the-demo", "installation", "speed"} <= set(titles)
    assert not {"all-pages", "train-a-model-step-by-step", "tests"} & set(titles)


def test_every_public_name_has_a_place_of_its_own(site: Path) -> None:
    page = (site / "reference" / "api.html").read_text(encoding="utf-8")
    named = set(re.findall(r'id="allhands\.(\w+)"', page))
    assert set(allhands.__all__) - {"__version__"} <= named


@dataclass(frozen=True)
class Reader:
    """A browser's page, the site's address, and the addresses that were asked for."""

    page: Any
    address: str
    asked: list[str] = field(default_factory=list)

    def open(self, name: str) -> None:
        self.page.goto(f"{self.address}/{name}", wait_until="domcontentloaded")


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(params=WIDTHS)
def reader(request: pytest.FixtureRequest, site: Path) -> Iterator[Reader]:
    handler = functools.partial(_Quiet, directory=str(site))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": request.param, "height": 844})
            seen = Reader(page, f"http://127.0.0.1:{server.server_port}")
            page.on("request", lambda request: seen.asked.append(request.url))
            yield seen
            browser.close()
        server.shutdown()


@needs_browser
def test_pages_fit_the_screen_and_ask_no_other_host(
    reader: Reader, site: Path, tmp_path: Path
) -> None:
    shots = Path(os.environ.get("ALLHANDS_TEST_SHOTS", tmp_path))
    width = reader.page.viewport_size["width"]
    pages = [path.relative_to(site) for path in site.rglob("*.html")]
    pages = [path for path in pages if path.parts[0] != "repository"]
    assert len(pages) > 25
    for path in pages if width < 1000 else map(Path, SHOWN):
        reader.open(path.as_posix())
        assert reader.page.evaluate("document.documentElement.scrollWidth") <= width, path
        if path.as_posix() in SHOWN:
            reader.page.screenshot(path=shots / f"site-{path.stem}-{width}.png")
    assert [url for url in reader.asked if not url.startswith((reader.address, "data:"))] == []


@needs_browser
def test_search_finds_a_page(reader: Reader) -> None:
    page = reader.page
    reader.open("index.html")
    page.keyboard.press("/")
    page.keyboard.type("token store", delay=20)
    page.locator(".md-search-result__link").first.click(timeout=20_000)
    page.wait_for_url("**/reference/files.html*")
    assert page.locator("#token-store").is_visible()


@needs_browser
def test_a_command_is_copied_as_it_is_typed(reader: Reader) -> None:
    reader.open("tutorials/pirate.html")
    shown = reader.page.locator(".language-bash code").first.inner_text()
    assert shown == "allhands model get demo --out models/smollm2\n"
    reader.open("two-computers.html")
    lines = reader.page.locator(".language-bash code").first.inner_text().splitlines()
    assert len(lines) == 2
