"""What is planned for real situations: computers, links and models, and the advice that an engineer
would sign.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import call_allhands
from PIL import Image

from allhands.plan import chart, noise
from allhands.plan.chart import bars_of, draw_chart, told_of
from allhands.plan.computers import Computer, listed
from allhands.plan.devices import device_of
from allhands.plan.job import Job
from allhands.plan.links import link_of
from allhands.plan.noise import LoadWatch, busy, contradiction
from allhands.plan.outlook import Outlook, look_ahead
from allhands.plan.speed import StepModel, enough, predict
from allhands.run.training_memory import DecoderShape, Work, on_gpu

MISTRAL = DecoderShape(
    layers=32, dims=4096, mlp_dims=14336, queries=4096, keys=1024, vocabulary=32768
)
LORA_BYTES = 20_000_000
PAIR = ("M1 Pro 32GB", "M1 Pro 16GB")


def planned(
    computers: tuple[str, ...],
    link: str | None = "thunderbolt4",
    *,
    gigabytes: float = 4.1,
    rows: int = 8,
    full: bool = False,
    step_s: float = 10.0,
    exchanged: int = LORA_BYTES,
    **changed: Any,
) -> Outlook:
    """LoRA of Mistral 7B with weights of so many bytes; ``step_s`` is of the first computer."""
    devices = [device_of(each) for each in computers]
    weights = int(gigabytes * 1e9)
    trained = weights if full else exchanged
    work = Work(
        "full" if full else "lora",
        *(512 * rows, 8, weights, trained, "adamw"),
        batch_tokens=512 * rows,
        row_tokens=512,
    )
    values: dict[str, Any] = {
        "steps": 10_000,
        "start_s": 0.0,
        "step": StepModel(
            0.01 * step_s, 512.0 * rows, 0.99 * step_s / (512 * rows), rows, trained, 32_000_000
        ),
        "link": None if link is None or len(computers) < 2 else link_of(link),
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
            "blocks": MISTRAL,
            "work": work,
            "of": on_gpu,
            "batch_rows": rows,
            "kind": devices[0].kind,
        },
        **{
            "quantised": gigabytes < 5,
            "about": "LoRA of mistral: 10,000 steps of 8 rows",
            "again_s": 1.5,
        },
    }
    return look_ahead(Job(**{**values, **changed}))


@pytest.mark.parametrize(
    ("computers", "more", "outcome", "advised"),
    [
        # The series' own pair, by a cable, by wifi with little to compute, and with a model that
        # only one holds.
        (PAIR, {}, "data parallel", 2),
        (PAIR, {"link": "1GbE", "step_s": 2.0, "exchanged": 150_000_000}, "accumulate", 2),
        (PAIR, {"link": "wifi", "step_s": 1.0, "exchanged": 400_000_000}, "faster link", 1),
        (PAIR, {"gigabytes": 14.5}, "one machine", 1),
        # None holds it as it is, each can with smaller micro-batches; or with its share.
        (("M1 Pro 16GB",), {"rows": 16}, "smaller", 1),
        (("M1 Pro 16GB",) * 2, {"rows": 16}, "data parallel", 2),
        # Only when the optimizer is divided, or not at all.
        (("M2 Ultra 64GB",) * 4, {"gigabytes": 14.5, "full": True}, "divide the optimizer", 2),
        (("M2 Ultra 64GB",), {"gigabytes": 14.5, "full": True}, "framework", 1),
        (("M1 16GB",) * 4, {"gigabytes": 14.5, "full": True}, "framework", 1),
        # One named device is one computer.
        (("M1 Pro 32GB",), {}, "one machine", 1),
        # A slow one that helps little, and one that is felt.
        (("M2 Ultra 64GB", "M1 16GB"), {}, "one machine", 1),
        (("M2 Ultra 64GB", "M2 Max 32GB"), {}, "data parallel", 2),
        (("M2 Max 32GB",) * 3 + ("M1 16GB",), {"rows": 12}, "data parallel", 3),
        (("M1 16GB",) + ("M2 Max 32GB",) * 3, {"rows": 12, "step_s": 60.0}, "data parallel", 3),
        # A row cannot be divided.
        (PAIR, {"rows": 1}, "one machine", 1),
        # Done within the hour; or needed only once.
        (PAIR, {"steps": 100}, "one machine", 1),
        (PAIR, {"once": True, "steps": 1000}, "one machine", 1),
        (PAIR, {"once": True}, "data parallel", 2),
        (PAIR, {"doubt": "this computer is busy"}, "measure again", 1),
    ],
)
def test_the_advice(
    computers: tuple[str, ...], more: dict[str, Any], outcome: str, advised: int
) -> None:
    found = planned(computers, **more)
    assert (found.advice.outcome, found.advised) == (outcome, advised)
    if outcome == "data parallel":
        saved = 1 - found.line(advised).training_s / found.alone_s
        assert saved >= 0.15
        assert chart.arrows_of(found.advice)[-1] is not None


def test_one_machine_is_held_to_the_largest_memory_and_each_of_several_to_its_own() -> None:
    for computers in (PAIR, PAIR[::-1]):
        found = planned(computers, gigabytes=14.5)
        fits = {(way.ranks, way.name): way.fits for way in found.memory}
        assert fits[1, "as it is"], "22.9 of 32 GB"
        assert fits[2, "data parallel"] is False, "11.5 of 16 GB"
        assert (found.alone.name, found.line(2).short) == ("M1 Pro 32GB", ("M1 Pro 16GB",))
        assert any("M1 Pro 16GB" in reason for reason in found.advice.reasons)
        # Weights in 4 bits are another model: that is told, not advised.
        assert "QUANTIZE" not in found.advice.title.upper()
    equal = planned(("M1 Pro 32GB",) * 2, gigabytes=14.5)
    assert equal.advice.outcome == "data parallel"
    assert equal.line(2).short == ()


def test_a_larger_share_takes_more_memory() -> None:
    found = planned(("M2 Ultra 64GB", "M2 Max 32GB"), rows=12)
    way = next(way for way in found.memory if way.name == "data parallel")
    assert way.by_rank[0] == way.rank_bytes > way.by_rank[1]
    assert found.line(2).weights == (2.0, 1.0)
    assert any("--rank-weights '[2, 1]'" in reason for reason in found.advice.reasons)
    assert planned(PAIR).line(2).weights == ()


def test_the_one_machine_is_the_fastest_that_holds_it() -> None:
    small_but_fast = ("M1 Pro 64GB", "M2 Max 16GB")
    assert planned(small_but_fast).alone.name == "M2 Max 16GB"
    assert planned(small_but_fast, gigabytes=14.5).alone.name == "M1 Pro 64GB"
    assert planned(small_but_fast, gigabytes=60).alone.name == "M1 Pro 64GB"


@pytest.mark.parametrize("link", ["wifi", "1GbE", "10GbE", "thunderbolt4"])
@pytest.mark.parametrize("step_s", [0.05, 0.2, 1.0, 5.0])
def test_the_order_in_which_computers_are_named_does_not_matter(link: str, step_s: float) -> None:
    found: list[Any] = []
    fast = device_of("M4 Max 64GB").flops
    for names in (("M1 Pro 32GB", "M4 Max 64GB"), ("M4 Max 64GB", "M1 Pro 32GB")):
        token_s = step_s / 4096 * fast / device_of(names[0]).flops
        outlook = planned(
            names, link, step=StepModel(0.01, 4096.0, token_s, 8, LORA_BYTES, 32_000_000)
        )
        advice = outlook.advice
        found.append(
            (
                advice.outcome,
                outlook.advised,
                [each.training_s for each in outlook.lines],
                advice.path,
            )
        )
    assert found[0][:2] == found[1][:2]
    assert found[0][2] == pytest.approx(found[1][2])
    assert [each.answer for each in found[0][3]] == [each.answer for each in found[1][3]]
    assert [each.why for each in found[0][3]] == [each.why for each in found[1][3]]


def test_computers_that_are_imagined_are_called_so() -> None:
    found = planned(("M1 Pro 32GB",), numbers=(1, 2, 4, 8), imagined=True, link=None)
    assert [line.machines for line in found.lines][-1] == 8
    imagined = planned(("M1 Pro 32GB",), numbers=(1, 2, 4, 8), imagined=True)
    imagined = look_ahead(replace(imagined.job, link=link_of("10GbE")))
    assert (imagined.advice.outcome, imagined.advised) == ("data parallel", 8)
    assert any("imagined" in reason for reason in imagined.advice.reasons)
    assert not any("imagined" in reason for reason in planned(PAIR).advice.reasons)


def test_the_advice_never_goes_beyond_what_is_worth_it() -> None:
    for link in ("thunderbolt4", "10GbE", "1GbE", "100MbE", "wifi"):
        for computers in (PAIR, ("M1 Pro 32GB",) * 4, ("M2 Max 32GB",) * 3 + ("M1 16GB",)):
            for exchanged in (LORA_BYTES, 400_000_000, 3_000_000_000):
                found = planned(computers, link, exchanged=exchanged, step_s=4.0)
                assert found.advised <= found.enough or found.advice.outcome == "accumulate"
                assert found.line(1).training_s == pytest.approx(found.alone_s)
                for line in found.lines:
                    assert found.alone_s / line.training_s <= line.prediction.capacity + 1e-9, (
                        "never more than N-fold"
                    )
                if found.advised > 1 and found.advice.outcome == "data parallel":
                    assert found.line(found.advised).training_s <= 0.85 * found.alone_s


def test_more_that_is_worth_it_only_together_is_seen() -> None:
    # Eight rows: five, six and seven take as long as four do, eight half as long.
    assert enough({1: 8, 2: 4, 3: 3, 4: 2, 5: 2, 6: 2, 7: 2, 8: 1}) == 8
    assert enough({1: 8, 2: 4, 3: 3.9, 4: 3.8}) == 2
    assert enough({1: 8, 2: 9, 3: 8.5}) == 1


def test_whole_rows_go_to_who_is_done_first() -> None:
    free = link_of("nvlink")
    step = StepModel(0.0, 200.0, 0.01, 2, 0, 1)
    # Two rows and a computer four times as slow: it gets none, so that it does not hurt.
    assert predict(step, free, [1.0, 0.25]).step_s <= predict(step, free, [1.0]).step_s


def test_more_processes_than_cores_take_turns_and_save_nothing() -> None:
    one = planned(("M1 Pro 32GB",), numbers=(1, 2, 3, 4), together=True).job
    own, turns = (look_ahead(replace(one, link=link_of("nvlink"), room=room)) for room in (4, 2))
    step = [line.prediction.step_s for line in turns.lines]
    assert step[:2] == [line.prediction.step_s for line in own.lines][:2], "cores of their own"
    assert step[2] >= step[1]
    assert step[3] >= step[1]
    assert own.enough == 4
    assert turns.enough == turns.advised == 2
    assert turns.lines[3].prediction.capacity == 2
    assert turns.lines[3].training_s >= turns.lines[1].training_s


def test_every_kind_of_computer_is_listed() -> None:
    pair = [
        Computer("a", 1.0, 24_000_000_000, 32_000_000_000, "the system has the rest"),
        Computer("b", 0.5),
    ]
    assert listed([*pair, pair[0]]) == [
        "2 x a: 24 GB of 32 GB for training (the system has the rest)",
        "b: memory not known, 0.5 times the speed of a",
    ]


# --- what cannot be true --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "whole_s", "amiss"),
    [
        ([(800, 1.0), (400, 0.55)], None, False),
        ([(800, 1.0), (400, 0.55)], 0.6, False),
        ([(800, 1.0), (400, 0.55)], 1.04, False),
        ([(800, 0.396), (400, 0.2)], 0.708, True),  # more cores slower than fewer
        ([(800, 1.0), (400, 1.2)], None, True),  # half takes longer than all of it
        ([(800, 1.0)], None, False),
    ],
)
def test_times_that_contradict_each_other(
    points: list[tuple[float, float]], whole_s: float | None, amiss: bool
) -> None:
    assert bool(contradiction(points, whole_s)) == amiss


@pytest.mark.parametrize(
    ("cores", "mine", "others", "told"),
    [
        (2, 2, 0.2, False),
        (2, 2, 1.0, True),
        (16, 16, 1.0, False),
        (16, 16, 4.0, True),
        (64, 2, 20.0, False),
    ],
)
def test_a_busy_computer_is_called_so(
    monkeypatch: pytest.MonkeyPatch, cores: int, mine: int, others: float, told: bool
) -> None:
    monkeypatch.setattr(noise, "allowed_cores", lambda: cores)
    monkeypatch.setattr(noise, "available_cores", lambda: mine)
    assert bool(busy(others)) == told


def test_cores_of_others_are_those_that_this_process_has_not_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([(0.0, 10.0, 3.0), (10.0, 25.0, 8.0)])
    now: list[float] = []

    def clock() -> float:
        now[:] = next(times)
        return now[0]

    monkeypatch.setattr(noise.time, "monotonic", clock)
    monkeypatch.setattr(noise, "cores_busy_s", lambda: now[1])
    monkeypatch.setattr(noise, "own_busy_s", lambda: now[2])
    with noise.watched() as watch:
        assert isinstance(watch, LoadWatch)
    # 15 s of the cores in 10 s, of which 5 were this process's.
    assert watch.others == pytest.approx(1.0)


# --- the picture ----------------------------------------------------------------------------------


def test_the_picture_names_training_computers_and_link(tmp_path: Path) -> None:
    found = planned(PAIR)
    told = "\n".join(told_of(found))
    assert "LoRA of mistral" in told
    assert all(name in told for name in (*PAIR, "thunderbolt4"))
    bars = bars_of(found)
    assert [(seconds, taken) for _, seconds, taken in bars] == [
        (line.training_s, line.machines == found.advised) for line in found.lines
    ]
    with Image.open(draw_chart(found, tmp_path / "chart.png")) as image:
        assert image.width < 1000, "its letters can be read where it is shown 390 pixels wide"
        blue = sum(
            count
            for count, colour in image.convert("RGB").getcolors(1 << 20)
            if colour == (0, 114, 178)
        )
    assert blue > 1000, "the path stands out"
    doubtful = planned(PAIR, doubt="this computer is busy")
    assert not any(taken for _, _, taken in bars_of(doubtful))
    assert "busy" in "\n".join(told_of(doubtful))


def test_many_computers_have_few_bars() -> None:
    found = planned(("M1 Pro 32GB",) * 100, rows=1024)
    assert len(bars_of(found)) <= 10
    assert found.advised in [line.machines for line in found.lines]


# --- the command ----------------------------------------------------------------------------------

SHAPE = ("--shape", "llama-15m", "--tokenizer", "t", "--data", "d", "--iters", "200000")


def command(tmp_path: Path, *words: str) -> dict[str, Any]:
    done = call_allhands("plan", *words, *SHAPE, "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_named_device_is_listed_with_its_memory(tmp_path: Path) -> None:
    found = command(tmp_path, "--device", "M1 Pro 32GB, M1 Pro 16GB", "--link", "thunderbolt4")
    assert [each["usable_bytes"] for each in found["computers"]] == [22_906_503_168, 11_453_251_584]
    told = " ".join(found["notes"])
    assert "11.5 GB of 16 GB" in told
    assert "22.9 GB of 32 GB" in told
    assert found["advised_machines"] == 2


def test_devices_that_are_given_one_by_one_are_several_computers(tmp_path: Path) -> None:
    link = ("--link", "thunderbolt4")
    apart = command(tmp_path, "--device", "M2 Max 64GB", "--device", "2 x M1 16GB", *link)
    assert [each["name"] for each in apart["computers"]] == ["M2 Max 64GB", "M1 16GB", "M1 16GB"]
    one = command(tmp_path, "--device", "M2 Max 64GB, 2 x M1 16GB", *link)
    assert apart["machines"] == one["machines"]
    assert apart["machines"][-1]["weights"][0] > apart["machines"][-1]["weights"][1] > 0


def test_one_named_device_is_one_computer(tmp_path: Path) -> None:
    for more in ((), ("--link", "10GbE")):
        found = command(tmp_path, "--device", "M1 Pro 32GB", *more)
        assert [line["machines"] for line in found["machines"]] == [1]
        assert found["advice"]["outcome"] == "one machine"
        assert any("--link 10GbE is not used" in note for note in found["notes"]) == bool(more)
    imagined = command(
        tmp_path, "--device", "M1 Pro 32GB", "--machines", "1,2,4", "--link", "10GbE"
    )
    assert [line["machines"] for line in imagined["machines"]] == [1, 2, 4]


def test_what_each_takes_is_paid_for(tmp_path: Path) -> None:
    found = command(tmp_path, "--device", "M1 Pro, M1", "--price-per-kwh", "0.3")
    one, two = found["machines"]
    assert one["kwh"] == pytest.approx(one["training_s"] / 3600 * 0.040)
    assert two["kwh"] == pytest.approx(two["training_s"] / 3600 * 0.060)
