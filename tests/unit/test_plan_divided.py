"""Plans in which arrays, matrices or rows are divided: where each way is advised, and where it is
not.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import call_allhands
from rich.console import Console
from tiny import write_model

from allhands.cli import plan_shown
from allhands.config.combinations import require_groups, unfit_stages
from allhands.config.schema import TrainConfig, build_config
from allhands.plan.calibration import settings
from allhands.plan.chart import arrows_of, draw_chart
from allhands.plan.computers import Computer
from allhands.plan.devices import device_of
from allhands.plan.dividing import Dividing, dividing_of
from allhands.plan.job import Job
from allhands.plan.links import link_of
from allhands.plan.outlook import Outlook, look_ahead
from allhands.plan.speed import StepModel
from allhands.plan.strategies import Way
from allhands.run.training_memory import DecoderShape, Work, blocks_of, on_gpu

MISTRAL = DecoderShape(
    layers=32, dims=4096, mlp_dims=14336, queries=4096, keys=1024, vocabulary=32768
)
EVERY = Dividing(frozenset({"fsdp", "tensor", "context"}), (32, 8, 14336), (4096, 14336))
GPUS = ("RTX 4090",) * 4
PAIR = ("M2 Max 64GB",) * 2
WEIGHTS = 14_500_000_000


def planned(
    computers: tuple[str, ...],
    link: str,
    *,
    full: bool = False,
    rows: int = 8,
    row: int = 512,
    step_s: float = 10.0,
    dividing: Dividing | None = EVERY,
    **changed: Any,
) -> Outlook:
    """LoRA, or full training, of Mistral 7B in half precision; ``step_s`` is of the first computer."""
    devices = [device_of(each) for each in computers]
    trained = WEIGHTS if full else 20_000_000
    work = Work(
        "full" if full else "lora", min(rows * row, max(row, 16384)), 32, WEIGHTS, trained, "adamw",
        batch_tokens=rows * row, row_tokens=row, accumulated=rows * row > 16384,
    )  # fmt: skip
    step = StepModel(
        0.01 * step_s, rows * row, 0.99 * step_s / (rows * row), rows, trained, 32_000_000
    )
    values: dict[str, Any] = {
        **{
            "steps": 10_000,
            "start_s": 0.0,
            "step": replace(step, overlapped=devices[0].kind == "cuda"),
        },
        **{
            "link": link_of(link),
            "numbers": (),
            "blocks": MISTRAL,
            "work": work,
            "of": on_gpu,
            "batch_rows": rows,
        },
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
        **{"kind": devices[0].kind, "again_s": 4 / 3, "dividing": dividing},
    }
    return look_ahead(Job(**{**values, **changed}))


def way_of(found: Outlook, strategy: str, ranks: int) -> Way:
    ways = [
        each
        for each in found.memory
        if (each.strategy, each.ranks) == (strategy, ranks) and each.step_s
    ]
    assert len(ways) == 1
    return ways[0]


def test_fetched_blocks_are_computed_once_on_a_gpu_and_twice_elsewhere() -> None:
    mixture = replace(MISTRAL, experts=8, active=2)
    once, cpu, experts = (
        way_of(planned(GPUS, "nvlink", full=True, rows=32, row=2048, **more), "fsdp", 4).step_s
        for more in ({}, {"kind": "cpu"}, {"blocks": mixture})
    )
    assert cpu == pytest.approx(4 / 3 * once, rel=0.02)
    assert experts == pytest.approx(4 / 3 * once, rel=0.02)


@pytest.mark.parametrize(
    ("how", "more", "outcome", "flags"),
    [
        # Full training that none holds: by a fast link in parts of arrays, by a slow one in blocks.
        (
            (GPUS, "nvlink"),
            {"full": True, "rows": 4, "step_s": 0.5},
            "fully sharded",
            "--strategy fsdp",
        ),
        (
            (GPUS, "1GbE"),
            {"full": True, "rows": 4, "step_s": 0.5},
            "pipeline",
            "--strategy pipeline",
        ),
        # One short row, which nobody else can divide, and which a slow link divides for nothing.
        ((PAIR, "nvlink"), {"rows": 1, "row": 256}, "tensor parallel", "--tp 2"),
        ((PAIR, "wifi"), {"rows": 1, "row": 256}, "one machine", ""),
        # A long one.
        ((PAIR, "10GbE"), {"rows": 1, "row": 4096, "step_s": 40.0}, "context parallel", "--cp 2"),
        ((PAIR, "wifi"), {"rows": 1, "row": 4096, "step_s": 4.0}, "one machine", ""),
        # Rows enough for all: whole rows are done soonest, however fast the link.
        ((PAIR, "nvlink"), {"rows": 8, "row": 2048, "step_s": 40.0}, "data parallel", ""),
        ((PAIR, "nvlink"), {"rows": 8}, "data parallel", ""),
        # A divided optimizer is enough.
        (
            (("M2 Ultra 64GB",) * 4, "thunderbolt4"),
            {"full": True},
            "divide the optimizer",
            "--strategy zero1",
        ),
    ],
)
def test_the_way_that_is_advised(
    how: tuple[Any, ...], more: dict[str, Any], outcome: str, flags: str
) -> None:
    found = planned(*how, **more)
    assert found.advice.outcome == outcome, (
        found.advice.title,
        [(w.name, w.ranks, w.training_s) for w in found.memory],
    )
    assert flags in f"{found.advice.title} {found.advice.reasons}"
    assert (found.advised > 1) == (outcome != "one machine")
    others = {"fully sharded", "tensor parallel", "context parallel"} - {outcome}
    assert not any(word in found.advice.title for word in others)


def test_without_these_ways_it_would_not_be_so() -> None:
    assert (
        planned(GPUS, "nvlink", full=True, rows=4, step_s=0.5, dividing=None).advice.outcome
        == "pipeline"
    )
    assert planned(PAIR, "nvlink", rows=1, row=256, dividing=None).advice.outcome == "one machine"


def test_more_computers_are_not_advised_for_what_fewer_hold_as_fast() -> None:
    """Four rows are four ranks' work. Eight hold smaller parts, send more, and are done no sooner."""
    found = planned(
        ("RTX 4090",) * 8,
        "nvlink",
        full=True,
        rows=4,
        step_s=0.5,
        dividing=replace(EVERY, ways=frozenset({"fsdp"})),
    )
    ways = {each.ranks: each for each in found.memory if each.strategy == "fsdp"}
    assert (found.advice.outcome, found.advised) == ("fully sharded", 4)
    assert ways[8].rank_bytes < ways[4].rank_bytes
    assert ways[8].sent_bytes > ways[4].sent_bytes
    assert ways[8].training_s > 0.85 * ways[4].training_s


