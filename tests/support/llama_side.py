"""What llama.cpp makes of a GGUF file; run by a Python that has llama-cpp-python.

python llama_side.py MODEL.gguf OUT.npz < TEXTS.json    # tokens-N and logits-N of each text, told
to stop nowhere
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
from llama_cpp import Llama  # pyright: ignore[reportMissingImports]

model = Llama(model_path=sys.argv[1], logits_all=True, verbose=False, n_ctx=256, n_threads=1)
found: dict[str, Any] = {}
for number, text in enumerate(json.loads(sys.stdin.read())):
    model.reset()
    tokens = model.tokenize(text.encode(), add_bos=True, special=True)
    model.eval(tokens)
    found[f"tokens-{number}"] = np.array(tokens)
    found[f"logits-{number}"] = np.array(model.scores[: len(tokens)])
np.savez(sys.argv[2], **found)
