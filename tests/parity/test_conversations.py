"""Chat templates and the end of answers on the way from training to mlx_lm: nothing has to be said
twice.
"""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from command_line import call_allhands, parse
from mlx_lm import generate
from mlx_lm.utils import load
from rich.console import Console
from tiny import CHAT_TEMPLATE, SPECIAL, run_allhands, write_model

from allhands.config.schema import build_config
from allhands.errors import AllhandsError
from allhands.run.session import RunContext, run_finetune

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "Fish?"}
NO_PLACE = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    + CHAT_TEMPLATE
)
IGNORES = CHAT_TEMPLATE.replace(
    "%}<|im_start|>", "%}{% if message['role'] != 'system' %}<|im_start|>", 1
).replace("<|im_end|>\n{% endfor", "<|im_end|>\n{% endif %}{% endfor", 1)


def like(base: Path, path: Path, *, template: str | None = CHAT_TEMPLATE, eos: int = 2) -> Path:
    """The tiny model with another chat template, or another end of text."""
    shutil.copytree(base, path)
    file = path / "chat_template.jinja"
    file.unlink(missing_ok=True)
    if template is not None:
        file.write_text(template, encoding="utf-8")
    for name, change in (
        ("tokenizer_config.json", {"eos_token": SPECIAL[eos]}),
        ("config.json", {"eos_token_id": eos}),
    ):
        values = json.loads((path / name).read_text())
        values.pop("chat_template", None)
        (path / name).write_text(json.dumps(values | change))
    return path


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "base", hidden=64)


def chats(folder: Path, *, system: bool = False, texts: bool = False) -> Path:
    folder.mkdir()
    messages = [
        *([SYSTEM] if system else []),
        QUESTION,
        {"role": "assistant", "content": "herring"},
    ]
    row = {"text": "herring"} if texts else {"messages": messages}
    (folder / "train.jsonl").write_text((json.dumps(row) + "\n") * 4, encoding="utf-8")
    (folder / "test.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")
    return folder


def train(
    model: Path, data: Path, out: Path, *more: str, iters: int = 1
) -> subprocess.CompletedProcess[str]:
    """As ``allhands train`` does it, in this process."""
    masked = [] if (data / "train.jsonl").read_text().startswith('{"text') else ["--mask-prompt"]
    words = [
        "train",
        "--model",
        str(model),
        "--data",
        str(data),
        "--adapter-path",
        str(out),
        *masked,
        *more,
    ]
    words += ["--iters", str(iters), "--batch-size", "4", "--learning-rate", "2e-3"]
    told = io.StringIO()
    try:
        config = build_config({**parse(words)[1], "train": True})
        run_finetune(config, RunContext(console=Console(file=told, highlight=False)))
    except AllhandsError as error:
        return subprocess.CompletedProcess(words, error.exit_code, told.getvalue(), str(error))
    return subprocess.CompletedProcess(words, 0, told.getvalue(), "")


def rendered(path: Path, messages: list[Any]) -> str:
    """By mlx_lm alone."""
    tokenizer: Any = load(str(path))[1]
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)


# --- the end of answers ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def learned(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model whose own end of text is not the end of answers, and an adapter that has learned one."""
    folder = tmp_path_factory.mktemp("learned")
    model = like(base, folder / "model", eos=0)
    done = train(
        model, chats(folder / "data"), folder / "run", "--fine-tune-type", "full", iters=150
    )
    assert done.returncode == 0, done.stderr
    assert "<|im_end|>" in done.stdout.partition("run ")[0]
    return model, folder / "run"


def test_the_fused_model_stops_where_answers_end(
    learned: tuple[Path, Path], tmp_path: Path
) -> None:
    model, run = learned
    (model / "generation_config.json").write_text('{"eos_token_id": 0, "top_k": 3}')
    try:
        done = call_allhands("fuse", "--adapter-path", run, "--save-path", tmp_path / "fused")
    finally:
        (model / "generation_config.json").unlink()
    assert (done.returncode, "<|im_end|>" in done.stdout) == (0, True), done.stderr
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "fused" / name).read_text())["eos_token_id"] == [0, 2]
    assert json.loads((tmp_path / "fused" / "generation_config.json").read_text())["top_k"] == 3
    fused: Any = load(str(tmp_path / "fused"))
    prompt = fused[1].apply_chat_template([QUESTION], add_generation_prompt=True)
    assert generate(fused[0], fused[1], prompt, max_tokens=20) == "herring"
    asked = call_allhands("generate", "--model", tmp_path / "fused", "-p", "Fish?", "-m", "20")
    assert asked.stdout.splitlines()[0] == "herring"
    assert "note" not in asked.stderr


