"""``allhands generate`` and ``allhands compare``."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from allhands.data.demo import demo_records, pirate_share
from allhands.data.records import ColumnNames, Record
from allhands.data.splits import full_places, load_split
from allhands.data.templates import TEMPLATE_FILE, ChatChoice
from allhands.errors import ConfigError, DataError
from allhands.io.files import make_directory, require_ours, require_writable, write_whole
from allhands.io.terminal import console_for, tell
from allhands.observe.metrics import ANSWERS_FILE, METRICS_FILE

if TYPE_CHECKING:
    from allhands.infer.divided import AnsweringRanks
    from allhands.model.load import LoadedModel

# What is in every file that save_comparison has written, near its end.
SCORED = b'"after_share"'


@dataclass(frozen=True)
class GenerateOptions:
    """Options of ``allhands generate``, by flag name."""

    model: str
    adapter_path: Path | None
    prompt: str
    max_tokens: int
    temp: float
    top_p: float
    seed: int
    system_prompt: str | None
    ignore_chat_template: bool
    trust_remote_code: bool
    chat: ChatChoice = field(default_factory=ChatChoice)


def tell_notes(loaded: LoadedModel) -> None:
    """What a person should know about a model that answers, on standard error."""
    for note in loaded.notes:
        tell(f"allhands: note: {note}")


def tell_harm(adapter_path: Path | None, model: str | None = None) -> None:
    """Warn in one line of weights whose training did harm: nothing else about them looks wrong."""
    from allhands.run.adapter_files import warning_of

    if told := warning_of(adapter_path, model):
        tell(f"allhands: warning: {told}")


def run_generate(options: GenerateOptions) -> None:
    """Print the answer as it comes, then what it cost."""
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    _require_fitting(options, prompt)
    from allhands.model.beyond import answering, limits_told

    use = answering(options.model, options.adapter_path, trust_remote_code=options.trust_remote_code)
    with limits_told(use):
        _generate(options, prompt)


def _require_fitting(options: GenerateOptions, prompt: str) -> None:
    """Refuse, before anything is started or loaded, what cannot be asked.

    Raises:
        ConfigError: an empty prompt, or options that exclude each other.
    """
    if not prompt.strip():
        raise ConfigError("the prompt is empty", where="--prompt", hint="say what to ask")
    if options.ignore_chat_template and options.chat != ChatChoice():
        flag = "--system" if options.chat.template is None else "--chat-template"
        raise ConfigError("it has no effect with --ignore-chat-template", where=flag, hint="leave one of the two out")


def _generate(options: GenerateOptions, prompt: str) -> None:
    from allhands.infer.generate import load_for_generation

    trust = options.trust_remote_code
    loaded = load_for_generation(options.model, options.adapter_path, trust_remote_code=trust, chat=options.chat)
    _answer(options, loaded, prompt)


def _answer(options: GenerateOptions, loaded: LoadedModel, prompt: str, *, speaks: bool = True) -> None:
    """Print the answer, if this process ``speaks``."""
    from allhands.infer.generate import Sampling, prompt_tokens, stream_answer

    if speaks:
        tell_notes(loaded)
        tell_harm(options.adapter_path, options.model)
    tokens = prompt_tokens(
        loaded, prompt, system_prompt=options.system_prompt, use_template=not options.ignore_chat_template
    )
    sampling = Sampling(options.temp, options.top_p, options.seed)
    cost = None
    for text, cost in stream_answer(loaded, tokens, options.max_tokens, sampling):  # noqa: B007 - the last one
        if speaks:
            print(text, end="", flush=True)
    if not speaks:
        return
    print("\n" + "=" * 10)
    if cost is not None:
        print(f"Prompt: {cost.prompt_tokens} tokens, {cost.prompt_tps:.3f} tokens-per-sec")
        print(f"Generation: {cost.generation_tokens} tokens, {cost.generation_tps:.3f} tokens-per-sec")
        print(f"Peak memory: {cost.peak_memory_bytes / 1e9:.3f} GB")


def run_generate_divided(options: GenerateOptions, ranks: Mapping[str, Any]) -> int:
    """:func:`run_generate` on several ranks, or as one of them; the exit code.

    ``ranks``: options of a training that say where ranks are and what each has.
    """
    from allhands.cli.divided import run_divided

    if options.prompt == "-":
        raise ConfigError("several ranks have no standard input", where="--prompt -", hint="give the text itself")
    _require_fitting(options, options.prompt)

    def work(answering: AnsweringRanks, speaks: bool) -> None:
        loaded = answering.load(options.adapter_path, options.chat)
        _answer(options, loaded, options.prompt, speaks=speaks)

    return run_divided(options.model, options.adapter_path, ranks, work, trust_remote_code=options.trust_remote_code)


@dataclass(frozen=True)
class AnswersCompared:
    """Answers of one model to the same prompts, without and with an adapter.

    Attributes:
        before_share: share of the words of ``before`` that are pirate speech; ``after_share`` likewise.
    """

    prompts: tuple[str, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]
    before_share: float
    after_share: float


def held_out_prompts(data: str, count: int) -> list[str]:
    """Last questions of the first ``count`` test examples.

    Raises:
        DataError: no test split, or one without questions.
    """
    records = demo_records("test") if data == "demo" else _records(Path(data))
    prompts = [text for record in records if (text := _question(record))]
    if not prompts:
        raise DataError(
            "no example of test.jsonl has a question", where=data, hint="give chat or prompt/completion data"
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
    load: Callable[[Path | None, ChatChoice | None], LoadedModel] | None = None,
) -> tuple[list[str], Any]:
    """Greedy answers and their speed; the model is freed afterwards.

    ``load`` loads it with an adapter, where that is not done by one process.
    """
    from allhands.infer.generate import answer_all, load_for_generation
    from allhands.model.beyond import answering, limits_told

    if load is not None:
        return answer_all(load(adapter_path, chat), prompts, max_tokens)
    with limits_told(answering(model, adapter_path)):
        return answer_all(load_for_generation(model, adapter_path, chat=chat), prompts, max_tokens)


def show_speed(console: Console, label: str, speed: Any) -> None:
    """One line in the words of mlx_lm.generate."""
    console.print(
        f"{label}: prompt {speed.prompt_tokens} tokens, {speed.prompt_tps:.1f} tokens-per-sec; generation "
        f"{speed.generation_tokens} tokens, {speed.generation_tps:.1f} tokens-per-sec; "
        f"peak memory {speed.peak_memory_bytes / 1e9:.3f} GB",
        highlight=False,
    )


def comparison_table(comparison: AnswersCompared, show: int, max_tokens: int) -> Table:
    """The first ``show`` answers side by side, which end after ``max_tokens``."""
    caption = f"an answer ends after {max_tokens} tokens, wherever it is"
    table = Table(show_lines=True, expand=True, caption=caption, caption_justify="left")
    table.add_column("prompt", ratio=2)
    table.add_column("before", ratio=4)
    table.add_column("after", ratio=4)
    rows = zip(comparison.prompts, comparison.before, comparison.after, strict=True)
    for prompt, before, after in list(rows)[:show]:
        # As text: an answer may hold what looks like markup.
        table.add_row(Text(prompt), Text(before), Text(after))
    return table


def score_lines(comparison: AnswersCompared) -> list[str]:
    """The score in words."""
    number = len(comparison.prompts)
    return [
        f"pirate words in the answers to {number} held-out prompts: {comparison.before_share:.1%} before, "
        f"{comparison.after_share:.1%} after",
        f"answers with one or more of them: {_with_one(comparison.before)} before, {_with_one(comparison.after)} after",
        "(a pirate word is one of the published lexicon, allhands/data/demo/lexicon.txt, or ends in -in')",
    ]


def _with_one(answers: Sequence[str]) -> str:
    return f"{sum(pirate_share([answer]) > 0 for answer in answers)} of {len(answers)}"


@dataclass(frozen=True)
class Questions:
    """Held-out prompts to ask: of which data, how many, and how long answers may be."""

    data: str
    num_prompts: int
    max_tokens: int


def run_compare(
    model: str,
    adapter_path: Path | None,
    asked: Questions,
    show: int,
    out: Path | None,
    *,
    force: bool = False,
    ranks: Mapping[str, Any] | None = None,
) -> int:
    """Answer held-out prompts without and with the adapter, and score both; the exit code.

    ``ranks``: options of a training that say where ranks are and what each has, if they are several.

    Raises:
        ConfigError: no adapter; or ``out`` is no file of such answers, and is not to be replaced by ``force``.
    """
    if adapter_path is None:
        raise ConfigError("there is nothing to compare with", where="--adapter-path", hint="give a trained adapter")
    from allhands.run.adapter_files import check_adapter

    def place() -> Path | None:
        """Where the answers are written; called before anything that takes long."""
        path = adapter_path / ANSWERS_FILE if out is None and (adapter_path / METRICS_FILE).exists() else out
        if path is not None:
            require_ours(path, [SCORED], "comparison of answers", force=force)
            make_directory(path.parent)
            require_writable(path)
        return path

    if ranks is None:
        check_adapter(adapter_path)
        target = place()
        _show(_asked_twice(model, adapter_path, asked, console_for()), asked, show, target)
        return 0
    from allhands.cli.divided import run_divided

    def work(answering: AnsweringRanks, speaks: bool) -> None:
        target = place() if speaks else None
        console = console_for() if speaks else None
        comparison = _asked_twice(model, adapter_path, asked, console, answering.load)
        if speaks:
            _show(comparison, asked, show, target)

    return run_divided(model, adapter_path, ranks, work)


def _asked_twice(
    model: str,
    adapter_path: Path,
    asked: Questions,
    console: Console | None,
    load: Callable[[Path | None, ChatChoice | None], LoadedModel] | None = None,
) -> AnswersCompared:
    """The answers without and with the adapter; ``console`` is told how fast they came."""
    prompts, max_tokens = held_out_prompts(asked.data, asked.num_prompts), asked.max_tokens
    # Both are asked in the same words.
    kept = adapter_path / TEMPLATE_FILE
    chat = ChatChoice(str(kept)) if kept.is_file() else None
    before, speed_before = answers(model, None, prompts, max_tokens, chat, load)
    if console is not None:
        show_speed(console, "before", speed_before)
    after, speed_after = answers(model, adapter_path, prompts, max_tokens, load=load)
    if console is not None:
        show_speed(console, "after", speed_after)
    return compared(prompts, before, after)


def _show(comparison: AnswersCompared, asked: Questions, show: int, out: Path | None) -> None:
    """Print the comparison, and write it to ``out``."""
    console = console_for()
    console.print(comparison_table(comparison, show, asked.max_tokens))
    # Answers that are learned from other data are no worse for being no pirate's.
    if asked.data == "demo" or comparison.before_share or comparison.after_share:
        for line in score_lines(comparison):
            console.print(line, highlight=False)
    if out is not None:
        save_comparison(comparison, out)
        console.print(f"answers: {out}", highlight=False, soft_wrap=True, markup=False)


def compared(prompts: Sequence[str], before: Sequence[str], after: Sequence[str]) -> AnswersCompared:
    """Score two sets of answers to the same prompts."""
    return AnswersCompared(tuple(prompts), tuple(before), tuple(after), pirate_share(before), pirate_share(after))


def save_comparison(comparison: AnswersCompared, path: Path) -> None:
    """Write prompts, answers and scores as JSON."""
    make_directory(path.parent)
    text = json.dumps(asdict(comparison), indent=1, ensure_ascii=False)
    # As private as the rest of a run: what people asked is in it.
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"), private=True)
