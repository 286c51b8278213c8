"""What ``--resume`` says of other settings, shapes and tokenizers; what is the same in other words
is no change.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny import write_tokenizer

from allhands.checkpoints.settings import check_contents, check_settings
from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import build_config
from allhands.errors import AllhandsError, ConfigError, DataError, ModelError
from allhands.model.load import load_bare_tokenizer

GIVEN = {
    "train": True,
    "tokenizer": "t",
    "data": "d",
    "shape": "llama-15m",
    "layers": 2,
    "max_seq_length": 64,
}


def pretraining(**options: Any) -> PretrainConfig:
    return build_config({**GIVEN, **options}, kind=PretrainConfig)


def checkpoint(config: PretrainConfig) -> Any:
    state = {
        "config": config.model_dump(mode="json"),
        "model": {"path": "old-tokenizer", "fingerprint": "a"},
        "data": {"train": "x", "valid": None},
    }
    return SimpleNamespace(path=Path("run/step-6"), state=state)


@pytest.mark.parametrize(
    "same",
    [
        {"rope_theta": 10000.0},
        {"heads": 6, "kv_heads": 6, "head_dim": 48, "dims": 288, "tied": True, "experts": 0},
        {"vocabulary": 320},  # the model tells whether it is the tokenizer's
    ],
)
def test_what_is_so_by_default_may_be_given(same: dict[str, Any]) -> None:
    assert check_settings(checkpoint(pretraining()), pretraining(**same)) == []
    assert check_settings(checkpoint(pretraining(**same)), pretraining()) == []


@pytest.mark.parametrize(
    ("other", "where", "words"),
    [
        ({"rope_theta": 500000.0}, "--rope-theta", "made with 10000.0, this is 500000.0"),
        ({"layers": 3}, "--layers", "made with 2, this is 3"),
        ({"heads": 4}, "--heads", "made with 6, this is 4"),
        ({"dims": 144}, "--dims", "made with 288, this is 144"),
        ({"shape": "llama-42m"}, "--shape", 'made with "llama-15m", this is "llama-42m"'),
    ],
)
def test_of_another_shape_no_weights_are_offered(
    other: dict[str, Any], where: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        check_settings(checkpoint(pretraining()), pretraining(**other))
    assert caught.value.where == where
    assert "--resume-adapter-file" not in (caught.value.hint or "")
    assert "--adapter-path" in (caught.value.hint or "")


def test_of_the_same_shape_they_are() -> None:
    with pytest.raises(ConfigError, match="made with 0, this is 1") as caught:
        check_settings(checkpoint(pretraining()), pretraining(seed=1))
    assert "--resume-adapter-file run/step-6/adapters.safetensors" in (caught.value.hint or "")


def failure(kind: type[AllhandsError], model: str, data: str) -> AllhandsError:
    with pytest.raises(kind) as caught:
        check_contents(checkpoint(pretraining()), pretraining(), model.__eq__, {"train": data})
    return caught.value


def test_another_tokenizer_is_told_as_one() -> None:
    error = failure(ModelError, "b", "x")
    assert error.where == "--tokenizer"
    assert "another vocabulary or other special tokens than old-tokenizer" in error.message
    assert error.hint == "name the tokenizer that the run began with"
    assert "name the data and the tokenizer that" in (failure(DataError, "a", "y").hint or "")
    assert (
        check_contents(checkpoint(pretraining()), pretraining(), "a".__eq__, {"train": "x"}) == []
    )


def test_a_directory_without_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, problem in (
        ("empty", "there is no tokenizer in this directory"),
        ("none", "there is no such directory"),
        ("file", "this is a file, not a directory"),
    ):
        with pytest.raises(ModelError) as caught:
            load_bare_tokenizer(str(tmp_path / name))
        assert caught.value.message == problem
        assert "allhands tokenizer train" in (caught.value.hint or "")
        assert "demo" not in (caught.value.hint or "")
    with pytest.raises(ModelError) as caught:  # no path, so it may be on the Hub, and is not
        load_bare_tokenizer("no tokenizer")
    assert "Hub" in caught.value.message
    assert "allhands tokenizer train" in (caught.value.hint or "")
    assert "demo" not in (caught.value.hint or "")
    write_tokenizer(tmp_path / "there")
    assert load_bare_tokenizer(str(tmp_path / "there")).path == tmp_path / "there"
