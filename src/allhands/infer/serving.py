"""mlx_lm's OpenAI-compatible server for one model, with an adapter on it and made fast on this
device.

mlx_lm's own server loads any model that a request names, also from the Hub, and answers any web
page. Here every request is checked first, and only the model of the start answers.
"""

from __future__ import annotations

import argparse
import signal
import socket
import sys
import threading
import time
from collections import abc
from collections.abc import Callable
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

import mlx.core as mx
from mlx_lm.server import get_system_fingerprint

from allhands.data.render import ChatTemplate, has_chat_template
from allhands.data.templates import MERGE, ChatChoice
from allhands.infer.completions import Served
from allhands.infer.generate import load_for_generation
from allhands.infer.generation import Generator, Provider
from allhands.infer.handler import Handler
from allhands.io.terminal import tell
from allhands.model.tokenizer import positions_of
from allhands.run.adapter_files import check_adapter
from allhands.runtime.accelerator import detect
from allhands.runtime.http_guard import Guard, Listening

_MOST_CONNECTIONS = 128
_BUSY = (
    b"HTTP/1.0 503 Service Unavailable\r\nContent-Type: application/json\r\n\r\n"
    b'{"error": {"message": "too many requests wait for an answer", "type": "server_error", "param": null, '
    b'"code": null}}'
)
_LINGER_S = (
    2.0  # for what a refused client still sends; closed before that, it may not see the answer
)


@dataclass(frozen=True)
class ServeOptions:
    """The served model, with the default sampling of requests."""

    model: str
    adapter_path: Path | None
    max_tokens: int
    temperature: float
    top_p: float
    trust_remote_code: bool
    chat: ChatChoice | None = None


class _Server(ThreadingHTTPServer):
    """A server with one thread for each connection, up to a limit.

    At the limit the oldest connection with an incomplete request is closed.
    """

    def __init__(self, listening: Listening, provider: Provider, served: Served) -> None:
        super().__init__(("", 0), Handler, bind_and_activate=False)  # type: ignore[arg-type]
        self.socket.close()
        self.socket = listening.listener
        self.server_address = listening.listener.getsockname()
        self.guard: Guard = listening.guard
        self.served = served
        self._provider = provider
        self._fingerprint = get_system_fingerprint()
        self._generator = self._new_generator()
        self._lock = threading.Lock()
        self._reading: dict[
            socket.socket, bool
        ] = {}  # of each connection whether its request is still awaited

    # --- the model --------------------------------------------------------------------------------

    def _new_generator(self) -> Generator:
        return Generator(self._provider)

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Answer a request; with a new generator if the last one has failed, for example for lack
        of memory.
        """
        with self._lock:
            if not self._generator.is_healthy:
                self._generator = self._new_generator()
        Handler(
            self._generator, request, client_address, self, system_fingerprint=self._fingerprint
        )

    def stop(self) -> None:
        """Drop answers that have begun."""
        self.server_close()
        self._generator.stop_and_join()

    # --- connections ------------------------------------------------------------------------------

    def process_request(self, request: Any, client_address: Any) -> None:
        """Take a connection; at the limit it replaces one without a complete request."""
        with self._lock:
            if len(self._reading) >= _MOST_CONNECTIONS:
                slowest = next((one for one, reading in self._reading.items() if reading), request)
                self._reading.pop(slowest, None)
                with suppress(OSError):
                    if slowest is request:
                        request.sendall(_BUSY)
                    slowest.shutdown(socket.SHUT_RDWR)
            self._reading[request] = True
        super().process_request(request, client_address)

    def has_asked(self, request: socket.socket) -> None:
        """Note that a connection's request is complete: it keeps its place."""
        with self._lock:
            if request in self._reading:
                self._reading[request] = False

    def shutdown_request(self, request: Any) -> None:
        """Close after reading the client's remaining bytes; otherwise it would not see the answer."""
        with self._lock:
            if request in self._reading:
                self._reading[request] = True
        with suppress(OSError):
            request.shutdown(socket.SHUT_WR)
            until = time.monotonic() + _LINGER_S
            while (left := until - time.monotonic()) > 0:
                request.settimeout(left)
                if not request.recv(65536):
                    break
        with self._lock:
            self._reading.pop(request, None)
        self.close_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print one line; a client that leaves in the middle of an answer is no error of the
        server.
        """
        error = sys.exc_info()[1]
        if isinstance(error, ConnectionError | TimeoutError):
            print(
                f"{client_address[0]} left before the answer was complete",
                file=sys.stderr,
                flush=True,
            )
        else:
            print(
                f"allhands: error: a request failed: {type(error).__name__}: {error}",
                file=sys.stderr,
                flush=True,
            )


def serve(options: ServeOptions, listening: Listening, ready: Callable[[], None]) -> None:
    """Answer requests until ``KeyboardInterrupt``, which drops unfinished answers.

    Args:
        listening: the address, opened before loading, so that a taken address is not found only
            after minutes.
        ready: called once requests are answered.

    Raises:
        ModelError: model or adapter cannot be loaded.
    """
    with _interrupted_once():
        _serve(options, listening, ready)


def _serve(options: ServeOptions, listening: Listening, ready: Callable[[], None]) -> None:
    server: _Server | None = None
    try:
        if options.adapter_path is not None:
            check_adapter(options.adapter_path)
        trust = options.trust_remote_code
        loaded = load_for_generation(
            options.model, options.adapter_path, trust_remote_code=trust, chat=options.chat
        )
        for note in loaded.notes:
            tell(f"allhands: note: {note}")
        tokenizer: Any = loaded.tokenizer
        if has_chat_template(tokenizer) and not ChatTemplate(tokenizer).takes_system:
            told = f"the chat template has no place for system messages: {MERGE} puts them before questions"
            tell(f"allhands: note: {told}")
        settings = _settings(options)
        model: Any = loaded.model
        vocabulary = model(mx.array([[0]])).shape[-1]  # known without being computed
        served = Served(
            options.model, settings.adapter_path, vocabulary, positions_of(loaded.config)
        )
        server = _Server(listening, Provider(settings, loaded), served)
        ready()
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        listening.listener.close()
        if server is not None:
            server.stop()


@contextmanager
def _interrupted_once() -> abc.Generator[None]:
    """Let the first SIGINT or SIGTERM raise ``KeyboardInterrupt``, and later ones nothing.

    A second one would leave the generating thread alive, and with it the process.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    heard = False

    def hear(_number: int, _frame: FrameType | None) -> None:
        nonlocal heard
        if not heard:
            heard = True
            raise KeyboardInterrupt

    before = {number: signal.signal(number, hear) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _settings(options: ServeOptions) -> argparse.Namespace:
    """Return the settings that mlx_lm's server reads."""
    return argparse.Namespace(
        model=options.model,
        adapter_path=None if options.adapter_path is None else str(options.adapter_path),
        draft_model=None,
        num_draft_tokens=3,
        trust_remote_code=options.trust_remote_code,
        chat_template="",
        use_default_chat_template=False,
        chat_template_args={},
        temp=options.temperature,
        top_p=options.top_p,
        top_k=0,
        min_p=0.0,
        max_tokens=options.max_tokens,
        allowed_origins=[],
        decode_concurrency=32,
        prompt_concurrency=8,
        # A part of a prompt that delays other requests only briefly.
        prefill_step_size=512 if detect().kind == "cpu" else 2048,
        prompt_cache_size=10,
        prompt_cache_bytes=None,
        kv_bits=None,
        kv_group_size=64,
        quantized_kv_start=0,
        pipeline=False,
    )
