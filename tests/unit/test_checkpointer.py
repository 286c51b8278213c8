"""``allhands.Checkpointer``: everything of a loop comes back to the same bits, on any number of
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from test_supervised import make_session
from twins import ThreadCommunicator, run_ranks

from allhands.checkpoints import checkpoints_in
from allhands.errors import CheckpointError, ConfigError
from allhands.loops import supervised
from allhands.loops.checkpointer import Checkpointer
from allhands.loops.loader import DistributedLoader
from allhands.loops.world import World

ALONE = World(0, 1, 0, 1, "none", "single", None)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def process(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Call it to be another process from then on."""
    monkeypatch.delenv(supervised.DIRECTORY_VARIABLE, raising=False)

    def begin() -> None:
        made = make_session()
        monkeypatch.setattr(supervised, "this_session", lambda: made)

    begin()
    return begin


class Loop:
    """A training with random inputs, whose state is the model, Adam's moments, the place in the
    data and the key.
    """

    def __init__(self, place: Path, **options: Any) -> None:
        mx.random.seed(1)
        self.model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        self.optimizer = optim.Adam(learning_rate=optim.cosine_decay(0.1, 50))
        self.loader = DistributedLoader(range(10), 4, seed=2, world=ALONE)
        self.keeper = Checkpointer(
            place,
            model=self.model,
            optimizer=self.optimizer,
            loader=self.loader,
            keep_last=2,
            **options,
        )
        self.seen: list[list[int]] = []

    def run(self, until: int, every: int = 1) -> Loop:
        first = self.keeper.restore()
        function = nn.value_and_grad(self.model, lambda model, x: mx.mean(mx.square(model(x) - 1)))
        batches = self.loader.endless()
        for step in range(first + 1, until + 1):
            self.seen.append(next(batches))
            _, grads = function(self.model, mx.random.normal((4, 3)))
            self.optimizer.update(self.model, grads)
            self.keeper.save(step, {"seen": step}, every=every)
        return self

    def bits(self) -> list[bytes]:
        return [
            np.array(one).tobytes()
            for one in (self.model.layers[0].weight, self.model.layers[2].bias)
        ]


def test_it_goes_on_to_the_same_bits(tmp_path: Path, process: Callable[[], None]) -> None:
    whole = Loop(tmp_path / "whole").run(9, every=20)
    assert not checkpoints_in(tmp_path / "whole")
    process()
    begun = Loop(tmp_path / "run").run(5)
    assert [path.name for path in checkpoints_in(tmp_path / "run")] == [
        "step-0000005",
        "step-0000004",
    ]
    process()
    resumed = Loop(tmp_path / "run").run(9)
    assert resumed.keeper.values == {"seen": 5}
    assert begun.seen + resumed.seen == whole.seen
    assert resumed.bits() == whole.bits()
    assert resumed.optimizer.step.item() == 9


def test_without_a_checkpoint_nothing_changes(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    before = loop.bits()
    assert loop.keeper.restore() == 0
    assert loop.bits() == before
    assert list(tmp_path.iterdir()) == []


def test_frozen_parameters_may_be_left_out(tmp_path: Path, process: Callable[[], None]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model.layers[0].freeze()
    keeper = Checkpointer(tmp_path, model=model, frozen=False)
    keeper.save(1)
    trained, base = mx.array(model.layers[1].weight), mx.array(model.layers[0].weight)
    process()
    model.layers[1].weight = mx.zeros((1, 4))
    assert Checkpointer(tmp_path, model=model, frozen=False).restore() == 1
    assert mx.array_equal(model.layers[1].weight, trained)
    assert mx.array_equal(model.layers[0].weight, base)
    with pytest.raises(CheckpointError, match=r"layers\.0\.\w+ is absent there and 4"):
        Checkpointer(tmp_path, model=model).restore()


def test_all_ranks_get_what_rank_0_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(communicator: ThreadCommunicator) -> list[float]:
        # The session is of a thread here; ranks that share no files: only rank 0's computer has the
        # directory.
        session = make_session(rank=communicator.rank, size=2, local_size=1)
        session.group = communicator
        place = tmp_path / f"computer-{communicator.rank}"
        session.take_over()
        saved = session.load(place, together=True)
        assert saved is not None
        return saved.arrays["model"]["weight"].tolist()

    model = nn.Linear(2, 1)
    Checkpointer(tmp_path / "computer-0", model=model).save(3)
    results = run_ranks(2, work)
    assert results == [model.weight.tolist()] * 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"model": nn.Linear(2, 2)}, "bias is 1 there and 2 in the model .and 1 more"),
        ({}, "it holds model, random, but random are"),
        (
            {"model": nn.Linear(2, 1), "loader": DistributedLoader(range(4), 2, world=ALONE)},
            "but loader, model, random",
        ),
    ],
)
def test_what_does_not_fit(tmp_path: Path, arguments: dict[str, Any], words: str) -> None:
    Checkpointer(tmp_path, model=nn.Linear(2, 1)).save(3)
    with pytest.raises(CheckpointError, match=words):
        Checkpointer(tmp_path, **arguments).restore()


