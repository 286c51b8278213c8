"""Conversation between a terminal and the ranks of a model: lines of JSON over a local socket.

The terminal's process sends ``ask``, ``reset`` and ``stop``; when it ends, the ranks end, too. A rank
on the same computer sends pieces of an answer (``text``), and ends it with ``done`` or ``error``.
"""

from __future__ import annotations

import json
import select
import socket
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any, Protocol

from allhands.errors import AllhandsError, ConfigError, DataError, ModelError, error_named

# The path of the terminal's socket, for the ranks.
VARIABLE = "ALLHANDS_CHAT"
# Errors of one question; any other error ends the session.
LINE_ERRORS = (ConfigError, DataError, ModelError)


class Talks(Protocol):
    """A partner that answers line by line."""

    def ask(self, text: str) -> Generator[str]:
        """Yield pieces of the answer; if the generator is closed early, the rest is not computed."""
        ...

    def reset(self) -> None:
        """Forget what was said."""
        ...


class Wire:
    """One end of the connection."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket, self._heard = connection, b""

    @classmethod
    def to(cls, path: str) -> Wire | None:
        """Connect to the terminal; ``None`` if it is on another computer."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(path)
        except OSError:
            connection.close()
            return None
        return cls(connection)

    def send(self, **word: Any) -> None:
        """Send a message; it is dropped if the other end is closed."""
        with suppress(OSError):
            self._socket.sendall(json.dumps(word).encode() + b"\n")

    def take(self, timeout_s: float | None) -> dict[str, Any] | None:
        """Return the next received message; ``None`` if nothing arrives in this time.

        Raises:
            EOFError: the other end is closed.
        """
        while b"\n" not in self._heard:
            if not select.select([self._socket], [], [], timeout_s)[0]:
                return None
            try:
                piece = self._socket.recv(1 << 16)
            except OSError:
                piece = b""
            if not piece:
                raise EOFError
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        return json.loads(line)

    def close(self) -> None:
        """End the connection."""
        self._socket.close()


class RanksEnded(Exception):
    """The ranks have ended without a request; their supervisor knows the reason."""


class RemoteConversation:
    """:class:`Talks` with ranks.

    Attributes:
        answering: whether an answer is being generated; it becomes false at any end of the answer.
    """

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self.answering = False

    def reset(self) -> None:
        """Forget all but the system prompt."""
        self._wire.send(reset=True)

    def ask(self, text: str) -> Generator[str]:
        """Yield pieces of the answer as they arrive.

        Raises:
            AllhandsError: as of :meth:`allhands.infer.conversation.Conversation.ask`.
            RanksEnded: before the answer's end.
        """
        self.answering, ends = True, False
        self._wire.send(ask=text)
        try:
            while not ends:
                word = self._next()
                ends = "text" not in word
                if "error" in word:
                    name, message, code, where, hint = word["error"]
                    kind = error_named(name) or AllhandsError
                    raise kind(message, code=code, where=where, hint=hint)
                if not ends:
                    yield word["text"]
        except RanksEnded:
            ends = True
            raise
        finally:
            if not ends:
                self._wire.send(stop=True)
                while "text" in self._next():
                    pass
            self.answering = False

    def _next(self) -> dict[str, Any]:
        try:
            word = self._wire.take(None)
        except EOFError:
            raise RanksEnded from None
        assert word is not None
        return word


def answer(conversation: Talks, text: str, wire: Wire | None, stops: Callable[[], bool]) -> None:
    """Answer on a rank; ``wire``: connection of the rank that sends the answer; ``stops``: returns
    true after the last wanted piece.
    """
    pieces = conversation.ask(text)
    told: dict[str, Any] = {"done": True}
    try:
        for piece in pieces:
            if wire is not None:
                wire.send(text=piece)
            if stops():
                break
    except LINE_ERRORS as error:
        name = type(error).__name__
        told = {"error": [name, error.message, error.code, error.where, error.hint]}
    finally:
        pieces.close()
    if wire is not None:
        wire.send(**told)
