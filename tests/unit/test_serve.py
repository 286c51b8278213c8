"""The server: real requests to a tiny model, its end, and addresses that cannot be had."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from command_line import call_allhands
from tiny import write_adapter

from allhands.data.templates import ChatChoice
from allhands.infer.conversation import Conversation
from allhands.infer.generate import Sampling, load_for_generation, prompt_tokens, stream_answer


@contextmanager
def served(*words: str | Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    command = [sys.executable, "-m", "allhands", "serve", "--port", "0", *map(str, words)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert " is served at http://" in line, process.stderr.read() if process.stderr else ""
        yield line.split()[-1], process
    finally:
        process.kill()
        process.communicate()


def ask(address: str, body: dict[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM])
def test_a_request_is_answered_and_the_server_ends_cleanly(
    tiny_model: Path, end: signal.Signals
) -> None:
    with served("--model", tiny_model, "--max-tokens", "8") as (address, process):
        assert address.startswith("http://127.0.0.1:")
        chat = {"messages": [{"role": "user", "content": "What is dew?"}], "model": str(tiny_model)}
        answer = ask(f"{address}/chat/completions", chat)
        conversation = Conversation(
            load_for_generation(str(tiny_model), None), Sampling(), max_tokens=8
        )
        assert answer["choices"][0]["message"]["content"] == "".join(
            conversation.ask("What is dew?")
        )
        assert ask(f"{address}/models")["data"][0]["id"] == str(tiny_model)
        assert ask(address.removesuffix("/v1") + "/health") == {"status": "ok"}
        process.send_signal(end)
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("apart_s", [0.0, 0.02, 0.2])
def test_a_second_interrupt_does_not_keep_the_server_alive(
    tiny_model: Path, apart_s: float
) -> None:
    with served("--model", tiny_model, "--max-tokens", "8") as (address, process):
        ask(f"{address}/chat/completions", {"messages": [{"role": "user", "content": "Hi"}]})
        process.send_signal(signal.SIGINT)
        time.sleep(apart_s)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) in (0, 130, -signal.SIGINT)


def test_the_adapter_answers_and_a_stream_comes_in_pieces(tiny_model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tiny_model, tmp_path / "run")
    words = {}
    for chosen in (None, adapter):
        conversation = Conversation(
            load_for_generation(str(tiny_model), chosen), Sampling(), max_tokens=8
        )
        words[chosen] = "".join(conversation.ask("What is dew?"))
    assert words[None] != words[adapter]
    with served("--model", tiny_model, "--adapter-path", adapter, "--max-tokens", "8") as (
        address,
        process,
    ):
        chat = {"messages": [{"role": "user", "content": "What is dew?"}]}
        assert (
            ask(f"{address}/chat/completions", chat)["choices"][0]["message"]["content"]
            == words[adapter]
        )
        alone = {
            "seed": 1,
            "temperature": 1.0,
            "logit_bias": {"2": -100},
        }  # which is answered by itself
        body = json.dumps({**chat, **alone, "stream": True, "max_tokens": 10_000_000}).encode()
        request = urllib.request.Request(
            f"{address}/chat/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            lines = [
                line for line in (answer.readline() for _ in range(8)) if line.startswith(b"data: ")
            ]
            assert json.loads(lines[1].removeprefix(b"data: "))["object"] == "chat.completion.chunk"
            # In the middle of an answer without end.
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0


def test_a_taken_port_and_a_strange_address_are_one_message(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        done = call_allhands("serve", "--model", tiny_model, "--port", str(taken.getsockname()[1]))
    assert done.returncode == 2
    assert "another program listens there already" in done.stderr
    done = call_allhands("serve", "--model", tiny_model, "--host", "192.0.2.7", "--port", "0")
    assert done.returncode == 2
    assert "no address of this computer" in done.stderr
    for wrong in (
        ["--model", tiny_model.parent],
        ["--model", tiny_model, "--adapter-path", tiny_model],
    ):
        done = call_allhands("serve", "--port", "0", *wrong)
        assert done.returncode == 4
        assert done.stderr.count("allhands: error") == 1
        assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        ("chat/completions", {"messages": []}, "empty_array", "messages"),
        ("chat/completions", {"messages": "hello"}, "invalid_type", "messages"),
        ("chat/completions", {"messages": ["hello"]}, "invalid_type", "messages[0]"),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": "a"}, {"content": "b"}]},
            "missing_required_parameter",
            "messages[1]",
        ),
        (
            "chat/completions",
            {"messages": [{"role": "user", "content": 3}]},
            "invalid_type",
            "messages[0]",
        ),
        (
            "chat/completions",
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "image_url", "image_url": {"url": "http://[::1]:9/"}}],
                    }
                ]
            },
            "invalid_type",
            "messages[0]",
        ),
        ("chat/completions", {}, "missing_required_parameter", "messages"),
        ("chat/completions", {"messages": [], "max_tokens": "many"}, "empty_array", "messages"),
        ("completions", {"prompt": 3}, "invalid_type", "prompt"),
    ],
)
def test_what_cannot_be_answered_is_refused_in_a_sentence(
    served_for_all: str, path: str, body: dict[str, Any], code: str, param: str
) -> None:
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask(f"{served_for_all}/{path}", body)
    assert caught.value.code == 400
    error = json.load(caught.value)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"].startswith(param) or code == "missing_required_parameter"
    assert (error["code"], error["param"], error["type"]) == (code, param, "invalid_request_error")


@pytest.fixture(scope="module")
def served_for_all(tiny_model: Path) -> Iterator[str]:
    with served("--model", tiny_model, "--max-tokens", "8") as (address, _):
        yield address


@pytest.mark.slow
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_costs_one_line_at_the_most(tiny_model: Path, stream: bool) -> None:
    with served("--model", tiny_model) as (address, process):
        host, port = address.removeprefix("http://").removesuffix("/v1").split(":")
        chat = {
            "messages": [{"role": "user", "content": "What is dew?"}],
            "stream": stream,
            "max_tokens": 300,
        }
        body = json.dumps(chat).encode()
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        with socket.create_connection((host, int(port))) as client:
            client.sendall(head + body)
            if stream:
                assert client.recv(10)
            # Closed with a reset, as by a killed program.
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # It goes on answering, after whatever it had begun.
        assert ask(f"{address}/chat/completions", {**chat, "stream": False, "max_tokens": 300})[
            "choices"
        ]
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
        assert process.stderr is not None
        said = process.stderr.read()
    assert "Traceback" not in said
    assert "BrokenPipe" not in said
    assert said.count("left before the answer was complete") == 1


@pytest.fixture(scope="module")
def without_place(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose chat template refuses system messages, as Gemma's."""
    model = tmp_path_factory.mktemp("model") / "no-system"
    shutil.copytree(tiny_model, model)
    file = model / "chat_template.jinja"
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    file.write_text(refusal + file.read_text())
    return model


