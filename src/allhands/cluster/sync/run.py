"""A sync: every host reports the files that it lacks, and gets them from this computer or a host
that has them.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shlex
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Any, cast

from allhands.cluster import ssh
from allhands.cluster.hosts import HERE, Host
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
from allhands.cluster.sync.plan import SyncPlan, environment_of
from allhands.cluster.sync.state import SyncOptions, SyncState
from allhands.errors import AllhandsError, ConfigError, DataError, DistributedError

_THIS = "this computer"
_FLUSH_S = 100.0  # no sign of life comes while a disk takes a large file
_LOGIN_S = 8.0
_TICK_S = 0.2
_BY_HAND = "install rsync with the package manager of that computer"
# Errors of a disk, in the system's words, which rsync repeats.
_OF_DISKS = {
    os.strerror(number): number for number in (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG)
}
_SENT = re.compile(
    r"(?:Literal|Unmatched) data: ([\d,.]+)"
)  # Samba's rsync; openrsync, on either stream


Show = Callable[[SyncState], None]
Sender = Member | None  # ``None``: this computer


def synchronise(
    plan: SyncPlan,
    hosts: Sequence[Host],
    options: SyncOptions,
    show: Show = lambda state: None,
) -> SyncState:
    """Copy the files of the plan to every host that is not this computer.

    A host that fails does not stop the others; its error is in the result. Nothing runs on
    afterwards, and received bytes are kept for the next sync.

    Args:
        show: called several times a second.

    Raises:
        ConfigError: there is no host to copy to, or no rsync here.
        DataError: a file here cannot be read.
    """
    others = [host for host in hosts if host.ssh is not None]
    if not others:
        raise ConfigError(
            "all hosts are this computer",
            code="nothing-to-do",
            hint="name the others in --hosts or --hostfile",
        )
    if program_path("rsync") is None:
        raise ConfigError(
            "there is no rsync on this computer",
            code="rsync-missing",
            hint=install_command("rsync") or _BY_HAND,
        )
    run = _SyncRun(plan, others, options, show)
    try:
        return run.run()
    finally:
        run.close()


class _SyncRun:
    def __init__(
        self,
        plan: SyncPlan,
        hosts: Sequence[Host],
        options: SyncOptions,
        show: Show,
    ) -> None:
        self._files, self._options, self._show = plan.files, options, show
        self._began = time.monotonic()
        self._roots = list(dict.fromkeys(file.root for file in plan.files))
        numbers = {file: number for number, file in enumerate(plan.files)}
        self._members = [
            Member(host, [numbers[one] for one in plan.by_host.get(host.name, plan.files)])
            for host in hosts
        ]
        names = tuple(str(file.path) for file in plan.files)
        self._state = SyncState(
            [member.status for member in self._members], names, notes=list(plan.notes)
        )
        # Name of a file that proves that a sender's ssh leads to the right host.
        self._token = f"run-{secrets.token_hex(16)}"
        self._entries: list[tuple[os.stat_result, str]] = []
        self._withdrawn: set[int] = set()
        self._barred: dict[
            tuple[Member, Member], str
        ] = {}  # senders and receivers that do not work together, with the reason
        self._senders: list[Member] = []  # on this computer, one for each transfer
        self._pool = ThreadPoolExecutor(3 * len(hosts), "sync")

    def run(self) -> SyncState:
        connected = [self._pool.submit(member.start) for member in self._members]
        self._hash()
        running: dict[Future[None], tuple[Sender, Member]] = {}
        for member, future in zip(self._members, connected, strict=True):
            running[self._pool.submit(self._begin, member, future)] = (None, member)
        while running:
            done, _ = wait(running, _TICK_S, FIRST_COMPLETED)
            for future in done:
                del running[future]
                future.result()
            for pair in self._next(running.values()):
                pair[1].status.state = "receiving"
                running[self._pool.submit(self._transfer, *pair)] = pair
            self._update()
        for (sender, receiver), reason in self._barred.items():
            if receiver.status.parent == _THIS:
                names = f"{sender.host.name} cannot send to {receiver.host.name}"
                self._state.notes.append(f"{names}, so this computer did: {reason}")
        return self._state

    def close(self) -> None:
        """End everything on all hosts."""
        for closed in [
            self._pool.submit(member.close) for member in (*self._members, *self._senders)
        ]:
            closed.result()
        self._pool.shutdown()

    def _update(self) -> None:
        for member in self._members:
            if member.status.state == "looking" and member.session is not None:
                member.status.read = member.session.progress
            elif member.status.state == "receiving":
                member.status.received = member.counted + max(0, member.arrived - member.before)
        self._state.seconds = time.monotonic() - self._began
        self._show(self._state)

    def _go_on(self, member: Member, done: bool) -> None:
        member.status.done_s = time.monotonic() - self._began if done else None
        member.status.state = "done" if done else "waiting"

    # --- the files here and there -----------------------------------------------------------------

    def _hash(self) -> None:
        """Read the files here.

        Raises:
            DataError: one cannot be read.
        """

        def beat(read: int) -> None:
            self._state.hashed = read
            self._show(self._state)

        found = all_digests(
            self._state.names, HashCache(str(self._options.cache or "") or None), beat
        )
        for path, each in zip(self._state.names, found, strict=True):
            if isinstance(each, OSError):
                raise DataError(
                    f"cannot be read: {each.strerror}",
                    code="data-unreadable",
                    where=path,
                    hint="check its rights, then sync again",
                )
            self._entries.append(each)
        self._state.sizes = tuple(status.st_size for status, _ in self._entries)
        self._state.total = sum(self._state.sizes)

    def _begin(self, member: Member, connected: Future[None]) -> None:
        """Find out which files a host lacks."""
        status = member.status
        try:
            connected.result()
            status.state = "looking"
            self._look(member, sorted(member.wanted))
            status.lacking = tuple(sorted(member.lacking))
            status.needed = (
                sum(self._state.sizes[file] for file in status.lacking) - member.told["partial"]
            )
            status.paths = tuple(self._path(member, file) for file in status.lacking)
            if status.lacking and member.told["rsync"] is None:
                command = member.told["install"]
                raise DistributedError(
                    f"there is no rsync on host {member.host.name}",
                    code="host-without-rsync",
                    hint=(
                        f"ssh -t {shlex.quote(str(member.host.ssh))} {shlex.quote(command)}"
                        if command
                        else _BY_HAND
                    ),
                )
        except AllhandsError as error:
            member.fail(error)
            return
        self._go_on(member, self._options.dry_run or not status.lacking)

    def _look(self, member: Member, files: Sequence[int]) -> None:
        """Have a host put received files into place, and report which of ``files`` it lacks.

        Raises:
            AllhandsError: the host is lost, or something there is in the way.
        """
        told = member.ask(
            "look",
            _FLUSH_S,
            roots=[root.on(member.host) for root in self._roots],
            files=[self._described(file) for file in files],
            envs=environment_of(member.host),
            dry=self._options.dry_run,
            token=self._token,
        )
        lacking = cast("list[int]", told["lacking"])
        if len(told["roots"]) != len(self._roots) or max(lacking, default=-1) >= len(files):
            raise DistributedError(
                f"host {member.host.name} sent an unknown answer",
                code="message-not-understood",
                hint="report this",
            )
        member.told, member.arrived, member.before = told, told["partial"], told["partial"]
        member.lacking = frozenset(files[index] for index in lacking)

    def _described(self, file: int) -> list[Any]:
        """Return a file for a host: root, path below it, size, hash, mode and time."""
        found, (status, digest) = self._files[file], self._entries[file]
        root, path = self._roots.index(found.root), "/".join(found.parts)
        return [root, path, status.st_size, digest, status.st_mode & 0o777, status.st_mtime_ns]

    def _root(self, member: Member, file: int) -> str:
        """Return the root of a file on that host."""
        return str(member.told["roots"][self._roots.index(self._files[file].root)])

    def _path(self, member: Sender, file: int) -> str:
        """Return the path of a file on that computer."""
        if member is None:
            return self._state.names[file]
        return os.path.join(self._root(member, file), *self._files[file].parts)

    # --- who sends to whom ------------------------------------------------------------------------

    def _next(self, running: Collection[tuple[Sender, Member]]) -> Iterator[tuple[Sender, Member]]:
        """Yield pairs of a free sender and a host that waits."""
        busy = {sender for sender, receiver in running if receiver.status.state == "receiving"}
        barred = {receiver for _, receiver in list(self._barred)}
        for receiver in [member for member in self._members if member.status.state == "waiting"]:
            able = self._able(receiver)
            # If only this computer can send to it, it need not wait until this one is free.
            at_once = self._options.topology == "star" or (able == [None] and receiver in barred)
            if free := [sender for sender in able if at_once or sender not in busy]:
                busy.add(free[0])
                yield free[0], receiver

    def _able(self, receiver: Member) -> list[Sender]:
        """Return the computers that may send to this host, the best first; empty if the host has to
        wait.
        """
        others = [member for member in self._members if (member, receiver) not in self._barred]
        if self._options.topology == "tree":
            return [None, *(member for member in others if self._sendable(member, receiver))]
        if self._options.topology == "chain":
            for before in reversed(others[: others.index(receiver)]):
                if before.status.state not in ("done", "failed"):
                    return []
                if self._sendable(before, receiver):
                    return [before]
        return [None]

    def _sendable(self, sender: Sender, receiver: Member) -> list[int]:
        """Return the files that the one has and the other lacks."""
        lacking = receiver.lacking - self._withdrawn
        if sender is not None:
            lacking &= sender.wanted if sender.status.state == "done" else frozenset()
        return sorted(lacking)

    def _way(self, sender: Sender, receiver: Member, root: str) -> tuple[str, ssh.SshOptions]:
        """Return the name and options by which the sender reaches the host over ssh.

        Raises:
            AllhandsError: it cannot log in, or is lost.
        """
        host, told = receiver.host, receiver.told
        ways = [(str(host.ssh), ssh.SshOptions())]
        if sender is None:
            return ways[0]
        port = ssh.SshOptions(settings={"Port": told["port"]})
        ways += [
            (f"{told['user']}@{ip}", port)
            for ip in dict.fromkeys([*host.ips, told["address"]])
            if ip
        ]
        test = ["test", "-e", os.path.join(root, STAGING, self._token)]
        logins = [{"argv": ssh.command(name, test, settings)} for name, settings in ways]
        tried = sender.ask("logins", 2 * _LOGIN_S, logins=logins, timeout_s=_LOGIN_S)["logins"]
        right = [way for way, login in zip(ways, tried, strict=False) if login["code"] == 0]
        if not right:
            said = _last_line("\n".join(login["said"] for login in reversed(tried)))
            raise DistributedError(
                said or "ssh from there leads elsewhere, or gets no answer", code="ssh-login-failed"
            )
        return right[0]

    # --- one transfer -----------------------------------------------------------------------------

    def _transfer(self, sender: Sender, receiver: Member) -> None:
        """Send, verify and put into place; afterwards the host is done, has failed, or waits for
        more.
        """
        receiver.status.parent = sender.host.name if sender else _THIS
        files, refused, said = self._sendable(sender, receiver), "", ""
        try:
            try:
                said = self._send(sender, receiver, files)
            except AllhandsError as error:
                refused = error.message
            self._judge(sender, receiver, files, refused, said)
        except AllhandsError as error:
            receiver.fail(error)
            return
        receiver.status.received = receiver.counted
        self._go_on(receiver, not self._sendable(None, receiver))

    def _judge(
        self, sender: Sender, receiver: Member, files: Sequence[int], refused: str, said: str
    ) -> None:
        """Have the host check the received files; a host that has not sent all of them is not asked
        to send to it again.

        Args:
            refused: the reason why the sender could not send.
            said: the error output of rsync.

        Raises:
            AllhandsError: the host is lost, or files from this computer do not arrive.
        """
        self._look(receiver, sorted(receiver.lacking))
        left = [file for file in files if file in receiver.lacking]
        if left and (sender is None or _disk_error(said)):
            self._explain(receiver, left, refused or said)
        elif sender is not None and (left or refused):
            reason = refused or _last_line(said) or "its files have changed"
            self._barred[sender, receiver] = reason

    def _send(self, sender: Sender, receiver: Member, files: Sequence[int]) -> str:
        """Have the sender run rsync; return its error output if it has failed.

        Raises:
            AllhandsError: the sender cannot, or is lost.
        """
        own = sender or Member(HERE)
        try:
            if sender is None:
                self._senders.append(own)
                own.start()
            roots = dict.fromkeys(self._root(receiver, file) for file in files)
            transfers = [self._order(sender, receiver, root, files) for root in roots]
            rsync = own.told["rsync"] if sender else program_path("rsync")
            if rsync is None:  # a host that lacked no file may be without it
                raise DistributedError("there is no rsync", code="host-without-rsync")
            ended = own.ask("send", rsync=rsync, transfers=transfers)
        finally:
            if sender is None:
                own.close()
        count = _sent_bytes(ended, max(0, receiver.arrived - receiver.before))
        receiver.counted, receiver.before = receiver.counted + count, receiver.arrived
        (sender.status if sender else self._state).sent += count
        return (
            (ended["said"].strip() or f"rsync ended with code {ended['code']}")
            if ended["code"]
            else ""
        )

    def _order(
        self, sender: Sender, receiver: Member, root: str, files: Sequence[int]
    ) -> dict[str, Any]:
        """Return the transfer of the files below one root: their links at the sender, and its ssh
        command.
        """
        name, settings = self._way(sender, receiver, root)
        words = ["sh", "-c", RECEIVE, "sh", os.path.join(root, STAGING), receiver.told["rsync"]]
        these = [file for file in files if self._root(receiver, file) == root]
        links = {
            staged_name("/".join(self._files[file].parts)): self._path(sender, file)
            for file in these
        }
        return {"links": links, "ssh": ssh.command(name, words, settings)}

    def _explain(self, receiver: Member, files: Sequence[int], reason: str) -> None:
        """Withdraw files that have changed since they were hashed.

        Raises:
            AllhandsError: a file has not changed; the error has the reason why it did not arrive.
        """
        for file in files:
            before, path = self._entries[file][0], self._state.names[file]
            if not os.path.exists(path) or file_identity(os.stat(path)) != file_identity(before):
                if file not in self._withdrawn:
                    self._withdrawn.add(file)
                    self._state.withdrawn.append(path)
            elif (number := _disk_error(reason)) is not None:
                raise receiver.storage_error(
                    self._path(receiver, file), number, os.strerror(number)
                )
            else:
                said = _last_line(reason) or f"{path} has not arrived as it was sent"
                raise DistributedError(
                    f"host {receiver.host.name}: {said}",
                    code="copy-failed",
                    hint=f"see what it says, then {RETRY}",
                )


def _sent_bytes(ended: Mapping[str, Any], otherwise: int) -> int:
    """Return the bytes that rsync says it has sent; ``otherwise`` if it does not say."""
    found = [
        int(re.sub("[.,]", "", number)) for number in _SENT.findall(ended["stats"] + ended["said"])
    ]
    return sum(found) if found else otherwise


def _disk_error(text: str) -> int | None:
    return next((number for words, number in _OF_DISKS.items() if words in text), None)


def _last_line(text: str) -> str:
    """Return the last line that tells a cause, cut to 200 characters."""
    telling = [line for line in ssh.printable_lines(text) if not line.startswith("rsync error:")]
    return telling[-1][:200] if telling else ""
