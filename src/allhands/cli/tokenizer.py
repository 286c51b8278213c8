"""``allhands tokenizer train`` and ``allhands tokenizer show``."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from allhands.cli.verbs_data import TokenizerShow, TokenizerTrain
from allhands.data.sources import SourceOptions, find_sources
from allhands.data.tokens_shown import cut, load_tokenizer_file
from allhands.data.vocabulary import OUTPUT, VocabularyOptions, VocabularyReport, train_tokenizer
from allhands.errors import ConfigError
from allhands.io.formatting import counted, format_duration, format_size
from allhands.io.staging import require_place
from allhands.io.terminal import counting

_UPDATE_EVERY = 1000


def train(asked: TokenizerTrain) -> None:
    """Run the verb."""
    options = VocabularyOptions(
        asked.vocabulary,
        tuple(asked.special or ()),
        asked.split_digits,
        asked.chat_template,
        asked.text_key,
        asked.force,
    )
    if asked.out is None:
        raise ConfigError(
            "--out is missing",
            code="option-missing",
            where="tokenizer train",
            hint="name a directory: --out tokenizer",
        )
    require_place(asked.out, "a tokenizer", OUTPUT, force=asked.force)
    found = find_sources(
        [*(asked.data or ()), *(asked.sources or ())], SourceOptions(limit=asked.limit)
    )
    with counting(_UPDATE_EVERY) as count:
        report = train_tokenizer(
            found,
            asked.out,
            options,
            lambda texts, num_bytes: count(
                texts, f"{counted(texts, 'text')}, {format_size(num_bytes)}"
            ),
        )
    for line in report_lines(report, asked.vocabulary, asked.out):
        typer.echo(line)


def show(asked: TokenizerShow) -> None:
    """Run the verb."""
    tokenizer = load_tokenizer_file(asked.directory)
    found = cut(tokenizer, sys.stdin.read() if asked.text == "-" else asked.text)
    each = f": {found.num_bytes / len(found.ids):.2f} bytes a token" if found.ids else ""
    typer.echo(f"{counted(len(found.ids), 'token')}, {counted(found.num_bytes, 'byte')}{each}")
    typer.echo(bracketed(found.pieces))
    typer.echo(" ".join(map(str, found.ids)))


def bracketed(pieces: Sequence[str]) -> str:
    """Put each piece between brackets, so that blanks are visible."""
    return "".join(f"[{piece}]" for piece in pieces)


def report_lines(report: VocabularyReport, wanted: int, out: Path) -> list[str]:
    """Return lines about a tokenizer that was made; ``wanted``: its requested size."""
    fewer = (
        f" of {wanted} requested: the text has no more pairs to merge"
        if report.vocabulary < wanted
        else ""
    )
    documents = f"{counted(report.documents, 'text')} of {format_size(report.num_bytes)}"
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
        lines.append(
            f"left out: {reason.count} x {reason.message}: {', '.join(reason.places)}{more}"
        )
        lines += [f"  what to do: {reason.hint}"] if reason.hint else []
    return [*lines, f"sample: {bracketed(report.sample)}"]
