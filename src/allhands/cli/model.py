"""``allhands model get``."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from allhands.model.load import get_model


def run_model_get(
    source: str,
    out: Path | None,
    quantize: int | None,
    group_size: int | None,
    dequantize: bool,
    dtype: str | None,
    force: bool,
) -> None:
    """Write the model to ``out`` (default: models/NAME) and say where it is."""
    console = Console(highlight=False, soft_wrap=True)
    target = out or Path("models") / source.rstrip("/").split("/")[-1]
    written = get_model(
        source,
        target,
        quantize_bits=quantize,
        group_size=group_size,
        dequantize=dequantize,
        dtype=dtype,
        force=force,
        report=lambda line: console.print(line, markup=False),
    )
    console.print(f"model: {written}", markup=False)
