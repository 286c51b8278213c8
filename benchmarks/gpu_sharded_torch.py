"""One rank of ``gpu_sharded.py`` on PyTorch, started by torchrun: FSDP2, eager or by torch.compile
of each block.

    python -m torch.distributed.run --standalone --nproc-per-node 2 benchmarks/gpu_sharded_torch.py
    \\
        '{"shape": {...}, "row": 1024, "rows": 4, "warmup": 3, "steps": 10, "compiled": true,
        "checkpoint": false,
          "out": "PATH"}'

The model of transformers is made without memory, divided, and only then given memory and numbers:
no rank ever has all of it. Rank 0 writes what all ranks have measured to ``out``, as JSON.
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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM


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
        out = Path(asked["out"])
        draft = out.with_suffix(".draft")
        draft.write_text(json.dumps(found), encoding="utf-8")
        draft.replace(out)
    dist.barrier()
    dist.destroy_process_group()


def build(asked: dict[str, Any], device: torch.device) -> Any:
    """This rank's part of the model: bfloat16 on a GPU, float32 on a CPU, as allhands has it there."""
    config = LlamaConfig(
        **asked["shape"],
        rms_norm_eps=1e-5,
        attn_implementation="sdpa",
        use_cache=False,
        max_position_embeddings=4096,
    )
    torch.set_default_dtype(torch.bfloat16 if device.type == "cuda" else torch.float32)
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
    torch.set_default_dtype(torch.float32)
    layers = model.model.layers
    for number in range(len(layers)):
        layer = layers[number]
        if asked["checkpoint"]:
            layer = checkpoint_wrapper(layer, preserve_rng_state=False)
        if asked["compiled"]:
            layer = torch.compile(layer)
        layers[number] = layer
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device=device)
    # Angles are no parameters, and are as empty as these.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor), name
            own = parameter.to_local()
            own.fill_(1.0) if "norm" in name else own.normal_(0.0, 0.02)
    return model.train()


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The mean loss, in float32."""
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def measure(asked: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """Every rank returns the same."""
    cuda, size = device.type == "cuda", dist.get_world_size()
    model = build(asked, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.01, fused=cuda)
    loss_function = torch.compile(loss_of) if asked["compiled"] else loss_of
    generator = torch.Generator().manual_seed(1000 + dist.get_rank())
    total, shape = asked["warmup"] + asked["steps"], (asked["rows"], asked["row"] + 1)
    vocabulary = asked["shape"]["vocab_size"]
    batches = [
        torch.randint(0, vocabulary, shape, generator=generator).to(device) for _ in range(total)
    ]

    def step(ids: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_function(model(input_ids=ids[:, :-1]).logits, ids[:, 1:])
        loss.backward()
        optimizer.step()
        return loss.detach()

    def wait() -> float:
        dist.barrier()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    begun = wait()
    losses = [step(ids) for ids in batches[:1]]
    first = wait() - begun
    if cuda:
        torch.cuda.reset_peak_memory_stats()  # what compiling has taken is not what a step takes
    losses += [step(ids) for ids in batches[1 : asked["warmup"]]]
    begun = wait()
    losses += [step(ids) for ids in batches[asked["warmup"] :]]
    seconds = wait() - begun
    peaks = (
        (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if cuda else (0, 0)
    )
    mean = torch.stack(losses)
    dist.all_reduce(mean)
    everyone: list[Any] = [None] * size
    dist.all_gather_object(everyone, (seconds, first, *peaks))
    return {
        "seconds": max(each[0] for each in everyone),
        "first_step_s": max(each[1] for each in everyone),
        "peak_bytes": [each[2] for each in everyone],
        "reserved_bytes": [each[3] for each in everyone],
        "losses": (mean / size).tolist(),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
    }


if __name__ == "__main__":
    main()
