"""The only source of option names, defaults, bounds and help texts.

The command line, the YAML file, the Python call and the documentation are all made from
:class:`TrainConfig`. Names and meanings are those of ``mlx_lm.lora``; Hugging Face synonyms are
aliases.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, ValidationError, field_validator, model_validator

from allhands.config.aliases import ALIASES, ELSEWHERE, for_key, take_outdated
from allhands.config.combinations import refuse_combinations
from allhands.config.nested import HfDataset, LoraParameters, LrSchedule, Strict
from allhands.config.problems import canonical_key, explained, place_in_yaml
from allhands.config.values import (
    LocalPath,
    Split,
    batches_of,
    parse_json,
    parse_size,
    parse_weights,
)
from allhands.errors import ConfigError
from allhands.io.paths import local_path

# The values of --report-to, and the package that each needs.
TRACKERS = {"tensorboard": "tensorboardX"} | {
    name: name for name in ("wandb", "mlflow", "trackio", "swanlab")
}
# Compiling a step of SmolLM-135M for an H200 costs 19 s if its kernels were never built, and less
# than 1 s if they are cached. It saves 10 to 14 ms of the 62 ms of a step. So it pays from 1,500
# batches on the first time, and from 100 later.
COMPILE_FROM_BATCHES = 400


class TrainConfig(Strict):
    """Everything a fine-tuning run depends on."""

    _notes: tuple[str, ...] = PrivateAttr(default=())

    VERB: ClassVar[str] = "train"
    FIRST: ClassVar[tuple[str, ...]] = ()
    HIDDEN: ClassVar[frozenset[str]] = frozenset()
    # Options that say where and how to run, not what is computed: ranks may differ in them.
    LOCAL_KEYS: ClassVar[frozenset[str]] = frozenset(
        {
            "config",
            "adapter_path",
            "cores_per_rank",
            "log_level",
            "resume",
            "hostfile",
            "hosts",
            "num_ranks",
            "min_ranks",
            "max_restarts",
            "hang_timeout_s",
            "stop_grace_s",
            "start_timeout_s",
            "tag_output",
            "profile",
            "gradient_check",
        }
    )

    model: LocalPath = Field(
        "demo", description="Model directory, Hugging Face repository, or 'demo'."
    )
    train: bool = Field(False, description="Train. This is the default without --test.")
    data: LocalPath = Field(
        "demo", description="Directory with train, valid and test .jsonl, a Hub dataset, or 'demo'."
    )
    fine_tune_type: Literal["lora", "dora", "full"] = Field(
        "lora", description="Adapters (lora, dora), or all weights (full)."
    )
    optimizer: Literal["adam", "adamw", "muon", "sgd", "adafactor"] = Field(
        "adam", description="Optimizer."
    )
    optimizer_config: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="Keyword arguments by optimizer name (JSON)."
    )
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of data order, adapters and dropout.")
    num_layers: int | None = Field(
        None,
        ge=-1,
        description="Blocks to train, counted from the last; -1 is all. [adapters: 16; full: all]",
    )
    batch_size: int = Field(
        4, ge=1, le=10**6, description="Examples per batch: global, over all ranks."
    )
    iters: int | None = Field(
        None, ge=1, le=10**9, description="Iterations: batches to train on. [1000, unless --epochs]"
    )
    epochs: float | None = Field(
        None, gt=0, le=10**6, description="Passes over the training set, instead of --iters."
    )
    val_batches: int = Field(
        25, ge=-1, description="Validation batches; -1 is the whole set, 0 none."
    )
    learning_rate: float = Field(
        1e-5, gt=0, description="Learning rate (the peak, with a schedule)."
    )
    lr_schedule: LrSchedule | None = Field(
        None, description="constant, linear or cosine by name, or mlx_lm's schedule as JSON."
    )
    warmup_steps: int | None = Field(
        0, ge=0, description="Steps (optimizer updates) of linear warm-up."
    )
    weight_decay: float | None = Field(
        None, ge=0, description="Weight decay of adamw, muon, sgd, adafactor."
    )
    weight_decay_on: Literal["all", "matrices"] = Field(
        "all", description="matrices: no weight decay of norms and biases."
    )
    master_weights: bool = Field(
        False,
        description="Update float32 copies of half-precision weights, then round them to the weights.",
    )
    max_grad_norm: float | None = Field(
        None, gt=0, description="Clip the global gradient norm to this value."
    )
    grad_accumulation_steps: int = Field(
        1, ge=1, description="Iterations (batches) per step; a step is one optimizer update."
    )
    steps_per_report: int = Field(
        10, ge=1, description="Iterations (batches) between training reports."
    )
    steps_per_eval: int = Field(200, ge=1, description="Iterations (batches) between validations.")
    save_every: int = Field(100, ge=1, description="Iterations (batches) between saves.")
    adapter_path: LocalPath = Field(
        "adapters", description="Directory for adapters, metrics, plot and logs."
    )
    resume_adapter_file: LocalPath | None = Field(
        None, description="Adapter weights to start from."
    )
    resume: LocalPath | None = Field(
        None,
        description="Go on from a checkpoint: its path, or auto for the latest in --adapter-path, if any.",
    )
    keep_last: int = Field(
        2, ge=0, description="Checkpoints to keep, the latest ones; 0 writes none."
    )
    keep_every: int | None = Field(
        None, ge=1, description="Also keep checkpoints at multiples of this number of iterations."
    )
    keep_best: bool = Field(
        True, description="Also keep the checkpoint with the best validation loss, as best/."
    )
    checkpoint_copies: int = Field(
        2,
        ge=1,
        description="Computers that keep copies of the checkpoints, without a shared file system.",
    )
    non_finite: Literal["stop", "skip"] = Field(
        "stop",
        description="At a NaN or infinite gradient: stop, or skip the update (10 in a row end the run).",
    )
    early_stopping_patience: int | None = Field(
        None, ge=1, description="Stop after this many validations without improvement."
    )
    early_stopping_min_delta: float = Field(
        0.0, ge=0, description="Smallest change that counts as an improvement."
    )
    test: bool = Field(
        False, description="Evaluate on the test set (after training, with --train)."
    )
    test_batches: int = Field(500, ge=-1, description="Test batches; -1 is the whole set.")
    max_seq_length: int = Field(
        2048, ge=2, le=10**8, description="Most tokens of an example; longer ones are cut."
    )
    mask_prompt: bool = Field(False, description="Train on the answers only.")
    train_on: Literal["assistant", "last", "all"] = Field(
        "assistant",
        description="With --mask-prompt: every assistant turn, the last one, or all tokens.",
    )
    chat_template: LocalPath | None = Field(
        None,
        description="Chat template in place of the model's: a Jinja file, or chatml, llama3, gemma, mistral, zephyr.",
    )
    system: Literal["template", "merge"] = Field(
        "template",
        description="merge: put system messages before questions, for templates without a place for them.",
    )
    packing: bool = Field(
        False,
        description="Join all texts and cut them into rows of --max-seq-length: for pre-training.",
    )
    isolate_documents: bool = Field(
        False,
        description="With --packing: attention and positions do not cross the texts of a row.",
    )
    lora_parameters: LoraParameters = Field(
        default_factory=lambda: LoraParameters.model_validate({}),
        description='Adapter shape as JSON: {"rank": 8, "scale": 20.0, "dropout": 0.0}.',
    )
    grad_checkpoint: bool = Field(
        False, description="Recompute activations in the backward pass: less memory."
    )
    micro_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="Tokens (padding included) computed at once on a rank. [chosen by device]",
    )
    compile: Literal["auto", "on", "off"] = Field(
        "auto", description="Compile the step; auto: on GPUs, for runs that are long enough."
    )
    deterministic: bool = Field(
        False,
        description="Equal bits in repeated runs on NVIDIA GPUs; attention without cuDNN is slower.",
    )
    gradient_check: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Before training compare the gradient with that of mlx_lm's own model; auto: once per kind of run.",
    )
    clear_cache_threshold: int = Field(
        0, ge=0, description="Clear MLX's buffer cache above this size, such as 2GB."
    )
    hf_dataset: HfDataset | list[HfDataset] | None = Field(
        None, description="Hub datasets to train on (YAML or JSON)."
    )
    prompt_feature: str | None = Field(None, description="Column with the prompt.")
    completion_feature: str | None = Field(None, description="Column with the completion.")
    chat_feature: str | None = Field(None, description="Column with the messages.")
    text_feature: str | None = Field(None, description="Column with the text.")
    trust_remote_code: bool = Field(
        False, description="Allow a model repository's own Python code."
    )
    report_to: str | None = Field(
        None,
        description="Also report to tensorboard, wandb, mlflow, trackio, swanlab (comma-separated).",
    )
    project_name: str | None = Field(None, description="Project name for --report-to.")
    config: LocalPath | None = Field(
        None, description="YAML file with these options; flags win over it."
    )
    num_ranks: int = Field(
        1, ge=1, le=1024, description="Processes to start here; with --hostfile: ranks at most."
    )
    backend: Literal["auto", "ring", "mpi", "nccl", "jaccl"] = Field(
        "auto", description="Communication back-end."
    )
    cores_per_rank: int | None = Field(
        None, ge=1, description="Processor cores each local process may use."
    )
    rank_weights: list[float] | Literal["auto", "equal"] | None = Field(
        None,
        description="Ranks' shares of a batch: auto (by speed), equal, or speeds (JSON). [auto with several hosts]",
    )
    bucket_mb: float | None = Field(
        None,
        gt=0,
        description="Size of an all-reduce call in MB. Default: 128 with NCCL, 32 otherwise.",
    )
    strategy: Literal["auto", "data", "zero1", "zero2", "zero3", "fsdp", "pipeline"] = Field(
        "auto",
        description="Division of the work over ranks: data, zero1 (sharded optimizer state), fsdp or zero3 (sharded "
        "weights, too), zero2 (fsdp with --reshard off), pipeline (each rank has some of the blocks); auto: data, or "
        "zero1 with NCCL and float32 copies; if memory is short, a strategy that fits.",
    )
    reshard: Literal["auto", "on", "off"] = Field(
        "auto",
        description="With --strategy fsdp: on fetches weights again for the backward pass; off keeps them for a step; "
        "auto: off in pipelines and with zero2.",
    )
    dp_shard: int | None = Field(
        None,
        ge=2,
        description="With --strategy fsdp or pipeline: ranks that divide each array. [fsdp: all]",
    )
    tp: int = Field(
        1,
        ge=1,
        description="Ranks that divide the matrices of each block, and compute the same rows.",
    )
    cp: int = Field(
        1, ge=1, description="Ranks that divide each row by token positions; for long rows."
    )
    ep: int = Field(
        1,
        ge=1,
        description="Ranks that divide the experts of each block, and compute rows of their own.",
    )
    pp: int | None = Field(
        None, ge=2, description="With --strategy pipeline: ranks of a pipeline. [all]"
    )
    pp_schedule: Literal["1f1b", "interleaved", "zb"] = Field(
        "1f1b",
        description="With --strategy pipeline: order of the passes; interleaved and zb wait less.",
    )
    pp_split: Split = Field(
        "auto", description="Blocks of each stage, such as 20,12; auto: by speed and memory."
    )
    compress: Literal["none", "bf16", "int8", "int4"] = Field(
        "none",
        description="Compress gradients for slow links: bf16 sends half of float32's bytes, int8 0.28, int4 0.16. "
        "Changes the result a little.",
    )
    sync_every: int = Field(
        1,
        ge=1,
        le=10**6,
        description="Local steps of each rank before weights are averaged, for slow links. Changes the result.",
    )
    outer_lr: float = Field(
        1.0,
        gt=0,
        description="With --sync-every: learning rate of the outer step. 1 averages; DiLoCo takes 0.7.",
    )
    outer_momentum: float = Field(
        0.0,
        ge=0,
        lt=1,
        description="With --sync-every: Nesterov momentum of the outer step. DiLoCo takes 0.9.",
    )
    sync_fragments: int = Field(
        1, ge=1, description="With --sync-every: number of parts of the weights, exchanged in turn."
    )
    sync_delay: int = Field(
        0, ge=0, description="Steps that an exchange may be late; without --sync-every: 0 or 1."
    )
    start_timeout_s: float = Field(
        300.0, gt=0, description="Seconds until every rank must have started."
    )
    hostfile: LocalPath | None = Field(
        None, description="Computers to train on: mlx.launch's JSON, or 'host slots=N' lines."
    )
    hosts: str | None = Field(
        None, description="Computers to train on, by name: node1,node2:2 for one rank and two."
    )
    min_ranks: int | None = Field(
        None, ge=1, description="Fewest ranks with which a run goes on after a fault. [all]"
    )
    max_restarts: int | None = Field(
        None,
        ge=0,
        description="Most restarts from the last checkpoint after faults. [3 with several ranks, else 0]",
    )
    hang_timeout_s: float | None = Field(
        None,
        gt=0,
        description="Seconds without progress that count as a hang. [adapts to the measured steps]",
    )
    stop_grace_s: float = Field(
        60.0,
        gt=0,
        description="Seconds for saving after a stop, from the end of the running step.",
    )
    tag_output: bool | None = Field(
        None,
        description="Show the lines of all ranks; each begins with its rank and computer. [with several computers]",
    )
    sample_prompts: list[str] | None = Field(
        None,
        description='Texts that the model continues at each validation (JSON): ["Once upon a time"].',
    )
    sample_every: int | None = Field(
        None, ge=1, description="Iterations (batches) between samples. [with each validation]"
    )
    sample_tokens: int = Field(100, ge=1, description="Tokens of a sample at most.")
    sample_temperature: float = Field(
        0.8, ge=0, description="Temperature of the samples; 0 is greedy."
    )
    log_level: Literal["normal", "verbose"] = Field(
        "normal", description="verbose explains each choice."
    )
    profile: bool = Field(
        False, description="With each report, show the time of each part of a step."
    )

    @field_validator(
        "model",
        "data",
        "adapter_path",
        "resume",
        "resume_adapter_file",
        "config",
        "hostfile",
        "hosts",
    )
    @classmethod
    def _not_empty(cls, value: str | None) -> str | None:
        # A shell gives an empty text for a variable that is not set. It must not count as an option
        # that was not given.
        if value is not None and not value.strip():
            raise ValueError("must not be empty")
        return value

    @field_validator("lora_parameters", "optimizer_config", "hf_dataset", mode="before")
    @classmethod
    def _json_value(cls, value: Any) -> Any:
        return parse_json(value)

    @field_validator("rank_weights", mode="before")
    @classmethod
    def _weights(cls, value: Any) -> Any:
        return parse_weights(value)

    @field_validator("sample_prompts", mode="before")
    @classmethod
    def _one_prompt(cls, value: Any) -> Any:
        value = parse_json(value)
        return [value] if isinstance(value, str) else value

    @field_validator("lr_schedule", mode="before")
    @classmethod
    def _schedule_by_name(cls, value: Any) -> Any:
        value = parse_json(value)
        return {"name": value} if isinstance(value, str) else value

    @field_validator("clear_cache_threshold", mode="before")
    @classmethod
    def _size(cls, value: Any) -> Any:
        return parse_size(value)

    @field_validator("num_layers")
    @classmethod
    def _some_layers(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("0 layers would train nothing: give a number from 1, or -1 for all")
        return value

    @field_validator("optimizer_config")
    @classmethod
    def _arguments_of_optimizers(
        cls, value: dict[str, dict[str, Any]]
    ) -> dict[str, dict[str, Any]]:
        from allhands.config.optimizer_arguments import (
            checked_arguments,
        )  # imported here, because the help does not need it

        return {name: checked_arguments(name, arguments) for name, arguments in value.items()}

    @field_validator("report_to")
    @classmethod
    def _known_reporters(cls, value: str | None) -> str | None:
        for name in (value or "").split(","):
            if name.strip() and name.strip().lower() not in TRACKERS:
                raise ValueError(f"{name.strip()!r} is not known: {', '.join(TRACKERS)}")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> TrainConfig:
        refuse_combinations(self)
        return self

    @property
    def given_weights(self) -> list[float] | None:
        """The ranks' speeds, if they were given as numbers; else ``None``."""
        return self.rank_weights if isinstance(self.rank_weights, list) else None

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for people on options without effect, as in mlx_lm."""
        return self._notes

    def batches(self, per_epoch: int) -> int:
        """Return the number of batches of the whole training, with ``per_epoch`` batches an epoch.

        Raises:
            ConfigError: ``--epochs`` makes too many batches.
        """
        if self.iters is None and self.epochs:
            return batches_of(self.epochs, per_epoch)
        return self.iters or 1000

    def noted(self, notes: tuple[str, ...]) -> Self:
        """Return a copy of these options with other :attr:`notes`."""
        found = self.model_copy()
        found._notes = notes
        return found

    def shared_values(self) -> dict[str, Any]:
        """Return the options that all ranks must agree on, as plain JSON values."""
        return {k: v for k, v in self.model_dump(mode="json").items() if k not in self.LOCAL_KEYS}

    def fingerprint(self) -> str:
        """Return the SHA-256 of :meth:`shared_values`, in hexadecimal digits."""
        return hashlib.sha256(json.dumps(self.shared_values(), sort_keys=True).encode()).hexdigest()


def build_config(
    flags: Mapping[str, Any],
    yaml_file: str | Path | None = None,
    kind: type[TrainConfig] = TrainConfig,
) -> TrainConfig:
    """Merge flags over a YAML file over the defaults and validate.

    Args:
        flags: given options by field name or alias; ``None`` means not given.
        yaml_file: a file with the same keys, or ``None``.
        kind: the class of the options.

    Raises:
        ConfigError: unreadable YAML, an unknown key (with a suggestion), a key given twice, a wrong
            value, or options that contradict each other.
    """
    from allhands.config.yaml_files import read_yaml

    yaml_file = local_path(yaml_file, "--config") if yaml_file else None
    content = read_yaml(yaml_file) if yaml_file else {}
    notes = take_outdated(content)
    values = _canonical(content, str(yaml_file), kind) if yaml_file else {}
    given = {key: value for key, value in flags.items() if value is not None}
    values |= _canonical(given, None, kind)
    try:
        config = kind.model_validate(values)
    except ValidationError as error:
        raise explained(error, given, yaml_file, kind) from None
    return config.noted((*notes, *_unused_alpha(values.get("lora_parameters"), config)))


def _unused_alpha(value: Any, config: TrainConfig) -> list[str]:
    shape = parse_json(value)
    if not isinstance(shape, Mapping) or "alpha" not in shape:
        return []
    scale = config.lora_parameters.scale
    return [
        f"lora_parameters: alpha has no effect, as in mlx_lm: the factor on the adapter is scale ({scale:g})"
    ]


def _canonical(
    values: Mapping[str, Any], source: str | None, kind: type[TrainConfig]
) -> dict[str, Any]:
    """Return the options that have a value, by their names instead of aliases.

    Args:
        source: the YAML file, for messages; ``None`` for flags.

    Raises:
        ConfigError: a key is unknown, or an option is given twice.
    """
    result: dict[str, Any] = {}
    spelled: dict[str, Any] = {}
    unknown: list[tuple[str, str, str]] = []  # place, problem and hint
    for raw, value in values.items():
        key = canonical_key(raw)
        where = place_in_yaml(source, key) if source else f"--{key.replace('_', '-')}"
        if key in ELSEWHERE:
            raise ConfigError(
                f"{raw} is not an option of allhands",
                code="option-unknown",
                where=where,
                hint=for_key(ELSEWHERE[key]),
            )
        if key not in kind.model_fields:
            known = [*kind.model_fields, *ALIASES]
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.6)
            hint = (
                f"did you mean {near[0]}?"
                if near
                else f"see allhands {kind.VERB} --help for all options"
            )
            unknown.append((where, f"unknown option {raw!r}", hint))
            continue
        if key in spelled:
            names = f"{spelled[key]} and {raw}"
            raise ConfigError(
                f"{key} is given twice, as {names}",
                code="option-given-twice",
                where=where,
                hint="keep one of them",
            )
        spelled[key] = raw
        # ``null`` means "not set", as in mlx_lm's files: the default remains.
        if value is not None:
            result[key] = value
    if unknown:
        (where, problem, hint), *others = unknown
        more = "".join(f"; and {place}: {what} ({advice})" for place, what, advice in others)
        raise ConfigError(problem + more, code="option-unknown", where=where, hint=hint)
    return result
