"""Arrays in slices of any cut: saved by ranks that divide them in one way, read by others in
another way.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from twins import ThreadCommunicator, run_ranks

from allhands.checkpoints import Checkpoint, Tensor, open_checkpoint, parts, write_checkpoint
from allhands.checkpoints.arrays import Held, local_arrays, owned, snapshot
from allhands.checkpoints.format import Groups
from allhands.checkpoints.parts import PartExchange
from allhands.checkpoints.slices import stored_numbers
from allhands.checkpoints.writing import drafting
from allhands.errors import StorageError
from allhands.io.regions import Box, Flat, Region

FILE = "state.safetensors"
# Cuts of a (5, 7) array: whole, in rows, 2x2 uneven boxes, ranges across rows, ranges of one
# number, and both kinds.
CUTS: dict[str, list[Region]] = {
    "whole": [Box((0, 0), (5, 7))],
    "rows": [Box((0, 0), (2, 7)), Box((2, 0), (3, 7))],
    "2x2": [Box((0, 0), (2, 3)), Box((0, 3), (2, 4)), Box((2, 0), (3, 3)), Box((2, 3), (3, 4))],
    "ranges": [Flat(0, 10), Flat(10, 11), Flat(11, 35)],
    "reversed": [Flat(20, 35), Flat(0, 20)],
    "empty": [Flat(0, 0), Flat(0, 35), Flat(35, 35)],
    "both": [Box((0, 0), (2, 7)), Flat(14, 35)],
}


def values(shape: tuple[int, ...] = (5, 7)) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def cut(array: Any, region: Region) -> Any:
    """Its numbers, by means of our own."""
    if isinstance(region, Flat):
        return array.reshape(-1)[region.start : region.stop]
    return array[tuple(slice(at, at + n) for at, n in zip(region.start, region.shape, strict=True))]


def written(path: Path, array: Any, regions: list[Region]) -> Checkpoint:
    """A checkpoint of one array, whose slices lie in files of their own."""
    made: dict[str, list[Tensor]] = {}
    with drafting(path / "c") as draft:
        arrays = []
        for rank, region in enumerate(regions):
            part = np.ascontiguousarray(cut(array, region))
            tensor = Tensor("w", "F32", region.shape, memoryview(part), (array.shape, region))
            file = FILE if rank == 0 else f"state-{rank}.safetensors"
            made[file] = [tensor]
            arrays.append((file, region))
        first, *others = made
        more = [
            part_of(draft.directory, file, made[file], array.shape, region)
            for file, region in arrays[1:]
        ]
        assert len(others) == len(more)
        return draft.publish(1, "run", {}, {first: made[first]}, parts=lambda: more)


def part_of(
    directory: Path, file: str, tensors: list[Tensor], shape: tuple[int, ...], region: Region
) -> parts.WrittenPart:
    from allhands.checkpoints.format import StoredArray, StoredSlice
    from allhands.checkpoints.writing import write_file
    from allhands.io.tensors import safetensors_pieces

    stored = write_file(directory / file, safetensors_pieces(tensors), lambda: None)
    return parts.WrittenPart(
        {file: stored}, [StoredArray("state.w", shape, "F32", (StoredSlice(file, "w", region),))]
    )


WANTED: list[Region] = [
    *(region for regions in CUTS.values() for region in regions),
    *(Box((1, 1), (3, 5)), Box((4, 6), (1, 1)), Box((2, 2), (0, 3)), Flat(3, 32), Flat(9, 9)),
]


@pytest.mark.parametrize("name", CUTS)
def test_every_slice_is_read_from_every_cut(name: str, tmp_path: Path) -> None:
    array = values()
    checkpoint = open_checkpoint(written(tmp_path, array, CUTS[name]).path)
    (facts,) = checkpoint.arrays
    assert (facts.name, facts.shape, facts.dtype) == ("state.w", (5, 7), "F32")
    stored = local_arrays(checkpoint, FILE)["w"]
    assert np.array(stored.read()).tobytes() == array.tobytes()
    for region in WANTED:
        found = np.array(stored.read(region))
        assert found.shape == region.shape
        assert found.tobytes() == np.ascontiguousarray(cut(array, region)).tobytes(), region


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_ranges_and_boxes_of_any_array(data: st.DataObject) -> None:
    """Cut at random into ranges or along an axis, and read at random."""
    import tempfile

    shape = tuple(data.draw(st.lists(st.integers(1, 5), min_size=0, max_size=4)))
    array, size = values(shape), int(np.prod(shape))
    if shape and data.draw(st.booleans()):
        axis = data.draw(st.integers(0, len(shape) - 1))
        edges = sorted(
            {0, shape[axis], *data.draw(st.lists(st.integers(0, shape[axis]), max_size=3))}
        )
        starts = [tuple(a if i == axis else 0 for i in range(len(shape))) for a in edges[:-1]]
        lengths = [b - a for a, b in pairwise(edges)]
        regions: list[Region] = [
            Box(start, tuple(n if i == axis else whole for i, whole in enumerate(shape)))
            for start, n in zip(starts, lengths, strict=True)
        ]
    else:
        edges = sorted({0, size, *data.draw(st.lists(st.integers(0, size), max_size=4))})
        regions = [Flat(a, b) for a, b in pairwise(edges)]
    begin = tuple(data.draw(st.integers(0, n)) for n in shape)
    box = Box(
        begin, tuple(data.draw(st.integers(0, n - at)) for n, at in zip(shape, begin, strict=True))
    )
    start = data.draw(st.integers(0, size))
    flat = Flat(start, data.draw(st.integers(start, size)))
    with tempfile.TemporaryDirectory() as place:
        numbers = stored_numbers(written(Path(place), array, regions), FILE)["w"]
        for region in (box, flat):
            found = numbers.words(region).view(np.float32)
            assert found.shape == region.shape
            assert found.tobytes() == np.ascontiguousarray(cut(array, region)).tobytes()


@pytest.mark.parametrize(
    "regions",
    [
        [Box((0, 0), (2, 7))],
        [Box((0, 0), (3, 7)), Box((2, 0), (3, 7))],
        [Box((0, 0), (3, 7)), Box((2, 0), (2, 7))],
        [Flat(0, 20), Flat(19, 34)],
        [Flat(0, 36)],
        [Box((0, 0), (5, 8))],
        [Box((0,), (35,))],
    ],
    ids=["gap", "twice", "both", "shifted", "beyond", "wide", "other"],
)
def test_slices_that_are_not_the_array_are_refused(regions: list[Region], tmp_path: Path) -> None:
    tensors = [Tensor("w", "F32", r.shape, bytes(4 * r.size), ((5, 7), r)) for r in regions]
    files = {
        f"{'state' if not n else f'state-{n}'}.safetensors": [t] for n, t in enumerate(tensors)
    }

    def write() -> None:
        with drafting(tmp_path / "c") as draft:
            more = [
                part_of(draft.directory, f, files[f], (5, 7), regions[n])
                for n, f in enumerate(files)
                if n
            ]
            draft.publish(1, "run", {}, {FILE: files[FILE]}, parts=lambda: more)

    with pytest.raises(ValueError, match=r"slice|array"):
        write()
    assert list(tmp_path.iterdir()) == []


# --- ranks that have divided arrays among them ----------------------------------------------------

SHAPES = {"matrix": (6, 5), "row": (11,), "number": ()}


def groups(rank: int, size: int, way: str) -> Groups:
    """What a rank holds of three arrays, of which two are divided."""
    arrays = {name: mx.array(values(shape)) for name, shape in SHAPES.items()}
    regions: dict[str, Region] = {}
    if way == "flat":
        for name in ("matrix", "row"):
            total = arrays[name].size
            each = -(-total // size)
            regions[name] = Flat(min(rank * each, total), min(rank * each + each, total))
    elif way == "boxes":
        # Two ranks for each half: the first of them owns it.
        half = min(rank % 2, size - 1)
        regions["matrix"] = Box((3 * half, 0), (3, 5)) if size > 1 else Box((0, 0), (6, 5))
    elif way == "stages" and size > 1:
        mine = {name: arrays[name] for n, name in enumerate(arrays) if n % size == rank}
        return {FILE: {name: owned(array) for name, array in mine.items()}}
    return {
        FILE: {
            name: owned(mx.array(cut(np.array(array), regions[name])), array.shape, regions[name])
            if name in regions
            else owned(array)
            for name, array in arrays.items()
        }
    }


def save(size: int, way: str, directories: list[Path]) -> list[Any]:
    """One checkpoint by so many ranks; what each has of it, or what went wrong."""

    def work(communicator: ThreadCommunicator) -> Any:
        rank = communicator.rank
        directory = directories[rank]
        keeps = directory not in directories[:rank]

        def mine() -> Groups:
            return groups(rank, size, way)

        exchange = PartExchange.agreed(communicator, directory, Held(mine), keeps)
        target = directory / "checkpoints" / "step-0000001"
        if exchange is None:
            if rank:
                return None
            return write_checkpoint(target, 1, "run", {}, snapshot(mine(), 0)())
        try:
            delivery = exchange.begin(target)
            if delivery is None:
                return None
            with delivery.opened() as draft:
                tensors = snapshot(exchange.ownership.common(mine()), 0)()
                return draft.publish(
                    1, "run", {}, tensors, parts=lambda: delivery.collect(lambda: None)
                )
        finally:
            exchange.close()

    return run_ranks(size, work)


@pytest.mark.parametrize("shared", [True, False], ids=["one directory", "several"])
@pytest.mark.parametrize("way", ["same", "flat", "boxes", "stages"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_ranks_divide_is_one_checkpoint(
    size: int, way: str, shared: bool, tmp_path: Path
) -> None:
    directories = [tmp_path / ("run" if shared else str(rank)) for rank in range(size)]
    results = save(size, way, directories)
    kept = [result for result in results if result is not None]
    assert all(isinstance(result, Checkpoint) for result in kept), results
    # Without a common directory all that keep files have all of it.
    assert len(kept) == (1 if shared or way == "same" or size == 1 else size)
    for found in kept:
        checkpoint = open_checkpoint(found.path)
        read = {
            name: np.array(stored.read()) for name, stored in local_arrays(checkpoint, FILE).items()
        }
        assert {name: array.tobytes() for name, array in read.items()} == {
            name: values(shape).tobytes() for name, shape in SHAPES.items()
        }
        assert sorted(path.name for path in checkpoint.path.iterdir()) == sorted(
            [*checkpoint.files, "manifest.json"]
        )
        assert sum(array.shape != () for array in checkpoint.arrays) == 2
        # Every number lies there once.
        numbers = sum(region.region.size for array in checkpoint.arrays for region in array.slices)
        assert numbers == 30 + 11 + 1
        assert [path.name for path in found.path.parent.iterdir()] == ["step-0000001"]


def test_a_part_that_cannot_be_written_is_told_and_nothing_is_left(tmp_path: Path) -> None:
    directory = tmp_path / "run"

    def fails(directory: Path, *_: Any) -> Any:
        raise OSError(28, "No space left on device", str(directory))

    def work(communicator: ThreadCommunicator) -> Any:
        rank = communicator.rank
        exchange = PartExchange.agreed(
            communicator, directory, Held(lambda: groups(rank, 2, "flat")), rank == 0
        )
        assert exchange is not None
        try:
            delivery = exchange.begin(directory / "checkpoints" / "step-0000001")
            if delivery is None:
                return None
            with delivery.opened() as draft:
                return draft.publish(
                    1, "run", {}, {FILE: []}, parts=lambda: delivery.collect(lambda: None)
                )
        finally:
            exchange.close()

    real, lock = parts.write_file, threading.Lock()

    def sometimes(path: Path, pieces: Any, progress: Any) -> Any:
        with lock:
            return (
                fails(path)
                if path.name.endswith("-1.safetensors")
                else real(path, pieces, progress)
            )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "write_file", sometimes)
        first, second = run_ranks(2, work)
    assert second is None
    assert isinstance(first, StorageError)
    assert first.exit_code == 5
    assert "rank 1" in first.message
    assert list((directory / "checkpoints").iterdir()) == []


@pytest.mark.timeout(30)
@pytest.mark.parametrize("failing", ["-1.safetensors", "-0.safetensors", "state.json"])
def test_after_a_failure_no_part_is_waited_for_again(tmp_path: Path, failing: str) -> None:
    """Whoever wants the weights of a failed checkpoint hears of the failure at once: the parts'
    notes were read, or went with the draft. They were waited for ten minutes.
    """
    real = parts.write_file

    def sometimes(path: Path, pieces: Any, progress: Any) -> Any:
        if path.name.endswith(failing):
            raise OSError(28, "No space left on device", str(path))
        return real(path, pieces, progress)

    def work(communicator: ThreadCommunicator) -> Any:
        rank = communicator.rank
        exchange = PartExchange.agreed(
            communicator, tmp_path, Held(lambda: groups(rank, 2, "flat")), rank == 0
        )
        assert exchange is not None
        told: list[Any] = []
        try:
            delivery = exchange.begin(tmp_path / "checkpoints" / "step-0000001")
            if delivery is None:
                return None
            try:
                with delivery.opened() as draft:
                    sometimes(draft.directory / "state.json", [b"{}"], lambda: None)
                    delivery.parts(lambda: None)
            except (OSError, StorageError) as error:
                told.append(error)
            for again in (delivery.parts, delivery.weights):
                with pytest.raises(StorageError) as caught:
                    again(lambda: None)
                told.append(caught.value)
        finally:
            exchange.close()
        return told

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "write_file", sometimes)
        first, second = run_ranks(2, work)
    assert second is None
    assert len(first) == 3, first
    assert {error.code for error in first[1:]} == {"disk-full"}


@pytest.mark.timeout(30)
def test_a_rank_without_room_for_its_note_is_heard(tmp_path: Path) -> None:
    """On a full disk the other ranks may take the room that it has just made."""

    def fails(path: Path, *_: Any) -> Any:
        # No file of this process grows beyond nothing, as on a full disk.
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
        raise OSError(28, "No space left on device", str(path))

    def work(communicator: ThreadCommunicator) -> Any:
        rank = communicator.rank
        exchange = PartExchange.agreed(
            communicator, tmp_path, Held(lambda: groups(rank, 2, "flat")), rank == 0
        )
        assert exchange is not None
        delivery = exchange.begin(tmp_path / "checkpoints" / "step-0000001")
        exchange.close()
        if delivery is None:
            return None
        with pytest.raises(StorageError) as caught, delivery.opened():
            delivery.parts(lambda: None)
        return caught.value

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(parts, "write_file", fails)
            first, second = run_ranks(2, work)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (first.code, second) == ("disk-full", None)


def test_a_rank_that_is_gone_is_not_waited_for_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "_AT_THE_END_S", 0.2)

    def gone() -> None:
        raise RuntimeError("the process is gone")

    def work(communicator: ThreadCommunicator) -> Any:
        rank = communicator.rank
        exchange = PartExchange.agreed(
            communicator, tmp_path, Held(lambda: groups(rank, 2, "flat")), rank == 0
        )
        assert exchange is not None
        writes = gone if rank == 1 else lambda: None
        delivery = exchange.begin(tmp_path / "checkpoints" / "step-0000001", writes)
        exchange.close()
        if delivery is None:
            return None
        with delivery.opened() as draft:
            return draft.publish(
                1, "run", {}, {FILE: []}, parts=lambda: delivery.collect(lambda: None)
            )

    first, _ = run_ranks(2, work)
    assert isinstance(first, StorageError)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_rank_can_wait_for_what_it_writes_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it waits for others: over NCCL that would keep its GPU from handing out what rank 0
    waits for.
    """
    real = parts.write_file

    def slowly(path: Path, pieces: Any, progress: Any) -> Any:
        time.sleep(0.3)
        return real(path, pieces, progress)

    monkeypatch.setattr(parts, "write_file", slowly)

    def work(communicator: ThreadCommunicator) -> Any:
        rank = communicator.rank
        exchange = PartExchange.agreed(
            communicator, tmp_path, Held(lambda: groups(rank, 2, "flat")), rank == 0
        )
        assert exchange is not None
        delivery = exchange.begin(tmp_path / "checkpoints" / "step-0000001")
        exchange.settle()
        there = [path for path in tmp_path.rglob("*.safetensors") if f"-{rank}" in path.name]
        barrier.wait()
        if delivery is not None:
            delivery.stack.close()
        exchange.close()
        return there

    barrier = threading.Barrier(2)
    assert all(run_ranks(2, work))


