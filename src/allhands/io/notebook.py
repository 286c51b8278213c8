"""One output of a notebook's cell that changes while a call goes on."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Sequence
from html import escape
from importlib import import_module
from typing import Any

_MOST_KEPT = 200
_RECENT = 5


def in_notebook() -> bool:
    """True if this process is the kernel of a notebook, which shows outputs that change."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookOutput:
    """Lines that stay, a state that changes, and the latest events, as one output of a cell.

    A console can use it as its file: printed lines stay. The output appears with the first line.

    Args:
        words: called with each printed line and each event; returns the text to show.
        display: makes the output of the cell, as IPython's ``display`` does, which is the default.
    """

    encoding = "utf-8"

    def __init__(
        self, words: Callable[[str], str] = str, display: Callable[..., Any] | None = None
    ) -> None:
        self._words, self._make_display = words, display
        self._kept: deque[str] = deque(maxlen=_MOST_KEPT)
        self._recent: deque[str] = deque(maxlen=_RECENT)
        self._state: Sequence[str] = ()
        self._done, self._total = 0, 0
        self._begun = ""  # beginning of a line that has no end yet
        self._display: Any = None

    def write(self, text: str) -> int:
        """Add lines that stay."""
        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            self._kept += map(self._words, lines)
            self._update()
        return len(text)

    def flush(self) -> None:
        """Do nothing: no text is buffered."""

    def show(self, done: int, total: int, state: Sequence[str]) -> None:
        """Replace the state: ``done`` of ``total``, for the progress bar, and lines about it."""
        self._done, self._total, self._state = done, total, state
        self._update()

    def add_event(self, line: str) -> None:
        """Add an event; only the latest ones are shown."""
        self._recent.append(self._words(line))
        self._update()

    def _update(self) -> None:
        if self._display is None:
            make = self._make_display or import_module("IPython.display").display
            self._display = make(self, display_id=True)
        else:
            self._display.update(self)

    def _repr_mimebundle_(self, **_options: Any) -> dict[str, str]:
        """Return the output as text and as HTML; IPython asks for it."""
        below = [*self._state, *self._recent]
        bar = ""
        if self._total:
            bar = f'<progress value="{self._done}" max="{self._total}" style="width: 100%"></progress>'
        html = f"<div>{_pre(self._kept)}{bar}{_pre(below)}</div>"
        return {"text/plain": "\n".join([*self._kept, *below]), "text/html": html}


def _pre(lines: Sequence[str]) -> str:
    return f"<pre>{escape(chr(10).join(lines))}</pre>" if lines else ""
