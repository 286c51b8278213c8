"""The words between the supervisor and its agents: JSON, one frame a line, each with the secret of the run.

A login shell may print what it likes on the same stream: a line without the secret is noise, never a frame. A frame
holds what its kind must hold, see :data:`FROM_SUPERVISOR` and :data:`FROM_AGENT`, or nobody gets to see it. Both
directions have a thread of their own, so neither side ever waits for the other one's network.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import queue
import threading
from collections.abc import Callable, Mapping
from typing import Any, cast

from allhands.strict_json import is_integer, read_object

Frame = dict[str, Any]
Check = Callable[[Any], bool]
GARBLED = "garbled"  # received in place of a frame that has the secret, but not what it must hold

_LONGEST = 8 << 20  # bytes of a frame; what is longer is noise
_CHUNK = 65536
_LEAST_SECRET = 32


# --- what frames hold --------------------------------------------------------------------------------


def _integer(least: int, most: int) -> Check:
    return lambda value: is_integer(value, least, most)


def _maybe(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _list(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, cast("list[Any]", value)))


def _mapping(check: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(check, cast("dict[str, Any]", value).values()))


def _object(needed: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> Check:
    def check(value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        known = {name: one for name, one in (optional or {}).items() if name in value}
        return all(name in value and one(value[name]) for name, one in {**needed, **known}.items())

    return check


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _flag(value: Any) -> bool:
    return isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, float) or is_integer(value, -(1 << 53), 1 << 53)


def _bytes(value: Any) -> bool:
    """Bytes as the letters of Latin-1."""
    return isinstance(value, str) and (value.isascii() or max(value) <= "\xff")


def _word(value: Any) -> bool:
    """The name of a file in a private directory."""
    return isinstance(value, str) and value.isascii() and value.replace("-", "").isalnum()


_RANK = _COUNT = _integer(0, 1 << 32)
_CODE = _integer(-(1 << 31), 1 << 31)
_PORT = _integer(1, 65535)
_ANY_TEXT = _maybe(_text)
# What a rank writes about itself.
ERROR = _object({"type": _text, "message": _text}, {"where": _ANY_TEXT, "hint": _ANY_TEXT, "text": _ANY_TEXT})
_REPORT = _object(
    {"error": _maybe(ERROR), "log_path": _text, "log_tail": _list(_text), "out_of_memory": _flag}, {"stopped": _flag}
)
BEAT = _object({"step": _COUNT, "phase": _text, "count": _COUNT}, {"waited_s": _number})
_AGED_BEAT = _object({"step": _COUNT, "phase": _text, "count": _COUNT, "age": _number}, {"waited_s": _number})
_HELLO = _object(
    {
        "name": _text,
        "python": _text,
        "cwd": _text,
        "cwd_required": _flag,
        "below_home": _ANY_TEXT,
        "forwarded": _mapping(_text),
        "descriptors": _list(_COUNT),
        "adapter_path": _ANY_TEXT,
        "run_id": _ANY_TEXT,
        "first": _COUNT,
        "count": _COUNT,
        "backend": _text,
        "address": _text,
    },
    {
        "resume": _ANY_TEXT,
        "command": lambda value: _list(_text)(value) and bool(value),
        "num_processes": _COUNT,
        "log_dir": _text,
        "cores_per_rank": _maybe(_COUNT),
        "env": _mapping(_text),
        "stop_grace_s": _number,
        "weights": _maybe(_list(_number)),
        "tag_output": _flag,
        "keep_logs": _flag,
        "relay": _flag,
        "rdma": _maybe(_list(lambda row: isinstance(row, list))),
    },
)
FROM_SUPERVISOR: Mapping[str, Check] = {
    "hello": _HELLO,
    "start": _object({"peers": _list(_text)}),
    "ping": _object({"number": _COUNT}),
    "signal": _object({"rank": _RANK, "number": _integer(1, 64)}),
    "tell": _object({"word": _word}),
    "report": _object({"rank": _RANK}),
    "end": _object({}),
}
FROM_AGENT: Mapping[str, Check] = {
    "ready": _object(
        {
            "ports": _list(_PORT),
            "step": _maybe(_COUNT),
            "own": _flag,
            "hostname": _text,
            "cores": _COUNT,
            "versions": _mapping(_ANY_TEXT),
        }
    ),
    "refused": _object({"type": _text, "message": _text, "where": _ANY_TEXT, "hint": _ANY_TEXT}),
    "pong": _object({}),
    "output": _object({"stream": _integer(1, 2), "data": _bytes}),
    "line": _object({"rank": _RANK, "data": _bytes}),
    "sample": _object({"line": _text}),
    "marks": _object(
        {
            "rank": _RANK,
            "ready": _flag,
            "started": _flag,
            "busy_age": _maybe(_number),
            "beat": _maybe(_AGED_BEAT),
        }
    ),
    "exit": _object({"rank": _RANK, "code": _CODE, "age": _number, "report": _REPORT}),
    "report": _object({"rank": _RANK, "report": _REPORT}),
    "ended": _object({}),
}


# --- the connection ----------------------------------------------------------------------------------


class Link:
    """One end of a connection over two descriptors, which it closes in :meth:`close`.

    Args:
        kinds: of the frames that the other end sends, and what they must hold.
        secret: of the run; ``None``: that of the first frame, which must come before anything else.
        receive: called in the reading thread with every frame, and with ``None`` when the other end has closed. A
            frame that has the secret, but not what it must hold, comes as one of kind :data:`GARBLED`.
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
        frame = read_object(line, halves=True)
        if frame is None:
            return None
        secret, kind = frame.pop("secret", None), frame.get("kind")
        if not isinstance(secret, str) or not isinstance(kind, str) or not secret.isascii():
            return None
        if self._secret is None and kind == "hello" and len(secret) >= _LEAST_SECRET and self._kinds[kind](frame):
            self._secret = secret
        if self._secret is None or not hmac.compare_digest(secret, self._secret):
            return None
        check = self._kinds.get(kind)
        if check is None:
            return None
        return frame if check(frame) else {"kind": GARBLED, "what": kind}


def _write_all(descriptor: int, content: bytes) -> bool:
    view = memoryview(content)
    try:
        while view:
            view = view[os.write(descriptor, view) :]
    except OSError:
        return False
    return True
