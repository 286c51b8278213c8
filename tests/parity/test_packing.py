"""Packed rows against the documents computed alone, in loss and gradient, for several
architectures.
"""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gemma2, gemma3_text, llama, mamba, qwen3

from allhands.data.loader import MicroBatch, collate, pad_targets
from allhands.data.tokens import PackedRows, TokenSet
from allhands.errors import ConfigError
from allhands.kernels.documents import require_isolation
from allhands.model.remat import checkpoint_layers
from allhands.objectives.causal_lm import batch_values
from allhands.parallel.gradient import make_gradient

SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": 96,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
}
ARCHITECTURES = {
    "llama": (llama, {"model_type": "llama", "tie_word_embeddings": True}),
    "qwen3": (qwen3, {"model_type": "qwen3", "tie_word_embeddings": False}),
    # A window of 4 in two layers of three: documents are longer than it.
    "gemma3": (
        gemma3_text,
        {"model_type": "gemma3_text", "sliding_window": 4, "sliding_window_pattern": 3},
    ),
}


def make(name: str):
    module, extra = {**ARCHITECTURES, "gemma2": (gemma2, {"model_type": "gemma2"})}[name]
    mx.random.seed(1)
    model = module.Model(module.ModelArgs.from_dict({**SHAPE, **extra}))
    mx.eval(model.parameters())
    return model


def documents(seed: int, count: int) -> TokenSet:
    random = np.random.default_rng(seed)
    lengths = random.integers(2, 23, count)
    return TokenSet.of_examples([(random.integers(1, 96, n), np.arange(n) > 0) for n in lengths])


def sums(
    model: object, batches: list[MicroBatch], form: str = "lazy"
) -> tuple[float, int, dict[str, np.ndarray]]:
    """Loss sum, targets and gradients of the sum over ``batches``."""
    gradient = make_gradient(model, cpu_native=form == "eager", compiled=form == "compiled")  # type: ignore[arg-type]
    batches = [pad_targets(batch) for batch in batches] if form == "compiled" else batches
    loss, count, total = 0.0, 0, {}
    for batch in batches:
        value, grads = gradient(*map(mx.array, batch_values(batch)))
        loss, count = loss + value.item(), count + batch.num_targets
        for key, grad in tree_flatten(grads):
            total[key] = total.get(key, 0) + np.array(grad, dtype=np.float64)
    return loss, count, total


def alone(tokens: TokenSet, block: int) -> list[MicroBatch]:
    """The pieces into which the rows cut the documents, each by itself."""
    pieces = []
    for i in range(len(tokens)):
        ids, _ = tokens.example(i)
        start = int(tokens.offsets[i])
        # Input place p of the stream lies in row p // block: a cut falls before each multiple of
        # the block.
        cuts = [
            0,
            *(c - start for c in range((start // block + 1) * block, start + len(ids) - 1, block)),
            len(ids) - 1,
        ]
        pieces += [ids[a : b + 1] for a, b in pairwise(cuts)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    cut = TokenSet.of_examples([(piece, np.arange(len(piece)) > 0) for piece in pieces])
    return [collate(cut, np.array([i]), int(cut.work[i])) for i in range(len(cut))]


@pytest.mark.parametrize("form", ["eager", "lazy", "compiled"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_isolated_documents_teach_what_they_teach_alone(name: str, form: str) -> None:
    model = make(name)
    require_isolation(model, name)
    tokens = documents(seed=3, count=9)
    rows = PackedRows(tokens, 32, isolate=True)
    batches = [collate(rows, np.arange(len(rows)), 32)]
    packed_loss, packed_count, packed = sums(model, batches, form)
    loss, count, grads = sums(model, alone(tokens, 32), "eager" if form == "eager" else "lazy")
    assert packed_count == count == len(tokens.tokens) - len(tokens)
    assert packed_loss == pytest.approx(loss, rel=2e-6)
    for key, grad in grads.items():
        np.testing.assert_allclose(
            packed[key], grad, rtol=2e-4, atol=2e-5 * np.abs(grad).max() + 1e-7, err_msg=key
        )


def test_without_isolation_documents_do_see_each_other() -> None:
    # Otherwise the test above would hold for a mask that does nothing.
    model, tokens = make("llama"), documents(seed=3, count=9)
    losses = []
    for isolate in (True, False):
        rows = PackedRows(tokens, 32, isolate=isolate)
        loss, count, _ = sums(model, [collate(rows, np.arange(len(rows)), 32)])
        losses.append(loss / count)
    assert abs(losses[0] - losses[1]) > 1e-4


def test_joined_rows_are_one_stream() -> None:
    model, tokens = make("llama"), documents(seed=5, count=7)
    rows = PackedRows(tokens, 24, isolate=False)
    loss, count, _ = sums(model, [collate(rows, np.arange(len(rows)), 24)])
    stream = np.asarray(tokens.tokens)
    expected = 0.0
    for start in range(0, len(stream) - 1, 24):
        piece = stream[start : start + 25]
        logits = np.array(model(mx.array(piece[None, :-1])), dtype=np.float64)[0]
        logits -= logits.max(axis=1, keepdims=True)
        expected -= (logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))[
            np.arange(len(piece) - 1), piece[1:]
        ].sum()
    assert count == len(stream) - 1
    assert loss == pytest.approx(expected, rel=1e-5)


def test_isolation_with_recomputed_activations() -> None:
    tokens = documents(seed=4, count=6)
    rows = PackedRows(tokens, 32, isolate=True)
    batches = [collate(rows, np.arange(len(rows)), 32)]
    plain, recomputing = make("llama"), make("llama")
    checkpoint_layers(recomputing.layers)
    require_isolation(recomputing, "llama")
    loss, _, grads = sums(plain, batches)
    again, _, same = sums(recomputing, batches)
    assert again == pytest.approx(loss, rel=1e-6)
    for key, grad in grads.items():
        np.testing.assert_allclose(same[key], grad, rtol=1e-4, atol=1e-6, err_msg=key)


def test_architectures_that_cannot_are_refused() -> None:
    # A state that runs on through the row; and attention whose scores take masks of one row only.
    arguments = {
        "model_type": "mamba",
        "vocab_size": 96,
        "hidden_size": 16,
        "intermediate_size": 32,
        "state_size": 4,
        "num_hidden_layers": 2,
        "conv_kernel": 4,
        "use_bias": False,
        "use_conv_bias": True,
        "time_step_rank": 2,
    }
    model = mamba.Model(mamba.ModelArgs.from_dict(arguments))
    for refused, name in ((model, "mamba"), (make("gemma2"), "gemma2")):
        with pytest.raises(ConfigError, match=f"kept apart.*{name}") as caught:
            require_isolation(refused, name)
        assert caught.value.where == "--isolate-documents"


def test_what_depends_on_the_length_of_a_row_is_refused() -> None:
    """Angles that follow the length: seen in rows longer than the model's only."""
    dynamic = {"rope_scaling": {"type": "dynamic", "factor": 2.0}, "model_type": "llama"}
    model = llama.Model(llama.ModelArgs.from_dict({**SHAPE, **dynamic}))
    with pytest.raises(ConfigError) as caught:
        require_isolation(model, "llama")
    assert caught.value.where == "--isolate-documents"
