"""The command ``allhands`` in processes of its own, to be mistreated; what every bad end must have
in common.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from allhands.observe.metrics import RunHistory, read_metrics

_MARK = "ALLHANDS_TEST_MARK"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def environment() -> dict[str, str]:
    """This process's variables, also while another thread changes one (pytest names the test that
    runs).
    """
    return {name: value for name in list(os.environ) if (value := os.environ.get(name)) is not None}


class Job:
    """A running command line. Everything it starts carries a mark of its own in the environment."""

    def __init__(
        self,
        *arguments: str | Path,
        prefix: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
    ) -> None:
        self.mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [*prefix, sys.executable, "-m", "allhands", *map(str, arguments)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**environment(), "OPENBLAS_NUM_THREADS": "1", **(env or {}), _MARK: self.mark},
            cwd=cwd,
            start_new_session=True,
        )
        self.out, self.err = "", ""
        self._finished = False

    def finish(self, timeout: float = 60.0) -> int:
        """Wait for the end, check that no process is left and no traceback was shown; the exit
        code.
        """
        if self._finished:
            return self.process.returncode
        try:
            self.out, self.err = self.process.communicate(timeout=timeout)
            until(lambda: not self.processes(), 5.0, "some process is left")
        except (subprocess.TimeoutExpired, AssertionError):
            self.kill()
            raise
        self.out = _ESCAPES.sub("", self.out)
        assert "Traceback" not in self.out + self.err, self.out + self.err
        self._finished = True
        return self.process.returncode

    def fails(self, code: int, *words: str, timeout: float = 60.0) -> str:
        """Wait for the end with ``code`` and one error message, in which each of ``words`` stands;
        the message.
        """
        assert self.finish(timeout) == code, (self.process.returncode, self.out, self.err)
        text = self.out + self.err
        assert text.count("allhands: error: ") == 1, text
        message = text.partition("allhands: error: ")[2]
        assert all(word in message for word in words), (words, text)
        first = message.splitlines()[0]
        assert text.count(first) == 1, text
        assert "what to do: " in message, text
        return message

    def processes(self) -> dict[int, psutil.Process]:
        """Every living process of this job, by number."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get(_MARK) == self.mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found[process.pid] = process
        return found

    def rank(self, number: int) -> psutil.Process:
        """The process that works as this rank."""
        for process in self.processes().values():
            with contextlib.suppress(psutil.Error):
                env, line = process.environ(), process.cmdline()
                rank = env.get("ALLHANDS_RANK") or env.get("OMPI_COMM_WORLD_RANK")
                if rank == str(number) and not any(word.endswith("guard.py") for word in line):
                    return process
        raise AssertionError(f"there is no rank {number}")

    def signal(self, *numbers: int, pause_s: float = 0.3) -> None:
        """Send signals to the command itself, one after the other."""
        for number in numbers:
            self.process.send_signal(number)
            time.sleep(pause_s)

    def wait_for(self, event: str, directory: Path, count: int = 1) -> None:
        """Return when the run in ``directory`` has written so many events of a kind, or fail."""
        file = directory / "metrics.jsonl"

        def seen() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            return file.exists() and file.read_text().count(f'"event": "{event}"') >= count

        until(seen, 40.0, f"no {event}")

    def kill(self) -> None:
        """End whatever is left after a failed test."""
        for process in self.processes().values():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)
        if not self._finished:
            self.process.communicate()
            self._finished = True


def until(condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
    """Wait until ``condition`` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.02)


def run(*arguments: str | Path, timeout: float = 60.0, **options: Any) -> Job:
    """Run a command that must succeed."""
    job = Job(*arguments, **options)
    assert job.finish(timeout) == 0, (job.out, job.err)
    return job


def history(directory: Path) -> RunHistory:
    """The run's metrics: every line of the file must be whole."""
    for line in (directory / "metrics.jsonl").read_text().splitlines():
        json.loads(line)
    return read_metrics(directory)
