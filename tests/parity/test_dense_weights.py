"""In the order of operations that training asks of MLX's CUDA back-end, dense weights are made one
after the other.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# Peak memory of a pass of a 4-bit model, beyond its weights, in units of one block's dense weights.
SCRIPT = """
import sys
import mlx.core as mx, mlx.nn as nn
from mlx_lm.models import llama
from mlx_lm.tuner.utils import linear_to_lora_layers
from mlx.utils import tree_map
from allhands.kernels.fused.blocks import fuse

blocks, trained, compiled, form = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "compiled", sys.argv[4]
width, mlp, tokens = 512, 1792, 32
model = llama.Model(llama.ModelArgs(
    model_type="llama", hidden_size=width, num_hidden_layers=blocks, intermediate_size=mlp, num_attention_heads=4,
    num_key_value_heads=1, rms_norm_eps=1e-5, vocab_size=64, head_dim=128, tie_word_embeddings=False))
nn.quantize(model, 64, 4)
model.freeze()
if trained:
    keys = None if form == "some" else {"self_attn.q_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"}
    linear_to_lora_layers(model, trained, {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": keys})
model.train()
fuse(model, tokens)
mx.eval(model.parameters())
ids = mx.zeros((1, tokens), dtype=mx.int32)

def loss(given):
    model.update(given)
    return model(ids).square().sum()

function = mx.value_and_grad(loss) if trained else loss
function = mx.compile(function) if compiled else function
given = model.trainable_parameters()
mx.eval(given)
before, limit = mx.get_active_memory(), mx.set_memory_limit(0)  # with which MLX runs hardly ahead
mx.reset_peak_memory()
mx.eval(function(given))
dense = 4 * (3 * width * mlp + 2 * width * width + 2 * width * 128)
print((mx.get_peak_memory() - before) / dense)
"""


def peak(blocks: int, trained: int, compiled: str, form: str) -> float:
    environ = {**os.environ, "MLX_BFS_MAX_WIDTH": "1"}
    words = [
        sys.executable,
        "-c",
        "import allhands\n" + SCRIPT,
        str(blocks),
        str(trained),
        compiled,
        form,
    ]
    done = subprocess.run(
        words, capture_output=True, text=True, env=environ, timeout=120, check=True
    )
    return float(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["compiled", "graph"])
@pytest.mark.parametrize(("trained", "form"), [(0, "none"), (2, "some"), (2, "all")])
def test_memory_does_not_grow_with_the_number_of_frozen_blocks(
    trained: int, form: str, compiled: str
) -> None:
    few, many = (peak(blocks, trained, compiled, form) for blocks in (4, 16))
    assert many - few < 1.5  # of twelve blocks more


@pytest.mark.parametrize("form", ["some", "all"])
def test_memory_of_trained_blocks_is_that_of_their_activations(form: str) -> None:
    """The backward pass makes each weight again when it is needed."""
    few, many = (peak(blocks, blocks, "compiled", form) for blocks in (4, 12))
    assert many - few < 2.5  # of eight blocks more
