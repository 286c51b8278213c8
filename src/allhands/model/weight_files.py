"""Weight files of a model; a computer may have only the files of its own stages.

In that case a list of all files lies beside them, with names, sizes and hashes, and with names,
shapes and types of the arrays. With the list the model is built as the whole one, and has the same
fingerprint. Arrays of absent files are NaN, so a computation with them cannot go unnoticed.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from allhands.errors import ModelError
from allhands.io.formatting import counted
from allhands.io.strict_json import Check, integer, is_text, list_of, object_of

if TYPE_CHECKING:
    from allhands.model.stages import Blocks

LIST_FILE = "allhands-weights.json"
PATTERN = "model*.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_NUMBER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_FIRST = ("embed", "wte")  # parts of the names of embeddings
_HEADS = ("lm_head", "embed_out", "output.weight", "output.scales")
_EMBEDDING, _HEAD = "the embedding", "the final norm and the head"


@dataclass(frozen=True)
class WeightFile:
    """Facts about a weight file, which may be absent.

    Attributes:
        bytes: size of the file.
        blocks: SHA-256 of each block of the file, see :mod:`allhands.model.fingerprints`.
        arrays: for each array its type, as MLX names it, followed by its shape.
    """

    bytes: int
    blocks: list[str]
    arrays: dict[str, list[Any]]


_SIZE = integer(0, 1 << 60)
_LISTED: Mapping[str, Check] = {
    "bytes": _SIZE,
    "blocks": list_of(is_text),
    "arrays": lambda value: isinstance(value, dict),
}


def present(path: Path) -> list[Path]:
    """Return the files of weights that are in the directory ``path``, by name."""
    return sorted(path.glob(PATTERN))


def is_weights(path: Path) -> bool:
    """Return True for a file of weights that MLX reads, by its name."""
    return path.suffix in (".safetensors", ".npz", ".gguf") and path.is_file()


def is_model(path: Path) -> bool:
    """Return True if a directory holds a model: its description, and weights."""
    return (path / "config.json").is_file() and bool(present(path))


def absent(path: Path) -> dict[str, WeightFile]:
    """Return the model's files that are missing in the directory ``path``, by name, from its list.

    Raises:
        ModelError: the list cannot be read.
    """
    file = path / LIST_FILE
    if not file.is_file():
        return {}
    here = {each.name for each in present(path)}
    named = indexed(path)  # names in the present model: the list may be an older model's
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if not all(object_of(_LISTED)(each) for each in content.values()):
            raise ValueError
        return {
            name: WeightFile(**each)
            for name, each in sorted(content.items())
            if name in named - here
        }
    except (ValueError, TypeError, AttributeError, OSError) as error:
        hint = "remove it, and bring the model again: allhands cluster sync --stages"
        raise ModelError(
            "the list of the model's files cannot be read",
            code="weights-unreadable",
            where=str(file),
            hint=hint,
        ) from error


def indexed(path: Path) -> set[str]:
    """Return the names of the weight files in the index; empty if there is no index.

    Raises:
        ModelError: the index cannot be read.
    """
    index = path / INDEX_FILE
    if not index.is_file():
        return set()
    try:
        return set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            "the index cannot be read",
            code="weights-unreadable",
            where=str(index),
            hint="fetch the model again",
        ) from error


def all_bytes(path: Path) -> int:
    """Return the bytes of all weight files of the model, absent ones included."""
    return sum(file.stat().st_size for file in present(path)) + sum(
        each.bytes for each in absent(path).values()
    )


def names_in(file: Path) -> list[str]:
    """Return the names of a file's arrays.

    Raises:
        ModelError: the file cannot be read.
    """
    try:
        with safe_open(file, framework="numpy") as opened:
            return list(opened.keys())
    except (OSError, SafetensorError) as error:
        raise ModelError(
            "the file of weights is torn",
            code="weights-torn",
            where=str(file),
            hint="fetch the model again",
        ) from error


# --- which files a stage needs --------------------------------------------------------------------


def names_by_file(path: Path) -> dict[str, list[str]]:
    """Return the names of the arrays in each file of the model, absent files included."""
    found = {file.name: names_in(file) for file in present(path)}
    return found | {name: list(each.arrays) for name, each in absent(path).items()}


def needed(names: Mapping[str, Collection[str]], parts: Sequence[Blocks]) -> dict[str, list[str]]:
    """Return the files that the stages ``parts`` need, each with the needed contents in words.

    The embedding belongs to the first stage, and to the last stage too if no other array is the
    head. Other arrays outside the blocks belong to the last stage.

    Args:
        names: result of :func:`names_by_file`.

    Raises:
        ModelError: the arrays of the blocks are not found by their names.
    """
    every = list(chain(*names.values()))
    count = parts[0].count
    prefix = _prefix_of_blocks(every, count)
    tied = not any(head in name for name in every for head in _HEADS)
    mine = set[int | str]().union(*(part.places for part in parts))
    if any(part.needs_embedding(tied=tied) for part in parts):
        mine.add(_EMBEDDING)
    if any(part.is_last for part in parts):
        mine.add(_HEAD)

    def part_of(name: str) -> int | str:
        before, number = _split(name)
        if before == prefix and number is not None and number < count:
            return number
        return _EMBEDDING if any(word in name for word in _FIRST) else _HEAD

    found = {file: {part_of(name) for name in inside} & mine for file, inside in names.items()}
    return {file: _words(what) for file, what in found.items() if what}


def _split(name: str) -> tuple[str, int | None]:
    """Return the text before the first number of a name, and that number."""
    match = _NUMBER.search(name)
    return (name, None) if match is None else (name[: match.start(1)], int(match.group(1)))


def _prefix_of_blocks(names: Iterable[str], count: int) -> str:
    """Return the prefix of the blocks' names.

    Of all prefixes that are followed by the numbers of all blocks, it is that with most arrays.

    Raises:
        ModelError: there is no such prefix.
    """
    numbers: defaultdict[str, list[int]] = defaultdict(list)
    for name in names:
        before, number = _split(name)
        if number is not None:
            numbers[before].append(number)
    complete = [before for before, found in numbers.items() if set(range(count)) <= set(found)]
    if not complete:
        raise ModelError(
            f"the arrays of the model's {counted(count, 'block')} are not found by their names",
            code="blocks-not-found",
            hint="bring all files to every computer: allhands cluster sync without --stages",
        )
    return max(complete, key=lambda before: len(numbers[before]))


def _words(what: set[int | str]) -> list[str]:
    numbers = sorted(each for each in what if isinstance(each, int))
    texts = sorted(each for each in what if isinstance(each, str))
    if not numbers:
        return texts
    whole = numbers == list(range(numbers[0], numbers[-1] + 1)) and len(numbers) > 1
    told = f"{numbers[0]} to {numbers[-1]}" if whole else ", ".join(map(str, numbers))
    return [f"block{'s' * (len(numbers) > 1)} {told}", *texts]


def require_files(path: Path, parts: Sequence[Blocks]) -> None:
    """Refuse stages if a file that they need is not on this computer.

    Raises:
        ModelError: a file is missing.
    """
    lacking = absent(path)
    if not lacking:
        return
    lines = needed(names_by_file(path), parts)
    told = [f"{name} ({', '.join(lines[name])})" for name in sorted(lines) if name in lacking]
    if told:
        raise ModelError(
            f"weights that this rank's stages need are not on this computer: {'; '.join(told)}",
            code="stage-weights-missing",
            where=str(path),
            hint="allhands cluster sync --stages, with this run's --hostfile, --model and --pp-split, brings them",
        )
