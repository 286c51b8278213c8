"""A loss or gradient that is not finite: nothing changes, on any rank, and the examples that did it
are named.

The poison is a row of NaN in the frozen embedding of one token: an example is poisoned if it holds
that token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_flatten
from plain_loop import adapted_model
from tiny import write_model

from allhands.data.loader import MicroBatch, collate, pad_targets
from allhands.data.tokens import TokenSet
from allhands.distributed.backend import Communicator, SingleProcess
from allhands.errors import NumericsError
from allhands.model.dropout import install_dropout
from allhands.train.poison import NAMED, Blame, find_culprits
from allhands.train.result import StepResult
from allhands.train.step import StepOptions, make_step
from allhands.train.updater import Rules

POISON = 200
FORMS = {
    "eager": {"cpu_native": True},
    "lazy": {"cpu_native": False, "compiled": False},
    "compiled": {"cpu_native": False, "compiled": True},
}
# MLX's random state is one for all threads.
SEEDING = threading.Lock()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a head of its own: a tied one would have the NaN in the logits of everybody."""
    return write_model(tmp_path_factory.mktemp("poison") / "model", layers=1, tied=False)


def tokens(poisoned: set[int], count: int = 12) -> TokenSet:
    """Examples of 4 to 15 tokens."""
    random = np.random.default_rng(0)
    examples = [random.integers(1, 150, 4 + i % 12) for i in range(count)]
    for i in poisoned:
        examples[i][1] = POISON
    return TokenSet.of_examples([(ids, np.arange(len(ids)) > 0) for ids in examples])


def batch(windows: TokenSet, *examples: int) -> MicroBatch:
    chosen = np.array(examples)
    return collate(windows, chosen, int(windows.work[chosen].max()))


class Trainer:
    """A step and what it trains."""

    def __init__(
        self,
        path: Path,
        communicator: Communicator | None = None,
        dropout: float = 0.0,
        **options: Any,
    ):
        with SEEDING:
            self.model: Any = adapted_model(path, scale=2.0, dropout=dropout)
            self.model.model.embed_tokens.weight[POISON] = float("nan")
            mx.eval(self.model.parameters())
        self.model.train()
        self.optimizer = optim.Adam(1e-2)
        self.beats: list[str] = []
        options.setdefault("cpu_native", False)
        options.setdefault("compiled", False)
        dropout_keys, heartbeat = install_dropout(self.model, 0), self.beats.append
        how = StepOptions(dropout=dropout_keys, heartbeat=heartbeat, **options)
        self.step = make_step(self.model, self.optimizer, communicator or SingleProcess(), how)

    def state(self) -> dict[str, np.ndarray[Any, Any]]:
        trees = {"model": self.model.parameters(), "optimizer": self.optimizer.state}
        return {name: np.array(value) for name, value in tree_flatten(trees)}


