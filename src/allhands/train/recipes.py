"""Assemble a fine-tuning run: data, model, group, loader, step and loop. The only place that knows them all."""

from __future__ import annotations

import hashlib
import importlib.metadata
import math
import platform
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from rich.console import Console

from allhands.accelerator import Accelerator, detect
from allhands.config import TrainConfig
from allhands.data.loader import Loader, MicroBatch
from allhands.data.order import GlobalOrder
from allhands.data.prefetch import Prefetcher
from allhands.data.tokens import Windows
from allhands.distributed.agree import agree
from allhands.distributed.backend import Alone, Communicator
from allhands.distributed.mesh import Mesh
from allhands.distributed.reduce import barrier
from allhands.errors import AllhandsError, ConfigError, Interrupted, ModelError, NumericsError
from allhands.evaluate import Evaluator
from allhands.files import claimed, make_directory
from allhands.formatting import format_count
from allhands.metrics import (
    METRICS_FILE,
    ConsoleSink,
    JsonlSink,
    RunEnded,
    RunStarted,
    Sink,
    Sinks,
    read_metrics,
)
from allhands.model.adapters import (
    Trainable,
    adapter_config,
    as_written,
    load_trained,
    make_trainable,
    save_adapter_config,
    save_adapters,
    trained_weights,
)
from allhands.model.checkpointing import checkpoint_layers
from allhands.model.documents import require_isolation
from allhands.model.load import LoadedModel, load_model, load_tokenizer, require_in_vocabulary
from allhands.model.quantized import prepare_quantized
from allhands.reporting import require_trackers, start_trackers, tracker_names
from allhands.train.callbacks import Callback
from allhands.train.datasets import Datasets, Progress, find_splits, open_data
from allhands.train.explain import choices
from allhands.train.loop import LoopParts, LoopState, SaveKind, train_loop
from allhands.train.optim import make_optimizer
from allhands.train.step import TrainStep
from allhands.trees import number

BEST_DIRECTORY = "best"
# Compiling costs 10 to 40 s at the start on a GPU and saves about a sixth of each step.
COMPILE_FROM_BATCHES = 400
TELL_EVERY_S = 5.0
BUSY_EVERY_S = 1.0


@dataclass(frozen=True)
class Surroundings:
    """What the recipe is given from outside: who the other ranks are, where text goes, who may stop it.

    Attributes:
        connect: joins the group; called after data and model are known to be good.
        started: called once when this rank is ready to train.
        busy: called now and then, by another thread, while the data are fetched and tokenised.
        stop_requested: the signal that asked this process to stop, or 0.
        console: for rank 0's progress; ``None`` for silence.
        cores_per_rank: processor cores of each local process, if limited.
        claims_directory: whether rank 0 keeps other runs off the adapter path; a supervisor does it for its ranks.
        log_file: where this rank's own lines go besides the console.
    """

    mesh: Mesh = field(default_factory=Mesh)
    connect: Callable[[], Communicator] = Alone
    started: Callable[[], None] = lambda: None
    busy: Callable[[], None] = lambda: None
    stop_requested: Callable[[], int] = lambda: 0
    console: Console | None = None
    cores_per_rank: int | None = None
    claims_directory: bool = True
    log_file: Path | None = None


@dataclass(frozen=True)
class FinetuneResult:
    """Outcome of :func:`finetune`.

    Attributes:
        adapter_path: directory with the adapter, metrics and plot.
        ended: how it ended, with the best validation loss and the test loss if asked for.
        plot: path of the loss curves; ``None`` on ranks other than 0 or without training.
    """

    adapter_path: Path
    ended: RunEnded
    plot: Path | None


def run_finetune(config: TrainConfig, surroundings: Surroundings, callbacks: Sequence[Callback] = ()) -> FinetuneResult:
    """Train and test as ``config`` says, in this process, as one rank of ``surroundings.mesh``.

    Raises:
        AllhandsError: one of its classes for every kind of wrong input or failure.
    """
    if not (config.train or config.test):
        raise ConfigError("nothing to do", hint="add --train, --test or both")
    directory = Path(config.adapter_path)
    start = _starting_weights(config, directory)
    if surroundings.mesh.is_main:
        require_trackers(tracker_names(config.report_to))
    with ExitStack() as stack:
        if config.train and surroundings.mesh.is_main and surroundings.claims_directory:
            stack.enter_context(claimed(directory))
        return _prepare(config, surroundings, callbacks, directory, start).execute()


