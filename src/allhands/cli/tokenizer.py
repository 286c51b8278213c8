"""``allhands tokenizer train`` and ``allhands tokenizer show``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allhands.data.sources import SourceOptions, find_sources
from allhands.data.tokens_shown import cut, load_tokenizer_file
from allhands.errors import ConfigError
from allhands.io.formatting import format_duration, format_size
from allhands.io.staging import require_place
from allhands.io.terminal import counting

if TYPE_CHECKING:
    from allhands.data.vocabulary import VocabularyReport

_UPDATE_EVERY = 1000


def train(
    sources: Annotated[list[str] | None, typer.Argument(metavar="[SOURCE]...", help="The same as --data.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="SOURCE", help="A file, a directory, or OWNER/NAME of the Hub. Repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="Directory to write.")] = None,
    vocabulary: Annotated[int, typer.Option("--vocabulary", help="Tokens, bytes and special ones included.")] = 4096,
    special: Annotated[
        list[str] | None, typer.Option("--special", metavar="TOKEN", help="A further special token. Repeatable.")
    ] = None,
    split_digits: Annotated[
        bool, typer.Option("--split-digits", help="Every digit a token of its own; else up to three are one.")
    ] = False,
    chat_template: Annotated[
        str | None, typer.Option("--chat-template", metavar="chatml", help="Add the template, and its tokens.")
    ] = None,
    text_key: Annotated[str, typer.Option("--text-key", metavar="NAME", help="Column of the text.")] = "text",
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, metavar="ROWS", help="Read so many rows of each source at most.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a tokenizer that was made before.")] = False,
) -> None:
    """Make a tokenizer from texts, as a directory that transformers and mlx_lm load.

    Byte-level BPE: it can cut every text. It learns from the training split, and is measured on the validation split or
    else on the end of the text. The same data give the same files.
    """
    from allhands.data.vocabulary import OUTPUT, VocabularyOptions, train_tokenizer

    options = VocabularyOptions(vocabulary, tuple(special or ()), split_digits, chat_template, text_key, force)
    if out is None:
        raise ConfigError("--out is missing", where="tokenizer train", hint="say where to write: --out tokenizer")
    require_place(out, "a tokenizer", OUTPUT, force=force)
    found = find_sources([*(data or ()), *(sources or ())], SourceOptions(limit=limit))
    with counting(_UPDATE_EVERY) as count:
        report = train_tokenizer(
            found, out, options, lambda texts, num_bytes: count(texts, f"{texts} texts, {format_size(num_bytes)}")
        )
    for line in report_lines(report, vocabulary, out):
        typer.echo(line)


def show(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Directory of a tokenizer, or of a model.")],
    text: Annotated[str, typer.Argument(metavar="TEXT", help="The text; '-' reads standard input.")],
) -> None:
    """Show how a text is cut into tokens."""
    tokenizer = load_tokenizer_file(directory)
    found = cut(tokenizer, sys.stdin.read() if text == "-" else text)
    each = f": {found.num_bytes / len(found.ids):.2f} bytes a token" if found.ids else ""
    typer.echo(f"{len(found.ids)} tokens, {found.num_bytes} bytes{each}")
    typer.echo(bracketed(found.pieces))
    typer.echo(" ".join(map(str, found.ids)))


def bracketed(pieces: Sequence[str]) -> str:
    """Each piece between brackets, so that blanks can be seen."""
    return "".join(f"[{piece}]" for piece in pieces)


def report_lines(report: VocabularyReport, wanted: int, out: Path) -> list[str]:
    """What was made, in words."""
    fewer = f" of {wanted} asked for: the text has no more to join" if report.vocabulary < wanted else ""
    documents = f"{report.documents} text{'s' * (report.documents != 1)} of {format_size(report.num_bytes)}"
    measured = "too little text to measure bytes per token on"
    if report.bytes_per_token is not None:
        size = format_size(report.held_out_bytes)
        measured = f"bytes per token: {report.bytes_per_token:.2f}, on {report.held_out} ({size})"
    lines = [
        f"tokenizer: {out}",
        f"vocabulary: {report.vocabulary} tokens{fewer}",
        measured,
        f"learned from {documents} in {format_duration(report.seconds)}",
    ]
    for reason in report.left_out:
        more = ", ..." if reason.count > len(reason.places) else ""
        lines.append(f"left out: {reason.count} x {reason.message}: {', '.join(reason.places)}{more}")
        lines += [f"  what to do: {reason.hint}"] if reason.hint else []
    return [*lines, f"sample: {bracketed(report.sample)}"]
