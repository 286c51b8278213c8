"""What a step on a GPU is expected to hold, against what steps on an H200 held."""

from __future__ import annotations

from dataclasses import replace

import pytest

from allhands.run.training_memory import DecoderShape, Work, on_gpu

MIXTURE = DecoderShape(30, 576, 1536, 576, 192, 50257, experts=8, active=2)
LLAMA = DecoderShape(layers=16, dims=2048, mlp_dims=8192, queries=2048, keys=512, vocabulary=128256)
SMALLER = DecoderShape(
    layers=16, dims=2048, mlp_dims=8192, queries=2048, keys=512, vocabulary=50304
)
SMOL = DecoderShape(layers=30, dims=576, mlp_dims=1536, queries=576, keys=192, vocabulary=49152)
FEW_WORDS = replace(LLAMA, vocabulary=4096, heads=32)
PADDED = replace(FEW_WORDS, padded=True)
ADAPTED = Work("lora", 11088, 16, 1_985_613_824, 22_544_384, "adamw", row_tokens=1386)


@pytest.mark.parametrize(
    ("blocks", "work", "gigabytes"),
    [
        (LLAMA, Work("full", 8192, 16, 2_471_645_608, 2_471_645_608, "adamw"), 20.6),
        (LLAMA, Work("lora", 8192, 16, 2_494_000_000, 22_544_384, "adamw"), 14.3),
        (SMOL, Work("full", 16384, 30, 269_030_016, 269_030_016, "adamw"), 9.9),
        # Of another vocabulary: with float32 copies, all layers adapted, and 8 layers of what was 4
        # bits.
        (
            SMALLER,
            Work("full", 8192, 16, 2_152_337_408, 2_152_337_408, "adamw", masters=True),
            27.8,
        ),
        (SMALLER, Work("lora", 8192, 16, 2_152_337_408 + 22_544_384, 22_544_384, "adamw"), 13.88),
        (SMALLER, Work("lora", 8192, 8, 2_152_337_408 + 11_272_192, 11_272_192, "adamw"), 8.82),
        (
            MIXTURE,
            Work("full", 8192, 30, 1_385_400_960, 1_385_400_960, "adamw", masters=True),
            21.6,
        ),
        # Activations computed again: of full training the update's peak, in which the largest array
        # is there twice.
        (
            LLAMA,
            Work(
                "full",
                8192,
                16,
                2_471_645_608,
                2_471_645_608,
                "adamw",
                recomputed=True,
                masters=True,
            ),
            23.45,
        ),
        (LLAMA, Work("lora", 8192, 16, 2_494_000_000, 22_544_384, "adamw", recomputed=True), 5.95),
        # Of a small vocabulary, where logits take little: rows of 1,024 tokens, then of up to 1,386,
        # with and without the scores of attention in memory; 8 of these blocks; and a small model.
        (FEW_WORDS, replace(ADAPTED, tokens=8192, row_tokens=1024), 13.585),
        (FEW_WORDS, ADAPTED, 19.47),
        (PADDED, ADAPTED, 17.91),
        (PADDED, replace(ADAPTED, with_scores=True), 19.47),
        (
            FEW_WORDS,
            replace(
                ADAPTED, trained_layers=8, weights_bytes=1_974_341_632, trained_bytes=11_272_192
            ),
            12.897,
        ),
        (
            replace(SMOL, vocabulary=4096),
            Work("lora", 16384, 30, 217_125_504 + 9_768_960, 9_768_960, "adamw", row_tokens=2048),
            9.488,
        ),
    ],
)
def test_what_was_measured_on_a_gpu_with_nothing_ahead(
    blocks: DecoderShape, work: Work, gigabytes: float
) -> None:
    """Of benchmarks/gpu.py's works on an H200: the peak of MLX's memory in the first step."""
    assert on_gpu(blocks, work).arrays / 1e9 == pytest.approx(gigabytes, rel=0.05)


@pytest.mark.parametrize(
    ("blocks", "trained", "tokens", "gigabytes"),
    [
        (FEW_WORDS, 1_963_069_440, 8192, 24.377),
        (replace(SMOL, vocabulary=4096), 217_125_504, 16384, 10.815),
    ],
)
def test_full_training_of_few_words_on_a_gpu(
    blocks: DecoderShape, trained: int, tokens: int, gigabytes: float
) -> None:
    work = Work("full", tokens, blocks.layers, trained, trained, "adamw", masters=True)
    assert on_gpu(blocks, work).arrays / 1e9 == pytest.approx(gigabytes, rel=0.1)
