"""The program that the doctor runs on every computer: it is sent over ssh, and answers requests in
lines of JSON.

The program (:func:`program`) is one text, joined from this module, some modules of
:mod:`allhands.runtime` and those of :mod:`allhands.cluster.probes`. It needs only Python 3.9.
:data:`BOOTSTRAP` is given to ``python -c``. It reads the first line of its input (``TOKEN
LENGTH``), then the text, and calls :func:`converse`. It runs on any Python since 2.7, so that an
old Python can report its version.

Each request is a line of JSON. Each answer is a line with the token and JSON; the token
distinguishes it from what a login shell or a library prints. The program ends when its input ends,
or after a long time without a request.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from allhands.cluster.probes.computer import (
    ON_MAC,
    disk_facts,
    gpu_facts,
    limit_facts,
    memory_facts,
    mpi_facts,
    processor_facts,
    python_facts,
    rdma_facts,
    starts_fact,
    system_facts,
    variable_facts,
)
from allhands.cluster.probes.files import look, send, staged_bytes
from allhands.cluster.probes.mac import mac_facts, mac_interfaces
from allhands.cluster.probes.network import linux_firewalls, linux_interfaces, route_fact
from allhands.cluster.probes.reach import Listeners, login_fact, reach_fact
from allhands.cluster.probes.tools import gathered
from allhands.cluster.probes.trees import tree_fact
from allhands.runtime.threads import side_by_side

# The oldest Python that can run the program.
OLDEST = (3, 9)
# Like `python -`, it runs a program from its input, which the user's doctor sends over the user's
# ssh. Unlike there, the input stays open for requests. Nothing is imported from the directory in
# which it starts.
BOOTSTRAP = """
import sys
sys.path = [place for place in sys.path if place]
import json
token, length = sys.stdin.readline().split()
if sys.version_info < (3, 9):
    print(token + " " + json.dumps({"old": sys.version.split()[0], "python": sys.executable}))
    sys.stdout.flush()
else:
    import types
    name = "allhands_probe"
    sys.modules[name] = program = types.ModuleType(name)  # in which dataclasses look for names
    exec(compile(sys.stdin.read(int(length)), name, "exec"), program.__dict__)
    program.converse(token)
