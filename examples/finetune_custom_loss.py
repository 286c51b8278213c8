"""Fine-tune a language model with a loss of your own: here label smoothing, counted on the answers only.

On one process: ``python examples/finetune_custom_loss.py --model MODEL``. MODEL is a directory or a name that mlx-lm
loads, such as a directory of ``allhands model get``. On two processes:
``allhands launch -n 2 -- python examples/finetune_custom_loss.py ...``.
"""

import argparse

import allhands  # before MLX: on Linux it loads a fast BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
from mlx_lm import load
from mlx_lm.tuner.utils import linear_to_lora_layers

parser = argparse.ArgumentParser()
parser.add_argument("--model", required=True)
parser.add_argument("--steps", type=int, default=60)
parser.add_argument(
    "--smoothing", type=float, default=0.1, help="share of the target that goes to all other tokens"
)
parser.add_argument("--out", default="finetune-run")
options = parser.parse_args()

world = allhands.init()
mx.random.seed(0)  # the same first adapters on every process
model, tokenizer = load(options.model)
model.freeze()
linear_to_lora_layers(model, len(model.layers), {"rank": 8, "scale": 10.0, "dropout": 0.0})

# Questions with short and long answers, so that processes hold different numbers of trained tokens.
EXAMPLES = [(f"How many is {n}? ", "one " * n + "and no more.") for n in range(1, 9)] * 8


def collate(examples):
    """Token ids (B, T), and a mask (B, T - 1): 1.0 if the next token belongs to an answer."""
    rows = []
    for question, answer in examples:
        asked = tokenizer.encode(question)
        answered = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        rows.append((asked + answered, len(asked)))
    width = max(len(ids) for ids, _ in rows)
    ids = mx.array([ids + [0] * (width - len(ids)) for ids, _ in rows])
    mask = [[float(asked <= place < len(ids)) for place in range(1, width)] for ids, asked in rows]
    return ids, mx.array(mask)


def smoothed_loss(model, ids, mask):
    """Mean over the trained tokens of -log p: mostly of the right token, and a little of every token."""
    logits = model(ids[:, :-1]).astype(mx.float32)
    log_p = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    right = mx.take_along_axis(log_p, ids[:, 1:, None], axis=-1).squeeze(-1)
    each = -(1 - options.smoothing) * right - options.smoothing * log_p.mean(axis=-1)
    return (each * mask).sum() / mask.sum()


loss_and_grad_fn = nn.value_and_grad(model, smoothed_loss)
optimizer = optim.Adam(learning_rate=1e-3)
loader = allhands.DistributedLoader(EXAMPLES, 8, seed=1, collate=collate)

with allhands.Metrics(options.out, show=print) as metrics:
    for step, (ids, mask) in zip(range(1, options.steps + 1), loader.endless(), strict=False):
        loss, grads = loss_and_grad_fn(model, ids, mask)
        grads = allhands.average_gradients(grads, num_tokens=mask.sum())  # the additional line
        optimizer.update(model, grads)
        mx.eval(model.trainable_parameters(), optimizer.state)
        metrics.log(step, {"loss": loss}, reduce="mean", weight=mask.sum())
