"""Keep transformers from importing PyTorch, which takes seconds, where nothing but its tokenizers
is wanted.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from typing import Any


def leave_torch_out() -> None:
    """Import transformers, which takes PyTorch for not installed from then on; everybody else may
    import it.

    For processes of the command line alone: a program that imports allhands may want transformers'
    models. Does nothing where there is no PyTorch, or where one of both is imported already.
    """
    if {"torch", "transformers"} & sys.modules.keys() or find_spec("torch") is None:
        return
    # As Python marks what cannot be imported.
    hidden: dict[str, Any] = {"torch": None}
    sys.modules.update(hidden)
    try:
        # It looks once, and keeps the answer.
        import_module("transformers.utils.import_utils").is_torch_available()
    finally:
        del sys.modules["torch"]
