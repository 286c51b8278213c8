"""``allhands report``: what is on the page of whole, partial and damaged runs, and that nothing on
it can run.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest
from written_runs import BEGAN, HOSTILE, write_run, write_samples

from allhands.cli.main import main
from allhands.cluster.training import tell_troubles
from allhands.errors import DataError
from allhands.io.pictures import palettes, phase_colour
from allhands.observe.metrics import RunEnded, read_metrics
from allhands.observe.times import times_of
from allhands.report import make_page, read_facts, to_html, to_markdown
from allhands.report.html import colour_sheet, in_script
from allhands.report.page import Page


class Reader(HTMLParser):
    """The elements of a page with their attributes, and the text of its tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        elif tag == "script":
            self.scripts.append("")
        if tag not in ("meta", "link", "rect"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "rect":
            assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data
        elif self.open and self.open[-1] == "script":
            self.scripts[-1] += data

    def count(self, tag: str) -> int:
        return Counter(name for name, _ in self.elements)[tag]


def page_of(*runs: Path) -> Page:
    return make_page([read_facts(run, now=BEGAN + 1e6) for run in runs])


def told(page: Page) -> str:
    return "\n".join(one.text for run in page.runs for one in run.judgements)


def run_main(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["report", *map(str, arguments)])
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


# --- the command ----------------------------------------------------------------------------------


def test_one_run_is_one_file_of_html_and_one_of_markdown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "adapters")
    write_samples(run)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    code, out, err = run_main(capsys, run)
    assert (code, err) == (0, "")
    assert "adapters (1 rank): finished" in out
    made = {path for path in run.rglob("*") if path.is_file()} - before.keys()
    assert made == {run / "report.html", run / "report.md"}
    assert {path: path.read_bytes() for path in before} == before
    assert all(path.stat().st_mode & 0o777 == 0o600 for path in made)
    # Again, because a run goes on: its own reports may be replaced.
    assert run_main(capsys, run)[0] == 0


def test_nothing_but_a_report_is_replaced_without_force(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "adapters")
    for name in ("page.html", "page.md"):
        (tmp_path / name).write_text("mine")
        code, _, err = run_main(capsys, run, "--out", tmp_path / "page.html")
        assert code == 2
        assert "--force" in err
        assert (tmp_path / name).read_text() == "mine"
        assert run_main(capsys, run, "--out", tmp_path / "page.html", "--force")[0] == 0
        (tmp_path / "page.md").unlink()
    (tmp_path / "directory.html").mkdir()
    assert run_main(capsys, run, "--out", tmp_path / "directory.html", "--force")[0] == 2
    assert run_main(capsys, run, "--out", tmp_path / "page.pdf")[0] == 2


@pytest.mark.parametrize("kind", ["missing", "empty", "other", "planned"])
def test_what_is_no_run_is_one_clear_error(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "place"
    if kind != "missing":
        place.mkdir()
    if name := {"other": "metrics.jsonl", "planned": "plan.json"}.get(kind):
        (place / name).write_text("not of a run\n")
    code, out, err = run_main(capsys, write_run(tmp_path / "good"), place)
    assert (code, out, err.count("error:")) == (DataError.exit_code, "", 1)
    assert ("planned" in err) is (kind == "planned")
    assert str(place) in err
    assert "what to do" in err
    assert not list(tmp_path.rglob("report.html"))


def test_an_output_below_a_file_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    code, _, err = run_main(
        capsys, write_run(tmp_path / "run"), "--out", tmp_path / "file" / "report.html"
    )
    assert code == 2
    assert "Traceback" not in err


# --- what is on the page --------------------------------------------------------------------------


def test_the_page_stands_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "adapters")
    write_samples(run)
    text = to_html(page_of(run))
    seen = Reader(text)
    assert seen.open == []
    # No address but the policy's own and an empty icon.
    loaded = [
        value
        for _, attrs in seen.elements
        for name, value in attrs.items()
        if name in ("src", "href")
    ]
    assert all(value is not None and value[0] in "#d" for value in loaded)
    assert {value for value in loaded if value and not value.startswith("#")} == {"data:,"}
    assert "@import" not in text
    assert "url(" not in text
    assert "MIT License" in text
    assert "Leon Sorokin" in text


