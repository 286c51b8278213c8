"""``allhands train``: one process, several local ones, or a rank of somebody else's launcher."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from rich.console import Console

from allhands.cluster.environment import Launch, recognise
from allhands.cluster.join import check_weights, join_group, mesh_of
from allhands.cluster.mpi import require_mpi, usable_mpi
from allhands.cluster.supervisor import LaunchSpec, SupervisorEvent, supervise
from allhands.cluster.worker import SPEAK_AFTER_S, WorkerContext, install
from allhands.config import TrainConfig, build_config
from allhands.errors import AllhandsError, ConfigError
from allhands.files import claimed

LOG_DIRECTORY = "logs"
_SHORT_OF_MEMORY = (
    "if memory was short, add --grad-checkpoint or lower --max-seq-length; "
    "--resume-adapter-file goes on from the last save, if there was one (--save-every)"
)


def train(flags: dict[str, Any]) -> int:
    """Run the training that ``flags`` (and the YAML file they name) describe; returns the exit code."""
    launch = recognise(os.environ, has_cuda=_has_cuda())
    with _rank_0_speaks_first(launch):
        config = build_config(flags, flags.get("config"))
        _check_launch(config, launch)
    if launch.launcher == "single":
        check_before_start(config)
    if launch.launcher == "single" and config.num_ranks > 1:
        return supervise_local(config, [sys.executable, "-m", "allhands", *sys.argv[1:]])
    return work(config, launch)


@contextmanager
def _rank_0_speaks_first(launch: Launch) -> Generator[None, None, None]:
    """Hold an error of another rank back: rank 0 has it too, or else this is the only one, and no less clear."""
    try:
        yield
    except AllhandsError:
        if launch.rank > 0:
            time.sleep(SPEAK_AFTER_S)
        raise


def _check_launch(config: TrainConfig, launch: Launch) -> None:
    """Refuse options that contradict the number of ranks, or a launcher other than this command."""
    check_weights(config.rank_weights, config.num_ranks if launch.launcher == "single" else launch.size)
    if launch.launcher == "single":
        return
    if config.num_ranks not in (1, launch.size):
        raise ConfigError(
            f"{config.num_ranks} processes are asked for, but {launch.launcher} has started {launch.size}",
            where="-n",
            hint="leave -n out under another launcher",
        )
    if launch.size > 1 and config.backend not in ("auto", launch.backend):
        raise ConfigError(
            f"{launch.launcher} has started a group over {launch.backend}",
            where=f"--backend {config.backend}",
            hint="leave --backend out under another launcher",
        )


def _has_cuda() -> bool:
    from importlib.util import find_spec

    return sys.platform == "linux" and find_spec("mlx_cuda") is not None


def check_before_start(config: TrainConfig) -> None:
    """Find in the launcher, once, what every rank would find: cheaper and clearer than N messages."""
    if not (config.train or config.test):
        raise ConfigError("nothing to do", hint="add --train, --test or both")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if config.cores_per_rank and config.cores_per_rank * config.num_ranks > cores:
        raise ConfigError(
            f"{config.num_ranks} ranks with {config.cores_per_rank} cores each, but there are {cores} cores",
            where="--cores-per-rank",
            hint="lower one of the two",
        )
    if config.num_ranks > 1:
        _check_backend(config)


def _check_backend(config: TrainConfig) -> None:
    from allhands.accelerator import nvidia_gpus

    if config.backend == "mpi":
        require_mpi()
    if config.backend == "nccl" and (gpus := nvidia_gpus()) < config.num_ranks:
        raise ConfigError(
            f"NCCL needs an NVIDIA GPU a process: {gpus} for {config.num_ranks} processes",
            where="--backend nccl",
            hint="leave --backend out, or give --backend ring" + (f" or -n {gpus}" if gpus > 1 else ""),
        )


def supervise_local(config: TrainConfig, command: list[str]) -> int:
    """Start ``config.num_ranks`` processes of ``command`` and answer for them."""
    backend = _choose_backend(config)
    cores = config.cores_per_rank or _fair_share(config.num_ranks)
    directory = Path(config.adapter_path)
    spec = LaunchSpec(
        command,
        config.num_ranks,
        backend,
        directory / LOG_DIRECTORY,
        cores_per_rank=cores,
        start_deadline_s=config.start_timeout_s,
    )
    try:
        with claimed(directory):
            return supervise(spec, show_event)
    finally:
        if sys.stdout.isatty():
            # A rank that was killed while it showed its progress has left the cursor hidden.
            print("\x1b[?25h", end="", flush=True)


def _choose_backend(config: TrainConfig) -> Literal["ring", "mpi", "nccl"]:
    from allhands.accelerator import default_backend

    if config.backend != "auto":
        return config.backend
    chosen = default_backend(config.num_ranks, usable_mpi())
    # One supervised process joins nothing; the ring's way of starting it is the plainest.
    return "ring" if chosen == "none" else chosen


def _fair_share(num_ranks: int) -> int | None:
    """Cores of each local process when the person has not said: all of them, divided."""
    if not hasattr(os, "sched_getaffinity"):
        return None
    return max(1, len(os.sched_getaffinity(0)) // num_ranks)


def show_event(event: SupervisorEvent) -> None:
    """Tell the person, on standard error, what the supervisor sees."""
    if event.kind not in ("retrying", "cancelling", "killing", "failed"):
        return
    if sys.stderr.isatty():
        # Off the line on which a progress display may have been left.
        print(file=sys.stderr)
    if event.kind != "failed":
        print(f"allhands: {event.message}", file=sys.stderr, flush=True)
        return
    if event.explanation:
        print(f"allhands: error: {event.explanation}", file=sys.stderr)
    else:
        # Rank 0's output is on the screen already.
        killed = event.exit_code == 128 + signal.SIGKILL
        if event.log_tail and event.rank:
            # Who is killed says nothing about it: of such a log only the place matters.
            tail = event.log_tail[-3:] if killed else event.log_tail
            print(f"last lines of rank {event.rank}:", *tail, sep="\n  ", file=sys.stderr)
        print(f"allhands: error: {event.message}", file=sys.stderr)
        if killed:
            print(f"  what to do: {_SHORT_OF_MEMORY}", file=sys.stderr)
    print(f"  log of rank {event.rank}: {event.log_path}", file=sys.stderr, flush=True)


def work(config: TrainConfig, launch: Launch) -> int:
    """Be one rank: this process alone, or one of a group that a launcher has started."""
    with install(launch, os.environ) as worker:
        _train_as_rank(config, launch, worker)
        if launch.size > 1:
            _leave(launch)
    return 0


def _leave(launch: Launch) -> None:
    """End an error-free rank without a clean-up that can hang when ranks end apart.

    Under a foreign mpirun the ordinary end is needed: it takes a rank that skips MPI's finalizer for a failure.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if launch.launcher != "openmpi":
        os._exit(0)


