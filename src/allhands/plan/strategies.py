"""What each rank holds under each way of dividing a training: which of them fit, and which of them are built here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from allhands.plan.memory import Blocks, Memory, Work
from allhands.plan.sizes import all_weights, expert_weights

# Bytes of a weight in 4 bits with groups of 64, against one of two bytes.
_QUANTISED = 4.5 / 16
# Optimizers for which an array is no more than its numbers, so that any part of it can be updated by itself.
ELEMENTWISE = ("adam", "adamw", "sgd")


@dataclass(frozen=True)
class Strategy:
    """One way of dividing the work.

    Attributes:
        ranks: computers that it takes.
        parts: bytes of a rank by what they are for, in the order of a table.
        rank_bytes: at the peak; less than all parts, which do not come together.
        built: whether allhands does it; else it is for a framework that is named in the advice.
        flags: what switches it on.
    """

    name: str
    ranks: int
    parts: dict[str, int]
    rank_bytes: int
    built: bool = True
    flags: str = ""


def strategies(
    work: Work,
    blocks: Blocks,
    ranks: int,
    bucket_bytes: int,
    of: Callable[[Work], Memory],
    *,
    quantised: bool,
    together: bool = False,
    divides: bool = True,
) -> Iterator[Strategy]:
    """All ways that make sense for this work on ``ranks`` computers, the simplest first.

    Args:
        work: of one computer alone, with the whole batch in micro-batches as it would cut it.
        of: the arrays of a rank's work at its peak.
        quantised: whether the model's weights are already.
        together: whether the ranks are processes of one computer.
        divides: whether the optimizer's state can be divided: on a Linux CPU it is not.
    """
    yield _of("as it is", 1, work, of(work), 0)
    one = replace(work, tokens=max(1, work.tokens // 2), accumulated=True)
    yield _of("half micro-batches", 1, one, of(one), 0, flags=f"--micro-batch-tokens {one.tokens}")
    if not work.recomputed:
        again = replace(work, recomputed=True)
        yield _of("checkpointing", 1, again, of(again), 0, flags="--grad-checkpoint")
    if not quantised and work.method != "full":
        small = replace(work, weights_bytes=int(work.weights_bytes * _QUANTISED) + work.trained_bytes)
        yield _of("weights in 4 bits", 1, small, of(small), 0, flags="allhands model get MODEL --quantize 4")
    if ranks < 2:
        return
    share, start = work.divided(ranks), f"-n {ranks}" if together else "--hostfile hosts.json"
    memory = of(share)
    yield _of("data parallel", ranks, share, memory, bucket_bytes, flags=start)
    if divides and work.optimizer in ELEMENTWISE:
        update = memory.update - memory.renewed * (ranks - 1) // ranks
        parted = replace(memory, optimizer=memory.optimizer // ranks, update=update)
        flags = f"{start} --shard-optimizer on"
        yield _of("optimizer divided", ranks, share, parted, bucket_bytes, flags=flags)
    if work.method == "full":
        block = work.weights_bytes // max(1, blocks.layers)
        whole = replace(memory, weights=memory.weights // ranks + 2 * block, optimizer=memory.optimizer // ranks)
        parted = work.trained_bytes * (ranks - 1) // ranks
        update = memory.update - parted - memory.renewed * (ranks - 1) // ranks
        whole = replace(whole, backward=whole.backward - parted, update=update)
        yield _of("parameters sharded", ranks, share, whole, 2 * block, built=False)
    tensor = of(
        replace(
            work,
            weights_bytes=work.weights_bytes // ranks,
            trained_bytes=work.trained_bytes // ranks,
            by_adam_bytes=work.by_adam_bytes // ranks,
        )
    )
    # What lies between the products is on every rank whole: about a third of what is kept.
    saved = tensor.activations - (tensor.activations // 3 + 2 * tensor.activations // (3 * ranks))
    tensor = replace(
        tensor,
        activations=tensor.activations - saved,
        backward=tensor.backward - saved,
        loss=max(tensor.logits, tensor.loss - saved),
    )
    yield _of("tensors sharded", ranks, work, tensor, 0, built=False)
    if blocks.experts >= ranks:
        kept = 1 - expert_weights(blocks) / all_weights(blocks, tied=True) * (ranks - 1) / ranks
        trained = int(kept * work.trained_bytes) if work.method == "full" else work.trained_bytes
        some = replace(share, weights_bytes=int(kept * work.weights_bytes), trained_bytes=trained)
        yield _of("experts sharded", ranks, some, of(some), bucket_bytes, built=False)
    if blocks.layers >= ranks:
        layers = -(-work.trained_layers // ranks)
        piece = replace(
            work,
            trained_layers=layers,
            weights_bytes=work.weights_bytes // ranks,
            trained_bytes=work.trained_bytes // ranks,
            by_adam_bytes=work.by_adam_bytes // ranks,
        )
        yield _of("pipeline of layers", ranks, piece, of(piece), 0, built=False)


def _of(
    name: str, ranks: int, work: Work, memory: Memory, bucket_bytes: int, *, built: bool = True, flags: str = ""
) -> Strategy:
    gradients = work.trained_bytes * (2 if work.accumulated else 1)
    parts = {
        "weights": memory.weights,
        "optimizer": memory.optimizer,
        "gradients": gradients,
        "activations": memory.activations,
        "logits": memory.logits,
        "buckets": bucket_bytes,
    }
    return Strategy(name, ranks, parts, memory.arrays + bucket_bytes, built, flags)
