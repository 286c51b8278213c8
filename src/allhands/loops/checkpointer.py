"""Checkpoints for a training loop of your own: model, optimizer and other objects with a state."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from allhands.errors import CheckpointError, ConfigError
from allhands.loops.supervised import last_checkpoint, save_checkpoint, whole_step

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim

_WHERE = "Checkpointer"


class Stateful(Protocol):
    """An object with a state of JSON values, such as :class:`allhands.DistributedLoader`."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> object: ...


class Checkpointer:
    """Checkpoints of a training loop: whole or absent, written by rank 0, restored by all ranks in the same way.

    The format is that of :func:`allhands.save_checkpoint`: each checkpoint has its own directory
    with checksums, and ``allhands checkpoint list`` shows it. Ranks need not share files: a rank
    with the latest checkpoint sends it to the others.

    Examples:
        >>> keeper = allhands.Checkpointer("run", model=model, optimizer=optimizer, loader=loader)
        >>> for step in range(keeper.restore() + 1, 1001):
        ...     ...
        ...     keeper.save(step, every=100)
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        *,
        model: nn.Module | None = None,
        optimizer: optim.Optimizer | None = None,
        keep_last: int = 2,
        frozen: bool = True,
        **others: Stateful | None,
    ) -> None:
        """Create the checkpointer; nothing is read or written yet.

        Args:
            directory: directory for ``checkpoints/``; ``None``: the directory of ``allhands
                launch`` (``--checkpoints``, or else its log directory), or of the variable
                ``ALLHANDS_CHECKPOINT_DIR``.
            model: model whose parameters are saved, bit by bit.
            optimizer: optimizer whose whole state is saved, including the step. :meth:`restore`
                leaves a constant learning rate as it is; a schedule goes on from the step.
            keep_last: number of checkpoints to keep.
            frozen: also save parameters that are not trained. Without them the program must load
                the model before it restores a checkpoint.
            **others: objects with ``state_dict`` and ``load_state_dict``, by names of your choice,
                such as a loader; ``None`` is left out. ``random`` is MLX's own state, which is
                always saved.

        Raises:
            ConfigError: an argument has a wrong type or value.
        """
        kinds: dict[str, tuple[str, tuple[str, ...]]] = {}
        kinds |= dict.fromkeys(others, ("an object with states", ("state_dict", "load_state_dict")))
        kinds["model"] = ("an mlx.nn.Module", ("parameters", "trainable_parameters", "update"))
        kinds["optimizer"] = ("an optimizer of mlx.optimizers", ("state", "apply_gradients"))
        for name, given in {**others, "model": model, "optimizer": optimizer}.items():
            wanted, has = kinds[name]
            lacks = [each for each in has if not hasattr(given, each)]
            if name == "random":
                raise ConfigError(
                    "random is the name of MLX's own random state, which is saved anyway",
                    code="argument-invalid",
                    where=_WHERE,
                    hint="give the object another name",
                )
            if given is not None and (isinstance(given, type) or lacks):
                hint = f"give {wanted}, or leave it out; plain values go into save(step, values={{...}})"
                raise ConfigError(
                    f"{name} ({given!r}) has no {' and '.join(has)}",
                    code="argument-invalid",
                    where=_WHERE,
                    hint=hint,
                )
        if keep_last < 1:
            raise ConfigError(
                f"keep_last={keep_last} keeps no checkpoint",
                code="value-out-of-range",
                where=_WHERE,
                hint="give 1 or more",
            )
        self._directory, self._keep_last, self._frozen = directory, keep_last, frozen
        self._model, self._optimizer = model, optimizer
        self._others = {name: one for name, one in others.items() if one is not None}
        self.values: dict[str, Any] = {}

    def save(self, step: int, values: Mapping[str, Any] | None = None, *, every: int = 1) -> bool:
        """Write a checkpoint, if ``step`` is a multiple of ``every``; call it on every rank.

        Args:
            step: number of completed steps.
            values: further JSON values, which :attr:`values` holds after :meth:`restore`.
            every: number of steps between checkpoints.

        Returns:
            True if a checkpoint was written.

        Raises:
            ConfigError: there is no directory, ``step`` or ``every`` is no such number, or a value
                cannot be kept.
            StorageError: the checkpoint cannot be written; earlier checkpoints are unchanged.
            CheckpointError: the directory has later checkpoints, and none of them was restored.
        """
        if every < 1:
            raise ConfigError(
                f"every={every} steps",
                code="value-out-of-range",
                where=_WHERE,
                hint="give 1 or more",
            )
        if whole_step(step, f"{_WHERE}.save") % every:
            return False
        import mlx.core as mx

        arrays: dict[str, Any] = {"random": cast("list[mx.array]", mx.random.state)[0]}
        if self._model is not None:
            arrays["model"] = self._parameters(self._model)
        if self._optimizer is not None:
            arrays["optimizer"] = self._optimizer.state
        kept: dict[str, Any] = {
            "values": dict(values or {}),
            "others": {name: dict(one.state_dict()) for name, one in self._others.items()},
        }
        if self._optimizer is not None:
            kept["optimizer"] = _described(self._optimizer)
        save_checkpoint(step, arrays, kept, directory=self._directory, keep_last=self._keep_last)
        return True

    def restore(self) -> int:
        """Restore the state of the latest whole checkpoint; call it on every rank, before the first
        step.

        All ranks also get rank 0's random state of MLX. A constant learning rate of the optimizer
        stays as it is now. A loop that changes its learning rate by hand has to set it again.

        Returns:
            The number of completed steps; 0 if there is no checkpoint, and nothing was changed.

        Raises:
            ConfigError: there is no directory.
            CheckpointError: the checkpoint is of another program, or does not fit the model, the
                optimizer or the other objects. Then nothing was changed, unless another object
                refuses its state.
            DistributedError: the ranks cannot connect.
        """
        saved = last_checkpoint(directory=self._directory)
        if saved is None:
            return 0
        found: Any = saved.arrays
        arrays = cast("dict[str, Any]", found) if isinstance(found, dict) else {}
        kept: dict[str, Any] = saved.values
        present, given = {*arrays, *kept.get("others", {})}, {"random", *self._others}
        given |= {name for name in ("model", "optimizer") if getattr(self, f"_{name}") is not None}
        if present != given or "values" not in kept:
            raise _unfit(
                saved.step,
                f"it holds {_names(present)}, but {_names(given)} are to be restored",
                "create the Checkpointer with the same objects as before, or give it another directory",
            )
        self._put(saved.step, arrays, kept.get("optimizer"))
        for name, one in self._others.items():
            one.load_state_dict(kept["others"][name])
        self.values = kept["values"]
        return saved.step

    def _put(self, step: int, arrays: dict[str, Any], kind: str | None) -> None:
        import mlx.core as mx

        # Everything is checked before anything changes.
        if self._model is not None:
            _require_same(step, arrays["model"], self._parameters(self._model), "model")
        if self._optimizer is not None:
            _check_optimizer(step, self._optimizer, arrays["optimizer"], kind)
            _put_optimizer(self._optimizer, arrays["optimizer"])
        if self._model is not None:
            self._model.update(arrays["model"])
        # The stored state is a key of two words, and MLX accepts it only as a seed.
        high, low = cast("list[int]", arrays["random"].tolist())
        mx.random.seed(high << 32 | low)

    def _parameters(self, model: nn.Module) -> Any:
        module = cast("Any", model)
        return module.parameters() if self._frozen else module.trainable_parameters()


def _parts(optimizer: optim.Optimizer) -> list[optim.Optimizer]:
    """Return the optimizers with a state of their own: the parts of a ``MultiOptimizer``, or the
    optimizer itself.
    """
    inner = cast("list[optim.Optimizer] | None", getattr(optimizer, "optimizers", None))
    return [optimizer] if inner is None else [part for one in inner for part in _parts(one)]


def _described(optimizer: optim.Optimizer) -> str:
    """Return the class names of the optimizer's parts."""
    return " + ".join(type(part).__name__ for part in _parts(optimizer))


