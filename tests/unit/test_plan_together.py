"""Plans of ways that go together, of experts and of kept weights: refused as training does, and
where they pay.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from command_line import call_allhands
from test_plan_divided import EVERY, GPUS, WEIGHTS, planned, way_of
from tiny import run_allhands, write_model
from trained import write_models

from allhands.config.combinations import require_stages
from allhands.config.schema import build_config
from allhands.distributed.capabilities import CAPABILITIES
from allhands.distributed.mesh import Mesh
from allhands.errors import ConfigError
from allhands.parallel.costs import Traffic
from allhands.plan.dividing import dividing_of, strategy_name
from allhands.plan.meshes import ExchangeGroup, asked_mesh
from allhands.plan.outlook import Outlook
from allhands.plan.strategies import Way
from allhands.run.piping import piped, require_back_end
from allhands.run.training_memory import DecoderShape, Work, blocks_of

MPI = ("--backend", "mpi")
MIXTRAL = DecoderShape(32, 4096, 14336, 4096, 1024, 32000, experts=8, active=2)


def asked(
    options: dict[str, Any], link: str = "nvlink", computers: tuple[str, ...] = GPUS, **more: Any
) -> Outlook:
    return planned(
        computers, link, asked=build_config({"train": True, **options}), backend="nccl", **more
    )


def first(found: Outlook, strategy: str, ranks: int = 4) -> Way:
    return next(
        each
        for each in found.memory
        if (each.strategy, each.ranks) == (strategy, ranks) and each.step_s
    )


@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        ({"strategy": "fsdp", "tp": 2}, "fsdp+tensor"),
        ({"strategy": "pipeline", "tp": 2}, "pipeline+tensor"),
        ({"strategy": "pipeline", "dp_shard": 2}, "pipeline+fsdp"),
        ({"strategy": "fsdp", "reshard": "off"}, "zero2"),
        ({"strategy": "zero2"}, "zero2"),
        ({"strategy": "fsdp", "dp_shard": 2}, "fsdp"),
        ({"ep": 4}, "expert"),
        ({"ep": 2, "tp": 2}, "tensor+expert"),
        ({"cp": 2, "strategy": "zero1"}, "context+zero1"),
        ({"cp": 2, "strategy": "fsdp"}, "fsdp+context"),
        ({"cp": 2, "strategy": "pipeline"}, "pipeline+context"),
        ({"cp": 2, "tp": 2}, "tensor+context"),
        ({"cp": 2, "ep": 2}, "expert+context"),
        ({"strategy": "fsdp", "ep": 4}, "fsdp+expert"),
        ({"strategy": "fsdp", "ep": 2, "tp": 2}, "fsdp+tensor+expert"),
        ({"strategy": "zero1"}, ""),
    ],
)
def test_each_way_that_is_asked_for_is_planned(options: dict[str, Any], strategy: str) -> None:
    config = build_config({"train": True, **options})
    assert strategy_name(lambda name: getattr(config, name)) == strategy
    if not strategy:
        assert asked_mesh(config, 4) is None
        return
    more: dict[str, Any] = {"blocks": MIXTRAL} if "ep" in options else {}
    way = first(asked(options, full=True, rows=4, **more), strategy)
    assert way.fits is not None
    assert all(
        f"--{name.replace('_', '-')} {value}" in way.flags for name, value in options.items()
    )
    assert (len(way.by_rank), min(way.by_rank) > 0, way.sent_bytes > 0, way.training_s > 0) == (
        4,
        True,
        True,
        True,
    )


def test_what_ranks_hold_together_is_divided_by_both() -> None:
    """A quarter of every array each; of whole blocks half as much for a moment as fully sharded
    ranks of one kind.
    """
    plain = way_of(planned(GPUS, "nvlink", full=True, rows=4), "fsdp", 4)
    both = first(asked({"strategy": "fsdp", "tp": 2}, full=True, rows=4), "fsdp+tensor")
    copies = first(asked({"strategy": "fsdp", "dp_shard": 2}, full=True, rows=4), "fsdp")
    kept = first(asked({"strategy": "zero2"}, full=True, rows=4), "zero2")
    tables = 2 * WEIGHTS * 32768 * 4096 / (7.25e9 * 4)
    assert plain.parts["weights"] == pytest.approx(WEIGHTS / 4, rel=0.03)
    assert plain.parts["weights"] <= both.parts["weights"] <= plain.parts["weights"] + 1.01 * tables
    assert copies.parts["weights"] == pytest.approx(WEIGHTS / 2, rel=0.03)
    assert kept.parts["weights"] == pytest.approx(WEIGHTS, rel=0.03)
    assert kept.rank_bytes > plain.rank_bytes + WEIGHTS / 2
    # Weights are fetched once in place of twice: a third less. Copies of the model exchange what
    # both have.
    assert kept.sent_bytes == pytest.approx(plain.sent_bytes * 2 / 3, rel=0.05)
    assert copies.sent_bytes == pytest.approx(2.5 / 2.25 * plain.sent_bytes * 0.8, rel=0.05)


def test_stages_hold_what_the_other_way_leaves_of_them() -> None:
    """Of full training: weights, gradients and states of half of the blocks, of which two ranks
    have a half each.
    """
    options = ({"pp": 2}, {"tp": 2}, {"dp_shard": 2, "reshard": "on"})
    one, tensor, shard = (
        first(asked({"strategy": "pipeline", **more}, full=True, rows=4), name)
        for more, name in zip(
            options, ("pipeline", "pipeline+tensor", "pipeline+fsdp"), strict=True
        )
    )
    assert max(one.by_rank) > 1.5 * max(tensor.by_rank)
    assert max(one.by_rank) > 1.5 * max(shard.by_rank)
    # One rank of a stage has what the other has.
    assert sorted(tensor.by_rank) == sorted(2 * [min(tensor.by_rank)] + 2 * [max(tensor.by_rank)])
    # Copies of the model exchange all gradients, ranks with parts of matrices hidden states.
    assert tensor.sent_bytes < min(one.sent_bytes, shard.sent_bytes)


def test_two_ways_together_are_worth_it_where_rows_are_few() -> None:
    """Two rows for four ranks: fully sharded alone, two of them have none. With eight rows nobody
    waits for sums.
    """
    for rows, better in ((2, True), (8, False)):
        found = asked(
            {"strategy": "fsdp", "tp": 2}, full=True, rows=rows, row=2048, step_s=2.5 * rows
        )
        together, alone = first(found, "fsdp+tensor"), first(found, "fsdp")
        assert (together.step_s < alone.step_s) == better, rows


@pytest.mark.parametrize(("rows", "flags"), [(2, "--strategy fsdp --tp 2"), (8, "--strategy fsdp")])
def test_two_ways_together_are_advised_where_they_are_the_quickest_that_fits(
    rows: int, flags: str
) -> None:
    sharded = replace(EVERY, ways=frozenset({"fsdp"}))
    options = {"strategy": "fsdp", "tp": 2}
    found = asked(options, full=True, rows=rows, row=2048, step_s=2.5 * rows, dividing=sharded)
    assert found.advice.outcome == "fully sharded"
    assert found.advice.title.endswith(flags)


def test_experts_are_planned_without_being_asked_for() -> None:
    """Of mixtures whose experts so many ranks divide; elsewhere there is no such way."""
    by_experts = replace(EVERY, ways=EVERY.ways | {"expert"}, experts=8)
    work = Work(
        "full", 4 * 512, 32, 2 * 46_000_000_000, 2 * 46_000_000_000, "adamw", batch_tokens=4 * 512
    )
    found = planned(
        GPUS, "nvlink", full=True, rows=4, blocks=MIXTRAL, work=work, dividing=by_experts
    )
    ways = {each.ranks: each for each in found.memory if each.strategy == "expert"}
    assert ways.keys() == {2, 4}
    data = way_of(found, "data", 4)
    # 96 % of it are experts.
    assert ways[4].parts["weights"] == pytest.approx(
        data.parts["weights"] * (0.04 + 0.96 / 4), rel=0.05
    )
    assert by_experts.among(3, 64) == ("fsdp",)
    assert "expert" not in {each.strategy for each in planned(GPUS, "nvlink", full=True).memory}
    values = {
        **{
            "model_type": "mixtral",
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "intermediate_size": 128,
        },
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300},
        **{"num_local_experts": 8, "num_experts_per_tok": 2},
    }
    for options, here in (
        ({}, True),
        ({"fine_tune_type": "dora"}, False),
        ({"compress": "int8"}, False),
    ):
        config = build_config({"train": True, **options})
        assert ("expert" in dividing_of(values, blocks_of(values), config, 1).ways) == here


def test_groups_of_some_ranks_over_a_ring_send_more() -> None:
    """All ranks exchange for all groups: a sum with a slot for each, and a gathering of everything."""
    traffic = Traffic(all_reduced=1000, gathered=1000)
    assert ExchangeGroup(2).sent(traffic) == 1000 + 500
    assert ExchangeGroup(2, slots=2).sent(traffic) == 3000 + 1500
    assert ExchangeGroup(1, slots=4).sent(traffic) == 0


@pytest.mark.parametrize(
    ("row", "full", "together"),
    [(8192, False, False), (65536, False, True), (32768, True, False)],
    ids=["arrays alone fit", "only both fit", "neither fits"],
)
def test_arrays_and_rows_are_divided_where_nothing_else_fits(
    row: int, full: bool, together: bool
) -> None:
    found = planned(GPUS[:2], "nvlink", rows=2, row=row, full=full)
    alone = [each for each in found.memory if each.ranks == 2 and "+" not in each.strategy]
    both = [each for each in found.memory if each.strategy == "fsdp+context"]
    assert bool(both) == all(each.fits is False for each in alone)
    assert any(each.fits for each in both) == together
    assert ("--strategy fsdp --cp 2" in found.advice.title) == together


@pytest.mark.parametrize("backend", CAPABILITIES)
@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({"strategy": "fsdp", "tp": 2}, True),
        ({"strategy": "pipeline", "tp": 2}, True),
        ({"strategy": "pipeline", "dp_shard": 2}, True),
        ({"tp": 2}, True),
        ({"tp": 4}, False),
        ({"cp": 2}, True),
        ({"cp": 2, "strategy": "fsdp"}, True),
        ({"cp": 4, "strategy": "fsdp"}, False),
        ({"ep": 2, "strategy": "fsdp"}, False),
        ({"cp": 2, "ep": 2}, True),
        ({"ep": 2}, False),
        ({"strategy": "fsdp", "dp_shard": 2}, False),
        ({"strategy": "pipeline"}, False),
    ],
)
def test_back_ends_without_groups_are_refused_for_what_needs_them(
    options: dict[str, Any], needs: bool, backend: str
) -> None:
    mesh = piped(build_config({"train": True, **options}), Mesh(0, 4))
    if backend == "none" or (needs and "split" not in CAPABILITIES[backend]):
        if needs or options.get("strategy") == "pipeline":
            with pytest.raises(ConfigError) as refused:
                require_back_end(mesh, backend)
            assert refused.value.where == f"--backend {backend}"
        return
    require_back_end(mesh, backend)


# --- refused as training does ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_models(tmp_path_factory.mktemp("refused"))
    write_model(folder / "mixture", layers=2, hidden=64, experts=4)
    return folder


REFUSED: list[tuple[int, str, tuple[str, ...], str]] = [
    (3, "model", ("--tp", "3"), "--tp 3"),
    (4, "model", ("--backend", "ring", "--strategy", "fsdp", "--tp", "2"), "--backend ring"),
    (4, "model", ("--backend", "ring", "--strategy", "pipeline", "--dp-shard", "2"), "--backend ring"),
    (4, "model", ("--strategy", "pipeline", "--pp", "3", "--tp", "2"), "--pp 3 --tp 2"),
    (4, "model", ("--strategy", "fsdp", "--dp-shard", "4", "--tp", "2"), "--tp 2 --dp-shard 4"),
    (4, "model", (*MPI, "--strategy", "pipeline", "--dp-shard", "2", "--optimizer", "muon"), "--dp-shard 2"),
    (2, "model", ("--ep", "2"), "--ep"),
    (3, "mixture", ("--ep", "3"), "--ep 3"),
    (2, "mixture", ("--ep", "2", "--cp", "2"), "--ep 2"),
    (2, "model", ("--strategy", "pipeline", "--pp-split", "2,3"), "--pp-split"),
]  # fmt: skip


def told(stderr: str) -> str:
    return next(line for line in stderr.splitlines() if "error: " in line)


@pytest.mark.parametrize(("ranks", "model", "words", "where"), REFUSED)
def test_plans_refuse_what_training_refuses(
    place: Path, ranks: int, model: str, words: tuple[str, ...], where: str
) -> None:
    device = ("--device", f"{ranks} x M1 16GB", "--iters", "9", "--num-layers", "-1")
    done = call_allhands("plan", *device, "--model", str(place / model), *words, cwd=place)
    assert (done.returncode, done.stdout) in ((2, ""), (4, "")), done.stderr
    assert where in told(done.stderr)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("ranks", "model", "words", "where"), REFUSED)
def test_training_gives_the_same_reason(
    place: Path, ranks: int, model: str, words: tuple[str, ...], where: str
) -> None:
    device = ("--device", f"{ranks} x M1 16GB", "--iters", "9", "--num-layers", "-1")
    planned = call_allhands("plan", *device, "--model", str(place / model), *words, cwd=place)
    given = (
        "--model",
        place / model,
        "--data",
        place / "data",
        "--adapter-path",
        place / "run",
        "--num-layers",
        "-1",
    )
    trained = run_allhands(
        "train", "--train", "--iters", "2", "-n", str(ranks), *map(str, given), *words
    )
    assert trained.returncode == planned.returncode, trained.stderr
    shown = [
        re.sub(r"\s+", " ", told(done.stderr)).partition("error: ")[2]
        for done in (planned, trained)
    ]
    assert shown[0] == shown[1]


@pytest.mark.parametrize(
    "options", [{"tp": 2}, {"strategy": "pipeline"}, {"strategy": "fsdp", "dp_shard": 2}]
)
def test_one_computer_is_refused_what_needs_several(place: Path, options: dict[str, Any]) -> None:
    words = [
        word
        for name, value in options.items()
        for word in (f"--{name.replace('_', '-')}", str(value))
    ]
    model = ("--model", str(place / "model"), "--iters", "9")
    done = call_allhands("plan", "--device", "M1 16GB", *model, *words, cwd=place)
    assert done.returncode == 2
    with pytest.raises(ConfigError) as refused:
        require_stages(build_config({"train": True, **options}), 1)
    assert refused.value.message in done.stderr
    # Of as many as it takes, though only imagined, it is planned.
    done = call_allhands(
        "plan", "--device", "M1 16GB", "--machines", "2", *model, *words, "--json", cwd=place
    )
    assert done.returncode == 0, done.stderr
    assert any(" ".join(words) in way["flags"] for way in json.loads(done.stdout)["memory"])
