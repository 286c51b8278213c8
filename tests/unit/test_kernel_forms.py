"""The form in which an operation is computed: rules, what a person asks for, agreement of ranks,
and resuming.
"""

from __future__ import annotations

import json
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tuner.utils import linear_to_lora_layers
from substituted import prepare_dense, prepare_quantized
from twins import run_ranks

from allhands.errors import ConfigError
from allhands.kernels import native, native_products
from allhands.kernels.fused import linear
from allhands.kernels.fused.blocks import fuse
from allhands.kernels.selection import BY_RULE, FORMS, KernelSelection, Kind, parse_request
from allhands.objectives.cross_entropy import eager_linear_cross_entropy
from allhands.run.explain import kernel_choices
from allhands.run.kernel_forms import KernelForms, kernel_forms
from allhands.runtime.accelerator import Accelerator

KINDS: tuple[Kind, ...] = ("cpu", "metal", "cuda")
EVERY = [(name, kind) for name in FORMS for kind in KINDS if kind in FORMS[name]]
pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler, or not a Linux CPU")


def cpu(**changes: Any) -> Accelerator:
    facts = {
        "kind": "cpu",
        "name": "x",
        "memory_bytes": 1,
        "cores": 2,
        "cpu_native": True,
        "warning": None,
    }
    return Accelerator(**facts | changes)


# --- decisions ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_by_rule_it_is_the_first_form(name: str, kind: Kind) -> None:
    assert BY_RULE.select(name, kind, 1000) == FORMS[name][kind][0]


def test_few_tokens_are_multiplied_by_the_quantised_weight_itself() -> None:
    assert [BY_RULE.select("quantized_linear", "cuda", n) for n in (199, 200)] == ["plain", "dense"]


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_no_request_gives_what_the_device_does_not_have(name: str, kind: Kind) -> None:
    foreign = {form for forms in FORMS[name].values() for form in forms} - set(FORMS[name][kind])
    for form in (*foreign, "unheard-of"):
        assert KernelSelection({name: form}).select(name, kind, 512) == FORMS[name][kind][0]


def test_a_form_that_is_missing_is_neither_taken_nor_told() -> None:
    found = KernelSelection({"": "native"}, {"native"})
    assert found.explain("rms_norm", "cpu") == ("plain", "rule for cpu without native operations")
    assert found.select("swiglu", "cpu") == "polynomial"
    with pytest.raises(ConfigError) as caught:
        parse_request("rms_norm=native", "cpu", found.missing)
    assert caught.value.code == "value-unknown"
    assert kernel_forms(cpu(), {}, cpu_native=False).selection.missing == {"native"}


def test_a_request_wins_and_says_so() -> None:
    found = KernelSelection({"rms_norm": "plain"})
    assert found.explain("rms_norm", "cpu") == ("plain", "asked for by ALLHANDS_KERNELS")
    assert found.explain("swiglu", "cpu") == ("native", "rule for cpu")


def test_plain_is_plain_wherever_there_is_such_a_form() -> None:
    selection = KernelSelection(parse_request("plain, swiglu=polynomial", "cpu"))
    found = {name: selection.select(name, "cpu") for name in FORMS if "cpu" in FORMS[name]}
    assert found.pop("swiglu") == "polynomial"
    assert found.pop("loss_chunk") == "256"
    assert set(found.values()) == {"plain"}


@pytest.mark.parametrize("text", ["", "auto", " auto , "])
def test_nothing_asked_for(text: str) -> None:
    assert parse_request(text, "cpu") == {}


@pytest.mark.parametrize(
    "text", ["rms_nom=plain", "rms_norm=fused", "rms_norm", "fast", "rms_norm=", "rope=plain"]
)
def test_what_there_is_not_is_one_clear_error(text: str) -> None:
    with pytest.raises(ConfigError, match="ALLHANDS_KERNELS") as caught:
        parse_request(f"swiglu=plain,{text}", "cpu")
    assert text in str(caught.value)
    assert "swiglu=native|polynomial|plain" in str(caught.value.hint)
    assert caught.value.exit_code == 2


# --- what is computed -----------------------------------------------------------------------------


ARGUMENTS = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 96,
}
ARGUMENTS |= {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "vocab_size": 101,
}


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> list[str]:
    """The calls of functions from now on, by their names."""
    calls: list[str] = []
    for name in names:
        real = getattr(module, name)
        monkeypatch.setattr(
            module, name, lambda *a, _n=name, _r=real, **k: (calls.append(_n), _r(*a, **k))[1]
        )
    return calls


