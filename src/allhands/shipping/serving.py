"""mlx_lm's OpenAI-compatible server for one model, with an adapter on it and made fast on this device.

What mlx_lm's own does besides is left out: it loads any model that a request names, from the Hub if need be. Here every
request is answered by the model that was chosen at the start, whatever it names, as with other local servers.
"""

from __future__ import annotations

import argparse
import errno
import json
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.server import APIHandler, CompletionRequest, ModelProvider, ResponseGenerator, get_system_fingerprint

from allhands.data.templates import ChatChoice
from allhands.errors import ConfigError
from allhands.generate import check_adapter, load_for_generation
from allhands.model.load import LoadedModel


@dataclass(frozen=True)
class ServeOptions:
    """What is served and where; sampling holds for requests that do not say otherwise. Port 0 is any free one."""

    model: str
    adapter_path: Path | None
    host: str
    port: int
    max_tokens: int
    temperature: float
    top_p: float
    allowed_origins: tuple[str, ...]
    trust_remote_code: bool
    chat: ChatChoice | None = None


class _Provider(ModelProvider):
    """One model, whatever a request asks for."""

    def __init__(self, settings: argparse.Namespace, loaded: LoadedModel) -> None:
        super().__init__(settings)
        model: Any = loaded.model
        self.model: Any = model
        self.tokenizer: Any = loaded.tokenizer
        self.model_key: Any = (settings.model, settings.adapter_path, None)
        self.is_batchable: bool = all(hasattr(cache, "merge") for cache in make_prompt_cache(model))

    def load(self, model_path: Any, adapter_path: Any = None, draft_model_path: Any = None) -> tuple[Any, Any]:
        """The model and its tokenizer."""
        return self.model, self.tokenizer


class _Generator(ResponseGenerator):
    """Leaves nothing of MLX's behind in its thread: a stream that outlives it aborts the process at its end."""

    def _run_generate(self) -> None:
        super()._run_generate()
        mx.clear_streams()


