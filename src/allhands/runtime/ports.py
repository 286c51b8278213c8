"""Error messages for ports: why a program cannot listen there, or cannot connect.

Each message is true for the system's error. "Listens there already" is said only of a port in use,
with the program that uses it, if it can be seen. A firewall is suspected if nobody answers or the
system forbids the connection. It is never suspected of a refused connection: there nobody listens
yet.
"""

from __future__ import annotations

import errno
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["refused", "dropped", "rejected", "forbidden", "failed"]

_UNREACHABLE = (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EHOSTDOWN, errno.ENETDOWN)
_FORBIDDEN = (errno.EPERM, errno.EACCES)
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_FIRST_FREE = Path("/proc/sys/net/ipv4/ip_unprivileged_port_start")
_USUAL_FIRST_FREE = 1024


@dataclass(frozen=True)
class PortTrouble:
    """The trouble with a port, and a remedy."""

    message: str
    hint: str


@dataclass(frozen=True)
class PortSettings:
    """Words of hints for the options with which a person chooses where to listen.

    Attributes:
        port: another port, for example ``"another --port, or 0 for any free one"``.
        address: another address.
    """

    port: str = "another port"
    address: str = "an address of this computer"


# --- listening ------------------------------------------------------------------------------------


def cannot_listen(
    error: Exception, address: str, port: int, settings: PortSettings | None = None
) -> PortTrouble:
    """Return the reason why a program cannot listen at ``port`` of ``address``, and a remedy.

    Args:
        error: the exception of binding the port, or of looking up the address.
        port: 0 is any port that is free.
    """
    given, words = settings or PortSettings(), _words(error)
    number = getattr(error, "errno", None)
    if isinstance(error, OverflowError):
        return PortTrouble("a port is a number from 0 to 65535", f"choose {given.port}")
    if isinstance(error, socket.gaierror | UnicodeError):
        return PortTrouble(
            f"{address} is no name or address that is known here", f"give {given.address}"
        )
    if number == errno.EADDRINUSE and port:
        user = user_of(port)
        found = (
            "end it" if user else f"look for it (ss -ltnp 'sport = :{port}', or lsof -iTCP:{port})"
        )
        told = f"another program listens there already{f': {user}' if user else ''}"
        return PortTrouble(told, f"{found}, or choose {given.port}")
    if number == errno.EACCES and 0 < port < (first := _first_free()):
        return PortTrouble(
            f"ports below {first} are for the administrator",
            f"choose {given.port}, {first} or higher",
        )
    known = {
        errno.EADDRNOTAVAIL: (f"{address} is no address of this computer", f"give {given.address}"),
        errno.EADDRINUSE: (
            "no port is free",
            "end programs that hold thousands of connections: ss -s",
        ),
        errno.EAFNOSUPPORT: (
            f"this computer has no {'IPv6' if ':' in address else 'IPv4'}",
            f"give {given.address}",
        ),
        **dict.fromkeys(
            _FORBIDDEN,
            (
                f"the system forbids it ({words})",
                "look at the rules of the sandbox, container or SELinux",
            ),
        ),
        **dict.fromkeys(
            _NO_ROOM,
            (f"the system has no room for it ({words})", "close files, or allow more: ulimit -n"),
        ),
    }
    return PortTrouble(*known.get(number or 0, (words, f"choose {given.port}, or {given.address}")))


def user_of(port: int) -> str | None:
    """Return the program that listens at a TCP port here, as ``"python3 (process 123)"``; ``None``
    if it cannot be seen.
    """
    import psutil

    found: str | None = None
    # macOS shows the connections of all processes to the administrator only.
    with suppress(psutil.Error, OSError, RuntimeError):
        for one in psutil.net_connections("tcp"):
            if one.laddr and one.laddr.port == port and one.status == psutil.CONN_LISTEN:
                found = (
                    f"{psutil.Process(one.pid).name()} (process {one.pid})"
                    if one.pid
                    else "another user's program"
                )
                if one.pid:
                    break
    return found


def _first_free() -> int:
    with suppress(OSError, ValueError):
        return int(_FIRST_FREE.read_text(encoding="ascii"))
    return _USUAL_FIRST_FREE


def _words(error: Exception) -> str:
    return (
        (error.strerror if isinstance(error, OSError) else None)
        or str(error)
        or type(error).__name__
    )


# --- connecting -----------------------------------------------------------------------------------


def kind_of(error: OSError) -> Kind:
    """Return the kind of a failed connection.

    Only ``"refused"`` shows that the computer is there and nobody listens at the port.
    """
    if isinstance(error, TimeoutError) or error.errno == errno.ETIMEDOUT:
        return "dropped"
    if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET):
        return "refused"
    if error.errno in _UNREACHABLE:
        return "rejected"
    return "forbidden" if error.errno in _FORBIDDEN else "failed"


def is_blocked(kind: Kind) -> bool:
    """True if a firewall or the network may be in the way; False if just nobody listens yet."""
    return kind in ("dropped", "rejected", "forbidden")


def fate_of(error: OSError) -> str:
    """Return what happens to connections with this error, as the end of a sentence about them."""
    match kind_of(error):
        case "dropped":
            return (
                "get no answer (timed out): a firewall drops them, or that address leads elsewhere"
            )
        case "rejected":
            return f"do not get there ({_words(error)}): a firewall rejects them, or there is no way to that address"
        case "forbidden":
            return f"are not let out ({_words(error)}): a firewall of this computer forbids them"
        case "refused":
            return f"are refused ({_words(error)})"
        case "failed":
            return f"fail ({_words(error)})"
