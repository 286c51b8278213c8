"""Options that do not go together, and what has no effect without another."""

from __future__ import annotations

import re
from typing import Any

import pytest
from test_config import refused

from allhands.config.combinations import refuse_combinations, unfit_stages
from allhands.config.schema import build_config
from allhands.distributed.mesh import Mesh
from allhands.errors import ConfigError
from allhands.run.piping import as_left, piped


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"sync_every": 20, "strategy": "zero1"}, "--strategy zero1"),
        ({"sync_every": 20, "strategy": "data"}, "--strategy data"),
        ({"outer_lr": 0.7}, "--outer-lr"),
        ({"outer_momentum": 0.9, "sync_every": 1}, "--outer-momentum"),
        ({"sync_fragments": 2}, "--sync-fragments"),
        ({"sync_delay": 2}, "--sync-delay"),
        ({"sync_delay": 1, "strategy": "zero1"}, "--sync-delay"),
        ({"sync_delay": 1, "strategy": "pipeline"}, "--sync-delay"),
        ({"sync_delay": 1, "sync_fragments": 2}, "--sync-fragments"),
        ({"sync_every": 4, "sync_fragments": 5}, "--sync-fragments"),
        ({"sync_every": 4, "sync_delay": 5}, "--sync-delay"),
        ({"sync_every": 20, "sync_fragments": 3, "sync_delay": 7}, "--sync-delay"),
        ({"sync_every": 0}, "--sync-every"),
        ({"sync_every": 2, "outer_momentum": 1.0}, "--outer-momentum"),
        ({"diloco": True}, "sync_every"),
        ({"fragment_sync_delay": 5}, "sync_delay"),
    ],
)
def test_rounds_and_what_they_cannot_go_with(flags: dict[str, Any], named: str) -> None:
    assert named in str(refused(flags))
    kept = build_config({"sync_every": 20, "outer_lr": 0.7, "outer_momentum": 0.9})
    assert (kept.sync_every, kept.strategy) == (20, "auto")


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"packing": True, "mask_prompt": True}, "--mask-prompt"),
        ({"isolate_documents": True}, "--packing: add it"),
    ],
)
def test_packing_that_cannot_take_effect_is_refused(flags: dict[str, Any], word: str) -> None:
    assert word in refused(flags).message


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"strategy": "zero1"}, "--strategy zero1"),
        ({"sync_every": 4}, "--sync-every"),
        ({"sync_delay": 1}, "--sync-delay"),
        ({"compress": "int8"}, "--compress"),
        ({"rank_weights": "auto"}, "--rank-weights"),
        ({"fine_tune_type": "dora"}, "lora"),
    ],
)
def test_divided_matrices_refuse_what_they_have_not(flags: dict[str, Any], word: str) -> None:
    assert word in refused({"tp": 2, **flags}).message


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        ({"strategy": "fsdp", "dp_shard": 2}, "--dp-shard"),
        ({"strategy": "fsdp", "cp": 2}, "--cp"),
        ({"strategy": "pipeline"}, "--tp 2"),
        ({"strategy": "zero1"}, "--strategy zero1"),
        ({"sync_every": 4}, "--sync-every"),
        ({"sync_delay": 1}, "--sync-delay"),
        ({"compress": "int8"}, "--compress"),
        ({"rank_weights": "auto"}, "--rank-weights"),
        ({"tp": 4}, "--tp 4"),
        ({"fine_tune_type": "dora"}, "DoRA"),
    ],
)
def test_divided_experts_refuse_what_they_have_not(flags: dict[str, Any], word: str) -> None:
    message = refused({"ep": 2, **flags}).message
    assert "--ep 2" in message
    assert word in message


def test_ranks_make_up_groups_that_divide_experts() -> None:
    """Each has rows of its own, but where the same ranks divide matrices."""
    mesh = piped(build_config({"ep": 2}), Mesh(3, 6, weights=(1.0, 2.0, 1.0, 1.0, 1.0, 1.0)))
    assert (mesh.expert, mesh.size_of("data"), mesh.data_size, mesh.data_rank) == (2, 3, 6, 3)
    assert mesh.weights[1] == 2.0
    both = piped(build_config({"ep": 2, "tp": 2}), Mesh(3, 6))
    assert (both.expert, both.tensor, both.data_size, both.data_rank) == (1, 2, 3, 1)
    with pytest.raises(ConfigError, match="3 ranks do not make whole groups of 2"):
        piped(build_config({"ep": 2}), Mesh(0, 3))
    for ranks, parts in ((8, 4), (6, 2), (3, 1)):
        left = as_left(build_config({"ep": 4, "min_ranks": 2}), Mesh(0, ranks))
        assert (left.ep, len(left.notes)) == (parts, parts != 4)
        left = as_left(build_config({"ep": 4, "tp": 4, "min_ranks": 2}), Mesh(0, ranks))
        assert (left.ep, left.tp) == (parts, parts)


