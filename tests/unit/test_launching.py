"""What a person is told of a job: why it failed, how a stop ended, how to go on, and what was asked
for in vain.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import run_allhands

from allhands.checkpoints import checkpoint_path, write_checkpoint
from allhands.cluster import addresses, launching, notices, ranks
from allhands.cluster.agent import enter_directory
from allhands.cluster.job import TrainingJob, check, job_of, step_in, way_on
from allhands.cluster.notices import Notices, telling
from allhands.cluster.supervisor import SupervisorEvent
from allhands.config.schema import build_config
from allhands.errors import ConfigError
from allhands.observe.metrics.console import (
    ended_line,
    skipped_line,
    started_lines,
    train_line,
    valid_line,
)
from allhands.observe.metrics.events import (
    RunEnded,
    RunStarted,
    StepSkipped,
    TrainReport,
    ValidReport,
)

_RESUME = "to go on from step 20: the same command with --resume"
_TRAINING = TrainingJob(Path(), Path(), memory_hint="lower --max-seq-length")
_PROGRAM = TrainingJob(Path(), Path(), resumes=False)
Err = Callable[[], str]


@pytest.fixture
def err(capsys: pytest.CaptureFixture[str]) -> Err:
    return lambda: capsys.readouterr().err


def of_training(way: str | None = _RESUME) -> Notices:
    return Notices(_TRAINING, lambda: way)


def of_a_program(way: str | None = None) -> Notices:
    return Notices(_PROGRAM, lambda: way)


def show(told: Notices, *events: SupervisorEvent) -> None:
    for event in (SupervisorEvent("launched", "2 processes"), *events):
        told.show(event)


def failed(
    exit_code: int, message: str = "rank 1 has failed", *tail: str, rank: int = 1
) -> SupervisorEvent:
    path = Path(f"logs/rank-{rank}.log")
    return SupervisorEvent(
        "failed", message, rank=rank, exit_code=exit_code, log_path=path, log_tail=tail
    )


# --- other computers ------------------------------------------------------------------------------


def test_other_computers_are_told_of_the_home_directory_as_it_was_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """There the ranks of the same command have the run below their own home directory."""
    monkeypatch.setenv("HOME", str(tmp_path))
    hostfile = tmp_path / "hosts"
    hostfile.write_text("node1 slots=1\nnode2 slots=1\n")
    asked: list[tuple[str | Path, str | Path | None]] = []
    monkeypatch.setattr(
        "allhands.cluster.launching.newest_checkpoint",
        lambda _, path, __, resume: asked.append((path, resume)) or {},
    )
    told: list[str | None] = []
    for path in ("~/run", f"{tmp_path}/run", "run"):
        flags = {
            "train": True,
            "adapter_path": path,
            "hostfile": "~/hosts",
            "resume": "auto",
            "backend": "ring",
        }
        job = job_of(build_config(flags))
        assert (job.directory, job.hostfile) == (
            tmp_path / "run" if path != "run" else Path("run"),
            str(hostfile),
        )
        members: Any = launching._members(job, "run-1")
        members._checkpoints([])
        told.append(launching._spec(job, ["program"]).log_dir_there)
    assert asked == [("~/run", "~/run"), (f"{tmp_path}/run", f"{tmp_path}/run"), ("run", "run")]
    assert told == ["~/run/logs", None, None]
    with pytest.raises(ConfigError) as caught:
        enter_directory("~/nowhere", None)
    assert caught.value.code == "directory-inaccessible"
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path)
    enter_directory("~/work", None)
    assert Path.cwd() == tmp_path / "work"


# --- failures -------------------------------------------------------------------------------------


def test_memory_is_a_guess_unless_the_kernel_said_so(err: Err) -> None:
    show(of_training(), failed(137, "rank 1 was killed by SIGKILL at step 8, compute"))
    assert err() == (
        "allhands: error: rank 1 was killed by SIGKILL at step 8, compute\n"
        "  what to do: if memory was short, lower --max-seq-length\n"
        f"  {_RESUME}\n"
        "  log of rank 1: logs/rank-1.log\n"
    )
    show(of_training(), failed(137, "rank 1 was killed by SIGKILL (out of memory)"))
    assert "  what to do: lower --max-seq-length\n" in err()
    show(of_training(), failed(137, "rank 1 was killed by SIGKILL (possibly out of memory)"))
    assert "  what to do: if memory was short, " in err()
    show(of_a_program(), failed(137, "rank 1 was killed by SIGKILL"))
    assert (
        "if memory was short, give each rank less to do at once, or start fewer with -n\n" in err()
    )


def test_a_rank_that_failed_otherwise_was_not_short_of_memory(err: Err) -> None:
    show(of_training(None), failed(7, "rank 1 on here made no progress for 5.0 s"))
    text = err()
    assert "memory" not in text
    assert "--resume" not in text


_START = RunStarted(
    name="run",
    model="model",
    method="lora",
    num_ranks=2,
    backend="ring",
    batch_size=8,
    total_steps=100,
    trainable_params=1000,
    total_params=10_000,
    num_train_examples=50,
    cores_per_rank=1,
    versions={},
    time=0.0,
    step=20,
)
_TRAINED = TrainReport(
    step=8,
    loss=2.5,
    learning_rate=1e-3,
    grad_norm=1.0,
    tokens_per_s=10.0,
    trained_tokens_per_s=9.0,
    trained_tokens=800,
    step_time_s=0.5,
    data_wait_s=0.0,
    comm_s=0.0,
    elapsed_s=4.0,
    peak_memory_bytes=(2**30, 2**30),
    epoch=0.5,
)
_VALID = ValidReport(step=8, loss=2.5, num_tokens=10, elapsed_s=4.0, duration_s=0.5, best=True)
_END = RunEnded(
    step=100, reason="finished", total_time_s=12.0, best_step=90, best_valid_loss=2.5, test_loss=2.6
)
_LINES = (
    *started_lines(_START),
    *started_lines(replace(_START, resumed_from="/old/checkpoints/step-0000020")),
    *started_lines(replace(_START, attempt=2)),
    train_line(_TRAINED, 100, 60.0),
    train_line(replace(_TRAINED, data_wait_s=0.4, peak_memory_bytes=(2**30,)), 100, float("nan")),
    valid_line(_VALID),
    valid_line(replace(_VALID, best=False)),
    "step 8  saved adapters/0000008_adapters.safetensors",
    "note: 3 examples are cut off",
    "",
    ended_line(_END),
)
_SKIPPED = skipped_line(
    StepSkipped(step=9, reason="the loss is nan", examples=(17,), where=("train.jsonl:18",))
)


def test_a_start_tells_from_where_it_goes_on_unless_it_is_its_own() -> None:
    elsewhere = replace(_START, resumed_from="/old/checkpoints/step-0000020")
    found = [started_lines(start)[-1] for start in (_START, elsewhere)]
    assert found == [
        "resumed     from step 20",
        "resumed     from step 20: /old/checkpoints/step-0000020",
    ]


@pytest.mark.parametrize("line", _LINES)
def test_a_line_of_progress_says_nothing(line: str) -> None:
    assert telling((line,)) == ()


@pytest.mark.parametrize(
    "line",
    [
        _SKIPPED,
        "warning: the disk is full",
        "step 3: loss 2.5",
        "MemoryError",
        "Segmentation fault",
        "model = 3",
    ],
)
def test_any_other_line_may(line: str) -> None:
    assert telling((*_LINES, line, *_LINES[-3:])) == (line, *_LINES[-3:])


@pytest.mark.parametrize("code", [137, 7])
def test_progress_is_no_explanation(err: Err, code: int) -> None:
    show(of_training(), failed(code, "rank 1 has failed", *_LINES))
    text = err()
    assert "last lines" not in text
    assert "  log of rank 1: logs/rank-1.log\n" in text
    show(
        of_training(),
        failed(code, "rank 1 has failed", *_LINES, "Current thread 0x1:", '  File "x.py", line 3'),
    )
    assert "last lines of rank 1:\n  Current thread 0x1:\n    File" in err()


def test_the_outer_end_of_a_stack_says_nothing(err: Err) -> None:
    frames = tuple(f'  File "/a/{i}.py", line {i} in call' for i in range(20))
    show(of_training(), failed(7, "rank 1 made no progress", *frames))
    assert "last lines" not in err()
    show(
        of_training(),
        failed(7, "rank 1 made no progress", *frames, "Current thread 0x1:", frames[0]),
    )
    assert "last lines of rank 1:\n  Current thread 0x1:\n    File" in err()


def test_of_a_killed_rank_only_the_very_last_lines(err: Err) -> None:
    show(of_a_program(), failed(137, "rank 1 has failed", "one", "two", "three", "four"))
    assert "last lines of rank 1:\n  two\n  three\n  four\n" in err()


def test_an_explained_error_needs_no_way_on(err: Err) -> None:
    event = replace(
        failed(3, "rank 1 exited"), explanation="data: there is none\n  what to do: make some"
    )
    told = of_training()
    # A restart and a log would tell nothing more of what was given wrong.
    for early in (event, replace(event, step=0)):
        told.show(early)
        told.show(SupervisorEvent("given up", "not started again", exit_code=3))
        assert err() == "allhands: error: data: there is none\n  what to do: make some\n"
    for later in (replace(event, step=2), replace(event, exit_code=5)):
        told.show(later)
        told.show(SupervisorEvent("given up", "not started again", exit_code=later.exit_code))
        text = err()
        assert "log of rank 1" in text
        assert "not started again" in text


def test_an_error_of_another_computer_is_told_with_its_name(err: Err) -> None:
    sync = "allhands cluster sync --hostfile h --data d"
    elsewhere = replace(_TRAINING, hostfile="h", sync=sync, tag_output=False)
    told = Notices(elsewhere, lambda: None)
    data = replace(
        failed(3), explanation="data: there is none", error="DataError: there is none", host="node7"
    )
    told.show(data)
    assert err() == (
        "allhands: error: on node7 (rank 1): data: there is none\n"
        "  if node7 has no copy, or an old one: allhands cluster sync --hostfile h --data d\n"
        "  log of rank 1, on node7: logs/rank-1.log\n"
    )
    told.show(replace(data, error="ConfigError: it cannot work", explanation="it cannot work"))
    assert "sync" not in err()
    here = "allhands: error: data: there is none\n"
    for event in (replace(data, host="localhost"), replace(data, host=None)):
        told.show(event)
        assert err() == here
    # What the supervisor finds names its ranks and computers itself.
    told.show(replace(data, error=None, explanation="rank 1 did not finish starting within 5 s"))
    assert err().startswith("allhands: error: rank 1 did not finish")


def test_what_is_on_the_screen_is_not_shown_again(err: Err) -> None:
    show(
        Notices(replace(_PROGRAM, tag_output=True), lambda: None),
        failed(1, "rank 1 exited with code 1", "ValueError: x"),
    )
    assert err() == "allhands: error: rank 1 exited with code 1\n  log of rank 1: logs/rank-1.log\n"
    show(of_a_program(), failed(1, "rank 1 exited with code 1", "ValueError: x"))
    assert "last lines of rank 1:\n  ValueError: x\n" in err()


@pytest.mark.parametrize(
    ("lines", "asked", "train", "launch"),
    [
        ("localhost slots=2\n", None, False, True),
        ("localhost\nnode1\n", None, True, True),
        ("node1 slots=2\n", None, True, True),
        ("localhost\nnode1\n", False, False, False),
        ("localhost slots=2\n", True, True, True),
        ("node1\n", None, False, False),
    ],
)
def test_whose_lines_are_shown(
    tmp_path: Path, lines: str, asked: bool | None, train: bool, launch: bool
) -> None:
    (tmp_path / "hosts").write_text(lines)
    job = TrainingJob(tmp_path, tmp_path, hostfile=str(tmp_path / "hosts"), tag_output=asked)
    assert (job.tagged, replace(job, resumes=False).tagged) == (train, launch)
    alone = TrainingJob(tmp_path, tmp_path, num_ranks=2)
    assert (alone.tagged, replace(alone, resumes=False).tagged) == (False, True)


def test_what_could_not_even_begin_is_an_error(err: Err) -> None:
    event = SupervisorEvent(
        "given up", "not started: b", exit_code=7, explanation="not started: b\n  what to do: c"
    )
    of_training().show(event)
    assert err() == "allhands: error: not started: b\n  what to do: c\n"
    show(of_training(), SupervisorEvent("given up", "not started again: b", exit_code=7))
    assert err() == "allhands: not started again: b\n"


# --- stops ----------------------------------------------------------------------------------------

_STOPPING = SupervisorEvent("stopping", "all processes are told to stop after this step")
_KILLING = SupervisorEvent("killing", "rank 0, 1 ended at once; what was not saved is lost")
_ENDED = SupervisorEvent("finished", "stopped (exit code 130)", exit_code=130)
_LOST = "allhands: ended at once; what was not saved is lost\n"


def test_a_second_ctrl_c_ends_with_what_is_left(err: Err) -> None:
    show(of_training(), _STOPPING, _KILLING, _ENDED)
    assert err() == f"{_LOST}  {_RESUME}\n"
    show(of_training(None), _STOPPING, _KILLING, _ENDED)
    assert err() == f"{_LOST}  there is no checkpoint to go on from\n"
    show(of_a_program(), _STOPPING, _KILLING, _ENDED)
    assert err() == _LOST
    show(of_a_program("to go on from step 20: the same command"), _STOPPING, _KILLING, _ENDED)
    assert err() == f"{_LOST}  to go on from step 20: the same command\n"


def test_a_stop_that_took_too_long_is_not_said_to_be_a_wish(
    err: Err, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr(notices.time, "monotonic", lambda: clock[0])
    told = of_training()
    show(told, _STOPPING)
    clock[0] += 60.0
    for event in (_KILLING, _ENDED):
        told.show(event)
    assert err() == (
        f"allhands: not ended within 60 s (--stop-grace-s); what was not saved is lost\n  {_RESUME}\n"
    )


@pytest.mark.parametrize(
    "text", ["stopped before the next start", "stopping before all processes have started"]
)
def test_a_stop_while_nothing_runs_says_how_to_go_on(err: Err, text: str) -> None:
    show(of_training(), SupervisorEvent("cancelling", text), _ENDED)
    assert err() == f"allhands: {text}\n  {_RESUME}\n"
    show(of_training(None), SupervisorEvent("cancelling", text), _ENDED)
    assert err() == f"allhands: {text}\n"


def test_a_stop_that_was_heeded_is_told_by_training_itself(err: Err) -> None:
    show(of_training(), _STOPPING, _ENDED)
    assert err() == ""
    show(of_a_program("to go on from step 20: the same command"), _STOPPING, _ENDED)
    assert err() == "allhands: stopped\n  to go on from step 20: the same command\n"
    show(of_a_program(), _STOPPING, _ENDED)
    assert err() == ""
    show(
        of_a_program("to go on"),
        SupervisorEvent("finished", "all ranks have finished", exit_code=0),
    )
    assert err() == ""


# --- how to go on ---------------------------------------------------------------------------------


def write(directory: Path, step: int, run_id: str) -> None:
    write_checkpoint(checkpoint_path(directory, step), step, run_id, {}, {})


def test_from_which_step_and_with_what(tmp_path: Path) -> None:
    out, before = tmp_path / "out", tmp_path / "before"
    write(before, 30, "an earlier run")
    job = TrainingJob(out, out / "logs", checkpoints=out)
    assert way_on(job, "this") is None
    assert way_on(replace(job, resume=before), "this") == "to go on from step 30: the same command"
    assert way_on(replace(job, hostfile="hosts"), "this") == (
        "to go on from the last checkpoint, if there is one: the same command with --resume"
    )
    write(out, 10, "an earlier run")
    assert way_on(job, "this") is None, "it is not one of this run"
    assert way_on(replace(job, resumes=False), "this") == "to go on from step 10: the same command"
    write(out, 20, "this")
    for same in (job, replace(job, resume=before), replace(job, hostfile="hosts")):
        assert way_on(same, "this") == _RESUME
    assert way_on(replace(job, checkpoints=None), "this") is None


def test_a_place_that_cannot_be_read_is_left_to_the_ranks(tmp_path: Path) -> None:
    assert step_in(tmp_path / "none") is None
    (tmp_path / "file").touch()
    assert step_in(tmp_path / "file") is None


def test_one_computer_by_two_names_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        addresses.ssh, "real_name", lambda host: {"a": "192.0.2.7", "b": "192.0.2.8"}[host]
    )
    hosts = tmp_path / "hosts"
    job = TrainingJob(tmp_path, tmp_path, hostfile=str(hosts), backend="ring")
    hosts.write_text("a\n192.0.2.7\n")
    with pytest.raises(ConfigError, match=r"a and 192\.0\.2\.7 are one computer") as refused:
        check(job)
    assert "a:2" in (refused.value.hint or "")
    for lines in ("a\nb\n", "a slots=2\n", "localhost\n192.0.2.7\n"):
        hosts.write_text(lines)
        check(job)


# --- more ranks than slots ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "number", "words"),
    [
        ("a slots=2\nb\n", 4, "has 3 slots: 3 ranks now, up to 4 when computers are added to it"),
        ("a\n", 2, "has 1 slot: 1 rank now, up to 2 when computers are added to it"),
        ("a slots=2\n", 2, None),
        ("a slots=2\n", 1, None),
        ("a slots=2\n", None, None),
    ],
)
def test_more_ranks_than_slots_are_told(
    tmp_path: Path,
    err: Err,
    monkeypatch: pytest.MonkeyPatch,
    lines: str,
    number: int | None,
    words: str | None,
) -> None:
    monkeypatch.setattr(launching, "supervise", lambda *_, **__: 0)
    hosts = tmp_path / "hosts"
    hosts.write_text(lines)
    job = TrainingJob(
        tmp_path / "out",
        tmp_path / "out/logs",
        num_ranks=number,
        hostfile=str(hosts),
        backend="ring",
    )
    assert launching.run(job, ["true"]) == 0
    assert err() == (f"allhands: {hosts} {words}\n" if words else "")


def test_ranks_of_this_computer_are_as_many_as_asked_for(
    tmp_path: Path, err: Err, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launching, "supervise", lambda *_, **__: 128 + signal.SIGTERM)
    monkeypatch.setattr(launching, "allowed_cores", lambda: 4)
    job = TrainingJob(tmp_path / "out", tmp_path / "out/logs", num_ranks=3, backend="ring")
    assert launching.run(job, ["true"]) == 143
    assert err() == ""


def test_the_ranks_of_hosts_are_not_those_of_n() -> None:
    """``--hosts a,b`` is two ranks, so two weights fit: who counts ``-n`` would want one."""
    from allhands.cluster.environment import recognise
    from allhands.cluster.training import check_launch
    from allhands.config.schema import build_config

    config = build_config({"hosts": "a,b", "rank_weights": [2, 1]}, None)
    check_launch(config, recognise({}))


# --- more processes than there is room for --------------------------------------------------------


def test_more_processes_than_cores_can_carry_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from allhands.cluster.netbench import measured_hosts

    monkeypatch.setattr(ranks, "allowed_cores", lambda: 2)
    check(TrainingJob(Path(), Path(), num_ranks=16, backend="ring"))
    for ask in (
        lambda: check(TrainingJob(Path(), Path(), num_ranks=17, backend="ring")),
        lambda: measured_hosts(None, None, 17),
    ):
        with pytest.raises(ConfigError, match="17 processes on 2 cores") as told:
            ask()
        assert told.value.where == "-n"
        assert "-n 2 gives each a core of its own; 16 at most" in str(told.value.hint)


@pytest.mark.parametrize(
    ("ranks", "gpus", "told"),
    [
        (2, 0, ""),
        (
            3,
            0,
            "allhands: 3 processes on 2 cores take turns: with -n 2 each has a core of its own\n",
        ),
        (3, 4, ""),
    ],
)
def test_processes_that_take_turns_are_told_of(
    ranks: int,
    gpus: int,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(launching, "allowed_cores", lambda: 2)
    monkeypatch.setattr("allhands.cluster.launching.nvidia_gpus", lambda: gpus)
    launching._tell_cores(TrainingJob(Path(), Path(), num_ranks=ranks, backend="ring"))
    assert capsys.readouterr().err == told


@pytest.mark.parametrize("verb", ["train", "pretrain", "eval", "plan", "launch", "cluster bench"])
def test_every_verb_that_starts_processes_refuses_999(
    verb: str, tiny_model: Path, tiny_data: Path
) -> None:
    words = ["--model", str(tiny_model), "--data", str(tiny_data)]
    own = {
        "pretrain": ["--tokenizer", str(tiny_model), "--data", str(tiny_data)],
        "launch": ["--", "true"],
        "cluster bench": [],
    }
    began = time.monotonic()
    done = run_allhands(*verb.split(), "-n", "999", *own.get(verb, words))
    assert (done.returncode, "999 processes on" in done.stderr) == (2, True), done.stderr
    assert time.monotonic() - began < 10
