"""Chat templates that write the current date: the date belongs to the run, not to the clock, on
every rank.

Whether two moments give the same run is told by comparing with a run that nothing disturbs: bit by
bit.
"""

from __future__ import annotations

import json
import signal
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from runs import distance, read_weights
from tiny import CHAT_TEMPLATE, run_allhands, write_chat_data, write_model
from twins import errors_of, run_ranks

from allhands.checkpoints import find_latest
from allhands.cluster.environment import LaunchPlace
from allhands.cluster.join import surroundings_of
from allhands.cluster.worker import WorkerContext
from allhands.config.eval_schema import EvalConfig
from allhands.config.schema import build_config
from allhands.distributed.mesh import Mesh
from allhands.errors import DataError
from allhands.model.load import load_tokenizer
from allhands.observe.metrics import read_metrics
from allhands.run.datasets import find_splits, load_data, open_data
from allhands.run.evaluating import run_evaluation
from allhands.run.session import RunContext, run_finetune

EVENING, MORNING = datetime(2026, 2, 28, 23, 59, 59), datetime(2026, 3, 1, 0, 0, 1)
NEXT_YEAR = datetime(2027, 1, 1, 12)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_model(tmp_path_factory.mktemp("dates-model") / "dated", layers=2)
    file = path / "tokenizer_config.json"
    config = json.loads(file.read_text())
    template = path / "chat_template.jinja"
    assert template.is_file() != ("chat_template" in config)
    written = (
        "<|im_start|>system\nToday: {{ strftime_now('%d %b %Y, %H:%M:%S') }}<|im_end|>\n"
        + CHAT_TEMPLATE
    )
    if template.is_file():
        template.write_text(written)
    else:
        file.write_text(json.dumps(config | {"chat_template": written}))
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_data(tmp_path_factory.mktemp("dates-data"), train=11, valid=4, longest=30)


@pytest.fixture
def flags(model: Path, data: Path, tmp_path: Path) -> dict[str, Any]:
    names = {"model": str(model), "data": str(data), "adapter_path": str(tmp_path / "run")}
    shape = {"train": True, "iters": 6, "batch_size": 4, "learning_rate": 1e-2}
    return {**names, **shape, "save_every": 2, "steps_per_report": 2}


def train(flags: dict[str, Any], moment: datetime, stop_at: int | None = None, **more: Any) -> Path:
    """One start of a run in this process, at ``moment``."""
    done = {"step": 0}

    def beat(phase: str, step: int) -> None:
        done["step"] = step

    def stop() -> int:
        return signal.SIGTERM if stop_at is not None and done["step"] >= stop_at else 0

    surroundings = RunContext(beat=beat, stop_requested=stop, moment=moment)
    return run_finetune(build_config(flags | more), surroundings).adapter_path


def weights(directory: Path) -> bytes:
    return (directory / "adapters.safetensors").read_bytes()


def losses(directory: Path) -> list[float]:
    return [report.loss for report in read_metrics(directory).train]


@pytest.mark.parametrize("resumed", [MORNING, NEXT_YEAR])
def test_a_resumed_run_writes_the_date_on_which_it_began(
    resumed: datetime, flags: dict[str, Any], tmp_path: Path
) -> None:
    whole = train(flags, EVENING, adapter_path=str(tmp_path / "whole"))
    other = train(flags, resumed, adapter_path=str(tmp_path / "other"))
    assert weights(other) != weights(whole)  # the date is trained on
    train(flags, EVENING, iters=2)
    assert weights(train(flags, resumed, resume="auto")) == weights(whole)
    # And once more, from what the resumed run has written.
    train(flags, NEXT_YEAR, resume="auto", iters=8)
    assert weights(Path(flags["adapter_path"])) == weights(
        train(flags, EVENING, iters=8, adapter_path=str(tmp_path))
    )


