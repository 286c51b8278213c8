"""The dashboard's visitors who are none, and runs whose files somebody else has written."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from command_line import call_allhands
from dashboards import Dashboard, dashboard
from garbage import ODD, answers, ask_a_hundred_thousand, is_wrong, some_request
from hypothesis import strategies as st
from serving import connect, parsed, received
from written_runs import HOSTILE, write_run, write_samples

from allhands.errors import AllhandsError
from allhands.report.dashboard.app import Settings, make_app
from allhands.report.dashboard.runs import logs_of, processes_of, summary_of
from allhands.report.facts import read_facts
from allhands.report.html import page_parts
from allhands.report.page import make_page
from allhands.runtime.http_guard import Guard


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    write_samples(write_run(folder / "one", ranks=2, sampled=[("hello", HOSTILE)]))
    (folder / "one" / "logs" / "rank-0.log").write_text("step 1\n")
    return folder


@pytest.fixture(scope="module")
def served(root: Path) -> Iterator[Dashboard]:
    with dashboard(root) as running:
        yield running


def port_of(running: Dashboard) -> int:
    return int(running.address.rstrip("/").rpartition(":")[2])


PATHS = [
    *(
        "/",
        "/api/runs",
        "/api/page?run=one",
        "/api/log?run=one&log=rank-0.log",
        "/api/stop?run=one",
        "/assets/script.js",
    ),
    *(
        "/api/page",
        "/api/log?run=../one&log=../../etc/passwd",
        "/assets/..%2f..%2fapp.py",
        "/?token=%ff",
        "//evil.example/",
    ),
    *(
        "/%00",
        "/api/log?run=%00&log=%00",
        "/api/page?" + "run=one&" * 2000,
        "http://evil.example/",
        "*",
        "/api/runs?" + "x" * 9000,
    ),
]


_GET = ("GET", "HEAD")
ROUTES = {
    **dict.fromkeys(
        ("/", "/api/runs", "/api/page", "/api/log", "/assets/script.js", "/assets/style.css"), _GET
    ),
    "/api/stop": ("POST",),
}


def some_requests(count: int, seed: int) -> list[bytes]:
    """Few are for the run's page, which takes longest."""
    source, paths = random.Random(seed), [path for path in PATHS if "page" not in path] * 8 + PATHS
    made = [some_request(source, paths) for _ in range(count)]
    return [one.replace(b"POST ", b"GET ", 1) if source.random() < 0.5 else one for one in made]


def check_requests(running: Dashboard, requests: Sequence[bytes]) -> Counter[str]:
    """How many were answered, were wrong and were refused."""
    port, seen = port_of(running), Counter[str]()

    def send(request: bytes) -> bytes:
        if (
            b"\r\n\r\n" not in request
        ):  # the rest would be waited for: half of these callers leave, the others say it
            request += b"\r\n\r\n" * (len(request) % 2)
        with connect(port) as client:
            client.settimeout(0.3)
            with contextlib.suppress(ConnectionError, TimeoutError):
                client.sendall(request)
                return received(client) if b"\r\n\r\n" in request else b""
        return b""

    for request, status, body in answers(send, requests):
        assert status < 500, (request, body)
        assert b"root:" not in body
        whole = request if b"\r\n\r\n" in request else request + b"\r\n\r\n"
        wrong = is_wrong(whole, ROUTES)
        assert not (wrong and status == 200), repr((request, body))[:900]
        seen.update({"answered": True, "right": status == 200, "wrong": wrong})
    return seen


def test_garbage_over_the_network(served: Dashboard) -> None:
    # The rest is of those that were not complete.
    assert check_requests(served, some_requests(400, 1))["answered"] > 320
    assert served.json("/api/runs")[0]["name"] == "one"


