"""Data and model of a container, from the channels (directories) of its platform."""

from __future__ import annotations

import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from allhands.data.rows import NAMES_OF_SPLITS
from allhands.errors import DataError, ModelError
from allhands.io.files import storage_error

MODEL_CHANNELS = ("model", "pretrained")
SPLITS = {**NAMES_OF_SPLITS, "data": "train"}


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
    only, *others = by_split.values()
    if not others and (only / "train.jsonl").is_file():
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
    if (own := path / f"{split}.jsonl").is_file():
        return [own]
    found = sorted(
        filter(Path.is_file, path.glob("[!.]*")) if path.is_dir() else path.parent.glob(path.name)
    )
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
        for pattern in ("config.json", "*/config.json")
        for one in place.glob(pattern)
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
