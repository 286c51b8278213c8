"""Search for the examples that cause a loss or gradient that is not finite, after it has occurred."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import Communicator, SingleProcess
from allhands.distributed.handout import gather_rows
from allhands.io.trees import flatten, number
from allhands.train.optim import clip

# Number of examples that each rank can name; the collective always has this size.
NAMED = 8
_NO_EXAMPLE = -1
_ALONE = SingleProcess()


@dataclass(frozen=True)
class Blame:
    """The result of the search, the same on every rank.

    Attributes:
        examples: numbers (from 0) of the windows at fault, ascending; at most :data:`NAMED` of each
            rank.
        count: number of all windows at fault.
        otherwise: the cause in words, if no single window is at fault.
    """

    examples: tuple[int, ...] = ()
    count: int = 0
    otherwise: str = ""

    def named(self, what: str) -> str:
        """Return the examples for a message, counted from 1, as `` (training example 18)``; empty
        if there are none.
        """
        if not self.examples:
            return ""
        numbers = ", ".join(str(example + 1) for example in self.examples)
        more = self.count - len(self.examples)
        rest = f" and {more} more" if more else ""
        return f" ({what}{'s' if self.count > 1 else ''} {numbers}{rest})"


def find_culprits(
    gradient: Callable[[MicroBatch], tuple[mx.array, Any]],
    weights: Any,
    micro_batches: Sequence[MicroBatch],
    communicator: Communicator,
    beat: Callable[[str], None],
    together: Communicator = _ALONE,
    *,
    share: int | None = None,
) -> Blame:
    """Compute each example of this rank's micro-batches by itself, and exchange the results.

    Every rank must call it.

    Args:
        gradient: loss sum and tree of gradients of a micro-batch.
        weights: tree of the trained parameters; if one is not finite, no example is looked at.
        beat: called with "compute" before each example and with "reduce" before waiting for other
            ranks.
        together: ranks with the same micro-batches; each has a part of the weights and of
            ``gradient``. The first of them names the examples.
        share: number of this rank's share, if ranks of ``together`` have different micro-batches
            but compute together; ``gradient`` then takes ``None`` for an example of another share.
            ``None``: all have the same micro-batches.
    """

    def everywhere(good: bool) -> bool:
        return not number(together.all_sum(mx.array(float(not good))))

    own = _all_finite(weights)
    finite = everywhere(own)
    rows = [(batch, row) for batch in micro_batches for row in range(len(batch.examples))]
    if share is not None:
        alone = [batch.alone(row) for batch, row in rows if finite]
        counted = [each for each in alone if each.num_targets]
        found, names = _in_step(gradient, counted, together, share, everywhere, beat)
    else:
        found = [
            int(b.examples[r])
            for b, r in rows
            if finite and not everywhere(_is_finite(gradient, b, r, beat))
        ]
        names = together.rank == 0
    if not names:
        rows, found = [], []
    named = [*sorted(found), *[_NO_EXAMPLE] * NAMED][:NAMED]
    mine = np.array([not own, len(rows), len(found), *named], dtype=np.int32)
    beat("reduce")
    return _judge(gather_rows(communicator, mine))


def _in_step(
    gradient: Callable[..., tuple[mx.array, Any]],
    own: Sequence[MicroBatch],
    together: Communicator,
    share: int,
    everywhere: Callable[[bool], bool],
    beat: Callable[[str], None],
) -> tuple[list[int], bool]:
    """Return this rank's examples with a result that is not finite, and whether this rank names
    them.

    All ranks compute one example at a time together. Of the ranks with the same share, the first
    rank names its examples.
    """
    found: list[int] = []
    told = gather_rows(together, np.array([share, len(own)], dtype=np.int32)).tolist()
    names = [each[0] for each in told].index(share) == together.rank
    for one, count in sorted({(one, count) for one, count in told}):
        for place in range(count):
            beat("compute")
            mine = own[place] if one == share else None
            if not everywhere(_finite(*gradient(mine))) and mine is not None:
                found.append(int(mine.examples[0]))
    return found, names


def _all_finite(tree: Any) -> bool:
    # One array after the other: the results of ``isfinite``, a byte for each value, take memory.
    return all(bool(mx.isfinite(value).all().item()) for _, value in flatten(tree))


def _is_finite(
    gradient: Callable[[MicroBatch], tuple[mx.array, Any]],
    batch: MicroBatch,
    row: int,
    beat: Callable[[str], None],
) -> bool:
    example = batch.alone(row)
    if example.num_targets == 0:
        return True
    beat("compute")
    return _finite(*gradient(example))


def _finite(loss: mx.array, grads: Any) -> bool:
    return bool((mx.isfinite(loss) & mx.isfinite(clip(grads, None)[1])).item())


def _judge(everyone: np.ndarray[Any, np.dtype[np.int32]]) -> Blame:
    """Return the cause from ``everyone``, (ranks, 3 + NAMED).

    The columns: 1 if the weights are not finite, number of examples, number of examples at fault,
    and the numbers of those examples.
    """
    bad = np.flatnonzero(everyone[:, 0])
    examined, count = (int(total) for total in everyone[:, 1:3].sum(axis=0))
    if len(bad) == len(everyone):
        return Blame(otherwise="the weights are not finite")
    if len(bad):
        ranks = ", ".join(map(str, bad))
        return Blame(
            otherwise=f"the weights of rank {ranks} are not finite, those of other ranks are"
        )
    if count == 0:
        return Blame(otherwise="no single example is to blame")
    if count == examined > 1:
        return Blame(otherwise="each single example of the next batch gives the same")
    numbers = everyone[:, 3:]
    return Blame(tuple(sorted(map(int, numbers[numbers != _NO_EXAMPLE]))), count)
