"""A sync: every host tells what it lacks, and gets it from this computer or from a host that has it."""

from __future__ import annotations

import errno
import os
import re
import secrets
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any

from allhands.cluster import ssh
from allhands.cluster.hosts import Host
from allhands.cluster.probes.files import (
    RECEIVE,
    STAGING,
    HashCache,
    all_digests,
    file_identity,
    install_command,
    program_path,
    staged_name,
)
from allhands.cluster.sync.member import RETRY, Member
from allhands.cluster.sync.plan import FoundFile, Plan, environment_of
from allhands.cluster.sync.state import HostState, SyncOptions, SyncState
from allhands.errors import AllhandsError, ConfigError, DataError, DistributedError

HERE = -1  # the number of this computer
_THIS = "this computer"
_FLUSH_S = 100.0  # no sign of life comes while a disk takes a large file
_LOGIN_S = 8.0
_TICK_S = 0.2
_BY_HAND = "install rsync with the package manager of that computer"
# Errors of a disk, in the system's words, which rsync repeats.
_OF_DISKS = {os.strerror(number): number for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)}
_SENT = re.compile(r"(?:Literal|Unmatched) data: ([\d,.]+)")  # Samba's rsync; openrsync, on either stream


Show = Callable[[SyncState], None]
Wanted = Mapping[str, Collection[FoundFile]]


def synchronise(
    plan: Plan,
    hosts: Sequence[Host],
    options: SyncOptions,
    show: Show = lambda state: None,
    wanted: Wanted | None = None,
) -> SyncState:
    """Copy the files of the plan to every host that is not this computer.

    A host that fails does not stop the others; its error is in the result. Nothing runs on afterwards, and what was
    received is kept for the next sync.

    Args:
        show: called several times a second.
        wanted: the files of each host by its name; ``None``: all get all.

    Raises:
        ConfigError: there is no host to copy to, or no rsync here.
        DataError: a file here cannot be read.
    """
    others = [host for host in hosts if host.ssh is not None]
    if not others:
        raise ConfigError("all hosts are this computer", hint="name the others in --hosts or --hostfile")
    if program_path("rsync") is None:
        raise ConfigError("there is no rsync on this computer", hint=install_command("rsync") or _BY_HAND)
    run = _SyncRun(plan, others, options, show, wanted or {})
    try:
        return run.run()
    finally:
        run.close()


class _Refused(Exception):
    """The sender cannot send to this host."""


