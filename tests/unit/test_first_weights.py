"""The first weights of a model: their statistics, their bits, and that both libraries compute the
same with them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS

# isort: split
import mlx.core as mx
import mlx_lm.utils
import numpy as np
import pytest
from mlx.utils import tree_flatten

from allhands.checkpoints.arrays import tensors_of
from allhands.errors import ModelError
from allhands.io.tensors import safetensors_pieces
from allhands.model.pretraining import build_model, portable_tensors
from allhands.model.shapes import TokenIds, find_shape, model_config

FAMILIES = ("llama", "qwen3", "mixtral")
SMALL = {
    "layers": 2,
    "dims": 32,
    "mlp_dims": 48,
    "heads": 4,
    "kv_heads": 2,
    "vocabulary": 300,
    "block_size": 64,
}
ROUGH = {**SMALL, "init_std": 0.3, "rope_theta": 500.0, "experts": None}


def parameters(model: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


def made(family: str, seed: int = 0, **numbers: Any) -> dict[str, mx.array]:
    return parameters(build_model(model_config(find_shape(family, {**SMALL, **numbers})), seed))


def same(one: mx.array, other: mx.array) -> bool:
    return one.shape == other.shape and bool(mx.array_equal(one, other))


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics(family: str) -> None:
    weights = made(family, layers=8, dims=128, mlp_dims=192, tied=False, init_std=0.05)
    for name, value in weights.items():
        values = np.array(value)
        if "norm" in name:
            assert (values == 1).all(), name
            continue
        std = 0.05
        if "o_proj" in name or "down_proj" in name:
            std = 0.05 / math.sqrt(16)
        # Of n independent normal values, the mean has std / sqrt(n), and the deviation std / sqrt(2
        # n).
        assert abs(values.mean()) < 5 * std / math.sqrt(values.size), name
        assert abs(values.std() - std) < 5 * std / math.sqrt(2 * values.size), name
    drawn = [
        np.array(value).ravel()[:1000] for name, value in weights.items() if "norm" not in name
    ]
    # Arrays of their own, not one and the same cut to size.
    assert len({values[:8].tobytes() for values in drawn}) == len(drawn)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_seed_and_the_name_make_the_bits(family: str) -> None:
    first = made(family)
    mx.random.seed(99)
    again = made(family)
    assert first.keys() == again.keys()
    assert all(same(first[name], again[name]) for name in first)
    other = made(family, seed=1)
    assert not any(same(first[name], other[name]) for name in first if "norm" not in name)
    # A layer more, another MLP: what has its name and its shape still has its numbers, but for the
    # scale of the depth.
    larger = made(family, layers=3, mlp_dims=64)
    assert same(
        first["model.layers.1.self_attn.q_proj.weight"],
        larger["model.layers.1.self_attn.q_proj.weight"],
    )
    assert same(first["model.embed_tokens.weight"], larger["model.embed_tokens.weight"])


def test_an_expert_does_not_depend_on_the_number_of_experts() -> None:
    name = "model.layers.0.block_sparse_moe.switch_mlp.up_proj.weight"
    four, eight = (made("mixtral", experts=number)[name] for number in (4, 8))
    assert same(four, eight[:4])
    assert not same(eight[0], eight[1])


def test_known_bits() -> None:
    """Written down once: a run that is resumed elsewhere, or another rank, must begin with these
    very numbers.
    """
    value = np.array(made("llama", init_std=0.02)["model.layers.0.self_attn.q_proj.weight"])
    random = np.random.Generator(np.random.Philox(key=np.frombuffer(KEY, dtype="<u8")))
    assert (value == random.standard_normal((32, 32), dtype=np.float32) * np.float32(0.02)).all()


@pytest.mark.parametrize(
    ("name", "numbers", "std"),
    [
        ("llama", SMALL, math.sqrt(2 / (5 * 32))),
        ("llama", {**SMALL, "init_std": 0.5}, 0.5),
        ("llama-15m", {}, math.sqrt(2 / (5 * 288))),
        ("smollm2-135m", {}, 1 / 24),
        ("qwen3-0.6b", {"dims": 32}, 0.02),
    ],
)
def test_the_deviation_is_the_named_models_or_follows_from_the_width(
    name: str, numbers: Any, std: float
) -> None:
    assert find_shape(name, numbers).init_std == pytest.approx(std)
    assert model_config(find_shape(name, numbers))["initializer_range"] == pytest.approx(std)


# blake2b of "0 model.layers.0.self_attn.q_proj.weight", 16 bytes.
KEY = bytes.fromhex("334fc7ffe44b48952e8465ac24e4a4ed")


def test_half_precision_is_the_same_rounded() -> None:
    config = model_config(find_shape("llama", SMALL))
    whole, half = (
        parameters(build_model(config, 3)),
        parameters(build_model(config, 3, dtype=mx.bfloat16)),
    )
    assert all(same(half[name], whole[name].astype(mx.bfloat16)) for name in whole)


def test_other_models_are_refused() -> None:
    with pytest.raises(ModelError, match="llama, qwen3, mixtral"):
        build_model({"model_type": "gpt2"}, 0)
    with pytest.raises(ModelError, match="vocab_size"):
        build_model({"model_type": "llama"}, 0)


def write(directory: Path, family: str, **numbers: Any) -> mx.array:
    """A model directory, and the logits of its model for tokens 0 to 39."""
    config = model_config(find_shape(family, {**ROUGH, **numbers}), ids=TokenIds(1, 2, 0))
    model = build_model(config, 7)
    (directory / "config.json").write_text(json.dumps(config))
    pieces = safetensors_pieces(list(portable_tensors(tensors_of(model.parameters()))))
    (directory / "model.safetensors").write_bytes(b"".join(pieces))
    logits: mx.array = model(mx.arange(40)[None])
    mx.eval(logits)
    return logits


@pytest.mark.parametrize("family", FAMILIES)
def test_mlx_lm_reads_what_was_written(family: str, tmp_path: Path) -> None:
    logits = write(tmp_path, family)
    model, _ = mlx_lm.utils.load_model(tmp_path)
    assert same(model(mx.arange(40)[None]), logits)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "numbers", [{}, {"tied": False, "head_dim": 16, "norm_eps": 0.1}], ids=["usual", "other"]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_computes_the_same(
    family: str, numbers: dict[str, Any], tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    if family == "mixtral":
        numbers = {name: value for name, value in numbers.items() if name != "head_dim"}
    logits = np.array(write(tmp_path, family, **numbers))
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        theirs = model(torch.arange(40)[None]).logits.numpy()
    assert np.abs(theirs).max() > 0.3
    np.testing.assert_allclose(logits, theirs, rtol=1e-4, atol=1e-5)
    assert sum(parameter.numel() for parameter in model.parameters()) == sum(
        value.size
        for value in parameters(
            build_model(json.loads((tmp_path / "config.json").read_text()), 0)
        ).values()
    )
