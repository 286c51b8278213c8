"""What a process on the simulated Mac asked for that a Mac does not have, and who asked.

Only requests of allhands itself are written down: Python and packages are built for the system that
they run on.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig

_OWN = os.path.dirname(os.path.abspath(__file__))
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib")})
_PACKAGES = tuple({sysconfig.get_path(name) for name in ("purelib", "platlib")})
_open, _write, _close = os.open, os.write, os.close


def caller() -> str | None:
    """``module:line`` of allhands that asks now; ``None`` if a package or Python itself asks."""
    frame = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename
        if path.startswith(_PACKAGES):
            return None
        if not path.startswith((_OWN, "<", *_LIBRARIES)):
            _, found, place = path.rpartition("/src/allhands/")
            return f"{place}:{frame.f_lineno}" if found else None
        frame = frame.f_back
    return None


def note(kind: str, what: object, where: str) -> None:
    """Write one request into the file that ``SIMULATED_MAC_JOURNAL`` names."""
    line = json.dumps({"kind": kind, "what": str(what), "where": where}) + "\n"
    file = _open(os.environ["SIMULATED_MAC_JOURNAL"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    _write(file, line.encode())
    _close(file)
