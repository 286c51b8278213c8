"""How ssh is called: without questions, with deadlines, and with every word quoted for the remote
shell.

``ALLHANDS_SSH`` replaces the program and its first options (``ALLHANDS_SSH="ssh -F my_config"``).
It is split as a shell would split it, but is never given to a shell. All other settings of a host,
such as its port and key, belong in ssh's own configuration.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from allhands.errors import ConfigError

# Names, addresses and users; nothing that a shell, ssh or a ProxyCommand could misunderstand.
_HOST = re.compile(r"[A-Za-z0-9_:][A-Za-z0-9_.:%-]*(@[A-Za-z0-9_:][A-Za-z0-9_.:%-]*)?")
_NAME = re.compile(r"(?=.*[A-Za-z])[A-Za-z0-9_][A-Za-z0-9_.-]*")
_MOST_SAID = 1 << 16
_LONGEST_REASON = 160
_FAILED = 255  # exit code of ssh itself; any other code is that of the remote command
_BY_HAND = "make `ssh {host} true` work without a question"
_CHANGED = "REMOTE HOST IDENTIFICATION HAS CHANGED"
# Words of OpenSSH, each with the kind of trouble. More specific words come first: a changed key is
# also reported as a failed verification.
_KINDS = (
    (_CHANGED.lower(), "changed-key"),
    ("could not resolve hostname", "name"),
    ("host key verification failed", "unknown-key"),
    ("permission denied", "auth"),
    ("too many authentication failures", "auth"),
    ("connection refused", "refused"),
    ("connection timed out", "timeout"),
    ("operation timed out", "timeout"),
    ("no route to host", "unreachable"),
    ("network is unreachable", "unreachable"),
)
_HINTS = {
    "changed-key": "find out why its key has changed; if the new key is right, remove the old one "
    "(ssh-keygen -R) and run `ssh {host} true` once by hand",
    "name": "correct the name, or give its address in ~/.ssh/config",
    "unknown-key": "run `ssh {host} true` once by hand, and accept its key if it is right",
    "auth": "put your public key there (ssh-copy-id {host}), or name the key to use in ~/.ssh/config (IdentityFile)",
    "refused": "start the ssh server there; a port other than 22 belongs in ~/.ssh/config",
}
_LASTING = ("changed-key", "name", "unknown-key", "auth")
# The file and the host name of a key that has changed.
_STALE = re.compile(
    r"^Offending [^\n]*key in ([^\n]+):\d+\n(?:[^\n]*\n)*?Host key for (\S+) has changed",
    re.MULTILINE,
)


@dataclass(frozen=True)
class SshOptions:
    """Options of a call of ssh.

    Attributes:
        connect_timeout_s: time limit for making the connection.
        settings: settings of ssh's configuration, which are added to ours or replace them.
    """

    connect_timeout_s: int = 10
    settings: Mapping[str, object] = field(default_factory=dict[str, object], hash=False)


@dataclass(frozen=True)
class SshTrouble:
    """Why no command can be run on a host.

    Attributes:
        reason: the reason in ssh's own words; ``None``: there was no answer in time.
        hint: what the user can do.
        lasting: true if waiting will not help.
        kind: kind of trouble, see :func:`classified`.
    """

    reason: str | None
    hint: str
    lasting: bool = False
    kind: str = "other"


def command(host: str, argv: Sequence[str], options: SshOptions | None = None) -> list[str]:
    """Return the command line that runs ``argv`` on ``host``.

    Every word of ``argv`` arrives unchanged, whatever characters it has. The only exception: a
    program whose name begins with ``~/`` is looked for in the home directory on ``host``. The
    remote shell must be a POSIX shell, because ssh joins the words with spaces and gives them to
    it. Nothing is forwarded, ssh asks no questions (about passwords or unknown host keys), and
    there is no pseudo-terminal.

    Raises:
        ConfigError: ``host`` cannot be the name of a host, a word has a NUL, or ``ALLHANDS_SSH`` is
            not understood.
    """
    check_host(host)
    if any("\0" in word for word in argv):
        raise ConfigError(
            "a word of the command holds a NUL character", code="value-invalid", where=host
        )
    return [*program(), *_arguments(options or SshOptions()), "-T", "--", host, _joined(argv)]


def _joined(argv: Sequence[str]) -> str:
    below_home = argv[0][2:] if argv and argv[0].startswith("~/") else ""
    return f"~/{shlex.join([below_home, *argv[1:]])}" if below_home else shlex.join(argv)


def trouble(host: str, timeout_s: float) -> SshTrouble | None:
    """Return why no command can be run on ``host`` now, or ``None`` if one can.

    It takes at most ``timeout_s``.

    Raises:
        ConfigError: as in :func:`command`.
    """
    argv = command(host, ["true"], SshOptions(connect_timeout_s=max(1, round(timeout_s))))
    # A file, not a pipe: a proxy that ssh leaves behind may keep its end of a pipe open.
    with tempfile.TemporaryFile() as said:
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=said,
                timeout=timeout_s,
                check=False,
                start_new_session=True,
            )
        except OSError as error:
            found = missing(error)
            return SshTrouble(found.message, found.hint or "", lasting=True)
        except subprocess.TimeoutExpired:
            return SshTrouble(None, f"look whether it is switched on; {_BY_HAND.format(host=host)}")
        said.seek(0)
        return _explained(host, done.returncode, said.read(_MOST_SAID)) if done.returncode else None


def classified(code: int | None, said: str) -> tuple[str, str, tuple[str, str] | None]:
    """Classify an ssh that failed.

    Args:
        code: its exit code; ``None``: no answer in time.
        said: its error output. The reason is the last line; banners may come before it.

    Returns:
        The kind of trouble; the reason; and, if a host's key has changed, the file with the old key
        and the name of the host.
    """
    lines = printable_lines(said)
    reason = lines[-1] if lines else ""
    if code is None:
        return "timeout", reason, None
    if code in (126, 127):
        return "no-ssh" if "no ssh program" in said else "no-python", reason, None
    if code != _FAILED:
        return "login", reason or f"it ended with code {code}", None
    text = "\n".join(lines)
    telling = text if _CHANGED in text else reason
    kind = next((kind for words, kind in _KINDS if words in telling.lower()), "other")
    stale = _STALE.search(text) if kind == "changed-key" else None
    return kind, reason or "ssh has failed without a message", stale and (stale[1], stale[2])


def printable_lines(text: str) -> list[str]:
    """Return the lines that are not empty, without control characters and surrounding blanks."""
    lines = (
        "".join(letter for letter in line if letter.isprintable()).strip()
        for line in text.splitlines()
    )
    return [line for line in lines if line]


def _explained(host: str, code: int, said: bytes) -> SshTrouble:
    """Return the trouble of an ssh that has failed."""
    kind, reason, _ = classified(code, said.decode(errors="replace"))
    reason = f"{_CHANGED}: {reason}" if kind == "changed-key" else reason
    hint = _HINTS.get(kind, _BY_HAND).format(host=host)
    shown = reason if len(reason) <= _LONGEST_REASON else f"{reason[:_LONGEST_REASON]}..."
    return SshTrouble(shown, hint, kind in _LASTING, kind)


def real_name(host: str) -> str:
    """Return the name or address that ssh connects to for ``host``.

    ``host`` may be an alias in ssh's configuration.

    Raises:
        ConfigError: as in :func:`command`, or there is no ssh.
    """
    return settings_of(host).get("hostname", [host.rpartition("@")[2]])[0]


def settings_of(host: str, options: SshOptions | None = None) -> dict[str, list[str]]:
    """Return the settings that ssh uses for ``host``: a mapping from lower-case names to values.

    Raises:
        ConfigError: as in :func:`command`, or there is no ssh.
    """
    check_host(host)
    argv = [*program(), *_arguments(options or SshOptions()), "-G", "--", host]
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise missing(error) from None
    found: dict[str, list[str]] = {}
    for line in done.stdout.splitlines():
        name, _, value = line.partition(" ")
        found.setdefault(name.lower(), []).append(value)
    return found


def near_names(host: str) -> tuple[str, ...]:
    """Return up to three known names that look like ``host``, for a host that is not known.

    Known are names in the files of ssh and in /etc/hosts.
    """
    bare = host.rpartition("@")[2].lower()
    return tuple(difflib.get_close_matches(bare, sorted(_known_names() - {bare}), n=3, cutoff=0.7))


def _known_names() -> set[str]:
    """Return the names in ssh's configuration, in its list of known keys (unless hashed), and in
    /etc/hosts.
    """
    words = program()
    home = Path.home() / ".ssh"
    config = Path(words[words.index("-F") + 1]) if "-F" in words[:-1] else home / "config"
    places = {
        config: r"(?im)^\s*host(?:name)?\s+(.*)",
        home / "known_hosts": r"(?m)^(\S+)",
        Path("/etc/hosts"): r"(?m)^\s*[\da-f.:]+\s+([^#\n]*)",
    }
    found: set[str] = set()
    for path, pattern in places.items():
        with suppress(OSError):
            for text in re.findall(pattern, path.read_text(encoding="utf-8", errors="replace")):
                found |= {
                    name.removeprefix("[").partition("]")[0]
                    for name in re.split(r"[\s,]+", text.lower())
                }
    # Leave out patterns, hashes and addresses.
    return {name for name in found if _NAME.fullmatch(name)}


def missing(error: OSError | subprocess.TimeoutExpired) -> ConfigError:
    """Return the error for an ssh program that does not start or does not answer."""
    reason = error.strerror if isinstance(error, OSError) else "no answer"
    return ConfigError(
        f"{shlex.join(program())} cannot be run: {reason}",
        code="ssh-missing",
        where="ALLHANDS_SSH" if "ALLHANDS_SSH" in os.environ else None,
        hint="install OpenSSH's client, or name it in ALLHANDS_SSH",
    )


def check_host(host: str) -> None:
    """Check that ``host`` is a name, so that ssh cannot take it for an option or anything else.

    Raises:
        ConfigError: it is not a name.
    """
    if not _HOST.fullmatch(host):
        raise ConfigError(
            f"{ascii(host)[:60]} is not the name of a host",
            code="host-name-invalid",
            hint="give a name or address, such as node1 or user@node1",
        )


def program() -> list[str]:
    """Return the words that start ssh.

    Raises:
        ConfigError: ``ALLHANDS_SSH`` is not understood.
    """
    text = os.environ.get("ALLHANDS_SSH") or "ssh"
    try:
        words = [os.path.expanduser(word) for word in shlex.split(text)]
    except ValueError as error:
        words, reason = [], str(error)
    else:
        reason = "it is empty"
    if not words or not words[0]:
        raise ConfigError(
            f"not understood: {reason}",
            code="ssh-command-invalid",
            where="ALLHANDS_SSH",
            hint="for example 'ssh -F my_config'",
        )
    return words


def _arguments(options: SshOptions) -> list[str]:
    settings = {
        "BatchMode": "yes",
        "ConnectTimeout": options.connect_timeout_s,
        "ConnectionAttempts": 1,
        # These two make ssh notice that the other side is gone.
        "ServerAliveInterval": 3,
        "ServerAliveCountMax": 3,
        "ForwardAgent": "no",
        "ForwardX11": "no",
        "ClearAllForwardings": "yes",
        "PermitLocalCommand": "no",
        "RequestTTY": "no",
        # A connection shared with another session would stay open after we end the process.
        "ControlMaster": "no",
        "ControlPath": "none",
        "EscapeChar": "none",
        **options.settings,
    }
    return [word for name, value in settings.items() for word in ("-o", f"{name}={value}")]