@pytest.mark.parametrize(
    ("flags", "ranks", "parts", "copies", "rows"),
    [
        ({"strategy": "fsdp"}, 4, 4, 1, 4),
        ({"strategy": "fsdp", "dp_shard": 2}, 4, 2, 2, 4),
        ({"strategy": "fsdp", "cp": 2}, 2, 2, 1, 1),
        ({"strategy": "fsdp", "cp": 2}, 8, 8, 1, 4),
        ({"strategy": "fsdp", "cp": 2, "dp_shard": 2}, 8, 4, 2, 4),
        ({"strategy": "fsdp", "ep": 2}, 4, 2, 2, 4),
        ({"strategy": "fsdp", "ep": 2, "tp": 2}, 4, 2, 1, 2),
        ({"strategy": "pipeline", "cp": 2}, 4, 1, 2, 1),
        ({"strategy": "pipeline", "dp_shard": 2, "cp": 2}, 8, 2, 2, 2),
        ({"tp": 2, "cp": 2}, 8, 1, 4, 2),
        ({"ep": 2, "cp": 2}, 4, 1, 2, 2),
    ],
)
def test_parts_and_copies_of_arrays_that_go_together(
    flags: dict[str, Any], ranks: int, parts: int, copies: int, rows: int
) -> None:
    mesh = piped(build_config(flags), Mesh(0, ranks))
    assert (mesh.parts, mesh.copies, mesh.data_size) == (parts, copies, rows)
    # Each part is on equally many ranks.
    every = [mesh.part_of(rank) for rank in range(ranks)]
    assert sorted(set(every)) == list(range(parts))
    assert len({every.count(part) for part in range(parts)}) == 1


@pytest.mark.parametrize(
    "flags",
    [
        {"strategy": strategy, **more}
        for strategy in ("fsdp", "pipeline", "data")
        for more in (
            {"cp": 2},
            {"tp": 2},
            {"tp": 2, "ep": 2},
            {"tp": 2, "cp": 2},
            {"tp": 2, "ep": 2, "cp": 2},
            *([] if strategy == "data" else [{"dp_shard": 2}, {"dp_shard": 2, "cp": 2}]),
            *([] if strategy == "pipeline" else [{"ep": 2}]),
        )
    ],
)
def test_ranks_that_are_left_make_up_a_mesh(flags: dict[str, Any]) -> None:
    config = build_config({"min_ranks": 1, **flags})
    for ranks in range(1, 9):
        left = as_left(config, Mesh(0, ranks))
        mesh = piped(left, Mesh(0, ranks))
        assert mesh.size == ranks
        refuse_combinations(left)


def test_ranks_make_up_groups_that_divide_matrices() -> None:
    mesh = piped(build_config({"tp": 2}), Mesh(3, 6))
    assert (mesh.tensor, mesh.data_size, mesh.data_rank) == (2, 3, 1)
    with pytest.raises(ConfigError, match="3 ranks do not make whole groups of 2"):
        piped(build_config({"tp": 2}), Mesh(0, 3))
    for ranks, parts in ((8, 4), (6, 2), (3, 1)):
        left = as_left(build_config({"tp": 4, "min_ranks": 2}), Mesh(0, ranks))
        assert (left.tp, len(left.notes)) == (parts, parts != 4)
    assert as_left(build_config({"tp": 4}), Mesh(0, 3)).tp == 4


@pytest.mark.parametrize(
    ("flags", "ranks", "where"),
    [
        ({}, 3, None),
        ({}, 1, "--strategy pipeline"),
        ({"pp": 2}, 4, None),
        ({"pp": 2}, 3, "--pp 2"),
        ({"pp_split": "20,12"}, 2, None),
        ({"pp_split": "20,12"}, 3, "--pp-split 20,12"),
        ({"pp": 2, "pp_split": "20,12"}, 4, None),
        ({"pp_split": "8,8,8,8", "pp_schedule": "interleaved"}, 2, None),
        ({"pp_split": "20,12", "pp_schedule": "interleaved"}, 2, "--pp-split 20,12"),
        ({"pp_split": "8,8,8,8"}, 2, "--pp-split 8,8,8,8"),
    ],
)
def test_ranks_make_up_the_stages_that_are_asked_for(
    flags: dict[str, Any], ranks: int, where: str | None
) -> None:
    config = build_config({"strategy": "pipeline", **flags})
    problem = unfit_stages(config, ranks)
    assert (problem and problem.where) == where
    # Fewer ranks may be left of those that were asked for.
    left = as_left(build_config({"strategy": "pipeline", "min_ranks": 1, **flags}), Mesh(0, ranks))
    assert (left.pp, left.pp_split) == ((None, "auto") if where else (config.pp, config.pp_split))
    assert piped(left, Mesh(0, ranks)).pipe == (ranks if where else config.pp or ranks)
    assert len(left.notes) == (where is not None)
    assert left.strategy == ("auto" if ranks == 1 else "pipeline")
    fewer = as_left(
        build_config({"strategy": "pipeline", "min_ranks": ranks + 1, **flags}), Mesh(0, ranks)
    )
    assert fewer.pp_split == config.pp_split, "not so few"


@pytest.mark.parametrize(
    "options",
    [{"tp": 2}, {"cp": 4}, {"ep": 2}, {"ep": 4, "tp": 4}, {"strategy": "fsdp", "dp_shard": 2}],
)
def test_nouns_agree_with_the_number_of_ranks_that_are_left(options: dict[str, Any]) -> None:
    for ranks in (1, 3):
        (note,) = as_left(build_config({"min_ranks": 1, **options}), Mesh(0, ranks)).notes
        assert re.search(r"\b1 [a-z]+s\b", note) is None
        assert re.search(rf"\b{ranks} rank{'s' * (ranks > 1)}\b", note)


@pytest.mark.parametrize("split", ["", "a,b", "20,", "20;12", "-1,2"])
def test_a_split_that_is_none_is_told_in_words(split: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_config({"pp_split": split, "strategy": "pipeline"})
    assert "pp-split" in str(caught.value.where)
    assert "20,12, or auto" in caught.value.message


def test_epochs_have_the_bound_of_batches() -> None:
    with pytest.raises(ConfigError):
        build_config({"epochs": 1e18})
    assert build_config({"epochs": 3}).batches(100) == 300
    assert build_config({"epochs": 1e-9}).batches(100) == 1
    with pytest.raises(ConfigError) as caught:
        build_config({"epochs": 1e6}).batches(10**4)
    assert caught.value.where == "--epochs"
