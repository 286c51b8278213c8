"""Adapters for PEFT of models that share weights, rename or stack them; and what is not PEFT's
adapter is not kept.
"""

from __future__ import annotations

from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS

# isort: split
import mlx.core as mx
import pytest

from allhands.errors import ModelError
from allhands.model.hf_names import ARCHITECTURES
from allhands.model.peft import Adapter, to_peft
from allhands.model.peft_base import PeftBase
from allhands.model.peft_check import check_peft
from allhands.model.peft_import import from_peft


def below(
    *names: str, shape: tuple[int, int] = (5, 6), kind: str = "llama", **how: Any
) -> PeftBase:
    """A model with layers of these names, all of one shape."""
    return PeftBase("b", kind, ARCHITECTURES[kind], dict.fromkeys(names, shape), **how)


def tensors(
    module: str, rank: int, seed: int = 0, prefix: str = "base_model.model."
) -> dict[str, mx.array]:
    mx.random.seed(seed)
    return {
        f"{prefix}{module}.lora_A.weight": mx.random.normal((rank, 6)),
        f"{prefix}{module}.lora_B.weight": mx.random.normal((5, rank)),
    }


PLAIN = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", "lora_dropout": 0.05}


# --- tied embeddings ------------------------------------------------------------------------------

EMBEDDING = "model.embed_tokens"


def tied_base(*more: str) -> PeftBase:
    return below(
        EMBEDDING, *more, embeddings=[EMBEDDING], tied=True, tables={EMBEDDING: mx.ones((5, 6))}
    )


def of_embedding(name: str = EMBEDDING) -> dict[str, mx.array]:
    mx.random.seed(1)
    return {
        f"base_model.model.{name}.lora_embedding_A": mx.random.normal((4, 5)),
        f"base_model.model.{name}.lora_embedding_B": mx.random.normal((6, 4)),
    }


def of_head(embedding: dict[str, mx.array], factor: float = 1.0) -> dict[str, mx.array]:
    a, b = embedding.values()
    return {
        "base_model.model.lm_head.lora_A.weight": mx.contiguous(b.T) * factor,
        "base_model.model.lm_head.lora_B.weight": mx.contiguous(a.T),
    }


def test_an_adapter_of_a_tied_embedding_reaches_the_output_layer_of_every_version_of_peft() -> None:
    made = from_peft(
        Adapter(
            of_embedding(),
            {**PLAIN, "target_modules": ["embed_tokens"], "ensure_weight_tying": True},
        ),
        tied_base(),
        num_layers=1,
    )
    assert made.config["lora_parameters"]["keys"] == [EMBEDDING]
    back = to_peft(made, tied_base())
    assert back.config["ensure_weight_tying"] is True
    assert back.config["target_modules"] == ["embed_tokens", "lm_head"]
    for name, value in {**of_embedding(), **of_head(of_embedding())}.items():
        assert mx.array_equal(back.weights[name], value), name
    untied = to_peft(made, below(EMBEDDING, "lm_head", embeddings=[EMBEDDING]))
    assert "ensure_weight_tying" not in untied.config
    assert set(untied.weights) == set(of_embedding())


@pytest.mark.parametrize(
    ("head", "config", "fine"),
    [
        (None, {}, False),
        (None, {"ensure_weight_tying": True, "target_modules": ["embed_tokens"]}, True),
        (None, {"ensure_weight_tying": True, "target_modules": r".*\.q_proj|embed_tokens"}, True),
        # PEFT ties nothing if no target has one of the names that it knows.
        (None, {"ensure_weight_tying": True, "target_modules": ["wte"]}, False),
        (
            None,
            {
                "ensure_weight_tying": True,
                "target_modules": ["embed_tokens"],
                "alpha_pattern": {"lm_head": 3},
            },
            False,
        ),
        (1.0, {}, True),
        (1.0, {"ensure_weight_tying": True, "target_modules": ["embed_tokens"]}, True),
        (1.5, {}, False),
        (1.0, {"alpha_pattern": {"lm_head": 3}}, False),
    ],
)
def test_an_adapter_that_parts_embedding_and_output_layer_is_refused(
    head: float | None, config: dict[str, Any], fine: bool
) -> None:
    weights = of_embedding()
    if head is not None:
        weights |= of_head(of_embedding(), head)
    if fine:
        made = from_peft(Adapter(weights, {**PLAIN, **config}), tied_base(), num_layers=1)
        assert set(made.weights) == {f"{EMBEDDING}.lora_a", f"{EMBEDDING}.lora_b"}
        return
    with pytest.raises(ModelError) as caught:
        from_peft(Adapter(weights, {**PLAIN, **config}), tied_base(), num_layers=1)
    assert caught.value.code == "peft-weights-tied"


