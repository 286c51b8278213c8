"""Ranks that mean different runs are told so, all of them, before anything is summed."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import mlx.core as mx
import pytest
from twins import ThreadCommunicator, errors_of, run_ranks

from allhands.distributed.agree import agree
from allhands.distributed.backend import SingleProcess
from allhands.errors import DistributedError

FACTS: dict[str, Any] = {
    "config": {
        "batch_size": 4,
        "seed": 0,
        "data": "chats",
        "lora_parameters": {"rank": 8, "scale": 20.0},
    },
    "parameters": {
        "layers.0.lora_a": [[32, 8], "float32"],
        "layers.0.lora_b": [[8, 32], "float32"],
    },
    "data": {"train": "0f" * 32, "valid": None},
    "versions": {"mlx": "0.32.4"},
}


def changed(**sections: dict[str, Any]) -> dict[str, Any]:
    return {name: {**content, **sections.get(name, {})} for name, content in FACTS.items()}


def outcome(*facts: dict[str, Any]) -> list[Any]:
    return run_ranks(len(facts), lambda communicator: agree(communicator, facts[communicator.rank]))


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_equal_facts_pass_with_one_small_exchange(ranks: int) -> None:
    calls: list[list[tuple[str, tuple[int, ...]]]] = []

    def work(communicator: ThreadCommunicator) -> None:
        # Written in another order, they are the same facts.
        agree(communicator, dict(sorted(FACTS.items(), reverse=communicator.rank % 2 == 0)))
        calls.append(communicator.calls)

    assert run_ranks(ranks, work) == [None] * ranks
    # 32 bytes of SHA-256 each, however many parameters there are.
    assert calls == [[("all_gather", (1, 8))]] * ranks


def test_one_process_agrees_with_itself() -> None:
    agree(SingleProcess(), FACTS)


DIFFERENCES: dict[str, tuple[dict[str, Any], str]] = {
    "option": (
        changed(config={"batch_size": 8}),
        "config.batch_size is 4 on rank 0 and 8 on rank 1",
    ),
    "nested option": (
        changed(config={"lora_parameters": {"rank": 16, "scale": 20.0}}),
        "config.lora_parameters.rank is 8 on rank 0 and 16 on rank 1",
    ),
    "shape": (
        changed(parameters={"layers.0.lora_a": [[32, 16], "float32"]}),
        "parameters.layers.0.lora_a is [[32, 8], 'float32'] on rank 0 and [[32, 16], 'float32'] on rank 1",
    ),
    "dtype": (
        changed(parameters={"layers.0.lora_b": [[8, 32], "bfloat16"]}),
        "[[8, 32], 'bfloat16'] on rank 1",
    ),
    "one parameter more": (
        changed(parameters={"layers.1.lora_a": [[32, 8], "float32"]}),
        "parameters.layers.1.lora_a is missing on rank 0",
    ),
    "data": (changed(data={"train": "1f" * 32}), "data.train is 0f0f0f0f"),
    "version": (
        changed(versions={"mlx": "0.31.0"}),
        "versions.mlx is 0.32.4 on rank 0 and 0.31.0 on rank 1",
    ),
}


@pytest.mark.parametrize("kind", DIFFERENCES)
def test_a_difference_is_named_on_every_rank_alike(kind: str) -> None:
    other, message = DIFFERENCES[kind]
    errors = outcome(FACTS, other, FACTS)
    texts = errors_of(errors)
    assert len(set(texts)) == 1
    assert message in texts[0]
    assert "the ranks disagree: " in texts[0]
    assert "what to do: give every rank the same" in texts[0]
    assert all(isinstance(error, DistributedError) and error.exit_code == 7 for error in errors)
    # Only what differs is named.
    assert texts[0].count(" on rank 0 and ") == 1


def test_the_rank_that_differs_is_the_one_named() -> None:
    text = errors_of(outcome(FACTS, FACTS, FACTS, changed(config={"seed": 7})))[0]
    assert "config.seed is 0 on rank 0 and 7 on rank 3" in text


def test_many_differences_are_counted_not_listed() -> None:
    many = {"p": {f"name{i:03}": i for i in range(50)}}
    text = errors_of(outcome(many, {"p": {name: value + 1 for name, value in many["p"].items()}}))[
        0
    ]
    assert text.count(" on rank 0 and ") == 3
    assert "and 47 more" in text
    assert len(text) < 500


def test_texts_of_very_unequal_length_and_foreign_letters_travel_whole() -> None:
    texts = errors_of(outcome({"model": "ü€漢"}, {"model": "m" * 10_001}, {"model": ""}))
    assert len(set(texts)) == 1
    assert "model is ü€漢 on rank 0 and mmmmmmm" in texts[0]


def test_values_that_are_no_json_are_compared_by_their_text() -> None:
    assert outcome({"dtype": mx.float32}, {"dtype": mx.float32}) == [None, None]
    assert "bfloat16" in errors_of(outcome({"dtype": mx.float32}, {"dtype": mx.bfloat16}))[0]


def test_only_what_the_strategy_calls_equal_is_compared() -> None:
    """Stages of a pipeline have arrays of their own; those that all have must be the same."""
    import mlx.nn as nn

    from allhands.config.schema import TrainConfig
    from allhands.run.facts import RankFacts

    def facts(shapes: dict[str, int], equal: set[str] | None) -> Any:
        model: Any = nn.Module()
        for name, size in shapes.items():
            model[name] = mx.zeros((size,))
        loaded: Any = SimpleNamespace(model=model, fingerprint="f", config={})
        data: Any = SimpleNamespace(fingerprints=dict)
        return RankFacts(TrainConfig(train=True), loaded, data, None, equal).values()

    one, other = {"shared": 4, "first": 2}, {"shared": 4, "second": 3}
    assert errors_of(outcome(facts(one, None), facts(other, None)))
    assert outcome(facts(one, {"shared"}), facts(other, {"shared"})) == [None, None]
    assert errors_of(outcome(facts(one, {"shared"}), facts({"shared": 5}, {"shared"})))
