"""Checks of optimizers' arguments when options are read, before a model is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, ValidationError

from allhands.errors import in_our_words

_Share = Annotated[float, Field(ge=0, lt=1, allow_inf_nan=False)]
_Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_From0 = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Number = Annotated[float, Field(allow_inf_nan=False)]
# Types of arguments by their names in mlx.optimizers; the optimizer checks all others itself.
_KINDS: dict[str, Any] = {
    "betas": Annotated[list[_Share], Field(min_length=2, max_length=2)],
    "eps": _Above0,
    "weight_decay": _From0,
    "momentum": _Share,
    "dampening": _Number,
    "nesterov": bool,
    "bias_correction": bool,
    "ns_steps": Annotated[int, Field(ge=1)],
    "clip_threshold": _Above0,
    "decay_rate": Annotated[float, Field(lt=0, allow_inf_nan=False)],
    "beta_1": Annotated[float | None, Field(ge=0, lt=1)],
    "scale_parameter": bool,
    "relative_step": bool,
    "warmup_init": bool,
}
_ADAFACTOR_EPS = Annotated[list[_Above0], Field(min_length=2, max_length=2)]


def checked_arguments(optimizer: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``arguments`` of ``optimizer``, converted to numbers, lists and booleans.

    Raises:
        ValueError: an argument cannot have its value; the message names it.
    """
    found: dict[str, Any] = {}
    for name, value in arguments.items():
        kind = _ADAFACTOR_EPS if (optimizer, name) == ("adafactor", "eps") else _KINDS.get(name)
        try:
            found[name] = value if kind is None else _adapter(kind).validate_python(value)
        except ValidationError as error:
            one = error.errors()[0]
            inner = "".join(f"[{part}]" for part in one["loc"] if isinstance(part, int))
            pair = one["type"] in ("list_type", "too_short", "too_long")
            message = "must be two numbers" if pair else in_our_words(str(one["msg"]))
            raise ValueError(f"{optimizer}: {name}{inner} {message}") from None
    return found


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)
