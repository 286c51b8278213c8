"""The seams of a step: an objective and a strategy of one's own, as docs/architecture.md shows
them.
"""

from __future__ import annotations

import math
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import allhands

# isort: split
import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.llama import Model, ModelArgs
from twins import ThreadCommunicator, run_ranks

from allhands.data.loader import MicroBatch
from allhands.distributed import shards
from allhands.distributed.backend import SingleProcess
from allhands.io.trees import flatten
from allhands.observe.metrics import read_metrics
from allhands.parallel.costs import DataCosts
from allhands.parallel.registry import STRATEGIES, Entry, TrainingNeeds
from allhands.train.optimizers import SGD, KernelAdamW
from allhands.train.result import StepResult
from allhands.train.step import StepOptions, make_step

DOCS = Path(__file__).parents[2] / "docs" / "architecture.md"
VOCABULARY = 96


def example(name: str) -> dict[str, Any]:
    """What the example of that name in the documentation defines."""
    (code,) = re.findall(
        rf"```python\n# example: {name}\n(.*?)```", DOCS.read_text(encoding="utf-8"), re.S
    )
    defined: dict[str, Any] = {"__name__": "example"}
    exec(compile(code, f"{DOCS}:{name}", "exec"), defined)
    return defined


def network() -> Any:
    mx.random.seed(3)
    shape = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 48,
    }
    heads = {
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
    }
    model: Any = Model(ModelArgs.from_dict(shape | heads))
    mx.eval(model.parameters())
    model.train()
    return model


def micro_batch(number: int, rows: int = 2, width: int = 12) -> MicroBatch:
    ids = (
        np.random.default_rng(number)
        .integers(0, VOCABULARY, size=(rows, width + 1))
        .astype(np.int32)
    )
    places = np.arange(rows * width, dtype=np.int32)
    targets = ids[:, 1:].reshape(-1).copy()
    targets[: number % 5] = -1  # ranks hold unequal numbers of trained tokens
    return MicroBatch(ids[:, :-1], places, targets, rows * width, np.arange(rows, dtype=np.int32))


def trained(
    communicator: Any, strategy: str, steps: int, *, cpu_native: bool, optimizer: Any
) -> tuple[list[StepResult], list[dict[str, bytes]]]:
    """The results of the steps, and the weights after each."""
    model = network()
    options = StepOptions(cpu_native=cpu_native, compiled=False, strategy=strategy)
    step = make_step(model, optimizer(), communicator, options)
    results, weights = list[StepResult](), list[dict[str, bytes]]()
    for number in range(steps):
        results.append(step([micro_batch(10 * number + communicator.rank)]))
        weights.append(
            {
                name: np.array(array).tobytes()
                for name, array in flatten(model.trainable_parameters())
            }
        )
    return results, weights


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The documentation's strategy under its name in the registry."""
    module = ModuleType("example_module")
    vars(module).update(example("strategy"))
    monkeypatch.setitem(sys.modules, "example_module", module)
    monkeypatch.setitem(
        STRATEGIES, "local", Entry("local steps", DataCosts(), "example_module:local_steps")
    )
    return module.LocalSteps


@pytest.mark.parametrize(
    "optimizer", [lambda: SGD(0.1), lambda: KernelAdamW(1e-2)], ids=["sgd", "adamw"]
)
@pytest.mark.parametrize("cpu_native", [True, False])
def test_local_steps_with_a_sum_each_step_are_data_parallel_training(
    local: Any, monkeypatch: pytest.MonkeyPatch, cpu_native: bool, optimizer: Any
) -> None:
    monkeypatch.setattr(local, "every", 1)

    def work(name: str) -> list[Any]:
        def one(communicator: ThreadCommunicator) -> Any:
            return trained(communicator, name, 3, cpu_native=cpu_native, optimizer=optimizer)[1]

        return run_ranks(2, one)

    assert work("local") == work("data")


def test_replicas_part_between_rounds_and_are_equal_after_each(local: Any) -> None:
    def one(communicator: ThreadCommunicator) -> Any:
        return trained(communicator, "local", 4, cpu_native=True, optimizer=lambda: SGD(0.1))

    (first, mine), (second, other) = run_ranks(2, one)
    assert [a == b for a, b in zip(mine, other, strict=True)] == [False, True, False, True]
    # Each reports the loss of both, whatever its own updates were.
    assert [result.loss_sum for result in first] == [result.loss_sum for result in second]
    alone = trained(SingleProcess(), "data", 1, cpu_native=True, optimizer=lambda: SGD(0.1))[1]
    assert alone[0] == mine[0]  # of the first rank's batch alone, divided by its own tokens


