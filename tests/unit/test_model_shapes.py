"""Shapes of models: their numbers, what they count, and the config.json that both libraries read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from mlx.utils import tree_flatten

from allhands.errors import ConfigError
from allhands.model.pretraining import build_model
from allhands.model.shapes import Shape, TokenIds, find_shape, model_config, num_parameters

SMALL = {
    "layers": 2,
    "dims": 32,
    "mlp_dims": 48,
    "heads": 4,
    "kv_heads": 2,
    "vocabulary": 300,
    "block_size": 64,
}
FAMILIES = ("llama", "qwen3", "mixtral")

# As their authors give them. Of stories15M: its file of 60,816,028 bytes less 28 of header and two
# tables of 256 x 24 for positions; of the others, the parameters in their files.
PUBLISHED = {
    "llama-15m": (60_816_028 - 28) // 4 - 2 * 256 * 24,
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "llama-1b": 1_235_814_400,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_named_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert num_parameters(find_shape(name)) == PUBLISHED[name]


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_counts_are_those_of_the_built_model(family: str, tied: bool) -> None:
    shape = find_shape(family, {**SMALL, "tied": tied})
    flat: Any = tree_flatten(build_model(model_config(shape), 0).parameters())
    sizes = {name: value.size for name, value in flat}
    assert num_parameters(shape) == sum(sizes.values())


def test_numbers_take_the_place_of_a_names() -> None:
    shape = find_shape("llama-15m", {"heads": 4, "vocabulary": 4096, "layers": None})
    assert (shape.heads, shape.kv_heads, shape.head_dim, shape.vocabulary, shape.layers) == (
        4,
        4,
        72,
        4096,
        6,
    )
    assert find_shape("qwen3-0.6b", {"dims": 512}).head_dim == 128
    learner = {
        "layers": 4,
        "dims": 256,
        "mlp_dims": 512,
        "heads": 4,
        "block_size": 512,
        "vocabulary": 50257,
    }
    expected = Shape("llama", 4, 256, 512, 4, 4, 64, 50257, 512, init_std=(2 / (5 * 256)) ** 0.5)
    assert find_shape("llama", learner) == expected


@pytest.mark.parametrize(
    ("name", "numbers", "where", "words"),
    [
        ("llama-16m", {}, "--shape", "did you mean llama-15m"),
        ("gpt2", {}, "--shape", "llama, qwen3, mixtral"),
        (
            "llama",
            {"layers": 2},
            "--dims",
            "no number of dims, mlp_dims, heads, vocabulary, block_size",
        ),
        (
            "llama",
            {"layers": 2},
            "--dims",
            "--block-size is the longest row that the model will read",
        ),
        ("llama-15m", {"depth": 3}, "depth", "a shape has no depth"),
        ("llama-15m", {"heads": 7}, "--heads", "take 287 or 294 dims"),
        ("llama-15m", {"heads": 0}, "--heads", "whole number from 1"),
        ("llama-15m", {"layers": 2.5}, "--layers", "2.5 is not a number of layers"),
        ("llama-15m", {"layers": True}, "--layers", "True is not"),
        ("llama-15m", {"dims": "288"}, "--dims", "'288' is not"),
        ("llama-15m", {"heads": 96}, "--head-dim", "3 is odd"),
        ("llama-15m", {"kv_heads": 4}, "--kv-heads", "one of 1, 2, 3, 6"),
        ("llama-15m", {"norm_eps": 0.0}, "--norm-eps", "not a positive number"),
        ("llama-15m", {"rope_theta": float("inf")}, "--rope-theta", "not a positive number"),
        ("llama-15m", {"vocabulary": 2**31}, "--vocabulary", "a whole number from 1"),
        ("llama-15m", {"experts": 4}, "--experts", "a llama has no experts"),
        ("mixtral-tiny", {"experts": 1}, "--experts", "at least 2"),
        ("mixtral-tiny", {"experts_per_token": 5}, "--experts-per-token", "5 of 4 experts"),
        ("mixtral-tiny", {"experts_per_token": 0}, "--experts-per-token", "give 1 to 4"),
        ("mixtral-tiny", {"head_dim": 16}, "--head-dim", "leave --head-dim out"),
    ],
)
def test_what_cannot_be_is_one_clear_error(
    name: str, numbers: dict[str, Any], where: str, words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        find_shape(name, numbers)
    assert (caught.value.where, words in str(caught.value)) == (where, True), caught.value
    assert caught.value.hint


def test_a_config_that_does_not_fit_its_tokenizer_is_refused() -> None:
    shape = find_shape("llama-15m")
    with pytest.raises(ConfigError, match=r"token 500 \(eos\) is not in a vocabulary of 300"):
        model_config(shape, 300, TokenIds(bos=1, eos=500))
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        model_config(shape, dtype="float8")
    with pytest.raises(ConfigError, match="vocabulary"):
        model_config(shape, 0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_the_config_as_it_is_meant(family: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    shape = find_shape(family, {**SMALL, "rope_theta": 5000.0, "norm_eps": 1e-4, "tied": False})
    (tmp_path / "config.json").write_text(
        json.dumps(model_config(shape, 400, TokenIds(1, 2, 0), dtype="bfloat16"))
    )
    config: Any = AutoConfig.from_pretrained(tmp_path)
    assert config.model_type == family
    assert (config.hidden_size, config.num_hidden_layers, config.intermediate_size) == (32, 2, 48)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 8)
    assert (config.vocab_size, config.max_position_embeddings) == (400, 64)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (1, 2, 0)
    assert config.tie_word_embeddings is False
    assert config.rms_norm_eps == 1e-4
    assert config.to_dict()["rope_parameters"]["rope_theta"] == 5000.0
    if family == "mixtral":
        assert (config.num_local_experts, config.num_experts_per_tok) == (8, 2)
