"""A plan that was kept beside the run that followed: figures worked out by hand, and plans that
cannot be read.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import call_allhands
from written_runs import BEGAN, write_run, write_samples

from allhands.config.schema import TrainConfig
from allhands.errors import ConfigError
from allhands.observe.metrics import RunEnded, read_metrics
from allhands.observe.monitor import decode_sample, encode_sample
from allhands.plan.calibration import Calibrator
from allhands.plan.compared import Comparison, Figure, compare
from allhands.plan.kept import keep_plan, plan_before, plan_record, read_plan
from allhands.report import make_page, read_facts, to_html, to_markdown
from allhands.report.planned import comparison_of, plan_words

# What the runs of written_runs are: 60 steps of 0.5 s with 200 tokens, 31 s and 600 MB in all.
WAYS = [
    {"name": "as it is", "ranks": 1, "rank_bytes": 600_000_000, "flags": "", "strategy": "data"},
    {
        **{"name": "checkpointing", "ranks": 1, "rank_bytes": 400_000_000},
        **{"flags": "--grad-checkpoint", "strategy": "data"},
    },
    {
        **{"name": "data parallel", "ranks": 2, "rank_bytes": 500_000_000},
        **{"flags": "-n 2", "strategy": "data"},
    },
]
OPTIONS = {"model": "models/tiny", "batch_size": 8, "data": "data/pirate"}


def line(machines: int, step_s: float, exposed_s: float = 0.0) -> dict[str, Any]:
    prediction = {"step_s": step_s, "exposed_s": exposed_s}
    return {"machines": machines, "prediction": prediction, "training_s": 2.0 + 60 * step_s}


def planned(**changed: Any) -> dict[str, Any]:
    values = {
        **{
            "time": BEGAN - 100,
            "options": OPTIONS,
            "processor": "cpu",
            "device": None,
            "steps": 60,
            "start_s": 2.0,
        },
        **{
            "step": {"tokens": 200.0},
            "machines": [line(1, 0.5), line(2, 0.25, 0.025)],
            "memory": WAYS,
        },
        "measured": {"exchanged": 1_000, "cores_per_rank": 1},
    }
    return {**values, **changed}


def compared(run: Path, **changed: Any) -> Comparison:
    keep_plan(run, planned(**changed))
    found = comparison_of(read_facts(run, now=BEGAN + 1e6))
    assert found is not None
    return found


def figures(found: Comparison) -> dict[str, Figure]:
    return {figure.key: figure for figure in found.figures}


def told(found: Comparison) -> list[tuple[str, str]]:
    return [(word.level, word.text) for word in plan_words(found)]


def change(run: Path, **parts: dict[int, Any]) -> None:
    """Change fields of reports at steps of ``metrics.jsonl``."""
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    for record in lines:
        for name, values in parts.items():
            if record["event"] == "train" and record["step"] in values:
                record[name] = values[record["step"]]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in lines))


def set_option(run: Path, **options: Any) -> None:
    file = run / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **options}))


# --- figures --------------------------------------------------------------------------------------


def test_a_run_as_it_was_planned(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    write_samples(run, ranks=1)
    file = run / "logs" / "monitor-rank-0.jsonl"
    samples = [decode_sample(text) for text in file.read_text().splitlines()]
    lines = [encode_sample(replace(sample, began=BEGAN - 2.2)) for sample in samples if sample]
    file.write_text("\n".join(lines) + "\n")
    found = compared(run)
    assert {key: (one.planned, one.measured) for key, one in figures(found).items()} == {
        "start": (2.0, pytest.approx(2.2)),
        "step": (0.5, 0.5),
        "tokens": (200.0, pytest.approx(200.0)),
        "steps": (30.0, 31.0),
        "memory": (600_000_000, 600_000_000),
        "expected": (600_000_000, 600_000_000),
    }
    assert [one.ratio for one in found.figures] == [
        pytest.approx(r) for r in (1.1, 1.0, 1.0, 31 / 30, 1.0, 1.0)
    ]
    assert (found.differences, found.notes, any(one.off for one in found.figures)) == (
        (),
        (),
        False,
    )
    assert told(found) == [
        (
            "good",
            "As planned. Time to the start: 2.2 s, 1.10 times the 2 s planned; A step: 500 ms, 1.00 times the 500 ms "
            "planned; All steps: 31 s, 1.03 times the 30 s planned; Memory of a rank at its peak (as it is): 600 MB, "
            "1.00 times the 600 MB planned; Memory of a rank, as the run itself expected it: 600 MB, 1.00 times the "
            "600 MB expected.",
        )
    ]


def test_what_is_off_is_said_and_what_may_explain_it_is_beside_it(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    step = {"tokens": 160.0}
    found = compared(
        run, machines=[line(1, 0.4)], memory=[{**WAYS[0], "rank_bytes": 500_000_000}], step=step
    )
    assert told(found) == [
        ("warning", "Not as planned. A step: 500 ms, 1.25 times the 400 ms planned."),
        ("warning", "Not as planned. All steps: 31 s, 1.29 times the 24 s planned."),
        (
            "warning",
            "Not as planned. Memory of a rank at its peak (as it is): 600 MB, 1.20 times the 500 MB planned.",
        ),
    ]
    tokens = figures(found)["tokens"]
    assert (tokens.planned, tokens.measured, tokens.off) == (160.0, pytest.approx(200.0), False)
    assert "| tokens of a step | 160 | 200 | 1.25 | – |" in to_markdown(
        make_page([read_facts(run)])
    )


@pytest.mark.parametrize(
    ("step_s", "rank_bytes", "off"),
    # 0.5 / 0.44 = 1.136, / 0.43 = 1.163, / 0.58 = 0.862, / 0.6 = 0.833; 600 / 550 = 1.09, / 540 = 1.11, / 670 = 0.896
    [
        (0.44, 550, set()),
        (0.43, 540, {"step", "memory"}),
        (0.58, 660, set()),
        (0.6, 670, {"step", "memory"}),
    ],
)
def test_the_bounds_of_as_planned(
    tmp_path: Path, step_s: float, rank_bytes: int, off: set[str]
) -> None:
    memory = [{**WAYS[0], "rank_bytes": rank_bytes * 1_000_000}]
    found = figures(
        compared(write_run(tmp_path / "run"), machines=[line(1, step_s)], memory=memory)
    )
    assert {key for key in ("step", "memory") if found[key].off} == off


def test_a_step_is_the_median_without_the_first_report(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=25)  # reports at 5, 10, 15, 20, 25
    change(run, step_time_s={5: 9.0, 10: 0.7, 15: 0.6, 20: 30.0, 25: 0.5})
    # Of 0.5, 0.6, 0.7 and 30; with the first it would be 0.7.
    assert figures(compared(run))["step"].measured == pytest.approx(0.65)


def test_a_run_that_divided_the_model_is_compared_with_that_way(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", ranks=2)
    set_option(run, num_ranks=2, strategy="fsdp")
    way = {
        **{"name": "fully sharded", "ranks": 2, "rank_bytes": 400_000_000, "strategy": "fsdp"},
        **{"flags": "-n 2 --strategy fsdp", "step_s": 0.4, "training_s": 26.0},
    }
    found = figures(compared(run, memory=[*WAYS, way]))
    assert (found["step"].planned, found["steps"].planned) == (0.4, 24.0)
    assert found["memory"].planned == 400_000_000
    assert "exchange" not in found  # which is that of data parallel ranks
    # A plan of an earlier version has no time of it.
    old = {name: value for name, value in way.items() if not name.endswith("_s")}
    found = figures(compared(run, memory=[*WAYS, old]))
    assert (found["step"].planned, found["steps"].planned) == (0.25, 15.0)


def test_the_exchange_and_the_ranks_of_the_run(tmp_path: Path) -> None:
    run = write_run(
        tmp_path / "run", ranks=2
    )  # 0.25 s, of which 0.025 s is exchange; the higher peak is 610 MB
    set_option(run, num_ranks=2)
    found = compared(run, machines=[line(1, 0.5), line(2, 0.2, 0.005)])
    assert found.machines == 2
    step, memory = figures(found)["step"], figures(found)["memory"]
    assert (step.planned, step.measured, step.ratio) == (0.2, 0.25, pytest.approx(1.25))
    exchange = figures(found)["exchange"]
    assert (exchange.planned, exchange.measured, exchange.off) == (
        0.005,
        pytest.approx(0.025),
        False,
    )
    assert (memory.of, memory.ratio) == (
        "memory of a rank at its peak (data parallel)",
        pytest.approx(1.22),
    )


def test_what_the_run_itself_expected(tmp_path: Path) -> None:
    """600 MB, of 900 MB that it took: said where the plan was right, and once where it was as
    wrong.
    """
    run = write_run(tmp_path / "run")
    write_samples(run, ranks=1)
    peaks = {step: [900_000_000] for step in range(5, 65, 5)}
    change(run, peak_memory_bytes=peaks, peak_rss_bytes=peaks)
    right = compared(run, memory=[{**WAYS[0], "rank_bytes": 900_000_000}])
    assert told(right) == [
        (
            "warning",
            "Not as the run expected. Memory of a rank, as the run itself expected it: 900 MB, 1.50 times the "
            "600 MB expected.",
        )
    ]
    wrong = compared(run)
    assert figures(wrong)["expected"].ratio == figures(wrong)["memory"].ratio == 1.5
    assert ["Memory of a rank at its peak" in text for _, text in told(wrong)] == [True]


def test_a_peak_that_rose_later(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=30)
    change(
        run,
        peak_memory_bytes={
            step: [900_000_000 if step > 15 else 500_000_000] for step in range(5, 35, 5)
        },
    )
    memory = figures(compared(run, memory=[{**WAYS[0], "rank_bytes": 500_000_000}]))["memory"]
    assert (memory.ratio, memory.off) == (pytest.approx(1.8), True)


def test_nothing_is_interpolated(tmp_path: Path) -> None:
    found = compared(write_run(tmp_path / "run", ranks=3))
    assert found.figures == ()
    assert found.notes == (
        "The plan has no line for 3 ranks, only for 1, 2: times are not compared.",
        "The plan has no memory for 3 ranks divided as the run was.",
    )


def test_a_plan_that_doubts_itself_is_no_measure_of_times(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    sound, doubted = compared(run), compared(run, doubt="this computer is busy")
    assert {"step"} <= figures(sound).keys() - figures(doubted).keys()
    assert any("busy" in note for note in doubted.notes)
    assert "memory" in figures(doubted)


def test_what_changes_while_it_trains(tmp_path: Path) -> None:
    """Two ranks at first, then one from step 30 on: of that the steps, and nothing of the whole
    time.
    """
    run = write_run(tmp_path / "run", ranks=2)
    lines = (run / "metrics.jsonl").read_text().splitlines()
    first = json.loads(next(text for text in lines if '"started"' in text))
    again = json.dumps({**first, "num_ranks": 1, "attempt": 2, "step": 30, "time": BEGAN + 20})
    place = next(n for n, text in enumerate(lines) if '"train"' in text and '"step": 35' in text)
    (run / "metrics.jsonl").write_text("\n".join([*lines[:place], again, *lines[place:]]) + "\n")
    change(run, step_time_s={35: 9.0, 40: 0.5, 45: 0.5, 50: 0.5, 55: 0.5, 60: 0.5})
    found = compared(run)
    assert found.machines == 1
    assert (figures(found)["step"].measured, figures(found)["steps"].measured) == (0.5, None)
    assert found.notes == (
        "The number of ranks changed: only the last part, with 1 rank, is compared, not the whole time.",
    )


def test_a_run_without_an_end_has_no_whole_time(tmp_path: Path) -> None:
    for name, ended in (("killed", None), ("stopped", RunEnded(30, "interrupted", 15.0))):
        found = figures(compared(write_run(tmp_path / name, ended=ended)))
        assert (found["steps"].measured, found["steps"].ratio) == (None, None)
        assert found["step"].ratio == 1.0


# --- options --------------------------------------------------------------------------------------


def test_other_options_are_named_and_the_figures_marked(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    set_option(run, packing=True, iters=60, num_layers=16, lora_parameters=None)
    options = {
        **OPTIONS,
        "batch_size": 16,
        "packing": False,
        "iters": 100,
        "num_layers": None,
        "data": "./data/pirate",
    }
    found = compared(
        run, options={**options, "lora_parameters": {"rank": 8}}, measured={"exchanged": 2_000}
    )
    assert [one.told for one in found.differences] == [
        "planned with --batch-size 16, trained with --batch-size 8",
        "planned with --no-packing, trained with --packing",
        "planned with --iters 100, trained with --iters 60",
        "planned with 2,000 trained parameters, trained with 1,000 trained parameters",
    ]
    assert all(one.marked for one in found.figures)
    words = told(found)
    assert words[0][0] == "note"
    assert words[0][1].startswith(
        "Not trained with the options that were planned: planned with --batch-size 16, "
    )
    page = to_markdown(make_page([read_facts(run)]))
    assert "| a step | 500 ms | 500 ms | 1.00 \\* | yes |" in page
    assert "| --batch-size 16 | --batch-size 8 |" in page


def test_texts_that_the_model_writes_are_no_steps(tmp_path: Path) -> None:
    """Two of half a second at each of seven validations."""
    plain, wrote = (
        compared(write_run(tmp_path / name, sampled=sampled))
        for name, sampled in (("plain", ()), ("wrote", [("Once", "upon"), ("A", "time")]))
    )
    assert (figures(plain)["steps"].measured, figures(wrote)["steps"].measured) == (31.0, 24.0)


def test_another_number_of_steps_has_its_share_of_the_time(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    set_option(run, iters=60)
    found = compared(
        run,
        options={**OPTIONS, "iters": 600},
        steps=600,
        machines=[{**line(1, 0.5), "training_s": 302.0}],
    )
    assert not any(one.marked for one in found.figures)
    whole = figures(found)["steps"]
    assert (whole.of, whole.planned, whole.measured) == (
        "all 60 steps (600 were planned: their share)",
        30.0,
        31.0,
    )
    assert [one.told for one in found.differences] == [
        "planned with --iters 600, trained with --iters 60"
    ]


def test_which_tokens_are_trained_is_compared(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    set_option(run, mask_prompt=False)
    record = plan_record(
        {**OPTIONS, "mask_prompt": True, "train_on": "last"}, processor="cpu", device=None
    )
    assert record["options"]["train_on"] == "last"
    found = compared(run, options=record["options"])
    assert any("--mask-prompt" in one.told for one in found.differences)
    assert figures(found)["step"].marked


def test_a_number_of_steps_that_no_option_tells(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    set_option(run, epochs=2.0, grad_accumulation_steps=4)
    found = compared(
        run, options={**OPTIONS, "epochs": 2.0, "grad_accumulation_steps": 4}, steps=15
    )
    assert [one.told for one in found.differences] == [
        "planned with 15 steps, trained with 60 steps"
    ]
    assert not any(one.marked for one in found.figures)
    assert figures(found)["steps"].planned == pytest.approx(30.0 * 60 / 15)


def test_a_way_that_the_plan_has_shown_is_the_one_that_is_compared(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    set_option(run, grad_checkpoint=True)
    found = figures(compared(run, options={**OPTIONS, "grad_checkpoint": False}))
    assert (found["memory"].planned, found["memory"].marked) == (400_000_000, False)
    assert found["step"].marked


def test_described_computers_and_other_cores(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    described = compared(run, device="M1 Pro", measured=None, start_s=0.0, machines=[line(1, 0.25)])
    assert "start" not in figures(described)
    assert figures(described)["step"].off
    (difference,) = compared(run, measured={"exchanged": 1_000, "cores_per_rank": 2}).differences
    assert difference.told == "planned with 2 cores a rank, trained with 1 core a rank"


# --- files ----------------------------------------------------------------------------------------


def test_a_later_plan_is_no_prediction_and_takes_nothing_away(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    assert keep_plan(run, planned(time=BEGAN + 60)) == (
        f"the plan is kept in {run / 'plan.json'}: allhands report compares the next run there with it, "
        "not the one that is there already"
    )
    facts = read_facts(run, now=BEGAN + 1e6)
    assert facts.plan is None
    assert (
        "plan.json was made 1m00s after this run had begun: it is no prediction, and is not compared."
        in facts.notes
    )
    page = make_page([facts])
    assert "plan" not in {section.key for section in page.sections}
    assert "loss" in {section.key for section in page.sections}
    # Of no run: the next plan takes its place. Of this run: it stays, under a number.
    keep_plan(run, planned(time=BEGAN - 50))
    assert not (run / "plan.1.json").exists()
    assert keep_plan(run, planned(time=BEGAN + 90)).endswith(
        "the plan of an earlier run there is kept as plan.1.json"
    )
    assert read_plan(run / "plan.1.json").time == BEGAN - 50
    found = read_facts(run).plan
    assert found is not None
    assert found.time == BEGAN - 50
    # The next run is compared with the later one; the first, which it has set aside, with its own.
    (run / "metrics.jsonl").rename(run / "metrics.1.jsonl")
    text = (run / "metrics.1.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text.replace(f'"time": {BEGAN}', f'"time": {BEGAN + 100}'))
    plans = [read_facts(run / name).plan for name in ("metrics.jsonl", "metrics.1.jsonl")]
    assert [plan.time - BEGAN for plan in plans if plan] == [90, -50]


@pytest.mark.parametrize(
    ("content", "amiss"),
    [
        (json.dumps({"version": 1, **planned()})[:200], "the plan is torn: it is no whole JSON."),
        ("", "the plan is torn: it is no whole JSON."),
        ("\0\xff" * 9, "the plan is torn: it is no whole JSON."),
        ("[" * 100_000, "the plan is torn: it is no whole JSON."),
        (json.dumps([1, 2]), "this is no plan: it holds no object."),
        (
            json.dumps({**planned(), "version": 2}),
            "the plan has version 2, and this allhands reads version 1.",
        ),
        (json.dumps(planned()), "the plan has no version, and this allhands reads version 1."),
        (
            json.dumps({"version": 1, "time": 1.0}),
            "the plan has a fault at options: Field required.",
        ),
        (
            json.dumps({"version": 1, **planned(machines=[{"machines": 1, "training_s": 2.0}])}),
            "the plan has a fault at machines.0.prediction: Field required.",
        ),
        (
            json.dumps({"version": 1, **planned(machines=[line(1, 0.0)])}),
            "the plan has a fault at machines.0.prediction.step_s: Input should be greater than 0.",
        ),
        (
            json.dumps({"version": 1, **planned(start_s=float("nan"))}),
            "the plan has a fault at start_s: Input should be a finite number.",
        ),
    ],
)
def test_a_plan_that_cannot_be_read_is_a_note(tmp_path: Path, content: str, amiss: str) -> None:
    run = write_run(tmp_path / "run")
    (run / "plan.json").write_bytes(content.encode("latin-1"))
    facts = read_facts(run, now=BEGAN + 1e6)
    assert f"plan.json is not compared: {amiss}" in facts.notes
    page = make_page([facts])
    assert {"loss", "times", "options"} <= {section.key for section in page.sections}
    assert "plan" not in {section.key for section in page.sections}
    assert amiss.split(":")[0] in to_html(page)
    # And the next plan does not destroy what somebody may want to mend.
    keep_plan(run, planned())
    assert (run / "plan.1.json").read_bytes() == content.encode("latin-1")


def test_nothing_is_compared_where_nothing_says_when_it_began(tmp_path: Path) -> None:
    keep_plan(tmp_path, planned())
    assert plan_before(tmp_path, None) == (
        None,
        ["plan.json is not compared: nothing says when the run began."],
    )
    assert plan_before(tmp_path / "none", 1.0) == (None, [])


def test_names_of_a_run_are_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    hostile = "<script>document.title='owned'</script>"
    found = compared(
        run, options={**OPTIONS, "data": hostile}, memory=[{**WAYS[0], "name": hostile}]
    )
    assert found.differences[0].planned == f"--data {hostile}"
    page = make_page([read_facts(run)])
    assert hostile not in to_html(page)
    assert hostile not in to_markdown(page)


def test_the_comparison_is_a_function_of_files_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    keep_plan(run, planned())
    found = compare(read_plan(run / "plan.json"), read_metrics(run), {})
    assert found.notes == (
        "The options of the run are not known, so they cannot be compared with the plan's.",
    )
    assert figures(found)["step"].ratio == 1.0
    assert not figures(found)["step"].marked


# --- the command ----------------------------------------------------------------------------------

DESCRIBED = (
    *(
        "plan",
        "--device",
        "M1 Pro 32GB",
        "--shape",
        "llama-15m",
        "--tokenizer",
        "t",
        "--data",
        "d",
        "--iters",
        "20",
    ),
)


def test_the_command_keeps_its_plan(tmp_path: Path) -> None:
    done = call_allhands(*DESCRIBED, "--adapter-path", "deep/run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    shown = json.loads(done.stdout)
    assert shown.pop("kept") == "deep/run/plan.json"
    file = tmp_path / "deep" / "run" / "plan.json"
    kept = json.loads(file.read_text())
    assert kept.pop("version") == 1
    assert kept == shown
    assert file.stat().st_mode & 0o777 == 0o600
    assert [one.name for one in file.parent.iterdir()] == ["plan.json"]
    plan = read_plan(file)
    assert (plan.device, plan.processor, plan.steps, plan.measured) == (
        "M1 Pro 32GB",
        "gpu",
        20,
        None,
    )
    assert {
        "shape": "llama-15m",
        "batch_size": 4,
        "iters": 20,
        "data": "d",
    }.items() <= plan.options.items()
    assert not {"model", "adapter_path", "learning_rate", "num_ranks"} & plan.options.keys()


def test_a_plan_that_cannot_be_kept_is_shown_all_the_same(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    done = call_allhands(*DESCRIBED, "--adapter-path", "taken/run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["kept"] is None
    assert done.stderr.startswith("the plan is not kept, because ")
    assert done.stderr.count("\n") == 1
    text = call_allhands(*DESCRIBED, "--adapter-path", "taken", cwd=tmp_path)
    assert text.returncode == 0, text.stderr
    assert "Is distributing worth it?" in text.stdout
    assert text.stdout.splitlines()[-1].startswith("the plan is not kept, because taken ")
    assert (tmp_path / "taken").read_text() == "mine"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_without_the_right_to_write(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir(0o500)
    done = call_allhands(*DESCRIBED, "--adapter-path", "run", cwd=tmp_path)
    assert (done.returncode, "no report will compare" in done.stdout) == (0, True)


def test_a_hint_names_options_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = call_allhands("plan", "--help").stdout

    def late(*_: object, **__: object) -> None:
        raise subprocess.TimeoutExpired("allhands", 3.0)

    monkeypatch.setattr("allhands.plan.calibration.subprocess.run", late)
    with pytest.raises(ConfigError) as caught:
        Calibrator(3.0, on_gpu=False).calibrate(TrainConfig())
    named = set(re.findall(r"--[a-z-]+", str(caught.value.hint)))
    assert named == {"--timeout-s", "--batch-size", "--device"}
    assert all(flag in shown for flag in named - {"--batch-size"})
    assert "batch_size" in TrainConfig.model_fields


def test_afterwards_the_same_comparison(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    keep_plan(run, planned(machines=[line(1, 0.4)], options={**OPTIONS, "batch_size": 16}))
    done = call_allhands("plan", "--after", run)
    assert done.returncode == 0, done.stderr
    assert "A step: 500 ms, 1.25 times the 400 ms planned." in " ".join(done.stdout.split())
    rows = [" ".join(text.split()) for text in done.stdout.splitlines()]
    assert "--batch-size 16 --batch-size 8" in rows
    assert "time to the start 2 s – – –" in rows
    found = json.loads(call_allhands("plan", "--after", run, "--json").stdout)
    step = next(one for one in found["plan"]["figures"] if one["key"] == "step")
    assert (step["planned"], step["measured"], step["ratio"], step["off"]) == (0.4, 0.5, 1.25, True)
    (run / "plan.json").write_text("[]")
    torn = call_allhands("plan", "--after", run)
    assert (torn.returncode, "plan.json is not compared: this is no plan" in torn.stdout) == (
        0,
        True,
    )


@pytest.mark.parametrize(
    ("measured", "told"), [(897, "0.897"), (904, "0.90"), (1104, "1.104"), (880, "0.88")]
)
def test_a_ratio_is_printed_on_its_side_of_the_limit(measured: int, told: str) -> None:
    assert Figure("memory", "memory", 1000, measured).times == told
