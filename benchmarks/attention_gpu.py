"""Attention's forward and backward pass on an NVIDIA GPU by length of rows: as MLX has it
(``plain``), and with rows that are padded to a multiple of 128 (``padded``).

    python benchmarks/attention_gpu.py

Prints a table: milliseconds of a pass over about 8,192 tokens in bfloat16, the best of four, and
megabytes that four passes need. See README.md in this directory.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

from allhands.kernels.fused import kernels, ops
from allhands.kernels.selection import KernelSelection

# isort: split
import mlx.core as mx

LENGTHS = (20, 40, 64, 100, 136, 200, 264, 300, 392, 520, 700, 1000, 1386, 2000)
# Query heads, key heads, and features of a head.
HEADS = ((32, 8, 64), (9, 3, 64), (32, 8, 128))
TOKENS, PASSES = 8192, 4


def passes(
    heads: tuple[int, int, int], length: int, form: str
) -> tuple[Callable[[mx.array], mx.array], mx.array]:
    """The function that computes some passes one after the other, and its input."""
    queries, keys, width = heads
    rows = max(1, TOKENS // length)
    x = mx.random.normal((rows, length, queries + 2 * keys, width)).astype(mx.bfloat16)
    angles = mx.random.uniform(0, 6, (length, width // 2))
    turns = mx.stack([mx.cos(angles), mx.sin(angles)], axis=-1)
    cotangent = mx.random.normal((rows, length, queries * width)).astype(mx.bfloat16)
    mx.eval(x, turns, cotangent)
    selection = KernelSelection({} if form == "padded" else {"attention": "plain"})

    def attended(x: mx.array) -> mx.array:
        longer = ops.attended_length(x, "causal", selection)
        q, k, v = ops.rope_split(x, turns, (queries, keys), selection, longer)
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=width**-0.5, mask="causal")
        return (y[:, :, :length].transpose(0, 2, 1, 3).reshape(cotangent.shape) * cotangent).sum()

    gradient = mx.grad(attended)

    def run(x: mx.array) -> mx.array:
        for _ in range(PASSES):
            x = x + 1e-3 * gradient(x)
        return x

    return run, x


def measured(heads: tuple[int, int, int], length: int, form: str) -> tuple[float, float]:
    """Milliseconds of a pass, and megabytes."""
    run, x = passes(heads, length, form)
    mx.eval(run(x))
    mx.eval(run(x))
    held = mx.get_active_memory()
    mx.reset_peak_memory()
    times: list[float] = []
    for _ in range(4):
        began = time.perf_counter()
        mx.eval(run(x))
        times.append(time.perf_counter() - began)
    return 1e3 * min(times) / PASSES, (mx.get_peak_memory() - held) / 1e6


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Attention by length of rows.")
    parser.parse_args()
    if not kernels.available():
        raise SystemExit("needs an NVIDIA GPU and MLX's CUDA build")
    # Shorter rows are computed in the plain form otherwise.
    ops.PADDED_FROM_TOKENS = 1  # pyright: ignore[reportConstantRedefinition]
    print("| heads | tokens | plain, ms | padded, ms | plain, MB | padded, MB |")
    print("|---|---:|---:|---:|---:|---:|")
    for heads in HEADS:
        for length in LENGTHS:
            (plain, before), (padded, after) = (
                measured(heads, length, form) for form in ("plain", "padded")
            )
            told = f"{plain:.2f} | {padded:.2f} | {before:,.0f} | {after:,.0f}"
            print(f"| {heads[0]} and {heads[1]} x {heads[2]} | {length} | {told} |", flush=True)


if __name__ == "__main__":
    main()
