"""``allhands generate``: one prompt, one answer."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import typer

from allhands.cli.answering import chat_choice, ranks_asked, tell_harm, tell_notes
from allhands.cli.divided import run_divided
from allhands.cli.verbs_models import Generate
from allhands.errors import ConfigError

if TYPE_CHECKING:
    from allhands.infer.divided import AnsweringRanks
    from allhands.model.load import LoadedModel


def generate(asked: Generate) -> None:
    """Run the verb."""
    prompt = asked.prompt
    ranks = ranks_asked(asked)
    chat = chat_choice(asked.chat_template, asked.system)
    if prompt == "-":
        if ranks is not None:
            raise ConfigError("several ranks have no standard input", where="--prompt -", hint="give the text itself")
        prompt = sys.stdin.read()
    if not prompt.strip():
        raise ConfigError("the prompt is empty", where="--prompt", hint="say what to ask")
    if asked.ignore_chat_template and (asked.chat_template is not None or asked.system != "template"):
        flag = "--system" if asked.chat_template is None else "--chat-template"
        raise ConfigError("it has no effect with --ignore-chat-template", where=flag, hint="leave one of the two out")

    def answer(loaded: LoadedModel, *, speaks: bool = True) -> None:
        from allhands.infer.generate import Sampling, prompt_tokens, stream_answer

        if speaks:
            tell_notes(loaded)
            tell_harm(asked.adapter_path, asked.model)
        tokens = prompt_tokens(
            loaded, prompt, system_prompt=asked.system_prompt, use_template=not asked.ignore_chat_template
        )
        cost, sampling = None, Sampling(asked.temp, asked.top_p, asked.seed)
        for text, cost in stream_answer(loaded, tokens, asked.max_tokens, sampling):  # noqa: B007
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
        answer(answering.load(asked.adapter_path, chat), speaks=speaks)

    if ranks is not None:
        raise typer.Exit(
            run_divided(asked.model, asked.adapter_path, ranks, work, trust_remote_code=asked.trust_remote_code)
        )
    from allhands.infer.generate import load_for_generation
    from allhands.model.beyond import answering, limits_told

    with limits_told(answering(asked.model, asked.adapter_path, trust_remote_code=asked.trust_remote_code)):
        answer(
            load_for_generation(asked.model, asked.adapter_path, trust_remote_code=asked.trust_remote_code, chat=chat)
        )