@pytest.mark.slow
@pytest.mark.parametrize("pause_s", [0.0, 0.5])
@pytest.mark.parametrize("path", ["/", "/api/page?run=one", "/api/stop"])
def test_what_comes_behind_a_request_and_is_none_is_no_trouble(
    root: Path, path: str, pause_s: float
) -> None:
    """A body that is not written as its request says, while the answer is made or after it: nothing
    is logged.
    """
    with dashboard(root) as running:
        for body in (b"x" * 30, b"5\r\nabc", b"zz\r\n"):
            with connect(port_of(running)) as client, contextlib.suppress(ConnectionError):
                head = (
                    f"GET {path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
                )
                client.sendall(head.encode())
                time.sleep(pause_s)
                client.sendall(body)
                client.shutdown(socket.SHUT_WR)
                received(client)
        assert running.json("/api/runs")[0]["name"] == "one"
        running.process.terminate()
        assert running.process.communicate(timeout=20)[1] == ""


@pytest.mark.long
def test_a_hundred_thousand_inputs_over_the_network(root: Path) -> None:
    """Into one process, which is alive at the end, as large as it was, and answers."""
    words = [
        b"GET ",
        b"POST ",
        b"HTTP/1.1",
        b"Host: localhost",
        b"\r\n",
        b"/api/runs",
        b" ",
        b":",
        b"\0",
        b"Cookie",
    ]
    pieces = st.lists(st.one_of(st.sampled_from(words), st.binary(max_size=20)), max_size=20).map(
        b"".join
    )
    request = st.one_of(st.binary(), pieces)
    with dashboard(root) as running:
        check = partial(check_requests, running)
        seen, footprint = ask_a_hundred_thousand(running.process.pid, check, request, some_requests)
        assert seen["answered"] > 80_000
        assert seen["right"] > 2_000
        assert seen["wrong"] > 50_000
        assert running.json("/api/runs")[0]["name"] == "one"
        assert running.process.poll() is None
        footprint.has_not_grown(megabytes=40)
        running.process.terminate()
        assert running.process.communicate(timeout=20)[1] == ""


async def status_of(app: Any, scope: dict[str, Any]) -> int:
    """What the application answers, without a network between."""
    found: list[int] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.disconnect"}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            found.append(message["status"])

    await app(scope, receive, send)
    (status,) = found
    return status


@pytest.mark.long
def test_a_hundred_thousand_requests_of_any_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = make_app(Settings(tmp_path, Guard(token="correct-horse")))
    source = random.Random(3)
    names = [
        b"host",
        b"origin",
        b"cookie",
        b"authorization",
        b"x-allhands",
        b"sec-fetch-site",
        b"content-length",
    ]
    values = [
        b"localhost",
        b"[::1]:8",
        b"evil.example",
        b"null",
        b"allhands-token=correct-horse",
        b"allhands-token=\xe9",
    ]
    values += [
        b"Bearer correct-horse",
        b"stop",
        b"cross-site",
        b"-1",
        b"",
        b'a="; b=\x00',
        b"http://localhost",
    ]

    def some(parts: list[bytes]) -> bytes:
        return (
            source.choice(parts)
            if source.random() < 0.9
            else source.randbytes(source.randrange(30))
        )

    async def ask_all() -> Counter[int]:
        seen: Counter[int] = Counter()
        for _ in range(100_000):
            path, _, query = source.choice(PATHS).partition("?")
            headers = [(source.choice(names), some(values)) for _ in range(source.randrange(4))]
            if source.random() < 0.7:
                headers += [(b"host", b"localhost"), (b"authorization", b"Bearer correct-horse")]
            scope: dict[str, Any] = {
                "type": "http",
                "method": source.choice(["GET", "POST", "HEAD", "X"]),
                "path": path,
                "raw_path": path.encode(),
                "query_string": some([query.encode(), b"token=correct-horse", b"token=%ff"]),
                "headers": headers,
                "server": ("127.0.0.1", 80),
                "client": ("127.0.0.1", 9),
                "scheme": "http",
                "root_path": "",
                "http_version": "1.1",
            }
            seen[await status_of(app, scope)] += 1
        return seen

    seen = asyncio.run(ask_all())
    assert set(seen) <= {200, 303, 400, 403, 404, 405}, seen
    assert seen[200] > 1000
    assert capsys.readouterr().err == ""