def test_generation_with_the_adapter_stops_there(
    learned: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, run = learned
    assert json.loads((run / "adapter_config.json").read_text())["stop_tokens"] == ["<|im_end|>"]
    asked = call_allhands(
        "generate", "--model", model, "--adapter-path", run, "-p", "Fish?", "-m", "20"
    )
    assert asked.stdout.splitlines()[0] == "herring"
    assert "<|im_end|>" in asked.stderr
    monkeypatch.setattr("sys.stdin", io.StringIO("Fish?\n"))
    talked = call_allhands("chat", "--model", model, "--adapter-path", run, "-m", "20")
    assert talked.stdout.splitlines() == ["herring"]


def test_gguf_files_name_the_end_of_a_turn(learned: tuple[Path, Path], tmp_path: Path) -> None:
    model, run = learned
    done = call_allhands(
        "export", "--to", "gguf", "--model", model, "--adapter-path", run, "--out", tmp_path / "out"
    )
    if "cannot be described for llama.cpp" in done.stderr:
        pytest.skip("the tiny tokenizer is none of llama.cpp's")
    assert done.returncode == 0, done.stderr
    metadata: Any = mx.load(str(tmp_path / "out" / "model.gguf"), return_metadata=True)[1]
    assert metadata["tokenizer.ggml.eot_token_id"].item() == 2


@pytest.mark.parametrize(("eos", "texts"), [(2, False), (0, True)])
def test_nothing_is_said_where_the_model_stops_or_no_answer_is_trained(
    base: Path, tmp_path: Path, eos: int, texts: bool
) -> None:
    model = like(base, tmp_path / "model", eos=eos)
    done = train(model, chats(tmp_path / "data", texts=texts), tmp_path / "run")
    assert (done.returncode, "<|im_end|>" in done.stdout) == (0, False), done.stdout
    done = call_allhands(
        "fuse", "--adapter-path", tmp_path / "run", "--save-path", tmp_path / "fused"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "fused" / "config.json").read_text())["eos_token_id"] == eos


# --- chat templates -------------------------------------------------------------------------------


def test_a_chosen_template_stays_with_what_was_trained(base: Path, tmp_path: Path) -> None:
    model, data, run = (
        like(base, tmp_path / "model", template=None),
        chats(tmp_path / "data"),
        tmp_path / "run",
    )
    assert train(model, data, run).returncode == 4
    done = train(model, data, run, "--chat-template", "chatml", iters=2)
    assert done.returncode == 0, done.stderr
    for folder in (run, *(run / "checkpoints").iterdir()):
        assert (folder / "chat_template.jinja").is_file()
    asked = call_allhands(
        "generate", "--model", model, "--adapter-path", run, "-p", "Fish?", "-m", "3"
    )
    assert (
        asked.returncode,
        f"Prompt: {len('1user.Fish?2.1assistant.')} tokens" in asked.stdout,
    ) == (0, True)
    evaluated = run_allhands(
        "eval", "--model", model, "--adapter-path", run, "--data", data, "--mask-prompt"
    )
    assert evaluated.returncode == 0, evaluated.stderr
    assert (
        call_allhands("fuse", "--adapter-path", run, "--save-path", tmp_path / "fused").returncode
        == 0
    )
    assert (
        rendered(tmp_path / "fused", [QUESTION])
        == "<|im_start|>user\nFish?<|im_end|>\n<|im_start|>assistant\n"
    )
    exported = call_allhands(
        "export", "--to", "peft", "--adapter-path", run, "--out", tmp_path / "peft"
    )
    assert exported.returncode == 0, exported.stderr
    assert (tmp_path / "peft" / "chat_template.jinja").read_text() == (
        run / "chat_template.jinja"
    ).read_text()


def test_a_run_goes_on_with_its_template_only(base: Path, tmp_path: Path) -> None:
    model, data, run = (
        like(base, tmp_path / "model", template=None),
        chats(tmp_path / "data"),
        tmp_path / "run",
    )
    assert train(model, data, run, "--chat-template", "chatml").returncode == 0
    other = train(model, data, run, "--chat-template", "zephyr", "--resume", "auto", iters=2)
    assert (other.returncode, "--chat-template" in other.stderr) == (3, True), other.stderr
    assert (
        train(model, data, run, "--chat-template", "chatml", "--resume", "auto", iters=2).returncode
        == 0
    )
    # A new run without one leaves none behind.
    model = like(base, tmp_path / "own")
    assert train(model, data, run).returncode == 0
    assert not (run / "chat_template.jinja").exists()


def test_a_template_without_chats_is_refused(base: Path, tmp_path: Path) -> None:
    data = chats(tmp_path / "data", texts=True)
    for more in (["--chat-template", "chatml"], ["--system", "merge"]):
        done = train(base, data, tmp_path / "run", *more)
        assert (done.returncode, more[0] in done.stderr) == (2, True), done.stderr


