"""``allhands data prepare`` and ``allhands data demo``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import typer

from allhands.cli.answering import chat_choice
from allhands.cli.parser import refuse_idle
from allhands.cli.prepare_shown import Screen
from allhands.cli.verbs_data import DataDemo, DataPrepare
from allhands.data.demo import write_demo_data
from allhands.data.intake import Measure, PrepareOptions
from allhands.data.prepare import NothingLeft, check_output
from allhands.data.prepare import prepare as run_prepare
from allhands.data.records import ColumnNames
from allhands.data.render import Renderer
from allhands.data.sources import SourceOptions, find_sources
from allhands.data.splitting import SplitShare
from allhands.data.templates import ChatChoice
from allhands.errors import ConfigError
from allhands.io.terminal import console_for, counting

_MAX_SEQ_LENGTH = 2048
_UPDATE_EVERY = 100


def prepare(asked: DataPrepare) -> None:
    """Run the verb."""
    options = _options(asked)
    check_output(asked.out, asked.sources, options.force)
    console = console_for()
    wanted = SourceOptions(
        asked.documents, asked.hub_split, asked.hub_config, asked.streaming, asked.limit
    )
    sources = find_sources(asked.sources, wanted)
    chat_choice(asked)  # refuses wrong values
    measure = _measure(asked.model, asked) if asked.model else None
    try:
        with counting(_UPDATE_EVERY) as count:

            def progress(what: str, done: int, total: int | None) -> None:
                count(done, f"{what}: {done:,}" + (f" of {total:,}" if total else ""))

            outcome = run_prepare(sources, asked.out, options, measure=measure, progress=progress)
    except NothingLeft as error:
        Screen(console, error.outcome, asked).left_out(written=False)
        raise
    Screen(console, outcome, asked).everything()


def data_demo(asked: DataDemo) -> None:
    """Run the verb."""
    counts = write_demo_data(asked.out)
    typer.echo(f"{asked.out}: " + ", ".join(f"{name} {number}" for name, number in counts.items()))


# --- from flags to options ------------------------------------------------------------------------


def _options(flags: DataPrepare) -> PrepareOptions:
    features = flags.features
    if flags.model is None:
        idle = {"--max-seq-length": flags.max_seq_length, "--chat-template": flags.chat_template}
        refuse_idle(idle, "without a model", "add --model, whose tokens are counted")
    columns, typed = _short_columns(flags.column or (), features)
    return PrepareOptions(
        columns={**columns, **features},
        column_flags=typed,
        valid=SplitShare.parse(flags.valid, "--valid") if flags.valid is not None else None,
        test=SplitShare.parse(flags.test, "--test") if flags.test is not None else None,
        split_by=flags.split_by,
        resplit=flags.resplit,
        seed=flags.seed,
        shuffle=flags.shuffle,
        dedupe=cast("Any", flags.dedupe.value),
        near_threshold=flags.near_threshold,
        max_seq_length=flags.max_seq_length or _MAX_SEQ_LENGTH,
        strict=flags.strict,
        force=flags.force,
        merge_system=flags.system == "merge",
    )


def _short_columns(
    given: Sequence[str], features: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """Return the columns of ``--column``, and the flag that named each of them.

    ``["prompt=question"]`` gives ``{"prompt_feature": "question"}`` and ``{"prompt_feature":
    "--column prompt=question"}``.

    Args:
        given: values of ``--column``.
        features: columns from the long flags, ``{"prompt_feature": "question"}``.

    Raises:
        ConfigError: a part is not known, or is mapped twice.
    """
    known = {part: f"{part}_feature" for part in ColumnNames().names}
    known["messages"] = "chat_feature"
    columns: dict[str, str] = {}
    typed: dict[str, str] = {}
    for text in given:
        part, equals, name = text.partition("=")
        if not equals or not name or part.strip() not in known:
            raise ConfigError(
                f"{text!r} is not PART=NAME with a known part",
                code="value-invalid",
                where="--column",
                hint=f"for example --column prompt=question; parts: {', '.join(known)}",
            )
        key, flag = known[part.strip()], f"--column {text}"
        other = typed.get(key) if columns.get(key, name) != name else None
        if key in features:
            other = f"--{key.replace('_', '-')} {features[key]}"
        if other is not None:
            raise ConfigError(
                f"the column of one part is named twice, also by {other}",
                code="option-given-twice",
                where=flag,
                hint="a part has only one column: keep one of the two",
            )
        columns[key], typed[key] = name, flag
    return columns, typed


def _measure(model: str, asked: DataPrepare) -> Measure:
    """Return a function that counts the tokens of records with the tokenizer of ``model``."""
    from allhands.model.load import load_tokenizer

    # If system messages are to be merged, the rows are merged already.
    chat = ChatChoice(asked.chat_template)
    loaded = load_tokenizer(model, trust_remote_code=asked.trust_remote_code, chat=chat)
    return Renderer(cast("Any", loaded.tokenizer), mask_prompt=False, max_seq_length=None).render
