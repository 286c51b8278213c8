"""One measurement of ``gpu.py`` on PyTorch, with PEFT for adapters, eager or by torch.compile.

    python benchmarks/gpu_torch.py '{"peer": "torch", "work": {...}, "steps": 20}'

Prints one line of JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch
from rounds import WARM_UP, in_rounds
from transformers import AutoConfig, AutoModelForCausalLM


def build(work: dict[str, Any], device: str) -> Any:
    """The model in the work's ``dtype`` (bfloat16) with random weights."""
    torch.manual_seed(0)
    shape = {"model_type": "llama", **work["shape"]}
    config = AutoConfig.for_model(
        **shape,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        use_cache=False,
    )
    dtype = getattr(torch, work.get("dtype", "bfloat16"))
    torch.set_default_dtype(dtype)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    torch.set_default_dtype(torch.float32)
    if work["rank"]:
        from peft import LoraConfig, get_peft_model

        blocks = work["shape"]["num_hidden_layers"]
        lora = LoraConfig(
            r=work["rank"],
            lora_alpha=20 * work["rank"],
            target_modules=[
                "q_proj",
                "k_proj",
                "v_proj",
                "o_proj",
                "gate_proj",
                "up_proj",
                "down_proj",
            ],
            layers_to_transform=list(range(blocks - work["layers"], blocks)),
        )
        model = get_peft_model(model, lora, autocast_adapter_dtype=False)
    return model.train()


def make_optimizer(model: Any) -> Any:
    """AdamW of what is trained."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-5, weight_decay=0.01, fused=trained[0].is_cuda)


def train(called: Any, optimizer: Any, ids: torch.Tensor, more: bool) -> torch.Tensor:
    """One step on all of ``ids`` (rows, length + 1); returns the mean loss.

    Unless ``more`` follow, everything is computed then; a loop that does not look at each loss need
    not wait.
    """
    optimizer.zero_grad(set_to_none=True)
    logits = called(ids[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
    loss.backward()
    optimizer.step()
    if ids.is_cuda and not more:
        torch.cuda.synchronize()
    return loss.detach()


def main() -> None:
    """Measure what the first argument describes."""
    asked = json.loads(sys.argv[1])
    work = asked["work"]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = build(work, device)
    optimizer = make_optimizer(model)
    called = torch.compile(model) if asked["peer"] == "torch-compiled" else model
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(
        0, work["shape"]["vocab_size"], (work["batch"], work["length"] + 1), generator=generator
    ).to(device)

    def before(number: int) -> None:
        if number == 1 and device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    times, losses = in_rounds(
        lambda more: train(called, optimizer, ids, more), asked["steps"], before=before
    )
    steady = sorted(times[len(WARM_UP) :])
    result = {
        "tokens_per_s": work["batch"] * work["length"] / statistics.median(steady),
        "step_s": {"median": statistics.median(steady), "best": steady[0], "worst": steady[-1]},
        "repeats": len(steady),
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        "first_step_s": times[0],
        "losses": [float(losses[0]), float(losses[-1])],
        "trained": sum(p.numel() for p in model.parameters() if p.requires_grad),
    }
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
