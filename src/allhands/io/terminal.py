"""A person's terminal: whether there is one, and lines that it breaks between words."""

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

# Who starts a rank with these gives it a terminal of its own, wherever its output really ends up.
# Our own launcher, which may go through mpirun, hands its output over.
_OURS = "ALLHANDS_RANK"
_RELAYED = ("OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE")
_TRAILING = re.compile(r"[ \t]+(?=\r?\n)")
_NO = ("", "0", "false", "no")
_WIDTH_OF_FILES = 80


def is_screen(stream: Any, environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if ``stream`` is a terminal on which a display may write over itself.

    No screen: a file or a pipe, ``TERM=dumb``, ``NO_COLOR``, and what :func:`is_read_live` leaves
    out. ``FORCE_COLOR`` asks for colours, not for this.
    """
    if environ.get("TERM", "").lower() in ("dumb", "unknown") or environ.get("NO_COLOR"):
        return False
    return is_read_live(stream, environ)


def is_read_live(stream: Any, environ: Mapping[str, str] = os.environ) -> bool:
    """Return True if ``stream`` is a terminal before which a person sits.

    Nobody sits before that of continuous integration (``CI``), which keeps all that was ever
    written, or before the one that mpirun or srun gives a rank, wherever its output really ends up.
    """
    relayed = _OURS not in environ and any(name in environ for name in _RELAYED)
    if relayed or environ.get("CI", "").lower() not in _NO:
        return False
    try:
        return bool(stream.isatty())
    except (AttributeError, ValueError, OSError):  # closed, or none
        return False


def console_for(
    stream: TextIO | None = None,
    environ: Mapping[str, str] = os.environ,
    *,
    widest: int | None = None,
    **options: Any,
) -> Console:
    """Return a console of rich's on standard output, or ``stream``; it writes no order of a
    terminal where there is no screen.

    ``FORCE_COLOR`` gives colours anywhere, ``NO_COLOR`` nowhere. The width is that of this stream,
    not of another one that happens to be a terminal: of tables 80 in a file, where text is broken
    only if ``COLUMNS`` says at what width. Text is printed as it is: brackets are no markup, colons
    no emoji, and numbers have no colours.

    Args:
        widest: columns that are used at most.
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
    """A file without blanks at the ends of lines, with which tables and broken text are filled up."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, text: str) -> int:
        self._file.write(_TRAILING.sub("", text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


@cache
def _careful_console() -> type[Console]:
    """A console that breaks plain text as :func:`fitted` does: what is copied from rich's own has
    ends of lines.
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
    """Return a table without a frame, which has a line below its heads if it is ``ruled``.

    Args:
        heads: of the columns; all empty: none are shown.
        left: the columns that are aligned to the left.
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
    """Print a table without as many of the columns that are ``dispensable``, the first ones first,
    as have no room.
    """
    columns = dict(zip(heads, zip(*rows, strict=True), strict=True))
    columns = columns_within(columns, console.width, dispensable)
    console.print(table_of([*columns], zip(*columns.values(), strict=True), ruled=True))


def columns_within(
    columns: Mapping[str, Sequence[str]], width: int, dispensable: Iterable[str]
) -> dict[str, Sequence[str]]:
    """Return the columns of a ruled table without as many of those that are ``dispensable``, the
    first ones first, as have no room.
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
    """Return a console on standard error, or ``stream``, for a display that writes over itself: on
    a screen alone.

    ``FORCE_COLOR`` does not make a screen of a file.
    """
    from rich.console import Console

    stream = sys.stderr if stream is None else stream
    # In a notebook rich would make an output of each line.
    screen = is_screen(stream, environ)
    return Console(file=stream, force_terminal=screen, force_jupyter=False, **options)


@contextmanager
def counting(every: int) -> Generator[Callable[[int, str], None]]:
    """Show a line on standard error that counts, if that is a terminal; takes the number and the
    line's words.
    """
    with progress_console(highlight=False).status("reading") as status:

        def show(done: int, words: str) -> None:
            if done % every == 0:
                status.update(words)

        yield show


def fitted(text: str, width: int) -> str:
    """``text`` with rows filled up to ``width``, so that a terminal breaks it between words.

    A row that would be broken in a word gets blanks up to its end, and no end of line: the terminal
    goes on below, and what is copied from it, a command for instance, is still one line. A word
    longer than a row is broken.
    """
    return "\n".join("".join(_rows(line, width)) for line in text.split("\n"))


def broken(text: str, width: int) -> str:
    """``text`` in lines of at most ``width``, for a file; broken where :func:`fitted` breaks it."""
    return "\n".join(row.rstrip(" ") for line in text.split("\n") for row in _rows(line, width))


def _rows(line: str, width: int) -> list[str]:
    rows: list[str] = []
    while len(line) >= width > 1:
        # The last column stays empty, so that there is a blank between two words when what is shown
        # is copied.
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
    """Return text of others without characters that could steer a terminal."""
    return "".join(letter if letter.isprintable() else instead for letter in text)


def one_line(text: str) -> str:
    """Return text of others on one line, without what a terminal would take for orders."""
    return " ".join(printable(text, " ").split())


def echo(text: str) -> None:
    """:func:`tell` on standard output."""
    tell(text, sys.stdout)


def print_json(values: object, *, indent: int | None = 1, **how: Any) -> None:
    """Print plain values on standard output, for machines; see :func:`json.dumps`."""
    print(json.dumps(values, indent=indent, **how))


def row_width(console: Console) -> int | None:
    """Return the width of the rows on which ``console`` shows lines; ``None`` where a line may be
    as long as it is.
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


def fitted_to(file: int, text: str) -> str:
    """``text`` as :func:`fitted` to the terminal that the file descriptor is; as it is elsewhere."""
    try:
        return fitted(text, os.get_terminal_size(file).columns or sys.maxsize)
    except OSError:  # no terminal
        return text


class _Spoken(io.FileIO):
    """A file descriptor for words on which nothing depends: those that cannot be written are lost
    without an error.

    ``lost`` is the first error of them.
    """

    lost: OSError | None = None

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            self.lost = self.lost or error
            return len(data)


def open_closed_streams() -> None:
    """Open what this process was started without (``>&-``), so that no file of ours gets its number
    and our words.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def stream_of(number: int, stream: TextIO | None) -> TextIO:
    """``stream``, or a new one on the file descriptor ``number`` where Python found that closed."""
    return open(number, "w", encoding="utf-8", closefd=False) if stream is None else stream


def keep_going(stream: TextIO) -> TextIO:
    """``stream`` as one into which writing never fails, for a command whose result is not its
    words.
    """
    stream.flush()
    raw = _Spoken(stream.fileno(), "w", closefd=False)
    # A line at a time, too, where Python was asked to write at once (PYTHONUNBUFFERED). With a
    # buffer, threads that log at the same time may write what is no text: CPython before 3.11.10
    # and 3.12.4 does not lock it (its issue 119506).
    lines = stream.isatty() or any(
        getattr(stream, name, False) for name in ("line_buffering", "write_through")
    )
    return io.TextIOWrapper(
        io.BufferedWriter(raw), encoding=stream.encoding, errors=stream.errors, line_buffering=lines
    )


def tell_lost_words() -> None:
    """Say on standard error that words to a stream of :func:`keep_going` were lost, and that
    nothing else is amiss.
    """
    raw = getattr(getattr(sys.stdout, "buffer", None), "raw", None)
    if not isinstance(raw, _Spoken):
        return
    sys.stdout.flush()
    # Of a reader that has gone (a pager, head) nobody need be told.
    if raw.lost is not None and not isinstance(raw.lost, BrokenPipeError):
        reason = raw.lost.strerror or raw.lost
        tell(
            f"allhands: note: standard output cannot be written ({reason}): output was lost, and nothing else"
        )
