"""The corpus as the peers of ``process_memory.py`` keep it, and one rank of their loop, started by
``mlx.launch``.

    python process_memory_worker.py prepare --store DIR --work DIR --block-size 256 mlx.launch -n 2
    -- python process_memory_worker.py every_rank_loads_all --model CONFIG --work DIR ...

The loop is the one that everybody writes with MLX. The two ways differ in :func:`open_corpus`
alone.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# Gives the rows of some numbers: (n,) -> (n, block size + 1).
Rows = Callable[[list[int]], Any]
WAYS = ("every_rank_loads_all", "datasets")
FLAT, TABLE = "tokens.int32", "table"
# What MLX holds has come to its highest by then, and every rank is at work.
AT_WORK = 5


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("action", choices=("prepare", *WAYS))
    parser.add_argument("--store", type=Path, help="directory of allhands' token store")
    parser.add_argument("--model", type=Path, help="a config.json of transformers")
    parser.add_argument("--work", type=Path, required=True, help="where the peers' corpus is")
    parser.add_argument("--told", type=Path, help="directory of what the ranks say")
    parser.add_argument("--block-size", type=int, required=True)
    parser.add_argument("--batch-size", type=int, default=16, help="rows of all ranks together")
    parser.add_argument("--iters", type=int, default=1)
    return parser.parse_args()


def prepare(options: argparse.Namespace) -> None:
    """Write the tokens of allhands' store once more: flat, for NumPy, and as a table of rows, for
    datasets.
    """
    from datasets import Dataset, Features, Sequence, Value

    manifest = json.loads((options.store / "manifest.json").read_text())
    stored = np.memmap(
        options.store / "tokens.bin", dtype=manifest["arrays"]["tokens"]["dtype"], mode="r"
    )
    tokens = stored.astype(np.int32)
    tokens.tofile(options.work / FLAT)
    block = options.block_size
    count = (len(tokens) - 1) // block

    def rows() -> Any:
        for row in range(count):
            yield {"input_ids": tokens[row * block : (row + 1) * block + 1]}

    # What tokenizers give: int32.
    features = Features({"input_ids": Sequence(Value("int32"))})
    made = Dataset.from_generator(rows, features=features, cache_dir=str(options.work / "cache"))
    made.save_to_disk(str(options.work / TABLE))
    print(json.dumps({"tokens": len(tokens), "rows": count}))


def open_corpus(options: argparse.Namespace, rank: int, size: int) -> tuple[Rows, int, int]:
    """How this rank reads rows of its part, how many there are, and the bytes of corpus that it has
    allocated.
    """
    if options.action == "datasets":
        from datasets import load_from_disk

        # Mapped; each rank has a part of its own, as the documentation of datasets says for data
        # parallelism.
        table: Any = (
            load_from_disk(str(options.work / TABLE))
            .shard(num_shards=size, index=rank)
            .with_format("numpy")
        )
        return lambda numbers: table[numbers]["input_ids"], len(table), 0
    tokens = np.fromfile(options.work / FLAT, dtype=np.int32)
    block = options.block_size
    whole = (len(tokens) - 1) // block
    places = np.arange(block + 1)

    def read(numbers: list[int]) -> Any:
        # Of the rows of all, those of this rank: every size-th.
        return tokens[(np.array(numbers) * size + rank)[:, None] * block + places]

    return read, (whole - rank + size - 1) // size, tokens.nbytes


def train(options: argparse.Namespace) -> None:
    """Steps of the loop; what the rank is goes to ``told/rank-N.json`` once it is at work, and
    again at its end.
    """
    import allhands  # noqa: F401 - before MLX: on Linux it loads the BLAS that makes a step a second, not half a minute

    # isort: split
    import mlx.core as mx
    import mlx.nn as nn
    import mlx.optimizers as optim
    from mlx_lm.models.llama import Model, ModelArgs

    group = mx.distributed.init()
    rank, size = group.rank(), group.size()
    read, count, allocated = open_corpus(options, rank, size)
    mx.random.seed(0)
    model = Model(ModelArgs.from_dict(json.loads(options.model.read_text())))
    optimizer = optim.AdamW(learning_rate=2e-3)

    def loss_of(model: Any, rows: Any) -> Any:
        return nn.losses.cross_entropy(model(rows[:, :-1]), rows[:, 1:], reduction="mean")

    loss_and_gradients = nn.value_and_grad(model, loss_of)
    order = np.random.default_rng(0).permutation(count)
    share = options.batch_size // size
    losses: list[float] = []
    for step in range(options.iters):
        numbers = order[np.arange(step * share, (step + 1) * share) % count].tolist()
        loss, gradients = loss_and_gradients(model, mx.array(read(numbers)))
        gradients = nn.average_gradients(gradients)
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state, loss)
        losses.append(float(loss.item()))
        if step + 1 in (AT_WORK, options.iters):
            about = {
                "pid": os.getpid(),
                "step": step + 1,
                "corpus_bytes": allocated,
                "losses": losses,
            }
            tell(
                options.told / f"rank-{rank}.json", about | {"mlx_peak_bytes": mx.get_peak_memory()}
            )
    # Nobody ends while another one still needs it.
    mx.eval(mx.distributed.all_sum(mx.array(1.0)))


def tell(file: Path, about: dict[str, Any]) -> None:
    """Replaced whole: somebody waits for it."""
    draft = file.with_suffix(".draft")
    draft.write_text(json.dumps(about))
    draft.replace(file)


if __name__ == "__main__":
    asked = parse()
    (prepare if asked.action == "prepare" else train)(asked)
