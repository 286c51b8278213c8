"""The modules that faster forms may stand for: their source is what was read, and an instance has
nothing else.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Collection
from typing import Any

import mlx.nn as nn
import pytest
from mlx_lm.models import llama, rope_utils

from allhands.config.schema import TrainConfig
from allhands.errors import ConfigError
from allhands.kernels import known
from allhands.kernels.selection import KernelSelection
from allhands.model.passes import apply_passes
from allhands.parallel.mixtures import MIXTURES
from allhands.run.preparing import pass_context
from allhands.runtime.accelerator import detect

# Digests of the sources of ``__call__`` that were read for each list, without types and comments.
# Where this fails, mlx_lm has changed: read the class again, then put its new digest here, or take
# the class out of the list.
READ: dict[str, tuple[Collection[str], str]] = {
    "swiglu": (
        known.SWIGLU,
        """
        07f48c3a2dde 3122b91fdc3f 79476ad65df9 aef51d920450 defa68ecfebd
        """,
    ),
    "attention": (
        known.ATTENTION,
        """
        04191b58a1a1 302a2407129d 4851e3f31117 4fe845fd174b 56319302b710 59440ae8ec9e 779e769b9f77 81a0b25d9684
        87be81bdb02a 9639386cddc1 9fd2c159f0e9 b10a53cde2f7 d4af0c46ab14
        """,
    ),
    "rotation": (
        known.ROTATIONS,
        """
        a1ce76c68446 c2194e33a44d fa4b7813ec3e fe931a428845
        """,
    ),
    "block": (
        known.BLOCKS,
        """
        285515860952 557f6ebc44c0
        """,
    ),
    "mixture": (MIXTURES, "454487aee330 6941fea0aecb 9e62bd5321b1 e2c32c6a32f9"),
    "model": (
        [f"{family}.Model" for family in known.SPLIT],
        """
        05d3fc9c071b 215e8a05797d 6a5609be988e 742326e9e9b8 75c934754d64 863a370e5826 95bf7e01f700 9a33aff5ab63
        a35d75ba0aa0 bd2f50a82ad7 d203bc806124 d5425b165f2c d9842d7d977d e3705c0ef66e f5f855143420
        """,
    ),
}


def source_of(name: str) -> str:
    """``__call__`` of a class of mlx_lm, without annotations, docstrings and comments."""
    module, _, kind = name.rpartition(".")
    found = getattr(importlib.import_module(f"mlx_lm.models.{module}"), kind)
    function: Any = ast.parse(textwrap.dedent(inspect.getsource(found.__call__))).body[0]
    function.returns = None
    for node in ast.walk(function):
        if isinstance(node, ast.arg):
            node.annotation = None
    if isinstance(function.body[0], ast.Expr) and isinstance(function.body[0].value, ast.Constant):
        del function.body[0]
    return ast.unparse(function)


@pytest.mark.parametrize("kind", READ)
def test_the_source_of_every_listed_class_has_been_read(kind: str) -> None:
    names, read = READ[kind]
    assert len(names) > 5 or kind in ("rotation", "mixture")
    for name in names:
        digest = hashlib.sha256(source_of(name).encode()).hexdigest()[:12]
        assert digest in read.split(), f"{name} ({digest}):\n{source_of(name)}"


def arguments(**changes: Any) -> Any:
    sizes = {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "intermediate_size": 96,
    }
    sizes |= {
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 101,
    }
    return llama.ModelArgs.from_dict(sizes | changes)


def test_a_block_is_known_with_its_sizes() -> None:
    layer = llama.TransformerBlock(arguments())
    assert known.is_block(layer)
    assert known.is_swiglu(layer.mlp)
    assert known.attention_of(layer.self_attn) == known.Attention(
        heads=4, kv_heads=2, width=16, normed=False
    )


def test_an_attribute_that_is_not_listed_makes_it_unknown() -> None:
    layer = llama.TransformerBlock(arguments())
    layer.self_attn.attn_logit_softcapping = 30.0
    assert known.attention_of(layer.self_attn) is None
    layer.mlp.limit = 7.0
    assert not known.is_swiglu(layer.mlp)
    layer.layer_scalar = nn.Linear(1, 1)
    assert not known.is_block(layer)


def test_a_class_derived_from_a_listed_one_is_unknown() -> None:
    layer = llama.TransformerBlock(arguments())
    for module in (layer, layer.self_attn, layer.mlp):
        module.__class__ = type("Own", (type(module),), {})
    assert not known.is_block(layer)
    assert not known.is_swiglu(layer.mlp)
    assert known.attention_of(layer.self_attn) is None


DYNAMIC = rope_utils.DynamicNTKScalingRoPE(16, 64, False, 10000.0, 2.0)


class NoRotation(nn.Module):
    def __call__(self, x: Any, offset: int = 0) -> Any:
        return x


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        (nn.RoPE(16), True),
        (nn.RoPE(16, base=500.0, scale=0.25), True),
        (rope_utils.YarnRoPE(16, scaling_factor=4.0, original_max_position_embeddings=32), True),
        (rope_utils.SuScaledRoPE(16, long_factor=[2.0] * 8), True),
        (rope_utils.ProportionalRoPE(16, 8), True),
        # Pairs of neighbours, a part of a head, another length's angles, none at all.
        (nn.RoPE(16, traditional=True), False),
        (nn.RoPE(8), False),
        (DYNAMIC, False),
        (NoRotation(), False),
    ],
    ids=[
        "plain",
        "scaled",
        "yarn",
        "longrope",
        "proportional",
        "neighbours",
        "partial",
        "dynamic",
        "none",
    ],
)
def test_the_rotation_decides(rope: Any, expected: bool) -> None:
    attention = llama.TransformerBlock(arguments()).self_attn
    attention.rope = rope
    assert (known.attention_of(attention) is not None) == expected


def test_a_model_that_runs_its_blocks_twice_is_not_known_to_run_in_order() -> None:
    assert {"iquestloopcoder", "nanbeige"}.isdisjoint(known.IN_ORDER)
    assert known.runs_in_order(llama.Model(arguments()))
    assert not known.runs_in_order(nn.Sequential())


def test_recomputation_is_refused_where_it_would_have_no_effect() -> None:
    from mlx_lm.models import iquestloopcoder

    sizes = {
        "model_type": "iquestloopcoder",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
    }
    sizes |= {
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 101,
        "head_dim": 16,
    }
    sizes |= {"max_position_embeddings": 64, "loop_num": 2, "loop_window_size": 8}
    model: Any = iquestloopcoder.Model(iquestloopcoder.ModelArgs.from_dict(sizes))
    config = TrainConfig.model_validate({"grad_checkpoint": True})
    with pytest.raises(ConfigError) as caught:
        apply_passes(model, pass_context(model, config, detect(), KernelSelection()))
    assert caught.value.where == "--grad-checkpoint"


def test_the_length_from_which_padding_counts() -> None:
    assert known.length_that_counts(llama.Model(arguments())) is None
    dynamic = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 64}
    assert known.length_that_counts(llama.Model(arguments(**dynamic))) == 64
