"""Assembly of one rank's training run from data, model, group, loader, step and loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

from allhands.checkpoints.arrays import Held
from allhands.checkpoints.place import require_place_of_run
from allhands.checkpoints.saving import Save, Saved, SavePlan, saving
from allhands.config.pretrain_schema import pretraining
from allhands.config.schema import TrainConfig
from allhands.data.loader import Largest, Loader, MicroBatch
from allhands.data.order import GlobalOrder
from allhands.data.prefetch import Prefetcher
from allhands.data.tokens import Windows
from allhands.distributed.backend import Communicator
from allhands.distributed.codecs import Codec
from allhands.distributed.hierarchy import by_computer
from allhands.distributed.mesh import Mesh
from allhands.distributed.reduce import barrier, bucket_bytes_for
from allhands.errors import AllhandsError, ConfigError, Interrupted, NumericsError
from allhands.io.files import claimed
from allhands.io.formatting import counted, format_bytes
from allhands.io.trees import number
from allhands.kernels.known import depends_on_padding
from allhands.model.adapters import adapter_config
from allhands.model.balance import has_balance
from allhands.model.beyond import limits_told, use_of
from allhands.model.fresh import ModelFiles
from allhands.model.tokenizer import positions_of
from allhands.objectives.base import Objective
from allhands.objectives.causal_lm import CAUSAL_LM
from allhands.observe.metrics import METRICS_FILE, RunEnded, Sampled, Sink
from allhands.observe.metrics.history import other_examples
from allhands.observe.monitor import Identity, ProcessSampler, monitor_file
from allhands.observe.monitor.samples import LOGS
from allhands.observe.trackers import require_trackers, tracker_names
from allhands.parallel.piping import Piping
from allhands.parallel.registry import TrainingNeeds
from allhands.parallel.rounds import rounds_of
from allhands.parallel.shares import Balance
from allhands.run.balancing import SHARES, cut_alike, make_balance, require_timed
from allhands.run.context import RunContext
from allhands.run.contexts import agreed, context_of, same_rows
from allhands.run.datasets import size_notes, without_effect
from allhands.run.dividing import STAGES
from allhands.run.expecting import Device, expected_bytes, fitted_to_memory, in_half, scarce
from allhands.run.explain import choices, kernel_choices, updated_numbers
from allhands.run.loop import TrainLoop
from allhands.run.outputs import Outputs, copies_of
from allhands.run.piping import as_left, micro_batch_tokens, piped, piping_of, sums_together
from allhands.run.preparing import LoadedRun, compiles, prepare, versions
from allhands.run.samples import Sampler, answering
from allhands.run.starting import starting_weights
from allhands.run.state import LoopState
from allhands.run.strategy_choice import chosen_codec, chosen_strategy
from allhands.runtime.blas import give_back_freed_pages
from allhands.runtime.faults import inject_fault
from allhands.runtime.sizing import Sizing
from allhands.train.callbacks import Callback, checked, gradient_hook
from allhands.train.evaluation import Evaluator
from allhands.train.optim import has_schedule, make_optimizer, num_batches
from allhands.train.sharded_state import load_left_out, load_optimizer, sharded_state
from allhands.train.step import StepOptions, TrainStep, make_step
from allhands.train.updater import Rules

__all__ = ["FinetuneResult", "RunContext", "run_finetune"]


@dataclass(frozen=True)
class FinetuneResult:
    """Result of :func:`run_finetune`.

    Attributes:
        adapter_path: directory of the run, with the adapter, metrics and plot.
        ended: the end of the run, with the best validation loss, and the test loss if requested.
        plot: path of the loss curves; ``None`` on ranks that keep no files, or if nothing was
            drawn.
    """

    adapter_path: Path
    ended: RunEnded
    plot: Path | None


def run_finetune(
    config: TrainConfig,
    surroundings: RunContext,
    callbacks: Sequence[Callback] = (),
    objective: Objective = CAUSAL_LM,
) -> FinetuneResult:
    """Train and test as ``config`` says, in this process, as one rank of ``surroundings.mesh``.

    Raises:
        AllhandsError: wrong input or a failure; each kind has its own subclass.
    """
    if not (config.train or config.test):
        raise ConfigError("nothing to do", code="nothing-to-do", hint="add --train, --test or both")
    require_place_of_run(config)
    callbacks = checked(callbacks)
    directory = Path(config.adapter_path)
    config = as_left(config, surroundings.mesh)
    surroundings = replace(surroundings, mesh=piped(config, surroundings.mesh))
    start = starting_weights(config, directory, surroundings)
    if surroundings.mesh.is_main:
        require_trackers(tracker_names(config.report_to))
    identity = Identity("rank", surroundings.mesh.rank, attempt=surroundings.attempt)
    with limits_told(use_of(config)), ExitStack() as stack, ProcessSampler(identity) as observer:
        if config.train and surroundings.mesh.is_main:
            stack.enter_context(claimed(directory))
        surroundings = _observed(surroundings, observer)
        ready = prepare(
            config,
            surroundings,
            directory,
            start,
            hooked=gradient_hook(callbacks, None) is not None,
        )
        # The memory may require another strategy.
        surroundings = replace(surroundings, mesh=piped(ready.config, surroundings.mesh))
        observer.write_to(
            monitor_file(directory / LOGS, "rank", surroundings.mesh.rank), ready.run_id
        )
        outputs = Outputs(directory, surroundings, ready, copies_of(directory, surroundings, ready))
        return _RankRun(
            ready.config, surroundings, callbacks, ready, observer, outputs, objective
        ).execute()


def _observed(surroundings: RunContext, observer: ProcessSampler) -> RunContext:
    """Return the context with each heartbeat also sent to ``observer``."""

    def beat(phase: str, step: int) -> None:
        observer.beat(phase, step)
        surroundings.beat(phase, step)

    def waits(step: int, seconds: float) -> None:
        observer.beat("load", step)
        surroundings.waits(step, seconds)

    return replace(surroundings, beat=beat, waits=waits)


@dataclass(frozen=True)
class _RankRun:
    """One rank's run, after everything is loaded and agreed."""

    config: TrainConfig
    surroundings: RunContext
    callbacks: Sequence[Callback]
    ready: LoadedRun
    observer: ProcessSampler
    outputs: Outputs
    objective: Objective

    @property
    def mesh(self) -> Mesh:
        """This rank's place among the others."""
        return self.surroundings.mesh

    def execute(self) -> FinetuneResult:
        try:
            planned = self._planned() if self.config.train else None
            with self.outputs.claim(), self.outputs.sinks() as sink:
                ended = self._train(sink, *planned) if planned else RunEnded(0, "finished", 0.0)
                try:
                    if self.config.test:
                        ended = replace(ended, test_loss=self._test(ended.step))
                finally:
                    self.surroundings.beat("end", ended.step)
                    sink.emit(ended)
        except (Interrupted, NumericsError):
            # All ranks raise this error. The curves show what happened; a failure to draw them must
            # not hide the error.
            with suppress(AllhandsError):
                self.outputs.plot()
            barrier(self.ready.communicator)
            raise
        return FinetuneResult(self.outputs.directory, ended, self.outputs.plot())

    def _planned(self) -> tuple[Windows, GlobalOrder, int]:
        """Return the windows, their order and the number of batches.

        Errors in options are raised here, before an earlier run is set aside.
        """
        windows = self.ready.data.train
        assert windows is not None
        order = GlobalOrder(windows.work, self.config.batch_size, self.config.seed)
        _ = self._codec  # raises ConfigError if the requested compression is impossible
        return windows, order, num_batches(self.config, order.batches_per_epoch)

    def _state(self, saved: dict[str, Any]) -> LoopState:
        """Return the state to begin with; ``saved``: content of a checkpoint's ``state.json``."""
        if not saved:
            return LoopState()
        data, state = self.ready.data, LoopState.from_json(saved)
        if other_examples(data.validated_before(saved), data.validated(self.config)):
            return state.without_validations()
        return state

    def _train(self, sink: Sink, windows: Windows, order: GlobalOrder, total: int) -> RunEnded:
        config, ready = self.config, self.ready
        saved = {} if ready.restored is None else ready.restored.state
        state = self._state(saved)
        updates = state.steps_in_all(total, config.grad_accumulation_steps)
        optimizer = make_optimizer(config, updates, half=in_half(ready.loaded.model))
        compiled = compiles(config, total, ready.loaded.model)
        if ready.sharding is None:
            # Frees the buffers into which the model was read: training cannot use their sizes. A
            # fully sharded rank keeps them: fetched arrays have the same sizes.
            mx.clear_cache()
        give_back_freed_pages()
        device = Device(ready.accelerator, self.mesh, self.observer.resident())
        sizing = self._sizing(windows, order, device, compiled)
        balance, told = make_balance(config, self.mesh, windows, order, state.iteration, saved)
        self.outputs.say(told)
        weights = balance.weights(state.iteration)
        how: Any = {"alike": cut_alike(ready.communicator, sizing), "cut_of": balance.cut}
        loader = Loader(windows, order, sizing, self.mesh.data_rank, weights, **how)
        self._expect(largest := loader.largest(), device)
        step = self._step(optimizer, state, compiled)
        require_timed(balance, config, step.strategy)
        self._restore_optimizer(optimizer, step)
        sink.emit(self.outputs.started(total, state, largest, self._strategy))
        self._say_notes(windows, total / order.batches_per_epoch)
        self._explain(sizing, step, compiled)
        if state.iteration >= total:
            at = f"iteration {state.iteration} (step {state.step})"
            self.outputs.say(
                [
                    f"note: nothing is left to train: the checkpoint is at {at}, and the run has {total}"
                ]
            )
        begin, stored = replace(state), ready.data.stored.get("valid")

        def load(iteration: int) -> list[MicroBatch]:
            done = (iteration - begin.iteration) // config.grad_accumulation_steps
            inject_fault("load", begin.step + done, self.mesh.rank)
            return loader.load(iteration)

        waits = self.surroundings.waits
        prefetched = Prefetcher(load, end=total, waits=lambda seconds: waits(state.step, seconds))
        with (
            closing(step),
            prefetched as prefetcher,
            self._saving(optimizer, step, balance) as (save, saved),
        ):
            ended = TrainLoop(
                state=state,
                config=config,
                order=order,
                load=prefetcher.get,
                step=step,
                evaluator=self._evaluator(
                    ready.data.valid, config.val_batches, lambda: balance.weights(state.iteration)
                ),
                communicator=ready.communicator,
                accelerator=ready.accelerator,
                sink=sink,
                callbacks=self.callbacks,
                save=save,
                saved=saved,
                beat=self.surroundings.beat,
                stop_requested=self.surroundings.stop_requested,
                regroup_requested=self.surroundings.regroup_requested,
                learning_rate=lambda: number(optimizer.learning_rate),
                total=total,
                sample=self._sampler(),
                tokens_per_byte=stored.report.tokens_per_byte
                if stored and config.packing
                else None,
                copies=self.outputs.copies,
                balance=balance,
            ).run()
        if config.log_level == "verbose":
            in_graph = compiled and not step.options.cpu_native
            kind = "compiled" if in_graph else "computed, none of them compiled"
            self.outputs.say([f"shapes of micro-batches: {len(step.shapes)} {kind}"])
        return ended

    def _sizing(
        self, windows: Windows, order: GlobalOrder, device: Device, compiled: bool
    ) -> Sizing:
        """Return the rules for the size of a micro-batch, agreed on by all ranks with the same
        rows.
        """
        config, ready = self.config, self.ready
        tokens = micro_batch_tokens(config, windows.work, self.mesh)
        sizing = ready.accelerator.sizing(tokens, compiled=compiled)
        # Routers that learn to keep experts busy count all tokens of a row, its padding included.
        sizing = replace(sizing, alike=has_balance(ready.loaded.model)).fitted(windows.work)
        if tokens is None and self.mesh.size > 1:
            sizing, notes = fitted_to_memory(
                config, ready.loaded, device, sizing, windows, order, ready.sharding
            )
            self.outputs.say(notes)
        return agreed(sizing, self._same_rows)

    def _say_notes(self, windows: Windows, epochs: float) -> None:
        config, positions = self.config, positions_of(self.ready.loaded.config)
        notes = size_notes(config, windows, epochs, positions)
        if self.mesh.size == 1:
            notes += without_effect(config)
        if self.ready.accelerator.cpu_native and config.compile == "on":
            notes.append(
                "--compile on: a C++ compiler builds each step's kernels first, for every length of rows; on a CPU "
                "the first steps take seconds to minutes"
            )
        self.outputs.say([f"note: {note}" for note in notes])

    def _sampler(self) -> Callable[[int, int], list[Sampled]]:
        """Return the function that generates sample texts.

        It does nothing on ranks that do not compute together with rank 0.
        """
        config = self.config
        sharding = self.ready.sharding
        together = self.mesh.data_rank == 0 and self.mesh.coordinates().context == 0
        if not (config.sample_prompts and (together or sharding or self.ready.experts)):
            return lambda step, iteration: []
        model, on_cuda = self.ready.loaded.model, self.ready.accelerator.kind == "cuda"
        return Sampler(
            model=answering(model, self._piping, sharding, self.ready.experts),
            tokenizer=self.ready.loaded.tokenizer,
            prompts=config.sample_prompts,
            num_tokens=config.sample_tokens,
            temperature=config.sample_temperature,
            seed=config.seed,
            most=config.max_seq_length,
            beat=self.surroundings.beat,
            multiple=64 if on_cuda and not depends_on_padding(model) else 1,
        )

    def _model_files(self) -> ModelFiles | None:
        """Return the files that make a complete model of trained weights; ``None`` if an adapter is
        trained.
        """
        fresh = pretraining(self.config)
        if fresh is None:
            return None
        values = fresh.model_dump(mode="json", exclude={"model"})
        mark, data = {"made_by": "allhands pretrain", "config": values}, self.ready.data
        return ModelFiles.of(self.ready.loaded, mark, data.template, data.stop_tokens)

    def _restore_optimizer(self, optimizer: Any, step: TrainStep) -> None:
        """Give the optimizer the checkpoint's state, or this rank's part of it under the
        strategy.
        """
        config, restored = self.config, self.ready.restored
        if restored is None:
            return
        rows = load_optimizer(
            optimizer, step.updater.flat, restored, self.surroundings.busy, step.strategy
        )
        if rows and (rows != self.mesh.size or not step.strategy.keeps_own_optimizer):
            self.outputs.say(
                [
                    f"note: the optimizer's state is the mean of the separate states of {counted(rows, 'rank')}"
                ]
            )
        before = restored.state.get("config", {}).get("compress", "none")
        changed = f"--compress was {before}" if before != config.compress else ""
        if lost := load_left_out(
            self.ready.loaded.model, step.updater.flat, step.strategy, restored, changed
        ):
            self.outputs.say(
                [
                    f"note: what {before} had kept as rounding errors of the last gradients is dropped: {lost}"
                ]
            )
        if not has_schedule(config):  # a schedule computes the rate from the step
            optimizer.learning_rate = config.learning_rate
        # The model and the optimizer have all arrays now; the checkpoint's copies are freed.
        restored.weights.clear()
        restored.optimizer.clear()
        restored.left.clear()

    def _step(self, optimizer: Any, state: LoopState, compiled: bool) -> TrainStep:
        config = self.config
        # Loading leaves evaluation mode, in which some architectures use kernels without a
        # gradient.
        self.ready.loaded.model.train()
        start = state.step

        def heartbeat(phase: str) -> None:
            # The first update after a start takes longer: it builds kernels and buffers.
            first = state.step == start and phase != "reduce"
            self.surroundings.beat("first" if first else phase, state.step)

        hook = gradient_hook(self.callbacks, self.ready.loaded.model)
        rules = Rules(
            max_grad_norm=config.max_grad_norm,
            after_backward=None if hook is None else lambda gradients: hook(state.step, gradients),
            inject_fault=lambda point: inject_fault(point, state.step, self.mesh.rank),
        )
        options = StepOptions(
            cpu_native=self._cpu_native,
            compiled=compiled,
            rules=rules,
            strategy=self._strategy,
            rounds=rounds_of(config),
            piping=self._piping,
            sharding=self.ready.sharding,
            matrices=self.ready.matrices,
            experts=self.ready.experts,
            codec=self._codec,
            bucket_bytes=bucket_bytes_for(self.ready.communicator.backend, config.bucket_mb),
            dropout=self.ready.dropout,
            non_finite=config.non_finite,
            queues_ahead=self.ready.accelerator.kind != "cpu",
            packed=config.packing,
            objective=self._objective,
            same_rows=self._same_rows,
            pieces=self.mesh.context,
            heartbeat=heartbeat,
        )
        communicator = self.ready.communicator
        divided = options.piping or options.sharding or options.matrices or options.experts
        if options.codec is None and not options.rounds.delay and not divided:
            communicator = by_computer(communicator, self.mesh.local_rank, self.mesh.local_size)
        return make_step(self.ready.loaded.model, optimizer, communicator, options)

    @cached_property
    def _context(self) -> Communicator:
        return context_of(self.ready.communicator, self.mesh)

    @cached_property
    def _same_rows(self) -> Communicator:
        return same_rows(self.ready.communicator, self.mesh)

    @cached_property
    def _objective(self) -> Objective:
        """The objective of this rank's part of the rows."""
        return self.objective.across(self._context)

    @cached_property
    def _piping(self) -> Piping | None:
        ready = self.ready
        return (
            piping_of(self.config, ready.stages, ready.communicator, self.mesh)
            if ready.stages
            else None
        )

    @property
    def _trained(self) -> Any:
        """The module whose arrays this rank updates."""
        sharding = self.ready.sharding
        return self.ready.loaded.model if sharding is None else sharding.parts

    @property
    def _cpu_native(self) -> bool:
        return self.ready.accelerator.runs_natively(self.config.compile)

    @cached_property
    def _strategy(self) -> str:
        config, model = self.config, self.ready.loaded.model
        hooked, masters = (
            gradient_hook(self.callbacks, None) is not None,
            in_half(model) and config.master_weights,
        )
        wanted = TrainingNeeds(
            config.optimizer, self._cpu_native, wants_gradients=hooked, masters=masters
        )
        return chosen_strategy(config, self.ready.communicator, model, wanted)

    @cached_property
    def _codec(self) -> Codec | None:
        return chosen_codec(
            self.config, self.ready.communicator, self.ready.loaded.model, self._strategy
        )

    def _expect(self, largest: Largest, device: Device) -> None:
        """Report the expected memory to the monitor, and warn if it is too much."""
        on_cpu = device.accelerator.cpu_native
        ready = self.ready
        expected = expected_bytes(
            self.config, ready.loaded, largest, device, ready.stages, ready.sharding
        )
        if expected is None:
            return
        self.observer.expect(expected, arrays=not on_cpu)
        have = device.present_bytes, self.mesh.local_size, device.room
        if on_cpu and (note := scarce(expected, *have)):
            self.outputs.say([f"note: {note}"])
        elif self.config.log_level == "verbose":
            self.outputs.say(
                [f"expected: at most {format_bytes(expected)} of memory for this process"]
            )

    def _explain(self, sizing: Sizing, step: TrainStep, compiled: bool) -> None:
        """Print the run's choices and their reasons, with --log-level verbose only."""
        if self.config.log_level != "verbose":
            return
        ready = self.ready
        stored = ready.data.stored.items()
        self.outputs.say(
            [f"tokens of {n}: {'made now' if s.built else 'found'} in {s.path}" for n, s in stored]
        )
        tokens = min(sizing.max_tokens, self.config.batch_size * self.config.max_seq_length)
        kernels = kernel_choices(
            ready.kernels, tokens, quantised="quantization" in ready.loaded.config
        )
        self.outputs.say([f"pass: {each}" for each in ready.passes])
        self.outputs.say(kernels)
        parts = (ready.loaded.model, ready.accelerator, step.strategy.communicator, sizing)
        updates = updated_numbers(self._trained, step.shards), ready.trainable.parameters
        self.outputs.say(
            choices(
                self.config, *parts, compiled=compiled, strategy=step.strategy.name, updates=updates
            )
        )

    def _saving(
        self, optimizer: Any, step: TrainStep, balance: Balance
    ) -> AbstractContextManager[tuple[Save, Saved]]:
        """Return a context with the functions ``save`` and ``saved`` for this rank.

        A rank that keeps files saves the whole checkpoint, another rank only sends the slices that
        it alone holds.
        """
        ready = self.ready
        held = Held(
            groups=lambda: sharded_state(
                self._trained, optimizer, step.updater.flat, step.strategy
            ),
            spare_bytes=lambda: step.spare_bytes,
            ranks_here=self.mesh.local_size,
        )

        assert ready.data.train is not None
        rows, metrics = len(ready.data.train), self.outputs.directory / METRICS_FILE

        def described(state: LoopState) -> dict[str, Any]:
            """Return the progress of the run as JSON values."""
            epoch = state.iteration * self.config.batch_size / rows
            written = metrics.stat().st_size if metrics.exists() else 0
            return {
                **state.to_json(),
                "epoch": epoch,
                "metrics_bytes": written,
                SHARES: balance.to_json(state.iteration),
            }

        return saving(
            ready.communicator, self._save_plan(), held, described, keeps=ready.keeps_files
        )

    def _save_plan(self) -> SavePlan:
        config, ready = self.config, self.ready
        return SavePlan(
            directory=self.outputs.directory,
            run_id=ready.run_id,
            busy=self.surroundings.busy,
            rank=self.mesh.rank,
            keep_last=config.keep_last,
            keep_every=config.keep_every,
            # In full training each numbered file is a whole model, which the checkpoint has, too.
            numbered=config.fine_tune_type != "full" or config.keep_last == 0,
            adapter_config=adapter_config(config, *ready.described()),
            chat_template=ready.data.template,
            constants=cache(self._constants),
            model=self._model_files(),
            room=self.outputs.room if self.outputs.copies.keeps else lambda: None,
        )

    def _constants(self) -> dict[str, Any]:
        """Return the facts that every checkpoint of this start records besides the progress."""
        ready = self.ready
        return {
            "random": "order and dropout are functions of seed, batch and example",
            "config": self.config.model_dump(mode="json"),
            "config_fingerprint": self.config.fingerprint(),
            "versions": versions(),
            "model": {"path": str(ready.loaded.path), "fingerprint": ready.loaded.fingerprint},
            "data": ready.data.recorded(),
            "chat_template": ready.data.template,
            "world_size": self.mesh.size,
            "backend": ready.communicator.backend,
            "attempt": self.surroundings.attempt,
            "kernels": ready.kernels.recorded(),
            **({STAGES: list(ready.split)} if ready.split else {}),
        }

    def _evaluator(
        self,
        windows: Windows | None,
        num_batches: int,
        weights: Callable[[], tuple[float, ...]] | None = None,
    ) -> Evaluator | None:
        if windows is None or num_batches == 0:
            return None
        return Evaluator(
            self.ready.loaded.model,
            windows,
            self.ready.communicator,
            self.mesh,
            agreed(
                self.ready.accelerator.sizing(
                    micro_batch_tokens(self.config, windows.work, self.mesh), compiled=False
                ),
                self._same_rows,
            ),
            batch_size=self.config.batch_size,
            num_batches=num_batches,
            cpu_native=self.ready.accelerator.cpu_native,
            objective=self._objective,
            weights=weights,
            stop_requested=self.surroundings.stop_requested,
            beat=self.surroundings.beat,
            together=sums_together(self._piping, self.ready, self._objective),
            same_rows=self._same_rows,
        )

    def _test(self, step: int) -> float:
        evaluator = self._evaluator(self.ready.data.test, self.config.test_batches)
        assert evaluator is not None
        return evaluator(step).loss
