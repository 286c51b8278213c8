"""What ``--strategy auto`` takes by the ranks' memory, of a model that is never read: for ranks
that are all alike.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_lm.models import gemma2, llama

from allhands.config.schema import TrainConfig
from allhands.distributed.backend import SingleProcess
from allhands.distributed.mesh import Mesh
from allhands.errors import ModelError
from allhands.model.adapters import make_trainable
from allhands.run.choosing import (
    Choosing,
    _quicker,
    _Rank,
    is_open,
    reads_later,
    strategy_by_memory,
)
from allhands.run.dividing import DividedModel
from allhands.run.expecting import require_room_for_weights
from allhands.run.piping import piped
from allhands.runtime.accelerator import Accelerator

GIGABYTE = 10**9
# 1.03 billion weights: 4.1 GB in float32.
SIZES: dict[str, Any] = {
    **{
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "intermediate_size": 8192,
        "num_attention_heads": 16,
    },
    **{
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-5,
        "vocab_size": 16_000,
        "tie_word_embeddings": True,
    },
}
CPU = Accelerator("cpu", "cpu", 0, 8, True, None)
GPU = Accelerator("cuda", "gpu", 0, 8, False, None)
METAL = Accelerator("metal", "gpu", 0, 8, False, None)


def choosing(
    gigabytes: float,
    ranks: int = 4,
    accelerator: Accelerator = CPU,
    kind: Any = llama,
    **options: Any,
) -> Choosing:
    """A training on ranks with so much memory each, on computers of their own."""
    config = TrainConfig(
        **{"train": True, "fine_tune_type": "full", "num_layers": -1, "batch_size": 8, **options}
    )
    sizes = {"model_type": kind.__name__.rpartition(".")[2], **SIZES}
    model = kind.Model(kind.ModelArgs.from_dict({**sizes, "head_dim": 128}))
    make_trainable(model, config)
    divided = DividedModel(model, sizes, np.full(64, 512))
    mesh = Mesh(rank=0, size=ranks, local_rank=0, local_size=1)
    device = replace(accelerator, memory_bytes=int(gigabytes * GIGABYTE))
    return Choosing(
        config, divided, mesh, device, present_bytes=0 if accelerator is not CPU else GIGABYTE // 8
    )


def chosen(*how: Any, **options: Any) -> tuple[str, str]:
    config, told = strategy_by_memory(choosing(*how, **options), SingleProcess())
    return config.strategy, " ".join(told)


@pytest.fixture(autouse=True)
def _no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own control group is nobody's business here."""
    monkeypatch.setattr("allhands.run.expecting.memory_limit", lambda: None)


def test_who_has_room_keeps_what_there_was() -> None:
    assert chosen(64) == ("auto", "")
    assert chosen(8, fine_tune_type="lora") == ("auto", "")


def test_who_has_little_divides_everything() -> None:
    """Weights, gradients and two states of AdamW are 16.5 GB, and a quarter of that fits."""
    name, told = chosen(12)
    assert name == "fsdp"
    assert told.startswith("fully sharded (--strategy fsdp): for a whole model rank 0 would need ")
    assert "may have 11.4 GB (4 of 4 ranks have too little)" in told
    # With LoRA the weights alone are too large.
    assert chosen(3.5, fine_tune_type="lora")[0] == "fsdp"


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"optimizer": "adafactor"}, "pipeline"),  # which updates an array as a whole
        ({"rank_weights": "auto"}, "fsdp"),
    ],
)
def test_options_leave_some_ways(options: dict[str, Any], name: str) -> None:
    assert chosen(7, **options)[0] == name


def test_gpus_divide_the_optimizer_first() -> None:
    assert chosen(40, 4, GPU)[0] == "auto"
    assert chosen(16, 4, GPU)[0] == "zero1"
    assert chosen(9, 4, GPU)[0] == "fsdp"


def test_what_fits_nowhere_is_refused_with_what_would() -> None:
    with pytest.raises(ModelError) as found:
        chosen(5)
    assert "with --strategy fsdp rank 0 would need" in found.value.message
    assert found.value.hint is not None
    number = int(found.value.hint.split()[0])
    assert "such ranks would hold it (--strategy fsdp)" in found.value.hint
    assert number > 4
    assert chosen(5, number, rank_weights="auto")[0] == "fsdp"
    with pytest.raises(ModelError):  # nor a pipeline, which does not divide a batch by speeds
        chosen(5, number - 1, rank_weights="auto")


def test_more_ranks_of_one_computer_are_no_advice() -> None:
    """They would share its memory: as many computers as are named hold the training."""
    asked = choosing(5, rank_weights="auto")
    here = replace(asked, mesh=replace(asked.mesh, local_size=4))
    with pytest.raises(ModelError) as found:
        strategy_by_memory(here, SingleProcess())
    assert found.value.hint is not None
    number, what = found.value.hint.split()[:2]
    assert what == "computers"
    assert chosen(5, int(number), rank_weights="auto")[0] == "fsdp"
    with pytest.raises(ModelError):
        chosen(5, int(number) - 1, rank_weights="auto")


