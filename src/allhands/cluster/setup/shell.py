"""Commands here and on other computers, without a terminal: built on :mod:`allhands.cluster.ssh`."""

from __future__ import annotations

import contextlib
import os
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
from allhands.cluster.reaper import signal_group
from allhands.cluster.setup.state import Access, HostKey, SetupIdentity

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


def on(target: str | None, argv: Sequence[str]) -> list[str]:
    """Return the command line that runs ``argv`` on a computer; ``None`` is this one.

    Raises:
        ConfigError: as :func:`allhands.cluster.ssh.command`.
    """
    return list(argv) if target is None else ssh.command(target, argv)


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
            return self.run(on(target, argv), stream, timeout_s, remote=target is not None)

    def run(
        self, argv: Sequence[str], stdin: IO[bytes] | int, timeout_s: float, *, remote: bool
    ) -> CommandDone:
        """Run a command line and wait for it.

        Args:
            stdin: a file, ``subprocess.DEVNULL``, or ``subprocess.PIPE``: nothing, but open until
                the end.

        Raises:
            ConfigError: it is an ssh (``remote``), and there is none.
        """
        # Files and no pipes: the children of a command may keep their ends open.
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as errors:
            try:
                with self._lock:
                    if self._stopped:
                        return CommandDone(130, errors="interrupted")
                    process = subprocess.Popen(
                        argv, stdin=stdin, stdout=said, stderr=errors, start_new_session=True
                    )
                    self._running.add(process)
            except OSError as error:
                if remote:
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
    # In slices: another thread may reap it, too.
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(min(left, _SLICE_S))
    signal_group(process.pid)
    process.wait()
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

    ``None``: at that place is a private key whose public half is missing.
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
    """Return the host keys that an unknown computer shows, in the form of ssh's notes; no file is
    changed.

    Raises:
        ConfigError: as :meth:`Shell.ask`.
    """
    with tempfile.TemporaryDirectory(prefix="allhands-") as scratch:
        notes = Path(scratch) / "known_hosts"
        noting = ssh.SshOptions(max(1, round(timeout_s)), _noting_in(notes))
        # Where the option has been taken already, as by ALLHANDS_SSH, ssh would accept the key for
        # good.
        if known_hosts_of(ssh.settings_of(target, noting)) != notes:
            return ()
        argv = ssh.command(target, ("true",), noting)
        shell.run(argv, subprocess.DEVNULL, timeout_s, remote=True)
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
        # Not to log in: a key that nobody has compared yet gets to know nothing.
        "PreferredAuthentications": "none",
    }