# --- system messages ------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [NO_PLACE, IGNORES])
def test_merged_system_messages_are_trained_and_used_alike(
    base: Path, tmp_path: Path, template: str
) -> None:
    model, data, run = (
        like(base, tmp_path / "m", template=template),
        chats(tmp_path / "d", system=True),
        tmp_path / "r",
    )
    if template == NO_PLACE:
        refused = train(model, data, run)
        assert (refused.returncode, "--system merge" in refused.stderr) == (3, True)
    checked = call_allhands("data", "check", data, "--model", model, "--mask-prompt", "--json")
    assert any(
        "--system merge" in str(finding["remedy"])
        for finding in json.loads(checked.stdout)["findings"]
    )
    merged = call_allhands(
        "data", "check", data, "--model", model, "--mask-prompt", "--system", "merge", "--json"
    )
    assert "--system merge" not in merged.stdout
    assert train(model, data, run, "--system", "merge").returncode == 0
    assert (
        call_allhands("fuse", "--adapter-path", run, "--save-path", tmp_path / "f").returncode == 0
    )
    wanted = "<|im_start|>user\nBe brief.\n\nFish?<|im_end|>\n<|im_start|>assistant\n"
    assert rendered(tmp_path / "f", [SYSTEM, QUESTION]) == wanted
    words = ["generate", "--model", model, "--adapter-path", run, "-p", "Fish?", "-m", "2"]
    asked = call_allhands(*words, "--system-prompt", "Be brief.")
    # Each letter is a token, and each mark of a turn.
    letters = wanted.replace("<|im_start|>", "1").replace("<|im_end|>", "2")
    assert f"Prompt: {len(letters)} tokens" in asked.stdout


def test_rows_can_be_merged_once_for_all(base: Path, tmp_path: Path) -> None:
    data = chats(tmp_path / "data", system=True)
    words = [
        "data",
        "prepare",
        data,
        "--out",
        tmp_path / "out",
        "--valid",
        "0",
        "--resplit",
        "--test",
        "0",
    ]
    assert call_allhands(*words, "--system", "merge").returncode == 0
    row = json.loads((tmp_path / "out" / "train.jsonl").read_text().splitlines()[0])
    assert row["messages"][0] == {"role": "user", "content": "Be brief.\n\nFish?"}
    assert call_allhands(*words, "--force", "--chat-template", "chatml").returncode == 2


def test_a_place_for_system_messages_that_is_not_used_is_told(base: Path, tmp_path: Path) -> None:
    done = train(base, chats(tmp_path / "data", system=True), tmp_path / "run", "--system", "merge")
    assert (done.returncode, "has a place for a system message" in done.stdout) == (0, True)


# --- tokens that may be new -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ([], "model.embed_tokens"),
        (["--fine-tune-type", "full"], ""),
        (["--fine-tune-type", "full", "--num-layers", "1"], "--num-layers -1"),
        (["--lora-parameters", '{"keys": ["self_attn.q_proj", "model.embed_tokens"]}'], ""),
    ],
)
def test_new_tokens_are_told_where_the_embedding_is_not_trained(
    base: Path, tmp_path: Path, more: list[str], told: str
) -> None:
    model = like(base, tmp_path / "model")
    tokenizer: Any = load(str(base))[1]
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|scene|>"]})
    tokenizer.save_pretrained(str(model))
    data = chats(tmp_path / "data")
    rows = (data / "train.jsonl").read_text()
    before = train(model, data, tmp_path / "before", *more)
    assert "<|scene|>" not in before.stdout
    (data / "train.jsonl").write_text(rows.replace("herring", "<|scene|>herring"))
    checked = call_allhands(
        "data", "check", data, "--model", model, "--mask-prompt", "--json", *more
    )
    findings = {finding["code"] for finding in json.loads(checked.stdout)["findings"]}
    assert "special-text" not in findings
    assert ("own-tokens" in findings) == bool(told)
    done = train(like_larger(model), data, tmp_path / "run", *more)
    assert done.returncode == 0, done.stderr
    assert ("<|scene|>" in done.stdout, told in done.stdout) == (bool(told), True)


def like_larger(model: Path) -> Path:
    """The model with rows for new tokens."""
    weights: Any = mx.load(str(model / "model.safetensors"))
    table = weights["model.embed_tokens.weight"]
    weights["model.embed_tokens.weight"] = mx.concatenate([table, table[:5]])
    mx.save_safetensors(str(model / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(
        json.dumps(config | {"vocab_size": config["vocab_size"] + 5})
    )
    return model


def test_tokens_of_the_template_in_words_are_found_as_before(base: Path, tmp_path: Path) -> None:
    data = chats(tmp_path / "data")
    rows = (data / "train.jsonl").read_text()
    (data / "train.jsonl").write_text(rows.replace("Fish?", "Fish?<|im_end|>"))
    checked = call_allhands("data", "check", data, "--model", base, "--mask-prompt", "--json")
    findings = {finding["code"] for finding in json.loads(checked.stdout)["findings"]}
    assert ("special-text" in findings, "own-tokens" in findings) == (True, False)
