"""A web page of somebody else's in a real browser, against ``serve`` and the dashboard on the same
computer.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from dashboards import dashboard
from serving import served
from test_report_browser import CHROMIUM, playwright, pytestmark  # noqa: F401 - the marks
from written_runs import write_run

# All that a page can try without help of the person; what it gets to read.
TRIES = """async ([server, token]) => {
  const body = JSON.stringify({messages: [{role: "user", content: "What is dew?"}], max_tokens: 2});
  const known = token ? {Authorization: "Bearer " + token} : {};
  const json = {"Content-Type": "application/json", ...known};
  const got = {};
  const attempt = async (name, doing) => { try { got[name] = await doing(); } catch (error) { got[name] = null; } };
  const at = server + "/v1/chat/completions";
  const read = answer => answer.ok ? answer.text() : null;
  await attempt("json", async () => read(await fetch(at, {method: "POST", headers: json, body})));
  await attempt("plain", async () => read(await fetch(at, {method: "POST", body, headers: known})));
  await attempt("blind", async () => (await fetch(at, {method: "POST", mode: "no-cors", body})).text());
  await attempt("models", async () => read(await fetch(server + "/v1/models", {headers: known})));
  await attempt("health", async () => read(await fetch(server + "/health", {headers: known})));
  await attempt("runs", async () => read(await fetch(server + "/api/runs")));
  const stop = {method: "POST", headers: {"X-Allhands": "stop"}};
  await attempt("stop", async () => read(await fetch(server + "/api/stop?run=run", stop)));
  const load = kind => new Promise((done, failed) => {
    const tag = document.createElement(kind);
    tag.onload = () => done("loaded");
    tag.onerror = failed;
    tag.src = server + "/v1/models";
    document.body.append(tag);
  });
  await attempt("script", () => load("script"));
  return got;
}"""
FORM = """server => {
  const form = document.createElement("form");
  form.method = "POST"; form.enctype = "text/plain"; form.action = server + "/v1/chat/completions";
  const field = document.createElement("input");
  field.name = '{"messages":[{"role":"user","content":"hi"}],"user":"'; field.value = '"}';
  form.append(field); document.body.append(form); form.submit();
}"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>theirs</title><body>")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def elsewhere() -> Iterator[int]:
    """The port of a server of somebody else's."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Page) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def opened(browser: Any, address: str) -> Any:
    page = browser.new_context().new_page()
    page.goto(address)
    return page


@pytest.mark.slow
@pytest.mark.parametrize("name", ["localhost", "127.0.0.1"])
def test_a_page_of_another_origin_gets_nothing(
    browser: Any, elsewhere: int, tiny_model: Path, name: str
) -> None:
    with served("--model", tiny_model) as running:
        server = f"http://127.0.0.1:{running.port}"
        page = opened(browser, f"http://{name}:{elsewhere}/")
        got = page.evaluate(TRIES, [server, None])
        assert {key: value for key, value in got.items() if value} == {}
        page.evaluate(FORM, server)
        page.wait_for_url(f"{server}/**")
        assert "may not send requests" in page.content()
        # Not even unread: the model was never asked.
        assert '" 200' not in running.said()
        assert running.ask("GET", "/v1/models")[0] == 200
        # What a person opens is answered.
        assert "tiny" in opened(browser, f"{server}/v1/models").content()


@pytest.mark.parametrize("token", [None, "correct-horse"])
def test_a_page_that_may_ask_works(
    browser: Any, elsewhere: int, tiny_model: Path, token: str | None
) -> None:
    words = [
        "--allow-origin",
        f"http://localhost:{elsewhere}",
        *(["--token", token] if token else []),
    ]
    with served("--model", tiny_model, *words) as running:
        server = f"http://127.0.0.1:{running.port}"
        got = opened(browser, f"http://localhost:{elsewhere}/").evaluate(TRIES, [server, token])
        assert "choices" in got["json"]
        assert "choices" in got["plain"]
        assert "tiny" in got["models"]
        assert "ok" in got["health"]
        assert got["script"] is None
        # The same page under another name is another origin.
        got = opened(browser, f"http://127.0.0.1:{elsewhere}/").evaluate(TRIES, [server, token])
        assert {key: value for key, value in got.items() if value} == {}


def test_the_dashboard_tells_other_pages_nothing(
    browser: Any, elsewhere: int, tmp_path: Path
) -> None:
    write_run(tmp_path / "run")
    with dashboard(tmp_path) as running:
        server = running.address.rstrip("/")
        page = opened(browser, f"http://localhost:{elsewhere}/")
        got = page.evaluate(TRIES, [server, None])
        assert {key: value for key, value in got.items() if value} == {}
        # A link to it is followed, and its own page works.
        page.evaluate("server => { location = server + '/' }", server)
        page.wait_for_selector("tbody tr")
        assert "run" in page.content()
