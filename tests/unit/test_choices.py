"""Which form of an operation is computed: rules, measurements, wishes, the table's file, and agreement of ranks."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models.llama import Model, ModelArgs
from mlx_lm.tuner.utils import linear_to_lora_layers
from substituted import prepare_dense, prepare_quantized
from twins import run_ranks

from allhands.cli.main import main
from allhands.errors import ConfigError, ModelError
from allhands.kernels import native, native_products, selection
from allhands.kernels.fused import linear
from allhands.kernels.fused.blocks import fuse
from allhands.kernels.selection import (
    BY_RULE,
    FORMS,
    Choices,
    FormTimes,
    KernelSelection,
    Kind,
    SizedOperation,
    parse_wishes,
    tolerance,
)
from allhands.model import measurements
from allhands.objectives.cross_entropy import eager_linear_cross_entropy
from allhands.run import measuring, operations
from allhands.run.choosing import Settlement, agreed, own_choices, resumed
from allhands.run.explain import kernel_choices
from allhands.runtime.accelerator import Accelerator

KINDS: tuple[Kind, ...] = ("cpu", "metal", "cuda")
EVERY = [(name, kind) for name in FORMS for kind in KINDS if kind in FORMS[name]]
NORM = SizedOperation("rms_norm", "float32", (64,), 512)
SIZES = operations.ModelSizes(64, 96, 4, 2, 16, 257, 4, 32, "float32")


def cpu(**changes: Any) -> Accelerator:
    facts = {"kind": "cpu", "name": "x", "memory_bytes": 1, "cores": 2, "cpu_native": True, "warning": None}
    return Accelerator(**facts | changes)


def measured(problem: SizedOperation = NORM, *, native_ms: float, plain_ms: float, off: float = 0.0) -> FormTimes:
    times = {"native": native_ms, "plain": plain_ms}
    return FormTimes(problem, "cpu", times, times, {"native": off, "plain": 0.0})


pytestmark = pytest.mark.skipif(not native.available(), reason="no C compiler, or not a Linux CPU")


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of tables."""
    monkeypatch.setattr(measurements, "cache_dir", lambda: tmp_path)
    return tmp_path / "choices"


# --- decisions ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_by_rule_it_is_the_first_form(name: str, kind: Kind) -> None:
    assert BY_RULE.select(name, kind, mx.float32, 1000, (8,)) == FORMS[name][kind][0]


def test_few_tokens_are_multiplied_by_the_quantised_weight_itself() -> None:
    found = [BY_RULE.select("quantized_linear", "cuda", mx.bfloat16, n, (8, 8, 4, 32)) for n in (199, 200)]
    assert found == ["plain", "dense"]


@pytest.mark.parametrize(("name", "kind"), EVERY)
def test_no_wish_and_no_table_gives_what_the_device_does_not_have(name: str, kind: Kind) -> None:
    problem = SizedOperation(name, "float32", (8,), 512)
    foreign = {form for forms in FORMS[name].values() for each in forms for form in (each,)} - set(FORMS[name][kind])
    for form in (*foreign, "unheard-of"):
        times = {form: 1.0, "plain": 2.0}
        choices = Choices([FormTimes(problem, kind, times, times, dict.fromkeys(times, 0.0))], {name: form})
        assert choices.select(name, kind, mx.float32, 512, (8,)) in FORMS[name][kind]


@pytest.mark.parametrize(
    ("native_ms", "plain_ms", "off", "best"),
    [
        (1.0, 2.0, 0.0, "native"),
        (1.05, 1.0, 0.0, "native"),  # within the noise the rule stays
        (1.2, 1.0, 0.0, "plain"),
        (1.0, 9.0, 2 * tolerance("rms_norm", "float32"), "plain"),
        (1.0, 9.0, math.inf, "plain"),
    ],
)
def test_the_faster_form_is_taken_if_it_is_right(native_ms: float, plain_ms: float, off: float, best: str) -> None:
    found = measured(native_ms=native_ms, plain_ms=plain_ms, off=off)
    assert found.best == best
    assert Choices([found]).select("rms_norm", "cpu", mx.float32, 512, (64,)) == best


