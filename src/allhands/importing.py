"""Have a say in how one module of another library is imported, when and if it is."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any, cast

Run = Callable[[Any, Callable[[], None]], None]


def around(name: str, run: Run) -> None:
    """When the module ``name`` is imported, ``run`` it: called with the module, still empty, and what executes it."""
    sys.meta_path.insert(0, _Finder(name, run))


class _Finder:
    """A finder of modules that has one of them executed by a loader of its own, once."""

    def __init__(self, name: str, run: Run) -> None:
        self._name, self._run = name, run

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = cast("Any", _Loader(spec, spec.loader, self._run))
        return spec


class _Loader:
    """Not of :class:`importlib.abc.Loader`, which takes as long to import as this whole module."""

    def __init__(self, spec: ModuleSpec, own: Any, run: Run) -> None:
        self._spec, self._own, self._run = spec, own, run

    def create_module(self, spec: ModuleSpec) -> Any:
        return self._own.create_module(spec)

    def exec_module(self, module: Any) -> None:
        # It leaves no trace: who looks for a module's source asks its loader.
        self._spec.loader = module.__loader__ = self._own
        self._run(module, lambda: self._own.exec_module(module))
