"""Asking a model: prompts, held-out questions, comparison before and after, and the score."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.tuner.utils import linear_to_lora_layers
from rich.console import Console
from tiny import CHAT_TEMPLATE, with_positions, write_model
from written_runs import write_run

from allhands.cli.compare import compare, comparison_table, score_lines
from allhands.cli.generate import generate
from allhands.cli.verbs_models import Compare, Generate
from allhands.data.demo import splits
from allhands.errors import ConfigError, DataError, ModelError, StorageError
from allhands.infer.comparing import AnswersCompared, held_out_prompts
from allhands.infer.generate import (
    PromptTooLong,
    answer_all,
    load_for_generation,
    prompt_tokens,
    room_for_answer,
)
from allhands.model.load import load_model
from allhands.report import read_facts


@pytest.fixture(scope="module")
def adapter(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter, with dropout, that changes every answer."""
    directory = tmp_path_factory.mktemp("adapter")
    parameters = {"rank": 2, "scale": 20.0, "dropout": 0.5}
    model: Any = load_model(str(tiny_model)).model
    linear_to_lora_layers(model, 3, parameters)
    mx.random.seed(1)
    weights = {
        name: mx.random.normal(value.shape)
        for name, value in tree_flatten(model.parameters())
        if "lora_" in name
    }
    mx.save_safetensors(str(directory / "adapters.safetensors"), weights)
    values = {"fine_tune_type": "lora", "num_layers": 3, "lora_parameters": parameters}
    (directory / "adapter_config.json").write_text(json.dumps(values))
    return directory


def ask(model: Path, **changes: Any) -> None:
    values: dict[str, Any] = {
        "model": str(model),
        "adapter_path": None,
        "prompt": "How do I make tea?",
        "max_tokens": 8,
        "temp": 0.0,
        "top_p": 1.0,
        "seed": 0,
        "system_prompt": None,
        "ignore_chat_template": False,
        "trust_remote_code": False,
    }
    generate(Generate(**{**values, **changes}))


