"""Data for a training loop of your own: each rank reads its part of a dataset, in one global order
for any number of ranks.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar, cast, overload

import numpy as np

from allhands.data.order import Shuffle
from allhands.errors import CheckpointError, ConfigError, DataError
from allhands.io.formatting import counted

if TYPE_CHECKING:
    from allhands.loops.world import World

T = TypeVar("T")
B = TypeVar("B")
T_co = TypeVar("T_co", covariant=True)
_LOADER, _SHARD = "DistributedLoader", "shard"


class Indexable(Protocol[T_co]):
    """A dataset with numbered samples: a list, an array, a dataset of ``datasets`` or PyTorch."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> T_co: ...


@overload
def shard(dataset: Indexable[T], world: World | None = None) -> Sequence[T]:
    """Return samples of an indexable dataset."""
    ...


@overload
def shard(dataset: Iterable[T], world: World | None = None) -> Iterable[T]:
    """Return samples of an iterable."""
    ...


def shard(
    dataset: Indexable[T] | Iterable[T], world: World | None = None
) -> Sequence[T] | Iterable[T]:
    """Return this rank's samples: numbers ``rank``, ``rank + size``, ``rank + 2 * size`` and so on.

    The parts of the ranks are disjoint and cover the dataset; some ranks have one sample more than
    others. A loop that sums over ranks in each step needs the same number of steps on all ranks:
    use :class:`DistributedLoader` for it.

    Args:
        dataset: indexable or iterable. From an indexable dataset only this rank's samples are read.
            An iterable is read completely, and the samples of other ranks are dropped.
        world: default: :func:`allhands.init`.

    Returns:
        A lazy sequence for an indexable dataset; otherwise an iterable, repeatable if the dataset
        is.

    Raises:
        ConfigError: the dataset is neither indexable nor iterable.
    """
    place = _world(world)
    if _is_indexable(dataset):
        return _RankSamples(cast("Indexable[T]", dataset), place.rank, place.size)
    if not isinstance(dataset, Iterable):
        raise _no_dataset(dataset, _SHARD)
    return _Every(dataset, place.rank, place.size)


