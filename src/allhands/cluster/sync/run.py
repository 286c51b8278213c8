"""A whole sync: every host is asked what it lacks, and told from whom to get it, until all have everything."""

from __future__ import annotations

import errno
import queue
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from allhands.cluster.hosts import Host
from allhands.cluster.sync.blocks import BlockEntry, HashCache
from allhands.cluster.sync.member import Member, lost
from allhands.cluster.sync.plan import Plan, Topology, Transport, environment_of, parents
from allhands.cluster.sync.relay import Listener, serve, wanted
from allhands.cluster.sync.source import SourceShelf, Stopped, has_openssl, hash_files, make_certificate
from allhands.cluster.sync.wire import Broken, Security
from allhands.cluster.sync.worker import Counts
from allhands.errors import AllhandsError, ConfigError, DataError, DistributedError
from allhands.io.files import storage_error
from allhands.io.strict_json import Check, integer, is_integer, is_text, list_of, object_of
from allhands.runtime.ports import cannot_listen

SOURCE = -1  # the number of this computer
_OVER_SSH = -2
_CONNECT_S = 40.0
_LOST_S = 12.0  # without a word, of which there should be four a second
_TICK_S = 0.2
_END_S = 1.5
NO_OPENSSL = "there is no openssl here, so everything is sent over ssh from this computer; --transport tcp is faster"


@dataclass(frozen=True)
class SyncOptions:
    """How files are brought.

    Attributes:
        topology: who gets them from whom.
        transport: between hosts: ``tls``, ``tcp`` (in clear), ``ssh`` (from this computer to each, which needs no
            other connection), or ``auto``: ``tls`` where a certificate can be made.
        dry_run: only find out what there is to do.
        cache: file with hashes of the files here; ``None``: all are read.
    """

    topology: Topology = "chain"
    transport: Transport = "auto"
    dry_run: bool = False
    cache: Path | None = None


@dataclass
class HostState:
    """Where a host stands; bytes and files are those of this run.

    Attributes:
        state: ``connecting``, ``looking``, ``receiving``, ``done`` or ``failed``.
        read: bytes of its own files that it has read.
        needed: bytes that must come from elsewhere.
        lacking: numbers of the files that are not there, or not the same; ``paths`` is where they belong there.
        received: bytes of blocks that have come, wrong ones too.
        parent: who feeds it; ``None`` before that is known.
        error: why it failed.
        done_s: seconds from the start until it had everything.
    """

    name: str
    state: str = "connecting"
    read: int = 0
    needed: int = 0
    lacking: tuple[int, ...] = ()
    paths: tuple[str, ...] = ()
    received: int = 0
    sent: int = 0
    parent: str | None = None
    error: AllhandsError | None = None
    done_s: float | None = None


@dataclass
class SyncState:
    """Where the whole sync stands; given to who shows it, and the report at the end.

    Attributes:
        total: bytes of all files.
        hashed: bytes of them that this computer has read, or knows.
        sent: bytes of blocks that this computer has sent.
        withdrawn: files that have changed while they were sent.
    """

    hosts: list[HostState]
    names: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    total: int = 0
    hashed: int = 0
    sent: int = 0
    notes: list[str] = field(default_factory=list[str])
    withdrawn: list[str] = field(default_factory=list[str])
    seconds: float = 0.0

    @property
    def errors(self) -> list[AllhandsError]:
        """Everything that went wrong."""
        found = [host.error for host in self.hosts if host.error is not None]
        hint = "sync again when nothing writes to it"
        return found + [DataError("it changed while it was sent", where=name, hint=hint) for name in self.withdrawn]

    @property
    def exit_code(self) -> int:
        """0, or the most telling of the errors' codes: a host lost before a disk that is full."""
        codes = {error.exit_code for error in self.errors}
        return next((code for code in (DistributedError.exit_code, *sorted(codes)) if code in codes), 0)


Show = Callable[[SyncState], None]


def synchronise(plan: Plan, hosts: Sequence[Host], options: SyncOptions, show: Show = lambda state: None) -> SyncState:
    """Bring the files of the plan to every host that is not this computer.

    A host that fails does not stop the others; what went wrong is in the result. However this is left, nothing of it
    runs on afterwards, and what was received is kept.

    Args:
        show: called several times a second.

    Raises:
        ConfigError: there is no host to bring them to, or the transport cannot be used.
        DataError: a file here cannot be read.
    """
    others = [host for host in hosts if host.ssh is not None]
    if not others:
        raise ConfigError("all hosts are this computer", hint="name the others in --hosts or --hostfile")
    run = _SyncRun(plan, others, options, show)
    try:
        return run.run()
    finally:
        run.close()


