"""``allhands model get`` and ``allhands model check``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from allhands.cli.verbs_models import ModelGet
from allhands.cli.verbs_training import ModelCheck
from allhands.config.schema import build_config
from allhands.errors import ConfigError
from allhands.io.terminal import console_for, table_of
from allhands.model.load import Conversion, get_model
from allhands.run.gradient_check import GradientVerdict
from allhands.run.gradient_check_alone import check_gradient

# Number of tokens of the long row, if no data are given.
DEFAULT_LONGEST = 1024


def _named_once(asked: ModelGet | ModelCheck) -> str:
    """Return the model, named either as an argument or as an option.

    Raises:
        ConfigError: it is named in neither way, or in both.
    """
    given = [name for name in (asked.source, asked.model) if name is not None]
    if len(given) != 1:
        raise ConfigError(
            "it is named twice" if given else "this argument is missing",
            code="input-given-twice" if given else "argument-missing",
            where="MODEL",
            hint="leave --model out" if given else "name demo, a directory, or a Hub repository",
        )
    return given[0]


def get(asked: ModelGet) -> None:
    """Run the verb."""
    name = _named_once(asked)

    console = console_for(soft_wrap=True)
    target = asked.out or Path("models") / name.rstrip("/").split("/")[-1]
    conversion = Conversion(asked.quantize, asked.group_size, asked.dequantize, asked.dtype)
    console.print(
        f"model: {get_model(name, target, conversion, force=asked.force, report=console.print)}"
    )


def check(asked: ModelCheck) -> None:
    """Run the verb."""
    given, name = asked.flags, _named_once(asked)
    config = build_config({**given, "model": name, "train": True, "val_batches": 0})

    console = console_for(soft_wrap=True)
    longest = given.get("max_seq_length") or DEFAULT_LONGEST
    verdict = check_gradient(config, longest, with_data="data" in given, say=console.print)
    _print_verdict(console, verdict)
    if not verdict.compared:
        raise ConfigError(
            "nothing could be compared",
            code="comparison-impossible",
            where=name,
            hint="; ".join(verdict.notes),
        )
    verdict.raise_if_wrong(name)
    console.print("correct: no difference is larger than rounding")


def _print_verdict(console: Console, verdict: GradientVerdict) -> None:
    heads = (
        "tokens",
        "blocks",
        "loss",
        "mlx_lm's",
        "gradient differs by",
        "rounding up to",
        "most in",
    )
    rows: list[Sequence[str]] = []
    for row in verdict.compared:
        worst, share = row.worst
        losses = f"{row.loss:.5f}", f"{row.expected_loss:.5f}"
        differs = f"{row.difference:.1e}", f"{row.limit:.1g}", f"{worst} ({share:.1e})"
        rows.append((str(row.tokens), str(row.blocks), *losses, *differs))
    console.print(table_of(heads, rows, left=(6,)))
    for note in verdict.notes:
        console.print(f"note: {note}")
    if verdict.compared:
        console.print("differences are shares of the gradient's norm")
