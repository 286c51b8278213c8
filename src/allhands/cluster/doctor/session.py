"""A session with the probe on one computer, over ssh or here: lines of JSON, with deadlines."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from allhands.cluster import probe, ssh
from allhands.cluster.doctor.access import ssh_trouble
from allhands.cluster.doctor.facts import FactTrouble
from allhands.cluster.hosts import Host
from allhands.cluster.reaper import end_group
from allhands.io.strict_json import (
    Check,
    integer,
    is_integer,
    is_number,
    is_text,
    list_of,
    mapping_of,
    maybe,
    object_of,
    read_object,
)

_MOST_NOISE = 4096
_MOST_SAID = 1 << 14
_LONGEST_LINE = 64 << 20
_END_S = 1.0
_SSH_FAILED = 255
NOT_UNDERSTOOD = "its answer is not understood"
_ERROR = object_of(
    {"error": object_of({"number": integer(0, 1 << 16), "reason": is_text, "path": is_text})}
)


def _copied(held: Mapping[str, Check]) -> Check:
    """Return a check of the answer to a step of copying: these fields, or an error of the disk."""
    check = object_of(held)
    return lambda value: check(value) or _ERROR(value)


# The form of the answer to each request; the callers parse facts and trees.
ANSWERS: Mapping[str, Check] = {
    "time": object_of({"time": is_number}),
    "facts": object_of({}),
    "trees": object_of({"trees": list_of(object_of({}))}),
    "listen": object_of({"ports": mapping_of(integer(1, 65535)), "errors": mapping_of(is_text)}),
    "reach": object_of({"reached": list_of(object_of({}, {"source": is_text}))}),
    "logins": object_of(
        {"logins": list_of(object_of({"code": maybe(integer(-255, 255)), "said": is_text}))}
    ),
    "staged": object_of({"bytes": integer(0, 1 << 60)}),
    "look": _copied(
        {
            "roots": list_of(is_text),
            "lacking": list_of(integer(0, 1 << 32)),
            "partial": integer(0, 1 << 60),
            "rsync": maybe(is_text),
            "install": is_text,
            "user": is_text,
            "address": is_text,
            "port": integer(1, 65535),
        }
    ),
    "send": _copied({"code": integer(-255, 255), "stats": is_text, "said": is_text}),
}


class Untold(Exception):
    """The computer has not answered, for a ``reason``."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class SessionRefused(Exception):
    """The computer could not be asked at all."""

    def __init__(self, trouble: FactTrouble) -> None:
        super().__init__(trouble.kind)
        self.trouble = trouble


