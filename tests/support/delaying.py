"""A cable with a delay, for kernels without netem: frames of either end come out of the other some
time later.

As a program: ``delaying.py FIRST SECOND SECONDS``, of two network interfaces; it ends when one of
them does.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections import deque
from contextlib import suppress

_PACKET_OUTGOING = 4
# linux/if_packet.h: the header of 10 bytes that large or unfinished frames need to be passed on as
# they are.
_SOL_PACKET, _PACKET_VNET_HDR, _ALL = 263, 15, 3
_LARGEST = 1 << 17


def _open(name: str) -> socket.socket:
    end = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL))
    end.setsockopt(_SOL_PACKET, _PACKET_VNET_HDR, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 26)
    end.bind((name, 0))
    end.setblocking(False)
    return end


def relay(first: str, second: str, delay_s: float) -> None:
    """Pass frames on until an interface is gone."""
    ends = [_open(first), _open(second)]
    waiting: deque[tuple[float, int, bytes]] = (
        deque()
    )  # in the order of their times, which are all as far away
    while True:
        left = max(0.0, waiting[0][0] - time.monotonic()) if waiting else None
        ready, _, _ = select.select(ends, [], [], left)
        for end in ready:
            while True:
                try:
                    frame, origin = end.recvfrom(_LARGEST)
                except BlockingIOError:
                    break
                if origin[2] != _PACKET_OUTGOING:
                    waiting.append((time.monotonic() + delay_s, 1 - ends.index(end), frame))
        while waiting and waiting[0][0] <= time.monotonic():
            _, place, frame = waiting.popleft()
            with suppress(BlockingIOError):  # its queue is full: it is lost, as on a cable
                ends[place].send(frame)


if __name__ == "__main__":
    try:
        relay(sys.argv[1], sys.argv[2], float(sys.argv[3]))
    except OSError as error:
        sys.exit(str(error))
