"""The facts of ``allhands plan``: the model, a short training here, the computers and the link."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from allhands.config.pretrain_schema import pretraining
from allhands.config.schema import TrainConfig
from allhands.distributed.codecs import CODECS, require_gain
from allhands.distributed.reduce import bucket_bytes_for
from allhands.errors import ConfigError
from allhands.io.formatting import counted, format_bytes, format_count, format_duration
from allhands.model.quantized import held_dense
from allhands.parallel.costs import PackedGradients
from allhands.parallel.registry import TrainingNeeds
from allhands.parallel.rounds import rounds_of
from allhands.parallel.runahead import limit_for
from allhands.plan.asked import asks, require_asked
from allhands.plan.calibration import Calibration, Calibrator, steps_of
from allhands.plan.dividing import dividing_of, left_out
from allhands.plan.job import Job
from allhands.plan.kept import plan_record
from allhands.plan.meshes import flags_of
from allhands.plan.models import model_facts, trained_layers, trained_parameters
from allhands.plan.outlook import Outlook, look_ahead
from allhands.plan.pipelines import PROGRAM_BYTES
from allhands.plan.site import (
    AskedComputers,
    Say,
    Site,
    computers_of,
    link_between,
    on_hosts,
    prices_of,
)
from allhands.plan.speed import StepModel, fitted
from allhands.plan.validations import number_of, seconds_of, valid_rows
from allhands.run.datasets import load_data
from allhands.run.model_sizes import flops_per_token, left_to_adam
from allhands.run.starting import require_weights
from allhands.run.strategy_choice import require_fit
from allhands.run.training_memory import (
    WRITING_BYTES,
    DecoderShape,
    Work,
    of_process,
    on_cpu,
    on_gpu,
)
from allhands.runtime.accelerator import detect, device_memory, sizing_of
from allhands.runtime.blas import available_cores
from allhands.train.optim import make_schedule

_FELT_S = 1.0
_BANDWIDTH = {"metal": 200e9, "cuda": 1e12}  # approximate speed of memory, in bytes per second
_METHODS = {"lora": "LoRA", "dora": "DoRA", "full": "full training"}


def facts_of(
    config: TrainConfig, asked: AskedComputers, say: Say
) -> tuple[Job, list[str], Calibration | None]:
    """Return all facts of the plan, notes on their sources, and the results of a short training
    here.

    Raises:
        ConfigError: options contradict each other.
        AllhandsError: the model or the data cannot be read, or the short training failed.
    """
    facts = _Facts(config, asked, say)
    return facts.job(), facts.notes, facts.measured


def plan_of(
    config: TrainConfig, asked: AskedComputers, say: Say
) -> tuple[Outlook, list[str], dict[str, Any]]:
    """Return the predictions for a training, notes on the sources of the facts, and the plan as
    plain values.

    Raises:
        AllhandsError: as :func:`facts_of`.
    """
    job, notes, measured = facts_of(config, asked, say)
    outlook = look_ahead(job)
    # The plan does not keep options that this kind of training does not have.
    options = config.model_dump(mode="json", exclude=set(config.HIDDEN))
    processor = "cpu" if job.kind == "cpu" else "gpu"
    return (
        outlook,
        notes,
        {
            **plan_record(options, processor=processor, device=asked.device),
            **outlook.as_json(),
            "notes": notes,
            "measured": None if measured is None else asdict(measured),
        },
    )


class _Facts:
    """A training and the computers for it, as far as they are known; ``notes`` have the sources.

    Attributes:
        measured: results of a short training here; ``None``: the computers are only described.
        as_one_of: the configuration of the measured process, with the cores of one of several
            ranks.
        row_tokens: mean number of tokens of a row.
        num_rows: number of rows of the training data, if it is known.
        together: True if the ranks are processes of this computer.
        trained: number of trained parameters.
        layers: number of trained blocks.
    """

    def __init__(self, config: TrainConfig, asked: AskedComputers, say: Say) -> None:
        self.config, self.asked, self.say = config, asked, say
        self.kind = detect().kind if asked.site is not None else asked.devices[0].kind
        self.on_gpu = self.kind != "cpu"
        self.together = asked.site is not None and config.num_ranks > 1 and not on_hosts(config)
        self.notes = [*config.notes, *left_out(config)]
        self.prices = prices_of(asked, self.notes)  # before any long work
        require_weights(config)
        self.model = model_facts(config, self.kind)
        self.blocks = self.model.blocks
        if asks(config):
            require_asked(config, self.model.values, asked.most, self._known_backend)
            if asked.most > 1:
                self.notes.append(
                    "the first table is of ranks that all have the whole model and rows of their own: the second one has "
                    f"the time and the memory with {flags_of(config)}"
                )
        elif asked.most > 1:
            require_fit(config, TrainingNeeds(config.optimizer, self._native))
        self.measured: Calibration | None = None
        self.as_one_of = config
        if asked.site is not None:
            self.measured = self._measure(asked.site)
            self.notes.append(_told(self.measured))
        self.row_tokens, self.num_rows = self._rows()
        self.trained = self._trained()
        self.layers = 0 if self.blocks is None else trained_layers(config, self.blocks)

    def job(self) -> Job:
        """Return the job with all facts for the plan."""
        config, asked = self.config, self.asked
        step = self._step()
        link = link_between(config, asked, self.say, self.notes)
        computers = computers_of(config, asked, self.kind, link, self.say, self.notes)
        work = self._work()
        make_schedule(config, steps := self._steps())  # refused as in training
        counted = self.measured is not None or self.num_rows is not None
        valid = valid_rows(config, counted=counted, say=self.say, notes=self.notes)
        validations = number_of(
            self._batches(), config.steps_per_eval, config.grad_accumulation_steps
        )
        job = Job(
            steps=steps,
            start_s=0.0,
            started=self._started(),
            step=step,
            validations=validations if valid.number else 0,
            validation_s=seconds_of(valid, step, config, self.blocks, self.layers),
            link=link,
            computers=computers,
            numbers=tuple(range(1, config.num_ranks + 1)) if self.together else asked.machines,
            imagined=bool(asked.machines) and not self.together,
            blocks=self.blocks,
            work=work,
            of=on_gpu if self.on_gpu else on_cpu,
            batch_rows=config.batch_size,
            present_bytes=self._present(work),
            quantised=self.model.bits > 0,
            once=asked.once,
            together=self.together,
            shares=self.together and self.kind != "cuda",
            room=self._room(),
            prices=self.prices,
            about=self._about(),
            again_s=self._again_s(),
            rounds=rounds_of(config) if config.sync_every > 1 or config.sync_delay else None,
            kind=self.kind,
            tied=self.model.tied,
            forms=self.model.forms,
            dividing=dividing_of(self.model.values, self.blocks, config, self.model.group),
            wants_stages=config.strategy == "pipeline",
            asked=config if asks(config) else None,
            backend=self._known_backend,
            compiled=not self.on_gpu and not self._native,
        )
        return self._with_small_passes(self._with_measured(job))

    def _with_measured(self, job: Job) -> Job:
        """Return the job with the times and the memory of the short training, if there was one."""
        measured = self.measured
        if measured is None:
            return job
        needed = measured.peak_bytes if self.kind == "cuda" or job.compiled else 0
        if needed and self.kind == "cuda" and job.blocks is not None and job.work is not None:
            most = format_bytes(
                limit_for(max(needed, on_gpu(job.blocks, job.work).arrays), device_memory())
            )
            self.notes.append(
                f"training takes up to {most} of the GPU's memory if it is free, because that is faster"
            )
        # A part of the additional time of the first steps, if the training is short.
        first = min(1.0, job.steps / steps_of(self.config, on_gpu=self.on_gpu))
        return replace(
            job,
            start_s=measured.start_s,
            whole_s=measured.whole_s,
            first_s=measured.first_s * first,
            needed_bytes=needed,
            doubt=measured.doubt,
        )

    @property
    def _native(self) -> bool:
        """True if this computer's CPU trains with native operations, which are not compiled."""
        return self.asked.site is not None and detect().runs_natively(self.config.compile)

    @cached_property
    def _known_backend(self) -> str:
        """The back-end that a training here would take, as far as it is known without measuring."""
        if self.config.backend != "auto":
            return self.config.backend
        if self.kind == "cuda":
            return "nccl"
        return self.asked.site.backend() if self.asked.site and self.together else "ring"

    def _room(self) -> int:
        """Return the number of processes for which this computer's cores suffice; 0 if the ranks do
        not share a CPU.
        """
        if not self.together or self.on_gpu:
            return 0
        return max(1, available_cores() // (self.config.cores_per_rank or 1))

    @cached_property
    def _calibrator(self) -> Calibrator:
        in_child = self.asked.site and self.asked.site.in_child
        return Calibrator(self.asked.timeout_s, on_gpu=self.on_gpu, in_child=in_child)

    def _measure(self, site: Site) -> Calibration:
        """Train a few steps, with the cores of one rank if a computer will have several."""
        config, steps = self.config, steps_of(self.config, on_gpu=self.on_gpu)
        self.say(f"training {steps} steps with the whole batch, and with half of it ...")
        ranks = max(site.slots)
        if ranks > 1 and not config.cores_per_rank:
            there = available_cores()
            cores = max(1, there // ranks)
            told = f"each of {ranks} processes on this computer has {cores} of its cores; so has the measured one"
            if ranks > there:
                turns = f"{ranks} processes share {there} core{'s' * (there > 1)}, and take turns on them"
                told = f"{turns}; the measured one has one core"
            self.notes.append(told)
            self.as_one_of = config.model_copy(update={"cores_per_rank": cores})
        fewer = self.together or (on_hosts(config) and self.as_one_of.cores_per_rank is not None)
        return self._calibrator.calibrate(
            self.as_one_of, self.say, with_all_cores=fewer and not self.on_gpu
        )

    def _with_small_passes(self, job: Job) -> Job:
        """Return the job with the time of micro-batches of the smallest planned pipeline, if there
        is one.
        """
        if (
            self.measured is None
            or not on_hosts(self.config)
            or not (pipelines := look_ahead(job).pipelines)
        ):
            return job
        self.say("training a few steps with the small micro-batches of a pipeline ...")
        stages = min(each.machines for each in pipelines)
        small = self._calibrator.small_passes(self.as_one_of, self.measured, stages)
        return replace(job, small=small)

    def _about(self) -> str:
        """Describe the training in a few words."""
        config, fresh = self.config, pretraining(self.config)
        what = f"{_METHODS[config.fine_tune_type]} of {Path(config.model).name}"
        what = what if fresh is None else f"pre-training of {fresh.shape}"
        rows = counted(config.batch_size * config.grad_accumulation_steps, "row")
        return f"{what}: {counted(self._steps(), 'step')} of {rows}"

    def _again_s(self) -> float:
        """Return the factor by which recomputed activations lengthen the passes."""
        if self.blocks is None or self.config.grad_checkpoint:
            return 1.0
        once = self._flops(self.blocks, recomputed=False)
        return self._flops(self.blocks, recomputed=True) / once

    def _flops(self, blocks: DecoderShape, *, recomputed: bool) -> float:
        return flops_per_token(
            blocks, self.config.fine_tune_type, self.layers, recomputed=recomputed
        )

    def _started(self) -> tuple[int, float] | None:
        if not self.together:
            return None
        self.say(f"starting it in {self.config.num_ranks} processes ...")
        return self.config.num_ranks, self._calibrator.time_to_start(self.config)

    # --- a step -----------------------------------------------------------------------------------

    def _trained(self) -> int:
        """Return the number of trained parameters."""
        if self.measured is not None:
            return self.measured.exchanged
        if self.blocks is None:
            raise ConfigError(
                "this model is not built of equal blocks: nothing can be estimated",
                code="model-not-estimable",
                hint="leave --device out, so that a few steps are trained",
            )
        return trained_parameters(self.config, self.blocks, tied=self.model.tied)

    @property
    def _gradient_word(self) -> int:
        return self.model.word if self.config.fine_tune_type == "full" else 4

    def _step(self) -> StepModel:
        config, word = self.config, self._gradient_word
        if self.measured is not None:
            serial_s, token_s = fitted(self.measured.points)
        else:
            assert self.blocks is not None, "self._trained() has said so"
            where, *_ = self.asked.devices
            # The update moves about thirty bytes for each trained number.
            serial_s = 0.002 + self.trained * 30.0 / _BANDWIDTH[where.kind]
            token_s = where.seconds(self._flops(self.blocks, recomputed=config.grad_checkpoint))
            known = ", ".join(dict.fromkeys(each.name for each in self.asked.devices))
            self.notes.append(
                f"{known}: estimated from the manufacturer's figures, right within a factor of 1.5; for better "
                "figures run allhands plan on that computer"
            )
        number = config.batch_size * config.grad_accumulation_steps
        return StepModel(
            serial_s=serial_s,
            tokens=self.row_tokens * number,
            token_s=token_s,
            rows=number,
            gradient_bytes=self.trained * word,
            bucket_bytes=bucket_bytes_for(self._backend, config.bucket_mb),
            overlapped=self.kind == "cuda" and config.sync_every == 1,
            packed=self._packed(),
            every=config.sync_every,
            beside=rounds_of(config).beside,
            word=word,
        )

    @property
    def _backend(self) -> str:
        return "nccl" if self.kind == "cuda" else "ring"

    def _packed(self) -> PackedGradients | None:
        """Return the form of compressed gradients; ``None`` if they are not compressed."""
        if self.config.compress == "none":
            return None
        codec = CODECS[self.config.compress]
        require_gain(codec, self._backend, max(2, self.config.num_ranks), self._gradient_word)
        return PackedGradients(codec, self._backend, self._gradient_word)

    def _rows(self) -> tuple[float, int | None]:
        """Return the mean tokens of a row and the number of rows.

        They come from the short training or from the data. Otherwise a row has the maximum length,
        and the number is ``None``.
        """
        config = self.config
        if self.measured is not None:
            return self.measured.points[0][0] / config.batch_size, self.measured.examples
        if config.packing or not {"data", "hf_dataset"} & config.model_fields_set:
            why = "rows are packed" if config.packing else "no --data is named"
            self.notes.append(
                f"for rows of {config.max_seq_length} tokens, the longest there can be: {why}"
            )
            return float(config.max_seq_length), None
        self.say("reading the data ...")
        alone = config.model_copy(
            update={"val_batches": 0, "test": False, "early_stopping_patience": None}
        )
        data = load_data(alone)
        assert data.train is not None
        number = len(data.train)
        tokens = data.stored["train"].report.num_tokens / number
        self.notes.append(
            f"for rows of {tokens:.0f} tokens on the average, of which the data have {number:,}"
        )
        return tokens, number

    def _batches(self) -> int:
        config = self.config
        if config.epochs and self.num_rows is None:
            raise ConfigError(
                "the number of steps is not known",
                code="option-missing",
                where="--epochs",
                hint="give --iters: the number of rows is only known after the data are read",
            )
        return config.batches(math.ceil((self.num_rows or 0) / config.batch_size))

    def _steps(self) -> int:
        return math.ceil(self._batches() / self.config.grad_accumulation_steps)

    # --- memory -----------------------------------------------------------------------------------

    def _work(self) -> Work | None:
        config, blocks, measured = self.config, self.blocks, self.measured
        if blocks is None:
            return None
        share = config.batch_size * config.max_seq_length
        most = sizing_of(self.kind, config.micro_batch_tokens, compiled=False).max_tokens
        if self.on_gpu and measured is not None and measured.largest:
            most, cuts = measured.largest
            share = min(share, most * cuts)
        elif not config.packing:
            # The real length of rows counts, not --max-seq-length.
            share = min(share, int(1.15 * self.row_tokens * config.batch_size))
        full, word = config.fine_tune_type == "full", self.model.word
        trained_bytes = self.trained * self._gradient_word
        by_adam = (
            left_to_adam(blocks, config.optimizer, trained_bytes, word)
            if pretraining(config)
            else 0
        )
        row = min(config.max_seq_length, share)
        return Work(
            method=config.fine_tune_type,
            tokens=max(row, min(most, share)),
            row_tokens=row,
            trained_layers=self.layers,
            weights_bytes=self._weights_bytes() + (0 if full else 4 * self.trained),
            trained_bytes=trained_bytes,
            by_adam_bytes=by_adam,
            optimizer=config.optimizer,
            recomputed=config.grad_checkpoint,
            accumulated=share > most or config.grad_accumulation_steps > 1,
            masters=self.kind == "cuda" and config.master_weights and word == 2 and full,
            batch_tokens=share,
            packed=self._packed(),
            lengths=self._lengths(),
            with_scores=config.deterministic,
        )

    def _lengths(self) -> int:
        """Return the number of different row lengths; 1 if it is not known."""
        return (self.measured and self.measured.lengths) or 1

    def _weights_bytes(self) -> int:
        """Return the bytes of the weights; a GPU holds quantised weights dense if they fit."""
        quantised = self.kind == "cuda" and self.model.bits and self.measured
        if quantised and held_dense(quantised.total, device_memory()):
            return 2 * quantised.total
        return self.model.weights_bytes

    def _present(self, work: Work | None) -> int:
        """Return the bytes of a process on a CPU besides its training arrays, as the short training
        reported them or as an estimate; 0 on a GPU.
        """
        if self.on_gpu:
            return 0
        measured = self.measured
        if (
            self.blocks is None
            or work is None
            or measured is None
            or measured.expected_bytes is None
        ):
            return PROGRAM_BYTES
        # The measured steps wrote no checkpoint.
        later = WRITING_BYTES if self.config.sample_prompts else 0
        return later + max(0, measured.expected_bytes - of_process(on_cpu(self.blocks, work), 0, 0))


def _told(measured: Calibration) -> str:
    """Return the results of the short training in words."""
    speed = measured.points[0][0] / measured.points[0][1]
    first = measured.first_s
    later = (
        f"; its first steps take {format_duration(first)} longer than later ones"
        if first >= _FELT_S
        else ""
    )
    return (
        f"measured here: {speed:,.0f} tokens/s with {format_count(measured.exchanged)} of "
        f"{format_count(measured.total)} parameters trained, {format_bytes(measured.peak_bytes)} at the peak, "
        f"{format_duration(measured.start_s)} to the start{later}"
    )
