"""Which files of weights a stage needs, and a model of which some are not there."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from tiny import in_files, write_model

from allhands.errors import ModelError
from allhands.model.fingerprints import fingerprint, fingerprints
from allhands.model.load import load_model
from allhands.model.reading import list_of_files
from allhands.model.stages import blocks_of_stages, cut
from allhands.model.weight_files import (
    INDEX_FILE,
    LIST_FILE,
    absent,
    all_bytes,
    names_by_file,
    needed,
    present,
    require_files,
)

FILES = [["layers.0.", "embed"], ["layers.1.", "layers.2."], ["layers.3.", "norm", "lm_head"]]


def written(directory: Path, *, tied: bool = False, bits: int | None = None) -> Path:
    return in_files(write_model(directory, layers=4, hidden=64, tied=tied, bits=bits), FILES)


def take_away(path: Path, *numbers: int) -> list[str]:
    """Leave a list of the files, and remove some."""
    files = present(path)
    content = {name: asdict(each) for name, each in list_of_files(files).items()}
    (path / LIST_FILE).write_text(json.dumps(content))
    for number in numbers:
        files[number].unlink()
    return [files[number].name for number in numbers]


@pytest.mark.parametrize(
    ("tied", "sizes", "expected"),
    [
        (False, [2, 2], [{1, 2}, {2, 3}]),
        (False, [1, 2, 1], [{1}, {2}, {3}]),
        (True, [1, 2, 1], [{1}, {2}, {1, 3}]),
        (False, [4], [{1, 2, 3}]),
    ],
)
def test_a_stage_needs_the_files_of_its_arrays(
    tmp_path: Path, tied: bool, sizes: list[int], expected: list[set[int]]
) -> None:
    path = written(tmp_path / "model", tied=tied)
    names = names_by_file(path)
    found = [
        {int(file[6:11]) for file in needed(names, [part])} for part in blocks_of_stages(sizes)
    ]
    assert found == expected
    # Independently: what mlx_lm's model, cut, reads of.
    index = json.loads((path / INDEX_FILE).read_text())["weight_map"]
    for part, files in zip(blocks_of_stages(sizes), expected, strict=True):
        model = load_model(str(path), lazy=True).model
        cut(model, [part])
        assert {int(index[name][6:11]) for name, _ in tree_flatten(model.parameters())} == files


def test_other_lists_than_that_of_blocks_are_not_taken_for_them() -> None:
    parts = blocks_of_stages([1, 1])
    names = {
        "a": [
            "language_model.model.layers.0.mlp.experts.0.w",
            "language_model.model.layers.0.mlp.experts.1.w",
        ],
        "b": [f"language_model.model.layers.1.mlp.experts.{number}.w" for number in range(2)],
        "c": ["vision.blocks.0.w", "vision.blocks.1.w", "language_model.model.embed_tokens.weight"],
        "d": [
            "language_model.lm_head.weight",
            "language_model.model.layers.2.of_another_purpose.w",
        ],
    }
    assert [sorted(needed(names, [part])) for part in parts] == [["a", "c"], ["b", "c", "d"]]
    with pytest.raises(ModelError) as caught:
        needed({"a": ["one", "two"]}, parts)
    assert caught.value.code == "blocks-not-found"


@pytest.mark.parametrize("bits", [None, 4])
def test_a_part_is_loaded_as_of_the_whole_and_known_as_it(tmp_path: Path, bits: int | None) -> None:
    path = written(tmp_path / "model", bits=bits)
    whole = load_model(str(path))
    size, print_of_whole, each = all_bytes(path), fingerprint(path), fingerprints(path)
    (gone,) = take_away(path, 2)
    assert list(absent(path)) == [gone]
    assert (all_bytes(path), fingerprint(path), fingerprints(path)) == (size, print_of_whole, each)

    first, last = blocks_of_stages([2, 2])
    part = load_model(str(path), lazy=True)
    require_files(path, [first])
    with pytest.raises(ModelError) as caught:
        require_files(path, [last])
    assert all(
        word in str(caught.value) for word in (gone, "block 3", "the head", "cluster sync --stages")
    )
    cut(part.model, [first])
    for number in (0, 1):
        theirs, ours = (
            dict(tree_flatten(model.layers[number].parameters()))
            for model in (whole.model, part.model)
        )
        assert theirs.keys() == ours.keys()
        assert all(mx.array_equal(theirs[name], ours[name]).item() for name in theirs)
    # Computing with what is not there is seen at once.
    unseen = load_model(str(path), lazy=True).model(mx.array([[1, 2]]))
    assert mx.isnan(unseen).all().item()
    with pytest.raises(ModelError, match=gone):
        load_model(str(path))


def test_a_list_of_another_model_is_not_believed(tmp_path: Path) -> None:
    path = written(tmp_path / "model")
    take_away(path)
    content = json.loads((path / LIST_FILE).read_text())
    (path / LIST_FILE).write_text(
        json.dumps({**content, "model-of-before.safetensors": content.popitem()[1]})
    )
    assert absent(path) == {}
    load_model(str(path))
    for text in ("{", "[]", '{"model-00001-of-00003.safetensors": {"bytes": -1}}'):
        (path / LIST_FILE).write_text(text)
        with pytest.raises(ModelError) as caught:
            absent(path)
        assert caught.value.code == "weights-unreadable"
