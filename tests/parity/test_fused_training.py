"""Whole runs with the fast forms of an NVIDIA GPU, computed here by MLX's own operations, against
plain ones.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from runs import distance, read_run
from tiny import write_chat_data, write_model

from allhands.config.schema import build_config
from allhands.model import passes
from allhands.run import preparing
from allhands.run.session import RunContext, run_finetune
from allhands.runtime import accelerator
from allhands.runtime.accelerator import Accelerator
from allhands.train.callbacks import Callback

BLOCKS = {
    "lora": 6,
    "dropout": 6,
    "full": 6,
    "qlora": 6,
    "dora": 0,
    "packed": 6,
    "recomputed": 6,
    "corrected": 6,
}
METHODS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dropout": {"lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.3}},
    "full": {"fine_tune_type": "full", "optimizer": "adamw", "weight_decay": 0.1},
    "qlora": {"model": "quantised"},
    "dora": {"fine_tune_type": "dora"},
    "packed": {
        "packing": True,
        "isolate_documents": True,
        "mask_prompt": False,
        "max_seq_length": 96,
    },
    "recomputed": {"grad_checkpoint": True, "compile": "off"},
    "corrected": {"optimizer_config": {"adam": {"bias_correction": True, "eps": 1e-6}}},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fused-training")
    write_model(root / "dense", layers=3, hidden=64)
    write_model(root / "quantised", layers=3, hidden=64, bits=4)
    write_chat_data(root / "data", train=24, valid=4, longest=40)
    return root


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_a_run_in_fast_forms_is_the_plain_run(
    place: Path, method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    here = accelerator.detect()
    fused: list[int] = []

    def trained(name: str, device: Accelerator) -> Any:
        monkeypatch.setattr(preparing, "detect", lambda: device)
        fuse = passes.fuse

        def counted(model: Any, *more: Any, **how: Any) -> int:
            fused.append(fuse(model, *more, **how))
            return fused[-1]

        with monkeypatch.context() as patch:
            patch.setattr(passes, "fuse", counted)
            flags = {
                "data": str(place / "data"),
                "adapter_path": str(tmp_path / name),
                "train": True,
                "iters": 12,
                "batch_size": 4,
                "grad_accumulation_steps": 2,
                "val_batches": -1,
                "steps_per_report": 2,
                "steps_per_eval": 6,
                "learning_rate": 1e-3,
                "max_grad_norm": 1.0,
                "optimizer_config": {"adam": {"eps": 1e-6}, "adamw": {"eps": 1e-6}},
                "compile": "on",
                "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0},
                **METHODS[method],
            }
            flags["model"] = str(place / flags.get("model", "dense"))
            run_finetune(build_config(flags), RunContext(), [Callback()])
        return read_run(tmp_path / name)

    plain = trained("plain", replace(here, kind="metal", cpu_native=False))
    # A device with so little memory that quantised layers stay quantised.
    fast = trained("fast", replace(here, kind="cuda", cpu_native=False, memory_bytes=1))
    assert fused == [BLOCKS[method]]
    assert fast.losses[-1] < fast.losses[0]
    assert fast.losses == pytest.approx(plain.losses, rel=1e-4)
    assert fast.valid_losses == pytest.approx(plain.valid_losses, rel=1e-4)
    assert distance(plain.weights, fast.weights) < 2e-4
