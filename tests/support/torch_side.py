"""What PyTorch and transformers make of a model; run by a Python that has them, and asked by
``asked.Asked``.

logits MODEL OUT.npz      # of tokens 3 to 39
names CONFIGS.json        # names and shapes of the weights of each config
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from asked import answer_all
from transformers import AutoConfig, AutoModelForCausalLM


def logits(path: str, out: str) -> None:
    model, told = AutoModelForCausalLM.from_pretrained(path, dtype="auto", output_loading_info=True)
    assert not told["missing_keys"], told
    assert not told["unexpected_keys"], told
    with torch.no_grad():
        found = model.eval()(torch.arange(3, 40)[None], use_cache=False).logits
    np.savez(out, logits=found.float().numpy(), dtype=str(next(model.parameters()).dtype))


def names(configs: str) -> dict[str, dict[str, list[int]]]:
    found: dict[str, dict[str, list[int]]] = {}
    for config in json.loads(Path(configs).read_text()):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        tied = (
            set(getattr(model, "_tied_weights_keys", None) or [])
            if config["tie_word_embeddings"]
            else set()
        )
        found[config["model_type"]] = {
            n: list(v.shape) for n, v in model.state_dict().items() if n not in tied
        }
    return found


def answer(verb: str, *words: str) -> Any:
    return {"logits": logits, "names": names}[verb](*words)


answer_all(answer)