def _train_as_rank(config: TrainConfig, launch: Launch, worker: WorkerContext) -> None:
    cores = _share_cores(config, launch)
    # Only now, because importing MLX fixes its BLAS threads and device.
    from allhands.distributed.backend import Communicator
    from allhands.train.recipes import Surroundings, run_finetune

    console = _console(launch) if launch.rank == 0 else None
    if console is not None:
        worker.announce_stops(partial(console.print, markup=False))

    def join() -> Communicator:
        worker.mark_ready()
        return join_group(launch, config.start_timeout_s)

    mesh = mesh_of(launch, config.rank_weights)
    surroundings = Surroundings(
        mesh=mesh,
        connect=join,
        started=worker.mark_started,
        busy=worker.mark_busy,
        stop_requested=worker.stop_requested,
        console=console,
        cores_per_rank=cores,
        claims_directory=launch.launcher != "allhands",
        log_file=Path(config.adapter_path) / LOG_DIRECTORY / f"rank-{launch.rank}.log",
    )
    result = run_finetune(config, surroundings)
    if mesh.is_main and config.train:
        where = [str(result.adapter_path)] + ([f"curves in {result.plot}"] if result.plot else [])
        print(f"saved in {', '.join(where)}", flush=True)


def _console(launch: Launch) -> Console:
    """Progress goes here. Open MPI gives a rank a terminal of its own, wherever the output really ends up."""
    return Console(highlight=False, force_terminal=False if launch.launcher == "openmpi" else None)


def _share_cores(config: TrainConfig, launch: Launch) -> int | None:
    """Divide this host's cores among its ranks, where nobody has done so already; how many this rank has got."""
    from allhands.blas import available_cores, limit_cores

    if launch.launcher == "allhands" or os.environ.get("OPENBLAS_NUM_THREADS"):
        return int(os.environ.get("ALLHANDS_CORES", 0)) or config.cores_per_rank
    cores = config.cores_per_rank or max(1, available_cores() // launch.local_size)
    if cores < available_cores():
        from allhands.cluster.guard import pin_cores

        pin_cores(launch.local_rank, cores)
        limit_cores(cores)
    return cores
