"""Change of the computation of one module: the only place that gives an instance another class.

A form is a subclass of the module's own class. So only this instance computes in another way. Other
models of the process, the names and values of parameters and the results of ``isinstance`` stay
unchanged.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any


def give_form(module: Any, form: type, **attributes: Any) -> None:
    """Let ``module`` compute as ``form``, a subclass of its class.

    Args:
        attributes: what the form needs beside parameters; set before the class is.

    Raises:
        TypeError: ``form`` is no subclass of the module's class.
    """
    if not issubclass(form, type(module)):
        raise TypeError(f"{form.__name__} is no form of {type(module).__name__}")
    for name, value in attributes.items():
        # Not the module's own way, which would count arrays among its parameters.
        object.__setattr__(module, name, value)
    module.__class__ = form


def mix_in(module: Any, form: type, **attributes: Any) -> None:
    """:func:`give_form` of a class that is ``form`` before the module's own, under the name of
    that.
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
