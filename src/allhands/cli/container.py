"""``allhands container``: what the image runs, whoever has started it: SageMaker, Vertex AI, Kubernetes or a person.

The platform's inputs become options of ``allhands train``; the training is run, supervised, with a rank a GPU, on this
computer or as its part of several; what it made goes where the platform collects it.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, cast

import typer

from allhands.cli.container_inputs import as_flags, data_of, hyperparameters, merged, model_of, parse_arguments
from allhands.cli.container_results import Mirror, publish_model, publish_records, reason_of, tell_failure
from allhands.cli.notices import say
from allhands.cli.train import job_of, supervise_training, work
from allhands.cli.verbs_runs import Container
from allhands.cluster.environment import has_cuda, read_text, recognise
from allhands.cluster.node import NodeJob, run_node
from allhands.cluster.patience import Patience
from allhands.cluster.place import Launch, Paths
from allhands.cluster.platforms import from_bucket
from allhands.cluster.ranks import LaunchSpec
from allhands.config.schema import TrainConfig, build_config
from allhands.errors import AllhandsError, ConfigError, DistributedError
from allhands.runtime.blas import allowed_cores
from allhands.runtime.gpus import nvidia_gpus

RESTARTS = 3
# Of the time that a platform gives to end: for copying what was trained.
_LEAST_STOP_S = 5.0
_COPYING_S = 20.0
_CLOUDS = ("sagemaker", "vertex")
_BUCKETS = Path("/gcs")
_PATHS = ("model", "data", "adapter_path", "resume", "resume_adapter_file", "config")


@dataclass(frozen=True)
class Machine:
    """What the container is run on; tests have their own.

    Attributes:
        environ: the variables.
        root: what stands for ``/`` in the paths of platforms.
        gpus: how many GPUs MLX can compute on here.
        cuda: whether this MLX computes with CUDA.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    root: Path = Path("/")
    gpus: int = 0
    cuda: bool = False

    def under(self, path: Path) -> Path:
        """A platform's path here."""
        return self.root / path.relative_to("/") if path.is_absolute() else path

    def read(self, path: str) -> str | None:
        """The text of a platform's file; ``None`` if there is none."""
        return read_text(str(self.under(Path(path))))

    def launch(self) -> Launch:
        """Who has started this process; where nobody says how many ranks a computer gets, it is one a GPU."""
        env = dict(self.environ)
        said = "ALLHANDS_RANKS_PER_NODE" in env or "SM_NUM_GPUS" in env or env.get("PET_NPROC_PER_NODE", "").isdigit()
        if self.gpus > 1 and not said:
            env["ALLHANDS_RANKS_PER_NODE"] = str(self.gpus)
        found = recognise(env, has_cuda=self.cuda, read=self.read)
        paths, file = found.paths, found.failure_file
        rooted = Paths(
            {name: self.under(path) for name, path in paths.data.items()},
            *(None if path is None else self.under(path) for path in (paths.model, paths.checkpoints, paths.output)),
            config=None if paths.config is None else self.under(paths.config),
        )
        platform = replace(found.platform, paths=rooted, failure_file=None if file is None else self.under(file))
        return replace(found, platform=platform)


def container(asked: Container) -> None:
    """Run the verb."""
    raise typer.Exit(run_container(asked.arguments or [], here()))


def here() -> Machine:
    """This machine."""
    if not has_cuda():
        return Machine()

    return Machine(gpus=nvidia_gpus(), cuda=True)


def run_container(arguments: Sequence[str], machine: Machine) -> int:
    """Do what the platform, or a person, wants of the image; returns the exit code, which is not 0 after a failure.

    The reason of a failure is written to the platform's file for it.

    Raises:
        AllhandsError: something is wrong with the inputs, or the training cannot be started.
    """
    words = list(arguments)
    if words and not words[0].startswith("-") and words[0] != "train":
        _become(words)
    words = words[1:] if words[:1] == ["train"] else words
    if "--help" in words:
        parse_arguments(words)
        return 0
    failure_file: Path | None = _failure_file_unseen(machine)
    # As the first process of a container this one is not ended by a signal that it does not handle.
    before = signal.signal(signal.SIGTERM, _end)
    try:
        launch = machine.launch()
        failure_file = launch.failure_file
        with tempfile.TemporaryDirectory(prefix="allhands-") as scratch:
            code, reason = ContainerRun(machine, launch, Path(scratch)).run(words)
    except AllhandsError as error:
        tell_failure(failure_file, f"allhands: error: {error}", say)
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        text = f"a defect of allhands: {type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        tell_failure(failure_file, text, say)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)
    if reason is not None:
        tell_failure(failure_file, f"allhands: error: {reason}", say)
    return code


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)


def _failure_file_unseen(machine: Machine) -> Path | None:
    """Where SageMaker looks, for who cannot even find out that it is SageMaker."""
    place = machine.under(Path("/opt/ml/output"))
    return place / "failure" if place.is_dir() else None


