"""One peer of ``data.py`` in a process of its own: tokenise, open, read, wait.

    python data_worker.py PEER ACTION --data DIR --tokenizer DIR --work DIR

It says what it has measured in lines that begin with ``@`` and go on in JSON. Each peer's way is
the one that its own training script goes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Nothing is cut.
NO_LIMIT = 1 << 20
BATCH_SIZE = 8


class Peer(ABC):
    """Imports and the tokenizer come with the constructor; the data are not touched before
    :meth:`open`.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.data = options.data
        self.work = options.work
        self.tokenizer_path = str(options.tokenizer)

    @abstractmethod
    def open(self) -> Any:
        """The training set, tokenised now if it was not before."""

    @abstractmethod
    def num_tokens(self, data: Any, first: int | None = None) -> int:
        """Tokens of the first examples, or of all."""

    @abstractmethod
    def read_all(self, data: Any) -> int:
        """Read every example once through the peer's loader, in batches of eight; returns the
        batches.
        """


class Allhands(Peer):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        os.environ["ALLHANDS_TOKEN_CACHE"] = str(self.work / "allhands")
        from allhands.config.schema import build_config
        from allhands.data.loader import Loader
        from allhands.data.order import GlobalOrder
        from allhands.model.load import load_tokenizer
        from allhands.run.datasets import find_splits, open_data
        from allhands.runtime.sizing import Sizing

        values = {
            "model": self.tokenizer_path,
            "data": str(self.data),
            "train": True,
            "val_batches": 0,
        }
        self._config = build_config({**values, "max_seq_length": NO_LIMIT})
        self._open, self._find, self._loader, self._order = (
            open_data,
            find_splits,
            Loader,
            GlobalOrder,
        )
        self._sizing = Sizing
        self._tokenizer = load_tokenizer(self.tokenizer_path)

    def open(self) -> Any:
        return (
            self._open(self._config, self._find(self._config), self._tokenizer)
            .stored["train"]
            .tokens
        )

    def num_tokens(self, data: Any, first: int | None = None) -> int:
        return int(data.offsets[len(data) if first is None else first])

    def loader(self, data: Any, seed: int = 0) -> tuple[Any, Any]:
        """A loader in the state in which a run begins, and its order."""
        order = self._order(data.work, BATCH_SIZE, seed)
        return self._loader(
            data, order, self._sizing(16_384, overhead_tokens=256), 0, (1.0,)
        ), order

    def read_all(self, data: Any) -> int:
        loader, order = self.loader(data)
        for i in range(order.batches_per_epoch):
            loader.load(i)
        return order.batches_per_epoch


class HuggingFace(Peer):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        os.environ["HF_DATASETS_CACHE"] = str(self.work / "hugging_face")
        import datasets
        import transformers

        datasets.disable_progress_bars()
        self._load_dataset = datasets.load_dataset
        self._cores = options.cores
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(self.tokenizer_path)

    def open(self) -> Any:
        tokenizer = self._tokenizer

        def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
            ids = tokenizer(batch["text"])["input_ids"]
            # As the others do it: the end-of-text token closes a document.
            return {
                "input_ids": [
                    one if one[-1] == tokenizer.eos_token_id else [*one, tokenizer.eos_token_id]
                    for one in ids
                ]
            }

        files = str(self.data / "train.jsonl")
        data = self._load_dataset("json", data_files=files, split="train")
        # With a name for the result, so that it need not hash the tokenizer to find it again.
        return data.map(
            encode,
            batched=True,
            num_proc=self._cores,
            remove_columns=["text"],
            new_fingerprint="benchmark",
        )

    def num_tokens(self, data: Any, first: int | None = None) -> int:
        chosen = data if first is None else data.select(range(first))
        return sum(len(ids) for batch in chosen.iter(1000) for ids in batch["input_ids"])

    def read_all(self, data: Any) -> int:
        import numpy as np

        order = np.random.default_rng(0).permutation(len(data)).tolist()
        batches = 0
        for start in range(0, len(order), BATCH_SIZE):
            _ = data[order[start : start + BATCH_SIZE]]
            batches += 1
        return batches


