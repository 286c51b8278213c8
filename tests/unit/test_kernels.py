"""The cache of MLX's kernels: what counts as whole, who gets what, and what is refused."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from allhands.runtime import jit_cache

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="MLX compiles kernels like this on Linux only"
)

VERSION = importlib.metadata.version("mlx")
LIBRARY = min(Path(np.__file__).parent.rglob("*.so"), key=lambda path: path.stat().st_size)
PROGRAM = b"// made by NVRTC\n.visible .entry f()\n{\n\tret;\n}\n\0"


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    return {
        "ALLHANDS_KERNEL_CACHE": str(tmp_path / "cache" / "kernels"),
        "PATH": os.environ["PATH"],
    }


@pytest.fixture
def cache(environ: dict[str, str]) -> Path:
    """The directory that MLX would be led to."""
    inside = dict(environ)
    jit_cache.prepare(inside)
    return Path(inside["TEMPDIR"])


@pytest.fixture
def rank(environ: dict[str, str], tmp_path: Path) -> dict[str, str]:
    run_dir = tmp_path / "run"
    run_dir.mkdir(mode=0o700)
    return environ | {"ALLHANDS_RUN_DIR": str(run_dir), "ALLHANDS_RANK": "3"}


def put(base: Path, name: str, *, part: float = 1.0, age_s: float = 100.0) -> Path:
    """A kernel's file below ``base``, the first ``part`` of it, last written ``age_s`` ago."""
    kind = "cpu" if name.endswith(".so") else "ptx"
    content = {".so": LIBRARY.read_bytes(), ".ptx": PROGRAM, ".txt": b"f\tf\n"}[Path(name).suffix]
    path = base / "mlx" / VERSION / kind / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content[: round(len(content) * part)])
    os.utime(path, times=(time.time() - age_s, time.time() - age_s))
    return path


def names(base: Path, kind: str = "cpu") -> set[str]:
    directory = base / "mlx" / VERSION / kind
    return set(os.listdir(directory)) if directory.is_dir() else set()


# --- wholeness ------------------------------------------------------------------------------------


@pytest.mark.parametrize("twentieth", range(20))
def test_a_library_cut_short_anywhere_is_not_whole(
    tmp_path: Path, environ: dict[str, str], twentieth: int
) -> None:
    put(tmp_path, "liba.so")
    torn = put(tmp_path, "libb.so", part=twentieth / 20)
    assert torn.stat().st_size < LIBRARY.stat().st_size
    jit_cache.prepare(environ | {"TMPDIR": str(tmp_path)})
    assert names(tmp_path) == {"liba.so"}