def _become(words: Sequence[str]) -> NoReturn:
    """Run another program in place of this one, as images do.

    Raises:
        ConfigError: there is no such program.
    """
    if words[0] == "serve":
        hint = "load /opt/ml/model with mlx_lm, or with an image that serves models"
        raise ConfigError("this image trains; it does not serve models", where="serve", hint=hint)
    if shutil.which(words[0]) is None:
        hint = "give options of allhands train (they begin with --), or a program: allhands env"
        raise ConfigError(f"{words[0]!r} is not a program of this image", where="arguments", hint=hint)
    os.execvp(words[0], list(words))


@dataclass
class ContainerRun:
    """One run of the image."""

    machine: Machine
    launch: Launch
    scratch: Path

    @property
    def is_share(self) -> bool:
        """Whether this process stands for one computer of several, whose ranks are still to be started."""
        launch = self.launch
        return launch.size > 1 and launch.node == launch.rank and launch.num_nodes == launch.size

    def run(self, words: Sequence[str]) -> tuple[int, str | None]:
        """Train; the exit code, and the reason if it is that of a failure."""
        config = self.configure(words)
        say(f"{self._place()}: allhands train {shlex.join(as_flags(config))}")
        for note in self.launch.notes:
            say(f"note: {note}")
        if self.launch.size > 1 and not self.is_share:
            return work(config, self.launch), None  # a rank of somebody else's launcher
        mirror = self._mirror(config)
        if mirror is not None:
            mirror.restore()
            mirror.start()
        try:
            code, reason = self._train_share(config) if self.is_share else self._train(config)
        finally:
            # What follows is short, and the platform will end it if it must.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if mirror is not None:
                mirror.finish()
        if self._collects():
            self._publish(config, code)
        return code, reason

    def _place(self) -> str:
        name = {"sagemaker": "SageMaker", "vertex": "Vertex AI", "kubernetes": "Kubernetes"}
        parts = [name.get(self.launch.platform.name, "container")]
        if self.is_share:
            parts.append(f"computer {self.launch.rank} of {self.launch.size}")
        return ", ".join(parts)

    # --- options ----------------------------------------------------------------------------------

    def configure(self, words: Sequence[str]) -> TrainConfig:
        """The options of the training: a person's own, and for the rest what the platform's inputs mean.

        Raises:
            AllhandsError: an option or an input cannot be used.
        """
        given = {name: self._from_bucket(name, value) for name, value in parse_arguments(words).items()}
        asked = merged(given, {name: self._from_bucket(name, value) for name, value in self._hyperparameters().items()})
        for note in asked.notes:
            say(f"note: {note}")
        values = asked.model_dump(exclude_unset=True)
        if self.is_share:
            self._check_share(asked)
        for name, value in self._defaults(asked).items():
            values.setdefault(name, value)
        return build_config(values)

    def _check_share(self, asked: TrainConfig) -> None:
        """Refuse what only a supervisor of all computers could do.

        Raises:
            ConfigError: an option would have no effect.
        """
        total = self.launch.size * self.launch.ranks_per_node
        if asked.hostfile or asked.num_ranks not in (1, total):
            where = "--hostfile" if asked.hostfile else "-n"
            hint = "leave it out; ALLHANDS_RANKS_PER_NODE sets the ranks of a computer"
            raise ConfigError(f"{self._place()} has its {total} ranks already", where=where, hint=hint)
        if asked.backend not in ("auto", self.launch.backend):
            hint = f"leave it out: it is {self.launch.backend}"
            raise ConfigError("it cannot be chosen here", where=f"--backend {asked.backend}", hint=hint)
        if asked.max_restarts or asked.min_ranks:
            where = "--max-restarts" if asked.max_restarts else "--min-ranks"
            hint = "leave it out; a job that is started again goes on from its last checkpoint"
            raise ConfigError("with several computers it is the platform that restarts", where=where, hint=hint)

    def _hyperparameters(self) -> dict[str, Any]:
        if self.launch.platform.name != "sagemaker":
            return {}
        directory = self.launch.paths.config or self.machine.under(Path("/opt/ml/input/config"))
        return hyperparameters(self.machine.environ, directory / "hyperparameters.json")

    def _from_bucket(self, name: str, value: Any) -> Any:
        """On Vertex AI ``gs://`` is mounted as files."""
        if name in _PATHS and isinstance(value, str) and value.startswith("gs://"):
            if self.launch.platform.name != "vertex":
                hint = "buckets are mounted on Vertex AI only: give a path, or mount the bucket"
                raise ConfigError(f"{value} is not a path", where=f"--{name.replace('_', '-')}", hint=hint)
            return str(self.machine.under(cast(Path, from_bucket(value))))
        return value

    def _defaults(self, asked: TrainConfig) -> dict[str, Any]:
        """What is not given, by what the platform has prepared."""
        given, paths = asked.model_fields_set, self.launch.paths
        values: dict[str, Any] = {"train": True, "resume": "auto"}
        if "data" not in given:
            data, notes = data_of(paths.data, self.scratch)
            for note in notes:
                say(f"note: {note}")
            if data is not None:
                values["data"] = str(data)
            elif self.launch.platform.name in _CLOUDS:
                where = {"sagemaker": "a channel called train", "vertex": "--data=gs://BUCKET/FOLDER"}
                hint = f"give {where[self.launch.platform.name]}, or data=demo for the shipped one"
                raise ConfigError("there is no training data", where="--data", hint=hint)
        if "model" not in given and (model := model_of(paths.data, self.scratch)) is not None:
            values["model"] = str(model)
        if "adapter_path" not in given and (run_dir := self._run_dir()) is not None:
            values["adapter_path"] = str(run_dir)
        if self.launch.grace_s is not None:
            spare = min(_COPYING_S, self.launch.grace_s / 3)
            values["stop_grace_s"] = max(_LEAST_STOP_S, self.launch.grace_s - spare)
        if not self.is_share and self.launch.size == 1:
            values |= self._supervision(asked)
        return values

    def _supervision(self, asked: TrainConfig) -> dict[str, Any]:
        ranks = max(self.launch.ranks_per_node, self.machine.gpus, 1)
        restarts = {"max_restarts": RESTARTS} if asked.keep_last > 0 else {}
        return restarts | ({"num_ranks": ranks} if ranks > 1 else {})

    def _run_dir(self) -> Path | None:
        """Where the run writes: what outlives this machine, if it takes checkpoints as they are, and if rank 0 is here.

        Several computers whose checkpoint directories are copied to one place must not write the same names.
        """
        checkpoints = self.launch.paths.checkpoints
        if self.launch.platform.name not in _CLOUDS:
            return None
        keeps = checkpoints is not None and not self._is_bucket(checkpoints) and self._leads()
        return checkpoints if keeps else self.scratch / "run"

    def _leads(self) -> bool:
        return self.launch.rank == 0

    def _is_bucket(self, path: Path) -> bool:
        return path.is_relative_to(self.machine.under(_BUCKETS))

    # --- training ---------------------------------------------------------------------------------

    def _train(self, config: TrainConfig) -> tuple[int, str | None]:
        """All ranks on this computer, under the supervisor."""
        command = [sys.executable, "-m", "allhands", "train", *as_flags(config)]
        code = supervise_training(config, command)
        failed = code not in (0, 130, 143)
        return code, reason_of(Path(config.adapter_path), code) if failed else None

    def _train_share(self, config: TrainConfig) -> tuple[int, str | None]:
        """This computer's ranks of a job over several."""
        launch, count = self.launch, self.launch.ranks_per_node
        if launch.meeting is None:
            raise DistributedError("it is not known where the computers meet", hint="see allhands env")
        job = job_of(config)
        spec = LaunchSpec(
            [sys.executable, "-m", "allhands", "train", *as_flags(config)],
            launch.size * count,
            "nccl" if launch.backend == "nccl" else "ring",
            job.log_dir,
            cores_per_rank=job.cores_per_rank or max(1, allowed_cores() // count),
            start_deadline_s=job.start_deadline_s,
            stop_grace_s=job.stop_grace_s,
            hang_timeout_s=job.hang_timeout_s,
            weights=job.weights,
        )
        end = run_node(NodeJob(spec, launch.rank, count, launch.meeting, Patience(tell=say), say))
        if end.reason is not None:
            say(f"error: {end.reason}")
        return end.code, end.reason

    # --- results ----------------------------------------------------------------------------------

    def _mirror(self, config: TrainConfig) -> Mirror | None:
        checkpoints = self.launch.paths.checkpoints
        if checkpoints is None or not self._is_bucket(checkpoints) or not (self._leads() or self.is_share):
            return None
        if Path(config.adapter_path) != self.scratch / "run":
            return None  # a person's own choice
        return Mirror(Path(config.adapter_path), checkpoints, say, logs_only=not self._leads())

    def _collects(self) -> bool:
        return self._leads() and self.launch.platform.name in _CLOUDS

    def _publish(self, config: TrainConfig, code: int) -> None:
        """Hand over what was made. SageMaker keeps the model of a job that was stopped, too.

        Raises:
            StorageError: it cannot be written.
        """
        run_dir, paths = Path(config.adapter_path), self.launch.paths
        steps: list[Callable[[], object]] = []
        if paths.output is not None:
            steps.append(partial(publish_records, run_dir, paths.output))
        stopped = code in (130, 143) and self.launch.platform.name == "sagemaker"
        if paths.model is not None and config.train and (code == 0 or stopped):
            steps.append(partial(publish_model, run_dir, paths.model))
        for step in steps:
            step()
        if paths.model is not None and code == 0 and config.train:
            say(f"the adapter is in {paths.model}")
