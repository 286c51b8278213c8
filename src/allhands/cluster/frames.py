"""Frames: the messages between the supervisor and its agents. A frame is one line of JSON with the
secret of the run.

A login shell may print anything on the same stream, so a line without the secret is never a frame.
Each kind of frame has required fields, see :data:`FROM_SUPERVISOR` and :data:`FROM_AGENT`. A frame
without them is passed on only as a frame of kind :data:`GARBLED`. Each direction has a thread of
its own, so neither side ever waits for the network of the other.
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
GARBLED = "garbled"  # received instead of a frame that has the secret, but not its required fields

_LONGEST = 8 << 20  # bytes of the longest frame; a longer line is not a frame
_CHUNK = 65536
_LEAST_SECRET = 32


# --- what frames hold -----------------------------------------------------------------------------


def _bytes(value: Any) -> bool:
    """True for bytes that are written as letters of Latin-1."""
    return isinstance(value, str) and (value.isascii() or max(value) <= "\xff")


def _word(value: Any) -> bool:
    """True for a word that can be the name of a file in a private directory."""
    return isinstance(value, str) and value.isascii() and value.replace("-", "").isalnum()


_RANK = _COUNT = integer(0, 1 << 32)
_CODE = integer(-(1 << 31), 1 << 31)
_PORT = integer(1, 65535)
_ANY_TEXT = maybe(is_text)
# The error file that a rank writes about itself.
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
            "listening": is_flag,
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
    """One end of a connection over two descriptors; its threads close them.

    The writer is closed after :meth:`close`, the reader when the other end has closed.

    Args:
        kinds: the kinds of frames that the other end sends, each with the check of its fields.
        secret: the secret of the run; ``None``: take it from the first frame, a ``hello``, which
            must come before any other line.
        receive: called in the reading thread with every frame, and with ``None`` when the other end
            has closed. For a frame with the secret but without its required fields it gets a frame
            of kind :data:`GARBLED`.
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
        """Send a frame; returns at once, without an error even if the other end is gone."""
        text = json.dumps({"secret": self._secret, "kind": kind, **fields})
        # The first line break ends a line that other output may have begun.
        self._outgoing.put(f"\n{text}\n".encode())

    def flush(self, timeout_s: float) -> bool:
        """Wait until all frames sent so far are written; return false if the time was too short."""
        written = threading.Event()
        self._outgoing.put(written)
        return written.wait(timeout_s)

    def close(self) -> None:
        """Stop sending, so that the other end sees the end of the stream.

        Frames that still come are read.
        """
        self._outgoing.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for the threads of both directions, for each at most ``timeout_s``."""
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
    """Write all of ``content``, in several parts if necessary; return false if the other end is
    gone.
    """
    view = memoryview(content)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        return False
    return True