def test_a_library_without_its_last_byte_or_with_an_empty_end_is_not_whole(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    content = LIBRARY.read_bytes()
    put(tmp_path, "libwhole.so")
    for name, torn in {"liba.so": content[:-1], "libb.so": content[:-4096] + bytes(4096)}.items():
        path = put(tmp_path, name)
        path.write_bytes(torn)
        os.utime(path, times=(time.time() - 100, time.time() - 100))
    jit_cache.prepare(environ | {"TMPDIR": str(tmp_path)})
    assert names(tmp_path) == {"libwhole.so"}


def test_a_program_for_the_gpu_is_whole_with_its_end_and_its_list_of_names(
    tmp_path: Path, environ: dict[str, str]
) -> None:
    for stem, part, listed in (
        ("whole", 1.0, 1.0),
        ("cut", 0.6, 1.0),
        ("unlisted", 1.0, 0.5),
        ("empty", 0.0, 1.0),
    ):
        put(tmp_path, f"{stem}.ptx", part=part)
        put(tmp_path, f"{stem}.txt", part=listed)
    put(tmp_path, "alone.ptx")
    jit_cache.prepare(environ | {"TMPDIR": str(tmp_path)})
    assert {name for name in names(tmp_path, "ptx") if name.endswith(".ptx")} == {"whole.ptx"}


# --- a process without a supervisor ---------------------------------------------------------------


def test_the_cache_is_private_and_where_mlx_looks(environ: dict[str, str], cache: Path) -> None:
    root = Path(environ["ALLHANDS_KERNEL_CACHE"])
    assert cache.parent == root
    assert cache.name.startswith(f"{VERSION}-")
    level = cache / "mlx" / VERSION / "cpu"
    assert level.is_dir()
    while level != root.parent.parent:
        assert level.stat().st_mode & 0o777 == 0o700, level
        level = level.parent


def test_torn_kernels_in_the_cache_are_removed(environ: dict[str, str], cache: Path) -> None:
    for name, part, age_s in (("liba.so", 1.0, 100), ("libb.so", 0.5, 100), ("libc.so", 0.5, 0)):
        put(cache, name, part=part, age_s=age_s)
    jit_cache.prepare(environ)
    assert names(cache) == {"liba.so", "libc.so"}  # the last one may still be being written
    assert environ["TEMPDIR"] == str(cache)
    assert "TMPDIR" not in environ


@pytest.mark.parametrize("variable", ["TMPDIR", "TMP", "TEMP", "TEMPDIR"])
def test_a_persons_directory_is_left_but_for_old_torn_kernels(
    tmp_path: Path, environ: dict[str, str], variable: str
) -> None:
    chosen = tmp_path / "chosen"
    for name, part, age_s in (("liba.so", 1.0, 100), ("libb.so", 0.5, 100), ("libc.so", 0.5, 30)):
        put(chosen, name, part=part, age_s=age_s)
    (chosen / "mlx" / VERSION / "cpu" / "notes.txt").write_text("torn?")
    environ[variable] = str(chosen)
    before = dict(environ)
    jit_cache.prepare(environ)
    assert environ == before
    assert names(chosen) == {"liba.so", "libc.so", "notes.txt"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_others_files_and_directories_are_not_touched_and_not_used(
    tmp_path: Path, environ: dict[str, str], cache: Path
) -> None:
    torn = put(tmp_path / "chosen", "libb.so", part=0.5)
    os.chown(torn, 12345, 12345)
    jit_cache.prepare(environ | {"TMPDIR": str(tmp_path / "chosen")})
    assert torn.exists()
    os.chown(cache / "mlx", 12345, 12345)
    before = dict(environ)
    jit_cache.prepare(environ)
    assert environ == before


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_cache_that_others_can_write_to_is_not_used(
    environ: dict[str, str], cache: Path, mode: int
) -> None:
    cache.chmod(mode)
    before = dict(environ)
    jit_cache.prepare(environ)
    assert environ == before


def test_a_cache_that_others_can_replace_or_that_is_a_link_is_not_used(
    environ: dict[str, str], cache: Path
) -> None:
    above = cache.parent.parent
    above.chmod(0o777)
    jit_cache.prepare(environ)
    assert "TEMPDIR" not in environ
    above.chmod(0o700)
    cache.rename(above / "elsewhere")
    cache.symlink_to(above / "elsewhere")
    jit_cache.prepare(environ)
    assert "TEMPDIR" not in environ


@pytest.mark.parametrize("cache_home", ["/proc/nowhere", "relative", '/tmp/allhands-$(touch x)"'])
def test_without_a_usable_home_nothing_changes(
    cache_home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    environ = {"XDG_CACHE_HOME": cache_home}
    jit_cache.prepare(environ)
    assert environ == {"XDG_CACHE_HOME": cache_home}
    assert not Path(cache_home).exists()


def test_without_any_home_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    environ: dict[str, str] = {}
    jit_cache.prepare(environ)
    assert environ == {}


def test_without_a_compiler_there_is_a_cache_of_its_own(
    environ: dict[str, str], cache: Path, tmp_path: Path
) -> None:
    bare = environ | {"PATH": str(tmp_path)}
    jit_cache.prepare(bare)
    assert Path(bare["TEMPDIR"]).parent == cache.parent
    assert (Path(bare["TEMPDIR"]) == cache) == (shutil.which("g++") is None)


def test_a_child_process_follows_its_own_mlx(environ: dict[str, str], cache: Path) -> None:
    child = environ | {"TEMPDIR": str(cache.parent / "0.1-another")}
    jit_cache.prepare(child)
    assert child["TEMPDIR"] == str(cache)


# --- ranks ----------------------------------------------------------------------------------------


def test_a_rank_gets_a_directory_of_its_own_with_all_whole_kernels(
    rank: dict[str, str], cache: Path
) -> None:
    linked = put(cache, "liba.so")
    put(cache, "libtorn.so", part=0.5)
    put(cache, "libunfinished.so", age_s=0.0)
    put(cache, "tmp_0123abcd.so")
    put(cache, "f.ptx")
    put(cache, "f.txt")
    jit_cache.prepare(rank)
    private = Path(rank["TMPDIR"])
    assert private == Path(rank["ALLHANDS_RUN_DIR"], "tmp-3")
    assert private.stat().st_mode & 0o777 == 0o700
    assert names(private) == {"liba.so"}
    assert (private / "mlx" / VERSION / "cpu" / "liba.so").samefile(linked)
    assert names(private, "ptx") == {"f.ptx", "f.txt"}
    assert not (private / "mlx" / VERSION / "ptx" / "f.ptx").samefile(
        cache / "mlx" / VERSION / "ptx" / "f.ptx"
    )
    assert "TEMPDIR" not in rank


def test_kernels_are_copied_where_they_cannot_be_linked(
    rank: dict[str, str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[str] = []

    def link(source: Path, target: Path, **_: object) -> None:
        tried.append(target.name)
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", link)
    put(cache, "liba.so")
    jit_cache.prepare(rank)
    assert tried == ["liba.so"]
    assert (
        Path(rank["TMPDIR"], "mlx", VERSION, "cpu", "liba.so").read_bytes() == LIBRARY.read_bytes()
    )


def test_a_run_directory_that_others_can_write_to_is_not_used(
    rank: dict[str, str], cache: Path
) -> None:
    Path(rank["ALLHANDS_RUN_DIR"]).chmod(0o777)
    jit_cache.prepare(rank)
    assert "TMPDIR" not in rank
    assert rank["TEMPDIR"] == str(cache)


def test_a_rank_works_without_a_cache(rank: dict[str, str]) -> None:
    rank["ALLHANDS_KERNEL_CACHE"] = "/proc/nowhere"
    jit_cache.prepare(rank)
    put(Path(rank["TMPDIR"]), "liba.so")
    assert jit_cache.publish(rank) == 0


def test_what_is_whole_and_new_is_published_once(rank: dict[str, str], cache: Path) -> None:
    put(cache, "libold.so")
    jit_cache.prepare(rank)
    private = Path(rank["TMPDIR"])
    put(private, "liba.so")
    put(private, "libtorn.so", part=0.9)
    put(private, "libyoung.so", age_s=0.2)
    put(private, "tmp_0123abcd.so")
    put(private, "f.ptx")
    put(private, "f.txt")
    put(private, "unlisted.ptx")
    assert jit_cache.publish(rank) == 2
    assert names(cache) == {"libold.so", "liba.so"}
    assert names(cache, "ptx") == {"f.ptx", "f.txt"}
    published = cache / "mlx" / VERSION / "cpu" / "liba.so"
    assert published.read_bytes() == LIBRARY.read_bytes()
    assert published.stat().st_nlink == 1  # what the rank does to its own file does not reach it
    assert jit_cache.publish(rank) == 0
    time.sleep(0.9)
    assert jit_cache.publish(rank) == 1
    assert names(cache) == {"libold.so", "liba.so", "libyoung.so"}


def test_only_ranks_publish(environ: dict[str, str], rank: dict[str, str], cache: Path) -> None:
    put(cache, "liba.so")
    assert jit_cache.publish(environ) == 0
    assert jit_cache.publish(rank) == 0  # not prepared


def test_a_rank_that_starts_at_once_gets_what_was_just_published(
    rank: dict[str, str], cache: Path
) -> None:
    jit_cache.prepare(rank)
    put(Path(rank["TMPDIR"]), "liba.so")
    assert jit_cache.publish(rank) == 1
    following = rank | {"ALLHANDS_RANK": "4"}
    jit_cache.prepare(following)
    assert names(Path(following["TMPDIR"])) == {"liba.so"}
    shutil.rmtree(cache / "mlx")
    assert jit_cache.publish(following) == 0


def test_nothing_is_published_by_halves(
    rank: dict[str, str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jit_cache.prepare(rank)
    put(Path(rank["TMPDIR"]), "liba.so")
    synced: list[int] = []

    def full(descriptor: int) -> None:
        synced.append(descriptor)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert jit_cache.publish(rank) == 0
    assert len(synced) == 1
    assert names(cache) == set()


def test_the_oldest_kernels_go_when_there_are_too_many(
    rank: dict[str, str], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age_s in range(10, 20):
        put(cache, f"lib{age_s}.so", age_s=age_s)
    put(cache, "tmp_0123abcd.so", age_s=7200)
    monkeypatch.setattr(jit_cache, "_MAX_FILES", 4)
    jit_cache.prepare(rank)
    put(Path(rank["TMPDIR"]), "libnew.so")
    assert jit_cache.publish(rank) == 1
    assert names(cache) == {"libnew.so", "lib10.so", "lib11.so", "lib12.so"}
    monkeypatch.setattr(jit_cache, "_MAX_BYTES", 2 * LIBRARY.stat().st_size)
    put(Path(rank["TMPDIR"]), "libnewer.so")
    assert jit_cache.publish(rank) == 1  # those that are gone do not come back
    assert names(cache) == {"libnew.so", "libnewer.so"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The variables that this process was started with, of which MLX is not known to have read any."""
    begun = dict[str, str]()
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(jit_cache, "switched_off", set[str]())
    monkeypatch.setattr(jit_cache, "environ_at_start", lambda: begun)
    return begun


def test_a_person_s_own_launching_is_kept(
    started: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"MLX_MAX_OPS_PER_BUFFER": "7"}
    assert jit_cache.launch_directly(environ, untouched=True, freed_after=14)
    assert (environ["MLX_MAX_OPS_PER_BUFFER"], environ["MLX_USE_CUDA_GRAPHS"]) == ("7", "0")
    # MLX ends a process that has planned attention for more shapes than twice what it keeps.
    assert environ["MLX_ENABLE_CACHE_THRASHING_CHECK"] == "0"
    assert (
        int(environ["MLX_CUDA_SDPA_CACHE_SIZE"])
        == int(environ["MLX_CUDA_SDPA_BACKWARD_CACHE_SIZE"])
        >= 1024
    )
    assert "MLX_CUDA_USE_CUDNN_SDPA" not in environ
    asked = {"MLX_CUDA_USE_CUDNN_SDPA": "1"}  # the option says more clearly what is wanted
    assert jit_cache.launch_directly(asked, untouched=True, deterministic=True)
    assert asked["MLX_CUDA_USE_CUDNN_SDPA"] == "0"
    usual, often = dict[str, str](), dict[str, str]()
    jit_cache.launch_directly(usual, untouched=True)
    jit_cache.launch_directly(often, untouched=True, freed_after=14)
    assert int(often["MLX_MAX_OPS_PER_BUFFER"]) == 14 < int(usual["MLX_MAX_OPS_PER_BUFFER"])
    # Metal would cut its commands by one of them.
    monkeypatch.setattr(sys, "platform", "darwin")
    elsewhere: dict[str, str] = {}
    jit_cache.launch_directly(elsewhere, untouched=True)
    assert elsewhere == {}


@pytest.mark.parametrize(
    ("untouched", "begun", "own", "expected"),
    [
        (True, {}, {}, True),
        (True, {}, {"MLX_USE_CUDA_GRAPHS": "1"}, False),
        (False, {}, {}, False),
        (False, {}, {"MLX_USE_CUDA_GRAPHS": "0"}, False),  # set too late, maybe
        (False, {"MLX_USE_CUDA_GRAPHS": "0"}, {"MLX_USE_CUDA_GRAPHS": "0"}, True),
    ],
)
def test_kernels_run_in_order_only_if_mlx_was_told_before_its_first(
    started: dict[str, str],
    untouched: bool,
    begun: dict[str, str],
    own: dict[str, str],
    expected: bool,
) -> None:
    """What is computed in the memory of its input would be read too early in a graph."""
    started.update(begun)
    assert not jit_cache.launches_directly()
    jit_cache.launch_directly(dict(own), untouched=untouched)
    assert jit_cache.launches_directly() is expected
    # A second training of the process knows what MLX has read.
    jit_cache.launch_directly(dict(own), untouched=False)
    assert jit_cache.launches_directly() is expected


def test_sums_in_order_cannot_be_asked_for_after_the_first(started: dict[str, str]) -> None:
    assert not jit_cache.launch_directly({}, untouched=False, deterministic=True)
    started["MLX_CUDA_USE_CUDNN_SDPA"] = "0"
    assert jit_cache.launch_directly({}, untouched=False, deterministic=True)


def test_the_variables_of_the_start_are_known(tmp_path: Path) -> None:
    code = "import os; os.environ['ADDED'] = '0'; from allhands.runtime import jit_cache as j; e = j.environ_at_start()"
    environ = {**os.environ, "GIVEN": "0"}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print(e.get('GIVEN'), e.get('ADDED'))"],
        env=environ, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.split() == ["0", "None"]
