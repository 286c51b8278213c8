"""Requests to the server: headers are checked, bodies are read with limits, and mlx_lm generates
the answers.
"""

from __future__ import annotations

import io
import json
import re
import select
import socket
import sys
import time
import uuid
from collections.abc import Mapping
from http.client import HTTPMessage
from typing import Any
from urllib.parse import unquote

from mlx_lm.server import APIHandler

from allhands.infer.completions import MOST_BYTES, Refused, read_request
from allhands.infer.generation import Asked, Generator, ModelFailed, completion_of
from allhands.infer.replies import Answer, Piece, Reply

HEAD_S = 10.0  # to send the head of a request, also in very small pieces
BODY_S = 60.0
_WRITE_S = 60.0  # that a client may take no more of its answer
_COMPLETIONS = ("/v1/completions", "/v1/chat/completions", "/chat/completions")
_LISTED = re.compile(r"/health|/v1/models(/.*)?")
_LENGTH = re.compile(r"[0-9]{1,15}")


def _method_of(path: str) -> str | None:
    """Return the method of a path; ``None`` if there is no such path."""
    return "POST" if path in _COMPLETIONS else "GET" if _LISTED.fullmatch(path) else None


class _TooSlow(Exception):
    """The request was not complete in time."""


class _Incoming(io.RawIOBase):
    """A client's bytes until a fixed deadline, which further bytes do not move.

    Attributes:
        ended: whether a read found the end of the data.
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


def error_of(
    message: str,
    code: str | None = None,
    kind: str = "invalid_request_error",
    param: str | None = None,
) -> dict[str, Any]:
    """Return a refusal as OpenAI's clients read it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


