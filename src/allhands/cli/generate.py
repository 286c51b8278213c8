"""``allhands generate``: one prompt, one answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import typer

from allhands.cli.answering import chat_choice, ranks_asked, tell_harm, tell_notes
from allhands.cli.parser import refuse_idle
from allhands.cli.verbs_models import Chat, Generate
from allhands.cluster.answering import run_divided
from allhands.errors import ConfigError
from allhands.io.formatting import format_bytes

if TYPE_CHECKING:
    from allhands.infer.divided import AnsweringRanks
    from allhands.model.load import LoadedModel

# Generates with a model; prints if the flag is true; the last argument is the ranks that hold the
# model together, or ``None``.
Work = Callable[["LoadedModel", bool, "AnsweringRanks | None"], None]


def generate(asked: Generate) -> None:
    """Run the verb."""
    ranks = ranks_asked(asked)
    prompt = _prompt(asked, on_ranks=ranks is not None)

    def answer(loaded: LoadedModel, speaks: bool, _: AnsweringRanks | None) -> None:
        from allhands.infer.generate import Sampling, prompt_tokens, stream_answer

        use_template = not asked.ignore_chat_template
        tokens = prompt_tokens(
            loaded, prompt, system_prompt=asked.system_prompt, use_template=use_template
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
            print(
                f"Generation: {cost.generation_tokens} tokens, {cost.generation_tps:.3f} tokens-per-sec"
            )
            print(f"Peak memory: {format_bytes(cost.peak_memory_bytes)}")

    with_model(asked, ranks, answer)


def _prompt(asked: Generate, *, on_ranks: bool) -> str:
    """Return the prompt.

    Raises:
        ConfigError: the prompt is empty, its options exclude each other, or several ranks would
            read standard input.
    """
    if asked.ignore_chat_template:
        system = None if asked.system == "template" else asked.system
        idle = {"--chat-template": asked.chat_template, "--system": system}
        refuse_idle(idle, "with --ignore-chat-template", "leave one of the two out")
    if asked.prompt == "-" and on_ranks:
        raise ConfigError(
            "several ranks have no standard input",
            code="terminal-unreachable",
            where="--prompt -",
            hint="give the text itself",
        )
    prompt = sys.stdin.read() if asked.prompt == "-" else asked.prompt
    if not prompt.strip():
        raise ConfigError(
            "the prompt is empty", code="value-empty", where="--prompt", hint="give a question"
        )
    return prompt


def with_model(
    asked: Generate | Chat,
    ranks: Mapping[str, Any] | None,
    work: Work,
    env: Mapping[str, str] | None = None,
) -> None:
    """Load the model, print its notes, and call ``work``.

    Args:
        ranks: options of the ranks that divide the model's blocks; ``None``: this process has the
            whole model.
        env: further environment variables of the ranks.

    Raises:
        AllhandsError: the model cannot be loaded, or options do not match.
        typer.Exit: the ranks have ended.
    """
    adapter, trust = asked.adapter_path, asked.trust_remote_code
    chat = chat_choice(asked)

    def told(loaded: LoadedModel, speaks: bool, answering: AnsweringRanks | None) -> None:
        if speaks:
            tell_notes(loaded)
            tell_harm(adapter, asked.model)
        work(loaded, speaks, answering)

    if ranks is not None:
        raise typer.Exit(
            run_divided(
                asked.model,
                adapter,
                ranks,
                lambda ranks, speaks: told(ranks.load(adapter, chat), speaks, ranks),
                trust_remote_code=trust,
                env=env,
            )
        )
    from allhands.infer.generate import load_for_generation
    from allhands.model.beyond import answering, limits_told

    with limits_told(answering(asked.model, adapter, trust_remote_code=trust)):
        told(
            load_for_generation(asked.model, adapter, trust_remote_code=trust, chat=chat),
            True,
            None,
        )
