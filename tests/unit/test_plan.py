"""What is planned: links, devices, times, memory and the chart, against figures worked out by hand."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import call_allhands

from allhands.cluster.figures import Figures, Timing
from allhands.config.schema import TrainConfig
from allhands.errors import ConfigError
from allhands.model.load import load_tokenizer
from allhands.observe.metrics import RunEnded, RunHistory, RunStarted, TrainReport
from allhands.observe.metrics.events import encode_event
from allhands.plan.computers import Computer
from allhands.plan.devices import device_of
from allhands.plan.job import Job, Prices
from allhands.plan.links import ExchangeTimes, Link, Measured, link_of
from allhands.plan.outgrown import signs_of
from allhands.plan.outlook import look_ahead
from allhands.plan.speed import StepModel, enough, fitted, laws, predict
from allhands.plan.strategies import Setting, Way, all_ways
from allhands.run.model_sizes import adapter_weights, all_weights, flops_per_token
from allhands.run.training_memory import DecoderShape, Work, on_cpu, on_gpu

# A step of 1 s: 0.1 s of it are serial; 8 rows of 100 tokens; 80 MB to be exchanged.
STEP = StepModel(0.1, 800.0, 0.9 / 800, 8, 80_000_000, 32_000_000)
FREE = Link("free", float("inf"), 0.0)
LLAMA = DecoderShape(layers=16, dims=2048, mlp_dims=8192, queries=2048, keys=512, vocabulary=128256)
MIXTRAL = DecoderShape(32, 4096, 14336, 4096, 1024, 32000, experts=8, active=2)


# --- links and devices ----------------------------------------------------------------------------


def test_a_ring_sends_each_part_twice_but_for_one() -> None:
    link = Link("a", 100e6, 0.001)
    # Two ranks: 40 MB there and 40 MB back, in two rounds.
    assert link.seconds(80_000_000, 2) == pytest.approx(2 * (0.001 + 0.4))
    assert link.seconds(80_000_000, 4) == pytest.approx(6 * (0.001 + 0.2))
    assert link.seconds(80_000_000, 1) == 0.0


@pytest.mark.parametrize(
    ("text", "rate", "latency"),
    [
        ("10gbe", 9.4e9 / 8, 50e-6),
        ("Wi-Fi", 0.3e9 / 8, 3e-3),
        ("tb4", 18e9 / 8, 60e-6),
        ("400Mbit/s", 50e6, 150e-6),
        ("100Mbit/s,5ms", 12.5e6, 5e-3),
        ("1.5 Gbps, 20us", 187.5e6, 20e-6),
        ("10GbE,5ms", 9.4e9 / 8, 5e-3),
    ],
)
def test_links_by_name_and_by_rate(text: str, rate: float, latency: float) -> None:
    link = link_of(text)
    assert (link.bytes_per_s, link.latency_s) == pytest.approx((rate, latency))


@pytest.mark.parametrize("text", ["", "thunderbold4", "10", "fast", "3GbE"])
def test_what_is_no_link(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        link_of(text)
    assert caught.value.where == "--link"
    assert "10GbE" in str(caught.value.hint)
    assert ("did you mean thunderbolt4" in str(caught.value.hint)) == (text == "thunderbold4")


def test_measured_times_are_kept_between_and_scaled_beyond() -> None:
    times = [(1000, 0.001), (1_000_000, 0.011), (4_000_000, 0.041)]
    timings = [Timing(num_bytes, 9, seconds, seconds, seconds) for num_bytes, seconds in times]
    found = Measured(2, Figures(("a", "b"), 2, "ring", tuple(timings)).seconds)
    assert found.seconds(500, 2) == 0.001
    assert found.seconds(2_500_000, 2) == pytest.approx(0.026)
    assert found.seconds(8_000_000, 2) == pytest.approx(0.082)
    # Three times the rounds; each link carries 3/4 in place of 1/2 of it, twice.
    assert found.seconds(1_000_000, 4) == pytest.approx(0.003 + 0.010 * 1.5)


def test_devices_by_description() -> None:
    mac, card = device_of("Apple M1 Pro 32GB"), device_of("NVIDIA GeForce RTX 4090")
    assert (mac.kind, mac.memory_bytes, mac.usable_bytes) == (
        "metal",
        32_000_000_000,
        22_906_503_168,
    )
    assert (card.kind, card.memory_bytes, device_of("4090 24 GB").flops) == (
        "cuda",
        24_000_000_000,
        card.flops,
    )
    assert device_of("M1 Max").seconds(1e12) == pytest.approx(device_of("M1 Pro").seconds(1e12) / 2)
    for text in ("", "M9", "32GB", "RTX"):
        with pytest.raises(ConfigError):
            device_of(text)


# --- time -----------------------------------------------------------------------------------------


def test_two_sizes_of_batch_tell_what_does_not_get_shorter() -> None:
    assert fitted([(800, 1.0), (400, 0.55)]) == pytest.approx((0.1, 0.9 / 800))
    assert fitted([(800, 1.0)]) == pytest.approx((0.0, 1 / 800))
    # Noise does not make anything negative.
    assert fitted([(800, 1.0), (400, 0.4)])[0] == 0.0
    assert fitted([(800, 1.0), (400, 1.1)]) == (pytest.approx(1.05), 0.0)


def test_without_an_exchange_it_is_amdahls_law() -> None:
    for ranks in (1, 2, 4, 8):
        found = predict(STEP, FREE, [1.0] * ranks)
        assert found.speed_up == pytest.approx(laws(0.1, ranks)["amdahl"])
    assert laws(0.1, 4) == pytest.approx({"amdahl": 1 / (0.1 + 0.225), "gustafson": 3.7})


def test_an_exchange_is_waited_for_call_by_call() -> None:
    link = Link("a", 100e6, 0.001)
    found = predict(STEP, link, [1.0, 1.0])
    calls = 2 * link.seconds(32_000_000, 2) + link.seconds(16_000_000, 2)
    assert found.exchange_s == found.exposed_s == pytest.approx(calls)
    assert found.step_s == pytest.approx(0.1 + 0.45 + calls)
    beside = predict(replace(STEP, overlapped=True), link, [1.0, 1.0])
    assert beside.exposed_s == pytest.approx(max(link.seconds(32_000_000, 2), calls - 0.225))


def test_unequal_computers_get_unequal_shares() -> None:
    even, uneven = predict(STEP, FREE, [1.0, 1.0]), predict(STEP, FREE, [1.0, 0.5])
    assert even.compute_s == pytest.approx(0.45)
    # 5.33 rows and 2.67: six and three, which take 6/8 of the time alone, and 0.9 s by 1.5 if tokens are cut finely.
    assert uneven.compute_s == pytest.approx((0.6 + 0.675) / 2)
    assert 1.0 < uneven.speed_up < even.speed_up
    # More ranks than rows: one row is what each that has any computes.
    assert predict(STEP, FREE, [1.0] * 16).compute_s == pytest.approx(0.9 / 8)


def test_where_another_computer_saves_little() -> None:
    def found(step: StepModel, link: Link) -> int:
        return enough({ranks: predict(step, link, [1.0] * ranks).step_s for ranks in range(1, 100)})

    assert found(STEP, Link("slow", 1e6, 0.0)) == 1
    save = [1 - (0.1 + 0.9 / (n + 1)) / (0.1 + 0.9 / n) for n in range(1, 40)]
    assert found(replace(STEP, rows=5040), FREE) == next(
        n for n, part in enumerate(save, 1) if part < 0.05
    )


# --- memory ---------------------------------------------------------------------------------------


def strategies(
    work: Work,
    blocks: DecoderShape,
    ranks: int,
    bucket_bytes: int,
    *,
    quantised: bool = False,
    divides: bool = True,
) -> list[Way]:
    """All ways on one GPU and on so many equal ones."""
    setting = Setting(
        of=lambda each: on_gpu(blocks, each),
        needed=lambda memory, number: memory.arrays,
        quantised=quantised,
        bucket_bytes=bucket_bytes,
        divides=divides,
    )
    found = all_ways(work, (1.0,), setting)
    return found if ranks == 1 else found + all_ways(work, [1 / ranks] * ranks, setting)


def test_numbers_of_a_known_model() -> None:
    # Llama 3.2 1B: 1,235,814,400 parameters, of which 67,584 are norms.
    assert all_weights(LLAMA, tied=True) == 1_235_814_400 - 33 * 2048
    # Rank 8 on all linear layers of one block: 8 x the sum of their inputs and outputs.
    inputs_and_outputs = 2 * 4096 + 2 * 2560 + 2 * 10240 + 10240
    assert adapter_weights(LLAMA, 2, 8, None) == 2 * 8 * inputs_and_outputs
    assert adapter_weights(LLAMA, 1, 8, ["self_attn.q_proj"]) == 8 * 4096
    # Everybody's 6 N for full training; 4 N and the factors where the weights are frozen.
    weights = all_weights(LLAMA, tied=True)
    assert flops_per_token(LLAMA, "full", 16, recomputed=False) == 6 * weights
    assert flops_per_token(LLAMA, "lora", 16, recomputed=False) == 4 * weights
    assert flops_per_token(LLAMA, "lora", 8, recomputed=False) < 4 * weights


def test_numbers_of_a_model_with_experts() -> None:
    # Mixtral 8x7B: 46,702,792,704 parameters, of which 65 x 4096 are norms; 12.9 billion of them
    # compute a token.
    assert all_weights(MIXTRAL, tied=False) == 46_702_792_704 - 65 * 4096
    flops = flops_per_token(MIXTRAL, "full", 32, recomputed=False)
    assert flops / 6 == pytest.approx(12.88e9 - 32000 * 4096, rel=0.001)
    # Each expert has factors of its own, and so does the router.
    experts, attention, router = 8 * 3 * (4096 + 14336), 2 * 8192 + 2 * 5120, 4096 + 8
    assert adapter_weights(MIXTRAL, 1, 8, None) == 8 * (experts + attention + router)
    assert adapter_weights(MIXTRAL, 1, 8, ["block_sparse_moe.switch_mlp.up_proj"]) == 8 * 8 * (
        4096 + 14336
    )


def test_a_rank_computes_its_share_in_micro_batches_no_larger_than_before() -> None:
    work = Work("full", 2048, 16, 100, 100, "adamw", accumulated=True, batch_tokens=8192)
    assert [work.divided(n).tokens for n in (1, 2, 4, 8)] == [2048, 2048, 2048, 1024]
    assert [work.divided(n).accumulated for n in (1, 2, 4, 8)] == [True, True, False, False]
    # Accumulated over batches, not for want of room.
    assert replace(work, batch_tokens=2048).divided(2).accumulated


def test_each_way_saves_what_it_divides() -> None:
    work = Work("full", 32_768, 16, 2_500_000_000, 2_500_000_000, "adamw", masters=True)
    found = {s.name: s for s in strategies(work, LLAMA, 4, 128_000_000)}
    plain, divided = found["data parallel"], found["optimizer divided"]
    assert plain.parts["optimizer"] == 6 * 2_500_000_000
    assert divided.parts["optimizer"] == plain.parts["optimizer"] // 4
    assert (
        plain.rank_bytes - divided.rank_bytes
        == plain.parts["optimizer"] - divided.parts["optimizer"]
    )
    # With few tokens the update is the peak, and what is renewed there is divided, too.
    few = replace(work, tokens=4096)
    less = {s.name: s for s in strategies(few, LLAMA, 4, 128_000_000)}
    saved = less["data parallel"].rank_bytes - less["optimizer divided"].rank_bytes
    renewed = on_gpu(LLAMA, few).renewed
    assert plain.parts["optimizer"] * 3 / 4 < saved <= plain.parts["optimizer"] * 3 / 4 + renewed
    assert (
        found["checkpointing"].parts["activations"] < 0.2 * found["as it is"].parts["activations"]
    )
    assert plain.parts["activations"] == pytest.approx(
        found["as it is"].parts["activations"] / 4, rel=0.01
    )
    undivided = strategies(work, LLAMA, 4, 0, divides=False)
    simple = {name for name, each in found.items() if not each.combined}
    assert {s.name for s in undivided if not s.combined} == simple - {"optimizer divided"}
    whole = replace(work, optimizer="muon")
    found_whole = strategies(whole, LLAMA, 4, 0)
    assert "optimizer divided" not in {s.name for s in found_whole}
    small = strategies(work, LLAMA, 1, 0, quantised=True)
    assert [s.ranks for s in small if not s.combined] == [1, 1, 1]
    one_row = strategies(replace(work, row_tokens=32_768), LLAMA, 1, 0, quantised=True)
    assert [s.name for s in one_row] == ["as it is", "checkpointing"], (
        "no micro-batch is smaller than a row"
    )


# --- outlook --------------------------------------------------------------------------------------


def job(**changed: object) -> Job:
    work = Work("full", 800, 16, 2_500_000_000, 2_500_000_000, "adamw")
    values: dict[str, object] = {
        **{"steps": 36_000, "start_s": 5.0, "step": STEP, "link": link_of("10GbE")},
        **{
            "numbers": (1, 2, 4),
            "blocks": LLAMA,
            "work": work,
            "of": on_cpu,
            "prices": Prices(2.0, 100.0, 0.5),
        },
    }
    usable = changed.pop("usable_bytes", 40_000_000_000)
    speeds = changed.pop("speeds", (1.0,))
    values["computers"] = tuple(Computer(f"speed {speed}", speed, usable) for speed in speeds)  # type: ignore
    return Job(**{**values, **changed})  # type: ignore[arg-type]


def test_all_of_it_together() -> None:
    found = look_ahead(job())
    assert [line.machines for line in found.lines] == [1, 2, 4]
    assert found.lines[0].training_s == pytest.approx(36_005)
    assert found.lines[0].kwh == pytest.approx(36_005 / 3600 * 0.1)
    assert found.lines[0].money == pytest.approx(36_005 / 3600 * (2.0 + 0.05))
    assert found.advice.outcome == "data parallel"
    assert json.loads(json.dumps(found.as_json()))["machines"][1]["prediction"]["efficiency"] < 1.0
    poor = look_ahead(job(usable_bytes=1_000_000))
    assert (poor.advice.outcome, {way.fits for way in poor.memory}) == ("framework", {False})
    assert look_ahead(job(link=None, numbers=())).lines[-1].machines == 1
    small = look_ahead(job(step=replace(STEP, gradient_bytes=1_000_000)))
    buckets = [
        {each.name: each.parts["buckets"] for each in one.memory}["data parallel"]
        for one in (found, small)
    ]
    assert buckets == [32_000_000, 1_000_000], "a call is no larger than all that is exchanged"
    assert [line.machines for line in look_ahead(job(speeds=(1.0, 0.5, 0.5))).lines] == [1, 2, 3]


def test_ways_to_send_less_are_told_only_to_ranks_that_can() -> None:
    slow = {"link": link_of("100Mbit/s")}
    assert look_ahead(job(**slow)).lighter
    for options in ({"strategy": "fsdp"}, {"tp": 2}, {"strategy": "pipeline"}):
        asked = TrainConfig.model_validate({"num_ranks": 2, **options})
        assert not look_ahead(job(**slow, asked=asked)).lighter


def test_what_steps_needed_beyond_what_was_computed_is_in_every_line() -> None:
    computed = look_ahead(job()).memory
    seen = computed[0].rank_bytes + 2_000_000_000
    found, less = (
        look_ahead(job(needed_bytes=needed)).memory for needed in (seen, seen - 3_000_000_000)
    )
    assert found[0].rank_bytes == seen
    assert [
        each.rank_bytes - was.rank_bytes for each, was in zip(found, computed, strict=True)
    ] == ([2_000_000_000] * len(computed))
    assert less == computed, "the steps that were made may not have met the largest batch"
    assert look_ahead(job(usable_bytes=seen - 1)).memory[0].fits
    assert not look_ahead(job(usable_bytes=seen - 1, needed_bytes=seen)).memory[0].fits


def test_compiled_steps_of_a_cpu_need_what_was_measured() -> None:
    """Where ranks update a part of the weights, they hold a part of what was not computed."""
    cpu = {"present_bytes": 150_000_000, "kind": "cpu", "numbers": (1, 2)}
    computed = {way.name: way.rank_bytes for way in look_ahead(job(**cpu, compiled=True)).memory}
    more = 8_000_000_000
    seen = computed["as it is"] + more
    found = {
        way.name: way.rank_bytes
        for way in look_ahead(job(**cpu, compiled=True, needed_bytes=seen)).memory
    }
    assert found["as it is"] == seen
    assert found["data parallel"] == computed["data parallel"] + more
    assert found["optimizer divided"] == computed["optimizer divided"] + more / 2
    native = {way.name for way in look_ahead(job(**cpu)).memory}
    assert native == computed.keys() - {"optimizer divided"}


def test_processes_of_one_computer_share_its_memory_and_its_price() -> None:
    apart, together = (
        look_ahead(job(numbers=(1, 2))),
        look_ahead(job(numbers=(1, 2), together=True)),
    )
    hours = together.lines[1].training_s / 3600
    assert apart.lines[1].money == pytest.approx(2 * hours * (2.0 + 0.05))
    assert together.lines[1].money == pytest.approx(hours * (2.0 + 0.05))
    assert together.lines[1].kwh == pytest.approx(hours * 0.1)
    place = [each.name for each in together.memory].index("data parallel")
    enough_for_one = together.memory[place].rank_bytes * 3 // 2
    kinds = [
        {},
        {"together": True},
        {"together": True, "shares": True},
    ]  # computers, GPUs of one, processes of one
    fits = [
        look_ahead(job(numbers=(1, 2), usable_bytes=enough_for_one, **kind)).memory[place].fits
        for kind in kinds
    ]
    assert fits == [True, True, False]
    assert [one.memory[place].flags for one in (apart, together)] == [
        "--hostfile hosts.json",
        "-n 2",
    ]


def test_a_process_has_room_for_the_back_end_that_was_measured() -> None:
    def exchange(link: ExchangeTimes) -> float:
        """Bytes of a rank of two beyond its arrays and its buckets, against one rank with the same
        arrays.
        """
        work = Work("full", 8, 16, 25_000_000, 25_000_000, "adamw", batch_tokens=16)
        found = look_ahead(
            job(numbers=(1, 2), present_bytes=100_000_000, link=link, work=work)
        ).memory
        one, two = (
            next(way for way in found if way.ranks == 1),
            next(way for way in found if way.ranks == 2),
        )
        assert {
            name: size for name, size in one.parts.items() if name != "buckets"
        }.items() <= two.parts.items()
        return two.rank_bytes - one.rank_bytes - two.parts["buckets"]

    measured = {
        name: exchange(Measured(2, lambda size: 1e-3 + size / 1e9, name=name))
        for name in ("ring", "mpi")
    }
    assert measured == {"ring": 34_000_000, "mpi": 12_000_000}
    assert exchange(link_of("10GbE")) == measured["ring"], "computers that are only described"


def test_processes_that_share_a_computer_are_held_to_one_that_has_all_of_it() -> None:
    shared = {"numbers": (1, 2), "together": True, "shares": True}
    split, whole = (look_ahead(job(**shared, whole_s=whole_s)) for whole_s in (None, 0.6))
    of_two = whole.lines[1].training_s
    assert of_two == split.lines[1].training_s
    assert whole.alone_s == pytest.approx(5.0 + 36_000 * 0.6)
    # STEP takes 1 s with a share of the cores: half as long by two, but not half of 0.6 s.
    assert f"{split.lines[0].training_s / of_two:.2f} times as fast" in " ".join(
        split.advice.reasons
    )
    assert f"{whole.alone_s / of_two:.2f} times as fast on 2 processes" in " ".join(
        whole.advice.reasons
    )
    quick = look_ahead(job(**shared, whole_s=0.05))
    assert quick.advice.outcome == "one machine"


def test_the_start_of_several_is_what_was_measured_with_them() -> None:
    found = look_ahead(job(numbers=(1, 2, 3), started=(3, 11.0)))
    assert [line.start_s for line in found.lines] == [5.0, 8.0, 11.0]
    for line in found.lines:
        assert line.training_s == pytest.approx(line.start_s + 36_000 * line.prediction.step_s)
    assert [line.start_s for line in look_ahead(job(numbers=(1, 2))).lines] == [5.0, 5.0]


# --- the command ----------------------------------------------------------------------------------


def test_rows_are_as_long_as_those_of_the_data_that_are_named(
    tmp_path: Path, tiny_model: Path, tiny_data: Path
) -> None:
    words = (
        "plan",
        "--device",
        "M1 Pro 32GB",
        "--json",
        "--model",
        str(tiny_model),
        "--batch-size",
        "4",
    )
    lengths = _token_counts(tiny_model, tiny_data / "train.jsonl")
    told = call_allhands(*words, "--data", str(tiny_data), "--epochs", "3", cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    found = json.loads(told.stdout)
    mean = sum(lengths) / len(lengths)
    assert found["step"]["tokens"] == pytest.approx(4 * mean)
    assert found["steps"] == 3 * -(-len(lengths) // 4)
    assert (
        f"for rows of {mean:.0f} tokens on the average, of which the data have {len(lengths)}"
        in found["notes"]
    )
    unnamed = json.loads(call_allhands(*words, "--iters", "9", cwd=tmp_path).stdout)
    assert unnamed["step"]["tokens"] == 4 * 2048
    assert (
        unnamed["notes"][0]
        == "for rows of 2048 tokens, the longest there can be: no --data is named"
    )
    (tmp_path / "file").touch()
    unwritten = call_allhands(*words, "--iters", "9", "--picture", "file/chart.png", cwd=tmp_path)
    assert (unwritten.returncode, unwritten.stdout) == (
        2,
        "",
    )  # before anything is trained or measured
    assert "file" in unwritten.stderr
    missing = call_allhands(*words, "--data", "nowhere", "--iters", "9", cwd=tmp_path)
    assert (missing.returncode, missing.stdout) == (3, "")
    assert "nowhere: the data folder does not exist" in missing.stderr


def _token_counts(model: Path, file: Path) -> list[int]:
    tokenizer: Any = load_tokenizer(str(model)).tokenizer
    rows = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    return [
        len(tokenizer.encode(tokenizer.apply_chat_template(row, tokenize=False))) for row in rows
    ]


def test_computers_by_description(tmp_path: Path) -> None:
    words = ("--shape", "llama-15m", "--tokenizer", "t", "--data", "d", "--iters", "200000")
    done = call_allhands(
        "plan", "--device", "2 x M1 Pro 32GB", "--link", "10GbE", "--json", *words, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [line["machines"] for line in found["machines"]] == [1, 2]
    assert found["steps"] == 200_000
    assert found["usable_bytes"] == 22_906_503_168
    assert any("right within a factor" in note for note in found["notes"])
    assert found["notes"][0] == "for rows of 2048 tokens, the longest there can be: rows are packed"
    shown = call_allhands(
        "plan", "--device", "2 x M1 Pro 32GB", "--link", "10GbE", *words, cwd=tmp_path
    )
    assert not any(line != line.rstrip() for line in shown.stdout.splitlines())
    assert "Is distributing worth it?" in shown.stdout
    *_, kept = shown.stdout.splitlines()
    assert kept.startswith("the plan is kept in pretrained/plan.json: ")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--device", "M1 Pro", "--link", "10GbE", "--hosts", "a,b"], "exclude each other"),
        (["--device", "M1 Pro", "--hosts", "a,b"], "only described"),
        (["--device", "M1 Pro, RTX 4090"], "cannot train together"),
        (["--device", "M1 Pro, M2", "--machines", "4"], "one by one"),
        (["--device", "M1 Pro", "--machines", "0,x"], "--machines"),
        (["--device", "M1 Pro", "--price-per-kwh", "0.3", "--epochs", "2"], "number of steps"),
        (["--device", "M1 Pro", "--picture", "chart.gif"], "cannot be written as .gif"),
        (["--device", " , "], "no computer is named"),
    ],
)
def test_wrong_options(tmp_path: Path, words: list[str], told: str) -> None:
    shape = ("--shape", "llama-15m", "--tokenizer", "t", "--data", "d")
    done = call_allhands("plan", *words, *shape, cwd=tmp_path)
    assert not list(tmp_path.iterdir())
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr


# --- afterwards -----------------------------------------------------------------------------------


def history(ranks: int = 2, **parts: float) -> RunHistory:
    """A run whose steps of 1 s go into the parts named, and for the rest into computing."""
    started = {
        **{
            "name": "run",
            "model": "m",
            "method": "lora",
            "num_ranks": ranks,
            "backend": "ring",
            "batch_size": 8,
        },
        **{"total_steps": 50, "trainable_params": 1, "total_params": 2, "num_train_examples": 9},
        **{"cores_per_rank": None, "versions": {}, "time": 0.0},
    }
    made = RunHistory("run", RunStarted(**started))  # type: ignore[arg-type]
    rest = parts.pop("rest", 0.0)
    values = {"comm_s": 0.0, "data_wait_s": 0.0, **parts}
    for number in range(1, 6):
        report = {
            **{
                "step": 10 * number,
                "loss": 2.0,
                "learning_rate": 1e-4,
                "grad_norm": 1.0,
                "tokens_per_s": 100.0,
            },
            **{
                "trained_tokens_per_s": 90.0,
                "trained_tokens": 900,
                "step_time_s": 1.0,
                "epoch": 0.1,
                **values,
            },
            **{
                "elapsed_s": 10.0 * number,
                "peak_memory_bytes": (1,),
                "compute_s": 1.0 - rest - sum(values.values()),
            },
        }
        made.train.append(TrainReport(**report))  # type: ignore[arg-type]
    return made


def started_again(*attempts: int) -> RunHistory:
    """One that goes on so often: of the second attempt on after a fault, by a person's command
    else.
    """
    made = history()
    assert made.started is not None
    starts = [
        made.started,
        *(replace(made.started, step=1, attempt=attempt) for attempt in attempts),
    ]
    return replace(made, restarts=[(1, 1.0)] * len(attempts), starts=starts)


@pytest.mark.parametrize(
    ("made", "seen"),
    [
        (history(), []),
        (history(comm_s=0.3), ["30 % of a step was waiting for other ranks"]),
        (history(1, comm_s=0.3), []),
        (history(data_wait_s=0.1), ["10 % of a step was waiting for data"]),
        (history(rest=0.4), ["40 % of a step gets no shorter with more ranks"]),
        (history(1, rest=0.4), []),
        (started_again(2, 3, 4), ["it was started again 3 times after faults"]),
        (started_again(2, 1, 2, 1), []),
        (
            replace(history(16), ended=RunEnded(50, "finished", 200_000.0)),
            ["16 ranks computed for 2.3 days"],
        ),
        (replace(history(comm_s=0.3), train=[]), []),
    ],
)
def test_signs_of_a_run(made: RunHistory, seen: list[str]) -> None:
    assert [sign.seen for sign in signs_of(made)] == seen
    assert all(sign.advice for sign in signs_of(made))


@pytest.mark.parametrize(("norm", "told"), [(1.0, []), (3.0, ["gradients"])])
def test_gradients_that_explode_are_told_before_how_to_be_faster(
    norm: float, told: list[str], tmp_path: Path
) -> None:
    made = history(comm_s=0.5)
    assert made.started is not None
    reports = [replace(made.train[0], step=place + 1, grad_norm=norm**place) for place in range(12)]
    lines = [encode_event(event) for event in (made.started, *reports)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = json.loads(call_allhands("plan", "--after", str(tmp_path), "--json").stdout)
    assert [one["kind"] for one in found["judgements"] if one["kind"] == "gradients"] == told
    shown = call_allhands("plan", "--after", str(tmp_path)).stdout
    assert shown.startswith("warning: ") == bool(told)
    assert "waiting for other ranks" in shown


def test_a_run_that_ended_too_early_is_not_called_healthy(tmp_path: Path) -> None:
    made = history(comm_s=0.0)
    assert made.started is not None
    lines = [encode_event(event) for event in (replace(made.started, time=1e9), made.train[0])]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    os.utime(tmp_path / "metrics.jsonl", (1e9, 1e9))
    found = json.loads(call_allhands("plan", "--after", str(tmp_path), "--json").stdout)
    assert (found["signs"], found["status"]) == ([], "crashed or killed")
    told = call_allhands("plan", "--after", str(tmp_path)).stdout
    assert f"{tmp_path.name}: crashed or killed" in told
    assert "no sign" not in told


def test_a_run_is_judged_by_its_files(tmp_path: Path) -> None:
    made = history(comm_s=0.5)
    assert made.started is not None
    lines = [encode_event(event) for event in (made.started, *made.train)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    done = call_allhands("plan", "--after", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("50 % of a step was waiting for other ranks\n  what to do: ")
    found = json.loads(call_allhands("plan", "--after", str(tmp_path), "--json").stdout)
    assert found["signs"][0]["seen"].startswith("50 %")
    assert (found["plan"], found["notes"]) == (None, [])
    none = call_allhands("plan", "--after", str(tmp_path / "none"))
    assert (none.returncode, "Traceback" in none.stderr) == (3, False)
