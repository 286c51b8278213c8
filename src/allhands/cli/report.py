"""``allhands report``: a page about a run, or about several runs."""

from __future__ import annotations

import time
from pathlib import Path

from allhands.cli.verbs_runs import Report
from allhands.errors import ConfigError
from allhands.io.files import make_directory, require_ours, write_whole
from allhands.io.paths import output_file
from allhands.io.terminal import echo, one_line
from allhands.observe.metrics import METRICS_FILE
from allhands.report import html, make_page, markdown, read_facts, to_html, to_markdown

_MARKDOWN = ".md"


def report(asked: Report) -> None:
    """Run the verb."""
    _require_different(asked.runs)
    target = output_file(asked.out or _usual(asked.runs), (".html", ".htm", _MARKDOWN))
    named = target.suffix.lower() == _MARKDOWN
    in_html = target.with_suffix(".html") if named else target
    in_markdown = target if named else target.with_suffix(_MARKDOWN)
    for file in (in_html, in_markdown):
        require_ours(
            file, [html.MARK.encode(), markdown.MARK.encode()], "report", force=asked.force
        )
    found = [read_facts(run) for run in asked.runs]
    page = make_page(found, title=asked.title, now=time.time())
    texts = {in_html: to_html(page), in_markdown: to_markdown(page)}
    # Private, because the page has content of the run's private files: prompts, answers,
    # directories.
    make_directory(target.parent, private=True)
    for file, text in texts.items():
        write_whole(
            file,
            lambda draft, text=text: draft.write_text(text, encoding="utf-8", errors="replace"),
            private=True,
        )
    for part in page.runs:
        echo(one_line(f"{part.label}: {part.status}{f' ({part.reason})' if part.reason else ''}"))
        for one in part.judgements:
            echo(f"  {one.text}")
        for note in part.notes:
            echo(f"  {one_line(note)}")
    echo(f"report: {in_html}\nas Markdown: {in_markdown}")


def _require_different(runs: list[Path]) -> None:
    """Refuse to compare a run with itself, also under two names.

    Raises:
        ConfigError: two of the runs are the same.
    """
    seen = set[Path]()
    for run in runs:
        file = (run / METRICS_FILE if run.is_dir() else run).resolve()
        if file in seen:
            raise ConfigError(
                "the same run twice",
                code="input-given-twice",
                where=str(run),
                hint="give each run once: a comparison of a run with itself shows nothing",
            )
        seen.add(file)


def _usual(runs: list[Path]) -> Path:
    """Return the default path: in the run's directory, or in this directory for several runs."""
    if len(runs) > 1:
        return Path("report.html")
    return (runs[0] if runs[0].is_dir() else runs[0].parent) / "report.html"