"""
_PARTS = (
    *("runtime/versions", "runtime/callers", "runtime/threads"),
    *(
        f"cluster/probes/{part}"
        for part in ("tools", "computer", "network", "mac", "trees", "reach", "files")
    ),
    "cluster/probe",
)
_SIDE_BY_SIDE = 32  # connections or logins at the same time
# After this time without a request, or without output during one, the system ends the program.
_IDLE_S = 120
_PROGRESS_S = 0.5


_TEXT: list[str] = []
_ONE_AT_A_TIME = threading.Lock()


def program() -> str:
    """Return the text to send: ASCII, for Python 3.9 or later."""
    # Threads look at several computers at the same time, but only one may parse: Python 3.11 mixes
    # up the depths of two parsers.
    with _ONE_AT_A_TIME:
        if not _TEXT:
            _TEXT.append(joined_text())
        return _TEXT[0]


def joined_text() -> str:
    """Join the modules of the program into one text, without their imports of each other."""
    import ast
    from pathlib import Path

    texts = ["from __future__ import annotations\n"]
    for part in _PARTS:
        path = Path(__file__).parents[1] / f"{part}.py"
        lines = path.read_text(encoding="ascii").splitlines(keepends=True)
        for node in ast.parse("".join(lines)).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in (
                "__future__",
                "allhands",
            ):
                lines[node.lineno - 1 : node.end_lineno] = ["\n"] * (
                    (node.end_lineno or node.lineno) - node.lineno + 1
                )
        texts += lines
    return "".join(texts)


def converse(token: str) -> None:
    """Answer the requests on standard input until it ends."""
    listeners: list[Listeners] = []

    def say(**fields: Any) -> None:
        signal.alarm(_IDLE_S)
        sys.stdout.write(f"{token} {json.dumps(fields)}\n")
        sys.stdout.flush()

    say(ready=True)
    for line in sys.stdin:
        signal.alarm(_IDLE_S)
        say(**answer_to(json.loads(line), say, listeners))
    for one in listeners:
        one.close()


def answer_to(
    request: dict[str, Any], say: Callable[..., None], listeners: list[Listeners]
) -> dict[str, Any]:
    """Return the answer to one request; its ``kind`` selects the probe.

    Args:
        say: called with fields to send before the answer, such as progress.
        listeners: gets the sockets that stay open after the answer, for the kind ``listen``.
    """
    kind = request["kind"]
    if kind == "time":
        return {"time": time.time()}
    if kind == "facts":
        return facts(request)
    if kind == "trees":
        return {"trees": trees(request, say)}
    if kind == "listen":
        listeners.append(Listeners(request["secret"]))
        return listeners[-1].open(request["addresses"])
    if kind == "reach":
        secret, limit = request["secret"], request["timeout_s"]
        return {
            "reached": side_by_side(
                lambda target: reach_fact(target, secret, limit), request["targets"], _SIDE_BY_SIDE
            )
        }
    if kind == "logins":
        limit = request["timeout_s"]
        return {
            "logins": side_by_side(
                lambda login: login_fact(login, limit), request["logins"], _SIDE_BY_SIDE
            )
        }
    if kind == "staged":
        return {"bytes": staged_bytes(request["roots"])}
    if kind in ("look", "send"):
        return copied(request, say)
    return {"unknown": kind}


def copied(request: dict[str, Any], say: Callable[..., None]) -> dict[str, Any]:
    """Do one step of ``allhands cluster sync``; return its result, or the error if it fails."""
    try:
        return (look if request["kind"] == "look" else send)(
            request, lambda done: say(progress=done)
        )
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # nobody listens any more
            raise
        path = os.fsdecode(error.filename or "")
        return {
            "error": {
                "number": error.errno or 0,
                "reason": error.strerror or str(error),
                "path": path,
            }
        }


def facts(request: dict[str, Any]) -> dict[str, Any]:
    """Return all facts about this computer that need no other computer.

    Facts that cannot be found, or take longer than ``timeout_s`` of the request, are named under
    ``missing``.

    Args:
        request: may also have ``cwd``, the working directory; ``below_home``, a path below the home
            directory to use if ``cwd`` does not exist; ``places``, paths by role whose disks are
            examined; ``peers``, addresses whose routes are looked up; and ``only``, the names of
            the facts to collect.
    """
    found: dict[str, Any] = {"cwd_error": None}
    if request.get("cwd"):
        try:
            os.chdir(os.path.expanduser(request["cwd"]))
        except OSError as error:
            found["cwd_error"] = error.strerror
            if "below_home" in request:
                with contextlib.suppress(OSError):
                    os.chdir(os.path.join(os.path.expanduser("~"), request["below_home"]))
    found["cwd"] = os.getcwd()
    collectors: dict[str, Callable[[], Any]] = {
        "system": system_facts,
        "python": python_facts,
        "starts": starts_fact,
        "processor": processor_facts,
        "memory": memory_facts,
        "gpus": gpu_facts,
        "limits": limit_facts,
        "variables": variable_facts,
        "disks": lambda: disk_facts(request.get("places", {})),
        "mpi": mpi_facts,
        "rdma": rdma_facts,
        "interfaces": mac_interfaces if ON_MAC else linux_interfaces,
        "routes": lambda: [route_fact(ip) for ip in request.get("peers", [])],
    }
    collectors.update({"mac": mac_facts} if ON_MAC else {"firewalls": linux_firewalls})
    only = request.get("only", collectors)
    asked = {name: collector for name, collector in collectors.items() if name in only}
    values, errors = gathered(asked, request["timeout_s"])
    return {**found, **values, "missing": errors}


def trees(request: dict[str, Any], say: Callable[..., None]) -> list[dict[str, Any]]:
    """Return facts about the directories of ``request["sources"]``, a mapping of roles to paths.

    Progress is sent in bytes.
    """
    told = time.monotonic()

    def progress(done: int) -> None:
        nonlocal told
        if time.monotonic() >= told + _PROGRESS_S:
            told = time.monotonic()
            say(progress=done)

    return [
        tree_fact(role, source, request["hashed"], progress)
        for role, source in request["sources"].items()
    ]
