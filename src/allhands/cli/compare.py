"""``allhands compare``: the answers of a model without and with an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from allhands.cli.answering import ranks_asked
from allhands.cli.verbs_models import Compare
from allhands.cluster.answering import run_divided
from allhands.data.demo import pirate_share
from allhands.data.templates import TEMPLATE_FILE, ChatChoice
from allhands.errors import ConfigError
from allhands.infer.comparing import (
    AnswersCompared,
    Load,
    answers,
    held_out_prompts,
    place_of_answers,
    save_comparison,
)
from allhands.io.formatting import counted, format_bytes
from allhands.io.terminal import console_for
from allhands.run.adapter_files import check_adapter


def compare(asked: Compare) -> None:
    """Run the verb."""
    ranks = ranks_asked(asked)
    adapter = asked.adapter_path
    if adapter is None:
        raise ConfigError(
            "there is nothing to compare with",
            code="option-missing",
            where="--adapter-path",
            hint="give a trained adapter",
        )

    def work(load: Load | None, speaks: bool) -> None:
        # The place of the answers is found before anything that takes long.
        target = place_of_answers(adapter, asked.out, force=asked.force) if speaks else None
        prompts = held_out_prompts(asked.data, asked.num_prompts)
        # The model without the adapter gets the same chat template.
        kept = adapter / TEMPLATE_FILE
        chat = ChatChoice(str(kept)) if kept.is_file() else None
        console = console_for()
        found: list[list[str]] = []
        for label, used, template in (("before", None, chat), ("after", adapter, None)):
            texts, speed = answers(asked.model, used, prompts, asked.max_tokens, template, load)
            found.append(texts)
            if speaks:
                show_speed(console, label, speed)
        if not speaks:
            return
        comparison = AnswersCompared(prompts, *found)
        show_comparison(
            console, comparison, asked.show, asked.max_tokens, scored=asked.data == "demo"
        )
        if target is not None:
            save_comparison(comparison, target)
            console.print(f"answers: {target}", soft_wrap=True)

    if ranks is not None:
        raise typer.Exit(
            run_divided(
                asked.model, adapter, ranks, lambda answering, speaks: work(answering.load, speaks)
            )
        )
    check_adapter(adapter)
    work(None, True)


def show_speed(console: Console, label: str, speed: Any) -> None:
    """Print speed and peak memory in a line, in the words of mlx_lm.generate."""
    console.print(
        f"{label}: prompt {speed.prompt_tokens} tokens, {speed.prompt_tps:.1f} tokens-per-sec; generation "
        f"{speed.generation_tokens} tokens, {speed.generation_tps:.1f} tokens-per-sec; "
        f"peak memory {format_bytes(speed.peak_memory_bytes)}",
    )


def show_comparison(
    console: Console, comparison: AnswersCompared, show: int, max_tokens: int, *, scored: bool
) -> None:
    """Print the first ``show`` answers side by side, and the score.

    Args:
        show: number of answers to print.
        max_tokens: most tokens of an answer.
        scored: True if the score is shown even if no answer has a pirate word.
    """
    console.print(comparison_table(comparison, show, max_tokens))
    # Answers that were learned from other data need no pirate words.
    if scored or comparison.before_share or comparison.after_share:
        for line in score_lines(comparison):
            console.print(line)


def comparison_table(comparison: AnswersCompared, show: int, max_tokens: int) -> Table:
    """Return a table of the first ``show`` answers side by side; they end after ``max_tokens``."""
    caption = f"an answer ends after {counted(max_tokens, 'token')}, wherever it is"
    table = Table(show_lines=True, expand=True, caption=caption, caption_justify="left")
    for name, ratio in (("prompt", 2), ("before", 4), ("after", 4)):
        table.add_column(name, ratio=ratio)
    rows = zip(comparison.prompts, comparison.before, comparison.after, strict=True)
    for row in list(rows)[:show]:
        # Text, not str: an answer may contain brackets that look like markup.
        table.add_row(*map(Text, row))
    return table


def score_lines(comparison: AnswersCompared) -> list[str]:
    """Return the score in words."""
    number = len(comparison.prompts)
    return [
        f"pirate words in the answers to {number} held-out prompts: {comparison.before_share:.1%} before, "
        f"{comparison.after_share:.1%} after",
        f"answers with one or more of them: {_with_one(comparison.before)} before, {_with_one(comparison.after)} after",
        "(a pirate word is one of the published lexicon, allhands/data/demo/lexicon.txt, or ends in -in')",
    ]


def _with_one(answers: Sequence[str]) -> str:
    return f"{sum(pirate_share([answer]) > 0 for answer in answers)} of {len(answers)}"
