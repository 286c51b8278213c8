"""Types of the keyword arguments of :func:`allhands.finetune` and :func:`allhands.pretrain`.

This file is made from the configuration model: ``python scripts/write_option_types.py``. Other
names of options that are understood, such as ``lr``, are unknown to type checkers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

from allhands.config.nested import Strict

PathName = str | os.PathLike[str]
# An option with fields of its own.
Object = Mapping[str, Any] | Strict


class TrainOptions(TypedDict, total=False):
    """The options of ``allhands train``."""

    model: PathName
    train: bool
    data: PathName
    fine_tune_type: Literal["lora", "dora", "full"]
    optimizer: Literal["adam", "adamw", "muon", "sgd", "adafactor"]
    optimizer_config: Mapping[str, Mapping[str, Any]]
    seed: int
    num_layers: int | None
    batch_size: int
    iters: int | None
    epochs: float | None
    val_batches: int
    learning_rate: float
    lr_schedule: Literal["constant", "linear", "cosine"] | Object | None
    warmup_steps: int | None
    weight_decay: float | None
    weight_decay_on: Literal["all", "matrices"]
    master_weights: bool
    max_grad_norm: float | None
    grad_accumulation_steps: int
    steps_per_report: int
    steps_per_eval: int
    save_every: int
    adapter_path: PathName
    resume_adapter_file: PathName | None
    resume: PathName | None
    keep_last: int
    keep_every: int | None
    keep_best: bool
    checkpoint_copies: int
    non_finite: Literal["stop", "skip"]
    early_stopping_patience: int | None
    early_stopping_min_delta: float
    test: bool
    test_batches: int
    max_seq_length: int
    mask_prompt: bool
    train_on: Literal["assistant", "last", "all"]
    chat_template: PathName | None
    system: Literal["template", "merge"]
    packing: bool
    isolate_documents: bool
    lora_parameters: Object
    grad_checkpoint: bool
    micro_batch_tokens: int | None
    compile: bool | Literal["auto", "on", "off"]
    deterministic: bool
    gradient_check: bool | Literal["auto", "on", "off"]
    clear_cache_threshold: str | int
    hf_dataset: Object | Sequence[Object] | None
    prompt_feature: str | None
    completion_feature: str | None
    chat_feature: str | None
    text_feature: str | None
    trust_remote_code: bool
    report_to: str | None
    project_name: str | None
    num_ranks: int
    backend: Literal["auto", "ring", "mpi", "nccl", "jaccl"]
    cores_per_rank: int | None
    rank_weights: Sequence[float] | Literal["auto", "equal"] | None
    bucket_mb: float | None
    strategy: Literal["auto", "data", "zero1", "zero2", "zero3", "fsdp", "pipeline"]
    reshard: bool | Literal["auto", "on", "off"]
    dp_shard: int | None
    tp: int
    cp: int
    ep: int
    pp: int | None
    pp_schedule: Literal["1f1b", "interleaved", "zb"]
    pp_split: str
    compress: Literal["none", "bf16", "int8", "int4"]
    sync_every: int
    outer_lr: float
    outer_momentum: float
    sync_fragments: int
    sync_delay: int
    start_timeout_s: float
    hostfile: PathName | None
    hosts: str | None
    min_ranks: int | None
    max_restarts: int | None
    hang_timeout_s: float | None
    stop_grace_s: float
    tag_output: bool | None
    sample_prompts: str | Sequence[str] | None
    sample_every: int | None
    sample_tokens: int
    sample_temperature: float
    log_level: Literal["normal", "verbose"]
    profile: bool


class PretrainOptions(TrainOptions, total=False):
    """The options of ``allhands pretrain``."""

    tokenizer: PathName
    shape: str
    layers: int | None
    dims: int | None
    mlp_dims: int | None
    heads: int | None
    kv_heads: int | None
    head_dim: int | None
    vocabulary: int | None
    block_size: int | None
    rope_theta: float | None
    tied: bool | None
    experts: int | None
    experts_per_token: int | None
    router_aux_loss: float
    dtype: Literal["auto", "float32", "bfloat16"]
