"""Options of verbs about data and tokenizers: each class is the command line of a verb."""

from __future__ import annotations

from dataclasses import Field, fields
from enum import StrEnum
from inspect import Parameter
from pathlib import Path
from typing import Annotated, NamedTuple

from typer import Argument, Option

from allhands.cli.verbs_models import ChatTemplate, System
from allhands.data.records import ColumnNames


def _column(field: Field[str]) -> Parameter:
    """Return the option that names the column of a part of a row."""
    part = field.name.removesuffix("_feature").replace("_", " ")
    words = f"Column for the key '{part}'. [{field.default}]"
    option = Option(f"--{field.name.replace('_', '-')}", metavar="NAME", help=words)
    return Parameter(
        field.name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[str | None, option]
    )


_COLUMNS = list(map(_column, fields(ColumnNames)))


# Kinds of repeated rows that are dropped.
Dedupe = StrEnum("Dedupe", ["off", "exact", "near"])


class DataPrepare(NamedTuple):
    """Turn files of any usual form into a training folder.

    Chats, prompts with completions, texts, Alpaca, ShareGPT and preference data are recognised.
    Rows that cannot be used are left out and listed with file and line.

    New splits have no rows in common, near duplicates included. The directory is whole or absent.
    """

    sources: Annotated[
        list[str],
        Argument(
            help="Files, directories, or datasets of the Hub (OWNER/NAME).", metavar="SOURCE..."
        ),
    ]
    out: Annotated[Path, Option("--out", "-o", help="Directory to write: train.jsonl and so on.")]
    model: Annotated[
        str | None,
        Option(help="Count lengths in this model's tokens, through its chat template."),
    ] = None
    max_seq_length: Annotated[
        int | None,
        Option(
            min=2,
            metavar="TOKENS",
            help="With --model: length at which rows are cut. [2048]",
        ),
    ] = None
    chat_template: ChatTemplate = None
    system: System = "template"
    column: Annotated[
        list[str] | None,
        Option(metavar="PART=NAME", help="A column: prompt=question. Repeatable."),
    ] = None
    valid: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            help="Rows for validation: fraction or number. [0.05, or the sources' split]",
        ),
    ] = None
    test: Annotated[
        str | None,
        Option(
            metavar="SIZE",
            help="Rows for testing: fraction or number. [0.05, or the sources' split]",
        ),
    ] = None
    split_by: Annotated[
        str | None,
        Option(
            metavar="COLUMN",
            help="Keep rows with the same value in one split; source: rows of the same file.",
        ),
    ] = None
    resplit: Annotated[
        bool, Option("--resplit", help="Make new splits of sources that have splits.")
    ] = False
    seed: Annotated[int, Option(min=0, help="Seed of splits and order.")] = 0
    shuffle: Annotated[
        bool,
        Option(
            "--shuffle/--no-shuffle", help="Order by hash and seed, or as in the sources. [shuffle]"
        ),
    ] = True
    dedupe: Annotated[
        Dedupe,
        Option(metavar="off|exact|near", help="Repeated rows to drop; all are reported."),
    ] = Dedupe.off
    near_threshold: Annotated[
        float,
        Option(help="Similarity of near duplicates; 1 looks for exact ones only."),
    ] = 0.8
    strict: Annotated[
        bool, Option("--strict", help="Stop at the first bad row, with exit code 3.")
    ] = False
    force: Annotated[
        bool, Option("--force", help="Replace a directory that was prepared before.")
    ] = False
    documents: Annotated[
        str,
        Option(
            metavar="HOW",
            help="Rows of a text file: file, line, blank-line (paragraphs), or a separator.",
        ),
    ] = "auto"
    hub_split: Annotated[str | None, Option(help="Split of a Hub dataset. [all]")] = None
    hub_config: Annotated[str | None, Option(help="Configuration of a Hub dataset.")] = None
    streaming: Annotated[
        bool, Option("--streaming", help="Stream from the Hub, without a copy on disk.")
    ] = False
    limit: Annotated[
        int | None,
        Option(min=1, metavar="ROWS", help="Most rows to read of each source."),
    ] = None
    trust_remote_code: Annotated[
        bool, Option("--trust-remote-code", help="Allow a model's own code.")
    ] = False
    features: Annotated[dict[str, str], _COLUMNS] = {}  # noqa: RUF012


class DataDemo(NamedTuple):
    """Write the shipped pirate chat data as .jsonl files."""

    out: Annotated[Path, Option("--out", "-o", help="Directory to write.")] = Path("data/pirate")


class TokenizerTrain(NamedTuple):
    """Make a tokenizer from texts, as a directory that transformers and mlx_lm load.

    The tokenizer is byte-level BPE, which can encode every text. It learns from the training split,
    and is measured on the validation split, or on the end of the text. The same data give the
    same files.
    """

    sources: Annotated[
        list[str] | None, Argument(metavar="[SOURCE]...", help="The same as --data.")
    ] = None
    data: Annotated[
        list[str] | None,
        Option(
            metavar="SOURCE",
            help="A file, a directory, or OWNER/NAME of the Hub. Repeatable.",
        ),
    ] = None
    out: Annotated[Path | None, Option("--out", "-o", help="Directory to write.")] = None
    vocabulary: Annotated[int, Option(help="Number of tokens, with bytes and special tokens.")] = (
        4096
    )
    special: Annotated[
        list[str] | None,
        Option(metavar="TOKEN", help="A further special token. Repeatable."),
    ] = None
    split_digits: Annotated[
        bool,
        Option("--split-digits", help="Make each digit a token; else up to three digits are one."),
    ] = False
    chat_template: Annotated[
        str | None,
        Option(metavar="chatml", help="Add this chat template and its tokens."),
    ] = None
    text_key: Annotated[str, Option(metavar="NAME", help="Column of the text.")] = "text"
    limit: Annotated[
        int | None,
        Option(min=1, metavar="ROWS", help="Most rows to read of each source."),
    ] = None
    force: Annotated[bool, Option("--force", help="Replace a tokenizer that was made before.")] = (
        False
    )


class TokenizerShow(NamedTuple):
    """Show how a text is cut into tokens."""

    directory: Annotated[
        Path, Argument(metavar="DIR", help="Directory of a tokenizer, or of a model.")
    ]
    text: Annotated[str, Argument(metavar="TEXT", help="The text; '-' reads standard input.")]
