"""One piece of allhands' own work, counted by the tool that started this process; see
``instructions.py``.

    python benchmarks/instructions_worker.py callgrind PIECE REPEAT SCRATCH
    python benchmarks/instructions_worker.py perf:CONTROL:ACKNOWLEDGE PIECE 1 SCRATCH

Everything is prepared and done once before the tool is told to count.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

Work = Callable[[], Any]
NUM_CHATS = 300


def rendered_chats(_scratch: Path) -> Work:
    """Chats to tokens and masks, as ``allhands train --mask-prompt`` does it."""
    from allhands.data.demo import demo_records
    from allhands.data.render import Renderer
    from allhands.model.load import load_tokenizer

    # The demo's model is there: instructions.py has seen to it.
    renderer = Renderer(load_tokenizer("demo").tokenizer, mask_prompt=True, max_seq_length=2048)
    shipped = demo_records("train")
    records = [shipped[number % len(shipped)] for number in range(NUM_CHATS)]
    return lambda: renderer.render_many(records)


def read_chats(scratch: Path) -> Work:
    """Lines of JSON to checked records."""
    import json

    from allhands.data.demo import demo_records
    from allhands.data.records import ColumnNames
    from allhands.data.splits import split_of_folder

    shipped = demo_records("train")
    rows = [
        {"messages": list(shipped[number % len(shipped)].messages or ())}
        for number in range(NUM_CHATS)
    ]
    (scratch / "train.jsonl").write_text(
        "".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8"
    )

    def load() -> list[Any]:
        split = split_of_folder(scratch, "train", ColumnNames(), required=True)
        assert split is not None
        return list(split.records())

    return load


def loaded_batches(_scratch: Path) -> Work:
    """The global order of 5,000 examples, and the first 200 batches of 8, padded."""
    import numpy as np

    from allhands.data.loader import Loader
    from allhands.data.order import GlobalOrder
    from allhands.data.tokens import TokenSet
    from allhands.runtime.sizing import Sizing

    lengths = np.random.default_rng(0).integers(10, 300, size=5_000)
    examples = [(np.arange(length), np.arange(length) > length // 2) for length in lengths]
    tokens = TokenSet.of_examples(examples)

    def work() -> None:
        loader = Loader(
            tokens, GlobalOrder(tokens.work, 8, 0), Sizing(2048, overhead_tokens=24), 0, (1.0,)
        )
        for step in range(200):
            loader.load(step)

    return work


def written_checkpoint(scratch: Path) -> Work:
    """A checkpoint of 64 tensors, 16 MiB in all: serialised, hashed, synced and renamed."""
    from allhands.checkpoints.writing import write_checkpoint
    from allhands.io.tensors import Tensor

    data = bytes(range(256)) * 1024
    tensors = [Tensor(f"layers.{number}.weight", "F32", (256, 256), data) for number in range(64)]
    target = scratch / "checkpoints" / "0000001"
    return lambda: write_checkpoint(
        target, 1, "run", {"step": 1}, {"adapters.safetensors": tensors}
    )


def trained_steps(_scratch: Path) -> Work:
    """4 steps of a small Llama with adapters, in the form that a CPU gets."""
    import allhands  # noqa: F401 - before MLX, for its BLAS

    # isort: split
    import mlx.core as mx
    import numpy as np
    from mlx_lm.models.llama import Model, ModelArgs

    from allhands.config.schema import build_config
    from allhands.data.loader import MicroBatch
    from allhands.distributed.backend import SingleProcess
    from allhands.model.adapters import make_trainable
    from allhands.train.optimizers import KernelAdamW
    from allhands.train.step import StepOptions, make_step

    mx.set_default_device(mx.cpu)
    mx.random.seed(0)
    shape = {
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "intermediate_size": 128,
        "num_attention_heads": 4,
    }
    shape |= {
        "num_key_value_heads": 2,
        "vocab_size": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
    model = Model(ModelArgs.from_dict({"model_type": "llama", "rope_theta": 10000.0, **shape}))
    make_trainable(model, build_config({"num_layers": 2}))
    model.train()
    mx.eval(model.parameters())
    rows, length = 4, 16
    ids = np.random.default_rng(0).integers(0, 256, size=(rows, length + 1)).astype(np.int32)
    places = np.arange(rows * length, dtype=np.int32)
    targets = ids[:, 1:].reshape(-1)
    batch = MicroBatch(ids[:, :-1], places, targets, rows * length, np.arange(rows, dtype=np.int32))
    step = make_step(
        model, KernelAdamW(learning_rate=1e-5), SingleProcess(), StepOptions(cpu_native=True)
    )

    def work() -> None:
        for _ in range(4):
            step([batch])

    return work


PIECES: dict[str, Callable[[Path], Work]] = {
    f"{NUM_CHATS:,} chats read from JSON lines": read_chats,
    f"{NUM_CHATS:,} chats rendered, tokenised and masked": rendered_chats,
    "200 batches of 8 of 5,000 examples": loaded_batches,
    "a checkpoint of 16 MiB": written_checkpoint,
    "4 steps of a small Llama, LoRA": trained_steps,
}


# --- telling the tool -----------------------------------------------------------------------------


@contextmanager
def by_callgrind() -> Any:
    """Count in the block; the count goes to a file of its own."""
    _tell_valgrind("instrumentation", "on")
    yield
    _tell_valgrind("instrumentation", "off")
    _tell_valgrind("dump")


def _tell_valgrind(*words: str) -> None:
    subprocess.run(["vgdb", f"--pid={os.getpid()}", *words], check=True, capture_output=True)


def by_perf(control: str, acknowledge: str) -> AbstractContextManager[None]:
    """Count in the block."""

    def tell(word: str) -> None:
        with open(control, "w", encoding="ascii") as out:
            out.write(f"{word}\n")
        with open(acknowledge, encoding="ascii") as answer:
            answer.readline()

    @contextmanager
    def counting() -> Any:
        tell("enable")
        yield
        tell("disable")

    return counting()


def main() -> None:
    """Prepare, do it once, then as often as asked for while the tool counts."""
    tool, piece, repeat, scratch = sys.argv[1:]
    work = PIECES[piece](Path(scratch))
    work()
    for _ in range(int(repeat)):
        with by_callgrind() if tool == "callgrind" else by_perf(*tool.split(":")[1:]):
            work()


if __name__ == "__main__":
    main()
