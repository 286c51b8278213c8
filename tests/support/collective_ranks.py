"""Groups, messages and streams, as every rank of a group finds them: compared with one process that has all parts.

Run as a program on every rank, in a ring (see ``ring_ranks.run_ring``) or under mpirun: ``collective_ranks.py ring 2``.
Prints a JSON object: for each case the largest error, in parts of the largest right number.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from itertools import product

import allhands  # before MLX, for its BLAS

# isort: split
import mlx.core as mx

from allhands.distributed.backend import Communicator, MlxGroup, TwoStreamsError, connect, moved_to
from allhands.distributed.groups import along
from allhands.distributed.mesh import Axis, Mesh
from allhands.errors import ConfigError


def numbers(rank: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Of a rank: others than those of any other."""
    return mx.random.normal(shape, key=mx.random.key(17 + 5 * rank)).astype(dtype)


def error(found: mx.array, right: mx.array) -> float:
    """The largest difference, in parts of the largest right number; of other shapes or types infinite."""
    if found.shape != right.shape:
        return float("inf")
    found, right = found.astype(mx.float32), right.astype(mx.float32)
    return float((mx.abs(found - right).max() / mx.maximum(mx.abs(right).max(), 1e-6)).item())


# --- messages -------------------------------------------------------------------------------------------


def message_errors(group: MlxGroup) -> Iterator[tuple[str, float]]:
    """A large array goes around once; who is even sends first."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    mine = numbers(group.rank, (4_000_000,), mx.float32)
    if group.rank % 2 == 0:
        mx.eval(group.send(mine, right))
    got = group.receive(mine.shape, mine.dtype, left)
    mx.eval(got)
    if group.rank % 2:
        mx.eval(group.send(mine, right))
    yield "sent around", error(got, numbers(left, mine.shape, mine.dtype))


# --- groups along axes ------------------------------------------------------------------------------------


def group_errors(world: Communicator) -> Iterator[tuple[str, float]]:
    """Of sums and gatherings along each axis: with what each member brings, which any process can compute."""
    unlike = 0.0
    for pipe in (each for each in (1, 2, world.size) if world.size % each == 0):
        mesh = Mesh(world.rank, world.size, pipe=pipe)
        axes: tuple[Axis, ...] = ("data", "pipe")
        for axis in axes:
            members = mesh.members(axis)
            try:
                group = along(world, mesh, axis)
            except ConfigError:
                unlike += float(world.backend != "ring" or len(members) in (1, world.size))
                continue
            assert (group.size, group.rank) == (len(members), members.index(world.rank))
            assert (group is world) == (len(members) == world.size)
            name = f"{pipe} {axis}"
            for dtype, shape in ((mx.float32, (3, 2)), (mx.int32, (1,)), (mx.bfloat16, ())):
                every = [(8 * numbers(rank, shape, mx.float32)).astype(dtype) for rank in members]
                mine = every[group.rank]
                right = sum(every[1:], every[0])
                yield f"sum {name} {dtype}", error(group.all_sum(mine), right)
                if shape:
                    yield f"gather {name} {dtype}", error(group.all_gather(mine), mx.concatenate(every))
            # What is not finite stays within its group.
            spoilt = mx.full((2,), float("nan") if world.rank == 0 else 1.0)
            clean = bool(mx.isfinite(group.all_sum(spoilt)).all().item())
            yield f"nan {name}", float(clean != (0 not in members))
    yield "unlike stages", unlike


# --- one stream ---------------------------------------------------------------------------------------------


def stream_errors(world: MlxGroup) -> Iterator[tuple[str, float]]:
    """Whether another stream is refused, waited for, or not taken at all."""
    size = world.size
    mine, right = mx.full((200_000,), world.rank + 1.0), size * (size + 1) / 2
    mx.eval(world.all_sum(mine))
    other = mx.new_stream(mx.cpu)

    def refused(call: Callable[[], object]) -> float:
        try:
            call()
        except TwoStreamsError as found:
            return float(found.code != "two-streams" or found.exit_code != 7)
        return 1.0

    yield "another stream", refused(lambda: MlxGroup(world.group, world.backend, other))
    beside: list[float] = []
    everyone = allhands.World(world.rank, size, world.rank, size, world.backend, "", world)

    def elsewhere() -> None:
        beside.append(refused(lambda: world.all_sum(mx.ones((2,)))))
        released.acquire()
        beside.append(error(world.all_sum(mine), mx.full((200_000,), right)))
        everyone.barrier()

    released = threading.Semaphore(0)
    thread = threading.Thread(target=elsewhere)
    thread.start()
    while not beside:
        time.sleep(0.01)
    everyone.barrier()
    released.release()
    thread.join()
    yield "another thread", max(beside) if len(beside) == 2 else 1.0
    # MLX's default is another stream here, and both sums are there at once.
    first = world.all_sum(mine)
    with mx.stream(other):
        second = world.all_sum(2 * mine)
    mx.eval(first, second)
    yield "default", max(error(first, mx.full((200_000,), right)), error(second, mx.full((200_000,), 2 * right)))
    # A person's streams: one after the other, lazy or not.
    streams = [mx.new_stream(mx.cpu) for _ in range(3)]
    means = [
        allhands.average_gradients({"a": factor * mine}, world.group, communication_stream=stream, num_tokens=tokens)
        for factor, (stream, tokens) in enumerate(product(streams, (None, mx.array(3))), 1)
    ]
    first = world.all_sum(mine)
    mx.eval(first, means)
    found = [error(mean["a"], mx.full((200_000,), k * right / size)) for k, mean in enumerate(means, 1)]
    yield "of a person", max(*found, error(first, mx.full((200_000,), right)))
    compiled = mx.compile(lambda x: allhands.average_gradients({"a": x}, world.group, 0, other)["a"])
    try:
        compiled(mine)
        yield "compiled", 1.0
    except ConfigError:
        compiled = mx.compile(lambda x: allhands.average_gradients([x], world.group)[0])
        yield "compiled", error(compiled(mine), mx.full((200_000,), right / size))
    moved = moved_to(world, other)
    mx.eval(sums := [moved.all_sum(mine), world.all_sum(mine)])
    yield "moved", max(error(one, mx.full((200_000,), right)) for one in sums)
    yield "after the move", refused(lambda: MlxGroup(world.group, world.backend, streams[0]))


def main(backend: str, size: int) -> None:
    """Join, find everything, tell."""
    rank = int(os.environ.get("MLX_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    world = connect(backend, size, rank)
    assert isinstance(world, MlxGroup)
    found: dict[str, float] = {}
    for cases in (group_errors, message_errors, stream_errors):
        found.update(cases(world))
    print(json.dumps(found), flush=True)
    if backend == "ring":
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
