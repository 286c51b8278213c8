"""``allhands container``: the program of the image, under SageMaker, Vertex AI, Kubernetes or
alone.

The platform's inputs become options of ``allhands train``. The training runs with a rank for each
GPU of this computer, or as this computer's share of a job on several computers. The results go to
the place where the platform collects them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import typer

from allhands.cli.container_inputs import (
    as_flags,
    data_of,
    hyperparameters,
    merged,
    model_of,
    parse_arguments,
)
from allhands.cli.container_results import (
    Mirror,
    publish_model,
    publish_records,
    reason_of,
    tell_failure,
)
from allhands.cli.notices import say
from allhands.cli.train import job_of, supervise_training, work
from allhands.cli.verbs_runs import Container
from allhands.cluster.environment import has_cuda, recognise
from allhands.cluster.node import run_node
from allhands.cluster.patience import Patience
from allhands.cluster.place import LaunchPlace, below
from allhands.cluster.platforms.vertex import from_bucket
from allhands.cluster.ranks import LaunchSpec
from allhands.config.schema import TrainConfig, build_config
from allhands.errors import AllhandsError, ConfigError, DistributedError
from allhands.runtime.blas import allowed_cores
from allhands.runtime.gpus import nvidia_gpus

RESTARTS = 3
_STOPPED = (130, 143)
# Least seconds for a stop, and most seconds of the platform's grace time that copying results gets.
_LEAST_STOP_S = 5.0
_COPYING_S = 20.0
_NAMES = {"sagemaker": "SageMaker", "vertex": "Vertex AI", "kubernetes": "Kubernetes"}
# Platforms that collect results, and the way to give them data.
_CLOUDS = {"sagemaker": "a channel called train", "vertex": "--data=gs://BUCKET/FOLDER"}
_PATHS = ("model", "data", "adapter_path", "resume", "resume_adapter_file", "config")


@dataclass(frozen=True)
class Machine:
    """The machine that the container runs on.

    Attributes:
        environ: the environment variables.
        root: the directory that platforms call ``/``.
        gpus: number of GPUs that MLX can compute on.
        cuda: True if this MLX computes with CUDA.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")
    gpus: int = 0
    cuda: bool = False

    def launch(self) -> LaunchPlace:
        """Return the launch that the variables and files describe; by default each GPU has a rank."""
        env = dict(self.environ)
        given = (
            "ALLHANDS_RANKS_PER_NODE" in env
            or "SM_NUM_GPUS" in env
            or env.get("PET_NPROC_PER_NODE", "").isdigit()
        )
        if self.gpus > 1 and not given:
            env["ALLHANDS_RANKS_PER_NODE"] = str(self.gpus)
        return recognise(env, has_cuda=self.cuda, root=self.root)


def container(asked: Container) -> None:
    """Run the verb."""
    raise typer.Exit(run_container(asked.arguments or [], here()))


def here() -> Machine:
    """Return this machine."""
    if not has_cuda():
        return Machine()
    return Machine(gpus=nvidia_gpus(), cuda=True)


def run_container(arguments: Sequence[str], machine: Machine) -> int:
    """Train, or become the program that the arguments name; return the exit code.

    The reason of a failure is written to the platform's failure file.

    Raises:
        AllhandsError: an input is wrong, or the training cannot be started.
    """
    words = list(arguments)
    if words and not words[0].startswith("-") and words[0] != "train":
        _become(words)
    words = words[1:] if words[:1] == ["train"] else words
    if "--help" in words:
        parse_arguments(words)
        return 0
    # SageMaker's file, if even the platform cannot be recognised.
    output = below(machine.root, "/opt/ml/output")
    failure_file = output / "failure" if output.is_dir() else None
    # Linux ignores signals for which the first process of a container has no handler.
    before = signal.signal(signal.SIGTERM, _end)
    try:
        launch = machine.launch()
        failure_file = launch.failure_file
        with tempfile.TemporaryDirectory(prefix="allhands-") as scratch:
            code, reason = ContainerRun(machine, launch, Path(scratch)).run(words)
        if reason is not None:
            tell_failure(failure_file, f"allhands: error: {reason}", say)
        return code
    except Exception as error:
        text = f"allhands: error: {error}"
        if not isinstance(error, AllhandsError):
            last = traceback.extract_tb(error.__traceback__)[-1]
            text = f"a defect of allhands: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        tell_failure(failure_file, text, say)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _become(words: Sequence[str]) -> NoReturn:
    """Replace this process by another program, as images do.

    Raises:
        ConfigError: there is no such program.
    """
    if shutil.which(words[0]) is None:
        raise ConfigError(
            f"{words[0]!r} is not a program of this image",
            code="program-not-found",
            where="arguments",
            hint="give options of allhands train (they begin with --), or a program: allhands env",
        )
    os.execvp(words[0], list(words))


