"""Rules for requests to an HTTP server of allhands: accepted names, web pages and tokens.

Any web page in a browser of this computer can send requests to the computer's servers. If the page
uses a server's own address, the browser names the page's origin. Or the page uses a host name of
its own that points to this computer (DNS rebinding). Both requests are refused before anything else
is looked at. Requests from other computers need a token.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
import secrets
import socket
from collections.abc import Iterable
from dataclasses import dataclass

from allhands.errors import ConfigError
from allhands.runtime.callers import listen_at
from allhands.runtime.ports import PortSettings, cannot_listen

LEAST_TOKEN = 8
_HOST = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:\[\]/@]+)(?::[0-9]{1,5})?")
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?/?")
_HEADER_NAMES = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~, -]{1,2000}")
_PORTS = {"http": "80", "https": "443"}
_SAFE = ("GET", "HEAD")
_SETTINGS = PortSettings(
    "another --port, or 0 for any free one", "--host 127.0.0.1, or 0.0.0.0 for all addresses"
)


@dataclass(frozen=True)
class Refusal:
    """The reason to refuse a request: HTTP status, one sentence, and a code for programs."""

    status: int
    message: str
    code: str


@dataclass(frozen=True)
class Guard:
    """Check of the headers of each request.

    Attributes:
        hosts: accepted names and addresses of the server, besides localhost and loopback addresses.
        origins: origins of other web pages that may send requests, as :func:`origin_of` returns
            them; "*": all pages.
        token: the token that a request must have; ``None``: none, because only this computer
            reaches the server.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    token: str | None = None

    def refusal(self, method: str, headers: Iterable[tuple[str, str]]) -> Refusal | None:
        """Return the reason to refuse a request with these headers; ``None`` if there is none."""
        found = _by_name(headers)
        hosts, origins = found.get("host", []), found.get("origin", [])
        name = _host_name(hosts[0]) if len(hosts) == 1 else None
        if name is None:
            return Refusal(
                400,
                "a request has one Host header: the server's own name or address",
                "invalid_host",
            )
        if not (_is_loopback(name) or name == "localhost" or name in self.hosts):
            told = (
                f"this server is not {name[:100]!r}: use its own address, or start it with --name"
            )
            return Refusal(400, told, "invalid_host")
        if len(origins) > 1 or (origins and not self.admits(origins[0], hosts[0])):
            told = f"pages of {origins[0][:100]!r} may not send requests: start the server with --allow-origin to allow them"
            return Refusal(403, told, "origin_not_allowed")
        # If a page loads pictures or scripts, browsers name no origin.
        if not (origins or "*" in self.origins) and _is_for_other_site(method, found):
            return Refusal(403, "pages of other sites may not send requests", "origin_not_allowed")
        return None

    def knows_token(self, headers: Iterable[tuple[str, str]]) -> bool:
        """True if there is no token, or the request has it (``Authorization: Bearer``)."""
        given = _by_name(headers).get("authorization", [])
        kind, _, value = given[0].partition(" ") if len(given) == 1 else ("", "", "")
        return self.token is None or (kind.lower() == "bearer" and self.is_token(value.strip()))

    def is_token(self, given: str) -> bool:
        """True if ``given`` is the token; compared in constant time.

        Compared as bytes, because visitors may send any characters.
        """
        wanted = (self.token or "").encode()
        return self.token is not None and hmac.compare_digest(
            given.encode("utf-8", "surrogatepass"), wanted
        )

    def admits(self, origin: str, host: str) -> bool:
        """True if pages of ``origin`` may send requests: pages of the server itself, whose Host
        header is ``host``, and pages of :attr:`origins`.
        """
        scheme, _, place = origin.lower().partition("://")
        own = scheme in _PORTS and place == host.lower()
        return own or "*" in self.origins or origin.lower() in self.origins

    def shared_with(self, headers: Iterable[tuple[str, str]]) -> dict[str, str]:
        """Return the response headers (CORS) by which a browser lets pages of :attr:`origins` read
        the answer.
        """
        found = _by_name(headers)
        origin = next(iter(found.get("origin", [])), "")
        if not self.origins:
            return {}
        if not ("*" in self.origins or origin.lower() in self.origins):
            return {"Vary": "Origin"}
        asked = next(iter(found.get("access-control-request-headers", [])), "")
        added = {
            "Access-Control-Allow-Origin": "*" if "*" in self.origins else origin,
            "Access-Control-Allow-Methods": "GET, POST, OPTIONS",
            "Vary": "Origin",
        }
        if _HEADER_NAMES.fullmatch(asked):
            added["Access-Control-Allow-Headers"] = asked
        if "access-control-request-private-network" in found:
            added["Access-Control-Allow-Private-Network"] = "true"
        return added


