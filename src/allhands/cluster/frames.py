"""The words between the supervisor and its agents: JSON, one frame a line, each with the secret of
the run.

A login shell may print what it likes on the same stream: a line without the secret is noise, never
a frame. A frame holds what its kind must hold, see :data:`FROM_SUPERVISOR` and :data:`FROM_AGENT`,
or nobody gets to see it. Both directions have a thread of their own, so neither side ever waits for
the other one's network.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any

from allhands.io.strict_json import (
    Check,
    integer,
    is_flag,
    is_number,
    is_text,
    list_of,
    mapping_of,
    maybe,
    object_of,
    read_object,
)

Frame = dict[str, Any]
GARBLED = "garbled"  # received in place of a frame that has the secret, but not what it must hold

_LONGEST = 8 << 20  # bytes of a frame; what is longer is noise
_CHUNK = 65536
_LEAST_SECRET = 32


# --- what frames hold -----------------------------------------------------------------------------


def _bytes(value: Any) -> bool:
    """Bytes as the letters of Latin-1."""
    return isinstance(value, str) and (value.isascii() or max(value) <= "\xff")


def _word(value: Any) -> bool:
    """The name of a file in a private directory."""
    return isinstance(value, str) and value.isascii() and value.replace("-", "").isalnum()


_RANK = _COUNT = integer(0, 1 << 32)
_CODE = integer(-(1 << 31), 1 << 31)
_PORT = integer(1, 65535)
_ANY_TEXT = maybe(is_text)
# What a rank writes about itself.
ERROR = object_of(
    {"type": is_text, "message": is_text},
    {"code": _ANY_TEXT, "where": _ANY_TEXT, "hint": _ANY_TEXT, "text": _ANY_TEXT},
)
_REPORT = object_of(
    {
        "error": maybe(ERROR),
        "log_path": is_text,
        "log_tail": list_of(is_text),
        "out_of_memory": is_flag,
    },
    {"stopped": is_flag},
)
BEAT = object_of({"step": _COUNT, "phase": is_text, "count": _COUNT}, {"waited_s": is_number})
_AGED_BEAT = object_of(
    {"step": _COUNT, "phase": is_text, "count": _COUNT, "age": is_number, "waited_s": is_number}
)
_HELLO = object_of(
    {
        "name": is_text,
        "python": is_text,
        "cwd": is_text,
        "cwd_required": is_flag,
        "below_home": _ANY_TEXT,
        "forwarded": mapping_of(is_text),
        "descriptors": list_of(_COUNT),
        "adapter_path": _ANY_TEXT,
        "run_id": _ANY_TEXT,
        "first": _COUNT,
        "count": _COUNT,
        "backend": is_text,
        "address": is_text,
    },
    {
        "resume": _ANY_TEXT,
        "command": lambda value: list_of(is_text)(value) and bool(value),
        "num_processes": _COUNT,
        "log_dir": is_text,
        "cores_per_rank": maybe(_COUNT),
        "env": mapping_of(is_text),
        "stop_grace_s": is_number,
        "weights": maybe(list_of(is_number)),
        "tag_output": is_flag,
        "keep_logs": is_flag,
        "relay": is_flag,
        "rdma": maybe(list_of(lambda row: isinstance(row, list))),
    },
)
FROM_SUPERVISOR: Mapping[str, Check] = {
    "hello": _HELLO,
    "start": object_of({"peers": list_of(is_text)}),
    "ping": object_of({"number": _COUNT}),
    "signal": object_of({"rank": _RANK, "number": integer(1, 64)}),
    "tell": object_of({"word": _word}),
    "report": object_of({"rank": _RANK}),
    "end": object_of({}),
}
FROM_AGENT: Mapping[str, Check] = {
    "ready": object_of(
        {
            "ports": list_of(_PORT),
            "step": maybe(_COUNT),
            "own": is_flag,
            "versions": mapping_of(_ANY_TEXT),
        }
    ),
    "refused": object_of(
        {
            "type": is_text,
            "message": is_text,
            "code": is_text,
            "where": _ANY_TEXT,
            "hint": _ANY_TEXT,
        }
    ),
    "pong": object_of({}),
    "output": object_of({"stream": integer(1, 2), "data": _bytes}),
    "line": object_of({"rank": _RANK, "data": _bytes}),
    "sample": object_of({"line": is_text}),
    "marks": object_of(
        {
            "rank": _RANK,
            "ready": is_flag,
            "started": is_flag,
            "busy_age": maybe(is_number),
            "beat": maybe(_AGED_BEAT),
        }
    ),
    "exit": object_of({"rank": _RANK, "code": _CODE, "age": is_number, "report": _REPORT}),
    "report": object_of({"rank": _RANK, "report": _REPORT}),
    "attested": object_of({"content": object_of({})}),
    "ended": object_of({}),
}


# --- the connection -------------------------------------------------------------------------------


class FrameLink:
    """One end of a connection over two descriptors, which it closes in :meth:`close`.

    Args:
        kinds: of the frames that the other end sends, and what they must hold.
        secret: of the run; ``None``: that of the first frame, which must come before anything else.
        receive: called in the reading thread with every frame, and with ``None`` when the other end
            has closed. A frame that has the secret, but not what it must hold, comes as one of kind
            :data:`GARBLED`.
        noise: called in the reading thread with every line that is not a frame.
    """

    def __init__(
        self,
        reader: int,
        writer: int,
        kinds: Mapping[str, Check],
        secret: str | None,
        receive: Callable[[Frame | None], None],
        noise: Callable[[bytes], None],
    ) -> None:
        self._reader, self._writer = reader, writer
        self._kinds = kinds
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
        """Stop sending, so that the other end sees the end of the stream; what is still to come is
        read.
        """
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
                broken = not write_all(self._writer, item)
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
                self._receive(
                    None
                )  # whoever speaks first without a secret is not to be listened to

    def _as_frame(self, line: bytes) -> Frame | None:
        if not line.startswith(b"{"):
            return None
        frame = read_object(line, halves=True)
        if frame is None:
            return None
        secret, kind = str(frame.pop("secret", "")), str(frame.get("kind"))
        check = self._kinds.get(kind)
        if check is None or not secret.isascii():
            return None
        if (
            self._secret is None
            and kind == "hello"
            and len(secret) >= _LEAST_SECRET
            and check(frame)
        ):
            self._secret = secret
        if self._secret is None or not hmac.compare_digest(secret, self._secret):
            return None
        return frame if check(frame) else {"kind": GARBLED, "what": kind}


def write_all(descriptor: int, content: bytes) -> bool:
    """Write all of it, however little is taken at a time; false if the other end is gone."""
    view = memoryview(content)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        return False
    return True
