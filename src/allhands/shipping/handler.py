"""Requests to the server: their heads are looked at, their bodies read within bounds, then mlx_lm answers."""

from __future__ import annotations

import io
import json
import re
import socket
import sys
import time
from collections.abc import Mapping
from http.client import HTTPMessage
from typing import Any
from urllib.parse import unquote

from mlx_lm.server import APIHandler

from allhands.shipping.completions import MOST_BYTES, Refused, read_request

HEAD_S = 10.0  # to send the head of a request, however few bytes come at a time
BODY_S = 60.0
_WRITE_S = 60.0  # that a client may take no more of its answer
_COMPLETIONS = ("/v1/completions", "/v1/chat/completions", "/chat/completions")
_LENGTH = re.compile(r"[0-9]{1,15}")


class _TooSlow(Exception):
    """The request was not there in time."""


class _Incoming(io.RawIOBase):
    """What a client sends, until a moment that no byte moves.

    Attributes:
        ended: whether more was looked for than there was.
    """

    def __init__(self, connection: socket.socket, seconds: float) -> None:
        self._connection = connection
        self.until = time.monotonic() + seconds
        self.ended = False

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Wait for bytes, as long as there is time."""
        left = self.until - time.monotonic()
        try:
            self._connection.settimeout(max(left, 0.001))
            count = self._connection.recv_into(buffer)
        except TimeoutError:
            raise _TooSlow from None
        self.ended = self.ended or count == 0
        return count


class _Refusals:
    """The stream of an answer, in which mlx_lm's ``{"error": "text"}`` becomes what clients of OpenAI's read."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        """Send ``data``, in another form if it is a refusal; mlx_lm writes each in one piece."""
        if data.startswith(b'{"error": "'):
            data = json.dumps(error_of(json.loads(data)["error"])).encode()
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def error_of(message: str, code: str | None = None, kind: str = "invalid_request_error") -> dict[str, Any]:
    """A refusal as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind} | ({"code": code} if code else {})}