def _check_optimizer(step: int, optimizer: optim.Optimizer, stored: Any, kind: str | None) -> None:
    """Refuse the stored state of another optimizer.

    Args:
        kind: class of the stored optimizer; ``None``: the checkpoint does not have it.

    Raises:
        CheckpointError: the class, names or shapes differ.
    """
    shared = isinstance(stored, dict) and isinstance(
        cast("dict[str, Any]", stored).get("states"), list
    )
    own = _described(optimizer)
    if (kind or own) != own or shared != hasattr(optimizer, "optimizers"):
        raise _unfit(step, f"its optimizer is {kind or 'another'}, the one here is {own}", _HINT)
    # An optimizer gets its state for each parameter in its first update. Before, there is nothing
    # to compare.
    if all(getattr(part, "_initialized", False) for part in _parts(optimizer)):
        _require_same(step, stored, optimizer.state, "optimizer")


def _put_optimizer(optimizer: optim.Optimizer, stored: Any) -> None:
    """Give the optimizer its stored state, except a learning rate without a schedule."""
    rates: list[tuple[optim.Optimizer, mx.array]] = [
        (part, part.state["learning_rate"])
        for part in _parts(optimizer)
        if "learning_rate" in part.state and "learning_rate" not in getattr(part, "_schedulers", {})
    ]
    optimizer.state = stored
    for part, rate in rates:
        part.learning_rate = rate


_HINT = "create the same model and optimizer as before, or give another directory"


def _require_same(step: int, stored: Any, here: Any, owner: str) -> None:
    """Refuse arrays of other names or shapes.

    Raises:
        CheckpointError: names or shapes differ.
    """
    from allhands.io.trees import flatten

    was = {name: array.shape for name, array in flatten(stored)}
    now = {name: array.shape for name, array in flatten(here)}
    if differing := sorted(
        name for name in was.keys() | now.keys() if was.get(name) != now.get(name)
    ):
        name, more = differing[0], f" (and {len(differing) - 1} more)" if differing[1:] else ""
        what = f"{name} is {_shape(was.get(name))} there and {_shape(now.get(name))} in the {owner}{more}"
        raise _unfit(step, what, _HINT)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "x".join(map(str, shape)) or "one number"


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _unfit(step: int, what: str, hint: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint of step {step} does not fit: {what}",
        code="checkpoint-mismatch",
        where=_WHERE,
        hint=hint,
    )
