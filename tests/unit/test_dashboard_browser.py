"""The dashboard in a real browser, beside a run that is being written."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from dashboards import dashboard
from test_report_browser import CONTRAST, WIDTHS, browser, pytestmark  # noqa: F401 - the fixture and the marks
from written_runs import HOSTILE, write_run, write_samples


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_it_shows_runs_as_they_go_on(browser: Any, tmp_path: Path, width: int, scheme: str) -> None:  # noqa: F811
    write_run(tmp_path / "first", ranks=2, sampled=[("hello", HOSTILE)])
    write_samples(tmp_path / "first")
    (tmp_path / "first" / "logs" / "rank-0.log").write_text(f"step 1 {HOSTILE}\n")
    with dashboard(tmp_path) as running:
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        complaints: list[str] = []
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.goto(running.address)
        page.wait_for_selector("[data-drawn]")
        assert page.is_checked("#runs tbody tr:has-text('first') input"), "the only run is shown unasked"
        assert page.text_content("#state") == "1 run, 0 going on"
        # A second run, written while the page is open, and chosen with the keyboard.
        write_run(tmp_path / "second")
        page.wait_for_selector("#runs tbody tr:nth-child(2)")
        page.focus("#runs tbody tr:has-text('second') input")
        page.keyboard.press("Space")
        page.wait_for_selector("#page .run:nth-child(2)")
        assert "run=second" in page.url
        page.wait_for_function("document.getElementById('tail').textContent.includes('step 1')")
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        worst, where, count = page.evaluate(CONTRAST)
        assert count > 40
        assert worst >= 4.5, where
        assert page.title() == f"{tmp_path.name}: dashboard", "nothing of a run has run"
        if folder := os.environ.get("ALLHANDS_SCREENSHOTS"):
            page.screenshot(path=f"{folder}/dashboard-{width}-{scheme}.png", full_page=True)
        assert complaints == []
        page.close()
