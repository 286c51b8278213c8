"""What strangers say to a port, and a program that says it on another computer, see :func:`main`.

The standard library only, so that it runs on every computer of a test.
"""

from __future__ import annotations

import json
import random
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

HANDED = (b'{"body":1,"mac":"x"}\n', b"[" * 4090, b"[" * 4090 + b"\n")
# What a supervisor says to an agent first.
AGENT_HELLO = {
    "first": 0,
    "count": 1,
    "backend": "ring",
    "name": "other",
    "address": "127.0.0.1",
    "cwd": "/",
    "cwd_required": True,
    "below_home": "",
    "forwarded": {},
    "descriptors": [],
    "adapter_path": None,
    "run_id": None,
    "python": "python",
}
_NUMBER = b"0123456789abcdef" * 4
_VALUES = (
    *(
        "1",
        "-1",
        "true",
        "null",
        "1.0",
        "1e999",
        "NaN",
        "-Infinity",
        "9" * 5000,
        '"1"',
        '"\\ud800"',
        '""',
        "[]",
        "{}",
    ),
    *("[" * 1000, '{"a":' * 700, '"' + "x" * 3000 + '"', '{"rank":1,"rank":2}', "1" + "0" * 40),
)
_PIECES = (b"\n", b"\r\n", b"\0", b"[", b"{", b'"', b"\\", b"\xff\xfe", b"\xed\xa0\x80")
_HELLO = {
    "version": 2,
    "rank": 1,
    "size": 2,
    "address": "127.0.0.1",
    "port": 5001,
    "nonce": "0" * 32,
}


def hello(random_: random.Random) -> bytes:
    """What rank 1 of 2 may say, with a MAC that nobody has made, and maybe with a word that is
    none.
    """
    text = json.dumps(_HELLO)
    if random_.random() < 0.7:
        name = random_.choice(list(_HELLO))
        text = text.replace(
            f'"{name}": {json.dumps(_HELLO[name])}', f'"{name}": {random_.choice(_VALUES)}'
        )
    mac = random_.randbytes(32).hex()
    if random_.random() < 0.3:  # as it was said once
        return json.dumps({"body": text, "mac": mac}).encode() + b"\n"
    return f"{mac} {text}\n".encode()


def changed(random_: random.Random, words: bytes) -> bytes:
    """The words with some bytes changed, left out, put in, said twice, or not said to the end."""
    content = bytearray(words)
    for _ in range(random_.randint(1, 4)):
        at = random_.randrange(len(content) + 1)
        way = random_.randrange(6)
        if way == 0 and at < len(content):
            content[at] = random_.randrange(256)
        elif way == 1:
            del content[at : at + random_.randint(1, 40)]
        elif way == 2:
            content[at:at] = random_.randbytes(random_.randint(1, 40))
        elif way == 3:
            content[at:at] = content[: random_.randint(0, 200)]
        elif way == 4:
            del content[at:]
        else:
            content[at:at] = random_.choice(
                (b"\n", b"\r\n", b"\0", b"[", b"{", b'"', b"\\", b"\xff\xfe", b"\xed\xa0\x80")
            )
    return bytes(content)


def inputs(count: int, seed: int = 0) -> Iterator[bytes]:
    """``count`` things that a stranger may say."""
    random_ = random.Random(seed)
    for index in range(count):
        if index < len(HANDED):
            yield HANDED[index]
        elif index % 10 == 0:
            yield random_.randbytes(random_.choice((0, 1, 64, 65, 66, 200, 5000)))
        else:
            number = _NUMBER if index % 3 else random_.randbytes(32).hex().encode()
            words = number + b"\n" + hello(random_) if index % 7 else hello(random_)
            yield words if index % 5 == 0 else changed(random_, words)


def say(address: tuple[str, int], words: bytes, source: str = "", listen: bool = True) -> bytes:
    """Call, say that, and return what is answered until the other side hangs up; nothing is raised."""
    answer = b""
    with suppress(OSError), socket.socket() as call:
        call.settimeout(20.0)
        if source:
            call.setsockopt(socket.IPPROTO_IP, 24, 1)  # IP_BIND_ADDRESS_NO_PORT
            call.bind((source, 0))
        call.connect(address)
        call.sendall(words)
        if not listen:  # hang up at once, with a reset
            call.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            return answer
        call.shutdown(socket.SHUT_WR)
        while heard := call.recv(4096):
            answer += heard
    return answer


