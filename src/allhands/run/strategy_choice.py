"""Choice of the strategy for ``--strategy auto``, and check of a requested one."""

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
_WITHOUT = "leave this strategy out"
_OTHERS = f"{_WITHOUT}, or take another --optimizer: {', '.join(ELEMENTWISE)}"


def chosen_strategy(
    config: TrainConfig, communicator: Communicator, model: nn.Module, wanted: TrainingNeeds
) -> str:
    """Return the name of the strategy by which ranks divide the work.

    Over NCCL a divided optimizer costs nothing, since an all-reduce consists of a reduce-scatter
    and an all-gather anyway. Over the other back-ends it sends the weights in addition, which pays
    only if memory is short.

    Raises:
        ConfigError: the requested strategy does not fit this training.
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
    """Refuse a requested strategy that does not fit this training, as :func:`chosen_strategy` does.

    Raises:
        ConfigError: a requested way of dividing the model does not fit.
    """
    asked = _asked_for(config)
    hint = _hint(asked[0], wanted)
    _require_fit((asked, *_beside(config)) if asked[0] != "auto" else (), wanted, hint)


def _hint(name: str, wanted: TrainingNeeds) -> str:
    """Return what to do if a strategy does not fit."""
    if wanted.optimizer not in ELEMENTWISE:
        return _OTHERS
    return _COMPILED if wanted.cpu_native and name == "zero1" else _WITHOUT


def _require_fit(asked: Iterable[tuple[str, str]], wanted: TrainingNeeds, hint: str) -> None:
    for name, flag in asked:
        if problem := STRATEGIES[name].unfit(wanted):
            raise ConfigError(problem, code="strategy-unsuitable", where=flag, hint=hint)


def _asked_for(config: TrainConfig) -> tuple[str, str]:
    """Return the requested strategy and its flag."""
    if is_sharded(config):
        return "fsdp", f"--strategy {config.strategy}"
    if config.strategy != "pipeline":
        if config.tp > 1:
            return "tensor", f"--tp {config.tp}"
        if config.ep > 1:
            return "expert", f"--ep {config.ep}"
    return config.strategy, f"--strategy {config.strategy}"


def _beside(config: TrainConfig) -> list[tuple[str, str]]:
    """Return further requested ways of dividing the model, each with its flag."""
    found = [("tensor", f"--tp {config.tp}")] if config.tp > 1 else []
    if config.ep > 1 and config.tp == 1:
        found += [("expert", f"--ep {config.ep}")]
    return found + ([("fsdp", f"--dp-shard {config.dp_shard}")] if config.dp_shard else [])


def chosen_codec(
    config: TrainConfig, communicator: Communicator, model: nn.Module, strategy: str
) -> Codec | None:
    """Return the codec that compresses gradients; ``None`` if none is requested or nothing is sent.

    Raises:
        ConfigError: the codec saves nothing here, or the strategy cannot compress.
    """
    if config.compress == "none" or communicator.size == 1:
        return None
    codec = CODECS[config.compress]
    if not STRATEGIES[strategy].packs:
        able = [each.flags or f"--strategy {key}" for key, each in STRATEGIES.items() if each.packs]
        hint = f"leave it out, or take {' or '.join(able)}"
        raise ConfigError(
            f"strategy {strategy} exchanges gradients as they are",
            code="strategy-unsuitable",
            where=f"--compress {codec.name}",
            hint=hint,
        )
    # Arrays that gain nothing are sent as they are. If that is true for all, the codec is refused.
    item_bytes = max((array.dtype.size for array in trained_weights(model).values()), default=4)
    require_gain(codec, communicator.backend, communicator.size, item_bytes)
    return codec


def worth_dividing(communicator: Communicator, trained: int, masters: bool) -> bool:
    """Return True if a step is faster if each rank updates only a part of the trained numbers.

    Without float32 copies (``masters``) an update moves half as many bytes, and the saved time is
    no longer than the exchange takes (benchmarks/results/gpu_many-2026-11-22.md).
    """
    return (
        communicator.size > 1
        and can(communicator.backend, "overlap")
        and masters
        and trained >= _WORTH_IT
    )
