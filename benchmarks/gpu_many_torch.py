"""One rank of ``gpu_many.py`` on PyTorch, started by torchrun: DistributedDataParallel, eager or by
torch.compile.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/gpu_many_torch.py \\
        '{"peer": "torch", "work": {...}, "rows": 8, "steps": 15, "out": "PATH"}'

Rank 0 writes what all ranks have measured to ``out``, as JSON.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpu_many import batch_of
from gpu_torch import build, make_optimizer, train
from rounds import WARM_UP, in_rounds
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Measure what the first argument describes."""
    asked = json.loads(sys.argv[1])
    if sys.platform == "linux":
        # torchrun gives its ranks sessions of their own: killed for want of time, it would leave
        # them behind.
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)
    cuda, local = torch.cuda.is_available(), int(os.environ["LOCAL_RANK"])
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", **({"device_id": device} if cuda else {}))
    found = measure(asked, device)
    if dist.get_rank() == 0:
        Path(asked["out"]).write_text(
            json.dumps({**found, "backend": dist.get_backend()}), encoding="utf-8"
        )
    dist.destroy_process_group()


def measure(asked: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Every rank returns the same."""
    rank, size, cuda = dist.get_rank(), dist.get_world_size(), device.type == "cuda"
    model = build(asked["work"], str(device))
    optimizer = make_optimizer(model)
    called: Any = model
    if size > 1:
        # The only buffers are constants.
        called = DistributedDataParallel(
            model,
            device_ids=[device.index] if cuda else None,
            gradient_as_bucket_view=True,
            broadcast_buffers=False,
        )
    if asked["peer"] == "torch-compiled":
        called = torch.compile(called)
    ids = torch.from_numpy(batch_of(asked["work"], asked["rows"], rank)).to(device, torch.int64)

    counted: list[float] = []

    def before(number: int) -> None:
        if number == 1 and cuda:
            torch.cuda.reset_peak_memory_stats()
        dist.barrier()
        if cuda:
            torch.cuda.synchronize()
        if number == len(WARM_UP):
            counted.append(time.time())

    times, means = in_rounds(
        lambda more: train(called, optimizer, ids, more), asked["steps"], before=before
    )
    losses = [float(mean) for mean in means]
    counted.append(time.time())
    everyone: list[Any] = [None] * size
    dist.all_gather_object(
        everyone, (times, losses, torch.cuda.max_memory_allocated() if cuda else 0)
    )
    return {
        "times": [one[0] for one in everyone],
        # A rank's own mean; all have the same number of tokens.
        "losses": [
            sum(values) / size for values in zip(*(one[1] for one in everyone), strict=True)
        ],
        "peak_bytes": [one[2] for one in everyone],
        "counted": counted,
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }


if __name__ == "__main__":
    main()
