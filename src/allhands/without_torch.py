"""Keep transformers from importing PyTorch, which takes seconds, where nothing but its tokenizers is wanted."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any


def leave_torch_out() -> None:
    """Let transformers, once it is imported, take PyTorch for not installed; everybody else may import it.

    For processes of the command line alone: a program that imports allhands may want transformers' models.
    """
    if not {"torch", "transformers"} & sys.modules.keys():
        sys.meta_path.insert(0, _BeforeTransformers())


class _BeforeTransformers:
    """A finder of modules that has transformers executed by a loader of its own."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != "transformers" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None and "torch" not in sys.modules:
            spec.loader = _Loader(spec, spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, spec: ModuleSpec, own: Any) -> None:
        self._spec, self._own = spec, own

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._own.create_module(spec)

    def exec_module(self, module: Any) -> None:
        self._spec.loader = module.__loader__ = self._own
        # As Python marks what cannot be imported.
        hidden: dict[str, Any] = {"torch": None}
        sys.modules.update(hidden)
        try:
            self._own.exec_module(module)
            # It looks once, and keeps the answer.
            import_module("transformers.utils.import_utils").is_torch_available()
        finally:
            if sys.modules.get("torch", module) is None:
                del sys.modules["torch"]