class Handler(APIHandler):
    """mlx_lm's, behind a guard. It lists and asks the model that is served, and no other.

    What cannot be answered is refused in one sentence, before the model is asked.
    """

    server: Any  # which knows ``guard`` and ``served``
    default_request_version = "HTTP/1.0"

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._incoming = _Incoming(self.connection, HEAD_S)
        self.rfile: Any = io.BufferedReader(self._incoming)
        self.wfile: Any = _Refusals(self.wfile)
        self.headers = HTTPMessage()
        self.requestline, self.path, self.command = "", "", ""
        self.request_version = "HTTP/1.0"
        self._answering = False  # the head of an answer is on its way
        self._asking = False  # mlx_lm has the request

    def handle_one_request(self) -> None:
        self.close_connection = True
        try:
            super().handle_one_request()
        except _TooSlow:
            self._answer(408, error_of("the request was not complete in time"))
        except Refused as refused:
            self._answer(refused.status, error_of(refused.message, refused.code))
        except ConnectionError:
            raise
        except Exception as error:
            self._failed(error)

    def parse_request(self) -> bool:
        """Read the head, and look at it before anything is done."""
        if not super().parse_request():
            return False
        self.connection.settimeout(_WRITE_S)
        self.path = self.path.partition("?")[0]
        if self._incoming.ended:  # nobody has looked for more than the head
            raise Refused("the head of the request is not complete")
        if self.headers.defects or self.headers.get_payload():
            raise Refused("a header is not written as HTTP wants it")
        if refusal := self.server.guard.refusal(self.command, self.headers.items()):
            raise Refused(refusal.message, refusal.status, refusal.code)
        if self.command != "OPTIONS" and not self.server.guard.knows_token(self.headers.items()):
            told = "the token is missing or wrong: send the one that was printed (Authorization: Bearer, or api_key)"
            raise Refused(told, 401, "invalid_api_key")
        if self.command != "POST":
            self.server.has_asked(self.connection)
        return True

    # --- what is asked for ----------------------------------------------------------------------------

    def do_GET(self) -> None:
        model = {"id": self.server.served.model, "object": "model", "created": self.created}
        if self.path == "/health":
            super().handle_health_check()
        elif self.path in ("/v1/models", "/v1/models/"):
            self._answer(200, {"object": "list", "data": [model]})
        elif unquote(self.path) == f"/v1/models/{self.server.served.model}":
            self._answer(200, model)
        else:
            raise Refused(f"there is no {self.path[:100]!r} here", 404)

    def do_OPTIONS(self) -> None:
        self.send_response(204)
        self._set_cors_headers()
        self.end_headers()

    def do_POST(self) -> None:
        if self.path not in _COMPLETIONS:
            raise Refused(f"there is no {self.path[:100]!r} here", 404)
        body = json.dumps(read_request(self._body(), self.path, self.server.served)).encode()
        # To mlx_lm's handler it is what has come.
        self.rfile = io.BytesIO(body)
        del self.headers["Content-Length"]
        self.headers["Content-Length"] = str(len(body))
        self._asking = True
        super().do_POST()

    def _body(self) -> bytes:
        lengths = self.headers.get_all("Content-Length", [])
        if self.headers.get("Transfer-Encoding") is not None or not lengths:
            raise Refused("Content-Length header is required", 411)
        if len(lengths) > 1 or not _LENGTH.fullmatch(lengths[0].strip()):
            raise Refused("Invalid Content-Length header")
        length = int(lengths[0])
        if length > MOST_BYTES:
            raise Refused(f"the body is larger than {MOST_BYTES // 2**20} MiB", 413)
        self._incoming.until = time.monotonic() + BODY_S
        raw = self.rfile.read(length)
        self.connection.settimeout(_WRITE_S)
        if len(raw) < length:
            raise Refused(f"the body ends after {len(raw)} of {length} bytes")
        self.server.has_asked(self.connection)
        return raw

    # --- how it is answered ---------------------------------------------------------------------------

    def _answer(self, status: int, content: Mapping[str, Any]) -> None:
        if self._answering:
            return
        self._headers_buffer: list[bytes] = []
        self.connection.settimeout(_WRITE_S)
        body = json.dumps(content).encode()
        self._set_completion_headers(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.wfile.flush()

    def _failed(self, error: Exception) -> None:
        """One line here and an error there; a stream that has begun ends with it."""
        told = f"{type(error).__name__}: {error}".translate(self._control_char_table)  # type: ignore[attr-defined]
        print(f"allhands: error: a request failed: {told[:500]}", file=sys.stderr, flush=True)
        content = error_of("the server could not answer this request", kind="server_error")
        if self._answering:
            self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
            self.wfile.flush()
        self._answer(500, content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What http.server itself refuses, as JSON as well."""
        self._answer(code, error_of((message or explain or self.responses[code][0])[:300]))  # type: ignore[index]

    def end_headers(self) -> None:
        self._answering = True
        super().end_headers()

    def _set_completion_headers(self, status_code: int = 200) -> None:
        if status_code == 404 and self._asking:
            # mlx_lm's word for whatever went wrong before the first token.
            status_code = 400 if self.response_generator.is_healthy else 500
        super()._set_completion_headers(status_code)
        self.send_header("X-Content-Type-Options", "nosniff")

    def _set_cors_headers(self) -> None:
        for name, value in self.server.guard.shared_with(self.headers.items()).items():
            self.send_header(name, value)

    def version_string(self) -> str:
        """Not which Python it is."""
        return "allhands"

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Without what stands behind a question mark, where people write tokens."""
        self.log_message('"%s %s" %s', self.command or "-", self.path[:200], getattr(code, "value", code))

    def log_error(self, format: str, *args: Any) -> None:
        """Said in the answer."""
