"""Every option of every verb: a path knows the home directory, and what takes one value is given
once.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any, get_args

import pytest
from command_line import call_allhands, parse, verbs
from pydantic import BaseModel

from allhands.cli.plan import training_config
from allhands.config.eval_schema import EvalConfig
from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import HfDataset, TrainConfig, build_config
from allhands.errors import ConfigError
from allhands.io.paths import expanded, written

# Texts that are no paths of this computer. A new option of text belongs here, to TEXT_PATHS, or is
# a Path.
NO_PATHS = {
    *(
        "hosts",
        "backend",
        "link",
        "machines",
        "device",
        "title",
        "host",
        "token",
        "name",
        "prompt",
        "system_prompt",
    ),
    *(
        "allowed_origins",
        "dtype",
        "gguf_path",
        "upload_repo",
        "to",
        "message",
        "split",
        "split_by",
        "dedupe",
    ),
    *(
        "documents",
        "hub_split",
        "hub_config",
        "column",
        "valid",
        "test",
        "system",
        "try_text",
        "special",
        "text_key",
    ),
    *("text", "shape", "tokens", "only", "delete", "transport", "tasks", "train_on", "strategy"),
    *("pp_split", "pp_schedule", "reshard"),
    *(
        "prompt_feature",
        "completion_feature",
        "chat_feature",
        "text_feature",
        "instruction_feature",
        "input_feature",
    ),
    *(
        "output_feature",
        "history_feature",
        "system_feature",
        "tools_feature",
        "chosen_feature",
        "rejected_feature",
    ),
    "label_feature",
    # of training: words, and JSON, of which the configuration knows the paths
    *(
        "fine_tune_type",
        "optimizer",
        "optimizer_config",
        "lr_schedule",
        "weight_decay_on",
        "non_finite",
    ),
    *(
        "lora_parameters",
        "compile",
        "clear_cache_threshold",
        "hf_dataset",
        "report_to",
        "project_name",
    ),
    *("rank_weights", "strategy", "compress", "sample_prompts", "log_level", "gradient_check"),
}
# Paths on other computers: what ~ is, they know.
THERE = {
    *(("cluster init", name) for name in ("python", "env_dir")),
    *(("cluster sync", name) for name in ("paths", "model", "data", "config")),
    *(("cluster check", name) for name in ("model", "data", "adapter_path")),
    # words of another program, or of allhands train, whose own parser reads them
    *(("launch", "command"), ("container", "arguments")),
}
PARAMETERS = [
    (verb, command, one)
    for verb, command in verbs()
    for one in command.params
    if one.name != "help"
]
NAMES = [f"{verb} {one.name}" for verb, _, one in PARAMETERS]


def annotation(parameter: Any) -> Any:
    described = getattr(parameter, "type_descriptor", None)
    found = described.annotation if described is not None else type(parameter.type)
    return next(iter(get_args(found)), found)


def words_for(parameter: Any, value: str) -> list[str]:
    if parameter.param_type_name == "argument":
        return [value]
    if parameter.is_flag:
        return [max(parameter.opts, key=len)]
    return [f"{max(parameter.opts, key=len)}={value}"]


def a_value(parameter: Any) -> str:
    kind = annotation(parameter)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return str(next(iter(kind)).value)
    return "1" if kind in (int, float) else "x"


def needed(command: Any, besides: Any) -> list[str]:
    """Words for the parameters that the verb cannot do without, those in front of an argument
    included.
    """
    found: list[str] = []
    for one in command.params:
        if one is not besides and one.required:
            found += words_for(one, a_value(one))
    return found


def given_to(verb: str, command: Any, parameter: Any, *values: str) -> list[str]:
    words = [word for value in values for word in words_for(parameter, value)]
    if parameter.param_type_name != "argument":
        return [*verb.split(), *words, *needed(command, parameter)]
    found: list[str] = []  # arguments in their order
    for one in command.params:
        found += words if one is parameter else words_for(one, a_value(one)) if one.required else []
    return [*verb.split(), *found]


@pytest.mark.parametrize(("verb", "command", "parameter"), PARAMETERS, ids=NAMES)
def test_every_path_knows_the_home_directory(
    verb: str, command: Any, parameter: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kind = annotation(parameter)
    if isinstance(kind, type) and issubclass(kind, Enum):
        assert isinstance(
            parse(given_to(verb, command, parameter, a_value(parameter)))[1][parameter.name], kind
        )
    if getattr(parameter, "is_flag", False) or kind not in (str, Path):
        return
    monkeypatch.setenv("HOME", str(tmp_path))
    found = parse(given_to(verb, command, parameter, "~/of mine"))[1][parameter.name]
    (found,) = found if isinstance(found, list | tuple) else (found,)
    if (verb, parameter.name) in THERE or parameter.name in NO_PATHS:
        assert found == "~/of mine"
    else:
        assert str(found) == str(tmp_path / "of mine"), (
            "a path (see TEXT_PATHS), or not (see NO_PATHS)?"
        )
        for other in ("org/name", "a/~/b", "x~", "./~"):
            (same,) = [parse(given_to(verb, command, parameter, other))[1][parameter.name]]
            assert str(same[0] if isinstance(same, list | tuple) else same) == (
                str(Path(other)) if isinstance(found, Path) else other
            )


@pytest.mark.parametrize(("verb", "command", "parameter"), PARAMETERS, ids=NAMES)
def test_what_takes_one_value_is_given_once(verb: str, command: Any, parameter: Any) -> None:
    if parameter.param_type_name == "argument":
        return
    value = a_value(parameter)
    words = given_to(verb, command, parameter, value, value)
    if parameter.multiple:
        assert len(parse(words)[1][parameter.name]) == 2
        return
    for flag in {*parameter.opts, *parameter.secondary_opts}:
        with pytest.raises(ConfigError) as refused:
            parse(
                [
                    *given_to(verb, command, parameter, value),
                    *([flag] if parameter.is_flag else [flag, value]),
                ]
            )
        assert refused.value.exit_code == 2
        assert flag in refused.value.message


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["train", "--iters", "1", "--max-steps", "2"], ("--iters 1", "--max-steps 2")),
        (["train", "--max_steps=1", "--max-steps=1"], ("--max_steps=1", "--max-steps=1")),
        (["train", "-n2", "-n", "3"], ("-n2", "-n 3")),
        (["train", "-c", "a", "--config=b"], ("-c a", "--config=b")),
        (["train", "--no-train", "--train"], ("--no-train", "--train")),
        (["train", "--log-level", "normal", "-v"], ("--log-level", "--verbose")),
        (
            ["train", "--resume", "--resume-from-checkpoint", "x"],
            ("--resume", "--resume-from-checkpoint x"),
        ),
        (
            ["plan", "--device", "M1", "--iters", "1", "--max-steps", "2"],
            ("--iters 1", "--max-steps 2"),
        ),
        (["generate", "-p", "a", "--prompt", "b"], ("-p a", "--prompt b")),
        (["fuse", "--dequantize", "--de-quantize"], ("--dequantize", "--de-quantize")),
        (["container", "--iters", "1", "--iters", "2"], ("--iters 1", "--iters 2")),
    ],
    ids=" ".join,
)
def test_both_are_named_and_nothing_is_done(
    words: list[str], named: tuple[str, str], tmp_path: Path
) -> None:
    done = call_allhands(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert all(one in done.stderr for one in named), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_only_looks_like_an_option_given_twice(tmp_path: Path) -> None:
    assert parse(["generate", "--prompt", "--seed", "--seed", "2"])[1]["seed"] == 2
    assert parse(["launch", "-n", "2", "--", "program", "-n", "3", "-n", "4"])[1]["num_ranks"] == 2
    assert call_allhands("train", "--iters", "1", "--iters", "2", "--help").returncode == 0


def test_the_training_that_is_planned_knows_its_kind_by_any_spelling_of_the_file(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("shape: llama-15m\ntokenizer: t\ndata: d\n")
    for words in (["-c", str(file)], [f"--config={file}"], [f"-c{file}"], ["--config", str(file)]):
        assert isinstance(training_config(words), PretrainConfig)
    assert isinstance(
        training_config(["--shape=llama-15m", "--tokenizer=t", "--data=d"]), PretrainConfig
    )


# --- the configuration ----------------------------------------------------------------------------


def texts_of(kind: type[BaseModel]) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        if str in (field.annotation, *get_args(field.annotation)) and not field.metadata:
            yield name


@pytest.mark.parametrize("kind", [TrainConfig, PretrainConfig, EvalConfig])
def test_texts_of_the_configuration_that_are_no_local_paths_are_known(
    kind: type[BaseModel],
) -> None:
    assert set(texts_of(kind)) <= NO_PATHS, "a path (LocalPath), or not (NO_PATHS)?"


PATHS = ("model", "data", "adapter_path", "resume", "resume_adapter_file", "hostfile")


@pytest.mark.parametrize("key", PATHS)
def test_keys_and_arguments_that_are_paths(
    key: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / "a.yaml"
    file.write_text(f"{key}: ~/of mine\n")
    for made in (
        build_config({}, "~/a.yaml"),
        build_config({}, Path("~/a.yaml")),
        build_config({key: "~/of mine"}),
        build_config({key: Path("~/of mine")}),
    ):
        assert getattr(made, key) == str(tmp_path / "of mine")
        # Other computers, with another home directory, take it as it was written.
        assert written(getattr(made, key)) == made.model_dump(mode="json")[key] == "~/of mine"


def test_paths_inside_and_those_of_the_other_kinds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    dataset = {"path": "~/d", "config": {"data_files": {"train": ["~/a.jsonl", "b"]}, "name": "~"}}
    found = build_config({"hf_dataset": json.dumps(dataset)}).hf_dataset
    assert isinstance(found, HfDataset)
    assert found.path == f"{tmp_path}/d"
    assert found.config == {"data_files": {"train": [f"{tmp_path}/a.jsonl", "b"]}, "name": "~"}
    assert build_config({}, None, EvalConfig).adapter_path == ""
    made = build_config({"tokenizer": "~/t", "data": "~/d", "model": "demo"}, None, PretrainConfig)
    assert (getattr(made, "tokenizer", None), made.data) == (f"{tmp_path}/t", f"{tmp_path}/d")
    (tmp_path / "null.yaml").write_text("adapter_path: ~\ndata: ~\n")  # which is YAML for: not set
    assert build_config({}, tmp_path / "null.yaml").adapter_path == "adapters"


@pytest.mark.parametrize(
    "path", ["x" * 300, "a/" + "é" * 130 + "/b", "a/" * 2100, "a\0b", "caf\udce9"]
)
def test_what_no_file_can_be_called_is_one_message(path: str) -> None:
    for key in ("model", "data", "adapter_path", "resume"):
        with pytest.raises(ConfigError) as told:
            build_config({"train": True, key: path})
        assert key.replace("_", "-") in (told.value.where or "")
    if "\0" not in path:
        for words in (
            ["data", "check", path],
            ["report", path],
            ["model", "get", path],
            ["monitor", path],
        ):
            assert call_allhands(*words).returncode == 2
    build_config({"train": True, "model": "é" * 127, "data": "/".join(["x" * 255] * 15)})


def test_words_of_another_encoding_are_one_message() -> None:
    for words in (["generate", "--prompt", "b\udcffd"], ["chat", "--system-prompt", "b\udcffd"]):
        done = call_allhands(*words, "--model", "demo")
        assert (done.returncode, words[1] in done.stderr) == (2, True), done.stderr


def test_homes_of_other_users_and_files_of_such_names(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert expanded("~root/x") == os.path.expanduser("~root") + "/x"
    with pytest.raises(ConfigError) as refused:
        build_config({"adapter_path": "~nobody-of-that-name/x"})
    assert refused.value.where == "--adapter-path"
    done = call_allhands("data", "demo", "--out", "~nobody-of-that-name/x")
    assert (done.returncode, list(tmp_path.iterdir())) == (2, [])
    done = call_allhands("version", env={"ALLHANDS_CACHE": "~nobody-of-that-name/x"})
    assert done.returncode == 2
    assert "ALLHANDS_CACHE" in done.stderr
    (tmp_path / "~notes.jsonl").touch()
    assert build_config({"data": "~notes.jsonl"}).data == "~notes.jsonl"


CALLS = """
import allhands, mlx.core as mx
from pathlib import Path
allhands.save_checkpoint(1, {"a": mx.zeros(1)}, {}, directory="~/run")
assert allhands.last_checkpoint(directory=Path("~/run")) is not None
with allhands.Metrics("~/numbers") as metrics:
    metrics.log(1, {"loss": 1.0})
