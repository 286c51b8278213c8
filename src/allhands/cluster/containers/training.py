"""One training in a container, from the platform's inputs to its results."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from allhands.cluster.containers.channels import data_of, model_of
from allhands.cluster.containers.options import hyperparameters, merged
from allhands.cluster.containers.results import Mirror, publish_model, publish_records, reason_of
from allhands.cluster.environment import recognise
from allhands.cluster.node import run_node
from allhands.cluster.place import LaunchPlace, below
from allhands.cluster.platforms.vertex import from_bucket
from allhands.cluster.ranks import LaunchSpec, fair_share
from allhands.config.schema import TrainConfig, build_config
from allhands.errors import ConfigError, DistributedError
from allhands.observe.journal import LOGS

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

    environ: Mapping[str, str] = field(default_factory=os.environ.copy)
    root: Path = Path("/")
    gpus: int = 0
    cuda: bool = False

    def launch(self) -> LaunchPlace:
        """Return the launch that the variables and files describe; by default each GPU has a rank.

        Raises:
            DistributedError: the variables and files are not understood.
        """
        env = dict(self.environ)
        counted = "SM_NUM_GPUS" in env or env.get("PET_NPROC_PER_NODE", "").isdigit()
        if self.gpus > 1 and not counted:
            env.setdefault("ALLHANDS_RANKS_PER_NODE", str(self.gpus))
        return recognise(env, has_cuda=self.cuda, root=self.root)


@dataclass(frozen=True)
class ContainerRun:
    """One run of the image.

    Attributes:
        machine: the machine that it runs on.
        launch: the launch that the machine describes.
        scratch: a directory that is removed after the run.
        tell: called with lines for the user.
    """

    machine: Machine
    launch: LaunchPlace
    scratch: Path
    tell: Callable[[str], None]

    @property
    def is_share(self) -> bool:
        """True if this process is one computer of several, and must start the computer's ranks."""
        launch = self.launch
        place = (launch.rank, launch.size)
        return launch.size > 1 and (launch.node, launch.num_nodes) == place

    @property
    def place(self) -> str:
        """The platform and, if there are several, the computer in words."""
        name = _NAMES.get(self.launch.platform.name, "container")
        computer = f", computer {self.launch.rank} of {self.launch.size}"
        return name + computer * self.is_share

    @property
    def _bucket(self) -> Path | None:
        """Return the checkpoints' directory if it is in a bucket, which cannot rename directories."""
        kept = self.launch.paths.checkpoints
        return kept if kept and kept.is_relative_to(below(self.machine.root, "/gcs")) else None

    @property
    def _run_dir(self) -> Path:
        # The platform copies the checkpoint directories of all computers to one place: only the
        # first computer may use it.
        keeps = self.launch.rank == 0 and not self._bucket and self.launch.paths.checkpoints
        return keeps or self.scratch / "run"

    # --- options ----------------------------------------------------------------------------------

    def configure(self, arguments: Mapping[str, Any]) -> TrainConfig:
        """Return the options of the training: the given ones, and defaults from the platform's
        inputs.

        Args:
            arguments: options of the command line, by the configuration's names.

        Raises:
            AllhandsError: an option or an input cannot be used.
        """
        given, directory = self._mounted(arguments), self.launch.paths.config
        hyper = (
            hyperparameters(self.machine.environ, directory / "hyperparameters.json")
            if directory
            else {}
        )
        asked = merged(given, self._mounted(hyper))
        for note in asked.notes:
            self.tell(f"note: {note}")
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
        again = (
            "with several computers the platform restarts the job",
            "leave it out; a job that is started again goes on from its last checkpoint",
        )
        other = asked.backend not in ("auto", backend)
        for where, refused, (text, hint) in (
            ("--hostfile", asked.hostfile, ranks),
            ("-n", asked.num_ranks not in (1, total), ranks),
            ("--backend", other, (f"the back-end is {backend} here", "leave it out")),
            ("--max-restarts", asked.max_restarts, again),
            ("--min-ranks", asked.min_ranks, again),
        ):
            if refused:
                raise ConfigError(text, code="option-set-by-platform", where=where, hint=hint)

    def _mounted(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values with paths of mounted files in place of Vertex AI's ``gs://``.

        Raises:
            ConfigError: a bucket is named on another platform.
        """
        paths = dict(values)
        for name in _PATHS:
            value = values.get(name)
            if isinstance(value, str) and value.startswith("gs://"):
                if self.launch.platform.name != "vertex":
                    raise ConfigError(
                        f"{value} is not a path",
                        code="path-invalid",
                        where=f"--{name.replace('_', '-')}",
                        hint="buckets are mounted on Vertex AI only: give a path, or mount the bucket",
                    )
                paths[name] = str(from_bucket(value, self.machine.root))
        return paths

    def _defaults(self, asked: TrainConfig) -> dict[str, Any]:
        """Return the options that follow from the platform's inputs; ``None`` for each that does
        not, or that is given.
        """
        given, launch, grace_s = asked.model_fields_set, self.launch, self.launch.grace_s
        paths = {
            "data": None if "data" in given else self._data(),
            "model": None if "model" in given else model_of(launch.paths.data, self.scratch),
            "adapter_path": self._run_dir if launch.platform.name in _CLOUDS else None,
        }
        values: dict[str, Any] = {name: path and str(path) for name, path in paths.items()}
        if grace_s is not None:
            values["stop_grace_s"] = max(_LEAST_STOP_S, grace_s - min(_COPYING_S, grace_s / 3))
        if launch.size == 1:
            ranks = max(launch.ranks_per_node, self.machine.gpus)
            values["num_ranks"] = ranks if ranks > 1 else None
            values["max_restarts"] = RESTARTS if asked.keep_last > 0 else None
        return {"train": True, "resume": "auto", **values}

    def _data(self) -> Path | None:
        data, notes = data_of(self.launch.paths.data, self.scratch)
        for note in notes:
            self.tell(f"note: {note}")
        if data is None and (way := _CLOUDS.get(self.launch.platform.name)):
            raise ConfigError(
                "there is no training data",
                code="option-missing",
                where="--data",
                hint=f"give {way}, or data=demo for the shipped one",
            )
        return data

    # --- training ---------------------------------------------------------------------------------

    def train(
        self, config: TrainConfig, command: list[str], supervise: Callable[[], int]
    ) -> tuple[int, str | None]:
        """Train, and copy the results; return the exit code, and the reason of a failure or
        ``None``.

        Args:
            command: the command of each rank.
            supervise: trains with all ranks of a job on one computer; returns the exit code.

        Raises:
            AllhandsError: the ranks cannot be started, or a result cannot be written.
        """
        run_dir, bucket, launch = Path(config.adapter_path), self._bucket, self.launch
        mirror, reason = None, None
        if bucket and run_dir == self.scratch / "run":
            mirror = Mirror(run_dir, bucket, self.tell, logs_only=launch.rank > 0)
            mirror.restore()
            mirror.start()
        try:
            if self.is_share:
                code, reason = self._train_share(config, command)
            elif (code := supervise()) not in (0, *_STOPPED):
                reason = reason_of(run_dir, code)
        finally:
            # The rest takes a short time, and the platform can still kill this process.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            if mirror is not None:
                mirror.finish()
        if launch.rank == 0:
            self._publish(config, code)
        return code, reason

    def _train_share(self, config: TrainConfig, command: Sequence[str]) -> tuple[int, str | None]:
        """Train with this computer's ranks of a job on several computers."""
        launch, count = self.launch, self.launch.ranks_per_node
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
            Path(config.adapter_path) / LOGS,
            cores_per_rank=config.cores_per_rank or fair_share(count),
            start_deadline_s=config.start_timeout_s,
            stop_grace_s=config.stop_grace_s,
            hang_timeout_s=config.hang_timeout_s,
            weights=tuple(config.given_weights or ()) or None,
        )
        own = range(launch.rank * count, (launch.rank + 1) * count)
        code, reason = run_node(spec, own, launch.meeting, self.tell)
        if reason is not None:
            self.tell(f"error: {reason}")
        return code, reason

    def _publish(self, config: TrainConfig, code: int) -> None:
        """Copy the results; on SageMaker also the model of a job that was stopped.

        Raises:
            StorageError: a file cannot be written.
        """
        run_dir, paths = Path(config.adapter_path), self.launch.paths
        if paths.output is not None:
            publish_records(run_dir, paths.output)
        wanted = code == 0 or (code in _STOPPED and self.launch.platform.name == "sagemaker")
        if paths.model is None or not config.train or not wanted:
            return
        if publish_model(run_dir, paths.model) and code == 0:
            self.tell(f"the adapter is in {paths.model}")
