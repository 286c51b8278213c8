"""Uploading, against a stand-in for the Hub that speaks its HTTP."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tiny import run_allhands, write_adapter, write_model


class Hub(ThreadingHTTPServer):
    """Keeps what it was told; ``refuse`` is a status for every request, ``public`` what it says of
    repositories.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.created: list[dict[str, Any]] = []
        self.files: dict[str, bytes] = {}
        self.summary = ""
        self.refuse = 0
        self.public = False

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, content: Any, status: int = 200) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        hub: Any = self.server
        if hub.refuse:
            return self.answer({"error": "refused"}, hub.refuse)
        return self.answer(
            {"id": "me/mine", "sha": "0" * 40, "private": not hub.public, "siblings": []}
        )

    def do_POST(self) -> None:
        hub: Any = self.server
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if hub.refuse:
            return self.answer({"error": "refused"}, hub.refuse)
        if self.path == "/api/repos/create":
            hub.created.append(json.loads(body))
            return self.answer({"url": f"{hub.address}/me/mine"})
        if self.path.startswith("/api/models/me/mine/preupload/"):
            paths = [file["path"] for file in json.loads(body)["files"]]
            return self.answer(
                {
                    "files": [
                        {"path": p, "uploadMode": "regular", "shouldIgnore": False} for p in paths
                    ]
                }
            )
        if self.path.startswith("/api/models/me/mine/commit/"):
            for line in map(json.loads, body.splitlines()):
                if line["key"] == "header":
                    hub.summary = line["value"]["summary"]
                else:
                    hub.files[line["value"]["path"]] = base64.b64decode(line["value"]["content"])
            return self.answer(
                {"commitUrl": f"{hub.address}/me/mine/commit/1", "commitOid": "1" * 40}
            )
        return self.answer({})


@contextmanager
def hub() -> Iterator[Hub]:
    server = Hub()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def upload(server: Hub, *words: str | Path, home: Path) -> Any:
    environ = {
        "HF_ENDPOINT": server.address,
        "HF_TOKEN": "hf_stand_in",
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": "0",
    }
    return run_allhands("upload", *words, env=environ)


@pytest.mark.parametrize("private", [False, True])
def test_a_directory_becomes_one_commit_without_what_a_run_keeps_for_itself(
    tmp_path: Path, private: bool
) -> None:
    run = write_adapter(write_model(tmp_path / "base"), tmp_path / "run")
    for hidden in ("checkpoints/step-1/state.json", "logs/rank-0.log", "events.jsonl", ".draft-1"):
        (run / hidden).parent.mkdir(parents=True, exist_ok=True)
        (run / hidden).write_text("mine")
    with hub() as server:
        words = ["--private"] if private else []
        done = upload(server, run, "--to", "me/mine", *words, home=tmp_path / "home")
        assert done.returncode == 0, done.stderr
        assert f"uploaded: {server.address}/me/mine" in done.stdout
        # Said in two ways by different versions of the client.
        asked = server.created[0]
        assert (asked.get("visibility") == "private" or bool(asked.get("private"))) == private
        assert server.created[0]["name"] == "mine"
        assert server.files == {
            name: (run / name).read_bytes()
            for name in ("adapters.safetensors", "adapter_config.json")
        }
        assert server.summary == "Upload with allhands"


def test_a_public_repository_gets_nothing_that_should_be_private(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    with hub() as server:
        server.public = True
        done = upload(server, base, "--to", "me/mine", "--private", home=tmp_path / "home")
        assert done.returncode == 4
        assert "there already, and public" in done.stderr
        assert server.files == {}


@pytest.mark.slow
def test_what_the_hub_and_we_refuse_is_one_message(tmp_path: Path) -> None:
    base = write_model(tmp_path / "base")
    with hub() as server:
        for words, said in (
            ([base, "--to", "mine"], "no name on the Hub"),
            ([tmp_path, "--to", "me/mine"], "no model and no adapter"),
            ([tmp_path / "nowhere", "--to", "me/mine"], "no such directory"),
        ):
            done = upload(server, *words, home=tmp_path / "home")
            assert done.returncode in (2, 4)
            assert said in done.stderr
        assert server.created == []
        server.refuse = 403
        done = upload(server, base, "--to", "me/mine", home=tmp_path / "home")
        assert done.returncode == 4
        assert "hf auth login" in done.stderr
        assert "Traceback" not in done.stderr
    done = upload(server, base, "--to", "me/mine", home=tmp_path / "home")
    assert done.returncode == 4
    assert "check the connection" in done.stderr
    assert "Traceback" not in done.stderr
