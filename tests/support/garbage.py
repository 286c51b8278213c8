"""Requests that are mostly right, and bytes that are not: for servers that must go on answering."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

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


def some_request(random: random.Random, paths: Sequence[str]) -> bytes:
    body = some_body(random).replace(b'"tiny"', b'"default_model"')
    length: Any = len(body)
    if random.random() < 0.1:
        length = random.choice(
            ["", "-1", "x", "1_0", "+3", "9" * 30, "0", len(body) + 5, max(0, len(body) - 5), "\xb2"]
        )
    host = random.choice(["localhost"] * 20 + ["evil.example", "", "127.0.0.1, a"])
    path = random.choice(paths)
    method = random.choice(["POST"] * 20 + ["GET", "PUT", "HEAD", "OPTIONS", "P\x00ST", ""])
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", f"Content-Length: {length}", "Connection: close"]
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


def answers(send: Callable[[bytes], bytes], requests: Sequence[bytes]) -> Iterator[tuple[bytes, int, bytes]]:
    """Send them, several at a time; each with status and body of its answer, those without one left out."""
    with ThreadPoolExecutor(8) as callers:
        for request, answer in zip(requests, callers.map(send, requests), strict=True):
            head, _, body = answer.partition(b"\r\n\r\n")
            if head:
                yield request, int(head.split()[1]), body