"""


def test_the_python_calls(tmp_path: Path) -> None:
    # A process of its own: the calls make it a rank, whose signals end it.
    environ = {**os.environ, "HOME": str(tmp_path), "ALLHANDS_CACHE": str(tmp_path / "cache")}
    subprocess.run([sys.executable, "-c", CALLS], cwd=tmp_path, env=environ, check=True, timeout=60)
    assert {path.name for path in tmp_path.iterdir()} - {"cache", ".cache"} == {"numbers", "run"}


@pytest.mark.parametrize(
    "text",
    [
        "iters: 1\nmax_steps: 2\n",
        "batch-size: 1\nbatch_size: 1\n",
        "lora_layers: 3\nnum_layers: 3\n",
        "iters: 1\niters: 1\n",
        "lora_parameters:\n  rank: 1\n  rank: 2\n",
        "hf_dataset:\n- path: a\n- path: b\n  path: c\n",
    ],
)
def test_keys_given_twice(text: str, tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        build_config({}, tmp_path / "a.yaml")
    assert caught.value.code == "option-given-twice"


@pytest.mark.parametrize(
    "flags",
    [
        {"iters": 1, "max_steps": 2},
        {"lora_parameters": '{"rank": 1, "rank": 2}'},
        {"hf_dataset": '[{"path": "a", "config": {"x": 1, "x": 1}}]'},
        {"optimizer_config": '{"adamw": {"eps": 1e-8, "eps": 1e-6}}'},
    ],
    ids=str,
)
def test_arguments_given_twice(flags: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="twice"):
        build_config(flags)


# --- files of earlier versions of mlx_lm ----------------------------------------------------------

SHAPE = {"keys": ["self_attn.q_proj"], "rank": 8, "scale": 10.0}


def yaml_of(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_files_of_earlier_mlx_lm_run_with_notes_on_what_has_no_effect(tmp_path: Path) -> None:
    text = "lora_layers: 4\nuse_dora: false\nadapter_file: adapters.npz\nwandb: null\nlora_parameters:\n"
    text += "  keys: [self_attn.q_proj]\n  rank: 8\n  alpha: 16.0\n  scale: 10.0\n  dropout: 0.0\n"
    made = build_config({}, yaml_of(tmp_path, text))
    assert made.num_layers == 4
    assert made.lora_parameters.model_dump() == {
        "rank": 8,
        "scale": 10.0,
        "dropout": 0.0,
        "keys": ["self_attn.q_proj"],
    }
    assert [note.partition(" has no effect")[0] for note in made.notes] == [
        "use_dora",
        "adapter_file",
        "lora_parameters: alpha",
    ]
    assert made.model_copy(update={"iters": 3}).notes == made.notes
    # The same without them is the same run, and has no notes.
    plain = build_config(
        {}, yaml_of(tmp_path, "num_layers: 4\nlora_parameters: " + json.dumps(SHAPE))
    )
    assert plain.notes == ()
    assert plain.fingerprint() == made.fingerprint()
    flag = build_config({"lora_parameters": json.dumps({**SHAPE, "alpha": 1})})
    assert len(flag.notes) == 1


@pytest.mark.parametrize(
    "text",
    ["use_dora: true\n", "wandb: mine\n", "lora_parameters:\n  alpha: 16\n", "no_such_key: null\n"],
)
def test_what_earlier_files_mean_otherwise_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError):
        build_config({}, yaml_of(tmp_path, text))


def test_the_name_of_a_dataset_in_earlier_files(tmp_path: Path) -> None:
    found = build_config(
        {}, yaml_of(tmp_path, "hf_dataset:\n  name: billsum\n  prompt_feature: text\n")
    ).hf_dataset
    assert getattr(found, "path", None) == "billsum"


def test_all_unknown_keys_are_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("learning_rat: 1\niters: 3\nzzz: 2\n")
    with pytest.raises(ConfigError) as told:
        build_config({}, tmp_path / "run.yaml")
    error = told.value
    assert error.where == f"{tmp_path / 'run.yaml'}:1: learning_rat"
    assert f"{tmp_path / 'run.yaml'}:3: zzz" in error.message


def test_a_plan_reads_resume_as_training_does() -> None:
    config = training_config(["--resume", "--iters", "3"])
    assert (config.resume, config.iters) == ("auto", 3)
