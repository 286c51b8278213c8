"""Rounds of local steps: against a loop of MLX's own optimizers, and against data parallelism where
it is the same.

The reference knows nothing of ours but the micro-batches: each rank's model is trained by
``mlx.optimizers`` on the mean loss of its own tokens, and the weights come together in numpy.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import allhands

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_map
from test_seams import micro_batch, network
from twins import ThreadCommunicator, run_ranks

from allhands.distributed.backend import SingleProcess
from allhands.distributed.codecs import CODECS
from allhands.io.trees import flatten, unflatten
from allhands.parallel.local import fragments_of
from allhands.parallel.rounds import Rounds
from allhands.train.optimizers import SGD, KernelAdam, KernelAdamW
from allhands.train.step import StepOptions, TrainStep, make_step

del allhands
Weights = dict[str, np.ndarray]
# Rows of each rank in a step: very unequal numbers of tokens, and none at all now and then.
ROWS = ((1, 4, 2), (3, 1, 0), (2, 0, 5), (1, 1, 1), (4, 2, 1))


def batches_of(step: int, rank: int) -> list[Any]:
    rows = ROWS[step % len(ROWS)][rank]
    return [micro_batch(10 * step + rank, rows=rows, width=6 + 3 * rank)] if rows else []


def made(
    communicator: Any, optimizer: Any, rounds: Rounds | None, *, cpu_native: bool
) -> TrainStep:
    # Weights travel in several pieces.
    how: dict[str, Any] = (
        {} if rounds is None else {"strategy": "local", "rounds": rounds, "bucket_bytes": 6000}
    )
    return make_step(
        network(),
        optimizer(),
        communicator,
        StepOptions(cpu_native=cpu_native, compiled=False, **how),
    )


def weights_of(step: TrainStep) -> Weights:
    return {
        name: np.array(array) for name, array in flatten(step.passes.model.trainable_parameters())
    }


def trained(
    size: int, steps: int, optimizer: Any, rounds: Rounds | None, *, cpu_native: bool
) -> list[tuple[list[Any], list[Weights], list[bool]]]:
    """Of each rank: results, weights after each step, and whether it was within a round then."""

    def one(communicator: ThreadCommunicator) -> Any:
        step = made(communicator, optimizer, rounds, cpu_native=cpu_native)
        results, weights, within = list[Any](), list[Weights](), list[bool]()
        for number in range(steps):
            results.append(step(batches_of(number, communicator.rank)))
            weights.append(weights_of(step))
            within.append(step.strategy.in_round)
        return results, weights, within

    found: list[Any] = run_ranks(size, one)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def mean_loss(model: Any, batches: Sequence[Any]) -> mx.array:
    """The mean over the trained tokens, of some batch."""
    total, count = mx.zeros(()), 0
    for batch in batches:
        logits = model(mx.array(batch.inputs)).reshape(-1, 96)[mx.array(batch.positions)]
        kept = np.flatnonzero(batch.targets >= 0)
        losses = nn.losses.cross_entropy(logits[mx.array(kept)], mx.array(batch.targets[kept]))
        total, count = total + losses.sum(), count + len(kept)
    return total / max(count, 1)


def reference(size: int, steps: int, optimizer: Any, rounds: Rounds) -> list[Weights]:
    """The common weights after each whole round."""
    models: list[Any] = [network() for _ in range(size)]
    optimizers = [optimizer() for _ in range(size)]
    common = {
        name: np.array(array, dtype=np.float64)
        for name, array in flatten(models[0].trainable_parameters())
    }
    momentum = {name: np.zeros_like(array) for name, array in common.items()}
    tokens, found = np.zeros(size), list[Weights]()
    for step in range(steps):
        for rank, (model, own) in enumerate(zip(models, optimizers, strict=True)):
            batches = batches_of(step, rank)
            if batches:
                _, grads = nn.value_and_grad(
                    model, lambda batches, model=model: mean_loss(model, batches)
                )(batches)
            else:
                grads = tree_map(mx.zeros_like, model.trainable_parameters())
            own.update(model, grads)
            mx.eval(model.parameters(), own.state)
            tokens[rank] += sum(int((batch.targets >= 0).sum()) for batch in batches)
        if (step + 1) % rounds.every:
            continue
        here = [dict(flatten(model.trainable_parameters())) for model in models]
        for name, before in common.items():
            changes = [np.array(each[name], dtype=np.float64) - before for each in here]
            change = np.average(changes, axis=0, weights=tokens)
            momentum[name] = rounds.momentum * momentum[name] + change
            common[name] = before + rounds.learning_rate * (
                change + rounds.momentum * momentum[name]
            )
        for model in models:
            model.update(
                unflatten(
                    [(name, mx.array(array.astype(np.float32))) for name, array in common.items()]
                )
            )
        tokens[:] = 0
        found.append(dict(common))
    return found


def assert_close(one: Weights, other: Weights, tolerance: float) -> None:
    for name in one:
        np.testing.assert_allclose(one[name], other[name], rtol=0, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("cpu_native", [True, False])
@pytest.mark.parametrize("size", [2, 3])
def test_rounds_of_one_step_of_sgd_are_data_parallel_training(size: int, cpu_native: bool) -> None:
    """Whatever the ranks' numbers of tokens are: changes are weighted as gradients are divided."""
    local = trained(size, 5, lambda: SGD(0.1, weight_decay=0.01), Rounds(1), cpu_native=cpu_native)
    data = trained(size, 5, lambda: SGD(0.1, weight_decay=0.01), None, cpu_native=cpu_native)
    assert_close(local[0][1][-1], data[0][1][-1], 2e-6)
    start = {name: np.array(array) for name, array in flatten(network().trainable_parameters())}
    assert max(np.abs(data[0][1][-1][name] - start[name]).max() for name in start) > 1e-2
    for mine, theirs in zip(local[0][0], data[0][0], strict=True):
        assert (mine.num_targets, mine.num_tokens) == (theirs.num_targets, theirs.num_tokens)
        assert mine.loss_sum == pytest.approx(theirs.loss_sum, rel=1e-5)


