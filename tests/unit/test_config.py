"""The configuration: names, bounds, precedence and what is said about wrong values."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from command_line import parse
from mlx_lm.lora import CONFIG_DEFAULTS

from allhands.cli.demo import demo_config
from allhands.config.aliases import ALIASES, ELSEWHERE, for_key
from allhands.config.command_line import arguments, command_line
from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import TrainConfig, build_config
from allhands.config.yaml_files import read_yaml
from allhands.errors import ConfigError
from allhands.train.optim import make_schedule


def refused(flags: dict[str, Any], yaml_file: Path | None = None) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        build_config(flags, yaml_file)
    assert caught.value.exit_code == 2
    return caught.value


def yaml_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return path


# --- defaults and names ---------------------------------------------------------------------------


def test_every_key_of_mlx_lm_is_a_field_with_the_same_default() -> None:
    config = TrainConfig()
    ours = config.model_dump(exclude={"lora_parameters"})
    # What differs, and why: defaults of our own (demo, our seed of adapters), and the 16 or 1000
    # that we choose later, because --fine-tune-type and --epochs decide them.
    different = {
        "model",
        "data",
        "num_layers",
        "iters",
        "optimizer_config",
        "report_to",
        "lora_parameters",
    }
    for key, value in CONFIG_DEFAULTS.items():
        assert key in TrainConfig.model_fields, key
        if key not in different:
            assert ours[key] == value, key
    theirs = {"rank": 8, "scale": 20.0, "dropout": 0.0}
    assert (
        config.lora_parameters.model_dump(exclude={"keys"})
        == theirs
        == CONFIG_DEFAULTS["lora_parameters"]
    )


def test_aliases_lead_to_fields_and_nothing_else_is_shadowed() -> None:
    for alias, field in ALIASES.items():
        assert field in TrainConfig.model_fields, alias
        assert alias not in TrainConfig.model_fields
    assert not set(ELSEWHERE) & (set(TrainConfig.model_fields) | set(ALIASES))


ALIASED: dict[str, tuple[Any, Any]] = {
    "num_train_epochs": (2, 2.0),
    "num_epochs": (2, 2.0),
    "model_name_or_path": ("models/mine", "models/mine"),
    **dict.fromkeys(("tensor_parallel_size", "tensor_parallel_degree", "tp_size"), (2, 2)),
    **dict.fromkeys(("expert_parallel_size", "expert_parallel_degree", "ep_size"), (2, 2)),
    **dict.fromkeys(("max_seq_len", "cutoff_len"), (512, 512)),
    "global_batch_size": (16, 16),
    "resume_from_checkpoint": ("auto", "auto"),
    "save_total_limit": (3, 3),
    "max_steps": (7, 7),
    "gradient_accumulation_steps": (3, 3),
    "output_dir": ("out", "out"),
    "lr": (1e-4, 1e-4),
    "lora_layers": (3, 3),
    "save_steps": (5, 5),
    "eval_steps": (6, 6),
    "logging_steps": (2, 2),
    "max_length": (99, 99),
    "pack": (True, True),
    "packed": (True, True),
    "sample_packing": (True, True),
    "gradient_checkpointing": (True, True),
    "train_type": ("dora", "dora"),
    "optim": ("sgd", "sgd"),
    "num_processes": (2, 2),
    "n": (3, 3),
    "early_stopping": (4, 4),
    "clip_grad_norm": (0.5, 0.5),
    "full_determinism": (True, True),
}


@pytest.mark.parametrize("alias", sorted(set(ALIASES) - {"lr_scheduler_type", "wandb_project"}))
def test_an_alias_sets_its_field_in_yaml_and_in_python(alias: str, tmp_path: Path) -> None:
    given, expected = ALIASED[alias]
    assert getattr(build_config({alias: given}), ALIASES[alias]) == expected
    for spelling in (alias, alias.replace("_", "-")):
        assert (
            getattr(build_config({}, yaml_of(tmp_path, f"{spelling}: {given}\n")), ALIASES[alias])
            == expected
        )


def test_a_schedule_and_a_project_by_their_other_names() -> None:
    assert (
        build_config({"report_to": "wandb", "wandb_project": "herring"}).project_name == "herring"
    )
    assert (
        build_config({"lr_scheduler_type": "cosine"}).lr_schedule
        == build_config({"lr_schedule": "cosine"}).lr_schedule
    )


# --- precedence -----------------------------------------------------------------------------------


def test_flags_win_over_yaml_and_yaml_over_defaults(tmp_path: Path) -> None:
    path = yaml_of(
        tmp_path, "iters: 30\nbatch-size: 6\ngrad_checkpoint: true\ntrain: true\nseed: null\n"
    )
    verb, flags = parse(["train", "-c", str(path), "--batch-size", "2", "--no-train"])
    assert verb == "train"
    config = build_config(flags, flags["config"])
    assert (config.iters, config.batch_size, config.grad_checkpoint, config.train) == (
        30,
        2,
        True,
        False,
    )
    # null means "not set" in mlx_lm's files, and so does an absent key.
    assert (config.seed, config.save_every) == (0, 100)


def test_a_flag_wins_over_an_alias_in_yaml(tmp_path: Path) -> None:
    assert (
        build_config({"learning_rate": 1e-3}, yaml_of(tmp_path, "lr: 1e-6\n")).learning_rate == 1e-3
    )


# --- YAML -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-5", 1e-5),
        ("1E-05", 1e-5),
        ("2.5e-4", 2.5e-4),
        ("1e+2", 100.0),
        ("3e2", 300.0),
        (".5e-3", 5e-4),
    ],
)
def test_exponents_without_a_dot_are_numbers(text: str, value: float, tmp_path: Path) -> None:
    found = read_yaml(
        yaml_of(
            tmp_path,
            f"learning_rate: {text}\nlr_schedule: {{name: cosine_decay, arguments: [{text}, 9]}}",
        )
    )
    assert found["learning_rate"] == value
    assert isinstance(found["learning_rate"], float)
    assert found["lr_schedule"]["arguments"] == [value, 9]


def test_mlx_lms_own_example_file_is_accepted(tmp_path: Path) -> None:
    # The keys and values of mlx_lm's examples/lora_config.yaml.
    text = """
