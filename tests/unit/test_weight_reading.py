"""Weights read by several threads, and hashed side by side, are those that one thread reads and
hashes.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
import tiny
from mlx.utils import tree_flatten

from allhands.errors import ModelError
from allhands.model import fingerprints, load, reading
from allhands.model.fingerprints import begin_fingerprint, fingerprint
from allhands.model.load import load_model
from allhands.model.reading import read_arrays, worth_threads
from allhands.model.weight_files import present


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Arrays of many sizes and types, one name in both files."""
    mx.random.seed(3)
    sizes = [1, 5, 70_000, 3, 900, 120_000]
    arrays = {
        f"a{size}": mx.random.normal((size,)).astype(mx.bfloat16 if size % 2 else mx.float32)
        for size in sizes
    }
    mx.save_safetensors(str(tmp_path / "model-1.safetensors"), {**arrays, "both": mx.array([1])})
    mx.save_safetensors(
        str(tmp_path / "model-2.safetensors"),
        {"both": mx.array([2]), "packed": mx.arange(64, dtype=mx.uint32)},
    )
    return sorted(tmp_path.glob("*.safetensors"))


def by_mlx(files: Sequence[Path]) -> dict[str, mx.array]:
    arrays: dict[str, mx.array] = {}
    for file in files:
        arrays.update(mx.load(str(file)))  # type: ignore[arg-type]
    return arrays


@pytest.mark.parametrize("threads", [1, 2, 3, 8])
def test_several_threads_read_what_mlx_reads(files: list[Path], threads: int) -> None:
    wanted, read = by_mlx(files), read_arrays(files, threads)
    assert sorted(read) == sorted(wanted)
    for name, array in wanted.items():
        assert read[name].dtype == array.dtype
        assert bytes(memoryview(read[name].view(mx.uint8))) == bytes(
            memoryview(array.view(mx.uint8))
        ), name
    assert read["both"].item() == 2  # the last file's, as in mlx_lm


def test_each_thread_has_about_as_much(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The two large arrays must not be one thread's."""
    of: list[int] = []
    evaluate = mx.eval

    def count(arrays: Any) -> None:
        of.append(sum(array.nbytes for array in arrays.values()))
        evaluate(arrays)

    monkeypatch.setattr(reading, "available_cores", lambda: 2)
    monkeypatch.setattr(mx, "eval", count)
    total = sum(array.nbytes for array in by_mlx(files).values())
    read_arrays(files)
    assert sum(of) == pytest.approx(total, abs=16)  # a name in both files is read once
    assert max(of) < 0.65 * total


def test_what_cannot_be_read_is_said_and_nothing_hangs(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = reading.lazy_arrays

    def torn(file: Path, stream: mx.Stream | None = None) -> dict[str, mx.array]:
        if stream is not None and file.name == "model-2.safetensors":
            raise RuntimeError("the disk is gone")
        return whole(file, stream)

    monkeypatch.setattr(reading, "lazy_arrays", torn)
    with pytest.raises(RuntimeError, match="the disk is gone"):
        read_arrays(files)


@pytest.mark.parametrize("bits", [None, 4])
def test_a_model_of_arrays_read_by_threads_is_the_same_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bits: int | None
) -> None:
    path = tiny.write_model(tmp_path / "model", hidden=64, bits=bits)
    usual = load_model(str(path))
    calls: list[int] = []

    def count(files: Sequence[Path], threads: int = 3) -> dict[str, mx.array]:
        calls.append(len(files))
        return read_arrays(files, threads)

    monkeypatch.setattr(load, "worth_threads", lambda files: True)
    monkeypatch.setattr(reading, "read_arrays", count)
    read = load_model(str(path))
    assert calls == [1]
    assert type(read.model) is type(usual.model)
    assert "sanitize" not in vars(read.model)
    wanted: dict[str, mx.array] = dict(tree_flatten(usual.model.parameters()))
    got: dict[str, mx.array] = dict(tree_flatten(read.model.parameters()))
    assert sorted(got) == sorted(wanted)
    for name, array in wanted.items():
        assert mx.array_equal(got[name], array), name
    tokens = mx.array([[5, 6, 7]])
    assert mx.array_equal(read.model(tokens), usual.model(tokens))


def test_threads_are_for_nvidia_gpus_and_large_files(
    files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gpu:
        type = mx.DeviceType.gpu

    assert not worth_threads(files)
    monkeypatch.setattr(mx, "default_device", Gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert not worth_threads(files)
    monkeypatch.setattr(reading, "SMALL_BYTES", 1000)
    assert worth_threads(files)
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    assert not worth_threads(files)


# --- fingerprints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cores", [1, 3])
def test_a_fingerprint_is_of_names_sizes_and_all_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    """By its definition: each file's name and size, and the SHA-256 of each block on a line."""
    monkeypatch.setattr(fingerprints, "BLOCK_BYTES", 1000)
    monkeypatch.setattr(fingerprints, "_PIECE_BYTES", 300)
    monkeypatch.setattr(fingerprints, "available_cores", lambda: cores)
    contents = {
        "model-2.safetensors": bytes(range(250)) * 9,
        "model-1.safetensors": b"x" * 1000,
        "model.safetensors": b"",
    }
    lines = ""
    for name, content in sorted(contents.items()):
        (tmp_path / name).write_bytes(content)
        lines += f"{name} {len(content)}\n"
        for start in range(0, max(len(content), 1), 1000):
            lines += hashlib.sha256(content[start : start + 1000]).hexdigest() + "\n"
    (tmp_path / "config.json").write_text("{}")
    assert (
        fingerprint(tmp_path)
        == hashlib.sha256(lines.encode()).hexdigest()
        == begin_fingerprint(tmp_path).result()
    )


def test_a_bit_anywhere_changes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprints, "BLOCK_BYTES", 64)
    file = tmp_path / "model.safetensors"
    content = bytearray(200)
    seen: set[str] = set()
    for place in (None, 0, 63, 64, 130, 199):
        changed = bytearray(content)
        if place is not None:
            changed[place] ^= 1
        file.write_bytes(changed)
        seen.add(fingerprint(tmp_path))
    file.write_bytes(content[:-1])
    seen.add(fingerprint(tmp_path))
    assert len(seen) == 7


def test_a_checkpoint_of_an_earlier_version_knows_its_model(tmp_path: Path) -> None:
    """Until 0.1 a fingerprint was one hash over each whole file."""
    path = tiny.write_model(tmp_path / "model")
    loaded = load_model(str(path))
    file = path / "model.safetensors"
    line = f"{file.name} {file.stat().st_size} {hashlib.sha256(file.read_bytes()).hexdigest()}\n"
    assert loaded.is_recorded(hashlib.sha256(line.encode()).hexdigest())
    assert loaded.is_recorded(loaded.fingerprint)
    assert not loaded.is_recorded("0" * 64)
    assert load_model(str(path), hashed=True).fingerprint == loaded.fingerprint


def test_weights_that_are_gone_are_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tiny.write_model(tmp_path / "model")
    listed = present(path)
    monkeypatch.setattr(fingerprints, "present", lambda path: listed)
    shutil.rmtree(path)
    for ask in (lambda: fingerprint(path), begin_fingerprint(path).result):
        with pytest.raises(ModelError, match="the weights cannot be read: No such file") as caught:
            ask()
        assert caught.value.where == str(listed[0])
