"""Requests that are mostly right, and bytes that are not: for servers that must go on answering."""

from __future__ import annotations

import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice
from typing import Any

import psutil
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CHAT = {"messages": [{"role": "user", "content": "What is dew?"}], "max_tokens": 1}
# As one client or another sends them.
FIELDS: dict[str, Any] = {
    **{"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "max_tokens": 2},
    **{
        "max_completion_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.5,
        "top_k": 3,
        "min_p": 0.1,
        "n": 1,
        "seed": 7,
    },
    **{
        "stop": ["a", "b"],
        "logit_bias": {"7": -1.5},
        "logprobs": True,
        "top_logprobs": 2,
        "user": "me",
    },
    **{
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_context_size": 5,
    },
    **{
        "presence_context_size": 0,
        "frequency_context_size": 5,
        "xtc_probability": 0.5,
        "xtc_threshold": 0.1,
    },
    **{
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": "auto",
    },
    **{
        "response_format": {"type": "text"},
        "adapters": None,
        "draft_model": None,
        "num_draft_tokens": 3,
    },
    **{
        "chat_template_kwargs": {"enable_thinking": False},
        "role_mapping": {"user": "U: "},
        "prompt": "x",
    },
}
ODD: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        1.5,
        -0.0,
        10**9,
        2**31,
        2**63,
        10**30,
        -(10**30),
        1e308,
        5e-324,
        1e-30,
    ),
    *(
        "",
        "x",
        "/etc/passwd",
        "\x00",
        "\ud800",
        "é",
        "a" * 3000,
        "default_model",
        "../..",
        "259",
        "-1",
    ),
    *(
        [],
        {},
        [[]],
        [{}],
        {"": None},
        [None],
        ["", 3],
        {"a": {"a": {"a": []}}},
        {"258": 1},
        {"259": 1},
        {"x": 1},
    ),
    *(
        {"role": "user"},
        [{"role": "user", "content": "hi"}],
        [{"role": 3}],
        {"chat_template": "x"},
        {"tools": 1},
    ),
    *(
        [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
        {"type": "text"},
    ),
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
    return {
        random.choice(["role", "content", "type", "text", "x"]): some_value(random, depth + 1)
        for _ in range(2)
    }


def some_body(random: random.Random) -> bytes:
    """A request of which most is right, or something that begins like one."""
    body: dict[str, Any] = dict(CHAT)
    if random.random() < 0.3:
        body["messages"] = [some_value(random) for _ in range(random.randrange(3))]
    for name in random.sample(list(FIELDS), random.randrange(4)):
        body[name] = some_value(random) if random.random() < 0.6 else FIELDS[name]
        if name.startswith("max_") and type(body[name]) is int:
            body[name] = min(
                body[name], 3
            )  # answers of a billion tokens are right, and take their time
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
            [
                "",
                "-1",
                "x",
                "1_0",
                "+3",
                "9" * 30,
                "0",
                len(body) + 5,
                max(0, len(body) - 5),
                "\xb2",
            ]
        )
    host = random.choice(["localhost"] * 20 + ["evil.example", "", "127.0.0.1, a"])
    path = random.choice(paths)
    method = random.choice(["POST"] * 20 + ["GET", "PUT", "HEAD", "OPTIONS", "P\x00ST", ""])
    lines = [
        f"{method} {path} HTTP/1.1",
        f"Host: {host}",
        f"Content-Length: {length}",
        "Connection: close",
    ]
    if random.random() < 0.1:
        lines.append(
            random.choice(
                [
                    "Origin: null",
                    "no colon",
                    ": x",
                    " folded",
                    "Transfer-Encoding: chunked",
                    "X: " + "y" * 70_000,
                ]
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


def answers(
    send: Callable[[bytes], bytes], requests: Sequence[bytes]
) -> Iterator[tuple[bytes, int, bytes]]:
    """Send them, several at a time; each with status and body of its answer, those without one left
    out.
    """
    with ThreadPoolExecutor(8) as callers:
        for request, answer in zip(requests, callers.map(send, requests), strict=True):
            head, _, body = answer.partition(b"\r\n\r\n")
            if head:
                yield request, int(head.split()[1]), body


# --- what must not be answered --------------------------------------------------------------------


def _number(low: float, high: float = math.inf) -> Callable[[Any], bool]:
    return lambda value: type(value) in (int, float) and low <= value <= high


def _whole(low: int) -> Callable[[Any], bool]:
    return lambda value: type(value) is int and value >= low


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds


# What a field may be at most, besides null: more may be refused than is told here, but nothing else
# is answered.
_MAY_BE: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("stream", "logprobs"), _is(bool)),
    **dict.fromkeys(("max_tokens", "max_completion_tokens", "n"), _whole(1)),
    **dict.fromkeys(("top_logprobs", "top_k", "seed"), _is(int)),
    **dict.fromkeys(
        (
            "repetition_context_size",
            "presence_context_size",
            "frequency_context_size",
            "num_draft_tokens",
        ),
        _whole(0),
    ),
    **dict.fromkeys(("top_p", "min_p", "xtc_probability"), _number(0, 1)),
    **dict.fromkeys(("temperature", "repetition_penalty", "xtc_threshold"), _number(0)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), _number(-math.inf)),
    **dict.fromkeys(
        ("logit_bias", "stream_options", "chat_template_kwargs", "role_mapping"), _is(dict)
    ),
    **dict.fromkeys(("model", "user"), _is(str)),
    **{"stop": _is(str, list), "tools": _is(list)},
}
_ROLES = ("system", "developer", "user", "assistant", "tool", "function")