@dataclass
class _Duty:
    """What the coordinator keeps of a host besides what is shown."""

    member: Member | None = None
    addresses: list[tuple[str, int]] | None = None  # where it serves; None before it has said so
    source: str = ""  # this computer, as it sees it
    tried: set[int] = field(default_factory=set[int])
    parent: int | None = None
    orders: int = 0


_INDEX = integer(0, 1 << 32)
_BYTES = integer(0, 1 << 60)


def _is_address(row: Any) -> bool:
    return list_of(lambda value: True)(row) and len(row) == 2 and is_text(row[0]) and is_integer(row[1], 1, 65535)


_COUNTED = object_of({"read": _BYTES, "received": _BYTES, "sent": _BYTES})
# What a host says, which may be anything.
_SAID: Mapping[str, Check] = {
    "hello": object_of({"addresses": list_of(_is_address), "source": is_text}),
    "progress": _COUNTED,
    "looked": object_of({"files": list_of(_INDEX), "needed": _BYTES, "roots": list_of(is_text)}),
    "orphan": object_of({"number": _INDEX, "reason": is_text}),
    "want": object_of({"rows": list_of(list_of(integer(0, 1 << 40)))}),
    "complete": object_of({}),
    "failed": object_of({"errno": integer(0, 1 << 16), "reason": is_text, "path": is_text}),
    "ended": _COUNTED,
}


