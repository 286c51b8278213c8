"""``allhands.launch`` with real processes: a script and functions on two ranks, and what cannot be
started.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny import run_allhands

import allhands
from allhands.cli.verbs_training import Launch
from allhands.cluster.mpi import find_mpi
from allhands.errors import ConfigError, DistributedError, Interrupted
from allhands.loops.starting import _OPTIONS, _flags, run_call

SCRIPT = """
import sys
import allhands
from pathlib import Path

def train(start, more):
    world = allhands.init(size=2)
    Path(f"{more['name']}-{world.rank}").write_text(str(world.all_sum(float(start + world.rank)).item()))

if __name__ == "__main__":
    here = {"num_ranks": 2, "backend": "ring", "tag_output": False}
    if sys.argv[1:]:
        train(int(sys.argv[1]), {"name": "script"})
    else:
        allhands.launch(train, {"start": 3, "more": {"name": "function"}}, **here)
        allhands.launch(__file__, [5], **here)
"""


@pytest.mark.parametrize("name", ["program.py", "program"])
def test_a_function_and_a_script(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(SCRIPT)
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    command = [sys.executable, name]
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / f"function-{rank}").read_text() for rank in range(2)] == ["7.0", "7.0"]
    assert [(tmp_path / f"script-{rank}").read_text() for rank in range(2)] == ["11.0", "11.0"]


def test_what_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(DistributedError, match="the ranks ended with code 3"):
        allhands.launch("bad.py", max_restarts=0)
    Path("stopped.py").write_text("raise SystemExit(130)\n")
    with pytest.raises(Interrupted):
        allhands.launch("stopped.py", max_restarts=0)


FAILS = """
import allhands, sys
world = allhands.init()
if world.rank == int(sys.argv[1]):
    raise ValueError("boom")
world.barrier()
"""


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    "backend",
    [
        "ring",
        pytest.param(
            "mpi", marks=pytest.mark.skipif(find_mpi() is None, reason="Open MPI is not installed")
        ),
    ],
)
def test_a_rank_that_raises_ends_all_at_once_and_is_named(
    tmp_path: Path, backend: str, rank: int
) -> None:
    """MPI would wait at its end for the other one, which waits for it."""
    (tmp_path / "fails.py").write_text(FAILS)
    options = ("-n", "2", "--backend", backend, "--max-restarts", "0")
    done = run_allhands(
        "launch", *options, "--", sys.executable, "fails.py", str(rank), cwd=tmp_path, timeout=40
    )
    assert done.returncode == 1
    assert f"rank {rank} exited with code 1: ValueError: boom" in done.stderr


CALLS_BACK = """
import allhands, sys

class Fails(allhands.Callback):
    def on_train_report(self, report):
        raise ValueError("boom")

allhands.finetune(model=sys.argv[1], data=sys.argv[2], iters=3, batch_size=2, val_batches=0, adapter_path="out",
                  callbacks=[Fails()])
"""


@pytest.mark.slow
@pytest.mark.skipif(find_mpi() is None, reason="Open MPI is not installed")
def test_a_callback_that_raises_under_a_plain_mpirun_ends_all(
    tmp_path: Path, tiny_model: Path, tiny_data: Path
) -> None:
    (tmp_path / "program.py").write_text(CALLS_BACK)
    installation = find_mpi()
    assert installation is not None
    mpirun = [str(installation.mpirun), "--allow-run-as-root", "--oversubscribe", "-np", "2"]
    command = [*mpirun, sys.executable, "program.py", str(tiny_model), str(tiny_data)]
    environ = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert "ValueError: boom" in done.stderr + done.stdout


def test_what_cannot_be_started() -> None:
    def inner() -> None: ...

    for target in (inner, lambda: None, print):
        with pytest.raises(ConfigError, match="no function at the top level of a file"):
            allhands.launch(target)
    with pytest.raises(ConfigError, match="not a JSON value"):
        allhands.launch(run_call, [object()])
    with pytest.raises(ConfigError, match="a script are a list"):
        allhands.launch("x.py", {"steps": 3})
    with pytest.raises(ConfigError, match="7 cannot be started"):
        allhands.launch(7)  # type: ignore[arg-type]


def test_an_argument_that_there_is_not() -> None:
    for wrong, words in (
        ("num_rnks", "did you mean num_ranks?"),
        ("hostfiles", "did you mean hostfile?"),
    ):
        with pytest.raises(ConfigError, match=f"no argument {wrong}") as caught:
            allhands.launch("w1.py", **{wrong: 2})  # pyright: ignore[reportArgumentType]
        assert caught.value.hint == words
    with pytest.raises(ConfigError) as caught:
        allhands.launch("w1.py", zzz=1)
    assert (caught.value.hint or "").startswith("there are num_ranks, hostfile, ")
    assert {"command", "num_ranks", *_OPTIONS} == {*Launch._fields}


def test_options_are_those_of_the_command() -> None:
    options = {"num_ranks": 2, "tag_output": False, "hosts": None, "log_dir": Path("x y")}
    assert _flags(options) == ["--num-ranks=2", "--no-tag-output", "--log-dir=x y"]
    assert _flags({"tag_output": True}) == ["--tag-output"]


def test_a_rank_calls_the_function_of_a_module_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "neighbour.py").write_text("NAME = 'told'\n")
    (tmp_path / "work.py").write_text(
        "from pathlib import Path\nfrom neighbour import NAME\n"
        "def work(place, text='none'):\n    Path(place, NAME).write_text(text)\n"
        "if __name__ == '__main__':\n    raise AssertionError\n"
    )
    run_call(str(tmp_path / "work.py"), "work", f'["{tmp_path}", "by order"]')
    assert (tmp_path / "told").read_text() == "by order"
    run_call(str(tmp_path / "work.py"), "work", f'{{"place": "{tmp_path}", "text": "by name"}}')
    assert (tmp_path / "told").read_text() == "by name"
    run_call("os.path", "join", '["a", "b"]')
