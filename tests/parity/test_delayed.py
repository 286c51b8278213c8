"""Delayed gradients: against a loop of MLX's own optimizer that is given each step's gradients one
step late.

The reference knows nothing of ours but the micro-batches: one model, the mean loss of all ranks'
tokens.
"""

from __future__ import annotations

from functools import partial, reduce
from typing import Any

import allhands

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest
from mlx.utils import tree_map
from test_local_steps import Weights, assert_close, batches_of, mean_loss, weights_of
from test_seams import network
from twins import ThreadCommunicator, run_ranks

from allhands.distributed.backend import SingleProcess
from allhands.distributed.codecs import CODECS
from allhands.io.trees import flatten, unflatten
from allhands.train.optimizers import SGD, KernelAdam
from allhands.train.step import StepOptions, TrainStep, make_step
from allhands.train.updater import Rules

del allhands
STEPS = 6


def adam() -> Any:
    return KernelAdam(1e-3, eps=1e-5, bias_correction=True)


def made(
    communicator: Any, optimizer: Any = adam, *, cpu_native: bool = True, **how: Any
) -> TrainStep:
    options = StepOptions(
        cpu_native=cpu_native, compiled=False, strategy="delayed", bucket_bytes=6000, **how
    )
    return make_step(network(), optimizer(), communicator, options)


def on_ranks(size: int, work: Any) -> list[Any]:
    found: list[Any] = [work(SingleProcess())] if size == 1 else run_ranks(size, work)
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


def norm_of(gradient: Any) -> float:
    return float(
        np.sqrt(
            sum(np.square(np.array(each, dtype=np.float64)).sum() for _, each in flatten(gradient))
        )
    )


def expected(model: Any, own: Any, mean: Any, last: float | None, max_norm: float | None) -> Any:
    """The weights after a step of Adam by a rank's own mean gradient, as if its norm was that of
    the last sum.
    """
    (b1, b2), step = own.betas, int(own.state.get("step", 0)) + 1
    norm = norm_of(mean)
    last = norm if last is None else last
    clipped = 1.0 if max_norm is None else min(max_norm / (last + 1e-6), 1.0)
    found, state, none = dict(_flat(model)), dict(flatten(own.state)), mx.zeros(())
    for name, gradient in flatten(mean):
        gradient = clipped * gradient
        first = b1 * state.get(f"{name}.m", none) + (1 - b1) * gradient
        second = b2 * state.get(f"{name}.v", none) + (1 - b2) * min(
            last / norm, 1.0
        ) ** 2 * mx.square(gradient)
        first, second = first / (1 - b1**step), second / (1 - b2**step)
        found[name] = found[name] - own.learning_rate * first / (mx.sqrt(second) + own.eps)
    return unflatten(list(found.items()))


def reference(size: int, steps: int, max_norm: float | None) -> list[Weights]:
    """The weights after each step: a rank's passes are with those that it expects."""
    model, own = network(), optim.Adam(1e-3, eps=1e-5, bias_correction=True)
    late: Any = None
    norm: float | None = None
    of_rank: list[Any] = [None] * size
    found = list[Weights]()
    for step in range(steps):
        batches = [batches_of(step, rank) for rank in range(size)]
        tokens = [sum(int((batch.targets >= 0).sum()) for batch in each) for each in batches]
        means = list[Any]()
        for rank in range(size):
            there = network()
            there.update(model.trainable_parameters())
            if of_rank[rank] is not None:
                there.update(expected(model, own, of_rank[rank], norm, max_norm))
            _, mean = nn.value_and_grad(there, partial(mean_loss, there))(batches[rank])
            mx.eval(mean)
            means.append(mean)
        of_rank = [
            mean if own_tokens else None for mean, own_tokens in zip(means, tokens, strict=True)
        ]
        if late is not None:
            norm = norm_of(late)
            clipped = 1.0 if max_norm is None else min(max_norm / (norm + 1e-6), 1.0)
            own.update(model, tree_map(partial(mx.multiply, clipped), late))
            mx.eval(model.parameters(), own.state)
        whole = sum(tokens)
        parts = [
            tree_map(partial(mx.multiply, n / whole), mean)
            for n, mean in zip(tokens, means, strict=True)
        ]
        late = reduce(partial(tree_map, mx.add), parts)
        found.append({name: np.array(a) for name, a in _flat(model)})
    return found


