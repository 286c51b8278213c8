"""Garbage, half of it well-formed: it gets a refusal as JSON, and the next request its answer."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from garbage import CHAT, FIELDS, answers, ask_a_hundred_thousand, is_wrong, some_body, some_request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import Served, served

from allhands.infer.completions import Refused, read_request
from allhands.infer.completions import Served as Model
from allhands.infer.replies import Piece, Reply, Token

MODEL = Model("tiny", None, 259)


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
    """How many of so many were taken: they hold what mlx_lm computes with, and nothing that it
    would load.
    """
    source, taken = random.Random(seed), 0
    for number in range(count):
        found = read(
            some_body(source), ("/v1/chat/completions", "/v1/completions")[number % 8 == 0]
        )
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


CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "taken"),
    [
        ({"role": "user", "content": "Hello"}, True),
        ({"role": "user", "content": ""}, True),
        ({"role": "developer", "content": "Be short."}, True),
        ({"role": "assistant", "content": None, "tool_calls": [CALL]}, True),
        ({"role": "assistant", "content": "Hello", "tool_calls": None, "name": None}, True),
        ({"role": "user"}, False),
        ({"role": "user", "content": None}, False),
        ({"role": "assistant"}, False),
        ({"role": "alien", "content": "Hello"}, False),
    ],
)
def test_messages_without_words_or_of_unknown_roles_are_refused(
    message: dict[str, Any], taken: bool
) -> None:
    body = json.dumps({"messages": [message, {"role": "user", "content": "And?"}]}).encode()
    assert (read(body) is not None) == taken


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda of: st.lists(of) | st.dictionaries(st.text(), of),
)


@given(JSON)
def test_bodies_of_any_json_are_read_or_refused(body: Any) -> None:
    read(json.dumps(body).encode())


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
STRANGE = "\U000e0000" * 300  # each is ten characters of a message
NO_MODEL = [*NO_TEXT, STRANGE]
WRONG: dict[str, list[Any]] = {
    **dict.fromkeys(("stream", "logprobs"), NO_TRUTH),
    **{name: [*NOT_WHOLE, 0, -1, 10**30] for name in ("max_tokens", "max_completion_tokens")},
    **{
        name: [*NOT_WHOLE, -1, 10**30]
        for name in ("repetition_context_size", "presence_context_size", "num_draft_tokens")
    },
    **{
        "frequency_context_size": [*NOT_WHOLE, -1],
        "top_k": [*NOT_WHOLE, -2, 10**30],
        "n": [*NOT_WHOLE, 0, 2],
    },
    **{
        "seed": [*NOT_WHOLE, 2**64],
        "top_logprobs": [*NOT_WHOLE, 21, -2],
        "temperature": [*NO_NUMBER, -1, 2.1],
    },
    **{name: [*NO_NUMBER, -0.1, 1.1] for name in ("top_p", "min_p", "xtc_probability")},
    **{"xtc_threshold": [*NO_NUMBER, 0.6], "repetition_penalty": [*NO_NUMBER, -1]},
    **{name: [*NO_NUMBER, 1e300, -1e300] for name in ("presence_penalty", "frequency_penalty")},
    **{
        "stream_options": [*NO_OBJECT, {"include_usage": 3}],
        "logit_bias": [*NO_OBJECT, {"7": "x"}, {"259": 1}, {"-1": 1}, {STRANGE: 1}],
    },
    **{
        "stop": [True, 3, {"x": 3}, [3], [""], "", [], ["a"] * 5],
        "tools": ["x", 3, {"x": 3}, ["f"]],
    },
    **dict.fromkeys(("model", "adapters", "draft_model"), NO_MODEL),
    **{"prompt": [True, 1, {"x": "x"}, ["x", "y"], [259], [True], [["x"]], [[1], [2]]]},
    **{
        "user": NO_TEXT,
        "tool_choice": [True, 3, ["x"]],
        "response_format": [*NO_OBJECT, {"type": "json_object"}],
    },
    **{
        "chat_template_kwargs": [*NO_OBJECT, {"chat_template": "x"}],
        "role_mapping": [*NO_OBJECT, {"user": 3}],
    },
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


# --- over the network -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tiny_model: Path) -> Any:
    with served("--model", tiny_model, "--max-tokens", "2") as running:
        yield running


ROUTES = {
    **dict.fromkeys(
        ("/v1/chat/completions", "/v1/completions", "/chat/completions"), ("POST", "OPTIONS")
    ),
    **{"/v1/models": ("GET", "HEAD", "OPTIONS"), "/": ("OPTIONS",)},
}
PATHS = ["/v1/chat/completions"] * 9 + [
    "/v1/completions",
    "/chat/completions",
    "/v1/models",
    "/",
    "//x",
]


def check_requests(server: Served, requests: Sequence[bytes]) -> Counter[str]:
    """How many were answered, were wrong and were refused."""
    seen: Counter[str] = Counter()
    for request, status, body in answers(server.send, requests):
        assert status in (200, 204) or 400 <= status < 500 or status == 501, (request, body)
        if status >= 400 and b"HEAD " not in request:
            assert json.loads(body)["error"]["message"], (request, body)
        wrong = is_wrong(request, ROUTES)
        assert not (wrong and status == 200), repr((request, body))[:900]
        seen.update({"right": status == 200, "wrong": wrong, "refused": status >= 400})
    return seen


def some_requests(count: int, seed: int) -> list[bytes]:
    source = random.Random(seed)
    return [some_request(source, PATHS) for _ in range(count)]


def still_answers(server: Served) -> None:
    status, _, answer = server.ask("POST", "/v1/chat/completions", CHAT)
    assert status == 200
    assert answer["choices"][0]["message"]
    said = server.said()
    assert "Traceback" not in said
    assert "allhands: error" not in said, said[-2000:]


def test_garbage_over_the_network(server: Served) -> None:
    check_requests(server, some_requests(600, 3))
    still_answers(server)


WORDS = st.text("ab é\n{<", max_size=6) | st.sampled_from(
    ["{", '{"a": [1]}', "[1]", "Zq" + "9" * 4400 + "qZ"]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | WORDS,
    lambda of: st.lists(of, max_size=2) | st.dictionaries(WORDS, of, max_size=2),
    max_leaves=3,
)


def some_function() -> st.SearchStrategy[dict[str, Any]]:
    more = dict.fromkeys(("arguments", "parameters", "description", "x"), VALUES)
    return st.fixed_dictionaries({"name": WORDS}, optional=more)


def some_message() -> st.SearchStrategy[dict[str, Any]]:
    calls = st.lists(
        st.fixed_dictionaries({"function": some_function()}, optional={"id": VALUES}), max_size=2
    )
    more = {"tool_calls": st.none() | calls, "name": VALUES, "reasoning_content": VALUES}
    roles = st.sampled_from(["system", "developer", "user", "assistant", "tool"])
    return st.fixed_dictionaries({"role": roles, "content": WORDS}, optional=more)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.lists(some_message(), min_size=1, max_size=3),
    st.none() | st.lists(some_function(), max_size=2),
)
def test_conversations_of_any_form_are_answered_or_refused(
    server: Served, messages: list[dict[str, Any]], functions: list[dict[str, Any]] | None
) -> None:
    tools = functions and [{"type": "function", "function": function} for function in functions]
    body = {"messages": messages, "tools": tools, "max_tokens": 1}
    status, _, answer = server.ask("POST", "/v1/chat/completions", body)
    assert status in (200, 400), answer


def test_a_message_with_nulls_is_one_without_these_fields(server: Served) -> None:
    message = {"role": "assistant", "content": "Hello"}
    nulls = {"tool_calls": None, "name": None, "reasoning_content": None}
    asked = [{**CHAT, "messages": [each, *CHAT["messages"]]} for each in (message, message | nulls)]
    plain, with_nulls = (server.ask("POST", "/v1/chat/completions", body) for body in asked)
    assert (plain[0], with_nulls[0]) == (200, 200)
    assert plain[2]["usage"]["prompt_tokens"] == with_nulls[2]["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    "head", ["", "Connection: clos", "Connection: close", "Connection: close\r\n"]
)
def test_a_head_that_ends_too_early_is_refused(server: Served, head: str) -> None:
    """Perhaps what would have followed forbids it."""
    whole = f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{head}"
    assert server.send(whole.encode()).split()[1] == b"400"
    assert server.send(f"{whole.rstrip()}\r\n\r\n".encode()).split()[1] == b"200"


def of_bytes(body: bytes) -> bytes:
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n"
        % len(body)
        + body
    )


@pytest.mark.long
def test_a_hundred_thousand_inputs_over_the_network(tiny_model: Path) -> None:
    """Into one process, which is alive at the end, as large as it was, and answers."""
    body = st.dictionaries(st.sampled_from([*FIELDS, "messages"]), JSON).map(
        lambda fields: {**CHAT, **fields}
    )
    request = st.one_of(
        st.binary(), st.binary().map(of_bytes), body.map(json.dumps).map(str.encode).map(of_bytes)
    )
    with served("--model", tiny_model, "--max-tokens", "2") as server:
        check = partial(check_requests, server)
        seen, footprint = ask_a_hundred_thousand(server.process.pid, check, request, some_requests)
        assert seen["right"] > 5_000
        assert seen["wrong"] > 50_000
        assert seen["refused"] > 80_000
        still_answers(server)
        assert server.process.poll() is None
        footprint.has_not_grown(megabytes=100)


@pytest.mark.parametrize("logprob", [-float("inf"), float("nan")])
def test_likelihoods_that_are_no_numbers_of_jsons(logprob: float) -> None:
    tokens = SimpleNamespace(of=lambda _: b"a", shown=lambda _: "a")
    token = {"id": 3, "logprob": logprob, "end": 1}
    for kind in ("chat", "text"):
        reply = Reply("1", kind, "tiny", 0, "", tokens, logprobs=True)  # type: ignore[arg-type]
        piece = Piece(text="a", tokens=[Token(**token, top=({"id": 3, "logprob": logprob},))])
        assert "-9999" in json.dumps(reply.whole(piece, {}), allow_nan=False)
