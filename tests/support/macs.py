"""Child processes on a simulated Mac of 32 GB, see ``simulated_mac``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import allhands

DOUBLE = Path(__file__).with_name("simulated_mac")
SOURCE = Path(allhands.__file__).parents[1]
# As /var/folders/zz/zyxvpxvq6csfxvn_n0000000000000/T: of a local socket's path little is left.
_TEMPORARY_CHARACTERS = 48


class Mac:
    """A simulated Mac; :meth:`requests` has what allhands asked for that a Mac does not have."""

    def __init__(self, temporary: Path, place: Path) -> None:
        self._journal = place / "journal"
        paths = os.pathsep.join(map(str, (DOUBLE, SOURCE)))
        linux = ("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONSTARTUP")
        self.environment = {
            **{name: value for name, value in os.environ.items() if name not in linux},
            "HOME": str(place),
            "MLX_DISABLE_COMPILE": "1",  # a Mac's GPU needs no C++ compiler, and this CPU one
            "PYTHONPATH": paths,
            "SIMULATED_MAC_JOURNAL": str(self._journal),
            "TMPDIR": str(temporary),
        }

    def python(self, *words: str | Path, timeout_s: float = 120) -> str:
        """Run Python with these words, and return its output; an assertion fails if it fails."""
        done = subprocess.run(
            [sys.executable, *map(str, words)],
            capture_output=True,
            text=True,
            env=self.environment,
            timeout=timeout_s,
            check=False,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}\n{self.requests()}"
        return done.stdout

    def allhands(self, *words: str | Path) -> str:
        """Run a command of allhands, as :meth:`python` does."""
        return self.python("-m", "allhands", *words)

    def requests(self) -> Sequence[dict[str, str]]:
        """Return the requests so far: ``kind``, ``what``, ``where``."""
        lines = self._journal.read_text().splitlines() if self._journal.exists() else []
        return [json.loads(line) for line in lines]


@contextmanager
def simulated_mac(place: Path) -> Iterator[Mac]:
    """Give a Mac with its home at ``place``, and a temporary directory as long as macOS has it."""
    start = Path(tempfile.mkdtemp(dir="/tmp"))
    temporary = start / ("x" * (_TEMPORARY_CHARACTERS - len(str(start)) - 1))
    temporary.mkdir()
    try:
        yield Mac(temporary, place)
    finally:
        shutil.rmtree(start)