def test_every_chart_has_words_and_a_table_with_its_numbers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "adapters", ranks=2)
    write_samples(run)
    seen = Reader(to_html(page_of(run)))
    charts = json.loads(seen.scripts[0])
    hosts = [attrs for tag, attrs in seen.elements if tag == "div" and "data-chart" in attrs]
    expected = {
        "loss-steps",
        "loss-tokens",
        "loss-time",
        "learning-rate",
        "gradient-norm",
        "throughput",
        "step-time",
    }
    expected |= {"rank-memory", "memory-0", "phases-0", "phases-0-rank-0", "phases-0-rank-1"}
    assert {str(attrs["data-chart"]) for attrs in hosts} == set(charts) == expected
    for attrs in hosts:
        described = [one for _, one in seen.elements if one.get("id") == attrs["aria-describedby"]]
        assert len(described) == 1
        assert attrs["tabindex"] == "0"
    history = read_metrics(run)
    table = next(
        table
        for table in seen.tables
        if table[0] == ["step", *[f"adapters (2 ranks): {n}" for n in KINDS]]
    )
    rows = {int(row[0]): row[1:] for row in table[1:]}
    assert {step: float(row[0]) for step, row in rows.items() if row[0] != "–"} == pytest.approx(
        {one.step: one.loss for one in history.train}, abs=6e-5
    )
    assert {step: float(row[1]) for step, row in rows.items() if row[1] != "–"} == pytest.approx(
        {one.step: one.loss for one in history.valid}, abs=6e-5
    )
    drawn = charts["loss-steps"]["lines"]
    assert drawn[0]["x"] == [one.step for one in history.train]
    assert drawn[0]["y"] == [one.loss for one in history.train]
    # At every validation as many tokens as the report of the same step has: 100 a step.
    assert charts["loss-tokens"]["lines"][1]["x"] == [1e2 * one.step for one in history.valid]
    assert charts["loss-steps"]["stars"] == [[60, history.valid[-1].loss, 0]]


KINDS = ("training", "validation")


def test_two_runs_lie_over_each_other_with_the_table_of_times(tmp_path: Path) -> None:
    one, two = write_run(tmp_path / "one"), write_run(tmp_path / "two", ranks=2)
    page = page_of(one, two)
    text, seen = to_markdown(page), Reader(to_html(page))
    labels, measures = times_of([read_metrics(one), read_metrics(two)])
    assert labels == ["one (1 rank)", "two (2 ranks)"]
    grid = next(section for section in page.sections if section.key == "times").grids[0]
    assert grid.rows == tuple((name, *cells) for name, cells in measures)
    assert ("speed-up", "1.00x", "2.00x") in grid.rows
    assert "| speed-up | 1.00x | 2.00x |" in text
    charts = json.loads(seen.scripts[0])
    assert {line["colour"] for line in charts["loss-steps"]["lines"]} == {0, 1}
    differing = next(table for table in seen.tables if ["num_ranks", "1", "2"] in table)
    assert ["batch_size", "8", "8"] not in differing


