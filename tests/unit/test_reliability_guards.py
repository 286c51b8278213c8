"""Guards of a run that are only seen when something goes wrong: claims, failed saves, no
checkpoints, one name for all.

Everything runs in this process on a tiny model; where there are several ranks they are threads,
each with a directory of its own, as on computers that share no files. Guards that need processes
are in tests/distributed.
"""

from __future__ import annotations

import io
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from faulty import fill, small_disk
from rich.console import Console
from tiny import write_chat_data, write_model
from twins import ThreadCommunicator, run_ranks

from allhands.checkpoints import checkpoints_in, open_checkpoint
from allhands.checkpoints.writing import drafting
from allhands.cluster import launching
from allhands.cluster.job import RESTARTS_OF_SEVERAL, TrainingJob, job_of
from allhands.cluster.supervisor import LaunchSpec
from allhands.config.schema import build_config
from allhands.distributed.mesh import Mesh
from allhands.errors import ConfigError, Interrupted, NumericsError, Regroup, StorageError
from allhands.io.files import CLAIMED, claim_mark, claimed
from allhands.observe.metrics import read_metrics
from allhands.run.session import RunContext, run_finetune

TAKEN = "another run is writing into this directory"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("guards")
    data = write_chat_data(root / "data", train=12, valid=4, longest=20)
    return {"model": str(write_model(root / "model", layers=1)), "data": str(data)}


@pytest.fixture
def flags(inputs: dict[str, str], tmp_path: Path) -> dict[str, Any]:
    """Eight batches that are saved every two, without validation."""
    return {
        **inputs,
        "adapter_path": str(tmp_path / "run"),
        "train": True,
        "iters": 8,
        "batch_size": 4,
        "save_every": 2,
        "steps_per_report": 1,
        "val_batches": 0,
        "lora_parameters": {"rank": 2, "scale": 2.0, "dropout": 0.0},
    }


def on_computers(size: int, flags: dict[str, Any], **given: Callable[[int], Any]) -> list[Any]:
    """What a run returned, or raised, on ranks that see no files of each other: rank N writes into
    ``run-N``.

    ``given`` are fields of :class:`RunContext` by rank. A rank that fails ends the others' wait for
    it.
    """

    def work(communicator: ThreadCommunicator) -> Path:
        rank = communicator.rank
        config = build_config(flags | {"adapter_path": f"{flags['adapter_path']}-{rank}"})
        mesh = Mesh(rank, size, 0, 1, (1.0,) * size)
        more = {name: value(rank) for name, value in given.items()}
        try:
            return run_finetune(
                config, RunContext(mesh=mesh, connect=lambda: communicator, **more)
            ).adapter_path
        except (
            Regroup,
            Interrupted,
            NumericsError,
        ):  # all ranks agreed on it: a rank may not yet have woken from that exchange
            raise
        except BaseException:
            communicator.table.barrier.abort()
            raise

    return run_ranks(size, work)


def checkpoint_steps(directory: Path) -> list[int]:
    return sorted(open_checkpoint(path).step for path in checkpoints_in(directory))


def numbered(directory: Path) -> list[int]:
    return sorted(int(path.name[:7]) for path in directory.glob("*_adapters.safetensors"))


# --- claims ---------------------------------------------------------------------------------------


