"""Why a command has failed, from what it said: programs tell it in one line, and what follows from it in the last."""

from __future__ import annotations

import re
from dataclasses import dataclass

from allhands.cluster.setup.shell import CommandDone

_NO_NETWORK = "let it reach the package index, or name a mirror in its pip.conf (for uv: uv.toml)"
_MEND = "mend that Python, install uv there, or name another Python with --python"
# Of pip and uv. A connection may break and come back: only where the last word is that nothing was found.
_BROKEN = re.compile(r"connection broken by|Max retries exceeded|error sending request|Failed to fetch|dns error")
_NOT_FOUND = re.compile(r"No matching distribution|Could not find a version|Max retries|Request failed|Failed to fetch")
_WHY_BROKEN = re.compile(
    r"Temporary failure in name resolution|Name or service not known|nodename nor servname provided|"
    r"Network is unreachable|No route to host|Connection refused|(?:connection|connect|read) timed out|"
    r"certificate verify failed|Tunnel connection failed[^')]*",
    re.IGNORECASE,
)
_DEBIANS_PACKAGE = re.compile(r"apt install (\S+-venv)")


@dataclass(frozen=True)
class Cause:
    """What was wrong, and what to do; an empty hint: nothing better than to try by hand."""

    text: str
    hint: str = ""


def cause_of(done: CommandDone) -> Cause:
    """What made a command fail."""
    said, last = f"{done.errors}\n{done.output}", done.last_line
    if _BROKEN.search(said) and _NOT_FOUND.search(last):
        why = _WHY_BROKEN.search(said)
        return Cause(f"it cannot reach the package index{f': {why.group()}' if why else ''} ({last})", _NO_NETWORK)
    if "ensurepip is not" in said:
        package = _DEBIANS_PACKAGE.search(said)
        hint = f"install it there: sudo apt install {package.group(1)}" if package else _MEND
        return Cause("its Python has no ensurepip, which puts pip into an environment", hint)
    if "'ensurepip'" in last:
        return Cause("ensurepip of its Python does not work, which puts pip into an environment", _MEND)
    return Cause(last)
