"""What a Python interpreter has of allhands: run by that interpreter, on any computer, as text after ``-c``.

The standard library of Python 3.8 and nothing else, in ASCII: its text is sent with that of
:mod:`allhands.runtime.versions`, from which it takes names, behind it.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from typing import Any

from allhands.runtime.versions import fingerprint

# What a rank does first. MLX last: it needs the drivers.
STARTS = "import allhands.cluster.agent; import mlx.core"
_STARTS_S = 60


def versions(names: list[str]) -> dict[str, str]:
    """Versions of those packages that are installed."""
    found: dict[str, str] = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def problem() -> str | None:
    """Why a rank could not be started by this interpreter; ``None`` if it could."""
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    try:
        done = subprocess.run(
            [sys.executable, *safe, "-c", STARTS],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_STARTS_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"importing allhands and MLX takes more than {_STARTS_S} s"
    lines = [line.strip() for line in done.stderr.decode(errors="replace").splitlines() if line.strip()]
    return None if done.returncode == 0 else (lines or [f"Python ended with code {done.returncode}"])[-1][:300]


def look(names: list[str]) -> dict[str, Any]:
    """Everything about this interpreter."""
    spec = importlib.util.find_spec("allhands")
    origin = spec.origin if spec is not None else None
    return {
        "python": sys.executable,
        "version": list(sys.version_info[:3]),
        "versions": versions(names),
        "fingerprint": fingerprint(os.path.dirname(origin)) if origin else None,
        "problem": problem() if origin else "allhands is missing",
    }


def tell(token: str, names: list[str]) -> None:
    """Print it in a line that begins with ``token``."""
    sys.stdout.write(f"\n{token} {json.dumps(look(names))}\n")


if __name__ == "__main__":
    # Nothing is imported from the directory that this happens to start in.
    sys.path[:] = [path for path in sys.path if path]
    tell(sys.argv[1], sys.argv[2:])
