"""The facts of ``allhands plan``: the model, a short training here, the computers and the link."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from allhands.cli.plan_asked import AskedComputers, devices_of, hosts_of, on_hosts
from allhands.cli.plan_calibration import (
    Calibration,
    calibrate,
    small_passes,
    steps_of,
    time_to_start,
)
from allhands.cli.plan_computers import computers_of, link_between, prices_of
from allhands.cli.plan_validations import number_of, open_splits, seconds_of, valid_rows
from allhands.cluster.candidates import facts_here
from allhands.cluster.choose import choose
from allhands.config.pretrain_schema import PretrainConfig, pretraining
from allhands.config.schema import TrainConfig
from allhands.distributed.codecs import CODECS, require_gain
from allhands.distributed.reduce import bucket_bytes_for
from allhands.errors import ConfigError, ModelError
from allhands.io.formatting import counted, format_bytes, format_count, format_duration
from allhands.model.adapters import full_of_quantised, no_such_keys
from allhands.model.divisible import resolve_layers
from allhands.model.load import read_config
from allhands.model.quantized import held_dense
from allhands.model.shapes import find_shape, model_config, num_parameters, rows_for
from allhands.model.sources import resolve
from allhands.model.weight_files import all_bytes
from allhands.parallel.costs import PackedGradients
from allhands.parallel.registry import TrainingNeeds
from allhands.parallel.rounds import rounds_of
from allhands.parallel.runahead import limit_for
from allhands.plan.asked import asks, require_asked
from allhands.plan.dividing import dividing_of, left_out
from allhands.plan.job import Job
from allhands.plan.meshes import flags_of
from allhands.plan.outlook import look_ahead
from allhands.plan.pipelines import PROGRAM_BYTES
from allhands.plan.speed import StepModel, fitted
from allhands.run.model_sizes import (
    adapter_weights,
    all_weights,
    flops_per_token,
    forms_on_cpu,
    left_to_adam,
    linears,
)
from allhands.run.starting import require_weights
from allhands.run.strategy_choice import require_fit
from allhands.run.training_memory import (
    WRITING_BYTES,
    DecoderShape,
    Work,
    blocks_of,
    of_process,
    on_cpu,
    on_gpu,
)
from allhands.runtime.accelerator import detect, device_memory, sizing_of
from allhands.runtime.blas import available_cores
from allhands.train.optim import make_schedule

_DEFAULT_ITERS = 1000
_FELT_S = 1.0
_BANDWIDTH = {"metal": 200e9, "cuda": 1e12}  # approximate speed of memory, in bytes per second
_METHODS = {"lora": "LoRA", "dora": "DoRA", "full": "full training"}

Say = Callable[[str], object]


@dataclass(frozen=True)
class _Model:
    """Facts of a model from its files, or from the options of pre-training.

    Attributes:
        blocks: widths of the model; ``None`` if it is not built of equal blocks.
        weights_bytes: bytes of the weights in training.
        word: bytes of a dense weight in memory.
        bits: bits of a quantised weight; 0 for dense weights.
        tied: True if the embedding is also the head.
        forms: forms of quantised weights on a CPU, see :func:`forms_on_cpu`.
        values: content of config.json.
        group: size of a group of quantised weights; 1 for dense weights.
    """

    blocks: DecoderShape | None
    weights_bytes: int
    word: int
    bits: int = 0
    tied: bool = False
    forms: tuple[tuple[float, float], ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict[str, Any])
    group: int = 1


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
        self.devices = devices_of(asked.device)
        self.kind = self.devices[0].kind if self.devices else detect().kind
        self.together = not self.devices and config.num_ranks > 1 and not on_hosts(config)
        self.notes = [*config.notes, *left_out(config)]
        self.prices = prices_of(asked, self.devices, self.notes)  # before any long work
        require_weights(config)
        self.model = (
            _fresh(config, self.kind)
            if isinstance(config, PretrainConfig)
            else _read(config, self.kind)
        )
        self.blocks = self.model.blocks
        if asks(config):
            require_asked(config, self.model.values, self._most_ranks(), self._known_backend)
            if self._most_ranks() > 1:
                self.notes.append(
                    "the first table is of ranks that all have the whole model and rows of their own: the second one has "
                    f"the time and the memory with {flags_of(config)}"
                )
        elif self._most_ranks() > 1:
            require_fit(config, TrainingNeeds(config.optimizer, self._native))
        self.measured: Calibration | None = None
        self.as_one_of = config
        if not self.devices:
            self.measured = self._measure()
            self.notes.append(_told(self.measured))
        self.row_tokens, self.num_rows = self._rows()
        self.trained = self._trained()
        self.layers = 0 if self.blocks is None else _trained_layers(config, self.blocks)

    def job(self) -> Job:
        """Return the job with all facts for the plan."""
        config, asked = self.config, self.asked
        step = self._step()
        link = link_between(config, asked, len(self.devices), self.say, self.notes)
        computers = computers_of(config, asked, self.devices, self.kind, link, self.say, self.notes)
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
            of=on_cpu if self.kind == "cpu" else on_gpu,
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
            compiled=self.kind == "cpu" and not self.devices and not self._native,
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
        first = min(1.0, job.steps / steps_of(self.config, on_gpu=self.kind != "cpu"))
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
        return not self.devices and detect().runs_natively(self.config.compile)

    @cached_property
    def _known_backend(self) -> str:
        """The back-end that a training here would take, as far as it is known without measuring."""
        if self.config.backend != "auto":
            return self.config.backend
        if self.kind == "cuda":
            return "nccl"
        if self.together:
            return choose(
                facts_here(self.config.num_ranks), cores_per_rank=self.config.cores_per_rank
            ).backend
        return "ring"

    def _most_ranks(self) -> int:
        """Return the largest number of ranks that is planned."""
        if self.devices:
            return max(len(self.devices), *(self.asked.machines or (1,)))
        return max(
            sum(host.slots for host in hosts_of(self.config)), *(self.asked.machines or (1,))
        )

    def _room(self) -> int:
        """Return the number of processes for which this computer's cores suffice; 0 if the ranks do
        not share a CPU.
        """
        if not self.together or self.kind != "cpu":
            return 0
        return max(1, available_cores() // (self.config.cores_per_rank or 1))

    def _measure(self) -> Calibration:
        """Train a few steps, with the cores of one rank if a computer will have several."""
        config, on_gpu = self.config, self.kind != "cpu"
        self.say(
            f"training {steps_of(config, on_gpu=on_gpu)} steps with the whole batch, and with half of it ..."
        )
        ranks = max(host.slots for host in hosts_of(config))
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
        timeout_s, alone = self.asked.timeout_s, fewer and not on_gpu
        return calibrate(self.as_one_of, timeout_s, self.say, on_gpu=on_gpu, with_all_cores=alone)

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
        stages, timeout_s = min(each.machines for each in pipelines), self.asked.timeout_s
        small = small_passes(
            self.as_one_of, self.measured, stages, timeout_s, on_gpu=self.kind != "cpu"
        )
        return replace(job, small=small)

    def _about(self) -> str:
        """Describe the training in a few words."""
        config, fresh = self.config, pretraining(self.config)
        method = _METHODS[config.fine_tune_type]
        what = (
            f"pre-training of {fresh.shape}"
            if fresh is not None
            else f"{method} of {Path(config.model).name}"
        )
        rows = counted(config.batch_size * config.grad_accumulation_steps, "row")
        return f"{what}: {counted(self._steps(), 'step')} of {rows}"

    def _again_s(self) -> float:
        """Return the factor by which recomputed activations lengthen the passes."""
        if self.blocks is None or self.config.grad_checkpoint:
            return 1.0
        return self._flops(self.blocks, recomputed=True) / self._flops(
            self.blocks, recomputed=False
        )

    def _flops(self, blocks: DecoderShape, *, recomputed: bool) -> float:
        return flops_per_token(
            blocks, self.config.fine_tune_type, self.layers, recomputed=recomputed
        )

    def _started(self) -> tuple[int, float] | None:
        if not self.together:
            return None
        self.say(f"starting it in {self.config.num_ranks} processes ...")
        return self.config.num_ranks, time_to_start(self.config, self.asked.timeout_s)

    # --- a step -----------------------------------------------------------------------------------

    def _trained(self) -> int:
        """Return the number of trained parameters."""
        config, blocks = self.config, self.blocks
        if self.measured is not None:
            return self.measured.exchanged
        if blocks is None:
            raise ConfigError(
                "this model is not built of equal blocks: nothing can be estimated",
                code="model-not-estimable",
                hint="leave --device out, so that a few steps are trained",
            )
        layers = _trained_layers(config, blocks)
        if config.fine_tune_type == "full":
            if layers == blocks.layers:
                return all_weights(blocks, tied=self.model.tied)
            return (
                layers
                * (all_weights(blocks, tied=True) - blocks.vocabulary * blocks.dims)
                // blocks.layers
            )
        numbers = adapter_weights(
            blocks, layers, config.lora_parameters.rank, config.lora_parameters.keys
        )
        if not numbers:
            raise no_such_keys(config, linears(blocks), config.lora_parameters.keys or ())
        return numbers

    @property
    def _gradient_word(self) -> int:
        return self.model.word if self.config.fine_tune_type == "full" else 4

    def _step(self) -> StepModel:
        config, word = self.config, self._gradient_word
        if self.measured is not None:
            serial_s, token_s = fitted(self.measured.points)
        else:
            assert self.blocks is not None, "self._trained() has said so"
            where = self.devices[0]
            # The update moves about thirty bytes for each trained number.
            serial_s = 0.002 + self.trained * 30.0 / _BANDWIDTH[where.kind]
            token_s = where.seconds(self._flops(self.blocks, recomputed=config.grad_checkpoint))
            known = ", ".join(dict.fromkeys(each.name for each in self.devices))
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
        data = open_splits(alone)
        assert data.train is not None
        number = len(data.train)
        tokens = data.stored["train"].report.num_tokens / number
        self.notes.append(
            f"for rows of {tokens:.0f} tokens on the average, of which the data have {number:,}"
        )
        return tokens, number

    def _batches(self) -> int:
        config = self.config
        if not config.epochs:
            return config.iters or _DEFAULT_ITERS
        if self.num_rows is None:
            raise ConfigError(
                "the number of steps is not known",
                code="option-missing",
                where="--epochs",
                hint="give --iters: the number of rows is only known after the data are read",
            )
        return math.ceil(config.epochs * math.ceil(self.num_rows / config.batch_size))

    def _steps(self) -> int:
        return math.ceil(self._batches() / self.config.grad_accumulation_steps)

    # --- memory -----------------------------------------------------------------------------------

    def _work(self) -> Work | None:
        config, blocks, measured = self.config, self.blocks, self.measured
        if blocks is None:
            return None
        share = config.batch_size * config.max_seq_length
        most = sizing_of(self.kind, config.micro_batch_tokens, compiled=False).max_tokens
        if self.kind != "cpu" and measured is not None and measured.largest:
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
        if self.kind != "cpu":
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


# --- the model ------------------------------------------------------------------------------------


def _read(config: TrainConfig, kind: str) -> _Model:
    """Return the facts of a model from its files.

    Raises:
        ModelError: weights are missing, or quantised weights cannot be trained in full.
    """
    place = resolve(config.model)
    values = read_config(place)
    quantised = _quantisation(values)
    bits = int(quantised.get("bits", 0))
    if bits and config.fine_tune_type == "full":
        raise full_of_quantised(f"{bits} bits")
    if not (size := all_bytes(place)):
        raise ModelError(
            "weights are missing: no model*.safetensors",
            code="weights-missing",
            where=str(place),
            hint="fetch the model again",
        )
    tied = bool(values.get("tie_word_embeddings", False))
    half = (values.get("torch_dtype") or values.get("dtype")) in ("bfloat16", "float16")
    blocks, group = blocks_of(values), int(quantised.get("group_size", 64)) if bits else 1
    facts: dict[str, Any] = {"bits": bits, "tied": tied, "values": values, "group": group}
    if kind != "cpu":
        return _Model(blocks, size, 2 if half else 4, **facts)
    # A CPU computes in float32, and holds dense weights in float32.
    if not bits or blocks is None:
        return _Model(blocks, size if bits or not half else 2 * size, 4, **facts)
    codes, packed = _forms(blocks, bits, group, size, tied=tied)
    of_block, of_table = codes
    weights_bytes = int(blocks.layers * of_block + (2 - tied) * of_table)
    return _Model(blocks, weights_bytes, 4, forms=(codes, packed), **facts)


def _forms(
    blocks: DecoderShape, bits: int, group: int, size: int, *, tied: bool
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return :func:`forms_on_cpu`, with the packed form scaled to the ``size`` of the files in
    bytes, because scales may have any type.
    """
    codes, (of_block, of_table) = forms_on_cpu(blocks, bits, group)
    by_file = size / (blocks.layers * of_block + (2 - tied) * of_table) if size else 1.0
    return codes, (by_file * of_block, by_file * of_table)


