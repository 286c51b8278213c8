"""For a person's own loop: model, optimizer and whatever else has a state, saved and restored as one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from allhands.errors import CheckpointError, ConfigError
from allhands.supervised import last_checkpoint, save_checkpoint

if TYPE_CHECKING:
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim

_WHERE = "Checkpointer"
_ARRAYS = ("model", "optimizer", "random")


class Stateful(Protocol):
    """What has a state of JSON values, such as :class:`allhands.DistributedLoader`."""

    def state_dict(self) -> Mapping[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> object: ...


class Checkpointer:
    """Checkpoints of a training loop: whole or absent, written by rank 0, restored alike by all ranks.

    They are those of :func:`allhands.save_checkpoint`: each in a directory of its own with checksums, that
    ``allhands checkpoint list`` shows. Ranks need not share files: one that has the latest hands it to the others.

    Example:
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
        **others: Stateful,
    ) -> None:
        """Reads and writes nothing yet.

        Args:
            directory: gets ``checkpoints/``; ``None``: that of ``allhands launch --checkpoints``, or of the variable
                ``ALLHANDS_CHECKPOINT_DIR``.
            model: all its parameters are kept, as they are.
            optimizer: its whole state, the step and the learning rate included.
            keep_last: how many checkpoints to keep.
            frozen: also keep parameters that are not trained; without them the model must be loaded as before.
            **others: anything with ``state_dict`` and ``load_state_dict``, by a name of your choice, such as a loader.

        Raises:
            ConfigError: an argument is not what it should be.
        """
        for name, one in others.items():
            if name in _ARRAYS or not (hasattr(one, "state_dict") and hasattr(one, "load_state_dict")):
                raise ConfigError(
                    f"{name} has no state_dict and load_state_dict",
                    where=_WHERE,
                    hint="give such objects; plain values go into save(step, values={...})",
                )
        if keep_last < 1:
            raise ConfigError(f"keep_last={keep_last} keeps no checkpoint", where=_WHERE, hint="give 1 or more")
        self._directory, self._keep_last, self._frozen = directory, keep_last, frozen
        self._model, self._optimizer, self._others = model, optimizer, others
        self.values: dict[str, Any] = {}

    def save(self, step: int, values: Mapping[str, Any] | None = None, *, every: int = 1) -> bool:
        """Write a checkpoint, if ``step`` is a multiple of ``every``; call it on every rank.

        Args:
            step: steps done.
            values: further JSON values, which :attr:`values` holds after :meth:`restore`.

        Returns:
            Whether it was written.

        Raises:
            ConfigError: something cannot be kept.
            StorageError: it cannot be written; earlier checkpoints are as they were.
            CheckpointError: the directory has later checkpoints, which were not restored from.
        """
        if every < 1:
            raise ConfigError(f"every={every} steps", where=_WHERE, hint="give 1 or more")
        if step % every:
            return False
        import mlx.core as mx

        arrays: dict[str, Any] = {"random": cast("list[mx.array]", mx.random.state)[0]}
        if self._model is not None:
            arrays["model"] = self._parameters(self._model)
        if self._optimizer is not None:
            arrays["optimizer"] = self._optimizer.state
        kept = {
            "values": dict(values or {}),
            "others": {name: dict(one.state_dict()) for name, one in self._others.items()},
        }
        save_checkpoint(step, arrays, kept, directory=self._directory, keep_last=self._keep_last)
        return True

    def restore(self) -> int:
        """Put everything as it was at the latest whole checkpoint; call it on every rank, before the first step.

        MLX's random state comes back, too: that of rank 0, on all.

        Returns:
            The steps done; 0 if there is no checkpoint, and nothing was changed.

        Raises:
            CheckpointError: it is damaged, or does not fit the model, the optimizer or the others; nothing of them
                was changed then, unless one of the others refuses its state.
        """
        saved = last_checkpoint(directory=self._directory)
        if saved is None:
            return 0
        arrays = saved.arrays if isinstance(saved.arrays, dict) else {}
        kept: dict[str, Any] = saved.values
        present = {name for name in ("model", "optimizer") if name in arrays} | set(kept.get("others", {}))
        given = {name for name in ("model", "optimizer") if getattr(self, f"_{name}") is not None} | set(self._others)
        if present != given or "random" not in arrays:
            raise _unfit(
                saved.step,
                f"it holds {_names(present)}, but {_names(given)} are to be restored",
                "make the Checkpointer with the same things as before, or give it another directory",
            )
        self._put(saved.step, arrays)
        for name, one in self._others.items():
            one.load_state_dict(kept["others"][name])
        self.values = kept["values"]
        return saved.step

    def _put(self, step: int, arrays: dict[str, Any]) -> None:
        import mlx.core as mx

        if self._model is not None:
            self._check_model(step, self._model, arrays["model"])
            self._model.update(arrays["model"])
        if self._optimizer is not None:
            self._optimizer.state = arrays["optimizer"]
        # Its state is a key of two words, which MLX takes as a seed only.
        high, low = cast("list[int]", arrays["random"].tolist())
        mx.random.seed(high << 32 | low)

    def _parameters(self, model: nn.Module) -> Any:
        return model.parameters() if self._frozen else model.trainable_parameters()

    def _check_model(self, step: int, model: nn.Module, stored: Any) -> None:
        from allhands.trees import flatten

        was = {name: array.shape for name, array in flatten(stored)}
        now = {name: array.shape for name, array in flatten(self._parameters(model))}
        differing = sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
        if differing:
            name = differing[0]
            what = f"{name} is {_shape(was.get(name))} there and {_shape(now.get(name))} in the model"
            more = f" (and {len(differing) - 1} more)" if len(differing) > 1 else ""
            raise _unfit(step, what + more, "build the model as it was, or give another directory")


def _shape(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else "x".join(map(str, shape)) or "one number"


def _names(names: set[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def _unfit(step: int, what: str, hint: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint of step {step} does not fit: {what}", where=_WHERE, hint=hint)
