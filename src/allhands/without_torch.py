"""Keep transformers from importing PyTorch, which takes seconds, where nothing but its tokenizers is wanted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

from allhands.importing import around


def leave_torch_out() -> None:
    """Let transformers, once it is imported, take PyTorch for not installed; everybody else may import it.

    For processes of the command line alone: a program that imports allhands may want transformers' models.
    """
    if not {"torch", "transformers"} & sys.modules.keys():
        around("transformers", _hide_torch)


def _hide_torch(transformers: Any, execute: Callable[[], None]) -> None:
    if "torch" in sys.modules:
        return execute()
    # As Python marks what cannot be imported.
    hidden: dict[str, Any] = {"torch": None}
    sys.modules.update(hidden)
    try:
        execute()
        # It looks once, and keeps the answer.
        import_module("transformers.utils.import_utils").is_torch_available()
    finally:
        if sys.modules.get("torch", transformers) is None:
            del sys.modules["torch"]
