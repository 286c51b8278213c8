"""Other trainers' names for our options and commands: which we understand, and what to do instead of the others.

Apart from the options themselves, because the command line needs them for the smallest of its tasks. In what to do,
``[[key]]`` and ``[[key: value]]`` stand for an option, which :func:`for_key` and :func:`for_flag` spell.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Callable, Iterable
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
    "matrices and experts are not divided among ranks here: [[num_ranks]] or [[hosts]] divides the batch, and "
    "[[strategy: zero1]] the optimizer's state (as ZeRO-1), [[strategy: pipeline]] the model's blocks"
)
_STAGES = (
    "each rank has some of the model's blocks with [[strategy: pipeline]]; [[pp: 2]] makes pipelines of two ranks, and "
    "[[pp_schedule: interleaved]] another order of the passes"
)
_EXCHANGE = (
    "gradients are exchanged once a step: larger batches or [[grad_accumulation_steps]] exchange less often, "
    "[[compress: int8]] fewer bytes, and allhands plan says whether the link is fast enough"
)
_COMPRESS = "use [[compress: int8]], or bf16 or int4: gradients in fewer bytes, what rounding leaves out sent later"
_ROUNDS = (
    "ranks average their weights every so many steps with [[sync_every: 50]]; DiLoCo's outer step is that with "
    "[[outer_lr: 0.7]] and [[outer_momentum: 0.9]]"
)
_FRAGMENTS = (
    "parts of the weights are exchanged in turn, beside the computation, with [[sync_every: 50]], "
    "[[sync_fragments: 5]] and [[sync_delay: 10]]"
)
_TYPES = (
    "a model computes in its weights' type: allhands model get MODEL --dtype bfloat16 --out DIR, then [[model: DIR]]"
)
_QUANTISED = "quantise first: allhands model get MODEL --quantize BITS --out DIR, then [[model: DIR]]"
_RANK = 'use [[lora_parameters: {"rank": 8, "scale": 20.0, "dropout": 0.05}]]'
_SCALE = (
    "use [[lora_parameters]], whose scale is alpha / rank: rank 8 and alpha 16 are "
    '[[lora_parameters: {"rank": 8, "scale": 2.0}]]'
)
_MODULES = 'use [[lora_parameters: {"keys": ["self_attn.q_proj", "self_attn.v_proj"], "rank": 8, "scale": 20.0}]]'
_ADAM = 'use [[optimizer_config: {"adamw": {"betas": [0.9, 0.95], "eps": 1e-8}}]]'
_KERNELS = "attention's kernels are chosen by themselves; ALLHANDS_KERNELS says otherwise"
_GENERATION = (
    "mlx_lm's own commands have it, and read the model and the adapter as they are: mlx_lm.generate, mlx_lm.server"
)
_UPLOAD = "nothing is uploaded here; afterwards: allhands upload DIR --to OWNER/NAME"
_PROCESSES = "use [[num_ranks]] for processes here; [[hosts]] or [[hostfile]] for other computers"
_DATA = "use [[data: DIRECTORY]] (allhands data prepare FILE --out DIRECTORY makes one), or train with [[hf_dataset]]"
# Names that cannot be taken over because they mean something else; each with what to do.
# What is in OUTDATED, too, is refused only where it asks for something.
ELSEWHERE: dict[str, str] = {
    "per_device_train_batch_size": "use [[batch_size]]: it is the global batch, over all ranks",
    **dict.fromkeys(("lora_r", "lora_rank", "lora_dropout"), _RANK),
    "lora_alpha": _SCALE,
    **dict.fromkeys(("target_modules", "lora_target", "lora_target_modules"), _MODULES),
    "use_dora": "use [[fine_tune_type: dora]]",
    "wandb": "use [[report_to: wandb]], and [[project_name]]",
    **dict.fromkeys(("load_in_4bit", "load_in_4bits"), _QUANTISED.replace("BITS", "4")),
    "load_in_8bit": _QUANTISED.replace("BITS", "8"),
    "neat_packing": "use [[packing: on]] with [[isolate_documents: on]]",
    "warmup_ratio": "use [[warmup_steps]] (optimizer updates)",
    "micro_batch_size": "use [[micro_batch_tokens]]: results do not depend on it",
    "push_to_hub": "upload the result afterwards: allhands upload DIR --to OWNER/NAME",
    **dict.fromkeys(("flash_attn", "attn_implementation"), _KERNELS),
    **dict.fromkeys(("tensor_parallel", "tensor_parallel_size", "tensor_parallel_degree", "tp", "tp_size"), _SHARDED),
    **dict.fromkeys(("pipeline_parallel", "pipeline_parallel_size", "pipeline_parallel_degree"), _STAGES),
    **dict.fromkeys(("pipeline", "pp_size", "pipeline_parallel_schedule"), _STAGES),
    **dict.fromkeys(("context_parallel", "context_parallel_size", "sequence_parallel", "expert_parallel"), _SHARDED),
    **dict.fromkeys(("fsdp", "fsdp_config", "zero", "zero_stage", "deepspeed", "deepspeed_config"), _SHARDED),
    **dict.fromkeys(("compression", "gradient_compression", "grad_compression", "powersgd", "topk"), _COMPRESS),
    **dict.fromkeys(("local_sgd", "local_steps", "diloco"), _ROUNDS),
    **dict.fromkeys(("streaming_diloco", "num_fragments", "fragment_sync_delay"), _FRAGMENTS),
    **dict.fromkeys(("bf16", "fp16", "mixed_precision", "amp"), _TYPES),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "adam_epsilon"), _ADAM),
    **dict.fromkeys(("num_gpus", "nproc_per_node", "nnodes", "node_rank", "master_addr", "master_port"), _PROCESSES),
    **dict.fromkeys(("dataset", "dataset_name", "train_file", "data_path"), _DATA),
}

# The same for options of mlx_lm's other commands, whichever of ours gets them.
OF_MLX_LM: dict[str, str] = {
    "hf_path": "use [[model]]",
    "hf_repo": "use [[model]]",
    "q_bits": _QUANTISED,
    "q_group_size": "quantise first: allhands model get MODEL --quantize 4 --group-size 64, then [[model: DIR]]",
    **dict.fromkeys(("q_mode", "quant_predicate"), "mlx_lm.convert has it; what it writes is read here"),
    "mlx_path": "allhands model get MODEL --out DIR writes a model's directory",
    "upload_repo": _UPLOAD,
    "sequence_length": "use [[max_seq_length]]",
    "num_samples": "use [[test_batches]]",
    **dict.fromkeys(("chat_template_config", "chat_template_args"), "use [[chat_template: FILE]]"),
    "use_default_chat_template": "the model's own template is used; [[chat_template: chatml]] for one without",
    **dict.fromkeys(("top_k", "min_p", "min_tokens_to_keep", "xtc_probability", "xtc_threshold"), _GENERATION),
    **dict.fromkeys(("draft_model", "num_draft_tokens", "kv_bits", "kv_group_size", "max_kv_size"), _GENERATION),
    **dict.fromkeys(("quantized_kv_start", "prompt_cache_file", "prompt_cache_size", "prefill_step_size"), _GENERATION),
    **dict.fromkeys(("extra_eos_token", "prefill_response", "image", "log_level"), _GENERATION),
    **dict.fromkeys(("quantize_activations", "prompt_cache_bytes", "decode_concurrency"), _GENERATION),
    "prompt_concurrency": _GENERATION,
}
# And where one of ours has its own way of it, by its verb. One letter is an option that has no other name here.
OF_VERBS: dict[str, dict[str, str]] = {
    "model get": {
        **dict.fromkeys(("q", "q_bits", "bits", "load_in_4bit"), "use [[quantize: 4]]: the number of bits"),
        "q_group_size": "use [[group_size: 64]], beside [[quantize: 4]]",
        "d": "use [[dequantize]]",
        "hf_path": "name it without an option: allhands model get MODEL",
        **dict.fromkeys(("mlx_path", "save_path", "output_dir", "local_dir", "adapter_path"), "use [[out: DIR]]"),
        **dict.fromkeys(("bf16", "fp16", "torch_dtype"), "use [[dtype: bfloat16]]"),
        **dict.fromkeys(
            ("trust_remote_code",), "files are copied and converted, and no code of a model's is run: leave it out"
        ),
    },
    "upload": {
        "path": "name the directory without an option: allhands upload DIR --to OWNER/NAME",
        **dict.fromkeys(("upload_repo", "repo_id", "repo", "hf_repo"), "use [[to: OWNER/NAME]]"),
    },
    "fuse": {
        **dict.fromkeys(("out", "output", "mlx_path"), "use [[save_path: DIR]]"),
        "hf_path": "use [[model]]: the model below the adapter",
    },
    **{verb: {"pipeline": "one process has all of the model here"} for verb in ("generate", "chat", "serve")},
    "eval": {
        "data_path": "use [[data]]",
        "num_fewshot": "use [[num_shots]]",
        "output_dir": "the result is printed; [[json]] prints it as JSON",
    },
    "data prepare": {
        **dict.fromkeys(("output_dir", "adapter_path", "save_path"), "use [[out: DIR]]"),
        **dict.fromkeys(("test_size", "test_split_ratio"), "use [[test: 0.1]], or [[valid: 0.1]]"),
        **dict.fromkeys(("val_size", "val_split", "valid_split", "validation"), "use [[valid: 0.1]]"),
    },
}

# Commands that people look for: what to do instead of each.
_TRAIN = "`allhands train --model MODEL --data DIR`"
_ASK = "`allhands generate --model MODEL --prompt TEXT`, with --adapter-path for what was trained"
_GET = "`allhands model get MODEL --out DIR` fetches a model; with --quantize 4 it is quantised"
_PREPARE = "`allhands data prepare FILE --out DIR`; training tokenises by itself"
_TO_HUB = "`allhands upload DIR --to OWNER/NAME`"
_THEIRS = "there is no such thing here: mlx_lm has it, and what it writes is a model like any other (--model DIR)"
_SUPERVISED = "there is no training on preferences or rewards here; on examples there is: `allhands train`"
_SEVERAL = (
    "`allhands train -n 2` for processes here, --hosts for other computers; a program of yours: `allhands launch`"
)
_LOOK = "`allhands monitor RUN` in the terminal, `allhands dashboard` in the browser"
COMMANDS: dict[str, str] = {
    **dict.fromkeys(("lora", "qlora", "dora", "finetune", "fine-tune", "finetuning", "sft", "tune"), _TRAIN),
    **dict.fromkeys(("training", "fit", "learn", "run", "start"), _TRAIN),
    **dict.fromkeys(
        ("resume", "continue", "restart"), "the command of the run, with --resume: `allhands train --resume`"
    ),
    **dict.fromkeys(("dpo", "orpo", "kto", "grpo", "ppo", "rlhf", "reward"), _SUPERVISED),
    **dict.fromkeys(("distributed", "mpirun", "torchrun", "accelerate", "deepspeed"), _SEVERAL),
    **dict.fromkeys(("convert", "quantize", "quantise", "dequantize", "quant"), _GET),
    **dict.fromkeys(("download", "pull", "fetch"), f"{_GET}; data of the Hub: `allhands data prepare NAME --out DIR`"),
    **dict.fromkeys(("awq", "dwq", "gptq", "dynamic-quant", "cache-prompt", "manage", "share"), _THEIRS),
    **dict.fromkeys(("merge", "merge-lora", "bake"), "`allhands fuse --adapter-path RUN --save-path DIR`"),
    **dict.fromkeys(
        ("evaluate", "perplexity", "ppl", "test", "validate", "lm-eval", "score"),
        ("`allhands eval --model MODEL --data DIR`, with --adapter-path for what was trained, --tasks for benchmarks"),
    ),
    **dict.fromkeys(
        ("bench", "benchmark"), "`allhands eval --tasks NAME` asks benchmarks, `allhands cluster bench` measures links"
    ),
    **dict.fromkeys(("infer", "inference", "predict", "ask", "complete", "completion", "prompt", "sample"), _ASK),
    **dict.fromkeys(("talk", "repl", "interactive"), "`allhands chat --model MODEL`"),
    **dict.fromkeys(("server", "api", "host"), "`allhands serve --model MODEL`"),
    **dict.fromkeys(("push", "publish", "push-to-hub"), _TO_HUB),
    **dict.fromkeys(
        ("gguf", "ollama", "hf", "peft"), "`allhands export --to gguf --out DIR`; --to hf, peft and ollama, too"
    ),
    "data style": "examples/restyle.py of the source tree writes answers in another style, by rules",
    **dict.fromkeys(("dataset", "preprocess", "tokenize", "tokenise", "split"), _PREPARE),
    **dict.fromkeys(("status", "watch", "top", "ps", "runs", "logs", "tail", "ui", "web", "gui"), _LOOK),
    **dict.fromkeys(("stop", "kill", "cancel"), "Ctrl-C where it was started, or the button of `allhands dashboard`"),
    **dict.fromkeys(
        ("graph", "chart", "visualize"), "`allhands plot RUN` draws the curves, `allhands report RUN` a page"
    ),
    **dict.fromkeys(("doctor", "ssh"), "`allhands cluster check --hosts NAME,NAME`"),
    **dict.fromkeys(("config", "configure"), "options stand in a YAML file: `allhands train --config FILE`"),
    **dict.fromkeys(("login", "logout"), "the Hub's own: hf auth login; or the variable HF_TOKEN"),
    **dict.fromkeys(("update", "upgrade", "install"), "as it was installed: pip install --upgrade allhands"),
    **dict.fromkeys(("data convert", "data download", "data import"), _PREPARE),
    **dict.fromkeys(
        ("tokenizer get", "tokenizer download"), "a model brings its own: `allhands model get MODEL --out DIR`"
    ),
    "model list": "no list is kept: a model is a directory, or a name on the Hub; `allhands model get MODEL --out DIR`",
    "help": "`allhands --help`, and --help after any command",
}
_MARK = re.compile(r"\[\[(\w+)(?:: (.*?))?\]\]")
_ALIKE = 0.75  # below it "merge" is "serve"


def for_key(text: str) -> str:
    """What to do, in the keys of a YAML file or of a call."""
    return _MARK.sub(lambda found: found[0][2:-2], text)


def for_flag(text: str) -> str:
    """What to do, in the options of a command line."""

    def flag(found: re.Match[str]) -> str:
        name, value = f"--{found[1].replace('_', '-')}", found[2]
        if value is None or value == "on":
            return name
        return f"{name} {value if value.isupper() or '/' in value else shlex.quote(value)}"

    return _MARK.sub(flag, text)


def instead_of_flag(flag: str, verb: str, options: Iterable[str]) -> str | None:
    """What to do instead of an option that a verb, which has those ``options``, has not; ``None`` if we do not know."""
    key = flag.lstrip("-").replace("-", "_")
    text = {**OF_MLX_LM, **ELSEWHERE, **OF_VERBS.get(verb, {})}.get(key)
    if text is None:
        return None
    foreign = {found[1] for found in _MARK.finditer(text)} - set(options)
    return f"{'it is about training, allhands train: ' if foreign else ''}{for_flag(text)}"


def instead_of_command(words: str, siblings: Iterable[str], commands: Callable[[], Iterable[str]]) -> str:
    """What to do instead of ``words``, a group and what is no command of it, or only that.

    Args:
        siblings: what could stand in the place of the last word.
        commands: gives all commands, with the groups that they are in: ``model get``.
    """
    group, _, word = words.lower().replace("_", "-").rpartition(" ")
    name = re.sub(r"^(mlx[-.]lm|allhands)[-.]?", "", word)
    beside = {sibling: f"{group} {sibling}".strip() for sibling in siblings}
    if near := difflib.get_close_matches(name, beside, n=1, cutoff=_ALIKE):
        return f"did you mean `allhands {beside[near[0]]}`?"
    if text := COMMANDS.get(f"{group} {name}", COMMANDS.get(name)):
        return text
    if inner := [command for command in commands() if command.rpartition(" ")[2] == name]:
        return f"did you mean {' or '.join(f'`allhands {command}`' for command in inner)}?"
    if near := difflib.get_close_matches(name, COMMANDS, n=1, cutoff=_ALIKE):
        return COMMANDS[near[0]]
    return f"`{f'allhands {group}'.strip()} --help` lists the commands"


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
