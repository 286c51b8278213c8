"""Limits of the dashboard's connections: how long a caller may take, and how many there may be."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from typing import Any, cast

import uvicorn
from h11 import LocalProtocolError
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

_HEAD_S = 10.0  # to send the head of a request, however few bytes come at a time
_ANSWER_S = 60.0  # to take the answer
_WORKS_S = 2  # for requests that are under way when it ends
_MOST_CONNECTIONS = 128


class _Connection(H11Protocol):
    """A connection that ends if its caller takes too long, or if it is the oldest of too many."""

    _since: float = 0.0
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        if len(self.connections) >= _MOST_CONNECTIONS:
            oldest = min(
                (one for one in self.connections if isinstance(one, _Connection)),
                key=lambda one: cast("float", one._since),
            )
            oldest.transport.abort()
            self.connections.discard(oldest)
        super().connection_made(transport)
        self._wait(_HEAD_S)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait(_HEAD_S)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no HTTP; the request before, whose body they may be, is answered no
        further.
        """
        cycle: Any = self.cycle
        if cycle is not None:
            cycle.disconnected = True
        try:
            super().send_400_response(msg)
        except LocalProtocolError:  # its answer has begun, or is complete
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._timer is not None:
            self._timer.cancel()

    def _wait(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._since = self.loop.time()
        self._timer = self.loop.call_later(seconds, self._late, seconds)

    def _late(self, seconds: float) -> None:
        # A caller whose request is here gets time to take the answer.
        cycle: Any = self.cycle
        if seconds == _HEAD_S and cycle is not None and not cycle.response_complete:
            self._wait(_ANSWER_S)
        else:
            self.transport.abort()


def run(app: ASGIApp, listener: socket.socket) -> None:
    """Answer requests until a signal."""
    config = uvicorn.Config(
        app,
        log_level="error",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=_WORKS_S,
        http=_Connection,
        ws="none",
        lifespan="off",
    )
    # Signals are the normal end: uvicorn ends its work, and then sends itself the signal again.
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])