def assert_bitwise(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.tobytes() == other[name].tobytes(), name


# --- one process ----------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("form", FORMS)
def test_a_skipped_update_leaves_no_trace(path: Path, form: str, dropout: float) -> None:
    windows = tokens({5})
    good, bad = (
        [batch(windows, 0, 1), batch(windows, 2)],
        [batch(windows, 3, 4), batch(windows, 6, 5, 7)],
    )
    if form == "compiled":
        good, bad = ([pad_targets(b) for b in batches] for batches in (good, bad))
    one, other = (
        Trainer(path, non_finite="skip", dropout=dropout, **FORMS[form]) for _ in range(2)
    )
    first = one.step(good)
    assert (first.skipped, first.culprits) == ("", ())
    before = one.state()
    assert before["optimizer.step"] == 1
    skipped = one.step(bad, stop=lambda: True)
    assert (skipped.skipped, skipped.culprits) == ("the loss is nan", (5,))
    assert (skipped.loss_sum, skipped.num_targets, skipped.stop_votes) == (0.0, 0, 1)
    assert skipped.num_tokens == sum(b.num_tokens for b in bad)
    assert_bitwise(one.state(), before)
    # As if it had never been.
    other.step(good)
    results = [trainer.step(good) for trainer in (one, other)]
    assert results[0].loss_sum == results[1].loss_sum > 0
    assert_bitwise(one.state(), other.state())
    assert one.state()["optimizer.step"] == 2


def test_the_very_first_update_may_be_skipped(path: Path) -> None:
    windows = tokens({0})
    trainer, clean = Trainer(path, non_finite="skip"), Trainer(path, non_finite="skip")
    assert trainer.step([batch(windows, 0, 1)]).culprits == (0,)
    for one in (trainer, clean):
        one.step([batch(windows, 1, 2)])
    assert_bitwise(trainer.state(), clean.state())


@pytest.mark.parametrize(("packed", "name"), [(False, "training example"), (True, "packed row")])
def test_stopping_names_the_example_and_changes_nothing(
    path: Path, packed: bool, name: str
) -> None:
    windows = tokens({5, 7})
    trainer = Trainer(path, packed=packed)
    trainer.step([batch(windows, 0)])
    before = trainer.state()
    with pytest.raises(NumericsError, match=rf"the loss is nan \({name} 6\)\n.*--non-finite skip"):
        trainer.step([batch(windows, 4, 5)])
    with pytest.raises(NumericsError, match=rf"the loss is nan \({name}s 6, 8\)"):
        trainer.step([batch(windows, 7, 1), batch(windows, 4, 5)])
    assert_bitwise(trainer.state(), before)


def test_everybody_is_nobody(path: Path) -> None:
    windows = tokens({1, 2, 3})
    trainer = Trainer(path, non_finite="skip")
    result = trainer.step([batch(windows, 1, 2), batch(windows, 3)])
    assert result.skipped == "the loss is nan; each single example of the next batch gives the same"
    assert result.culprits == ()
    # But one that is alone in its batch is named.
    assert trainer.step([batch(windows, 2)]).culprits == (2,)


def test_bad_weights_are_told_without_looking_at_examples(path: Path) -> None:
    trainer, windows = Trainer(path), tokens(set())
    layer = trainer.model.layers[0].self_attn.q_proj
    layer.lora_b = layer.lora_b.at[0, 0].add(float("inf"))
    with pytest.raises(
        NumericsError, match="the loss is nan; the weights are not finite"
    ) as caught:
        trainer.step([batch(windows, 0, 1, 2)])
    assert "example" not in str(caught.value.hint)  # none is named
    assert trainer.beats == ["compute", "reduce"]


class Corrupting(SingleProcess):
    """One process that is told of two, whose sum is spoilt on the way."""

    size = 2
    backend = "ring"

    def __init__(self) -> None:
        self.spoilt = 0

    def all_sum(self, array: mx.array) -> mx.array:
        self.spoilt += 1
        return array.at[0].add(float("inf"))

    def all_gather(self, array: mx.array) -> mx.array:
        return mx.concatenate([array, array])


def test_a_sum_that_no_example_spoils_is_nobodys_fault(path: Path) -> None:
    communicator = Corrupting()
    trainer, windows = Trainer(path, communicator, non_finite="skip"), tokens(set())
    result = trainer.step([batch(windows, 0, 1)])
    assert communicator.spoilt == 1
    assert result.skipped == "the gradient is inf; no single example is to blame"
    assert result.culprits == ()


def test_callbacks_see_the_gradient_that_was_refused(path: Path) -> None:
    seen: list[Any] = []
    windows = tokens({0})
    trainer = Trainer(path, non_finite="skip", rules=Rules(after_backward=seen.append))
    trainer.step([batch(windows, 0, 1)])
    assert len(seen) == 1
    assert any(not mx.isfinite(value).all().item() for _, value in tree_flatten(seen[0]))


# --- signs of life --------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_every_phase_is_told(path: Path, form: str) -> None:
    windows = tokens({5})
    trainer = Trainer(path, non_finite="skip", **FORMS[form])
    good = [batch(windows, 0, 1), batch(windows, 2)]
    new = "first" if form == "compiled" else "compute"
    # In a graph all that follows is handed out with the last micro-batch, and waited for in its
    # phase.
    sums, update = (["reduce"], ["update"]) if form == "eager" else ([], [])
    trainer.step(good)
    assert trainer.beats == [new, new, *sums, *update]
    trainer.beats.clear()
    trainer.step(good)
    assert trainer.beats == ["compute", "compute", *sums, *update]
    trainer.beats.clear()
    trainer.step([batch(windows, 0, 1), batch(windows, 5, 6)])
    # Four examples are looked at one by one.
    assert trainer.beats == ["compute", new, *sums, *["compute"] * 4, "reduce"]


# --- several ranks --------------------------------------------------------------------------------


class Meeting:
    """Where the threads of a group exchange their arrays."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=30)
        self._slots: list[Any] = [None] * size

    def exchange(self, rank: int, array: mx.array) -> list[np.ndarray[Any, Any]]:
        # As numpy arrays, because those of MLX belong to the thread that made them.
        self._slots[rank] = np.array(array)
        self._barrier.wait()
        everyone = list(self._slots)
        self._barrier.wait()
        return everyone


class ThreadRank:
    """One rank of a :class:`Meeting`."""

    backend = "ring"

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self.size = meeting.size
        self._meeting = meeting

    def all_sum(self, array: mx.array) -> mx.array:
        return mx.array(np.sum(self._meeting.exchange(self.rank, array), axis=0))

    def all_gather(self, array: mx.array) -> mx.array:
        return mx.array(np.concatenate(self._meeting.exchange(self.rank, array)))


def on_ranks(size: int, task: Callable[[Communicator], Any]) -> list[Any]:
    """``task`` on every rank at once; the results."""
    meeting = Meeting(size)

    def run(rank: int) -> Any:
        with mx.stream(mx.new_stream(mx.cpu)):
            return task(ThreadRank(meeting, rank))

    with ThreadPoolExecutor(size) as threads:
        return [future.result() for future in [threads.submit(run, rank) for rank in range(size)]]


def test_all_ranks_skip_together_and_know_why(path: Path) -> None:
    """Rank 1 has the poison, rank 2 no example at all."""
    windows = tokens({4, 7})
    good = [[batch(windows, 0)], [batch(windows, 1, 2)], []]
    bad = [[batch(windows, 3)], [batch(windows, 5, 7), batch(windows, 4)], []]

    def task(communicator: Communicator) -> tuple[list[StepResult], list[dict[str, Any]]]:
        trainer = Trainer(path, communicator, non_finite="skip")
        results, states = [], []
        for shares in (good, bad, good):
            results.append(trainer.step(shares[communicator.rank]))
            states.append(trainer.state())
        return results, states

    everyone = on_ranks(3, task)
    for results, states in everyone:
        assert [(r.skipped, r.culprits) for r in results] == [
            ("", ()),
            ("the loss is nan", (4, 7)),
            ("", ()),
        ]
        assert [r.num_targets for r in results] == [r.num_targets for r in everyone[0][0]]
        assert_bitwise(states[1], states[0])
        assert states[2]["optimizer.step"] == 2
        for state, expected in zip(states, everyone[0][1], strict=True):
            assert_bitwise(state, expected)
    assert np.abs(everyone[0][1][2]["model.model.layers.0.mlp.up_proj.lora_b"]).max() > 0


def test_all_ranks_stop_with_the_same_message(path: Path) -> None:
    windows = tokens({4})

    def task(communicator: Communicator) -> str:
        trainer = Trainer(path, communicator)
        with pytest.raises(NumericsError) as caught:
            trainer.step([batch(windows, 4 + communicator.rank)])
        return caught.value.message

    assert on_ranks(2, task) == ["the loss is nan (training example 5)"] * 2


def test_one_rank_with_bad_weights_is_named(path: Path) -> None:
    windows = tokens(set())

    def task(communicator: Communicator) -> StepResult:
        trainer = Trainer(path, communicator, non_finite="skip")
        if communicator.rank == 1:
            layer = trainer.model.layers[0].self_attn.q_proj
            layer.lora_a = layer.lora_a.at[0, 0].add(float("nan"))
        return trainer.step([batch(windows, communicator.rank)])

    for result in on_ranks(2, task):
        assert (
            result.skipped
            == "the loss is nan; the weights of rank 1 are not finite, those of other ranks are"
        )
        assert result.culprits == ()


# --- many culprits, and losses that only overflow together ----------------------------------------


def search(values: dict[int, float], count: int) -> Blame:
    """Of ``count`` examples in one micro-batch, those of ``values`` have such losses; one process."""

    def gradient(example: MicroBatch) -> tuple[mx.array, Any]:
        assert len(example.examples) == 1
        return mx.array(values.get(int(example.examples[0]), 1.0)), {"weight": mx.zeros((2,))}

    weights = {"weight": mx.ones((2,))}
    batches = [batch(tokens(set(), count), *range(count))]
    return find_culprits(gradient, weights, batches, SingleProcess(), lambda _: None)


def test_more_culprits_than_can_be_named_are_counted() -> None:
    blame = search({i: float("inf") for i in range(1, 12)}, 14)
    assert blame.examples == tuple(range(1, 1 + NAMED))
    assert blame.named("row") == " (rows 2, 3, 4, 5, 6, 7, 8, 9 and 3 more)"
    assert blame.otherwise == ""
    assert search({3: -float("inf")}, 5).named("row") == " (row 4)"


def test_large_losses_that_are_finite_alone_are_nobodys_fault() -> None:
    blame = search({0: 3e38, 1: 3e38}, 4)
    assert (blame.examples, blame.otherwise, blame.named("row")) == (
        (),
        "no single example is to blame",
        "",
    )


def test_a_gradient_is_at_fault_even_if_its_loss_is_not() -> None:
    def gradient(example: MicroBatch) -> tuple[mx.array, Any]:
        value = float("nan") if example.examples[0] == 2 else 0.0
        return mx.array(1.0), {"a": mx.zeros((3,)), "b": mx.array([0.0, value])}

    found = find_culprits(
        gradient, {}, [batch(tokens(set()), 0, 2, 4)], SingleProcess(), lambda _: None
    )
    assert found.examples == (2,)