def test_memory_expected_and_measured_and_phases_of_each_rank(tmp_path: Path) -> None:
    run = write_run(tmp_path / "adapters", ranks=2)
    write_samples(run, host=lambda rank: ("mac", "studio")[rank])
    page = page_of(run)
    memory = next(section for section in page.sections if section.key == "memory")
    # Reports say 610 MB of rank 1, of 600 expected; samples 300 MB and 19 times 10 more.
    head, rows = memory.grids[0].head, memory.grids[0].rows
    assert head[2:6] == ("expected", "measured in training", "of expected", "highest resident")
    assert rows[1][:6] == ("rank 1", "studio", "600 MB", "610 MB", "102%", "490 MB")
    assert rows[0][:4] == ("rank 0", "mac", "600 MB", "600 MB")
    # Both at the last moment before one of them ends, each on a computer of its own, with all that
    # it has there.
    assert (rows[2][0], rows[2][6]) == ("together", "970 MB")
    time = next(section for section in page.sections if section.key == "time")
    assert dict(time.bars[1].rows)["rank 1 on studio"] == (("compute", 10.0), ("reduce", 10.0))
    parts = dict(time.bars[0].rows[0][1])
    assert parts == pytest.approx(
        {"compute": 0.175, "reduce": 0.025, "data wait": 0.0025, "update and rest": 0.0475}
    )
    machines = next(section for section in page.sections if section.key == "machines").grids[0]
    assert ("computers", "mac: rank 0; studio: rank 1") in machines.rows


def test_a_rank_that_is_started_again_leaves_a_gap(tmp_path: Path) -> None:
    run = write_run(tmp_path / "adapters")
    write_samples(run, ranks=1, count=4)
    file = run / "logs" / "monitor-rank-0.jsonl"
    first = file.read_text().splitlines()
    again = [
        json.dumps(json.loads(line) | {"pid": 7, "time": BEGAN + 10 + n})
        for n, line in enumerate(first)
    ]
    file.write_text("\n".join([*first, *again]) + "\n")
    page = page_of(run)
    chart = next(
        chart for section in page.sections for chart in section.charts if chart.key == "memory-0"
    )
    held = [250e6 + 10e6 * place for place in range(4)]
    assert chart.lines[0].x == (0, 1, 2, 3, 6.5, 10, 11, 12, 13)
    assert chart.lines[0].y == (*held, None, *held)
    assert [row[0] for row in chart.table.rows] == ["0", "1", "2", "3", "10", "11", "12", "13"]


def test_a_sign_that_it_has_outgrown_its_way_of_training_is_told(tmp_path: Path) -> None:
    run = write_run(tmp_path / "slow", ranks=2)
    assert "waiting for" not in told(page_of(run))
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if line["event"] == "train":
            line |= {"compute_s": 0.4 * line["step_time_s"], "comm_s": 0.5 * line["step_time_s"]}
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "50 % of a step was waiting for other ranks. What to do: a faster link" in told(
        page_of(run)
    )


def test_restarts_and_what_the_supervisor_saw(tmp_path: Path) -> None:
    run = write_run(tmp_path / "adapters", steps=30, ended=None)
    whole = (run / "metrics.jsonl").read_text().splitlines()
    started = json.loads(whole[1]) | {
        "step": 20,
        "attempt": 2,
        "elapsed_s": 10.0,
        "time": BEGAN + 60,
    }
    tail = {"event": "ended", "step": 30, "reason": "finished", "total_time_s": 5.0}
    (run / "metrics.jsonl").write_text(
        "\n".join([*whole, json.dumps(started), json.dumps(tail)]) + "\n"
    )
    fault = {
        "time": BEGAN + 50,
        "kind": "fault",
        "message": "rank 1 was killed",
        "rank": 1,
        "host": "node1",
        "step": 23,
    }
    facts = read_facts(run, [fault])
    page = make_page([facts])
    grid = next(section for section in page.sections if section.key == "restarts").grids[0]
    assert [row[1] for row in grid.rows] == ["start", "fault", "start"]
    assert grid.rows[1][:4] == (
        "+50 s",
        "fault",
        "rank 1, host node1, step 23",
        "rank 1 was killed",
    )
    assert grid.rows[0][4] == "2026-11-18 11:06:40"
    assert "attempt 2, from step 20" in grid.rows[2][3]
    charts = {chart.key: chart for section in page.sections for chart in section.charts}
    assert charts["loss-steps"].marks == ((20, 0),)


