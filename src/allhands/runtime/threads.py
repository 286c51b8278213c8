"""Functions that run work in daemon threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_background(function: Callable[[], Result]) -> Future[Result]:
    """Call a function in a daemon thread, and return its future."""
    future: Future[Result] = Future()

    def work() -> None:
        try:
            future.set_result(function())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    return future


def side_by_side(
    function: Callable[[Item], Result], items: Sequence[Item], threads: int | None = None
) -> list[Result]:
    """Call ``function`` with every item, in threads; return the results in the order of the items.

    All calls are made, even after an error. The threads are daemons, unlike those of the standard
    library's pools: a program can end while they still work.

    Args:
        threads: most threads at a time; default: one for each item.

    Raises:
        BaseException: the first error of a call.
    """
    results: dict[int, Result] = {}
    errors: list[BaseException] = []
    waiting = iter(range(len(items)))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                number = next(waiting, None)
            if number is None:
                return
            try:
                results[number] = function(items[number])
            except BaseException as error:
                errors.append(error)

    count = len(items) if threads is None else min(threads, len(items))
    workers = [threading.Thread(target=work, daemon=True) for _ in range(count)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return [results[number] for number in range(len(items))]
