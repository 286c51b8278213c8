"""``allhands dashboard``: runs in the browser while they go on."""

from __future__ import annotations

import secrets
import signal
import socket
import sys
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from allhands.errors import ConfigError, DataError

_HERE = ("127.0.0.1", "::1", "localhost")
_WORKS_S = 2  # for requests that are under way when it ends


def dashboard(
    runs: Annotated[Path, typer.Argument(help="Directory below which the runs are.")] = Path(),
    host: Annotated[
        str, typer.Option("--host", help="Address to listen on; of others than this computer's a token is asked for.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port; 0 is any free one.")] = 8765,
    token: Annotated[
        str | None, typer.Option("--token", help="What visitors must know. [made anew where others can reach it]")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="Further name or address under which browsers ask for it.")
    ] = None,
) -> None:
    """Show runs in the browser while they go on.

    Loss, speed, memory and phases of several runs, their processes side by side, the end of their logs, and a button
    that asks a run to save and stop. Only this computer is answered, unless --host says otherwise. Ends with Ctrl-C.
    """
    if not runs.is_dir():
        there = "this is a file" if runs.exists() else "there is no such directory"
        raise DataError(there, where=str(runs), hint="give the directory in which runs are")
    if token is not None and len(token) < 8:
        raise ConfigError("a token of fewer than 8 characters can be guessed", where="--token", hint="leave it out")
    import uvicorn

    from allhands.dashboard.app import Settings, make_app

    if token is None and host not in _HERE:
        token = secrets.token_urlsafe(18)
    listener = _listen(host, port)
    own = _addresses() if host in ("0.0.0.0", "::") else [host]
    address = own[0]
    names = {*_HERE, "[::1]", *own, *(f"[{one}]" for one in own if ":" in one), socket.gethostname(), name or host}
    place = f"http://{f'[{address}]' if ':' in address else address}:{listener.getsockname()[1]}/"
    print(f"dashboard: {place}{f'?token={token}' if token else ''}", flush=True)
    if host not in _HERE:
        print("allhands: note: it is not encrypted: whoever listens on the way can read along", file=sys.stderr)
    app = make_app(Settings(runs, tuple(sorted(names)), token))
    config = uvicorn.Config(
        app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=_WORKS_S
    )
    signal.signal(signal.SIGTERM, _stop)
    # Either signal is how it is meant to end; uvicorn ends its work, and then sends itself the signal again.
    with suppress(KeyboardInterrupt):
        uvicorn.Server(config).run(sockets=[listener])


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _addresses() -> list[str]:
    """This computer's, those first under which others know it; its name if it has none."""
    import psutil

    families = (socket.AF_INET, socket.AF_INET6)
    every = [one for ones in psutil.net_if_addrs().values() for one in ones if one.family in families]
    found = [one.address.partition("%")[0] for one in sorted(every, key=lambda one: families.index(one.family))]
    others = [address for address in found if not address.startswith("127.") and address != "::1"]
    return [*others, socket.gethostname()]


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens.

    Raises:
        ConfigError: the port is taken, or the address is none of this computer's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(64)
    except OSError as error:
        listener.close()
        hint = "choose another with --port, or 0 for any free one; --host is an address of this computer"
        raise ConfigError(f"cannot listen: {error.strerror or error}", where=f"{host}:{port}", hint=hint) from None
    return listener
