"""The supervisor's connection to one agent: over ssh, or to a child process on this computer.

Both are used in the same way.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from allhands.cluster import ssh
from allhands.cluster.frames import FROM_AGENT, GARBLED, Frame, FrameLink
from allhands.cluster.hosts import Host
from allhands.cluster.reaper import end_group
from allhands.cluster.runfiles import tail
from allhands.distributed.blame import init_command
from allhands.errors import AllhandsError, DistributedError, error_named
from allhands.io.files import private_opener

# A computer that sends nothing for this long counts as lost. With what is done after that, less
# than five seconds pass.
LOST_S = 3.5
_PING_S = 0.5
_UNANSWERED_S = 1.0
# At most this much silence is counted between two checks: if more time has passed, this process has
# slept, not the other side.
_STEP_S = 1.0
_MOST_NOISE = 1 << 20
_AGENT = ("-P", "-m", "allhands.cluster.agent")


class HostError(DistributedError):
    """Computers that cannot take part; ``hosts`` are their names."""

    def __init__(
        self,
        hosts: Sequence[str],
        message: str,
        *,
        code: str,
        where: str | None = None,
        hint: str | None = None,
    ) -> None:
        super().__init__(message, code=code, where=where, hint=hint)
        self.hosts = tuple(hosts)


class UnfitHosts(HostError):
    """Computers that cannot take part in their present state; the others could run without them."""


class Connection:
    """An agent that has been started and sent its ``hello``, but may not have answered yet.

    Args:
        host: the computer; without ``ssh`` it is this one.
        name: the computer's name in messages.
        hello: content of the ``hello`` frame, which says what to do.
        log: a file for output that is not a frame; ``None`` drops such output.
        listen: called in another thread with each frame except ``ready`` and ``ended``, and with
            ``None`` when the computer is lost.

    Raises:
        AllhandsError: ssh or Python cannot be run.
    """

    def __init__(
        self,
        host: Host,
        name: str,
        hello: Mapping[str, Any],
        log: Path | None,
        listen: Callable[[Frame | None], None],
    ) -> None:
        self.name = name
        self.ready: Frame | None = None
        self.lost = False
        self._listen = listen
        self._log = log
        self._noise_left = _MOST_NOISE
        self._refused: AllhandsError | None = None
        self._answered = threading.Event()  # ready, refused, or gone
        self._ended = threading.Event()  # the agent has said that nothing is left there
        self._gone = threading.Event()  # the stream has ended
        self._silent_s = 0.0
        self._checked = self._pinged = time.monotonic()
        self._lock = threading.Lock()
        stdin, stdout = os.pipe(), os.pipe()
        try:
            self._process = self._start(host, stdin[0], stdout[1], hello["descriptors"] or ())
        except BaseException:
            for descriptor in (stdin[1], stdout[0]):
                os.close(descriptor)
            raise
        finally:
            for descriptor in (stdin[0], stdout[1]):
                os.close(descriptor)
        self._link = FrameLink(
            stdout[0], stdin[1], FROM_AGENT, secrets.token_hex(32), self._take, self._note
        )
        self._link.send("hello", **hello)

    def wait_until_ready(self, deadline: float) -> Frame:
        """Wait for the agent's ``ready``, and return it.

        Raises:
            HostError: the agent cannot be reached, or does not answer before ``deadline``
                (``time.monotonic``).
            AllhandsError: it refuses; the error says why.
        """
        answered = self._answered.wait(max(0.0, deadline - time.monotonic()))
        if self.ready is not None and not self.lost:
            return self.ready
        if self._refused is not None:
            raise self._refused
        raise (
            self._unreachable()
            if answered
            else HostError(
                [self.name],
                f"host {self.name} has not answered in time",
                code="host-unresponsive",
                hint=self._see_log("is it overloaded?"),
            )
        )

    def send(self, kind: str, **fields: Any) -> None:
        """Send the agent a frame; returns at once, even if the agent is gone."""
        if not self.lost:
            self._link.send(kind, **fields)

    def check(self) -> None:
        """Send a ping twice a second, and count the computer as lost after :data:`LOST_S` seconds
        of silence.

        To be called more than twice a second.
        """
        now = time.monotonic()
        self._silent_s += min(now - self._checked, _STEP_S)
        self._checked = now
        if now >= self._pinged + _PING_S:
            self._pinged = now
            self.send("ping", number=0)
        if self.ready is not None and self._silent_s > LOST_S:
            self._lose()

    def finish(self, deadline: float) -> bool:
        """Wait until the agent has ended all its processes, but not beyond ``deadline``.

        Return whether the agent has confirmed it.
        """
        self._link.close()
        if not self._answered.is_set():
            deadline = min(deadline, time.monotonic() + _UNANSWERED_S)  # it has started nothing yet
        while (
            not (self._ended.is_set() or self._gone.is_set())
            and time.monotonic() < deadline
            and not self.lost
        ):
            self._ended.wait(0.02)
        if self._ended.is_set():
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.1, deadline - time.monotonic()))
        # An agent that loses its connection ends all its processes. If it is a child of ours, it is
        # killed here, and its reaper does this.
        end_group(self._process)
        self._link.join(0.5)
        return self._ended.is_set()

    def _start(
        self, host: Host, stdin: int, stdout: int, descriptors: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        python, target = host.python or sys.executable, host.ssh
        argv = (
            ssh.command(target, [python, *_AGENT])
            if target is not None
            else [os.path.expanduser(python), *_AGENT]
        )
        try:
            with contextlib.ExitStack() as stack:
                stderr = (
                    stack.enter_context(open(self._log, "ab", opener=private_opener))
                    if self._log
                    else subprocess.DEVNULL
                )
                return subprocess.Popen(
                    argv,
                    stdin=stdin,
                    stdout=stdout,
                    stderr=stderr,
                    start_new_session=True,
                    pass_fds=tuple(descriptors),
                )
        except OSError as error:
            if target is not None:
                raise ssh.missing(error) from None
            raise HostError(
                [self.name],
                f"host {self.name} cannot start its Python {argv[0]}: {error.strerror}",
                code="host-python-unusable",
                hint='correct "python" in the hostfile',
            ) from None

    def _take(self, frame: Frame | None) -> None:
        self._silent_s = 0.0
        if frame is None:
            self._gone.set()
            if not self._ended.is_set():
                self._lose()
        elif frame["kind"] == "ready":
            self.ready = frame
        elif frame["kind"] == "refused":
            self._refused = self._as_error(frame)
            self._listen(frame)
        elif frame["kind"] == "ended":
            self._ended.set()
        elif frame["kind"] == GARBLED:
            self._refused = self._refused or self._not_understood(frame["what"])
            self._note(self._refused.message.encode())
            self._lose()
        else:
            self._listen(frame)
        if frame is None or frame["kind"] in ("ready", "refused", GARBLED):
            self._answered.set()

    def _lose(self) -> None:
        with self._lock:
            first, self.lost = not self.lost, True
        if first:
            self._listen(None)

    def _note(self, line: bytes) -> None:
        """Write into the log what a login shell or a library has printed, up to a limit."""
        self._noise_left -= len(line)
        if self._log is not None and self._noise_left > 0:
            with (
                contextlib.suppress(OSError),
                open(self._log, "ab", opener=private_opener) as stream,
            ):
                stream.write(line + b"\n")

    def _as_error(self, frame: Frame) -> AllhandsError:
        kind = error_named(str(frame["type"]))
        message, hint = f"host {self.name}: {frame['message']}", frame["hint"]
        if kind is None or kind is DistributedError:
            return HostError(
                [self.name], message, code=frame["code"], where=frame["where"], hint=hint
            )
        return kind(message, code=frame["code"], where=frame["where"], hint=hint)

    def _not_understood(self, what: str) -> HostError:
        hint = self._see_log("install the same version of allhands everywhere")
        return HostError(
            [self.name],
            f"host {self.name} sent an unknown message ({what!a})",
            code="message-not-understood",
            hint=hint,
        )

    def _unreachable(self) -> HostError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        code = self._process.poll()
        last = "".join(f": {line}" for line in (tail(self._log)[-1:] if self._log else ()))
        if code == 255:
            by_hand = f"make `ssh {shlex.quote(self.name)} true` work without a question"
            return HostError(
                [self.name],
                f"host {self.name} cannot be reached{last}",
                code="host-unreachable",
                hint=self._see_log(by_hand),
            )
        kind = UnfitHosts if code in (1, 126, 127) else HostError
        ready = f"make it ready (`{init_command([self.name])}`)"
        return kind(
            [self.name],
            f"host {self.name} runs no agent of allhands{last}",
            code="host-without-agent",
            hint=self._see_log(
                f'{ready}, or name the Python that has allhands there as "python" in the hostfile'
            ),
        )

    def _see_log(self, hint: str) -> str:
        return f"{hint}; see {self._log}" if self._log else hint
