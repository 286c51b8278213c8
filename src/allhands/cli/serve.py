"""``allhands serve``: a model behind the interface of OpenAI's, for editors, chat windows and programs."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from allhands.cli.options import ChatTemplate, System, chat_choice

_HERE = ("127.0.0.1", "::1", "localhost")


def serve(
    model: Annotated[
        str, typer.Option("--model", help="Model directory, Hugging Face repository, or 'demo'.")
    ] = "demo",
    adapter_path: Annotated[Path | None, typer.Option("--adapter-path", help="Directory of a training run.")] = None,
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 is any free one.")] = 8080,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Of an answer, unless asked otherwise.")] = 512,
    temp: Annotated[float, typer.Option("--temp", min=0.0, help="Temperature, unless asked otherwise.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, help="Top-p, unless asked otherwise.")] = 1.0,
    allowed_origins: Annotated[
        str, typer.Option("--allowed-origins", help="Web pages that may ask, by origin (a,b); * is all.")
    ] = "*",
    chat_template: ChatTemplate = None,
    system: System = "template",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow a model's own Python code.")
    ] = False,
) -> None:
    """Answer requests to a model over HTTP, as OpenAI does.

    The server is mlx_lm's: /v1/chat/completions, /v1/completions and /v1/models. Ends with Ctrl-C.
    """
    from allhands.shipping.serving import ServeOptions
    from allhands.shipping.serving import serve as answer

    if host not in _HERE:
        print(f"allhands: note: whoever reaches {host}:{port} can use the model: there is no password", file=sys.stderr)
    origins = tuple(origin.strip() for origin in allowed_origins.split(",") if origin.strip())
    choice = chat_choice(chat_template, system)
    options = ServeOptions(model, adapter_path, host, port, max_tokens, temp, top_p, origins, trust_remote_code, choice)
    signal.signal(signal.SIGTERM, _stop)
    answer(options, lambda address: print(f"{model} is served at {address}/v1", flush=True))


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