def updated(optimizer: optim.Optimizer, model: nn.Linear) -> optim.Optimizer:
    optimizer.update(model, {"weight": mx.ones((1, 2)), "bias": mx.ones((1,))})
    return optimizer


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (optim.SGD(0.1), optim.Adam(0.1), "its optimizer is SGD, the one here is Adam"),
        (optim.Adam(0.1), optim.SGD(0.1), "its optimizer is Adam, the one here is SGD"),
        (optim.Adam(0.1), optim.AdamW(0.1), "its optimizer is Adam, the one here is AdamW"),
        (
            optim.MultiOptimizer(
                [optim.SGD(0.1), optim.Adam(0.1)], [lambda name, _: name == "bias"]
            ),
            optim.MultiOptimizer(
                [optim.SGD(0.1), optim.AdamW(0.1)], [lambda name, _: name == "bias"]
            ),
            r"is SGD \+ Adam, the one here is SGD \+ AdamW",
        ),
    ],
)
def test_another_optimizer_changes_nothing(
    tmp_path: Path, before: optim.Optimizer, after: optim.Optimizer, words: str
) -> None:
    model = nn.Linear(2, 1)
    Checkpointer(tmp_path, model=model, optimizer=updated(before, model)).save(3)
    model.weight = mx.zeros((1, 2))
    with pytest.raises(CheckpointError, match=words):
        Checkpointer(tmp_path, model=model, optimizer=after).restore()
    assert model.weight.tolist() == [[0, 0]]
    updated(after, model)


def test_a_state_of_other_shapes(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    Checkpointer(tmp_path, optimizer=updated(optim.Adam(0.1), model)).save(3)
    other = optim.Adam(0.1)
    other.init({"weight": mx.zeros((1, 3)), "bias": mx.zeros((1,))})
    with pytest.raises(
        CheckpointError, match=r"weight\.m is 1x2 there and 1x3 in the optimizer .and 1 more"
    ):
        Checkpointer(tmp_path, optimizer=other).restore()
    assert other.state["weight"]["m"].shape == (1, 3)


def test_a_plain_learning_rate_is_the_one_given_now(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    Checkpointer(tmp_path / "one", optimizer=updated(optim.Adam(0.1), model)).save(3)
    now = optim.Adam(0.5)
    assert Checkpointer(tmp_path / "one", optimizer=now).restore() == 3
    assert (now.learning_rate.item(), now.step.item()) == (0.5, 1)
    assert "m" in now.state["weight"]

    def two(rate: float) -> optim.MultiOptimizer:
        curve = optim.linear_schedule(1.0, 0.0, 4)
        return optim.MultiOptimizer(
            [optim.SGD(curve), optim.Adam(rate)], [lambda name, _: name == "bias"]
        )

    Checkpointer(tmp_path / "two", optimizer=updated(updated(two(0.1), model), model)).save(3)
    both = two(0.5)
    Checkpointer(tmp_path / "two", optimizer=both).restore()
    # The schedule's value at step 1 is what the second update was made with.
    assert [part.learning_rate.item() for part in both.optimizers] == [0.75, 0.5]


def test_a_checkpoint_that_does_not_name_its_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = updated(optim.Adam(0.1), model)
    arrays = {"optimizer": optimizer.state, "random": mx.random.state[0]}
    supervised.save_checkpoint(4, arrays, {"values": {}, "others": {}}, directory=tmp_path)
    now = optim.Adam(0.1)
    assert Checkpointer(tmp_path, optimizer=now).restore() == 4
    assert mx.array_equal(now.state["weight"]["v"], optimizer.state["weight"]["v"])
    several = optim.MultiOptimizer([optim.Adam(0.1)])
    with pytest.raises(CheckpointError) as caught:
        Checkpointer(tmp_path, optimizer=several).restore()
    assert caught.value.code == "checkpoint-mismatch"


def test_a_checkpoint_of_save_checkpoint_alone(tmp_path: Path) -> None:
    supervised.save_checkpoint(2, {"w": mx.ones((1,))}, directory=tmp_path)
    with pytest.raises(CheckpointError, match="does not fit: it holds w"):
        Checkpointer(tmp_path, model=nn.Linear(2, 1)).restore()


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"schedule .* has no state_dict"):
        Checkpointer(tmp_path, schedule=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="keep_last=0"):
        Checkpointer(tmp_path, keep_last=0)
    with pytest.raises(ConfigError, match=r"model \(3\) has no parameters"):
        Checkpointer(tmp_path, model=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"optimizer \(.*Adam.*\) has no state"):
        Checkpointer(tmp_path, optimizer=optim.Adam)  # type: ignore[arg-type]
    keeper = Checkpointer(tmp_path)
    for wrong in ("a", -1, 1.5):
        with pytest.raises(ConfigError) as caught:
            keeper.save(wrong, every=2)  # type: ignore[arg-type]
        assert caught.value.code == "value-out-of-range"
    with pytest.raises(ConfigError, match="every=0"):
        keeper.save(1, every=0)
    with pytest.raises(ConfigError) as caught:
        keeper.save(1, {"x": float("nan")})
    assert caught.value.code == "value-not-json"
    with pytest.raises(ConfigError) as caught:
        Checkpointer().save(1)
    assert caught.value.code == "checkpoint-directory-missing"


def test_an_object_that_is_none_is_left_out(tmp_path: Path) -> None:
    keeper = Checkpointer(tmp_path, loader=None)
    assert keeper.save(1)
    assert Checkpointer(tmp_path).restore() == 1


def test_the_name_of_the_random_state_is_taken(tmp_path: Path) -> None:
    loader = DistributedLoader(range(10), 4, world=ALONE)
    with pytest.raises(ConfigError) as caught:
        Checkpointer(tmp_path, random=loader)
    assert "state_dict" not in caught.value.message