def test_an_adapter_of_a_tied_output_layer_alone_is_refused() -> None:
    with pytest.raises(ModelError) as caught:
        from_peft(Adapter(of_head(of_embedding()), PLAIN), tied_base(), num_layers=1)
    assert caught.value.code == "peft-weights-tied"


@pytest.mark.parametrize(
    ("factor", "rows", "fine"), [(1.0, 5, True), (1.001, 5, True), (2.0, 5, False), (1.0, 7, False)]
)
def test_embeddings_that_peft_saves_beside_the_adapter_have_to_be_the_models(
    factor: float, rows: int, fine: bool
) -> None:
    config = {**PLAIN, "target_modules": ["embed_tokens"], "ensure_weight_tying": True}
    saved = {f"base_model.model.{EMBEDDING}.base_layer.weight": mx.ones((rows, 6)) * factor}
    adapter = Adapter({**of_embedding(), **saved}, config)
    if fine:
        assert len(from_peft(adapter, tied_base(), num_layers=1).weights) == 2
        return
    with pytest.raises(ModelError) as caught:
        from_peft(adapter, tied_base(), num_layers=1)
    assert caught.value.code == "peft-embeddings-differ"


# --- other names, other layouts -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "ours", "theirs"),
    [
        ("gpt_neox", "model.h.1.attention.dense", "gpt_neox.layers.1.attention.dense"),
        ("gpt_neox", "model.embed_in", "gpt_neox.embed_in"),
        ("gpt2", "model.h.1.attn.c_attn", "transformer.h.1.attn.c_attn"),
        ("gptj", "model.h.1.mlp.fc_in", "transformer.h.1.mlp.fc_in"),
        ("llama", "model.layers.1.mlp.up_proj", "model.layers.1.mlp.up_proj"),
    ],
)
def test_modules_have_the_names_of_transformers_and_come_back(
    kind: str, ours: str, theirs: str
) -> None:
    base = below(ours, "model.h.0.other", kind=kind)
    made = from_peft(Adapter(tensors(theirs, 4), PLAIN), base, num_layers=2)
    assert set(made.weights) == {f"{ours}.lora_a", f"{ours}.lora_b"}
    back = to_peft(made, base)
    assert all(
        mx.array_equal(back.weights[name], value) for name, value in tensors(theirs, 4).items()
    )
    assert back.config["fan_in_fan_out"] is (kind == "gpt2")


def test_a_model_whose_names_are_not_known_is_refused_unless_its_own_files_prove_them() -> None:
    adapter = Adapter(tensors("a.layers.0.q", 4), PLAIN)
    unknown = PeftBase("b", "strange", None, {"a.layers.0.q": (5, 6)})
    with pytest.raises(ModelError, match="strange"):
        from_peft(adapter, unknown, num_layers=1)
    proved = PeftBase("b", "strange", None, {"a.layers.0.q": (5, 6)}, proved=["a.layers.0.q"])
    made = from_peft(adapter, proved, num_layers=1)
    assert to_peft(made, proved).weights.keys() == adapter.weights.keys()
    with pytest.raises(ModelError, match="strange"):
        to_peft(made, unknown)


MOE = tuple(f"model.layers.1.mlp.switch_mlp.{name}_proj" for name in ("gate", "up", "down"))


