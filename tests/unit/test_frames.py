"""Supervisor and agent: whatever the other end says, only what has the secret and the right types
is listened to.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from strangers import AGENT_HELLO, HANDED, changed

from allhands.cluster.connection import Connection, HostError
from allhands.cluster.frames import FROM_AGENT, FROM_SUPERVISOR, GARBLED, Frame, FrameLink
from allhands.cluster.hosts import Host

SECRET = "5" * 64
REPORT = {
    "stopped": False,
    "error": None,
    "log_path": "/x",
    "log_tail": ["a"],
    "out_of_memory": False,
}
BEAT = {"step": 1, "phase": "compute", "count": 7, "age": 0.5, "waited_s": 0.0}
SOUND: dict[str, Frame] = {
    "ready": {
        "ports": [5001],
        "step": None,
        "own": False,
        "versions": {"python": "3.12.1", "mlx": None},
    },
    "refused": {
        "type": "DataError",
        "message": "no",
        "code": "data-missing",
        "where": None,
        "hint": None,
    },
    "pong": {"number": 0},
    "output": {"stream": 1, "data": "\xff text"},
    "line": {"rank": 1, "data": "text"},
    "sample": {"line": "{}"},
    "marks": {
        "rank": 0,
        "ready": True,
        "started": False,
        "listening": True,
        "busy_age": 0.25,
        "beat": BEAT,
    },
    "exit": {
        "rank": 0,
        "code": -9,
        "age": 0.0,
        "report": REPORT | {"error": {"type": "Boom", "message": "bang"}},
    },
    "report": {"rank": 3, "report": REPORT},
    "attested": {"content": {"model": {"files": "abc"}}},
    "ended": {},
}
ODD = (None, True, -1, 10**15, 1.5, "x", [], [None], {}, {"a": 1})
HELLO: Frame = {**AGENT_HELLO}


def line(kind: str, fields: Frame, secret: str = SECRET) -> bytes:
    return json.dumps({"secret": secret, "kind": kind, **fields}).encode() + b"\n"


@contextmanager
def linked() -> Iterator[tuple[int, list[Frame | None], list[bytes], threading.Event]]:
    """The end of a pipe at whose other end a link reads: what it takes for frames, for noise, and
    that it has ended.
    """
    reader, writer = os.pipe()
    frames, noise, ended = list[Frame | None](), list[bytes](), threading.Event()

    def receive(frame: Frame | None) -> None:
        frames.append(frame)
        if frame is None:
            ended.set()

    link = FrameLink(
        reader, os.open(os.devnull, os.O_WRONLY), FROM_AGENT, SECRET, receive, noise.append
    )
    yield writer, frames, noise, ended
    link.close()
    link.join(5.0)


def taken(*lines: bytes) -> tuple[list[Frame], list[bytes]]:
    with linked() as (writer, frames, noise, ended):
        with os.fdopen(writer, "wb") as stream:
            stream.writelines(lines)
        assert ended.wait(20.0)
    return [frame for frame in frames if frame is not None], noise


@pytest.mark.parametrize("kind", SOUND)
def test_every_frame_must_hold_what_it_must(kind: str) -> None:
    frames, noise = taken(line(kind, SOUND[kind]))
    assert (frames, noise) == ([{"kind": kind, **SOUND[kind]}], [])
    for name, value in SOUND[kind].items():
        without = {key: kept for key, kept in SOUND[kind].items() if key != name}
        others = [{**without, name: odd} for odd in ODD if type(odd) is not type(value)]
        for odd in [without, *others]:
            (frame,), _ = taken(line(kind, odd))
            # It is told from what it should be, unless the other value may be there, too.
            assert frame["kind"] == GARBLED or FROM_AGENT[kind](odd)


def test_what_has_no_secret_or_no_known_kind_is_noise() -> None:
    lines = [
        *(one if one.endswith(b"\n") else one + b"\n" for one in HANDED),
        line("pong", {"number": 0}, "6" * 64),
        line("pong", {"number": 0}, "\u00e9"),
        line("pong", {"number": 0}, "\ud800"),
        line("dance", {}),
        line("ping", {"number": 0}),  # what a supervisor says
        b'{"secret": "' + SECRET.encode() + b'", "kind": "pong", "kind": "ended"}\n',
        b'{"secret": "' + SECRET.encode() + b'", "kind": "pong", "number": NaN}\n',
        b'{"secret": ["' + SECRET.encode() + b'"], "kind": "pong"}\n',
        b'{"secret": "' + SECRET.encode() + b'", "kind": ["pong"]}\n',
        b'{"secret": "'
        + SECRET.encode()
        + b'", "kind": "pong", "x": '
        + b"[" * 900
        + b"]" * 900
        + b"}\n",
    ]
    frames, noise = taken(*lines, line("pong", {"number": 0}))
    assert frames == [{"kind": "pong", "number": 0}]
    assert len(noise) == len(lines)


def test_a_hundred_thousand_lines_are_no_frames_of_other_types() -> None:
    random_, kinds = random.Random(4), list(SOUND)
    written = [line(kind := kinds[i % len(kinds)], SOUND[kind]) for i in range(100_000)]
    frames, _ = taken(
        *(changed(random_, one).replace(b"\n", b" ") + b"\n" for one in written), line("ended", {})
    )
    assert frames[-1] == {"kind": "ended"}
    assert len(frames) < 60_000
    for frame in frames:
        assert frame["kind"] == GARBLED or FROM_AGENT[frame["kind"]](frame)


def test_a_real_agent_outlives_a_hundred_thousand_lines() -> None:
    random_ = random.Random(5)
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "allhands.cluster.agent"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as agent:
        assert agent.stdin is not None
        assert agent.stdout is not None
        agent.stdin.write(line("hello", HELLO))
        agent.stdin.flush()
        assert (
            json.loads(agent.stdout.readline().strip() or agent.stdout.readline())["kind"]
            == "ready"
        )
        for i in range(100_000):
            noise = (
                random_.randbytes(20)
                if i % 4
                else changed(random_, line("ping", {"number": 3}, "6" * 64))
            )
            agent.stdin.write(noise.replace(b"\n", b" ") + b"\n")
            if i % 2000 == 0:  # so that it does not take our silence for our end
                agent.stdin.write(line("ping", {"number": 4}))
        agent.stdin.write(line("ping", {"number": 5}) + line("end", {}))
        agent.stdin.close()
        said = [json.loads(one) for one in agent.stdout if one.strip()]
        assert agent.wait(20.0) == 0
    assert [(one["kind"], one.get("number")) for one in said if one.get("number") != 4] == [
        ("pong", 5),
        ("ended", None),
    ]


def test_a_supervisor_that_says_other_types_is_told_so() -> None:
    text = line("hello", HELLO) + line("signal", {"rank": "0", "number": 15}) + line("end", {})
    done = subprocess.run(
        [sys.executable, "-P", "-m", "allhands.cluster.agent"],
        input=text,
        capture_output=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0
    assert b"Traceback" not in done.stderr
    said = [json.loads(one) for one in done.stdout.splitlines() if one.strip()]
    assert [one["kind"] for one in said] == ["ready", "refused", "ended"]
    assert FROM_SUPERVISOR["hello"](HELLO)


FALSE_AGENT = """#!{python}
import json, sys
secret = json.loads(sys.stdin.readline().strip() or sys.stdin.readline())["secret"]
print(json.dumps({{"secret": secret, "kind": "ready", **{fields}}}), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    "changes", [{"ports": "5001"}, {"ports": [70000]}, {"versions": {"mlx": 3}}, {"step": True}]
)
def test_a_computer_that_says_other_types_is_named_at_once(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    program = tmp_path / "python"
    program.write_text(FALSE_AGENT.format(python=sys.executable, fields=SOUND["ready"] | changes))
    program.chmod(0o700)
    host = Host("other", None, ("127.0.0.1",), python=str(program))
    heard = list[Frame | None]()
    connection = Connection(host, "other", HELLO, tmp_path / "log", heard.append)
    try:
        began = time.monotonic()
        with pytest.raises(HostError) as caught:
            connection.wait_until_ready(began + 20.0)
        assert time.monotonic() - began < 5.0
    finally:
        connection.finish(time.monotonic() + 5.0)
    assert caught.value.hosts == ("other",)
    assert "unknown message" in caught.value.message
    assert heard == [None]
