"""Other trainers' names for our options: which we understand, and which mean something else.

Apart from the options themselves, because the command line needs them for the smallest of its tasks.
"""

from __future__ import annotations

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
}
# Names that cannot be taken over because they mean something else; each with what to do.
ELSEWHERE: dict[str, str] = {
    "per_device_train_batch_size": "use batch_size: it is the global batch, over all ranks",
    "lora_r": 'use lora_parameters, for example \'{"rank": 8, "scale": 20.0, "dropout": 0.0}\'',
    "lora_rank": 'use lora_parameters, for example \'{"rank": 8, "scale": 20.0, "dropout": 0.0}\'',
    "lora_alpha": "use lora_parameters with scale = alpha / rank",
    "target_modules": 'use lora_parameters with keys, for example \'{"keys": ["self_attn.q_proj"], ...}\'',
    "load_in_4bit": "quantise first: allhands model get MODEL --quantize 4 --out DIR, then --model DIR",
    "load_in_4bits": "quantise first: allhands model get MODEL --quantize 4 --out DIR, then --model DIR",
    "neat_packing": "use packing with isolate_documents",
    "warmup_ratio": "use warmup_steps (optimizer updates)",
}


def canonical_flag(name: str) -> str:
    """The flag, without dashes, that is meant by ``name``: aliases and underscores are understood, not shown."""
    key = name.replace("-", "_")
    return (ALIASES.get(key, key) if len(key) > 1 else key).replace("_", "-")