def origin_of(text: str) -> str:
    """Return an origin as browsers write it: scheme, host, and the port if it is not the scheme's
    own.

    Raises:
        ConfigError: no page has such an origin.
    """
    if text == "*":
        return text
    where, lower = f"--allow-origin {text}", text.lower()
    if lower == "null":
        hint = "serve the page over HTTP, and name its address; or allow every page: --allow-origin '*'"
        raise ConfigError(
            "null is the origin of every page that hides its own",
            code="origin-invalid",
            where=where,
            hint=hint,
        )
    found = _ORIGIN.fullmatch(lower)
    scheme, host, port = found.groups() if found else ("", "", None)
    if found is None or scheme == "file" or (port is not None and not 0 < int(port) < 65536):
        hint = "write scheme, host and port as the browser shows them, without a path: http://localhost:3000"
        raise ConfigError(
            "this is no web page's origin", code="origin-invalid", where=where, hint=hint
        )
    return f"{scheme}://{host}" + (
        f":{int(port)}" if port is not None and port != _PORTS.get(scheme) else ""
    )


def _is_for_other_site(method: str, headers: dict[str, list[str]]) -> bool:
    """True if a page of another site sends the request, unless a person follows a link."""
    site, mode = headers.get("sec-fetch-site", [""])[0], headers.get("sec-fetch-mode", [""])[0]
    return site in ("cross-site", "same-site") and not (mode == "navigate" and method in _SAFE)


def _by_name(headers: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for name, value in headers:
        found.setdefault(name.lower(), []).append(value.strip())
    return found


def _host_name(header: str) -> str | None:
    """Return the name in a Host header, as ``_normal`` writes it; ``None`` if it is invalid."""
    found = _HOST.fullmatch(header)
    return _normal(found[1]) if found else None


def _normal(name: str) -> str:
    bare = name.strip("[]").partition("%")[0].lower()
    try:
        return str(ipaddress.ip_address(bare))
    except ValueError:
        return bare.removesuffix(".")


def _is_loopback(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    return found.is_loopback or bool(
        found.version == 6 and found.ipv4_mapped and found.ipv4_mapped.is_loopback
    )


# --- listening ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listening:
    """A socket that listens, its URL, and the check of its requests.

    Attributes:
        address: URL of the server, without a path.
        is_open: True if other computers can reach it.
        made: True if the token was made here, so that the person must be told.
    """

    listener: socket.socket
    address: str
    guard: Guard
    is_open: bool
    made: bool


def listen(
    host: str,
    port: int,
    *,
    token: str | None = None,
    names: Iterable[str] = (),
    origins: Iterable[str] = (),
) -> Listening:
    """Listen at an address. If other computers can reach it and there is no ``token``, make one.

    Args:
        port: 0: any that is free.
        names: further accepted names of the server.
        origins: origins of other web pages that may send requests, separated by commas.

    Raises:
        ConfigError: nothing can listen at the address, or ``token`` or an origin is invalid.
    """
    allowed = frozenset(
        origin_of(one.strip()) for given in origins for one in given.split(",") if one.strip()
    )
    if token is not None:
        _check_token(token)
    listener = _bound(host, port)
    bound, number = listener.getsockname()[:2]
    is_open = not _is_loopback(bound)
    own, shown = [bound, host], host
    if ipaddress.ip_address(bound.partition("%")[0]).is_unspecified:
        own = _addresses()
        shown = own[0]
    hosts = {_normal(name) for name in (*own, *names, *([socket.gethostname()] if is_open else []))}
    made = token is None and is_open
    guard = Guard(frozenset(hosts), allowed, secrets.token_urlsafe(18) if made else token)
    place = f"http://{f'[{shown}]' if ':' in shown else shown}:{number}"
    return Listening(listener, place, guard, is_open, made)


def _check_token(token: str) -> None:
    problem = ""
    if len(token) < LEAST_TOKEN:
        problem = "a token of fewer than 8 characters can be guessed"
    elif not (token.isascii() and token.isprintable() and " " not in token):
        problem = "a token is made of ASCII letters, digits and signs"
    if problem:
        raise ConfigError(problem, code="access-token-unsafe", where="--token", hint="leave it out")


def _addresses() -> list[str]:
    """Return this computer's addresses without loopback, IPv4 first, and its name."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    every = [
        one for ones in psutil.net_if_addrs().values() for one in ones if one.family in families
    ]
    found = [
        one.address.partition("%")[0]
        for one in sorted(every, key=lambda one: families.index(one.family))
    ]
    return [*(address for address in found if not _is_loopback(address)), socket.gethostname()]


def _bound(host: str, port: int) -> socket.socket:
    try:
        every = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        found = min(every, key=lambda one: one[0] != socket.AF_INET)  # a name may have both kinds
        return listen_at(found[0], found[4], (socket.SO_REUSEADDR,))
    except (OSError, OverflowError, UnicodeError) as error:
        trouble = cannot_listen(error, host, port, _SETTINGS)
        raise ConfigError(
            f"cannot listen: {trouble.message}",
            code="server-port-unavailable",
            where=f"{host}:{port}",
            hint=trouble.hint,
        ) from None
