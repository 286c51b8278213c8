"""Memory of a rank under each way of dividing a training, by the costs of the strategies themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from allhands.parallel.costs import LocalCosts, with_left_out
from allhands.parallel.registry import STRATEGIES, Entry, TrainingNeeds
from allhands.parallel.rounds import Rounds
from allhands.run.model_sizes import all_weights, expert_weights
from allhands.run.training_memory import Blocks, Memory, Work

# Bytes of a weight in 4 bits with groups of 64, against one of two bytes.
_QUANTISED = 4.5 / 16
# What switches ways on.
CHECKPOINT = "--grad-checkpoint"
_DATA, _ZERO1 = STRATEGIES["data"], STRATEGIES["zero1"]
SHARD = _ZERO1.flags
QUANTISE = "allhands model get MODEL --quantize 4"
_THEN = ", then "

_Change = Callable[[Work], Work]


@dataclass(frozen=True)
class Way:
    """One way of dividing the work.

    Attributes:
        ranks: computers that it takes.
        parts: bytes of the rank with the largest share by what they are for, in the order of a table.
        rank_bytes: of that rank at the peak; less than all parts, which do not come together.
        by_rank: the same of each rank; all alike where each has an equal share.
        built: whether allhands does it; else it is for a framework that is named in the advice.
        flags: what switches it on; ``more`` of these what saves memory.
        sent_bytes: that a rank sends in a step; 0 where that is not worked out.
        fits: whether each rank's bytes do; ``None`` where that is not known.
        combined: whether several flags save memory together, which is of interest where none alone is enough.
    """

    name: str
    ranks: int
    parts: dict[str, int]
    rank_bytes: int
    built: bool = True
    flags: str = ""
    combined: bool = False
    by_rank: tuple[int, ...] = ()
    more: str = ""
    sent_bytes: int = 0
    fits: bool | None = None

    def with_bytes(self, of: Callable[[int], int]) -> Way:
        """With other bytes of each rank, worked out from those that it has."""
        found = {each: of(each) for each in {self.rank_bytes, *self.by_rank}}
        by_rank = tuple(found[each] for each in self.by_rank)
        return replace(self, rank_bytes=found[self.rank_bytes], by_rank=by_rank)


def ways_of_one(work: Work, of: Callable[[Work], Memory], *, quantised: bool) -> Iterator[Way]:
    """All ways that make sense for this work on one computer, the simplest first.

    Those of several flags together are all of them, from the one that costs the least time on: see :func:`those_told`.

    Args:
        work: the whole batch, in micro-batches as it would be cut.
        of: the arrays of a rank's work at its peak.
        quantised: whether the model's weights are already.
    """

    def way(name: str, flags: str, changed: Work, *, combined: bool = False) -> Way:
        return replace(_of(name, 1, changed, of(changed), 0, combined=combined), flags=flags)

    yield way("as it is", "", work)
    half = _cut(max(work.row_tokens, work.tokens // 2))
    changes = {flags: (name, change(work)) for name, flags, change in _less(work)}
    simple = {half: "half micro-batches", CHECKPOINT: "checkpointing"}
    for flags, name in simple.items():
        if flags in changes:
            yield way(name, flags, changes[flags][1])
    for flags, (name, changed) in changes.items():
        if flags not in simple:
            yield way(name, flags, changed, combined=True)
    if not quantised and work.method != "full":
        small = _in_four_bits(work)
        yield way("weights in 4 bits", QUANTISE, small)
        for name, flags, change in _less(small):
            yield way(f"4 bits, {name}", f"{QUANTISE}{_THEN}{flags}", change(small), combined=True)


def ways_of_team(
    work: Work,
    blocks: Blocks,
    shares: Sequence[float],
    bucket_bytes: int,
    of: Callable[[Work], Memory],
    *,
    quantised: bool,
    together: bool = False,
    divides: bool = True,
    scatters: bool = False,
    rounds: Rounds | None = None,
) -> Iterator[Way]:
    """All ways that make sense for this work on several computers; as :func:`ways_of_one`.

    Args:
        work: of one computer alone.
        shares: of each computer the part of a batch that it gets.
        together: whether the ranks are processes of one computer.
        divides: whether the optimizer's state can be divided: on a Linux CPU it is not.
        scatters: whether the back-end has a reduce-scatter.
        rounds: of local steps, or of one step with a delay, where such were asked for: then these are all.
    """
    plain = _DATA if rounds is None else _in_rounds(rounds)
    ranks, largest = len(shares), work.share(max(shares))
    start = f"-n {ranks}" if together else "--hostfile hosts.json"
    start += f" --compress {work.packed.codec.name}" if work.packed is not None else ""
    wanted = TrainingNeeds(work.optimizer, cpu_native=not divides)
    divided = rounds is None and not _ZERO1.unfit(wanted)

    def way(name: str, more: str, change: _Change, entry: Entry = plain, *, combined: bool = False) -> Way:
        """All ranks with the same flags, each with its share."""
        found = {share: change(work.share(share)) for share in {*shares}}
        kept = {share: with_left_out(entry.costs.memory(of(each), ranks), each) for share, each in found.items()}
        bytes_of = {share: each.arrays + bucket_bytes for share, each in kept.items()}
        changed = found[max(shares)]
        made = _of(name, ranks, changed, kept[max(shares)], bucket_bytes, combined=combined)
        before, then, after = more.partition(_THEN)
        flags = f"{before}{_THEN}{start} {after}" if QUANTISE in more else f"{start} {more}"
        if rounds is not None and entry.flags not in flags:
            flags = f"{flags.strip()} {entry.flags}"
        more = more if not then or after else before
        # Gradients travel in the type of what is trained.
        trained, packed = work.trained_bytes, work.packed
        travels = packed.traffic(trained, ranks) if packed is not None and entry.packs else None
        traffic = entry.costs.traffic(trained, trained, scatters=scatters, packed=travels)
        return replace(
            made,
            by_rank=tuple(bytes_of[share] for share in shares),
            flags=flags.strip(),
            more=more,
            sent_bytes=traffic.sent(ranks),
        )

    whole = [each for each in STRATEGIES.values() if each.exact and not each.divides_model]
    for entry in whole if rounds is None else [plain]:
        if not entry.unfit(wanted):
            yield way(entry.title, entry.flags, _same, entry)
    ways = [*_less(largest)]
    for name, flags, change in ways:
        yield way(f"{plain.title}, {name}", flags, change, combined=True)
    for name, flags, change in ways if divided else ():
        yield way(f"divided, {name}", f"{SHARD} {flags}", change, _ZERO1, combined=True)
    if not quantised and work.method != "full":
        yield way(f"4 bits, {plain.title}", f"{QUANTISE}{_THEN}", _in_four_bits)
        for name, flags, change in ways:
            yield way(
                f"4 bits, {name}", f"{QUANTISE}{_THEN}{flags}", partial(_both, _in_four_bits, change), combined=True
            )
    yield from _of_frameworks(work, blocks, ranks, bucket_bytes, of)


def _in_rounds(rounds: Rounds) -> Entry:
    """Local steps, or delayed gradients, as they were asked for."""
    if rounds.every == 1:
        return STRATEGIES["delayed"]
    return replace(STRATEGIES["local"], costs=LocalCosts(rounds), flags=rounds.flags)


def _same(work: Work) -> Work:
    return work


def _in_four_bits(work: Work) -> Work:
    return replace(work, weights_bytes=int(work.weights_bytes * _QUANTISED) + work.trained_bytes)


def _both(first: _Change, then: _Change, work: Work) -> Work:
    return then(first(work))


def _less(work: Work) -> Iterator[tuple[str, str, _Change]]:
    """Name, flags and change of all that saves memory and changes no result, from what costs the least time on.

    Micro-batches are halved as far as one row; then the same with activations that are computed again.
    """
    sizes: list[int] = []
    size = work.tokens
    while size > work.row_tokens:
        size = max(work.row_tokens, size // 2)
        sizes.append(size)
    for size in sizes:
        yield f"micro-batches of {size}", _cut(size), partial(_smaller, tokens=size)
    if work.recomputed:
        return
    yield "checkpointing", CHECKPOINT, partial(replace, recomputed=True)
    for size in sizes:
        flags = f"{CHECKPOINT} {_cut(size)}"
        yield f"checkpointing, micro-batches of {size}", flags, partial(_smaller, tokens=size, recomputed=True)


def _smaller(work: Work, *, tokens: int, recomputed: bool = False) -> Work:
    """With micro-batches of at most so many places."""
    return replace(work.cut(min(tokens, work.tokens)), recomputed=recomputed or work.recomputed)


def _cut(tokens: int) -> str:
    return f"--micro-batch-tokens {tokens}"


def cheapest(ways: Sequence[Way]) -> Way | None:
    """Return the way that fits and costs the least: what changes results comes last, before it what takes time most."""
    able = [way for way in ways if way.built and way.fits is not False]
    return min(able, key=lambda way: (QUANTISE in way.flags, CHECKPOINT in way.flags, SHARD in way.flags), default=None)


def those_told(ways: Sequence[Way]) -> list[Way]:
    """Return the ways that are worth telling: of those of several flags the first that fits, if no simple one does.

    Where none fits, the one that takes the least, of equal ones that with the most flags, shows by how much. On several
    computers the cheapest one is always told.
    """
    best = cheapest(ways) if ways and ways[0].ranks > 1 else None
    chosen = [] if best is None else [best]
    found = False
    for rounded in (False, True):  # 4 bits change the results: they come by themselves, and after the others
        group = [way for way in ways if way.built and way.flags.startswith(QUANTISE) is rounded]
        more = [way for way in group if way.combined]
        found |= any(way.fits is not False for way in group if not way.combined)
        if more and not found:
            least = min(reversed(more), key=lambda way: way.rank_bytes)
            chosen.append(next((way for way in more if way.fits), least))
            found = bool(chosen[-1].fits)
    return [way for way in ways if not way.combined or way in chosen]


def _of_frameworks(
    work: Work, blocks: Blocks, ranks: int, bucket_bytes: int, of: Callable[[Work], Memory]
) -> Iterator[Way]:
    """Ways that divide the model itself."""
    share = work.divided(ranks)
    memory = of(share)
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


def _of(
    name: str,
    ranks: int,
    work: Work,
    memory: Memory,
    bucket_bytes: int,
    *,
    built: bool = True,
    combined: bool = False,
) -> Way:
    gradients = work.trained_bytes * (2 if work.accumulated else 1)
    parts = {
        "weights": memory.weights,
        "optimizer": memory.optimizer,
        "gradients": gradients,
        "activations": memory.activations,
        "logits": memory.logits,
        "buckets": bucket_bytes,
    }
    whole = memory.arrays + bucket_bytes
    return Way(name, ranks, parts, whole, built, combined=combined, by_rank=(whole,) * ranks)
