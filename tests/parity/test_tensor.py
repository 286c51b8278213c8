"""Ranks that divide the matrices of blocks against one process: gradients of every family, and
whole trainings.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
from ring_ranks import run_ring
from tiny import write_chat_data, write_model
from trained import assert_same, assert_same_samples, told, train, write_poisoned

from allhands.parallel.matrices import CAN_BE_DIVIDED

RANKS = Path(__file__).parents[1] / "support" / "tensor_ranks.py"
DIVIDED = ("-n", "2", "--tp", "2")
ADAM = ("--fine-tune-type", "full", "--optimizer", "adamw", "--learning-rate", "0.001")
FAMILIES = [
    *(
        ("llama~tied", "full", "native"),
        ("llama", "lora", "plain"),
        ("llama", "quantised", "native"),
    ),
    *(("qwen2", "full", "plain"), ("qwen2~untied", "quantised", "native")),
    *(
        ("qwen3", "full", "native"),
        ("qwen3~wide heads", "lora", "native"),
        ("qwen3", "quantised", "plain"),
    ),
    *(
        ("qwen3_moe", "full", "plain"),
        ("qwen3_moe~yarn", "lora", "native"),
        ("qwen3_moe", "quantised", "native"),
    ),
    *(
        ("mixtral", "full", "native"),
        ("mixtral~linear", "quantised", "plain"),
        ("mixtral", "lora", "native"),
    ),
    ("mixtral", "full", "balanced"),
    *(
        ("gpt_oss", "full", "native"),
        ("gpt_oss~yarn", "lora", "plain"),
        ("gpt_oss", "quantised", "native"),
    ),
    *(("deepseek_v2", "full", "native"), ("deepseek_v2~groups", "full", "plain")),
    *(("deepseek_v2", "quantised", "plain"), ("deepseek_v2~groups", "lora", "native")),
]
OTHERS = [
    ("qwen3", "full", "forgotten"),
    ("qwen3_moe", "lora", "forgotten"),
    ("gemma2", "full", "plain"),
    ("llama+", "quantised", "plain"),
]
OF_FOUR = [
    ("llama~tied", "full", "native"),
    ("deepseek_v2", "lora", "plain"),
    ("mixtral", "full", "plain"),
]


def said_by(ranks: int, cases: list[tuple[str, str, str]]) -> dict[tuple[str, str, str], Any]:
    done = run_ring([[sys.executable, RANKS, json.dumps(cases)]] * ranks)
    assert all(one.returncode == 0 for one in done), done[0].stderr[-2000:]
    assert len({one.stdout for one in done}) == 1
    return dict(zip(cases, json.loads(done[0].stdout), strict=True))


@pytest.fixture(scope="module")
def of_two() -> dict[tuple[str, str, str], Any]:
    return said_by(2, [*FAMILIES, *OTHERS])


@pytest.fixture(scope="module")
def of_four() -> dict[tuple[str, str, str], Any]:
    return said_by(4, OF_FOUR)


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES, ids=" ".join)
def test_gradients_are_those_of_the_whole_model(
    of_two: dict[Any, Any], case: tuple[str, str, str]
) -> None:
    loss, gradients, squares = of_two[case]
    assert (loss < 1e-6, gradients < 5e-6, squares < 2e-5) == (True, True, True), (
        loss,
        gradients,
        squares,
    )


@pytest.mark.slow
@pytest.mark.parametrize("case", OF_FOUR[:2], ids=" ".join)
def test_four_ranks_divide_a_model_too(of_four: dict[Any, Any], case: tuple[str, str, str]) -> None:
    loss, gradients, squares = of_four[case]
    assert (loss < 1e-6, gradients < 5e-6, squares < 2e-5) == (True, True, True), (
        loss,
        gradients,
        squares,
    )


def test_every_family_is_compared() -> None:
    assert {name.partition("~")[0] for name, _, _ in FAMILIES} == CAN_BE_DIVIDED


@pytest.mark.slow
def test_a_sum_that_is_left_out_is_noticed(of_two: dict[Any, Any]) -> None:
    for case, name in (
        (OTHERS[0], "layers.0.self_attn.q_norm.weight"),
        (OTHERS[1], "q_proj.lora_a"),
    ):
        assert of_two[case].startswith("NumericsError: the gradient of model.layers.0."), of_two[
            case
        ]
        assert name in of_two[case]


@pytest.mark.slow
def test_what_cannot_be_divided_is_named(of_two: dict[Any, Any], of_four: dict[Any, Any]) -> None:
    assert "kind gemma2" in of_two[OTHERS[2]]
    assert (
        "model.layers.0.mlp.down_proj has 96 inputs in 3 quantisation groups of 32"
        in of_two[OTHERS[3]]
    )
    assert "model.layers.0.self_attn has 2 heads (num_key_value_heads)" in of_four[OF_FOUR[2]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tensor")
    write_model(folder / "model", layers=3, hidden=64)
    write_model(folder / "quantised", layers=3, hidden=64, bits=4)
    write_chat_data(folder / "data")
    return folder


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    train(place, "alone", "--fine-tune-type", "full")
    return place / "alone"


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        pytest.param(("-n", "4", "--backend", "mpi", "--tp", "2"), id="two copies"),
        # Its kernels may have to be built, which takes a minute.
        pytest.param(
            ("-n", "2", "--tp", "2", "--compile", "on"), id="in a graph", marks=pytest.mark.long
        ),
    ],
)
def test_ranks_train_as_one_process(place: Path, alone: Path, more: tuple[str, ...]) -> None:
    name = "-".join(more)
    train(place, name, "--fine-tune-type", "full", *more)
    assert_same(alone, place / name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "more"),
    [
        (
            "quantised",
            ("--lora-parameters", '{"rank": 4, "scale": 4.0, "dropout": 0.3}', "--backend", "ring"),
        ),
        (
            "model",
            (
                *(
                    "--packing",
                    "--isolate-documents",
                    "--max-seq-length",
                    "64",
                    "--grad-accumulation-steps",
                    "2",
                ),
                *("--grad-checkpoint", "--backend", "mpi"),
            ),
        ),
    ],
    ids=["quantised, dropout", "packed documents"],
)
def test_every_way_of_training_does(place: Path, model: str, more: tuple[str, ...]) -> None:
    *ways, _, _ = more
    one, other = f"one-{ways[0]}", f"two-{ways[0]}"
    train(place, one, *ways, model=model)
    train(place, other, *more, *DIVIDED, model=model)
    assert_same(place / one, place / other)


@pytest.mark.slow
def test_checkpoints_are_those_of_any_other_division(place: Path) -> None:
    train(place, "adam", *ADAM)
    train(place, "half", *ADAM, *DIVIDED, "--iters", "2")
    for name in ("again", "none", "sharded"):
        shutil.copytree(place / "half", place / name)
    train(place, "again", *ADAM, *DIVIDED, "--resume", "auto")
    train(place, "none", *ADAM, "--resume", "auto")
    train(place, "sharded", *ADAM, "-n", "2", "--strategy", "fsdp", "--resume", "auto")
    train(place, "half-alone", *ADAM, "--iters", "2")
    train(place, "half-alone", *ADAM, *DIVIDED, "--resume", "auto")
    for name in ("again", "none", "sharded", "half-alone"):
        assert_same(place / "adam", place / name)


@pytest.mark.slow
def test_samples_are_those_of_one_process(place: Path) -> None:
    assert_same_samples(place, DIVIDED)


@pytest.mark.slow
def test_examples_that_ruin_an_update_are_named_as_by_one_process(place: Path) -> None:
    write_poisoned(place)
    more = ("--data", str(place / "with-z"), "--non-finite", "skip", "--val-batches", "0")
    found: list[Any] = []
    for name, ways in (("skipped-1", ()), ("skipped-2", DIVIDED)):
        train(place, name, *more, *ways, model="poisoned")
        found.append(told(place / name, "skipped", "step", "examples"))
    assert found[0] == found[1]
    assert {each for examples in found[0][1::2] for each in examples} == {5, 12}
