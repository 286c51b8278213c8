"""Which form of an operation is computed: by rule, as measured on this device, or as a person asks.

An operation asks the :class:`Selector` that it was given, and names the kind of device whose forms it can compute:
what is for CUDA alone is never an answer elsewhere. Without a measurement the rule decides. Nothing here belongs to the
process: two models may compute by different choices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

import mlx.core as mx

from allhands.errors import ConfigError

VARIABLE = "ALLHANDS_KERNELS"
AUTO, PLAIN = "auto", "plain"
Kind = Literal["cpu", "metal", "cuda"]
# A quantised weight is made dense from so many tokens on; below, MLX's quantised product is faster.
DENSE_FROM_TOKENS = 200

# For each kind of device the forms of an operation, that of the rule first. What has one form only is no choice.
# ``plain`` is MLX's own operations; the forms of loss_chunk are rows, or the size of the logits.
FORMS: Mapping[str, Mapping[Kind, tuple[str, ...]]] = {
    "rms_norm": {"cpu": ("native", PLAIN), "cuda": ("fused", PLAIN)},
    "swiglu": {"cpu": ("native", "polynomial", PLAIN), "cuda": ("fused", PLAIN)},
    "rope": {"cuda": ("fused", PLAIN)},
    "attention": {"cpu": ("native", PLAIN)},
    "quantized_linear": {"cpu": ("native", PLAIN), "cuda": ("dense", PLAIN), "metal": (PLAIN, "dense")},
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
# Of the largest value: the rounding of each type, several times over.
_CLOSE = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}
# Float32 products may be computed with shorter factors on a GPU.
_CLOSE_PRODUCT = {**_CLOSE, "float32": 2e-3}
_PRODUCTS = ("quantized_linear", "adapted_linear", "loss_chunk", "cross_entropy")
_GAIN = 1.1  # times as fast another form must be before it takes the place of the rule's: more than noise
_REACH = 2  # powers of two in tokens up to which a measurement speaks for its neighbours


def forms(name: str, kind: Kind, tokens: int) -> tuple[str, ...]:
    """The forms of an operation on a kind of device, that of the rule first; none if it is no choice there."""
    found = FORMS[name].get(kind, ())
    if name == "quantized_linear" and kind == "cuda" and tokens < DENSE_FROM_TOKENS:
        return tuple(reversed(found))
    return found


def reference(name: str, kind: Kind) -> str:
    """The form with which the others are compared."""
    found = FORMS[name][kind]
    return PLAIN if PLAIN in found else found[0]


def tolerance(name: str, dtype: str) -> float:
    """How far a form may be from the plain one, as a share of the largest value."""
    return (_CLOSE_PRODUCT if name in _PRODUCTS else _CLOSE).get(dtype, 0.0)


@dataclass(frozen=True)
class SizedOperation:
    """An operation at one size.

    Attributes:
        shape: what the operation says of itself, such as (out, in, bits, group size).
        tokens: rows that it is computed for; 0 if it does not depend on them.
        dtype: of its input.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    tokens: int

    @property
    def size(self) -> int:
        """The power of two in which the tokens fall."""
        return max(0, self.tokens - 1).bit_length()

    def __str__(self) -> str:
        sizes, codes = (self.shape[:2], self.shape[2:]) if len(self.shape) == 4 else (self.shape, ())
        words = " x ".join(str(each) for each in ((self.tokens,) if self.tokens else ()) + sizes)
        return f"{words} of {codes[0]} bits" if codes else words


@dataclass(frozen=True)
class FormTimes:
    """What was found for a problem on a kind of device.

    Attributes:
        ms: median time of each form, forward and backward, in milliseconds.
        least_ms: the shortest.
        difference: largest difference of each form from the reference, as a share of the largest value.
    """

    problem: SizedOperation
    kind: Kind
    ms: Mapping[str, float]
    least_ms: Mapping[str, float]
    difference: Mapping[str, float]

    def right(self, form: str) -> bool:
        """Whether a form was measured, and computes the same but for rounding."""
        limit = tolerance(self.problem.name, self.problem.dtype)
        return form in self.ms and form in self.least_ms and self.difference.get(form, math.inf) <= limit

    @property
    def best(self) -> str:
        """The form to take: the rule's, unless another is clearly faster or it is not right."""
        known = forms(self.problem.name, self.kind, self.problem.tokens)
        rule, right = known[0], [form for form in known if self.right(form)]
        if not right:
            return reference(self.problem.name, self.kind)
        if rule not in right:
            return min(right, key=lambda form: self.ms[form])
        # By the middle of the rounds and by the best: what disturbed one form rarely spoils both.
        gains = {f: min(times[rule] / times[f] for times in (self.ms, self.least_ms)) for f in right}
        fastest = max(right, key=lambda form: gains[form])
        return fastest if gains[fastest] >= _GAIN else rule

    @property
    def ratio(self) -> float:
        """How many times as fast the best form is as the reference."""
        first = reference(self.problem.name, self.kind)
        return self.ms[first] / self.ms[self.best] if self.ms.get(first) and self.ms.get(self.best) else 1.0


