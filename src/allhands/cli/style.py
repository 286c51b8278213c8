"""``allhands data style``: answers in another style, by rules that people can read and edit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allhands.errors import ConfigError
from allhands.io.terminal import console_for

if TYPE_CHECKING:
    from rich.console import Console

    from allhands.data.style import StyleOptions, StyleReport
    from allhands.data.styles import RuleSet

_NUM_RULES = 10
_SAMPLE_CHARS = 240
_QUESTION_CHARS = 90


def style(
    style: Annotated[
        str, typer.Argument(metavar="STYLE", help="pirate, formal, concise, uk-spelling, or a YAML file.")
    ],
    source: Annotated[
        str | None, typer.Argument(metavar="[SOURCE]", help="A folder with train.jsonl and so on, or a file.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Directory to write, or a .jsonl file.")] = None,
    mix: Annotated[float, typer.Option("--mix", metavar="SHARE", help="Records that stay as they are.")] = 0.0,
    system: Annotated[str | None, typer.Option("--system", help="System message of what is styled.")] = None,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Seed of openings, choices and --mix.")] = 0,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first bad row, with exit code 3.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace what was written before.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the rules (YAML) and stop.")] = False,
    save_rules: Annotated[Path | None, typer.Option("--save-rules", help="Write the rules to edit them.")] = None,
    check: Annotated[bool, typer.Option("--check", help="First check the examples that the rules hold.")] = False,
    try_text: Annotated[str | None, typer.Option("--try", metavar="TEXT", help="Restyle a sentence.")] = None,
) -> None:
    """Restyle the answers of a data set by a set of rules.

    Code, addresses, numbers and questions stay as they are. The rules are YAML:
    --save-rules gives a copy to edit, which is then named in place of the style.
    """
    from allhands.data.styles import parse_rules, rules_text

    text, name = rules_text(style)
    rules = parse_rules(text, name)
    if show:
        typer.echo(text, nl=not text.endswith("\n"))
        return
    if save_rules is not None:
        _save(text, save_rules)
    if check:
        _check(rules, name)
    if try_text is not None:
        from allhands.data.styles.engine import Styler

        typer.echo(Styler(rules, seed).restyle(try_text))
    if source is not None and out is not None:
        from allhands.data.style import StyleOptions

        _run(rules, source, out, StyleOptions(seed, mix, system, strict, force))
    elif source is not None or out is not None:
        missing, example = (
            ("--out", "--out data/styled") if source else ("SOURCE", "allhands data style pirate data/mine")
        )
        raise ConfigError(f"{missing} is missing", where="data style", hint=f"say what to read and write: {example}")
    elif save_rules is None and not check and try_text is None:
        hint = f"allhands data style {style} SOURCE --out DIR, or one of --show, --save-rules, --check, --try"
        raise ConfigError("there is nothing to do", where="data style", hint=hint)


def _save(text: str, path: Path) -> None:
    from allhands.io.files import make_directory, write_whole

    if path.exists():
        raise ConfigError("the file exists", where=f"--save-rules {path}", hint="choose another name")
    make_directory(path.parent)
    write_whole(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))
    typer.echo(f"{path}: edit it, then: allhands data style {path} SOURCE --out DIR")


def _check(rules: RuleSet, name: str) -> None:
    """All examples of a rule set.

    Raises:
        ConfigError: one of them comes out differently; all that do are shown.
    """
    from allhands.data.styles.engine import Styler

    failed = Styler(rules).failures()
    for index, sample, result in failed:
        typer.echo(f"example {index + 1}: {sample.before}\n  wanted: {sample.after}\n  got:    {result}")
    if failed:
        hint = "change the rules, or what the example says"
        message = f"{len(failed)} of {len(rules.examples)} examples come out differently"
        raise ConfigError(message, where=f"{name}: examples", hint=hint)
    typer.echo(
        f"{name}: {rules.num_rules} rules, {len(rules.examples)} of {len(rules.examples)} examples as they should be"
    )


def _run(rules: RuleSet, source: str, out: Path, options: StyleOptions) -> None:

    from allhands.data.sources import SourceOptions, find_sources
    from allhands.data.style import style_data

    report = style_data(rules, find_sources([source], SourceOptions()), out, options)
    console = console_for(highlight=False)
    for line in report_lines(report, rules, out):
        console.print(line, markup=False, soft_wrap=True)
    _show_samples(console, report)


def report_lines(report: StyleReport, rules: RuleSet, out: Path) -> list[str]:
    """What was done, in words."""
    splits = ", ".join(f"{name} {count}" for name, count in report.records.items())
    lines = [f"{out}: {splits}"]
    if report.unmixed:
        lines.append(f"{report.unmixed} of the {sum(report.records.values())} records stay as they are (--mix)")
    share = report.words_changed / report.words if report.words else 0.0
    lines.append(
        f"answers changed: {report.changed} of {report.answers}; "
        f"words changed: {report.words_changed} of {report.words} ({share:.1%})"
    )
    if rules.name == "pirate" and report.texts:
        lines.append(_pirate_line(report.texts, report.answers))
    used = [f"{rule} {count}" for rule, count in report.rules.most_common(_NUM_RULES)]
    lines.append(f"rules used most: {'; '.join(used) or 'none'}")
    lines += report.skipped
    if report.num_left_out:
        lines.append(f"left out: {report.num_left_out} row{'s' * (report.num_left_out != 1)}")
    for reason in report.reasons:
        more = ", ..." if reason.count > len(reason.places) else ""
        lines.append(f"  {reason.count} x {reason.message}: {', '.join(reason.places)}{more}")
        if reason.hint:
            lines.append(f"    what to do: {reason.hint}")
    return lines


def _pirate_line(texts: Sequence[tuple[str, str]], answers: int) -> str:
    from allhands.data.demo import pirate_share

    before, after = (pirate_share(pair[side] for pair in texts) for side in (0, 1))
    where = f" in the first {len(texts)} answers" if len(texts) < answers else ""
    return f"pirate words{where}: {before:.1%} before, {after:.1%} after"


def _show_samples(console: Console, report: StyleReport) -> None:
    from rich.table import Table
    from rich.text import Text

    if not report.samples:
        return
    table = Table(show_lines=True, expand=True)
    for name, ratio in (("question", 2), ("before", 4), ("after", 4)):
        table.add_column(name, ratio=ratio)
    for sample in report.samples:
        # As text: an answer may hold what looks like markup.
        parts = (sample.question, _QUESTION_CHARS), (sample.before, _SAMPLE_CHARS), (sample.after, _SAMPLE_CHARS)
        table.add_row(*(Text(_short(part, length)) for part, length in parts))
    console.print(table)


def _short(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + " ..."
