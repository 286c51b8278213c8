"""Commands here and on other computers, built on :mod:`allhands.cluster.ssh`.

They run the steps of set-up, whose failures get a cause, and find out how ssh reaches a computer.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from allhands.cluster import ssh
from allhands.cluster.reaper import end_group, signal_group
from allhands.cluster.setup.plan import Step, shown
from allhands.cluster.setup.state import Access, HostKey, SetupIdentity
from allhands.errors import AllhandsError

_QUERY_S = 15.0
_MOST_SHOWN = 200
_ERRORS = ("error", "\u00d7")  # pip's and uv's marks; hints follow them
_FOLLOWS = "failing command"  # venv's last line, after what was wrong
_MOST_SAID = 1 << 20
_GRACE_S = 5.0
_SLICE_S = 0.1


@dataclass(frozen=True)
class CommandDone:
    """The result of a command; ``code`` is ``None`` if it did not end in time."""

    code: int | None
    output: str = ""
    errors: str = ""

    @property
    def last_line(self) -> str:
        """The last error line, or else the last line; without control characters."""
        for text in (self.errors, self.output):
            lines = ssh.printable_lines(text)
            errors = [line for line in lines if line.lower().startswith(_ERRORS)]
            causes = [line for line in lines if not line.lower().startswith(_FOLLOWS)]
            if lines:
                return (errors or causes or lines)[-1][:_MOST_SHOWN]
        return "no answer in time" if self.code is None else f"it ended with code {self.code}"


def on(target: str | None, argv: Sequence[str], options: ssh.SshOptions | None = None) -> list[str]:
    """Return the command line that runs ``argv`` on a computer; ``None`` is this one.

    Raises:
        ConfigError: as :func:`allhands.cluster.ssh.command`.
    """
    return list(argv) if target is None else ssh.command(target, argv, options)


class Shell:
    """Runs commands without a terminal, from any thread, and can end all of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._stopped = False

    def ask(
        self, target: str | None, argv: Sequence[str], text: str = "", timeout_s: float = _QUERY_S
    ) -> CommandDone:
        """Run a command that changes nothing, with ``text`` as its input, and wait for it.

        Raises:
            ConfigError: as :func:`on`, or there is no ssh.
        """
        with tempfile.TemporaryFile() as stream:
            stream.write(text.encode())
            stream.seek(0)
            return self.run(target, argv, stream, timeout_s)

    def run(
        self,
        target: str | None,
        argv: Sequence[str],
        stdin: IO[bytes] | int,
        timeout_s: float,
        options: ssh.SshOptions | None = None,
    ) -> CommandDone:
        """Run a command and wait for it.

        Args:
            stdin: a file, ``subprocess.DEVNULL``, or ``subprocess.PIPE``, which stays empty and
                open until the end.

        Raises:
            ConfigError: as :func:`on`, or there is no ssh.
        """
        words = on(target, argv, options)
        # Files instead of pipes: the children of a command may keep a pipe open.
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
            try:
                with self._lock:
                    if self._stopped:
                        return CommandDone(130, errors="interrupted")
                    process = subprocess.Popen(
                        words, stdin=stdin, stdout=said, stderr=errors, start_new_session=True
                    )
                    self._running.add(process)
            except OSError as error:
                if target is not None:
                    raise ssh.missing(error) from None
                return CommandDone(127, errors=f"{argv[0]}: {error.strerror}")
            try:
                code = _code(process, timeout_s)
            finally:
                with self._lock:
                    self._running.discard(process)
                if process.stdin is not None:
                    process.stdin.close()
            return CommandDone(code, _text(said), _text(errors))

    def stop(self) -> None:
        """End the running commands, here and there, and start no others."""
        with self._lock:
            self._stopped = True
            running = list(self._running)
        for process in running:
            signal_group(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + _GRACE_S
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            signal_group(process.pid)


def _code(process: subprocess.Popen[bytes], timeout_s: float) -> int | None:
    """Return the exit code; ``None`` if there is none in time, and then the command is ended."""
    deadline = time.monotonic() + timeout_s
    # In slices: another thread may reap the process meanwhile.
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(left, _SLICE_S))
    end_group(process)
    return None