def rows(path: Path, *content: Any) -> Path:
    (path / "test.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    return path


# --- prompts --------------------------------------------------------------------------------------


def test_a_prompt_goes_through_the_chat_template(tiny_model: Path) -> None:
    loaded = load_model(str(tiny_model))
    tokenizer: Any = loaded.tokenizer
    text = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi!<|im_end|>\n<|im_start|>assistant\n"
    ours = prompt_tokens(loaded, "Hi!", system_prompt="Be kind.")
    assert tokenizer.decode(ours) == text
    conversation = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi!"}]
    assert ours == tokenizer.apply_chat_template(
        conversation, add_generation_prompt=True, return_dict=False
    )
    # One token each for the marks, one a byte for the rest.
    assert ours[0] == 1
    assert len(prompt_tokens(loaded, "Hi!")) == 3 + len("user\nHi!\nassistant\n")
    assert prompt_tokens(loaded, "Hi!", use_template=False) == tokenizer.encode("Hi!")


def test_a_system_message_without_a_template_is_refused_not_dropped(
    tiny_model: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        prompt_tokens(
            load_model(str(tiny_model)), "Hi!", system_prompt="Be kind.", use_template=False
        )
    assert caught.value.code == "system-prompt-without-template"
    assert caught.value.where == "--system-prompt"
    bare = write_model(tmp_path / "bare")
    for path in bare.iterdir():
        if path.name.startswith(("chat_template", "tokenizer_config")):
            text = path.read_text()
            path.write_text(
                json.dumps({**json.loads(text), "chat_template": None})
                if path.suffix == ".json"
                else ""
            )
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    loaded = load_model(str(bare))
    assert CHAT_TEMPLATE not in str(getattr(loaded.tokenizer, "chat_template", None))
    assert prompt_tokens(loaded, "Hi!") == loaded.tokenizer.encode("Hi!")


@pytest.mark.parametrize("prompt", ["", "  \n"])
def test_an_empty_prompt_is_refused_before_anything_is_loaded(prompt: str) -> None:
    with pytest.raises(ConfigError) as caught:
        ask(Path("/no/such/model"), prompt=prompt)
    assert caught.value.code == "value-empty"


def test_a_prompt_beyond_the_models_positions_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """It has 200, and a letter is a token: as `serve` has it; transformers does not warn of what is
    looked at here.
    """
    model = with_positions(write_model(tmp_path / "model"), 200)
    asked = {"ignore_chat_template": True, "max_tokens": 10**6}
    for count in (200, 5000):
        with pytest.raises(PromptTooLong) as caught:
            ask(model, prompt="x" * count, **asked)
        assert (caught.value.exit_code, caught.value.where) == (2, "--prompt")
        with pytest.raises(PromptTooLong):
            answer_all(load_model(str(model)), ["x", "x" * count], 4)
    for count in (199, 150):
        capsys.readouterr()
        ask(model, prompt="x" * count, **asked)
        tokens = re.findall(r": (\d+) tokens", capsys.readouterr().out)
        assert int(tokens[0]) == count
        assert int(tokens[1]) <= 200 - count
    texts, _ = answer_all(load_model(str(model)), ["x", "x" * 150], 300)
    assert len(texts) == 2
    assert "sequence length" not in capsys.readouterr().err + caplog.text
    # Where a configuration has no bound there is none.
    assert room_for_answer(10**6, None, 7) == 7


# --- generate -------------------------------------------------------------------------------------


def test_the_answer_is_greedy_and_its_cost_is_shown(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ask(tiny_model)
    out = capsys.readouterr().out
    answer, _, figures = out.partition("\n==========\n")
    loaded = load_model(str(tiny_model))
    tokens = prompt_tokens(loaded, "How do I make tea?")
    model: Any = loaded.model
    # Greedy, one forward pass over everything a token: slow and sure.
    for _ in range(8):
        tokens.append(int(mx.argmax(model(mx.array([tokens]))[0, -1]).item()))
    expected = loaded.tokenizer.decode(tokens[-8:])
    assert answer == expected.removesuffix("<|im_end|>")
    lines = figures.splitlines()
    assert lines[0].startswith(f"Prompt: {len(tokens) - 8} tokens, ")
    assert lines[1].startswith("Generation: 8 tokens, ")
    assert lines[1].endswith(" tokens-per-sec")
    assert lines[2].startswith("Peak memory: ")


def test_sampling_follows_the_seed(tiny_model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(seed: int) -> str:
        ask(tiny_model, temp=1.0, seed=seed, max_tokens=16)
        return capsys.readouterr().out.partition("\n==========\n")[0]

    assert answer(3) == answer(3)
    assert len({answer(seed) for seed in range(4)}) > 1


def test_a_dash_reads_the_prompt_from_standard_input(
    tiny_model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ask(tiny_model, prompt="What is dew?")
    typed = capsys.readouterr().out.partition("\n==========\n")[0]
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is dew?"))
    ask(tiny_model, prompt="-")
    assert capsys.readouterr().out.partition("\n==========\n")[0] == typed


def test_an_adapter_changes_the_answer_and_its_dropout_does_not(
    tiny_model: Path, adapter: Path
) -> None:
    prompts = ["How do I make tea?", "Why is the sky blue?"]
    plain, _ = answer_all(load_for_generation(str(tiny_model), None), prompts, 12)
    first, speed = answer_all(load_for_generation(str(tiny_model), adapter), prompts, 12)
    again, _ = answer_all(load_for_generation(str(tiny_model), adapter), prompts, 12)
    assert first != plain
    assert first == again
    # mlx_lm counts a batch's prompts without the last token of each, which it takes as the first to
    # go on from.
    total = sum(len(prompt_tokens(load_model(str(tiny_model)), prompt)) for prompt in prompts)
    assert total - len(prompts) <= speed.prompt_tokens <= total
    assert speed.generation_tokens <= 24


def test_the_fast_form_is_used_with_an_adapter_with_dropout_too(
    tiny_model: Path, adapter: Path
) -> None:
    if sys.platform != "linux" or mx.default_device().type == mx.DeviceType.gpu:
        pytest.skip("the substitute for SwiGLU is for Linux CPUs")
    kinds = {
        path: type(load_for_generation(str(tiny_model), path).model.layers[0].mlp)
        .__mro__[1]
        .__name__
        for path in (None, adapter)
    }
    assert kinds == {None: "FastMlp", adapter: "FastMlp"}


def test_adapters_that_are_missing_or_do_not_fit_are_explained(
    tiny_model: Path, adapter: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=r"adapter_config\.json is missing") as caught:
        load_for_generation(str(tiny_model), tmp_path)
    assert caught.value.where == str(tmp_path)
    (tmp_path / "adapter_config.json").write_bytes((adapter / "adapter_config.json").read_bytes())
    with pytest.raises(ModelError, match=r"adapters\.safetensors is missing"):
        load_for_generation(str(tiny_model), tmp_path)
    (tmp_path / "adapters.safetensors").write_bytes(b"no safetensors")
    with pytest.raises(ModelError) as caught:
        load_for_generation(str(tiny_model), tmp_path)
    assert caught.value.code == "adapter-torn"
    assert str(tmp_path) in str(caught.value.where)
    assert caught.value.hint
    (tmp_path / "adapters.safetensors").write_bytes((adapter / "adapters.safetensors").read_bytes())
    wider = write_model(tmp_path / "wider", hidden=64)
    with pytest.raises(ModelError) as caught:
        answer_all(load_for_generation(str(wider), tmp_path), ["Hi!"], 2)
    assert caught.value.code == "adapter-mismatch"
    (tmp_path / "adapter_config.json").write_text("{")
    with pytest.raises(ModelError):
        load_for_generation(str(tiny_model), tmp_path)


# --- held-out prompts -----------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 16, 63, 64, 500])
def test_demo_prompts_are_test_questions_spread_over_the_subjects(count: int) -> None:
    prompts = held_out_prompts("demo", count)
    questions = [pair.question for pair in splits()["test"]]
    assert len(prompts) == min(count, 64)
    assert set(prompts) <= set(questions)
    assert len(set(prompts)) == len(prompts)
    seen_in_training = {pair.question for name in ("train", "valid") for pair in splits()[name]}
    assert not set(prompts) & seen_in_training
    if count == 16:
        subjects = {pair.topic for pair in splits()["test"] if pair.question in prompts}
        assert len(subjects) == 16


def test_the_last_question_of_each_chat_and_every_prompt_is_asked(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "Aye."}]
    chat = {
        "messages": [
            *turns,
            {"role": "user", "content": "Two?"},
            {"role": "assistant", "content": "Nay."},
        ]
    }
    assert held_out_prompts(str(rows(tmp_path, chat, chat)), 5) == ["Two?", "Two?"]
    completions = [{"prompt": f"Ask {i}?", "completion": "So."} for i in range(6)]
    assert held_out_prompts(str(rows(tmp_path, *completions)), 3) == ["Ask 0?", "Ask 2?", "Ask 4?"]


def test_data_without_questions_is_explained(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no example of test\.jsonl has a question"):
        held_out_prompts(str(rows(tmp_path, {"text": "Once upon a time."})), 3)
    (tmp_path / "test.jsonl").unlink()
    with pytest.raises(DataError, match="test"):
        held_out_prompts(str(tmp_path), 3)
    (tmp_path / "test.jsonl").touch()
    with pytest.raises(DataError) as told:
        held_out_prompts(str(tmp_path), 3)
    assert told.value.code == "data-empty"
    assert told.value.where == str(tmp_path / "test.jsonl")


# --- comparison and score -------------------------------------------------------------------------


def test_the_score_is_by_words_over_all_answers() -> None:
    comparison = AnswersCompared(
        ["a?", "b?"],
        ["Plain words here.", "Five more plain words here."],
        ["Ahoy matey", "aye it is"],
    )
    assert comparison.before_share == 0.0
    assert comparison.after_share == pytest.approx(3 / 5)
    first = score_lines(comparison)[0]
    assert "2 held-out prompts" in first
    assert "0.0% before, 60.0% after" in first


def test_the_table_shows_as_many_rows_as_asked_side_by_side() -> None:
    prompts = [f"question {i}" for i in range(5)]
    comparison = AnswersCompared(
        prompts, [f"before {i} [bold]" for i in range(5)], [f"after {i}" for i in range(5)]
    )
    out = io.StringIO()
    Console(file=out, width=120).print(comparison_table(comparison, 3, 60))
    text = out.getvalue()
    line = next(line for line in text.splitlines() if "question 2" in line)
    # What a model says is text, whatever it looks like.
    assert line.index("question 2") < line.index("before 2 [bold]") < line.index("after 2")
    assert "question 3" not in text
    assert "an answer ends after 60 tokens, wherever it is" in text


def test_compare_writes_prompts_answers_and_scores(
    tiny_model: Path, adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deep" / "answers.json"
    compare(Compare(str(tiny_model), adapter, num_prompts=3, max_tokens=6, show=1, out=out))
    assert out.stat().st_mode & 0o777 == 0o600  # as all that holds what people asked
    saved = json.loads(out.read_text(encoding="utf-8"))
    assert saved["prompts"] == held_out_prompts("demo", 3)
    assert {len(saved[key]) for key in ("prompts", "before", "after")} == {3}
    again = AnswersCompared(saved["prompts"], saved["before"], saved["after"])
    assert np.allclose(
        [again.before_share, again.after_share], [saved["before_share"], saved["after_share"]]
    )
    shown = capsys.readouterr().out
    assert "before: prompt " in shown
    assert "3 held-out prompts: " in shown


def test_answers_about_a_run_lie_where_its_report_looks(
    tiny_model: Path, adapter: Path, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run")
    for name in ("adapters.safetensors", "adapter_config.json"):
        (run / name).write_bytes((adapter / name).read_bytes())
    compare(Compare(str(tiny_model), run, num_prompts=2, max_tokens=4, show=1))
    saved = json.loads((run / "answers.json").read_text(encoding="utf-8"))
    (found,) = read_facts(run).answers
    assert list(found.prompts) == saved["prompts"] == held_out_prompts("demo", 2)
    assert list(found.after) == saved["after"]
    # Of an adapter that is no run nothing is written.
    compare(Compare(str(tiny_model), adapter, num_prompts=2, max_tokens=4, show=1))
    assert not (adapter / "answers.json").exists()


def test_a_file_that_cannot_be_written_is_found_before_anything_is_answered(
    tiny_model: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []
    monkeypatch.setattr("allhands.cli.compare.answers", lambda *each: asked.append(each))
    (tmp_path / "file").write_text("no directory")
    with pytest.raises(StorageError, match="file"):
        compare(
            Compare(
                str(tiny_model),
                adapter,
                num_prompts=3,
                max_tokens=6,
                show=1,
                out=tmp_path / "file" / "answers.json",
            )
        )
    assert not asked
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


def test_compare_without_an_adapter_is_refused(tiny_model: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        compare(Compare(str(tiny_model), None, num_prompts=3, max_tokens=6, show=1))
    assert caught.value.code == "option-missing"
    assert caught.value.where == "--adapter-path"
