"""A small network that tells ten kinds of pictures apart, trained on one process or on several.

Alone: ``python examples/mnist_mlp.py``. Together: ``allhands launch -n 2 -- python examples/mnist_mlp.py``.
The losses are the same. The pictures are made here, so nothing is downloaded: ten patterns, with much noise.
"""

import argparse
from itertools import pairwise

import allhands  # before MLX: on Linux it loads a fast BLAS

# isort: split
import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--out", default="mnist-run")
options = parser.parse_args()

world = allhands.init()  # joins all processes; without a launcher there is one


def make_pictures(count, seed):
    """Pictures (count, 784) and their labels (count,)."""
    patterns = np.random.default_rng(0).normal(size=(10, 784))
    random = np.random.default_rng(seed)
    labels = random.integers(0, 10, size=count)
    noise = random.normal(size=(count, 784), scale=12.0)
    return mx.array((patterns[labels] + noise).astype(np.float32)), mx.array(labels)


class MLP(nn.Module):
    """Linear layers with ReLU between them."""

    def __init__(self, dims):
        super().__init__()
        self.layers = [nn.Linear(i, o) for i, o in pairwise(dims)]

    def __call__(self, x):
        for layer in self.layers[:-1]:
            x = nn.relu(layer(x))
        return self.layers[-1](x)


def loss_fn(model, x, y):
    return nn.losses.cross_entropy(model(x), y, reduction="mean")


images, labels = make_pictures(4000, seed=1)
test_images, test_labels = make_pictures(1000, seed=2)

mx.random.seed(0)  # the same first weights on every process
model = MLP([784, 64, 64, 10])
optimizer = optim.Adam(learning_rate=1e-3)
loss_and_grad_fn = nn.value_and_grad(model, loss_fn)

# Each process gets a part of the numbers. A batch has 200 pictures over all processes.
numbers = range(len(labels))
loader = allhands.DistributedLoader(
    numbers, 200, collate=lambda chosen: (images[mx.array(chosen)], labels[mx.array(chosen)])
)

with allhands.Metrics(options.out, show=print) as metrics:
    step = 0
    for _ in range(options.epochs):
        for x, y in loader:
            loss, grads = loss_and_grad_fn(model, x, y)
            grads = allhands.average_gradients(grads)  # the additional line
            optimizer.update(model, grads)
            mx.eval(model.parameters(), optimizer.state)
            step += 1
            metrics.log(step, {"loss": loss}, reduce="mean")
        accuracy = mx.mean(mx.argmax(model(test_images), axis=1) == test_labels)
        metrics.log(step, {"accuracy": accuracy})
