"""What is advised to runs that wait: other things to small steps on one computer than to large
models on several.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from test_monitor import SAMPLE
from test_plan import history

from allhands.observe.monitor import Sample
from allhands.plan.outgrown import signs_of


def advice(
    comm_s: float, hosts: Sequence[str], *, params: int = 10**6, backend: str = "ring"
) -> str:
    """To a run with a rank on each of the hosts, of whose steps of 1 s so much was waiting for
    others.
    """
    made = history(max(2, len(hosts)), comm_s=comm_s)
    assert made.started is not None
    made.started = replace(made.started, total_params=params, backend=backend)
    samples: list[Sample] = [
        replace(SAMPLE, rank=rank, host=host) for rank, host in enumerate(hosts)
    ]
    (sign,) = signs_of(made, samples)
    return sign.advice


@pytest.mark.parametrize(
    ("ranks", "comm_s", "pays"), [(2, 0.69, False), (2, 0.4, True), (4, 0.7, True), (4, 0.8, False)]
)
def test_steps_too_short_for_several_processes_of_one_computer(
    ranks: int, comm_s: float, pays: bool
) -> None:
    told = advice(comm_s, ["a"] * ranks)
    assert (f"leave -n {ranks} out" in told) != pays
    assert "link" not in told
    assert "--strategy pipeline" not in told


@pytest.mark.parametrize(
    ("config", "stages"),
    [
        ({"strategy": "pipeline"}, True),
        ({"pp": 2}, True),
        ({"pp": 1}, False),
        ({"pp": None}, False),
    ],
)
def test_the_first_stage_of_a_pipeline_says_nothing_of_a_single_process(
    config: dict[str, object], stages: bool
) -> None:
    (sign,) = signs_of(history(2, comm_s=0.69), [SAMPLE], config)
    assert ("alone would need" in sign.advice or "leave -n" in sign.advice) is not stages
    assert ("--batch-size" in sign.advice) is stages


@pytest.mark.parametrize("hosts", [["a", "b"], []])
def test_between_computers_the_link_counts(hosts: list[str]) -> None:
    assert "a faster link" in advice(0.4, hosts)
    assert "takes" not in advice(0.4, hosts)
    assert "alone would need" in advice(0.69, hosts)


def test_only_large_models_are_worth_sharding() -> None:
    assert "--strategy pipeline" not in advice(0.4, ["a", "b"])
    assert "--strategy pipeline" in advice(0.4, ["a", "b"], params=7 * 10**9)
    assert "--strategy pipeline" in advice(0.4, ["a", "a"], params=7 * 10**9, backend="nccl")


@pytest.mark.parametrize(("hosts", "network"), [(["a", "a"], False), (["a", "b"], True)])
def test_faults_of_one_computer_are_not_those_of_a_network(hosts: list[str], network: bool) -> None:
    made = history(2)
    assert made.started is not None
    made.starts = [replace(made.started, attempt=attempt) for attempt in range(1, 5)]
    samples = [replace(SAMPLE, rank=rank, host=host) for rank, host in enumerate(hosts)]
    (sign,) = signs_of(made, samples)
    assert ("cluster check" in sign.advice) is network


def advised(comm_s: float, way: str, config: dict[str, object], **made_by: object) -> list[str]:
    """All advice to a run of two computers, whose GPUs are full."""
    made = history(2, comm_s=comm_s)
    assert made.started is not None
    made.started = replace(made.started, strategy=way, **made_by)  # type: ignore[arg-type]
    full = {"gpu_used_bytes": 95, "gpu_total_bytes": 100}
    samples = [replace(SAMPLE, rank=rank, host=host, **full) for rank, host in enumerate("ab")]
    return [sign.advice for sign in signs_of(made, samples, config)]


@pytest.mark.parametrize(
    ("way", "config"),
    [
        ("fully sharded", {"strategy": "auto"}),
        ("", {"strategy": "zero3"}),
        ("data parallel, --cp 2", {"strategy": "auto", "cp": 2}),
        ("matrices divided, --tp 2", {"strategy": "auto", "tp": 2}),
    ],
)
@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]])
def test_ranks_that_hold_parts_are_told_neither_to_be_one_nor_to_have_shares(
    way: str, config: dict[str, object], hosts: list[str]
) -> None:
    made = history(2, comm_s=0.8)
    assert made.started is not None
    made.started = replace(made.started, strategy=way)
    samples = [replace(SAMPLE, rank=rank, host=host) for rank, host in enumerate(hosts)]
    (sign,) = signs_of(made, samples, config)
    for words in ("leave -n", "alone would need", "--rank-weights"):
        assert words not in sign.advice


def test_the_way_that_auto_took_counts() -> None:
    (sign, _) = advised(0.69, "pipeline", {"strategy": "auto"})
    assert "alone would need" not in sign
    assert "--batch-size" in sign


def test_only_what_would_change_something_is_advised() -> None:
    plain = " ".join(advised(0.4, "data parallel", {"strategy": "auto", "rank_weights": "equal"}))
    for flag in (
        "--rank-weights auto",
        "--grad-checkpoint",
        "--strategy zero1",
        "--strategy fsdp",
    ):
        assert flag in plain
    config: dict[str, object] = {"strategy": "zero1", "grad_checkpoint": True, "rank_weights": None}
    told = " ".join(advised(0.4, "optimizer divided", config))
    for flag in ("--rank-weights", "--grad-checkpoint", "--strategy zero1"):
        assert flag not in told
    assert "--strategy fsdp" in told
    sharded = " ".join(advised(0.4, "fully sharded", {"strategy": "fsdp"}))
    assert "--strategy" not in sharded
    # These cannot be updated in parts, and on these GPUs nobody knows the speed of a rank.
    assert "zero1" not in " ".join(advised(0.4, "data parallel", {"optimizer": "muon"}))
    assert "--rank-weights auto" not in " ".join(advised(0.4, "data parallel", {}, backend="nccl"))
