"""What a platform hands to its container, as options of ``allhands train``: hyperparameters, arguments, channels."""

from __future__ import annotations

import json
import re
import shutil
import tarfile
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import typer.main

from allhands.cli.options import option_function
from allhands.cli.parser import App, with_auto_resume
from allhands.config.aliases import canonical_flag
from allhands.config.schema import ALIASES, TrainConfig, build_config
from allhands.errors import AllhandsError, ConfigError, DataError, ModelError
from allhands.io.files import storage_error
from allhands.io.strict_json import without_repeats

MODEL_CHANNELS = ("model", "pretrained")
SPLITS = {
    **dict.fromkeys(("train", "training", "data"), "train"),
    **dict.fromkeys(("valid", "validation", "val", "dev"), "valid"),
    **dict.fromkeys(("test", "testing"), "test"),
}
# What SageMaker, its SDK and its tuner put beside a person's own hyperparameters.
_FOREIGN = re.compile(r"sagemaker_.*|_tuning_objective_metric")
_UNSET = ("", "none", "null")


# --- hyperparameters -----------------------------------------------------------------------------------


def hyperparameters(environ: Mapping[str, str], file: Path) -> dict[str, Any]:
    """The options in SageMaker's hyperparameters, by the names of the configuration's fields.

    From ``file``, whose values are all strings; or else ``SM_HPS`` or ``SM_USER_ARGS``, which only a toolkit sets.

    Raises:
        ConfigError: they cannot be read, or one is given twice.
    """
    if file.is_file():
        try:
            given = _object(file.read_text(encoding="utf-8"), str(file))
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot be read: {error}", where=str(file), hint="make it readable UTF-8") from None
    elif environ.get("SM_HPS"):
        given = _object(environ["SM_HPS"], "SM_HPS")
    else:
        given = _pairs(environ.get("SM_USER_ARGS") or "[]")
    result: dict[str, Any] = {}
    for name, value in given.items():
        if _FOREIGN.fullmatch(name):
            continue
        key = _key(name)
        if key in result:
            raise ConfigError(f"{key} is given twice, under two names", where=_place(name), hint="keep one of them")
        if (plain := plain_value(key, value)) is not None:
            result[key] = plain
    return result


def plain_value(key: str, value: Any) -> Any:
    """A value as the configuration takes it; ``None``: not given.

    A string may be JSON in itself, as SDKs write it: ``"\\"cosine\\""`` is cosine, ``"true"`` true, ``"1e-5"`` 0.00001.
    """
    if not isinstance(value, str):
        return value
    text = value.strip()
    if text[:1] == text[-1:] == '"' and len(text) > 1:
        try:
            text = str(json.loads(text))
        except ValueError:
            return value
    return None if text.lower() in _UNSET and _may_be_unset(key) else text


def _may_be_unset(key: str) -> bool:
    field = TrainConfig.model_fields.get(key)
    return field is not None and type(None) in typing.get_args(field.annotation)


def _key(name: str) -> str:
    key = name.strip().lstrip("-").replace("-", "_")
    return ALIASES.get(key, key)


def _place(name: str) -> str:
    return f"hyperparameter {name}"


def _object(text: str, source: str) -> dict[str, Any]:
    try:
        content = json.loads(text, object_pairs_hook=without_repeats)
    except json.JSONDecodeError as error:
        raise ConfigError(f"it is not JSON: {error}", where=source, hint="write a JSON object") from None
    except ValueError as error:
        raise ConfigError(str(error), where=source, hint="remove the other") from None
    if not isinstance(content, dict):
        raise ConfigError("it is not a JSON object", where=source, hint='write {"iters": "100", ...}')
    return cast(dict[str, Any], content)


def _pairs(text: str) -> dict[str, Any]:
    """``["--iters", "100", "--mask-prompt"]`` as names and values; a name alone is true.

    Raises:
        ConfigError: it is something else.
    """
    try:
        words = json.loads(text)
    except ValueError:
        words = None
    if not isinstance(words, list) or not all(isinstance(word, str) for word in cast(list[Any], words)):
        raise ConfigError("it is not a JSON list of words", where="SM_USER_ARGS", hint="unset it")
    found: dict[str, Any] = {}
    open_name: str | None = None  # an option whose value may follow
    for word in cast(list[str], words):
        if word.startswith("--"):
            name, _, value = word.partition("=")
            if name in found:
                raise ConfigError(f"{name} is given twice", where="SM_USER_ARGS", hint="keep one of them")
            found[name] = value if "=" in word else "true"
            open_name = None if "=" in word else name
        elif open_name is None:
            raise ConfigError(f"{word!r} belongs to no option", where="SM_USER_ARGS", hint="give --name value")
        else:
            found[open_name] = word
            open_name = None
    return found


# --- arguments -----------------------------------------------------------------------------------------


