"""What PyTorch and transformers make of a model; run by a Python that has them.

python torch_side.py logits MODEL OUT.npz      # of tokens 3 to 39
python torch_side.py names CONFIGS.json        # names and shapes of the weights of each config, as JSON
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

if sys.argv[1] == "logits":
    model, told = AutoModelForCausalLM.from_pretrained(sys.argv[2], dtype="auto", output_loading_info=True)
    assert not told["missing_keys"], told
    assert not told["unexpected_keys"], told
    with torch.no_grad():
        logits = model.eval()(torch.arange(3, 40)[None]).logits
    np.savez(sys.argv[3], logits=logits.float().numpy(), dtype=str(next(model.parameters()).dtype))
else:
    found: dict[str, dict[str, list[int]]] = {}
    for config in json.loads(Path(sys.argv[2]).read_text()):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
        tied = set(getattr(model, "_tied_weights_keys", None) or []) if config["tie_word_embeddings"] else set()
        names = {n: list(v.shape) for n, v in model.state_dict().items() if n not in tied}
        found[config["model_type"]] = names
    print(json.dumps(found))
