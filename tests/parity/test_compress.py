"""``--compress``: sums beside numpy's over real back-ends, bytes by the formulae, whole runs, and
their checkpoints.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from command_line import call_allhands
from packed_ranks import SHAPES
from rich.console import Console
from ring_ranks import run_ring
from runs import read_run
from test_resume import options
from tiny import run_allhands, write_chat_data, write_model, write_tokenizer
from twins import run_ranks

from allhands.checkpoints import Checkpoint, checkpoints_in, open_checkpoint
from allhands.checkpoints.arrays import local_arrays
from allhands.checkpoints.format import LEFT_FILE, OPTIMIZER_FILE, WEIGHTS_FILE
from allhands.cluster.mpi import find_mpi, mpi_variables, mpirun_command
from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import TrainConfig, build_config
from allhands.distributed.codecs import CODECS, Codec
from allhands.distributed.mesh import Mesh
from allhands.observe.metrics import read_metrics
from allhands.parallel.costs import DataCosts, PackedGradients
from allhands.run.session import RunContext, run_finetune

PROGRAM = Path(__file__).parents[1] / "support" / "packed_ranks.py"
_NEEDS_MPI = pytest.mark.skipif(find_mpi() is None, reason="no Open MPI")
# int8 is gathered by up to seven ranks and passed on by eight, int4 gathered by all of these.
GROUPS = [
    *(("ring", size) for size in (2, 3, 4)),
    pytest.param("ring", 8, marks=pytest.mark.long),
    *(pytest.param("mpi", size, marks=_NEEDS_MPI) for size in (2, 3)),
]


# --- sums, over real back-ends --------------------------------------------------------------------


@cache
def told(backend: str, size: int) -> list[dict[str, Any]]:
    """What each rank has found."""
    if backend == "ring":
        done = run_ring([[sys.executable, PROGRAM, "ring", str(size)]] * size, timeout=200)
        assert [(one.returncode, one.stderr) for one in done] == [(0, "")] * size
        return [json.loads(one.stdout) for one in done]
    mpi = find_mpi()
    assert mpi is not None
    with TemporaryDirectory() as scratch:
        given = {
            **mpi_variables(mpi, Path(scratch)),
            "OPENBLAS_NUM_THREADS": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }
        command = mpirun_command(mpi, size, [sys.executable, str(PROGRAM), "mpi", str(size)])
        how: dict[str, Any] = {
            "capture_output": True,
            "text": True,
            "stdin": subprocess.DEVNULL,
            "timeout": 200,
        }
        mpirun = subprocess.run(command, env={**os.environ, **given}, check=False, **how)
    assert mpirun.returncode == 0, mpirun.stderr
    return [json.loads(line) for line in mpirun.stdout.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "size"), GROUPS)
@pytest.mark.parametrize("case", ["bf16", "int8", "int4", "passed int8", "passed int4"])
def test_all_ranks_have_the_same_bits(backend: str, size: int, case: str) -> None:
    assert len({each[case]["digest"] for each in told(backend, size)}) == 1
    assert len(told(backend, size)) == size


@pytest.mark.parametrize(("backend", "size"), GROUPS)
@pytest.mark.parametrize("compress", ["bf16", "int8", "int4"])
def test_sums_are_those_of_numpy(backend: str, size: int, compress: str) -> None:
    """Where a number lies in the middle between two codes rounding may choose either: then they are
    one step apart.
    """
    route = CODECS[compress].route(backend, size)
    if route == "pass":
        pytest.skip("each rank packs sums, not its own part alone: see test_nothing_is_lost")
    for each in told(backend, size):
        added_up = route == "sum"  # by the back-end, which rounds its sums
        assert each[compress]["typical"] <= (2e-3 * size if added_up else 1e-6)
        assert (
            each[compress]["apart"] <= {"bf16": 2e-2, "int8": 2e-2, "int4": 0.35}[compress] * size
        )


@pytest.mark.parametrize(("backend", "size"), GROUPS)
@pytest.mark.parametrize("case", ["int8", "int4", "passed int8", "passed int4"])
def test_nothing_is_lost(backend: str, size: int, case: str) -> None:
    """All sums so far and all that is left out are what there was to send, whoever has packed it
    how often.
    """
    for each in told(backend, size):
        assert each[case]["lost"] <= 5e-6
        assert 1e-7 < each[case]["apart"] < size * (0.05 if case.endswith("int8") else 1.0)


@pytest.mark.parametrize(("backend", "size"), GROUPS)
@pytest.mark.parametrize("compress", ["bf16", "int8", "int4"])
def test_a_number_that_is_not_finite_is_not_hidden(backend: str, size: int, compress: str) -> None:
    for each in told(backend, size):
        assert each[f"spoilt {compress}"] == [[False, True, True]] * 3


@pytest.mark.parametrize(("backend", "size"), GROUPS)
@pytest.mark.parametrize("compress", ["bf16", "int8", "int4"])
def test_bytes_are_those_of_the_formulae(backend: str, size: int, compress: str) -> None:
    codec = CODECS[compress]
    numbers = [int(np.prod(shape)) for shape in SHAPES]
    # In two buckets, of which the first is the first array alone; each array is filled up to whole
    # groups.
    rows = [
        sum(-(-count // 64) * 64 for count in bucket if count >= 64)
        for bucket in (numbers[:1], numbers[1:])
    ]
    beside = 4 * (sum(count for count in numbers if count < 64) + 2)  # and the scalars
    of_sum = 2 * (size - 1) / size
    packed = sum(codec.packed_bytes(row) for row in rows)
    expected = {
        "gather": (size - 1) * (packed + beside),
        "sum": of_sum * (packed + beside),
        "pass": of_sum * (sum(_in_parts(codec, row, size) for row in rows) + beside),
    }
    for each in told(backend, size):
        assert each[compress]["sent"] == pytest.approx(expected[codec.route(backend, size)], abs=8)
        if codec.grouped:
            assert each[f"passed {compress}"]["sent"] == pytest.approx(
                of_sum * _in_parts(codec, 6400, size)
            )


def _in_parts(codec: Codec, row: int, size: int) -> int:
    """Bytes of a row that is cut into a part for each rank, of whole groups."""
    return size * codec.packed_bytes(-(-row // (64 * size)) * 64)


@pytest.mark.parametrize(("backend", "size"), GROUPS)
def test_what_gains_nothing_travels_as_it_is(backend: str, size: int) -> None:
    """In the type that it has: as float32 it would take twice the bytes."""
    half, packed = 2 * 96 * 64, CODECS["bf16"].packed_bytes(96 * 64)
    for each in told(backend, size):
        assert each["mixed"]["same"]
        # Two ranks gather as many bytes as their sum would be.
        assert each["mixed"]["sent"] == pytest.approx(
            2 * (size - 1) / size * (half + packed), abs=16
        )


# --- whole runs -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("compress")
    data = write_chat_data(root / "data", train=11, valid=4, longest=30)
    model = write_model(root / "model", layers=2, hidden=64)
    more = {
        "iters": 8,
        "save_every": 4,
        "val_batches": 0,
        "learning_rate": 1e-3,
        "grad_accumulation_steps": 1,
    }
    return options(model, data, root / "run") | more


def train(
    flags: dict[str, Any], size: int, directory: Path, *, shared: bool = True, **more: Any
) -> Path:
    """One start on ranks that are threads, in one directory or each in its own."""
    return train_as(build_config({**flags, **more}), size, directory, shared=shared)


def train_as(config: TrainConfig, size: int, directory: Path, *, shared: bool = True) -> Path:
    config = config.model_copy(update={"adapter_path": str(directory)})

    def work(communicator: Any) -> Path:
        rank = communicator.rank
        mesh = Mesh(rank, size, rank, size, (1.0,) * size)
        own = (
            config
            if shared or not rank
            else config.model_copy(update={"adapter_path": f"{directory}-{rank}"})
        )
        console = None if rank else Console(width=200)
        surroundings = RunContext(mesh=mesh, connect=lambda: communicator, console=console)
        return run_finetune(own, surroundings).adapter_path

    outcomes = run_ranks(size, work)
    assert all(isinstance(outcome, Path) for outcome in outcomes), outcomes
    return directory


def arrays(checkpoint: Checkpoint) -> dict[str, bytes]:
    files = (WEIGHTS_FILE, OPTIMIZER_FILE, LEFT_FILE)
    return {
        f"{file} {name}": np.array(stored.read()).tobytes()
        for file in files
        for name, stored in local_arrays(checkpoint, file).items()
    }


def in_half(model: Path, to: Path) -> Path:
    """A model in bfloat16."""
    shutil.copytree(model, to)
    for file in to.glob("*.safetensors"):
        found: Any = mx.load(str(file))
        halved = {name: array.astype(mx.bfloat16) for name, array in found.items()}
        mx.eval(halved)
        mx.save_safetensors(str(file), halved, metadata={"format": "mlx"})
    return to


def saved(directory: Path) -> list[Checkpoint]:
    """The last checkpoint, then those before."""
    return [open_checkpoint(path) for path in checkpoints_in(directory)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "compress", "shared", "more"),
    [
        *((2, "int4", True, {"compile": compile_}) for compile_ in ("on", "off")),
        *((3, "int8", False, {"compile": compile_}) for compile_ in ("on", "off")),
        (2, "int8", True, {"strategy": "zero1", "compile": "on"}),
        (2, "int8", False, {"strategy": "zero1", "compile": "on", "fine_tune_type": "full"}),
        (
            2,
            "int8",
            True,
            {"grad_checkpoint": True, "grad_accumulation_steps": 2, "iters": 16, "save_every": 8},
        ),
        (2, "int8", True, {"fine_tune_type": "full", "half": True, "num_layers": 1}),
    ],
)
def test_a_resumed_run_goes_on_bit_for_bit(
    flags: dict[str, Any],
    tmp_path: Path,
    size: int,
    compress: str,
    shared: bool,
    more: dict[str, Any],
) -> None:
    """Adapters and whole weights, of which some are frozen, in float32 and in half precision."""
    how: dict[str, Any] = {"compress": compress, **more}
    if how.pop("half", False):
        how["model"] = str(in_half(Path(flags["model"]), tmp_path / "half"))
    whole = train(flags, size, tmp_path / "whole", shared=shared, **how)
    last, half = saved(whole)
    left = [name for name in arrays(last) if name.startswith(LEFT_FILE)]
    assert left
    assert len(left) == sum(name.startswith(WEIGHTS_FILE) for name in arrays(last))
    assert all(any(arrays(last)[name]) for name in left)
    resumed = train(flags, size, tmp_path / "resumed", shared=shared, resume=str(half.path), **how)
    assert arrays(saved(resumed)[0]) == arrays(last)


@pytest.mark.parametrize(
    ("size", "compress", "why"),
    [
        (3, "int8", "it belongs to 2 ranks"),
        (1, "int8", "gradients travel as they are now"),
        *((2, other, "--compress was int8") for other in ("int4", "none")),
    ],
)
def test_what_is_left_out_is_dropped_with_a_note_where_it_does_not_fit(
    flags: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    size: int,
    compress: str,
    why: str,
) -> None:
    whole = train(flags, 2, tmp_path / "whole", compress="int8")
    _, half = saved(whole)
    capsys.readouterr()
    resumed = train(flags, size, tmp_path / "resumed", resume=str(half.path), compress=compress)
    text = " ".join(capsys.readouterr().out.split())
    assert f"what int8 had kept as rounding errors of the last gradients is dropped: {why}" in text
    assert ("compress changed from" in text) == (compress != "int8")
    assert saved(resumed)[0].step == 8
    names = [name for name in arrays(saved(resumed)[0]) if name.startswith(LEFT_FILE)]
    assert bool(names) == (compress != "none" and size > 1)


def test_nobody_is_told_of_what_was_not_there(
    flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From unpacked gradients to packed ones, and from bf16, which leaves nothing for later."""
    for before, now in (("none", "int8"), ("bf16", "int8")):
        _, half = saved(train(flags, 2, tmp_path / before, compress=before))
        capsys.readouterr()
        train(flags, 2, tmp_path / f"from-{before}", resume=str(half.path), compress=now)
        assert "dropped" not in capsys.readouterr().out