@pytest.mark.parametrize("wish", ["plain", "rms_norm=plain,attention=plain,swiglu=polynomial"])
def test_a_model_computes_in_the_forms_that_are_chosen(
    wish: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mx.random.seed(7)
    model = Model(ModelArgs.from_dict(ARGUMENTS))
    model.freeze()
    tokens = mx.random.randint(0, 101, (2, 40))
    expected = model(tokens)
    prepare_dense(model)
    selection = KernelSelection()
    assert native.use_native(model, selection) > 0
    calls = counted(monkeypatch, native, "rms_norm", "attention", "swiglu")
    assert mx.allclose(model(tokens), expected, atol=1e-4)
    assert set(calls) == {"rms_norm", "attention", "swiglu"}
    calls.clear()
    selection.requested = parse_request(wish, "cpu")
    assert mx.allclose(model(tokens), expected, atol=1e-4)
    assert calls == []


def quantised_model() -> Any:
    """With adapters that are not zero."""
    mx.random.seed(7)
    model: Any = Model(ModelArgs.from_dict(ARGUMENTS))
    nn.quantize(
        model,
        group_size=32,
        bits=4,
        class_predicate=lambda _, module: isinstance(module, nn.Linear),
    )
    model.freeze()
    keys = ["self_attn.q_proj", "mlp.up_proj"]
    linear_to_lora_layers(model, 2, {"rank": 2, "scale": 2.0, "dropout": 0.0, "keys": keys})
    for name, value in tree_flatten(model.trainable_parameters()):
        model.load_weights([(name, 0.1 * mx.random.normal(value.shape))], strict=False)
    return model


def loss_and_gradients(model: Any) -> list[mx.array]:
    tokens = mx.arange(240).reshape(2, 120) * 7 % 101
    found = nn.value_and_grad(
        model, lambda m: nn.losses.cross_entropy(m(tokens), tokens, reduction="mean")
    )(model)
    arrays = [found[0], *(gradient for _, gradient in tree_flatten(found[1]))]
    mx.eval(arrays)
    return arrays


def assert_alike(found: list[mx.array], expected: list[mx.array]) -> None:
    assert len(found) == len(expected) > 4
    for one, other in zip(found, expected, strict=True):
        assert mx.abs(one - other).max().item() <= 1e-3 * mx.abs(other).max().item()


def use_codes(model: Any, selection: KernelSelection) -> None:
    prepare_quantized(model, cpu(), compact=True)
    assert native.use_native(model, selection) > 0


@pytest.mark.parametrize(
    ("prepare", "module", "name", "fast", "plain"),
    [
        (use_codes, native_products.CodedProduct, "run", "native", "plain"),
        (
            lambda model, selection: fuse(model, 120, selection),
            linear,
            "dequantized",
            "dense",
            "plain",
        ),
        # As on Metal, where the rule is the other way round.
        (linear.use_dense, linear, "dequantized", "dense", "plain"),
    ],
    ids=["cpu", "joined", "each"],
)
def test_quantised_layers_multiply_as_chosen(
    prepare: Any, module: Any, name: str, fast: str, plain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, model = loss_and_gradients(quantised_model()), quantised_model()
    selection = KernelSelection()
    prepare(model, selection)
    calls = counted(monkeypatch, module, name)
    for form, called in ((fast, True), (plain, False)):
        selection.requested = {"quantized_linear": form, "adapted_linear": form}
        assert_alike(loss_and_gradients(model), expected)
        assert bool(calls) == called
        calls.clear()


@pytest.mark.parametrize("rows", ["128", "256", "512"])
def test_the_loss_goes_in_chunks_of_the_chosen_size(rows: str) -> None:
    mx.random.seed(3)
    hidden, weight = mx.random.normal((300, 16)), mx.random.normal((101, 16))
    targets = mx.random.randint(0, 101, (300,))
    total, gradient, _ = eager_linear_cross_entropy(
        hidden, weight, targets, train_weight=False, selection=KernelSelection({"loss_chunk": rows})
    )
    expected = nn.losses.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert gradient is not None
    assert gradient.shape == hidden.shape


# --- several ranks, and resuming ------------------------------------------------------------------


def of_rank(request: str = "", *missing: str) -> KernelForms:
    return KernelForms("cpu", request, KernelSelection(parse_request(request, "cpu"), missing))


def test_all_ranks_go_by_rank_0() -> None:
    own = [of_rank("swiglu=plain"), of_rank("plain"), of_rank()]
    found: list[Any] = run_ranks(3, lambda group: own[group.rank].agreed(group))
    for each in found:
        assert each.selection.requested == {"swiglu": "plain"}
        assert each.recorded() == own[0].recorded()
        assert each.notes == ()


def test_ranks_that_lack_a_form_are_told_of() -> None:
    own = [of_rank("swiglu=native"), of_rank(), of_rank("", "native")]
    found: list[Any] = run_ranks(3, lambda group: own[group.rank].agreed(group))
    assert all("without native" in each.notes[0] for each in found)
    assert [each.selection.select("swiglu", "cpu") for each in found] == [
        "native",
        "native",
        "polynomial",
    ]


def test_a_resumed_run_says_what_may_differ_from_its_checkpoint() -> None:
    def notes(before: Any, now: KernelForms) -> tuple[str, ...]:
        return now.check_resumed({"kernels": json.loads(json.dumps(before))}).notes

    assert notes(of_rank("plain").recorded(), of_rank("plain")) == ()
    (changed,) = notes(of_rank().recorded(), of_rank("plain"))
    assert "changed from '' to 'plain'" in changed
    for one, other in ((of_rank(), of_rank("", "native")), (of_rank("", "native"), of_rank())):
        assert "without native" in notes(one.recorded(), other)[0]
    assert notes(KernelForms("cuda", "plain", KernelSelection()).recorded(), of_rank()) == ()
    assert of_rank().check_resumed({}).notes == ()


def test_what_earlier_versions_wrote_into_checkpoints_is_read() -> None:
    device = {
        "kind": "cpu",
        "name": "Xeon",
        "cores": 2,
        "missing": "",
        "mlx": "0.32.0",
        "forms": "1f",
    }
    before: dict[str, Any] = {"device": device, "wishes": "", "measured": [{"kind": "cpu"}]}
    assert of_rank().check_resumed({"kernels": before}).notes == ()


def test_each_choice_of_a_training_is_told() -> None:
    assert kernel_choices(of_rank("attention=plain"), 1024, quantised=False) == [
        "chosen: rms_norm: native (rule for cpu)",
        "chosen: swiglu: native (rule for cpu)",
        "chosen: attention: plain (asked for by ALLHANDS_KERNELS)",
        "chosen: loss_chunk: 256 (rule for cpu)",
    ]
    assert [line.split()[1] for line in kernel_choices(of_rank(), 1, quantised=True)][
        3
    ] == "quantized_linear:"
