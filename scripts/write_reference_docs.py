"""Write the generated pages of docs/reference from the code; ``--check`` only tells whether they
are up to date.
"""

from __future__ import annotations

import dataclasses
import re
import sys
from pathlib import Path
from typing import Any

import error_codes

import allhands
from allhands.errors import AllhandsError
from allhands.observe.metrics.events import KINDS

PLACE = Path(__file__).parents[1] / "docs" / "reference"

ERRORS = """# Exit and error codes

A command ends with one of these exit codes, also if it runs on several computers. Every error is one message on
standard error: what is wrong, where, and what to do. In Python each error is an exception with these attributes:
`message`, `code` (the [fault](#codes-of-faults)), `where` (file and line, option or rank), `hint` (what to do) and
`exit_code`. All of them are classes in `allhands.errors` and derive from `allhands.AllhandsError`.

This page is made from the code: `python scripts/write_reference_docs.py`.

| exit code | error | meaning |
|---|---|---|
"""

ERRORS_FOR_PROGRAMS = """
The words of messages change between versions. The names of errors, their exit codes and the codes of faults do not.
So a program reads these:

- **The exit code** of the command. [Stopping](../reliability.md#stopping) has the codes of runs that were stopped.
- **`logs/error-rank-N.json`** in the run's directory, for each rank that has failed. It has the name of the error
  (`type`), `code`, `message`, `where`, `hint`, `exit_code`, `time` and `traceback`.
- **`events.jsonl`** in the run's directory, for a run with a supervisor. Its
  [events](../reliability.md#eventsjsonl) have `error`, `code` and `exit_code`.

```python
import allhands

try:
    allhands.finetune(model="demo", data="no-such-directory", iters=10)
except allhands.AllhandsError as error:
    print(error.exit_code, error.code, error.hint)
```

## Codes of faults

A code names a fault, and not the place where it was found: `place-taken` is the same for a model, a picture and a
table. Codes are stable: later versions add codes, but no code gets another meaning. Each code belongs to one exit code. The
exception is `training-failed`, an error of a command that starts a training. Its exit code is that of the training.

The messages are examples. `...` stands for names, numbers and the words of other programs. A training with `-v` writes
the code in brackets before the message: `allhands: error: [value-unknown] ...`.
"""

METRICS = """# Metrics and events

Rank 0 of a run writes `metrics.jsonl` into the run's directory: one JSON object in each line. The key `event` says
which of the tables below has the other keys. A run that goes on from a checkpoint appends to the file: lines with a
higher `step` than the last line `started` were trained again and no longer count. Numbers that are not finite are the
texts `"NaN"`, `"Infinity"` and `"-Infinity"`. The first line is `{"event": "opened", "format": 1}`; readers leave out
events that they do not know.

A *step* is one optimizer update, and an *iteration* is one batch.

This page is made from the code: `python scripts/write_reference_docs.py`.
"""

API = """# Python API

`import allhands` has all names of this page. [allhands in Python](../python.md) explains how to use them together.
On the site (`make docs`) each name has its signature and its docstring.

This page is made from the code: `python scripts/write_reference_docs.py`.
"""

# The public names, in the order of the page.
PARTS = {
    "Whole trainings": ("finetune", "pretrain", "TrainConfig", "Callback"),
    "Loops of your own": (
        "init",
        "World",
        "average_gradients",
        "DistributedLoader",
        "shard",
        "Checkpointer",
        "Metrics",
        "launch",
    ),
    "Loops that survive faults": ("progress", "save_checkpoint", "last_checkpoint"),
    "Errors": ("AllhandsError",),
}
# Classes that public functions return or take.
RELATED = {
    "Callback": (
        "allhands.observe.metrics.events.TrainReport",
        "allhands.observe.metrics.events.ValidReport",
    ),
    "finetune": ("allhands.run.session.FinetuneResult",),
}
# A page of its own has the fields of the configuration.
FIELDS_ELSEWHERE = {"TrainConfig": "The fields are the [options](../configuration.md)."}


def first_paragraph(documented: Any) -> str:
    """The first paragraph of a docstring, as one line of Markdown."""
    return markdown((documented.__doc__ or "").partition("\n\n")[0])


