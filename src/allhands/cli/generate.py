"""``allhands generate``: one prompt, one answer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from allhands.cli.options import ChatTemplate, System, chat_choice
from allhands.cli.rank_options import BackendName, DividedBy, Hostfile, Hosts, NumRanks, Split, ranks_asked


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
    strategy: DividedBy = None,
    num_ranks: NumRanks = None,
    hosts: Hosts = None,
    hostfile: Hostfile = None,
    backend: BackendName = None,
    pp_split: Split = None,
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
    ranks = ranks_asked(
        strategy, num_ranks=num_ranks, hosts=hosts, hostfile=hostfile, backend=backend, pp_split=pp_split
    )
    if ranks is None:
        run_generate(options)
    else:
        raise typer.Exit(run_generate_divided(options, ranks))