def _prepare(
    config: TrainConfig,
    surroundings: Surroundings,
    callbacks: Sequence[Callback],
    directory: Path,
    start: Path | None,
) -> _Run:
    """Load model and data, join the group and agree."""
    if start is not None and not config.train:
        config = as_written(config, start.parent)
    mesh = surroundings.mesh
    accelerator = detect()
    # The data first, because mistakes in them are frequent and a model takes long to load.
    with _busy(surroundings):
        sources = find_splits(config)
        tokenizer = load_tokenizer(config.model, trust_remote_code=config.trust_remote_code)
        data = open_data(config, sources, tokenizer, _tell_progress(surroundings), leads=mesh.local_rank == 0)
    loaded = load_model(str(tokenizer.path), trust_remote_code=config.trust_remote_code, tokenizer=tokenizer.tokenizer)
    require_in_vocabulary(loaded, data.largest_token)
    model: Any = loaded.model
    mx.random.seed(config.seed)
    trainable = make_trainable(model, config)
    prepare_quantized(model, accelerator, compact=True)
    if start is not None:
        load_trained(model, start)
    if config.grad_checkpoint:
        checkpoint_layers(model.layers)
    if config.isolate_documents:
        require_isolation(model, loaded.config["model_type"])
    communicator = surroundings.connect()
    if communicator.size > 1:
        agree(communicator, run_facts(config, loaded, data, start))
    surroundings.started()
    return _Run(config, mesh, accelerator, communicator, data, loaded, trainable, directory, surroundings, callbacks)


