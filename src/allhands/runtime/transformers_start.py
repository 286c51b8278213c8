"""Import transformers quickly, for its tokenizers alone.

Where PyTorch is installed it is left out: its import takes seconds. And transformers reads its 3,300 source files,
twice in each process, for a list of what each of them offers; that takes 0.8 seconds of a processor. The list is kept
in the user's cache and holds until transformers is installed again.
"""

from __future__ import annotations

import marshal
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from hashlib import sha256
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias, cast

from allhands.runtime.blas import cache_dir

_PACKAGE, _READER = "transformers", "transformers.utils.import_utils"
_READS = "define_import_structure"
# For the packages that are needed: the modules that need them, and the names that each offers.
_List: TypeAlias = dict[frozenset[str], dict[str, set[str]]]
_LISTS = 8  # at most: each installation of transformers, and each version of Python, has its own


def prepare_transformers() -> None:
    """Make the import of transformers quick; it takes PyTorch for not installed from then on.

    For processes of the command line alone: a program that imports allhands may want transformers' models. Does
    nothing where transformers is imported already.
    """
    if _PACKAGE in sys.modules:
        return
    sys.meta_path.insert(0, _KeepsList())
    _leave_torch_out()


def _leave_torch_out() -> None:
    if "torch" in sys.modules or find_spec("torch") is None:
        return
    # As Python marks what cannot be imported.
    hidden: dict[str, Any] = {"torch": None}
    sys.modules.update(hidden)
    try:
        # It looks once, and keeps the answer.
        import_module(_READER).is_torch_available()
    finally:
        del sys.modules["torch"]


class _KeepsList:
    """Finds the module of transformers that makes the list, once, and gives it the kept list."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _READER:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                with suppress(Exception):  # without the kept list it is slower, and that is all
                    _keep_list(module)

            vars(spec.loader)["exec_module"] = exec_module
        return spec


def _keep_list(module: ModuleType) -> None:
    """Let the module's function that reads the models' source answer for all of them from the user's cache."""
    read: Callable[..., _List] = getattr(module, _READS)
    models = Path(str(module.__file__)).parents[1] / "models"
    kept = _place(models)
    if kept is None:
        return

    def structure(path: str | Path, prefix: str | None = None) -> _List:
        place = Path(path)
        if (place.parent if place.name == "__init__.py" else place) != models:
            return read(path, prefix)
        found = _kept(kept)
        if not found:
            found = read(path)
            with suppress(Exception):
                _write(kept, marshal.dumps(found))
        if prefix is None:
            return found
        return {needs: {f"{prefix}.{name}": of for name, of in offers.items()} for needs, offers in found.items()}

    setattr(module, _READS, structure)


def _kept(path: Path) -> _List:
    with suppress(OSError, ValueError, EOFError, TypeError):
        found: Any = marshal.loads(path.read_bytes())
        if isinstance(found, dict):
            return cast("_List", found)
    return {}


def _write(kept: Path, content: bytes) -> None:
    from allhands.io.files import write_whole  # not needed by the commands that find a list

    kept.parent.mkdir(parents=True, exist_ok=True)
    write_whole(kept, lambda draft: draft.write_bytes(content))
    lists = sorted(kept.parent.glob("[!.]*.list"), key=lambda path: path.stat().st_mtime)
    for old in lists[:-_LISTS]:
        old.unlink()


def _place(models: Path) -> Path | None:
    """The file of the list for this installation; ``None`` for one whose source may change without notice."""
    # Each installation writes this file. A copy that somebody works on has none beside it.
    records = list(models.parents[1].glob(f"{_PACKAGE}-*.dist-info/RECORD"))
    if len(records) != 1:
        return None
    status = os.stat(records[0])
    facts = (sys.implementation.cache_tag, str(records[0]), status.st_size, status.st_mtime_ns)
    return cache_dir() / _PACKAGE / f"{sha256(repr(facts).encode()).hexdigest()[:32]}.list"
