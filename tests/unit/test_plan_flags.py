"""Flags that save memory are tried together, and with the optimizer divided, before a framework is
named.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from written_runs import write_run

from allhands.io.names import PLAN_FILE
from allhands.observe.metrics import read_metrics
from allhands.plan.compared import compare
from allhands.plan.computers import Computer
from allhands.plan.job import Job
from allhands.plan.kept import keep_plan, read_plan
from allhands.plan.links import link_of
from allhands.plan.outlook import Outlook, look_ahead
from allhands.plan.speed import StepModel
from allhands.run.training_memory import DecoderShape, Work, on_gpu

# 1.44 billion weights with float32 copies: 64 rows of 2048 in micro-batches of 8, as on an RTX 4090.
LLAMA = DecoderShape(
    layers=24, dims=2048, mlp_dims=5632, queries=2048, keys=1024, vocabulary=151_680
)
WORK = Work(
    *("full", 16_384, 24, 2_890_000_000, 2_890_000_000, "adamw"),
    masters=True,
    accumulated=True,
    batch_tokens=131_072,
    row_tokens=2048,
)
STEP = StepModel(0.1, 131_072.0, 1e-4, 64, 2_890_000_000, 128_000_000, overlapped=True)
BOTH = "--grad-checkpoint --micro-batch-tokens"


def planned(gigabytes: float, *, machines: int = 8, **work: Any) -> Outlook:
    return look_ahead(
        Job(
            steps=100_000,
            start_s=5.0,
            step=STEP,
            link=link_of("pcie") if machines > 1 else None,
            computers=(Computer("a GPU", 1.0, int(gigabytes * 1e9)),),
            numbers=(machines,),
            blocks=LLAMA,
            work=replace(WORK, **work),
            of=on_gpu,
        )
    )


def shown(found: Outlook) -> dict[str, str]:
    """Of the ways of several flags those that are told, and whether they fit."""
    ways = [(way, way.fits) for way in found.memory]
    return {way.flags: {True: "yes", False: "no"}[bool(fits)] for way, fits in ways if way.combined}


def test_smaller_micro_batches_beside_the_divided_optimizer_are_enough() -> None:
    found = planned(22.56)
    divided = "--hostfile hosts.json --strategy zero1 --micro-batch-tokens 4096"
    assert shown(found) == {f"{BOTH} 2048": "no", divided: "yes"}
    advice = found.advice
    assert advice.outcome == "divide the optimizer"
    assert advice.title == "data parallel with the optimizer divided, and --micro-batch-tokens 4096"
    assert advice.reasons[0] == f"each rank keeps a part of the optimizer's state: {divided}"


def test_checkpointing_comes_after_smaller_micro_batches_and_with_them() -> None:
    half: dict[str, Any] = {
        "weights_bytes": 1_450_000_000,
        "trained_bytes": 1_450_000_000,
        "masters": False,
    }
    found = planned(13.0, optimizer="sgd", **half)
    assert found.advice.title == "data parallel on 8 machines, each with --micro-batch-tokens 4096"
    alone = planned(13.0, machines=1, optimizer="sgd", **half)
    assert alone.advice.title == "one machine, with --micro-batch-tokens 4096"
    tight = planned(
        6.9, machines=1, weights_bytes=1_450_000_000, trained_bytes=1_450_000_000, optimizer="sgd"
    )
    assert tight.advice.title == "more computers, or more memory in them"
    long = {
        "tokens": 131_072,
        "row_tokens": 65_536,
        "masters": False,
        "optimizer": "sgd",
        "accumulated": False,
    }
    rows = planned(45.0, machines=1, **long)
    assert rows.advice.title == f"one machine, with {BOTH} 65536"


def test_where_nothing_is_enough_the_least_of_all_shows_by_how_much() -> None:
    found = planned(9.4, machines=2)
    assert found.advice.outcome == "framework"
    assert set(shown(found).values()) == {"no"}
    assert list(shown(found)) == [
        f"{BOTH} 2048",
        f"--hostfile hosts.json --strategy zero1 {BOTH} 2048",
    ]


def test_flags_that_change_no_result_come_before_four_bits() -> None:
    lora = {"method": "lora", "trained_bytes": 20_000_000, "masters": False, "tokens": 131_072}
    found = planned(9.0, machines=1, **lora)
    assert found.advice.path[-1].why == "--micro-batch-tokens 2048"
    # The weights alone are 2.9 GB.
    small = planned(3.5, machines=1, **lora)
    assert (
        small.advice.title
        == f"one machine, with allhands model get MODEL --quantize 4, then {BOTH} 2048"
    )
    assert "weights in 4 bits are rounded" in small.advice.reasons[0]


@pytest.mark.parametrize("gigabytes", [60.0, 40.0, 34.0])
def test_where_one_flag_is_enough_none_are_combined(gigabytes: float) -> None:
    assert not [flags for flags in shown(planned(gigabytes)) if "--hostfile" not in flags]


@pytest.mark.parametrize(
    ("options", "way"),
    [
        (
            {"grad_checkpoint": True, "micro_batch_tokens": 2048},
            "checkpointing, micro-batches of 2048",
        ),
        ({"grad_checkpoint": True}, "checkpointing"),
        ({"micro_batch_tokens": 2048}, "as it is"),
        ({}, "as it is"),
    ],
)
def test_a_run_with_the_flags_together_is_held_to_their_own_line(
    tmp_path: Path, options: dict[str, Any], way: str
) -> None:
    run = write_run(tmp_path / "run", ranks=1)
    ways = {"as it is": "", "checkpointing": "--grad-checkpoint"}
    ways["checkpointing, micro-batches of 2048"] = f"{BOTH} 2048"
    memory = [
        {
            "name": name,
            "ranks": 1,
            "rank_bytes": 400_000_000 + place,
            "flags": flags,
            "strategy": "data",
        }
        for place, (name, flags) in enumerate(ways.items())
    ]
    plan: dict[str, Any] = {
        **{
            "time": 1.0,
            "options": {"grad_checkpoint": False, "micro_batch_tokens": None},
            "processor": "cpu",
        },
        **{
            "device": None,
            "steps": 60,
            "start_s": 2.0,
            "step": {"tokens": 200.0},
            "measured": None,
        },
        "machines": [
            {"machines": 1, "prediction": {"step_s": 0.5, "exposed_s": 0.0}, "training_s": 32.0}
        ],
        "memory": memory,
    }
    keep_plan(run, plan)
    config = {"grad_checkpoint": False, "micro_batch_tokens": None, **options}
    found = compare(read_plan(run / PLAN_FILE), read_metrics(run), config)
    figure = next(one for one in found.figures if one.key == "memory")
    assert f"({way})" in figure.of
    assert figure.marked == (options == {"micro_batch_tokens": 2048}), (
        "the plan has no line for that"
    )
