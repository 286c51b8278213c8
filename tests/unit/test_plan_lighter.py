"""What is offered where a link is slow, and that nothing is where it is not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allhands.distributed.codecs import CODECS
from allhands.plan.lighter import lighter_ways
from allhands.plan.links import Link, link_of
from allhands.plan.speed import StepModel, predict

STEP = StepModel(0.05, 4096.0, 0.5e-3, 16, 29_000_000, 32_000_000)


SLOW, FAST = link_of("100Mbit/s,1ms"), link_of("thunderbolt4")


def test_over_a_slow_link_what_sends_less_is_faster() -> None:
    ways = {way.flags: way for way in lighter_ways(STEP, SLOW, [1.0, 1.0], 0, "cpu")}
    plain = ways[""]
    assert plain.step_s == predict(STEP, SLOW, [1.0, 1.0]).step_s
    assert plain.sent_bytes == STEP.gradient_bytes
    order = ("", "--compress bf16", "--compress int8", "--compress int4", "--sync-every 50")
    seconds = [ways[flags].step_s for flags in order]
    assert seconds == sorted(seconds, reverse=True)
    for name in ("bf16", "int8", "int4"):
        assert ways[f"--compress {name}"].sent_bytes == pytest.approx(
            CODECS[name].ratio * plain.sent_bytes, rel=0.02
        )
    assert ways["--sync-every 50"].sent_bytes == pytest.approx(plain.sent_bytes / 50, rel=0.01)
    assert ways["--grad-accumulation-steps 4"].sent_bytes == plain.sent_bytes // 4
    streamed = next(way for flags, way in ways.items() if "--sync-fragments" in flags)
    together = ways["--sync-every 50 --compress int4"]
    assert streamed.sent_bytes == together.sent_bytes
    computed = streamed.step_s - streamed.exposed_s
    assert streamed.exposed_s < 0.4 * together.exposed_s
    late, packed = ways["--compress int4 --sync-delay 1"], ways["--compress int4"]
    assert late.sent_bytes == packed.sent_bytes
    assert late.exposed_s < 0.1 * packed.exposed_s
    assert late.step_s - late.exposed_s == pytest.approx(packed.step_s - packed.exposed_s)
    # Steps cannot hide what takes longer than they do.
    narrow = link_of("100kbit/s,1ms")
    slow = next(
        w for w in lighter_ways(STEP, narrow, [1.0, 1.0], 0, "cpu") if "--sync-fragments" in w.flags
    )
    assert slow.exposed_s > computed


@pytest.mark.parametrize(
    ("step", "link", "speeds"),
    [
        (STEP, FAST, [1.0, 1.0]),
        (STEP, SLOW, [1.0]),
        (replace(STEP, every=50), SLOW, [1.0, 1.0]),
        (replace(STEP, gradient_bytes=0), SLOW, [1.0, 1.0]),
    ],
    ids=["fast", "alone", "in rounds", "nothing"],
)
def test_nothing_is_offered_where_it_would_not_help(
    step: StepModel, link: Link, speeds: list[float]
) -> None:
    assert lighter_ways(step, link, speeds, 0, "cpu") == []


def test_only_what_gains_is_offered() -> None:
    """Of half precision bf16 does not; over NCCL many ranks gain nothing by int8."""
    half = {way.flags for way in lighter_ways(replace(STEP, word=2), SLOW, [1.0, 1.0], 0, "cpu")}
    assert "--compress bf16" not in half
    assert "--compress int8" in half
    many = {way.flags for way in lighter_ways(STEP, SLOW, [1.0] * 8, 0, "cuda")}
    assert not [flags for flags in many if "int8" in flags]
    assert "--sync-every 50" in many
