"""Safe directories for the kernels that MLX compiles while it runs.

MLX's CPU back-end compiles kernels with ``g++``, and its CUDA back-end with NVRTC, into
``<temporary directory>/mlx/<version>/cpu`` and ``.../ptx``, and loads any file there that has a
kernel's name. In ``/tmp`` another user can put code there first. A torn file, cut short by a power
cut for instance, kills every later process with SIGBUS, and ranks that share the directory may open
each other's unfinished files.

So a rank gets a temporary directory of its own. It is filled with the whole kernels of a cache in
the user's home, and :func:`publish` copies the rank's new kernels to the cache. A process without a
supervisor uses the cache itself.

MLX looks at TMPDIR, TMP, TEMP and TEMPDIR, in this order (libstdc++). Python and compilers do not
read TEMPDIR: only MLX follows it. Nothing here may import MLX, and no failure here may stop a
program.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import stat
import struct
import sys
import time
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from functools import cache
from pathlib import Path

from allhands.runtime.blas import cache_dir

_CHOICES = ("TMPDIR", "TMP", "TEMP", "TEMPDIR")  # in the order of libstdc++
_KINDS = {
    "cpu": ".so",
    "ptx": ".ptx",
}  # MLX's directory for a kind of kernels, and the suffix of the files that it loads
_DRAFT = ".draft-"
# MLX's environment variables for launching each kernel on an NVIDIA GPU at once. In training the
# host needs more time to make graphs of a hundred kernels than the GPU needs to run them.
_DIRECTLY = {
    "MLX_USE_CUDA_GRAPHS": "0",
    # Depth first. MLX's own order computes up to twenty operations side by side, and recomputes
    # activations for the backward pass long before they are used.
    "MLX_BFS_MAX_WIDTH": "1",
    # Number of attention plans that are kept, one for each shape. MLX ends a process that makes
    # more than twice as many plans in its whole life, unless this check is off.
    "MLX_CUDA_SDPA_CACHE_SIZE": "1024",
    "MLX_CUDA_SDPA_BACKWARD_CACHE_SIZE": "1024",
    "MLX_ENABLE_CACHE_THRASHING_CHECK": "0",
}
# Number of operations after which MLX frees arrays and compares the memory with its limit. The
# second is for a model that hardly fits: a step takes up to 5 % longer (benchmarks/gpu.py,
# pipeline_gpu.py), and blocks of a 70B model hold some gigabytes less. The third is for a limit
# just above the need of a step, so that MLX keeps it (benchmarks/gpu_sharded.py: 13b).
FREED_AFTER, FREED_OFTEN, FREED_AT_ONCE = 28, 14, 5
switched_off: set[str] = set()  # variables that MLX has surely read as "0" in this process
_QUIET_S = 1.0  # age of a file's last write from which on nobody is writing it any more
_TORN_S = 60.0  # the same for torn files in a directory that is not ours alone
_FINISHED = 0o400  # mode of kernels from the cache or copied to it: they are not written to again
_LITTER_S = 3600.0  # age of a draft that a killed compiler or copy has left
_MAX_FILES, _MAX_BYTES = 4096, 256 << 20  # limits of the cache, all versions together
_SEEDS, _SEED_BYTES = 512, 64 << 20  # limits of a rank's directory, because /tmp may be in memory
_TRIM_AGAIN_S = 86400.0

# ELF: <elf.h>, little-endian, 64 bits: the only one for which MLX has wheels.
_ELF64 = b"\x7fELF\x02\x01"
_HEADER = struct.Struct("<16s2H I 3Q I 6H")
_STRING_TABLE = struct.pack("<I", 3)


@cache
def prepare_process() -> None:
    """Call :func:`prepare` for this process, once: when a command, a rank or a training begins."""
    prepare(os.environ)


def prepare(environ: MutableMapping[str, str]) -> None:
    """Lead MLX, which must not be loaded yet, to a directory of kernels that is safe to use.

    In a rank under our supervisor, TMPDIR becomes ``tmp-<rank>`` in the private directory of the
    attempt, with the kernels of the user's cache in it. In other processes TEMPDIR becomes the
    cache. If the person has chosen a directory by one of MLX's four variables, it stays, and only
    this user's torn kernels are removed from it.

    Takes a few milliseconds and never raises. Changes nothing on macOS, if the home cannot be
    written, or if files there must not be executed.
    """
    if sys.platform != "linux":
        return
    with suppress(Exception):  # nothing odd about this computer may stop an import
        if not _prepare_rank(environ):
            _prepare_user(environ)


def publish(environ: Mapping[str, str]) -> int:
    """Copy the whole new kernels of this rank into the user's cache; return their number.

    A kernel is in the cache whole or not at all, whatever other processes do. Without new kernels
    the call takes well under a millisecond. Otherwise it waits for the disk, so a thread that must
    not wait should not make it. Never raises.
    """
    copied = 0
    with suppress(Exception):
        private, version = _rank_directory(environ), _mlx_version()
        if private is None or version is None or environ.get("TMPDIR") != str(private):
            return 0
        if cache := _cache(environ, version):
            for kind in _KINDS:
                copied += _publish_kind(
                    _kernels(private, version, kind), _kernels(cache, version, kind)
                )
            if copied:
                _trim(cache.parent)
    return copied


def _publish_kind(source: Path, target: Path) -> int:
    known, copied = set(_names(target)), 0
    for path in (source / name for name in _names(source) if name not in known):
        # Not a kernel that came from the cache and was removed there for its age. Not a torn one:
        # it may still be being written, and its directory is removed with the attempt.
        status = path.stat()
        if _is_finished(status) or _age(status) < _QUIET_S or not _whole(path):
            continue
        for part in _parts(path):
            _copy(part, target / part.name)
        path.chmod(_FINISHED)
        copied += 1
    return copied


def _prepare_rank(environ: MutableMapping[str, str]) -> bool:
    """Give a rank its own directory; return True if it has one now."""
    private = _rank_directory(environ)
    if private is None:
        return False
    if environ.get("TMPDIR") == str(private) and private.is_dir():
        return True  # a child of the rank: its parent has done this
    private.mkdir(mode=0o700, exist_ok=True)
    environ["TMPDIR"] = str(private)
    version = _mlx_version()
    if version and (cache := _cache(environ, version)):
        for kind in _KINDS:
            _seed(_kernels(cache, version, kind), _kernels(private, version, kind))
    return True


def _rank_directory(environ: Mapping[str, str]) -> Path | None:
    run_dir, rank = environ.get("ALLHANDS_RUN_DIR"), environ.get("ALLHANDS_RANK", "")
    if (
        not run_dir
        or not rank.isdecimal()
        or not _is_ours(Path(run_dir))
        or not _is_usable(Path(run_dir))
    ):
        return None
    return Path(run_dir, f"tmp-{rank}")


def _prepare_user(environ: MutableMapping[str, str]) -> None:
    version = _mlx_version()
    if version is None:
        return
    base, quiet_s = (
        Path(next((environ[name] for name in _CHOICES if name in environ), "/tmp")),
        _TORN_S,
    )
    if not any(name in environ for name in _CHOICES[:-1]):
        cache = _cache(environ, version)
        # A parent process of ours may have set TEMPDIR, for another MLX.
        if cache is not None and ("TEMPDIR" not in environ or base.parent == cache.parent):
            base, quiet_s = cache, _QUIET_S
            environ["TEMPDIR"] = str(cache)
            _trim_daily(cache.parent)
    for kind in _KINDS:
        list(_whole_kernels(_kernels(base, version, kind), quiet_s))


def _seed(source: Path, target: Path) -> None:
    """Put the newest kernels of ``source`` into ``target``, by links where that is possible."""
    whole = sorted(
        _whole_kernels(source, _QUIET_S), key=lambda each: each[1].st_mtime_ns, reverse=True
    )[:_SEEDS]
    if whole:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
    left = _SEED_BYTES
    for path, status in whole:
        left -= status.st_size
        if left < 0:
            return
        if not _is_finished(status):
            path.chmod(_FINISHED)
        for part in _parts(path):
            _link(part, target / part.name)


def _link(source: Path, target: Path) -> None:
    # MLX writes NVRTC's files in place: through a link others would see them unfinished.
    if source.suffix == ".so":
        try:
            os.link(source, target, follow_symlinks=False)
        except FileExistsError:
            return
        except OSError:  # on another file system, or without hard links
            pass
        else:
            return
    shutil.copy2(source, target)


def _copy(source: Path, target: Path) -> None:
    """Make ``target`` a copy of ``source`` that survives a power cut.

    Raises:
        OSError: it cannot be written; ``target`` is unchanged.
    """
    draft = target.parent / f"{_DRAFT}{os.urandom(8).hex()}"
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file, source.open("rb") as original:
            shutil.copyfileobj(original, file)
            file.flush()
            os.fchmod(descriptor, _FINISHED)
            os.fsync(file.fileno())
        draft.replace(target)
    finally:
        draft.unlink(missing_ok=True)


# --- kernels in a directory -----------------------------------------------------------------------


def _kernels(base: Path, version: str, kind: str) -> Path:
    return base / "mlx" / version / kind


def _names(directory: Path) -> Iterator[str]:
    """Yield the names of kernels; on the CPU MLX uses another name until a kernel is finished."""
    ending = _KINDS[directory.name]
    with suppress(OSError):
        for name in os.listdir(directory):
            if name.endswith(ending) and (ending != ".so" or name.startswith("lib")):
                yield name


def _whole_kernels(directory: Path, quiet_s: float) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield this user's whole kernels, and remove torn ones on the way.

    Kernels that were written to in the last ``quiet_s`` seconds are left out.
    """
    for name in _names(directory):
        with suppress(OSError):
            status = os.lstat(path := directory / name)
            if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
                continue
            if _age(status) < quiet_s and not _is_finished(status):
                continue
            if _whole(path):
                yield path, status
            else:
                path.unlink()


