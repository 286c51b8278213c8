"""``allhands model get`` and ``allhands model check``."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from allhands.cli.options import options_of, with_parameters
from allhands.config.schema import TrainConfig, build_config
from allhands.errors import ConfigError
from allhands.io.terminal import console_for, table_of

if TYPE_CHECKING:
    from rich.console import Console

    from allhands.run.gradient_check import GradientVerdict

# Tokens of the long row where no data say how long rows are.
DEFAULT_LONGEST = 1024

ModelArgument = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="'demo', a model directory, or a Hugging Face repository.")
]
ModelOption = Annotated[str | None, typer.Option("--model", help="The same, as other commands have it.")]


def _named_once(argument: str | None, option: str | None) -> str:
    """Return the model that was named in one of both ways.

    Raises:
        typer.BadParameter: in none, or in both.
    """
    given = [name for name in (argument, option) if name is not None]
    if len(given) != 1:
        message = "it is named twice: drop --model" if given else "name one: demo, a directory, or a Hub repository"
        raise typer.BadParameter(message, param_hint="MODEL")
    return given[0]


def get(
    source: ModelArgument = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Directory to write. [models/NAME]")] = None,
    model: ModelOption = None,
    quantize: Annotated[int | None, typer.Option("--quantize", metavar="BITS", help="Quantise to 2-8 bits.")] = None,
    group_size: Annotated[int | None, typer.Option("--group-size", help="Values a quantisation group.")] = None,
    dequantize: Annotated[bool, typer.Option("--dequantize", help="Write dense weights.")] = False,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32, float16 or bfloat16.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing directory.")] = False,
) -> None:
    """Fetch a model into a normal MLX model directory.

    It is quantised, dequantised or cast as asked.
    """
    name = _named_once(source, model)
    from allhands.model.load import Conversion, get_model

    console = console_for(soft_wrap=True)
    target = out or Path("models") / name.rstrip("/").split("/")[-1]
    conversion = Conversion(quantize, group_size, dequantize, dtype)
    console.print(f"model: {get_model(name, target, conversion, force=force, report=console.print)}")


def _check(source: str | None = None, model: str | None = None, **given: Any) -> None:
    name = _named_once(source, model)
    config = build_config({**given, "model": name, "train": True, "val_batches": 0})
    from allhands.run.gradient_check_alone import check_gradient

    console = console_for(soft_wrap=True)
    longest = given.get("max_seq_length") or DEFAULT_LONGEST
    verdict = check_gradient(config, longest, with_data="data" in given, say=console.print)
    _print_verdict(console, verdict)
    if not verdict.compared:
        raise ConfigError("nothing could be compared", where=name, hint="; ".join(verdict.notes))
    verdict.raise_if_wrong(name)
    console.print("right: nothing differs by more than rounding")


check = with_parameters(
    _check,
    """Compare a training step's loss and gradient with those of mlx_lm's own model.

    A short row and a long one are computed by both. Every training does this before its first step, but within
    seconds: with fewer blocks where the model is large. Options are those of training; with --data its longest row
    is compared.
    """,
    [
        inspect.Parameter("source", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ModelArgument),
        inspect.Parameter("model", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=ModelOption),
        *options_of(
            TrainConfig,
            (
                *("data", "fine_tune_type", "num_layers", "max_seq_length", "lora_parameters", "mask_prompt"),
                *("chat_template", "system", "grad_checkpoint", "compile", "trust_remote_code"),
            ),
        ),
    ],
)


def _print_verdict(console: Console, verdict: GradientVerdict) -> None:
    heads = ("tokens", "blocks", "loss", "mlx_lm's", "gradient differs by", "rounding up to", "most in")
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