class Session:
    """The probe on ``host``; :meth:`close` or :meth:`kill` ends it.

    Args:
        host: without ``ssh`` it is this computer.
        timeout_s: limit for connecting, and for silence.
        interpreter: the words that start Python there; ``None``: the host's own.

    Attributes:
        progress: the last number that the probe has reported about a request.
    """

    def __init__(
        self, host: Host, timeout_s: float, interpreter: Sequence[str] | None = None
    ) -> None:
        self.noise = ""
        self.progress = 0
        self._timeout_s = timeout_s
        self._token = secrets.token_hex(16)
        self._answers: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._ready = False
        self._ended = threading.Event()
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the session
        argv = [*(interpreter or [host.python or sys.executable]), "-u", "-c", probe.BOOTSTRAP]
        if host.ssh is not None:
            argv = ssh.command(
                host.ssh, argv, ssh.SshOptions(connect_timeout_s=max(1, min(10, round(timeout_s))))
            )
        self._process = self._start(argv, remote=host.ssh is not None)
        self._threads = [
            threading.Thread(target=work, name=f"{work.__name__}-{host.name}", daemon=True)
            for work in (self._read, self._send_program)
        ]
        for thread in self._threads:
            thread.start()

    def wait_until_ready(self) -> None:
        """Wait for the probe.

        Raises:
            SessionRefused: it does not start; the error has the reason.
        """
        answer = self._next(self._timeout_s)
        if answer is None:
            if self._ended.is_set():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_END_S)
            code = self._process.poll()
            self.kill()
            raise SessionRefused(
                ssh_trouble(code, f"{self._words()}\n{self.noise if code != _SSH_FAILED else ''}")
            )
        if "old" in answer:
            self.kill()
            raise SessionRefused(
                FactTrouble(
                    kind="old-python", reason=f"{answer['python']} is Python {answer['old']}"
                )
            )

    def ask(self, kind: str, silence_s: float | None = None, /, **request: Any) -> dict[str, Any]:
        """Return the answer to one request.

        Args:
            kind: the kind of the request; see :func:`allhands.cluster.probe.answer_to`.
            silence_s: limit for silence; ``None``: the session's.

        Raises:
            Untold: there is no answer.
        """
        limit = silence_s or self._timeout_s
        request["kind"] = kind
        if not self._send(json.dumps(request) + "\n"):
            raise Untold("the connection broke")
        while True:
            answer = self._next(limit)
            if answer is None:
                raise Untold(
                    "the connection broke" if self._ended.is_set() else f"no answer for {limit:g} s"
                )
            if "progress" in answer:
                self.progress = (
                    answer["progress"]
                    if is_integer(answer["progress"], 0, 1 << 60)
                    else self.progress
                )
                continue
            if not ANSWERS[kind](answer):
                raise Untold(NOT_UNDERSTOOD)
            return answer

    def close(self) -> None:
        """End the probe, wait a moment for it, and release its files and threads."""
        with contextlib.suppress(OSError):
            self._input.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self.kill()
        for thread in self._threads:
            thread.join(_END_S)
        # A process that ssh left behind may hold the pipe open: then the reader keeps our end.
        if not self._threads[0].is_alive():
            self._output.close()
            self._said.close()

    def kill(self) -> None:
        """End the probe at once; may be called again, and from any thread."""
        end_group(self._process)

    # --- what happens in other threads ------------------------------------------------------------

    def _start(self, argv: list[str], remote: bool) -> subprocess.Popen[bytes]:
        try:
            process = subprocess.Popen(
                argv,
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                start_new_session=True,
            )
        except OSError as error:
            self._said.close()
            kind = "no-ssh" if remote else "no-python"
            raise SessionRefused(
                FactTrouble(kind=kind, reason=f"{argv[0]}: {error.strerror}")
            ) from None
        assert process.stdin is not None
        assert process.stdout is not None
        self._input, self._output = process.stdin, process.stdout
        return process

    def _send_program(self) -> None:
        """Send the probe, in a thread: an ssh that is still connecting takes only so much."""
        text = probe.program()
        self._send(f"{self._token} {len(text)}\n{text}")

    def _send(self, text: str) -> bool:
        data = memoryview(text.encode("ascii"))
        try:
            while data:
                data = data[self._input.write(data) :]
        except (OSError, ValueError):  # the other side has gone, or we have closed
            return False
        return True

    def _read(self) -> None:
        pending = b""
        with contextlib.suppress(OSError, ValueError):
            while data := os.read(self._output.fileno(), 1 << 16):
                *lines, pending = (pending + data).split(b"\n")
                for line in lines:
                    self._take(line)
                if len(pending) > _LONGEST_LINE:
                    break
        self._hear(pending)
        self._ended.set()
        self._answers.put(None)

    def _take(self, line: bytes) -> None:
        """Take an answer, which follows the token; other programs printed everything else."""
        before, found, text = line.partition(self._token.encode())
        answer = read_object(text.strip(), halves=True) if found else None
        self._hear(line if answer is None else before)
        if answer is not None:
            self._ready = True
            self._answers.put(answer)

    def _hear(self, noise: bytes) -> None:
        """Keep the output of a shell before the first answer."""
        if noise.strip() and not self._ready and len(self.noise) < _MOST_NOISE:
            text = noise[:_MOST_NOISE].decode(errors="replace")
            self.noise += "".join(c for c in text if c.isprintable() or c == "\t") + "\n"

    def _next(self, timeout_s: float) -> dict[str, Any] | None:
        if self._ended.is_set() and self._answers.empty():
            return None
        try:
            return self._answers.get(timeout=timeout_s)
        except queue.Empty:
            return None

    def _words(self) -> str:
        """Return the end of the error output of ssh, or of the shell there."""
        self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, self._said.tell() - _MOST_SAID))
        return self._said.read().decode(errors="replace")


def clock_offset(session: Session, rounds: int = 3) -> tuple[float, float]:
    """Return the computer's clock minus this one's, and the round trip of the question, in seconds.

    Raises:
        Untold: it has not answered.
    """
    best: tuple[float, float] | None = None
    for _ in range(rounds):
        began, began_clock = time.monotonic(), time.time()
        there = float(session.ask("time")["time"])
        took = time.monotonic() - began
        if best is None or took < best[1]:
            best = there - (began_clock + took / 2), took
    assert best is not None
    return best
