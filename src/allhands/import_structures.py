"""Have transformers find out what it offers from what is kept of that, see :mod:`allhands.kept_structures`.

Every command comes by here, so nothing is loaded for it until transformers is.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from allhands.importing import around

_MODULE = "transformers.utils.import_utils"


def keep_import_structures() -> None:
    """Let transformers, once it is imported, take from the cache what it would find in its sources."""
    if "transformers" not in sys.modules:
        around(_MODULE, _with_structures)


def _with_structures(import_utils: Any, execute: Callable[[], None]) -> None:
    from allhands.kept_structures import replace_function

    execute()
    replace_function(import_utils)
