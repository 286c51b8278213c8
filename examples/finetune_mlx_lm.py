"""Fine-tune with LoRA like a script around mlx_lm's trainer, on one process or on several.

The options have the names of the original script. A callback of mlx_lm collects the losses. No callback averages
gradients, because allhands does that. On one process:
``python examples/finetune_mlx_lm.py --model MODEL --data DATA``. On two: the same command after ``mpirun -np 2``.
"""

import argparse
import json
import time

import allhands  # before MLX: on Linux it loads a fast BLAS

# isort: split
from mlx_lm.tuner.trainer import TrainingCallback

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="demo")
parser.add_argument("--data", default="demo")
parser.add_argument("--fine-tune-type", default="lora")
parser.add_argument("--num-layers", type=int, default=8)
parser.add_argument(
    "--batch-size", type=int, default=2, help="examples of a batch, over all processes together"
)
parser.add_argument("--iters", type=int, default=100)
parser.add_argument("--val-batches", type=int, default=25)
parser.add_argument("--learning-rate", type=float, default=1e-5)
parser.add_argument("--steps-per-report", type=int, default=10)
parser.add_argument("--steps-per-eval", type=int, default=200)
parser.add_argument("--save-every", type=int, default=100)
parser.add_argument("--max-seq-length", type=int, default=2048)
parser.add_argument("--adapter-path", default="adapters")
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--grad-checkpoint", action="store_true")
parser.add_argument(
    "--lora-parameters", type=json.loads, default={"rank": 8, "dropout": 0.0, "scale": 10.0}
)


class Losses(TrainingCallback):
    """Keep and print the losses; only the first process calls this."""

    def __init__(self):
        self.train, self.valid = [], []

    def on_train_loss_report(self, info):
        self.train.append((info["iteration"], info["train_loss"]))
        print(f"[train] {info['iteration']}: {info['train_loss']:.4f}")

    def on_val_loss_report(self, info):
        self.valid.append((info["iteration"], info["val_loss"]))
        print(f"[valid] {info['iteration']}: {info['val_loss']:.4f}")


options = parser.parse_args()
world = allhands.init()
begun, losses = time.monotonic(), Losses()
result = allhands.finetune(**vars(options), callbacks=[losses], progress=False)
if world.rank == 0:
    print(f"processes: {world.size}, {time.monotonic() - begun:.1f} s; the curves: {result.plot}")
