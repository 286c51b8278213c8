"""Who asks the server: this computer's programs, web pages, other computers, and callers that never
finish.
"""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from command_line import call_allhands
from serving import Served, parsed, received, served

from allhands.infer import handler, serving
from allhands.infer.serving import ServeOptions, serve
from allhands.runtime.http_guard import listen

CHAT = {"messages": [{"role": "user", "content": "What is dew?"}], "max_tokens": 2}
ROUTES = [
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/chat/completions", CHAT),
    ("POST", "/v1/completions", {"prompt": "Dew is", "max_tokens": 2}),
    ("GET", "/v1/models", None),
    ("GET", "/health", None),
]
FRIEND = "http://localhost:3000"


@pytest.fixture(scope="module")
def closed(tiny_model: Path) -> Iterator[Served]:
    with served("--model", tiny_model) as running:
        yield running


@pytest.fixture(scope="module")
def opened(tiny_model: Path) -> Iterator[Served]:
    """To other computers, and to pages of a friend."""
    with served(
        "--model",
        tiny_model,
        "--host",
        "0.0.0.0",
        "--name",
        "studio.example",
        "--allow-origin",
        FRIEND,
    ) as running:
        yield running


@pytest.mark.slow
@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
def test_every_route_is_guarded(
    closed: Served, opened: Served, method: str, path: str, body: object
) -> None:
    def status(server: Served, **headers: str | None) -> int:
        return server.ask(
            method, path, body, {name.replace("_", "-"): value for name, value in headers.items()}
        )[0]

    assert status(closed) == 200
    for host in ("localhost", f"localhost:{closed.port}", "127.0.0.2", "[::1]:8080"):
        assert status(closed, Host=host) == 200
    for host in ("evil.example", f"evil.example:{closed.port}", "studio.example", None, ""):
        assert status(closed, Host=host) == 400
    for origin in ("http://evil.example", "null", FRIEND):
        assert status(closed, Origin=origin) == 403
        # No preflight is made for these.
        assert status(closed, Origin=origin, Content_Type="text/plain") == 403
    assert status(closed, Origin=f"http://127.0.0.1:{closed.port}") == 200
    assert status(closed, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors") == 403

    assert status(opened) == 200
    assert status(opened, Host="studio.example:1") == 200
    assert status(opened, Host="evil.example") == 400
    assert status(opened, Origin=FRIEND) == 200
    assert status(opened, Origin="http://evil.example") == 403
    for wrong in (
        None,
        "Bearer wrong",
        f"Basic {opened.token}",
        f"Bearer {opened.token}x",
        "Bearer \xe9",
    ):
        assert status(opened, Authorization=wrong) == 401


def test_what_is_refused_is_said_as_clients_read_it(closed: Served, opened: Served) -> None:
    status, headers, told = opened.ask(
        "GET", "/v1/models", headers={"Authorization": None, "Origin": FRIEND}
    )
    assert (status, told["error"]["code"], headers["www-authenticate"]) == (
        401,
        "invalid_api_key",
        "Bearer",
    )
    # The friend's page can read it.
    assert headers["access-control-allow-origin"] == FRIEND
    status, headers, told = closed.ask("GET", "/v1/models", headers={"Host": "evil.example"})
    assert "evil.example" in told["error"]["message"]
    assert "access-control-allow-origin" not in headers
    status, _, told = closed.ask("POST", "/v1/chat/completions", {**CHAT, "model": "gpt-4o"})
    assert (status, told["error"]["code"]) == (404, "model_not_found")


def test_preflights(closed: Served, opened: Served) -> None:
    wanted = {
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    status, headers, _ = opened.ask(
        "OPTIONS", ROUTES[0][1], headers={**wanted, "Origin": FRIEND, "Authorization": None}
    )
    assert (status, headers["access-control-allow-origin"]) == (204, FRIEND)
    assert headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in headers["access-control-allow-methods"]
    assert headers["vary"] == "Origin"
    for server in (closed, opened):
        status, headers, _ = server.ask(
            "OPTIONS", ROUTES[0][1], headers={**wanted, "Origin": "http://evil.example"}
        )
        assert status == 403
        assert not [name for name in headers if name.startswith("access-control")]


def test_no_answer_lets_pages_read_it_unless_asked_for(closed: Served, opened: Served) -> None:
    for method, path, body in ROUTES:
        assert "access-control-allow-origin" not in closed.ask(method, path, body)[1]
        assert "access-control-allow-origin" not in opened.ask(method, path, body)[1]
        shared = opened.ask(method, path, body, {"Origin": FRIEND})[1]
        assert (shared["access-control-allow-origin"], shared["vary"]) == (FRIEND, "Origin")


def test_the_token_is_told_once_and_stands_nowhere_else(opened: Served) -> None:
    assert opened.token is not None
    assert len(opened.token) > 20
    opened.ask("GET", f"/v1/models?token={opened.token}")
    assert opened.token not in opened.said()
    assert opened.token not in " ".join(psutil.Process(opened.process.pid).cmdline())


def test_the_model_by_its_name(closed: Served, tiny_model: Path) -> None:
    for name in (str(tiny_model), str(tiny_model).replace("/", "%2F")):
        assert closed.ask("GET", f"/v1/models/{name}")[2]["id"] == str(tiny_model)
    assert closed.ask("GET", "/v1/models/other")[0] == 404


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_an_unknown_path_is_told_what_there_is(closed: Served, method: str) -> None:
    status, headers, answer = closed.ask(method, "/v1/embeddings", {} if method == "POST" else None)
    message = answer["error"]["message"]
    assert (status, answer["error"]["code"], "allow" in headers) == (404, "unknown_url", False)
    for path in ("/v1/models", "/health", "/v1/chat/completions", "/v1/completions"):
        assert path in message
        # Each that is named is there.
        assert closed.ask("DELETE", path)[0] == 405
    assert (message.index("/v1/models") < message.index("/v1/completions")) == (method != "POST")
    for near in ("/healthy", "/v1/modelsx"):
        assert closed.ask("GET", near)[0] == 404
        assert closed.ask("POST", near, {})[0] == 404


def test_a_token_of_ones_own(tiny_model: Path) -> None:
    for words, env in (
        (["--token", "correct-horse"], {}),
        ([], {"ALLHANDS_TOKEN": "correct-horse"}),
    ):
        with served("--model", tiny_model, *words, env={**os.environ, **env}) as running:
            assert running.token is None
            assert running.ask("GET", "/v1/models")[0] == 401
            assert (
                running.ask("GET", "/v1/models", headers={"Authorization": "Bearer correct-horse"})[
                    0
                ]
                == 200
            )
            assert "correct-horse" not in running.said()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--allow-origin", "localhost:3000"], "--allow-origin localhost:3000"),
        (["--allow-origin", "http://a", "--allow-origin", "null"], "--allow-origin null"),
        (["--allow-origin", "http://a/b"], "--allow-origin http://a/b"),
        (["--token", "short"], "--token"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
    ],
)
def test_wrong_options_are_one_message(tiny_model: Path, words: list[str], named: str) -> None:
    done = call_allhands("serve", "--model", tiny_model, "--port", "0", *words)
    assert (done.returncode, named in done.stderr, "what to do" in done.stderr) == (2, True, True)
    assert "Traceback" not in done.stderr


def test_every_page_may_ask_if_asked_for_with_a_warning(tiny_model: Path) -> None:
    with served("--model", tiny_model, "--allow-origin", "*") as running:
        assert "warning" in running.said()
        status, headers, _ = running.ask(
            "POST", ROUTES[0][1], CHAT, {"Origin": "http://evil.example"}
        )
        assert (status, headers["access-control-allow-origin"]) == (200, "*")
        assert running.ask("POST", ROUTES[0][1], CHAT, {"Host": "evil.example"})[0] == 400


# --- bodies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lengths", "status"),
    [
        ([], 411),
        (["-1"], 400),
        (["x"], 400),
        (["1_0"], 400),
        (["+10"], 400),
        ([""], 400),
        (["10", "11"], 400),
        (["9" * 15], 413),
        (["9" * 5000], 400),
        ([str(16 * 2**20 + 1)], 413),
        (["0"], 400),
        (["500"], 400),
        (["5"], 400),
    ],
)
def test_lengths_that_are_none(closed: Served, lengths: list[str], status: int) -> None:
    body = json.dumps(CHAT).encode()
    said = "".join(f"Content-Length: {length}\r\n" for length in lengths)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n{said}\r\n"
    found, _, told = parsed(closed.send(head.encode() + body))
    assert (found, bool(told["error"]["message"])) == (status, True)