class Handler(APIHandler):
    """mlx_lm's handler behind a guard. It offers only the served model, and writes answers here.

    Other requests are refused with one sentence, before the model computes.
    """

    server: Any  # which knows ``guard`` and ``served``
    default_request_version = "HTTP/1.0"

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._incoming = _Incoming(self.connection, HEAD_S)
        self.rfile: Any = io.BufferedReader(self._incoming)
        self.headers = HTTPMessage()
        self.requestline, self.path, self.command = "", "", ""
        self.request_version = "HTTP/1.0"
        self._answering = False  # the head of an answer is being sent
        self._begun = False  # and its first lines are there, before what they belong to
        self._streams = False

    def handle_one_request(self) -> None:
        self.close_connection = True
        try:
            super().handle_one_request()
        except _TooSlow:
            self._answer(408, error_of("the request was not complete in time"))
        except Refused as refused:
            self._answer(
                refused.status, error_of(refused.message, refused.code, param=refused.param)
            )
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
        if self._incoming.ended:  # only the head has been read
            raise Refused("the head of the request is not complete")
        if self.headers.defects or self.headers.get_payload():
            raise Refused("a header is not valid HTTP")
        if refusal := self.server.guard.refusal(self.command, self.headers.items()):
            raise Refused(refusal.message, refusal.status, refusal.code)
        if self.command != "OPTIONS" and not self.server.guard.knows_token(self.headers.items()):
            raise Refused(
                "the token is missing or wrong: send the one that was printed (Authorization: Bearer, or api_key)",
                401,
                "invalid_api_key",
            )
        if self.command != "POST":
            self.server.has_asked(self.connection)
        return True

    # --- what is asked for ------------------------------------------------------------------------

    def do_GET(self) -> None:
        model = {
            "id": self.server.served.model,
            "object": "model",
            "created": self.created,
            "owned_by": "allhands",
        }
        named = (
            unquote(self.path).partition("/v1/models/")[2]
            if self.path.startswith("/v1/models/")
            else ""
        )
        if self.path == "/health":
            super().handle_health_check()
        elif self.path in ("/v1/models", "/v1/models/"):
            self._answer(200, {"object": "list", "data": [model]})
        elif named and named == self.server.served.model:
            self._answer(200, model)
        elif named:
            raise Refused(
                f"the model {repr(named)[:200]} does not exist here: {self.server.served.model!r} is served",
                404,
                "model_not_found",
                param="model",
            )
        else:
            raise self._unknown()

    def _unknown(self) -> Refused:
        """Return the refusal of an unknown path or method."""
        shown, takes = repr(self.path[:100]), _method_of(self.path)
        if takes is None:
            ways = {"GET": ("/v1/models", "/v1/models/NAME", "/health"), "POST": _COMPLETIONS[:2]}
            asked = "GET" if self.command == "HEAD" else self.command
            first = sorted(
                ways, key=lambda method: method != asked
            )  # what the method that was used may ask
            there = "; ".join(f"{method} {', '.join(ways[method])}" for method in first)
            return Refused(f"there is no {shown} here; there is {there}", 404, "unknown_url")
        return Refused(f"{shown} takes {takes}, not {self.command}", 405, "method_not_supported")

    def _refuse_method(self) -> None:
        raise self._unknown()

    do_HEAD = do_PUT = do_DELETE = do_PATCH = _refuse_method

    def do_OPTIONS(self) -> None:
        self.send_response(204)
        self._set_cors_headers()
        self.end_headers()

    def do_POST(self) -> None:
        if self.path not in _COMPLETIONS:
            raise self._unknown()
        given = read_request(self._body(), self.path, self.server.served)
        generator: Generator = self.response_generator  # type: ignore[assignment]
        is_chat = "chat" in self.path
        request, arguments = completion_of(given, chat=is_chat, defaults=generator.cli_args)
        prepared = generator.prepare(request, arguments, self.server.served)
        reply = Reply(
            id=f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid.uuid4()}",
            kind="chat" if is_chat else "text",
            model=given["model"],
            created=self.created,
            fingerprint=self.system_fingerprint,
            tokens=generator.provider.token_bytes,
            logprobs=arguments.logprobs,
            usage=given.get("stream_options", {}).get("include_usage", False),
        )
        streams = given.get("stream", False)
        asked = Asked(
            generator, self._look, self._progress if streams else lambda _done, _all: None
        )
        self._streams = streams
        try:
            asked.begin(prepared, arguments)
            ends = frozenset(generator.provider.tokenizer.eos_token_ids)
            answer = Answer(asked.context, reply.tokens, ends, arguments, request.tools)
            if streams:
                self._stream(asked, answer, reply)
            else:
                self._whole(asked, answer, reply)
        finally:
            asked.stop()

    def _whole(self, asked: Asked, answer: Answer, reply: Reply) -> None:
        piece = Piece()
        for generated in asked:
            piece.add(answer.take(generated))
            if piece.finish is not None:
                break
        self._answer(200, reply.whole(piece, answer.counts()))

    def _stream(self, asked: Asked, answer: Answer, reply: Reply) -> None:
        self._set_stream_headers(200)
        self.end_headers()
        first, offset = True, 0
        for generated in asked:
            piece = answer.take(generated)
            if piece:
                self._event(reply.chunk(piece, first=first, offset=offset))
                first = False
                offset += sum(len(reply.tokens.shown(token.id)) for token in piece.tokens)
            if piece.finish is not None:
                break
        if reply.usage:
            self._event(reply.last(answer.counts()))
        self._send(b"data: [DONE]\n\n")

    def _event(self, content: Mapping[str, Any]) -> None:
        self._send(f"data: {json.dumps(content)}\n\n".encode())

    def _send(self, data: bytes) -> None:
        self.wfile.write(data)
        self.wfile.flush()

    def _progress(self, done: int, total: int) -> None:
        """Send a comment, so that a proxy does not take a long prompt for a dead connection."""
        if self._answering:
            self._send(f": keepalive {done}/{total}\n\n".encode())

    def _look(self) -> None:
        """Check that the client still waits for the answer.

        A client that sends nothing more may have left, or may only listen. Its reaction to some bytes
        of the answer shows which.

        Raises:
            ConnectionAbortedError: the client has left.
        """
        poll = select.poll()
        poll.register(self.connection, select.POLLIN)
        events = dict(poll.poll(0)).get(self.connection.fileno(), 0)
        if events & (select.POLLERR | select.POLLHUP | select.POLLNVAL):
            raise ConnectionAbortedError
        if not events & select.POLLIN or self.connection.recv(1, socket.MSG_PEEK):
            return
        if self._streams and self._answering:
            self._send(b": waiting\n\n")
        elif not self._streams and not self._begun:
            self.send_response(200)
            self.flush_headers()
            self._begun = True

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

    # --- how it is answered -----------------------------------------------------------------------

    def _answer(self, status: int, content: Mapping[str, Any]) -> None:
        if self._answering:
            return
        self._headers_buffer: list[bytes] = []
        self.connection.settimeout(_WRITE_S)
        body = json.dumps(content).encode()
        if self._begun and status != 200:
            return
        self._set_completion_headers(status)
        if status == 401:
            self.send_header("WWW-Authenticate", "Bearer")
        if status == 405:
            self.send_header("Allow", _method_of(self.path) or "")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
            self.wfile.flush()

    def _failed(self, error: Exception) -> None:
        """Print one line and answer with an error; a stream that has begun ends with it."""
        name = "" if isinstance(error, ModelFailed) else f"{type(error).__name__}: "
        told = f"{name}{error}".translate(self._control_char_table)  # type: ignore[attr-defined]
        print(f"allhands: error: a request failed: {told[:500]}", file=sys.stderr, flush=True)
        content = error_of("the server could not answer this request", kind="server_error")
        if self._answering:
            self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
            self.wfile.flush()
        self._answer(500, content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answer refusals of http.server itself as JSON, too."""
        self._answer(code, error_of((message or explain or self.responses[code][0])[:300]))  # type: ignore[index]

    def end_headers(self) -> None:
        self._answering = True
        super().end_headers()

    def send_response(self, code: int, message: str | None = None) -> None:
        """The first lines of an answer; not again those that are sent."""
        if not self._begun:
            super().send_response(code, message)

    def _set_completion_headers(self, status_code: int = 200) -> None:
        super()._set_completion_headers(status_code)
        self.send_header("X-Content-Type-Options", "nosniff")

    def _set_cors_headers(self) -> None:
        for name, value in self.server.guard.shared_with(self.headers.items()).items():
            self.send_header(name, value)

    def version_string(self) -> str:
        """Return the server's name, without Python's version."""
        return "allhands"

    def log_request(self, code: Any = "-", size: Any = "-") -> None:
        """Log the request without its query, which may have a token."""
        self.log_message(
            '"%s %s" %s', self.command or "-", self.path[:200], getattr(code, "value", code)
        )

    def log_error(self, format: str, *args: Any) -> None:
        """Log nothing, because the answer has the error."""