class _Refusals:
    """The stream of an answer, in which mlx_lm's ``{"error": "text"}`` becomes what clients of OpenAI's read."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, data: bytes) -> int:
        """Send ``data``, in another form if it is a refusal; mlx_lm writes each in one piece."""
        if data.startswith(b'{"error": "'):
            message = json.loads(data)["error"]
            data = json.dumps({"error": {"message": message, "type": "invalid_request_error"}}).encode()
        return self._stream.write(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Handler(APIHandler):
    """Lists the model that is served, and no others that happen to be in the cache of the Hub.

    What cannot be answered is refused in one sentence, before the model is asked.
    """

    def setup(self) -> None:
        super().setup()
        self.wfile: Any = _Refusals(self.wfile)

    def handle_chat_completions(self) -> CompletionRequest:
        if "messages" in self.body and (wrong := _wrong_messages(self.body["messages"])):
            raise ValueError(wrong)
        return super().handle_chat_completions()

    def handle_text_completions(self) -> CompletionRequest:
        if not isinstance(self.body.get("prompt", ""), str):
            raise ValueError("prompt must be a text")
        return super().handle_text_completions()

    def handle_models_request(self) -> None:
        self._set_completion_headers(200)
        self.end_headers()
        name = self.response_generator.cli_args.model
        listed = {"object": "list", "data": [{"id": name, "object": "model", "created": self.created}]}
        self.wfile.write(json.dumps(listed).encode())
        self.wfile.flush()


def _wrong_messages(messages: Any) -> str | None:
    """What keeps ``messages`` from being a conversation; ``None`` if nothing does."""
    if not isinstance(messages, list):
        return 'messages must be a list, as in [{"role": "user", "content": "Hello"}]'
    if not messages:
        return "messages is empty: at least one is needed"
    for place, message in enumerate(cast("list[Any]", messages)):
        if not isinstance(message, dict):
            return f'messages[{place}] must be an object, as in {{"role": "user", "content": "Hello"}}'
        known = cast("dict[str, Any]", message)
        if not isinstance(known.get("role"), str):
            return f"messages[{place}] has no role: give user, assistant or system"
        if not isinstance(known.get("content"), str | list | None):
            return f"messages[{place}].content must be a text or a list of parts"
        # Of an image mlx_lm fetches the address, whichever it is, in this computer's own network, too.
        for part in known["content"] if isinstance(known.get("content"), list) else ():
            kind = cast("dict[str, Any]", part).get("type") if isinstance(part, dict) else type(part).__name__
            if kind != "text":
                return f"messages[{place}].content has a part of type {kind}: only text is read here"
    return None


def serve(options: ServeOptions, ready: Callable[[str], None]) -> None:
    """Answer requests until ``KeyboardInterrupt``; what was begun is dropped then.

    Args:
        ready: told the address once requests are answered.

    Raises:
        ConfigError: the address cannot be had.
        ModelError: model or adapter cannot be loaded.
    """
    if options.adapter_path is not None:
        check_adapter(options.adapter_path)
    generator: _Generator | None = None

    def handle(*arguments: Any, **named: Any) -> APIHandler:
        assert generator is not None
        return _Handler(generator, *arguments, system_fingerprint=get_system_fingerprint(), **named)

    # The address first: that it is taken should not be found after minutes of loading.
    server = _bind(options, handle)
    try:
        trust = options.trust_remote_code
        loaded = load_for_generation(options.model, options.adapter_path, trust_remote_code=trust, chat=options.chat)
        for note in loaded.notes:
            print(f"allhands: note: {note}", file=sys.stderr)
        provider = _Provider(_settings(options), loaded)
        generator = _Generator(provider, LRUPromptCache(provider.cli_args.prompt_cache_size))
        host = f"[{options.host}]" if ":" in options.host else options.host
        ready(f"http://{host}:{server.server_address[1]}")
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
        if generator is not None:
            generator.stop_and_join()


def _bind(options: ServeOptions, handle: Callable[..., Any]) -> ThreadingHTTPServer:
    try:
        found = socket.getaddrinfo(options.host, options.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]

        class Server(ThreadingHTTPServer):
            """Of the address's family."""

            address_family = found[0]

            def handle_error(self, request: Any, client_address: Any) -> None:
                # Whoever closes a window in the middle of an answer is no fault of the server.
                if isinstance(sys.exc_info()[1], ConnectionError):
                    print(f"{client_address[0]} left before the answer was complete", file=sys.stderr, flush=True)
                else:
                    super().handle_error(request, client_address)

        return Server(found[4][:2], handle)  # type: ignore[arg-type]
    except (OSError, OverflowError) as error:
        number = getattr(error, "errno", None)
        if number == errno.EADDRINUSE:
            message, hint = "another program listens there already", "choose another: --port, or 0 for any free one"
        elif number == errno.EACCES:
            message, hint = "ports below 1024 are for the administrator", "choose another: --port 8080"
        elif isinstance(error, socket.gaierror) or number == errno.EADDRNOTAVAIL:
            message, hint = "this is no address of this computer", "give --host 127.0.0.1, or 0.0.0.0 for all of them"
        else:
            message, hint = f"cannot listen there: {error}", "choose another --port or --host"
        raise ConfigError(message, where=f"{options.host}:{options.port}", hint=hint) from None


def _settings(options: ServeOptions) -> argparse.Namespace:
    """What mlx_lm's server reads; the rest has its defaults there."""
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
        allowed_origins=list(options.allowed_origins),
        decode_concurrency=32,
        prompt_concurrency=8,
        prefill_step_size=2048,
        prompt_cache_size=10,
        prompt_cache_bytes=None,
        kv_bits=None,
        kv_group_size=64,
        quantized_kv_start=0,
        pipeline=False,
    )
