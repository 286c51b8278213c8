"""One host's part of a sync: started over ssh, spoken to over its standard input and output.

This module is sent to every host and runs there without allhands: standard library only, Python 3.9 or newer.

It ends when its input does, when it is told to, or when nothing has been heard for half a minute. What has been
received is kept in any case.
"""

from __future__ import annotations

import errno
import os
import platform
import queue
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from allhands.cluster.sync.blocks import BlockRefused, HashCache, read_manifest
from allhands.cluster.sync.relay import Listener, ask, fetch
from allhands.cluster.sync.shelf import Destination, WrongBlock
from allhands.cluster.sync.wire import BLOCK, JSON, Broken, Channel, Security, of_json, over_pipes

SILENCE_S = 30.0  # without a word from the coordinator, after which this host gives up
_TELL_S = 0.25
_AHEAD = 2
_WAIT_S = 1.0

Said = dict[str, Any]


class Counts:
    """Bytes that have been read, received and sent; added to by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.values = {"read": 0, "received": 0, "sent": 0}

    def adder(self, name: str) -> Callable[[int], None]:
        """A function that adds to one of them."""

        def add(number: int) -> None:
            with self._lock:
                self.values[name] += number

        return add


class Worker:
    """What one host does, from the first word of the coordinator to its last."""

    def __init__(self, control: Channel) -> None:
        self._control = control
        self._counts = Counts()
        self._cache = HashCache(None)
        self._destination: Destination | None = None
        self._security: Security | None = None
        self._listener: Listener | None = None
        self._environment: Mapping[str, str] = os.environ
        self._dry = False
        # Blocks that come over ssh; only while some have been asked for.
        self._inlet: queue.Queue[tuple[int, bytearray]] = queue.Queue(_AHEAD)
        self._asking = False

    def obey(self) -> None:
        """Do what the coordinator says until it says no more.

        Raises:
            Broken: it has gone.
        """
        while True:
            kind, content = self._control.receive()
            said: Said = of_json(content) if kind == JSON else {"kind": ""}
            if kind == BLOCK or said["kind"] == "served":
                self._let_in(kind, content)
            elif said["kind"] == "start":
                self._start(said)
            elif said["kind"] == "end":
                self._control.say("ended", **self._counts.values)
                return
            elif said["kind"] == "manifest":
                self._in_a_thread(self._take_manifest, said)
            elif said["kind"] == "follow":
                self._in_a_thread(self._follow, said)
            elif said["kind"] == "withdraw" and self._destination is not None:
                self._destination.withdraw(said["file"])

    def save(self) -> None:
        """Remember the hashes for the next time."""
        self._cache.save()

    # --- orders -------------------------------------------------------------------------------------

    def _start(self, said: Said) -> None:
        self._environment = {**os.environ, **said["envs"]}
        self._dry = said["dry"]
        self._cache = HashCache(os.path.join(base_directory("cache", self._environment), "sync-hashes.json"))
        client, server = (os.environ.get("SSH_CONNECTION", "").split() + [""] * 4)[0:3:2]
        addresses: list[tuple[str, int]] = []
        if said["transport"] != "ssh" and not self._dry:
            self._security = Security(said["transport"], said["secret"], said["certificate"])
            self._listener = Listener(self._security, self._counts.adder("sent"))
            for address in dict.fromkeys([*said["addresses"], server]):
                port = self._listener.listen(address) if address else None
                if port is not None:
                    addresses.append((address, port))
        version = platform.python_version()
        self._control.say("hello", name=platform.node(), python=version, addresses=addresses, source=client)
        threading.Thread(target=self._tell, name="sync-tell", daemon=True).start()

    def _take_manifest(self, said: Said) -> None:
        """Look what is there, say so, and make what can be made without others."""
        roots = [root_directory(root, self._environment) for root in said["roots"]]
        self._destination = destination = Destination(roots, read_manifest(said["files"], len(roots)), self._cache)
        if self._listener is not None:
            self._listener.open(destination)
        destination.look(self._counts.adder("read"))
        lacking = destination.unfinished()
        needed = destination.bytes_to_get()
        if not self._dry:
            _check_space(destination.bytes_to_store())
            destination.begin()
        self._control.say("looked", files=lacking, needed=needed, roots=roots)

    def _follow(self, said: Said) -> None:
        """Get what is missing from the host of these addresses; without addresses, from the coordinator."""
        destination = self._destination
        assert destination is not None
        for file in said["withdrawn"]:
            destination.withdraw(file)
        try:
            if destination.missing():
                self._fetch(said["addresses"], destination)
            destination.settle()
        except (Broken, WrongBlock) as error:
            self._control.say("orphan", reason=str(error), number=said["number"], wrong=isinstance(error, WrongBlock))
            return
        if destination.missing():
            self._control.say("orphan", reason="it has not sent everything", number=said["number"], wrong=False)
        else:
            self._control.say("complete")

    def _fetch(self, addresses: list[tuple[str, int]] | None, destination: Destination) -> None:
        told = self._counts.adder("received")
        if addresses is None:
            self._asking = True
            try:
                ask(self._control, destination.missing())
                fetch(self._inlet.get, destination, told)
            finally:
                self._asking = False
            return
        if self._security is None:
            raise Broken("this run has no connections between hosts")
        channel = self._security.connect(addresses)
        try:
            ask(channel, destination.missing())
            fetch(channel.receive, destination, told)
        finally:
            channel.close()

    def _let_in(self, kind: int, content: bytearray) -> None:
        while self._asking:
            with suppress(queue.Full):
                self._inlet.put((kind, content), timeout=_WAIT_S)
                return

    # --- telling ------------------------------------------------------------------------------------

    def _in_a_thread(self, order: Callable[[Said], None], said: Said) -> None:
        threading.Thread(target=self._try, args=(order, said), name="sync-order", daemon=True).start()

    def _try(self, order: Callable[[Said], None], said: Said) -> None:
        with suppress(Broken):
            try:
                order(said)
            except OSError as error:
                path = os.fsdecode(error.filename) if error.filename else ""
                self._control.say("failed", errno=error.errno or 0, reason=error.strerror or str(error), path=path)
            except BlockRefused as error:
                self._control.say("failed", errno=0, reason=str(error), path="")
            except Exception as error:
                self._control.say("failed", errno=0, reason=f"{type(error).__name__}: {error}", path="")

    def _tell(self) -> None:
        """Say how far this host is, and end when nobody listens."""
        with suppress(Broken):
            while time.monotonic() < self._control.heard + SILENCE_S:
                self._control.say("progress", **self._counts.values)
                time.sleep(_TELL_S)
        _end(self)


def _check_space(needed: Mapping[str, int]) -> None:
    """Refuse what cannot fit before anything is written.

    Raises:
        OSError: a disk has too little room.
    """
    devices: dict[int, int] = {}
    for root, count in needed.items():
        place = root
        while not os.path.isdir(place) and os.path.dirname(place) != place:
            place = os.path.dirname(place)
        device = os.stat(place).st_dev
        devices[device] = devices.get(device, 0) + count
        status = os.statvfs(place)
        free = status.f_bavail * status.f_frsize
        if devices[device] > free:
            reason = f"the disk has {free / 1e9:.2f} GB left, and {devices[device] / 1e9:.2f} GB are needed"
            raise OSError(errno.ENOSPC, reason, root)


def base_directory(base: str, environment: Mapping[str, str]) -> str:
    """A directory that every host has in a place of its own: ``home``, ``hub`` or ``cache``."""
    home = os.path.expanduser("~")
    caches = environment.get("XDG_CACHE_HOME") or os.path.join(home, ".cache")
    if base == "hub":
        hub_home = environment.get("HF_HOME") or os.path.join(caches, "huggingface")
        chosen = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE")
        return os.path.expanduser(chosen or os.path.join(hub_home, "hub"))
    if base == "cache":
        if sys.platform == "darwin":
            caches = os.path.join(home, "Library", "Caches")
        return os.path.expanduser(environment.get("ALLHANDS_CACHE") or os.path.join(caches, "allhands"))
    return home


def root_directory(root: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """The directory that a root of the manifest stands for on this host, whether it exists or not."""
    base, at = root["base"], root["at"]
    if base == "absolute":
        return os.path.normpath(at)
    if base != "cwd":
        return os.path.normpath(os.path.join(base_directory(base, environment), at))
    cwd = os.path.join(os.path.expanduser("~"), os.path.expanduser(root["cwd"]))
    if not root["required"] and not _can_be(cwd):
        cwd = os.path.expanduser("~")  # where ranks work that have no such directory
    return os.path.normpath(os.path.join(cwd, at))


def _can_be(directory: str) -> bool:
    """Whether there is such a directory or it can be made."""
    while not os.path.lexists(directory) and os.path.dirname(directory) != directory:
        directory = os.path.dirname(directory)
    return os.path.isdir(directory) and os.access(directory, os.W_OK | os.X_OK)


def _end(worker: Worker) -> None:
    worker.save()
    os._exit(0)  # a thread may wait for a network that is gone


def main() -> None:
    """Entry point of the process."""
    reader, writer = os.dup(0), os.dup(1)
    # Nothing but frames may come to where the frames go.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    control = over_pipes(reader, writer)
    mark = bytes(control.receive()[1])
    with suppress(BlockingIOError):
        os.write(writer, b"\n" + mark)
    worker = Worker(control)
    with suppress(Broken):
        worker.obey()
    _end(worker)
