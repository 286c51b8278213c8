"""Preparation of a rank for its first step: data, model, group, agreement and checkpoint."""

from __future__ import annotations

import os
import platform
import threading
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
import psutil

from allhands.checkpoints import Checkpoint
from allhands.checkpoints.resuming import (
    Restored,
    date_of,
    find_checkpoint,
    keeps_files,
    receive,
)
from allhands.checkpoints.settings import check_contents, check_settings, check_versions
from allhands.config.pretrain_schema import pretraining
from allhands.config.schema import TrainConfig
from allhands.data.pieces import Pieces
from allhands.distributed.agree import agree
from allhands.distributed.backend import Communicator
from allhands.distributed.handout import hand_out_json
from allhands.distributed.hierarchy import first_ranks
from allhands.distributed.mesh import Mesh
from allhands.errors import ConfigError
from allhands.kernels.documents import require_isolation
from allhands.kernels.known import can_be_compiled, is_compiled
from allhands.kernels.selection import KernelSelection
from allhands.model.adapters import (
    Trainable,
    as_written,
    dated_as,
    load_trained,
    make_trainable,
    unfit,
    untrained,
)
from allhands.model.dropout import DropoutKeys, dropout_keys_of
from allhands.model.fresh import fitted, new_model
from allhands.model.load import (
    LoadedModel,
    LoadedTokenizer,
    load_bare_tokenizer,
    load_model,
    load_tokenizer,
    read_weights,
    require_in_vocabulary,
)
from allhands.model.passes import Applied, PassContext, apply_passes
from allhands.model.quantized import is_quantized
from allhands.model.stages import Stage
from allhands.model.weight_files import require_files
from allhands.parallel.experts import Experts, let_experts_compute
from allhands.parallel.matrices import Matrices, compute_together
from allhands.parallel.sharding import Sharding
from allhands.run.choosing import chosen_by_memory, may_choose, reads_later
from allhands.run.context import RunContext
from allhands.run.contexts import check_context
from allhands.run.datasets import Datasets, chat_of, find_splits, open_data, tell_progress
from allhands.run.dividing import DividedModel, split_agreed, stages_of
from allhands.run.expecting import (
    Device,
    packed_note,
    require_room_for_shape,
    require_room_for_weights,
    roomy_form_fits,
)
from allhands.run.facts import RankFacts
from allhands.run.gradient_check import start_check
from allhands.run.kernel_forms import KernelForms, kernel_forms
from allhands.run.padding import padding_told
from allhands.run.piping import (
    divided,
    divides,
    experts_divided,
    has_parts,
    parts_by_memory,
    piped,
    put_back,
    require_pipelines,
    sharded,
)
from allhands.run.unlearned import unlearned
from allhands.runtime.accelerator import Accelerator, detect, nothing_computed
from allhands.runtime.jit_cache import (
    FREED_AFTER,
    FREED_AT_ONCE,
    FREED_OFTEN,
    launch_directly,
    launches_directly,
    prepare_process,
)
from allhands.runtime.versions import versions_of

BUSY_EVERY_S = 1.0


@dataclass(frozen=True)
class LoadedRun:
    """One rank, after everything is loaded and agreed.

    Attributes:
        config: the configuration; if an adapter is only tested, with that adapter's settings.
        restored: the checkpoint to go on from, its weights already in the model.
        keeps_files: True if this rank writes the run's files.
        notes: notes for the user.
        run_id: the same on all ranks.
        kernels: chosen forms of operations, with the reasons.
        passes: outcome of each substitution of modules.
        stages: this rank's stages of the model; empty if it has the whole model.
        split: blocks of each stage of all ranks; empty without stages.
        sharding: this rank's part of every array; ``None``: it has whole arrays.
        matrices: this rank's part of the blocks' matrices; ``None``: it has whole matrices.
        experts: this rank's part of the experts; ``None``: it has all experts.
    """

    config: TrainConfig
    accelerator: Accelerator
    communicator: Communicator
    data: Datasets
    loaded: LoadedModel
    trainable: Trainable
    dropout: DropoutKeys | None
    restored: Restored | None
    keeps_files: bool
    notes: tuple[str, ...]
    run_id: str
    kernels: KernelForms
    passes: tuple[Applied, ...] = ()
    stages: tuple[Stage, ...] = ()
    split: tuple[int, ...] = ()
    sharding: Sharding | None = None
    matrices: Matrices | None = None
    experts: Experts | None = None

    @property
    def divided(self) -> bool:
        """True if this rank has only a part of the model."""
        return bool(self.stages) or any((self.sharding, self.matrices, self.experts))

    def described(self) -> tuple[int, str, datetime | None, tuple[str, ...]]:
        """Return the facts that an adapter records beside the options: number of trained blocks,
        model, date in its data, tokens that end answers.
        """
        return (
            self.trainable.num_layers,
            str(self.loaded.path),
            self.data.dated,
            self.data.stop_tokens,
        )


