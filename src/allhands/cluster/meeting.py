"""The meeting: an exchange of addresses before MLX forms its group, between ranks that know only
the address of rank 0.

MLX's ring needs the address and a free port of every rank in advance. It waits half a minute for a
late rank, takes whoever connects first for its neighbour, and cannot be interrupted by a deadline.
So the ranks first meet here. Each tells rank 0 who it is, its address, and on which port it will
listen. Then rank 0 sends the whole list to all. After that all ranks listen, and each tries the
connections that MLX will make, see :mod:`allhands.cluster.ways`.

Rank 0 and every caller prove to each other that they know what the ranks of a job have in common,
see :mod:`allhands.runtime.callers`. So strangers (port scanners, health checks, another job) learn
nothing and disturb nothing. This protects against mistakes, not against an attacker who knows the
variables of the job. For that, set ``ALLHANDS_MEETING_KEY`` to a secret on every rank.
"""

from __future__ import annotations

import errno
import ipaddress
import json
import os
import secrets
import socket
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from allhands.cluster.patience import Patience, Waiting
from allhands.cluster.place import LOOPBACK, Backend, MeetingPoint
from allhands.cluster.ways import (
    Suspicion,
    blocked_way,
    is_loopback,
    listening_address,
    open_door,
)
from allhands.errors import DistributedError
from allhands.io.formatting import counted, format_duration
from allhands.io.strict_json import integer, is_integer, is_text, object_of, read_object
from allhands.runtime.callers import (
    CALLER,
    LISTENER,
    MEETING_KEY,
    Call,
    Caller,
    Callers,
    Handshake,
    Unproved,
    key_for,
    listen_at,
)
from allhands.runtime.ports import PortSettings, cannot_listen, fate_of, is_blocked, kind_of

_VERSION = 2
_MOST_BYTES = 4096  # of a line that a guest (a rank that calls rank 0) may send
_MOST_LIST_BYTES = 1 << 22
_MOST_STRANGERS = 1000  # addresses of strangers that are remembered
_MOST_RANKS = 1 << 20
_MOST_LETTERS = 500  # of a text from another rank, as it is shown
_REACH_S = 5.0
_CALL_S, _BRIEF_CALL_S = (
    3.0,
    1.0,
)  # for a connection; the shorter time applies after another port has not answered
_UNHEARD_S = 20.0  # without a caller, after which rank 0 reports this
_TRY_S, _LAST_S = 60.0, 8.0  # for all ranks to try their connections; less once one has failed
_FAREWELL_S = 5.0
_TICK_S = 0.2


def meet(
    point: MeetingPoint,
    rank: int,
    size: int,
    port: int,
    patience: Patience,
    backend: Backend = "ring",
) -> tuple[str, ...]:
    """Meet the other ranks; return ``"ip:port"`` of every rank, the same list on all of them.

    A rank's address is the one that its computer uses to reach rank 0.

    Args:
        port: the port on which this rank will listen. It also listens there for a moment during the
            meeting, to find out whether the connections of ``backend`` can be made.

    Raises:
        DistributedError: not all ranks came in time, a rank came twice, one was started for another
            size, or one cannot connect to another.
    """
    if ":" in point.host:
        raise DistributedError(
            f"rank 0 is named by the IPv6 address {point.host}, and MLX's groups take IPv4 addresses only",
            code="address-not-ipv4",
            hint="name rank 0's computer by its name or its IPv4 address (MASTER_ADDR)",
        )
    key = key_for(f"meeting of {point.job}", os.environ)
    hello = _Hello(_VERSION, rank, size, "", port, secrets.token_hex(16))
    part = _RollCall if rank == 0 else _Guest
    return part(point, hello, key, Waiting(patience), backend).run()


@dataclass(frozen=True)
class _Hello:
    """What a rank says about itself.

    ``address`` is the one that it uses to reach rank 0. ``nonce`` tells this process from another
    one with the same rank.
    """

    version: int
    rank: int
    size: int
    address: str
    port: int
    nonce: str

    @classmethod
    def read(cls, words: bytes) -> _Hello | None:
        """Read what a caller has sent about itself; ``None`` if no rank would send this."""
        said = read_object(words, most_depth=1)
        if said is None or not is_integer(said.get("version"), 1, 1 << 30):
            return None
        if said["version"] != _VERSION:
            return cls(
                said["version"], -1, -1, "", 0, ""
            )  # in that version the other fields may mean something else
        sound = _HELLO(said) and said["rank"] < said["size"]
        return cls(**{name: said[name] for name in cls.__dataclass_fields__}) if sound else None