def markdown(text: str) -> str:
    """A docstring's words as Markdown: no roles, single backquotes, one line."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text)
    return " ".join(text.replace("``", "`").replace("|", "\\|").split())


def kinds(base: type[AllhandsError]) -> list[type[AllhandsError]]:
    """All classes below ``base`` that have a code of their own; others in the package only carry
    more facts.
    """
    children = [
        child for child in base.__subclasses__() if child.__module__ == AllhandsError.__module__
    ]
    return [kind for child in children for kind in (child, *kinds(child))]


def errors_page() -> str:
    """Exit codes and error classes."""
    rows = [
        (0, "", "Done."),
        (1, "", "A defect of allhands: report it."),
        *(
            (kind.exit_code, f"`{kind.__name__}`", first_paragraph(kind))
            for kind in kinds(AllhandsError)
        ),
        (137, "", "A process was killed (often: out of memory)."),
        (143, "`Interrupted`", "Stopped by SIGTERM, after saving."),
    ]
    rows.sort(key=lambda row: row[0])
    lines = "".join(f"| {code} | {name} | {meaning} |\n" for code, name, meaning in rows)
    codes = "".join(
        codes_table(exit_code, found) for exit_code, found in error_codes.examples().items()
    )
    return f"{ERRORS}{lines}{ERRORS_FOR_PROGRAMS}{codes}"


def codes_table(exit_code: int, messages: dict[str, str]) -> str:
    """The codes of one exit code, each with a message."""
    rows = "".join(f"| `{code}` | {as_prose(text)} |\n" for code, text in messages.items())
    return f"\n### Exit code {exit_code}\n\n| code | message |\n|---|---|\n{rows}"


def as_prose(text: str) -> str:
    """A message in one line, without marks of Markdown but those of code."""
    parts = " ".join(text.split()).replace("|", "\\|").split("`")
    parts[::2] = [re.sub(r"([*<]|(?<!\w)_)", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def metrics_page() -> str:
    """The events of ``metrics.jsonl`` with their keys."""
    parts = [f"\n## {name}\n\n{event(kind)}" for name, kind in KINDS.items()]
    return f"{METRICS}{''.join(parts)}"


def event(kind: Any) -> str:
    """What an event is, and a table of its keys.

    Raises:
        KeyError: the docstring of the event does not describe a key.
    """
    prose, _, described = kind.__doc__.partition("Attributes:\n")
    paragraphs = "\n\n".join(markdown(part) for part in prose.strip().split("\n\n"))
    found = re.findall(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", described, re.MULTILINE)
    meanings = {name: markdown(text) for name, text in found}
    lines = [
        f"| `{field.name}` | {_type(str(field.type))} | {meanings[field.name]} |\n"
        for field in dataclasses.fields(kind)
    ]
    return f"{paragraphs}\n\n| key | value | meaning |\n|---|---|---|\n{''.join(lines)}"


def _type(annotation: str) -> str:
    """JSON's word for a field's annotation."""
    optional = annotation.endswith(" | None")
    annotation = annotation.removesuffix(" | None")
    words = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false"}
    if annotation.startswith("Literal"):
        word = ", ".join(f"`{value}`" for value in re.findall(r"['\"]([^'\"]+)", annotation)[::2])
    elif annotation.startswith(("tuple", "Sequence")):
        word = "list"
    elif annotation.startswith(("dict", "Mapping")):
        word = "object"
    else:
        word = words[annotation]
    return f"{word}, or null" if optional else word


def api_page() -> str:
    """The public names, first as tables and then with their signatures."""
    named = {name for names in PARTS.values() for name in names}
    if missing := set(allhands.__all__) - named - {"__version__"}:
        raise ValueError(f"{missing} is on no part of the page: add it to PARTS")
    return API + "".join(_api_part(title, names) for title, names in PARTS.items())


def _api_part(title: str, names: tuple[str, ...]) -> str:
    rows = "".join(
        f"| [`{name}`](#allhands.{name}) | {first_paragraph(getattr(allhands, name))} |\n"
        for name in names
    )
    blocks = "".join(_api_block(name) for name in names)
    return f"\n## {title}\n\n| name | what it does |\n|---|---|\n{rows}{blocks}"


def _api_block(name: str) -> str:
    if name in FIELDS_ELSEWHERE:
        options = "\n    options:\n      members: false"
        text = f"\n::: allhands.{name}{options}\n\n{FIELDS_ELSEWHERE[name]}\n"
    else:
        text = f"\n::: allhands.{name}\n"
    return text + "".join(f"\n::: {path}\n" for path in RELATED.get(name, ()))


PAGES = {"errors.md": errors_page, "api.md": api_page, "metrics.md": metrics_page}

if __name__ == "__main__":
    for name, page in PAGES.items():
        place = PLACE / name
        if "--check" not in sys.argv:
            place.write_text(page())
        elif not place.exists() or place.read_text() != page():
            sys.exit(f"{place} is out of date: run {sys.argv[0]}")
