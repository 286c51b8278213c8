"""``allhands serve``: a model behind OpenAI's interface, for editors, chat windows and programs."""

from __future__ import annotations

import sys

from allhands.cli.answering import chat_choice, tell_harm
from allhands.cli.verbs_models import Serve
from allhands.infer.serving import ServeOptions
from allhands.infer.serving import serve as answer
from allhands.io.terminal import tell
from allhands.runtime.http_guard import listen


def serve(asked: Serve) -> None:
    """Run the verb."""
    choice = chat_choice(asked)
    listening = listen(
        asked.host,
        asked.port,
        token=asked.token,
        names=asked.name or (),
        origins=asked.allowed_origins or (),
    )
    if listening.is_open:
        print(
            "allhands: note: the connection is not encrypted: others on the network can read it, and the token",
            file=sys.stderr,
        )
    if "*" in listening.guard.origins:
        every = "every web page that is open in a browser"
        told = f"{every} can use the model, and read its answers: it is safer to name the allowed pages (--allow-origin)"
        tell(f"allhands: warning: {told}")

    def ready() -> None:
        tell_harm(asked.adapter_path, asked.model)
        if listening.made:
            print(f"token (of clients, their api_key): {listening.guard.token}")
        print(f"{asked.model} is served at {listening.address}/v1", flush=True)

    options = ServeOptions(
        asked.model,
        asked.adapter_path,
        asked.max_tokens,
        asked.temp,
        asked.top_p,
        asked.trust_remote_code,
        choice,
    )
    answer(options, listening, ready)