@dataclass
class ContainerRun:
    """One run of the image."""

    machine: Machine
    launch: LaunchPlace
    scratch: Path

    def __post_init__(self) -> None:
        launch = self.launch
        self.platform = launch.platform.name
        self.is_cloud = self.platform in _CLOUDS
        # This process stands for one computer of several, and must start the computer's ranks.
        self.is_share = (
            launch.size > 1 and launch.node == launch.rank and launch.num_nodes == launch.size
        )
        self.bucket: Path | None = (
            None  # the checkpoints' directory where directories cannot be renamed
        )
        if launch.paths.checkpoints and launch.paths.checkpoints.is_relative_to(
            below(self.machine.root, "/gcs")
        ):
            self.bucket = launch.paths.checkpoints
        self.place = _NAMES.get(self.platform, "container")
        if self.is_share:
            self.place += f", computer {launch.rank} of {launch.size}"

    def run(self, words: Sequence[str]) -> tuple[int, str | None]:
        """Train; return the exit code, and the reason of a failure or ``None``."""
        config = self.configure(words)
        flags, launch = as_flags(config), self.launch
        say(f"{self.place}: allhands train {shlex.join(flags)}")
        for note in launch.notes:
            say(f"note: {note}")
        if launch.size > 1 and not self.is_share:
            return work(config, launch), None  # a rank of another launcher
        run_dir, mirror = Path(config.adapter_path), None
        if self.bucket and run_dir == self.scratch / "run":
            mirror = Mirror(run_dir, self.bucket, say, logs_only=launch.rank > 0)
            mirror.restore()
            mirror.start()
        command, reason = [sys.executable, "-m", "allhands", "train", *flags], None
        try:
            if self.is_share:
                code, reason = self._train_share(config, command)
            elif (code := supervise_training(config, command)) not in (0, *_STOPPED):
                reason = reason_of(run_dir, code)
        finally:
            # The rest takes a short time, and the platform can still kill this process.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if mirror is not None:
                mirror.finish()
        if launch.rank == 0 and self.is_cloud:
            self._publish(config, code)
        return code, reason

    # --- options ----------------------------------------------------------------------------------

    def configure(self, words: Sequence[str]) -> TrainConfig:
        """Return the options of the training: the given ones, and defaults from the platform's
        inputs.

        Raises:
            AllhandsError: an option or an input cannot be used.
        """
        given = self._unbucketed(parse_arguments(words))
        directory = self.launch.paths.config
        hyper = (
            hyperparameters(self.machine.environ, directory / "hyperparameters.json")
            if directory
            else {}
        )
        asked = merged(given, self._unbucketed(hyper))
        for note in asked.notes:
            say(f"note: {note}")
        if self.is_share:
            self._check_share(asked)
        return build_config({**self._defaults(asked), **asked.model_dump(exclude_unset=True)})

    def _check_share(self, asked: TrainConfig) -> None:
        """Refuse options that need a supervisor of all computers.

        Raises:
            ConfigError: an option would have no effect.
        """
        total, backend = self.launch.size * self.launch.ranks_per_node, self.launch.backend
        ranks = (
            f"{self.place} has its {total} ranks already",
            "leave it out; ALLHANDS_RANKS_PER_NODE sets their number",
        )
        restart = "with several computers the platform restarts the job"
        again = (
            restart,
            "leave it out; a job that is started again goes on from its last checkpoint",
        )
        for where, refused, (text, hint) in (
            ("--hostfile", asked.hostfile, ranks),
            ("-n", asked.num_ranks not in (1, total), ranks),
            (
                "--backend",
                asked.backend not in ("auto", backend),
                (f"the back-end is {backend} here", "leave it out"),
            ),
            ("--max-restarts", asked.max_restarts, again),
            ("--min-ranks", asked.min_ranks, again),
        ):
            if refused:
                raise ConfigError(text, code="option-set-by-platform", where=where, hint=hint)

    def _unbucketed(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the values with paths of mounted files in place of Vertex AI's ``gs://``.

        Raises:
            ConfigError: a bucket is named on another platform.
        """
        for name in _PATHS:
            value = values.get(name)
            if isinstance(value, str) and value.startswith("gs://"):
                if self.platform != "vertex":
                    raise ConfigError(
                        f"{value} is not a path",
                        code="path-invalid",
                        where=f"--{name.replace('_', '-')}",
                        hint="buckets are mounted on Vertex AI only: give a path, or mount the bucket",
                    )
                values[name] = str(from_bucket(value, self.machine.root))
        return values

    def _defaults(self, asked: TrainConfig) -> dict[str, Any]:
        """Return the options that follow from the platform's inputs, except the given ones."""
        given, launch = asked.model_fields_set, self.launch
        values: dict[str, Any] = {"train": True, "resume": "auto"}
        if "data" not in given and (data := self._data()) is not None:
            values["data"] = str(data)
        if (
            "model" not in given
            and (model := model_of(launch.paths.data, self.scratch)) is not None
        ):
            values["model"] = str(model)
        if self.is_cloud:
            values["adapter_path"] = str(self._run_dir())
        if launch.grace_s is not None:
            values["stop_grace_s"] = max(
                _LEAST_STOP_S, launch.grace_s - min(_COPYING_S, launch.grace_s / 3)
            )
        if launch.size == 1:
            ranks = max(launch.ranks_per_node, self.machine.gpus)
            values |= {"max_restarts": RESTARTS} if asked.keep_last > 0 else {}
            values |= {"num_ranks": ranks} if ranks > 1 else {}
        return values

    def _run_dir(self) -> Path:
        launch = self.launch
        # The platform copies the checkpoint directories of all computers to one place: only the
        # first computer may use it.
        keeps = launch.rank == 0 and not self.bucket and launch.paths.checkpoints
        return keeps or self.scratch / "run"

    def _data(self) -> Path | None:
        data, notes = data_of(self.launch.paths.data, self.scratch)
        for note in notes:
            say(f"note: {note}")
        if data is None and self.is_cloud:
            raise ConfigError(
                "there is no training data",
                code="option-missing",
                where="--data",
                hint=f"give {_CLOUDS[self.platform]}, or data=demo for the shipped one",
            )
        return data

    # --- training ---------------------------------------------------------------------------------

    def _train_share(self, config: TrainConfig, command: list[str]) -> tuple[int, str | None]:
        """Train with this computer's ranks of a job on several computers."""
        launch, count, job = self.launch, self.launch.ranks_per_node, job_of(config)
        if launch.meeting is None:
            raise DistributedError(
                "the address at which the computers meet is not known",
                code="meeting-address-unknown",
                hint="see allhands env",
            )
        spec = LaunchSpec(
            command,
            launch.size * count,
            "nccl" if launch.backend == "nccl" else "ring",
            job.log_dir,
            cores_per_rank=job.cores_per_rank or max(1, allowed_cores() // count),
            start_deadline_s=job.start_deadline_s,
            stop_grace_s=job.stop_grace_s,
            hang_timeout_s=job.hang_timeout_s,
            weights=job.weights,
        )
        own = range(launch.rank * count, (launch.rank + 1) * count)
        code, reason = run_node(spec, own, launch.meeting, Patience(tell=say), say)
        if reason is not None:
            say(f"error: {reason}")
        return code, reason

    def _publish(self, config: TrainConfig, code: int) -> None:
        """Copy the results; on SageMaker also the model of a job that was stopped.

        Raises:
            StorageError: a file cannot be written.
        """
        run_dir, paths = Path(config.adapter_path), self.launch.paths
        if paths.output is not None:
            publish_records(run_dir, paths.output)
        wanted = code == 0 or (code in _STOPPED and self.platform == "sagemaker")
        if (
            paths.model is not None
            and config.train
            and wanted
            and publish_model(run_dir, paths.model)
            and code == 0
        ):
            say(f"the adapter is in {paths.model}")
