"""Other trainers' names for our options: which we understand, and which mean something else.

Apart from the options themselves, because the command line needs them for the smallest of its tasks.
"""

from __future__ import annotations

from typing import Any

# Other people's names for our keys.
ALIASES: dict[str, str] = {
    "num_train_epochs": "epochs",
    "max_steps": "iters",
    "gradient_accumulation_steps": "grad_accumulation_steps",
    "output_dir": "adapter_path",
    "lr": "learning_rate",
    "lr_scheduler_type": "lr_schedule",
    "save_steps": "save_every",
    "eval_steps": "steps_per_eval",
    "logging_steps": "steps_per_report",
    "max_length": "max_seq_length",
    "gradient_checkpointing": "grad_checkpoint",
    "train_type": "fine_tune_type",
    "optim": "optimizer",
    "num_processes": "num_ranks",
    "n": "num_ranks",
    "early_stopping": "early_stopping_patience",
    "clip_grad_norm": "max_grad_norm",
    "pack": "packing",
    "packed": "packing",
    "sample_packing": "packing",
    "resume_from_checkpoint": "resume",
    "save_total_limit": "keep_last",
    "full_determinism": "deterministic",
    "lora_layers": "num_layers",  # in mlx_lm before 0.19
    "model_name_or_path": "model",
    "num_epochs": "epochs",
    "max_seq_len": "max_seq_length",
    "cutoff_len": "max_seq_length",
    "global_batch_size": "batch_size",
    "wandb_project": "project_name",
}
# Keys of the files of earlier versions of mlx_lm, which later ones ignore; each with what counts instead.
OUTDATED: dict[str, str] = {
    "use_dora": "fine_tune_type says what is trained",
    "adapter_file": "the adapter goes into the directory adapter_path",
    "wandb": "report_to says where to report",
}
_SHARDED = (
    "the model is not divided among ranks here, each has all of it: -n or --hosts divides the batch, and "
    "--strategy zero1 the optimizer's state (as ZeRO-1); torchtitan and DeepSpeed divide the model"
)
_EXCHANGE = (
    "gradients are exchanged whole, once a step: larger batches or --grad-accumulation-steps exchange less often, and "
    "allhands plan says whether the link is fast enough"
)
_TYPES = "a model computes in its weights' type: allhands model get MODEL --dtype bfloat16 --out DIR, then --model DIR"
_ADAM = 'use optimizer_config, for example \'{"adamw": {"betas": [0.9, 0.95], "eps": 1e-8}}\''
_GENERATION = (
    "mlx_lm's own commands have it, and read the model and the adapter as they are: mlx_lm.generate, mlx_lm.server"
)
_UPLOAD = "nothing is uploaded here; afterwards: allhands upload DIR --to OWNER/NAME"
_PROCESSES = "use -n for processes here; --hosts or --hostfile for other computers"
_DATA = "use --data DIRECTORY (allhands data prepare FILE --out DIRECTORY makes one), or train with --hf-dataset"
# Names that cannot be taken over because they mean something else; each with what to do.
# What is in OUTDATED, too, is refused only where it asks for something.
ELSEWHERE: dict[str, str] = {
    "per_device_train_batch_size": "use batch_size: it is the global batch, over all ranks",
    "lora_r": 'use lora_parameters, for example \'{"rank": 8, "scale": 20.0, "dropout": 0.0}\'',
    "lora_rank": 'use lora_parameters, for example \'{"rank": 8, "scale": 20.0, "dropout": 0.0}\'',
    "lora_alpha": "use lora_parameters with scale = alpha / rank",
    "target_modules": 'use lora_parameters with keys, for example \'{"keys": ["self_attn.q_proj"], ...}\'',
    "use_dora": "use fine_tune_type: dora",
    "wandb": "use report_to: wandb, and project_name",
    "load_in_4bit": "quantise first: allhands model get MODEL --quantize 4 --out DIR, then --model DIR",
    "load_in_4bits": "quantise first: allhands model get MODEL --quantize 4 --out DIR, then --model DIR",
    "neat_packing": "use packing with isolate_documents",
    "warmup_ratio": "use warmup_steps (optimizer updates)",
    "lora_dropout": 'use lora_parameters, for example \'{"rank": 8, "scale": 20.0, "dropout": 0.05}\'',
    "micro_batch_size": "use micro_batch_tokens: results do not depend on it",
    "push_to_hub": "upload the result afterwards, by the command upload",
    "flash_attn": "attention's kernels are chosen by themselves; ALLHANDS_KERNELS says otherwise",
    "attn_implementation": "attention's kernels are chosen by themselves; ALLHANDS_KERNELS says otherwise",
    **dict.fromkeys(("tensor_parallel", "tensor_parallel_size", "tensor_parallel_degree", "tp", "tp_size"), _SHARDED),
    **dict.fromkeys(("pipeline_parallel", "pipeline_parallel_size", "pipeline", "pp", "pp_size"), _SHARDED),
    **dict.fromkeys(("context_parallel", "context_parallel_size", "sequence_parallel", "expert_parallel"), _SHARDED),
    **dict.fromkeys(("fsdp", "fsdp_config", "zero", "zero_stage", "deepspeed", "deepspeed_config"), _SHARDED),
    **dict.fromkeys(("compression", "gradient_compression", "grad_compression", "powersgd", "topk"), _EXCHANGE),
    **dict.fromkeys(("local_sgd", "local_steps", "diloco", "sync_every"), _EXCHANGE),
    **dict.fromkeys(("bf16", "fp16", "mixed_precision", "amp"), _TYPES),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"), _ADAM),
    **dict.fromkeys(("num_gpus", "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port"), _PROCESSES),
    **dict.fromkeys(("dataset", "dataset_name", "train_file", "data_path"), _DATA),
}