def _is_address(text: object) -> bool:
    try:
        return isinstance(text, str) and bool(ipaddress.IPv4Address(text))
    except ValueError:
        return False


_RANK = integer(0, _MOST_RANKS)
_HELLO = object_of(
    {
        "size": _RANK,
        "rank": _RANK,
        "port": integer(1, 65535),
        "address": _is_address,
        "nonce": is_text,
    }
)


class _Trouble(Exception):
    """A reason why the ranks have not met, now or for good.

    ``blocked`` is true if something between the computers, such as a firewall, may be the cause.
    """

    def __init__(
        self, message: str, *, code: str = "rank-zero-unreachable", blocked: bool = False
    ) -> None:
        super().__init__(message)
        self.code = code
        self.blocked = blocked


@dataclass
class _Part:
    """A rank's part in the meeting."""

    point: MeetingPoint
    me: _Hello
    key: bytes
    waiting: Waiting
    backend: Backend = "ring"


# --- rank 0 ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Visitor:
    """A caller that has proved to be a rank of this job."""

    caller: Caller
    hello: _Hello
    conversation: Handshake

    def say(self, body: Mapping[str, object], deadline: float) -> None:
        with suppress(OSError):  # if it has left, this is noticed soon
            self.caller.say(self.conversation.sealed(LISTENER, json.dumps(body).encode()), deadline)

    def problem(self, what: str, line: bytes) -> str | None:
        """Return why the rank could not do ``what``, as this line says; empty if it could.

        ``None`` if the line is about something else.
        """
        words = self.conversation.opened(CALLER, line)
        said = None if words is None else read_object(words, most_depth=1)
        if said is None or said.get("kind") != what or not isinstance(said.get("problem"), str):
            return None
        return _printable(said["problem"])


