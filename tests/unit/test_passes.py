"""The list of passes: what applies where and why, and that models of one process have nothing to do
with each other.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tuner.utils import linear_to_lora_layers

from allhands.kernels import native
from allhands.kernels.instances import form_for_a_while, give_form
from allhands.kernels.selection import BY_RULE, KernelSelection, parse_request, selection_of
from allhands.model.dropout import dropout_keys_of
from allhands.model.passes import PASSES, Applied, PassContext, apply_passes
from allhands.parallel.gradient import make_gradient
from allhands.runtime.accelerator import Accelerator

SIZES = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
SIZES |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 101,
}


def device(kind: Any) -> Accelerator:
    # Small, so that quantised weights stay quantised.
    return Accelerator(kind, kind, 1, 2, kind == "cpu", None)


def adapted(*, bits: int = 0, dropout: float = 0.0) -> Any:
    mx.random.seed(7)
    model: Any = Model(ModelArgs.from_dict(SIZES))
    if bits:
        nn.quantize(
            model, 32, bits, class_predicate=lambda _, module: isinstance(module, nn.Linear)
        )
    model.freeze()
    linear_to_lora_layers(model, 2, {"rank": 2, "scale": 2.0, "dropout": dropout})
    return model


def context(kind: str, purpose: Any = "train", **more: Any) -> PassContext:
    return PassContext(device(kind), purpose, at_once=kind == "cpu", longest=40, **more)


def changed(applied: tuple[Applied, ...]) -> dict[str, int]:
    return {each.name: each.changed for each in applied if each.changed}


needs_native = pytest.mark.skipif(
    not native.available(), reason="no C compiler, or not a Linux CPU"
)


@needs_native
def test_what_applies_where() -> None:
    # Seven layers in each of two blocks, all quantised and adapted.
    found = apply_passes(adapted(bits=4, dropout=0.1), context("cpu", grad_checkpoint=True))
    counts = {
        "dropout by sample": 14,
        "quantised weights": 14,
        "float32": 1,
        "vectorised SwiGLU": 2,
    }
    names = [each.name for each in found]
    assert changed(found) | counts == changed(found)
    assert changed(found)["recomputation"] == 2
    assert changed(found)["native operations"] > 9
    assert names == [each.name for each in PASSES if each.stage == "adapted"]
    assert changed(apply_passes(adapted(bits=4), context("metal"))) == {"dense products": 14}
    assert changed(apply_passes(adapted(bits=4), context("cuda"))) == {"fused blocks": 4}


@pytest.mark.parametrize("kind", ["cpu", "metal", "cuda"])
def test_generation_changes_no_more_than_it_needs(kind: str) -> None:
    found = changed(
        apply_passes(adapted(bits=4, dropout=0.1), context(kind, "generate", grad_checkpoint=True))
    )
    wanted = {"quantised weights", "float32", "vectorised SwiGLU"} if kind == "cpu" else set[str]()
    assert found.keys() == wanted


@pytest.mark.parametrize("kind", ["cpu", "metal", "cuda"])
@pytest.mark.parametrize("purpose", ["train", "evaluate", "generate"])
def test_every_pass_says_what_it_did_or_why_not(kind: str, purpose: Any) -> None:
    for stage in ("made", "adapted", "agreed"):
        for each in apply_passes(adapted(bits=4), context(kind, purpose), stage):
            assert str(each).startswith(f"{each.name}: ")
            assert (each.changed == 0) == each.words.startswith("not applied (")
            assert len(each.words) > len("not applied ()")


def test_a_graph_is_not_computed_at_once() -> None:
    model = adapted()
    found = apply_passes(model, PassContext(device("cpu"), "train", at_once=False))
    (told,) = [each for each in found if each.name == "native operations"]
    assert (told.changed, "--compile" in told.words) == (0, True)
    assert not native.is_native(model)


def test_keys_of_dropout_are_found_again() -> None:
    dropping, plain = adapted(dropout=0.1), adapted()
    for model in (dropping, plain):
        apply_passes(model, context("cpu"))
    assert dropout_keys_of(dropping) is not None
    assert dropout_keys_of(plain) is None


@pytest.mark.parametrize("kind", ["cpu", "metal", "cuda"])
def test_parameters_keep_their_names_and_other_models_their_forms(kind: str) -> None:
    model, other = adapted(dropout=0.1), adapted(dropout=0.1)
    names = [
        [name for name, _ in tree_flatten(each)]
        for each in (model.parameters(), model.trainable_parameters())
    ]
    types = [type(module) for module in other.modules()]
    apply_passes(model, context(kind, grad_checkpoint=True))
    after = [
        [name for name, _ in tree_flatten(each)]
        for each in (model.parameters(), model.trainable_parameters())
    ]
    assert after == names
    assert [type(module) for module in other.modules()] == types


class OwnNorm(nn.RMSNorm):
    """Not a type that is known."""


@needs_native
def test_types_that_are_not_known_are_left_alone() -> None:
    model = adapted()
    model.layers[0].input_layernorm = OwnNorm(64)
    apply_passes(model, context("cpu"))
    assert type(model.layers[0].input_layernorm) is OwnNorm
    assert type(model.layers[1].input_layernorm) is native.NativeNorm


def test_an_instance_takes_forms_of_its_own_class_alone() -> None:
    norm, other = nn.RMSNorm(4), nn.RMSNorm(4)
    with pytest.raises(TypeError):
        give_form(norm, nn.LayerNorm)
    with form_for_a_while(norm, OwnNorm):
        assert type(norm) is OwnNorm
    assert type(norm) is type(other) is nn.RMSNorm
    give_form(norm, OwnNorm, _note=1)
    assert (type(norm), norm._note, type(other)) == (OwnNorm, 1, nn.RMSNorm)
    assert [name for name, _ in tree_flatten(norm.parameters())] == ["weight"]


@needs_native
def test_two_models_of_a_process_compute_by_their_own_choices(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Forward, backward, and in the size of the loss's chunks; also when one's choices are replaced
    later.
    """
    calls: list[str] = []
    for name in ("rms_norm", "attention", "swiglu"):
        real = getattr(native, name)
        monkeypatch.setattr(
            native, name, lambda *a, _n=name, _r=real, **k: (calls.append(_n), _r(*a, **k))[1]
        )
    sizes: list[str] = []

    class Told(KernelSelection):
        def select(self, name: str, *of: Any) -> str:
            form = super().select(name, *of)
            sizes.extend([form] if name == "loss_chunk" else [])
            return form

    selections = Told(parse_request("plain,loss_chunk=128", "cpu")), Told()
    models = adapted(), adapted()
    for model, selection in zip(models, selections, strict=True):
        apply_passes(model, context("cpu", selection=selection))
    tokens = mx.random.randint(0, 101, (2, 40))
    batch = tokens[:, :-1], mx.arange(78), tokens[:, 1:].reshape(-1)

    def used(model: Any) -> tuple[set[str], str]:
        calls.clear()
        mx.eval(make_gradient(model, cpu_native=True)(*batch))
        return set(calls), sizes[-1]

    every = {"rms_norm", "attention", "swiglu"}
    # In turns: what one does leaves nothing for the other.
    assert [used(model) for model in (*models, *models)] == 2 * [(set(), "128"), (every, "256")]
    selections[1].requested = parse_request("rms_norm=plain,loss_chunk=512", "cpu")
    assert [used(model) for model in models] == [(set(), "128"), (every - {"rms_norm"}, "512")]


def test_what_was_given_no_choices_goes_by_rule() -> None:
    model = adapted()
    assert selection_of(model) is BY_RULE
    assert selection_of(model.layers[0]) is BY_RULE
