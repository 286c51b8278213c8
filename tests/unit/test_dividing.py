"""What a stage holds, worked out before weights are read, against what a model of which they were
read holds.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import mixtral
from substituted import prepare_quantized
from tiny import write_model

from allhands.config.schema import build_config
from allhands.distributed.backend import SingleProcess
from allhands.distributed.mesh import Mesh
from allhands.errors import ConfigError, ModelError
from allhands.model.adapters import make_trainable
from allhands.model.load import load_model
from allhands.parallel.costs import Memory, Work
from allhands.parallel.schedules import SCHEDULES, make_schedule
from allhands.plan import pipelines
from allhands.run import dividing
from allhands.run.dividing import STAGES, DividedModel, split_agreed, weights_of
from allhands.run.model_sizes import all_weights, forms_on_cpu
from allhands.run.stage_costs import Model, Weights, layers_of
from allhands.run.training_memory import blocks_of
from allhands.runtime.accelerator import Accelerator, detect

EXPERTS: dict[str, Any] = {
    **{"model_type": "mixtral", "vocab_size": 300, "hidden_size": 64, "intermediate_size": 128},
    **{"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2},
}
CPU = Accelerator("cpu", "a processor", 1 << 36, 2, True, None)


def held(module: Any) -> int:
    arrays: Any = tree_flatten(module.parameters())
    return sum(array.nbytes for _, array in arrays)


@pytest.mark.parametrize(("tied", "bits"), [(True, None), (False, None), (True, 4), (False, 4)])
def test_weights_are_as_large_as_they_will_be(tmp_path: Path, tied: bool, bits: int | None) -> None:
    path = write_model(tmp_path / "model", layers=3, hidden=128, tied=tied, bits=bits)
    lazy: Any = load_model(str(path), lazy=True)
    lazy.model.freeze()
    found = weights_of(DividedModel(lazy.model, lazy.config), "codes", CPU)
    model: Any = load_model(str(path)).model
    model.freeze()
    if detect().kind != "cpu":
        pytest.skip("held as on a CPU")
    prepare_quantized(model, detect(), compact=True)
    assert [each.held_bytes for each in found.blocks] == pytest.approx(
        [held(each) for each in model.layers], rel=0.1
    )
    assert found.embedding.held_bytes == pytest.approx(held(model.model.embed_tokens), rel=0.1)
    head = held(model.model.norm) + held(model.model.embed_tokens if tied else model.lm_head)
    assert found.head.held_bytes == pytest.approx(head, rel=0.1)
    assert found.head.numbers == pytest.approx(259 * 128, rel=0.01)


@pytest.mark.parametrize("bits", [None, 4])
def test_experts_are_held_all_and_computed_by_some(bits: int | None) -> None:
    config = {**EXPERTS, "num_local_experts": 8, "num_experts_per_tok": 2}
    model: Any = mixtral.Model(mixtral.ModelArgs.from_dict(config))
    if bits is not None:
        model.set_dtype(mx.bfloat16)
        nn.quantize(model, 32, bits)
    model.freeze()
    forms: list[Any] = ["codes", "packed"] if bits else ["codes"]
    found = [weights_of(DividedModel(model, config), form, CPU) for form in forms]
    one = found[-1].blocks[0]
    if bits is None:
        assert one.held_bytes == held(model.layers[0])
    dense = 2 * 64 * 64 + 2 * 64 * 32 + 8 * 64
    assert one.numbers == pytest.approx(dense + 2 * 3 * 64 * 128, rel=0.02)
    # As the plan has it, which sees the configuration alone.
    blocks = blocks_of(config)
    assert blocks is not None
    work = Work("lora", 64, 2, 4 * all_weights(blocks, tied=False), 0, "adamw")
    for each, form in zip(found, forms_on_cpu(blocks, bits, 32) if bits else (None,), strict=True):
        planned = pipelines.model_of(blocks, work, tied=False, form=form)
        for here, there in (
            (each.blocks[0], planned.blocks[0]),
            (each.embedding, planned.embedding),
        ):
            assert there.numbers == pytest.approx(here.numbers, rel=0.02)
            assert there.held_bytes == pytest.approx(here.held_bytes, rel=0.1)


def test_no_stage_has_gradients_before_the_first_trained_block() -> None:
    blocks = (*[Weights(10.0, 100)] * 2, *[Weights(10.0, 100, 8)] * 2)
    model = Model(blocks, Weights(50.0, 7), Weights(50.0, 7))

    def of(work: Work) -> Memory:
        kept = 30 * work.trained_layers
        return Memory(0, 2 * work.trained_bytes, kept, 0, 0, activations=kept + 5, logits=11)

    layers, once = layers_of(model, Work("lora", 4, 2, 0, 16, "adamw"), of)
    assert [part.cost for part in layers.blocks] == [10, 10, 20, 20]
    assert [part.kept_bytes for part in layers.blocks] == [0, 0, 30, 30]
    assert layers.first_trained == 2
    assert [part.num_bytes for part in layers.blocks] == [100, 100, 132, 132], (
        "two states, two gradients"
    )
    assert (layers.head.cost, layers.head.num_bytes, layers.embedding.cost, once) == (100, 18, 0, 5)
    plain, _ = layers_of(model, None, None)
    assert [part.cost for part in plain.blocks] == [10] * 4


def test_a_recorded_split_is_taken_where_it_has_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load_model(str(write_model(tmp_path / "model", layers=6, hidden=64)))
    config = build_config({"strategy": "pipeline", "num_layers": -1})
    make_trainable(loaded.model, config)
    divided = DividedModel(loaded.model, loaded.config)

    def agreed(recorded: dict[str, Any] | None = None, **options: Any) -> tuple[int, ...]:
        chosen = build_config({"strategy": "pipeline", **options})
        mesh = Mesh(0, 2, local_size=2, pipe=2)
        return split_agreed(chosen, divided, mesh, CPU, SingleProcess(), recorded)[0]

    assert agreed() == (3, 3)
    assert agreed({STAGES: [5, 1]}) == (5, 1)
    assert agreed({STAGES: [2, 2, 2]}) == (3, 3), "of other ranks"
    assert agreed({STAGES: [5, 1]}, pp_split="2,4") == (2, 4)
    assert agreed(pp_schedule="interleaved") == (2, 2, 1, 1)
    with pytest.raises(ConfigError):
        agreed(pp_split="2,3")
    monkeypatch.setattr(dividing.Device, "room", property(lambda self: 1000))
    with pytest.raises(ModelError, match="rank 1"):
        agreed({STAGES: [5, 1]})


# --- stages that were asked for -------------------------------------------------------------------


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> DividedModel:
    path = write_model(tmp_path_factory.mktemp("asked") / "model", layers=8, hidden=64, tied=False)
    loaded = load_model(str(path))
    make_trainable(loaded.model, build_config({"num_layers": -1}))
    return DividedModel(loaded.model, loaded.config, np.full(8, 64))


def notes_of(divided: DividedModel, rooms: Sequence[int], **options: Any) -> list[str]:
    """What is said of stages of two ranks that may have so many bytes, beside those of their
    processes.
    """
    config = build_config({"strategy": "pipeline", "batch_size": 8, "num_layers": -1, **options})
    mesh = Mesh(0, 2, local_size=2, pipe=2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dividing, "present_bytes", lambda _: 0)
        patch.setattr(
            dividing, "gather_json", lambda _, own: [{**own, "room": room} for room in rooms]
        )
        return split_agreed(config, divided, mesh, CPU, SingleProcess())[1]


def test_stages_that_were_asked_for_are_refused_by_their_weights_and_told_by_the_rest(
    adapted: DividedModel,
) -> None:
    weights = sum(held(block) for block in adapted.model.layers[6:]) + held(adapted.model.lm_head)
    assert notes_of(adapted, [10**9, 10**9], pp_split="6,2") == []
    (note,) = notes_of(adapted, [10**9, int(1.1 * weights)], pp_split="6,2")
    assert re.search(r"rank 1 with .* would need", note)
    assert "rank 0" not in note
    with pytest.raises(ModelError, match="rank 1 with") as refused:
        notes_of(adapted, [10**9, int(0.9 * weights)], pp_split="6,2")
    assert refused.value.where == "--pp-split 6,2"


def test_a_rank_holds_as_many_micro_batches_as_its_schedule_says(adapted: DividedModel) -> None:
    """Eight micro-batches; what the parts of equal stages need, found by trying."""

    def needed(rank: int, split: str, **options: Any) -> int:
        low, high = 0, 1 << 26
        while high - low > 64:
            room = (low + high) // 2
            rooms = [room if place == rank else 1 << 40 for place in range(2)]
            try:
                fits = not notes_of(adapted, rooms, pp_split=split, **options)
            except ModelError:
                fits = False
            low, high = (low, room) if fits else (room, high)
        return high

    once = [needed(rank, "4,4") for rank in range(2)]
    each = needed(0, "4,4", compile="on") - once[0]
    assert each > 4 * 64 * 4 * 64 * 10, (
        "what blocks keep of a micro-batch: ten widths and more for each token"
    )
    schedule_of_one = make_schedule("1f1b", 2, 8)
    for name in SCHEDULES:
        split = "2,2,2,2" if name == "interleaved" else "4,4"
        schedule = make_schedule(name, 2, 8, 2 if name == "interleaved" else 1)
        for rank, most in enumerate(schedule.most_alive):
            alive = most * 2 / schedule.num_stages
            found = needed(rank, split, compile="on", pp_schedule=name)
            more = (
                (most - schedule_of_one.most_alive[rank]) * 64 * 64 * 4
            )  # hidden states that have come
            assert found == pytest.approx(once[rank] + (alive - 1) * each + more, rel=0.01), (
                name,
                rank,
            )
