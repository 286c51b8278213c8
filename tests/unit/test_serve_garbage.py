"""Garbage, half of it well-formed: it gets a refusal as JSON, and the next request its answer."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import Served, served

from allhands.shipping.completions import Refused, read_request
from allhands.shipping.completions import Served as Model

MODEL = Model("tiny", None, 259)
CHAT = {"messages": [{"role": "user", "content": "What is dew?"}], "max_tokens": 1}
# As one client or another sends them.
FIELDS: dict[str, Any] = {
    **{"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2},
    **{"max_completion_tokens": 2, "temperature": 0.5, "top_p": 0.5, "top_k": 3, "min_p": 0.1, "n": 1, "seed": 7},
    **{"stop": ["a", "b"], "logit_bias": {"7": -1.5}, "logprobs": True, "top_logprobs": 2, "user": "me"},
    **{"repetition_penalty": 1.1, "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_context_size": 5},
    **{"presence_context_size": 0, "frequency_context_size": 5, "xtc_probability": 0.5, "xtc_threshold": 0.1},
    **{"tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}], "tool_choice": "auto"},
    **{"response_format": {"type": "text"}, "adapters": None, "draft_model": None, "num_draft_tokens": 3},
    **{"chat_template_kwargs": {"enable_thinking": False}, "role_mapping": {"user": "U: "}, "prompt": "x"},
}
ODD: list[Any] = [
    *(None, True, False, 0, -1, 1, 1.5, -0.0, 10**9, 2**31, 2**63, 10**30, -(10**30), 1e308, 5e-324, 1e-30),
    *("", "x", "/etc/passwd", "\x00", "\ud800", "é", "a" * 3000, "default_model", "../..", "259", "-1"),
    *([], {}, [[]], [{}], {"": None}, [None], ["", 3], {"a": {"a": {"a": []}}}, {"258": 1}, {"259": 1}, {"x": 1}),
    *({"role": "user"}, [{"role": "user", "content": "hi"}], [{"role": 3}], {"chat_template": "x"}, {"tools": 1}),
    *([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}], {"type": "text"}),
]


def some_value(random: random.Random, depth: int = 0) -> Any:
    kind = random.randrange(8 if depth < 3 else 5)
    if kind < 3:
        return random.choice(ODD)
    if kind == 3:
        return random.choice(list(FIELDS.values()))
    if kind == 4:
        return random.uniform(-2, 2) * 10 ** random.randint(-10, 10)
    if kind == 5:
        return [some_value(random, depth + 1) for _ in range(random.randrange(3))]
    return {random.choice(["role", "content", "type", "text", "x"]): some_value(random, depth + 1) for _ in range(2)}


def some_body(random: random.Random) -> bytes:
    """A request of which most is right, or something that begins like one."""
    body: dict[str, Any] = dict(CHAT)
    if random.random() < 0.3:
        body["messages"] = [some_value(random) for _ in range(random.randrange(3))]
    for name in random.sample(list(FIELDS), random.randrange(4)):
        body[name] = some_value(random) if random.random() < 0.6 else FIELDS[name]
    text = json.dumps(body).encode()
    kind = random.randrange(12)
    if kind == 0:
        return random.randbytes(random.randrange(200))
    if kind == 1:
        return text[: random.randrange(len(text))]
    if kind == 2:
        place = random.randrange(len(text))
        return text[:place] + random.randbytes(3) + text[place:]
    if kind == 3:
        return random.choice([b"[", b'{"a":', b'[{"messages":']) * random.choice([10, 70, 5000])
    if kind == 4:
        return text.replace(b"1", b"9" * random.choice([20, 5000]), 1).replace(b"true", b"NaN")
    return text


def read(body: bytes, path: str = "/v1/chat/completions") -> dict[str, Any] | None:
    refusal = None
    try:
        return read_request(body, path, MODEL)
    except Refused as refused:
        refusal = refused
    assert 400 <= refusal.status < 500
    assert 0 < len(refusal.message) < 1000
    return None


def check_bodies(count: int, seed: int) -> int:
    """How many of so many were taken: they hold what mlx_lm computes with, and nothing that it would load."""
    source, taken = random.Random(seed), 0
    for number in range(count):
        found = read(some_body(source), ("/v1/chat/completions", "/v1/completions")[number % 8 == 0])
        if found is not None:
            taken += 1
            assert found["model"] == "tiny"
            assert not found.keys() & {"adapters", "draft_model"}
            assert 0 <= found.get("top_k", 1) < 259
            assert json.loads(json.dumps(found).encode()) == found
    return taken


def test_bodies_are_read_or_refused() -> None:
    assert 800 < check_bodies(5000, 1) < 4200


@pytest.mark.long
def test_a_hundred_thousand_bodies_are_read_or_refused() -> None:
    assert check_bodies(100_000, 2) > 10_000


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda of: st.lists(of) | st.dictionaries(st.text(), of),
)


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from([*FIELDS, "messages"]), JSON))
def test_bodies_of_any_shape_are_read_or_refused(body: dict[str, Any]) -> None:
    read(json.dumps({**CHAT, **body}).encode())
    read(json.dumps(body).encode(), "/v1/completions")


@given(st.binary())
def test_bytes_are_read_or_refused(body: bytes) -> None:
    read(body)


# Of each field the values of JSON's other types that it cannot have.
NOT_WHOLE: list[Any] = ["many", True, 1.5, [3], {"x": 3}]
NO_NUMBER: list[Any] = ["many", True, [3], {"x": 3}]
NO_TRUTH: list[Any] = ["many", 1, [True], {"x": True}]
NO_OBJECT: list[Any] = ["many", True, 1, [{}]]
NO_TEXT: list[Any] = [True, 1, ["x"], {"x": "x"}]
WRONG: dict[str, list[Any]] = {
    **dict.fromkeys(("stream", "logprobs"), NO_TRUTH),
    **{name: [*NOT_WHOLE, 0, -1, 10**30] for name in ("max_tokens", "max_completion_tokens")},
    **{
        name: [*NOT_WHOLE, -1, 10**30]
        for name in ("repetition_context_size", "presence_context_size", "num_draft_tokens")
    },
    **{"frequency_context_size": [*NOT_WHOLE, -1], "top_k": [*NOT_WHOLE, -2, 10**30], "n": [*NOT_WHOLE, 0, 2]},
    **{"seed": [*NOT_WHOLE, 2**64], "top_logprobs": [*NOT_WHOLE, 12, -2], "temperature": [*NO_NUMBER, -1, 1e300]},
    **{name: [*NO_NUMBER, -0.1, 1.1] for name in ("top_p", "min_p", "xtc_probability")},
    **{"xtc_threshold": [*NO_NUMBER, 0.6], "repetition_penalty": [*NO_NUMBER, -1]},
    **{name: [*NO_NUMBER, 1e300, -1e300] for name in ("presence_penalty", "frequency_penalty")},
    **{
        "stream_options": [*NO_OBJECT, {"include_usage": 3}],
        "logit_bias": [*NO_OBJECT, {"7": "x"}, {"259": 1}, {"-1": 1}],
    },
    **{"stop": [True, 3, {"x": 3}, [3], [""], "", ["a"] * 17], "tools": ["x", 3, {"x": 3}, ["f"]]},
    **dict.fromkeys(("model", "adapters", "draft_model", "prompt"), NO_TEXT),
    **{"user": NO_TEXT, "tool_choice": [True, 3, ["x"]], "response_format": NO_OBJECT},
    **{"chat_template_kwargs": [*NO_OBJECT, {"chat_template": "x"}], "role_mapping": [*NO_OBJECT, {"user": 3}]},
}


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_what_clients_send_is_taken_and_other_types_are_not(name: str) -> None:
    path = "/v1/completions" if name == "prompt" else "/v1/chat/completions"
    assert read(json.dumps({**CHAT, name: FIELDS[name]}).encode(), path) is not None
    if name != "prompt":
        assert read(json.dumps({**CHAT, name: None}).encode(), path) is not None
    for wrong in WRONG[name]:
        assert read(json.dumps({**CHAT, name: wrong}).encode(), path) is None, wrong


@pytest.mark.parametrize("name", ["model", "adapters", "draft_model"])
def test_no_request_makes_the_server_load_anything(name: str) -> None:
    for path in ("/etc", "../tiny", "org/name", "tiny/", "", "TINY", "x" * 100_000):
        with pytest.raises(Refused) as refused:
            read_request(json.dumps({**CHAT, name: path}).encode(), "/v1/chat/completions", MODEL)
        assert refused.value.status == 404
    trained = Model("tiny", "run", 259)
    assert "adapters" not in read_request(
        json.dumps({**CHAT, "adapters": "run"}).encode(), "/chat/completions", trained
    )


# --- over the network ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Any:
    with served("--model", tiny_model, "--max-tokens", "2") as running:
        yield running


def some_request(random: random.Random, server: Served) -> bytes:
    body = some_body(random).replace(b'"tiny"', b'"default_model"')
    length: Any = len(body)
    if random.random() < 0.1:
        length = random.choice(
            ["", "-1", "x", "1_0", "+3", "9" * 30, "0", len(body) + 5, max(0, len(body) - 5), "\xb2"]
        )
    host = random.choice(["localhost"] * 20 + ["evil.example", "", "127.0.0.1, a"])
    path = random.choice(
        ["/v1/chat/completions"] * 9 + ["/v1/completions", "/chat/completions", "/v1/models", "/", "//x"]
    )
    method = random.choice(["POST"] * 20 + ["GET", "PUT", "HEAD", "OPTIONS", "P\x00ST", ""])
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {length}"]
    if random.random() < 0.1:
        lines.append(
            random.choice(
                ["Origin: null", "no colon", ": x", " folded", "Transfer-Encoding: chunked", "X: " + "y" * 70_000]
            )
        )
    head = "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n"
    kind = random.randrange(30)
    if kind == 0:
        return random.randbytes(random.randrange(300))
    if kind == 1:
        return head[: random.randrange(len(head))]
    if kind == 2:
        place = random.randrange(len(head))
        return head[:place] + random.randbytes(3) + head[place:] + body
    return head + body


def check_requests(server: Served, count: int, seed: int) -> None:
    source = random.Random(seed)
    requests = [some_request(source, server) for _ in range(count)]
    with ThreadPoolExecutor(8) as callers:
        answers = list(callers.map(server.send, requests))
    for request, answer in zip(requests, answers, strict=True):
        head, _, body = answer.partition(b"\r\n\r\n")
        if not head:
            continue  # a line that is empty
        status = int(head.split()[1])
        assert status in (200, 204) or 400 <= status < 500 or status == 501, (request, answer)
        if status >= 400 and b"HEAD " not in request:
            assert json.loads(body)["error"]["message"], (request, answer)
    still_answers(server)


def still_answers(server: Served) -> None:
    status, _, answer = server.ask("POST", "/v1/chat/completions", CHAT)
    assert status == 200
    assert answer["choices"][0]["message"]
    said = server.said()
    assert "Traceback" not in said
    assert "allhands: error" not in said, said[-2000:]


def test_garbage_over_the_network(server: Served) -> None:
    check_requests(server, 600, 3)


@pytest.mark.long
def test_much_garbage_over_the_network(server: Served) -> None:
    check_requests(server, 10_000, 4)