@pytest.mark.parametrize(
    "more", [{"full": True, "rows": 4, "step_s": 0.5}, {"rows": 1, "row": 256}, {"rows": 1}]
)
def test_the_chart_has_the_path(more: dict[str, Any], tmp_path: Path) -> None:
    found = planned(GPUS if "full" in more else PAIR, "nvlink", **more)
    stations = [*(question.text for question in found.advice.path), found.advice.outcome]
    taken = {(arrow.start, arrow.end) for arrow in arrows_of(found.advice) if arrow.taken}
    assert taken == set(itertools.pairwise(stations))
    assert draw_chart(found, tmp_path / "chart.png").is_file()


def test_memory_is_divided_and_traffic_is_that_of_the_way() -> None:
    found = planned(GPUS, "nvlink", full=True, rows=4)
    four, two = (way_of(found, "fsdp", ranks) for ranks in (4, 2))
    assert four.parts["weights"] == pytest.approx(WEIGHTS / 4, rel=0.03)
    assert four.parts["optimizer"] == pytest.approx(two.parts["optimizer"] / 2, rel=0.01)
    assert four.fits
    assert not two.fits
    # NCCL scatters sums: 3 (N - 1) / N of all weights, of which the last block is fetched once.
    assert four.sent_bytes == pytest.approx(3 * 3 / 4 * WEIGHTS, rel=0.03)
    found = planned(PAIR, "nvlink", rows=2, row=2048)
    hidden = 2 * 2048 * 4096 * 2
    assert way_of(found, "tensor", 2).sent_bytes == pytest.approx((4 * 32 - 1) * hidden, rel=0.01)
    context = way_of(found, "context", 2)
    assert context.sent_bytes == pytest.approx(
        32 * 3 / 2 * 2 * 2 * 2048 * 1024 * 2 + 20_000_000, rel=0.001
    )
    # All weights, and half of the activations, with keys and values of whole rows.
    data = way_of(found, "data", 2)
    assert context.parts["weights"] == pytest.approx(data.parts["weights"], rel=1e-6)
    assert (
        data.parts["activations"] < context.parts["activations"] < 1.5 * data.parts["activations"]
    )


