"""The coordinator's connection to one host: starts the worker there over ssh with all of its code, and speaks to it."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from importlib import resources
from typing import IO, Any, cast

from allhands.cluster import ssh
from allhands.cluster.hosts import Host
from allhands.cluster.sync.wire import BEAT, JSON, Broken, Channel, of_json, over_pipes
from allhands.errors import AllhandsError, DistributedError

# What the worker is made of, in the order of their imports.
SHIPPED = ("wire", "blocks", "shelf", "relay", "worker")
PACKAGE = "allhands.cluster.sync"
_BEAT_S = 1.0
_AHEAD = 2  # blocks that may wait for the pipe to ssh
_LOOK_S = 6.0
_TOO_OLD = 9
# What the host's own Python runs: it reads the modules, and nothing of that host's own packages is used.
_LOADER = f"""
import json, os, sys, types
if sys.version_info < (3, 9):
    sys.stderr.write("Python 3.9 or newer is needed, and this is %d.%d\\n" % sys.version_info[:2])
    sys.exit({_TOO_OLD})
def take(count):
    text = b""
    while len(text) < count:
        piece = os.read(0, count - len(text))
        if not piece:
            sys.exit(1)
        text += piece
    return text
for name, text in json.loads(take(int(take(10)))):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = []
    exec(compile(text, name, "exec"), module.__dict__)