def test_a_claim_of_the_supervisor_is_one_of_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the directory itself, however its path is written; and for no other directory."""
    run, other = tmp_path / "run", tmp_path / "other"
    other.mkdir()
    (tmp_path / "link").symlink_to(run)
    with claimed(run):
        marks = [claim_mark(other), claim_mark(run)]
        for environment in (None, "", marks[0], marks[1][:-1]):
            if environment is not None:
                monkeypatch.setenv(CLAIMED, environment)
            with pytest.raises(StorageError, match=TAKEN), claimed(run):
                pytest.fail("two runs have the directory")
        monkeypatch.setenv(CLAIMED, " ".join(marks))
        for path in (run, tmp_path / "link", other / ".." / "run"):
            with claimed(path):
                pass
        monkeypatch.delenv(CLAIMED)
        with pytest.raises(StorageError, match=TAKEN), claimed(run):
            pytest.fail("a rank has given back what its supervisor holds")
    with claimed(run):
        pass


@pytest.mark.parametrize("ours", [True, False], ids=["its supervisor's", "another run's"])
def test_a_copy_keeper_and_a_claim_on_its_directory(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ours: bool
) -> None:
    """The supervisor is on the computer of rank 1, which keeps a copy in the directory that the
    supervisor holds.
    """
    held = tmp_path / "run-1"
    with claimed(held):
        if ours:
            monkeypatch.setenv(CLAIMED, claim_mark(held))
        results = on_computers(2, flags | {"iters": 2, "checkpoint_copies": 2})
    if ours:
        assert results == [tmp_path / "run-0", held]
        assert [checkpoint_steps(path) for path in results] == [[2], [2]]
    else:
        assert isinstance(results[1], StorageError)
        assert TAKEN in str(results[1])
        assert not checkpoints_in(held)


def test_the_launcher_holds_directories_for_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directories = [tmp_path / "logs", tmp_path / "checkpoints"]
    seen: list[str] = []

    def supervise(spec: LaunchSpec, *_: object, **__: object) -> int:
        for directory in directories:
            with pytest.raises(StorageError, match=TAKEN), claimed(directory):
                pytest.fail("a second run may write there")
        seen.extend(spec.env[CLAIMED].split())
        return 0

    monkeypatch.setattr(launching, "supervise", supervise)
    job = TrainingJob(directories[0], directories[0], checkpoints=directories[1], env={"MINE": "1"})
    assert launching.run(job, ["true"]) == 0
    assert seen == [claim_mark(directory) for directory in directories]
    for directory in directories:
        with claimed(directory):
            pass


# --- a regroup needs a checkpoint -----------------------------------------------------------------


@pytest.mark.parametrize("broken", [0, 1], ids=["rank 0", "the copy's rank"])
def test_ranks_that_shall_regroup_go_on_until_all_have_saved(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: int
) -> None:
    """Only rank 1 has heard of the wish; at the first boundary the disk of one rank is full."""
    failed: list[Path] = []

    def begin(target: Path) -> Any:
        if target.name == "step-0000002" and target.is_relative_to(tmp_path / f"run-{broken}"):
            failed.append(target)
            raise StorageError(
                "cannot be written: No space left on device", code="disk-full", where=str(target)
            )
        return drafting(target)

    monkeypatch.setattr("allhands.checkpoints.saving.drafting", begin)
    results = on_computers(
        2,
        flags | {"checkpoint_copies": 2},
        regroup_requested=lambda rank: lambda: rank == 1,
        run_id=lambda _: "r",
    )
    assert [path.name for path in failed] == ["step-0000002"]
    assert [type(result) for result in results] == [Regroup, Regroup]
    assert all("after step 4 " in str(result) for result in results)
    for rank in range(2):
        directory = tmp_path / f"run-{rank}"
        assert checkpoint_steps(directory) == ([4] if rank == broken else [2, 4])
        assert [report.step for report in read_metrics(directory).train] == [1, 2, 3, 4]
        told = warnings(directory)
        # Of a copy rank 0 tells, too.
        assert len(told) == (rank == broken or broken == 1)
        words = {
            (0, 0): "no checkpoint was written",
            (1, 0): "there is no copy",
            (1, 1): "no copy of the checkpoint",
        }
        assert all(words[broken, rank] in text and "No space left" in text for text in told)


def test_a_copy_that_cannot_be_kept_keeps_nobody_from_regrouping(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _without_room(tmp_path / "run-1", monkeypatch)
    results = on_computers(
        2,
        flags | {"checkpoint_copies": 2},
        regroup_requested=lambda rank: lambda: rank == 1,
        run_id=lambda _: "r",
    )
    assert [type(result) for result in results] == [Regroup, Regroup]
    assert all("after step 4 " in str(result) for result in results)
    assert checkpoint_steps(tmp_path / "run-0") == [2, 4]


def _without_room(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no checkpoint be written in ``directory``."""

    def begin(target: Path) -> Any:
        if target.is_relative_to(directory):
            raise StorageError(
                "cannot be written: No space left on device", code="disk-full", where=str(target)
            )
        return drafting(target)

    monkeypatch.setattr("allhands.checkpoints.saving.drafting", begin)