def _text(stream: IO[bytes]) -> str:
    size = stream.seek(0, os.SEEK_END)
    stream.seek(max(0, size - _MOST_SAID))
    return stream.read().decode(errors="replace")


# --- access ---------------------------------------------------------------------------------------


def access_of(shell: Shell, target: str, timeout_s: float) -> Access:
    """Find out if ssh runs commands on a computer without a question, in about twice ``timeout_s``
    at most.

    Raises:
        ConfigError: ``target`` is no name, or there is no ssh.
    """
    found = ssh.trouble(target, timeout_s)
    if found is None:
        return Access("ok")
    reason, settings = found.reason or "no answer in time", ssh.settings_of(target)
    if found.kind == "unknown-key":
        keys, file = offered_keys(shell, target, timeout_s), known_hosts_of(settings)
        if keys and file is not None:
            return Access("unknown-key", reason, found.hint, keys, file, identity_of(settings))
    elif found.kind == "auth":
        return Access("denied", reason, found.hint, identity=identity_of(settings))
    return Access("failed", reason, found.hint)


def known_hosts_of(settings: dict[str, list[str]]) -> Path | None:
    """Return the person's own file of host keys; ``None``: there is none, or its name is not plain."""
    value = (settings.get("userknownhostsfile") or [""])[0]
    whole = Path(os.path.expanduser(value))
    first = whole if whole.is_file() else Path((shlex.split(value) or [""])[0]).expanduser()
    return (
        first
        if first.is_absolute() and "%" not in str(first) and first != Path("/dev/null")
        else None
    )


def identity_of(settings: dict[str, list[str]]) -> SetupIdentity | None:
    """Return the person's key for a host: one that exists with its public half, or the place of a
    new one.

    ``None``: one half of a key is at that place already, or its path is not absolute.
    """
    files = [
        Path(os.path.expanduser(value))
        for value in settings.get("identityfile", [])
        if "%" not in value
    ]
    whole = [file for file in files if file.exists() and _public(file).exists()]
    usual = next((file for file in whole or files if file.name == "id_ed25519"), None)
    if whole:
        return SetupIdentity(usual or whole[0], True)
    new = usual or next(iter(files), Path("~/.ssh/id_ed25519").expanduser())
    return (
        None
        if new.exists() or _public(new).exists() or not new.is_absolute()
        else SetupIdentity(new, False)
    )


def _public(file: Path) -> Path:
    return file.with_name(f"{file.name}.pub")


def offered_keys(shell: Shell, target: str, timeout_s: float) -> tuple[HostKey, ...]:
    """Return the host keys that an unknown computer shows, as lines of ``known_hosts``; no file of
    the person is changed.

    Raises:
        ConfigError: as :meth:`Shell.ask`.
    """
    with tempfile.TemporaryDirectory(prefix="allhands-") as scratch:
        notes = Path(scratch) / "known_hosts"
        noting = ssh.SshOptions(max(1, round(timeout_s)), _noting_in(notes))
        # If the option is set elsewhere, as in ALLHANDS_SSH, ssh would accept the key for good.
        if known_hosts_of(ssh.settings_of(target, noting)) != notes:
            return ()
        shell.run(target, ("true",), subprocess.DEVNULL, timeout_s, noting)
        if not notes.exists():
            return ()
        prints = ssh.printable_lines(shell.ask(None, ["ssh-keygen", "-lf", str(notes)]).output)
        lines = [line for line in notes.read_text().splitlines() if line.strip()]
        return tuple(HostKey(line, text) for line, text in zip(lines, prints, strict=False))


def _noting_in(notes: Path) -> dict[str, str]:
    return {
        "StrictHostKeyChecking": "accept-new",
        "UserKnownHostsFile": f'"{notes}"',
        "HashKnownHosts": "no",
        "UpdateHostKeys": "no",
        # Do not log in: nobody has compared the key yet, so the computer must learn nothing.
        "PreferredAuthentications": "none",
    }


