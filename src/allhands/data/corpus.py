"""Plain text of training sources, streamed, with a part held out: to train a tokenizer."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from allhands.data.outcome import Reason, Reasons
from allhands.data.records import ColumnNames
from allhands.data.rows import RowProblem
from allhands.data.shapes import parse_example
from allhands.data.sources import Source
from allhands.errors import DataError

# Characters. A reader that keeps some hundred pieces then holds some megabytes.
_PIECE = 1 << 14
_MAX_HELD_OUT = 1 << 20
_TAIL_SHARE = 50

# Called now and then with the number of documents and of bytes that were read.
Progress = Callable[[int, int], None]


class Corpus:
    """The texts of the training split, and held-out texts: the validation split, or else the last
    fiftieth of the training text.

    A text row gives its ``text``; a chat or completion gives the words of all turns. Rows that
    cannot be used are counted and passed over.

    Attributes:
        held_out: texts of together at most 2^20 characters; complete when ``training`` is at its
            end.
        held_out_is_split: whether the held-out texts are the validation split.
        documents: number of training texts read so far, with the held-out end.
        num_bytes: UTF-8 bytes of these documents.
        first: the first training text.
    """

    def __init__(
        self, sources: Sequence[Source], text_key: str = "text", progress: Progress | None = None
    ) -> None:
        self._train = [source for source in sources if source.split in (None, "train")]
        self._valid = [source for source in sources if source.split == "valid"]
        self._names = [source.name for source in sources]
        self._columns = ColumnNames.from_options({"text_feature": text_key})
        self._progress = progress
        self._reasons = Reasons()
        self.held_out: list[str] = []
        self.held_out_is_split = False
        self.documents = 0
        self.num_bytes = 0
        self.first = ""

    @property
    def left_out(self) -> list[Reason]:
        """Return the reasons for which rows were passed over, the commonest first."""
        return self._reasons.listed()

    def training(self) -> Iterator[str]:
        """Yield the text to train on, in pieces of at most 16384 characters.

        A piece begins where a word does, unless a word is very long.

        Raises:
            DataError: there is no text to train on.
        """
        for text in self._texts(self._valid):
            room = _MAX_HELD_OUT - sum(map(len, self.held_out))
            self.held_out += _pieces(text[:room])
            if len(text) >= room:
                break
        self.held_out_is_split = bool(self.held_out)
        pieces = (piece for text in self._counted() for piece in _pieces(text))
        yield from pieces if self.held_out else self._all_but_the_end(pieces)
        if not self.documents:
            raise self._nothing()

    def _counted(self) -> Iterator[str]:
        for text in self._texts(self._train):
            self.first = self.first or text
            self.documents += 1
            self.num_bytes += len(text.encode())
            if self._progress:
                self._progress(self.documents, self.num_bytes)
            yield text

    def _all_but_the_end(self, pieces: Iterator[str]) -> Iterator[str]:
        """Yield all but the last fiftieth (at most 2^20 characters), which is held out."""
        waiting: deque[str] = deque()
        size = total = 0
        for piece in pieces:
            waiting.append(piece)
            size, total = size + len(piece), total + len(piece)
            while size - len(waiting[0]) >= _MAX_HELD_OUT:
                size -= len(waiting[0])
                yield waiting.popleft()
        keep = min(_MAX_HELD_OUT, total // _TAIL_SHARE)
        while waiting and size > keep:
            piece = waiting.popleft()
            size -= len(piece)
            if size < keep:
                place = _word(piece, len(piece) - (keep - size))
                waiting.extendleft([piece[place:]] if place < len(piece) else [])
                piece = piece[:place]
                size = 0
            yield piece
        self.held_out = [*waiting]

    def _texts(self, sources: Sequence[Source]) -> Iterator[str]:
        for item in (item for source in sources for item in source.rows()):
            try:
                if isinstance(item, RowProblem):
                    raise item.error()
                text = parse_example(
                    item.value, self._columns, source=item.source, line=item.line
                ).texts()
                text.encode()
            except DataError as error:
                # Advice names the column by its YAML key; here it is a flag.
                hint = re.sub(r"text_feature: \"(.+?)\"", r"--text-key \1", error.hint or "")
                self._reasons.add(error.message, hint, error.where or "")
            except UnicodeEncodeError:
                self._reasons.add(
                    "it has half a surrogate pair",
                    "write the whole character, or remove it",
                    f"{item.source}:{item.line}",
                )
            else:
                yield from [text] if text else []

    def _nothing(self) -> DataError:
        where = ", ".join(self._names[:3]) + (", ..." if len(self._names) > 3 else "")
        if not self._train:
            return DataError(
                "there is no training split",
                code="split-missing",
                where=where,
                hint="name files to train on: those called valid, validation, dev or test are held out",
            )
        if not self.left_out:
            return DataError(
                "there is no text", code="data-empty", where=where, hint="name files that hold some"
            )
        reason = self.left_out[0]
        return DataError(
            f"none of the rows can be used; the first: {reason.message}",
            code="rows-all-unusable",
            where=reason.places[0],
            hint=reason.hint,
        )


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > _PIECE:
        end = _word(text, start + _PIECE, start + _PIECE // 2)
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]


def _word(text: str, place: int, least: int = 0) -> int:
    """Return the last start of a line between ``least`` and ``place``.

    If there is none, it is the last start of a word, with the blank before it; if there is none
    either, ``place``.
    """
    line = text.rfind("\n", least, place)
    blank = text.rfind(" ", least, place)
    return line + 1 if line > least else blank if blank > least else place
