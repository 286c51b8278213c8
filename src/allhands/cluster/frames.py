"""The words between the supervisor and its agents: JSON, one frame a line, each with the secret of the run.

A login shell may print what it likes on the same stream: a line without the secret is noise, never a frame. Both
directions have a thread of their own, so neither side ever waits for the other one's network.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, cast

Frame = dict[str, Any]

_LONGEST = 8 << 20  # bytes of a frame; what is longer is noise
_CHUNK = 65536


class Link:
    """One end of a connection over two descriptors, which it closes in :meth:`close`.

    Args:
        secret: of the run; ``None``: that of the first frame, which must come before anything else.
        receive: called in the reading thread with every frame, and with ``None`` when the other end has closed.
        noise: called in the reading thread with every line that is not a frame.
    """

    def __init__(
        self,
        reader: int,
        writer: int,
        secret: str | None,
        receive: Callable[[Frame | None], None],
        noise: Callable[[bytes], None],
    ) -> None:
        self._reader, self._writer = reader, writer
        self._secret = secret
        self._receive = receive
        self._noise = noise
        self._outgoing: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=work, name=f"link-{work.__name__}", daemon=True)
            for work in (self._read, self._write)
        ]
        for thread in self._threads:
            thread.start()

    def send(self, kind: str, **fields: Any) -> None:
        """Send a frame; returns at once, and says nothing if the other end is gone."""
        text = json.dumps({"secret": self._secret, "kind": kind, **fields})
        # A line of its own even after noise that did not end its line.
        self._outgoing.put(f"\n{text}\n".encode())

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything sent so far has been written; false if it has not."""
        written = threading.Event()
        self._outgoing.put(written)
        return written.wait(timeout_s)

    def close(self) -> None:
        """Stop sending, so that the other end sees the end of the stream; what is still to come is read."""
        self._outgoing.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the end of both directions."""
        for thread in self._threads:
            thread.join(timeout_s)

    def _write(self) -> None:
        broken = False
        while (item := self._outgoing.get()) is not None:
            if isinstance(item, threading.Event):
                item.set()
            elif not broken:
                broken = not _write_all(self._writer, item)
        os.close(self._writer)

    def _read(self) -> None:
        rest = b""
        with contextlib.suppress(OSError):
            while chunk := os.read(self._reader, _CHUNK):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    self._take(line)
                if len(rest) > _LONGEST:
                    self._noise(rest)
                    rest = b""
        self._take(rest)
        os.close(self._reader)
        self._receive(None)

    def _take(self, line: bytes) -> None:
        if frame := self._as_frame(line):
            self._receive(frame)
        elif line:
            self._noise(line)
            if self._secret is None:
                self._receive(None)  # whoever speaks first without a secret is not to be listened to

    def _as_frame(self, line: bytes) -> Frame | None:
        if not line.startswith(b"{"):
            return None
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            return None
        frame = cast(Frame, found)
        secret, kind = frame.pop("secret", None), frame.get("kind")
        if not isinstance(secret, str) or not isinstance(kind, str):
            return None
        if self._secret is None and kind == "hello" and len(secret) >= 32:
            self._secret = secret
        if self._secret is None or not hmac.compare_digest(secret.encode(), self._secret.encode()):
            return None
        return frame


def _write_all(descriptor: int, content: bytes) -> bool:
    view = memoryview(content)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        return False
    return True
