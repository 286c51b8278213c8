"""Work on several things at the same time, in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def in_background(function: Callable[[], Result]) -> Future[Result]:
    """Call a function in a thread that does not keep this process from ending."""
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
    """``function`` of every item, in their order; all are worked on, and then the first error is
    raised, if any.

    The threads are daemons, which those of the standard library's pools are not: who stops a
    program, or ends what they wait for, does not wait for them.

    Args:
        threads: at most so many at a time; one for each item unless given.
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
