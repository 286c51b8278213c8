"""``allhands model get`` and ``allhands model check``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from allhands.config.schema import build_config
from allhands.errors import ConfigError
from allhands.io.terminal import console_for
from allhands.model.adapters import make_trainable
from allhands.model.dropout import dropout_keys_of
from allhands.model.load import Conversion, LoadedModel, get_model, load_model
from allhands.model.passes import apply_passes
from allhands.run.datasets import load_data
from allhands.run.gradient_check import GradientCheck, GradientVerdict
from allhands.run.kernel_forms import kernel_forms
from allhands.run.preparing import pass_context
from allhands.runtime.accelerator import detect

# Tokens of the long row where no data say how long rows are.
DEFAULT_LONGEST = 1024


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
    console = console_for(highlight=False, soft_wrap=True)
    target = out or Path("models") / source.rstrip("/").split("/")[-1]
    written = get_model(
        source,
        target,
        Conversion(quantize, group_size, dequantize, dtype),
        force=force,
        report=lambda line: console.print(line, markup=False),
    )
    console.print(f"model: {written}", markup=False)


def run_model_check(model: str, data: str | None, longest: int | None, settings: Mapping[str, Any]) -> None:
    """Compare the gradient of a training step of ``model`` with that of mlx_lm's own, and print what was found.

    Args:
        data: what will be trained on; its longest row is compared.
        longest: tokens of the long row at most.
        settings: of a training, by the names of its options; ``None`` is not given.

    Raises:
        ModelError: they differ.
        ConfigError: there is nothing to compare.
    """
    import mlx.core as mx

    console = console_for(highlight=False, soft_wrap=True)
    wanted = {**settings, "model": model, "data": data, "max_seq_length": longest, "train": True, "val_batches": 0}
    config = build_config(wanted)
    accelerator = detect()
    loaded = load_model(config.model, trust_remote_code=config.trust_remote_code)
    tokens, largest = longest or DEFAULT_LONGEST, _vocabulary(loaded) - 1
    if data is not None:
        sets = load_data(config)
        assert sets.train is not None
        tokens, largest = int(sets.train.work.max()) + 1, sets.largest_token
    mx.random.seed(config.seed)
    make_trainable(loaded.model, config)
    cpu_native = accelerator.runs_natively(config.compile)
    console.print(f"mlx_lm's own model computes rows of 16 and {tokens} tokens, then a training step does ...")
    check = GradientCheck(
        loaded.model, accelerator, loaded.config, longest=tokens, largest_token=largest, bounded=False
    )
    selection = kernel_forms(accelerator, cpu_native=cpu_native).selection
    for each in apply_passes(loaded.model, pass_context(loaded.model, config, accelerator, selection)):
        console.print(f"pass: {each}", markup=False)
    verdict = check.compare(loaded.model, cpu_native=cpu_native, dropout=dropout_keys_of(loaded.model))
    _print_verdict(console, verdict)
    if not verdict.compared:
        raise ConfigError("nothing could be compared", where=model, hint="; ".join(verdict.notes))
    verdict.raise_if_wrong(model)
    console.print("right: nothing differs by more than rounding")


def _vocabulary(loaded: LoadedModel) -> int:
    config = {**loaded.config, **(loaded.config.get("text_config") or {})}
    size = config.get("vocab_size")
    return size if isinstance(size, int) and size > 0 else len(loaded.tokenizer.get_vocab())


def _print_verdict(console: Console, verdict: GradientVerdict) -> None:
    table = Table(box=None, pad_edge=False)
    for heading in ("tokens", "blocks", "loss", "mlx_lm's", "gradient differs by", "rounding up to", "most in"):
        table.add_column(heading, justify="left" if heading == "most in" else "right")
    for row in verdict.compared:
        worst, share = row.worst
        losses = f"{row.loss:.5f}", f"{row.expected_loss:.5f}"
        table.add_row(
            str(row.tokens),
            str(row.blocks),
            *losses,
            f"{row.difference:.1e}",
            f"{row.limit:.1g}",
            f"{worst} ({share:.1e})",
        )
    console.print(table)
    for note in verdict.notes:
        console.print(f"note: {note}", markup=False)
    if verdict.compared:
        console.print("differences are shares of the gradient's norm")
