"""A rank for tests of several computers: ``remote_rank.py KIND SECONDS``; marks and beats by hand,
quick to start.

``plain`` waits; ``ring`` also forms MLX's ring; ``child`` also leaves a process in a group of its
own.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    """Work as the arguments say and end with code 3 as rank 1, 75 after the word "regroup", else 0."""
    kind, seconds = sys.argv[1], float(sys.argv[2])
    rank, run_dir = os.environ["ALLHANDS_RANK"], Path(os.environ["ALLHANDS_RUN_DIR"])
    facts = {
        "arguments": sys.argv[3:],
        "environment": {
            name: value
            for name, value in os.environ.items()
            if name.startswith(("ALLHANDS_", "TEST_"))
        },
        "directory": os.getcwd(),
        "python": sys.executable,
        "mode": run_dir.stat().st_mode & 0o777,
        "peers": json.loads(Path(os.environ["MLX_HOSTFILE"]).read_text()),
    }
    print("facts", json.dumps(facts), flush=True)
    (run_dir / f"rank-{rank}.ready").touch()
    (run_dir / f"rank-{rank}.busy").touch()
    if kind == "child":
        child = subprocess.Popen(["sleep", "1000"], process_group=0)
        print("child", child.pid, flush=True)
    if kind == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if kind == "ring":
        print("sum", ring_sum(), file=sys.stderr, flush=True)
    (run_dir / f"rank-{rank}.started").touch()
    work(rank, run_dir, time.monotonic() + seconds)
    if rank == "1":
        Path(os.environ["ALLHANDS_LOG_DIR"], "error-rank-1.json").write_text(
            '{"type": "Boom", "message": "bang"}'
        )
        sys.exit(3)


def ring_sum() -> float:
    """The sum of rank + 1 over MLX's ring."""
    import mlx.core as mx

    group = mx.distributed.init(strict=True, backend="ring")
    return mx.distributed.all_sum(mx.array(group.rank() + 1.0), group=group, stream=mx.cpu).item()


def work(rank: str, run_dir: Path, deadline: float) -> None:
    """Beat until the deadline."""
    count = 0
    while time.monotonic() < deadline:
        if (run_dir / "regroup").exists():
            sys.exit(75)
        count += 1
        line = json.dumps({"step": count // 2, "phase": "compute", "count": count})
        (run_dir / f"rank-{rank}.beat").write_text(line.ljust(128))
        time.sleep(0.05)


if __name__ == "__main__":
    main()
