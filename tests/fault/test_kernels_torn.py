"""Torn and shared kernels with the real MLX: what kills a process without care does not with it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux", reason="MLX compiles kernels like this on Linux only"
    ),
    pytest.mark.skipif(shutil.which("g++") is None, reason="without g++ MLX compiles no kernels"),
]

COMPUTE = """
import mlx.core as mx
mx.set_default_device(mx.cpu)
print(mx.compile(lambda x: mx.abs(x) * 2 + 1)(mx.array([1.0, -2.0, 3.0])).tolist())
"""
PREPARE = (
    "import os; from allhands.runtime.jit_cache import prepare, publish; prepare(os.environ)\n"
)
PUBLISH = "import time; time.sleep(1.1); publish(os.environ)\n"
RESULT = "[3.0, 5.0, 7.0]"
# Takes the place of g++: hands out the library that the real one made, in two halves, and notes
# where to.
COMPILER = """#!/bin/sh
[ "$1" = --version ] && exit 0
for last; do :; done
echo "$last" >> {log}
head -c 5000 {library} > "$last"
sleep 0.2
tail -c +5001 {library} >> "$last"
"""


def environment(**chosen: str) -> dict[str, str]:
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith(("ALLHANDS_", "T"))
    }
    return inherited | chosen


def start(script: str, **chosen: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", script]
    return subprocess.Popen(
        command,
        env=environment(**chosen),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def run(script: str, **chosen: str) -> tuple[int, str]:
    with start(script, **chosen) as process:
        output, _ = process.communicate(timeout=120)
        return process.returncode, output.strip()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A temporary directory in which MLX has compiled its one kernel."""
    base = tmp_path_factory.mktemp("compiled")
    assert run(COMPUTE, TMPDIR=str(base)) == (0, RESULT)
    return base


def kernel(base: Path) -> Path:
    (found,) = base.glob("mlx/*/cpu/lib*.so")
    return found


def tear(base: Path) -> None:
    path = kernel(base)
    os.truncate(path, path.stat().st_size // 4)
    os.utime(path, times=(time.time() - 100, time.time() - 100))


def test_a_torn_kernel_kills_a_process_unless_it_is_removed(compiled: Path, tmp_path: Path) -> None:
    base = tmp_path / "chosen"
    shutil.copytree(compiled, base)
    tear(base)
    for _ in range(2):  # and every later one
        code, output = run(COMPUTE, TMPDIR=str(base))
        assert code == -7  # SIGBUS; a shell says 135
        assert output == ""
    assert run(PREPARE + COMPUTE, TMPDIR=str(base)) == (0, RESULT)
    assert kernel(base).stat().st_size == kernel(compiled).stat().st_size


def test_a_torn_kernel_in_the_users_cache_harms_nobody(compiled: Path, tmp_path: Path) -> None:
    chosen = {"ALLHANDS_KERNEL_CACHE": str(tmp_path / "cache")}
    _, place = run(PREPARE + "print(os.environ['TEMPDIR'])", **chosen)
    shutil.copytree(compiled, place, dirs_exist_ok=True)
    tear(Path(place))
    assert run(COMPUTE, TEMPDIR=place)[0] == -7
    assert run(PREPARE + COMPUTE, **chosen) == (0, RESULT)
    tear(Path(place))
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    rank = {"ALLHANDS_RUN_DIR": str(run_dir), "ALLHANDS_RANK": "0"}
    assert run(PREPARE + COMPUTE + PUBLISH, **chosen, **rank) == (0, RESULT)
    assert kernel(Path(place)).read_bytes() == kernel(run_dir / "tmp-0").read_bytes()


def test_ranks_that_start_together_compile_apart_and_the_next_do_not_compile(
    compiled: Path, tmp_path: Path
) -> None:
    log, tools = tmp_path / "compiled.log", tmp_path / "bin"
    tools.mkdir()
    (tools / "g++").write_text(COMPILER.format(log=log, library=kernel(compiled)))
    (tools / "g++").chmod(0o755)
    chosen = {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "ALLHANDS_KERNEL_CACHE": str(tmp_path / "cache"),
    }
    for attempt in range(5):
        run_dir = tmp_path / f"run-{attempt}"
        run_dir.mkdir(mode=0o700)
        script = PREPARE + COMPUTE + (PUBLISH if attempt == 3 else "")
        ranks = [
            start(script, ALLHANDS_RUN_DIR=str(run_dir), ALLHANDS_RANK=str(rank), **chosen)
            for rank in range(2)
        ]
        for process in ranks:
            output, errors = process.communicate(timeout=120)
            assert (process.returncode, output.strip()) == (0, RESULT), errors
        outputs = [Path(line) for line in log.read_text().splitlines()]
        folders = {Path(str(path).removeprefix(str(run_dir))).parts[1] for path in outputs}
        if attempt < 4:  # a cold cache: nothing has been published
            assert folders == {"tmp-0", "tmp-1"}
            assert len(outputs) == 2
        else:
            assert len(outputs) == 0
        log.write_text("")


def test_where_files_must_not_be_executed_nothing_is_changed(tmp_path: Path) -> None:
    base = tmp_path / "noexec"
    base.mkdir(mode=0o700)
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "noexec,mode=0700", "none", str(base)],
        check=False,
        capture_output=True,
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount")
    try:
        place = {
            "ALLHANDS_KERNEL_CACHE": str(base / "cache"),
            "ALLHANDS_RUN_DIR": str(base),
            "ALLHANDS_RANK": "0",
        }
        assert run(PREPARE + COMPUTE + "print({'TMPDIR', 'TEMPDIR'} & set(os.environ))", **place)[
            1
        ] == (f"{RESULT}\nset()")
    finally:
        subprocess.run(["umount", str(base)], check=True)