# --- who asks -------------------------------------------------------------------------------------


def test_names_and_pages(served: Dashboard) -> None:
    port = port_of(served)
    for host in ("localhost", f"[::1]:{port}", "127.0.0.2"):
        assert served.ask("/api/runs", headers={"Host": host})[0] == 200
    for host in ("evil.example", "localhost.evil.example", "[::1", ""):
        assert served.ask("/api/runs", headers={"Host": host})[0] == 400
    for origin in ("http://evil.example", "null", "http://localhost:3000"):
        status, told, headers = served.ask("/api/runs", headers={"Origin": origin})
        assert (status, "may not send requests" in told) == (403, True)
        assert not [name for name in headers if name.lower().startswith("access-control")]
        stop = {"X-Allhands": "stop", "Origin": origin}
        assert served.ask("/api/stop?run=one", method="POST", headers=stop)[0] == 403
    own = {"X-Allhands": "stop", "Origin": f"http://127.0.0.1:{port}"}
    assert served.ask("/api/stop?run=one", method="POST", headers=own)[0] == 404


@pytest.mark.slow
def test_an_address_of_version_6(root: Path) -> None:
    with dashboard(root, "--host", "::1") as running:
        assert running.address.startswith("http://[::1]:")
        assert running.token is None
        assert running.json("/api/runs")


def test_the_token_of_programs_and_of_people(root: Path) -> None:
    with dashboard(
        root, "--token", "a+b/c&d=e%f", "--name", "one.example", "--name", "two.example"
    ) as running:
        assert running.ask("/api/runs")[0] == 403
        assert (
            running.ask(
                "/api/runs", headers={"Authorization": "Bearer a+b/c&d=e%f", "Host": "two.example"}
            )[0]
            == 200
        )
        assert running.ask("/api/runs", headers={"Authorization": "Bearer a+b"})[0] == 403
        # As it was printed; whatever stands before the question mark, it leads to the dashboard.
        assert running.token is not None
        with connect(port_of(running)) as client:
            head = f"GET //evil.example/?token={running.token} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
            client.sendall(head.encode())
            status, headers, _ = parsed(received(client))
        assert (status, headers["location"]) == (303, "/")
        cookie = headers["set-cookie"].partition(";")[0]
        assert "samesite=strict" in headers["set-cookie"].lower()
        assert running.ask("/api/runs", headers={"Cookie": cookie})[0] == 200


def test_a_name_that_is_none_is_one_message(root: Path) -> None:
    done = call_allhands("dashboard", str(root), "--host", "no.such.host.invalid")
    assert (done.returncode, "what to do" in done.stderr, "Traceback" in done.stderr) == (
        2,
        True,
        False,
    )


@pytest.mark.slow
def test_callers_that_never_finish_hold_up_nobody(root: Path) -> None:
    with dashboard(root) as running:
        idle = [connect(port_of(running)) for _ in range(300)]
        for client in idle:
            with contextlib.suppress(ConnectionError):
                client.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        begun = time.monotonic()
        assert running.json("/api/runs")
        assert time.monotonic() - begun < 5
        # The first are gone already, the last after a while, however slowly they go on.
        last = idle[-1]
        last.settimeout(0.5)
        ended = False
        while not ended and time.monotonic() - begun < 15:
            try:
                last.sendall(b"a")
                ended = last.recv(1) == b""
            except TimeoutError:
                pass
            except ConnectionError:
                ended = True
        assert ended
        for client in idle:
            client.close()


# --- files of runs that somebody else has written -------------------------------------------------


