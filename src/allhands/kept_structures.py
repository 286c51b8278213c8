"""Import transformers without reading the source of all its models each time.

To know which class is in which of its 1,600 files of models, transformers reads them all whenever it is imported, and
again when its models are: half a second, about as much as everything else that a training process imports. What it
finds follows from the files alone; so it is kept, and asked for again when the installation is another one.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from allhands.blas import cache_dir
from allhands.errors import AllhandsError
from allhands.files import make_directory, write_whole

_FUNCTION = "create_import_structure_from_path"
_INSTALLED = ("site-packages", "dist-packages")  # in others, sources change under their owner's hands

Structure = dict[Any, Any]


def replace_function(import_utils: Any) -> None:
    """Let transformers' module ``import_utils``, just executed, take from the cache what it would find."""
    look = getattr(import_utils, _FUNCTION, None)
    place = Path(import_utils.__file__ or "").parents[1] / "models"
    if look is not None and place.is_dir() and set(_INSTALLED) & set(place.parts):
        code = Path(import_utils.__file__).stat()
        # Another one when something was installed there, or is looked for in another way.
        mark = [str(place), place.stat().st_mtime_ns, code.st_mtime_ns, code.st_size]
        setattr(import_utils, _FUNCTION, Structures(getattr(look, "__wrapped__", look), place, mark))


class Structures:
    """In place of transformers' function: from a file or directory to which module has which names.

    Args:
        look: the function, which calls this object, by its name, for directories within a directory.
        place: the directory of all models.
        mark: what the answer holds for, as JSON values.
    """

    def __init__(self, look: Callable[[Any], Structure], place: Path, mark: list[Any]) -> None:
        self._look, self._place, self._mark = look, place, mark
        self._whole: Structure | None = None
        self._looking = False

    def __call__(self, module_path: Any) -> Structure:
        path = Path(os.path.dirname(module_path) if os.path.isfile(module_path) else module_path)
        if self._looking or not path.is_relative_to(self._place):
            return self._look(module_path)
        found = self._all()
        for name in path.relative_to(self._place).parts:
            if name not in found:
                return self._look(module_path)
            found = found[name]
        return found

    def _all(self) -> Structure:
        """What there is in all models."""
        if self._whole is None:
            # Each installation has a file of its own.
            file = cache_dir() / "imports" / f"{hashlib.sha256(str(self._place).encode()).hexdigest()[:32]}.json"
            self._whole = _read(file, self._mark)
            if self._whole is None:
                self._looking = True
                try:
                    self._whole = self._look(str(self._place))
                finally:
                    self._looking = False
                _write(file, self._mark, self._whole)
        return self._whole


def _read(file: Path, mark: list[Any]) -> Structure | None:
    """What was kept in ``file`` for ``mark``."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        content = json.loads(file.read_bytes())
        if content["mark"] == mark:
            return _decoded(content["structure"])
    return None


def _write(file: Path, mark: list[Any], structure: Structure) -> None:
    # Not of the form known here: nothing is kept. No home to keep it in: neither.
    with suppress(AllhandsError, TypeError, ValueError):
        text = json.dumps({"mark": mark, "structure": _encoded(structure)})
        make_directory(file.parent, private=True)
        write_whole(file, lambda draft: draft.write_text(text, encoding="utf-8"), private=True)


def _encoded(structure: Structure) -> dict[str, Any]:
    """As JSON has it, which knows neither sets nor keys of several words.

    A directory's own modules by what they need, such as ``torch``; then the directories in it.
    """
    own = [
        [sorted(needs), {module: sorted(names) for module, names in modules.items()}]
        for needs, modules in structure.items()
        if isinstance(needs, frozenset)
    ]
    inner = {name: _encoded(within) for name, within in structure.items() if isinstance(name, str)}
    if len(own) + len(inner) != len(structure):
        raise TypeError("keys of another kind")
    return {"own": own, "inner": inner}


def _decoded(content: dict[str, Any]) -> Structure:
    own: Structure = {
        frozenset(needs): {module: set(names) for module, names in modules.items()} for needs, modules in content["own"]
    }
    return {**own, **{name: _decoded(within) for name, within in content["inner"].items()}}