def _parts(path: Path) -> tuple[Path, ...]:
    """Return the files of a kernel; the last is the one that MLX looks for."""
    return (path,) if path.suffix == ".so" else (path.with_suffix(".txt"), path)


def _is_finished(status: os.stat_result) -> bool:
    return stat.S_IMODE(status.st_mode) == _FINISHED


def _age(status: os.stat_result) -> float:
    return abs(
        time.time() - status.st_mtime
    )  # a clock that was set back must not make a file new for ever


def _whole(path: Path) -> bool:
    """True if no file of a kernel is torn; False, too, if a file cannot be read."""
    try:
        with path.open("rb") as file:
            whole = (
                _is_whole_elf(file.fileno())
                if path.suffix == ".so"
                else _is_whole_program(file.fileno())
            )
        return whole and all(part.read_bytes().endswith(b"\n") for part in _parts(path)[:-1])
    except (OSError, struct.error):
        return False


def _is_whole_elf(descriptor: int) -> bool:
    """True if an ELF file is whole: the tables of segments and sections, the last parts of the
    file, lie within it.
    """
    size = os.fstat(descriptor).st_size
    start = os.pread(descriptor, 4096, 0)
    if not start.startswith(_ELF64):
        return start.startswith(b"\x7fELF") and len(start) > len(
            _ELF64
        )  # another kind of ELF, which cannot be judged here
    fields = _HEADER.unpack_from(start)
    segments, sections, segment_bytes, count, section_bytes, number, names = (
        *fields[5:7],
        *fields[9:14],
    )
    if sections + number * section_bytes > size or segments + count * segment_bytes > size:
        return False
    # After a power cut a file may have its length but not its contents: then this is zero.
    return (
        not number or os.pread(descriptor, 4, sections + names * section_bytes + 4) == _STRING_TABLE
    )


