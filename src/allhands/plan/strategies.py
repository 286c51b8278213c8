"""Memory of a rank for each way of dividing a training, from the strategies' own costs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from allhands.parallel.costs import LocalCosts, with_left_out
from allhands.parallel.registry import STRATEGIES, Entry, TrainingNeeds
from allhands.parallel.rounds import Rounds
from allhands.run.training_memory import Memory, Work

# Size of a weight in 4 bits with groups of 64, relative to a weight of two bytes.
_QUANTISED = 4.5 / 16
# Flags and a command that switch ways on.
CHECKPOINT = "--grad-checkpoint"
_DATA, _ZERO1 = STRATEGIES["data"], STRATEGIES["zero1"]
SHARD = _ZERO1.flags
QUANTISE = "allhands model get MODEL --quantize 4"
_THEN = ", then "

_Change = Callable[[Work], Work]


@dataclass(frozen=True)
class Setting:
    """The ranks of a plan, and what they can do.

    Attributes:
        of: function that returns the arrays of a rank's work at its peak.
        needed: function that returns the bytes of a rank, by its arrays and the number of ranks,
            without the buckets of the exchange.
        quantised: True if the model's weights are quantised already.
        bucket_bytes: bytes of the buckets of the exchange between several ranks.
        together: True if the ranks are processes of one computer.
        divides: True if the optimizer's state can be divided; on a Linux CPU it cannot.
        scatters: True if the back-end has a reduce-scatter.
        rounds: requested rounds of local steps, or of one step with a delay; several ranks then
            have no other way.
    """

    of: Callable[[Work], Memory]
    needed: Callable[[Memory, int], int]
    quantised: bool = False
    bucket_bytes: int = 0
    together: bool = False
    divides: bool = True
    scatters: bool = False
    rounds: Rounds | None = None


@dataclass(frozen=True)
class Way:
    """One way of dividing the work.

    Attributes:
        name: name for people.
        ranks: number of computers that it takes.
        parts: bytes of the rank with the largest share by purpose, in the order of a table.
        rank_bytes: bytes of this rank at its peak; less than the sum of all parts, which are not
            there at the same time.
        by_rank: bytes of each rank at its peak.
        flags: flags that start it, with ``more``.
        more: flags that ask for this way, or save memory.
        sent_bytes: bytes that a rank sends in a step.
        fits: True if each rank's bytes fit its computer; ``None`` if that is not known.
        combined: True if several flags save memory together; shown only if no simple way fits.
        strategy: name in the registry, ``context``, or several names joined by ``+``; empty: one
            rank, or local steps.
        step_s: seconds of a step; 0 if not predicted.
        training_s: seconds of the whole training; 0 if not predicted.
    """

    name: str
    ranks: int
    parts: dict[str, int]
    rank_bytes: int
    by_rank: tuple[int, ...]
    flags: str = ""
    more: str = ""
    sent_bytes: int = 0
    fits: bool | None = None
    combined: bool = False
    strategy: str = ""
    step_s: float = 0.0
    training_s: float = 0.0


def all_ways(work: Work, shares: Sequence[float], setting: Setting) -> list[Way]:
    """Return all ways that make sense for this work, the simplest first.

    Ways with several flags come in the order of the time that they cost; :func:`those_told` chooses
    among them.

    Args:
        work: the whole batch, in micro-batches as one computer would cut it.
        shares: the part of a batch of each rank.
    """
    return list(_AllWays(work, shares, setting).found())


class _AllWays:
    def __init__(self, work: Work, shares: Sequence[float], setting: Setting) -> None:
        self.shares, self.setting, self.ranks = shares, setting, len(shares)
        several = self.ranks > 1
        self.work = work if several else replace(work, packed=None)
        self.rounds = setting.rounds if several else None
        self.plain = _DATA if self.rounds is None else _in_rounds(self.rounds)
        start = launch_flags(self.ranks, together=setting.together)
        if self.work.packed is not None:
            start += f" --compress {self.work.packed.codec.name}"
        self.start = start if several else ""

    def found(self) -> Iterator[Way]:
        """Yield each strategy as it is, then with flags that save memory, then with weights in 4
        bits.
        """
        savings = [*_savings(self.work.share(max(self.shares)))]
        if self.ranks == 1:
            yield from self._of_one(savings)
            first = "weights in 4 bits"
        else:
            yield from self._of_several(savings)
            first = f"4 bits, {self.plain.title}"
        if self.setting.quantised or self.work.method == "full":
            return
        yield self._way(first, QUANTISE, _in_four_bits)
        for name, flags, change in savings:
            both = partial(_both, _in_four_bits, change)
            yield self._way(f"4 bits, {name}", f"{QUANTISE}{_THEN}{flags}", both, combined=True)

    def _of_one(self, savings: Sequence[tuple[str, str, _Change]]) -> Iterator[Way]:
        yield (plain := self._way("as it is", "", _same))
        half = _cut(max(self.work.row_tokens, self.work.tokens // 2))
        for name, flags, change in savings:
            simple = {half: "half micro-batches", CHECKPOINT: name}
            way = self._way(simple.get(flags, name), flags, change, combined=flags not in simple)
            if way.combined or way.rank_bytes < plain.rank_bytes:
                yield way

    def _of_several(self, savings: Sequence[tuple[str, str, _Change]]) -> Iterator[Way]:
        wanted = TrainingNeeds(self.work.optimizer, cpu_native=not self.setting.divides)
        entries = [each for each in STRATEGIES.values() if each.exact and not each.divides_model]
        if self.rounds is not None:
            entries = [self.plain]
        entries = [each for each in entries if not each.unfit(wanted)]
        for entry in entries:
            yield self._way(entry.title, entry.flags, _same, entry)
        for name, flags, change in savings:
            yield self._way(f"{self.plain.title}, {name}", flags, change, combined=True)
        for name, flags, change in savings if _ZERO1 in entries else ():
            yield self._way(f"divided, {name}", f"{SHARD} {flags}", change, _ZERO1, combined=True)

    def _way(
        self,
        name: str,
        more: str,
        change: _Change,
        entry: Entry | None = None,
        *,
        combined: bool = False,
    ) -> Way:
        """Return the way in which all ranks have the same flags, each with its share.

        Args:
            change: applies the flags ``more`` to the work of a rank.
        """
        entry = entry or self.plain
        works = {share: change(self.work.share(share)) for share in {*self.shares}}
        kept = {share: self._memory(entry, each) for share, each in works.items()}
        buckets = self.setting.bucket_bytes if self.ranks > 1 else 0
        needed = {
            share: self.setting.needed(each, self.ranks) + buckets for share, each in kept.items()
        }
        largest = max(self.shares)
        memory = kept[largest]
        gradients = works[largest].trained_bytes * (2 if works[largest].accumulated else 1)
        return Way(
            name=name,
            ranks=self.ranks,
            parts={
                "weights": memory.weights,
                "optimizer": memory.optimizer,
                "gradients": gradients,
                "activations": memory.activations,
                "logits": memory.logits,
                "buckets": buckets,
            },
            rank_bytes=needed[largest],
            by_rank=tuple(needed[share] for share in self.shares),
            flags=self._flags(more),
            more=more,
            sent_bytes=self._sent(entry) if self.ranks > 1 else 0,
            combined=combined,
            strategy="zero1"
            if entry is _ZERO1
            else "data"
            if self.ranks > 1 and self.rounds is None
            else "",
        )

    def _memory(self, entry: Entry, work: Work) -> Memory:
        return with_left_out(entry.costs.memory(self.setting.of(work), self.ranks), work)

    def _sent(self, entry: Entry) -> int:
        # Gradients have the types of the trained weights.
        trained, packed = self.work.trained_bytes, self.work.packed
        travels = (
            packed.traffic(trained, self.ranks) if packed is not None and entry.packs else None
        )
        return entry.costs.traffic(
            trained, trained, scatters=self.setting.scatters, packed=travels
        ).sent(self.ranks)

    def _flags(self, more: str) -> str:
        """Return the flags that start the ranks, with ``more``; the command for weights in 4 bits
        comes first.
        """
        after = more.removeprefix(QUANTISE).removeprefix(_THEN)
        rounds = (
            self.plain.flags if self.rounds is not None and self.plain.flags not in after else ""
        )
        flags = " ".join(filter(None, [self.start, after, rounds]))
        return _THEN.join(filter(None, [QUANTISE if QUANTISE in more else "", flags]))


def launch_flags(ranks: int, *, together: bool) -> str:
    """Return the flags that start ``ranks`` ranks, on one computer (``together``) or on several."""
    return f"-n {ranks}" if together else "--hostfile hosts.json"


def _in_rounds(rounds: Rounds) -> Entry:
    """Return the entry for the requested local steps or delayed gradients."""
    if rounds.every == 1:
        return STRATEGIES["delayed"]
    return replace(STRATEGIES["local"], costs=LocalCosts(rounds), flags=rounds.flags)


def _same(work: Work) -> Work:
    return work


def _in_four_bits(work: Work) -> Work:
    return replace(work, weights_bytes=int(work.weights_bytes * _QUANTISED) + work.trained_bytes)


def _both(first: _Change, then: _Change, work: Work) -> Work:
    return then(first(work))


def _savings(work: Work) -> Iterator[tuple[str, str, _Change]]:
    """Yield name, flags and change of all settings that save memory and change no result, in the
    order of the time that they cost.

    Micro-batches are halved down to one row; then the same with recomputed activations.
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
        yield (
            f"checkpointing, micro-batches of {size}",
            flags,
            partial(_smaller, tokens=size, recomputed=True),
        )


