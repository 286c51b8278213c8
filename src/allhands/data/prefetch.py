"""Prefetch of batches: a thread makes them while the step before them is computed."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

T = TypeVar("T")


class Prefetcher(Generic[T]):
    """Calls ``load(i)`` in a thread, for up to ``ahead`` numbers after the last one asked for.

    Any ``i`` may be asked for at any time; only the numbers after it are prefetched. Use it as a
    context manager, which ends the thread. :meth:`get` raises the errors of ``load``.
    """

    def __init__(
        self,
        load: Callable[[int], T],
        end: int,
        ahead: int = 2,
        waits: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """``load`` is called in one other thread; numbers from ``end`` on are not prefetched.

        ``waits`` is called before :meth:`get` waits, with the seconds since ``load`` began with the
        wanted number (0 if it has not begun).
        """
        self._load = load
        self._waits = waits
        self._begun: dict[int, float] = {}
        self._end = end
        self._ahead = ahead
        self._pending: dict[int, Future[T]] = {}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="allhands-data")

    def get(self, i: int) -> T:
        """Return ``load(i)``; wait for it if it is not ready."""
        wanted = range(i, min(i + 1 + self._ahead, max(self._end, i + 1)))
        for late in set(self._pending) - set(wanted):
            self._pending.pop(late).cancel()
        for number in wanted:
            if number not in self._pending:
                self._pending[number] = self._thread.submit(self._timed, number)
        future = self._pending.pop(i)
        if not future.done():
            now = time.monotonic()
            self._waits(now - self._begun.get(i, now))
        return future.result()

    def _timed(self, i: int) -> T:
        self._begun[i] = time.monotonic()
        try:
            return self._load(i)
        finally:
            del self._begun[i]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