def test_system_messages_where_the_template_has_no_place_for_them(without_place: Path) -> None:
    system, user = (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is dew?"},
    )
    parts = [
        {**one, "content": [{"type": "text", "text": one["content"]}]} for one in (system, user)
    ]
    loaded = load_for_generation(str(without_place), None, chat=ChatChoice(system="merge"))
    tokens = prompt_tokens(loaded, "What is dew?", system_prompt="Be brief.")
    assert tokens == prompt_tokens(loaded, "Be brief.\n\nWhat is dew?")
    expected = "".join(text for text, _ in stream_answer(loaded, tokens, 8, Sampling()))
    turns = [user, {"role": "assistant", "content": "Water."}, system, user]
    with served("--model", without_place, "--system", "merge", "--max-tokens", "8") as (
        address,
        process,
    ):
        for messages in ([system, user], parts, [{**system, "role": "developer"}, user]):
            answer = ask(f"{address}/chat/completions", {"messages": messages})
            assert answer["choices"][0]["message"]["content"] == expected
            assert answer["usage"]["prompt_tokens"] == len(tokens)
        for messages in (turns, [system], [system, system, user]):
            assert (
                ask(f"{address}/chat/completions", {"messages": messages})["usage"][
                    "completion_tokens"
                ]
                == 8
            )
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        assert process.stderr is not None
        assert "no place" not in process.stderr.read()


def test_a_system_message_that_is_refused_names_the_way_out(
    without_place: Path, served_for_all: str
) -> None:
    chat = {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "What is dew?"},
        ]
    }
    assert ask(f"{served_for_all}/chat/completions", chat)["choices"]
    with served("--model", without_place) as (address, process):
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(f"{address}/chat/completions", chat)
        assert caught.value.code == 400
        assert "--system merge" in json.load(caught.value)["error"]["message"]
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        assert process.stderr is not None
        assert "no place for system messages" in process.stderr.read()


def test_a_model_without_a_template_reads_parts_as_their_words(
    tiny_model: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny_model, tmp_path / "base")
    (tmp_path / "base" / "chat_template.jinja").unlink()
    with served("--model", tmp_path / "base", "--max-tokens", "2") as (address, _):
        counts = []
        for content in (
            "What is dew?",
            [{"type": "text", "text": "What is "}, {"type": "text", "text": "dew?"}],
        ):
            answer = ask(
                f"{address}/chat/completions", {"messages": [{"role": "user", "content": content}]}
            )
            counts.append(answer["usage"]["prompt_tokens"])
        assert counts[0] == counts[1]