def _smaller(work: Work, *, tokens: int, recomputed: bool = False) -> Work:
    """Return ``work`` in micro-batches of at most ``tokens``."""
    return replace(work.cut(min(tokens, work.tokens)), recomputed=recomputed or work.recomputed)


def _cut(tokens: int) -> str:
    return f"--micro-batch-tokens {tokens}"


def cheapest(ways: Sequence[Way]) -> Way | None:
    """Return the cheapest way that fits; ``None`` if none does.

    Weights in 4 bits are the most expensive because they change the results, then recomputation,
    then a divided optimizer.
    """
    able = [way for way in ways if way.fits is not False]
    return min(
        able,
        key=lambda way: (QUANTISE in way.flags, CHECKPOINT in way.flags, SHARD in way.flags),
        default=None,
    )


def those_told(ways: Sequence[Way]) -> list[Way]:
    """Return the ways to show: all simple ways, and a combined way only if no simple way fits.

    The combined way is the first that fits. If none fits, it is the one that needs the least memory
    (with the most flags if several need as little), to show how much is missing. On several
    computers the cheapest way is always shown.
    """
    best = cheapest([way for way in ways if way.ranks > 1])
    chosen = [best]
    fits = False
    for rounded in (
        False,
        True,
    ):  # weights in 4 bits change the results: they are a group of their own, after the others
        group = [way for way in ways if way.flags.startswith(QUANTISE) is rounded]
        fits |= any(way.fits is not False for way in group if not way.combined)
        more = [way for way in group if way.combined]
        if more and not fits:
            enough = next((way for way in more if way.fits), None)
            chosen.append(enough or min(reversed(more), key=lambda way: way.rank_bytes))
            fits = enough is not None
    return [way for way in ways if not way.combined or way in chosen]