ROUNDS = [Rounds(3), Rounds(2, 0.7, 0.9), Rounds(2, 0.5, 0.0)]


@pytest.mark.parametrize("cpu_native", [True, False])
@pytest.mark.parametrize("rounds", ROUNDS, ids=["mean", "nesterov", "half"])
@pytest.mark.parametrize("size", [2, 3])
def test_rounds_are_those_of_a_loop_that_shares_no_code(
    size: int, rounds: Rounds, cpu_native: bool
) -> None:
    ours: Any = lambda: KernelAdam(1e-3, eps=1e-5, bias_correction=True)  # noqa: E731
    found = trained(size, 6, ours, rounds, cpu_native=cpu_native)
    expected = reference(size, 6, lambda: optim.Adam(1e-3, eps=1e-5, bias_correction=True), rounds)
    ends = [number for number in range(6) if (number + 1) % rounds.every == 0]
    for number, wanted in zip(ends, expected, strict=True):
        assert_close(found[0][1][number], wanted, 1e-5)
    for number in range(6):
        replicas = [
            {name: array.tobytes() for name, array in each[1][number].items()} for each in found
        ]
        whole = (number + 1) % rounds.every == 0
        assert [each == replicas[0] for each in replicas[1:]] == [whole] * (size - 1)
        assert all(each[2][number] != whole for each in found)
        # Told alike by all ranks, also where their weights differ.
        told = [
            (each[0][number].loss_sum, each[0][number].num_targets, each[0][number].grad_norm)
            for each in found
        ]
        assert len(set(told)) == 1


STREAMED = [
    Rounds(4, fragments=2),
    Rounds(4, 0.7, 0.9, fragments=2),
    Rounds(3, fragments=3, delay=1),
    Rounds(5, 0.7, 0.9, fragments=2, delay=2),
    Rounds(3, delay=3),
]


