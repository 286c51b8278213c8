"""One checkpoint: safetensors that other libraries read, synced and private files, damage of every
kind.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import stat
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn
from safetensors import safe_open
from safetensors.numpy import load

from allhands.checkpoints import (
    Checkpoint,
    Tensor,
    best_in,
    checkpoint_path,
    latest,
    open_checkpoint,
    write_checkpoint,
)
from allhands.errors import CheckpointError, StorageError
from allhands.io.tensors import safetensors_pieces

RUN = "a1b2c3d4e5f6"
CODES = {
    "float32": "F32",
    "float16": "F16",
    "float64": "F64",
    "uint8": "U8",
    "uint32": "U32",
    "int32": "I32",
    "int64": "I64",
    "uint64": "U64",
    "int16": "I16",
    "bool": "BOOL",
}


def tensor(name: str, array: np.ndarray[Any, Any]) -> Tensor:
    return Tensor(name, CODES[array.dtype.name], array.shape, memoryview(array))


def write(target: Path, step: int, run_id: str = RUN, **state: Any) -> Checkpoint:
    weights = np.arange(24, dtype=np.float32).reshape(4, 6) + step
    optimizer = [tensor("step", np.array(step, dtype=np.uint64)), tensor("m", weights * 2)]
    files = {"adapters.safetensors": [tensor("w", weights)], "optimizer.safetensors": optimizer}
    return write_checkpoint(
        target,
        step,
        run_id,
        {"step": step, "iteration": step, **state},
        files,
        {"adapter_config.json": "{}"},
    )


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with three checkpoints."""
    for step in (100, 200, 300):
        write(checkpoint_path(tmp_path / "run", step), step)
    return tmp_path / "run"


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def step_of(found: Checkpoint | None) -> int | None:
    return None if found is None else found.step


# --- tensors --------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.text(st.characters(exclude_categories=["Cs"]), min_size=1).filter(
            lambda name: name != "__metadata__"
        ),
        st.sampled_from(sorted(CODES)).flatmap(
            lambda name: stn.arrays(
                np.dtype(name), stn.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)
            )
        ),
        max_size=6,
    )
)
def test_what_is_written_is_read_by_the_safetensors_library(
    arrays: dict[str, np.ndarray[Any, Any]],
) -> None:
    content = b"".join(safetensors_pieces([tensor(name, array) for name, array in arrays.items()]))
    found = load(content)
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
    length = int.from_bytes(content[:8], "little")
    assert length % 8 == 0
    header = json.loads(content[8 : 8 + length])
    assert header.pop("__metadata__") == {"format": "mlx"}
    # As in memory: each begins at a multiple of its items' size.
    assert all(
        facts["data_offsets"][0] % arrays[name].itemsize == 0 for name, facts in header.items()
    )


def test_what_is_written_is_read_by_mlx_and_mapped(tmp_path: Path) -> None:
    arrays = {
        "q": mx.array([[1, 2**32 - 1]], dtype=mx.uint32),
        "b": mx.array([1.5, -3.0, 1e38]).astype(mx.bfloat16),
        "flag": mx.array([True, False]),
        "one": mx.array(7, dtype=mx.uint64),
    }
    codes = {"q": "U32", "b": "BF16", "flag": "BOOL", "one": "U64"}
    plain = {
        name: np.array(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a)
        for name, a in arrays.items()
    }
    tensors = [
        Tensor(name, codes[name], array.shape, memoryview(plain[name]))
        for name, array in arrays.items()
    ]
    written = write_checkpoint(
        tmp_path / "c", 1, RUN, {}, {"a.safetensors": tensors, "none.safetensors": []}
    )
    found: Any = mx.load(str(written.path / "a.safetensors"))
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert mx.array_equal(found[name], array).item()
    assert mx.load(str(written.path / "none.safetensors")) == {}
    with safe_open(written.path / "a.safetensors", framework="numpy") as opened:
        assert opened.metadata() == {"format": "mlx"}
        assert opened.get_slice("b").get_dtype() == "BF16"


def test_large_data_are_passed_on_in_pieces_and_not_copied() -> None:
    data = np.arange(3_000_000, dtype=np.float32)
    header, *pieces = safetensors_pieces([tensor("w", data)])
    assert len(header) < 200
    assert [len(piece) for piece in pieces] == [4 << 20, 4 << 20, 12_000_000 - (8 << 20)]
    assert all(np.shares_memory(np.frombuffer(piece, dtype=np.uint8), data) for piece in pieces)


