"""``allhands upload``: a model or an adapter to the Hugging Face Hub."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def upload(
    directory: Annotated[Path, typer.Argument(help="Directory of a model or an adapter.", show_default=False)],
    to: Annotated[str, typer.Option("--to", help="Repository on the Hub: owner/name.")],
    private: Annotated[bool, typer.Option("--private", help="Only you, and whom you let, can see it.")] = False,
    message: Annotated[str, typer.Option("--message", help="Of the commit.")] = "Upload with allhands",
) -> None:
    """Put a model or an adapter on the Hugging Face Hub.

    The one command that sends anything away. Checkpoints and logs of a run are left out. `hf auth login` comes first.
    """
    from allhands.export.hub import upload as send

    print(f"uploaded: {send(directory, to, private=private, message=message)}")
