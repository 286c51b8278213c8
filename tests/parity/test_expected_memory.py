"""What is expected of a run's memory before its first step, beside what the monitor then saw."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import changed
from tiny import run_allhands, write_chat_data, write_tokenizer

from allhands.kernels import native
from allhands.observe.monitor import read_samples
from allhands.parallel.costs import Memory
from allhands.run.expecting import held_by, scarce
from allhands.run.training_memory import DecoderShape, Work, blocks_of, of_process, on_cpu
from allhands.runtime.sizing import Sizing

SHAPE = (
    "--shape",
    "llama",
    "--layers",
    "6",
    "--dims",
    "256",
    "--mlp-dims",
    "768",
    "--heads",
    "4",
    "--block-size",
    "256",
)
SIZES = {
    "num_hidden_layers": 6,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_attention_heads": 4,
}
BLOCKS = DecoderShape(layers=6, dims=256, mlp_dims=768, queries=256, keys=128, vocabulary=1000)
WORK = Work("lora", 1024, 6, 30_000_000, 1_000_000, "adamw")

needs_native = pytest.mark.skipif(
    not native.available(), reason="no C compiler, or not a Linux CPU"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Texts, chats, a tokenizer, and a model that was pre-trained for two batches."""
    folder = tmp_path_factory.mktemp("memory")
    write_tokenizer(folder / "tokenizer")
    write_chat_data(folder / "chats")
    random = np.random.default_rng(0)
    texts = ["".join(random.choice(list("abcdefgh "), 400)) for _ in range(60)]
    (folder / "texts").mkdir()
    (folder / "texts" / "train.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts)
    )
    return folder


def peak_and_expected(run: Path) -> tuple[int, int]:
    samples = [sample for sample in read_samples(run) if sample.role == "rank" and sample.rank == 0]
    expected = {sample.estimated_bytes for sample in samples if sample.estimated_bytes}
    assert len(expected) == 1
    # The curves that are drawn at the end come on top of it.
    return max(sample.peak_rss_bytes for sample in samples if sample.phase != "end"), expected.pop()


def pretrain(place: Path, out: Path, *more: str) -> tuple[int, int]:
    where = (
        "--data",
        str(place / "texts"),
        "--tokenizer",
        str(place / "tokenizer"),
        "--adapter-path",
        str(out),
    )
    steps = ("--batch-size", "8", "--iters", "2", "--save-every", "2", "--sample-prompts", "[]")
    words = changed([*where, *SHAPE, *steps], more)
    # Each run checks its gradient first, as the first of its kind does.
    words += ["--gradient-check", "on"]
    done = run_allhands("pretrain", *map(str, words), env={"ALLHANDS_MONITOR_EVERY_S": "0.2"})
    assert done.returncode == 0, done.stderr
    return peak_and_expected(out)


@pytest.mark.slow
@needs_native
def test_full_training(place: Path, tmp_path: Path) -> None:
    peak, expected = pretrain(place, tmp_path / "kept")
    assert expected == pytest.approx(peak, rel=0.1)
    again, less = pretrain(place, tmp_path / "recomputed", "--grad-checkpoint")
    assert less == pytest.approx(again, rel=0.1)
    # It is no constant that happens to be near.
    assert again < 0.7 * peak


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize(
    ("optimizer", "head"),
    [
        ("muon", "--tied"),
        *(
            pytest.param(*each, marks=pytest.mark.long)
            for each in [("adamw", "--tied"), ("muon", "--no-tied")]
        ),
        ("adamw", "--no-tied"),
    ],
)
def test_large_vocabularies(place: Path, tmp_path: Path, optimizer: str, head: str) -> None:
    # Embeddings, and a head of its own, are half of the weights or more; muon leaves them to adamw.
    more = ("--vocabulary", "30000", head, "--optimizer", optimizer)
    peak, expected = pretrain(place, tmp_path / "run", *more)
    assert expected == pytest.approx(peak, rel=0.1)


@pytest.mark.long
@needs_native
@pytest.mark.parametrize(
    "more", [("--outer-momentum", "0.9"), ("--compress", "int8")], ids=["outer", "packed"]
)
def test_what_ranks_keep_from_one_exchange_to_the_next(
    place: Path, tmp_path: Path, more: tuple[str, ...]
) -> None:
    # Weights are much of it: a round's first ones, and the outer momentum or what packing left out,
    # are as much again.
    words = (
        "-n",
        "2",
        "--sync-every",
        "2",
        "--dims",
        "512",
        "--mlp-dims",
        "1536",
        "--iters",
        "4",
        "--save-every",
        "4",
    )
    peak, expected = pretrain(place, tmp_path / "run", *words, *more)
    assert expected == pytest.approx(peak, rel=0.1)


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize("method", ["lora", pytest.param("dora", marks=pytest.mark.long)])
def test_adapters(place: Path, tmp_path: Path, method: str) -> None:
    pretrain(place, tmp_path / "base", "--iters", "1")
    where = ["--model", str(tmp_path / "base/model"), "--data", str(place / "texts")]
    where += ["--adapter-path", str(tmp_path / "out"), "--fine-tune-type", method]
    options = [
        "--batch-size",
        "8",
        "--num-layers",
        "-1",
        "--packing",
        "--max-seq-length",
        "256",
        "--iters",
        "3",
    ]
    options += ["--gradient-check", "on"]
    done = run_allhands("train", *where, *options, env={"ALLHANDS_MONITOR_EVERY_S": "0.2"})
    assert done.returncode == 0, done.stderr
    peak, expected = peak_and_expected(tmp_path / "out")
    assert expected == pytest.approx(peak, rel=0.12)