class DistributedLoader(Generic[B]):
    """Batches of any dataset, divided among ranks; ``B`` is the type of a batch.

    A batch belongs to all ranks together, and each rank reads only its own part. The samples of a batch depend on
    ``seed``, the epoch and the batch's number, never on the number of ranks. ``for batch in loader`` goes through one
    epoch, or through the rest of it after a ``break`` or :meth:`load_state_dict`. The next ``for`` is the next epoch,
    in another order.

    Every sample comes once per epoch. The last two batches share their samples evenly, so that
    every rank has a sample. The ranks' parts of a batch differ by one sample at most. If they can
    differ, use ``average_gradients(grads, num_tokens=len(batch))``.

    Examples:
        >>> loader = allhands.DistributedLoader(range(len(images)), 64, collate=lambda n: (images[n], labels[n]))
        >>> for epoch in range(10):
        ...     for x, y in loader: ...
    """

    @overload
    def __init__(
        self: DistributedLoader[list[T]],
        dataset: Indexable[T] | Iterable[T],
        batch_size: int,
        *,
        shuffle: bool | None = None,
        seed: int = 0,
        collate: None = None,
        drop_last: bool = False,
        world: World | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        dataset: Indexable[T] | Iterable[T],
        batch_size: int,
        *,
        shuffle: bool | None = None,
        seed: int = 0,
        collate: Callable[[list[T]], B],
        drop_last: bool = False,
        world: World | None = None,
    ) -> None: ...

    def __init__(
        self,
        dataset: Indexable[Any] | Iterable[Any],
        batch_size: int,
        *,
        shuffle: bool | None = None,
        seed: int = 0,
        collate: Callable[[list[Any]], B] | None = None,
        drop_last: bool = False,
        world: World | None = None,
    ) -> None:
        """Create the loader; nothing is read yet.

        Args:
            dataset: indexable or iterable. Every rank reads an iterable completely, and keeps its
                share of two batches at most.
            batch_size: samples per batch, over all ranks.
            shuffle: ``None``: shuffle an indexable dataset; an iterable keeps its own order.
            seed: seed of the shuffle, 0 or more.
            collate: turns a list of samples into the batch for the loop; ``None``: the list.
            drop_last: leave out samples that do not fill a batch.
            world: default: :func:`allhands.init`.

        Raises:
            ConfigError: an argument has a wrong type or value, or a rank's part of a batch would be
                empty.
        """
        self._world = _world(world)
        self._indexable = cast("Indexable[Any]", dataset) if _is_indexable(dataset) else None
        if self._indexable is None and not isinstance(dataset, Iterable):
            raise _no_dataset(dataset, _LOADER)
        self._stream = cast("Iterable[Any]", dataset)
        self._batch_size = _whole(batch_size, "batch_size", 1)
        self._seed = _whole(seed, "seed", 0)
        self._shuffle = self._indexable is not None if shuffle is None else shuffle
        self._collate, self._drop_last = collate, drop_last
        self._epoch = self._consumed = self._passes = 0
        if self._indexable is None and self._shuffle:
            raise ConfigError(
                "an iterable cannot be shuffled",
                code="argument-invalid",
                where=_LOADER,
                hint="shuffle the samples before it yields them, or give a dataset with __len__ and __getitem__",
            )
        self._check_parts()

    @property
    def epoch(self) -> int:
        """Number of completed epochs."""
        return self._epoch

    def __len__(self) -> int:
        """Number of batches per epoch; only for an indexable dataset."""
        if self._indexable is None:
            raise TypeError("the number of batches of an iterable is not known before its end")
        return len(_sizes(len(self._indexable), self._batch_size, self._drop_last))

    def __iter__(self) -> Iterator[B]:
        """Yield the remaining batches of this epoch. The state counts a batch as soon as it is
        yielded.
        """
        batches = (
            self._of_stream() if self._indexable is None else self._of_numbers(self._indexable)
        )
        for size, samples in batches:
            self._consumed += size
            yield cast("B", samples) if self._collate is None else self._collate(samples)
        self._epoch, self._consumed = self._epoch + 1, 0

    def endless(self) -> Iterator[B]:
        """Yield the batches of one epoch after the other, without end.

        Raises:
            DataError: an epoch has no batch.
        """
        while True:
            empty = not self._consumed
            for batch in self:
                empty = False
                yield batch
            if empty:
                raise DataError(
                    "an epoch without a single batch",
                    code="epoch-without-batch",
                    where=_LOADER,
                    hint="give more data",
                )

    def state_dict(self) -> dict[str, int]:
        """Return the position as JSON values, the same on every rank; it is valid for any number of
        ranks.
        """
        return {
            "seed": self._seed,
            "epoch": self._epoch,
            "consumed": self._consumed,
            "batch_size": self._batch_size,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on after the samples that ``state`` counts as consumed; the number of ranks may have
        changed.

        Raises:
            CheckpointError: ``state`` is no state, belongs to a loader with another seed or batch
                size, or its samples are not those of whole batches of this dataset. Another
                dataset of the same length, or another ``shuffle``, is not noticed.
        """
        try:
            given = {name: operator.index(state[name]) for name in self.state_dict()}
        except (KeyError, TypeError):
            given = {}
        epoch, consumed = given.get("epoch", -1), given.get("consumed", -1)
        if (
            given != {**self.state_dict(), "epoch": epoch, "consumed": consumed}
            or min(epoch, consumed) < 0
            or not self._ends_a_batch(consumed)
        ):
            raise CheckpointError(
                f"the state {dict(state)} does not fit a loader of seed {self._seed} and batch_size {self._batch_size} "
                "on this dataset: samples would be left out or come twice",
                code="checkpoint-mismatch",
                where=_LOADER,
                hint="give the result of state_dict() to a loader with the same seed, batch_size and dataset",
            )
        self._epoch, self._consumed = epoch, consumed

    def _ends_a_batch(self, consumed: int) -> bool:
        """True if an epoch has whole batches with so many samples, as far as its length is known."""
        if self._indexable is None:
            return True
        sizes = _sizes(len(self._indexable), self._batch_size, self._drop_last)
        return consumed in accumulate(sizes, initial=0)

    def _of_numbers(self, dataset: Indexable[Any]) -> Iterator[tuple[int, list[Any]]]:
        count, at = len(dataset), 0
        order = Shuffle(count, self._seed, self._epoch) if self._shuffle and count else None
        begin = self._consumed
        for size in _sizes(count, self._batch_size, self._drop_last):
            at += size
            if at <= begin:
                continue
            places = np.arange(at - size, at)
            mine = places[places % self._world.size == self._world.rank]
            numbers = mine if order is None else order.at(mine)
            # Plain integers, because lists and most datasets take no other kind.
            yield size, [dataset[number] for number in numbers.tolist()]

    def _of_stream(self) -> Iterator[tuple[int, list[Any]]]:
        source = iter(self._stream)
        if source is self._stream and self._passes:
            raise DataError(
                "an iterator can be read only once, and was read already",
                code="iterator-exhausted",
                where=_LOADER,
                hint="give an object whose __iter__ begins anew, such as a class with `def __iter__(self): yield ...`",
            )
        self._passes += 1
        start = self._consumed
        skipped = sum(1 for _ in islice(source, start))
        if skipped < start:
            raise CheckpointError(
                f"the stream has {counted(skipped, 'sample')}, but {start} of them were consumed",
                code="checkpoint-mismatch",
                where=_LOADER,
                hint="use the dataset of the interrupted run",
            )
        # Two batches are read ahead, because the last two share their samples.
        held, read = list[tuple[int, Any]](), start
        for sample in source:
            if read % self._world.size == self._world.rank:
                held.append((read, sample))
            read += 1
            if read - start == 2 * self._batch_size:
                start += self._batch_size
                yield self._batch_size, _taken(held, start)
        rest = read - start
        for size in _sizes(rest, self._batch_size, self._drop_last):
            if size < self._world.size:
                raise self._too_few(size, "the end of the stream")
            start += size
            yield size, _taken(held, start)

    def _check_parts(self) -> None:
        """Refuse batches in which a rank has no sample: its loss would be a mean of nothing.

        Raises:
            ConfigError: there are such batches.
        """
        least = self._batch_size if self._drop_last else (self._batch_size + 1) // 2
        where = "a batch at the end of the stream"
        if self._indexable is not None:
            count = len(self._indexable)
            where = f"the smallest batch of an epoch of {count} sample{'s' * (count != 1)}"
            least = min(_sizes(count, self._batch_size, self._drop_last), default=0)
        if least < self._world.size:
            raise self._too_few(least, where)

    def _too_few(self, samples: int, where: str) -> ConfigError:
        size = self._world.size
        text = (
            f"{where} has {samples} sample{'s' * (samples != 1)} for {size} rank{'s' * (size != 1)}"
        )
        advice = f"batch_size={2 * size} or more, drop_last=True, more data, or fewer ranks"
        if self._drop_last:
            advice = f"a batch_size from {size} to the number of samples, drop_last=False, or fewer ranks"
        return ConfigError(text, code="samples-too-few", where=_LOADER, hint=advice)


class _RankSamples(Sequence[T]):
    """Every ``size``-th sample of a dataset, from number ``rank`` on."""

    def __init__(self, dataset: Indexable[T], rank: int, size: int) -> None:
        self._dataset = dataset
        self._numbers = range(rank, len(dataset), size)

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...

    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self._dataset[number] for number in self._numbers[index]]
        return self._dataset[self._numbers[index]]


@dataclass(frozen=True)
class _Every(Iterable[T]):
    """Every ``size``-th item of an iterable, from number ``rank`` on."""

    source: Iterable[T]
    rank: int
    size: int

    def __iter__(self) -> Iterator[T]:
        return islice(iter(self.source), self.rank, None, self.size)


def _sizes(count: int, batch_size: int, drop_last: bool) -> list[int]:
    """Return the sizes of the batches of an epoch of ``count`` samples: full batches, except that
    the last two share their samples evenly if one of them is not full.
    """
    full, rest = divmod(count, batch_size)
    if not rest or drop_last:
        return [batch_size] * full
    if not full:
        return [rest]
    both = batch_size + rest
    return [batch_size] * (full - 1) + [both - both // 2, both // 2]


def _taken(held: list[tuple[int, T]], end: int) -> list[T]:
    """Remove the samples with numbers below ``end`` from the ordered ``held``, and return them."""
    taken = [sample for number, sample in held if number < end]
    del held[: len(taken)]
    return taken


def _is_indexable(dataset: Any) -> bool:
    # A dictionary has both methods, but its keys are no sample numbers.
    return (
        hasattr(dataset, "__getitem__")
        and hasattr(dataset, "__len__")
        and not isinstance(dataset, Mapping)
    )


def _no_dataset(dataset: object, where: str) -> ConfigError:
    return ConfigError(
        f"a {type(dataset).__qualname__} is no dataset",
        code="argument-invalid",
        where=where,
        hint="give a list, an array, anything with __len__ and __getitem__, or an iterable",
    )


def _world(world: World | None) -> World:
    if world is not None:
        return world
    from allhands.loops.world import init

    return init()


def _whole(value: int, name: str, least: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ConfigError(
            f"{name} is {value!r}",
            code="value-out-of-range",
            where=_LOADER,
            hint=f"give a whole number, {least} or more",
        )
    return number