def parse_arguments(arguments: Sequence[str]) -> dict[str, Any]:
    """The options in arguments for ``allhands train``, by the same parser.

    Raises:
        ConfigError: they are not understood.
    """
    given: dict[str, Any] = {}
    app = App(rich_markup_mode=None, context_settings={"token_normalize_func": canonical_flag})
    app.command()(option_function(given.update, "Train."))
    command: Any = typer.main.get_command(app)
    try:
        command.main(args=with_auto_resume(list(arguments)), prog_name="allhands train", standalone_mode=False)
    except AllhandsError:
        raise
    except Exception as error:
        message = getattr(error, "format_message", None)
        if message is None:
            raise
        raise ConfigError(str(message()), where="arguments", hint="see allhands train --help") from None
    return given


def merged(arguments: Mapping[str, Any], hyper: Mapping[str, Any]) -> TrainConfig:
    """What a person has asked for: arguments win over hyperparameters, both over the YAML file that they name.

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
            raise ConfigError(error.message, where=_place(name), hint=error.hint) from None
        raise


def as_flags(config: TrainConfig) -> list[str]:
    """The arguments of ``allhands train`` that give this configuration, as far as it was given."""
    flags: list[str] = []
    for name, value in config.model_dump(mode="json", exclude_unset=True).items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            flags.append(f"--{'' if value else 'no-'}{flag}")
        elif value is not None:
            flags.append(f"--{flag}={value if isinstance(value, str) else json.dumps(value)}")
    return flags


# --- channels ------------------------------------------------------------------------------------------


def data_of(channels: Mapping[str, Path], workspace: Path) -> tuple[Path | None, list[str]]:
    """A directory with ``train.jsonl`` and its like, made of data channels; and what a person should know.

    One channel may hold such files itself. Otherwise each channel is a split, named for it, and its ``.jsonl`` files
    are joined in the order of their names. ``None``: there is no data channel.

    Raises:
        DataError: a channel has nothing that can be trained on.
        StorageError: joined files cannot be written.
    """
    by_split, notes = dict[str, Path](), list[str]()
    data = {name: path for name, path in sorted(channels.items()) if name.lower() not in MODEL_CHANNELS}
    for name, path in data.items():
        split = SPLITS.get(name.lower())
        if split is None and len(data) > 1:
            notes.append(f"channel {name} is not used: it is none of {', '.join(SPLITS)}, model")
        elif (split := split or "train") in by_split:
            raise DataError(f"two channels are {split}", where=str(path), hint="keep one of them")
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
    """The data files of a channel: of its directory, the one that it is, or of a pattern such as ``train-*``."""
    if path.is_dir():
        found = sorted(one for one in path.iterdir() if one.is_file() and not one.name.startswith("."))
        own = [one for one in found if one.name == f"{split}.jsonl"]
        found = own or found
    else:
        found = [path] if path.is_file() else sorted(path.parent.glob(path.name)) if "*" in path.name else []
    if not found:
        raise DataError(f"the {split} channel is empty", where=str(path), hint="put .jsonl files into it")
    for one in found:
        if one.suffix != ".jsonl":
            hint = "bring it into shape first: allhands data prepare FILE --out DIR, and give that directory"
            raise DataError("training reads .jsonl files", where=str(one), hint=hint)
    return found


def _join(files: Sequence[Path], target: Path) -> None:
    if len(files) == 1:
        target.symlink_to(files[0].absolute())
        return
    try:
        with target.open("wb") as out:
            for file in files:
                with file.open("rb") as source:
                    shutil.copyfileobj(source, out)
                    if source.tell() and not _ends_line(file):
                        out.write(b"\n")
    except OSError as error:
        raise storage_error(target, error) from None


def _ends_line(file: Path) -> bool:
    with file.open("rb") as source:
        source.seek(-1, 2)
        return source.read(1) == b"\n"


def model_of(channels: Mapping[str, Path], workspace: Path) -> Path | None:
    """The model directory in the channel for it, also within a ``.tar.gz`` or a directory; ``None``: no such channel.

    Raises:
        ModelError: the channel has no model.
    """
    channel = next((path for name, path in channels.items() if name.lower() in MODEL_CHANNELS), None)
    if channel is None:
        return None
    archives = [channel] if channel.is_file() else sorted(channel.glob("*.tar.gz"))
    places = [channel, *sorted(path for path in channel.glob("*") if path.is_dir())]
    if len(archives) == 1 and not (channel / "config.json").exists():
        places = [inner := workspace / "model"]
        _unpack(archives[0], inner)
        places += sorted(path for path in inner.glob("*") if path.is_dir())
    found = [place for place in places if (place / "config.json").is_file()]
    if len(found) != 1:
        what = "no model (a directory with config.json)" if not found else "several models"
        hint = "give the channel one model directory, or its .tar.gz; an adapter alone is none"
        raise ModelError(f"the model channel holds {what}", where=str(channel), hint=hint)
    return found[0]


def _unpack(archive: Path, target: Path) -> None:
    try:
        with tarfile.open(archive) as content:
            content.extractall(target, filter="data")  # refuses paths and links that lead out of it
    except (OSError, tarfile.TarError) as error:
        hint = "make it again: tar -czf model.tar.gz -C DIRECTORY ."
        raise ModelError(f"cannot be unpacked: {error}", where=str(archive), hint=hint) from None