# --- memory ---------------------------------------------------------------------------------------

MEMORY = """
import json, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
import allhands
import mlx.core as mx
from twins import run_ranks
from allhands.checkpoints import open_checkpoint, write_checkpoint
from allhands.checkpoints.arrays import Held, local_arrays, owned, shared_arrays, snapshot
from allhands.io.regions import Flat
from allhands.checkpoints.parts import PartExchange

way, directory = sys.argv[1], Path(sys.argv[3])
EACH, COUNT, RANKS = 16 << 20, 6, 2  # arrays of 64 MiB
target = directory / "checkpoints" / "step-0000001"

def peak():
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) << 10

def begin():
    mx.reset_peak_memory()
    Path("/proc/self/clear_refs").write_text("5")  # begins to count the peak anew
    return peak(), mx.get_active_memory()

def state(rank):
    return {"state.safetensors": {str(n): slice_of(n, rank) for n in range(COUNT)}}

def slice_of(n, rank):
    part = Flat(rank * EACH // RANKS, (rank + 1) * EACH // RANKS)
    return owned(held[rank][n], (EACH,), part) if way != "whole" else owned(held[rank][n])

def save(communicator):
    rank = communicator.rank
    own = directory if way == "shared" or rank == 0 else directory / str(rank)
    exchange = PartExchange.agreed(communicator, own, Held(lambda: state(rank)), rank == 0)
    delivery = exchange.begin(target)
    if delivery is not None:
        with delivery.opened() as draft:
            draft.publish(1, "run", {}, {"state.safetensors": []}, parts=lambda: delivery.collect(lambda: None))
    exchange.close()

def read(communicator):
    checkpoint = open_checkpoint(target, verify=False) if communicator.rank == 0 else None
    stored = shared_arrays(communicator, checkpoint, "state.safetensors")
    return None if all(each.read(Flat(5, 9)).size == 4 for each in stored.values()) else "size"

if target.exists():
    kept, there = [], 0
    base, mlx = begin()
    if way == "sent":
        outcomes = run_ranks(RANKS, read)
        assert outcomes == [None] * RANKS, outcomes
    else:
        checkpoint = open_checkpoint(target, verify=False)
        kept = [each.read() for each in local_arrays(checkpoint, "state.safetensors").values()]
        there = 4 * EACH * COUNT
else:
    size = EACH if way == "whole" else EACH // RANKS
    held = [[mx.full((size,), float(n + r)) for n in range(COUNT)] for r in range(1 if way == "whole" else RANKS)]
    mx.eval(held)
    base, mlx = begin()
    there = 0
    if way == "whole":
        write_checkpoint(target, 1, "run", {}, snapshot(state(0), 0)())
    else:
        outcomes = run_ranks(RANKS, save)
        assert outcomes == [None] * RANKS, outcomes
print(json.dumps([4 * EACH, peak() - base - there, mx.get_peak_memory() - mlx - there]))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="measured by Linux's /proc")
@pytest.mark.parametrize("way", ["whole", "shared", "sent"])
def test_saving_and_reading_take_no_more_memory_than_the_largest_array(
    way: str, tmp_path: Path
) -> None:
    """384 MiB in arrays of 64, whole or divided among two ranks, which are threads of one process."""
    support = str(Path(__file__).parents[1] / "support")
    for what in ("saved", "read"):
        command = [sys.executable, "-c", MEMORY, way, support, str(tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        largest, resident, arrays = json.loads(done.stdout.splitlines()[-1])
        # Of the ranks that are threads here each has its own, and their exchange copies what passes
        # by.
        room = largest * (2 if way == "sent" else 1)
        assert resident < room + (48 << 20), (what, resident)
        assert arrays <= room, (what, arrays)