def _quantisation(values: dict[str, Any]) -> dict[str, Any]:
    """Return the part of config.json about quantised weights; empty if the weights are dense."""
    found = values.get("quantization") or values.get("quantization_config")
    return found if isinstance(found, dict) else {}


def _fresh(fresh: PretrainConfig, kind: str) -> _Model:
    """Return the facts of a new model, from the options of pre-training."""
    numbers: dict[str, Any] = fresh.numbers()
    if (file := Path(fresh.tokenizer) / "tokenizer.json").is_file() and fresh.vocabulary is None:
        numbers = {
            "vocabulary": rows_for(Tokenizer.from_file(str(file)).get_vocab_size()),
            **numbers,
        }
    shape = find_shape(fresh.shape, numbers)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mixed = shape.experts, shape.experts_per_token
    blocks = DecoderShape(
        shape.layers, shape.dims, shape.mlp_dims, queries, keys, shape.vocabulary, *mixed
    )
    word = 2 if fresh.dtype == "bfloat16" or (fresh.dtype == "auto" and kind != "cpu") else 4
    values = model_config(shape)
    return _Model(blocks, word * num_parameters(shape), word, tied=shape.tied, values=values)


def _trained_layers(config: TrainConfig, blocks: DecoderShape) -> int:
    asked = resolve_layers(blocks.layers, config)
    return blocks.layers if asked < 0 else asked


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
