"""A dashboard that really runs, and requests to it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Dashboard:
    """Where it is, with the token if there is one, and its process."""

    address: str
    token: str | None
    process: subprocess.Popen[str]

    def ask(
        self, path: str, *, method: str = "GET", headers: dict[str, str] | None = None
    ) -> tuple[int, str, dict[str, str]]:
        """Status, body and headers of the answer; what is refused is an answer as well."""
        request = urllib.request.Request(
            self.address + path.lstrip("/"), method=method, headers=headers or {}
        )
        try:
            with urllib.request.urlopen(request, timeout=20) as answer:
                return answer.status, answer.read().decode(), dict(answer.headers)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(), dict(error.headers)

    def json(self, path: str, **how: Any) -> Any:
        status, text, _ = self.ask(path, **how)
        assert status == 200, text
        return json.loads(text)


@contextmanager
def dashboard(root: Path, *options: str) -> Iterator[Dashboard]:
    """Start it on a free port, and end it."""
    command = [sys.executable, "-m", "allhands", "dashboard", str(root), "--port", "0", *options]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.fullmatch(r"dashboard: (http://\S+?/)(?:\?token=(\S+))?\n", line)
            assert found, (
                line,
                process.poll(),
                process.stderr.read() if process.poll() is not None else "",
            )
            yield Dashboard(found[1], found[2], process)
        finally:
            process.terminate()
            process.wait(20)
