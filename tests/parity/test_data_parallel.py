"""Any number of ranks computes the same run: the same losses and the same weights.

Ranks are real processes, started by ``allhands train -n``, by ``mpirun``, by ``mlx.launch`` and by
hand. Data are of very unequal lengths, so that an average of the ranks' own means is visibly
another number.

Tolerances. A sum in another order differs by float32's rounding, 6e-8 of its terms: losses of about
5 were seen to differ by up to 4e-6. Adam divides a gradient by its own size: where it is as small
as its rounding error, with the default ``eps`` of 1e-8 the direction of an update is noise (weights
differed by up to 2e-5 after 20 updates of 1e-3 each). So ``eps`` is 1e-6 here, above the noise and
far below the gradients, and weights agree to 1.3e-6 (updates moved them by up to 2e-2). Adapters
have scale 2, because with 20 this random model's loss jumps about, which enlarges any difference.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.optimizers as optim
import numpy as np
import pytest
from plain_loop import adapted_model, chats, full_model, numpy_loss, train_plainly
from ranked_tasks import KINDS, finetune, gradient_case
from ring_ranks import allhands_command, run_ring
from runs import Run, distance, read_run
from tiny import run_allhands, write_chat_data, write_model

from allhands.cluster.mpi import find_mpi, mpi_variables
from allhands.config.schema import build_config
from allhands.distributed import shards
from allhands.distributed.backend import SingleProcess
from allhands.distributed.reduce import start_all_reduce, start_sum, sum_over_ranks

LOSS_TOLERANCE = 1e-5
WEIGHT_TOLERANCE = 5e-6
ADAM = {"adam": {"eps": 1e-6}}
ADAPTERS = {"rank": 8, "scale": 2.0, "dropout": 0.0}
RANKS = (2, 3, pytest.param(4, marks=pytest.mark.long))
# On each rank, none at all on one, for `average_gradients`.
TOKENS = {2: [7, 300], 3: [0, 41, 5], 4: [1, 900, 0, 30]}
_needs_mpi = pytest.mark.skipif(find_mpi() is None, reason="Open MPI is not installed")


def assert_same_weights(one: dict[str, mx.array], other: dict[str, mx.array]) -> None:
    assert distance(one, other) <= WEIGHT_TOLERANCE


def assert_same_run(one: Run, other: Run) -> None:
    assert len(one.losses) == len(other.losses) > 0
    np.testing.assert_allclose(one.losses, other.losses, rtol=0, atol=LOSS_TOLERANCE)
    np.testing.assert_allclose(one.valid_losses, other.valid_losses, rtol=0, atol=LOSS_TOLERANCE)
    for mine, theirs in zip(one.reports, other.reports, strict=True):
        assert mine["trained_tokens"] == theirs["trained_tokens"]
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert_same_weights(one.weights, other.weights)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 chats of 39 to 117 tokens: batches of 5 end an epoch with one of 4."""
    return write_chat_data(tmp_path_factory.mktemp("parallel-data"), longest=60)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, a head of its own."""
    return write_model(tmp_path_factory.mktemp("parallel-model"), layers=2, tied=False)


# --- the command line, from every launcher --------------------------------------------------------


@pytest.fixture(scope="module")
def command(model: Path, data: Path) -> Callable[[Path], list[str]]:
    """LoRA with Adam, two batches of 5 an update, answers only: 20 updates."""

    def arguments(directory: Path) -> list[str]:
        text = (
            f"train --model {model} --data {data} --adapter-path {directory} --train --mask-prompt"
        )
        text += " --iters 40 --batch-size 5 --grad-accumulation-steps 2 --learning-rate 1e-3"
        text += " --steps-per-report 2 --steps-per-eval 40 --val-batches -1"
        return [
            *text.split(),
            "--optimizer-config",
            json.dumps(ADAM),
            "--lora-parameters",
            json.dumps(ADAPTERS),
        ]

    return arguments


@pytest.fixture(scope="module")
def one_process(
    command: Callable[[Path], list[str]], tmp_path_factory: pytest.TempPathFactory
) -> Run:
    directory = tmp_path_factory.mktemp("one") / "run"
    done = run_allhands(*command(directory))
    assert done.returncode == 0, done.stderr
    run = read_run(directory)
    assert len(run.losses) == 20
    assert run.losses[-1] < run.losses[0] - 0.5
    return run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        pytest.param(4, "ring", marks=pytest.mark.long),
        pytest.param(2, "mpi", marks=_needs_mpi),
        pytest.param(3, "mpi", marks=[_needs_mpi, pytest.mark.long]),
    ],
    ids=["ring-4", "mpi-2", "mpi-3"],
)
def test_local_processes_compute_the_run_of_one(
    command: Callable[[Path], list[str]], one_process: Run, tmp_path: Path, ranks: int, backend: str
) -> None:
    done = run_allhands(*command(tmp_path / "run"), "-n", str(ranks), "--backend", backend)
    assert done.returncode == 0, done.stderr
    assert f"ranks       {ranks} ({backend})" in done.stdout
    assert_same_run(one_process, read_run(tmp_path / "run"))


@pytest.mark.slow
@_needs_mpi
def test_same_command_line_under_mpirun(
    command: Callable[[Path], list[str]], one_process: Run, tmp_path: Path
) -> None:
    mpi = find_mpi()
    assert mpi is not None
    launcher = [str(mpi.mpirun), "-np", "2", "--map-by", ":OVERSUBSCRIBE"]
    environment = {**os.environ, **mpi_variables(mpi, tmp_path), "OPENBLAS_NUM_THREADS": "1"}
    # It is for allhands to find the library.
    del environment["MLX_MPI_LIBNAME"]
    done = _run([*launcher, *allhands_command(*command(tmp_path / "run"))], environment)
    assert "ranks       2 (mpi)" in done.stdout
    assert_same_run(one_process, read_run(tmp_path / "run"))


@pytest.mark.slow
def test_same_command_line_under_mlx_launch(
    command: Callable[[Path], list[str]], one_process: Run, tmp_path: Path
) -> None:
    programs = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{programs}:{os.environ['PATH']}",
        "OPENBLAS_NUM_THREADS": "1",
    }
    launcher = [
        str(programs / "mlx.launch"),
        "-n",
        "2",
        "--backend",
        "ring",
        "-p",
        str(_free_pair()),
        "--",
    ]
    done = _run([*launcher, "allhands", *command(tmp_path / "run")], environment)
    assert "ranks       2 (ring)" in done.stdout
    assert_same_run(one_process, read_run(tmp_path / "run"))


def _run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    return done


def _free_pair() -> int:
    """The first of two neighbouring free ports."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except (OSError, OverflowError):
                continue
            return port