def say_all(
    address: tuple[str, int], words: Iterable[bytes], sources: Sequence[str] = ("",)
) -> int:
    """Say each in a call of its own, from these addresses in turn; the most bytes that were
    answered.
    """
    most = 0
    for index, one in enumerate(words):
        most = max(
            most, len(say(address, one, sources[index % len(sources)], listen=index % 17 != 0))
        )
    return most


def loopback_sources(count: int) -> list[str]:
    """Addresses of this computer from which strangers may call, where it has more than one."""
    if sys.platform != "linux":
        return [""]
    return [f"127.1.{index // 250}.{index % 250 + 1}" for index in range(count)]


@contextmanager
def pestering(
    address: tuple[str, int], idle: int = 0, trickling: int = 0
) -> Iterator[Callable[[], int]]:
    """Strangers who call and say nothing, and others who say a byte each second, for as long as
    they are let.

    Yields a function that counts those who have not been hung up on.
    """
    over = threading.Event()
    silent = [one for _ in range(idle) if (one := _called(address)) is not None]
    slow: list[socket.socket] = []

    def trickle() -> None:
        slow.extend(one for _ in range(trickling) if (one := _called(address)) is not None)
        words = iter(_NUMBER * 100)
        while not over.wait(0.5):
            letter = bytes([next(words)])
            for index, one in enumerate(slow):
                try:
                    one.sendall(letter)
                except OSError:
                    one.close()
                    if (again := _called(address)) is not None:
                        slow[index] = again

    thread = threading.Thread(target=trickle)
    thread.start()
    try:
        yield lambda: sum(map(_is_open, silent))
    finally:
        over.set()
        thread.join()
        for one in (*silent, *slow):
            one.close()


def _called(address: tuple[str, int]) -> socket.socket | None:
    try:
        return socket.create_connection(address, timeout=5.0)
    except OSError:
        return None


def _is_open(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return one.recv(100) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def wait_for(address: tuple[str, int], seconds: float = 60.0) -> None:
    """Wait until somebody listens there."""
    deadline = time.monotonic() + seconds
    while (one := _called(address)) is None:
        assert time.monotonic() < deadline, f"nobody listens at {address}"
        time.sleep(0.02)
    one.close()


@contextmanager
def in_between(own: tuple[str, int], target: tuple[str, int]) -> Iterator[dict[str, bytearray]]:
    """Somebody at the address ``own`` who passes all on to the target and back, and keeps what both
    sides say.
    """
    said = {"there": bytearray(), "back": bytearray()}

    def pass_on(source: socket.socket, sink: socket.socket, kept: bytearray) -> None:
        with suppress(OSError):
            while heard := source.recv(1 << 16):
                kept += heard
                sink.sendall(heard)
            sink.shutdown(socket.SHUT_WR)

    def serve() -> None:
        with suppress(OSError):
            while True:
                caller, _ = server.accept()
                with caller, suppress(OSError), socket.create_connection(target) as called:
                    back = threading.Thread(target=pass_on, args=(called, caller, said["back"]))
                    back.start()
                    pass_on(caller, called, said["there"])
                    back.join()

    with socket.create_server(own) as server:
        thread = threading.Thread(target=serve)
        thread.start()
        yield said
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


def main(way: str, host: str, port: str, *rest: str) -> None:
    """``pester HOST PORT COUNT`` or ``record HOST PORT OWN`` until the input ends, or ``replay HOST
    PORT`` of it.
    """
    target = (host, int(port))
    if way == "pester":
        wait_for(target)
        with pestering(target, idle=300, trickling=20):
            print(say_all(target, inputs(int(rest[0]))), flush=True)
            sys.stdin.read()
    elif way == "record":
        with in_between((rest[0], int(port)), target) as said:
            sys.stdin.read()
        print(json.dumps({name: words.hex() for name, words in said.items()}))
    else:
        recorded = json.loads(sys.stdin.read())
        print(json.dumps([len(say(target, bytes.fromhex(words))) for words in recorded.values()]))


if __name__ == "__main__":
    main(*sys.argv[1:])