class _Opened(NamedTuple):
    """The files of one rank, opened before it meets the others.

    Attributes:
        config: the configuration, completed by the tokenizer for a new model.
        checkpoint: the checkpoint to resume from, on rank 0.
        made_data: makes ``data`` again with another ``moment``.
        notes: notes for the user.
    """

    config: TrainConfig
    checkpoint: Checkpoint | None
    made_data: Callable[..., Datasets]
    data: Datasets
    loaded: LoadedModel
    notes: list[str]


def prepare(
    config: TrainConfig,
    surroundings: RunContext,
    directory: Path,
    start: Path | None,
    *,
    hooked: bool = False,
) -> LoadedRun:
    """Load data and model, agree with the other ranks, and put a checkpoint back; all call this.

    ``start`` is the file of weights to start from or to test, if there is one. ``hooked`` is true
    if a callback reads whole gradients.

    Raises:
        AllhandsError: an input is wrong, ranks do not agree, or the training does not fit.
    """
    prepare_process()
    mesh, notes = surroundings.mesh, list(config.notes)
    config, tested = _tested(config, start)
    notes += _launching(config, mesh)
    accelerator = detect()
    kernels = kernel_forms(accelerator, cpu_native=accelerator.runs_natively(config.compile))
    opened = _opened(config, surroundings, directory, tested, accelerator)
    config, checkpoint, data, loaded = opened.config, opened.checkpoint, opened.data, opened.loaded
    require_in_vocabulary(loaded, data.largest_token)
    model: Any = loaded.model
    mx.random.seed(config.seed)
    trainable = _made_trainable(model, config, start)
    notes += opened.notes + _notes(loaded, data, config, trainable)
    check_context(model, mesh)
    early = has_parts(config, mesh) or may_choose(config, mesh, loaded)
    if early:
        _start_from(start, model, config)
    notes += _checkpoint_notes(checkpoint, opened)
    facts = RankFacts(config, loaded, data, start, equal=() if divides(config) else None)
    communicator, stages, split = None, tuple[Stage, ...](), tuple[int, ...]()
    if early:
        # All ranks decide about the division together, before the model is read or divided.
        communicator, data = _met(facts, surroundings, opened.made_data)
        facts, told = chosen_by_memory(
            replace(facts, data=data), mesh, accelerator, communicator, hooked=hooked
        )
        config, mesh = facts.config, piped(facts.config, mesh)
        surroundings = replace(surroundings, mesh=mesh)
        stages, split, cut = _cut(facts, mesh, accelerator, communicator, checkpoint)
        notes += told + cut
    with _busy(surroundings):
        matrices = divided(model, communicator, mesh, whole_experts=config.ep > 1)
        experts = experts_divided(model, communicator, mesh)
        if mesh.parts == 1:
            read_weights(model)
        context, applied = _passes_checked(
            config, loaded, accelerator, kernels, data, surroundings, notes, stages
        )
    if not early:
        _start_from(start, model, config)
    compute_together(matrices)
    let_experts_compute(experts)
    if checkpoint is not None:
        kernels = kernels.check_resumed(checkpoint.state)
    if communicator is None:
        communicator, data = _met(facts, surroundings, opened.made_data)
    kernels = kernels.agreed(communicator)
    applied += apply_passes(model, context, "agreed")
    with _busy(surroundings):
        shares, told = parts_by_memory(communicator, mesh, Device(accelerator, mesh, 0).room)
        sharding = sharded(config, model, communicator, mesh, stages, shares, experts)
    notes += told + _ordered(communicator, mesh)
    run_id: str = hand_out_json(communicator, surroundings.run_id)
    received = receive(communicator, checkpoint, directory, partial(_busy, surroundings))
    restored = put_back(
        received, model, sharding, (matrices, experts), surroundings.busy, in_stages=divides(config)
    )
    keeps = config.train and keeps_files(communicator, mesh, directory, config.checkpoint_copies)
    surroundings.beat("start", restored.step if restored else 0)
    surroundings.started()
    opened_here = config, accelerator, communicator, data, loaded, trainable
    agreed = dropout_keys_of(model), restored, keeps, (*notes, *kernels.notes), run_id
    divisions = stages, split, sharding, matrices, experts
    return LoadedRun(*opened_here, *agreed, kernels, applied, *divisions)


