"""Hyperparameters and arguments as options of ``allhands train``, and options as arguments."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from allhands.config.problems import canonical_key
from allhands.config.schema import TrainConfig, build_config
from allhands.errors import ConfigError
from allhands.io.strict_json import without_repeats

# Names that SageMaker, its SDK and its tuner add to the user's hyperparameters.
_FOREIGN = re.compile(r"sagemaker_.*|_tuning_objective_metric")


def hyperparameters(environ: Mapping[str, str], file: Path) -> dict[str, Any]:
    """Return the options in SageMaker's hyperparameters, by the configuration's names.

    They come from ``file``, whose values are all strings, or else from the variables ``SM_HPS`` or
    ``SM_USER_ARGS`` of SageMaker's toolkit.

    Raises:
        ConfigError: the hyperparameters cannot be read, or an option is given twice.
    """
    source = str(file) if file.is_file() else "SM_HPS" if environ.get("SM_HPS") else "SM_USER_ARGS"
    try:
        text = file.read_text("utf-8") if file.is_file() else environ.get(source) or "[]"
        given: Any = json.loads(text, object_pairs_hook=without_repeats)
        if source == "SM_USER_ARGS":
            given = _pairs(given)
        elif not isinstance(given, dict):
            raise ValueError('no JSON object, such as {"iters": "100"}')
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"the hyperparameters cannot be read: {error}",
            code="hyperparameters-unreadable",
            where=source,
            hint="write JSON in UTF-8, with each name once",
        ) from None
    result: dict[str, Any] = {}
    for name, value in cast("dict[str, Any]", given).items():
        key = canonical_key(name.strip().lstrip("-"))
        if key in result:
            raise ConfigError(
                f"{key} is given twice, under two names",
                code="option-given-twice",
                where=f"hyperparameter {name}",
                hint="keep one of the names",
            )
        if not _FOREIGN.fullmatch(name) and (plain := plain_value(key, value)) is not None:
            result[key] = plain
    return result


def _pairs(words: Any) -> dict[str, str]:
    """Return words such as ``["--iters", "100", "--mask-prompt"]`` as names and values.

    A name without a value gets "true".

    Raises:
        ValueError: the list has another form.
    """
    found: dict[str, str] = {}
    name = ""  # an option whose value may follow
    if not isinstance(words, list):
        raise ValueError("no JSON list of words")
    for word in cast("list[Any]", words):
        if not isinstance(word, str) or not (name or word.startswith("--")):
            raise ValueError(f"{word!r} in place of --name, value, ...")
        if word.startswith("--"):
            name, sign, value = word.partition("=")
            if name in found:
                raise ValueError(f"{name} is given twice")
            found[name] = value if sign else "true"
            name = "" if sign else name
        else:
            found[name], name = word, ""
    return found


def plain_value(key: str, value: Any) -> Any:
    """Return a value for the configuration; ``None``: the option is not given.

    SDKs write a string as JSON: ``"\\"cosine\\""`` is cosine.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text.startswith('"'):
        with suppress(ValueError):
            text = str(json.loads(text))
    field = TrainConfig.model_fields.get(key)
    optional = field is not None and type(None) in typing.get_args(field.annotation)
    return None if optional and text.lower() in ("", "none", "null") else text


def merged(arguments: Mapping[str, Any], hyper: Mapping[str, Any]) -> TrainConfig:
    """Return the given options: arguments win over hyperparameters, and both over the YAML file.

    Raises:
        ConfigError: an option is unknown or out of bounds.
    """
    values = {**hyper, **arguments}
    yaml_file = values.pop("config", None)
    try:
        return build_config(values, yaml_file)
    except ConfigError as error:
        name = (error.where or "").removeprefix("--").replace("-", "_")
        if name in hyper and name not in arguments:
            error.where = f"hyperparameter {name}"
        raise


def as_flags(config: TrainConfig) -> list[str]:
    """Return the arguments of ``allhands train`` that give the same configuration."""
    flags: list[str] = []
    for name, value in config.model_dump(mode="json", exclude_unset=True).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no-'}{flag}")
        elif value is not None:
            flags.append(f"--{flag}={value if isinstance(value, str) else json.dumps(value)}")
    return flags
