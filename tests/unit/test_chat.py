"""Conversations: what the model sees, what is computed again, and the command through a pipe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from command_line import call_allhands
from tiny import with_positions, write_model

from allhands.errors import ModelError
from allhands.infer.conversation import Conversation
from allhands.infer.generate import PromptTooLong, Sampling, load_for_generation

COMMAND = [sys.executable, "-m", "allhands", "chat"]


def greedy(loaded: Any, text: str, count: int) -> str:
    """One forward pass over everything a token."""
    tokens = loaded.tokenizer.encode(text, add_special_tokens=False)
    start = len(tokens)
    for _ in range(count):
        token = int(mx.argmax(loaded.model(mx.array([tokens]))[0, -1]).item())
        if token == loaded.tokenizer.eos_token_id:
            break
        tokens.append(token)
    return loaded.tokenizer.decode(tokens[start:])


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def test_every_turn_sees_those_before_it_and_only_what_is_new_is_computed(tiny_model: Path) -> None:
    loaded = load_for_generation(str(tiny_model), None)
    conversation = Conversation(loaded, Sampling(), max_tokens=12, system_prompt="Be kind.")
    said = turn("system", "Be kind.")
    for number, question in enumerate(("What is dew?", "And fog?", "Or rain, then?")):
        said += turn("user", question) + "<|im_start|>assistant\n"
        answer = "".join(conversation.ask(question))
        assert answer == greedy(loaded, said, 12)
        new = (
            len(turn("user", question).replace("<|im_start|>", "S").replace("<|im_end|>", "E")) + 11
        )
        if number:
            # The end of the last answer, the question and the header; not what came before.
            assert conversation.computed_tokens <= new + 4
        said += answer + "<|im_end|>\n"
    assert [message["role"] for message in conversation.messages] == [
        "system",
        *["user", "assistant"] * 3,
    ]
    conversation.reset()
    first = turn("system", "Be kind.") + turn("user", "And fog?") + "<|im_start|>assistant\n"
    assert "".join(conversation.ask("And fog?")) == greedy(loaded, first, 12)


def test_an_answer_that_is_stopped_is_kept_as_far_as_it_went(tiny_model: Path) -> None:
    loaded = load_for_generation(str(tiny_model), None)
    conversation = Conversation(loaded, Sampling(), max_tokens=12)
    pieces = conversation.ask("What is dew?")
    heard = next(pieces)
    while not heard:
        heard += next(pieces)
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": heard}
    said = turn("user", "What is dew?") + "<|im_start|>assistant\n" + heard + "<|im_end|>\n"
    said += turn("user", "Go on.") + "<|im_start|>assistant\n"
    assert "".join(conversation.ask("Go on.")) == greedy(loaded, said, 12)


def test_sampling_follows_the_seed(tiny_model: Path) -> None:
    loaded = load_for_generation(str(tiny_model), None)

    def answer(seed: int) -> str:
        return "".join(
            Conversation(loaded, Sampling(1.0, 0.9, seed), max_tokens=12).ask("What is dew?")
        )

    assert answer(3) == answer(3)
    assert len({answer(seed) for seed in range(4)}) > 1


def test_a_conversation_beyond_the_models_positions_is_refused_and_kept(tmp_path: Path) -> None:
    """It has 200, and a letter is a token; another line, or a new conversation, may do."""
    loaded = load_for_generation(str(with_positions(write_model(tmp_path / "model"), 200)), None)
    conversation = Conversation(loaded, Sampling(), max_tokens=10**6)
    with pytest.raises(PromptTooLong) as caught:
        "".join(conversation.ask("x" * 200))
    assert caught.value.exit_code == 2
    assert "/reset" not in str(caught.value), "there is nothing to forget"
    assert conversation.messages == []
    assert "".join(conversation.ask("Hi"))
    before = list(conversation.messages)
    with pytest.raises(PromptTooLong, match="/reset"):
        "".join(conversation.ask("x" * 150))
    assert conversation.messages == before
    conversation.reset()
    assert "".join(conversation.ask("x" * 150))


def test_a_model_without_a_template_is_refused(tmp_path: Path) -> None:
    bare = write_model(tmp_path / "bare")
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(ModelError) as caught:
        Conversation(load_for_generation(str(bare), None), Sampling(), max_tokens=4)
    assert caught.value.code == "chat-template-missing"


def test_each_line_of_a_pipe_is_a_turn(tiny_model: Path) -> None:
    lines = "What is dew?\n\nAnd fog?\n/reset\n/what\nWhat is dew?\n/exit\nnever asked\n"
    done = subprocess.run(
        [*COMMAND, "--model", str(tiny_model), "--max-tokens", "8"],
        input=lines,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    conversation = Conversation(
        load_for_generation(str(tiny_model), None), Sampling(), max_tokens=8
    )
    wanted = ["".join(conversation.ask("What is dew?")), "".join(conversation.ask("And fog?"))]
    assert wanted[0] != wanted[1]
    assert done.stdout == f"{wanted[0]}\n{wanted[1]}\n{wanted[0]}\n"
    assert "(forgotten)" in done.stderr
    assert "no command /what" in done.stderr


def test_ctrl_c_stops_the_answer_and_the_end_of_input_leaves(tiny_model: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--model", str(tiny_model), "--max-tokens", "1000000"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=0,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    for _ in range(2):
        process.stdin.write("What is dew?\n")
        process.stdin.flush()
        # An answer without end: it has begun when something is read.
        os.read(process.stdout.fileno(), 1)
        process.send_signal(signal.SIGINT)
        heard = b""
        while b"(stopped)\n" not in heard:
            heard += os.read(process.stdout.fileno(), 65536)
    process.stdin.close()
    assert process.wait(timeout=60) == 0
    process.stdout.close()


def test_wrong_input_is_one_message(tmp_path: Path) -> None:
    done = call_allhands("chat", "--model", tmp_path)
    assert done.returncode == 4
    assert "no config.json" in done.stderr
    assert "Traceback" not in done.stderr
