"""``allhands eval`` against a plain loop over mlx_lm's model, and on two processes against one."""

from __future__ import annotations

import json
import math
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from command_line import call_allhands
from mlx_lm.tuner.utils import load_adapters
from mlx_lm.utils import load
from tiny import run_allhands, write_adapter

from allhands.config.eval_schema import EvalConfig
from allhands.config.schema import build_config
from allhands.run.evaluating import run_evaluation
from allhands.run.session import RunContext


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tiny_model, tmp_path_factory.mktemp("eval") / "run")


def plain(model_path: Path, adapter: Path | None, texts: list[list[int]]) -> tuple[float, int]:
    """Mean loss and number of tokens, one text at a time."""
    model: Any
    model, *_ = load(str(model_path))
    if adapter is not None:
        load_adapters(model, str(adapter))
    model.eval()
    total, count = 0.0, 0
    for tokens in texts:
        array = mx.array([tokens])
        losses = nn.losses.cross_entropy(model(array[:, :-1]).astype(mx.float32), array[:, 1:])
        total += float(mx.sum(losses).item())
        count += len(tokens) - 1
    return total / count, count


def chats(model: Path, file: Path) -> list[list[int]]:
    tokenizer: Any = load(str(model))[1]
    rows = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    return [tokenizer.encode(tokenizer.apply_chat_template(row, tokenize=False)) for row in rows]


def evaluated(*words: object) -> dict[str, Any]:
    done = run_allhands("eval", "--json", *map(str, words))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("split", ["train", "valid", "test"])
def test_the_loss_is_that_of_a_plain_loop(
    tiny_model: Path, tiny_data: Path, adapter: Path, split: str
) -> None:
    texts = chats(tiny_model, tiny_data / f"{split}.jsonl")
    for chosen in (None, adapter):
        flags = {"model": str(tiny_model), "data": str(tiny_data), "split": split, "test": True}
        flags |= {"adapter_path": str(chosen)} if chosen else {}
        config = build_config(flags, None, EvalConfig)
        assert isinstance(config, EvalConfig)
        found = asdict(run_evaluation(config, RunContext()))
        loss, count = plain(tiny_model, chosen, texts)
        assert found["num_tokens"] == count
        assert found["num_examples"] == len(texts)
        assert found["loss"] == pytest.approx(loss, rel=1e-5)
        assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
        assert found["bits_per_byte"] is None


@pytest.mark.slow
def test_examples_that_were_left_out_are_not_counted(tiny_model: Path, tiny_data: Path) -> None:
    words = [
        "--model",
        tiny_model,
        "--data",
        tiny_data,
        "--split",
        "train",
        "--test-batches",
        2,
        "--batch-size",
        3,
    ]
    assert evaluated(*words)["num_examples"] == 6
    assert evaluated(*words, "--packing", "--max-seq-length", 16)["num_examples"] is None
    done = run_allhands("eval", *map(str, words), "--packing", "--max-seq-length", "16")
    assert "2 batches of 3 rows" in done.stdout


@pytest.mark.slow
def test_two_processes_give_the_number_of_one_and_leave_the_run_alone(
    tiny_model: Path, tiny_data: Path, adapter: Path
) -> None:
    words = [
        "--model",
        tiny_model,
        "--data",
        tiny_data,
        "--split",
        "train",
        "--adapter-path",
        adapter,
    ]
    before = {path.name for path in adapter.iterdir()}
    one, two = evaluated(*words), evaluated(*words, "-n", 2)
    assert (one["num_ranks"], two["num_ranks"], one["split"]) == (1, 2, "train")
    assert one["loss"] == pytest.approx(
        plain(tiny_model, adapter, chats(tiny_model, tiny_data / "train.jsonl"))[0], rel=1e-5
    )
    assert two["num_tokens"] == one["num_tokens"]
    assert two["loss"] == pytest.approx(one["loss"], rel=1e-6)
    assert {path.name for path in adapter.iterdir()} == before