def _checkpoint_notes(checkpoint: Checkpoint | None, opened: _Opened) -> list[str]:
    """Return notes on differences from the checkpoint that the run resumes from."""
    if checkpoint is None:
        return []
    config, loaded, data = opened.config, opened.loaded, opened.data
    notes = check_contents(
        checkpoint, config, loaded.is_recorded, data.fingerprints(), data.template
    )
    return notes + check_versions(checkpoint, versions())


def _tested(config: TrainConfig, start: Path | None) -> tuple[TrainConfig, Path | None]:
    """Return the configuration and the directory of an adapter that is only tested.

    The configuration then has the adapter's settings. In a training it is unchanged, and the
    directory is ``None``.
    """
    directory = start.parent if start is not None and not config.train else None
    return (config if directory is None else as_written(config, directory)), directory


def _opened(
    config: TrainConfig,
    surroundings: RunContext,
    directory: Path,
    tested: Path | None,
    accelerator: Accelerator,
) -> _Opened:
    mesh, fresh, tokenizer = surroundings.mesh, pretraining(config), None
    chat, trust = chat_of(config, tested), config.trust_remote_code
    # The data first, because mistakes in them are frequent and a model takes long to load.
    with _busy(surroundings):
        if fresh is not None:
            tokenizer = load_bare_tokenizer(fresh.tokenizer, trust_remote_code=trust, chat=chat)
            config = fresh = fitted(fresh, tokenizer)
        checkpoint, notes = _checkpoint_of(config, surroundings, directory)
        sources = find_splits(config)
        tokenizer = tokenizer or load_tokenizer(config.model, trust_remote_code=trust, chat=chat)
        progress = tell_progress(surroundings.say)
        made_data = partial(
            open_data, config, sources, tokenizer, progress, leads=mesh.local_rank == 0
        )
        data = made_data(moment=_moment(surroundings, tested, checkpoint))
        if fresh is not None:
            require_room_for_shape(fresh, tokenizer, accelerator, mesh)
            loaded = new_model(fresh, tokenizer, accelerator)
        else:
            compared = checkpoint is not None or mesh.size > 1 or surroundings.attest is not None
            loaded = _loaded(config, tokenizer, accelerator, mesh, compared=compared)
    return _Opened(
        config, checkpoint, made_data, data, loaded, notes + _date_told(data, surroundings)
    )


def _notes(
    loaded: LoadedModel, data: Datasets, config: TrainConfig, trainable: Trainable
) -> list[str]:
    """Return notes on options of model and data without an effect."""
    notes = [
        f"no layer is called {key}: this adapter key has no effect" for key in trainable.unmatched
    ]
    notes += unlearned(loaded.model, loaded.tokenizer, data, config) if config.train else []
    return notes + padding_told(loaded.model, data)


def _start_from(start: Path | None, model: Any, config: TrainConfig) -> None:
    if start is not None:
        load_trained(model, start, new=pretraining(config) is not None, tested=not config.train)


def _cut(
    facts: RankFacts,
    mesh: Mesh,
    accelerator: Accelerator,
    communicator: Communicator,
    checkpoint: Checkpoint | None,
) -> tuple[tuple[Stage, ...], tuple[int, ...], list[str]]:
    """Divide the model; return this rank's stages, the number of blocks of all stages, and notes.

    Both are empty without a pipeline.
    """
    config, loaded, trained = facts.config, facts.loaded, facts.data.train
    if not divides(config):
        return (), (), []
    require_pipelines(config, mesh, communicator, accelerator)
    work = trained.work if config.train and trained is not None else None
    divided = DividedModel(loaded.model, loaded.config, work)
    recorded = None if checkpoint is None else checkpoint.state
    split, told = split_agreed(config, divided, mesh, accelerator, communicator, recorded)
    stages = stages_of(loaded.model, split, mesh)
    require_files(loaded.path, [stage.blocks for stage in stages])
    return stages, split, told


