"""What ``allhands plan`` stands on: the model's widths, a short training here, and the link."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from allhands.cli.launching import require_cores
from allhands.cli.plan_calibration import Calibration, calibrate, small_passes, steps_of, time_to_start
from allhands.cli.plan_computers import (
    AskedComputers,
    computers_of,
    devices_of,
    hosts_of,
    link_between,
    on_hosts,
    prices_of,
)
from allhands.cli.plan_validations import number_of, seconds_of, valid_rows
from allhands.config.pretrain_schema import pretraining
from allhands.config.schema import TrainConfig
from allhands.distributed.codecs import CODECS, require_gain
from allhands.distributed.mesh import check_weights
from allhands.errors import ConfigError
from allhands.io.formatting import format_bytes, format_count, format_duration
from allhands.parallel.costs import PackedGradients
from allhands.parallel.rounds import rounds_of
from allhands.plan.devices import Device
from allhands.plan.job import Job
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
from allhands.run.training_memory import WRITING_BYTES, Blocks, Work, blocks_of, of_process, on_cpu, on_gpu

_DEFAULT_ITERS = 1000
_FELT_S = 1.0
_BANDWIDTH = {"metal": 200e9, "cuda": 1e12}  # of memory, about, in bytes a second
_METHODS = {"lora": "LoRA", "dora": "DoRA", "full": "full training"}


@dataclass(frozen=True)
class _Model:
    """What its files tell.

    Attributes:
        weights_bytes: as they are held in training.
        bits: of quantised weights, 0 for dense ones.
        forms: of these as a CPU holds them, see :func:`forms_on_cpu`.
        word: bytes of a number of dense weights in memory.
    """

    config: dict[str, Any]
    blocks: Blocks | None
    weights_bytes: int
    bits: int
    word: int
    forms: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True)
class _Rows:
    """Of the training data: tokens of a row on the average, and how many rows there are, where that is known."""

    tokens: float
    number: int | None


def facts_of(
    config: TrainConfig, asked: AskedComputers, say: Callable[[str], object]
) -> tuple[Job, list[str], Calibration | None]:
    """Everything to plan with, notes on where it is from, and what a short training here has shown.

    Raises:
        ConfigError: options contradict each other.
        AllhandsError: the model or the data cannot be read, or the short training failed.
    """
    devices = devices_of(asked.device)
    _check(config, asked, devices)
    kind = devices[0].kind if devices else _kind_here()
    model = _model(config, kind)
    notes = list(config.notes)
    energy: list[str] = []
    prices = prices_of(asked, devices, energy)  # before anything that takes long
    measured, shared = None, config
    together = not devices and config.num_ranks > 1 and not on_hosts(config)
    if not devices:
        steps = steps_of(config, on_gpu=kind != "cpu")
        say(f"training {steps} steps with the whole batch, and with half of it ...")
        shared = _as_one_of(config, notes)
        several = kind == "cpu" and (together or (on_hosts(config) and shared.cores_per_rank is not None))
        measured = calibrate(shared, asked.timeout_s, say, on_gpu=kind != "cpu", with_all_cores=several)
        notes.append(_told(measured))
    rows = _rows(config, measured, say, notes)
    step = _step(config, model, kind, measured, devices, rows, notes)
    link = link_between(config, asked, len(devices), say, notes)
    computers = computers_of(config, asked, devices, kind, link, say, notes)
    notes += energy
    work = _work(config, model, kind, measured, rows)
    batches = _batches(config, rows)
    valid = valid_rows(config, counted=measured is not None or rows.number is not None, say=say, notes=notes)
    layers = _trained_layers(config, model.blocks) if model.blocks is not None else 0
    job = Job(
        steps=_steps(config, rows),
        start_s=measured.start_s if measured else 0.0,
        whole_s=measured.whole_s if measured else None,
        first_s=_first_s(config, kind, measured, rows),
        started=_started(config, asked, say) if together else None,
        step=step,
        validations=number_of(batches, config.steps_per_eval, config.grad_accumulation_steps) if valid.number else 0,
        validation_s=seconds_of(valid, step, config, model.blocks, layers),
        link=link,
        computers=computers,
        numbers=tuple(range(1, config.num_ranks + 1)) if together else asked.machines,
        imagined=bool(asked.machines) and not together,
        blocks=model.blocks,
        work=work,
        of=on_cpu if kind == "cpu" else on_gpu,
        batch_rows=config.batch_size,
        present_bytes=_present(config, model.blocks, work, measured) if kind == "cpu" else 0,
        needed_bytes=measured.peak_bytes if kind == "cuda" and measured is not None else 0,
        quantised=model.bits > 0,
        once=asked.once,
        together=together,
        shares=together and kind != "cuda",
        room=_room(config) if together and kind == "cpu" else 0,
        prices=prices,
        doubt=measured.doubt if measured else "",
        about=_about(config, rows),
        again_s=_again_s(config, model.blocks, layers),
        rounds=rounds_of(config) if config.sync_every > 1 or config.sync_delay else None,
        kind=kind,
        tied=bool(model.config.get("tie_word_embeddings", False)),
        forms=model.forms,
    )
    if kind == "cuda" and measured is not None and model.blocks is not None and work is not None:
        from allhands.parallel.runahead import limit_for
        from allhands.runtime.accelerator import device_memory

        most = limit_for(max(job.needed_bytes, on_gpu(model.blocks, work).arrays), device_memory())
        notes.append(f"of the GPU's memory training takes up to {format_bytes(most)} where it is free: it is faster so")
    if measured is not None and on_hosts(config):
        job = _with_small_passes(job, shared, measured, asked, say)
    return job, notes, measured


def _with_small_passes(
    job: Job, config: TrainConfig, measured: Calibration, asked: AskedComputers, say: Callable[[str], object]
) -> Job:
    """With the time of micro-batches as small as those of the smallest pipeline that is spoken of, if one is."""
    pipelines = look_ahead(job).pipelines
    if not pipelines:
        return job
    say("training a few steps with the small micro-batches of a pipeline ...")
    stages = min(each.machines for each in pipelines)
    return replace(job, small=small_passes(config, measured, stages, asked.timeout_s, on_gpu=job.kind != "cpu"))


def _about(config: TrainConfig, rows: _Rows) -> str:
    """The training in a few words."""
    fresh = pretraining(config)
    method = _METHODS[config.fine_tune_type]
    what = f"pre-training of {fresh.shape}" if fresh is not None else f"{method} of {Path(config.model).name}"
    return f"{what}: {_steps(config, rows):,} steps of {config.batch_size * config.grad_accumulation_steps} rows"


def _again_s(config: TrainConfig, blocks: Blocks | None, layers: int) -> float:
    """Of the passes with activations computed again, by those without."""
    if blocks is None or config.grad_checkpoint:
        return 1.0
    once, again = (flops_per_token(blocks, config.fine_tune_type, layers, recomputed=way) for way in (False, True))
    return again / once


def _first_s(config: TrainConfig, kind: str, measured: Calibration | None, rows: _Rows) -> float:
    """Seconds that the first steps take longer; a part of them where the training is shorter than the one here was."""
    here = steps_of(config, on_gpu=kind != "cpu")
    return 0.0 if measured is None else measured.first_s * min(1.0, _steps(config, rows) / here)


def _check(config: TrainConfig, asked: AskedComputers, devices: list[Device]) -> None:
    if not (on_hosts(config) or devices):
        require_cores(config.num_ranks)
    if not devices:
        check_weights(config.given_weights, sum(host.slots for host in hosts_of(config)))
    values = {
        "--link": asked.link,
        "--hosts": config.hosts,
        "--hostfile": config.hostfile,
        "-n": config.num_ranks > 1 and not config.hostfile,
    }
    given = [flag for flag, value in values.items() if value]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other", where=given[-1], hint="give one of them")
    if devices and given and given != ["--link"]:
        hint = "leave --device out to plan with this computer's speed, or describe the link: --link 10GbE"
        raise ConfigError("computers that are only described cannot be measured", where="--device", hint=hint)
    named = len(devices) > 1 or on_hosts(config) or config.num_ranks > 1
    if named and asked.machines:
        raise ConfigError("the computers are named one by one", where="--machines", hint="leave it out")


def _as_one_of(config: TrainConfig, notes: list[str]) -> TrainConfig:
    """With the cores that each of several processes of a computer will have."""
    if config.cores_per_rank or (config.num_ranks == 1 and not on_hosts(config)):
        return config
    ranks = max(host.slots for host in hosts_of(config))
    if ranks == 1:
        return config
    from allhands.runtime.blas import available_cores

    cores, there = max(1, available_cores() // ranks), available_cores()
    told = f"each of {ranks} processes of this computer has {cores} of its cores: so has the one below"
    if ranks > there:
        told = f"{ranks} processes share {there} core{'s' * (there > 1)}, and take turns on them; the one below has one"
    notes.append(told)
    return config.model_copy(update={"cores_per_rank": cores})


def _room(config: TrainConfig) -> int:
    """How many processes of this computer there are cores for."""
    from allhands.runtime.blas import available_cores

    return max(1, available_cores() // (config.cores_per_rank or 1))


def _kind_here() -> str:
    from allhands.runtime.accelerator import detect

    return detect().kind


# --- the model ----------------------------------------------------------------------------------------


def _model(config: TrainConfig, kind: str) -> _Model:
    fresh = pretraining(config)
    if fresh is not None:
        return _fresh(fresh, kind)
    from allhands.model.load import read_config
    from allhands.model.sources import resolve

    place = resolve(config.model)
    values = read_config(place)
    quantised = values.get("quantization") or values.get("quantization_config") or {}
    bits = int(quantised.get("bits", 0)) if isinstance(quantised, dict) else 0
    if bits and config.fine_tune_type == "full":
        from allhands.model.adapters import full_of_quantised

        raise full_of_quantised(f"{bits} bits")
    size = sum(file.stat().st_size for file in place.glob("*.safetensors"))
    half = str(values.get("torch_dtype") or values.get("dtype") or "") in ("bfloat16", "float16")
    # A CPU computes in float32, in which weights are held there.
    word = 2 if half and kind != "cpu" else 4
    if not bits and half and kind == "cpu":
        size *= 2
    blocks, forms = blocks_of(values), ()
    if bits and kind == "cpu" and blocks is not None:
        forms = forms_on_cpu(blocks, bits, int(quantised.get("group_size", 64)))
        (of_block, of_table), _ = forms
        size = int(blocks.layers * of_block + (1 if values.get("tie_word_embeddings") else 2) * of_table)
    return _Model(values, blocks, size, bits, word, forms)


def _fresh(fresh: Any, kind: str) -> _Model:
    from allhands.model.shapes import find_shape, num_parameters, rows_for

    numbers = fresh.numbers()
    if (file := Path(fresh.tokenizer) / "tokenizer.json").is_file() and fresh.vocabulary is None:
        from tokenizers import Tokenizer

        numbers = {"vocabulary": rows_for(Tokenizer.from_file(str(file)).get_vocab_size()), **numbers}
    shape = find_shape(fresh.shape, numbers)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    mixed = shape.experts, shape.experts_per_token
    blocks = Blocks(shape.layers, shape.dims, shape.mlp_dims, queries, keys, shape.vocabulary, *mixed)
    half = fresh.dtype == "bfloat16" or (fresh.dtype == "auto" and kind != "cpu")
    word = 2 if half else 4
    return _Model({"tie_word_embeddings": shape.tied}, blocks, word * num_parameters(shape), 0, word)


# --- a step -------------------------------------------------------------------------------------------


def _trained_layers(config: TrainConfig, blocks: Blocks) -> int:
    from allhands.model.adapters import resolve_layers

    asked = resolve_layers(blocks.layers, config)
    return blocks.layers if asked < 0 else asked


def _trained(config: TrainConfig, model: _Model, measured: Calibration | None) -> int:
    """Numbers that are trained."""
    if measured is not None:
        return measured.exchanged
    if model.blocks is None:
        hint = "let it be trained for a few steps: leave --device out"
        raise ConfigError("this model is not built of equal blocks: nothing can be estimated", hint=hint)
    blocks, layers = model.blocks, _trained_layers(config, model.blocks)
    if config.fine_tune_type == "full":
        if layers == blocks.layers:
            return all_weights(blocks, tied=bool(model.config.get("tie_word_embeddings", False)))
        return layers * (all_weights(blocks, tied=True) - blocks.vocabulary * blocks.dims) // blocks.layers
    from allhands.model.adapters import no_such_keys

    numbers = adapter_weights(blocks, layers, config.lora_parameters.rank, config.lora_parameters.keys)
    if not numbers:
        raise no_such_keys(config, linears(blocks), config.lora_parameters.keys or ())
    return numbers


def _word_of_gradients(config: TrainConfig, model: _Model) -> int:
    return model.word if config.fine_tune_type == "full" else 4


def _step(
    config: TrainConfig,
    model: _Model,
    kind: str,
    measured: Calibration | None,
    devices: list[Device],
    rows: _Rows,
    notes: list[str],
) -> StepModel:
    number = config.batch_size * config.grad_accumulation_steps
    tokens = rows.tokens * number
    if measured is not None:
        serial_s, token_s = fitted(measured.points)
    else:
        trained, where = _trained(config, model, None), devices[0]
        assert model.blocks is not None, "the line before has said so"
        layers = _trained_layers(config, model.blocks)
        flops = flops_per_token(model.blocks, config.fine_tune_type, layers, recomputed=config.grad_checkpoint)
        # The update moves some thirty bytes of each trained number.
        serial_s = 0.002 + trained * 30.0 / _BANDWIDTH[where.kind]
        token_s = where.seconds(flops)
        known = ", ".join(dict.fromkeys(each.name for each in devices))
        notes.append(
            f"{known}: estimated from what the maker says they can do: good within a factor of 1.5, not better; "
            "a short training there tells (allhands plan on that computer)"
        )
    from allhands.distributed.reduce import bucket_bytes_for

    word = _word_of_gradients(config, model)
    bucket = bucket_bytes_for("nccl" if kind == "cuda" else "ring", config.bucket_mb)
    gradient = _trained(config, model, measured) * word
    every, packed = config.sync_every, _packed(config, model, kind)
    overlapped = kind == "cuda" and every == 1
    beside = rounds_of(config).beside
    return StepModel(serial_s, tokens, token_s, number, gradient, bucket, overlapped, packed, every, beside, word)


def _packed(config: TrainConfig, model: _Model, kind: str) -> PackedGradients | None:
    """How gradients travel, if not as they are."""
    if config.compress == "none":
        return None
    backend, codec = "nccl" if kind == "cuda" else "ring", CODECS[config.compress]
    word = _word_of_gradients(config, model)
    require_gain(codec, backend, max(2, config.num_ranks), word)
    return PackedGradients(codec, backend, word)


def _rows(config: TrainConfig, measured: Calibration | None, say: Callable[[str], object], notes: list[str]) -> _Rows:
    """As the short training has seen them; else those of the data that are named, else as long as they may be."""
    if measured is not None:
        return _Rows(measured.points[0][0] / config.batch_size, measured.examples)
    named = {"data", "hf_dataset"} & config.model_fields_set
    if not named or config.packing:
        why = "rows are packed" if config.packing else "no --data is named"
        notes.append(f"for rows of {config.max_seq_length} tokens, the longest there can be: {why}")
        return _Rows(float(config.max_seq_length), None)
    say("reading the data ...")
    found = _read(config)
    notes.append(f"for rows of {found.tokens:.0f} tokens on the average, of which the data have {found.number:,}")
    return found


def _read(config: TrainConfig) -> _Rows:
    """Tokenised as for the training, which finds the tokens again."""
    from allhands.model.load import load_bare_tokenizer, load_tokenizer
    from allhands.run.datasets import chat_of, find_splits, open_data

    alone = config.model_copy(update={"val_batches": 0, "test": False, "early_stopping_patience": None})
    fresh, trust = pretraining(config), config.trust_remote_code
    tokenizer = load_tokenizer(config.model, trust_remote_code=trust, chat=chat_of(config)) if fresh is None else None
    tokenizer = tokenizer or load_bare_tokenizer(fresh.tokenizer, trust_remote_code=trust, chat=chat_of(config))  # type: ignore[union-attr]
    data = open_data(alone, find_splits(alone), tokenizer)
    rows = data.train
    assert rows is not None
    return _Rows(data.stored["train"].report.num_tokens / len(rows), len(rows))


def _started(config: TrainConfig, asked: AskedComputers, say: Callable[[str], object]) -> tuple[int, float]:
    say(f"starting it in {config.num_ranks} processes ...")
    return config.num_ranks, time_to_start(config, asked.timeout_s)


def _steps(config: TrainConfig, rows: _Rows) -> int:
    """Optimizer updates."""
    return math.ceil(_batches(config, rows) / config.grad_accumulation_steps)


def _batches(config: TrainConfig, rows: _Rows) -> int:
    if config.epochs and rows.number is None:
        hint = "give --iters: how many rows there are is only known when the data have been read"
        raise ConfigError("the number of steps is not known", where="--epochs", hint=hint)
    if config.epochs and rows.number is not None:
        return math.ceil(config.epochs * math.ceil(rows.number / config.batch_size))
    return config.iters or _DEFAULT_ITERS


def _work(config: TrainConfig, model: _Model, kind: str, measured: Calibration | None, rows: _Rows) -> Work | None:
    if model.blocks is None:
        return None
    from allhands.runtime.accelerator import sizing_of

    share = config.batch_size * config.max_seq_length
    most = sizing_of(kind, config.micro_batch_tokens, compiled=False).max_tokens
    if kind != "cpu" and measured is not None and measured.largest:
        most, cuts = measured.largest
        share = min(share, most * cuts)
    elif not config.packing:
        # Rows are as long as they are, not as long as they may be.
        share = min(share, int(1.15 * rows.tokens * config.batch_size))
    trained = _trained(config, model, measured)
    trained_bytes = trained * _word_of_gradients(config, model)
    fresh = pretraining(config) is not None
    weights = model.weights_bytes
    if kind == "cuda" and model.bits and measured is not None:
        from allhands.model.quantized import held_dense
        from allhands.runtime.accelerator import device_memory

        if held_dense(measured.total, device_memory()):
            weights = 2 * measured.total
    masters = kind == "cuda" and config.master_weights and model.word == 2 and config.fine_tune_type == "full"
    row = min(config.max_seq_length, share)
    return Work(
        method=config.fine_tune_type,
        tokens=max(row, min(most, share)),
        row_tokens=row,
        trained_layers=_trained_layers(config, model.blocks),
        weights_bytes=weights + (0 if config.fine_tune_type == "full" else 4 * trained),
        trained_bytes=trained_bytes,
        by_adam_bytes=left_to_adam(model.blocks, config.optimizer, trained_bytes, model.word) if fresh else 0,
        optimizer=config.optimizer,
        recomputed=config.grad_checkpoint,
        accumulated=share > most or config.grad_accumulation_steps > 1,
        masters=masters,
        batch_tokens=share,
        packed=_packed(config, model, kind),
    )


def _present(config: TrainConfig, blocks: Blocks | None, work: Work | None, measured: Calibration | None) -> int:
    """Bytes of a process on a CPU that are no arrays of its training: as it has said itself, or about so many."""
    if blocks is None or work is None or measured is None or measured.expected_bytes is None:
        return PROGRAM_BYTES
    # The steps that were measured have written nothing.
    later = WRITING_BYTES if config.sample_prompts else 0
    return later + max(0, measured.expected_bytes - of_process(on_cpu(blocks, work), 0, 0))


def _told(measured: Calibration) -> str:
    speed = measured.points[0][0] / measured.points[0][1]
    first = measured.first_s
    later = f"; its first steps take {format_duration(first)} longer than later ones" if first >= _FELT_S else ""
    return (
        f"measured here: {speed:,.0f} tokens/s with {format_count(measured.exchanged)} of "
        f"{format_count(measured.total)} parameters trained, {format_bytes(measured.peak_bytes)} at the peak, "
        f"{format_duration(measured.start_s)} to the start{later}"
    )
