"""``allhands compare``: the answers of a model without and with an adapter."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from allhands.cli.answering import ranks_asked
from allhands.cli.verbs_models import Compare
from allhands.cluster.answering import run_divided
from allhands.data.demo import demo_records, pirate_share
from allhands.data.records import ColumnNames, Record
from allhands.data.splits import full_places, load_split
from allhands.data.templates import TEMPLATE_FILE, ChatChoice
from allhands.errors import ConfigError, DataError
from allhands.io.files import make_directory, require_ours, require_writable, write_whole
from allhands.io.formatting import format_bytes
from allhands.io.terminal import console_for
from allhands.observe.metrics import ANSWERS_FILE, METRICS_FILE
from allhands.run.adapter_files import check_adapter

if TYPE_CHECKING:
    from allhands.model.load import LoadedModel

Load = Callable[[Path | None, ChatChoice | None], "LoadedModel"]
# A text near the end of every file that save_comparison has written.
SCORED = b'"after_share"'


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
        target = _place_of_answers(adapter, asked.out, force=asked.force) if speaks else None
        prompts = held_out_prompts(asked.data, asked.num_prompts)
        # The model without the adapter gets the same chat template.
        kept = adapter / TEMPLATE_FILE
        chat = ChatChoice(str(kept)) if kept.is_file() else None
        console = console_for()
        before, speed_before = answers(asked.model, None, prompts, asked.max_tokens, chat, load)
        if speaks:
            show_speed(console, "before", speed_before)
        after, speed_after = answers(asked.model, adapter, prompts, asked.max_tokens, load=load)
        if not speaks:
            return
        show_speed(console, "after", speed_after)
        comparison = compared(prompts, before, after)
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


def _place_of_answers(adapter_path: Path, out: Path | None, *, force: bool) -> Path | None:
    """Return the file for the answers: ``out``, or a file in the run's directory; ``None`` if there
    is neither.

    Raises:
        ConfigError: the file exists and is no comparison, and ``force`` is false.
        StorageError: the file cannot be written.
    """
    path = (
        adapter_path / ANSWERS_FILE
        if out is None and (adapter_path / METRICS_FILE).exists()
        else out
    )
    if path is not None:
        require_ours(path, [SCORED], "comparison of answers", force=force)
        make_directory(path.parent)
        require_writable(path)
    return path


@dataclass(frozen=True)
class AnswersCompared:
    """Answers of one model to the same prompts, without and with an adapter.

    Attributes:
        prompts: the prompts.
        before: answers without the adapter.
        after: answers with the adapter.
        before_share: share of pirate words in ``before``.
        after_share: share of pirate words in ``after``.
    """

    prompts: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    before_share: float
    after_share: float


def held_out_prompts(data: str, count: int) -> list[str]:
    """Return the last questions of ``count`` examples, spread over the test split.

    Raises:
        DataError: there is no test split, or it has no questions.
    """
    records = demo_records("test") if data == "demo" else _records(Path(data))
    prompts = [text for record in records if (text := _question(record))]
    if not prompts:
        raise DataError(
            "no example of test.jsonl has a question",
            code="questions-missing",
            where=data,
            hint="give chat or prompt/completion data",
        )
    # Spread over the file, because neighbours are often about the same thing.
    stride = max(1, len(prompts) // count)
    return prompts[::stride][:count]


def _records(folder: Path) -> list[Record]:
    with full_places(folder):
        return load_split(folder, "test", ColumnNames(), required=True)


def _question(record: Record) -> str | None:
    if record.kind == "chat":
        users = [m["content"] for m in record.messages or () if m["role"] == "user"]
        return users[-1] if users else None
    return record.prompt if isinstance(record.prompt, str) else None


def answers(
    model: str,
    adapter_path: Path | None,
    prompts: Sequence[str],
    max_tokens: int,
    chat: ChatChoice | None = None,
    load: Load | None = None,
) -> tuple[list[str], Any]:
    """Return greedy answers, and their speed and memory; the model is freed afterwards.

    Args:
        load: loads the model with an adapter, if several ranks hold it; ``None``: this process
            holds the whole model.
    """
    from allhands.infer.generate import answer_all, load_for_generation
    from allhands.model.beyond import answering, limits_told

    if load is not None:
        return answer_all(load(adapter_path, chat), prompts, max_tokens)
    with limits_told(answering(model, adapter_path)):
        return answer_all(load_for_generation(model, adapter_path, chat=chat), prompts, max_tokens)


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
    caption = f"an answer ends after {max_tokens} tokens, wherever it is"
    table = Table(show_lines=True, expand=True, caption=caption, caption_justify="left")
    table.add_column("prompt", ratio=2)
    table.add_column("before", ratio=4)
    table.add_column("after", ratio=4)
    rows = zip(comparison.prompts, comparison.before, comparison.after, strict=True)
    for prompt, before, after in list(rows)[:show]:
        # Text, not str: an answer may contain brackets that look like markup.
        table.add_row(Text(prompt), Text(before), Text(after))
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


def compared(
    prompts: Sequence[str], before: Sequence[str], after: Sequence[str]
) -> AnswersCompared:
    """Score two sets of answers to the same prompts."""
    return AnswersCompared(
        tuple(prompts), tuple(before), tuple(after), pirate_share(before), pirate_share(after)
    )


def save_comparison(comparison: AnswersCompared, path: Path) -> None:
    """Write prompts, answers and scores as JSON."""
    make_directory(path.parent)
    text = json.dumps(asdict(comparison), indent=1, ensure_ascii=False)
    # Private like all files of a run, because it has people's questions.
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), private=True)
