"""The strategies by name: the only list of them, for ``--strategy``, for training and for
``allhands plan``.

A new strategy needs only an entry here. Importing this module loads no MLX.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from allhands.parallel.costs import (
    Costs,
    DataCosts,
    DelayedCosts,
    DividedOptimizerCosts,
    ExpertCosts,
    LocalCosts,
    PipelineCosts,
    ShardedCosts,
    TensorCosts,
)

# Optimizers that update each number by itself, so that any part of an array can be updated by
# itself.
ELEMENTWISE = ("adam", "adamw", "sgd")


@dataclass(frozen=True)
class TrainingNeeds:
    """The needs of a training that its strategy has to meet.

    Attributes:
        optimizer: its name.
        cpu_native: whether operations compute when they are called (Linux CPUs).
        wants_gradients: whether a callback reads whole gradients.
        masters: whether the optimizer has float32 copies of trained weights.
    """

    optimizer: str
    cpu_native: bool
    wants_gradients: bool = False
    masters: bool = False


@dataclass(frozen=True)
class Entry:
    """A strategy.

    Attributes:
        title: its name in ``allhands plan``.
        costs: memory and traffic of a rank.
        maker: module and function that create it. The function takes an
            :class:`allhands.parallel.base.Exchanging`, and whether gradients are exchanged during
            the passes.
        unfit: returns why a training cannot use it; empty if it can.
        flags: the flags that choose it.
        packs: whether gradients can be compressed (``--compress``).
        exact: whether it has the result of one process. Other strategies are used and planned only
            if the options ask for them.
        divides_model: whether each rank has only a part of the model.
    """

    title: str
    costs: Costs
    maker: str
    unfit: Callable[[TrainingNeeds], str] = lambda wanted: ""
    flags: str = ""
    packs: bool = False
    exact: bool = True
    divides_model: bool = False


def _undividable(wanted: TrainingNeeds) -> str:
    problems = {
        f"{wanted.optimizer} updates an array as a whole": wanted.optimizer not in ELEMENTWISE,
        "a callback looks at whole gradients": wanted.wants_gradients,
        "operations are computed one by one on this processor": wanted.cpu_native,
    }
    return next((problem for problem, here in problems.items() if here), "")


def _not_in_parts(wanted: TrainingNeeds) -> str:
    return _undividable(replace(wanted, cpu_native=False))


def _not_in_stages(wanted: TrainingNeeds) -> str:
    return (
        "a callback looks at whole gradients, which no rank has" if wanted.wants_gradients else ""
    )


def _not_local(wanted: TrainingNeeds) -> str:
    problems = {
        "the optimizer has float32 copies of weights, which ranks would not average": wanted.masters,
        "a callback looks at the gradients of whole batches, which no rank has": wanted.wants_gradients,
    }
    return next((problem for problem, here in problems.items() if here), "")


def _not_late(wanted: TrainingNeeds) -> str:
    return (
        "a callback looks at gradients, which are those of the step before"
        if wanted.wants_gradients
        else ""
    )


STRATEGIES = {
    "data": Entry("data parallel", DataCosts(), "allhands.parallel.data:plain", packs=True),
    "zero1": Entry(
        "optimizer divided",
        DividedOptimizerCosts(),
        "allhands.parallel.data:divided_optimizer",
        _undividable,
        "--strategy zero1",
        packs=True,
    ),
    "fsdp": Entry(
        "fully sharded",
        ShardedCosts(),
        "allhands.parallel.fsdp:fully_sharded",
        _not_in_parts,
        "--strategy fsdp",
        divides_model=True,
    ),
    "pipeline": Entry(
        "pipeline",
        PipelineCosts(),
        "allhands.parallel.pipeline:pipeline",
        _not_in_stages,
        "--strategy pipeline",
        divides_model=True,
    ),
    "tensor": Entry(
        "matrices divided",
        TensorCosts(),
        "allhands.parallel.tensor:tensor",
        _not_in_parts,
        "--tp",
        divides_model=True,
    ),
    "expert": Entry(
        "experts divided",
        ExpertCosts(),
        "allhands.parallel.expert:expert",
        _not_in_parts,
        "--ep",
        divides_model=True,
    ),
    "local": Entry(
        "local steps",
        LocalCosts(),
        "allhands.parallel.local:local_steps",
        _not_local,
        "--sync-every",
        packs=True,
        exact=False,
    ),
    "delayed": Entry(
        "data parallel, a step late",
        DelayedCosts(),
        "allhands.parallel.delayed:delayed",
        _not_late,
        "--sync-delay 1",
        packs=True,
        exact=False,
    ),
}
