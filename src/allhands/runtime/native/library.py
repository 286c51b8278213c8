"""Compile the C code beside this file for this processor, once, and load it.

MLX's CPU wheel is built for any x86-64 processor, and except for BLAS it works on one thread. The
code here uses all instructions and cores of this processor. The library is kept in the user's cache
and checked by hash. It is made again for other code, another compiler or another processor.

Nothing here may import MLX.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_COMPILERS = ("cc", "gcc", "clang")
_FLAGS = (
    "-std=gnu11",
    "-O3",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-fPIC",
    "-shared",
    "-pthread",
)
# A compiler may be killed on a computer that is short of memory. So there are several tries:
# without the library the last bits of a run's numbers differ.
_BUILD_S, _TRIES, _PAUSE_S = 600.0, 3, 0.5
_NAME = "liballhands.so"


def load(directory: Path) -> ctypes.CDLL | str:
    """Load the library, and make it in ``directory`` if it is not there yet.

    Libraries that are loaded later can use its names. The caller must call ``allhands_prepare``
    before anything multiplies.

    Returns:
        The library; or in a few words why there is none, and what to do.
    """
    if not wanted(os.environ):
        return "switched off by ALLHANDS_NATIVE"
    compiler = compiler_here()
    if compiler is None:
        return "no C compiler (install gcc: training is then up to twice as fast)"
    try:
        return ctypes.CDLL(str(_built(directory, compiler)), mode=ctypes.RTLD_GLOBAL)
    except subprocess.CalledProcessError as error:
        last = error.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return f"the C compiler failed: {''.join(last) or error}"
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)


def compiler_here() -> str | None:
    """Return the path of this computer's C compiler, if it has one."""
    return next((found for name in _COMPILERS if (found := shutil.which(name))), None)


def wanted(environ: Mapping[str, str]) -> bool:
    """True unless ``ALLHANDS_NATIVE`` switches native code off."""
    return environ.get("ALLHANDS_NATIVE", "").lower() not in ("off", "0", "none")


def architecture(environ: Mapping[str, str]) -> str:
    """Return the processor to compile for, as a value of the compiler's ``-march``.

    It is this processor, unless ``ALLHANDS_NATIVE`` names another. Name another one for an emulator
    such as valgrind, which may know fewer instructions than Linux says.
    """
    named = environ.get("ALLHANDS_NATIVE", "")
    return "native" if named.lower() in ("", "on", "1") else named


def _built(directory: Path, compiler: str) -> Path:
    sources = sorted(Path(__file__).parent.glob("*.[ch]"))
    flags = (*_FLAGS, f"-march={architecture(os.environ)}")
    code = [str(path) for path in sources if path.suffix == ".c"]
    target = directory / _key(Path(compiler), sources, flags) / _NAME
    return made_once(target, lambda draft: _run([compiler, *flags, *code, "-lm", "-o", str(draft)]))


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """Return ``target``; make it first unless it is there with the hash that is recorded beside it.

    Args:
        make: writes the file to the path that it gets.

    Raises:
        OSError: a file cannot be written; also any exception of ``make``.
    """
    recorded = target.with_suffix(".sha256")

    def is_whole() -> bool:
        return (
            target.exists()
            and recorded.exists()
            and recorded.read_text().strip() == _sha256(target)
        )

    if is_whole():
        return target
    import tempfile  # only here: `import allhands` is a fifth quicker without them

    from allhands.io.staging import publishing

    target.parent.mkdir(parents=True, exist_ok=True)
    # All ranks of a computer start together: one makes the library, and the others take it.
    with publishing(target), tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        if not is_whole():
            draft, digest = Path(scratch) / target.name, Path(scratch) / recorded.name
            make(draft)
            digest.write_text(_sha256(draft) + "\n")
            # Without locks several processes do this: each renaming is atomic, and all files are
            # the same.
            draft.replace(target)
            digest.replace(recorded)
    return target


def _run(command: list[str]) -> None:
    for left in reversed(range(_TRIES)):
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=_BUILD_S)
            return
        except (OSError, subprocess.CalledProcessError):
            if not left:
                raise
        time.sleep(_PAUSE_S)


def _key(compiler: Path, sources: list[Path], flags: tuple[str, ...]) -> str:
    """Return a hash of compiler, code, flags and processor, on which the library depends."""
    stat = compiler.resolve().stat()
    digest = hashlib.sha256(
        f"{compiler.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{flags}:{processor()}".encode()
    )
    for path in sources:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def processor() -> str:
    """Return the names of this processor's instruction sets, from Linux; else its architecture."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return value.strip()
    return platform.machine()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