def test_a_disturbed_measurement_changes_nothing() -> None:
    disturbed = replace(measured(native_ms=3, plain_ms=1), least_ms={"native": 0.9, "plain": 0.9})
    assert disturbed.best == "native"


@pytest.mark.usefixtures("table")
def test_a_form_that_is_missing_is_neither_taken_nor_told() -> None:
    found = Choices([measured(native_ms=1, plain_ms=3)], {"": "native"}, missing=frozenset({"native"}))
    assert found.decide(NORM, "cpu") == ("plain", "default for cpu; `allhands bench kernels` measures")
    assert found.decide(replace(NORM, name="swiglu"), "cpu")[0] == "polynomial"
    with pytest.raises(ConfigError, match="not a choice"):
        parse_wishes("rms_norm=native", "cpu", found.missing)
    own = own_choices(cpu(), {}, cpu_native=False)
    assert own.choices.missing == {"native"}


@pytest.mark.parametrize(("tokens", "form"), [(64, "native"), (65, "plain"), (2048, "plain"), (2049, "native")])
def test_a_measurement_speaks_for_its_neighbours(tokens: int, form: str) -> None:
    """For the two powers of two above and below the 512 tokens that were measured, and for nothing else."""
    found = Choices([measured(native_ms=3.0, plain_ms=1.0)])
    assert found.select("rms_norm", "cpu", mx.float32, tokens, (64,)) == form
    assert found.select("rms_norm", "cpu", mx.float32, 512, (65,)) == "native"
    assert found.select("rms_norm", "cpu", mx.float16, 512, (64,)) == "native"
    assert found.select("rms_norm", "cuda", mx.float32, 512, (64,)) == "fused"


def test_the_nearest_measurement_decides() -> None:
    few, many = (replace(NORM, tokens=n) for n in (512, 2048))
    choices = Choices([measured(few, native_ms=3, plain_ms=1), measured(many, native_ms=1, plain_ms=3)])
    found = [choices.select("rms_norm", "cpu", mx.float32, n, (64,)) for n in (512, 1024, 1025, 4096)]
    assert found == ["plain", "plain", "native", "native"]


def test_a_wish_wins_and_says_so() -> None:
    found = Choices([measured(native_ms=1, plain_ms=3)], {"rms_norm": "plain"}, "Xeon")
    assert found.decide(NORM, "cpu") == ("plain", "asked for by ALLHANDS_KERNELS")
    told = replace(found, wished={}).decide(NORM, "cpu")
    assert told == ("native", "measured 3.0x plain at 512 x 64 on Xeon")
    other = Choices([measured(native_ms=5, plain_ms=2)], {}, "Xeon").decide(NORM, "cpu")
    assert other == ("plain", "measured 2.5x native at 512 x 64 on Xeon")
    assert Choices().decide(NORM, "cpu") == ("native", "default for cpu; `allhands bench kernels` measures")


def test_plain_is_plain_wherever_there_is_such_a_form() -> None:
    choices = Choices(wished=parse_wishes("plain, swiglu=polynomial", "cpu"))
    found = {name: choices.select(name, "cpu", mx.float32, 512, (8,)) for name in FORMS if "cpu" in FORMS[name]}
    assert found.pop("swiglu") == "polynomial"
    assert found.pop("loss_chunk") == "256"
    assert set(found.values()) == {"plain"}


@pytest.mark.parametrize("text", ["", "auto", " auto , "])
def test_nothing_asked_for(text: str) -> None:
    assert parse_wishes(text, "cpu") == {}


@pytest.mark.parametrize("text", ["rms_nom=plain", "rms_norm=fused", "rms_norm", "fast", "rms_norm=", "rope=plain"])
def test_what_there_is_not_is_one_clear_error(text: str) -> None:
    with pytest.raises(ConfigError, match="ALLHANDS_KERNELS") as caught:
        parse_wishes(f"swiglu=plain,{text}", "cpu")
    assert text in str(caught.value)
    assert "swiglu=native|polynomial|plain" in str(caught.value.hint)
    assert caught.value.exit_code == 2


