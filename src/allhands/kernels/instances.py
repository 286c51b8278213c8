"""Replacement of one module's computation: only here does an instance get another class.

A form is a subclass of the module's own class, so that only this instance computes in another way.
Other models of the process, the names and values of parameters and the results of ``isinstance``
stay unchanged.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


def give_form(module: Any, form: type, **attributes: Any) -> None:
    """Let ``module`` compute as ``form``, a subclass of its class.

    Args:
        attributes: what the form needs besides parameters; set before the class.

    Raises:
        TypeError: ``form`` is no subclass of the module's class.
    """
    if not issubclass(form, type(module)):
        raise TypeError(f"{form.__name__} is no form of {type(module).__name__}")
    for name, value in attributes.items():
        # The module's own ``__setattr__`` would count arrays among its parameters.
        object.__setattr__(module, name, value)
    module.__class__ = form


def mix_in(module: Any, form: type, **attributes: Any) -> None:
    """Let ``module`` compute as a subclass of ``form`` and its own class, whose name it keeps;
    methods of ``form`` go first.
    """
    kind = type(module)
    give_form(module, type(kind.__name__, (form, kind), {}), **attributes)


@contextmanager
def form_for_a_while(module: Any, form: type) -> Generator[None]:
    """Let ``module`` compute as ``form``, a subclass of its class, inside the block."""
    kind = type(module)
    give_form(module, form)
    try:
        yield
    finally:
        module.__class__ = kind
