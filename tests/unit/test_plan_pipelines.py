"""Where a model fits no single computer the plan divides its blocks; where it fits one, it does not
speak of it.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from allhands.cli import plan_shown
from allhands.parallel.costs import PipelineCosts
from allhands.plan.computers import Computer
from allhands.plan.devices import device_of
from allhands.plan.job import Job, SmallPasses
from allhands.plan.links import link_of
from allhands.plan.outlook import Outlook, look_ahead
from allhands.plan.speed import StepModel
from allhands.run.model_sizes import forms_on_cpu
from allhands.run.training_memory import DecoderShape, Work, on_gpu

# 70 billion weights in 4 bits, LoRA of rank 8 in all blocks, 8 rows of 1,024 in micro-batches of
# one.
LARGE = DecoderShape(
    layers=80, dims=8192, mlp_dims=28672, queries=8192, keys=1024, vocabulary=128_256
)
WORK = Work(
    "lora", 1024, 80, 39_700_000_000, 410_000_000, "adamw", batch_tokens=8192, row_tokens=1024
)


def planned(
    computers: tuple[str, ...],
    link: str = "thunderbolt4",
    *,
    work: Work = WORK,
    rows: int = 8,
    **changed: Any,
) -> Outlook:
    devices = [device_of(each) for each in computers]
    values: dict[str, Any] = {
        "steps": 1000,
        "start_s": 0.0,
        "step": StepModel(0.1, 1024.0 * rows, 0.01, rows, 410_000_000, 32_000_000),
        "link": link_of(link) if len(computers) > 1 else None,
        "computers": tuple(
            Computer(
                each.name,
                each.flops / devices[0].flops,
                each.usable_bytes,
                each.memory_bytes,
                each.why,
            )
            for each in devices
        ),
        **{
            "numbers": (),
            "blocks": LARGE,
            "work": replace(work, recomputed=True),
            "of": on_gpu,
            "batch_rows": rows,
        },
        **{"quantised": True, "kind": "metal"},
    }
    return look_ahead(Job(**{**values, **changed}))


def test_a_pipeline_that_is_asked_for_has_a_line_beside_one_computer() -> None:
    fits: dict[str, Any] = {"work": replace(WORK, weights_bytes=8_000_000_000)}
    unasked, asked = (
        planned(("M2 Max 64GB",) * 2, **fits, **more) for more in ({}, {"wants_stages": True})
    )
    assert not unasked.pipelines
    assert [each.fits for each in asked.pipelines] == [True]
    assert asked.advice == unasked.advice


def test_a_model_that_fits_none_is_divided_by_speed_and_memory() -> None:
    found = planned(
        ("M2 Max 64GB", "M2 Max 32GB"), work=replace(WORK, weights_bytes=52_000_000_000)
    )
    (only,) = found.pipelines
    assert (found.advice.outcome, found.advised) == ("pipeline", 2)
    assert only.fits
    assert sum(only.sizes) == 80
    assert only.sizes[0] > only.sizes[1], "48 GB beside 24"
    assert all(
        needed <= usable
        for needed, usable in zip(only.num_bytes, only.usable_bytes, strict=True)
        if usable
    )
    # Weights, adapters with their states and gradients, and two micro-batches of activations at
    # most.
    assert sum(only.num_bytes) == pytest.approx(52e9 + 4 * 0.41e9, rel=0.15)
    assert only.micro_batches == 8
    assert only.bubble == pytest.approx(1 / 9)
    assert only.told in found.advice.reasons
    assert json.loads(json.dumps(found.as_json()))["pipelines"][0]["sizes"] == list(only.sizes)


def test_its_time_is_that_of_the_slowest_stage_with_the_bubble_and_the_messages() -> None:
    (equal,) = planned(
        ("M2 Max 64GB", "M2 Max 64GB"), work=replace(WORK, weights_bytes=70_000_000_000)
    ).pipelines
    one = 8192 * 0.01
    assert equal.sizes in ((41, 39), (40, 40))
    assert equal.step_s == pytest.approx(0.1 + one / 2 * 9 / 8 + equal.messages_s, rel=0.05)
    # A hidden state of 1,024 x 8,192 numbers in half precision over 18 Gbit/s, there and back.
    assert equal.messages_s == pytest.approx(2 * (60e-6 + 1024 * 8192 * 2 * 8 / 18e9), rel=0.01)
    assert equal.sent_bytes == 8 * 1024 * 8192 * 2
    slow = planned(
        ("M2 Max 64GB", "M1 Pro 64GB"), work=replace(WORK, weights_bytes=70_000_000_000)
    ).pipelines[0]
    assert slow.sizes[0] > slow.sizes[1]
    assert slow.step_s > 1.2 * equal.step_s
    wifi = planned(
        ("M2 Max 64GB", "M2 Max 64GB"), "wifi", work=replace(WORK, weights_bytes=70_000_000_000)
    )
    assert wifi.pipelines[0].messages_s > 50 * equal.messages_s


@pytest.mark.parametrize(
    ("computers", "outcome"),
    [
        (("M2 Ultra 192GB", "M2 Max 64GB"), None),  # fits one: nothing is said of it
        (("M2 Max 64GB",), "framework"),  # there is no second
        (("M1 16GB", "M1 16GB"), "framework"),  # nor room in both
        (("M1 16GB",) * 5, "pipeline"),
    ],
)
def test_a_pipeline_is_advised_only_where_it_is_needed_and_fits(
    computers: tuple[str, ...], outcome: str | None
) -> None:
    found = planned(
        computers, work=replace(WORK, weights_bytes=50_000_000_000) if len(computers) == 1 else WORK
    )
    if outcome is None:
        assert not found.pipelines
        assert found.advice.outcome != "pipeline"
        return
    assert found.advice.outcome == outcome
    assert any(each.fits for each in found.pipelines) == (outcome == "pipeline")
    if len(computers) == 2:
        assert all(missing > 0 for missing in found.pipelines[-1].missing)


def test_the_table_has_every_number_of_computers(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=300, record=True)
    monkeypatch.setattr(plan_shown, "console_for", lambda **_: console)
    found = planned(("M1 16GB",) * 5, work=replace(WORK, weights_bytes=37_000_000_000))
    plan_shown.show(found, [])
    shown = console.export_text()
    assert [each.fits for each in found.pipelines] == [False, False, True, True]
    for each in found.pipelines:
        assert f"{each.machines}: {each.told}" in shown
    console = Console(width=300, record=True)
    monkeypatch.setattr(plan_shown, "console_for", lambda **_: console)
    plan_shown.show(planned(("M2 Ultra 192GB", "M2 Max 64GB")), [])
    assert "pipeline" not in console.export_text()


def test_small_micro_batches_take_longer_for_each_token() -> None:
    """A step of 82 s in one micro-batch, of which 0.1 s are none of its passes: 8 micro-batches
    take 96 s.
    """
    one, large = 8192 * 0.01, replace(WORK, weights_bytes=70_000_000_000)
    small = SmallPasses(
        tokens=1024, limit=1024, longest=1024, batches=8, usual=1, seconds=0.1 + one + 14.0
    )
    (before,) = planned(("M2 Max 64GB", "M2 Max 64GB"), work=large).pipelines
    (after,) = planned(("M2 Max 64GB", "M2 Max 64GB"), work=large, small=small).pipelines
    assert after.micro_batches == before.micro_batches == 8
    assert after.step_s - after.messages_s == pytest.approx((one + 16.0) / 2 * 9 / 8, rel=0.03)
    assert after.num_bytes == before.num_bytes
    # Four times as many rows: four in a micro-batch with two stages, two with four.
    small = replace(small, tokens=4096, limit=4096)
    many = planned(
        ("M2 Max 64GB",) * 4, work=replace(large, batch_tokens=32768), rows=32, small=small
    ).pipelines
    assert [each.micro_batches for each in many] == [8, 12, 16]


def test_packed_weights_are_taken_where_no_others_fit() -> None:
    """A block has 0.86 billion numbers: 0.97 GB as codes, 0.48 GB packed; a table is 4.2 GB, or
    0.59 GB.
    """
    forms = forms_on_cpu(LARGE, 4, 64)
    (codes,) = planned(
        ("M2 Max 96GB", "M2 Max 96GB"), forms=forms, work=replace(WORK, weights_bytes=10**11)
    ).pipelines
    (packed,) = planned(
        ("M2 Max 64GB", "M2 Max 32GB"), forms=forms, work=replace(WORK, weights_bytes=10**11)
    ).pipelines
    assert codes.fits
    assert packed.fits
    assert sum(codes.num_bytes) - sum(packed.num_bytes) == pytest.approx(
        80 * 0.48e9 + 2 * 3.6e9, rel=0.05
    )
    assert packed.step_s > 1.09 * codes.step_s


def test_more_messages_than_computing_make_the_link_the_slowest_stage() -> None:
    costs = PipelineCosts(micro_batches=4, hidden_bytes=10)
    assert costs.step_s([1.0, 1.0], 0.0) == 5.0
    assert costs.step_s([1.0, 0.5], 0.0) == 4.5
    assert costs.step_s([1.0, 1.0], 3.0) == 2.0 + 6.0 + 9.0
    assert [costs.traffic(0, 0, scatters=False).sent(ranks) for ranks in (1, 2, 3)] == [0, 40, 80]
