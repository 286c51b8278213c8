"""The API for a person's own program: what checkpoints keep, what progress says, what is refused."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from twins import ThreadCommunicator, run_ranks

from allhands.checkpoints import checkpoints_in
from allhands.cluster.environment import LaunchPlace
from allhands.cluster.worker import WorkerContext
from allhands.errors import CheckpointError, ConfigError, StorageError
from allhands.io.nested import put_together, take_apart
from allhands.loops import supervised
from allhands.loops.supervised import Saved, last_checkpoint, progress, save_checkpoint


def make_session(
    run_dir: Path | None = None,
    run_id: str = "one",
    rank: int = 0,
    size: int = 1,
    local_size: int | None = None,
) -> supervised._Session:
    """A process's state as if its signals had been taken over already: this one's belong to pytest."""
    local = local_size or size
    launch = LaunchPlace(
        "allhands", rank, size, rank % local, local, "none" if size == 1 else "ring", "for a test"
    )
    return supervised._Session(launch, WorkerContext(launch, run_dir, None), run_id, installed=True)


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> supervised._Session:
    """A process alone, without a supervisor."""
    made = make_session()
    monkeypatch.setattr(supervised, "this_session", lambda: made)
    monkeypatch.setattr("atexit.register", lambda function: None)
    monkeypatch.delenv(supervised.DIRECTORY_VARIABLE, raising=False)
    return made


def same(one: Any, other: Any) -> bool:
    """Equal in structure, types and bits."""
    if isinstance(one, mx.array):
        if not isinstance(other, mx.array) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        bits = (
            np.array(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x).tobytes()
            for x in (one, other)
        )
        return len(set(bits)) == 1
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def every_kind() -> dict[str, Any]:
    """All types of MLX, odd shapes and values, and every way of nesting."""
    special = mx.array([math.nan, -math.nan, math.inf, -0.0, 1e-45, 3.4e38])
    return {
        "float32": special,
        "bfloat16": special.astype(mx.bfloat16),
        "float16": special.astype(mx.float16),
        "uint64": mx.array(np.array([2**64 - 1, 0, 2**53 + 1], dtype=np.uint64)),
        "int64": mx.array(np.array([-(2**63), 2**63 - 1], dtype=np.int64)),
        "small": [mx.array([[255]], dtype=t) for t in (mx.uint8, mx.uint16, mx.uint32)],
        "signed": tuple(mx.array(-5, dtype=t) for t in (mx.int8, mx.int16, mx.int32)),
        "bool": mx.array([True, False]),
        "complex": mx.array([1 + 2j]),
        "none in it": mx.zeros((0, 3), dtype=mx.bfloat16),
        "transposed": mx.arange(6).reshape(2, 3).T,
        "scalar": mx.array(7.5, dtype=mx.bfloat16),
        "empty": [{}, [], (), {"inside": {}}],
        "a.b": {"c": mx.array(1)},
        "a": {"b.c": mx.array(2), "b": {"c": mx.array(3)}},
        "0": mx.array(4),
        "plain": [None, True, 3, 2.5, "text"],
    }


# --- checkpoints ----------------------------------------------------------------------------------


def test_a_checkpoint_gives_back_every_bit(session: supervised._Session, tmp_path: Path) -> None:
    values = {"epoch": 3, "best": 0.1 + 0.2, "names": ["a", "ü"], "none": None, "large": 2**70}
    save_checkpoint(12, every_kind(), values, directory=tmp_path)
    found = last_checkpoint(directory=tmp_path)
    assert isinstance(found, Saved)
    assert found.step == 12
    assert same(found.arrays, every_kind())
    assert found.values == values


def test_one_array_and_none_at_all(session: supervised._Session, tmp_path: Path) -> None:
    for step, tree in enumerate([mx.array([1, 2]), {}, [], 3], start=1):
        save_checkpoint(step, tree, directory=tmp_path)
        found = last_checkpoint(directory=tmp_path)
        assert found is not None
        assert same(found.arrays, tree)


def test_model_and_optimizer_go_on_bit_by_bit(session: supervised._Session, tmp_path: Path) -> None:
    def start() -> tuple[nn.Module, optim.Optimizer]:
        mx.random.seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1), nn.ReLU())
        return model, optim.AdamW(learning_rate=optim.cosine_decay(0.1, 20))

    def train(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
        step_of = nn.value_and_grad(model, lambda model, x: (model(x) ** 2).mean())
        for step in steps:
            _, grads = step_of(model, mx.random.normal((5, 4), key=mx.random.key(step)))
            optimizer.update(model, grads)
            mx.eval(model.parameters(), optimizer.state)

    whole, half, resumed = start(), start(), start()
    train(*whole, range(10))
    train(*half, range(5))
    save_checkpoint(5, {"model": half[0], "optimizer": half[1].state}, directory=tmp_path)
    found = last_checkpoint(directory=tmp_path)
    assert found is not None
    resumed[0].update(found.arrays["model"])
    resumed[1].state = found.arrays["optimizer"]
    train(*resumed, range(5, 10))
    assert same(resumed[0].parameters(), whole[0].parameters())
    assert same(resumed[1].state, whole[1].state)
    assert not same(half[0].parameters(), whole[0].parameters())


def test_the_oldest_are_removed_those_of_the_run_before_too(
    monkeypatch: pytest.MonkeyPatch, session: supervised._Session, tmp_path: Path
) -> None:
    for step in (1, 2, 3):
        save_checkpoint(step, [mx.array(step)], directory=tmp_path)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-0000003", "step-0000002"]
    following = make_session(run_id="two")
    monkeypatch.setattr(supervised, "this_session", lambda: following)
    assert last_checkpoint(directory=tmp_path) is not None
    for step in (4, 5, 6):
        save_checkpoint(step, [mx.array(step)], directory=tmp_path)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-0000006", "step-0000005"]


def test_a_damaged_one_is_passed_over_and_told(
    session: supervised._Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save_checkpoint(step, [mx.array(step)], directory=tmp_path)
    file = tmp_path / "checkpoints" / "step-0000002" / "arrays.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    found = last_checkpoint(directory=tmp_path)
    assert found is not None
    assert found.step == 1
    assert "step-0000002" in caplog.text
    # It does not stand in the way of going on.
    save_checkpoint(2, [mx.array(2)], directory=tmp_path)
    again = last_checkpoint(directory=tmp_path)
    assert again is not None
    assert again.step == 2


def test_later_checkpoints_of_another_run_are_not_written_beside(
    session: supervised._Session, tmp_path: Path
) -> None:
    save_checkpoint(9, [mx.array(9)], directory=tmp_path)
    session.seen.clear()
    with pytest.raises(CheckpointError, match="step-0000009 belongs to another run") as caught:
        save_checkpoint(1, [mx.array(1)], directory=tmp_path)
    assert "last_checkpoint()" in str(caught.value)
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-0000009"]


def test_no_checkpoint_is_none(session: supervised._Session, tmp_path: Path) -> None:
    assert last_checkpoint(directory=tmp_path / "nothing here") is None


def test_a_checkpoint_of_training_is_refused(session: supervised._Session, tmp_path: Path) -> None:
    from allhands.checkpoints import checkpoint_path, write_checkpoint

    write_checkpoint(checkpoint_path(tmp_path, 1), 1, "r", {"config": {}}, {})
    with pytest.raises(CheckpointError, match=r"not one of allhands\.save_checkpoint"):
        last_checkpoint(directory=tmp_path)


def test_the_launchers_directory_is_taken(
    session: supervised._Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(supervised.DIRECTORY_VARIABLE, str(tmp_path / "here"))
    save_checkpoint(1, [mx.array(1)])
    assert checkpoints_in(tmp_path / "here")


def test_a_directory_that_cannot_be_written(session: supervised._Session, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError):
        save_checkpoint(1, [mx.array(1)], directory=tmp_path / "file")


REFUSED: dict[str, tuple[Callable[[Path], object], str]] = {
    "numpy": (
        lambda d: save_checkpoint(1, {"x": np.zeros(2)}, directory=d),
        "arrays.x: a ndarray of numpy",
    ),
    "keys": (lambda d: save_checkpoint(1, [{1: mx.array(1)}], directory=d), "arrays.0: 1 is a key"),
    "values": (
        lambda d: save_checkpoint(1, [], {"a": [(1,)]}, directory=d),
        "values.a.0: a tuple of builtins",
    ),
    "array as value": (
        lambda d: save_checkpoint(1, [], {"a": mx.array(1)}, directory=d),
        "values.a: a array of mlx",
    ),
    "infinity": (
        lambda d: save_checkpoint(1, [], {"best": math.inf}, directory=d),
        "values.best: there is no inf",
    ),
    "step": (lambda d: save_checkpoint(-1, [], directory=d), "step is -1"),
    "half a step": (lambda d: progress(0.5), "progress: step is 0.5"),  # type: ignore[arg-type]
    "keep none": (lambda d: save_checkpoint(1, [], directory=d, keep_last=0), "keep_last=0"),
    "nowhere": (lambda d: save_checkpoint(1, []), "there is no directory for checkpoints"),
    "nowhere to read": (lambda d: last_checkpoint(), "there is no directory for checkpoints"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_kept_is_named(
    session: supervised._Session, tmp_path: Path, case: str
) -> None:
    call, words = REFUSED[case]
    with pytest.raises(ConfigError) as caught:
        call(tmp_path)
    assert words in str(caught.value)
    assert "what to do" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_a_tree_is_the_same_through_json() -> None:
    tree = every_kind()
    shape, arrays = take_apart(tree, "arrays")
    assert len(arrays) == len({id(array) for array in arrays.values()}) == 20
    assert same(put_together(json.loads(json.dumps(shape)), arrays), tree)


# --- several computers ----------------------------------------------------------------------------


def test_whoever_has_the_latest_hands_it_out(tmp_path: Path) -> None:
    """Three computers without common files: the second was rank 0's before and has the latest
    checkpoint.
    """

    def work(group: ThreadCommunicator) -> list[Saved | None]:
        place = tmp_path / str(group.rank)
        mine = make_session(rank=group.rank, size=3, local_size=1)
        mine.group = group
        nobody = mine.load(place, together=True)
        writer = make_session(run_id="before")
        step = (4, 8, 0)[group.rank]
        if step:
            contents = supervised._Contents(
                step, *reversed(take_apart(every_kind(), "arrays")), {"of": group.rank}
            )
            writer.save(contents, place, 2)
        found = mine.load(place, together=True)
        alone = make_session(rank=group.rank, size=3, local_size=1).load(place, together=False)
        same_tree = found is not None and same(found.arrays, every_kind())
        return [
            nobody,
            found and Saved(found.step, same_tree, found.values),
            alone and Saved(alone.step, 0, {}),
        ]

    results = run_ranks(3, work)
    for rank, result in enumerate(results):
        assert isinstance(result, list), result
        assert result[0] is None
        assert result[1] == Saved(8, True, {"of": 1})
        assert result[2] == (Saved(4, 0, {}), Saved(8, 0, {}), None)[rank]


@pytest.mark.parametrize(
    ("wishes", "code"),
    [((0, 0), 0), ((75, 0), 75), ((0, 130), 130), ((75, 143), 143), ((130, 130), 130)],
)
def test_all_ranks_stop_at_the_same_step(
    wishes: tuple[int, int], code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("atexit.register", lambda function: None)

    def work(group: ThreadCommunicator) -> tuple[bool, bool, int]:
        mine = make_session(tmp_path, rank=group.rank, size=2)
        mine.group = group
        calm = mine.progress(1, True)
        monkeypatch.setattr(
            mine.context, "stop_requested", lambda: max(wishes[group.rank] - 128, 0)
        )
        monkeypatch.setattr(mine.context, "regroup_requested", lambda: wishes[group.rank] == 75)
        return calm, mine.progress(2, True), mine.ends_with

    assert run_ranks(2, work) == [(False, code > 0, code)] * 2


# --- signs of life --------------------------------------------------------------------------------


def test_progress_marks_and_beats(tmp_path: Path) -> None:
    mine = make_session(tmp_path)
    counts: list[int] = []
    for step in (0, 0, 1):
        assert mine.progress(step, True) is False
        beat = json.loads((tmp_path / "rank-0.beat").read_text())
        assert (beat["step"], beat["phase"]) == (step, "compute")
        counts.append(beat["count"])
        assert (tmp_path / "rank-0.started").exists()
    assert counts == sorted(set(counts)), "every call is a new sign of life"


_PROGRAM = """
import atexit, os, signal, sys, tempfile, time
import allhands.loops.supervised as allhands
print("begins", flush=True)
atexit.register(print, "earlier clean-up")
def train(number):
    for step in range(1, 1000):
        if allhands.progress(step):
            print("asked at", step)
            return step
        if step == 3:
            os.kill(os.getpid(), number)