# --- ranks without samples, everything trained ----------------------------------------------------

# Two samples a batch: with three and four ranks some have none.
FEW_SAMPLES = {"batch_size": 2, "fine_tune_type": "full", "optimizer_config": ADAM}
# Seven: no number of ranks divides it. SGD, so that nothing hides the size of a gradient, and a
# clipped norm.
CLIPPED = {"batch_size": 7, "optimizer": "sgd", "learning_rate": 0.1, "max_grad_norm": 0.5}
ACCUMULATED = {**FEW_SAMPLES, "grad_accumulation_steps": 2, "iters": 40}
SCENARIOS = {"few": FEW_SAMPLES, "clipped": CLIPPED, "accumulated": ACCUMULATED}
# Runs in which shares move: masked prompts with dropout, and packed rows in graphs with a divided
# optimizer.
_LONG = {"iters": 45, "val_batches": -1, "steps_per_eval": 15, "optimizer_config": ADAM}
MOVING = {
    "moving-masked": {
        **_LONG,
        "batch_size": 7,
        "mask_prompt": True,
        "lora_parameters": {**ADAPTERS, "dropout": 0.1},
    },
    "moving-packed": {
        **{
            **_LONG,
            "batch_size": 4,
            "packing": True,
            "max_seq_length": 64,
            "grad_accumulation_steps": 2,
            "iters": 90,
        },
        **{"strategy": "zero1", "compile": "on"},
    },
}
# Speeds of the ranks after so many steps: the last one becomes too slow for a row, and recovers.
PACES = [(0, [3.0, 1.0, 2.0]), (16, [1.0, 1.0, 0.01]), (30, [1.0, 3.0, 0.01])]