def test_one_rank_is_told_that_nothing_travels(
    flags: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(flags, 1, tmp_path / "one", compress="int8", iters=3)
    assert "--compress int8 has no effect" in " ".join(capsys.readouterr().out.split())
    train(flags, 2, tmp_path / "two", compress="int8", iters=3)
    assert "has no effect" not in capsys.readouterr().out


@pytest.mark.parametrize(
    "option", [{"rank_weights": "auto"}, {"sync_every": 2}, {"sync_delay": 1}], ids=str
)
def test_one_rank_is_told_of_every_option_for_several(
    flags: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    option: dict[str, Any],
) -> None:
    (name,) = option
    for size in (1, 2):
        train(flags, size, tmp_path / f"{size}", iters=3, **option)
        notes = [line for line in capsys.readouterr().out.splitlines() if line.startswith("note:")]
        assert any(f"--{name.replace('_', '-')}" in note for note in notes) == (size == 1), notes


def run_by_two(
    flags: dict[str, Any], directory: Path, compress: str, env: dict[str, str] | None = None
) -> Any:
    """A run of two processes, in which all layers are trained."""
    given = [
        "--train",
        "-n",
        "2",
        "--backend",
        "ring",
        "--iters",
        "4",
        "--val-batches",
        "0",
        "--save-every",
        "2",
    ]
    given += [
        "--batch-size",
        "4",
        "--steps-per-report",
        "1",
        "--compress",
        compress,
        "--num-layers",
        "-1",
    ]
    given += ["--model", flags["model"], "--data", flags["data"], "--adapter-path", str(directory)]
    done = run_allhands("train", *given, env=env, timeout=300)
    assert done.returncode == 0, done.stderr
    return read_run(directory)


@pytest.fixture(scope="module")
def plainly_sent(flags: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> float:
    """Bytes of a step in which nothing is packed."""
    run = run_by_two(flags, tmp_path_factory.mktemp("none") / "run", "none")
    gradient = sum(4 * array.size for array in run.weights.values())
    sent = run.reports[-1]["sent_bytes"]
    assert sent == pytest.approx(
        DataCosts().traffic(gradient, gradient, scatters=False).sent(2), rel=0.01
    )
    return sent


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compress", "bar"),
    [
        ("int8", 0.30),
        *(pytest.param(*each, marks=pytest.mark.long) for each in (("bf16", 0.51), ("int4", 0.17))),
    ],
)
def test_runs_of_processes_say_what_they_send(
    flags: dict[str, Any], tmp_path: Path, plainly_sent: float, compress: str, bar: float
) -> None:
    """As planned within 1 %, and a run with a kill in it ends like one without."""
    run = run_by_two(flags, tmp_path / "run", compress)
    # But for some numbers that ranks tell each other for a report.
    assert np.ptp([report["sent_bytes"] for report in run.reports]) < 100
    sent = run.reports[-1]["sent_bytes"]
    packed = PackedGradients(CODECS[compress], "ring").traffic(
        sum(4 * each.size for each in run.weights.values()), 2
    )
    assert sent == pytest.approx(packed.sent(2), rel=0.01)
    assert sent <= bar * plainly_sent
    told = call_allhands("monitor", tmp_path / "run", "--once").stdout
    assert f"{sent / 1e3:.1f} kB sent by a rank in a step" in " ".join(told.split())
    assert call_allhands("report", tmp_path / "run").returncode == 0
    assert f"{sent / 1e3:.1f} kB" in (tmp_path / "run" / "report.md").read_text()
    if CODECS[compress].grouped:
        schedule = tmp_path / "faults.json"
        schedule.write_text(json.dumps([{"rank": 1, "step": 3, "kind": "kill"}]))
        run_by_two(flags, tmp_path / "killed", compress, env={"ALLHANDS_FAULTS": str(schedule)})
        assert arrays(saved(tmp_path / "killed")[0]) == arrays(saved(tmp_path / "run")[0])


def test_what_is_no_form_is_told_in_one_message(flags: dict[str, Any]) -> None:
    done = call_allhands(
        "train", "--model", flags["model"], "--data", flags["data"], "--train", "--compress", "int3"
    )
    assert done.returncode == 2
    assert "--compress" in done.stderr
    assert all(name in done.stderr for name in ("int3", "none", *CODECS))
    assert "Traceback" not in done.stderr


# --- what it costs --------------------------------------------------------------------------------

ROOT = Path(__file__).parents[2]


@pytest.mark.long
def test_the_validation_loss_is_that_of_gradients_as_they_are(tmp_path: Path) -> None:
    """A small model from scratch on this project's own pages, byte by byte; int4 needs what is sent
    later for it.
    """
    write_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "data").mkdir()
    pages = [page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md"))]
    (tmp_path / "data" / "train.txt").write_text("<|endoftext|>".join(pages))
    valid = json.dumps({"text": (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")})
    (tmp_path / "data" / "valid.jsonl").write_text(valid)
    places = {
        "data": str(tmp_path / "data"),
        "tokenizer": str(tmp_path / "tokenizer"),
        "train": True,
    }
    shape = {
        "shape": "llama",
        "layers": 2,
        "dims": 64,
        "mlp_dims": 192,
        "heads": 4,
        "kv_heads": 2,
        "block_size": 64,
    }
    more = {
        "batch_size": 16,
        "iters": 250,
        "val_batches": -1,
        "steps_per_eval": 250,
        "learning_rate": 3e-3,
    }

    def loss(compress: str) -> float:
        config = build_config(
            {**places, **shape, **more, "compress": compress}, kind=PretrainConfig
        )
        return read_metrics(train_as(config, 2, tmp_path / compress)).valid[-1].loss

    plain = loss("none")
    assert plain < 2.6
    assert loss("int8") == pytest.approx(plain, rel=0.001)
    assert loss("int4") == pytest.approx(plain, rel=0.005)