def is_wrong(request: bytes, routes: Mapping[str, Collection[str]]) -> bool:
    """Whether no server may answer that with 200, for reasons that do not depend on how it reads
    requests.

    Args:
        routes: the paths, and each one's methods.
    """
    head, end, body = request.partition(b"\r\n\r\n")
    lines = (
        head.decode("latin-1").replace("\r\n ", " ").split("\r\n")
    )  # a header may go on in the next line
    if not end or any("\n" in line or "\r" in line for line in lines):
        return (
            not end and b"\n\n" not in request
        )  # it is not complete; or other ends of lines might be taken
    words = lines[0].split()
    method, path = (words[0], words[1].partition("?")[0]) if len(words) == 3 else ("", "")
    if method not in routes.get(path, ()):
        return True
    headers = [
        (name.strip().lower(), value.strip())
        for name, _, value in (line.partition(":") for line in lines[1:])
    ]
    hosts = [value for name, value in headers if name == "host"]
    named = {name for name, _ in headers}
    if any(line[:1] in ("", ":") or ":" not in line for line in lines[1:]) or hosts != [
        "localhost"
    ]:
        return True
    if "origin" in named:
        return True
    if method != "POST":
        return False
    lengths = [value for name, value in headers if name == "content-length"]
    if (
        "transfer-encoding" in named
        or len(lengths) != 1
        or not (lengths[0].isascii() and lengths[0].isdigit())
    ):
        return True
    return int(lengths[0]) > len(body) or _is_wrong_body(body[: int(lengths[0])], path)


def _is_wrong_body(body: bytes, path: str) -> bool:
    def no_number(word: str) -> Any:
        raise ValueError(word)

    try:
        found = json.loads(body, parse_constant=no_number)
    except (ValueError, RecursionError):
        return True
    if not isinstance(found, dict):
        return True
    if any(
        found.get(name) is not None and not may_be(found[name]) for name, may_be in _MAY_BE.items()
    ):
        return True
    if path == "/v1/completions":
        return not isinstance(found.get("prompt"), str | list)
    messages = found.get("messages")
    if not isinstance(messages, list) or not messages:
        return True
    return any(not isinstance(one, dict) or one.get("role") not in _ROLES for one in messages)


class Footprint:
    """What a process holds, to be compared with what it holds when much has been asked of it."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._before = self._held()

    def _held(self) -> tuple[int, int, int]:
        return (
            self._process.memory_info().rss >> 20,
            self._process.num_fds(),
            self._process.num_threads(),
        )

    def has_not_grown(self, megabytes: int, seconds: float = 15.0) -> None:
        """Fail if it has: by more than so much memory, or by more than a few descriptors or threads
        that stay.
        """
        deadline = time.monotonic() + seconds
        while any(
            now > before + 3 for now, before in zip(self._held()[1:], self._before[1:], strict=True)
        ):
            assert time.monotonic() < deadline, (self._before, self._held())
            time.sleep(0.5)
        held = self._held()
        print("MiB, descriptors, threads:", self._before, held)
        assert held[0] <= self._before[0] + megabytes, (self._before, held)


def ask_a_hundred_thousand(
    pid: int,
    check: Callable[[Sequence[bytes]], Counter[str]],
    request: st.SearchStrategy[bytes],
    some_requests: Callable[[int, int], list[bytes]],
) -> tuple[Counter[str], Footprint]:
    """What ``check`` counts of so many requests to the process, and what that held before most of
    them.

    Args:
        request: what hypothesis makes before and after the others.
        some_requests: so many of a seed.
    """
    seen: Counter[str] = Counter()

    @settings(max_examples=60, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(request, min_size=1, max_size=20))
    def many(some: list[bytes]) -> None:
        seen.update(check(list(islice(cycle(some), 20))))

    many()
    seen.update(check(some_requests(4_000, 2)))
    footprint = Footprint(pid)
    for seed in range(10):
        seen.update(check(some_requests(9_400, 10 + seed)))
    many()
    print(seen)
    return seen, footprint