@dataclass
class _RollCall(_Part):
    """Rank 0's part: listen, record who comes, and send all addresses when all ranks are there."""

    def __post_init__(self) -> None:
        self._here = ""
        self._present: dict[int, _Visitor] = {}
        self._unfit: list[_Visitor] = []
        self._strangers = Counter[str]()  # by address: callers that sent a line, but no valid proof

    def run(self) -> tuple[str, ...]:
        """Hold the meeting and return the addresses of all ranks.

        Raises:
            DistributedError: the ranks could not meet.
        """
        with Callers([self._listener()], _MOST_BYTES) as self._callers:
            try:
                return self._wait()
            except _Trouble as problem:
                self._say_all(
                    {
                        "kind": "error",
                        "message": str(problem),
                        "code": problem.code,
                        "blocked": problem.blocked,
                    }
                )
                raise DistributedError(
                    str(problem), code=problem.code, where="rank 0", hint=_HINTS[problem.blocked]
                ) from None

    def _listener(self) -> socket.socket:
        """Listen on the first port that is free.

        A port may be in use because there is a second rank 0 of the same job.

        Raises:
            DistributedError: no port can be used, or there is a second rank 0.
        """
        troubles, hints = list[str](), dict[str, None]()
        address = listening_address(self.point, self.waiting.patience)
        for port in self.point.ports:
            try:
                # Without SO_REUSEPORT: with it another job of the same user could share the port,
                # and would get half of the callers.
                listener = listen_at(socket.AF_INET, (address, port), (socket.SO_REUSEADDR,))
            except OSError as error:
                trouble = cannot_listen(error, address or "this computer", port, _SETTINGS)
                troubles.append(f"{port}: {error.strerror} ({trouble.message})")
                hints[trouble.hint] = None
                if error.errno == errno.EADDRINUSE:
                    # Ask the program that listens there: if it is a rank 0 of the same job, both
                    # end with an error.
                    with suppress(_Trouble):
                        _Guest(self.point, self.me, self.key, self.waiting).knock(
                            address or LOOPBACK, port, _CALL_S
                        )
            else:
                self._here = f"port {port} of {address or 'this computer'}"
                return listener
        raise DistributedError(
            f"rank 0 cannot listen at {self.point.host}: {'; '.join(troubles)}",
            code="port-unavailable",
            hint="; ".join(hints),
        )

    def _wait(self) -> tuple[str, ...]:
        while len(self._present) < self.me.size - 1:
            if self.waiting.left_s <= 0:
                limit = format_duration(self.waiting.patience.total_s)
                unheard = self._unheard()
                raise _Trouble(
                    f"{self._missing()} did not come within {limit}{self._who_else()}{unheard}",
                    code="rank-absent",
                    blocked=bool(unheard),
                )
            self.waiting.tell(f"waiting for {self._missing()}{self._unheard()}")
            for caller, line in self._callers.wait(_TICK_S):
                self._hear(caller, line)
        peers = self._peers()
        for visitor in self._present.values():
            visitor.caller.asked = True
        self._say_all({"kind": "list", "peers": peers})
        with ExitStack() as door:
            self._agree("listens", open_door(door, peers[0]))
            self._agree("reaches", blocked_way(self.backend, 0, peers))
        self._farewell()
        return peers

    def _agree(self, what: str, problem: str) -> None:
        """Let the ranks go on only together, after each has said whether it could do ``what``.

        Args:
            problem: why rank 0 itself could not do it; empty if it could.

        Raises:
            _Trouble: a rank has a problem, or has left.
        """
        problems = {0: problem}
        began = time.monotonic()
        # Hear all ranks, even after a problem: only a rank that has spoken listens for the reason.
        while len(problems) < self.me.size:
            if time.monotonic() > began + (_LAST_S if any(problems.values()) else _TRY_S):
                problems[-1] = (
                    f"rank {min(set(self._present) - set(problems))} says nothing any more"
                )
                break
            for caller, line in self._callers.wait(_TICK_S):
                rank = next(
                    (rank for rank, one in self._present.items() if one.caller is caller), None
                )
                if rank is None:
                    self._callers.drop(caller)  # all ranks are here, so this is a stranger
                elif line is None:
                    problems.setdefault(rank, f"rank {rank} has left the meeting")
                elif (said := self._present[rank].problem(what, line)) is not None:
                    problems[rank] = said
        if found := [text for _, text in sorted(problems.items(), reverse=True) if text]:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise _Trouble(
                found[-1] + more,
                code=_CODES_OF_TRIES[what],
                blocked=what == "reaches",
            )
        self._say_all({"kind": what})

    def _hear(self, caller: Caller, line: bytes | None) -> None:
        """Handle a line from a caller: admit a rank, or drop a stranger.

        Without a line the caller has left, and is forgotten.

        Raises:
            _Trouble: a rank of this job does not fit.
        """
        if line is None:
            self._present = {
                rank: one for rank, one in self._present.items() if one.caller is not caller
            }
            return
        conversation = caller.conversation(self.key)
        words = conversation.opened(CALLER, line)
        hello = None if words is None else _Hello.read(words)
        if hello is None:
            if len(self._strangers) < _MOST_STRANGERS:
                self._strangers[caller.there] += 1
            self._callers.drop(caller)
        else:
            self._greet(_Visitor(caller, hello, conversation))

    def _greet(self, visitor: _Visitor) -> None:
        """Record a rank that has come, and welcome it.

        Raises:
            _Trouble: the rank does not fit: its version or size differs, or the rank is taken.
        """
        caller, hello = visitor.caller, visitor.hello
        self._unfit = [visitor]
        if hello.version != _VERSION:
            raise _Trouble(
                f"the rank at {caller.there} has another version of allhands "
                f"(its meeting is of version {hello.version}, rank 0's of {_VERSION})",
                code="versions-differ",
            )
        if hello.size != self.me.size:
            raise _Trouble(
                f"rank {hello.rank} at {caller.there} was started for {counted(hello.size, 'rank')}, "
                f"rank 0 for {self.me.size}",
                code="world-size-mismatch",
            )
        before = self._present.get(hello.rank)
        if hello.rank == 0 or (before is not None and before.hello.nonce != hello.nonce):
            place = caller.here if before is None else before.caller.there
            raise _Trouble(
                f"there are two ranks {hello.rank}: at {place} and at {caller.there}",
                code="rank-taken-twice",
            )
        self._unfit = []
        if before is not None:
            self._callers.drop(before.caller)
        self._present[hello.rank] = visitor
        caller.proved = True
        visitor.say({"kind": "welcome"}, time.monotonic() + _REACH_S)

    def _missing(self) -> str:
        absent = [rank for rank in range(1, self.me.size) if rank not in self._present]
        shown = ", ".join(map(str, absent[:8])) + (
            f" and {len(absent) - 8} more" if len(absent) > 8 else ""
        )
        return f"rank{'s' * (len(absent) > 1)} {shown} of {self.me.size}"

    def _unheard(self) -> str:
        """Return a remark that no other computer has called; empty if one has, or if ranks may
        still be starting.
        """
        heard = self._strangers or any(
            not is_loopback(one.hello.address) for one in self._present.values()
        )
        if heard or self.point.is_local or self.waiting.passed_s < _UNHEARD_S:
            return ""
        return f"; nobody has called {self._here}: if they run, a firewall may keep them out"

    def _who_else(self) -> str:
        """Return a remark about callers that were not recognised as ranks of this job."""
        if not self._strangers:
            return ""
        shown = ", ".join(address for address, _ in self._strangers.most_common(3))
        return f"; callers from {shown} did not prove that they are of this job: compare {MEETING_KEY} and the port there"

    def _peers(self) -> tuple[str, ...]:
        """Return all addresses.

        Ranks on the same computer as rank 0 may have come by the loopback. They get the address
        that other computers use for rank 0.
        """
        others = [self._present[rank] for rank in range(1, self.me.size)]
        seen = [visitor.caller.here for visitor in others if not is_loopback(visitor.hello.address)]
        own = seen[-1] if seen else LOOPBACK
        addresses = [
            own if is_loopback(visitor.hello.address) else visitor.hello.address
            for visitor in others
        ]
        ports = [self.me.port, *(visitor.hello.port for visitor in others)]
        return tuple(
            f"{address}:{port}" for address, port in zip((own, *addresses), ports, strict=True)
        )

    def _say_all(self, body: Mapping[str, object]) -> None:
        deadline = time.monotonic() + _REACH_S
        for visitor in [*self._present.values(), *self._unfit]:
            visitor.say(body, deadline)

    def _farewell(self) -> None:
        """Wait until the others close their connections first.

        Then the port is free at once; otherwise the system would keep it for a minute.
        """
        staying = [visitor.caller for visitor in self._present.values()]
        for caller in self._callers.all():
            if not caller.proved:
                self._callers.drop(caller)
        deadline = time.monotonic() + _FAREWELL_S
        while staying and time.monotonic() < deadline:
            gone = [caller for caller, line in self._callers.wait(_TICK_S) if line is None]
            staying = [caller for caller in staying if caller not in gone]


