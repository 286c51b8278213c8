"""The chart of questions: where the path leads, and the arrows by which it is drawn."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from allhands.errors import ConfigError
from allhands.io.paths import output_file
from allhands.io.pictures import PICTURES
from allhands.plan import advice as chart
from allhands.plan.advice import Offer, Situation, advise
from allhands.plan.chart import arrows_of
from allhands.plan.links import faster_than, link_of
from allhands.plan.strategies import QUANTISE

HOSTS = "--hostfile hosts.json"
OFFER = Offer(
    machines=2,
    names="2 x a",
    training_s=36_000 / 1.9,
    speed_up=1.9,
    exposed=0.05,
    accumulated=1.95,
    flags=HOSTS,
)
FINE = Situation(
    again=True,
    alone_s=36_000,
    fits_one=True,
    fits_smaller="--grad-checkpoint",
    offer=OFFER,
    machines=2,
    enough=8,
)


def situation(**changed: Any) -> Situation:
    """The fine one with other values, also of what is offered; without others to help where that is
    ``None``.
    """
    if changed.get("offer", OFFER) is None:
        return replace(FINE, **changed)
    fields = {"names", "speed_up", "exposed", "accumulated", "flags", "more", "weights"}
    offered = {name: changed.pop(name) for name in fields & changed.keys()}
    found = replace(FINE, **changed)
    machines = changed.get("machines", 2)
    offer = replace(OFFER, **{"machines": machines, **offered})
    return replace(found, offer=replace(offer, training_s=found.alone_s / offer.speed_up))


DIVIDED = {"flags": f"{HOSTS} --strategy zero1", "more": "--strategy zero1"}
ALONE = {"machines": 1, "offer": None}


@pytest.mark.parametrize(
    ("changed", "outcome", "asked"),
    [
        ({}, "data parallel", [chart.AGAIN, chart.LONG, chart.FITS, chart.MORE, chart.PAYS]),
        ({"alone_s": 3000}, "one machine", [chart.AGAIN, chart.LONG]),
        ({"again": False, "alone_s": 20_000}, "one machine", [chart.AGAIN]),
        ({"again": False, "alone_s": 200_000}, "data parallel", None),
        ({"again": False, "alone_s": 20_000, "together": True}, "data parallel", None),
        (ALONE, "one machine", [chart.AGAIN, chart.LONG, chart.FITS, chart.MORE]),
        # 15 % saved is 1.176 times as fast.
        ({"speed_up": 1.18}, "data parallel", None),
        (
            {"speed_up": 1.17},
            "one machine",
            [chart.AGAIN, chart.LONG, chart.FITS, chart.MORE, chart.PAYS, chart.FAST],
        ),
        ({"speed_up": 1.03}, "one machine", None),
        ({"exposed": 0.3, "speed_up": 1.4}, "data parallel", None),
        ({"exposed": 0.3, "speed_up": 1.1, "accumulated": 1.2}, "faster link", None),
        ({"exposed": 0.7, "speed_up": 0.6, "accumulated": 1.5}, "accumulate", None),
        ({"exposed": 0.7, "speed_up": 0.6, "accumulated": 0.9}, "faster link", None),
        (
            {"fits_one": False},
            "data parallel",
            [chart.AGAIN, chart.LONG, chart.FITS, chart.SMALLER, chart.MORE, chart.PAYS],
        ),
        ({"fits_one": False, "exposed": 0.3, "speed_up": 1.4}, "data parallel", None),
        (
            {"fits_one": False, **ALONE},
            "smaller",
            [chart.AGAIN, chart.LONG, chart.FITS, chart.SMALLER],
        ),
        ({"fits_one": False, "together": True}, "smaller", None),
        ({"fits_one": False, "exposed": 0.7, "speed_up": 0.6}, "smaller", None),
        ({"fits_one": False, "speed_up": 1.1}, "smaller", None),
        ({"fits_one": False, "again": False, "alone_s": 20_000}, "smaller", None),
        ({"fits_one": False, "alone_s": 60}, "smaller", None),
        # For its memory it takes several, whatever they save of the time.
        ({"fits_one": False, "fits_smaller": "", **DIVIDED}, "divide the optimizer", None),
        ({"fits_one": False, "fits_smaller": "", "speed_up": 0.9}, "divide the optimizer", None),
        ({"fits_one": False, "fits_smaller": "", "offer": None}, "framework", None),
        ({"fits_one": False, "fits_smaller": "", **ALONE}, "framework", None),
        # Others that cannot hold their share are none.
        ({"offer": None, "unable": ("b: too small",)}, "one machine", None),
        ({"doubt": "the computer is busy"}, "measure again", []),
    ],
)
def test_the_chart(changed: dict[str, Any], outcome: str, asked: list[str] | None) -> None:
    found = advise(situation(**changed))
    several = ("data parallel", "accumulate", "divide the optimizer")
    assert (found.outcome, found.machines) == (outcome, 2 if outcome in several else 1)
    if asked is not None:
        assert [question.text for question in found.path] == asked
    arrows = arrows_of(found)
    for start in {arrow.start for arrow in arrows}:
        words = [arrow.word for arrow in arrows if arrow.start == start]
        assert len(set(words)) == len(words), (
            f"each exit of {start!r} has a word of its own: {words}"
        )
    stations = [*(question.text for question in found.path), found.outcome]
    assert {(arrow.start, arrow.end) for arrow in arrows if arrow.taken} == set(
        itertools.pairwise(stations)
    )
    answers = {question.text: question.answer for question in found.path}
    assert all(arrow.word == answers[arrow.start] for arrow in arrows if arrow.taken)
    usual = [
        (arrow.start, arrow.end, arrow.word) for arrow in arrows if arrow.word in ("yes", "no")
    ]
    assert usual == [(arrow.start, arrow.end, arrow.word) for arrow in arrows_of(advise(FINE))], (
        "always drawn alike"
    )


@pytest.mark.parametrize(
    ("changed", "question", "answer"),
    [
        ({"again": False, "alone_s": 200_000}, chart.AGAIN, "no, but long"),
        ({"again": False, "fits_one": False}, chart.AGAIN, "no, but too large"),
        (
            {"again": False, "alone_s": 20_000, "together": True},
            chart.AGAIN,
            "no, but nothing to set up",
        ),
        ({"fits_one": False, "alone_s": 60}, chart.LONG, "no, but too large"),
        ({"fits_one": False}, chart.SMALLER, "yes, and long"),
        ({"fits_one": False, "fits_smaller": "", **ALONE}, chart.DIVIDED, "no"),
    ],
)
def test_an_exception_says_that_it_is_one(
    changed: dict[str, Any], question: str, answer: str
) -> None:
    found = advise(situation(**changed))
    assert {one.text: one.answer for one in found.path}[question] == answer
    assert [
        arrow.word for arrow in arrows_of(found) if arrow.taken and arrow.start == question
    ] == [answer]


@pytest.mark.parametrize(("speed_up", "saves"), [(1.9, True), (0.8, False)])
def test_several_that_take_longer_save_no_time(speed_up: float, saves: bool) -> None:
    told = " ".join(advise(situation(alone_s=600, speed_up=speed_up)).reasons)
    assert ("sooner" in told) is saves
    assert ("longer" in told) is not saves


def test_flags_with_which_it_fits_are_for_each_of_several_machines() -> None:
    found = advise(situation(fits_one=False, machines=8, speed_up=6.0, more="--grad-checkpoint"))
    assert found.title == "data parallel on 8 machines, each with --grad-checkpoint"
    assert "6.00 times as fast on 8 machines" in " ".join(found.reasons)
    rounded = advise(situation(fits_one=False, fits_smaller=QUANTISE, more=QUANTISE))
    assert "rounded" in rounded.reasons[0]
    # A share may fit where the whole does not: then nobody needs flags.
    assert advise(situation(fits_one=False)).title == "data parallel on 2 machines"


def test_the_chart_says_how_long_and_why_it_goes_on() -> None:
    short = advise(situation(alone_s=98.0))
    assert short.path[-1].why == "about 1m38s"
    assert "--once" in advise(situation(again=False, alone_s=200_000)).path[0].why


@pytest.mark.parametrize("name", ["", ".", "..", "/tmp"])
def test_a_directory_is_no_name_of_a_picture(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        output_file(Path(name), PICTURES)
    assert caught.value.code == "output-name-invalid"


def test_advice_for_a_slow_link_is_of_that_link_and_that_training() -> None:
    slow = situation(
        exposed=0.99, speed_up=0.0027, accumulated=0.011, faster=faster_than(link_of("100MbE"))
    )
    full, lora = advise(slow).reasons, advise(replace(slow, adapters=True)).reasons
    assert "about 400 times slower on 2 machines" in full[0]
    assert full[1] == "10GbE or Thunderbolt in place of 100MbE; or LoRA, whose gradients are small"
    assert lora[1] == "10GbE or Thunderbolt in place of 100MbE"
    assert "about 90 times slower on 2 machines" in advise(slow).path[-1].why
    less = advise(situation(exposed=0.7, speed_up=0.6, accumulated=0.9))
    assert "0.60 times as fast on 2 machines" in less.reasons[0]


@pytest.mark.parametrize(
    ("link", "told"),
    [
        ("wifi6", "a cable in place of wifi6: 10GbE, or Thunderbolt"),
        ("10GbE", "Thunderbolt in place of 10GbE"),
        ("thunderbolt4", "InfiniBand or NVLink in place of thunderbolt4"),
        ("nvlink", ""),
    ],
)
def test_what_is_faster_than_a_link(link: str, told: str) -> None:
    assert faster_than(link_of(link)) == told


def test_processes_of_one_computer_are_told_of_no_cable() -> None:
    slow = {"exposed": 0.7, "speed_up": 0.6, "accumulated": 0.9}
    apart = situation(**slow, faster="10GbE in place of wifi")
    assert "10GbE" in " ".join(advise(apart).reasons)
    found = advise(replace(apart, together=True))
    assert found.outcome == "one machine"
    assert "10GbE" not in " ".join(found.reasons)
    assert "machine" not in found.title


def test_larger_batches_are_offered_on_the_computers_whose_numbers_are_told() -> None:
    few = situation(exposed=0.7, speed_up=0.6, accumulated=1.1)
    assert few.offer is not None
    four = replace(few.offer, machines=4, speed_up=0.8, accumulated=2.4)
    found = advise(replace(few, larger=four))
    assert (found.outcome, found.machines) == ("accumulate", 4)
    told = next(question.why for question in found.path if question.text == chart.LARGER)
    assert "2.4" in told
    assert "4 machines" in told
    assert "0.8" in found.reasons[0] or "1.2" in found.reasons[0]
    assert not any("2 machines" in reason for reason in found.reasons)
    # And not where no number of computers gains enough.
    slow = replace(few, larger=replace(four, accumulated=1.2))
    assert advise(slow).outcome == "faster link"
    # Packed gradients are told to whom has none.
    assert "--compress" in " ".join(advise(slow).reasons)
    assert "--compress" not in " ".join(advise(replace(slow, packed=True)).reasons)
