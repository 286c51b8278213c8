"""What a platform hands to the container becomes options; what it collects is whole or absent."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from allhands.cli.container import run_container
from allhands.cli.options import parsed_options
from allhands.cluster.containers.channels import data_of, model_of
from allhands.cluster.containers.options import as_flags, hyperparameters, merged, plain_value
from allhands.cluster.containers.results import publish_model, reason_of, tell_failure
from allhands.cluster.containers.training import ContainerRun, Machine
from allhands.config.schema import TrainConfig, build_config
from allhands.errors import ConfigError, DataError, ModelError, StorageError


def write(path: Path, content: str = "") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    return path


def given(**values: object) -> dict[str, Any]:
    return hyperparameters({"SM_HPS": json.dumps(values)}, Path("/nowhere"))


# --- hyperparameters ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "field", "meant"),
    [
        ("iters", "100", "iters", 100),
        ("max_steps", "100", "iters", 100),
        ("learning-rate", "1e-5", "learning_rate", 1e-5),
        ("--batch_size", "8", "batch_size", 8),
        ("mask_prompt", "true", "mask_prompt", True),
        ("mask_prompt", "True", "mask_prompt", True),
        ("packing", "false", "packing", False),
        ("optimizer", '"adamw"', "optimizer", "adamw"),
        ("model", "org/name", "model", "org/name"),
        ("rank_weights", "[2, 1]", "rank_weights", [2.0, 1.0]),
        ("epochs", "None", "epochs", None),
        ("iters", "", "iters", None),
        ("clear_cache_threshold", "2GB", "clear_cache_threshold", 2_000_000_000),
        ("num_layers", "-1", "num_layers", -1),
    ],
)
def test_strings_mean_what_the_fields_are(name: str, text: str, field: str, meant: object) -> None:
    config = merged({}, given(**{name: text}))
    assert getattr(config, field) == meant
    assert type(getattr(config, field)) is type(meant)


def test_structures_come_as_json_in_strings() -> None:
    config = merged(
        {},
        given(lora_parameters='{"rank": 4, "scale": 10.0, "dropout": 0.1}', lr_schedule="cosine"),
    )
    assert (
        config.lora_parameters.rank,
        config.lora_parameters.scale,
        config.lora_parameters.dropout,
    ) == (4, 10.0, 0.1)
    assert config.lr_schedule is not None
    assert config.lr_schedule.name == "cosine"


def test_a_string_is_left_alone_where_it_is_no_json() -> None:
    assert plain_value("model", '"half') == '"half'
    assert plain_value("model", "none") == "none"  # a model may be called so
    assert plain_value("report_to", "none") is None


def test_what_sagemaker_adds_is_passed_over() -> None:
    added = {
        "sagemaker_program": "train.py",
        "sagemaker_region": "x",
        "_tuning_objective_metric": "loss",
    }
    assert given(**added, iters="3") == {"iters": "3"}


def test_the_file_wins_over_the_toolkits_variables(tmp_path: Path) -> None:
    file = write(tmp_path / "hyperparameters.json", '{"iters": "7"}')
    assert hyperparameters({"SM_HPS": '{"iters": 8}'}, file) == {"iters": "7"}
    both = {"SM_HPS": '{"iters": 8}', "SM_USER_ARGS": '["--iters","9"]'}
    assert hyperparameters(both, tmp_path / "no") == {"iters": 8}
    assert hyperparameters({}, tmp_path / "no") == {}


def test_arguments_of_the_toolkit() -> None:
    words = [
        "--iters",
        "100",
        "--mask-prompt",
        "--learning_rate=1e-4",
        "--num-layers",
        "-1",
        "--train",
        "True",
    ]
    found = hyperparameters({"SM_USER_ARGS": json.dumps(words)}, Path("/nowhere"))
    config = merged({}, found)
    assert (config.iters, config.mask_prompt, config.learning_rate, config.num_layers) == (
        100,
        True,
        1e-4,
        -1,
    )
    assert config.train
    twice = '["--iters", "1", "--iters", "2"]'
    for wrong in ('"--iters 3"', '["iters"]', '["--iters=1", "2"]', "[1]", "no", "{}", twice):
        with pytest.raises(ConfigError) as caught:
            hyperparameters({"SM_USER_ARGS": wrong}, Path("/nowhere"))
        assert caught.value.where == "SM_USER_ARGS"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("learnig_rate", "1", "did you mean learning_rate"),
        ("iters", "many", "valid integer"),
        ("per_device_train_batch_size", "4", "use batch_size"),
        ("lora_parameters", "{rank: 4}", "not valid JSON"),
        ("num_layers", "0", "0 layers"),
    ],
)
def test_a_wrong_one_is_named(name: str, value: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        merged({}, given(**{name: value}))
    assert caught.value.where == f"hyperparameter {name}"


def test_one_given_twice_and_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        given(iters="1", max_steps="2")
    assert caught.value.code == "option-given-twice"
    for text in ("[]", "{", "\xff"):
        with pytest.raises(ConfigError, match=r"hyperparameters\.json"):
            hyperparameters({}, write(tmp_path / "hyperparameters.json", text))


# --- arguments ------------------------------------------------------------------------------------


def test_arguments_win_over_hyperparameters_and_both_over_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "options.yaml", "iters: 1\nbatch_size: 2\nseed: 3\n")
    arguments = parsed_options(
        ["--iters=10", "--learning_rate", "0.001", f"--config={file}", "--resume"],
        "allhands train",
    )
    config = merged(arguments, {"iters": "20", "batch_size": "20"})
    assert (config.iters, config.batch_size, config.seed, config.learning_rate) == (
        10,
        20,
        3,
        0.001,
    )
    assert config.resume == "auto"


def test_wrong_arguments_are_one_message() -> None:
    for words, code in (
        (["--iterations", "3"], "option-unknown"),
        (["--iters", "x"], "value-of-wrong-type"),
        (["stray"], "argument-unknown"),
    ):
        with pytest.raises(ConfigError) as caught:
            parsed_options(words, "allhands train")
        assert (caught.value.code, caught.value.where) == (code, words[0])


@pytest.mark.parametrize(
    "values",
    [
        {"train": True, "iters": 3, "mask_prompt": False, "keep_best": False},
        {
            "lora_parameters": {"rank": 4, "scale": 2.5},
            "lr_schedule": "cosine",
            "rank_weights": [2, 1],
        },
        {"data": "a b'c", "model": "--odd", "hf_dataset": [{"path": "x/y"}]},
        {
            "lr_schedule": {"name": "cosine_decay", "arguments": [1e-5, 100]},
            "clear_cache_threshold": "2GB",
        },
        {
            "optimizer": "adamw",
            "optimizer_config": {"adamw": {"betas": [0.9, 0.95]}},
            "num_layers": -1,
        },
    ],
)
def test_flags_give_the_same_configuration_back(values: dict[str, Any]) -> None:
    config = build_config(values)
    again = build_config(parsed_options(as_flags(config), "allhands train"))
    assert again == config
    assert again.model_fields_set == config.model_fields_set


# --- channels -------------------------------------------------------------------------------------


@pytest.fixture
def work(tmp_path: Path) -> Path:
    (tmp_path / "work").mkdir()
    return tmp_path / "work"


def test_one_channel_with_all_files_is_taken_as_it_is(tmp_path: Path, work: Path) -> None:
    channel = tmp_path / "training"
    write(channel / "train.jsonl", "{}\n")
    write(channel / "valid.jsonl", "{}\n")
    for name in ("training", "train", "pirates"):
        assert data_of({name: channel, "model": tmp_path}, work) == (channel, [])
    assert data_of({}, work) == (None, [])


def test_channels_are_splits_and_shards_are_joined(tmp_path: Path, work: Path) -> None:
    write(tmp_path / "train/b.jsonl", "2\n3\n")
    write(tmp_path / "train/a.jsonl", "1")  # without an end of line
    write(tmp_path / "train/.manifest", "x")
    write(tmp_path / "val/anything.jsonl", "4\n")
    write(tmp_path / "t.jsonl", "5\n")
    write(tmp_path / "extra/x", "")
    channels = {
        "train": tmp_path / "train",
        "validation": tmp_path / "val",
        "test": tmp_path / "t.jsonl",
    }
    found, notes = data_of({**channels, "extra": tmp_path / "extra"}, work)
    assert found is not None
    read = {path.name: path.read_text() for path in found.iterdir()}
    assert read == {"train.jsonl": "1\n2\n3\n", "valid.jsonl": "4\n", "test.jsonl": "5\n"}
    assert len(notes) == 1
    assert "extra" in notes[0]


def test_a_channel_by_its_own_split_beside_other_files(tmp_path: Path, work: Path) -> None:
    write(tmp_path / "c/valid.jsonl", "1\n")
    write(tmp_path / "c/notes.txt", "")
    write(tmp_path / "t/part-00.jsonl", "0\n")
    write(tmp_path / "t/part-01.jsonl", "1\n")
    found, _ = data_of({"valid": tmp_path / "c", "train": tmp_path / "t" / "part-*"}, work)
    assert found is not None
    assert (found / "valid.jsonl").read_text() == "1\n"
    assert (found / "train.jsonl").read_text() == "0\n1\n"


def test_channels_that_cannot_be_trained_on(tmp_path: Path, work: Path) -> None:
    write(tmp_path / "csv/a.csv", "x")
    (tmp_path / "empty").mkdir()
    for channels, said in (
        ({"train": tmp_path / "csv"}, "data prepare"),
        ({"train": tmp_path / "empty"}, "is empty"),
        ({"train": tmp_path / "nowhere"}, "is empty"),
        ({"train": tmp_path / "csv", "training": tmp_path / "csv"}, "two channels"),
    ):
        shutil.rmtree(work / "data", ignore_errors=True)
        with pytest.raises(DataError) as caught:
            data_of(channels, work)
        assert said in str(caught.value)


def archive(path: Path, name: str, text: str = "{}") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w:gz") as content:
        member = tarfile.TarInfo(name)
        member.size = len(text)
        content.addfile(member, io.BytesIO(text.encode()))
    return path


def test_the_model_in_its_channel(tmp_path: Path, work: Path) -> None:
    write(tmp_path / "plain/config.json", "{}")
    write(tmp_path / "deep/llama/config.json", "{}")
    assert model_of({"train": tmp_path}, work) is None
    assert model_of({"model": tmp_path / "plain"}, work) == tmp_path / "plain"
    assert model_of({"pretrained": tmp_path / "deep"}, work) == tmp_path / "deep" / "llama"
    archive(tmp_path / "packed/model.tar.gz", "llama/config.json")
    found = model_of({"model": tmp_path / "packed"}, work)
    assert found is not None
    assert (found / "config.json").read_text() == "{}"


def test_a_channel_without_a_model_or_with_a_hostile_archive(tmp_path: Path, work: Path) -> None:
    write(tmp_path / "adapter/adapters.safetensors")
    write(tmp_path / "two/a/config.json")
    write(tmp_path / "two/b/config.json")
    for place, said in (("adapter", "no model"), ("two", "several")):
        with pytest.raises(ModelError, match=said):
            model_of({"model": tmp_path / place}, work)
    archive(tmp_path / "evil/model.tar.gz", "../../escaped.json")
    with pytest.raises(ModelError) as caught:
        model_of({"model": tmp_path / "evil"}, work)
    assert caught.value.code == "archive-damaged"
    assert not list(tmp_path.rglob("escaped.json"))


# --- the platform's defaults ----------------------------------------------------------------------


def sagemaker(root: Path, hosts: int = 1, gpus: int = 0, **variables: str) -> Machine:
    config = root / "opt/ml/input/config"
    names = [f"algo-{n}" for n in range(1, hosts + 1)]
    write(config / "resourceconfig.json", json.dumps({"current_host": "algo-1", "hosts": names}))
    write(config / "inputdataconfig.json", '{"train": {}}')
    write(root / "opt/ml/input/data/train/train.jsonl", "{}\n")
    return Machine(variables, root, gpus, cuda=gpus > 0)


def configured(machine: Machine, scratch: Path, *words: str) -> TrainConfig:
    run = ContainerRun(machine, machine.launch(), scratch, print)
    return run.configure(parsed_options(words, "allhands train"))


def test_sagemaker_with_four_gpus(tmp_path: Path, work: Path) -> None:
    config = configured(sagemaker(tmp_path, gpus=4), work)
    assert config.train
    assert config.data == str(tmp_path / "opt/ml/input/data/train")
    assert config.adapter_path == str(tmp_path / "opt/ml/checkpoints")
    assert (config.resume, config.num_ranks, config.max_restarts) == ("auto", 4, 3)
    assert config.stop_grace_s == 100.0  # of 120, to have time to copy


def test_what_a_person_says_wins(tmp_path: Path, work: Path) -> None:
    words = [
        "--data=demo",
        "--adapter-path=mine",
        "-n",
        "2",
        "--max-restarts=0",
        "--no-train",
        "--stop-grace-s=7",
    ]
    config = configured(sagemaker(tmp_path, gpus=4), work, *words)
    said = (
        config.data,
        config.adapter_path,
        config.num_ranks,
        config.max_restarts,
        config.train,
        config.stop_grace_s,
    )
    assert said == ("demo", "mine", 2, 0, False, 7.0)
    assert configured(sagemaker(tmp_path), work, "--keep-last=0").max_restarts is None


def test_several_computers_write_checkpoints_on_the_first_only(tmp_path: Path, work: Path) -> None:
    machine = sagemaker(tmp_path, hosts=2)
    first = configured(machine, work)
    assert first.adapter_path == str(tmp_path / "opt/ml/checkpoints")
    write(
        tmp_path / "opt/ml/input/config/resourceconfig.json",
        '{"current_host": "algo-2", "hosts": ["algo-1","algo-2"]}',
    )
    second = configured(machine, work)
    assert second.adapter_path == str(work / "run")
    assert second.max_restarts is None
    for words in (["-n", "3"], ["--hostfile=h"], ["--max-restarts=2"], ["--backend=nccl"]):
        with pytest.raises(ConfigError):
            configured(machine, work, *words)
    assert configured(machine, work, "-n", "2").num_ranks == 2


def test_clouds_do_not_train_on_the_demo_unasked(tmp_path: Path, work: Path) -> None:
    machine = sagemaker(tmp_path)
    write(tmp_path / "opt/ml/input/config/inputdataconfig.json", "{}")
    with pytest.raises(ConfigError) as caught:
        configured(machine, work)
    assert caught.value.code == "option-missing"
    with pytest.raises(ConfigError) as caught:
        configured(Machine({"CLOUD_ML_JOB_ID": "1"}, tmp_path), work)
    assert caught.value.code == "option-missing"
    assert "data" not in configured(Machine({}, tmp_path / "elsewhere"), work).model_fields_set


def test_buckets_are_mounted_files_on_vertex(tmp_path: Path, work: Path) -> None:
    spec = {"cluster": {"workerpool0": ["h:2222"]}, "task": {"type": "workerpool0", "index": 0}}
    env = {"CLUSTER_SPEC": json.dumps(spec), "AIP_CHECKPOINT_DIR": "gs://b/c/"}
    config = configured(Machine(env, tmp_path), work, "--data=gs://b/data", "--model=gs://b/m")
    assert (config.data, config.model) == (str(tmp_path / "gcs/b/data"), str(tmp_path / "gcs/b/m"))
    assert config.adapter_path == str(work / "run")  # copied to the bucket from there
    with pytest.raises(ConfigError) as caught:
        configured(Machine({}, tmp_path), work, "--data=gs://b/data")
    assert caught.value.code == "path-invalid"


def test_kubernetes_gives_its_own_time(tmp_path: Path, work: Path) -> None:
    env = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
    assert configured(Machine(env, tmp_path), work).stop_grace_s == 20.0
    assert (
        configured(Machine({**env, "ALLHANDS_GRACE_S": "120"}, tmp_path), work).stop_grace_s
        == 100.0
    )
    assert configured(Machine({**env, "ALLHANDS_GRACE_S": "6"}, tmp_path), work).stop_grace_s == 5.0


def test_words_that_are_no_options_are_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[list[str]] = []
    monkeypatch.setattr(
        "os.execvp", lambda program, words: became.append([program, *words]) or exec_ends()
    )
    with pytest.raises(KeyboardInterrupt):
        run_container(["sh", "-c", "true"], Machine({}, tmp_path))
    assert became == [["sh", "sh", "-c", "true"]]
    for words in (["serve"], ["no-such-program"]):
        with pytest.raises(ConfigError):
            run_container(words, Machine({}, tmp_path))


def exec_ends() -> None:
    raise KeyboardInterrupt  # nothing follows an exec


# --- results --------------------------------------------------------------------------------------


def adapter(run: Path) -> Path:
    write(run / "adapters.safetensors", "weights")
    write(run / "adapter_config.json", "{}")
    write(run / "best/adapters.safetensors", "best")
    write(run / "best/adapter_config.json", "{}")
    return run


def files(directory: Path) -> dict[str, str]:
    return {
        str(p.relative_to(directory)): p.read_text()
        for p in sorted(directory.rglob("*"))
        if p.is_file()
    }


def test_the_model_is_copied_and_nothing_else(tmp_path: Path) -> None:
    run = adapter(tmp_path / "run")
    write(run / "metrics.jsonl", "x")
    (tmp_path / "model").mkdir()
    assert publish_model(run, tmp_path / "model")
    assert files(tmp_path / "model") == {
        "adapter_config.json": "{}",
        "adapters.safetensors": "weights",
        "best/adapter_config.json": "{}",
        "best/adapters.safetensors": "best",
    }
    assert not publish_model(tmp_path / "nothing", tmp_path / "other")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("failing", [0, 1, 2, 3])
def test_it_is_copied_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    run, calls = adapter(tmp_path / "run"), list[str]()
    real = shutil.copyfile if failing % 2 else Path.replace

    def fails(*arguments: Any) -> Any:
        calls.append(str(arguments[0]))
        if len(calls) == failing + 1:
            raise OSError(28, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(shutil, "copyfile", fails) if failing % 2 else monkeypatch.setattr(
        Path, "replace", fails
    )
    with pytest.raises(StorageError) as caught:
        publish_model(run, tmp_path / "model")
    assert caught.value.code == "disk-full"
    assert len(calls) == failing + 1
    assert files(tmp_path / "model") == {}


def test_the_reason_is_short_and_valid_text(tmp_path: Path) -> None:
    said: list[str] = []
    tell_failure(tmp_path / "output/failure", "é" * 900, said.append)
    text = (tmp_path / "output/failure").read_text()
    assert text == "é" * 500 + "\n"
    assert len(text) <= 1024
    tell_failure(None, "x", said.append)
    assert said == []
    write(tmp_path / "file")
    tell_failure(tmp_path / "file/failure", "x", said.append)
    assert len(said) == 1


def test_the_reason_is_that_of_the_rank_that_failed(tmp_path: Path) -> None:
    assert "exit code 3" in reason_of(tmp_path, 3)
    events = [
        {"kind": "given up", "message": "not started: no ranks"},
        {"kind": "failed", "message": "rank 1 exited with code 3", "rank": 1},
        {"kind": "given up", "message": "not started again: twice the same"},
    ]
    lines = [json.dumps({"time": 0.0, **event}) for event in events]
    write(tmp_path / "events.jsonl", lines[0] + "\n")
    assert reason_of(tmp_path, 3) == "not started: no ranks"
    write(tmp_path / "events.jsonl", "\n".join(lines) + "\ntorn")
    assert reason_of(tmp_path, 3) == "rank 1 exited with code 3"
    write(tmp_path / "logs/error-rank-1.json", json.dumps({"text": "train.jsonl:3: bad"}))
    assert reason_of(tmp_path, 3) == "train.jsonl:3: bad"