class MlxLm(Peer):
    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        from mlx_lm.tuner.datasets import CacheDataset, load_dataset
        from mlx_lm.tuner.trainer import iterate_batches
        from mlx_lm.utils import load_tokenizer

        self._load_dataset, self._cached, self._batches = (
            load_dataset,
            CacheDataset,
            iterate_batches,
        )
        self._tokenizer = load_tokenizer(self.tokenizer_path)

    def open(self) -> Any:
        wanted = SimpleNamespace(
            data=str(self.data), train=True, test=False, hf_dataset=False, mask_prompt=False
        )
        data = self._cached(self._load_dataset(wanted, self._tokenizer)[0])
        # It tokenises an example when a batch first needs it, and keeps it.
        for i in range(len(data)):
            _ = data[i]
        return data

    def num_tokens(self, data: Any, first: int | None = None) -> int:
        return sum(len(data[i][0]) for i in range(len(data) if first is None else first))

    def read_all(self, data: Any) -> int:
        return sum(1 for _ in self._batches(data, BATCH_SIZE, NO_LIMIT))


PEERS: dict[str, type[Peer]] = {"allhands": Allhands, "hugging_face": HuggingFace, "mlx_lm": MlxLm}


def main() -> None:
    options = parse()
    peer = PEERS[options.peer](options)
    if options.action == "empty":
        wait({})
    elif options.action == "loader":
        assert isinstance(peer, Allhands)
        tell(loader_figures(peer, peer.open(), options.step_ms))
    else:
        started = time.perf_counter()
        data = peer.open()
        opened = time.perf_counter() - started
        if options.action == "build":
            first = options.first_documents
            tell(
                {
                    "build_s": opened,
                    "num_tokens": peer.num_tokens(data),
                    "first": peer.num_tokens(data, first),
                }
            )
        elif options.action == "open":
            tell({"open_s": opened})
        else:
            wait({"open_s": opened, "batches": peer.read_all(data)})


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("action", choices=("build", "open", "hold", "empty", "loader"))
    for name in ("data", "tokenizer", "work"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--cores", type=int, default=1)
    parser.add_argument("--first-documents", type=int, default=0)
    parser.add_argument("--step-ms", type=float, default=20.0)
    return parser.parse_args()


def loader_figures(peer: Allhands, data: Any, step_ms: float) -> dict[str, float]:
    """Milliseconds a batch from two places of the run, each with a new loader; and what a step
    waits for data.
    """
    figures: dict[str, float] = {}
    for start in (0, 1_000_000):
        loader, _ = peer.loader(data)
        times = [
            timed_ms(lambda i=i, loader=loader: loader.load(i)) for i in range(start, start + 200)
        ]
        figures[f"first_ms_at_{start}"] = times[0]
        figures[f"mean_ms_from_{start}"] = sum(times) / len(times)
    waits = step_waits(peer.loader(data, seed=1)[0].load, 100, step_ms)
    return figures | {
        "wait_ms": sum(waits) / len(waits),
        "longest_wait_ms": max(waits),
        "step_ms": step_ms,
    }


def step_waits(load: Any, steps: int, step_ms: float) -> list[float]:
    """Milliseconds that each step after the first waits for its batch; the steps are idle time, as
    on a device.
    """
    from allhands.data.prefetch import Prefetcher

    waits: list[float] = []
    with Prefetcher(load, end=steps) as batches:
        for i in range(steps):
            waits.append(timed_ms(lambda i=i: batches.get(i)))
            time.sleep(step_ms / 1000)
    return waits[1:]


def timed_ms(work: Any) -> float:
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


def tell(values: dict[str, Any]) -> None:
    print("@" + json.dumps(values), flush=True)


def wait(values: dict[str, Any]) -> None:
    """Say that it is done, and keep everything until the other side has looked."""
    import gc

    gc.collect()
    tell(values)
    sys.stdin.readline()


if __name__ == "__main__":
    main()