def _checkpoint_of(
    config: TrainConfig, surroundings: RunContext, directory: Path
) -> tuple[Checkpoint | None, list[str]]:
    """Return the checkpoint to resume from, and notes for the user; nothing on other ranks than
    0.
    """
    if not (surroundings.mesh.is_main and config.train):
        return None, []
    checkpoint, notes = find_checkpoint(
        config, directory, surroundings.run_id, surroundings.attempt
    )
    return checkpoint, notes + ([] if checkpoint is None else check_settings(checkpoint, config))


def _date_told(data: Datasets, surroundings: RunContext) -> list[str]:
    """Return a note if the chat template's date is not that of this start."""
    if data.dated is None or data.dated.date() == surroundings.moment.date():
        return []
    return [
        f"the chat template writes the current date; the run keeps its first date, {data.dated:%d %b %Y}"
    ]


def _met(
    facts: RankFacts, surroundings: RunContext, made_data: Callable[..., Datasets]
) -> tuple[Communicator, Datasets]:
    """Return the group of all ranks, and the data with rank 0's date, after all ranks have agreed.

    Ranks may have started on different days, or be in different time zones.

    Raises:
        MisfitError: ranks do not agree.
    """
    communicator, mesh = surroundings.connect(), surroundings.mesh
    if communicator.size > 1:
        own = None if facts.data.dated is None else facts.data.dated.isoformat()
        told: str | None = hand_out_json(communicator, own)
        if own is not None and told not in (None, own):
            with _busy(surroundings):
                facts = replace(facts, data=made_data(moment=datetime.fromisoformat(told)))
        witness = facts.witness(surroundings.computer, mesh, surroundings.given)

        def read_again(sections: set[str]) -> Mapping[str, Any]:
            with _busy(surroundings):
                return witness.details(sections)

        agree(communicator, facts.values(), replace(witness, details=read_again))
    if surroundings.attest is not None and (mesh.is_main or surroundings.trial):
        with _busy(surroundings):
            attested = facts.attested()
        surroundings.attest(attested)
    return communicator, facts.data


def _ordered(communicator: Communicator, mesh: Mesh) -> list[str]:
    """Return a note if ranks with neighbouring numbers are on different computers needlessly."""
    if communicator.size == 1 or first_ranks(communicator, mesh.local_rank, mesh.local_size):
        return []
    return [
        "the ranks of a computer are not numbered one after the other, so more data than needed "
        "crosses the network: start all ranks of a computer before those of the next one, as "
        "mpirun --map-by slot and srun --distribution=block do"
    ]


def _loaded(
    config: TrainConfig,
    tokenizer: LoadedTokenizer,
    accelerator: Accelerator,
    mesh: Mesh,
    *,
    compared: bool,
) -> LoadedModel:
    """Return the model; its weights are not read yet if ranks may divide it.

    ``compared``: the fingerprint will be needed, so it is computed now.
    """
    later = has_parts(config, mesh) or reads_later(config, tokenizer.path, accelerator, mesh)
    if not later:
        require_room_for_weights(tokenizer.path, accelerator, mesh)
    how: Any = {"trust_remote_code": config.trust_remote_code, "hashed": compared, "lazy": later}
    loaded = load_model(str(tokenizer.path), tokenizer=tokenizer.tokenizer, **how)
    if compared:
        _ = loaded.fingerprint  # reads all weights
    return loaded


def _passes_checked(
    config: TrainConfig,
    loaded: LoadedModel,
    accelerator: Accelerator,
    kernels: KernelForms,
    data: Datasets,
    surroundings: RunContext,
    notes: list[str],
    stages: Sequence[Stage],
) -> tuple[PassContext, tuple[Applied, ...]]:
    """Apply the model passes; check the gradient before and after them, on one rank of a host.

    Notes are added to ``notes``.
    """
    # A part of a model has no loss by itself, so it is not checked.
    mesh = surroundings.mesh
    leads = mesh.local_rank == 0 and not has_parts(config, mesh)
    check = (
        start_check(config, loaded, accelerator, kernels, data, surroundings.say) if leads else None
    )
    # The selection follows this rank's own request; the agreement may replace it later.
    context = pass_context(loaded.model, config, accelerator, kernels.selection)
    if mesh.parts > 1:
        context = replace(context, short=True, fetched=True)  # weights travel packed
    elif accelerator.kind == "cpu" and is_quantized(loaded.model):
        device = Device(accelerator, surroundings.mesh, psutil.Process().memory_info().rss)
        if not roomy_form_fits(
            config, loaded, data.train if config.train else None, device, stages
        ):
            context = replace(context, short=True)
            notes.append(packed_note(device.room))
    applied = apply_passes(loaded.model, context)
    if check is not None:
        notes += check(dropout_keys_of(loaded.model))
    if config.isolate_documents:
        require_isolation(loaded.model, loaded.config["model_type"])
    return context, applied


