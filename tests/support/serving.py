"""A server that really runs, as a process, and requests to it, byte for byte if need be."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any


@dataclass
class Served:
    """Where it is, with the token if one was made, its process, and what it has said on stderr."""

    address: str
    token: str | None
    process: subprocess.Popen[str]
    errors: IO[bytes]

    @property
    def port(self) -> int:
        return int(re.findall(r":(\d+)/", self.address)[-1])

    def said(self) -> str:
        return Path(self.errors.name).read_text()

    def connect(self) -> socket.socket:
        return connect(self.port)

    def send(self, data: bytes) -> bytes:
        """Everything that comes back for these bytes, until the server closes."""
        with self.connect() as client:
            with contextlib.suppress(ConnectionError):
                client.sendall(data)
                with contextlib.suppress(
                    OSError
                ):  # not connected: it has answered and closed already
                    client.shutdown(socket.SHUT_WR)
            return received(client)

    def ask(
        self,
        method: str,
        path: str,
        body: Any = None,
        headers: Mapping[str, str | None] | None = None,
    ) -> tuple[int, dict[str, str], Any]:
        """Status, headers by lower-case name, and what came; ``None`` as a header's value leaves it
        out.
        """
        data = (
            b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        )
        sent: dict[str, str | None] = {"Host": f"127.0.0.1:{self.port}"}
        if body is not None:
            sent["Content-Length"] = str(len(data))
        if self.token is not None:
            sent["Authorization"] = f"Bearer {self.token}"
        sent |= headers or {}
        head = "".join(f"{name}: {value}\r\n" for name, value in sent.items() if value is not None)
        return parsed(self.send(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + data))


def connect(port: int) -> socket.socket:
    # MLX takes some ten seconds of two cores for three messages of some thousand tokens.
    return socket.create_connection(("127.0.0.1", port), timeout=120)


def received(client: socket.socket) -> bytes:
    pieces: list[bytes] = []
    with contextlib.suppress(ConnectionError):
        while piece := client.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def parsed(answer: bytes) -> tuple[int, dict[str, str], Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode("latin-1").split("\r\n")
    headers = {
        name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)
    }
    text = body.decode()
    return int(first.split()[1]), headers, json.loads(text) if text.startswith("{") else text


@contextmanager
def served(*words: str | Path, env: Mapping[str, str] | None = None) -> Iterator[Served]:
    command = [sys.executable, "-m", "allhands", "serve", "--port", "0", *map(str, words)]
    # Appended to by the server, and read by its name: a handle of both would share one position.
    with tempfile.NamedTemporaryFile("ab") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            token = line.split()[-1] if line.startswith("token") else None
            line = process.stdout.readline() if token else line
            assert " is served at http://" in line, Path(errors.name).read_text()
            yield Served(line.split()[-1], token, process, errors)
        finally:
            process.kill()
            process.communicate()
