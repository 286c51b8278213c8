"""``allhands serve``: a model behind the interface of OpenAI's, for editors, chat windows and programs."""

from __future__ import annotations

import signal
import sys
from types import FrameType
from typing import Annotated

import typer

from allhands.cli.answering import Adapter, ModelName, TrustCode, tell_harm
from allhands.cli.options import ChatTemplate, Host, HostNames, Port, System, Token, chat_choice
from allhands.io.terminal import tell
from allhands.runtime.http_guard import listen


def serve(
    model: ModelName = "demo",
    adapter_path: Adapter = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    token: Token = None,
    name: HostNames = None,
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            "--allowed-origins",
            metavar="URL",
            help="Web pages elsewhere that may ask: http://localhost:3000. Repeatable; * is all. [none]",
        ),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Of an answer, unless asked otherwise.")] = 512,
    temp: Annotated[float, typer.Option("--temp", min=0.0, help="Temperature, unless asked otherwise.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, help="Top-p, unless asked otherwise.")] = 1.0,
    chat_template: ChatTemplate = None,
    system: System = "template",
    trust_remote_code: TrustCode = False,
) -> None:
    """Answer requests to a model over HTTP, as OpenAI does.

    The server is mlx_lm's: /v1/chat/completions, /v1/completions and /v1/models. Programs of this computer may ask;
    web pages may not, unless --allow-origin names them; other computers only if --host lets them, with a token.
    Ends with Ctrl-C.
    """
    choice = chat_choice(chat_template, system)
    listening = listen(host, port, token=token, names=name or (), origins=allowed_origins or ())
    if listening.is_open:
        print(
            "allhands: note: it is not encrypted: whoever listens on the way can read along, and learn the token",
            file=sys.stderr,
        )
    if "*" in listening.guard.origins:
        every = "every web page that is open in a browser"
        told = f"{every} can use the model, and read what it says: rather name those that may (--allow-origin)"
        tell(f"allhands: warning: {told}")
    from allhands.infer.serving import ServeOptions
    from allhands.infer.serving import serve as answer

    def ready() -> None:
        tell_harm(adapter_path, model)
        if listening.made:
            print(f"token (of clients, their api_key): {listening.guard.token}")
        print(f"{model} is served at {listening.address}/v1", flush=True)

    options = ServeOptions(model, adapter_path, max_tokens, temp, top_p, trust_remote_code, choice)
    signal.signal(signal.SIGTERM, _stop)
    answer(options, listening, ready)


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
