"""The dashboard in a real browser, beside a run that is being written."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from dashboards import dashboard
from test_monitor import SAMPLE
from test_report_browser import CONTRAST, WIDTHS, browser, pytestmark  # noqa: F401 - the fixture and the marks
from written_runs import HOSTILE, write_run, write_samples

from allhands.observe.monitor import encode_sample, monitor_file


@pytest.mark.slow
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
        assert page.is_checked("#runs tbody tr:has-text('first') input"), (
            "the only run is shown unasked"
        )
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


@contextmanager
def going_on(directory: Path, **options: Any) -> Generator[Path]:
    """A run of which a process lives, which can be asked to stop."""
    write_run(directory, ended=None, **options)
    (directory / "logs").mkdir()
    samples = monitor_file(directory / "logs", "rank", 0)
    # A process is one of the run only as long as it holds the file of its samples open.
    code = (
        "import sys, time; held = open(sys.argv[1], 'a'); print('.', flush=True); time.sleep(120)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(samples)], stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        sample = replace(
            SAMPLE, host=socket.gethostname(), pid=process.pid, time=time.time() + 1.0, every_s=60.0
        )
        samples.write_text(f"{encode_sample(sample)}\n")
        try:
            yield directory
        finally:
            process.kill()


# Whether an element can be seen without scrolling, and how high and wide it is.
SEEN = """element => {
  const box = element.getBoundingClientRect();
  const shown = box.width && box.left >= 0 && box.top >= 0 && box.right <= innerWidth && box.bottom <= innerHeight;
  return [Boolean(shown), box.width, box.height];
}"""


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 390, 800, 1200])
def test_losses_and_stop_are_in_sight(browser: Any, tmp_path: Path, width: int) -> None:  # noqa: F811
    for name in ("older-1", "older-2"):
        write_run(tmp_path / name)
    write_run(tmp_path / "killed", ended=None)
    os.utime(tmp_path / "killed" / "metrics.jsonl", (1e9, 1e9))
    place = tmp_path / "runs" / "now-with-a-name-as-long-as-people-give-to-their-runs"
    with (
        going_on(place, valid=lambda step: 3.25, train=lambda step: 2.5),
        dashboard(tmp_path) as running,
    ):
        page = browser.new_page(viewport={"width": width, "height": 844})
        page.goto(running.address)
        page.wait_for_selector("[data-drawn]")
        row = page.locator("#runs tr:has-text('now')")
        cells = [
            cell
            for cell in row.locator("td").all()
            if "2.500" in cell.inner_text() or "3.250" in cell.inner_text()
        ]
        assert len(cells) == 2
        for element in (*cells, row.locator("button.stop"), row.locator(".status")):
            assert element.evaluate(SEEN)[0], element.inner_text()
        _, _, height = row.locator("button.stop").evaluate(SEEN)
        assert height >= (44 if width < 768 else 24), "large enough for a finger"
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert (
            page.evaluate("document.querySelector('#list .scroll').scrollWidth") <= width
            or width == 800
        )
        if width == 1200:
            over = "it => it.scrollWidth - it.clientWidth"
            assert page.locator("#list .scroll").evaluate(over) <= 0, "no scrolling sideways"
        # How a run goes can be told by word, by colour and by sign.
        told = {
            name: (
                page.inner_text(f"#runs tr:has-text('{name}') .status"),
                page.eval_on_selector(
                    f"#runs tr:has-text('{name}') .status", "it => getComputedStyle(it).color"
                ),
                page.eval_on_selector(
                    f"#runs tr:has-text('{name}') .status",
                    "it => getComputedStyle(it, '::before').content",
                ),
            )
            for name in ("now", "older-1", "killed")
        }
        assert [told[name][0] for name in ("now", "older-1", "killed")] == [
            "going on",
            "finished",
            "crashed or killed",
        ]
        for place in range(3):
            assert len({one[place] for one in told.values()}) == 3, told
        page.close()


@pytest.mark.parametrize("width", [390, 1200])
def test_what_is_chosen_comes_into_sight(browser: Any, tmp_path: Path, width: int) -> None:  # noqa: F811
    for number in range(12):
        write_run(tmp_path / f"run-{number:02d}")
    with dashboard(tmp_path) as running:
        page = browser.new_page(viewport={"width": width, "height": 844}, reduced_motion="reduce")
        page.goto(running.address)
        page.wait_for_selector("#runs tbody tr:nth-child(12)")
        page.locator("#runs tr:has-text('run-00') input").check()
        page.wait_for_selector("#page .run h3")
        page.wait_for_timeout(300)
        assert page.locator("#page .run h3").first.evaluate(SEEN)[0]
        # The parts stay at the top wherever one is, and say where that is.
        page.locator("nav.parts a[href='#logs']").click()
        page.wait_for_timeout(300)
        assert page.locator("nav.parts").evaluate("it => it.getBoundingClientRect().top") == 0
        page.locator("nav.parts a[href='#loss']").click()
        page.wait_for_selector("nav.parts a[href='#loss'][aria-current]", timeout=5000)
        assert page.locator("#loss h2").evaluate(SEEN)[0]
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        page.close()


def test_without_runs_it_says_so_and_shows_the_first_one(browser: Any, tmp_path: Path) -> None:  # noqa: F811
    with dashboard(tmp_path) as running:
        page = browser.new_page(viewport={"width": 390, "height": 900})
        page.goto(running.address)
        page.wait_for_selector("#state:has-text('no runs')")
        assert page.is_hidden("#list")
        write_run(tmp_path / "first")
        page.wait_for_selector("#runs tbody tr")
        assert page.is_visible("#list")
        page.close()
