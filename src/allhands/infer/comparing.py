"""Answers of a model to the same prompts, without and with an adapter."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allhands.data.demo import demo_source, pirate_share
from allhands.data.records import ColumnNames, Record
from allhands.data.splits import full_places, split_of_folder
from allhands.data.templates import ChatChoice
from allhands.errors import DataError
from allhands.io.files import make_directory, require_ours, require_writable, write_whole
from allhands.io.paths import output_file
from allhands.observe.metrics import ANSWERS_FILE, METRICS_FILE

if TYPE_CHECKING:
    from allhands.model.load import LoadedModel

Load = Callable[[Path | None, ChatChoice | None], "LoadedModel"]
# A text near the end of every file that save_comparison has written.
SCORED = b'"after_share"'


@dataclass(frozen=True)
class AnswersCompared:
    """Answers of one model to the same prompts, without and with an adapter.

    Attributes:
        prompts: the prompts.
        before: answers without the adapter.
        after: answers with the adapter.
    """

    prompts: Sequence[str]
    before: Sequence[str]
    after: Sequence[str]

    @property
    def before_share(self) -> float:
        """Share of pirate words in ``before``."""
        return pirate_share(self.before)

    @property
    def after_share(self) -> float:
        """Share of pirate words in ``after``."""
        return pirate_share(self.after)


def place_of_answers(adapter_path: Path, out: Path | None, *, force: bool) -> Path | None:
    """Return the file for the answers: ``out``, or a file in the run's directory; ``None`` if there
    is neither.

    Raises:
        ConfigError: ``out`` is no name of a JSON file; or the file exists and is no comparison, and
            ``force`` is false.
        StorageError: the file cannot be written.
    """
    if out is None and (adapter_path / METRICS_FILE).exists():
        out = adapter_path / ANSWERS_FILE
    if out is not None:
        out = output_file(out, (".json",))
        require_ours(out, [SCORED], "comparison of answers", force=force)
        make_directory(out.parent)
        require_writable(out)
    return out


def held_out_prompts(data: str, count: int) -> list[str]:
    """Return the last questions of ``count`` examples, spread over the test split.

    Raises:
        DataError: there is no test split, or it has no questions.
    """
    folder = Path(data)
    with full_places(folder):
        split = (
            demo_source("test")
            if data == "demo"
            else split_of_folder(folder, "test", ColumnNames(), required=True)
        )
        records = split.records() if split is not None else ()
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


def save_comparison(comparison: AnswersCompared, path: Path) -> None:
    """Write prompts, answers and scores as JSON."""
    make_directory(path.parent)
    shares = {"before_share": comparison.before_share, "after_share": comparison.after_share}
    text = json.dumps(asdict(comparison) | shares, indent=1, ensure_ascii=False)
    # Private like all files of a run, because it has people's questions.
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), private=True)
