"""A small configuration of our own for every architecture that mlx_lm has, and variants with
settings of real models.

The file beside this one has, for each module of ``mlx_lm.models``, configurations by name: the
first, ``""``, is added to what all have in common, the others are added to that. Beside a model's
own settings there are

- ``$text``: the architecture whose configuration is wrapped as ``text_config``;
- ``$short``, ``$long``: the lengths of rows, alike where a row is computed otherwise if it is
  padded (by rotations that depend on the length, and by phi3small, whose attention is not causal in
  mlx_lm);
- ``$keys``: the layers that get adapters, where not all can;
- ``$beyond``: the ways of training that mlx_lm itself cannot compute, ``""`` for all, with the
  beginning of its error;
- ``$refused``: what allhands refuses, a way, a form, or ``+`` for recomputation, with the beginning
  of its message;
- ``$kinks``: where a gradient jumps, so that rounding alone can change it much: there weights may
  be drawn again.
"""

from __future__ import annotations

import ast
import importlib.util
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

_FILE = Path(__file__).with_suffix(".json")
_MARK = "~"  # between an architecture and its variant
_TOLD = ("short", "long", "keys", "kinks", "beyond", "refused")
SHORT, LONG = (
    (13, 19),
    (153, 160),
)  # tokens: more than any length or window in a configuration that does not say otherwise
# Compared in `make test`: each computes something else otherwise than a Llama. The long tests
# compare all.
SAMPLE = (
    "llama~dynamic",
    "gemma4_text",
    "phi3~longrope",
    "deepseek_v3~yarn",
    "gpt_oss~yarn",
    "iquestloopcoder",
    "step3p5~limits",
    "rwkv7",
)


@dataclass(frozen=True)
class Architecture:
    """A configuration of ours.

    Attributes:
        name: ``MODULE`` or ``MODULE~VARIANT``.
        config: what ``config.json`` says.
        short: tokens of each short row.
        long: tokens of each long row.
        keys: of the layers that get adapters; ``None``: all.
        kinks: where its gradient jumps, if anywhere.
        beyond: ways of training that mlx_lm cannot compute, with the beginning of its error; all of
            them at ``""``.
        refused: ways of training, forms, or ``+`` for recomputation, that allhands refuses, with
            the beginning of its message.
    """

    name: str
    config: dict[str, Any]
    short: tuple[int, int] = SHORT
    long: tuple[int, int] = LONG
    keys: list[str] | None = None
    kinks: str | None = None
    beyond: dict[str, str] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def lengths(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Of the rows of each batch."""
        return self.short, self.long

    @property
    def module(self) -> str:
        """Of ``mlx_lm.models``."""
        return self.name.partition(_MARK)[0]

    @property
    def is_variant(self) -> bool:
        """Whether it differs from another one of its module in a few settings."""
        return _MARK in self.name


@cache
def _read() -> dict[str, Any]:
    return json.loads(_FILE.read_text(encoding="utf-8"))


def modules() -> list[str]:
    """Those of ``mlx_lm.models`` that have a configuration here."""
    return list(_read()["models"])


def names(module: str) -> list[str]:
    """The configurations of a module."""
    return [module + (_MARK + variant if variant else "") for variant in _read()["models"][module]]


def every() -> list[str]:
    """All names of configurations."""
    return [name for module in modules() for name in names(module)]


def architecture(name: str) -> Architecture:
    """The configuration of that name."""
    module, _, variant = name.partition(_MARK)
    variants = _read()["models"][module]
    settings: dict[str, Any] = {"model_type": module} | variants[""] | variants[variant]
    told = {key: settings.pop(f"${key}") for key in _TOLD if f"${key}" in settings}
    told |= {key: tuple(told[key]) for key in ("short", "long") if key in told}
    wrapped = settings.pop("$text", None)
    if wrapped is not None:
        inner = architecture(wrapped).config
        settings = {"text_config": inner, "vocab_size": inner["vocab_size"], **settings}
    elif "text_config" not in settings:
        settings = _read()["common"] | settings
    return Architecture(name, settings, **told)


def named(patterns: Sequence[str]) -> list[str]:
    """The configurations with these names, or all; a module's name stands for all of its own."""
    if not patterns:
        return every()
    found: list[str] = []
    for pattern in patterns:
        found += names(pattern) if pattern in _read()["models"] else [pattern]
    if unknown := [name for name in found if name not in every()]:
        raise ValueError(f"there is no configuration {unknown[0]!r}")
    return list(dict.fromkeys(found))


def installed() -> list[str]:
    """The modules of the installed ``mlx_lm.models`` that have a model: told from their text,
    nothing is imported.
    """
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    assert spec.origin is not None
    models = Path(spec.origin).parent / "models"
    return sorted(
        path.stem for path in models.glob("*.py") if {"Model", "ModelArgs"} <= _defined(path)
    )


def _defined(path: Path) -> set[str]:
    """What a module has at its top, made there or taken from another."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom):
            found |= {name.asname or name.name for name in node.names}
        elif isinstance(node, ast.ClassDef):
            found.add(node.name)
    return found