sys.modules[name].main()
"""
_SHELL = 'if command -v "$1" >/dev/null 2>&1; then exec "$1" -I -c "$2"; fi; exec python3 -I -c "$2"'


def worker_code() -> bytes:
    """The modules of the worker as the loader reads them: the length as ten digits, then names and texts."""
    parts = PACKAGE.split(".")
    modules = [(".".join(parts[:depth]), "") for depth in range(1, len(parts) + 1)]
    folder = resources.files(PACKAGE)
    modules += [(f"{PACKAGE}.{name}", (folder / f"{name}.py").read_text(encoding="utf-8")) for name in SHIPPED]
    content = json.dumps(modules).encode()
    return b"%010d" % len(content) + content


def worker_command(python: str) -> list[str]:
    """What runs on a host, whose Python may be elsewhere than is said; then the first one on its path."""
    return ["sh", "-c", _SHELL, "sh", python, _LOADER]


class Member:
    """One host of a sync.

    Args:
        host: where.
        start: what the worker is told first.
        listen: called in another thread with all that the worker says, and with ``None`` and why when it has ended.

    Attributes:
        answered: whether the worker has said anything.

    Raises:
        AllhandsError: ssh cannot be run.
    """

    def __init__(
        self,
        host: Host,
        start: Mapping[str, Any],
        listen: Callable[[dict[str, Any] | None, AllhandsError | None], None],
    ) -> None:
        self._host = host
        self._listen = listen
        self._ending = False
        self.answered = False
        self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (read when the process has ended)
        argv = ssh.command(cast(str, host.ssh), worker_command(host.python or sys.executable))
        stdin, stdout = os.pipe(), os.pipe()
        try:
            self._process = subprocess.Popen(
                argv, stdin=stdin[0], stdout=stdout[1], stderr=self._said, start_new_session=True
            )
        except OSError as error:
            for descriptor in (stdin[1], stdout[0]):
                os.close(descriptor)
            self._said.close()
            raise ssh.missing(error) from None
        finally:
            for descriptor in (stdin[0], stdout[1]):
                os.close(descriptor)
        self._stdout = stdout[0]
        self._stdin = os.fdopen(stdin[1], "wb", buffering=0)
        self._channel = over_pipes(stdout[0], stdin[1])
        self._outgoing: queue.SimpleQueue[tuple[int, tuple[bytes, ...], Callable[[], None] | None] | None]
        self._outgoing = queue.SimpleQueue()
        self._mark = secrets.token_hex(32).encode()
        self.say(**start)
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._write, self._read)]
        for thread in self._threads:
            thread.start()

    @property
    def silent_s(self) -> float:
        """Seconds since the last word of the worker."""
        return time.monotonic() - self._channel.heard

    def say(self, kind: str, **fields: Any) -> None:
        """Tell the worker something; returns at once, whatever has become of it."""
        self._outgoing.put((JSON, (json.dumps({"kind": kind, **fields}).encode(),), None))

    def feed(self) -> Channel:
        """A channel that sends blocks to the worker over ssh, no faster than they go."""
        return _Feed(self._outgoing, lambda: self._process.poll() is not None)

    def end(self) -> None:
        """Ask the worker to end; returns at once."""
        self._ending = True
        self.say("end")
        self._outgoing.put(None)

    def join(self, deadline: float) -> None:
        """Wait until the worker has ended, and end ssh at ``deadline`` (``time.monotonic``) if it has not."""
        self._ending = True
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        for thread in self._threads:
            thread.join(1.0)
        self._said.close()

    def kill(self) -> None:
        """End the connection now; the worker ends by itself when it notices."""
        self.end()
        self.join(time.monotonic())

    def _write(self) -> None:
        broken = False
        try:
            _write_all(self._stdin, worker_code())
            self._channel.send(BEAT, self._mark)
        except (OSError, Broken):
            broken = True
        while True:
            try:
                item = self._outgoing.get(timeout=_BEAT_S)
            except queue.Empty:
                item = (BEAT, (), None)
            if item is None:
                break
            kind, parts, done = item
            try:
                if not broken:
                    self._channel.send(kind, *parts)
            except Broken:
                broken = True
            if done is not None:
                done()
        with contextlib.suppress(OSError):
            self._stdin.close()

    def _read(self) -> None:
        reason: AllhandsError | None = None
        try:
            self._channel.skip_to(b"\n" + self._mark)
            self.answered = True
            while True:
                kind, content = self._channel.receive()
                if kind == JSON:
                    self._listen(of_json(content), None)
        except Broken as error:
            reason = self._why(str(error)) if not self._ending else None
        finally:
            os.close(self._stdout)
            self._listen(None, reason)

    def _why(self, reason: str) -> AllhandsError:
        name = self._host.name
        if self.answered:
            return lost(name, "its connection has ended")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        said = b""
        with contextlib.suppress(ValueError):  # it has been closed meanwhile: nobody wants to know any more
            self._said.seek(0)
            said = self._said.read(1 << 16)
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
        last = "".join(letter for letter in (lines[-1] if lines else reason) if letter.isprintable())[:160]
        if code == 255:
            trouble = ssh.trouble(cast(str, self._host.ssh), _LOOK_S)
            if trouble is not None:
                return DistributedError(
                    f"host {name} cannot be reached: {trouble.reason or 'no answer'}", hint=trouble.hint
                )
        hint = 'name a Python 3.9 or newer as "python" in the hostfile'
        return DistributedError(f"host {name} cannot take part: {last}", hint=hint)


class _Feed(Channel):
    """Blocks among the other words to a worker; waits while enough of them are on their way."""

    def __init__(self, outgoing: queue.SimpleQueue[Any], gone: Callable[[], bool]) -> None:
        super().__init__(lambda view: 0, len, 0, lambda: None)
        self._outgoing = outgoing
        self._gone = gone
        self._room = threading.Semaphore(_AHEAD)

    def send(self, kind: int, *parts: bytes) -> None:
        """As in :class:`Channel`."""
        while not self._room.acquire(timeout=_BEAT_S):
            if self._gone():
                raise Broken("its connection has ended")
        if self._gone():
            raise Broken("its connection has ended")
        self._outgoing.put((kind, parts, self._room.release))


def lost(name: str, reason: str) -> DistributedError:
    """The error for a host that was lost on the way."""
    hint = "look whether it is switched on and connected, then sync again: what it has received is kept"
    return DistributedError(f"host {name} has been lost: {reason}", hint=hint)


def _write_all(stream: IO[bytes], content: bytes) -> None:
    view = memoryview(content)
    while view:
        view = view[stream.write(view) :]
