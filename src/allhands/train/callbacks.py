"""Hooks for user code in a training run."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from allhands.errors import ConfigError
from allhands.io.trees import flatten, unflatten
from allhands.observe.metrics import TrainReport, ValidReport


class Callback:
    """Base class of callbacks: override the methods that you need, and pass instances to
    :func:`allhands.finetune`.

    ``on_*`` methods run on rank 0 only. ``after_backward`` runs on every rank, and must have the
    same effects on all of them. An exception in a callback ends the run.
    """

    def after_backward(self, step: int, gradients: Any) -> Any:
        """Change gradients before an update; ``step`` is the number of earlier updates.

        ``gradients`` is the tree of mean gradients over the global batch, not clipped yet. Each
        rank needs whole gradients for this method, so ``--strategy zero1`` is not available if a
        callback overrides it.

        Returns:
            ``None`` to train on these gradients, or a tree of the same names and shapes to train on
            instead.
        """

    def on_train_report(self, report: TrainReport) -> None:
        """React to a report, every ``steps_per_report`` iterations (batches), after the step that
        completes them.
        """

    def on_valid_report(self, report: ValidReport) -> None:
        """React to a validation."""

    def on_save(self, step: int, path: Path) -> None:
        """React to a save: the weights after ``step`` updates are complete at ``path``."""


GradientHook = Callable[[int, Any], Any]

_OURS = ("after_backward", "on_train_report", "on_valid_report", "on_save")
_OF_MLX_LM = ("on_train_loss_report", "on_val_loss_report", "on_after_backward")
_HOOKS = ("on_", "after_", "before_")  # beginnings of the names of hooks
_CLOSE = 0.8  # difflib's ratio from which on a name counts as a misspelt hook
_WHERE = "callbacks"


class _OfMlxLm(Callback):
    """Wrapper of a callback of mlx_lm's kind, whose methods take dictionaries."""

    def __init__(self, theirs: Any) -> None:
        self.theirs = theirs

    def on_train_report(self, report: TrainReport) -> None:
        if (method := getattr(self.theirs, "on_train_loss_report", None)) is not None:
            method(
                {
                    "iteration": report.iteration,
                    "train_loss": report.loss,
                    "learning_rate": report.learning_rate,
                    "iterations_per_second": report.iterations_per_s,
                    "tokens_per_second": report.trained_tokens_per_s,
                    "trained_tokens": report.trained_tokens,
                    "peak_memory": max(report.peak_memory_bytes, default=0) / 1e9,
                }
            )

    def on_valid_report(self, report: ValidReport) -> None:
        if (method := getattr(self.theirs, "on_val_loss_report", None)) is not None:
            method(
                {
                    "iteration": report.iteration,
                    "val_loss": report.loss,
                    "val_time": report.duration_s,
                }
            )


def checked(callbacks: Sequence[Any]) -> tuple[Callback, ...]:
    """Check callbacks; return ours unchanged, and mlx_lm's in wrappers.

    Raises:
        ConfigError: an object is no callback, or has a method that would never be called.
    """
    if not isinstance(callbacks, list | tuple):
        hint = "give a list of them: callbacks=[MyCallback()]"
        raise ConfigError(
            f"{_shown(callbacks)} is no list", code="argument-invalid", where=_WHERE, hint=hint
        )
    return tuple(_checked(callback) for callback in callbacks)


def gradient_hook(callbacks: Sequence[Callback], model: Any) -> GradientHook | None:
    """Return the function that lets callbacks change gradients one after the other; ``None`` if
    none of them has this hook.
    """
    hooks = [hook for callback in callbacks if (hook := _hook_of(callback, model)) is not None]
    if not hooks:
        return None

    def call(step: int, gradients: Any) -> Any:
        """Return the gradients that replace ``gradients``; ``None`` if there are none."""
        changed = None
        for hook in hooks:
            found = hook(step, gradients if changed is None else changed)
            changed = changed if found is None else _like(gradients, found)
        return changed

    return call


def _hook_of(callback: Callback, model: Any) -> GradientHook | None:
    if not isinstance(callback, _OfMlxLm):
        overrides = (
            getattr(callback.after_backward, "__func__", None) is not Callback.after_backward
        )
        return callback.after_backward if overrides else None
    method = getattr(callback.theirs, "on_after_backward", None)
    return None if method is None else partial(_in_their_order, method, model)


def _like(gradients: Any, found: Any) -> Any:
    """Return a callback's gradients, ``found``, in the order and types of ``gradients``.

    Raises:
        ConfigError: they have other names or shapes.
    """
    there: dict[str, Any] = dict(flatten(found)) if isinstance(found, dict | list) else {}
    expected = flatten(gradients)
    odd = [
        name for name, array in expected if getattr(there.get(name), "shape", None) != array.shape
    ]
    odd += sorted(there.keys() - {name for name, _ in expected})
    if odd:
        problem = f"gradients came back with other names or shapes: {', '.join(odd[:3])}"
        hint = "return a tree with the same names and shapes, or None to keep the gradients"
        raise ConfigError(problem, code="argument-invalid", where="after_backward", hint=hint)
    return unflatten([(name, there[name].astype(array.dtype)) for name, array in expected])


def _in_their_order(method: Callable[..., Any], model: Any, step: int, gradients: Any) -> Any:
    return method(model, gradients, step)


def _checked(callback: Any) -> Callback:
    if isinstance(callback, type):
        raise ConfigError(
            f"{_shown(callback)} is a class",
            code="argument-invalid",
            where=_WHERE,
            hint=f"give an instance: {callback.__name__}()",
        )
    if isinstance(callback, Callback):
        _require_known(callback, _OURS)
        return callback
    if any(callable(getattr(callback, name, None)) for name in _OF_MLX_LM):
        _require_known(callback, _OF_MLX_LM)
        return _OfMlxLm(callback)
    _require_known(callback, (*_OURS, *_OF_MLX_LM))
    hint = f"subclass allhands.Callback, or mlx_lm's TrainingCallback; methods: {', '.join(_OURS)}"
    raise ConfigError(
        f"{_shown(callback)} is no callback", code="argument-invalid", where=_WHERE, hint=hint
    )


def _require_known(callback: Any, known: Sequence[str]) -> None:
    """Refuse public methods that look like hooks but would never be called."""
    for name in dir(callback):
        if name.startswith("_") or name in known or not callable(getattr(callback, name, None)):
            continue
        close = difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)
        if close or name.startswith(_HOOKS):
            hint = (
                f"did you mean {close[0]}?"
                if close
                else f"methods that are called: {', '.join(known)}"
            )
            what = f"{type(callback).__name__}.{name} would never be called"
            raise ConfigError(
                what,
                code="callback-method-unknown",
                where=_WHERE,
                hint=f"{hint}; a helper's name begins with _",
            )


def _shown(value: Any) -> str:
    return repr(value) if len(repr(value)) < 80 else f"a {type(value).__name__}"
