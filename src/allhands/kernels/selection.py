"""Selection of the form of each operation: by rule, or by ``ALLHANDS_KERNELS``.

:data:`FORMS` is the table of rules. A model has a :class:`KernelSelection`, which its modules and
its training functions share; two models of a process may compute in different forms.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from allhands.errors import ConfigError

VARIABLE = "ALLHANDS_KERNELS"
AUTO, PLAIN = "auto", "plain"
Kind = Literal["cpu", "metal", "cuda"]
# A quantised weight is made dense from so many tokens on; below, MLX's quantised product is faster.
DENSE_FROM_TOKENS = 200
# On NVIDIA GPUs attention pads rows of so many tokens to a multiple of TILE.
PADDED_FROM_TOKENS, TILE = 64, 128
_WIDEST_HEAD = 128  # that cuDNN's attention takes

# For each kind of device the forms of an operation, the rule's first. Operations with a single form
# are left out. ``plain`` is MLX's own operations; the forms of loss_chunk are rows, or the size of
# the logits.
FORMS: Mapping[str, Mapping[Kind, tuple[str, ...]]] = {
    "rms_norm": {"cpu": ("native", PLAIN), "cuda": ("fused", PLAIN)},
    "swiglu": {"cpu": ("native", "polynomial", PLAIN), "cuda": ("fused", PLAIN)},
    "rope": {"cuda": ("fused", PLAIN)},
    "attention": {"cpu": ("native", PLAIN), "cuda": ("padded", PLAIN)},
    "quantized_linear": {
        "cpu": ("native", PLAIN),
        "cuda": ("dense", PLAIN),
        "metal": (PLAIN, "dense"),
    },
    "adapted_linear": {"cpu": ("native", PLAIN)},
    "dequantize": {"cuda": ("fused", PLAIN)},
    "cross_entropy": {"cuda": ("fused", PLAIN)},
    "adamw": {"cuda": ("fused", PLAIN)},
    "loss_chunk": {
        "cpu": ("256", "128", "512"),
        "cuda": ("512MB", "128MB", "256MB"),
        "metal": ("512MB", "128MB", "256MB"),
    },
}
# Only models with quantised weights compute these.
QUANTISED = ("quantized_linear", "adapted_linear", "dequantize")


def pads_heads(width: int) -> bool:
    """Return true if attention on NVIDIA GPUs can pad rows of heads with ``width`` features: MLX
    gives no others to cuDNN.
    """
    return width % 8 == 0 and width <= _WIDEST_HEAD


def forms(name: str, kind: Kind, tokens: int) -> tuple[str, ...]:
    """Return the forms of an operation on a kind of device, the rule's first; none if there is no
    choice.
    """
    found = FORMS[name].get(kind, ())
    if name == "quantized_linear" and kind == "cuda" and tokens < DENSE_FROM_TOKENS:
        return tuple(reversed(found))
    return found


class KernelSelection:
    """Selects the forms of one model's operations.

    Attributes:
        requested: requested form of each operation; the key ``""`` has that of all others. It may
            be replaced until functions are compiled with it.
        missing: forms that other devices of this kind have, but this process does not.
    """

    def __init__(
        self, requested: Mapping[str, str] | None = None, missing: Collection[str] = ()
    ) -> None:
        self.requested = dict(requested or {})
        self.missing = frozenset(missing)

    def select(self, name: str, kind: Kind, tokens: int = 0) -> str:
        """Return the form in which to compute an operation for so many tokens, one of
        :func:`forms`.
        """
        return (
            self.explain(name, kind, tokens)[0] if self.requested else forms(name, kind, tokens)[0]
        )

    def explain(self, name: str, kind: Kind, tokens: int = 0) -> tuple[str, str]:
        """Return the form in which to compute an operation, and why."""
        found = forms(name, kind, tokens)
        here = [form for form in found if form not in self.missing]
        for form in (self.requested.get(name), self.requested.get("")):
            if form in here:
                return form, f"asked for by {VARIABLE}"
        return here[0], f"rule for {kind}" if here == list(
            found
        ) else f"rule for {kind} without {found[0]} operations"


def parse_request(text: str, kind: Kind, missing: Collection[str] = ()) -> dict[str, str]:
    """Read ``ALLHANDS_KERNELS`` for a kind of device, for :attr:`KernelSelection.requested`.

    Raises:
        ConfigError: an operation or form does not exist here, or an operation is given twice.
    """
    here = {
        name: [each for each in kinds[kind] if each not in missing]
        for name, kinds in FORMS.items()
        if kind in kinds
    }
    requested: dict[str, str] = {}
    for part in (each.strip() for each in text.split(",")):
        name, equals, form = (each.strip() for each in part.partition("="))
        if part in ("", AUTO):
            continue
        if part == PLAIN:
            requested[""] = PLAIN
        elif name in requested:
            raise ConfigError(
                f"{name} is given twice: {text}",
                code="option-given-twice",
                where=VARIABLE,
                hint="keep one of them",
            )
        elif not equals or form not in here.get(name, ()):
            ways = "; ".join(f"{key}={'|'.join(values)}" for key, values in here.items())
            raise ConfigError(
                f"{part!r} is not a choice on this device ({kind})",
                code="value-unknown",
                where=VARIABLE,
                hint=f"write {AUTO}, {PLAIN}, or some of these with commas between: {ways}",
            )
        else:
            requested[name] = form
    return requested


BY_RULE = KernelSelection()
SELECTION = "_selection"  # an attribute of a module


def selection_of(module: Any) -> KernelSelection:
    """Return the selection of ``module``, which may be a whole model; by rule where it has none."""
    return getattr(module, SELECTION, BY_RULE)


def give_selection(module: Any, selection: KernelSelection) -> None:
    """Let ``module``, or the functions that are made for a whole model, select by ``selection``."""
    object.__setattr__(module, SELECTION, selection)
