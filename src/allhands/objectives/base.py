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
        """Return this objective for a rank of ``group``: its ranks have the same rows, and each
        computes its own token positions.

        Raises:
            ConfigError: the objective cannot be divided over token positions.
        """
        ...

    def values(self, batch: MicroBatch) -> tuple[NDArray[Any], ...]:
        """Return the arrays of ``batch`` that a forward pass takes."""
        ...

    def places(self, values: NDArray[Any]) -> NDArray[Any]:
        """Select from ``values``, (B, T, ...) for each token position of a batch, those of the
        tokens in :meth:`values`.
        """
        ...

    def counts(self, batch: MicroBatch) -> Mapping[str, int]:
        """Return the counts of a batch: ``"targets"``, the divisor of the loss, and ``"tokens"``,
        the work.
        """
        ...

    def sums(self, model: Any, *, cpu_native: bool, with_grad: bool = True) -> SumsFunction:
        """Return a function that takes :meth:`values` as MLX arrays and returns the sums; it never
        divides.

        Args:
            cpu_native: True if operations compute at once (Linux CPUs); the sums are then values,
                not a graph.
            with_grad: True if the function will be differentiated.
        """
        ...

    def model_inputs(self, num_layers: int, *arrays: mx.array) -> tuple[mx.array, dict[str, Any]]:
        """Return the tokens (B, T) and the keyword arguments for a call of a model with
        ``num_layers`` blocks; ``arrays`` are :meth:`values` as MLX arrays.

        For ranks that compute only some blocks and have no loss.
        """
        ...

    def cpu_gradient(self, model: Any) -> GradFunction | None:
        """Return the gradient function for devices whose operations compute at once; ``None``:
        differentiate :meth:`sums` instead.
        """
        ...

    def metrics(self, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the reported figures besides the mean loss.

        Args:
            sums: over the global batch: ``"loss"``, ``"targets"``, ``"tokens"`` and the further
                sums by name.
        """
        ...