# --- the other ranks ------------------------------------------------------------------------------

# What a rank tries before all go on together, and the code of the error if it fails.
_CODES_OF_TRIES = {"listens": "port-unavailable", "reaches": "connection-blocked"}
_HINTS = (
    "look at the output of the named ranks; every rank must belong to the same start of the same job",
    "let the computers reach each other at all ports; `allhands cluster check --hosts A,B` finds what is in the way",
)
_SETTINGS = PortSettings(
    "another port with MASTER_PORT", "the name or an address of rank 0's computer (MASTER_ADDR)"
)


def _printable(text: str) -> str:
    return "".join(letter for letter in text[:_MOST_LETTERS] if letter.isprintable())


class _Guest(_Part):
    """The part of every other rank: find rank 0, say who it is, and wait for the list."""

    def run(self) -> tuple[str, ...]:
        """Take part in the meeting and return the addresses of all ranks.

        Raises:
            DistributedError: the ranks could not meet.
        """
        patience, suspicion = self.waiting.patience, Suspicion(self.point)
        reason = _Trouble("no time was left")
        pause = patience.first_pause_s
        while self.waiting.left_s > 0:
            began = time.monotonic()
            try:
                return self._visit()
            except _Trouble as why:
                reason = why
            if told := suspicion.note(str(reason), began, reason.blocked):
                patience.tell(told)
            self.waiting.tell(f"waiting for rank 0 at {self.point.host}: {reason}")
            time.sleep(max(0.0, min(pause, self.waiting.left_s)))
            pause = min(2 * pause, patience.longest_pause_s)
        look = f"see whether rank 0 runs, and from here: nc -vz {self.point.host} {self.point.ports[0]}"
        raise DistributedError(
            f"no meeting with rank 0 at {self.point.host} within {format_duration(patience.total_s)}: {reason}",
            code="rank-zero-unreachable",
            where=f"rank {self.me.rank}",
            hint=f"{suspicion.way_out}; {look}" if reason.blocked else look,
        )

    def _visit(self) -> tuple[str, ...]:
        """Try each port once.

        Raises:
            _Trouble: rank 0 is at none of them.
            DistributedError: rank 0 has answered that the meeting has failed.
        """
        host, reasons = self.point.host, list[_Trouble]()
        try:
            address = self.waiting.patience.resolve(host)
        except OSError as error:
            raise _Trouble(
                f"the name {host} has no address yet ({error.strerror or error})",
            ) from None
        for port in self.point.ports:
            try:
                return self.knock(
                    address, port, _BRIEF_CALL_S if any(one.blocked for one in reasons) else _CALL_S
                )
            except _Trouble as why:
                reasons.append(why)
        # The best reason of several ports: first one from a port that answered, then a refused
        # connection, then one that may be blocked.
        raise min(reasons, key=lambda one: (one.blocked, "refused" in str(one)))

    def knock(self, address: str, port: int, call_s: float) -> tuple[str, ...]:
        try:
            call = Call((address, port), call_s)
        except OSError as error:
            blocked = is_blocked(kind_of(error))
            raise _Trouble(
                f"connections to {address}:{port} {fate_of(error)}",
                blocked=blocked,
            ) from None
        deadline = time.monotonic() + _REACH_S
        with call:
            try:
                conversation = call.begin(self.key, deadline)
                hello = json.dumps(asdict(replace(self.me, address=call.own_address))).encode()
                call.say(conversation.sealed(CALLER, hello), deadline)
                self._heard(conversation, call.line(_MOST_BYTES, deadline), "welcome")
            except (OSError, Unproved):
                raise _Trouble(
                    f"{address}:{port}: the program that listens there is not rank 0 of this job",
                ) from None
            try:
                until = time.monotonic() + max(0.0, self.waiting.left_s) + _REACH_S
                body = self._heard(conversation, call.line(_MOST_LIST_BYTES, until), "list")
                peers = tuple(body["peers"])
                with ExitStack() as door:
                    self._agree(call, conversation, "listens", open_door(door, peers[self.me.rank]))
                    self._agree(
                        call,
                        conversation,
                        "reaches",
                        blocked_way(self.backend, self.me.rank, peers),
                    )
            except (OSError, Unproved):
                late = self.waiting.left_s <= 0
                raise _Trouble(
                    "it waits for other ranks" if late else "it has ended before all had come",
                ) from None
        return peers

    def _agree(self, call: Call, conversation: Handshake, what: str, problem: str) -> None:
        """Say whether this rank could do ``what``, and wait until all could.

        Raises:
            Unproved, OSError: rank 0 has left.
            DistributedError: a rank could not.
        """
        deadline = time.monotonic() + _TRY_S + _REACH_S
        told = f"rank {self.me.rank}: {problem}" if problem and what == "listens" else problem
        call.say(
            conversation.sealed(CALLER, json.dumps({"kind": what, "problem": told}).encode()),
            deadline,
        )
        self._heard(conversation, call.line(_MOST_BYTES, deadline), what)

    def _heard(self, conversation: Handshake, line: bytes, kind: str) -> dict[str, Any]:
        """Return the content of a line from rank 0 in this conversation.

        Raises:
            Unproved: the line has no proof, or is not of this ``kind``.
            DistributedError: rank 0 says that the meeting has failed.
        """
        words = conversation.opened(LISTENER, line)
        body = None if words is None else read_object(words, most_depth=2)
        if body is None:
            raise Unproved
        if body.get("kind") == "error" and isinstance(body.get("message"), str):
            raise DistributedError(
                _printable(body["message"]),
                code=_printable(str(body.get("code") or "rank-zero-unreachable")),
                where=f"rank {self.me.rank}",
                hint=_HINTS[body.get("blocked") is True],
            )
        if body.get("kind") != kind or (kind == "list" and len(body["peers"]) != self.me.size):
            raise Unproved
        return body