def test_samples_and_answers_before_and_after(tmp_path: Path) -> None:
    run = write_run(tmp_path / "adapters", sampled=[("Once", "upon a time"), ("Ahoy", "matey")])
    answers = {
        "prompts": ["What is tea?"],
        "before": ["A drink."],
        "after": ["Aye, a drink."],
        "before_share": 0.0,
    }
    (run / "answers.json").write_text(json.dumps(answers))
    (run / "answers.1.json").write_text(json.dumps({**answers, "prompts": ["Of an earlier run?"]}))
    (run / "other.json").write_text('{"prompts": ["a"], "before": [], "after": ["b"]}')
    text = to_markdown(page_of(run))
    assert "| What is tea? | A drink. | Aye, a drink. |" in text
    assert "| 60 | Once | upon a time |" in text
    # Words begin at the left, numbers end at the right.
    assert "| step | prompt | text |\n| --- | --- | --- |\n" in text
    assert "|  | adapters (1 rank) |\n| --- | ---: |\n| ranks | 1 |\n" in text
    assert "other.json" not in text
    assert "earlier run" not in text


# --- runs that are not whole ----------------------------------------------------------------------


def test_a_damaged_line_is_said_on_the_page_and_on_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "adapters")
    lines = (run / "metrics.jsonl").read_text().splitlines()
    lines[4], lines[6] = "garbage{", lines[6].replace('"loss"', '"lass"')
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    said = "Lines of metrics.jsonl that cannot be read and are left out: 2 (the first is 5)."
    code, out, _ = run_main(capsys, run)
    assert (code, said in out) == (0, True)
    assert said in (run / "report.html").read_text()
    assert said in (run / "report.md").read_text().replace("\\", "")


def test_a_run_beside_itself_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "adapters")
    code, _, err = run_main(capsys, run, run / "metrics.jsonl", "--out", tmp_path / "both.html")
    assert code == 2
    assert "the same run twice" in err
    assert "adapters" in err
    assert not (tmp_path / "both.html").exists()


def test_a_torn_last_line_is_no_damage_and_no_end_is_said(tmp_path: Path) -> None:
    run = write_run(tmp_path / "adapters", ended=None)
    whole = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(whole[:-40])
    os.utime(run / "metrics.jsonl", (BEGAN, BEGAN))
    page = page_of(run)
    assert page.runs[0].status == "crashed or killed"
    assert "cannot be read" not in " ".join(page.runs[0].notes), "a kill leaves one"
    assert "loss-steps" in to_html(page)


def test_a_run_that_goes_on_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "adapters", ended=None)
    os.utime(run / "metrics.jsonl", (BEGAN, BEGAN))
    assert read_facts(run, now=BEGAN + 5).status == "going on"
    write_samples(run)
    assert (
        read_facts(run, now=BEGAN + 25).status == "crashed or killed"
    )  # all of its processes have ended


def test_a_run_without_validation_and_with_one_report(tmp_path: Path) -> None:
    page = page_of(write_run(tmp_path / "a", valid=None))
    assert "no validation loss" in told(page)
    assert "There are 3 training reports" in told(page_of(write_run(tmp_path / "d", steps=15)))
    short = page_of(write_run(tmp_path / "b", steps=5))
    assert "There is 1 training report " in told(short)
    assert "loss-steps" in {chart.key for section in short.sections for chart in section.charts}
    empty = page_of(write_run(tmp_path / "c", steps=4))
    assert "no training report" in told(empty)
    assert "There is no report of training yet." in empty.runs[0].notes
    for page in (short, empty):
        assert Reader(to_html(page)).open == []


def test_losses_that_are_no_numbers_are_gaps_and_said(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "adapters", train=lambda step: math.nan if step > 30 else 4 - step / 30
    )
    page = page_of(run)
    assert "The training loss is not a finite number in 6 of 12 reports, first at step 35" in told(
        page
    )
    seen = Reader(to_html(page))
    assert json.loads(seen.scripts[0])["loss-steps"]["lines"][0]["y"][-6:] == [None] * 6
    assert ["60", "NaN", "2.3857"] in seen.tables[1]
    nothing = page_of(write_run(tmp_path / "nothing", train=lambda step: math.nan, valid=None))
    assert "loss-steps" not in {
        chart.key for section in nothing.sections for chart in section.charts
    }
    assert Reader(to_html(nothing)).open == []