class _SyncRun:
    def __init__(self, plan: Plan, hosts: Sequence[Host], options: SyncOptions, show: Show, wanted: Wanted) -> None:
        self._files, self._options, self._show = plan.files, options, show
        self._began = time.monotonic()
        self._roots = list(dict.fromkeys(file.root for file in plan.files))
        numbers = {file: number for number, file in enumerate(plan.files)}
        self._wanted = [frozenset(numbers[file] for file in wanted.get(host.name, plan.files)) for host in hosts]
        names = tuple(str(file.path) for file in plan.files)
        self._state = SyncState([HostState(host.name) for host in hosts], names, notes=list(plan.notes))
        self._token = f"run-{secrets.token_hex(16)}"  # the name of a file by which a host is known as the right one
        self._entries: list[tuple[os.stat_result, str]] = []
        self._withdrawn: set[int] = set()
        self._barred: dict[tuple[int, int], str] = {}  # who cannot send to whom, and why
        self._members = [Member(host) for host in hosts]
        self._senders: list[Member] = []  # on this computer, one for each transfer
        self._pool = ThreadPoolExecutor(3 * len(hosts), "sync")

    def run(self) -> SyncState:
        connected = [self._pool.submit(member.start) for member in self._members]
        self._hash()
        running: dict[Future[None], tuple[int, int]] = {}
        for number, future in enumerate(connected):
            running[self._pool.submit(self._begin, number, future)] = (HERE, number)
        while running:
            done, _ = wait(running, _TICK_S, FIRST_COMPLETED)
            for future in done:
                del running[future]
                future.result()
            for pair in self._next(running.values()):
                self._state.hosts[pair[1]].state = "receiving"
                running[self._pool.submit(self._transfer, *pair)] = pair
            self._update()
        for (sender, receiver), reason in self._barred.items():
            name, host = self._state.hosts[sender].name, self._state.hosts[receiver]
            if host.parent == _THIS:
                self._state.notes.append(f"{name} cannot send to {host.name}, so this computer did: {reason}")
        return self._state

    def close(self) -> None:
        """End everything on all hosts, whatever has happened."""
        for closed in [self._pool.submit(member.close) for member in (*self._members, *self._senders)]:
            closed.result()
        self._pool.shutdown()

    def _update(self) -> None:
        for host, member in zip(self._state.hosts, self._members, strict=True):
            if host.state == "looking" and member.session is not None:
                host.read = member.session.progress
            elif host.state == "receiving":
                host.received = member.counted + max(0, member.arrived - member.before)
        self._state.seconds = time.monotonic() - self._began
        self._show(self._state)

    def _go_on(self, number: int, done: bool) -> None:
        self._state.hosts[number].done_s = time.monotonic() - self._began if done else None
        self._state.hosts[number].state = "done" if done else "waiting"

    def _fail(self, number: int, error: AllhandsError) -> None:
        self._state.hosts[number].state, self._state.hosts[number].error = "failed", error

    # --- what is here and there ---------------------------------------------------------------------

    def _hash(self) -> None:
        """Read the files here.

        Raises:
            DataError: one cannot be read.
        """

        def beat(read: int) -> None:
            self._state.hashed = read
            self._show(self._state)

        found = all_digests(self._state.names, HashCache(str(self._options.cache or "") or None), beat)
        for path, each in zip(self._state.names, found, strict=True):
            if isinstance(each, OSError):
                hint = "check its rights, then sync again"
                raise DataError(f"cannot be read: {each.strerror}", where=path, hint=hint)
            self._entries.append(each)
        self._state.sizes = tuple(status.st_size for status, _ in self._entries)
        self._state.total = sum(self._state.sizes)

    def _begin(self, number: int, connected: Future[None]) -> None:
        """Find out what a host lacks."""
        host, member = self._state.hosts[number], self._members[number]
        try:
            connected.result()
            host.state = "looking"
            self._look(number, sorted(self._wanted[number]))
            host.lacking = tuple(sorted(member.lacking))
            host.needed = sum(self._state.sizes[file] for file in host.lacking) - member.told["partial"]
            host.paths = tuple(self._path(number, file) for file in host.lacking)
            if host.lacking and member.told["rsync"] is None:
                command = member.told["install"]
                remedy = f"ssh -t {shlex.quote(str(member.host.ssh))} {shlex.quote(command)}" if command else _BY_HAND
                raise DistributedError(f"there is no rsync on host {host.name}", hint=remedy)
        except AllhandsError as error:
            self._fail(number, error)
            return
        self._go_on(number, self._options.dry_run or not host.lacking)

    def _look(self, number: int, files: Sequence[int]) -> None:
        """Have a host put into place what has come, and tell which of these files it lacks.

        Raises:
            AllhandsError: the host is lost, or something there is in the way.
        """
        member = self._members[number]
        told = member.ask(
            "look",
            _FLUSH_S,
            roots=[root.on(member.host) for root in self._roots],
            files=[self._described(file) for file in files],
            envs=environment_of(member.host),
            dry=self._options.dry_run,
            token=self._token,
        )
        if len(told["roots"]) != len(self._roots) or max(told["lacking"], default=-1) >= len(files):
            raise DistributedError(f"host {member.host.name} answers what is not understood", hint="report this")
        member.told, member.arrived, member.before = told, told["partial"], told["partial"]
        member.lacking = frozenset(files[index] for index in told["lacking"])

    def _described(self, file: int) -> list[Any]:
        """A file as the host is told it: root, path below it, size, hash, mode and time."""
        found, (status, digest) = self._files[file], self._entries[file]
        root, path = self._roots.index(found.root), "/".join(found.parts)
        return [root, path, status.st_size, digest, status.st_mode & 0o777, status.st_mtime_ns]

    def _root(self, number: int, file: int) -> str:
        """The root of a file on that host."""
        return str(self._members[number].told["roots"][self._roots.index(self._files[file].root)])

    def _path(self, number: int, file: int) -> str:
        """The path of a file on that host, or here."""
        if number == HERE:
            return self._state.names[file]
        return os.path.join(self._root(number, file), *self._files[file].parts)

    # --- who sends to whom --------------------------------------------------------------------------

    def _next(self, running: Collection[tuple[int, int]]) -> Iterator[tuple[int, int]]:
        """Pairs of a sender that is free and a host that waits."""
        hosts = self._state.hosts
        busy = {sender for sender, receiver in running if hosts[receiver].state == "receiving"}
        barred = {receiver for _, receiver in list(self._barred)}
        for receiver in [number for number, host in enumerate(hosts) if host.state == "waiting"]:
            able = self._able(receiver)
            # Nobody else will: then it need not wait for this computer to be free.
            at_once = self._options.topology == "star" or (able == [HERE] and receiver in barred)
            sender = next((one for one in able if at_once or one not in busy), None)
            if sender is not None:
                busy.add(sender)
                yield sender, receiver

    def _able(self, receiver: int) -> list[int]:
        """Computers that may send to this host, the best first; empty if the host has to wait."""
        hosts = self._state.hosts
        others = [number for number in range(len(hosts)) if (number, receiver) not in self._barred]
        if self._options.topology == "star":
            return [HERE]
        if self._options.topology == "tree":
            return [HERE, *(number for number in others if self._sendable(number, receiver))]
        for before in reversed([number for number in others if number < receiver]):
            if hosts[before].state not in ("done", "failed"):
                return []
            if self._sendable(before, receiver):
                return [before]
        return [HERE]

    def _sendable(self, sender: int, receiver: int) -> list[int]:
        """The files that the one has and the other lacks."""
        lacking = self._members[receiver].lacking - self._withdrawn
        if sender != HERE:
            lacking &= self._wanted[sender] if self._state.hosts[sender].state == "done" else frozenset()
        return sorted(lacking)

    def _way(self, sender: int, receiver: int, root: str) -> tuple[str, ssh.SshOptions]:
        """By what name the sender reaches the host over ssh.

        Raises:
            _Refused: it cannot log in.
            AllhandsError: the sender is lost.
        """
        host, told = self._members[receiver].host, self._members[receiver].told
        ways = [(str(host.ssh), ssh.SshOptions())]
        if sender == HERE:
            return ways[0]
        port = ssh.SshOptions(port=told["port"])
        ways += [(f"{told['user']}@{ip}", port) for ip in dict.fromkeys([*host.ips, told["address"]]) if ip]
        test = ["test", "-e", os.path.join(root, STAGING, self._token)]
        logins = [{"target": name, "argv": ssh.command(name, test, settings)} for name, settings in ways]
        tried = self._members[sender].ask("logins", 2 * _LOGIN_S, logins=logins, timeout_s=_LOGIN_S)["logins"]
        right = [way for way, login in zip(ways, tried, strict=False) if login["code"] == 0]
        if not right:
            said = _last_line("\n".join(login["said"] for login in reversed(tried)))
            raise _Refused(said or "ssh from there leads elsewhere, or gets no answer")
        return right[0]

    # --- one transfer -------------------------------------------------------------------------------

    def _transfer(self, sender: int, receiver: int) -> None:
        """Send, verify and put into place; afterwards the host is done, has failed, or waits for more."""
        host, member = self._state.hosts[receiver], self._members[receiver]
        host.parent = _THIS if sender == HERE else self._state.hosts[sender].name
        files, reason = self._sendable(sender, receiver), ""
        try:
            try:
                reason = self._send(sender, receiver, files)
            except _Refused as refused:
                self._barred[sender, receiver] = str(refused)
            self._look(receiver, sorted(member.lacking))
            left = [file for file in files if file in member.lacking]
            if left and (sender == HERE or _disk_error(reason)):
                self._explain(receiver, left, self._barred.pop((sender, receiver), reason))
            elif left:
                self._barred.setdefault((sender, receiver), _last_line(reason) or "its files are not what they were")
        except AllhandsError as error:
            self._fail(receiver, error)
            return
        host.received = member.counted
        self._go_on(receiver, not self._sendable(HERE, receiver))

    def _send(self, sender: int, receiver: int, files: Sequence[int]) -> str:
        """Have the sender run rsync; its complaints, if it has failed.

        Raises:
            _Refused: the sender cannot, or is lost.
        """
        member = self._members[receiver]
        own = Member(Host("localhost")) if sender == HERE else self._members[sender]
        try:
            if sender == HERE:
                self._senders.append(own)
                own.start()
            transfers: list[dict[str, Any]] = []
            for root in dict.fromkeys(self._root(receiver, file) for file in files):
                name, settings = self._way(sender, receiver, root)
                words = ["sh", "-c", RECEIVE, "sh", os.path.join(root, STAGING), member.told["rsync"]]
                these = [file for file in files if self._root(receiver, file) == root]
                links = {staged_name("/".join(self._files[file].parts)): self._path(sender, file) for file in these}
                transfers.append({"links": links, "ssh": ssh.command(name, words, settings)})
            rsync = program_path("rsync") if sender == HERE else own.told["rsync"]
            if rsync is None:  # it had everything already
                raise _Refused("there is no rsync")
            ended = own.ask("send", rsync=rsync, transfers=transfers)
        except AllhandsError as error:
            raise _Refused(error.message) from None
        finally:
            if sender == HERE:
                own.close()
        found = [int(re.sub("[.,]", "", number)) for number in _SENT.findall(ended["stats"] + ended["said"])]
        count = sum(found) if found else max(0, member.arrived - member.before)
        member.counted, member.before = member.counted + count, member.arrived
        (self._state if sender == HERE else self._state.hosts[sender]).sent += count
        return (ended["said"].strip() or f"rsync ended with code {ended['code']}") if ended["code"] else ""

    def _explain(self, receiver: int, files: Sequence[int], reason: str) -> None:
        """Withdraw files that are not any more what was hashed; others must have failed for a reason.

        Raises:
            AllhandsError: that reason.
        """
        member = self._members[receiver]
        for file in files:
            before, path = self._entries[file][0], self._state.names[file]
            if not os.path.exists(path) or file_identity(os.stat(path)) != file_identity(before):
                if file not in self._withdrawn:
                    self._withdrawn.add(file)
                    self._state.withdrawn.append(path)
            elif (number := _disk_error(reason)) is not None:
                raise member.storage_error(self._path(receiver, file), number, os.strerror(number))
            else:
                said = _last_line(reason) or f"{path} has not arrived as it was sent"
                raise DistributedError(f"host {member.host.name}: {said}", hint=f"see what it says, then {RETRY}")


def _disk_error(text: str) -> int | None:
    return next((number for words, number in _OF_DISKS.items() if words in text), None)


def _last_line(text: str) -> str:
    """The last line that tells a cause, short enough to be shown."""
    lines = ["".join(letter for letter in line if letter.isprintable()).strip() for line in text.splitlines()]
    telling = [line for line in lines if line and not line.startswith("rsync error:")]
    return telling[-1][:200] if telling else ""