def _flat(model: Any) -> Any:
    return flatten(model.trainable_parameters())


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("cpu_native", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_steps_are_those_of_a_loop_that_shares_no_code(
    size: int, cpu_native: bool, max_norm: float | None
) -> None:
    def one(communicator: Any) -> Any:
        step = made(communicator, cpu_native=cpu_native, rules=Rules(max_norm))
        results, weights = list[Any](), list[Weights]()
        for number in range(STEPS):
            results.append(step(batches_of(number, communicator.rank)))
            weights.append(weights_of(step))
            assert not step.strategy.in_round
        return results, weights

    found = on_ranks(size, one)
    start = {name: np.array(array) for name, array in _flat(network())}
    assert all((found[0][1][0][name] == start[name]).all() for name in start)
    for number, expected in enumerate(reference(size, STEPS, max_norm)):
        assert_close(found[0][1][number], expected, 3e-5)
        replicas = [
            {name: array.tobytes() for name, array in each[1][number].items()} for each in found
        ]
        assert all(each == replicas[0] for each in replicas)
        told = [
            (each[0][number].loss_sum, each[0][number].num_targets, each[0][number].grad_norm)
            for each in found
        ]
        assert len(set(told)) == 1
    assert max(np.abs(found[0][1][-1][name] - start[name]).max() for name in start) > 1e-3


@pytest.mark.parametrize("name", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("size", [2, 3])
def test_gradients_travel_packed(size: int, name: str) -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        step = made(communicator, lambda: SGD(0.1), codec=CODECS[name])
        for number in range(STEPS):
            step(batches_of(number, communicator.rank))
        step.strategy.close_round()
        return weights_of(step), [each for each in step.strategy.left if each is not None]

    def plain(communicator: ThreadCommunicator) -> Any:
        step = made(communicator, lambda: SGD(0.1))
        for number in range(STEPS):
            step(batches_of(number, communicator.rank))
        return weights_of(step)

    found, expected = on_ranks(size, one), on_ranks(size, plain)[0]
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
    start = {each: np.array(array) for each, array in _flat(network())}
    off = sum(np.square(weights[each] - expected[each]).sum() for each in weights) ** 0.5
    moved = sum(np.square(expected[each] - start[each]).sum() for each in weights) ** 0.5
    assert 1e-6 < off / moved < {"bf16": 0.01, "int8": 0.02, "int4": 0.2}[name]
    assert bool(left) == CODECS[name].grouped


@pytest.mark.parametrize("cpu_native", [True, False])
def test_a_gradient_that_is_not_finite_is_found_in_its_step(cpu_native: bool) -> None:
    """It never travels: the step's update is left out, and the one before it is made up for in the
    next.
    """

    def one(communicator: ThreadCommunicator) -> Any:
        at = {"step": 0}

        def spoils(point: str) -> str | None:
            here = (point, at["step"], communicator.rank)
            return "nan" if here == ("reduce", 2, 1) else None

        step = made(
            communicator, cpu_native=cpu_native, rules=Rules(inject_fault=spoils), non_finite="skip"
        )
        skipped, weights = list[str](), list[Weights]()
        for number in range(STEPS):
            at["step"] = number
            skipped.append(step(batches_of(number, communicator.rank)).skipped)
            weights.append(weights_of(step))
        return skipped, weights

    def without(communicator: ThreadCommunicator) -> Any:
        step = made(communicator, cpu_native=cpu_native)
        for number in (0, 1, 3):
            step(batches_of(number, communicator.rank))
        return weights_of(step)

    found, expected = on_ranks(2, one), on_ranks(2, without)[0]
    for skipped, weights in found:
        assert [bool(each) for each in skipped] == [number == 2 for number in range(STEPS)]
        assert "gradient" in skipped[2]
        assert all((weights[2][name] == weights[1][name]).all() for name in expected)
        assert_close(weights[3], expected, 0.0)
        assert max(np.abs(weights[5][name] - weights[3][name]).max() for name in expected) > 1e-4


@pytest.mark.parametrize("cpu_native", [True, False])
def test_what_is_kept_is_by_the_names_of_weights_and_goes_on(cpu_native: bool) -> None:
    """Whether gradients are arrays by name or few flat ones; another step object with this state is
    the same.
    """
    one, other = (made(SingleProcess(), lambda: SGD(0.1), cpu_native=cpu_native) for _ in range(2))
    for number in range(4):
        one(batches_of(number, 0))
    kept = dict(one.strategy.outer_state)
    names = dict(_flat(one.passes.model))
    assert {name for name in kept if "sum" in name} == {f"late/sum/{name}" for name in names}
    assert all(kept[f"late/sum/{name}"].shape == array.shape for name, array in names.items())
    other.passes.model.update(one.passes.model.trainable_parameters())
    other.strategy.load_outer_state(kept)
    for number in (4, 5):
        mine, theirs = one(batches_of(number, 0)), other(batches_of(number, 0))
        assert (mine.loss_sum, mine.grad_norm) == (theirs.loss_sum, theirs.grad_norm)
    assert_close(weights_of(one), weights_of(other), 0.0)