def streamed(size: int, steps: int, rounds: Rounds) -> list[list[Weights]]:
    """Each rank's weights after each step, by mlx's own Adam and numpy: parts that travel while
    others are made.
    """
    models: list[Any] = [network() for _ in range(size)]
    optimizers = [optim.Adam(1e-3, eps=1e-5, bias_correction=True) for _ in range(size)]
    fragments = fragments_of(dict(flatten(models[0].trainable_parameters())), rounds.fragments)
    common = {
        name: np.array(array, dtype=np.float64)
        for name, array in flatten(models[0].trainable_parameters())
    }
    momentum = {name: np.zeros_like(array) for name, array in common.items()}
    tokens = np.zeros((rounds.fragments, size))
    arriving: dict[int, list[tuple[str, list[np.ndarray], np.ndarray]]] = {}
    found = list[list[Weights]]()
    for step in range(1, steps + 1):
        for rank, (model, own) in enumerate(zip(models, optimizers, strict=True)):
            batches = batches_of(step - 1, rank)
            grads = tree_map(mx.zeros_like, model.trainable_parameters())
            if batches:
                _, grads = nn.value_and_grad(
                    model, lambda batches, model=model: mean_loss(model, batches)
                )(batches)
            own.update(model, grads)
            mx.eval(model.parameters(), own.state)
            tokens[:, rank] += sum(int((batch.targets >= 0).sum()) for batch in batches)
        now = [
            {name: np.array(a, dtype=np.float64) for name, a in flatten(m.trainable_parameters())}
            for m in models
        ]
        for number, names in enumerate(fragments):
            if (
                step % rounds.every
                != (number + 1) * rounds.every // rounds.fragments % rounds.every
            ):
                continue
            for name in names:
                sent = [each[name] for each in now]
                mean = np.average(
                    [each - common[name] for each in sent], axis=0, weights=tokens[number]
                )
                arriving.setdefault(step + rounds.delay, []).append((name, sent, mean))
            tokens[number] = 0
        for name, sent, mean in arriving.pop(step, []):
            momentum[name] = rounds.momentum * momentum[name] + mean
            common[name] = common[name] + rounds.learning_rate * (
                mean + rounds.momentum * momentum[name]
            )
            for rank, model in enumerate(models):
                array = common[name] + now[rank][name] - sent[rank]
                model.update(unflatten([(name, mx.array(array.astype(np.float32)))]))
        found.append(
            [{n: np.array(a) for n, a in flatten(model.trainable_parameters())} for model in models]
        )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("cpu_native", [True, False])
