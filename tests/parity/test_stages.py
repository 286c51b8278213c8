"""Models cut into stages against mlx_lm's own: loss and gradients, each architecture that may be
cut.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from architectures import architecture, every
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.utils import _get_classes

from allhands.errors import ConfigError, ModelError
from allhands.model.divisible import check_split
from allhands.model.stages import CAN_BE_CUT, Stage, blocks_of_stages, cut

# What people train most, and what differs most; the others are a minute's work.
OFTEN = frozenset(
    """
    cohere2 deepseek_v2 falcon_h1 gemma2 gemma3 glm4 gpt_oss granite llama~tied mixtral olmo2 phi3 qwen2 qwen3_moe
    qwen3_next smollm3
    """.split()  # noqa: SIM905
)
CUT = [
    pytest.param(name, marks=() if name in OFTEN else pytest.mark.long)
    for name in every()
    if architecture(name).module in CAN_BE_CUT and "" not in architecture(name).beyond
]
REFUSED = ("gemma3n", "gemma4_text", "hunyuan", "iquestloopcoder", "nanbeige~loops", "rwkv7")


def model_of(name: str) -> Any:
    """A new model of that configuration; the same numbers each time."""
    config = architecture(name).config
    mx.random.seed(7)
    module, args = _get_classes(config)
    model: Any = module(args.from_dict(config))
    model.train()
    for key, value in tree_flatten(model.parameters()):
        if mx.issubdtype(value.dtype, mx.floating):
            drawn = 0.1 * mx.random.normal(value.shape)
            model.update(tree_unflatten([(key, drawn if value.ndim > 1 else 1 + drawn)]))
    mx.eval(model.parameters())
    return model


def tokens_of(name: str) -> mx.array:
    config = architecture(name).config
    size = config.get("vocab_size") or config["text_config"]["vocab_size"]
    mx.random.seed(3)
    return mx.random.randint(0, min(size, 60), (2, 14))


def loss_of(logits: mx.array, tokens: mx.array) -> mx.array:
    return nn.losses.cross_entropy(
        logits[:, :-1].astype(mx.float32), tokens[:, 1:], reduction="sum"
    )


def flat(tree: Any) -> dict[str, mx.array]:
    return dict(tree_flatten(tree))


def whole(name: str) -> tuple[mx.array, dict[str, mx.array]]:
    """Loss and gradients of mlx_lm's model."""
    model, tokens = model_of(name), tokens_of(name)
    loss, grads = nn.value_and_grad(model, lambda: loss_of(model(tokens), tokens))()
    return loss, flat(grads)


def in_stages(name: str, num_stages: int) -> tuple[mx.array, dict[str, mx.array]]:
    """The same of stages that are models of their own, one after the other and back."""
    tokens = tokens_of(name)
    count = len(model_of(name).layers)
    sizes = [count // num_stages + (place < count % num_stages) for place in range(num_stages)]
    stages = [cut(model_of(name), [blocks])[0] for blocks in blocks_of_stages(sizes)]
    hidden, given = None, list[mx.array | None]()
    for stage in stages[:-1]:
        given.append(hidden)
        with stage.computing(hidden):
            hidden = stage.hidden(tokens)
        mx.eval(hidden)
    given.append(hidden)
    loss, cotangent, found = mx.zeros(()), mx.ones(()), dict[str, mx.array]()
    for stage, entered in zip(reversed(stages), reversed(given), strict=True):
        names, values = zip(*tree_flatten(stage.model.trainable_parameters()), strict=True)

        def run(
            received: mx.array, *arrays: mx.array, stage: Stage = stage, names: Any = names
        ) -> mx.array:
            stage.model.update(tree_unflatten(list(zip(names, arrays, strict=True))))
            with stage.computing(received):
                if stage.blocks.is_last:
                    return loss_of(stage.model(tokens), tokens)
                return stage.hidden(tokens)

        primal = mx.zeros((1,)) if entered is None else entered
        (out,), (cotangent, *grads) = mx.vjp(run, [primal, *values], [cotangent])
        loss = out if stage.blocks.is_last else loss
        for key, grad in zip(names, grads, strict=True):
            assert key not in found or key.startswith(stage.shared)
            found[key] = found[key] + grad if key in found else grad
        mx.eval(loss, cotangent, found)
    return loss, found


@pytest.mark.parametrize("name", CUT)
def test_a_cut_model_has_the_loss_and_the_gradients_of_the_whole(name: str) -> None:
    expected_loss, expected = whole(name)
    loss, found = in_stages(name, len(model_of(name).layers))
    assert loss.item() == pytest.approx(expected_loss.item(), rel=1e-6)
    assert found.keys() == expected.keys()
    for key, grad in expected.items():
        apart = mx.linalg.norm(found[key] - grad) / mx.maximum(mx.linalg.norm(grad), 1e-6)
        assert apart.item() < 5e-6, key


@pytest.mark.parametrize("name", REFUSED)
def test_what_hands_on_more_than_hidden_states_is_refused_by_name(name: str) -> None:
    with pytest.raises(ModelError, match=architecture(name).module) as raised:
        cut(model_of(name), blocks_of_stages([1, 1]))
    assert raised.value.exit_code == 4


def test_a_stage_keeps_the_weights_of_its_blocks_alone() -> None:
    names = [set(flat(model_of("llama").parameters()))]
    count = len(model_of("llama").layers)
    for blocks in blocks_of_stages([1, count - 1]):
        model = model_of("llama")
        (stage,) = cut(model, [blocks])
        names.append(set(flat(stage.model.parameters())))
    whole, first, last = names
    assert first | last == whole
    assert not first & last
    assert {name for name in first if "embed" not in name} == {
        name for name in whole if ".layers.0." in name
    }


@pytest.mark.parametrize("split", [(3, 4), (6,), (0, 6), (2, 2, 2)])
def test_a_split_that_is_none_is_refused(split: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="6 blocks"):
        check_split(split, 6, 2)
    check_split((2, 4), 6, 2)
