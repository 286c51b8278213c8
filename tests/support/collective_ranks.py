"""Collectives, groups and streams, as every rank of a group finds them: compared with one process
that has all parts.

Run as a program on every rank, in a ring (see ``ring_ranks.run_ring``) or under mpirun:
``collective_ranks.py ring 2``. Prints a JSON object: for each case the largest error, in parts of
the largest right number.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import allhands  # before MLX, for its BLAS

# isort: split
import mlx.core as mx

from allhands.distributed.backend import Communicator, MlxGroup, TwoStreamsError, connect, moved_to
from allhands.distributed.collectives import (
    all_max,
    gathered,
    received,
    replicated,
    scattered,
    sent,
    summed,
)
from allhands.distributed.groups import along
from allhands.distributed.mesh import Mesh
from allhands.errors import ConfigError

Arrays = list[mx.array]
# A rank's loss, of what it has; the whole loss, of what all have; what all have.
Case = tuple[Callable[[mx.array, int], mx.array], mx.array, Callable[[Arrays], mx.array], Arrays]


def numbers(rank: int, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """Of a rank: others than those of any other."""
    return mx.random.normal(shape, key=mx.random.key(17 + 5 * rank)).astype(dtype)


def used(array: mx.array, rank: int) -> mx.array:
    """What a rank makes of something: another number on each, of each entry another one."""
    slopes = mx.arange(1, array.size + 1).reshape(array.shape) / array.size + rank
    return mx.sum(mx.sin(array.astype(mx.float32) * slopes))


def error(found: mx.array, right: mx.array) -> float:
    """The largest difference, in parts of the largest right number; of other shapes or types
    infinite.
    """
    if found.shape != right.shape:
        return float("inf")
    found, right = found.astype(mx.float32), right.astype(mx.float32)
    return float((mx.abs(found - right).max() / mx.maximum(mx.abs(right).max(), 1e-6)).item())


# --- each pair, of a group whose ranks have numbers 0 to n - 1 ------------------------------------


def pair_replicated(group: Communicator, dtype: mx.Dtype) -> Case:
    def ours(x: mx.array, rank: int) -> mx.array:
        return used(replicated(group, x), rank)

    def one(parts: Arrays) -> mx.array:
        return sum((used(parts[0], rank) for rank in range(group.size)), mx.array(0.0))

    same = numbers(99, (3, 4), dtype)
    return ours, same, one, [same] * group.size


def pair_summed(group: Communicator, dtype: mx.Dtype) -> Case:
    def ours(x: mx.array, rank: int) -> mx.array:
        return used(summed(group, mx.tanh(x)), 0)

    def one(parts: Arrays) -> mx.array:
        return used(sum((mx.tanh(part) for part in parts[1:]), mx.tanh(parts[0])), 0)

    every = [numbers(rank, (5,), dtype) for rank in range(group.size)]
    return ours, every[group.rank], one, every


def pair_gathered(group: Communicator, dtype: mx.Dtype) -> Case:
    def ours(x: mx.array, rank: int) -> mx.array:
        return used(gathered(group, x * x), rank)

    def one(parts: Arrays) -> mx.array:
        whole = mx.concatenate([part * part for part in parts])
        return sum((used(whole, rank) for rank in range(group.size)), mx.array(0.0))

    every = [numbers(rank, (2, 3), dtype) for rank in range(group.size)]
    return ours, every[group.rank], one, every


def pair_scattered(group: Communicator, dtype: mx.Dtype) -> Case:
    def ours(x: mx.array, rank: int) -> mx.array:
        return used(scattered(group, mx.tanh(x)), rank)

    def one(parts: Arrays) -> mx.array:
        whole = sum((mx.tanh(part) for part in parts[1:]), mx.tanh(parts[0]))
        return sum(
            (used(whole[2 * rank : 2 * rank + 2], rank) for rank in range(group.size)),
            mx.array(0.0),
        )

    every = [numbers(rank, (2 * group.size, 3), dtype) for rank in range(group.size)]
    return ours, every[group.rank], one, every


def pair_all_max(group: Communicator, dtype: mx.Dtype) -> Case:
    def ours(x: mx.array, rank: int) -> mx.array:
        return used(x - all_max(group, x), rank)

    def one(parts: Arrays) -> mx.array:
        most = mx.stop_gradient(mx.max(mx.stack(parts), axis=0))
        return sum((used(part - most, rank) for rank, part in enumerate(parts)), mx.array(0.0))

    every = [numbers(rank, (6,), dtype) for rank in range(group.size)]
    return ours, every[group.rank], one, every


PAIRS = {
    "replicated": pair_replicated,
    "summed": pair_summed,
    "gathered": pair_gathered,
    "scattered": pair_scattered,
    "all_max": pair_all_max,
}


def pair_errors(group: Communicator, name: str, dtype: mx.Dtype, compiled: bool) -> float:
    """Of a rank's gradient and, where all ranks' losses are one sum, of that."""
    ours, mine, one, every = PAIRS[name](group, dtype)
    function = mx.value_and_grad(lambda x: ours(x, group.rank))
    loss, gradient = (mx.compile(function) if compiled else function)(mine)
    exact = [part.astype(mx.float32) for part in every]
    right_loss, right = mx.value_and_grad(one)(exact)
    # What is the same on all ranks has one gradient, which is not the sum of its parts' here.
    total = group.all_sum(loss) if name != "summed" else loss
    place = 0 if name == "replicated" else group.rank
    mx.eval(total, gradient, right)
    assert gradient.dtype == dtype
    return max(error(total, right_loss), error(gradient, right[place]))


# --- a chain of stages ----------------------------------------------------------------------------


def stage(x: mx.array, weight: mx.array) -> mx.array:
    return mx.tanh(x @ weight)


def chain_error(group: Communicator, dtype: mx.Dtype, compiled: bool, rows: int = 6) -> float:
    """Each rank computes a stage, gets its input from the one before and its gradient from the one
    after.
    """
    width = 16
    rank, last = group.rank, group.size - 1
    given = numbers(50, (rows, width), dtype)
    weights = [numbers(each, (width, width), dtype) / 4 for each in range(group.size)]

    def ours(weight: mx.array, anchor: mx.array) -> mx.array:
        x = given if rank == 0 else received(group, (rows, width), dtype, rank - 1, after=anchor)
        y = stage(x, weight)
        return (
            used(y, 1) if rank == last else mx.sum(0 * sent(group, y, rank + 1).astype(mx.float32))
        )

    def one(weights: Arrays) -> mx.array:
        x = given.astype(mx.float32)
        for weight in weights:
            x = stage(x, weight)
        return used(x, 1)

    function = mx.value_and_grad(ours, argnums=(0, 1))
    loss, (gradient, anchored) = (mx.compile(function) if compiled else function)(
        weights[rank], mx.zeros((1,))
    )
    mx.eval(loss, gradient, anchored)
    right_loss, right = mx.value_and_grad(one)([weight.astype(mx.float32) for weight in weights])
    total = group.all_sum(loss.astype(mx.float32))
    mx.eval(total, right)
    assert gradient.dtype == dtype
    return max(error(total, right_loss), error(gradient, right[rank]))


# --- groups along axes ----------------------------------------------------------------------------


def shapes_of(size: int) -> Iterator[dict[str, int]]:
    """Meshes of so many ranks: all on one axis, and 2 x 2."""
    yield {}
    yield {"data": 1, "tensor": size}
    if size == 4:
        yield from (
            {"data": 2, "tensor": 2},
            {"data": 2, "context": 2},
            {"shard": 2, "tensor": 2, "data": 1},
        )


def group_errors(world: Communicator) -> Iterator[tuple[str, float]]:
    """Of sums and gatherings along each axis: with what each member brings, which any process can
    compute.
    """
    for sizes in shapes_of(world.size):
        mesh = Mesh(world.rank, world.size, **sizes)
        for axes in (("data",), ("tensor",), ("context",), ("data", "shard"), ("data", "tensor")):
            group, members = along(world, mesh, *axes), mesh.members(*axes)
            assert (group.size, group.rank) == (len(members), members.index(world.rank))
            assert (group is world) == (len(members) == world.size)
            name = f"{sizes} {axes}"
            for dtype, shape in ((mx.float32, (3, 2)), (mx.int32, (1,)), (mx.bfloat16, ())):
                every = [(8 * numbers(rank, shape, mx.float32)).astype(dtype) for rank in members]
                mine = every[group.rank]
                right = sum(every[1:], every[0])
                yield f"sum {name} {dtype}", error(group.all_sum(mine), right)
                if shape:
                    yield (
                        f"gather {name} {dtype}",
                        error(group.all_gather(mine), mx.concatenate(every)),
                    )
            # What is not finite stays within its group.
            spoilt = mx.full((2,), float("nan") if world.rank == 0 else 1.0)
            clean = bool(mx.isfinite(group.all_sum(spoilt)).all().item())
            yield f"nan {name}", float(clean != (0 not in members))
            if 1 < group.size < world.size:
                for pair in PAIRS:
                    yield (
                        f"pair {pair} {name}",
                        pair_errors(group, pair, mx.float32, compiled=False),
                    )


def pipelines_error(world: Communicator) -> Iterator[tuple[str, float]]:
    """Two pipelines of two stages beside each other, which send within their groups."""
    if world.size == 4:
        mesh = Mesh(world.rank, 4, data=2, pipe=2)
        group = along(world, mesh, "pipe")
        yield "chain of a group", chain_error(group, mx.float32, compiled=False)
        try:
            along(world, mesh, "data")
            refused = False
        except ConfigError:
            refused = True
        yield "unlike stages", float(refused != (world.backend == "ring"))


# --- one stream -----------------------------------------------------------------------------------


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
    yield (
        "default",
        max(
            error(first, mx.full((200_000,), right)), error(second, mx.full((200_000,), 2 * right))
        ),
    )
    # A person's streams: one after the other, lazy or not.
    streams = [mx.new_stream(mx.cpu) for _ in range(3)]
    means = [
        allhands.average_gradients(
            {"a": factor * mine}, world.group, communication_stream=stream, num_tokens=tokens
        )
        for factor, (stream, tokens) in enumerate(product(streams, (None, mx.array(3))), 1)
    ]
    first = world.all_sum(mine)
    mx.eval(first, means)
    found = [
        error(mean["a"], mx.full((200_000,), k * right / size)) for k, mean in enumerate(means, 1)
    ]
    yield "of a person", max(*found, error(first, mx.full((200_000,), right)))
    compiled = mx.compile(
        lambda x: allhands.average_gradients({"a": x}, world.group, 0, other)["a"]
    )
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


# --- MLX's own rules ------------------------------------------------------------------------------


def rules_of_mlx(world: MlxGroup) -> Iterator[tuple[str, float]]:
    """How wrong MLX's own gradients are where ours are right; 0 would say that ours are needed no
    more.
    """
    group = world.group
    theirs: dict[str, Any] = {
        "gathered": lambda x: used(mx.distributed.all_gather(x * x, group=group), world.rank),
        "all_max": lambda x: used(x - mx.distributed.all_max(x, group=group), world.rank),
    }
    for name, loss in theirs.items():
        _, mine, one, every = PAIRS[name](world, mx.float32)
        yield f"mlx {name}", error(mx.grad(loss)(mine), mx.grad(one)(every)[world.rank])
    for name, function in (
        ("scattered", mx.distributed.sum_scatter),
        ("sent", partial(mx.distributed.send, dst=0)),
    ):
        try:
            mx.grad(lambda x, function=function: mx.sum(function(x, group=group)))(
                mx.ones((world.size,))
            )
            yield f"mlx {name}", 0.0
        except (RuntimeError, ValueError):
            yield f"mlx {name}", 1.0


def main(backend: str, size: int) -> None:
    """Join, find everything, tell."""
    rank = int(os.environ.get("MLX_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
    world = connect(backend, size, rank)
    assert isinstance(world, MlxGroup)
    found: dict[str, float] = {}
    for dtype, compiled in product((mx.float32, mx.bfloat16), (False, True)):
        case = f"{str(dtype).rpartition('.')[2]}{' compiled' * compiled}"
        for name in PAIRS:
            found[f"{name} {case}"] = pair_errors(world, name, dtype, compiled)
        found[f"chain {case}"] = chain_error(world, dtype, compiled)
    if world.size == 2:  # what both sent first, neither would get rid of
        found["chain of 64 MB"] = chain_error(world, mx.float32, compiled=False, rows=1_000_000)
    for cases in (group_errors, pipelines_error, rules_of_mlx, stream_errors):
        found.update(cases(world))
    print(json.dumps(found), flush=True)
    if backend == "ring":
        os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