def test_a_new_run_writes_the_date_of_its_own_beginning(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    first = train(flags, EVENING)
    started = {"resume_adapter_file": str(first / "adapters.safetensors")}
    for moment in (EVENING, MORNING):
        train(flags, moment, adapter_path=str(tmp_path / str(moment.day)), **started)
    assert weights(tmp_path / "28") != weights(tmp_path / "1")


def test_other_data_and_another_template_are_other_data_still(
    flags: dict[str, Any], model: Path, tmp_path: Path
) -> None:
    train(flags, EVENING, iters=2)
    with pytest.raises(DataError):
        train(
            flags,
            MORNING,
            resume="auto",
            data=str(write_chat_data(tmp_path / "other", train=11, seed=5)),
        )
    template = model / "chat_template.jinja"
    before = template.read_text()
    try:
        template.write_text(before.replace("Today", "Date"))
        with pytest.raises(DataError):
            train(flags, MORNING, resume="auto")
    finally:
        template.write_text(before)
    train(flags, MORNING, resume="auto")


@pytest.mark.slow
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("resumed", [False, True])
def test_ranks_of_any_clock_train_on_rank_0s_date(
    resumed: bool, shared: bool, flags: dict[str, Any], tmp_path: Path
) -> None:
    """Two ranks around midnight, or in other time zones; with and without one directory for all."""
    flags |= {
        "optimizer_config": {"adam": {"eps": 1e-6}},
        "learning_rate": 1e-3,
        "optimizer": "adam",
    }
    whole = train(flags, EVENING, adapter_path=str(tmp_path / "whole"))
    if resumed:
        train(flags, EVENING, iters=2)
    moments = [NEXT_YEAR if resumed else EVENING, MORNING, datetime(2020, 1, 1)]
    config = build_config(flags | ({"resume": "auto"} if resumed else {}))

    def work(communicator: Any) -> Path:
        rank = communicator.rank
        own = {} if shared or rank == 0 else {"adapter_path": f"{config.adapter_path}-{rank}"}
        mesh = Mesh(rank, 3, rank, 3, (1.0,) * 3)
        surroundings = RunContext(mesh=mesh, connect=lambda: communicator, moment=moments[rank])
        return run_finetune(config.model_copy(update=own), surroundings).adapter_path

    outcomes = run_ranks(3, work)
    assert all(isinstance(outcome, Path) for outcome in outcomes), outcomes
    ours = Path(flags["adapter_path"])
    assert losses(ours) == pytest.approx(losses(whole), abs=2e-6)
    assert distance(*(read_weights(one / "adapters.safetensors") for one in (ours, whole))) < 5e-6
    found = find_latest(ours)
    assert found is not None
    assert datetime.fromisoformat(found.state["data"]["template_date"]) == EVENING


@pytest.mark.slow
def test_ranks_with_other_templates_are_told_so(
    flags: dict[str, Any], data: Path, tmp_path: Path
) -> None:
    """One with a date, one without: they meet in the same exchanges all the same, and no rank waits
    for ever.
    """
    undated = write_model(tmp_path / "undated", layers=2)

    def work(communicator: Any) -> Path:
        rank = communicator.rank
        own = {
            "adapter_path": str(tmp_path / str(rank)),
            "model": flags["model"] if rank else str(undated),
        }
        surroundings = RunContext(
            mesh=Mesh(rank, 2, rank, 2, (1.0, 1.0)), connect=lambda: communicator
        )
        return run_finetune(build_config(flags | own), surroundings).adapter_path

    assert all("the ranks disagree" in text for text in errors_of(run_ranks(2, work)))


def test_an_adapter_is_evaluated_with_the_date_that_it_was_trained_with(
    flags: dict[str, Any],
) -> None:
    run = train(flags, EVENING, val_batches=-1, iters=4)
    trained = [report.loss for report in read_metrics(run).valid][-1]
    wanted = {key: flags[key] for key in ("model", "data", "adapter_path")} | {
        "split": "valid",
        "test": True,
    }
    config = build_config(wanted, None, EvalConfig)
    assert isinstance(config, EvalConfig)
    found = [run_evaluation(config, RunContext(moment=moment)) for moment in (MORNING, NEXT_YEAR)]
    assert [one.loss for one in found] == pytest.approx([trained] * 2, rel=1e-5)
    assert any("28 Feb 2026" in note for note in found[0].notes)
    alone = config.model_copy(update={"adapter_path": ""})
    bare = [
        run_evaluation(alone, RunContext(moment=moment)).loss for moment in (EVENING, NEXT_YEAR)
    ]
    assert bare[0] != bare[1]  # the model alone belongs to no run: today's date


def test_tokens_of_a_date_are_found_again(flags: dict[str, Any]) -> None:
    train(flags, EVENING, iters=2)
    train(flags, MORNING, resume="auto")
    config = build_config(flags)
    new = datetime(2026, 5, 6)
    sources, tokenizer = find_splits(config), load_tokenizer(config.model)
    built = [
        open_data(config, sources, tokenizer, moment=moment).stored["train"].built
        for moment in (EVENING, new, new)
    ]
    assert built == [False, True, False]
    assert load_data(config).dated is not None


@pytest.mark.slow
def test_a_rank_that_is_killed_over_midnight_starts_again(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    """The template writes seconds, so that every second is another day."""
    words = [
        "--train",
        "--model",
        flags["model"],
        "--data",
        flags["data"],
        "--iters",
        "6",
        "--save-every",
        "2",
    ]
    (tmp_path / "faults.json").write_text(json.dumps([{"rank": 0, "step": 5, "kind": "kill"}]))
    faults = {"ALLHANDS_FAULTS": str(tmp_path / "faults.json")}
    job = ["--adapter-path", tmp_path / "run", "--val-batches", "0", "--max-restarts", "1"]
    done = run_allhands("train", *words, *job, env=faults)
    assert done.returncode == 0, done.stderr
    assert "starting again" in done.stderr
    assert losses(tmp_path / "run")


@pytest.mark.parametrize(
    ("given", "expected"), [(EVENING.isoformat(), EVENING), ("yesterday", None), (None, None)]
)
def test_a_rank_is_told_when_its_run_began(
    given: str | None, expected: datetime | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ALLHANDS_RUN_BEGAN", raising=False)
    if given is not None:
        monkeypatch.setenv("ALLHANDS_RUN_BEGAN", given)
    launch = LaunchPlace("allhands", 0, 1, 0, 1, "none", "a test")
    moment = surroundings_of(WorkerContext(launch, None, None), launch, build_config({})).moment
    assert moment == expected if expected else abs((moment - datetime.now()).total_seconds()) < 600
