"""``allhands generate``: one prompt, one answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from allhands.cli.answering import (
    Adapter,
    BackendName,
    DividedBy,
    Hostfile,
    Hosts,
    MaxTokens,
    ModelName,
    NumRanks,
    Seed,
    Split,
    SystemPrompt,
    Temperature,
    TopP,
    TrustCode,
    ranks_asked,
    tell_harm,
    tell_notes,
)
from allhands.cli.divided import run_divided
from allhands.cli.options import ChatTemplate, System, chat_choice
from allhands.errors import ConfigError

if TYPE_CHECKING:
    from allhands.infer.divided import AnsweringRanks
    from allhands.model.load import LoadedModel


def generate(
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="What to ask; '-' reads standard input.")],
    model: ModelName = "demo",
    adapter_path: Adapter = None,
    max_tokens: MaxTokens = 256,
    temp: Temperature = 0.0,
    top_p: TopP = 1.0,
    seed: Seed = 0,
    system_prompt: SystemPrompt = None,
    ignore_chat_template: Annotated[bool, typer.Option(help="Give the prompt to the model as it is.")] = False,
    chat_template: ChatTemplate = None,
    system: System = "template",
    trust_remote_code: TrustCode = False,
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
    ranks = ranks_asked(locals())
    chat = chat_choice(chat_template, system)
    if prompt == "-":
        if ranks is not None:
            raise ConfigError("several ranks have no standard input", where="--prompt -", hint="give the text itself")
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise ConfigError("the prompt is empty", where="--prompt", hint="say what to ask")
    if ignore_chat_template and (chat_template is not None or system != "template"):
        flag = "--system" if chat_template is None else "--chat-template"
        raise ConfigError("it has no effect with --ignore-chat-template", where=flag, hint="leave one of the two out")

    def answer(loaded: LoadedModel, *, speaks: bool = True) -> None:
        from allhands.infer.generate import Sampling, prompt_tokens, stream_answer

        if speaks:
            tell_notes(loaded)
            tell_harm(adapter_path, model)
        tokens = prompt_tokens(loaded, prompt, system_prompt=system_prompt, use_template=not ignore_chat_template)
        cost = None
        for text, cost in stream_answer(loaded, tokens, max_tokens, Sampling(temp, top_p, seed)):  # noqa: B007
            if speaks:
                print(text, end="", flush=True)
        if not speaks:
            return
        print("\n" + "=" * 10)
        if cost is not None:
            print(f"Prompt: {cost.prompt_tokens} tokens, {cost.prompt_tps:.3f} tokens-per-sec")
            print(f"Generation: {cost.generation_tokens} tokens, {cost.generation_tps:.3f} tokens-per-sec")
            print(f"Peak memory: {cost.peak_memory_bytes / 1e9:.3f} GB")

    def work(answering: AnsweringRanks, speaks: bool) -> None:
        answer(answering.load(adapter_path, chat), speaks=speaks)

    if ranks is not None:
        raise typer.Exit(run_divided(model, adapter_path, ranks, work, trust_remote_code=trust_remote_code))
    from allhands.infer.generate import load_for_generation
    from allhands.model.beyond import answering, limits_told

    with limits_told(answering(model, adapter_path, trust_remote_code=trust_remote_code)):
        answer(load_for_generation(model, adapter_path, trust_remote_code=trust_remote_code, chat=chat))
