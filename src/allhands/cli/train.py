"""``allhands train`` and ``allhands pretrain``: one process, several local ones, or a rank of another
launcher.
"""

from __future__ import annotations

from typing import Any

from allhands.cluster.training import checked, recognised, start
from allhands.config.schema import TrainConfig, build_config
from allhands.errors import ConfigError


def train(flags: dict[str, Any], kind: type[TrainConfig] = TrainConfig) -> int:
    """Run the training that ``flags`` and their YAML file describe; return the exit code.

    Args:
        kind: class of the options.

    Raises:
        AllhandsError: an option is invalid, or the training failed in this process.
    """
    with recognised() as launch:
        config = checked(_config_of(flags, kind), launch)
    return start(config, launch)


def _config_of(flags: dict[str, Any], kind: type[TrainConfig]) -> TrainConfig:
    """Build the configuration; it trains by default unless it asks for a test.

    Raises:
        ConfigError: the configuration is invalid, or there is nothing to do.
    """
    config = build_config(flags, flags.get("config"), kind)
    if config.train or config.test:
        return config
    if "train" in config.model_fields_set:
        raise ConfigError(
            "there is nothing to do",
            code="nothing-to-do",
            where="--no-train",
            hint="leave it out to train, or add --test to evaluate what was trained",
        )
    return config.model_copy(update={"train": True})  # the default of this command
