"""``allhands generate``: one prompt, one answer."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from allhands.cli.options import ChatTemplate, System, chat_choice
from allhands.errors import ConfigError


class Divided(StrEnum):
    """How a model is divided among ranks."""

    pipeline = "pipeline"


def generate(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to ask; '-' reads standard input.")],
    model: Annotated[
        str, typer.Option("--model", help="Model directory, Hugging Face repository, or 'demo'.")
    ] = "demo",
    adapter_path: Annotated[
        Path | None, typer.Option("--adapter-path", help="Directory with adapters.safetensors from a training run.")
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Tokens to generate at most.")] = 256,
    temp: Annotated[float, typer.Option("--temp", min=0.0, help="Sampling temperature; 0 is greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option("--top-p", min=0.0, max=1.0, help="Nucleus sampling; 1 is off.")] = 1.0,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of the sampling.")] = 0,
    system_prompt: Annotated[str | None, typer.Option("--system-prompt", help="System message.")] = None,
    ignore_chat_template: Annotated[bool, typer.Option(help="Give the prompt to the model as it is.")] = False,
    chat_template: ChatTemplate = None,
    system: System = "template",
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Allow a model's own Python code.")
    ] = False,
    strategy: Annotated[
        Divided | None, typer.Option("--strategy", help="pipeline: each rank has some of the model's blocks.")
    ] = None,
    num_ranks: Annotated[
        int | None, typer.Option("--num-ranks", "-n", min=1, help="With --strategy: processes to start here.")
    ] = None,
    hosts: Annotated[str | None, typer.Option("--hosts", help="With --strategy: computers, by name.")] = None,
    hostfile: Annotated[str | None, typer.Option("--hostfile", help="With --strategy: file of computers.")] = None,
    backend: Annotated[str | None, typer.Option("--backend", help="With --strategy: who moves the bytes.")] = None,
    pp_split: Annotated[
        str | None, typer.Option("--pp-split", help="With --strategy: blocks of each rank, such as 20,12.")
    ] = None,
) -> None:
    """Ask a model, with or without a trained adapter.

    Speed and peak memory are shown as mlx_lm does. A model larger than one computer answers with --strategy pipeline.
    """
    from allhands.cli.talk import GenerateOptions, run_generate, run_generate_divided

    options = GenerateOptions(
        model,
        adapter_path,
        prompt,
        max_tokens,
        temp,
        top_p,
        seed,
        system_prompt,
        ignore_chat_template,
        trust_remote_code,
        chat_choice(chat_template, system),
    )
    ranks = {
        name: value
        for name, value in (
            ("num_ranks", num_ranks),
            ("hosts", hosts),
            ("hostfile", hostfile),
            ("backend", backend),
            ("pp_split", pp_split),
        )
        if value is not None
    }
    if strategy is None:
        for name in ranks:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                "it has no effect without --strategy pipeline", where=flag, hint="add it, or leave it out"
            )
        run_generate(options)
    else:
        raise typer.Exit(run_generate_divided(options, ranks))
