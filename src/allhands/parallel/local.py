"""Local steps: each rank updates by its own gradients, and all ranks get the same weights after
every round of steps.

In a round rank r changes the weights x to x_r. Then all ranks take an outer step along the mean
change: d = sum_r (n_r / n) (x_r - x), where n_r is the number of tokens that rank r has trained on
in the round; m = momentum * m + d; x + learning_rate * (d + momentum * m). By default the result is
the mean of the weights (local SGD, arXiv 1805.09767); with Nesterov's momentum it is DiLoCo (arXiv
2311.08105).

With fragments the arrays are exchanged in turn, each once in a round (Streaming DiLoCo, arXiv
2501.18512). With a delay changes are exchanged during further steps, and no rank waits. The changes
of these steps are kept: an array becomes the outer step's result plus this rank's changes since its
weights were sent, and these count in its next change. Then ranks have the same weights only after
:meth:`LocalSteps.close_round`.

A rank divides its gradients by its own tokens, and its change is weighted by these tokens. So a
round of one step of plain SGD equals the step of data parallelism, for rows of any lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import mlx.core as mx

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import expect_bulk
from allhands.distributed.codecs import GROUP
from allhands.distributed.packed import Begun, Left, Packing
from allhands.distributed.reduce import buckets
from allhands.io.trees import flatten, unflatten
from allhands.parallel.base import Exchanging, Expected, Strategy
from allhands.parallel.data import DataParallel
from allhands.parallel.norms import sum_of_squares
from allhands.parallel.passes import Passes
from allhands.parallel.sums import Gradients, Reduced

# Weights are sent in pieces of at most so many bytes, so that a rank sends heartbeats in between
# over a slow link, and of at least so many, because each piece costs latency.
_PIECE_BYTES, _LEAST_BYTES = 8_000_000, 250_000


@dataclass(frozen=True)
class _Piece:
    """Some numbers of an array, flattened."""

    name: str
    begin: int
    end: int

    def of(self, array: mx.array) -> mx.array:
        return array.reshape(-1)[self.begin : self.end]


def _cut(named: Mapping[str, mx.array], most: int) -> Iterator[_Piece]:
    """Yield the pieces of all arrays in order; an array of over ``most`` bytes is cut into equal
    pieces of whole groups.
    """
    for name, array in named.items():
        step = -(-array.size // max(1, -(-array.nbytes // most)))
        step = max(GROUP, -(-step // GROUP) * GROUP)
        yield from (
            _Piece(name, at, min(at + step, array.size)) for at in range(0, array.size, step)
        )


@dataclass
class _Fragment:
    """Arrays that are exchanged at the same time, and the tokens since the last exchange: this
    rank's, and all ranks'.
    """

    names: list[str]
    tokens: tuple[int, int] = (0, 0)


@dataclass
class _Sending:
    """Changes of arrays that are being exchanged, in calls one after the other.

    Attributes:
        sent: the weights when they were sent.
        share: this rank's share in the sum.
        calls: the pieces of each call.
        begun: the running call, by the type of its arrays.
        sums: the received sums of each array; ``left``: the rounding errors of packing.
    """

    sent: dict[str, mx.array]
    share: float
    calls: list[list[_Piece]]
    begun: list[tuple[list[_Piece], Begun]] = field(
        default_factory=list[tuple[list[_Piece], Begun]]
    )
    sums: dict[str, list[mx.array]] = field(default_factory=dict[str, list[mx.array]])
    left: dict[str, list[Left]] = field(default_factory=dict[str, list[Left]])

    @property
    def is_done(self) -> bool:
        return not self.calls and not self.begun


def local_steps(exchanging: Exchanging, overlap: bool) -> Strategy:
    """Make the strategy of ``--sync-every``."""
    return LocalSteps(exchanging)


class LocalSteps(DataParallel):
    """:class:`~allhands.parallel.base.Strategy`: local steps, and an outer step at the end of each
    round.

    In each step ranks exchange a few numbers: the loss, counts, requests to stop, and whether all
    gradients are finite; if one is not, no rank updates.
    """

    name = "local"
    keeps_own_optimizer = True

    def __init__(self, exchanging: Exchanging) -> None:
        # Gradients are not exchanged: the changes of weights in a round are packed.
        super().__init__(replace(exchanging, codec=None))
        self._outer = Packing(
            exchanging.communicator, exchanging.codec if exchanging.size > 1 else None
        )
        self._rounds = exchanging.rounds
        self._steps = 0
        self._of_step = (
            0,
            0,
        )  # trained tokens of the present step: this rank's, and all ranks'
        self._before: dict[str, mx.array] = {}  # the weights from which changes are computed
        self._momentum: dict[str, mx.array] = {}
        self._fragments: list[_Fragment] = []
        self._places: dict[str, int] = {}  # of the arrays, in ``left``
        self._sending: _Sending | None = None

    @property
    def in_round(self) -> bool:
        return self._steps > 0

    @property
    def steps_left(self) -> int:
        return -self._steps % self._rounds.every

    def prepare(self, passes: Passes, expected: Expected) -> None:
        super().prepare(passes, expected)
        self._model = passes.model
        trained = self._trained()
        self._places = {name: place for place, (name, _) in enumerate(trained)}
        self._fragments = [
            _Fragment(names) for names in fragments_of(dict(trained), self._rounds.fragments)
        ]
        self.left = self._outer.nothing_left([array for _, array in trained])
        if self._rounds.momentum:
            self._momentum = {name: mx.zeros(array.shape) for name, array in trained}

    def _trained(self) -> list[tuple[str, mx.array]]:
        return flatten(self._model.trainable_parameters())

    def gradients(self, passes: Passes, micro_batches: Sequence[MicroBatch]) -> Gradients:
        alone = (
            self._exchanging.size == 1 and self._rounds.is_mean
        )  # then the end of a round changes nothing
        if not self._before and not alone:
            self._before = dict(self._trained())
        if self._sending is not None:  # travels while this computes
            self._begin_call(self._sending)
            expect_bulk(self._exchanging.communicator, True)
        return super().gradients(passes, micro_batches)

    def reduce(
        self, mine: Gradients, numbers: Sequence[float | mx.array], extra: Sequence[float] = ()
    ) -> Reduced:
        expect_bulk(self._exchanging.communicator, False)
        own = mine.num_targets
        # A mean, weighted by tokens. If it is not finite on one rank, neither is the sum.
        squares = sum_of_squares([grad for _, grad in mine.grads]) / max(own, 1)
        totals, tokens, squares_of_all, num_gathered = self.reduce_numbers(
            mine, numbers, squares, extra
        )
        if self._sending is not None:
            self._end_call(self._sending)
        self._of_step = (own, tokens)
        norm = mx.sqrt(mx.array(squares_of_all) / max(tokens, 1))
        return Reduced(
            mine.grads, totals, divisor=mx.array(float(own)), norm=norm, num_gathered=num_gathered
        )

    def after_update(self, step: int) -> None:
        self._steps += 1
        for fragment in self._fragments:
            own, all_of_them = fragment.tokens
            fragment.tokens = own + self._of_step[0], all_of_them + self._of_step[1]
        rounds = self._rounds
        if not rounds.streams:
            if self._steps >= rounds.every:
                self.close_round()
            return
        if self._sending is not None and self._sending.is_done:
            self._arrive(self._sending)
        for number in rounds.sent_after(self._steps) if self._before else ():
            if rounds.delay:
                self._sending = self._send(self._fragments[number])
            else:
                self._exchange(self._fragments[number])

    def start_next(self, passes: Passes, upcoming: Callable[[], Sequence[MicroBatch]]) -> None:
        steps, rounds, sending = self._steps + 1, self._rounds, self._sending
        ends = (
            steps >= rounds.every
            if not rounds.streams
            else not rounds.delay and bool(rounds.sent_after(steps))
        )
        if not (
            ends or (sending is not None and sending.is_done)
        ):  # else the weights change before the next passes
            super().start_next(passes, upcoming)

    def close_round(self) -> None:
        if self._steps == 0:
            return
        if self._before:
            self.forget()
            if (sending := self._sending) is not None:
                self._finish(sending)
                self._arrive(sending)
            for fragment in self._fragments:
                self._exchange(fragment)
        self._steps, self._before = 0, {}
        for fragment in self._fragments:
            fragment.tokens = (0, 0)

    def _send(self, fragment: _Fragment) -> _Sending:
        """Begin to send a fragment's changes, in as many calls as there are steps for them."""
        present, calls = dict(self._trained()), self._rounds.delay
        sent = {name: present[name] for name in fragment.names}
        whole = max(1, sum(array.nbytes for array in sent.values()))
        found: list[list[_Piece]] = [[] for _ in range(calls)]
        at = 0
        for piece in _cut(sent, max(_LEAST_BYTES, -(-whole // calls))):
            found[at * calls // whole].append(piece)
            at += (piece.end - piece.begin) * sent[piece.name].dtype.size
        sending = _Sending(sent, self._share(fragment), found)
        fragment.tokens = (0, 0)
        return sending

    def _exchange(self, fragment: _Fragment) -> None:
        """Exchange a fragment's arrays over all ranks, piece by piece."""
        most = min(_PIECE_BYTES, self._exchanging.bucket_bytes)
        sizes = {name: array for name, array in self._trained() if name in fragment.names}
        parts = [
            [fragment.names[i] for i in some]
            for some in buckets(list(sizes.values()), range(len(sizes)), most)
        ]
        del sizes
        for names in parts:
            present = dict(self._trained())
            sent = {name: present[name] for name in names}
            del present
            pieces = list(_cut(sent, most))
            calls = [pieces] if len(sent) > 1 else [[piece] for piece in pieces]
            sending = _Sending(sent, self._share(fragment), calls)
            self._finish(sending)
            self._arrive(sending)
        fragment.tokens = (0, 0)

    def _share(self, fragment: _Fragment) -> float:
        """Return this rank's share in the mean change of a fragment."""
        own, tokens = fragment.tokens
        return own / tokens if tokens else 1.0 / self._exchanging.size

    def _begin_call(self, sending: _Sending) -> None:
        self._exchanging.inject_fault("round")
        pieces = sending.calls.pop(0)
        changes = [self._change(sending, piece) for piece in pieces]
        mx.eval(changes)
        for same in buckets(changes, range(len(changes)), 2**62):
            some = [pieces[i] for i in same]
            left = [self.left[self._places[piece.name]] for piece in some]
            parts = [
                None if kept is None else piece.of(kept)
                for piece, kept in zip(some, left, strict=True)
            ]
            begun = self._outer.begin([changes[i] for i in same], parts)
            mx.async_eval(begun.arrays)
            sending.begun.append((some, begun))

    def _change(self, sending: _Sending, piece: _Piece) -> mx.array:
        present, before = (piece.of(arrays[piece.name]) for arrays in (sending.sent, self._before))
        return (sending.share * (present.astype(mx.float32) - before)).astype(present.dtype)

    def _end_call(self, sending: _Sending) -> None:
        for pieces, begun in sending.begun:
            found = begun.finish()
            mx.eval(found.sums, [each for each in found.left if each is not None])
            for piece, total, left in zip(pieces, found.sums, found.left, strict=True):
                sending.sums.setdefault(piece.name, []).append(total)
                sending.left.setdefault(piece.name, []).append(left)
        sending.begun = []

    def _finish(self, sending: _Sending) -> None:
        """Make all remaining calls, without other computation."""
        self._end_call(sending)
        while sending.calls:
            self._exchanging.heartbeat("reduce")
            self._begin_call(sending)
            self._end_call(sending)

    def _arrive(self, sending: _Sending) -> None:
        """Take the outer step along the received changes."""
        if sending is self._sending:
            self._sending = None
        present, new = dict(self._trained()), dict[str, mx.array]()
        for name, sent in sending.sent.items():
            mean = _joined(sending.sums.pop(name, []), sent.shape)
            new[name] = stepped = self._stepped(name, mean)
            if self._rounds.delay and (now := present[name]) is not sent:
                new[name] = (stepped.astype(mx.float32) + (now.astype(mx.float32) - sent)).astype(
                    sent.dtype
                )
            self._before[name] = stepped
            if (left := sending.left.pop(name, [None]))[0] is not None:
                self.left[self._places[name]] = _joined(
                    [each for each in left if each is not None], sent.shape
                )
        kept = [self.left[self._places[name]] for name in new]
        mx.eval(
            new,
            [self._momentum[name] for name in new if name in self._momentum],
            [a for a in kept if a is not None],
        )
        self._model.update(unflatten(list(new.items())))

    def _stepped(self, name: str, mean: mx.array) -> mx.array:
        """Return an array after the outer step along the ranks' mean change."""
        rounds, before = self._rounds, self._before[name]
        change = mean.astype(mx.float32)
        if rounds.momentum:
            self._momentum[name] = rounds.momentum * self._momentum[name] + change
            change = change + rounds.momentum * self._momentum[name]
        return (before.astype(mx.float32) + rounds.learning_rate * change).astype(before.dtype)

    @property
    def outer_state(self) -> Mapping[str, mx.array]:
        return self._momentum

    def load_outer_state(self, state: Mapping[str, mx.array]) -> None:
        self._momentum = dict(state)


def fragments_of(arrays: Mapping[str, mx.array], count: int) -> list[list[str]]:
    """Divide the names of ``arrays`` into ``count`` parts of about equal bytes, each with arrays of
    all layers.
    """
    found: list[list[str]] = [[] for _ in range(count)]
    filled = [0] * count
    for name, array in sorted(arrays.items(), key=lambda item: -item[1].nbytes):
        place = filled.index(min(filled))
        found[place].append(name)
        filled[place] += array.nbytes
    order = {name: place for place, name in enumerate(arrays)}
    return [sorted(names, key=order.__getitem__) for names in found]


def _joined(pieces: Sequence[mx.array], shape: Sequence[int]) -> mx.array:
    """Join the pieces of an array."""
    flat = mx.concatenate([each.reshape(-1) for each in pieces]) if len(pieces) > 1 else pieces[0]
    return flat.reshape(*shape)