model: "mlx_model"
train: true
fine_tune_type: lora
optimizer: adamw
optimizer_config:
  adamw:
    betas: [0.9, 0.98]
    eps: 1e-6
    weight_decay: 0.05
    bias_correction: true
data: "data"
seed: 0
num_layers: 16
batch_size: 4
iters: 1000
val_batches: 25
learning_rate: 1e-5
report_to: wandb
project_name: test
steps_per_report: 10
steps_per_eval: 200
grad_accumulation_steps: 1
resume_adapter_file: null
adapter_path: "adapters"
save_every: 100
test: false
test_batches: 100
max_seq_length: 2048
grad_checkpoint: false
lora_parameters:
  keys: ["self_attn.q_proj", "self_attn.v_proj"]
  rank: 8
  scale: 20.0
  dropout: 0.0
lr_schedule:
  name: cosine_decay
  warmup: 100
  warmup_init: 1e-7
  arguments: [1e-5, 1000, 1e-7]
hf_dataset:
  path: "billsum"
  train_split: "train[:1000]"
  valid_split: "train[-100:]"
  prompt_feature: "text"
  completion_feature: "summary"
"""
    config = build_config({}, yaml_of(tmp_path, text))
    assert config.optimizer_config["adamw"]["eps"] == 1e-6
    assert config.lr_schedule is not None
    assert config.lr_schedule.arguments == [1e-5, 1000.0, 1e-7]
    assert config.lora_parameters.keys == ["self_attn.q_proj", "self_attn.v_proj"]
    assert (config.report_to, config.project_name, config.seed) == ("wandb", "test", 0)


def test_an_empty_file_is_all_defaults(tmp_path: Path) -> None:
    assert build_config({}, yaml_of(tmp_path, "# nothing\n")) == TrainConfig()


def test_unreadable_yaml_is_explained(tmp_path: Path) -> None:
    missing = refused({}, tmp_path / "none.yaml")
    assert missing.where == str(tmp_path / "none.yaml")
    assert "No such file" in missing.message
    assert "directory" in refused({}, tmp_path).message
    broken = refused({}, yaml_of(tmp_path, "iters: 3\nbatch_size: [1, 2\nseed: 1\n"))
    assert broken.where == f"{tmp_path / 'run.yaml'}:3"
    assert "pairs" in refused({}, yaml_of(tmp_path, "- iters\n- 3\n")).message
    (tmp_path / "latin.yaml").write_bytes(b"model: caf\xe9\n")
    latin = refused({}, tmp_path / "latin.yaml")
    assert ("UTF-8" in latin.message, "UTF-8" in (latin.hint or "")) == (True, True)
    tagged = refused({}, yaml_of(tmp_path, "model: !!python/object/apply:os.getcwd []\n"))
    assert tagged.where == f"{tmp_path / 'run.yaml'}:1"


# --- wrong keys and values ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "suggested"),
    [("learning_rat", "learning_rate"), ("batchsize", "batch_size"), ("num-layer", "num_layers")],
)
def test_an_unknown_key_gets_a_suggestion(key: str, suggested: str, tmp_path: Path) -> None:
    error = refused({}, yaml_of(tmp_path, f"{key}: 1\n"))
    assert error.where == f"{tmp_path / 'run.yaml'}:1: {key}"
    assert error.hint == f"did you mean {suggested}?"
    assert f"unknown option {key!r}" in error.message
    assert refused({key: 1}).hint == error.hint


def test_yaml_takes_on_and_off_for_booleans_and_they_are_what_was_written(tmp_path: Path) -> None:
    config = build_config({}, yaml_of(tmp_path, "compile: on\nstrategy: data\nmask_prompt: on\n"))
    assert (config.compile, config.strategy, config.mask_prompt) == ("on", "data", True)


def test_a_key_like_no_other_points_to_the_help() -> None:
    assert "--help" in str(refused({"zzzzzz": 1}).hint)


@pytest.mark.parametrize("key", sorted(ELSEWHERE))
def test_what_other_trainers_call_differently_is_explained(key: str, tmp_path: Path) -> None:
    hint = for_key(ELSEWHERE[key])
    assert refused({key: 1}).hint == hint
    assert "--" not in hint.partition("allhands")[0], "a flag, where a key was typed"
    assert refused({}, yaml_of(tmp_path, f"{key.replace('_', '-')}: 1\n")).hint == hint


def test_one_option_under_two_names_is_refused(tmp_path: Path) -> None:
    error = refused({}, yaml_of(tmp_path, "lr: 1e-4\nlearning_rate: 1e-5\n"))
    assert "learning_rate is given twice" in error.message


@pytest.mark.parametrize(
    ("flags", "where", "message"),
    [
        ({"batch_size": 0}, "--batch-size", "greater than or equal to 1"),
        ({"batch_size": "four"}, "--batch-size", "valid integer"),
        ({"num_layers": 0}, "--num-layers", "train nothing"),
        ({"num_layers": -2}, "--num-layers", "greater than or equal to -1"),
        ({"learning_rate": 0.0}, "--learning-rate", "greater than 0"),
        ({"learning_rate": True}, "--learning-rate", "must be a number"),
        ({"warmup_steps": False}, "--warmup-steps", "must be a number"),
        (
            {"optimizer_config": {"adamw": {"betas": [0.9]}}},
            "--optimizer-config",
            "adamw: betas must be two numbers",
        ),
        (
            {"optimizer_config": {"adamw": {"betas": [0.9, 2]}}},
            "--optimizer-config",
            "betas[1] must be less than 1",
        ),
        (
            {"optimizer_config": {"adam": {"eps": 0}}},
            "--optimizer-config",
            "adam: eps must be greater than 0",
        ),
        (
            {"optimizer_config": {"adafactor": {"eps": 1}}},
            "--optimizer-config",
            "adafactor: eps must be two numbers",
        ),
        (
            {"optimizer_config": {"muon": {"betas": 3}}},
            "--optimizer-config",
            "muon: betas must be two numbers",
        ),
        (
            {"optimizer_config": '{"sgd": {"momentum": "x"}}'},
            "--optimizer-config",
            "momentum must be a valid number",
        ),
        ({"learning_rate": float("nan")}, "--learning-rate", "finite"),
        ({"learning_rate": float("inf")}, "--learning-rate", "finite"),
        ({"max_grad_norm": -1.0}, "--max-grad-norm", "greater than 0"),
        ({"epochs": 0}, "--epochs", "greater than 0"),
        ({"max_seq_length": 1}, "--max-seq-length", "greater than or equal to 2"),
        ({"seed": 2**32}, "--seed", "less than 4294967296"),
        ({"iters": 10**12}, "--iters", "less than or equal to 1000000000"),
        ({"batch_size": 10**7}, "--batch-size", "less than or equal to 1000000"),
        ({"max_seq_length": 10**20}, "--max-seq-length", "less than or equal to 100000000"),
        ({"fine_tune_type": "qlora"}, "--fine-tune-type", "'lora', 'dora' or 'full'"),
        ({"optimizer": "lion"}, "--optimizer", "'adam'"),
        ({"lora_parameters": "{rank: 8}"}, "--lora-parameters", "not valid JSON"),
        ({"lora_parameters": '{"rank": 0}'}, "--lora-parameters", "rank: "),
        (
            {"lora_parameters": '{"rank": 8, "alpha": 16}'},
            "--lora-parameters",
            "scale = alpha / rank",
        ),
        ({"lora_parameters": '{"ranks": 8}'}, "--lora-parameters", "ranks: "),
        ({"lora_parameters": "8"}, "--lora-parameters", "keys and values"),
        ({"lora_parameters": '{"dropout": 1.0}'}, "--lora-parameters", "dropout: "),
        ({"lr_schedule": "triangle"}, "--lr-schedule", "name: "),
        (
            {"lr_schedule": '{"name": "cosine", "arguments": [1]}'},
            "--lr-schedule",
            "takes no arguments",
        ),
        ({"lr_schedule": "cosine_decay"}, "--lr-schedule", "needs arguments"),
        ({"clear_cache_threshold": "2 parsecs"}, "--clear-cache-threshold", "not a size"),
        ({"clear_cache_threshold": -1}, "--clear-cache-threshold", "greater than or equal to 0"),
        ({"report_to": "wandb,comet"}, "--report-to", "'comet' is not known"),
        ({"num_ranks": 0}, "--num-ranks", "greater than or equal to 1"),
        ({"backend": "gloo"}, "--backend", "'ring'"),
        ({"hf_dataset": '{"train_split": "a"}'}, "--hf-dataset", "path"),
    ],
)
def test_a_bad_value_is_named_with_its_flag(
    flags: dict[str, Any], where: str, message: str
) -> None:
    error = refused(flags)
    assert error.where == where
    assert message in error.message
    assert error.hint


@pytest.mark.parametrize(
    "key", ["model", "data", "adapter_path", "resume", "resume_adapter_file", "config", "hostfile"]
)
def test_an_empty_path_is_not_taken_for_an_option_that_was_not_given(
    key: str, tmp_path: Path
) -> None:
    """It is what a shell makes of a variable that is not set."""
    for value in ("", "  "):
        error = refused({key: value})
        assert error.where == f"--{key.replace('_', '-')}"
        assert "must not be empty" in error.message
    if key != "config":
        path = yaml_of(tmp_path, f'seed: 1\n{key}: ""\n')
        assert refused({}, path).where == f"{path}:2: {key}"


def test_a_bad_value_is_named_with_its_place_in_the_file(tmp_path: Path) -> None:
    path = yaml_of(tmp_path, "batch_size: 0\n")
    assert refused({"iters": 3}, path).where == f"{path}:1: batch_size"
    # The flag is the culprit where the flag has won.
    assert refused({"batch_size": -1}, path).where == "--batch-size"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"iters": 3, "epochs": 1}, ("--iters", "--epochs")),
        ({"train_on": "last"}, ("--train-on", "--mask-prompt")),
        (
            {"early_stopping_patience": 2, "val_batches": 0},
            ("--early-stopping-patience", "--val-batches"),
        ),
        (
            {"lr_schedule": '{"name": "cosine", "warmup": 3}', "warmup_steps": 3},
            ("--lr-schedule", "--warmup-steps"),
        ),
        ({"weight_decay": 0.1}, ("--weight-decay", "adamw")),
        ({"weight_decay_on": "matrices"}, ("--weight-decay-on", "adamw")),
        (
            {"early_stopping_min_delta": 0.1},
            ("--early-stopping-min-delta", "--early-stopping-patience"),
        ),
        ({"sample_every": 5}, ("--sample-every", "--sample-prompts")),
        ({"optimizer_config": '{"lion": {}}'}, ("optimizer_config", "lion")),
    ],
)
def test_options_that_exclude_each_other_name_both(
    flags: dict[str, Any], words: tuple[str, str]
) -> None:
    error = refused(flags)
    assert all(word in error.message for word in words)
    assert error.hint


def test_a_default_that_an_optimizer_does_not_have_is_no_fault() -> None:
    config = PretrainConfig.model_validate({"tokenizer": "t", "data": "d", "optimizer": "adam"})
    assert config.weight_decay == PretrainConfig.model_fields["weight_decay"].default > 0
    with pytest.raises(ValueError, match="--weight-decay has no effect on adam"):
        PretrainConfig.model_validate(
            {"tokenizer": "t", "data": "d", "optimizer": "adam", "weight_decay": 0.2}
        )


def test_a_warm_up_that_is_given_is_not_replaced_by_the_automatic_one() -> None:
    rates = {}
    for warmup in (0, 40):
        schedule = {"name": "constant", "warmup": warmup, "warmup_init": 0.0}
        made = make_schedule(
            PretrainConfig.model_validate(
                {"tokenizer": "t", "data": "d", "lr_schedule": schedule, "learning_rate": 1.0}
            ),
            200,
        )
        assert callable(made)
        rates[warmup] = made(mx.array(10)).item()
    assert rates == {0: pytest.approx(1.0), 40: pytest.approx(0.25, abs=0.03)}


# --- structured values ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("2GB", 2 * 10**9),
        ("500MB", 5 * 10**8),
        ("1.5 kb", 1500),
        ("3G", 3 * 10**9),
        ("2GiB", 2 << 30),
    ],
)
def test_sizes_are_understood(text: str, size: int) -> None:
    assert build_config({"clear_cache_threshold": text}).clear_cache_threshold == size
    _, flags = parse(["train", "--clear-cache-threshold", text])
    assert build_config(flags).clear_cache_threshold == size


@pytest.mark.parametrize(
    "flags",
    [
        {"clear_cache_threshold": "9" * 400},
        {"rank_weights": "[" + "9" * 400 + ", 1]", "num_ranks": 2},
        {"rank_weights": "[true, 2]", "num_ranks": 2},
        {"rank_weights": "[Infinity, 2]", "num_ranks": 2},
    ],
)
def test_numbers_that_are_none_are_refused(flags: dict[str, Any]) -> None:
    assert refused(flags).hint


@pytest.mark.parametrize("text", ["model: 2026-13-45", "lora_parameters: &a {keys: [*a]}"])
def test_values_that_yaml_cannot_read_are_refused(tmp_path: Path, text: str) -> None:
    assert refused({}, yaml_of(tmp_path, text)).code == "config-file-invalid"


def test_json_flags_become_what_yaml_would_give(tmp_path: Path) -> None:
    structured = {
        "--lora-parameters": '{"rank": 4, "scale": 2.0}',
        "--optimizer-config": '{"adam": {"eps": 1e-6}}',
        "--lr-schedule": '{"name": "cosine_decay", "arguments": [1e-5, 10]}',
        "--hf-dataset": '[{"path": "a"}]',
    }
    _, flags = parse(["train", *(word for pair in structured.items() for word in pair)])
    text = (
        "lora_parameters: {rank: 4, scale: 2.0}\noptimizer_config: {adam: {eps: 1e-6}}\n"
        "lr_schedule: {name: cosine_decay, arguments: [1e-5, 10]}\nhf_dataset: [{path: a}]\n"
    )
    assert build_config(flags) == build_config({}, yaml_of(tmp_path, text))


FULL: dict[str, Any] = {
    "model": "some where/model", "train": True, "data": "x", "fine_tune_type": "dora", "optimizer": "adamw",
    "optimizer_config": {"adamw": {"betas": [0.9, 0.98]}}, "seed": 7, "num_layers": -1, "batch_size": 3,
    "epochs": 1.5, "val_batches": -1, "learning_rate": 3e-07, "lr_schedule": {"name": "cosine"}, "warmup_steps": 2,
    "weight_decay_on": "matrices", "master_weights": True, "sample_prompts": ["a b", "c"], "sample_every": 2,
    "sample_tokens": 5, "sample_temperature": 0.5, "compress": "int8",
    "weight_decay": 0.01, "max_grad_norm": 1.0, "grad_accumulation_steps": 2, "steps_per_report": 1,
    "steps_per_eval": 2, "save_every": 3, "adapter_path": "a b'c", "resume_adapter_file": "r.safetensors",
    "keep_best": False, "early_stopping_patience": 2, "early_stopping_min_delta": 0.5, "test": True,
    "test_batches": -1, "max_seq_length": 64, "mask_prompt": True, "train_on": "last",
    "chat_template": "a b.jinja", "system": "merge",
    "lora_parameters": {"rank": 2, "keys": ["self_attn.q_proj"]}, "grad_checkpoint": True, "micro_batch_tokens": 9,
    "clear_cache_threshold": 10, "hf_dataset": [{"path": "p", "config": {"k": 1}}], "prompt_feature": "p",
    "completion_feature": "c", "chat_feature": "m", "text_feature": "t", "trust_remote_code": True,
    "report_to": "wandb,swanlab", "project_name": "n", "num_ranks": 2, "backend": "ring", "cores_per_rank": 1,
    "rank_weights": [2.0, 1.0], "bucket_mb": 1.5, "start_timeout_s": 9.0, "log_level": "verbose", "compile": "off",
    "resume": "auto", "keep_last": 1, "keep_every": 5, "checkpoint_copies": 1, "non_finite": "skip",
    "hostfile": "hosts", "min_ranks": 1, "max_restarts": 7, "hang_timeout_s": 8.0, "stop_grace_s": 9.0,
    "tag_output": True, "profile": True, "gradient_check": "on", "deterministic": True,
    "sync_every": 20, "outer_lr": 0.7, "outer_momentum": 0.9, "sync_fragments": 4, "sync_delay": 5,
}  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(),
        TrainConfig.model_validate(FULL),
        TrainConfig.model_validate(
            {"packing": True, "isolate_documents": True, "strategy": "zero1"}
        ),
        TrainConfig.model_validate(
            {"strategy": "pipeline", "pp": 2, "pp_schedule": "zb", "pp_split": "20,12"}
        ),
        TrainConfig.model_validate({"strategy": "fsdp", "reshard": "off", "dp_shard": 2}),
        *(TrainConfig.model_validate({"num_ranks": 4, option: 2}) for option in ("tp", "cp", "ep")),
        demo_config(Path("out dir"), "m", 1, 1, 60, 0),
        demo_config(Path("out"), "m", 2, 4, 9, 3),
    ],
    ids=[
        "defaults",
        "everything",
        "packing",
        "stages",
        "shards",
        "matrices",
        "rows",
        "experts",
        "demo1",
        "demo2",
    ],
)
def test_a_configuration_survives_its_own_command_line(config: TrainConfig) -> None:
    _, flags = parse(arguments(config))
    assert build_config(flags) == config
    program, *typed = shlex.split(command_line(config))
    assert program == "allhands"
    assert typed == arguments(config)


def test_the_round_trip_covers_every_field_but_two() -> None:
    # iters excludes epochs, hosts a hostfile, sync_every a strategy; config names a file; packing
    # without mask_prompt, and a strategy, with what belongs to it, have cases of their own.
    stages = {"strategy", "tp", "cp", "ep", "pp", "pp_schedule", "pp_split", "reshard", "dp_shard"}
    missing = {"iters", "config", "packing", "isolate_documents", "hosts", *stages}
    assert set(TrainConfig.model_fields) - set(FULL) == missing


@pytest.mark.parametrize(
    "weights", [[], [1, 0], [2, -1], "[1, x]", "[1, NaN]", ["2", "1"], "fast", 2]
)
def test_weights_of_ranks_are_positive_numbers(weights: Any) -> None:
    assert refused({"rank_weights": weights}).where == "--rank-weights"
    assert build_config({"rank_weights": "[2, 0.5]"}).given_weights == [2.0, 0.5]


def test_the_command_line_of_a_file_configuration_needs_no_file(tmp_path: Path) -> None:
    path = yaml_of(tmp_path, "batch_size: 9\nseed: 5\n")
    # The flag puts the default back: read again, the file would undo that.
    config = build_config({"seed": 0, "config": str(path)}, path)
    _, flags = parse(arguments(config))
    again = build_config(flags, flags.get("config"))
    assert (again.batch_size, again.seed) == (9, 0)


def test_the_fingerprint_is_that_of_what_ranks_must_share() -> None:
    base = build_config({"batch_size": 4})
    assert (
        build_config({"batch_size": 4, "adapter_path": "x", "cores_per_rank": 1}).fingerprint()
        == base.fingerprint()
    )
    assert build_config({"batch_size": 5}).fingerprint() != base.fingerprint()
    assert set(TrainConfig.model_fields) >= TrainConfig.LOCAL_KEYS


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("num_layers", 4, "--num-layers is for fine-tuning"),
        (
            "lora_parameters",
            {"rank": 4, "scale": 20.0, "dropout": 0.0},
            "--lora-parameters is for fine-tuning",
        ),
        ("fine_tune_type", "lora", "is always trained in full"),
        ("model", "other", "--model is not used"),
    ],
)
def test_what_is_for_fine_tuning_is_refused_in_pre_training(
    name: str, value: object, words: str
) -> None:
    given = {"tokenizer": "t", "data": "d"}
    assert PretrainConfig.model_validate(given).fine_tune_type == "full"
    with pytest.raises(ValueError, match=words):
        PretrainConfig.model_validate({**given, name: value})


def told(tmp_path: Path, text: str) -> ConfigError:
    """The error that a file of options makes."""
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        build_config({}, file)
    return error.value


def test_all_wrong_values_of_a_file_are_named_in_its_order(tmp_path: Path) -> None:
    error = told(tmp_path, "model: m\niters: many\nbatch_size: [4]\nlearning_rate: -1\n")
    words = str(error)
    places = [
        words.index(f"run.yaml:{line}: {key}: must")
        for line, key in ((2, "iters"), (3, "batch_size"))
    ]
    assert places == sorted(places)
    assert words.index("run.yaml:4: learning_rate: must") > places[1]
    assert "(got 'many')" in words


@pytest.mark.parametrize(
    ("text", "line", "key", "other"),
    [
        ("iters: 3\nmodel: m\niters: 5\n", 3, "iters", 1),
        ("iters: 3\nlora_parameters:\n  rank: 8\n  scale: 2.0\n  rank: 4\n", 5, "rank", 3),
    ],
)
def test_a_key_that_a_file_gives_twice_is_refused(
    tmp_path: Path, text: str, line: int, key: str, other: int
) -> None:
    words = str(told(tmp_path, text))
    assert f"run.yaml:{line}: {key} is given twice, in line {other} too" in words


def test_what_a_structured_option_has_is_named(tmp_path: Path) -> None:
    words = str(told(tmp_path, "lora_parameters:\n  rnk: 8\n"))
    assert (
        "run.yaml:1: lora_parameters: rnk: is unknown (got 8); it has rank, scale, dropout, keys"
        in words
    )


def test_a_line_that_does_not_begin_where_others_do(tmp_path: Path) -> None:
    assert "without blanks before the key" in str(told(tmp_path, "iters: 3\n  model: m\n"))


def test_v_explains_what_is_chosen() -> None:
    for flag in ("-v", "--verbose"):
        assert parse(["train", flag])[1] == {"verbose": True}


@pytest.mark.parametrize(("iters", "warmup"), [(2, 1), (5, 4), (6, 5), (60, 5)])
def test_the_warm_up_of_the_shortest_demo_is_shorter_than_its_training(
    iters: int, warmup: int
) -> None:
    config = demo_config(Path("out"), "m", 1, 1, iters, 0)
    assert config.warmup_steps == warmup
    make_schedule(config, iters)  # refuses a longer one
