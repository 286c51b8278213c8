"""Headings of a training's options in the help."""

from __future__ import annotations

GROUPS: dict[str, tuple[str, ...]] = {
    "Model and data": (
        *(
            "model",
            "tokenizer",
            "data",
            "hf_dataset",
            "prompt_feature",
            "completion_feature",
            "chat_feature",
        ),
        *(
            "text_feature",
            "chat_template",
            "system",
            "mask_prompt",
            "train_on",
            "max_seq_length",
            "packing",
        ),
        *("isolate_documents", "trust_remote_code"),
    ),
    "A new model": (
        *(
            "shape",
            "layers",
            "dims",
            "mlp_dims",
            "heads",
            "kv_heads",
            "head_dim",
            "vocabulary",
            "block_size",
        ),
        *("rope_theta", "tied", "experts", "experts_per_token", "router_aux_loss", "dtype"),
    ),
    "What is trained, and for how long": (
        *(
            "train",
            "fine_tune_type",
            "num_layers",
            "lora_parameters",
            "resume_adapter_file",
            "batch_size",
        ),
        *("grad_accumulation_steps", "iters", "epochs", "seed"),
    ),
    "Optimizer": (
        *(
            "optimizer",
            "optimizer_config",
            "learning_rate",
            "lr_schedule",
            "warmup_steps",
            "weight_decay",
        ),
        *("weight_decay_on", "max_grad_norm", "master_weights", "non_finite"),
    ),
    "Validation, reports and samples": (
        *(
            "val_batches",
            "steps_per_eval",
            "early_stopping_patience",
            "early_stopping_min_delta",
            "test",
        ),
        *(
            "test_batches",
            "steps_per_report",
            "report_to",
            "project_name",
            "sample_prompts",
            "sample_every",
        ),
        *("sample_tokens", "sample_temperature", "profile", "log_level", "verbose", "split"),
    ),
    "Saving and going on": (
        *(
            "adapter_path",
            "save_every",
            "keep_last",
            "keep_every",
            "keep_best",
            "checkpoint_copies",
            "resume",
        ),
    ),
    "Several processes and computers": (
        *(
            "num_ranks",
            "hosts",
            "hostfile",
            "backend",
            "rank_weights",
            "strategy",
            "bucket_mb",
            "min_ranks",
        ),
        *("reshard", "dp_shard", "tp", "cp", "ep", "pp", "pp_schedule", "pp_split"),
        *("compress", "sync_every", "outer_lr", "outer_momentum", "sync_fragments", "sync_delay"),
        *("max_restarts", "hang_timeout_s", "start_timeout_s", "stop_grace_s", "tag_output"),
    ),
    "Memory and speed": (
        *(
            "grad_checkpoint",
            "micro_batch_tokens",
            "cores_per_rank",
            "compile",
            "deterministic",
            "gradient_check",
        ),
        *("clear_cache_threshold",),
    ),
}
OTHERS = "Options"


def group_of(name: str) -> str:
    """Return the heading above the option of a field; :data:`OTHERS` for those of no group."""
    return next((group for group, names in GROUPS.items() if name in names), OTHERS)
