"""Output on a terminal or into a file: recognition of terminals, tables, and lines that are broken
between words.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# Environment variables of our own launcher, which shows the ranks' output to a person, and of
# mpirun and srun, which may give a rank a terminal of its own although its output goes to a file.
_OURS = "ALLHANDS_RANK"
_RELAYED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE")
_TRAILING = re.compile(r"[ \t]+(?=\r?\n)")
_NO = ("", "0", "false", "no")
_WIDTH_OF_FILES = 80


def is_screen(stream: Any, environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if ``stream`` is a terminal on which a display may write over itself.

    Not with ``TERM=dumb`` or ``NO_COLOR``, and only if :func:`is_read_live`. ``FORCE_COLOR`` asks
    for colours, not for such a display.
    """
    if environ.get("TERM", "").lower() in ("dumb", "unknown") or environ.get("NO_COLOR"):
        return False
    return is_read_live(stream, environ)


def is_read_live(stream: Any, environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if ``stream`` is a terminal that a person reads.

    Nobody reads the terminal of continuous integration (``CI``), which keeps all output, or the
    terminal that mpirun or srun gives a rank.
    """
    relayed = _OURS not in environ and any(name in environ for name in _RELAYED)
    if relayed or environ.get("CI", "").lower() not in _NO:
        return False
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError, OSError):  # the stream is closed, or is no file
        return False


def console_for(
    stream: TextIO | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    widest: int | None = None,
    **options: Any,
) -> Console:
    """Return rich's console on standard output, or ``stream``; without a screen it writes no
    control sequences.

    ``FORCE_COLOR`` gives colours anywhere, ``NO_COLOR`` nowhere. The width is that of this stream,
    even if another stream is a terminal. In a file, tables are 80 columns wide, and text is broken
    only if ``COLUMNS`` gives a width. Text is printed as it is: brackets are no markup, colons no
    emoji, and numbers have no colours.

    Args:
        widest: largest number of columns that are used.
        options: for rich's console.
    """
    options = {"markup": False, "emoji": False, "highlight": False, **options}
    stream = sys.stdout if stream is None else stream
    if environ.get("NO_COLOR"):
        options["color_system"] = None
    if not is_screen(stream, environ) and not environ.get("FORCE_COLOR"):
        options["force_terminal"] = False
    if not is_read_live(stream, environ) and not environ.get("COLUMNS"):
        options["width"] = options.get("width") or _WIDTH_OF_FILES
    file: Any = stream if is_read_live(stream, environ) else _Trimmed(stream)
    console = _careful_console()(file=file, **options)
    if widest is not None:
        console.width = min(console.width, widest)
    return console


class _Trimmed:
    """A file that drops blanks at the ends of lines: rich fills up tables and broken text."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, text: str) -> int:
        self._file.write(_TRAILING.sub("", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@cache
def _careful_console() -> type[Console]:
    """Return the class of a console that breaks plain text as :func:`fitted` does.

    rich's own console would put ends of lines into text that is copied from a terminal.
    """
    from rich.console import Console

    class Careful(Console):
        def print(self, *objects: Any, **how: Any) -> None:
            text = objects[0] if len(objects) == 1 else None
            if isinstance(text, str) and not how.get("soft_wrap"):
                if row_width(self):
                    objects = (fitted(text, self.width),)
                elif os.environ.get("COLUMNS"):
                    objects = (broken(text, self.width),)
                how["soft_wrap"] = True
            super().print(*objects, **how)

    return Careful


def table_of(
    heads: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[int] = (0,),
    ruled: bool = False,
) -> Table:
    """Return a table without a frame; if it is ``ruled``, with a line below its heads.

    Args:
        heads: heads of the columns; if all are empty, none are shown.
        left: numbers of the columns that are aligned to the left.
    """
    from rich import box
    from rich.table import Table
    from rich.text import Text

    padding, frame = ((0, 1, 0, 0), box.SIMPLE_HEAD) if ruled else ((0, 2, 0, 0), None)
    table = Table(box=frame, padding=padding, pad_edge=False, show_header=any(heads))
    for place, head in enumerate(heads):
        # On a narrow terminal names go on in a second line; numbers are never cut.
        table.add_column(
            head, justify="left" if place in left else "right", no_wrap=place not in left
        )
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def print_table(
    console: Console,
    heads: Sequence[str],
    rows: Sequence[Sequence[str]],
    dispensable: Sequence[str] = (),
) -> None:
    """Print a table; while it is too wide, leave out columns that are ``dispensable``, in their
    order. There must be at least one row.
    """
    columns = dict(zip(heads, zip(*rows, strict=True), strict=True))
    columns = columns_within(columns, console.width, dispensable)
    console.print(table_of([*columns], zip(*columns.values(), strict=True), ruled=True))


def columns_within(
    columns: Mapping[str, Sequence[str]], width: int, dispensable: Iterable[str]
) -> dict[str, Sequence[str]]:
    """Return the columns of a ruled table; while it is wider than ``width``, leave out those that
    are ``dispensable``, in their order.
    """
    from rich.cells import cell_len

    def needed() -> int:
        texts = [[*name.split("\n"), *cells] for name, cells in kept.items()]
        return sum(max(map(cell_len, words)) + 2 for words in texts) - 1

    kept = dict(columns)
    for name in dispensable:
        if needed() > width:
            kept.pop(name, None)
    return kept


def progress_console(
    stream: TextIO | None = None, environ: Mapping[str, str] = os.environ, **options: Any
) -> Console:
    """Return a console on standard error, or ``stream``, for a display that writes over itself.

    It shows the display on a screen alone; ``FORCE_COLOR`` does not make a file a screen.
    """
    from rich.console import Console

    stream = sys.stderr if stream is None else stream
    # In a notebook rich would make an output of each line.
    screen = is_screen(stream, environ)
    return Console(file=stream, force_terminal=screen, force_jupyter=False, **options)


@contextmanager
def counting(every: int) -> Generator[Callable[[int, str], None]]:
    """Show a counting line on standard error during the block, if that is a terminal.

    Yields a function that takes a number and the line's text, and shows each ``every``-th number.
    """
    with progress_console(highlight=False).status("reading") as status:

        def show(done: int, words: str) -> None:
            if done % every == 0:
                status.update(words)

        yield show


def fitted(text: str, width: int) -> str:
    """Return ``text`` with rows filled up to ``width``, so that a terminal breaks it between words.

    A row that would be broken in a word gets blanks up to its end, but no end of line: the terminal
    continues in the next row, and a command that is copied from there is still one line. A word
    longer than a row is broken.
    """
    return "\n".join("".join(_rows(line, width)) for line in text.split("\n"))


def broken(text: str, width: int) -> str:
    """Return ``text`` in lines of at most ``width``, for a file, broken as by :func:`fitted`."""
    return "\n".join(row.rstrip(" ") for line in text.split("\n") for row in _rows(line, width))


def _rows(line: str, width: int) -> list[str]:
    rows: list[str] = []
    while len(line) >= width > 1:
        # The last column stays empty, so that copied text has a blank between the last word of a
        # row and the first word of the next.
        place = line.rfind(" ", 0, width)
        if line[: place + 1].strip():
            rows.append(line[:place].ljust(width))
            line = line[place:].lstrip(" ")
        else:  # one word, whose end the next row holds
            whole = max(width, len(line.split(" ", 1)[0]) // width * width)
            rows += [line[at : at + width] for at in range(0, whole, width)]
            line = line[whole:]
    return [*rows, line] if line or not rows else rows


def printable(text: str, instead: str = "?") -> str:
    """Return text of unknown origin without control characters for a terminal.

    ``instead`` takes the place of each.
    """
    return "".join(letter if letter.isprintable() else instead for letter in text)


def one_line(text: str) -> str:
    """Return text of unknown origin on one line, without control characters for a terminal."""
    return " ".join(printable(text, " ").split())


def echo(text: str) -> None:
    """Print ``text`` as :func:`tell` does, on standard output."""
    tell(text, sys.stdout)


def print_json(values: object, *, indent: int | None = 1, **how: Any) -> None:
    """Print plain values on standard output, for machines; see :func:`json.dumps`."""
    print(json.dumps(values, indent=indent, **how))


def row_width(console: Console) -> int | None:
    """Return the width of the rows of ``console``; ``None`` if it is no terminal, so that a line
    may have any length.
    """
    return console.width if console.is_terminal or is_read_live(console.file) else None


def print_line(console: Console, line: str) -> None:
    """Print a line as it is, broken between words on a terminal."""
    width = row_width(console)
    shown = line if width is None else fitted(line, width)
    console.print(shown, markup=False, highlight=False, emoji=False, soft_wrap=True)


def tell(text: str, stream: TextIO | None = None) -> None:
    """Print ``text`` on standard error, or ``stream``, at once; broken between words on a terminal."""
    out: TextIO = sys.stderr if stream is None else stream
    print(fitted_to(out.fileno(), text) if is_read_live(out) else text, file=out, flush=True)


def say(text: str) -> None:
    """Print ``text``, a message of allhands itself, on standard error."""
    tell(f"allhands: {text}")


def fitted_to(file: int, text: str) -> str:
    """Return ``text`` :func:`fitted` to the terminal of this file descriptor; unchanged if it is no
    terminal.
    """
    try:
        return fitted(text, os.get_terminal_size(file).columns or sys.maxsize)
    except OSError:  # no terminal
        return text


class _Spoken(io.FileIO):
    """A file descriptor for messages; text that cannot be written is lost without an exception.

    ``lost`` is the first error; ``None`` if nothing was lost.
    """

    lost: OSError | None = None

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            self.lost = self.lost or error
            return len(data)


def open_closed_streams() -> None:
    """Open standard streams that are closed (``>&-``) on the null device.

    Otherwise a file that is opened later would get their number, and messages would go into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def stream_of(number: int, stream: TextIO | None) -> TextIO:
    """Return ``stream``; a new stream on file descriptor ``number`` if Python found it closed."""
    return open(number, "w", encoding="utf-8", closefd=False) if stream is None else stream


def keep_going(stream: TextIO) -> TextIO:
    """Return a stream that writes to ``stream`` and never fails, for a command whose result is not
    its output.
    """
    stream.flush()
    raw = _Spoken(stream.fileno(), "w", closefd=False)
    # Buffered by lines also if Python is to write at once (PYTHONUNBUFFERED). With a buffer of
    # several lines, threads that log at the same time may mix bytes: CPython before 3.11.10 and
    # 3.12.4 does not lock it (CPython's issue 119506).
    lines = stream.isatty() or any(
        getattr(stream, name, False) for name in ("line_buffering", "write_through")
    )
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=lines
    )


def tell_lost_words() -> None:
    """Say on standard error that output was lost, if standard output is from :func:`keep_going` and
    could not be written.
    """
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, _Spoken):
        return
    sys.stdout.flush()
    # A reader that has gone (a pager, head) is not worth a message.
    if raw.lost is not None and not isinstance(raw.lost, BrokenPipeError):
        reason = raw.lost.strerror or raw.lost
        tell(
            f"allhands: note: standard output cannot be written ({reason}): output was lost, and nothing else"
        )
