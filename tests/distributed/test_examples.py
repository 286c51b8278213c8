"""The programs in examples/, run as they stand on one process and on two: the losses are the same,
and they fall.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from ring_ranks import run_ring
from tiny import write_model, write_tokenizer

from allhands.observe.metrics.history import read_metrics

EXAMPLES = Path(__file__).parents[2] / "examples"
# Several in one process, because starting one costs more than these trainings.
PROGRAM = """
import json, runpy, sys
for path, *arguments in json.loads(sys.argv[1]):
    sys.argv = [path, *arguments]
    runpy.run_path(path, run_name="__main__")
"""
LLAMA_STEPS = 50


def command(*examples: tuple[str, ...]) -> list[str]:
    calls = [[str(EXAMPLES / name), *arguments] for name, *arguments in examples]
    return [sys.executable, "-W", "error", "-c", PROGRAM, json.dumps(calls)]


@dataclass(frozen=True)
class Ran:
    """Where the runs are, and what rank 0 and the others printed."""

    place: Path
    main: str
    others: list[str]

    def losses(self, run: str) -> list[float]:
        history = read_metrics(self.place / run)
        assert history.ended is not None
        assert history.ended.reason == "finished"
        assert [report.step for report in history.train] == list(range(1, len(history.train) + 1))
        return [report.loss for report in history.train]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    place = tmp_path_factory.mktemp("examples")
    model = place / "model"
    write_model(model)
    write_tokenizer(model)

    def runs(ranks: int) -> list[tuple[str, ...]]:
        llama = ("llama.py", "--steps", str(LLAMA_STEPS))
        return [
            ("mnist_mlp.py", "--epochs", "1", "--out", f"{place}/mnist-{ranks}"),
            (
                "finetune_custom_loss.py",
                "--model",
                str(model),
                "--steps",
                "16",
                "--out",
                f"{place}/finetune-{ranks}",
            ),
            (*llama, "--out", f"{place}/llama-{ranks}"),
        ]

    alone = subprocess.run(
        command(*runs(1)), capture_output=True, text=True, timeout=100, check=False
    )
    assert (alone.returncode, alone.stderr) == (0, "")
    naive = ("llama.py", "--steps", "4", "--naive", "--out", f"{place}/naive")
    begun = ("llama.py", "--steps", "5", "--save-every", "5", "--out", f"{place}/resumed")
    both = run_ring([command(*runs(2), naive, begun)] * 2, timeout=100)
    assert [(one.returncode, one.stderr) for one in both] == [(0, ""), (0, "")]
    return Ran(place, both[0].stdout, [one.stdout for one in both[1:]])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "steps"), [("mnist", 20), ("finetune", 16), ("llama", LLAMA_STEPS)]
)
def test_two_processes_have_the_losses_of_one(ran: Ran, run: str, steps: int) -> None:
    one, two = ran.losses(f"{run}-1"), ran.losses(f"{run}-2")
    assert len(one) == steps
    assert two == pytest.approx(one, rel=1e-4)
    assert sum(one[-3:]) < 0.8 * sum(one[:3]), one


@pytest.mark.slow
def test_the_naive_way_computes_the_same(ran: Ran) -> None:
    assert ran.losses("naive") == pytest.approx(ran.losses("llama-1")[:4], rel=1e-4)


@pytest.mark.slow
def test_what_two_began_one_finishes(ran: Ran) -> None:
    again = ("llama.py", "--steps", str(LLAMA_STEPS), "--out", f"{ran.place}/resumed")
    done = subprocess.run(command(again), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("step 6: loss ")
    assert ran.losses("resumed") == pytest.approx(ran.losses("llama-1"), rel=1e-4)


@pytest.mark.slow
def test_rank_0_speaks_for_all(ran: Ran) -> None:
    assert "step 20: loss " in ran.main
    assert "accuracy " in ran.main
    assert ran.others == [""]


def test_the_page_of_the_library_runs_and_goes_on(tmp_path: Path) -> None:
    page = (EXAMPLES.parent / "docs" / "python.md").read_text(encoding="utf-8")
    (text,) = [
        part.partition("```")[0]
        for part in page.split("```python\n")
        if "allhands.Checkpointer(" in part
    ]
    assert text.count("101") == 1
    for steps, first in ((51, "step 1: loss "), (61, "step 51: loss ")):
        program = text.replace("101", str(steps))
        done = subprocess.run(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith(first)
    assert len(read_metrics(tmp_path / "run").train) == 60


@pytest.mark.slow
def test_a_script_of_mlx_lms_kind_computes_the_same_on_two_processes(
    tmp_path: Path, tiny_data: Path
) -> None:
    """With the options of the blog series' own script, its callback and the alpha among its
    parameters.
    """
    model = write_model(tmp_path / "model")
    numbers = "--batch-size 2 --num-layers 2 --iters 6 --steps-per-report 1 --steps-per-eval 3 --val-batches 2 --seed 3"
    alpha = ("--lora-parameters", '{"rank": 8, "alpha": 16, "dropout": 0.0, "scale": 10.0}')

    def words(out: str) -> list[str]:
        places = (
            "--model",
            str(model),
            "--data",
            str(tiny_data),
            "--adapter-path",
            str(tmp_path / out),
        )
        return [
            sys.executable,
            str(EXAMPLES / "finetune_mlx_lm.py"),
            *numbers.split(),
            *alpha,
            *places,
        ]

    one = subprocess.run(words("one"), capture_output=True, text=True, timeout=100, check=False)
    assert one.returncode == 0, one.stderr
    main, other = run_ring([words("two")] * 2, timeout=100)
    assert (main.returncode, other.returncode) == (0, 0), main.stderr + other.stderr

    def printed(text: str, kind: str) -> dict[str, float]:
        return {
            step: float(loss)
            for step, loss in re.findall(rf"^\[{kind}\] (\d+): ([\d.]+)$", text, re.MULTILINE)
        }

    for kind, steps in (("train", 6), ("valid", 3)):
        losses = printed(one.stdout, kind)
        assert len(losses) == steps
        assert printed(main.stdout, kind) == pytest.approx(losses, abs=2e-4)
    assert other.stdout == ""
    assert "processes: 2" in main.stdout
    for run in ("one", "two"):
        assert (tmp_path / run / "loss.png").exists()
        assert (tmp_path / run / "adapters.safetensors").exists()


@pytest.mark.parametrize("name", ["mnist_mlp.py", "llama.py", "finetune_custom_loss.py"])
def test_they_are_short(name: str) -> None:
    text = (EXAMPLES / name).read_text(encoding="utf-8")
    assert len(text.splitlines()) < 100
    assert text.count("# the additional line") == 1
