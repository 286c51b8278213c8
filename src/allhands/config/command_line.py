"""A configuration as the command line that gives it."""

from __future__ import annotations

import json
import shlex

from allhands.config.schema import TrainConfig


def arguments(config: TrainConfig) -> list[str]:
    """Return the command-line arguments that give ``config``."""
    # The configuration file is left out. If it were read again, it would undo flags that have set
    # an option back to its default.
    given = config.model_dump(mode="json", exclude_defaults=True, exclude={"config"})
    result = ["train"]
    for name, value in given.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            result.append(flag if value else f"--no-{flag[2:]}")
        else:
            result += [flag, json.dumps(value) if isinstance(value, dict | list) else str(value)]
    return result


def command_line(config: TrainConfig) -> str:
    """Return the command line that gives ``config``, quoted for a shell."""
    return shlex.join(["allhands", *arguments(config)])