def test_a_gpu_is_refused_by_its_weights_alone() -> None:
    """Its other memory is an estimate: a run that may not fit begins with the way that needs least,
    and says so.
    """
    for device in (GPU, METAL):
        name, told = chosen(3, 4, device)
        assert name == "fsdp"
        assert "memory may not suffice, rank 0 would need" in told
        with pytest.raises(ModelError):
            chosen(0.8, 4, device)


def test_nothing_is_taken_that_changes_the_result_or_the_architecture_cannot() -> None:
    # Packed gradients are no part of fully sharded ranks or of a pipeline, and are not left out.
    with pytest.raises(ModelError):
        chosen(12, compress="int8")
    with pytest.raises(ModelError):
        strategy_by_memory(replace(choosing(12), hooked=True), SingleProcess())
    assert chosen(14, 4, kind=gemma2)[0] == "fsdp"


@pytest.mark.parametrize(
    "options",
    [
        {"strategy": "data"},
        {"strategy": "fsdp"},
        {"tp": 2},
        {"cp": 2},
        {"sync_every": 4},
        {"sync_delay": 1},
    ],
)
def test_what_a_person_has_chosen_stays(options: dict[str, Any]) -> None:
    asked = choosing(12, **options)
    assert not is_open(asked.config, piped(asked.config, asked.mesh))


def test_gpus_read_at_once_what_fits(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(10 * GIGABYTE)
    asked = choosing(12)
    for accelerator, gigabytes, later in ((CPU, 64, True), (GPU, 64, False), (GPU, 10, True)):
        device = replace(accelerator, memory_bytes=gigabytes * GIGABYTE)
        assert reads_later(asked.config, tmp_path, device, asked.mesh) == later
    assert not reads_later(choosing(12, strategy="data").config, tmp_path, CPU, asked.mesh)


@pytest.mark.parametrize(("pieces", "remedy"), [(1, "--hosts"), (2, "add --strategy fsdp")])
def test_weights_larger_than_a_rank_are_refused(tmp_path: Path, pieces: int, remedy: str) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(10 * GIGABYTE)
    device = replace(CPU, memory_bytes=8 * GIGABYTE)
    with pytest.raises(ModelError) as refused:
        require_room_for_weights(tmp_path, device, Mesh(0, pieces, context=pieces))
    assert refused.value.code == "memory-too-small"
    assert remedy in (refused.value.hint or "")


def test_one_rank_has_no_choice() -> None:
    asked = choosing(12)
    assert is_open(asked.config, asked.mesh)
    assert not is_open(asked.config, Mesh())


def test_unlike_memory_has_unlike_parts() -> None:
    """Three quarters of every array on the rank with three times as much memory, and no more than
    it has on each.
    """
    rank = _Rank(choosing(12, 2))
    rooms = 24 * GIGABYTE, 8 * GIGABYTE
    told = [{"room": room, "present": rank.present, "needs": rank.needs(2)} for room in rooms]
    large, small = (each["needs"]["fsdp"] for each in rank.by_memory(told))
    equal = rank.needs(2)["fsdp"]
    assert small < equal < large
    assert large + small == pytest.approx(2 * equal, rel=0.01)
    assert equal > rooms[1] > small
    alike = rank.by_memory([{**each, "room": rooms[0]} for each in told])
    assert [each["needs"]["fsdp"] for each in alike] == [equal, equal]


@dataclass(frozen=True)
class Ranks:
    """So many ranks of a ring, of which nothing but their number is asked."""

    size: int = 4
    rank: int = 0
    backend: str = "ring"


@pytest.mark.parametrize(
    ("bytes_per_s", "name"),
    [(20e9, "fsdp"), (0.1e9, "pipeline")],
    ids=["a fast link", "a slow link"],
)
def test_link_and_speed_decide_where_both_fit(
    monkeypatch: pytest.MonkeyPatch, bytes_per_s: float, name: str
) -> None:
    """A step of 4,096 tokens takes four such ranks 0.8 s; 12 GB of weights and gradients are sent
    by each.
    """

    def sums(_communicator: Any, plan: Any) -> list[dict[str, float]]:
        # Each of four ranks sends one and a half times the bytes.
        return [{"num_bytes": size, "median_s": 1.5 * size / bytes_per_s} for size in plan.sizes]

    monkeypatch.setattr("allhands.run.choosing.time_products", lambda *_: [10e12] * 4)
    monkeypatch.setattr("allhands.run.choosing.time_all_sum", sums)
    rank, ranks = _Rank(choosing(12)), Ranks()
    stages = rank.stages([{"room": 12 * GIGABYTE, "present": 0}] * 4)
    assert stages is not None
    assert _quicker(rank, ranks, stages) == name  # type: ignore[arg-type]
    assert _quicker(rank, ranks, None) == "fsdp"  # type: ignore[arg-type]