def test_bodies_in_pieces_are_refused_and_large_ones_hear_why(closed: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
    assert parsed(closed.send(head + b"2\r\n{}\r\n0\r\n\r\n"))[0] == 411
    # More than the buffers between hold: it is still told.
    assert closed.ask("POST", "/v1/completions", b"x" * (17 * 2**20))[0] == 413
    assert closed.ask("POST", "/v1/completions", b"x" * (15 * 2**20))[0] == 400


# --- callers that never finish --------------------------------------------------------------------


@pytest.fixture
def impatient(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """A server in this process, whose times are short."""
    monkeypatch.setattr(handler, "HEAD_S", 1.0)
    monkeypatch.setattr(handler, "BODY_S", 1.0)
    monkeypatch.setattr(serving, "_MOST_CONNECTIONS", 8)
    kept: list[serving._Server] = []
    begin = serving._Server.__init__

    def remembered(self: serving._Server, *arguments: object) -> None:
        begin(self, *arguments)  # type: ignore[arg-type]
        kept.append(self)

    monkeypatch.setattr(serving._Server, "__init__", remembered)
    listening = listen("127.0.0.1", 0)
    there = threading.Event()
    options = ServeOptions(str(tiny_model), None, 2, 0.0, 1.0, False)
    thread = threading.Thread(target=serve, args=(options, listening, there.set))
    thread.start()
    assert there.wait(60)
    running = Served(f"{listening.address}/v1", None, None, None)  # type: ignore[arg-type]
    running.server = kept[0]  # type: ignore[attr-defined]
    yield running
    kept[0].shutdown()
    thread.join()


def test_slow_callers_are_sent_away_as_a_whole_and_hold_up_nobody(impatient: Served) -> None:
    lines = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"
    slow = [(impatient.connect(), text) for text in (b"G", b"POST / HTTP/1.1\r\nHost: loc", lines)]
    begun = time.monotonic()
    for client, text in slow:
        client.sendall(text)
    assert impatient.ask("POST", ROUTES[0][1], CHAT)[0] == 200
    # A byte now and then does not make it longer.
    while time.monotonic() - begun < 1.2:
        for client, _ in slow:
            try:
                client.sendall(b"a")
            except ConnectionError:
                break
        time.sleep(0.1)
    for client, _ in slow:
        client.settimeout(5)
        assert parsed(received(client))[0] == 408
        client.close()
    assert time.monotonic() - begun < 8


def test_however_many_wait_one_that_asks_is_answered(impatient: Served) -> None:
    idle: list[socket.socket] = []
    for _ in range(40):
        idle.append(impatient.connect())
        idle[-1].sendall(b"GET /")
    begun = time.monotonic()
    assert impatient.ask("POST", ROUTES[0][1], CHAT)[0] == 200
    assert time.monotonic() - begun < 5
    for client in idle:
        client.close()


@pytest.mark.slow
def test_where_all_wait_for_answers_another_is_told_so(impatient: Served) -> None:
    never = {"logit_bias": {"2": -100}}  # the token at which it would end
    endless = json.dumps({**CHAT, **never, "max_tokens": 10**6, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(endless)}\r\n\r\n"
    busy: list[socket.socket] = []
    for _ in range(8):
        busy.append(impatient.connect())
        busy[-1].sendall(head.encode() + endless)
        assert busy[-1].recv(12) == b"HTTP/1.0 200"
    assert parsed(impatient.send(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"))[0] == 503
    for client in busy:
        client.close()
    time.sleep(1)
    assert impatient.ask("GET", "/health")[0] == 200


def test_a_model_that_failed_begins_anew(
    impatient: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    impatient.server._generator.requests.put("garbage")  # type: ignore[attr-defined]
    time.sleep(0.5)
    assert impatient.ask("POST", ROUTES[0][1], CHAT)[0] == 200
    assert impatient.ask("GET", "/health")[2] == {"status": "ok"}
    said = capfd.readouterr().err
    assert said.count("the model failed") == 1
    assert "Traceback" not in said