@pytest.mark.parametrize(
    "rounds", STREAMED, ids=["two", "two-nesterov", "three-delayed", "two-delayed", "delayed"]
)
@pytest.mark.parametrize("size", [2, 3])
def test_fragments_in_turn_are_those_of_a_loop_that_shares_no_code(
    size: int, rounds: Rounds, cpu_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("allhands.parallel.local._LEAST_BYTES", 500)
    steps = 2 * rounds.every + 2
    ours: Any = lambda: KernelAdam(1e-3, eps=1e-5, bias_correction=True)  # noqa: E731
    found = trained(size, steps, ours, rounds, cpu_native=cpu_native)
    for number, expected in enumerate(streamed(size, steps, rounds)):
        for rank in range(size):
            assert_close(found[rank][1][number], expected[rank], 1e-5)
            assert found[rank][2][number], "the next round has begun"


@pytest.mark.parametrize("codec", [None, "int8"])
def test_a_round_of_fragments_can_be_closed_at_any_time(
    codec: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, while and after one travels: then all ranks have the same weights, and nothing of a
    change is lost.
    """
    monkeypatch.setattr("allhands.parallel.local._LEAST_BYTES", 500)
    rounds = Rounds(4, fragments=2, delay=2)

    def one(communicator: ThreadCommunicator) -> Any:
        options = StepOptions(
            cpu_native=True,
            compiled=False,
            strategy="local",
            rounds=rounds,
            bucket_bytes=6000,
            codec=None if codec is None else CODECS[codec],
        )
        step = make_step(network(), SGD(0.1), communicator, options)
        closed, number = list[Weights](), 0
        for steps in (1, 2, 3, 4, 5, 7, 8, 9):
            for _ in range(steps):
                step(batches_of(number, communicator.rank))
                number += 1
            step.strategy.close_round()
            assert not step.strategy.in_round
            assert step.strategy.steps_left == 0
            closed.append(weights_of(step))
        return closed

    found: list[Any] = run_ranks(3, one)
    assert not [each for each in found if isinstance(each, BaseException)], found
    for each in zip(*found, strict=True):
        assert (
            len(
                {
                    tuple((name, array.tobytes()) for name, array in weights.items())
                    for weights in each
                }
            )
            == 1
        )
    one_step = trained(3, 1, lambda: SGD(0.1), None, cpu_native=True)[0][1][0]
    assert_close(found[0][0], one_step, 1e-6 if codec is None else 1e-3)


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("size", [2, 3])
def test_changes_of_weights_travel_packed(size: int, name: str) -> None:
    """Replicas stay equal, and what rounding leaves out of a round's change is small and is kept
    for the next.
    """
    rounds, codec = Rounds(2, 0.7, 0.9), CODECS[name]

    def one(communicator: ThreadCommunicator) -> Any:
        options = StepOptions(
            cpu_native=True, compiled=False, strategy="local", rounds=rounds, codec=codec
        )
        step = make_step(
            network(), KernelAdam(1e-3, eps=1e-5, bias_correction=True), communicator, options
        )
        for number in range(6):
            step(batches_of(number, communicator.rank))
        left = [each for each in step.strategy.left if each is not None]
        return weights_of(step), left

    expected = reference(size, 6, lambda: optim.Adam(1e-3, eps=1e-5, bias_correction=True), rounds)
    start = {each: np.array(array) for each, array in flatten(network().trainable_parameters())}
    found: list[Any] = run_ranks(size, one)
    assert not [each for each in found if isinstance(each, BaseException)]
    assert (
        len(
            {
                tuple((each, array.tobytes()) for each, array in weights.items())
                for weights, _ in found
            }
        )
        == 1
    )
    weights, left = found[0]
    off = sum(np.square(weights[each] - expected[-1][each]).sum() for each in weights) ** 0.5
    moved = sum(np.square(expected[-1][each] - start[each]).sum() for each in weights) ** 0.5
    assert 1e-6 < off / moved < {"bf16": 0.01, "int8": 0.02, "int4": 0.2}[name]
    assert bool(left) == codec.grouped
    assert all(mx.abs(each).max().item() > 0 for each in left)


def test_an_outer_step_of_one_rank_is_one_too() -> None:
    rounds = Rounds(2, 0.7, 0.9)
    step = made(
        SingleProcess(),
        lambda: KernelAdam(1e-3, eps=1e-5, bias_correction=True),
        rounds,
        cpu_native=True,
    )
    for number in range(4):
        step(batches_of(number, 0))
    assert_close(
        weights_of(step),
        reference(1, 4, lambda: optim.Adam(1e-3, eps=1e-5, bias_correction=True), rounds)[-1],
        1e-5,
    )


def test_a_round_can_be_closed_early_and_the_next_is_whole() -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        step = made(communicator, lambda: SGD(0.1), Rounds(4), cpu_native=True)
        step(batches_of(0, communicator.rank))
        assert step.strategy.in_round
        step.strategy.close_round()
        step.strategy.close_round()  # nothing is left to do
        closed, within = weights_of(step), list[bool]()
        for number in range(1, 5):
            step(batches_of(number, communicator.rank))
            within.append(step.strategy.in_round)
        return closed, within

    (first, within), (second, _) = run_ranks(2, one)
    assert {name: array.tobytes() for name, array in first.items()} == {
        n: a.tobytes() for n, a in second.items()
    }
    assert_close(first, trained(2, 1, lambda: SGD(0.1), None, cpu_native=True)[0][1][0], 1e-6)
    assert within == [True, True, True, False]


@pytest.mark.parametrize("cpu_native", [True, False])
def test_no_rank_updates_where_the_gradient_of_one_is_not_finite(cpu_native: bool) -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        model = network()
        options = StepOptions(
            cpu_native=cpu_native,
            compiled=False,
            strategy="local",
            rounds=Rounds(2),
            non_finite="skip",
        )
        step = make_step(model, KernelAdamW(1e-2), communicator, options)
        before = weights_of(step)
        if communicator.rank == 1:
            real = step.passes.accumulate

            def spoiled(*args: Any, **more: Any) -> Any:
                mine = real(*args, **more)
                mine.grads[0] = (mine.grads[0][0], mine.grads[0][1] * float("inf"))
                return mine

            step.passes.accumulate = spoiled  # type: ignore[method-assign]
        result = step(batches_of(0, communicator.rank))
        return result.skipped, before, weights_of(step), step.strategy.in_round

    for found in run_ranks(2, one):
        assert not isinstance(found, BaseException), found
        skipped, before, after, within = found
        assert "gradient" in skipped
        assert_close(before, after, 0.0)
        assert not within