# --- what is computed --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_each_form_computes_what_the_plain_one_does(kind: Kind) -> None:
    """Without a GPU MLX's own operations stand for the fused ones; tests/parity/test_fused.py runs the kernels."""
    found = operations.problems(SIZES, kind, [48, 300])
    assert {each.name for each in found} == {n for n in FORMS if kind in FORMS[n]} - {"dequantize"}  # of float32
    for problem in found:
        if problem.name == "adamw":
            problem = replace(problem, tokens=1 << 10)
        forms = operations.operation(problem, kind)
        assert set(forms) == set(FORMS[problem.name][kind])
        results = {name: form() for name, form in forms.items()}
        first = results[selection.reference(problem.name, kind)]
        for name, arrays in results.items():
            assert len(arrays) == len(first) >= 2, (problem, name)
            for one, other in zip(arrays, first, strict=True):
                wanted, actual = np.asarray(other), np.asarray(one)
                assert np.abs(wanted).max() > 0
                assert np.abs(actual - wanted).max() <= tolerance(problem.name, "float32") * np.abs(wanted).max(), name


def test_a_measurement_has_times_and_sees_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measuring.measure(NORM, "cpu")
    assert found.ms.keys() == found.difference.keys() == {"native", "plain"}
    assert all(ms > 0 for ms in found.ms.values())
    assert found.difference["plain"] == 0.0
    assert found.difference["native"] < 1e-5
    right = native.rms_norm
    monkeypatch.setattr(native, "rms_norm", lambda x, weight, eps: 1.01 * right(x, weight, eps))
    wrong = measuring.measure(NORM, "cpu")
    assert wrong.difference["native"] == pytest.approx(0.01, rel=0.05)
    assert wrong.best == "plain"


ARGUMENTS = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}
ARGUMENTS |= {"num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 101}


def counted(monkeypatch: pytest.MonkeyPatch, module: Any, *names: str) -> list[str]:
    """The calls of functions from now on, by their names."""
    calls: list[str] = []
    for name in names:
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, _n=name, _r=real, **k: (calls.append(_n), _r(*a, **k))[1])
    return calls