def test_a_failed_run_tells_why_even_without_metrics(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = {
        "time": BEGAN,
        "kind": "failed",
        "message": "rank 1 failed",
        "error": "out of memory",
        "rank": 1,
    }
    run = write_run(tmp_path / "a", ended=RunEnded(60, "failed", 30.0))
    facts = read_facts(run, [failed])
    assert (facts.status, facts.reason) == ("failed", "rank 1 failed: out of memory (rank 1)")
    # Without a supervisor, by what the run itself has written.
    error = "the gradient is nan\n  what to do: lower --learning-rate"
    alone = write_run(tmp_path / "alone", ended=RunEnded(60, "failed", 30.0, error=error))
    assert read_facts(alone).reason == "the gradient is nan. What to do: lower --learning-rate"
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "events.jsonl").write_text(json.dumps(failed) + "\n")
    code, out, _ = run_main(capsys, bare)
    assert code == 0
    assert "bare: failed (rank 1 failed: out of memory (rank 1))" in out
    assert "ended before its first step" in (bare / "report.md").read_text()


def test_what_cannot_be_read_beside_the_metrics_is_left_out(tmp_path: Path) -> None:
    run = write_run(tmp_path / "adapters")
    (run / "adapter_config.json").write_text("{torn")
    (run / "answers.json").write_text("[1, 2]")
    (run / "logs").mkdir()
    (run / "logs" / "monitor-rank-0.jsonl").write_text('{"torn\n')
    page = page_of(run)
    assert any("options are not known" in note for note in page.runs[0].notes)
    assert any("No process has left samples" in note for note in page.runs[0].notes)
    assert Reader(to_html(page)).open == []


def test_a_copy_of_a_run_goes_by_the_name_of_its_directory(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a1")
    copy = tmp_path / "d1"
    copy.mkdir()
    for file in run.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    page = page_of(run, copy)
    assert page.title == "a1 (1 rank) and d1 (1 rank)"
    assert [part.label for part in page.runs] == ["a1 (1 rank)", "d1 (1 rank)"]
    assert page_of(copy / "metrics.jsonl").title == "d1 (1 rank)"


# --- what comes from a run is text ----------------------------------------------------------------


def hostile_run(directory: Path) -> Path:
    """Everything that a person or a model can write into a run is HOSTILE."""
    run = write_run(directory, name=HOSTILE, sampled=[(HOSTILE, HOSTILE)], warned=[HOSTILE])
    write_samples(run, host=lambda rank: HOSTILE)
    (run / "adapter_config.json").write_text(
        json.dumps({"model": HOSTILE, HOSTILE: HOSTILE, "data": HOSTILE})
    )
    name = 'x"onload="document.title=1.json'
    (run / name).write_text(
        json.dumps({"prompts": [HOSTILE], "before": [HOSTILE], "after": [HOSTILE]})
    )
    return run


def test_what_comes_from_a_run_is_escaped(tmp_path: Path) -> None:
    plain, hostile = write_run(tmp_path / "plain"), hostile_run(tmp_path / HOSTILE.replace("/", ""))
    event = {"time": BEGAN, "kind": HOSTILE, "message": HOSTILE, "host": HOSTILE, "error": HOSTILE}
    page = make_page([read_facts(plain), read_facts(hostile, [event])], title=HOSTILE)
    seen = Reader(to_html(page))
    assert seen.open == []
    assert seen.count("script") == len(seen.scripts) == 2
    assert seen.count("img") == 0
    assert [
        attrs for _, attrs in seen.elements if any(name.startswith("on") for name in attrs)
    ] == []
    # As text it is all there.
    cells = [cell for table in seen.tables for row in table for cell in row]
    assert cells.count(HOSTILE) >= 8
    assert (
        any(HOSTILE in line["label"] for line in json.loads(seen.scripts[0])["memory-1"]["lines"])
        is False
    )
    markdown = to_markdown(page)
    assert not re.search(r"(?<!\\)[<]", markdown.replace("<!-- allhands report -->", ""))
    # No cell of a table ends early: each row has as many as its head.
    for table in re.findall(r"(?:^\|.*\n)+", markdown, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in table.splitlines()}) == 1, table