def _is_whole_program(descriptor: int) -> bool:
    """True if a program for the GPU is whole: machine code in ELF, or text that ends with a
    function's brace.
    """
    if os.pread(descriptor, 4, 0) == _ELF64[:4]:
        return _is_whole_elf(descriptor)
    end = os.pread(descriptor, 16, max(0, os.fstat(descriptor).st_size - 16))
    return end.rstrip(b"\0\r\n\t ").endswith(b"}")


# --- the user's cache -----------------------------------------------------------------------------


def _cache(environ: Mapping[str, str], version: str) -> Path | None:
    """Return the user's kernel directory for this MLX on this computer, made if need be; ``None``
    if there is no safe directory.
    """
    with suppress(OSError, RuntimeError):  # RuntimeError: there is no home
        chosen = environ.get("ALLHANDS_KERNEL_CACHE")
        root = Path(os.path.expanduser(chosen)) if chosen else cache_dir(environ) / "kernels"
        if not _is_plain(root):
            return None
        path = root / f"{version}-{_machine(environ)}"
        kinds = [_kernels(path, version, kind) for kind in _KINDS]
        for level in (level for kind in kinds for level in (*reversed(kind.parents), kind)):
            if not level.exists():
                level.mkdir(mode=0o700, exist_ok=True)
        ours = all(map(_is_ours, (root, path, path / "mlx", path / "mlx" / version, *kinds)))
        if ours and not any(map(_is_open_to_all, root.parents)) and _is_usable(path):
            return path
    return None


def _machine(environ: Mapping[str, str]) -> str:
    """Return a name for the properties of this computer on which kernels depend; computers with
    different properties may share a home.

    These are the processor's family (MLX compiles for the basic instruction set), the C library,
    the compiler, and for CUDA the driver and the models of the GPUs.
    """
    identity = [
        os.uname().machine,
        os.confstr("CS_GNU_LIBC_VERSION") if "CS_GNU_LIBC_VERSION" in os.confstr_names else "",
    ]
    if compiler := shutil.which("g++", path=environ.get("PATH")):
        status = os.stat(compiler)
        identity.append(f"{os.path.realpath(compiler)} {status.st_size} {status.st_mtime_ns}")
    devices = sorted(str(path) for path in Path("/sys/bus/pci/drivers/nvidia").glob("*:*/device"))
    for name in ("/proc/driver/nvidia/version", *devices):
        with suppress(OSError):
            identity.append(Path(name).read_text())
    return f"{os.uname().machine}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:12]}"