def of_experts(count: int = 3, rank: int = 2) -> Adapter:
    mx.random.seed(4)
    weights = {f"{name}.lora_a": mx.random.normal((count, rank, 6)) for name in MOE}
    weights |= {f"{name}.lora_b": mx.random.normal((count, 5, rank)) for name in MOE}
    settings = {
        "rank": rank,
        "scale": 2.0,
        "dropout": 0.0,
        "keys": [name.partition(".1.")[2] for name in MOE],
    }
    return Adapter(
        weights, {"fine_tune_type": "lora", "num_layers": 1, "lora_parameters": settings}
    )


def test_experts_are_one_module_each_and_come_back_stacked() -> None:
    base = below(*MOE, kind="qwen3_moe", experts=dict.fromkeys(MOE, 3))
    ours = of_experts()
    made = to_peft(ours, base)
    name = "base_model.model.model.layers.1.mlp.experts.2.up_proj"
    assert mx.array_equal(
        made.weights[f"{name}.lora_A.weight"], ours.weights[f"{MOE[1]}.lora_a"][2]
    )
    assert mx.array_equal(
        made.weights[f"{name}.lora_B.weight"], ours.weights[f"{MOE[1]}.lora_b"][2]
    )
    check_peft(made, ours, base)
    back = from_peft(made, base, num_layers=2)
    assert all(mx.array_equal(back.weights[name], value) for name, value in ours.weights.items())
    assert back.config["lora_parameters"]["keys"] == sorted(ours.config["lora_parameters"]["keys"])
    some = {name: value for name, value in made.weights.items() if ".experts.0." not in name}
    back = from_peft(Adapter(some, made.config), base, num_layers=2)
    assert mx.all(back.weights[f"{MOE[0]}.lora_b"][0] == 0).item()
    assert mx.array_equal(back.weights[f"{MOE[0]}.lora_b"][1], ours.weights[f"{MOE[0]}.lora_b"][1])


@pytest.mark.parametrize(
    ("kind", "left_out", "reason"),
    [
        ("qwen3_moe", MOE[2], "down_proj has none"),
        ("qwen2_moe", None, "qwen2_moe"),
        ("granitemoe", None, None),
    ],
)
def test_experts_that_peft_cannot_join_are_refused_with_the_reason(
    kind: str, left_out: str | None, reason: str | None
) -> None:
    ours = of_experts()
    kept = {name: v for name, v in ours.weights.items() if left_out is None or left_out not in name}
    moe = {
        name.replace(".mlp.", ".block_sparse_moe.") if kind == "granitemoe" else name
        for name in MOE
    }
    base = below(*moe, kind=kind, experts=dict.fromkeys(moe, 3))
    if kind == "granitemoe":
        kept = {name.replace(".mlp.", ".block_sparse_moe."): value for name, value in kept.items()}
    with pytest.raises(ModelError, match=reason) as refused:
        to_peft(Adapter(kept, ours.config), base)
    assert "--to hf" in str(refused.value.hint)


@pytest.mark.parametrize("damage", ["value", "scale", "targets", "missing", "tying", "name"])
def test_an_adapter_that_peft_would_read_otherwise_is_not_published(damage: str) -> None:
    base = tied_base("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj")
    theirs = {**of_embedding(), **tensors("model.layers.0.self_attn.q_proj", 4)}
    config = {**PLAIN, "target_modules": ["embed_tokens"], "ensure_weight_tying": True}
    ours = from_peft(Adapter(theirs, config), base, num_layers=2)
    made = to_peft(ours, base)
    check_peft(made, ours, base)
    weights, config = dict(made.weights), dict(made.config)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
    if damage == "value":
        weights[name] = weights[name] * 1.01
    elif damage == "scale":
        config["lora_alpha"] = 9
    elif damage == "targets":
        config["target_modules"] = ["embed_tokens", "lm_head", "q_proj"]
    elif damage == "missing":
        weights = {key: value for key, value in weights.items() if "q_proj" not in key}
    elif damage == "tying":
        del config["ensure_weight_tying"]
    else:
        weights[name.replace("layers.0", "h.0")] = weights.pop(name)
    with pytest.raises(ModelError) as caught:
        check_peft(Adapter(weights, config), ours, base)
    assert caught.value.code == "written-files-differ"
