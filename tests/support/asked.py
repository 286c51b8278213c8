"""A program that answers questions until nobody asks any more, because its imports cost more than
its answers.

The other side of it is :func:`answer_all`, which needs the standard library alone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any


class Asked:
    """``program`` under ``python``; a context manager. A question is a list of words, its answer
    any JSON.
    """

    def __init__(self, python: Path | str, program: Path) -> None:
        self._process = subprocess.Popen(
            [python, program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __enter__(self) -> Asked:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def __call__(self, *words: object) -> Any:
        """The answer; what goes wrong there fails the test with its traceback."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(list(map(str, words))) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, f"the program has ended: {self._process.wait()}"
        reply = json.loads(line)
        assert reply["failed"] is None, reply["failed"]
        return reply["answer"]


def answer_all(answer: Callable[..., Any]) -> None:
    """Answer each question of standard input with a line; whatever else is printed goes to standard
    error.
    """
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        try:
            reply = {"answer": answer(*json.loads(line)), "failed": None}
        except Exception:
            reply = {"answer": None, "failed": traceback.format_exc()}
        print(json.dumps(reply), file=replies, flush=True)