def _mlx_version() -> str | None:
    """Return MLX's version as in its paths, from the names in site-packages; importlib.metadata
    would take far longer.
    """
    spec = importlib.util.find_spec("mlx")
    for package in (spec.submodule_search_locations or ()) if spec else ():
        with suppress(OSError):
            for name in os.listdir(os.path.dirname(package)):
                if found := re.fullmatch(r"mlx-(.+)\.dist-info", name):
                    return found[1]
    return None


def _is_ours(path: Path) -> bool:
    """True if ``path`` is a directory of this user that nobody else can write to."""
    with suppress(OSError):
        status = os.lstat(path)
        return (
            stat.S_ISDIR(status.st_mode)
            and status.st_uid == os.geteuid()
            and not status.st_mode & 0o022
        )
    return False


def _is_open_to_all(path: Path) -> bool:
    """True if any user could replace a directory in ``path``."""
    mode = os.stat(path).st_mode
    return bool(mode & stat.S_IWOTH) and not mode & stat.S_ISVTX


def _is_plain(path: Path) -> bool:
    """True if the path is absolute and safe in double quotes, in which MLX gives it to a shell."""
    return path.is_absolute() and not set(str(path)) & set('"$`\\!\n')


def _is_usable(path: Path) -> bool:
    """True if MLX can write to ``path``, and load compiled code from there."""
    return (
        _is_plain(path) and os.access(path, os.W_OK) and not os.statvfs(path).f_flag & os.ST_NOEXEC
    )


def _trim_daily(root: Path) -> None:
    marker = root / "trimmed"
    with suppress(OSError):
        if time.time() - marker.stat().st_mtime < _TRIM_AGAIN_S:
            return
    _trim(root)
    marker.touch(mode=0o600)


def _trim(root: Path) -> None:
    """Remove abandoned drafts, then the oldest kernels until the cache is within its limits."""
    files: list[tuple[float, int, Path]] = []
    for folder, _, names in os.walk(root):
        for path in (Path(folder, name) for name in names):
            with suppress(OSError):
                status = os.lstat(path)
                if path.name.startswith((_DRAFT, "tmp_")) and _age(status) > _LITTER_S:
                    path.unlink()
                elif path.parent != root:
                    files.append((status.st_mtime, status.st_size, path))
    files.sort()
    count, size = len(files), sum(each[1] for each in files)
    for _, length, path in files:
        if count <= _MAX_FILES and size <= _MAX_BYTES:
            return
        with suppress(OSError):
            path.with_suffix(".ptx").unlink(
                missing_ok=True
            )  # first, because it is of no use without its list of names
            path.unlink(missing_ok=True)
        count, size = count - 1, size - length


def launch_directly(
    environ: MutableMapping[str, str],
    *,
    untouched: bool,
    deterministic: bool = False,
    freed_after: int = FREED_AFTER,
) -> bool:
    """Set MLX's environment variables for launching kernels on NVIDIA GPUs as training needs it.

    Variables that a person has set stay as they are. MLX reads them once, when it computes for the
    first time. Nothing is done outside Linux, because one of them changes Metal's command buffers.

    Args:
        untouched: True if MLX has not computed anything in this process yet.
        deterministic: True if all sums must be made in the same order every time. Then attention
            without cuDNN is used: cuDNN adds up its gradient in any order. All other operations in
            the training of dense models have a fixed order.
        freed_after: number of operations after which memory is freed.

    Returns:
        True if MLX's sums will have a fixed order, or if ``deterministic`` is false.
    """
    if sys.platform != "linux":
        return True
    environ.setdefault("MLX_MAX_OPS_PER_BUFFER", str(freed_after))
    for name, value in _DIRECTLY.items():
        environ.setdefault(name, value)
    if deterministic:
        environ["MLX_CUDA_USE_CUDNN_SDPA"] = "0"
    read = environ if untouched else environ_at_start()
    for name in ("MLX_USE_CUDA_GRAPHS", "MLX_CUDA_USE_CUDNN_SDPA"):
        if read.get(name) == "0":
            switched_off.add(name)
    return not deterministic or "MLX_CUDA_USE_CUDNN_SDPA" in switched_off


def attends_by_cudnn() -> bool:
    """True if MLX may compute attention on an NVIDIA GPU by cuDNN: not with ``--deterministic``."""
    return "MLX_CUDA_USE_CUDNN_SDPA" not in switched_off


def environ_at_start() -> dict[str, str]:
    """Return the environment variables with which this process was started; none if unknown."""
    try:
        pairs = os.fsdecode(Path("/proc/self/environ").read_bytes()).split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def launches_directly() -> bool:
    """True if kernels on an NVIDIA GPU surely run one after the other, in the order of their
    launches.
    """
    return "MLX_USE_CUDA_GRAPHS" in switched_off