@pytest.mark.parametrize(
    "tensors",
    [
        [Tensor("a", "F32", (2,), bytes(7))],
        [Tensor("a", "FLOAT", (2,), bytes(8))],
        [Tensor("a", "U8", (1,), b"1"), Tensor("a", "U8", (1,), b"2")],
        [Tensor("__metadata__", "U8", (1,), b"1")],
        [Tensor("a", "F32", (2, 2), memoryview(np.zeros((2, 4), dtype=np.float32)[:, ::2]))],
    ],
    ids=["size", "type", "twice", "name", "order"],
)
def test_tensors_that_are_none_are_refused_before_anything_is_written(
    tensors: list[Tensor], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=r"tensors of a file|no such type|bytes of data"):
        write_checkpoint(tmp_path / "c", 1, RUN, {}, {"a.safetensors": tensors})
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "name", ["../x", "a/b", "", ".hidden", "state.json", "manifest.json", "b\n"]
)
def test_names_that_are_none_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be a file of a checkpoint"):
        write_checkpoint(tmp_path / "c", 1, RUN, {}, {}, {name: "text"})
    with pytest.raises(ValueError, match="not JSON compliant"):
        write_checkpoint(tmp_path / "c", 1, RUN, {"best": float("inf")}, {})
    assert names(tmp_path) == []


# --- one checkpoint -------------------------------------------------------------------------------


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    os.umask(umask := os.umask(0))
    written = write(tmp_path / "run" / "checkpoints" / "step-0000007", 7, best=[1.5, None, "ü"])
    found = open_checkpoint(written.path)
    assert found == written
    assert (found.step, found.run_id, found.state) == (
        7,
        RUN,
        {"step": 7, "iteration": 7, "best": [1.5, None, "ü"]},
    )
    assert names(found.path) == sorted([*found.files, "manifest.json"])
    for name, facts in found.files.items():
        content = (found.path / name).read_bytes()
        assert (facts.bytes, facts.sha256) == (len(content), hashlib.sha256(content).hexdigest())
    manifest = (found.path / "manifest.json").read_bytes()
    assert found.digest == hashlib.sha256(manifest).hexdigest()
    assert json.loads(manifest).keys() == {
        "format",
        "step",
        "iteration",
        "run_id",
        "time",
        "files",
        "arrays",
        "sha256",
    }
    assert found.num_bytes == sum(path.stat().st_size for path in found.path.iterdir()) - len(
        manifest
    )
    for path in [tmp_path / "run", *(tmp_path / "run").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert os.umask(umask) == umask


def test_everything_is_synced_before_it_is_relied_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[tuple[str, str]] = []
    at: dict[int, str] = {}
    real_open, real_fsync, real_rename = os.open, os.fsync, os.rename

    def watched_open(path: Any, *arguments: Any, **more: Any) -> int:
        descriptor = real_open(path, *arguments, **more)
        at[descriptor] = Path(path).name
        log.append(("open", at[descriptor]))
        return descriptor

    def watched_fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        log.append(("sync", at[descriptor]))

    def watched_rename(source: Any, target: Any, **more: Any) -> None:
        log.append(("rename", Path(target).name))
        real_rename(source, target, **more)

    monkeypatch.setattr(os, "open", watched_open)
    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "rename", watched_rename)
    found = write(tmp_path / "checkpoints" / "step-0000001", 1)
    renamed = log.index(("rename", "step-0000001"))
    for name in found.files:
        assert log.index(("sync", name)) < log.index(("open", "manifest.json")), name
    assert log.index(("sync", "manifest.json")) < renamed
    # The directory under its first name, and the one that holds it after the renaming.
    assert any(
        kind == "sync" and name.startswith(".step-0000001.partial-") for kind, name in log[:renamed]
    )
    assert ("sync", "checkpoints") in log[renamed:]
    assert ("sync", tmp_path.name) in log


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 0x10
    file.write_bytes(content)