@pytest.mark.parametrize("text", ["</script>", "<!--<script>", "&amp;", "\u2028", HOSTILE])
def test_json_within_the_page_ends_no_script(text: str) -> None:
    written = in_script({text: [text]})
    assert not set(written) & set("<>&\u2028")
    assert json.loads(written) == {text: [text]}


def test_characters_that_cannot_be_written_or_steer_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "adapters", ended=RunEnded(60, "failed", 30.0))
    odd = "a\ud800b\x1b[31m\x00\u202ec"
    (run / "answers.json").write_text(
        json.dumps({"prompts": [odd], "before": [odd], "after": [odd]})
    )
    event = {"time": float("nan"), "kind": "failed", "message": odd, "rank": 0}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n")
    code, out, err = run_main(capsys, run)
    assert (code, err) == (0, "")
    text = out + (run / "report.md").read_text(encoding="utf-8")
    assert "a b \\[31m c" in text
    assert not set(text) & set("\x1b\x00\u202e")
    assert Reader((run / "report.html").read_text(encoding="utf-8")).open == []


def test_lines_can_be_told_from_the_page_in_both_schemes() -> None:
    """At least 3 to 1, as WCAG 2.1 (1.4.11) asks of what is drawn; the same colours in both, and in
    pictures.
    """
    style = (
        Path(__file__).parents[2] / "src" / "allhands" / "report" / "web" / "report.css"
    ).read_text(encoding="utf-8")
    backgrounds = [
        re.findall(r"--background: (#[0-9a-f]{6})", block)[0] for block in style.split(":root")[1:3]
    ]
    named = dict(re.findall(r"--([a-z]+-[0-9]+): (#[0-9a-f]{6})", colour_sheet()))
    for kind, some in palettes().items():
        assert [named[f"{kind}-{place}"] for place in range(len(some))] == [
            colour.lower() for colour in some
        ]
    lines = {
        f"phase-{phase_colour(name)}"
        for name in ("data wait", "compute", "reduce", "update and rest")
    }
    lines |= {name for name in named if not name.startswith("phase")}
    for background in backgrounds:
        for name in lines:
            assert contrast(named[name], background) >= 3, name


def contrast(one: str, other: str) -> float:
    def light(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [
            part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
        ]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, bright = sorted((light(one), light(other)))
    return (bright + 0.05) / (dark + 0.05)


@pytest.mark.slow
def test_long_runs_stay_small_enough_to_draw_and_to_read(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "adapters",
        steps=20_000,
        every=1,
        valid_every=1000,
        train=lambda s: 2 + (s == 7777),
    )
    page = page_of(run)
    chart = next(
        chart for section in page.sections for chart in section.charts if chart.key == "loss-steps"
    )
    faint = next(line for line in chart.to_json()["lines"] if line["faint"])
    assert len(faint["x"]) <= 1600
    assert (7777, 3.0) in zip(
        faint["x"], faint["y"], strict=True
    )  # the one that stands out is kept
    assert len(chart.table.rows) <= 90
    assert {row[0] for row in chart.table.rows} >= {f"{step:,}" for step in range(0, 20_001, 1000)}
    assert len(to_html(page).encode()) < 2_000_000


def test_the_end_of_training_warns_of_what_a_report_calls_bad(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tell_troubles(write_run(tmp_path / "good"))
    tell_troubles(tmp_path / "missing")
    assert capsys.readouterr().err == ""
    tell_troubles(write_run(tmp_path / "bad", train=lambda step: 4 + step / 20, valid=None))
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("allhands: warning: Diverging: training loss rose from ")