class _SyncRun:
    def __init__(self, plan: Plan, hosts: Sequence[Host], options: SyncOptions, show: Show) -> None:
        self._plan, self._hosts, self._options, self._show = plan, hosts, options, show
        self._began = time.monotonic()
        names = tuple(str(found.path) for found in plan.files)
        self._state = SyncState([HostState(host.name) for host in hosts], names, notes=list(plan.notes))
        self._duties = [_Duty() for _ in hosts]
        self._parents = parents(len(hosts), options.topology)
        self._events: queue.SimpleQueue[tuple[int, dict[str, Any] | None, AllhandsError | None]] = queue.SimpleQueue()
        self._counts = Counts()
        self._stopped = threading.Event()
        self._transport = self._choose_transport()
        self._security: Security | None = None
        self._listener: Listener | None = None
        self._ports: dict[str, int | None] = {}
        self._entries: list[BlockEntry] = []
        self._shelf: SourceShelf | None = None

    def run(self) -> SyncState:
        self._connect()
        reader = threading.Thread(target=self._hash, name="sync-hash", daemon=True)
        reader.start()
        while not all(host.state in ("done", "failed") for host in self._state.hosts):
            with suppress(queue.Empty):
                self._take(*self._events.get(timeout=_TICK_S))
            self._watch()
            self._update()
        self._say_goodbye()
        self._update()
        return self._state

    def close(self) -> None:
        """End everything on all hosts, whatever has happened."""
        self._stopped.set()
        if self._listener is not None:
            self._listener.close()
        members = [duty.member for duty in self._duties if duty.member is not None]
        for member in members:
            member.end()
        deadline = time.monotonic() + _END_S
        for member in members:
            member.join(deadline)

    # --- the beginning ------------------------------------------------------------------------------

    def _choose_transport(self) -> Transport:
        if self._options.transport != "auto":
            return self._options.transport
        if not has_openssl():
            self._state.notes.append(NO_OPENSSL)
            return "ssh"
        return "tls"

    def _connect(self) -> None:
        secret = secrets.token_hex(32)
        certificate = "" if self._transport != "tls" or self._options.dry_run else make_certificate()
        if self._transport != "ssh" and not self._options.dry_run:
            self._security = Security(self._transport, secret, certificate)
            self._listener = Listener(self._security, self._counts.adder("sent"))
        for number, host in enumerate(self._hosts):
            start = {
                "kind": "start",
                "transport": self._transport,
                "secret": secret,
                "certificate": certificate,
                "addresses": host.ips,
                "envs": environment_of(host),
                "dry": self._options.dry_run,
            }
            self._duties[number].member = Member(host, start, self._listen_to(number))

    def _listen_to(self, number: int) -> Callable[[dict[str, Any] | None, AllhandsError | None], None]:
        return lambda said, error: self._events.put((number, said, error))

    def _hash(self) -> None:
        """In a thread of its own, while the hosts are being connected to."""
        told = self._counts.adder("read")

        def heard(count: int) -> None:
            if self._stopped.is_set():
                raise Stopped
            told(count)

        try:
            self._entries = hash_files(self._plan, HashCache(str(self._options.cache or "") or None), heard)
            self._events.put((SOURCE, {"kind": "hashed"}, None))
        except Stopped:
            pass
        except DataError as error:
            self._events.put((SOURCE, None, error))

    # --- events -------------------------------------------------------------------------------------

    def _take(self, number: int, said: dict[str, Any] | None, error: AllhandsError | None) -> None:
        if number == SOURCE:
            self._take_own(said, error)
        elif said is None:
            host = self._state.hosts[number]
            self._fail(number, error or lost(host.name, "it has ended"))
        elif self._duties[number].member is not None:
            check = _SAID.get(said["kind"])
            take = getattr(self, f"_on_{said['kind']}", self._on_other) if check and check(said) else self._on_other
            take(number, said)

    def _take_own(self, said: Mapping[str, Any] | None, error: AllhandsError | None) -> None:
        if said is None:
            raise error or DataError("the files cannot be read")
        if said["kind"] == "withdrawn":
            self._state.withdrawn.append(self._state.names[said["file"]])
            for duty in self._duties:
                if duty.member is not None:
                    duty.member.say("withdraw", file=said["file"])
            return
        self._state.sizes = tuple(entry.size for entry in self._entries)
        self._state.total = sum(self._state.sizes)
        self._shelf = SourceShelf([found.path for found in self._plan.files], self._entries, self._changed)
        if self._listener is not None:
            self._listener.open(self._shelf)
        for number, host in enumerate(self._state.hosts):
            if host.state == "looking":
                self._send_manifest(number)

    def _changed(self, file: int) -> None:
        self._events.put((SOURCE, {"kind": "withdrawn", "file": file}, None))

    def _on_hello(self, number: int, said: Mapping[str, Any]) -> None:
        duty = self._duties[number]
        duty.addresses = [(address, port) for address, port in said["addresses"]]
        duty.source = said["source"]
        self._state.hosts[number].state = "looking"
        if self._shelf is not None:
            self._send_manifest(number)
        self._retry()

    def _send_manifest(self, number: int) -> None:
        member = cast(Member, self._duties[number].member)  # a host without one is out, and says nothing
        roots = [root.on(self._hosts[number]) for root in self._plan.roots]
        member.say("manifest", roots=roots, files=[entry.as_json() for entry in self._entries])

    def _say_goodbye(self) -> None:
        """Have the last numbers told."""
        waiting = {number for number, duty in enumerate(self._duties) if duty.member is not None}
        for number in waiting:
            cast(Member, self._duties[number].member).end()
        deadline = time.monotonic() + _END_S
        while waiting and time.monotonic() < deadline:
            with suppress(queue.Empty):
                number, said, _ = self._events.get(timeout=_TICK_S)
                if said is not None and said["kind"] == "ended" and _COUNTED(said):
                    self._on_progress(number, said)
                if number != SOURCE and (said is None or said["kind"] == "ended"):
                    waiting.discard(number)

    def _on_progress(self, number: int, said: Mapping[str, Any]) -> None:
        host = self._state.hosts[number]
        host.read, host.received, host.sent = said["read"], said["received"], said["sent"]

    def _on_looked(self, number: int, said: Mapping[str, Any]) -> None:
        if not (len(said["roots"]) == len(self._plan.roots) and all(i < len(self._entries) for i in said["files"])):
            self._on_other(number, said)
            return
        host = self._state.hosts[number]
        host.needed, host.lacking = said["needed"], tuple(said["files"])
        wanting = [self._entries[file] for file in host.lacking]
        host.paths = tuple("/".join((said["roots"][entry.root], *entry.parts)) for entry in wanting)
        if self._options.dry_run or not host.lacking:
            self._finish(number)
            return
        host.state = "receiving"
        self._choose_parent(number)

    def _on_orphan(self, number: int, said: Mapping[str, Any]) -> None:
        duty = self._duties[number]
        if said["number"] == duty.orders and duty.parent is not None:
            duty.tried.add(duty.parent)
            self._choose_parent(number, said["reason"])

    def _on_want(self, number: int, said: Mapping[str, Any]) -> None:
        feed, shelf = cast(Member, self._duties[number].member).feed(), self._shelf
        if shelf is None:
            self._on_other(number, said)
            return

        def send() -> None:
            with suppress(Broken, OSError):
                serve(feed, shelf, wanted(said["rows"], shelf), self._counts.adder("sent"))

        threading.Thread(target=send, name="sync-feed", daemon=True).start()

    def _on_complete(self, number: int, said: Mapping[str, Any]) -> None:
        self._finish(number)

    def _on_failed(self, number: int, said: Mapping[str, Any]) -> None:
        name, reason = self._state.hosts[number].name, str(said["reason"])
        if not said["errno"]:
            self._fail(number, DistributedError(f"host {name}: {reason}", hint="see what it says, then sync again"))
            return
        error = storage_error(Path(said["path"] or "/"), OSError(said["errno"], reason))
        error.where = f"{name}:{said['path']}"
        self._fail(number, error)

    def _on_other(self, number: int, said: Mapping[str, Any]) -> None:
        name = self._state.hosts[number].name
        self._fail(number, DistributedError(f"host {name} says what is not understood", hint="report this"))

    def _finish(self, number: int) -> None:
        self._state.hosts[number].state = "done"
        self._state.hosts[number].done_s = time.monotonic() - self._began

    def _fail(self, number: int, error: AllhandsError) -> None:
        """This host is out; those that it fed find its connection closed, and are given another one."""
        host, duty = self._state.hosts[number], self._duties[number]
        if duty.member is None:
            return
        if host.state != "done":  # else it has everything, but feeds nobody any more
            host.state, host.error = "failed", error
        threading.Thread(target=duty.member.kill, name="sync-kill", daemon=True).start()
        duty.member, duty.addresses = None, []
        self._retry()

    # --- who feeds whom -----------------------------------------------------------------------------

    def _retry(self) -> None:
        """Somebody may have waited for this host."""
        for number, host in enumerate(self._state.hosts):
            if host.state == "receiving" and self._duties[number].parent is None:
                self._choose_parent(number)

    def _choose_parent(self, number: int, reason: str = "") -> None:
        """The nearest one above it that is well and has not been tried; in the end this computer, at last over ssh."""
        duty, host = self._duties[number], self._state.hosts[number]
        duty.parent = host.parent = None
        above = self._parents[number]
        while above is not None:
            upper = self._duties[above]
            if self._state.hosts[above].state != "failed" and above not in duty.tried and self._transport != "ssh":
                if upper.addresses is None:
                    return  # it is still being connected to
                if upper.addresses:
                    self._follow(number, above, upper.addresses)
                    return
            above = self._parents[above]
        port = self._own_port(duty.source) if SOURCE not in duty.tried else None
        if port is not None:
            self._follow(number, SOURCE, [(duty.source, port)])
        elif _OVER_SSH not in duty.tried:
            self._follow(number, _OVER_SSH, None)
        else:
            hint = "sync again: what it has received is kept"
            self._fail(number, DistributedError(f"host {host.name} cannot be fed: {reason}", hint=hint))

    def _follow(self, number: int, parent: int, addresses: list[tuple[str, int]] | None) -> None:
        duty = self._duties[number]
        duty.parent, duty.orders = parent, duty.orders + 1
        own = {SOURCE: "this computer", _OVER_SSH: "this computer over ssh"}
        self._state.hosts[number].parent = own.get(parent) or self._hosts[parent].name
        withdrawn = sorted(self._shelf.withdrawn) if self._shelf is not None else []
        member = cast(Member, duty.member)
        member.say("follow", addresses=addresses, number=duty.orders, withdrawn=withdrawn)

    def _own_port(self, address: str) -> int | None:
        """Where this computer serves at that address of its own, if it can."""
        if not address or self._listener is None:
            return None
        if address not in self._ports:
            self._ports[address] = self._listener.listen(address, lambda error: self._note_deaf(address, error))
        return self._ports[address]

    def _note_deaf(self, address: str, error: OSError) -> None:
        if error.errno != errno.EADDRNOTAVAIL:  # a network in between knows this computer by another address
            reason = cannot_listen(error, address, 0).message
            self._state.notes.append(f"this computer cannot listen at {address}, so it feeds over ssh: {reason}")

    # --- time passes --------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Give up hosts that are silent."""
        for number, (host, duty) in enumerate(zip(self._state.hosts, self._duties, strict=True)):
            member = duty.member
            if member is None:
                continue
            if host.state == "connecting":
                if member.silent_s > _CONNECT_S:
                    hint = "look whether it is switched on"
                    self._fail(number, DistributedError(f"host {host.name} has not answered in time", hint=hint))
            elif member.silent_s > _LOST_S:
                self._fail(number, lost(host.name, f"nothing heard for {_LOST_S:g} s"))

    def _update(self) -> None:
        self._state.hashed, self._state.sent = self._counts.values["read"], self._counts.values["sent"]
        self._state.seconds = time.monotonic() - self._began
        self._show(self._state)