# Those whose ranks have all of the model; test_pipeline.py has the others.
WHOLE = [name for name, entry in STRATEGIES.items() if entry.exact and not entry.divides_model]


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("cpu_native", [True, False])
def test_every_strategy_in_the_registry_trains_as_one_process_does(
    name: str, cpu_native: bool
) -> None:
    if STRATEGIES[name].unfit(TrainingNeeds("adamw", cpu_native)):
        pytest.skip("the registry says that it does not fit here")

    def one(communicator: ThreadCommunicator) -> Any:
        return trained(
            communicator,
            name,
            3,
            cpu_native=cpu_native,
            optimizer=lambda: KernelAdamW(1e-2, eps=1e-5),
        )[0]

    results = run_ranks(2, one)
    model = network()
    step = make_step(
        model,
        KernelAdamW(1e-2, eps=1e-5),
        SingleProcess(),
        StepOptions(cpu_native=cpu_native, compiled=False),
    )
    whole = [step([micro_batch(10 * number), micro_batch(10 * number + 1)]) for number in range(3)]
    for mine in results:
        for found, expected in zip(mine, whole, strict=True):
            assert found.num_targets == expected.num_targets
            assert found.loss_sum == pytest.approx(expected.loss_sum, rel=1e-5)
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


@pytest.mark.parametrize(
    "name", [name for name, entry in STRATEGIES.items() if not entry.divides_model]
)
def test_the_traffic_that_the_registry_tells_is_what_travels(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of arrays that all divide evenly; a few numbers of the step travel besides."""
    monkeypatch.setattr(shards, "_LEAST", 1)

    def one(communicator: ThreadCommunicator) -> tuple[int, int]:
        trained(communicator, name, 2, cpu_native=False, optimizer=lambda: KernelAdamW(1e-2))
        bytes_of = dict.fromkeys(("all_sum", "all_gather"), 0)
        for kind, shape in communicator.calls:
            bytes_of[kind] += 4 * math.prod(shape)
        return bytes_of["all_sum"], bytes_of["all_gather"]

    weights = 4 * sum(array.size for _, array in flatten(network().trainable_parameters()))
    traffic = STRATEGIES[name].costs.traffic(weights, weights, scatters=False)
    (summed, parts), other = run_ranks(2, one)
    assert (summed, parts) == other
    assert summed == pytest.approx(2 * traffic.all_reduced, rel=0.02)
    # Each rank brings its part.
    assert 2 * parts == pytest.approx(2 * traffic.gathered, rel=0.02)
    assert traffic.sent(2) == traffic.all_reduced + traffic.gathered // 2


@pytest.mark.parametrize("cpu_native", [True, False])
def test_an_objective_of_ones_own_counts_over_ranks_and_micro_batches(cpu_native: bool) -> None:
    objective = example("objective")["WithAccuracy"]()

    def counted(communicator: Any, batches: list[MicroBatch]) -> StepResult:
        options = StepOptions(cpu_native=cpu_native, compiled=False, objective=objective)
        return make_step(network(), SGD(0.1), communicator, options)(batches)

    batches = [micro_batch(number, rows=16) for number in range(3)]
    model, right = network(), 0
    for batch in batches:
        logits = np.array(model(mx.array(batch.inputs))).reshape(-1, VOCABULARY)[batch.positions]
        right += int((logits.argmax(axis=-1) == batch.targets).sum())
    assert right > 0
    plain = make_step(
        network(), SGD(0.1), SingleProcess(), StepOptions(cpu_native=cpu_native, compiled=False)
    )(batches)
    alone = counted(SingleProcess(), batches)
    shares = [batches[:1], batches[1:]]
    two: list[Any] = run_ranks(
        2, lambda communicator: counted(communicator, shares[communicator.rank])
    )
    for found in (alone, *two):
        assert found.further == (right,)
        assert found.loss_sum == pytest.approx(plain.loss_sum, rel=1e-5)
        assert found.grad_norm == pytest.approx(plain.grad_norm, rel=1e-4)


def test_its_metrics_are_reported_of_training_and_validation(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    objective = example("objective")["WithAccuracy"]()
    options: dict[str, Any] = {
        "model": str(tiny_model),
        "data": str(tiny_data),
        "adapter_path": str(tmp_path / "run"),
    }
    options |= {
        "iters": 4,
        "steps_per_report": 2,
        "val_batches": 2,
        "learning_rate": 1e-3,
        "progress": False,
    }
    allhands.finetune(**options, objective=objective)
    history = read_metrics(tmp_path / "run")
    found = [report.metrics["accuracy"] for report in (*history.train, *history.valid)]
    assert len(found) >= 4
    assert all(0.0 <= each <= 1.0 for each in found)
    assert len(set(found)) > 1
