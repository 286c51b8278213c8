"""``allhands upload``: a model or an adapter to the Hugging Face Hub."""

from __future__ import annotations

from allhands.cli.verbs_models import Upload
from allhands.export.hub import upload as send


def upload(asked: Upload) -> None:
    """Run the verb."""
    print(
        f"uploaded: {send(asked.directory, asked.to, private=asked.private, message=asked.message)}"
    )