# --- steps ----------------------------------------------------------------------------------------

# A command on another computer outlives its ssh. This script ends it when the script's input ends,
# which this process holds open.
_WATCHED = (
    'exec 3<&0; "$@" </dev/null 3<&- & work=$!; '
    '{ cat <&3; pkill -P "$work"; kill "$work"; } >/dev/null 2>&1 & watch=$!; exec 3<&-; '
    'wait "$work"; code=$?; kill "$watch" 2>/dev/null; exit "$code"'
)
_NO_NETWORK = "let it reach the package index, or name a mirror in its pip.conf (for uv: uv.toml)"
_MEND = "mend that Python, install uv there, or name another Python with --python"
# Words of pip and uv. A connection may break and come back, so the last line has to say that
# nothing was found.
_BROKEN = re.compile(
    r"connection broken by|Max retries exceeded|error sending request|Failed to fetch|dns error"
)
_NOT_FOUND = re.compile(
    r"No matching distribution|Could not find a version|Max retries|Request failed|Failed to fetch"
)
_WHY_BROKEN = re.compile(
    r"Temporary failure in name resolution|Name or service not known|nodename nor servname provided|"
    r"Network is unreachable|No route to host|Connection refused|(?:connection|connect|read) timed out|"
    r"certificate verify failed|Tunnel connection failed[^')]*",
    re.IGNORECASE,
)
_DEBIANS_PACKAGE = re.compile(r"apt install (\S+-venv)")


class Failed(AllhandsError):
    """A step that failed; ``hint`` tells the person what to do."""

    def __init__(self, step: Step, done: CommandDone) -> None:
        cause, mend = cause_of(done)
        by_hand = f"by hand: {shown(step)}"
        super().__init__(
            f"{step.why}: {cause}",
            code="setup-step-failed",
            hint=f"{mend}, then run this again; {by_hand}" if mend else f"run it {by_hand}",
        )


def cause_of(done: CommandDone) -> tuple[str, str]:
    """Return the cause of a command's failure, and a hint; an empty one if it is best to try by
    hand.
    """
    said, last = f"{done.errors}\n{done.output}", done.last_line
    if _BROKEN.search(said) and _NOT_FOUND.search(last):
        why = _WHY_BROKEN.search(said)
        return (
            f"it cannot reach the package index{f': {why.group()}' if why else ''} ({last})",
            _NO_NETWORK,
        )
    if "ensurepip is not" in said:
        package = _DEBIANS_PACKAGE.search(said)
        hint = f"install it there: sudo apt install {package.group(1)}" if package else _MEND
        return "its Python has no ensurepip, which puts pip into an environment", hint
    if "'ensurepip'" in last:
        return "ensurepip of its Python does not work, which puts pip into an environment", _MEND
    return last, ""


def run_step(shell: Shell, step: Step) -> None:
    """Run a step.

    Raises:
        Failed: it did not work, or the shell was stopped.
        ConfigError: there is no ssh.
    """
    done = _with_terminal(step) if step.terminal else _quietly(shell, step)
    if done.code != 0:
        raise Failed(step, done)


def _quietly(shell: Shell, step: Step) -> CommandDone:
    if step.feed is not None:
        with step.feed.open("rb") as feed:
            return shell.run(step.ssh, step.argv, feed, step.timeout_s)
    if step.ssh is None:
        return shell.run(None, step.argv, subprocess.DEVNULL, step.timeout_s)
    argv = ("sh", "-c", _WATCHED, "sh", *step.argv)
    return shell.run(step.ssh, argv, subprocess.PIPE, step.timeout_s)


def _with_terminal(step: Step) -> CommandDone:
    """Run a step in the foreground, on the person's own terminal: passwords go to the program,
    never through us.
    """
    try:
        done = subprocess.run(on(step.ssh, step.argv), timeout=step.timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return CommandDone(None)
    except OSError as error:
        return CommandDone(127, errors=f"{step.argv[0]}: {error.strerror}")
    return CommandDone(done.returncode)
