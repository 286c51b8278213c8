"""Kernels for NVIDIA GPUs: every one is accepted by the compiler, and what is kept on disk is whole
or built again.
"""

from __future__ import annotations

import ctypes
import stat
from importlib.util import find_spec
from pathlib import Path

import mlx.core as mx
import pytest

from allhands.kernels.fused import build, cuda, kernels

CONSTANTS = [
    ("dequantize", {"GROUP": 64}),
    ("take_rows", {"D": 2048}),
    ("put_rows", {"D": 2048}),
    ("scale_by", {}),
    ("spread", {"SCALE": 20.0}),
    ("collect", {"SCALE": 0.1}),
    ("add_rows", {"D": 2048, "THREADS": 256, "ONTO": 0}),
    ("add_rows", {"D": 2048, "THREADS": 256, "ONTO": 1}),
    ("swiglu", {"F": 8192}),
    ("swiglu_vjp", {"F": 8192, "AGAIN": 0}),
    ("swiglu_vjp", {"F": 8192, "AGAIN": 1}),
    ("swiglu_adapted", {"F": 8192, "R": 16, "GATE": 8, "UP": 8}),
    ("swiglu_adapted_vjp", {"F": 8192, "R": 16, "GATE": 8, "UP": 8, "DOWN": 8}),
    ("swiglu_adapted", {"F": 8192, "R": 36, "GATE": 32, "UP": 4}),
    ("swiglu_adapted_vjp", {"F": 8192, "R": 64, "GATE": 32, "UP": 32, "DOWN": 32}),
    ("rope", {"H": 32, "KV": 8, "D": 64, "NORMED": 0, "EPS": 0.0}),
    ("rope", {"H": 16, "KV": 8, "D": 128, "NORMED": 1, "EPS": 1e-6}),
    ("rope_vjp", {"H": 32, "KV": 8, "D": 64, "NORMED": 0, "EPS": 0.0}),
    ("rope_vjp", {"H": 16, "KV": 8, "D": 128, "NORMED": 1, "EPS": 1e-6}),
    ("cross_entropy", {"V": 128256, "INPLACE": 0}),
    ("cross_entropy", {"V": 128256, "INPLACE": 1}),
    ("sum_of_squares", {"AFTER": 0}),
    ("sum_of_squares", {"AFTER": 1}),
    ("adam_scalars", {"BIAS": 1}),
    ("adam", {}),
    ("adam_master", {}),
    ("rms_norm", {"EPS": 1e-5, "D": 2048, "RESIDUAL": 1}),
    ("rms_norm", {"EPS": 1e-5, "D": 576, "RESIDUAL": 0}),
    ("rms_norm_vjp", {"EPS": 1e-5, "D": 2048, "WARPS": 1, "RESIDUAL": 1, "TRAINED": 1}),
    ("rms_norm_vjp", {"EPS": 1e-5, "D": 4096, "WARPS": 2, "RESIDUAL": 1, "TRAINED": 0}),
]


def has_compiler() -> bool:
    spec = find_spec("nvidia")  # of a package of the tests', where MLX has loaded none
    for folder in spec.submodule_search_locations or () if spec else ():
        for library in sorted(Path(folder).glob("*/lib/libnvrtc*.so.*[0-9]")):
            ctypes.CDLL(str(library))
    try:
        return build._nvrtc() is not None
    except RuntimeError:
        return False


@pytest.mark.skipif(not has_compiler(), reason="needs NVRTC, which comes with MLX for CUDA: no GPU")
@pytest.mark.parametrize("dtype", [mx.bfloat16, mx.float16, mx.float32], ids=str)
@pytest.mark.parametrize(("name", "constants"), CONSTANTS, ids=str)
def test_every_kernel_is_accepted(name: str, constants: dict[str, float], dtype: mx.Dtype) -> None:
    if name in ("dequantize", "swiglu_adapted", "swiglu_adapted_vjp") and dtype == mx.float32:
        return  # for half precision alone
    full, text = kernels.source(name, dtype, tuple(constants.items()))
    code = build.compile_program(text, ["--gpu-architecture=sm_90", "--std=c++17"])
    assert code.startswith(b"\x7fELF")
    assert full.encode() in code


def test_every_file_of_a_kernel_is_compiled_here() -> None:
    folder = Path(cuda.__file__).parent
    assert {file.stem for file in folder.glob("*.cu")} == {name for name, _ in CONSTANTS}
    assert not any("#include" in kernels.source(name, mx.bfloat16, [])[1] for name, _ in CONSTANTS)


def test_names_differ_by_everything_that_is_built_in() -> None:
    names = {
        kernels.source(name, dtype, tuple(constants.items()))[0]
        for name, constants in CONSTANTS
        for dtype in (mx.bfloat16, mx.float16, mx.float32)
    }
    assert len(names) == 3 * len(CONSTANTS)


@pytest.fixture
def builds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A compiler that writes down what it is asked to build, and a cache of its own."""
    asked: list[str] = []

    def compiler(source: str, options: list[str]) -> bytes:
        asked.append(source)
        return f"code of {source} for {options[0]}".encode()

    monkeypatch.setenv("ALLHANDS_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "compile_program", compiler)
    monkeypatch.setattr(build, "nvrtc_version", lambda: (13, 0))
    return asked


def kept(cache: Path) -> list[Path]:
    return sorted((cache / "cuda").glob("*.cubin"))


def test_a_kernel_is_built_once(builds: list[str], tmp_path: Path) -> None:
    codes = [
        build.built(source, capability)
        for _ in range(2)
        for source in "ab"
        for capability in ((9, 0), (8, 0))
    ]
    assert builds == ["a", "a", "b", "b"]
    assert len(set(codes)) == 4
    assert codes[0] == b"code of a for --gpu-architecture=sm_90"
    assert [stat.S_IMODE(path.stat().st_mode) for path in kept(tmp_path)] == [0o600] * 4
    assert stat.S_IMODE((tmp_path / "cuda").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "damage", [lambda b: b[:-1], lambda b: b[:20], lambda b: b"", lambda b: b[:-1] + b"?"]
)
def test_what_is_not_whole_is_built_again(
    builds: list[str], tmp_path: Path, damage: object
) -> None:
    code = build.built("a", (9, 0))
    (path,) = kept(tmp_path)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    assert build.built("a", (9, 0)) == code
    assert build.built("a", (9, 0)) == code
    assert builds == ["a", "a"]


def test_without_a_place_to_keep_it_a_kernel_is_built_all_the_same(
    builds: list[str], tmp_path: Path
) -> None:
    (tmp_path / "cuda").write_text("in the way")
    assert build.built("a", (9, 0)) == build.built("a", (9, 0))
    assert builds == ["a", "a"]


def test_a_missing_compiler_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "_LIBRARIES", ("libnothing.so.1",))
    with pytest.raises(RuntimeError, match=r"libnothing\.so\.1"):
        build._nvrtc.__wrapped__()