@pytest.mark.parametrize(
    "name",
    [
        "manifest.json",
        "state.json",
        "adapters.safetensors",
        "optimizer.safetensors",
        "adapter_config.json",
    ],
)
def test_damage_of_a_file_is_noticed_and_named(name: str, run: Path) -> None:
    file = checkpoint_path(run, 300) / name
    whole = file.read_bytes()

    def refused() -> str:
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(file.parent)
        error = caught.value
        assert error.where == str(file)
        assert error.exit_code == 9
        assert f"allhands checkpoint verify {run}" in (error.hint or "") or "rights" in (
            error.hint or ""
        )
        assert step_of(latest(run)) == 200
        return error.message

    # The manifest itself has a sum, too.
    for at in (
        range(0, len(whole), 4) if name == "manifest.json" else (0, len(whole) // 2, len(whole) - 1)
    ):
        flip(file, at)
        with pytest.raises(CheckpointError):
            open_checkpoint(file.parent)
        flip(file, at)
    flip(file, len(whole) // 2)
    refused()
    for torn in (whole[:-1], whole[: len(whole) // 2], b"", whole + b"\n"):
        file.write_bytes(torn)
        assert "bytes instead of" in refused() or name == "manifest.json"
    file.unlink()
    assert "is missing" in refused()
    file.mkdir()
    assert "not a file" in refused()
    file.rmdir()
    file.write_bytes(whole)
    assert step_of(latest(run)) == 300


def test_a_manifest_of_another_checkpoint_is_noticed(run: Path) -> None:
    first, last = checkpoint_path(run, 100), checkpoint_path(run, 300)
    shutil.copy(first / "manifest.json", last / "manifest.json")
    with pytest.raises(CheckpointError, match="SHA-256"):
        open_checkpoint(last)
    rejected: list[CheckpointError] = []
    assert step_of(latest(run, rejected=rejected)) == 200
    assert rejected == []  # it says that it is of step 100


NONSENSE: list[tuple[str, str]] = [
    ("", "not JSON"),
    ("[]", "JSON object"),
    ("{}", "format is None"),
    ('{"format": 2}', "an earlier version"),
    ('{"format": 4}', "a later version"),
    ('{"format": true}', "format is True"),
    ('{"format": 3}', "not a manifest"),
    (
        '{"format": 3, "arrays": [], "files": [], "step": 1, "iteration": 2, "run_id": "a", "time": 1}',
        "not a manifest",
    ),
    (
        '{"format": 3, "arrays": [], "files": {}, "step": "x", "iteration": 2, "run_id": "a", "time": 1}',
        "not a manifest",
    ),
    (
        '{"format": 3, "arrays": [], "files": {}, "step": 1, "iteration": 2, "run_id": "a", "time": NaN}',
        "not JSON",
    ),
    (
        '{"format": 3, "arrays": [], "files": {"a": 5}, "step": 1, "iteration": 2, "run_id": "a", "time": 1}',
        "not a manifest",
    ),
    (
        '{"format": 3, "arrays": [], "files": {}, "step": 1, "iteration": 2, "run_id": "a", "time": 1}',
        "sum is wrong",
    ),
    ("[" * 100_000, "not JSON"),
    ("\xff", "not JSON"),
]


@pytest.mark.parametrize(
    ("text", "words"), NONSENSE, ids=[words + str(i) for i, (_, words) in enumerate(NONSENSE)]
)
def test_a_manifest_that_is_nonsense_is_refused(text: str, words: str, run: Path) -> None:
    (checkpoint_path(run, 300) / "manifest.json").write_text(text, encoding="latin-1")
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(checkpoint_path(run, 300))
    rejected: list[CheckpointError] = []
    assert step_of(latest(run, rejected=rejected)) == 200
    assert [error.where for error in rejected] == [str(checkpoint_path(run, 300) / "manifest.json")]


def test_a_manifest_does_not_lead_out_of_its_directory(tmp_path: Path) -> None:
    from allhands.checkpoints.format import FORMAT, manifest_text

    (tmp_path / "secret").write_bytes(b"")
    (tmp_path / "c").mkdir()
    facts = {"bytes": 0, "sha256": hashlib.sha256(b"").hexdigest()}
    body = {"format": FORMAT, "step": 1, "iteration": 1, "run_id": RUN, "time": 1.0, "arrays": []}
    body["files"] = {"../secret": facts}
    (tmp_path / "c" / "manifest.json").write_bytes(manifest_text(body))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path / "c")
    assert caught.value.code == "checkpoint-damaged"


def test_without_sums_only_the_state_is_read(run: Path) -> None:
    path = checkpoint_path(run, 300)
    flip(path / "optimizer.safetensors", -1)
    assert open_checkpoint(path, verify=False).state == {"step": 300, "iteration": 300}
    flip(path / "state.json", 5)
    with pytest.raises(CheckpointError, match="SHA-256"):
        open_checkpoint(path, verify=False)


def test_what_is_replaced_is_only_ours(run: Path) -> None:
    target = checkpoint_path(run, 300)
    (target / ".DS_Store").touch()
    write(target, 300, more=1)
    (target / "notes.txt").write_text("mine")
    with pytest.raises(StorageError, match=r"notes\.txt") as caught:
        write(target, 300, more=2)
    assert caught.value.where == str(target)
    assert (target / "notes.txt").read_text() == "mine"
    assert open_checkpoint(target).state == {"step": 300, "iteration": 300, "more": 1}
    # An adapter that was saved without a checkpoint is ours, too.
    (run / "best").mkdir()
    (run / "best" / "adapters.safetensors").touch()
    (run / "best" / "adapter_config.json").touch()
    assert best_in(run) is None
    write(run / "best", 300)
    assert best_in(run) == run / "best"
    assert names(run) == ["best", "checkpoints"]
