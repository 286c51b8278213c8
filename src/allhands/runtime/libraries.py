"""Keep other libraries from importing what is not needed, and from warning of what is no fault."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any

# How many threads want errors only of a library, and the level that its logger had before.
_QUIET = dict[str, tuple[int, int]]()
_LOCK = threading.Lock()


def leave_torch_out() -> None:
    """Import transformers in such a way that it believes that PyTorch is not installed; other
    modules can still import PyTorch. Without PyTorch the import is seconds faster.

    Only commands may call this: a program that imports allhands may want transformers' models.
    Does nothing if there is no PyTorch, or if PyTorch or transformers is imported already.
    """
    if {"torch", "transformers"} & sys.modules.keys() or find_spec("torch") is None:
        return
    # None in sys.modules makes an import fail.
    hidden: dict[str, Any] = {"torch": None}
    sys.modules.update(hidden)
    try:
        # transformers checks once, and keeps the answer.
        import_module("transformers.utils.import_utils").is_torch_available()
    finally:
        del sys.modules["torch"]


@contextmanager
def errors_only(library: str) -> Generator[None]:
    """Let ``library`` log errors, and no warnings, until the last thread that asked for it is done."""
    logger = logging.getLogger(library)
    with _LOCK:
        asked, before = _QUIET.get(library, (0, logger.level))
        _QUIET[library] = asked + 1, before
        logger.setLevel(max(logging.ERROR, before))
    try:
        yield
    finally:
        with _LOCK:
            asked, before = _QUIET.pop(library)
            if asked > 1:
                _QUIET[library] = asked - 1, before
            else:
                logger.setLevel(before)