@pytest.mark.parametrize("end", ["finished", "stopped", "not a number"])
def test_however_a_run_ends_a_copy_that_is_not_kept_is_no_error(
    flags: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    _without_room(tmp_path / "run-1", monkeypatch)
    more: dict[str, Any] = {}
    if end == "stopped":
        more["stop_requested"] = lambda rank: lambda: signal.SIGTERM
    elif end == "not a number":
        flags |= {"learning_rate": 1e38}
    results = on_computers(2, flags | {"checkpoint_copies": 2}, run_id=lambda _: "r", **more)
    kind = {"finished": Path, "stopped": Interrupted, "not a number": NumericsError}[end]
    assert all(isinstance(result, kind) for result in results), results
    history = read_metrics(tmp_path / "run-0")
    assert history.ended is not None
    # Who looks at the run later reads what its terminal has said.
    assert history.ended.error == (str(results[0]) if end == "not a number" else None)
    (told,) = history.warned if end != "not a number" else (None,)
    assert told is None or "there is no copy of the checkpoint on" in told.message


def test_a_picture_that_cannot_be_drawn_is_no_error(
    flags: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def plot(*_: Any, **__: Any) -> Path:
        raise StorageError(
            "cannot be written: No space left on device", code="disk-full", where="loss.png"
        )

    monkeypatch.setattr("allhands.observe.plots.plot_losses", plot)
    text = io.StringIO()
    result = run_finetune(build_config(flags), RunContext(console=Console(file=text, width=200)))
    assert (result.ended.reason, result.plot) == ("finished", None)
    assert (
        "warning: the curves are not drawn (loss.png: cannot be written: No space left on device)"
        in text.getvalue()
    )


def test_ranks_that_shall_regroup_end_at_the_first_checkpoint(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    results = on_computers(2, flags, regroup_requested=lambda rank: lambda: rank == 1)
    assert [str(result) for result in results] == [
        "stopped after step 2 to go on with other ranks"
    ] * 2
    assert checkpoint_steps(tmp_path / "run-0") == [2]


def warnings(directory: Path) -> list[str]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [record["message"] for record in map(json.loads, lines) if record["event"] == "warned"]


# --- no checkpoints -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["lora", "full"])
def test_without_checkpoints_adapters_are_written_and_nobody_regroups(
    flags: dict[str, Any], method: str
) -> None:
    """There would be nothing to go on from: a wish to regroup is not heeded, and the run comes to
    its end.
    """
    flags |= {"keep_last": 0, "fine_tune_type": method, "val_batches": 1, "steps_per_eval": 4}
    result = run_finetune(build_config(flags), RunContext(regroup_requested=lambda: True))
    directory = result.adapter_path
    assert (result.ended.step, result.ended.reason) == (8, "finished")
    assert not (directory / "checkpoints").exists()
    assert not list(directory.rglob("step-*"))
    assert numbered(directory) == [2, 4, 6, 8]
    assert same_arrays(
        directory / "adapters.safetensors", directory / "0000008_adapters.safetensors"
    )


def test_with_checkpoints_full_weights_are_in_them_alone(flags: dict[str, Any]) -> None:
    directory = run_finetune(
        build_config(flags | {"fine_tune_type": "full", "keep_last": 1}), RunContext()
    )
    assert numbered(directory.adapter_path) == []
    assert checkpoint_steps(directory.adapter_path) == [8]


@pytest.mark.parametrize(
    ("more", "restarts"),
    [
        ({"num_ranks": 3}, RESTARTS_OF_SEVERAL),
        ({"num_ranks": 3, "keep_last": 0}, 0),
        ({"num_ranks": 3, "keep_last": 0, "max_restarts": 0}, 0),
        ({"num_ranks": 3, "max_restarts": 7}, 7),
        ({"hostfile": "hosts.json"}, RESTARTS_OF_SEVERAL),
        ({"hostfile": "hosts.json", "keep_last": 0}, 0),
        ({"num_ranks": 1}, 0),
    ],
)
def test_without_checkpoints_nothing_is_started_again(
    flags: dict[str, Any], tmp_path: Path, more: dict[str, Any], restarts: int
) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(
        json.dumps([{"ssh": "gpu0", "ips": ["10.0.0.1"]}, {"ssh": "gpu1", "ips": ["10.0.0.2"]}])
    )
    more |= {"hostfile": str(hosts)} if "hostfile" in more else {}
    assert job_of(build_config(flags | more)).max_restarts == restarts


@pytest.mark.parametrize("more", [{"max_restarts": 2}, {"min_ranks": 1}])
def test_restarts_without_checkpoints_are_refused(
    flags: dict[str, Any], more: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match="--keep-last 0 writes no checkpoint"):
        build_config(flags | {"num_ranks": 2, "keep_last": 0, **more})


def same_arrays(one: Path, other: Path) -> bool:
    first: dict[str, mx.array] = mx.load(str(one))  # type: ignore[assignment]
    second: dict[str, mx.array] = mx.load(str(other))  # type: ignore[assignment]
    return first.keys() == second.keys() and all(
        mx.array_equal(first[name], second[name]).item() for name in first
    )


# --- one name for all -----------------------------------------------------------------------------


def test_checkpoints_of_all_keepers_belong_to_one_run(
    flags: dict[str, Any], tmp_path: Path
) -> None:
    """Under a launcher other than ours every rank has made up a name: it is rank 0's that counts."""
    flags |= {"iters": 4, "checkpoint_copies": 2}
    results = on_computers(3, flags, run_id=lambda rank: f"name-of-{rank}")
    assert results == [tmp_path / f"run-{rank}" for rank in range(3)]
    for directory in results[:2]:
        assert {open_checkpoint(path).run_id for path in checkpoints_in(directory)} == {"name-of-0"}
        assert checkpoint_steps(directory) == [2, 4]
        assert (directory / ".run").read_text() == "name-of-0"
    assert not (results[2] / "checkpoints").exists()  # two copies were asked for


# --- a log that cannot be written -----------------------------------------------------------------


@pytest.mark.parametrize("stop", [False, True], ids=["to its end", "to a stop"])
def test_a_full_disk_under_the_log_does_not_end_a_run(
    flags: dict[str, Any], tmp_path: Path, stop: bool
) -> None:
    """Nor does it hide why the run ends."""
    with small_disk(tmp_path / "logs", megabytes=1) as disk:
        if disk is None:
            pytest.skip("no file system can be mounted here: that needs root and Linux")
        fill(disk)
        log = disk / "rank-0.log"
        surroundings = RunContext(log_file=log, regroup_requested=lambda: stop)
        if stop:
            with pytest.raises(Regroup, match="after step 2 "):
                run_finetune(build_config(flags), surroundings)
        else:
            assert run_finetune(build_config(flags), surroundings).ended.step == 8
        assert os.statvfs(disk).f_bavail == 0
        assert log.stat().st_size == 0
    assert checkpoint_steps(Path(flags["adapter_path"]))[-1] == (2 if stop else 8)
