"""The report in a real browser: drawn charts, light and dark, wide and narrow, with a keyboard and
without a script.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from test_report import HOSTILE, hostile_run
from written_runs import write_run, write_samples

from allhands.report import make_page, read_facts, to_html

CHROMIUM = next(
    (
        found
        for name in ("chromium", "chromium-browser", "google-chrome")
        if (found := shutil.which(name))
    ),
    None,
)
playwright = pytest.importorskip(
    "playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'"
)
pytestmark = [
    pytest.mark.skipif(
        CHROMIUM is None, reason="no Chromium here: scripts/install_test_tools.sh installs it"
    ),
]
WIDTHS = (1280, 390)
# The lowest contrast of text against what is behind it, of all elements that hold text and can be
# seen.
CONTRAST = """() => {
  const parse = text => (text.match(/[\\d.]+/g) || []).map(Number);
  const behind = element => {
    for (let at = element; at; at = at.parentElement) {
      const colour = parse(getComputedStyle(at).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.99) return colour;
    }
    return parse(getComputedStyle(document.body).backgroundColor);
  };
  const light = colour => colour.slice(0, 3).map(c => c / 255)
    .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
    .reduce((sum, c, place) => sum + c * [0.2126, 0.7152, 0.0722][place], 0);
  let worst = [99, ""], count = 0;
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some(node => node.nodeType === 3 && node.textContent.trim());
    if (!own || !element.getClientRects().length || ["SCRIPT", "NOSCRIPT"].includes(element.tagName)) continue;
    const a = light(parse(getComputedStyle(element).color)), b = light(behind(element));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    count += 1;
    if (ratio < worst[0]) worst = [ratio, element.outerHTML.slice(0, 200)];
  }
  return [...worst, count];
}"""
# Names of tables that end outside of what can be seen without scrolling.
CUT_OFF = """() => [...document.querySelectorAll("caption")].filter(caption => {
  const text = document.createRange();
  text.selectNodeContents(caption);
  return text.getBoundingClientRect().right > caption.closest(".scroll").getBoundingClientRect().right + 1;
}).map(caption => caption.textContent)"""
# Of each canvas how many pixels differ from the commonest one, and how many colours are strong.
PIXELS = """() => [...document.querySelectorAll("[data-chart]")].map(host => {
  const canvas = host.querySelector("canvas");
  const data = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  let inked = 0, coloured = 0;
  for (let i = 0; i < data.length; i += 4) {
    if (data[i + 3] > 128) {
      inked += 1;
      if (Math.max(data[i], data[i+1], data[i+2]) - Math.min(data[i], data[i+1], data[i+2]) > 60) coloured += 1;
    }
  }
  return [host.dataset.chart, inked, coloured];
})"""


@dataclass(frozen=True)
class Opened:
    """A page in the browser, with what it complained of and asked for."""

    page: Any
    complaints: list[str]
    requests: list[str]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One computer against two, with samples, a restart, overfitting in one of them."""
    place = tmp_path_factory.mktemp("report")
    sampled = [("Once upon a time", "there was a pirate who sailed the seven seas, " * 3)]
    one = write_run(place / "one-computer", steps=200, sampled=sampled)
    two = write_run(
        place / "two-computers",
        steps=200,
        ranks=2,
        train=lambda s: 4 - s / 70,
        valid=lambda s: 2.5 + abs(s - 90) / 80,
    )
    for run in (one, two):
        write_samples(run, host=lambda rank: ("mac", "studio")[rank])
    write(place / "report.html", one, two)
    return place / "report.html"


def write(target: Path, *runs: Path) -> None:
    target.write_text(
        to_html(make_page([read_facts(run) for run in runs], now=1.8e9)), encoding="utf-8"
    )


def opened(
    browser: Any, file: Path, width: int = 1280, scheme: str = "light", **options: Any
) -> Opened:
    viewport = {"width": width, "height": 900}
    page = browser.new_context(viewport=viewport, color_scheme=scheme, **options).new_page()
    seen = Opened(page, [], [])
    page.on("console", lambda message: seen.complaints.append(message.text))
    page.on("pageerror", lambda error: seen.complaints.append(str(error)))
    page.on("request", lambda request: seen.requests.append(request.url))
    page.goto(file.as_uri())
    return seen


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", WIDTHS)
def test_a_person_can_read_it(
    browser: Any, report: Path, width: int, scheme: str, tmp_path: Path
) -> None:
    seen = opened(browser, report, width, scheme)
    page = seen.page
    for details in page.query_selector_all("details"):
        details.evaluate("it => { it.open = true }")
    shots = Path(os.environ.get("ALLHANDS_TEST_SHOTS", tmp_path))
    page.screenshot(path=shots / f"report-{width}-{scheme}.png", full_page=True)
    assert seen.complaints == []
    assert [url for url in seen.requests if not url.startswith(("file:", "data:"))] == []
    # Nothing is wider than the screen, but for tables, which scroll by themselves.
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(CUT_OFF) == []
    ratio, where, count = page.evaluate(CONTRAST)
    assert count > 100
    assert ratio >= 4.5, where
    drawn = page.evaluate(PIXELS)
    assert {name for name, _, _ in drawn} >= {
        "loss-steps",
        "loss-tokens",
        "loss-time",
        "throughput",
        "memory-1",
    }
    for name, inked, coloured in drawn:
        assert inked > 2000, name
        assert coloured > 300, name
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")
    page.context.close()


