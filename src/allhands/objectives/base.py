"""Training objective: the interface for training, validation and the search for poisoned rows.

An objective returns sums and never divides. Sums and counts are added over micro-batches and ranks,
and the step divides once, by the count of the whole global batch. ``docs/architecture.md`` has a
worked example.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import mlx.core as mx
from numpy.typing import NDArray

from allhands.data.loader import MicroBatch
from allhands.distributed.backend import Communicator

# (*arrays of a micro-batch) -> () float32 loss sum, followed by the objective's further sums if it
# has any.
SumsFunction = Callable[..., tuple[mx.array, ...]]
# (*arrays of a micro-batch) -> (sums, tree of gradients); the sums are () for the loss alone, else
# (1 + further,).
GradFunction = Callable[..., tuple[mx.array, Any]]


class Objective(Protocol):
    """A loss as a sum, with its counts and further sums.

    Attributes:
        further: names of the sums besides the loss, in the order in which :meth:`sums` returns
            them; the same on every rank.
    """

    @property
    def further(self) -> tuple[str, ...]: ...

    def across(self, group: Communicator) -> Objective:
        """Return the objective of a rank of ``group``: all have the same rows, and each its own
        token positions.

        Raises:
            ConfigError: it cannot be divided like that.
        """
        ...

    def values(self, batch: MicroBatch) -> tuple[NDArray[Any], ...]:
        """Return the arrays of ``batch`` that a forward pass takes."""
        ...

    def places(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return those of (B, T, ...) values of a batch's places that belong to the tokens of
        :meth:`values`.
        """
        ...

    def counts(self, batch: MicroBatch) -> Mapping[str, int]:
        """Return the counts of a batch: ``"targets"``, the divisor of the loss, and ``"tokens"``,
        the work.
        """
        ...

    def sums(self, model: Any, *, cpu_native: bool, with_grad: bool = True) -> SumsFunction:
        """Return the function of :meth:`values`, as MLX's arrays, that returns the sums; it never
        divides.

        Args:
            cpu_native: True if operations compute at once (Linux CPUs); the result is then a value.
            with_grad: whether it will be differentiated.
        """
        ...

    def model_inputs(self, num_layers: int, *arrays: mx.array) -> tuple[mx.array, dict[str, Any]]:
        """Return the tokens (B, T) of :meth:`values`, as MLX's arrays, and what else a model of so
        many blocks is called with.

        For ranks that compute some blocks alone and have no loss.
        """
        ...

    def cpu_gradient(self, model: Any) -> GradFunction | None:
        """Return the gradient where operations compute when they are called; ``None``: that of
        :meth:`sums` will do.
        """
        ...

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the reported figures besides the mean loss.

        Args:
            sums: over the global batch: ``"loss"``, ``"targets"``, ``"tokens"`` and the further
                sums by name.
        """
        ...