def spoiled(source: random.Random, content: bytes) -> bytes:
    """Other bytes, an end in the middle, deep nesting, or lines of JSON with other values."""
    kind, place = source.randrange(5), source.randrange(max(1, len(content)))
    if kind == 0:
        return source.randbytes(source.randrange(300))
    if kind == 1:
        return content[:place] + source.randbytes(2) + content[place:]
    if kind == 2:
        return content[:place] + b"[" * source.choice([10, 200_000])
    lines = content.split(b"\n")
    for place in [source.randrange(len(lines)) for _ in range(3)]:
        with contextlib.suppress(ValueError):
            found = json.loads(lines[place])
            change(source, found)
            lines[place] = json.dumps(found).encode()
    return b"\n".join(lines)


def change(source: random.Random, found: Any) -> None:
    places = (
        list(found)
        if isinstance(found, dict)
        else list(range(len(found)))
        if isinstance(found, list)
        else []
    )
    if places:
        place = source.choice(places)
        if isinstance(found[place], dict | list) and source.random() < 0.6:
            change(source, found[place])
        else:
            found[place] = source.choice([*ODD, float("nan"), float("inf"), HOSTILE])


def check_files(folder: Path, count: int, seed: int) -> None:
    source, run = (
        random.Random(seed),
        write_run(folder / "run", steps=20, ranks=2, ended=None, sampled=[("a", "b")]),
    )
    write_samples(run, host=lambda _: os.uname().nodename)
    event = {
        "time": 1.0,
        "kind": "failed",
        "attempt": 1,
        "rank": 0,
        "message": "lost",
        "host": "mac",
        "error": "x",
    }
    (run / "events.jsonl").write_text(f"{json.dumps(event)}\n" * 3)
    whole = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for _ in range(count):
        for path in source.sample(sorted(whole), source.choice([1, 1, 2])):
            path.write_bytes(spoiled(source, whole[path]))
        with contextlib.suppress(AllhandsError):
            summary_of("run", run)
            facts = read_facts(run)
            html, charts = page_parts(make_page([facts], now=None))
            processes_of(facts, time.time())
            assert "<img" not in html
            assert "<script" not in html
            json.dumps(charts)
        for path, content in whole.items():
            path.write_bytes(content)


@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid:RuntimeWarning")
def test_files_of_any_content_are_shown_or_refused(tmp_path: Path) -> None:
    check_files(tmp_path, 60, 1)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning", "ignore:invalid:RuntimeWarning")
def test_many_files_of_any_content_are_shown_or_refused(tmp_path: Path) -> None:
    check_files(tmp_path, 300, 2)


def test_a_run_that_cannot_be_shown_hides_no_other(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever goes wrong with one request: an answer, a line, and the next request."""
    from starlette.testclient import TestClient

    client = TestClient(make_app(Settings(root)), base_url="http://localhost")

    def fails(*_: object, **__: object) -> None:
        raise ZeroDivisionError("out of nowhere")

    monkeypatch.setattr("allhands.report.dashboard.app.make_page", fails)
    assert client.get("/api/page?run=one").status_code == 500
    assert client.get("/api/runs").json()[0]["name"] == "one"
    assert capsys.readouterr().err.count("out of nowhere") == 1


@pytest.mark.parametrize(
    "made", [lambda path: path.symlink_to("/etc/passwd"), os.mkfifo, Path.mkdir]
)
def test_logs_are_files_of_the_run(tmp_path: Path, made: Callable[[Path], None]) -> None:
    run = write_run(tmp_path / "run")
    (run / "logs").mkdir(exist_ok=True)
    made(run / "logs" / "rank-0.log")
    (run / "logs" / "rank-1.log").write_text("its own\n")
    assert logs_of(run) == ["rank-1.log"]


def test_names_of_directories_are_text(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>"
    write_run(tmp_path / name)
    with dashboard(tmp_path) as running:
        assert running.json("/api/runs")[0]["name"] == name
        assert "<img" not in running.json("/api/page?run=" + name.replace(" ", "%20"))["html"]