class Selector(Protocol):
    """Who decides in which form an operation is computed: :class:`Choices`, or a model's :class:`KernelSelection`."""

    def select(self, name: str, kind: Kind, dtype: mx.Dtype, tokens: int, shape: tuple[int, ...]) -> str:
        """The form in which to compute an operation, one of :func:`forms`."""
        ...


@dataclass(frozen=True)
class Choices:
    """What a model computes by; without anything: by rule.

    Attributes:
        measured: on this device.
        wished: form by operation, which a person asks for; with ``""`` that of all others.
        device: its name for people.
        missing: forms that other devices of this kind have, but this process does not.
    """

    measured: Sequence[FormTimes] = ()
    wished: Mapping[str, str] = field(default_factory=dict[str, str])
    device: str = ""
    missing: frozenset[str] = frozenset()
    _selected: dict[tuple[SizedOperation, Kind], str] = field(
        default_factory=dict[tuple["SizedOperation", "Kind"], str], init=False, repr=False, compare=False
    )

    def select(self, name: str, kind: Kind, dtype: mx.Dtype, tokens: int, shape: tuple[int, ...]) -> str:
        """The form in which to compute an operation, one of :func:`forms`; see :meth:`decide`."""
        if not self.measured and not self.wished:
            return forms(name, kind, tokens)[0]
        problem = SizedOperation(name, type_name(dtype), shape, tokens)
        found = self._selected.get((problem, kind))
        if found is None:
            found = self._selected[problem, kind] = self.decide(problem, kind)[0]
        return found

    def nearest(self, problem: SizedOperation, kind: Kind) -> FormTimes | None:
        """The measurement that speaks for ``problem``."""
        alike = replace(problem, tokens=0)
        same = [e for e in self.measured if e.kind == kind and replace(e.problem, tokens=0) == alike]
        found = min(same, key=lambda e: (abs(e.problem.size - problem.size), e.problem.size), default=None)
        return found if found and abs(found.problem.size - problem.size) <= _REACH else None

    def decide(self, problem: SizedOperation, kind: Kind) -> tuple[str, str]:
        """The form to compute ``problem`` in on a kind of device on which it is a choice, and why."""
        known = [each for each in forms(problem.name, kind, problem.tokens) if each not in self.missing]
        for wish in (self.wished.get(problem.name), self.wished.get("")):
            if wish in known:
                return str(wish), f"asked for by {VARIABLE}"
        found = self.nearest(problem, kind)
        if found is None or found.best not in known:
            return known[0], f"default for {kind}; `allhands bench kernels` measures"
        first = reference(problem.name, kind)
        other = first if found.best != first else forms(problem.name, kind, problem.tokens)[0]
        times = [found.ms.get(each) for each in (other, found.best)]
        gain = f" {times[0] / times[1]:.1f}x {other}" if times[0] and times[1] and other != found.best else ""
        return found.best, f"measured{gain} at {found.problem} on {self.device or kind}"


def parse_wishes(text: str, kind: Kind, missing: Collection[str] = ()) -> dict[str, str]:
    """What ``ALLHANDS_KERNELS`` asks for on a kind of device.

    Raises:
        ConfigError: an operation or form that there is not.
    """
    here = {
        name: [each for each in kinds[kind] if each not in missing] for name, kinds in FORMS.items() if kind in kinds
    }
    wished: dict[str, str] = {}
    for part in (each.strip() for each in text.split(",")):
        name, equals, form = (each.strip() for each in part.partition("="))
        if part in ("", AUTO):
            continue
        if part == PLAIN:
            wished[""] = PLAIN
        elif name in wished:
            raise ConfigError(f"{name} is given twice: {text}", where=VARIABLE, hint="keep one of them")
        elif not equals or form not in here.get(name, ()):
            ways = "; ".join(f"{key}={'|'.join(values)}" for key, values in here.items())
            raise ConfigError(
                f"{part!r} is not a choice on this device ({kind})",
                where=VARIABLE,
                hint=f"write {AUTO}, {PLAIN}, or some of these with commas between: {ways}",
            )
        else:
            wished[name] = form
    return wished


# --- what selects --------------------------------------------------------------------------------------


class KernelSelection:
    """Selects the forms of one model: its modules and what trains it share one, and another model has another.

    The modules get theirs before the ranks agree, so its choices can be replaced.
    """

    def __init__(self, choices: Choices | None = None) -> None:
        self._choices = choices or Choices()

    def select_by(self, choices: Choices) -> None:
        """Select by ``choices`` from now on; functions that are compiled already stay as they are."""
        self._choices = choices

    def select(self, name: str, kind: Kind, dtype: mx.Dtype, tokens: int, shape: tuple[int, ...]) -> str:
        """The form in which to compute an operation, one of :func:`forms`."""
        return self._choices.select(name, kind, dtype, tokens, shape)


BY_RULE = Choices()
SELECTION = "_selection"  # an attribute of a module


def selection_of(module: Any) -> Selector:
    """What selects the forms of ``module``, which may be a whole model; by rule where nothing was given to it."""
    return getattr(module, SELECTION, BY_RULE)


def give_selection(module: Any, selection: Selector) -> None:
    """Let ``module``, or the functions that are made for it as a model, select by ``selection``."""
    object.__setattr__(module, SELECTION, selection)


def type_name(dtype: mx.Dtype) -> str:
    """Such as ``"float32"``."""
    return str(dtype).rpartition(".")[2]