def _launching(config: TrainConfig, mesh: Mesh) -> list[str]:
    """Set how MLX launches kernels on an NVIDIA GPU in training; return a note if it is too late.

    Raises:
        ConfigError: it is too late for ``--deterministic``.
    """
    if (
        not mx.cuda.is_available()
    ):  # on other devices the environment variables would have no effect
        return []
    freed_after = FREED_OFTEN if mesh.pipe > 1 or mesh.parts > 1 else FREED_AFTER
    if mesh.parts > 1 and config.grad_checkpoint:
        freed_after = FREED_AT_ONCE
    has_order = launch_directly(
        os.environ,
        untouched=nothing_computed(),
        deterministic=config.deterministic,
        freed_after=freed_after,
    )
    if not has_order:
        raise ConfigError(
            "MLX has already computed in this process, which fixes its order of sums",
            code="deterministic-too-late",
            where="--deterministic",
            hint="start a new process, or start Python with MLX_CUDA_USE_CUDNN_SDPA=0",
        )
    if launches_directly() or os.environ["MLX_USE_CUDA_GRAPHS"] != "0":
        return []
    return [
        "MLX has already computed in this process: a step needs more memory and time than in a new process"
    ]


def compiles(config: TrainConfig, batches: int, model: Any) -> bool:
    """Return True if a step that is computed as a graph should be compiled.

    ``batches``: number of batches of the run.
    """
    return is_compiled(config.compile, batches, getattr(model, "model_type", None))


def pass_context(
    model: Any, config: TrainConfig, accelerator: Accelerator, selection: KernelSelection
) -> PassContext:
    """Return the context that decides which passes apply to ``model``; call it after the trained
    weights are chosen.

    Raises:
        ConfigError: the options ask for compilation, but the model cannot be compiled.
    """
    if config.compile == "on" and not can_be_compiled(getattr(model, "model_type", None)):
        message = "this architecture cannot be compiled: mlx_lm chooses its experts in Python"
        raise ConfigError(
            message,
            code="option-unsuited-to-model",
            where="--compile",
            hint="leave it out: the step then runs without compilation",
        )
    return PassContext(
        accelerator,
        "train" if config.train else "evaluate",
        at_once=accelerator.runs_natively(config.compile),
        longest=Pieces(0, config.cp).width(config.max_seq_length),
        seed=config.seed,
        grad_checkpoint=config.grad_checkpoint,
        selection=selection,
    )


def _moment(
    surroundings: RunContext, tested: Path | None, checkpoint: Checkpoint | None
) -> datetime:
    """Return the moment whose date the chat template writes: that of the adapter or checkpoint,
    else the run's own.

    Ranks other than 0 do not know the checkpoint's date yet: see :func:`_met`.
    """
    kept = None
    if tested is not None and not surroundings.trial:
        kept = dated_as(tested)
    elif checkpoint is not None and not surroundings.trial:
        kept = date_of(checkpoint)
    return kept or surroundings.moment


def _made_trainable(model: Any, config: TrainConfig, start: Path | None) -> Trainable:
    if not config.train and start is None:
        return untrained(model)
    try:
        return make_trainable(model, config)
    except ConfigError as error:
        if start is None or config.train:
            raise
        # The settings are the adapter's, not options of the user: the error names the adapter.
        raise unfit(error.message, start.parent) from None


@contextmanager
def _busy(surroundings: RunContext) -> Generator[None]:
    """Send heartbeats to the supervisor from a thread in a ``with`` block.

    Fetching, hashing and tokenising of much data takes long.
    """
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


def versions() -> dict[str, str]:
    """Return the versions of the software that determines a run's numbers."""
    return {
        **versions_of("allhands", "mlx", "mlx-lm", "numpy"),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