# The same for options of mlx_lm's other commands.
OF_MLX_LM: dict[str, str] = {
    **dict.fromkeys(("hf_path", "hf_repo"), "name the model without an option, or with --model"),
    "mlx_path": "use --out",
    "q_bits": "quantise first: allhands model get MODEL --quantize BITS --out DIR, then --model DIR",
    "q_group_size": "use --group-size",
    **dict.fromkeys(("q_mode", "quant_predicate"), "mlx_lm.convert has it; what it writes is read here"),
    "upload_repo": _UPLOAD,
    "data_path": "use --data",
    "sequence_length": "use --max-seq-length",
    **dict.fromkeys(("top_k", "min_p", "min_tokens_to_keep", "xtc_probability", "xtc_threshold"), _GENERATION),
    **dict.fromkeys(("draft_model", "num_draft_tokens", "kv_bits", "kv_group_size", "max_kv_size"), _GENERATION),
    **dict.fromkeys(("quantized_kv_start", "prompt_cache_file", "prompt_cache_size", "prefill_step_size"), _GENERATION),
    **dict.fromkeys(("extra_eos_token", "prefill_response", "image", "log_level"), _GENERATION),
}


def take_outdated(content: dict[str, Any]) -> list[str]:
    """Take out of a file's ``content`` what a later mlx_lm ignores; a note on each that is set."""
    found = {raw: str(raw).replace("-", "_") for raw in content}
    gone = {raw: key for raw, key in found.items() if key in OUTDATED and not (content[raw] and key in ELSEWHERE)}
    values = {raw: content.pop(raw) for raw in gone}
    return [f"{raw} has no effect: {OUTDATED[gone[raw]]}" for raw, value in values.items() if value is not None]


def canonical_flag(name: str) -> str:
    """The flag, without dashes, that is meant by ``name``: aliases and underscores are understood, not shown."""
    key = name.replace("-", "_")
    return (ALIASES.get(key, key) if len(key) > 1 else key).replace("_", "-")
