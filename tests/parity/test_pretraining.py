"""``allhands pretrain``: a new model by the same trainer, and a model's directory as the result."""

from __future__ import annotations

import json
import math
import sys
import types
from pathlib import Path
from typing import Any

import allhands  # before MLX, for its BLAS

# isort: split
import mlx.core as mx
import mlx_lm
import numpy as np
import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
from ranked_tasks import finetune
from runs import read_weights
from tiny import run_allhands, write_tokenizer

from allhands.config.pretrain_schema import PretrainConfig
from allhands.config.schema import build_config
from allhands.errors import AllhandsError, ModelError
from allhands.io.trees import flatten
from allhands.model.load import load_model

TEXT = (
    "once upon a time there was little cat who liked to sit in the sun and sing with big red bird"
)
WORDS = tuple(TEXT.split(" "))
SHAPE = {
    "shape": "llama",
    "layers": 2,
    "dims": 32,
    "mlp_dims": 64,
    "heads": 4,
    "kv_heads": 2,
    "block_size": 48,
}
SMALL = {
    "batch_size": 4,
    "iters": 12,
    "steps_per_report": 1,
    "steps_per_eval": 6,
    "val_batches": -1,
    "save_every": 6,
    "learning_rate": 3e-3,
}


def stories(seed: int, count: int) -> list[str]:
    random = np.random.default_rng(seed)
    return [" ".join(random.choice(WORDS, random.integers(5, 60))) + "." for _ in range(count)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer of single bytes, and texts."""
    folder = tmp_path_factory.mktemp("corpus")
    write_tokenizer(folder / "tokenizer")
    (folder / "data").mkdir()
    (folder / "data" / "train.txt").write_text("<|endoftext|>".join(stories(1, 40)))
    (folder / "data" / "valid.jsonl").write_text(
        "".join(json.dumps({"text": t}) + "\n" for t in stories(2, 5))
    )
    return folder


def flags(place: Path, out: Path, **more: Any) -> dict[str, Any]:
    places = {
        "data": str(place / "data"),
        "tokenizer": str(place / "tokenizer"),
        "adapter_path": str(out),
    }
    return {"train": True, **places, **SHAPE, **SMALL, **more}


def pretrain(values: dict[str, Any]) -> Path:
    return finetune(build_config(values, kind=PretrainConfig))


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["event"] == kind]


def losses(run: Path) -> list[float]:
    return [event["loss"] for event in events(run, "train")]


@pytest.fixture(scope="module")
def alone(place: Path) -> Path:
    return pretrain(
        flags(place, place / "alone", sample_prompts=["once upon", "the"], sample_tokens=20)
    )


def test_the_result_is_a_model_that_mlx_lm_loads_and_generates_from(
    place: Path, alone: Path
) -> None:
    loaded: Any = mlx_lm.load(str(alone / "model"))
    model, tokenizer = loaded[:2]
    assert mlx_lm.generate(model, tokenizer, "once upon", max_tokens=5)
    # Its loss on the validation texts, cut into rows as in training, is the one that was reported.
    text = [tokenizer.encode(story) for story in stories(2, 5)]
    joined = [token for story in text for token in [*story, *([] if story[-1] == 2 else [2])]]
    rows = [joined[i : i + 48] for i in range(0, len(joined), 47)]
    total, count = 0.0, 0
    for row in rows:
        if len(row) > 1:
            logits = model(mx.array([row[:-1]]))[0].astype(mx.float32)
            picked = mx.take_along_axis(logits, mx.array(row[1:])[:, None], axis=-1)[:, 0]
            total += (mx.logsumexp(logits, axis=-1) - picked).sum().item()
            count += len(row) - 1
    reported = events(alone, "valid")[-1]
    assert reported["num_tokens"] == pytest.approx(count, abs=len(rows))
    assert total / count == pytest.approx(reported["loss"], rel=0.01)
    assert losses(alone)[-1] < losses(alone)[0] - 0.5


def test_the_best_weights_are_a_model_too(place: Path, tmp_path: Path) -> None:
    """The last ones are worse here: the learning rate is far too high at the end."""
    schedule = {"name": "linear_schedule", "arguments": [1e-3, 3.0, 12]}
    run = pretrain(flags(place, tmp_path / "run", lr_schedule=schedule, steps_per_eval=1))
    reports = events(run, "valid")
    best = min(reports, key=lambda report: report["loss"])
    assert 0 < best["step"] < 12
    mine, kept, last = (
        read_weights(run / file)
        for file in (
            "model-best/model.safetensors",
            "best/adapters.safetensors",
            "model/model.safetensors",
        )
    )
    assert mine.keys() == last.keys()
    for name, array in kept.items():
        np.testing.assert_array_equal(np.array(array), np.array(mine[name]))
    assert any(not np.array_equal(np.array(mine[name]), np.array(last[name])) for name in mine)
    assert mlx_lm.load(str(run / "model-best"))
    with pytest.raises(ModelError, match=r"its models are .*model and .*model-best"):
        load_model(str(run))


def test_bits_per_byte_are_the_loss_over_the_texts_bytes(alone: Path) -> None:
    num_bytes = sum(len(story.encode()) for story in stories(2, 5))
    # A token a byte, and two special tokens a text at most.
    for report in events(alone, "valid"):
        bits = report["loss"] / math.log(2)
        assert (
            bits * num_bytes
            <= report["bits_per_byte"] * num_bytes
            <= bits * (num_bytes + 2 * 5) * 1.001
        )


def test_samples_are_taken_with_each_validation_and_change_nothing(
    place: Path, alone: Path, tmp_path: Path
) -> None:
    found = events(alone, "sampled")
    assert [(event["step"], event["prompt"]) for event in found] == [
        (step, prompt) for step in (0, 6, 12) for prompt in ("once upon", "the")
    ]
    assert len({event["text"] for event in found}) > 3
    silent = pretrain(flags(place, tmp_path / "silent", sample_prompts=[]))
    assert events(silent, "sampled") == []
    assert losses(silent) == losses(alone)
    often = pretrain(
        flags(
            place,
            tmp_path / "often",
            iters=4,
            sample_prompts=["a"],
            sample_every=2,
            sample_tokens=3,
        )
    )
    assert [event["step"] for event in events(often, "sampled")] == [0, 2, 4]


def test_a_dataset_of_the_hub_by_its_name(
    place: Path, alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As roneneldan/TinyStories is: two splits, and a column ``text``."""
    rows = {"train": stories(1, 40), "validation": stories(2, 5)}
    library: Any = types.ModuleType("datasets")
    library.load_dataset = lambda path, split: [{"text": text} for text in rows[split]]
    library.get_dataset_split_names = lambda path: list(rows)
    monkeypatch.setitem(sys.modules, "datasets", library)
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")  # nobody is asked whether the Hub answers
    run = pretrain(flags(place, tmp_path / "hub", data="owner/stories"))
    assert losses(run) == losses(alone)
    assert [event["loss"] for event in events(run, "valid")] == [
        event["loss"] for event in events(alone, "valid")
    ]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_processes_train_the_same_model(
    place: Path, alone: Path, tmp_path: Path, optimizer: str
) -> None:
    one = (
        alone
        if optimizer == "adamw"
        else pretrain(flags(place, tmp_path / "one", optimizer=optimizer))
    )
    values = flags(place, tmp_path / "two", optimizer=optimizer)
    del values["train"]
    options = [
        text
        for name, value in values.items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    done = run_allhands("pretrain", *options, "-n", "2", "--backend", "ring")
    assert done.returncode == 0, done.stderr
    assert "method      pre-training" in done.stdout
    np.testing.assert_allclose(losses(tmp_path / "two"), losses(one), rtol=2e-4)
    mine, theirs = (
        read_weights(run / "model" / "model.safetensors") for run in (one, tmp_path / "two")
    )
    assert mine.keys() == theirs.keys()
    for name, array in mine.items():
        np.testing.assert_allclose(np.array(array), np.array(theirs[name]), atol=2e-3)


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_resumed_run_ends_with_the_same_bits(
    place: Path, alone: Path, tmp_path: Path, optimizer: str
) -> None:
    whole = (
        alone
        if optimizer == "adamw"
        else pretrain(flags(place, tmp_path / "whole", optimizer=optimizer))
    )
    run = tmp_path / "run"
    pretrain(flags(place, run, optimizer=optimizer, keep_last=5))
    part = run / "checkpoints" / "step-0000006"
    resumed = pretrain(flags(place, tmp_path / "resumed", optimizer=optimizer, resume=str(part)))
    assert losses(resumed) == losses(whole)
    assert (resumed / "model" / "model.safetensors").read_bytes() == (
        whole / "model" / "model.safetensors"
    ).read_bytes()


def test_another_shape_is_not_gone_on_with(place: Path, alone: Path) -> None:
    values = flags(place, alone, dims=64, resume="auto")
    del values["train"]
    options = [
        text
        for name, value in values.items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    done = run_allhands("pretrain", *options)
    assert done.returncode == 2
    assert "made with 32, this is 64" in done.stderr


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_other_families(place: Path, tmp_path: Path, family: str) -> None:
    more = {"experts": 4, "experts_per_token": 2} if family == "mixtral" else {}
    run = pretrain(flags(place, tmp_path / "run", shape=family, **more))
    assert losses(run)[-1] < losses(run)[0] - 0.5
    loaded: Any = mlx_lm.load(str(run / "model"))
    assert loaded[0].model_type == family
    names = {name for name, _ in flatten(loaded[0].parameters())}
    assert any("switch_mlp" in name for name in names) == (family == "mixtral")


@pytest.mark.gpu
@pytest.mark.skipif(
    mx.default_device().type != mx.DeviceType.gpu, reason="a CPU computes in float32"
)
def test_in_half_precision_with_copies_the_curve_is_that_of_float32(
    place: Path, alone: Path, tmp_path: Path
) -> None:
    rough = pretrain(flags(place, tmp_path / "rough", dtype="bfloat16", compile="on"))
    np.testing.assert_allclose(losses(rough), losses(alone), rtol=0.02)
    weights = read_weights(rough / "model" / "model.safetensors")
    assert {array.dtype for array in weights.values()} == {mx.bfloat16}
    assert json.loads((rough / "model" / "config.json").read_text())["torch_dtype"] == "bfloat16"


@pytest.mark.gpu
@pytest.mark.skipif(
    mx.default_device().type != mx.DeviceType.gpu, reason="a CPU computes the same bits anyway"
)
def test_a_deterministic_run_has_the_same_bits_each_time(place: Path, tmp_path: Path) -> None:
    """In processes of their own: MLX asks once whether attention goes to cuDNN."""
    values = flags(place, Path(), dims=256, block_size=256, iters=60, val_batches=0, save_every=60)
    for name in ("one", "two"):
        given = {key: value for key, value in values.items() if key != "train"} | {
            "adapter_path": tmp_path / name
        }
        options = [f"--{key.replace('_', '-')}={value}" for key, value in given.items()]
        done = run_allhands("pretrain", *options, "--deterministic")
        assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    one, two = (
        (tmp_path / name / "model" / "model.safetensors").read_bytes() for name in ("one", "two")
    )
    assert one == two


def test_files_of_other_kinds_and_in_parts(place: Path, alone: Path, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    (folder / "train").mkdir(parents=True)
    texts = stories(1, 40)
    parquet.write_table(pa.table({"text": texts[:25]}), folder / "train" / "a.parquet")
    (folder / "train" / "b.txt").write_text("<|endoftext|>".join(texts[25:]))
    (folder / "valid-1.jsonl").write_text((place / "data" / "valid.jsonl").read_text())
    result = allhands.pretrain(
        progress=False, **flags(place, tmp_path / "run", data=str(folder), iters=3)
    )
    assert losses(result.adapter_path)[0] == losses(alone)[0]


def test_a_directory_called_model_that_is_somebodys_own_stays(place: Path, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine.txt").write_text("mine")
    values = flags(place, tmp_path, fine_tune_type="lora")
    plain = {key: values[key] for key in ("train", "data", "adapter_path", "batch_size")}
    (tmp_path / "metrics.jsonl").write_text("")
    finetune(
        build_config({**plain, "model": str(alone_model(place)), "iters": 1, "val_batches": 0})
    )
    assert (tmp_path / "model" / "mine.txt").read_text() == "mine"


def alone_model(place: Path) -> Path:
    return place / "alone" / "model"


def test_a_second_run_sets_the_first_ones_model_aside(place: Path, tmp_path: Path) -> None:
    pretrain(flags(place, tmp_path, iters=2))
    first = (tmp_path / "model" / "model.safetensors").read_bytes()
    pretrain(flags(place, tmp_path, iters=2, seed=5))
    assert (tmp_path / "model.1" / "model.safetensors").read_bytes() == first
    assert (tmp_path / "model" / "model.safetensors").read_bytes() != first


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no tokenizer": ({"tokenizer": None}, "--tokenizer is missing"),
    "no data": ({"data": None}, "--data is missing"),
    "vocabulary": ({"vocabulary": 100}, "the tokenizer has 259 tokens, the vocabulary 100"),
    "heads": ({"heads": 5}, "32 dims cannot be divided among 5 heads"),
    "name": ({"shape": "lama"}, "did you mean llama"),
    "lora": ({"fine_tune_type": "lora"}, "trained in full"),
    "model": ({"model": "x"}, "--model is not used"),
    "rows": ({"max_seq_length": 99}, "rows of 99 tokens do not fit a block size of 48"),
    "half precision": ({"dtype": "bfloat16"}, "a CPU computes in float32"),
    "experts": ({"experts": 4}, "a llama has no experts"),
    "too large a vocabulary": ({"vocabulary": 10**11}, "give a whole number from 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_input_is_one_message(place: Path, tmp_path: Path, name: str) -> None:
    change, message = WRONG[name]
    values = {**flags(place, tmp_path / "run"), **change}
    with pytest.raises(AllhandsError) as caught:
        pretrain({key: value for key, value in values.items() if value is not None})
    assert caught.value.exit_code == 2
    assert message in str(caught.value)
    assert not (tmp_path / "run" / "model").exists()


def test_a_shape_larger_than_the_memory_is_refused_before_it_is_made(
    place: Path, tmp_path: Path
) -> None:
    with pytest.raises(AllhandsError) as caught:
        pretrain({**flags(place, tmp_path / "run"), "layers": 10**8})
    assert (caught.value.code, caught.value.exit_code) == ("memory-too-small", 4)
    assert not (tmp_path / "run" / "model").exists()


@pytest.mark.parametrize("name", ["no tokenizer", "vocabulary"])
def test_the_command_says_it_too(place: Path, tmp_path: Path, name: str) -> None:
    """What the options alone say, and what the first look at the files does."""
    change, message = WRONG[name]
    values = {**flags(place, tmp_path / "run"), **change}
    options = [
        f"--{k.replace('_', '-')}={v}" for k, v in values.items() if v is not None and k != "train"
    ]
    done = run_allhands("pretrain", *options)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run" / "model").exists()
