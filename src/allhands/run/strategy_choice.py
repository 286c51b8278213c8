"""The strategy that ``--strategy auto`` takes, and whether the one that was asked for can be had."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.nn as nn

from allhands.config.combinations import is_sharded
from allhands.config.schema import TrainConfig
from allhands.distributed.backend import Communicator
from allhands.distributed.capabilities import can
from allhands.distributed.codecs import CODECS, Codec, require_gain
from allhands.errors import ConfigError
from allhands.model.adapters import trained_weights
from allhands.parallel.registry import ELEMENTWISE, STRATEGIES, TrainingNeeds

# Trained numbers from which on the update takes a GPU longer than 0.5 ms.
_WORTH_IT = 1 << 26
_COMPILED = "add --compile on"
_OTHERS = f"leave it out, or take one of {', '.join(ELEMENTWISE)}"


def chosen_strategy(
    config: TrainConfig, communicator: Communicator, model: nn.Module, wanted: TrainingNeeds
) -> str:
    """Return the name of the strategy by which ranks divide the work.

    Over NCCL a divided optimizer costs nothing, since a sum over ranks is made of its parts anyway.
    Over the other back-ends weights travel besides, which only who has too little memory will want.

    Raises:
        ConfigError: the strategy that was asked for does not fit this training.
    """
    name, where = _asked_for(config)
    hint = _hint(name, wanted)
    if config.sync_every > 1:
        name, where, hint = (
            "local",
            f"--sync-every {config.sync_every}",
            "leave it out" + ", or --no-master-weights in its place" * wanted.masters,
        )
    elif config.sync_delay:
        name, where, hint = (
            "delayed",
            f"--sync-delay {config.sync_delay}",
            "leave one of the two out",
        )
    elif communicator.size == 1:
        return "data"
    elif name == "auto":
        trained = sum(array.size for array in trained_weights(model).values())
        divided = not STRATEGIES["zero1"].unfit(wanted) and worth_dividing(
            communicator, trained, wanted.masters
        )
        return "zero1" if divided else "data"
    _require_fit(((name, where), *_beside(config)), wanted, hint)
    return name


def require_fit(config: TrainConfig, wanted: TrainingNeeds) -> None:
    """Refuse ways of dividing a model, as :func:`chosen_strategy` does, that do not fit this
    training.

    Raises:
        ConfigError: one does not.
    """
    asked = _asked_for(config)
    hint = _hint(asked[0], wanted)
    _require_fit((asked, *_beside(config)) if asked[0] != "auto" else (), wanted, hint)


def _hint(name: str, wanted: TrainingNeeds) -> str:
    """Return what to do if a strategy does not fit."""
    return _COMPILED if wanted.cpu_native and name == "zero1" else _OTHERS


def _require_fit(asked: Iterable[tuple[str, str]], wanted: TrainingNeeds, hint: str) -> None:
    for name, flag in asked:
        if problem := STRATEGIES[name].unfit(wanted):
            raise ConfigError(problem, code="strategy-unsuitable", where=flag, hint=hint)


def _asked_for(config: TrainConfig) -> tuple[str, str]:
    """The strategy that was asked for, and the flag that did."""
    if is_sharded(config):
        return "fsdp", f"--strategy {config.strategy}"
    if config.strategy != "pipeline":
        if config.tp > 1:
            return "tensor", f"--tp {config.tp}"
        if config.ep > 1:
            return "expert", f"--ep {config.ep}"
    return config.strategy, f"--strategy {config.strategy}"


def _beside(config: TrainConfig) -> list[tuple[str, str]]:
    """The strategies whose way of dividing is taken besides, each with its flag."""
    found = [("tensor", f"--tp {config.tp}")] if config.tp > 1 else []
    if config.ep > 1 and config.tp == 1:
        found += [("expert", f"--ep {config.ep}")]
    return found + ([("fsdp", f"--dp-shard {config.dp_shard}")] if config.dp_shard else [])


def chosen_codec(
    config: TrainConfig, communicator: Communicator, model: nn.Module, strategy: str
) -> Codec | None:
    """Return the form in which gradients travel; ``None``: as they are, because nobody asked for
    another or nothing travels.

    Raises:
        ConfigError: what was asked for saves nothing here, or the strategy has no such thing.
    """
    if config.compress == "none" or communicator.size == 1:
        return None
    codec = CODECS[config.compress]
    if not STRATEGIES[strategy].packs:
        able = " or ".join(name for name, entry in STRATEGIES.items() if entry.packs)
        hint = f"leave it out, or take --strategy {able}"
        raise ConfigError(
            f"strategy {strategy} exchanges gradients as they are",
            code="strategy-unsuitable",
            where=f"--compress {codec.name}",
            hint=hint,
        )
    # What gains nothing travels as it is, which is refused where it is everything.
    item_bytes = max((array.dtype.size for array in trained_weights(model).values()), default=4)
    require_gain(codec, communicator.backend, communicator.size, item_bytes)
    return codec


def worth_dividing(communicator: Communicator, trained: int, masters: bool) -> bool:
    """True if ranks are faster if each updates a part of so many trained numbers.

    Without copies in float32 an update moves half as many bytes, and what a rank need not do takes
    no longer than what its exchange does besides (benchmarks/results/gpu_many-2026-11-22.md).
    """
    return (
        communicator.size > 1
        and can(communicator.backend, "overlap")
        and masters
        and trained >= _WORTH_IT
    )