def test_phases_of_many_runs_are_drawn_when_they_are_asked_for(
    browser: Any, tmp_path: Path
) -> None:
    runs = [write_run(tmp_path / name, steps=20) for name in ("one", "two", "three")]
    for run in runs:
        write_samples(run)
    write(tmp_path / "report.html", *runs)
    page = opened(browser, tmp_path / "report.html").page
    chart = page.locator("#phases [data-chart] canvas").first
    assert not chart.is_visible()
    page.locator("#phases summary").first.click()
    page.wait_for_timeout(500)
    assert chart.is_visible()
    inked = {name: count for name, count, _ in page.evaluate(PIXELS)}
    phases = [count for name, count in inked.items() if name.startswith("phases-")]
    assert len(phases) >= 3
    assert min(phases) > 2000


def test_the_keyboard_reads_values_and_hides_lines(browser: Any, report: Path) -> None:
    page = opened(browser, report).page
    host = page.locator('[data-chart="loss-steps"]')
    host.focus()
    for key in ("Home", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    readout = page.locator('[data-chart="loss-steps"] ~ .readout')
    assert readout.get_attribute("aria-live") == "polite"
    assert "one-computer (1 rank): training" in readout.inner_text()
    # The third place is step 10: validation 2.1 + 2 / 2.
    assert readout.inner_text().startswith("step 10: ")
    assert "one-computer (1 rank): validation 3.1000" in readout.inner_text()
    before = {name: coloured for name, _, coloured in page.evaluate(PIXELS)}
    for button in page.locator('[data-chart="loss-steps"] ~ .legend button').all():
        button.focus()
        page.keyboard.press("Enter")
        assert button.get_attribute("aria-pressed") == "false"
    page.wait_for_timeout(200)
    after = {name: coloured for name, _, coloured in page.evaluate(PIXELS)}
    assert after["loss-steps"] < before["loss-steps"] / 2
    assert after["loss-time"] == before["loss-time"]
    # Everything that can be used is reached with the tabulator, in the order of the page.
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.tagName") in ("SUMMARY", "DIV", "BUTTON")
    page.context.close()


def test_phases_of_ranks_are_read_side_by_side(browser: Any, report: Path) -> None:
    """Half of each second of the second run's ranks is computing, and half waiting; of a step of 1
    s.
    """
    page = opened(browser, report).page
    hosts = [page.locator(f'[data-chart="phases-1-rank-{rank}"]') for rank in range(2)]
    for rank, host in enumerate(hosts):
        host.focus()
        page.keyboard.press("End")
        told = page.locator(f'[data-chart="phases-1-rank-{rank}"] ~ .readout').inner_text()
        assert (
            told
            == "step 19: data wait 0 s; compute 0.5 s; reduce 0.5 s; update and rest 0 s; whole step 1 s"
        )
    # At one moment, since the page scrolls smoothly.
    names = ["phases-1-rank-0", "phases-1-rank-1", "phases-1"]
    script = """names => names.map(name =>
      document.querySelector(`[data-chart="${name}"]`).getBoundingClientRect().toJSON())"""
    left, right, whole = page.evaluate(script, names)
    assert (left["y"], left["width"]) == (right["y"], right["width"])
    assert left["x"] < right["x"]
    assert whole["width"] > left["width"] + right["width"]
    page.context.close()


def test_colours_follow_the_scheme_and_charts_the_width(browser: Any, report: Path) -> None:
    page = opened(browser, report).page
    colours = """() => ["--background", "--run-0", "--rank-0", "--phase-3"].map(
      name => getComputedStyle(document.documentElement).getPropertyValue(name))"""
    bright, (light, *kept) = page.evaluate(PIXELS), page.evaluate(colours)
    page.emulate_media(color_scheme="dark")
    page.set_viewport_size({"width": 390, "height": 900})
    page.wait_for_timeout(500)
    background, *shown = page.evaluate(colours)
    assert background != light
    assert shown == kept, "a colour means the same in both"
    assert page.evaluate(PIXELS) != bright
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    assert (
        page.evaluate(
            "Math.max(...[...document.querySelectorAll('canvas')].map(c => c.clientWidth))"
        )
        <= 390
    )
    page.context.close()


@pytest.mark.parametrize("width", [390, 1200])
def test_parts_stay_on_top_and_single_charts_have_the_whole_width(
    browser: Any, report: Path, width: int
) -> None:
    page = opened(browser, report, width, reduced_motion="reduce").page
    for key in ("memory", "options", "words"):
        page.locator(f"nav.parts a[href='#{key}']").click()
        page.wait_for_timeout(200)
        bar = page.locator("nav.parts").bounding_box()
        assert bar["y"] <= 90 if key == "words" else bar["y"] == 0
        assert bar["height"] <= 60, "one row, however many parts there are"
        assert page.locator(f"#{key} h2").bounding_box()["y"] >= bar["y"] + bar["height"] - 1
    # In each part a chart is half as wide as the page beside another, and else as wide as the page.
    rows = page.evaluate("""() => [...document.querySelectorAll(".charts")].map(part => {
      const rows = {};
      for (const one of part.querySelectorAll("figure")) {
        const box = one.getBoundingClientRect();
        (rows[Math.round(box.top)] ||= []).push(box.width / part.clientWidth);
      }
      return Object.values(rows);
    }).flat()""")
    assert rows
    for shares in rows:
        assert sum(shares) > 0.95, rows
    page.context.close()


def test_a_colour_means_one_thing(browser: Any, report: Path) -> None:
    """Legends and bars: what has the same colour is the same run, rank or phase, and has a mark or
    a word besides.
    """
    page = opened(browser, report).page
    shown = page.evaluate("""() => [
      ...[...document.querySelectorAll(".plot ~ .legend button")].map(it => [
        getComputedStyle(it.querySelector("path")).stroke, it.textContent,
        it.querySelector(".mark")?.getAttribute("d")]),
      ...[...document.querySelectorAll(".bars .legend li")].map(it => [
        getComputedStyle(it.querySelector("rect")).fill, it.textContent, "bar"]),
    ]""")
    meanings: dict[str, set[str]] = {}
    for colour, label, _ in shown:
        name = re.sub(
            r":? (training|validation).*|: MLX's arrays| \(directs.*|update and rest", "", label
        )
        meanings.setdefault(colour, set()).add(name or "update")
    assert len(meanings) > 8
    assert all(len(names) == 1 for names in meanings.values()), meanings
    marks = {label: mark for _, label, mark in shown if label in ("rank 0", "rank 1")}
    assert marks["rank 0"] != marks["rank 1"] is not None
    page.context.close()


def test_without_a_script_the_tables_are_there(browser: Any, report: Path) -> None:
    page = opened(browser, report, java_script_enabled=False).page
    assert page.locator(".noscript").bounding_box()["height"] > 20
    page.locator("details summary").first.click()
    assert page.locator("details table").first.is_visible()
    page.context.close()


def test_what_a_run_says_does_not_run(browser: Any, tmp_path: Path) -> None:
    write(tmp_path / "report.html", hostile_run(tmp_path / HOSTILE.replace("/", "")))
    seen = opened(browser, tmp_path / "report.html", 390)
    assert seen.page.title().startswith("<script><sc")  # as text
    assert seen.page.title() != "owned"
    assert seen.page.locator("img").count() == 0
    assert seen.complaints == []
    assert [url for url in seen.requests if not url.startswith(("file:", "data:"))] == []
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= 390
    # And if something had slipped through, the page's policy would not let it run.
    seen.page.evaluate("""() => {
      const it = document.createElement("div");
      it.innerHTML = '<img src=x onerror="document.title=\\'owned\\'">';
      document.body.append(it);
      const script = document.createElement("script");
      script.textContent = "document.title = 'owned'";
      document.body.append(script);
    }""")
    seen.page.wait_for_timeout(200)
    assert seen.page.title() != "owned"
    assert any("Content Security Policy" in one for one in seen.complaints)
    seen.page.context.close()


@pytest.mark.parametrize("kind", ["one report", "no validation", "not a number", "nothing"])
def test_partial_runs_are_drawn_as_far_as_they_go(browser: Any, tmp_path: Path, kind: str) -> None:
    nan = float("nan")
    match kind:
        case "one report":
            run = write_run(tmp_path / "run", steps=5)
        case "no validation":
            run = write_run(tmp_path / "run", valid=None)
        case "not a number":
            run = write_run(
                tmp_path / "run", train=lambda step: nan if 20 < step < 40 else 3.0 - step / 60
            )
        case _:
            run = write_run(tmp_path / "run", steps=4, valid=None)
    write(tmp_path / "report.html", run)
    seen = opened(browser, tmp_path / "report.html")
    assert seen.complaints == []
    drawn = {name: coloured for name, _, coloured in seen.page.evaluate(PIXELS)}
    assert (kind == "nothing") == (drawn == {})
    assert all(coloured > 10 for coloured in drawn.values()), drawn
    seen.page.context.close()