def test_parts_of_arrays_follow_the_memory_of_computers() -> None:
    found = planned(("M2 Ultra 128GB", "M2 Max 32GB"), "nvlink", full=True, rows=4)
    unlike = way_of(found, "fsdp", 2)
    assert unlike.fits, "half of it is more than the second has"
    # 96 and 21.3 GB, as 9 to 2: macOS gives three quarters and two thirds to the GPU.
    static = [each - (unlike.by_rank[1] - 4 * WEIGHTS * 2 / 11) for each in unlike.by_rank]
    assert static[0] / static[1] == pytest.approx(4.5, rel=0.1)
    alike = way_of(planned(("M2 Ultra 128GB",) * 2, "nvlink", full=True, rows=4), "fsdp", 2)
    assert unlike.by_rank[1] < alike.by_rank[1] == alike.by_rank[0] < unlike.by_rank[0]
    # Parts travel as long as the largest.
    assert unlike.sent_bytes == pytest.approx(2 * 9 / 11 * alike.sent_bytes, rel=0.001)


def test_times_follow_the_link() -> None:
    slow, fast = (planned(PAIR, link, rows=2, row=2048) for link in ("10GbE", "nvlink"))
    for name in ("fsdp", "tensor", "context"):
        assert way_of(slow, name, 2).step_s > way_of(fast, name, 2).step_s
    # 127 sums of 2 x 2,048 x 4,096 numbers of two bytes, each as an all-reduce of two ranks, and
    # half of the passes.
    sums = 127 * slow.job.link.seconds(2 * 2048 * 4096 * 2, 2)  # type: ignore[union-attr]
    step = slow.job.step
    head = 32768 * 4096
    inside = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    passes = step.tokens * step.token_s * (0.5 + 0.5 * head / (head + inside))
    assert way_of(slow, "tensor", 2).step_s == pytest.approx(
        step.serial_s + passes + sums + 127 * 0.6e-3, rel=0.01
    )
    # Weights in parts travel beside the passes, where these take longer.
    sharded = way_of(fast, "fsdp", 2)
    assert sharded.step_s == pytest.approx(step.serial_s + step.tokens * step.token_s / 2, rel=0.02)


def test_an_exchange_takes_one_of_the_cores_that_ranks_share() -> None:
    # As measured with two ranks on two cores: a step of SmolLM2-135M takes 513 ms with fsdp, which
    # exchanges 349 MB for 0.12 s, and 391 ms with data.
    apart, crowded, roomy = (
        way_of(planned(PAIR, "10GbE", rows=2, row=2048, step_s=60.0, **more), "fsdp", 2).step_s
        for more in ({}, {"shares": True, "room": 2}, {"shares": True, "room": 16})
    )
    assert roomy - apart == pytest.approx((crowded - apart) / 8, rel=0.2)
    exchanged = 2 * WEIGHTS / 2 / 1.1e9  # forward and backward, at 10GbE
    assert crowded - apart == pytest.approx(exchanged, rel=0.25)


def test_the_table_has_their_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(width=300, record=True)
    monkeypatch.setattr(plan_shown, "console_for", lambda **_: console)
    found = planned(PAIR, "thunderbolt4", row=2048)
    plan_shown.show(found, [])
    shown = console.export_text()
    for words in (
        "fully sharded: --hostfile hosts.json --strategy fsdp",
        "matrices divided: --hostfile hosts.json --tp 2",
    ):
        assert f"2: {words}" in shown
    assert "2: rows divided: --hostfile hosts.json --cp 2" in shown
    record = json.loads(json.dumps(found.as_json()))
    told = {way["strategy"]: way for way in record["memory"] if way["ranks"] == 2 and way["step_s"]}
    assert {"data", "zero1", "fsdp", "tensor", "context"} <= told.keys()
    assert all(way["sent_bytes"] and way["fits"] is not None for way in told.values())


