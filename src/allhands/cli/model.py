"""``allhands model get`` and ``allhands model check``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allhands.config.schema import build_config
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

    console = console_for(highlight=False, soft_wrap=True, markup=False)
    target = out or Path("models") / name.rstrip("/").split("/")[-1]
    conversion = Conversion(quantize, group_size, dequantize, dtype)
    console.print(f"model: {get_model(name, target, conversion, force=force, report=console.print)}")


def check(
    source: ModelArgument = None,
    model: ModelOption = None,
    data: Annotated[str | None, typer.Option("--data", help="What will be trained on: its longest row counts.")] = None,
    fine_tune_type: Annotated[str | None, typer.Option("--fine-tune-type", help="lora, dora or full.")] = None,
    num_layers: Annotated[int | None, typer.Option("--num-layers", help="Blocks to train; -1 is all.")] = None,
    max_seq_length: Annotated[int | None, typer.Option("--max-seq-length", help="Tokens of the long row.")] = None,
    lora_parameters: Annotated[str | None, typer.Option("--lora-parameters", help="As for train (JSON).")] = None,
    mask_prompt: Annotated[bool | None, typer.Option("--mask-prompt", help="As for train.")] = None,
    chat_template: Annotated[str | None, typer.Option("--chat-template", help="As for train.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="As for train.")] = None,
    grad_checkpoint: Annotated[bool | None, typer.Option("--grad-checkpoint", help="As for train.")] = None,
    compile: Annotated[str | None, typer.Option("--compile", help="on: the form that GPUs use.")] = None,
    trust_remote_code: Annotated[bool | None, typer.Option("--trust-remote-code", help="As for train.")] = None,
) -> None:
    """Compare a training step's loss and gradient with those of mlx_lm's own model.

    A short row and a long one are computed by both. Every training does this before its first step, but within
    seconds: with fewer blocks where the model is large.
    """
    given = {name: value for name, value in locals().items() if name not in ("source", "model")}
    name = _named_once(source, model)
    config = build_config({**given, "model": name, "train": True, "val_batches": 0})
    from allhands.run.gradient_check_alone import check_gradient

    console = console_for(highlight=False, soft_wrap=True, markup=False)
    longest = max_seq_length or DEFAULT_LONGEST
    verdict = check_gradient(config, longest, with_data=data is not None, say=console.print)
    _print_verdict(console, verdict)
    if not verdict.compared:
        raise ConfigError("nothing could be compared", where=name, hint="; ".join(verdict.notes))
    verdict.raise_if_wrong(name)
    console.print("right: nothing differs by more than rounding")


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
