"""Python's start on a simulated NVIDIA GPU: this directory comes first in ``PYTHONPATH``.

allhands is told that it computes on a GPU, and gives models the forms for one: fused blocks, flat
arrays, fetched graphs. They are computed on this computer's CPU, by MLX's own operations where a
GPU would have a kernel of allhands.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_MODULE = "allhands.runtime.accelerator"


class _Detecting(Loader):
    """Loads the module that detects devices, and has it find a GPU."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._loader.exec_module(module)
        detect = module.detect
        module.detect = lambda: replace(
            detect(), kind="cuda", name="simulated GPU", cpu_native=False, warning=None
        )


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if name != _MODULE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None:
            spec.loader = _Detecting(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