@pytest.mark.slow
@needs_native
@pytest.mark.parametrize(
    "more",
    [
        ("--shape", "qwen3"),
        # Heads of 24, which no vector divides, and attention within documents: neither may cost the
        # square of a row.
        ("--dims", "240", "--heads", "10", "--isolate-documents"),
        (
            "--shape",
            "mixtral",
            "--layers",
            "4",
            "--experts",
            "4",
            "--experts-per-token",
            "2",
            "--mlp-dims",
            "512",
        ),
        pytest.param(
            ("--shape", "mixtral", "--experts", "8", "--grad-checkpoint"), marks=pytest.mark.long
        ),
        # The head is most of it.
        pytest.param(
            ("--layers", "3", "--vocabulary", "40000", "--batch-size", "2"), marks=pytest.mark.long
        ),
    ],
)
def test_other_families(place: Path, tmp_path: Path, more: tuple[str, ...]) -> None:
    # The last of an option counts.
    peak, expected = pretrain(place, tmp_path / "out", *more)
    assert expected == pytest.approx(peak, rel=0.1)


@pytest.mark.parametrize(
    ("more", "found"),
    [
        (
            {"vocab_size": 10, "num_local_experts": 8, "num_experts_per_tok": 2},
            DecoderShape(6, 256, 768, 256, 256, 10, experts=8, active=2, heads=4),
        ),
        (
            {
                "vocab_size": 10,
                "num_experts": 16,
                "num_experts_per_tok": 4,
                "moe_intermediate_size": 64,
            },
            DecoderShape(6, 256, 64, 256, 256, 10, experts=16, active=4, heads=4),
        ),
        (
            {
                "vocab_size": 10,
                "num_experts": 16,
                "num_experts_per_tok": 4,
                "decoder_sparse_step": 2,
            },
            None,
        ),
        ({"vocab_size": 10, "n_routed_experts": 16, "num_experts_per_tok": 4}, None),
        ({"vocab_size": 10}, DecoderShape(6, 256, 768, 256, 256, 10, heads=4)),
        (
            {"vocab_size": 10, "num_key_value_heads": 1, "head_dim": 32},
            DecoderShape(6, 256, 768, 128, 32, 10, heads=4),
        ),
        ({}, None),
        ({"vocab_size": 10, "num_local_experts": 8}, None),
        ({"vocab_size": "many"}, None),
    ],
)
def test_the_widths_of_a_model(more: dict[str, Any], found: DecoderShape | None) -> None:
    assert blocks_of({**SIZES, **more}) == found


def test_what_makes_it_more_or_less() -> None:
    def arrays(**changes: Any) -> int:
        return on_cpu(BLOCKS, Work(**{**WORK.__dict__, **changes})).arrays

    usual = arrays()
    assert (
        arrays(recomputed=True)
        < arrays(trained_layers=3)
        < usual
        < arrays(tokens=2048)
        < arrays(method="dora")
    )
    # Twice the tokens are twice the activations, and nothing else.
    fixed = 30_000_000 + 2 * 1_000_000 + 1_000_000
    assert arrays(tokens=2048) - fixed == pytest.approx(2 * (usual - fixed), rel=1e-6)
    # With few tokens the update is the peak: weights, what AdamW keeps, and a quarter more than the
    # gradients.
    assert arrays(tokens=1, method="full", trained_bytes=30_000_000) == pytest.approx(
        4.25 * 30_000_000, rel=1e-6
    )
    assert of_process(on_cpu(BLOCKS, WORK), 200_000_000, 30_000_000) > 170_000_000 + usual


@pytest.mark.parametrize(
    ("arrays", "others", "peak"),
    [
        (8.2, 121.7, 136.7),
        (22.2, 127.7, 159.4),
        (58.0, 132.6, 208.7),
        (146.1, 135.0, 307.5),
        (229.2, 152.4, 415.5),
    ],
)
def test_a_process_takes_more_than_its_arrays(arrays: float, others: float, peak: float) -> None:
    """Megabytes of pre-trainings of two layers, 64 to 512 wide, as the monitor saw them."""
    found = of_process(Memory(0, 0, int(1e6 * arrays), 0, 0), int(1e6 * others), 0)
    assert found == pytest.approx(1e6 * peak, rel=0.025)


def test_too_much_is_told() -> None:
    assert scarce(10**9, 10**9, 4) is None
    told = scarce(10**15, 10**9, 2)
    assert told is not None
    assert "about 1e+06 GB of memory each" in told
    assert "--grad-checkpoint" in told
    # What a control group allows counts, too.
    assert scarce(2 * 10**9, 2 * 10**9, 1, room=2 * 10**9) is None
    assert scarce(2 * 10**9, 2 * 10**9, 1, room=10**9) is not None


@pytest.mark.parametrize(
    ("room", "expected"),
    [(10_000, 2048), (2048, 2048), (2047, 1024), (700, 512), (300, 300), (1, 300)],
)
def test_micro_batches_are_as_small_as_a_rank_needs_them(room: int, expected: int) -> None:
    """A row is not cut: it is what is computed at once at least."""
    sizing = held_by(Sizing(2048), room, 300, lambda cut: cut.max_tokens)
    assert sizing.max_tokens == expected
    assert held_by(Sizing(2048), room, 300, lambda cut: None).max_tokens == 2048, "nobody knows"
    assert held_by(Sizing(128), 1, 300, lambda cut: cut.max_tokens).max_tokens == 128
