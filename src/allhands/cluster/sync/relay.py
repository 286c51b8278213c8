"""Blocks on their way: who lacks some connects to who has them, or will, and gets them as they come.

This module is sent to every host and runs there without allhands: standard library only, Python 3.9 or newer.

Because a host passes blocks on while it still receives, a chain of hosts takes little longer than one transfer. And
because it asks for nothing that it has, it can go on from another host at any time without getting a block twice.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from allhands.cluster.sync.shelf import Destination, Place, Shelf, WrongBlock
from allhands.cluster.sync.wire import BEAT, BLOCK, Broken, Channel, Security, of_block, of_json

_BEAT_S = 1.0
_BACKLOG = 1024
_PAUSE_S = 0.02
_MOST_STRANGERS = 32  # connections that have not proved yet who they are
_AHEAD = 2  # blocks that may have come and are not written yet


def wanted(rows: object, shelf: Shelf) -> set[Place]:
    """The blocks that a request names.

    Raises:
        Broken: it makes no sense.
    """
    places: set[Place] = set()
    left = sum(entry.num_blocks for entry in shelf.entries)
    if not isinstance(rows, list):
        raise Broken("this is not a request")
    for row in rows:
        if not isinstance(row, list) or len(row) != 3 or not all(type(number) is int for number in row):
            raise Broken("this is not a request")
        file, first, last = row
        if not 0 <= file < len(shelf.entries) or not 0 <= first <= last < shelf.entries[file].num_blocks:
            raise Broken("it asks for what is not in the manifest")
        left -= last - first + 1
        if left < 0:
            raise Broken("it asks for something twice")
        places.update((file, block) for block in range(first, last + 1))
    return places


def serve(channel: Channel, shelf: Shelf, places: set[Place], told: Callable[[int], None]) -> None:
    """Send these blocks as they become available, and a sign of life every second in which none does.

    Args:
        told: hears of the size of every block that has been sent.

    Raises:
        Broken: the other side is gone.
        OSError: a block cannot be read.
    """
    seen = gone = 0
    while True:
        if len(shelf.withdrawn) > gone:
            gone = len(shelf.withdrawn)
            places = {place for place in places if place[0] not in shelf.withdrawn}
        if not places:
            break
        new = shelf.since(seen, _BEAT_S)
        seen += len(new)
        if not new:
            channel.send(BEAT)
        for place in new:
            if place in places and place[0] not in shelf.withdrawn:
                _send(channel, shelf, place, told)
                places.discard(place)
    channel.say("served", withdrawn=sorted(shelf.withdrawn))


def _send(channel: Channel, shelf: Shelf, place: Place, told: Callable[[int], None]) -> None:
    try:
        content = shelf.read(*place)
    except WrongBlock:
        return  # it has been withdrawn
    channel.send_block(*place, content)
    told(len(content))


class Listener:
    """Serves every host of this run that connects.

    Args:
        security: how it is known.
        shelf: what it may have; ``None`` until that is known.
        told: hears of the size of every block that has been sent.
    """

    def __init__(self, security: Security, told: Callable[[int], None]) -> None:
        self._security = security
        self._told = told
        self._shelf: Shelf | None = None
        self._opened = threading.Event()
        self._lock = threading.Lock()
        self._strangers: list[socket.socket] = []  # the first who came first
        self._closed = False
        self._sockets: list[socket.socket] = []

    def listen(self, address: str, failed: Callable[[OSError], None] = lambda _: None) -> int | None:
        """Listen on one of this host's addresses; the port, or ``None`` if that cannot be, as ``failed`` hears."""
        try:
            listening = socket.create_server((address, 0), family=_family(address), backlog=_BACKLOG)
        except OSError as error:
            failed(error)
            return None
        self._sockets.append(listening)
        threading.Thread(target=self._accept, args=(listening,), name="sync-accept", daemon=True).start()
        return int(listening.getsockname()[1])

    def open(self, shelf: Shelf) -> None:
        """From now on there is something to have."""
        self._shelf = shelf
        self._opened.set()

    def close(self) -> None:
        """Listen no more; what is being served goes on."""
        self._closed = True
        for listening in self._sockets:
            with suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)
            listening.close()

    def _accept(self, listening: socket.socket) -> None:
        while not self._closed:
            try:
                connection, _ = listening.accept()
            except OSError:
                time.sleep(_PAUSE_S)  # one has left again, or there is no room for it: others may come
                continue
            with self._lock:
                self._strangers.append(connection)
                for late in self._strangers[:-_MOST_STRANGERS]:
                    with suppress(OSError):
                        late.shutdown(socket.SHUT_RDWR)  # its thread closes it
            threading.Thread(target=self._answer, args=(connection,), name="sync-serve", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        try:
            channel = self._security.accept(connection)
        except Broken:
            return
        finally:
            with self._lock:
                self._strangers.remove(connection)
        with suppress(Broken, OSError):
            request = of_json(channel.receive()[1])
            while not self._opened.wait(_BEAT_S):
                channel.send(BEAT)
            assert self._shelf is not None
            serve(channel, self._shelf, wanted(request.get("rows"), self._shelf), self._told)
        channel.close()


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class Writer:
    """Takes blocks in a thread of its own, so that the network goes on while a block is hashed and written."""

    def __init__(self, destination: Destination, told: Callable[[int], None]) -> None:
        self._destination = destination
        self._told = told
        self._queue: queue.Queue[tuple[int, int, memoryview] | None] = queue.Queue(_AHEAD)
        self._trouble: Exception | None = None
        self._thread = threading.Thread(target=self._work, name="sync-write", daemon=True)
        self._thread.start()

    def put(self, file: int, block: int, content: memoryview) -> None:
        """Have a block written.

        Raises:
            OSError, WrongBlock: an earlier one could not be.
        """
        self._queue.put((file, block, content))
        self.check()

    def close(self) -> None:
        """Wait until everything that has been put has been dealt with."""
        self._queue.put(None)
        self._thread.join()

    def check(self) -> None:
        """Raise what has gone wrong.

        Raises:
            OSError, WrongBlock: something could not be written.
        """
        if self._trouble is not None:
            raise self._trouble

    def _work(self) -> None:
        while True:
            item = self._queue.get()
            if item is None:
                return
            if self._trouble is None:  # else what comes is dropped, and nobody waits for room
                self._write(*item)

    def _write(self, file: int, block: int, content: memoryview) -> None:
        try:
            self._destination.write(file, block, content)
        except (OSError, WrongBlock) as error:
            self._trouble = error
        self._told(len(content))


def fetch(receive: Callable[[], tuple[int, bytearray]], destination: Destination, told: Callable[[int], None]) -> None:
    """Take the blocks that have been asked for, until the other side says that it has sent them all.

    Args:
        receive: the next frame.
        told: hears of the size of every block that has come.

    Raises:
        Broken: the other side is gone.
        OSError: a block cannot be written.
        WrongBlock: a block is not what the manifest says.
    """
    writer = Writer(destination, told)
    try:
        _take_all(receive, destination, writer)
    finally:
        writer.close()
        writer.check()  # of two troubles the one that this host has itself


def _take_all(receive: Callable[[], tuple[int, bytearray]], destination: Destination, writer: Writer) -> None:
    while True:
        kind, content = receive()
        if kind == BLOCK:
            writer.put(*of_block(content))
        elif kind != BEAT:
            said: dict[str, Any] = of_json(content)
            if said["kind"] != "served":
                raise Broken("it says something else than it should")
            withdrawn = said.get("withdrawn", [])
            for file in withdrawn if isinstance(withdrawn, list) else []:
                if type(file) is int and 0 <= file < len(destination.entries):
                    destination.withdraw(file)
            return


def ask(channel: Channel, rows: Sequence[tuple[int, int, int]]) -> None:
    """Say which blocks are wanted.

    Raises:
        Broken: the other side is gone.
    """
    channel.say("want", rows=rows)