def test_plain_texts_have_bits_per_byte(tiny_model: Path, tmp_path: Path) -> None:
    texts = ["One day it rained.", "Überall war Nebel, überall."]
    (tmp_path / "test.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    found = evaluated("--model", tiny_model, "--data", tmp_path)
    tokenizer: Any = load(str(tiny_model))[1]
    tokens = [[*tokenizer.encode(text), tokenizer.eos_token_id] for text in texts]
    loss, count = plain(tiny_model, None, tokens)
    assert found["num_tokens"] == count
    size = sum(len(text.encode()) for text in texts)
    total = sum(map(len, tokens))
    assert found["bits_per_byte"] == pytest.approx(loss / math.log(2) * total / size, rel=1e-5)
    done = run_allhands("eval", "--model", tiny_model, "--data", tmp_path)
    assert f"{count} tokens counted" in done.stdout
    assert (
        f"loss {loss:.4f}  perplexity {math.exp(loss):.3f}  {found['bits_per_byte']:.4f} bits per byte"
        in done.stdout
    )


@pytest.mark.parametrize(
    ("words", "said", "code"),
    [
        (["--split", "valid"], "valid", 3),
        (["--adapter-path", "nowhere"], "no adapter", 4),
        (["--batch-size", "0"], "--batch-size", 2),
        (
            ["--test-batches", "0"],
            "--test-batches: 0 batches evaluate nothing: give a number from 1, or -1",
            2,
        ),
        (["--limit", "3"], "no effect without --tasks", 2),
        (["--tasks", "piqa", "--split", "test"], "no effect with --tasks", 2),
        (["--tasks", "piqa", "--hosts", "a,b"], "no effect with --tasks", 2),
        (["--hosts", "a,b", "--hostfile", "hosts"], "give one of the two", 2),
        (["--hosts", "a,,b"], "a name is missing beside a comma", 2),
        (["--hosts", "a,a"], "a is given twice", 2),
        (["--hosts", ""], "must not be empty", 2),
        (["--hostfile", "nowhere"], "nowhere", 2),
    ],
)
def test_wrong_input_is_one_message(
    tiny_model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    said: str,
    code: int,
) -> None:
    (tmp_path / "test.jsonl").write_text('{"text": "One day."}\n')
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    data = [] if "--tasks" in words else ["--data", tmp_path]
    # What only the data can say is said by a rank.
    run = run_allhands if code == 3 else call_allhands
    done = run("eval", "--model", tiny_model, *data, *words, env={"TMPDIR": str(temporary)})
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    assert list(temporary.glob("allhands*")) == []


def test_benchmarks_say_what_to_install(tiny_model: Path) -> None:
    pytest.importorskip("mlx_lm")
    from importlib.util import find_spec

    if find_spec("lm_eval") is not None:
        pytest.skip("lm_eval is installed")
    done = call_allhands("eval", "--model", tiny_model, "--tasks", "piqa")
    assert done.returncode == 2
    assert "pip install lm_eval" in done.stderr


TASK = """task: tea
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: label
metric_list: [{metric: acc}]
"""


def test_a_task_of_ones_own_in_the_real_harness(tiny_model: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="needs lm_eval")
    rows: list[dict[str, Any]] = [
        {"question": f"{letter} is", "choices": ["so", "otherwise, I fear"], "label": 1}
        for letter in "abcd"
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tea.yaml").write_text(TASK.replace("FILE", str(tmp_path / "rows.jsonl")))
    env = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    words = ["eval", "--json", "--model", tiny_model, "--tasks"]
    done = run_allhands(*words, tmp_path / "tea.yaml", env=env)
    assert done.returncode == 0, done.stderr
    model: Any
    model, tokenizer, *_ = load(str(tiny_model))

    def likelihood(question: str, answer: str) -> float:
        chat = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True
        )
        before, after = (
            tokenizer.encode(text, add_special_tokens=False) for text in (chat, chat + answer)
        )
        logs = nn.log_softmax(model(mx.array([after]))[0].astype(mx.float32))
        return sum(float(logs[i - 1, after[i]].item()) for i in range(len(before), len(after)))

    right = [
        likelihood(row["question"], row["choices"][1])
        > likelihood(row["question"], row["choices"][0])
        for row in rows
    ]
    assert json.loads(done.stdout)["tea"]["acc,none"] == sum(right) / len(right)
    for task, said in (
        (tmp_path / "none.yaml", "No such file"),
        (tmp_path / "rows.yml", "no line `task"),
        (",", "no task"),
    ):
        (tmp_path / "rows.yml").write_text("a: 1\n")
        done = call_allhands(*words, task)
        assert (done.returncode, said in done.stderr, "Traceback" in done.stderr) == (
            2,
            True,
            False,
        ), done.stderr


def test_benchmarks_score_the_model_with_its_adapter(
    tiny_model: Path, adapter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for lm-evaluation-harness that asks for one likelihood, as the real one asks
    for many.
    """
    asked: dict[str, Any] = {}

    def simple_evaluate(model: Any, **options: Any) -> Any:
        request = ModuleType("request")
        request.args = ("Tea", " now")  # type: ignore[attr-defined]
        asked.update(options)
        return {"results": {"made-up": {"score": model.loglikelihood([request])[0][0]}}}

    class Model:
        pass

    class Manager:
        all_tasks = ("made-up",)

    def module(name: str, **content: Any) -> None:
        made = ModuleType(name)
        made.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, made)

    module("lm_eval", simple_evaluate=simple_evaluate)
    module("lm_eval.tasks", TaskManager=Manager)
    module("lm_eval.api")
    module("lm_eval.api.model", LM=Model)
    module("lm_eval.api.registry", register_model=lambda name: lambda kind: kind)
    monkeypatch.delitem(sys.modules, "mlx_lm.evaluate", raising=False)
    from allhands.errors import ConfigError, DataError
    from allhands.export.harness import run_harness

    def run(task: str) -> dict[str, dict[str, Any]]:
        how: dict[str, Any] = {"batch_size": 4, "limit": 7, "num_shots": None}
        return run_harness([task], str(tiny_model), adapter, trust_remote_code=False, **how)

    found = run("made-up")["made-up"]["score"]
    assert asked["limit"] == 7
    assert asked["apply_chat_template"] is True
    model: Any
    model, tokenizer, *_ = load(str(tiny_model))
    load_adapters(model, str(adapter))
    model.eval()
    before, after = (
        tokenizer.encode(text, add_special_tokens=False) for text in ("Tea", "Tea now")
    )
    logs = nn.log_softmax(model(mx.array([after]))[0].astype(mx.float32))
    wanted = sum(float(logs[i - 1, after[i]].item()) for i in range(len(before), len(after)))
    assert found == pytest.approx(wanted, rel=1e-4)
    with pytest.raises(ConfigError, match="no task 'other'"):
        run("other")

    def offline(**options: Any) -> Any:
        raise ConnectionError("Couldn't reach the Hub")

    module("lm_eval", simple_evaluate=offline)
    with pytest.raises(DataError, match="cannot be fetched: Couldn't reach"):
        run("made-up")
    monkeypatch.delitem(sys.modules, "mlx_lm.evaluate", raising=False)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    with pytest.raises(ConfigError, match="cannot be imported"):
        run("made-up")
    monkeypatch.delitem(sys.modules, "mlx_lm.evaluate", raising=False)
