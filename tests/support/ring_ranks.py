"""Ranks of MLX's ring started by hand: no launcher of ours is between the test and the processes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from allhands.cluster.processes import reserve_ports


def allhands_command(*arguments: str | Path) -> list[str]:
    """The command line of ``allhands`` under this Python."""
    return [sys.executable, "-m", "allhands", *map(str, arguments)]


def run_ring(
    commands: Sequence[Sequence[str | Path]],
    *,
    present: int | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = 120,
) -> list[subprocess.CompletedProcess[str]]:
    """Run one command a rank, with the variables of ``mlx.launch``, and wait for all of them.

    Args:
        present: start only so many of the ranks that the hostfile promises.
        env: further variables, the same for every rank; ``{rank}`` in a value stands for the rank.
        timeout: seconds; then every process is killed and :class:`subprocess.TimeoutExpired`
            raised.
    """
    with contextlib.ExitStack() as stack:
        # The sockets stay open, not listening: the ring shares the port, strangers cannot.
        sockets, ports = reserve_ports(len(commands), shareable=True)
        for one in sockets:
            stack.enter_context(contextlib.closing(one))
        scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="ring-"))
        hostfile = Path(scratch, "hosts.json")
        hostfile.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in ports]))
        ranks = [
            subprocess.Popen(
                list(map(str, command)),
                env={
                    **os.environ,
                    "OPENBLAS_NUM_THREADS": "1",
                    "MLX_RANK": str(rank),
                    "MLX_HOSTFILE": str(hostfile),
                    **{name: value.format(rank=rank) for name, value in (env or {}).items()},
                },
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            for rank, command in enumerate(commands[:present])
        ]
        try:
            texts = [rank.communicate(timeout=timeout) for rank in ranks]
        finally:
            for rank in ranks:
                if rank.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(rank.pid, signal.SIGKILL)
                    rank.communicate()
    return [
        subprocess.CompletedProcess(rank.args, rank.returncode, out, err)
        for rank, (out, err) in zip(ranks, texts, strict=True)
    ]


def told_by_two(program: str, cases: Sequence[tuple[Any, ...]]) -> dict[tuple[Any, ...], Any]:
    """What two processes say of every case, which must be the same, one case after the other.

    A start costs more than ten cases. ``program`` is Python's; it is given the cases, and prints a
    list, as JSON.
    """
    done = run_ring([[sys.executable, "-c", program, json.dumps(cases)]] * 2)
    assert [(one.returncode, one.stderr) for one in done] == [(0, ""), (0, "")], [
        one.stderr[-1500:] for one in done
    ]
    assert done[0].stdout == done[1].stdout
    return dict(zip(cases, json.loads(done[0].stdout), strict=True))
