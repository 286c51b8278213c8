"""A training program of your own that goes on after faults.

Start it on two processes with
``allhands launch -n 2 --checkpoints checkpoints -- python examples/supervised_training.py``. Kill one of them, or press
Ctrl-C and start it again: it ends with the same numbers. It also resumes without a launcher:
``python examples/supervised_training.py --out supervised-run``.
"""

import argparse
import os

import allhands  # before MLX: on Linux it loads a fast BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--save-every", type=int, default=20)
# The launcher names the directory of its checkpoints. Without a launcher there is a default.
parser.add_argument("--out", default=os.environ.get("ALLHANDS_CHECKPOINT_DIR", "supervised-run"))
options = parser.parse_args()

saved = allhands.last_checkpoint(directory=options.out)
group = mx.distributed.init()

mx.random.seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = optim.Adam(learning_rate=1e-2)
optimizer.init(model.trainable_parameters())
first = 0
if saved:
    model.update(saved.arrays["model"])
    optimizer.state = saved.arrays["optimizer"]
    first = saved.step


def batch(step):
    """This rank's share of a step's examples. They depend on the step alone, so a restart sees the same ones."""
    inputs = mx.random.normal((64, 8), key=mx.random.key(step))
    targets = mx.sin(inputs.sum(axis=1, keepdims=True))
    return inputs[group.rank() :: group.size()], targets[group.rank() :: group.size()]


def mean_loss(model, inputs, targets):
    return nn.losses.mse_loss(model(inputs), targets)


loss_and_grad = nn.value_and_grad(model, mean_loss)
for step in range(first + 1, options.steps + 1):
    loss, grads = loss_and_grad(model, *batch(step))
    grads = nn.average_gradients(grads)
    optimizer.update(model, grads)
    mx.eval(model.parameters(), optimizer.state)
    if group.rank() == 0 and step % 20 == 0:
        print(f"step {step}: loss {loss.item():.4f}", flush=True)

    stop = allhands.progress(step)
    if stop or step % options.save_every == 0 or step == options.steps:
        allhands.save_checkpoint(
            step, {"model": model, "optimizer": optimizer.state}, directory=options.out
        )
    if stop:
        break