@pytest.mark.parametrize("wish", ["plain", "rms_norm=plain,attention=plain,swiglu=polynomial"])
def test_a_model_computes_in_the_forms_that_are_chosen(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
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
    selection.select_by(Choices(wished=parse_wishes(wish, "cpu")))
    assert mx.allclose(model(tokens), expected, atol=1e-4)
    assert calls == []


def quantised_model() -> Any:
    """With adapters that are not zero."""
    mx.random.seed(7)
    model: Any = Model(ModelArgs.from_dict(ARGUMENTS))
    nn.quantize(model, group_size=32, bits=4, class_predicate=lambda _, module: isinstance(module, nn.Linear))
    model.freeze()
    keys = ["self_attn.q_proj", "mlp.up_proj"]
    linear_to_lora_layers(model, 2, {"rank": 2, "scale": 2.0, "dropout": 0.0, "keys": keys})
    for name, value in tree_flatten(model.trainable_parameters()):
        model.load_weights([(name, 0.1 * mx.random.normal(value.shape))], strict=False)
    return model


def loss_and_gradients(model: Any) -> list[mx.array]:
    tokens = mx.arange(240).reshape(2, 120) * 7 % 101
    found = nn.value_and_grad(model, lambda m: nn.losses.cross_entropy(m(tokens), tokens, reduction="mean"))(model)
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
        (lambda model, selection: fuse(model, 120, selection), linear, "dequantized", "dense", "plain"),
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
        selection.select_by(Choices(wished={"quantized_linear": form, "adapted_linear": form}))
        assert_alike(loss_and_gradients(model), expected)
        assert bool(calls) == called
        calls.clear()


@pytest.mark.parametrize("rows", ["128", "256", "512"])
def test_the_loss_goes_in_chunks_of_the_chosen_size(rows: str) -> None:
    mx.random.seed(3)
    hidden, weight = mx.random.normal((300, 16)), mx.random.normal((101, 16))
    targets = mx.random.randint(0, 101, (300,))
    total, gradient, _ = eager_linear_cross_entropy(
        hidden, weight, targets, train_weight=False, selection=Choices(wished={"loss_chunk": rows})
    )
    expected = nn.losses.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    assert total.item() == pytest.approx(expected.item(), rel=1e-5)
    assert gradient is not None
    assert gradient.shape == hidden.shape


# --- the table ---------------------------------------------------------------------------------------


def test_what_was_measured_is_found_again_and_replaced_alone(table: Path) -> None:
    facts = measurements.device_facts(cpu())
    assert measurements.load_table(facts) == ([], None)
    other = measured(replace(NORM, tokens=8), native_ms=4, plain_ms=5, off=0.25)
    path = measurements.save_table(facts, [measured(native_ms=1, plain_ms=2), other])
    assert path.parent == table
    new = measured(native_ms=3, plain_ms=2)
    measurements.save_table(facts, [new])
    assert measurements.load_table(facts) == ([new, other], None)
    elsewhere = measurements.device_facts(cpu(cores=3))
    assert measurements.load_table(elsewhere) == ([], None)


def _spoilt(content: dict[str, Any], how: str) -> str:
    if how == "cut short":
        return json.dumps(content)[:-9]
    if how == "other device":
        content["device"]["cores"] = 77
    elif how == "other format":
        content["format"] = 2
    elif how == "no rows":
        content["measured"] = {"a": 1}
    elif how == "words for times":
        content["measured"][0]["ms"] = {"native": "fast"}
    return "[1]" if how == "a list" else json.dumps(content)


@pytest.mark.parametrize("how", ["cut short", "other device", "other format", "no rows", "words for times", "a list"])
@pytest.mark.usefixtures("table")
def test_a_file_that_cannot_be_used_is_said_and_left_alone(how: str) -> None:
    facts = measurements.device_facts(cpu())
    path = measurements.save_table(facts, [measured(native_ms=1, plain_ms=2)])
    path.write_text(_spoilt(json.loads(path.read_text()), how))
    found, notice = measurements.load_table(facts)
    assert found == []
    assert notice is not None
    assert str(path) in notice
    own = own_choices(cpu(), {})
    assert (list(own.choices.measured), own.notes) == ([], (notice,))


@pytest.mark.usefixtures("table")
def test_impossible_times_and_unknown_forms_are_left_out() -> None:
    facts = measurements.device_facts(cpu())
    times = {"native": -1.0, "plain": 2.0, "magic": 0.1}
    odd = FormTimes(NORM, "cpu", times, times, dict.fromkeys(times, 0.0))
    measurements.save_table(facts, [odd, FormTimes(replace(NORM, name="gone"), "cpu", {}, {}, {})])
    (found,) = measurements.load_table(facts)[0]
    assert found.best == "plain"


# --- several ranks, and resuming ---------------------------------------------------------------------


def settlement(*rows: FormTimes, wishes: str = "", **facts: Any) -> Settlement:
    return Settlement({"kind": "cpu", **facts}, wishes, Choices(rows, parse_wishes(wishes, "cpu"), "Xeon"))


def test_ranks_of_like_devices_go_by_rank_0() -> None:
    first, second = measured(native_ms=3, plain_ms=1), measured(native_ms=1, plain_ms=3)
    own = [settlement(first, wishes="swiglu=plain"), settlement(second, wishes="plain"), settlement()]
    found: list[Any] = run_ranks(3, lambda group: agreed(own[group.rank], group))
    for each in found:
        assert list(each.choices.measured) == [first]
        assert each.choices.wished == {"swiglu": "plain"}
        assert each.recorded() == own[0].recorded()
        assert each.notes == ()


def test_ranks_of_other_devices_go_by_the_rules() -> None:
    own = [settlement(measured(native_ms=3, plain_ms=1)), settlement(cores=7)]
    found: list[Any] = run_ranks(2, lambda group: agreed(own[group.rank], group))
    for each in found:
        assert list(each.choices.measured) == []
        assert "devices differ" in each.notes[0]
    own = [settlement(), settlement(), settlement(missing="native")]
    found = run_ranks(3, lambda group: agreed(own[group.rank], group))
    assert all("without native" in each.notes[0] for each in found)
    own = [settlement(), settlement(cores=7)]
    assert all(each.notes == () for each in run_ranks(2, lambda group: agreed(own[group.rank], group)))  # type: ignore[union-attr]


def test_a_resumed_run_keeps_its_table() -> None:
    before, now = measured(native_ms=3, plain_ms=1), measured(native_ms=1, plain_ms=3)
    state = json.loads(json.dumps({"kernels": settlement(before).recorded()}))
    found = resumed(settlement(now), state)
    assert list(found.choices.measured) == [before]
    assert "as the checkpoint's run chose them" in found.notes[0]
    assert resumed(settlement(before), state) == settlement(before)
    asked = resumed(settlement(before, wishes="plain"), state)
    assert asked.choices.wished == {"": "plain"}
    assert "changed from '' to 'plain'" in asked.notes[0]
    # A run without a table stays without one.
    assert list(resumed(settlement(now), {"kernels": settlement().recorded()}).choices.measured) == []
    for state in ({}, {"kernels": settlement(before, cores=9).recorded()}, {"kernels": {"device": {"kind": "cpu"}}}):
        assert list(resumed(settlement(now), state).choices.measured) == [now]
        assert resumed(settlement(now), state).notes == ()
    for one, other in (("", "native"), ("native", "")):
        state = {"kernels": settlement(before, missing=one).recorded()}
        assert "differ by rounding" in resumed(settlement(missing=other), state).notes[0]


def test_each_choice_of_a_training_is_told() -> None:
    config = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "vocab_size": 257}
    lines = kernel_choices(Choices([measured(native_ms=1, plain_ms=2)], {}, "Xeon"), config, cpu(), 1024)
    assert lines[0] == "chosen: rms_norm: native (measured 2.0x plain at 512 x 64 on Xeon)"
    assert lines[1] == "chosen: swiglu at 1024 x 96: native (default for cpu; `allhands bench kernels` measures)"
    assert [line.split()[1] for line in lines[2:]] == ["attention", "loss_chunk"]
    (unknown,) = kernel_choices(Choices(), {"hidden_size": 64}, cpu(), 1024)
    assert "does not say" in unknown
    with pytest.raises(ModelError, match="vocab_size"):
        operations.sizes_of({**config, "vocab_size": "many"}, cpu())


# --- the command -------------------------------------------------------------------------------------


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "kernels", *arguments])
    return caught.value.code, *capsys.readouterr()


def test_the_command_measures_tells_and_keeps(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--only", "rms_norm", "--tokens", "16,32", "--json", "--no-save")
    found = json.loads(out)
    assert code == 0
    assert [row["problem"]["tokens"] for row in found["measured"]] == [16, 32]
    assert found["measured"][0]["best"] in ("native", "plain")
    assert not table.exists()
    code, out, _ = run(capsys, "--only", "rms_norm", "--tokens", "16")
    (file,) = table.iterdir()
    assert code == 0
    assert "16 x 576" in out
    assert str(file) in out.replace("\n", "")
    (row,) = own_choices(cpu(cores=found["device"]["cores"]), {}).choices.measured
    assert row.problem == SizedOperation("rms_norm", "float32", (576,), 16)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [(("--only", "rope"), "rms_norm"), (("--shape", "9b"), "small, 1b, 7b"), (("--tokens", "0"), "512,2048")],
)
def test_mistakes_are_told(arguments: tuple[str, ...], word: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, *arguments)
    assert code == 2
    assert word in err