@pytest.mark.parametrize(
    ("ranks", "row", "ways"),
    [
        (2, 512, ("fsdp", "tensor", "context")),
        (2, 511, ("fsdp", "tensor")),  # 256 tokens a rank at least
        (3, 4096, ("fsdp", "context")),  # 32 heads
        (16, 4096, ("fsdp", "context")),  # 8 of keys and values
        (8, 64, ("fsdp", "tensor")),
    ],
)
def test_ways_need_heads_and_rows_enough(ranks: int, row: int, ways: tuple[str, ...]) -> None:
    assert EVERY.among(ranks, row) == ways


CONFIG = {
    **{
        "model_type": "llama",
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "intermediate_size": 14336,
    },
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32768},
}
ALL = {"fsdp", "tensor", "context"}


@pytest.mark.parametrize(
    ("values", "options", "ways"),
    [
        ({}, {}, ALL),
        ({"model_type": "mistral"}, {}, ALL),  # which mlx_lm builds as a Llama
        ({"model_type": "gemma"}, {}, {"fsdp", "context"}),
        ({"model_type": "gemma2"}, {}, {"fsdp"}),
        ({"model_type": "mamba"}, {}, {"fsdp"}),
        ({"model_type": "phi3small"}, {}, {"fsdp"}),
        ({"model_type": "new"}, {}, set()),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, {}, {"fsdp", "tensor"}),
        ({}, {"optimizer": "muon"}, {"context"}),
        ({}, {"fine_tune_type": "dora"}, {"fsdp", "context"}),
        ({}, {"compress": "int8"}, {"context"}),
        ({}, {"sync_every": 4}, set()),
        ({}, {"strategy": "pipeline", "pp": 2}, ALL),  # another way than the one that was asked for
    ],
)
def test_architectures_and_options_leave_some_ways(
    values: dict[str, Any], options: dict[str, Any], ways: set[str]
) -> None:
    told = {**CONFIG, **values}
    found = dividing_of(told, blocks_of(told), TrainConfig(**{"train": True, **options}), 1)
    assert found.ways == ways
    assert dividing_of(told, None, TrainConfig(), 1).ways == set()


def test_groups_of_quantised_weights_stay_whole() -> None:
    found = dividing_of(
        {**CONFIG, "intermediate_size": 14336 + 64}, blocks_of(CONFIG), TrainConfig(), 64
    )
    assert found.group == 64
    narrow = replace(found, inner=(4096, 64 * 6))
    assert "tensor" in narrow.among(2, 64)
    assert "tensor" not in narrow.among(4, 64), "six groups"


def test_the_command_reads_the_architecture_and_no_weights(tmp_path: Path) -> None:
    write_model(tmp_path / "model", layers=2, hidden=64)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"no weights")
    words = (
        "--model",
        "model",
        "--link",
        "thunderbolt4",
        "--iters",
        "100",
        "--num-layers",
        "-1",
        "--json",
    )

    def told(devices: str, *more: str) -> set[tuple[int, str]]:
        done = call_allhands("plan", *words, "--device", devices, *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return {
            (way["ranks"], way["strategy"])
            for way in json.loads(done.stdout)["memory"]
            if way["step_s"]
        }

    two = {(2, name) for name in ("data", "zero1", "fsdp", "tensor", "context")}
    three = {(3, name) for name in ("data", "zero1", "fsdp", "context")}  # four heads
    assert told("3 x M1 16GB", "--max-seq-length", "1024") == two | three
    assert (2, "context") not in told("2 x M1 16GB", "--max-seq-length", "500")
    assert told("M1 16GB, M2 Max 32GB", "--max-seq-length", "1024", "--optimizer", "muon") == {
        (2, "data"),
        (2, "context"),
    }
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**config, "model_type": "gemma2"}))
    assert told("2 x M1 16GB", "--max-seq-length", "1024") == {
        (2, "data"),
        (2, "zero1"),
        (2, "fsdp"),
    }


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 2},
        {"cp": 2},
        {"strategy": "fsdp", "dp_shard": 2},
        {"strategy": "pipeline", "pp": 2, "pp_split": "1,1"},
    ],
)
def test_one_process_is_measured_with_all_of_the_model(
    options: dict[str, Any], tmp_path: Path
) -> None:
    asked = TrainConfig(**{"train": True, "num_ranks": 2, **options})
    measured = build_config(dict(settings(asked, 4, tmp_path)))
    assert require_groups(measured, 1) is None
    assert unfit_stages(measured, 1) is None
    assert all(getattr(measured, name) == getattr(TrainConfig(), name) for name in options)