train({number})
print("after the loop")
{end}
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGUSR1, 143)]
)
def test_a_stop_outside_of_a_supervisor(number: int, code: int) -> None:
    program = _PROGRAM.format(number=int(number), end="")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == code, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "begins"
    assert lines[1].startswith("asked at ")
    assert lines[2:] == ["after the loop", "earlier clean-up"]
    assert done.stderr == ""


def test_an_error_after_a_stop_stays_an_error() -> None:
    program = _PROGRAM.format(number=int(signal.SIGTERM), end="raise ValueError('in the end')")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "ValueError: in the end" in done.stderr


def test_another_thread_only_beats(tmp_path: Path) -> None:
    """Signals can be taken over in the main thread only; the program must not be ended by a second
    thread's call.
    """
    program = (
        "import signal, threading, allhands.loops.supervised as allhands\n"
        "before = signal.getsignal(signal.SIGTERM)\n"
        "thread = threading.Thread(target=allhands.progress, args=(5,))\n"
        "thread.start(); thread.join()\n"
        "assert signal.getsignal(signal.SIGTERM) is before\n"
        "assert allhands.progress(6) is False\n"
        "assert signal.getsignal(signal.SIGTERM) is not before\n"
    )
    run_dir, log_dir = tmp_path / "run", tmp_path / "logs"
    run_dir.mkdir()
    log_dir.mkdir()
    variables = {
        "ALLHANDS_RANK": "0",
        "ALLHANDS_WORLD_SIZE": "1",
        "ALLHANDS_RUN_DIR": str(run_dir),
        "ALLHANDS_LOG_DIR": str(log_dir),
        "ALLHANDS_SUPERVISOR_PID": str(os.getpid()),
    }
    environ = {**os.environ, **variables}
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environ, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((run_dir / "rank-0.beat").read_text())["step"] == 6
    assert time.monotonic() - begun < 50
