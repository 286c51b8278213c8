"""What PyTorch and PEFT make of an adapter; run by a Python that has them, and asked by
``asked.Asked``.

read BASE ADAPTER OUT.npz         # logits without and with the adapter write BASE ADAPTER OUT.npz
JSON   # a random adapter of a LoraConfig, and its logits merge BASE ADAPTER OUT.npz MODEL  # the
adapter merged and saved as MODEL part BASE ADAPTER OUT.npz MODEL   # the same, after embedding and
output layer have got weights of their own
"""

from __future__ import annotations

import json

import numpy as np
import torch
from asked import answer_all
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM


def answer(verb: str, base: str, adapter: str, out: str, settings: str = "") -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    ids = torch.arange(20)[None]
    plain = model(ids).logits.detach().numpy()
    if verb == "write":
        model = get_peft_model(model, LoraConfig(**json.loads(settings)))
        with torch.no_grad():
            for name, value in model.named_parameters():
                if "lora_" in name and "magnitude" not in name:
                    value.normal_(std=0.2)
                elif value.requires_grad:
                    value.add_(torch.randn(value.shape) * 0.1)
        model.eval().save_pretrained(adapter)
    elif verb in ("merge", "part"):
        if verb == "part":
            model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.clone())
            model.config.tie_word_embeddings = False
        model = PeftModel.from_pretrained(model, adapter).eval().merge_and_unload()
        model.save_pretrained(settings)
    else:
        model = PeftModel.from_pretrained(model, adapter).eval()
    np.savez(out, plain=plain, adapted=model(ids).logits.detach().numpy())


answer_all(answer)