@contextmanager
def _busy(surroundings: Surroundings) -> Generator[None]:
    """Keep the supervisor patient: to fetch, hash and tokenise much data takes longer than a start should."""
    done = threading.Event()

    def beat() -> None:
        while not done.wait(BUSY_EVERY_S):
            surroundings.busy()

    thread = threading.Thread(target=beat, name="allhands-busy", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _tell_progress(surroundings: Surroundings) -> Progress:
    """Keep a person informed, from time to time."""
    told = time.monotonic()

    def tell(split: str, records: int, tokens: int) -> None:
        nonlocal told
        if surroundings.console is not None and time.monotonic() > told + TELL_EVERY_S:
            told = time.monotonic()
            line = f"tokenising {split}: {records} records, {format_count(tokens)} tokens so far"
            surroundings.console.print(line, highlight=False, markup=False)

    return tell


@dataclass(frozen=True)
class _Run:
    """One rank's run, everything loaded and agreed."""

    config: TrainConfig
    mesh: Mesh
    accelerator: Accelerator
    communicator: Communicator
    data: Datasets
    loaded: LoadedModel
    trainable: Trainable
    directory: Path
    surroundings: Surroundings
    callbacks: Sequence[Callback]

    def execute(self) -> FinetuneResult:
        try:
            return self._execute()
        except (Interrupted, NumericsError):
            # Raised on all ranks. The curves show what happened; a second failure must not hide the first.
            with suppress(AllhandsError):
                self._plot()
            barrier(self.communicator)
            raise

    def _execute(self) -> FinetuneResult:
        with self._sinks() as sink:
            ended = self._train(sink) if self.config.train else RunEnded(0, "finished", 0.0)
            try:
                if self.config.test:
                    ended = replace(ended, test_loss=self._test())
            finally:
                sink.emit(ended)
        return FinetuneResult(self.directory, ended, self._plot())

    def _plot(self) -> Path | None:
        if not (self.mesh.is_main and self.config.train):
            return None
        from allhands.plots import plot_losses  # matplotlib, in memory only now

        return plot_losses([read_metrics(self.directory)], self.directory / "loss.png")

    def _train(self, sink: Sink) -> RunEnded:
        config, windows = self.config, self.data.train
        assert windows is not None
        order = GlobalOrder(windows.work, config.batch_size, config.seed)
        total = config.iters or (_batches(config.epochs, order.batches_per_epoch) if config.epochs else 1000)
        optimizer = make_optimizer(config, math.ceil(total / config.grad_accumulation_steps))
        state = LoopState()
        compiled = config.compile == "on" or (config.compile == "auto" and total >= COMPILE_FROM_BATCHES)
        sizing = self.accelerator.sizing(config.micro_batch_tokens, compiled=compiled).fitted(windows.work)
        # Loading leaves evaluation mode, in which some architectures use kernels without a gradient.
        self.loaded.model.train()
        step = TrainStep(
            self.loaded.model,
            optimizer,
            self.communicator,
            eager=self.accelerator.eager and config.compile != "on",
            compiled=compiled,
            max_grad_norm=config.max_grad_norm,
            bucket_bytes=int(config.bucket_mb * 1e6),
            after_backward=self._after_backward(state) if self.callbacks else None,
        )
        sink.emit(self._started(total))
        if config.log_level == "verbose":
            self._say(
                [
                    f"tokens of {n}: {'made now' if s.built else 'found'} in {s.path}"
                    for n, s in self.data.stored.items()
                ]
            )
            self._say(
                choices(config, self.loaded.model, self.accelerator, self.communicator, sizing, compiled=compiled)
            )
        loader = Loader(windows, order, sizing, self.mesh.rank, self.mesh.weights)
        with Prefetcher(loader.load, end=total) as prefetcher:
            ended = train_loop(self._parts(step, order, prefetcher.get, sink, optimizer, total), state)
        if config.log_level == "verbose":
            kind = "compiled" if compiled and not step.eager else "computed, none of them compiled"
            self._say([f"shapes of micro-batches: {len(step.shapes)} {kind}"])
        return ended

    def _parts(
        self,
        step: TrainStep,
        order: GlobalOrder,
        load: Callable[[int], list[MicroBatch]],
        sink: Sink,
        optimizer: Any,
        total: int,
    ) -> LoopParts:
        config = self.config
        return LoopParts(
            config=config,
            order=order,
            load=load,
            step=step,
            evaluator=self._evaluator(self.data.valid, config.val_batches),
            communicator=self.communicator,
            accelerator=self.accelerator,
            sink=sink,
            callbacks=self.callbacks,
            save=self._save,
            stop_requested=self.surroundings.stop_requested,
            learning_rate=lambda: number(optimizer.learning_rate),
            total=total,
        )

    def _after_backward(self, state: LoopState) -> Callable[[Any], None]:
        def call(gradients: Any) -> None:
            for callback in self.callbacks:
                callback.after_backward(state.iteration, gradients)

        return call

    def _evaluator(self, windows: Windows | None, num_batches: int) -> Evaluator | None:
        if windows is None or num_batches == 0:
            return None
        return Evaluator(
            self.loaded.model,
            windows,
            self.communicator,
            self.mesh,
            self.accelerator.sizing(self.config.micro_batch_tokens, compiled=False),
            batch_size=self.config.batch_size,
            num_batches=num_batches,
            eager=self.accelerator.eager,
            stop_requested=self.surroundings.stop_requested,
        )

    def _test(self) -> float:
        evaluator = self._evaluator(self.data.test, self.config.test_batches)
        assert evaluator is not None
        return evaluator()[0]

    def _save(self, iteration: int, kind: SaveKind) -> Path:
        """Write the trained weights; mlx_lm reads the directory, and ``best`` within it, as they are.

        The configuration is written with them, not before: until then what lies there may be another run's.
        """
        weights = trained_weights(self.loaded.model)
        place = make_directory(self.directory / BEST_DIRECTORY) if kind == "best" else self.directory
        if kind != "best":
            numbered = place / f"{iteration:07d}_adapters.safetensors"
            save_adapters(weights, numbered)
            if kind == "suspect":
                return numbered
        save_adapter_config(adapter_config(self.config, self.trainable.num_layers, str(self.loaded.path)), place)
        save_adapters(weights, place / "adapters.safetensors")
        return place / "adapters.safetensors"

    def _started(self, total: int) -> RunStarted:
        config, windows = self.config, self.data.train
        return RunStarted(
            name=self.directory.name,
            model=config.model,
            method=config.fine_tune_type,
            num_ranks=self.mesh.size,
            backend=self.communicator.backend,
            batch_size=config.batch_size,
            total_steps=total,
            trainable_params=self.trainable.parameters,
            total_params=self.trainable.total_parameters,
            num_train_examples=len(windows) if windows else 0,
            cores_per_rank=self.surroundings.cores_per_rank,
            versions=versions(),
            time=time.time(),
        )

    @contextmanager
    def _sinks(self) -> Generator[Sinks, None, None]:
        """Rank 0 writes metrics and shows progress; every rank keeps a log of its own lines."""
        notes = [f"note: {note}" for note in (self.accelerator.warning, *self.data.notes) if note]
        sinks: list[Sink] = []
        with ExitStack() as stack:
            if self.surroundings.log_file is not None:
                make_directory(self.surroundings.log_file.parent)
                log = stack.enter_context(self.surroundings.log_file.open("a", encoding="utf-8"))
                print(*notes, sep="\n", end="\n" if notes else "", file=log)
                sinks.append(ConsoleSink(Console(file=log, width=200), is_terminal=False))
            if self.mesh.is_main and self.config.train:
                sinks.append(JsonlSink(_fresh(self.directory / METRICS_FILE)))
                # This run may never write one of its own.
                _fresh(self.directory / BEST_DIRECTORY)
                names, values = tracker_names(self.config.report_to), self.config.shared_values()
                sinks += start_trackers(names, self.config.project_name, self.directory, values)
            self._say(notes)
            if self.surroundings.console is not None:
                sinks.append(ConsoleSink(self.surroundings.console))
            yield stack.enter_context(Sinks(sinks))

    def _say(self, lines: Sequence[str]) -> None:
        """Print ``lines`` where this rank has a console."""
        if self.surroundings.console is not None:
            for line in lines:
                self.surroundings.console.print(line, highlight=False, markup=False, soft_wrap=True)


def _batches(epochs: float, batches_per_epoch: int) -> int:
    """Batches of so many passes; a part of one counts whole, but not what multiplication rounds up."""
    return math.ceil(round(epochs * batches_per_epoch, 6))


def _fresh(path: Path) -> Path:
    """Make way for a new run's file or directory; an earlier run's is kept beside it under a number."""
    if path.exists():
        number = 1
        while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
            number += 1
        path.rename(kept)
    return path


def _starting_weights(config: TrainConfig, directory: Path) -> Path | None:
    """The file with the weights to start from or to test, which exists; looked for before anything is loaded."""
    if config.resume_adapter_file:
        resumed = Path(config.resume_adapter_file)
        if not resumed.is_file():
            problem = "this is a directory, not a file of weights" if resumed.is_dir() else "there is no such file"
            hint = "give the adapters.safetensors, or a numbered one, of an earlier run"
            raise ModelError(f"{problem} (--resume-adapter-file)", where=str(resumed), hint=hint)
        return resumed
    if config.test and not config.train:
        saved = directory / "adapters.safetensors"
        if not saved.exists():
            raise ConfigError(
                f"there is no adapter to test in {directory}",
                where="--adapter-path",
                hint="train first (--train), or name the directory of an earlier run",
            )
        return saved
    return None


def run_facts(config: TrainConfig, loaded: LoadedModel, data: Datasets, start: Path | None) -> dict[str, Any]:
    """What every rank must have in common, as JSON values.

    Weights are compared as files, because ranks on other devices may hold them in other types.
    """
    arrays = {name: [list(a.shape), str(a.dtype)] for name, a in trained_weights(loaded.model).items()}
    return {
        "config": config.shared_values(),
        "parameters": arrays,
        "data": data.fingerprints(),
        "model": {"weights": loaded.fingerprint},
        "resume_adapter_file": {"weights": _sha256(start) if start else None},
        "versions": {k: v for k, v in versions().items() if k != "platform"},
    }


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def versions() -> dict[str, str]:
    """Versions of what determines a run's numbers."""
    found = {name: importlib.metadata.version(name) for name in ("allhands", "mlx", "mlx-lm", "numpy")}
    return {**found, "python": platform.python_version(), "platform": platform.platform()}
