"""How much of what is computed is padding, on one chat set: mlx_lm's batches, random ones and
allhands'.

    python data_padding.py --data DIR --tokenizer DIR --batch-sizes 4,8,32

Written as JSON in a line that begins with ``@``.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import allhands  # noqa: F401 - before MLX, for its BLAS  # isort: skip
import numpy as np
from numpy.typing import NDArray

from allhands.config.schema import build_config
from allhands.data.loader import Loader
from allhands.data.order import GlobalOrder
from allhands.data.tokens import TokenSet
from allhands.model.load import load_tokenizer
from allhands.run.datasets import find_splits, open_data
from allhands.runtime.sizing import Sizing

MAX_SEQ_LENGTH = 2048
# As allhands.runtime.accelerator has them for a CPU, a GPU with uncompiled steps, and a GPU with
# compiled ones.
SIZINGS = {
    "allhands_cpu": Sizing(2048, overhead_tokens=24),
    "allhands_gpu": Sizing(16_384, overhead_tokens=256),
    "allhands_gpu_ladder": Sizing(16_384, overhead_tokens=256, few_shapes=True),
}
# (rows, width) or (rows, width, trained places) of a pass, and the input tokens in it.
Pass = tuple[tuple[int, ...], int]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--batch-sizes", required=True)
    options = parser.parse_args()
    values = {"model": options.tokenizer, "data": options.data, "train": True, "val_batches": 0}
    config = build_config({**values, "max_seq_length": MAX_SEQ_LENGTH})
    tokens = (
        open_data(config, find_splits(config), load_tokenizer(options.tokenizer))
        .stored["train"]
        .tokens
    )
    figures: dict[str, Any] = {
        "num_examples": len(tokens),
        "num_inputs": int(tokens.work.sum()),
        "batches": {},
    }
    for size in map(int, options.batch_sizes.split(",")):
        ways = {
            "mlx_lm": mlx_lm_passes(options.data, options.tokenizer, size),
            "random": random_passes(tokens, size),
        }
        ways |= {name: allhands_passes(tokens, size, sizing) for name, sizing in SIZINGS.items()}
        figures["batches"][size] = {name: summary(passes) for name, passes in ways.items()}
    print("@" + json.dumps(figures), flush=True)


def summary(passes: Iterable[Pass]) -> dict[str, float]:
    """Of one epoch: how much is computed beyond the tokens, in passes of how many different shapes."""
    every = list(passes)
    places = sum(shape[0] * shape[1] for shape, _ in every)
    inputs = sum(count for _, count in every)
    return {
        "padding": (places - inputs) / places,
        "places": places,
        "inputs": inputs,
        "passes": len(every),
        "shapes": len({shape for shape, _ in every}),
    }


def mlx_lm_passes(data: str, tokenizer: str, batch_size: int) -> list[Pass]:
    """Its own batches; what is left of the data below a whole batch it does not train."""
    from mlx_lm.tuner.datasets import CacheDataset, load_dataset
    from mlx_lm.tuner.trainer import iterate_batches
    from mlx_lm.utils import load_tokenizer as load

    wanted = SimpleNamespace(data=data, train=True, test=False, hf_dataset=False, mask_prompt=False)
    cached = CacheDataset(load_dataset(wanted, load(tokenizer))[0])
    passes: list[Pass] = []
    for batch, lengths in iterate_batches(cached, batch_size, MAX_SEQ_LENGTH):
        # The last place of a row is a target only.
        inputs = np.asarray(lengths)[:, 1] - 1
        passes.append(((batch.shape[0], batch.shape[1] - 1), int(inputs.sum())))
    return passes


def random_passes(tokens: TokenSet, batch_size: int, seed: int = 0) -> list[Pass]:
    """Batches drawn by chance, padded to their longest example."""
    order = np.random.default_rng(seed).permutation(len(tokens))
    return [
        padded(tokens.work[order[i : i + batch_size]]) for i in range(0, len(order), batch_size)
    ]


def padded(lengths: NDArray[Any]) -> Pass:
    return (len(lengths), int(lengths.max())), int(lengths.sum())


def allhands_passes(tokens: TokenSet, batch_size: int, sizing: Sizing) -> list[Pass]:
    """What one rank computes in the first epoch."""
    order = GlobalOrder(tokens.work, batch_size, 0)
    loader = Loader(tokens, order, sizing.fitted(tokens.work), 0, (1.0,))
    return [
        (part.shape, part.num_tokens)
        for i in range(order.batches_per_epoch)
        for part in loader.load(i)
    ]


if __name__ == "__main__":
    main()
