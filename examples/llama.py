"""A small Llama that learns to write stories, letter by letter, on one process or on several.

On one process: ``python examples/llama.py``. On two: ``allhands launch -n 2 -- python examples/llama.py``. Every
process takes its part of each batch, and the losses are the same. With ``--naive`` every process computes every whole
batch: the result is right, but no faster. ``--text`` names a text file, or JSON lines with "text", such as TinyStories.
"""

import argparse
import json
from pathlib import Path

import allhands  # before MLX: on Linux it loads a fast BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx_lm.models.llama import Model, ModelArgs

STORY = "{} saw a {} {}. It was very {}! {} took it home and they were happy.\n"
CONTEXT, BATCH_SIZE = 64, 16  # letters of a piece; pieces of a step, over all processes
WORDS = (
    ["Tom", "Lily", "Ben"],
    ["big", "little", "red"],
    ["dog", "cat", "ball"],
    ["kind", "soft", "loud"],
)

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--text", help="text file in place of generated small stories")
parser.add_argument("--naive", action="store_true", help="every process computes every batch")
parser.add_argument("--out", default="llama-run")
parser.add_argument("--save-every", type=int, default=50)
options = parser.parse_args()

world = allhands.init()


def read_text():
    """The text as its bytes: numbers from 0 to 255, one for each plain letter."""
    if options.text:
        text = Path(options.text).read_text(encoding="utf-8")
        if options.text.endswith(".jsonl"):
            text = "\n".join(json.loads(line)["text"] for line in text.strip().split("\n"))
    else:
        pick = np.random.default_rng(0).choice
        text = "".join(STORY.format(*map(pick, WORDS), "Mum") for _ in range(1000))
    return np.frombuffer(text.encode(), dtype=np.uint8).astype(np.int32)


def collate(numbers):
    """Pieces of the text as the model reads them, and the letter after each letter."""
    starts = np.array(numbers)[:, None] * CONTEXT + np.arange(CONTEXT)
    return mx.array(text[starts]), mx.array(text[starts + 1])


shape = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "num_attention_heads": 4,
}
mx.random.seed(0)  # the same first weights on every process
model = Model(
    ModelArgs(model_type="llama", vocab_size=256, rms_norm_eps=1e-5, num_key_value_heads=4, **shape)
)
optimizer = optim.AdamW(learning_rate=1e-3)


def loss_fn(model, inputs, targets):
    return nn.losses.cross_entropy(model(inputs), targets, reduction="mean")


loss_and_grad_fn = nn.value_and_grad(model, loss_fn)
sharing = world.by_itself() if options.naive else world
text = read_text()
pieces = range((len(text) - 1) // CONTEXT)
loader = allhands.DistributedLoader(pieces, BATCH_SIZE, collate=collate, world=sharing)
keeper = allhands.Checkpointer(options.out, model=model, optimizer=optimizer, loader=loader)
first = keeper.restore()  # the number of finished steps; 0 in a new run

with allhands.Metrics(options.out, first_step=first, show=print) as metrics:
    for step, (inputs, targets) in zip(
        range(first + 1, options.steps + 1), loader.endless(), strict=False
    ):
        loss, grads = loss_and_grad_fn(model, inputs, targets)
        grads = allhands.average_gradients(grads, num_tokens=targets.size)  # the additional line
        optimizer.update(model, grads)
        mx.eval(model.parameters(), optimizer.state)
        metrics.log(step, {"loss": loss}, reduce="mean", weight=targets.size)
        keeper.save(step, every=options.save_every)