# Whether the weights are trained as one array.
BESIDE = {"beside-joined": True, "beside-apart": False}
# With as many calls as these make, three ranks take as long over them as over all the rest.
BESIDE_RANKS = (2, 4)
MOVING_RANKS = (2, 3)


def _flags(model: Path, data: Path, directory: Path, scenario: dict[str, Any]) -> dict[str, Any]:
    common = {
        "train": True,
        "iters": 20,
        "val_batches": 0,
        "steps_per_report": 1,
        "learning_rate": 1e-3,
    }
    places = {"model": str(model), "data": str(data), "adapter_path": str(directory)}
    return {**common, **places, "lora_parameters": ADAPTERS, **scenario}


@pytest.fixture(scope="module")
def alone(model: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Each scenario in this process."""
    root = tmp_path_factory.mktemp("alone")
    flags = {
        name: _flags(model, data, root / name, scenario) for name, scenario in SCENARIOS.items()
    }
    flags |= {
        name: _flags(model, data, root / name, {**scenario, "strategy": "data"})
        for name, scenario in MOVING.items()
    }
    return {name: read_run(finetune(build_config(values))) for name, values in flags.items()}


@pytest.fixture(scope="module", params=RANKS, ids=lambda n: f"{n}-ranks")
def together(
    request: pytest.FixtureRequest,
    model: Path,
    data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[int, Path]:
    """Number of ranks, and the directory in which they did every task, one process a rank."""
    ranks: int = request.param
    root = tmp_path_factory.mktemp(f"ranks-{ranks}")
    tasks: list[dict[str, Any]] = [
        {"kind": "finetune", "flags": _flags(model, data, root / name, scenario)}
        for name, scenario in SCENARIOS.items()
    ]
    tasks += _moving(model, data, root, ranks) if ranks in MOVING_RANKS else []
    # Unequal computers: the first does as much as all others together. The last, if there are
    # three, next to nothing.
    weights = [ranks - 1.0, *[1.0] * (ranks - 2), 0.01][:ranks]
    flags = _flags(model, data, root / "uneven", {**FEW_SAMPLES, "rank_weights": weights})
    tasks.append({"kind": "finetune", "flags": flags})
    tasks.append(
        {"kind": "mean_of_means", "flags": _flags(model, data, root / "means", FEW_SAMPLES)}
    )
    for dtype in ("float32", "bfloat16"):
        for reduction in ("mean", "sum"):
            place = str(root / f"{dtype}-{reduction}")
            tasks.append(
                {
                    "kind": "average",
                    "path": place,
                    "num_tokens": TOKENS[ranks],
                    "dtype": dtype,
                    "reduction": reduction,
                }
            )
    if ranks in BESIDE_RANKS:
        tasks += _beside(model, data, root)
    (root / "tasks.json").write_text(json.dumps({"tasks": tasks}))
    program = Path(__file__).parents[1] / "support" / "ranked_tasks.py"
    for done in run_ring([[sys.executable, program, root / "tasks.json"]] * ranks, timeout=240):
        assert done.returncode == 0, done.stderr
    return ranks, root


@pytest.fixture
def moving(together: tuple[int, Path]) -> tuple[int, Path]:
    if together[0] not in MOVING_RANKS:
        pytest.skip("four ranks take turns here, and have nothing in them that three have not")
    return together


def _moving(model: Path, data: Path, root: Path, ranks: int) -> list[dict[str, Any]]:
    """With speeds that change; then with one speed all the time, in one go, and stopped after 20
    steps and resumed.
    """
    paces = [(since, [*speeds, *speeds][-ranks:]) for since, speeds in PACES]
    runs = [(name, scenario, paces) for name, scenario in MOVING.items()]
    for name, more in (("steady", {}), ("resumed", {"iters": 20}), ("resumed", {"resume": "auto"})):
        runs.append((name, {**CLIPPED, "iters": 40, "save_every": 20, **more}, paces[:1]))
    return [
        {
            "kind": "finetune_paced",
            "flags": _flags(model, data, root / name, more),
            "speeds": speeds,
        }
        for name, more, speeds in runs
    ]


def _beside(model: Path, data: Path, root: Path) -> list[dict[str, Any]]:
    """With buckets of a few arrays."""
    flags = {
        name: _flags(model, data, root / name, {**ACCUMULATED, "bucket_mb": 0.02})
        for name in BESIDE
    }
    return [
        {"kind": "finetune_beside", "flags": flags[name], "joined": joined}
        for name, joined in BESIDE.items()
    ]


@pytest.mark.slow
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_ranks_compute_the_run_of_one(
    alone: dict[str, Run], together: tuple[int, Path], scenario: str
) -> None:
    run = read_run(together[1] / scenario)
    assert len(run.losses) == 20
    assert run.losses[-1] < run.losses[0] - 0.3
    assert_same_run(alone[scenario], run)


@pytest.mark.slow
def test_unequal_shares_are_the_same_run(alone: dict[str, Run], together: tuple[int, Path]) -> None:
    assert_same_run(alone["few"], read_run(together[1] / "uneven"))


@pytest.mark.parametrize("scenario", MOVING)
def test_shares_that_move_are_the_same_run(
    alone: dict[str, Run], moving: tuple[int, Path], scenario: str
) -> None:
    ranks, root = moving
    run = read_run(root / scenario)
    changes = [
        json.loads(line) for line in (root / scenario / "metrics.jsonl").read_text().splitlines()
    ]
    changes = [event for event in changes if event["event"] == "shares"]
    assert len(changes) >= 2
    assert [len(event["shares"]) for event in changes] == [ranks] * len(changes)
    assert any(not all(event["rows"]) for event in changes), "one got no rows"
    assert {tuple(report["shares"]) for report in run.reports} >= {
        tuple(event["shares"]) for event in changes
    }
    assert_same_run(alone[scenario], run)


def test_a_resumed_run_goes_on_with_its_shares(moving: tuple[int, Path]) -> None:
    """With the same shares the same sums are added, in messages of the same length: every bit is as
    in one go.
    """
    one, run = (read_run(moving[1] / name) for name in ("steady", "resumed"))
    shares = {report["step"]: report["shares"] for report in run.reports}
    assert len(shares) == 40
    assert shares == {report["step"]: report["shares"] for report in one.reports}
    assert shares[1] == pytest.approx([1 / moving[0]] * moving[0], abs=1e-3)
    assert shares[21] != shares[1]
    assert one.losses == [
        report["loss"] for report in sorted(run.reports, key=lambda report: report["step"])
    ]
    assert len({report["sent_bytes"] for report in one.reports + run.reports}) == 1
    assert distance(one.weights, run.weights) == 0.0


@pytest.mark.parametrize(
    "together",
    [2, pytest.param(4, marks=pytest.mark.long)],
    ids=lambda n: f"{n}-ranks",
    indirect=True,
)
@pytest.mark.parametrize("name", BESIDE)
def test_an_exchange_beside_the_passes_changes_nothing(
    alone: dict[str, Run], together: tuple[int, Path], name: str
) -> None:
    run = read_run(together[1] / name)
    assert_same_run(alone["accumulated"], run)
    assert all(report["comm_s"] >= 0 and report["compute_s"] > 0 for report in run.reports)


def test_mean_of_the_ranks_means_is_another_run(
    alone: dict[str, Run], together: tuple[int, Path]
) -> None:
    weights = read_run(together[1] / "means").weights
    with pytest.raises(AssertionError):
        assert_same_weights(alone["few"].weights, weights)
    assert distance(alone["few"].weights, weights) > 500 * WEIGHT_TOLERANCE


def test_mean_of_one_mean_is_the_same_run(
    alone: dict[str, Run], model: Path, data: Path, tmp_path: Path
) -> None:
    """So it is the averaging, and nothing else, in which the run above differs."""
    KINDS["mean_of_means"](
        SingleProcess(), flags=_flags(model, data, tmp_path / "run", FEW_SAMPLES)
    )
    assert_same_weights(alone["few"].weights, read_run(tmp_path / "run").weights)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_average_gradients_counts_every_token_once(
    together: tuple[int, Path], dtype: str, reduction: str
) -> None:
    ranks, root = together
    counts = TOKENS[ranks]
    cases = [gradient_case(rank, dtype, count) for rank, count in enumerate(counts)]
    results: list[dict[str, Any]] = []
    for rank in range(ranks):
        with np.load(root / f"{dtype}-{reduction}-{rank}.npz") as file:
            results.append(dict(file))
    for name in cases[0]:
        parts = [
            np.array(case[name].astype(mx.float32), dtype=np.float64) * count
            for case, count in zip(cases, counts, strict=True)
            if count
        ]
        expected = sum(parts) / sum(counts)
        # bfloat16 keeps 8 bits; "sum" rounds the sums that go in as well.
        tolerance = 2.0**-7 if dtype == "bfloat16" else 1e-6
        for result in results:
            np.testing.assert_allclose(result[name], expected, rtol=tolerance, atol=tolerance)
            np.testing.assert_array_equal(result[name], results[0][name])


# --- one process against a loop that shares no code with it ---------------------------------------


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("mask_prompt", [False, True], ids=["all tokens", "answers"])
def test_one_process_equals_a_plain_loop(
    model: Path, tmp_path: Path, method: str, mask_prompt: bool
) -> None:
    # The whole set is one batch, so that no order of samples comes into it.
    data = write_chat_data(tmp_path / "data", train=5, longest=60)
    flags = _flags(
        model,
        data,
        tmp_path / "run",
        {"fine_tune_type": method, "batch_size": 5, "mask_prompt": mask_prompt},
    )
    run = read_run(finetune(build_config({**flags, "optimizer_config": ADAM})))
    examples = chats(model, data / "train.jsonl", mask_prompt=mask_prompt)
    reference = adapted_model(model, scale=2.0) if method == "lora" else full_model(model)
    reference.train()
    assert run.losses[0] == pytest.approx(numpy_loss(reference, examples), abs=LOSS_TOLERANCE)
    losses, weights = train_plainly(reference, optim.Adam(1e-3, eps=1e-6), [examples] * 20)
    np.testing.assert_allclose(run.losses, losses, rtol=0, atol=LOSS_TOLERANCE)
    assert_same_weights(run.weights, weights)
    assert run.reports[-1]["trained_tokens"] == 20 * sum(sum(mask) for _, mask in examples)


# --- few, large calls -----------------------------------------------------------------------------


class OtherRank:
    """A twin of a group of two; the other rank passes, in every call, what ``others`` holds for it."""

    rank = 0
    size = 2
    backend = "ring"

    def __init__(self, others: list[mx.array] | None = None) -> None:
        self.calls: list[mx.array] = []
        self._others = others

    def all_sum(self, array: mx.array) -> mx.array:
        self.calls.append(array)
        return array if self._others is None else array + self._others[len(self.calls) - 1]

    def all_gather(self, array: mx.array) -> mx.array:
        return mx.concatenate([array, array])


def _mixed(seed: int) -> list[mx.array]:
    random = np.random.default_rng(seed)
    dtypes = [mx.float32, mx.bfloat16, mx.float32, mx.float16, mx.bfloat16, mx.float32]
    shapes = [(3, 4), (5,), (), (2, 2, 2), (0, 3), (7, 1)]
    return [
        mx.array(random.integers(-9, 9, shape), dtype=d)
        for shape, d in zip(shapes, dtypes, strict=True)
    ]


@pytest.mark.parametrize("bucket_bytes", [1, 40, 1 << 20])
def test_buckets_of_mixed_types_are_summed_right(bucket_bytes: int) -> None:
    recorder = OtherRank()
    sum_over_ranks(recorder, _mixed(1), [2.0, 5.0], bucket_bytes=bucket_bytes)
    sums, scalars = sum_over_ranks(
        OtherRank(recorder.calls), _mixed(0), [1.0, 4.0], bucket_bytes=bucket_bytes
    )
    for total, mine, theirs in zip(sums, _mixed(0), _mixed(1), strict=True):
        assert (total.dtype, total.shape) == (mine.dtype, mine.shape)
        # Small whole numbers: exact in every type.
        assert mx.array_equal(total, mine + theirs)
    assert scalars.tolist() == [3.0, 9.0]


@pytest.mark.parametrize("bucket_bytes", [1, 40, 1 << 20])
def test_sums_that_are_begun_are_those_that_are_waited_for(bucket_bytes: int) -> None:
    stream = mx.new_stream(mx.cpu)
    how: dict[str, Any] = {"bucket_bytes": bucket_bytes, "stream": stream}
    recorder = OtherRank()
    start_all_reduce(recorder, _mixed(1), **how)
    start_sum(recorder, [2.0, 5.0], stream=stream)
    other = OtherRank(recorder.calls)
    begun = start_all_reduce(other, _mixed(0), **how)
    for total, mine, theirs in zip(begun.arrays, _mixed(0), _mixed(1), strict=True):
        assert (total.dtype, total.shape) == (mine.dtype, mine.shape)
        assert mx.array_equal(total, mine + theirs)
    assert start_sum(other, [1.0, 4.0], stream=stream).tolist() == [3.0, 9.0]


def test_what_is_computed_first_travels_first() -> None:
    layers = [mx.full((5,), float(number)) for number in range(4)]
    twin, stream = OtherRank(), mx.new_stream(mx.cpu)
    begun = start_all_reduce(twin, layers, bucket_bytes=20, stream=stream)
    start_sum(twin, [9.0, 1.0], stream=stream)
    # Ranks meet, by a single number, before each bucket; what is told at the end needs no meeting.
    assert [call.size for call in twin.calls] == [*[1, 5] * 4, 2]
    assert [call[0].item() for call in twin.calls if call.size > 1] == [3.0, 2.0, 1.0, 0.0, 9.0]
    assert mx.array_equal(begun.computed[-1], layers[0])


def test_ranks_that_keep_parts_get_theirs_of_the_sums() -> None:
    """Large arrays by themselves and in equal parts, zeros where they do not divide; small ones
    whole, last.
    """
    sizes = [shards._LEAST + 130, 7, shards._LEAST]
    mine, theirs = (
        [mx.random.normal((size,), key=mx.random.key(seed + size)) for size in sizes]
        for seed in (0, 1)
    )
    stream = mx.new_stream(mx.cpu)
    recorder = OtherRank()
    parts = shards.Shards(recorder, [(size,) for size in sizes])
    assert parts.divided == [True, False, True]
    how: dict[str, Any] = {"bucket_bytes": 1 << 20, "stream": stream, "shards": parts}
    start_all_reduce(recorder, theirs, **how)
    begun = start_all_reduce(OtherRank(recorder.calls), mine, **how)
    for i, size in enumerate(sizes):
        total = mine[i] + theirs[i]
        each = -(-size // 128) * 64
        wanted = (
            mx.concatenate([total, mx.zeros((2 * each - size,))])[:each]
            if parts.divided[i]
            else total
        )
        assert mx.array_equal(begun.arrays[i], wanted), i


def test_few_calls_not_one_a_parameter() -> None:
    parameters = [mx.ones((100, 10)) for _ in range(200)]
    twin = OtherRank()
    sum_over_ranks(twin, parameters, [1.0, 2.0])
    assert [call.size for call in twin.calls] == [200 * 1000 + 2]
    twin = OtherRank()
    sum_over_ranks(twin, parameters, bucket_bytes=400_000)
    assert [call.nbytes <= 400_000 for call in twin.calls] == [True] * 2
    twin = OtherRank()
    sum_over_ranks(twin, [*parameters, *(array.astype(mx.bfloat16) for array in parameters)], [1.0])
    assert [call.dtype for call in twin.calls] == [mx.float32, mx.bfloat16]


def test_one_call_an_update(model: Path, data: Path, tmp_path: Path) -> None:
    """Training of some twenty tensors: one call an update."""
    twin = OtherRank()
    scenario = {"fine_tune_type": "full", "iters": 4, "grad_accumulation_steps": 2, "batch_size": 4}
    run = finetune(build_config(_flags(model, data, tmp_path / "run", scenario)), twin)
    assert len(read_run(run).weights) == 21
    # What rank 0 tells the others at the start goes as integers.
    assert sum(call.size > 1 and call.dtype == mx.float32 for call in twin.calls) == 2
