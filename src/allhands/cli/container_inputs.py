"""Platform inputs as options of ``allhands train``: hyperparameters, arguments, data and model
channels.
"""

from __future__ import annotations

import json
import re
import tarfile
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import typer.main

from allhands.cli.options import option_function
from allhands.cli.parser import App, with_auto_resume
from allhands.config.aliases import canonical_flag
from allhands.config.problems import canonical_key
from allhands.config.schema import TrainConfig, build_config
from allhands.data.rows import NAMES_OF_SPLITS
from allhands.errors import ConfigError, DataError, ModelError
from allhands.io.files import storage_error
from allhands.io.strict_json import without_repeats

MODEL_CHANNELS = ("model", "pretrained")
SPLITS = {**NAMES_OF_SPLITS, "data": "train"}
# Names that SageMaker, its SDK and its tuner add to the user's hyperparameters.
_FOREIGN = re.compile(r"sagemaker_.*|_tuning_objective_metric")


# --- hyperparameters and arguments ----------------------------------------------------------------


def hyperparameters(environ: Mapping[str, str], file: Path) -> dict[str, Any]:
    """Return the options in SageMaker's hyperparameters, by the configuration's names.

    They come from ``file``, whose values are all strings, or else from the variables ``SM_HPS`` or
    ``SM_USER_ARGS`` of SageMaker's toolkit.

    Raises:
        ConfigError: the hyperparameters cannot be read, or an option is given twice.
    """
    source = str(file) if file.is_file() else "SM_HPS" if environ.get("SM_HPS") else "SM_USER_ARGS"
    try:
        text = (
            file.read_text(encoding="utf-8") if source == str(file) else environ.get(source) or "[]"
        )
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
    for name, value in cast(dict[str, Any], given).items():
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
    for word in cast(list[object], words):
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
    if text[:1] == text[-1:] == '"' and len(text) > 1:
        try:
            text = str(json.loads(text))
        except ValueError:
            return value
    field = TrainConfig.model_fields.get(key)
    optional = field is not None and type(None) in typing.get_args(field.annotation)
    return None if optional and text.lower() in ("", "none", "null") else text


def parse_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the options in ``arguments``, with the parser of ``allhands train``.

    Raises:
        ConfigError: an argument is not understood.
    """
    given: dict[str, Any] = {}
    app = App(rich_markup_mode=None, context_settings={"token_normalize_func": canonical_flag})
    app.command()(option_function(given.update, "Train."))
    command: Any = typer.main.get_command(app)
    command.main(
        args=with_auto_resume(list(arguments)),
        prog_name="allhands train",
        standalone_mode=False,
    )
    return given


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
            raise ConfigError(
                error.message, code=error.code, where=f"hyperparameter {name}", hint=error.hint
            ) from None
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


# --- channels -------------------------------------------------------------------------------------


def data_of(channels: Mapping[str, Path], workspace: Path) -> tuple[Path | None, list[str]]:
    """Return the directory with the data channels' data, ``None`` without one; and notes.

    A single channel with ``train.jsonl`` is that directory. Otherwise each channel is the split
    that it is named for, and its ``.jsonl`` files are joined in the order of their names.

    Raises:
        DataError: a channel has no data to train on.
        StorageError: joined files cannot be written.
    """
    by_split, notes = dict[str, Path](), list[str]()
    data = {
        name: path for name, path in sorted(channels.items()) if name.lower() not in MODEL_CHANNELS
    }
    for name, path in data.items():
        split = SPLITS.get(name.lower(), "train" if len(data) == 1 else "")
        if not split:
            notes.append(f"channel {name} is not used: it is none of {', '.join(SPLITS)}, model")
        elif split in by_split:
            raise DataError(
                f"two channels are {split}",
                code="split-given-twice",
                where=str(path),
                hint="keep one of them",
            )
        else:
            by_split[split] = path
    if not by_split:
        return None, notes
    only = next(iter(by_split.values()))
    if len(by_split) == 1 and (only / "train.jsonl").is_file():
        return only, notes
    joined = workspace / "data"
    joined.mkdir()
    for split, path in by_split.items():
        _join(_jsonl_files(path, split), joined / f"{split}.jsonl")
    return joined, notes


def _jsonl_files(path: Path, split: str) -> list[Path]:
    """Return the data files of a channel: a directory, a file, or a pattern such as ``train-*``.

    Raises:
        DataError: the channel has no file, or a file that is no .jsonl.
    """
    if path.is_dir():
        found = sorted(
            one for one in path.iterdir() if one.is_file() and not one.name.startswith(".")
        )
        found = [one for one in found if one.name == f"{split}.jsonl"] or found
    else:
        found = sorted(path.parent.glob(path.name))
    if not found:
        raise DataError(
            f"the {split} channel is empty",
            code="split-empty",
            where=str(path),
            hint="put .jsonl files into it",
        )
    for one in found:
        if one.suffix != ".jsonl":
            raise DataError(
                "training reads .jsonl files",
                code="file-type-unsupported",
                where=str(one),
                hint="convert it first: allhands data prepare FILE --out DIR, and give that directory",
            )
    return found


def _join(files: Sequence[Path], target: Path) -> None:
    if len(files) == 1:
        target.symlink_to(files[0].absolute())
        return
    try:
        with target.open("wb") as out:
            for file in files:
                with file.open("rb") as lines:
                    out.writelines(line if line.endswith(b"\n") else line + b"\n" for line in lines)
    except OSError as error:
        raise storage_error(target, error) from None


def model_of(channels: Mapping[str, Path], workspace: Path) -> Path | None:
    """Return the model directory in the model channel, also inside a ``.tar.gz`` or a directory;
    ``None``: no such channel.

    Raises:
        ModelError: the channel has no model.
    """
    channel = next(
        (path for name, path in channels.items() if name.lower() in MODEL_CHANNELS), None
    )
    if channel is None:
        return None
    place, archives = channel, [channel] if channel.is_file() else sorted(channel.glob("*.tar.gz"))
    if len(archives) == 1 and not (channel / "config.json").exists():
        place = workspace / "model"
        try:
            with tarfile.open(archives[0]) as content:
                content.extractall(
                    place, filter="data"
                )  # the filter refuses paths and links that lead out of ``place``
        except (OSError, tarfile.TarError) as error:
            raise ModelError(
                f"cannot be unpacked: {error}",
                code="archive-damaged",
                where=str(archives[0]),
                hint="make it again: tar -czf model.tar.gz -C DIRECTORY .",
            ) from None
    found = [
        one.parent
        for one in (place / "config.json", *sorted(place.glob("*/config.json")))
        if one.is_file()
    ]
    if len(found) != 1:
        what = "no model (a directory with config.json)" if not found else "several models"
        raise ModelError(
            f"the model channel holds {what}",
            code="model-channel-ambiguous",
            where=str(channel),
            hint="give the channel one model directory, or its .tar.gz; an adapter alone is no model",
        )
    return found[0]
