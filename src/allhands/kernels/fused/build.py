"""Build CUDA kernels with NVRTC, which MLX has loaded, and keep them for the next process.

MLX builds a custom kernel again in every process, with headers that take longer than the kernel: a
second each. The kernels of this package are built without headers, for the GPU in use, most of them
in 0.1 to 0.5 seconds, and are kept in the user's cache. A file there begins with the hash of its
rest, so that a torn or changed file is built again.
"""

from __future__ import annotations

import ctypes
import hashlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from allhands.errors import AllhandsError
from allhands.io.files import make_directory, write_whole
from allhands.runtime.blas import cache_dir

_LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")
_DIGEST_BYTES = 32


def built(source: str, capability: tuple[int, int]) -> bytes:
    """Return the machine code of ``source`` for GPUs of a compute ``capability``, such as (9, 0).

    Raises:
        RuntimeError: there is no NVRTC, or it does not accept the source.
    """
    options = [f"--gpu-architecture=sm_{capability[0]}{capability[1]}", "--std=c++17"]
    key = hashlib.sha256(
        "\0".join([*map(str, nvrtc_version()), *options, source]).encode()
    ).hexdigest()
    path = cache_dir() / "cuda" / f"{key[:32]}.cubin"
    known = _read(path)
    if known is not None:
        return known
    code = compile_program(source, options)
    with suppress(AllhandsError):  # no home to keep it in: it is built again the next time
        make_directory(path.parent, private=True)
        write_whole(
            path,
            lambda draft: draft.write_bytes(hashlib.sha256(code).digest() + code),
            private=True,
        )
    return code


def _read(path: Path) -> bytes | None:
    """Return the code that was kept at ``path``, if it is whole."""
    with suppress(OSError):
        content = path.read_bytes()
        if hashlib.sha256(content[_DIGEST_BYTES:]).digest() == content[:_DIGEST_BYTES]:
            return content[_DIGEST_BYTES:]
    return None


@cache
def _nvrtc() -> Any:
    for name in _LIBRARIES:
        with suppress(OSError):
            return ctypes.CDLL(name)
    raise RuntimeError(f"none of {', '.join(_LIBRARIES)} can be loaded")


@cache
def nvrtc_version() -> tuple[int, int]:
    """Return major and minor version of NVIDIA's compiler library."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _nvrtc().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def compile_program(source: str, options: list[str]) -> bytes:
    """Return the machine code of a source, as NVIDIA's compiler library makes it."""
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    _check(
        nvrtc.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), b"allhands.cu", 0, None, None
        )
    )
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), words):
            raise RuntimeError(
                f"a kernel cannot be built: {_text(program, 'ProgramLog').decode(errors='replace')}"
            )
        return _text(program, "CUBIN")
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _text(program: ctypes.c_void_p, kind: str) -> bytes:
    """Return NVRTC's output that ``nvrtcGet<kind>`` gives."""
    nvrtc, size = _nvrtc(), ctypes.c_size_t()
    _check(getattr(nvrtc, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)))
    buffer = ctypes.create_string_buffer(size.value)
    _check(getattr(nvrtc, f"nvrtcGet{kind}")(program, buffer))
    return buffer.raw


def _check(outcome: int) -> None:
    if outcome:
        raise RuntimeError(f"NVRTC ended with {outcome}")
