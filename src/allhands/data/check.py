"""Check of a data set before a run: counts, cut tokens, padding, and faults that ruin runs.

Records are rendered one by one, whole; only numbers are kept. The limit on the length is applied
here, so that the tokens it cuts off can be counted.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, Literal

import numpy as np

from allhands.data.arrays import Bools, Int32s
from allhands.data.duplicates import Overlap
from allhands.data.explained import openings, pattern_of, special_tokens
from allhands.data.lengths import LengthSummary
from allhands.data.messages import REASONING_KEYS, is_untrained
from allhands.data.outcome import Reasons
from allhands.data.padding import Padding, estimate_padding
from allhands.data.records import Record
from allhands.data.render import (
    ChatTemplate,
    Rendered,
    Renderer,
    TrainOn,
    has_chat_template,
)
from allhands.data.shapes import Example, remedy_of_warning, spoken_words
from allhands.data.token_roles import own_tokens, stop_tokens
from allhands.errors import AllhandsError, DataError, ModelError
from allhands.runtime.sizing import Sizing

Severity = Literal["ruins", "harms", "note"]

_PLACES, _SHORT_TOKENS = 3, 3
# An answer is reported if at least _SAME_ANSWERS records, and more than this share of them, have
# it. Places are kept for the first _FIRST_ANSWERS different answers.
_SAME_ANSWERS, _SAME_ANSWER_SHARE, _FIRST_ANSWERS = 5, 0.2, 1000
# Message with which `Reasons` groups the reasons that it does not list singly.
_OTHER_REASONS = "other reasons"
# Code under which examples are counted whose answers do not begin as generated ones do;
# `template_findings` reports it.
_OPENED_OTHERWISE = "opened-otherwise"


@dataclass(frozen=True)
class CheckOptions:
    """Options of a run that decide which tokens training sees.

    Attributes:
        sizing: how the device cuts and pads batches.
        vocab_size: rows of the model's embedding; None if unknown, which leaves the check of token
            ids out.
        packing: examples are joined and cut into rows of ``max_seq_length`` tokens; no token is
            lost.
        trains_embedding: whether training changes the model's embedding.
        near_limit: texts of each split that are searched for near duplicates; 0 searches none.
    """

    max_seq_length: int = 2048
    mask_prompt: bool = False
    train_on: TrainOn = "assistant"
    batch_size: int = 4
    seed: int = 0
    packing: bool = False
    vocab_size: int | None = None
    sizing: Sizing = field(default_factory=lambda: Sizing(2048))
    trains_embedding: bool = False
    near_limit: int = 0

    @property
    def masks(self) -> bool:
        """True if prompts are kept from the loss."""
        return self.mask_prompt and self.train_on != "all"

    @property
    def limit(self) -> int | None:
        """Tokens after which an example is cut; None with packing."""
        return None if self.packing else self.max_seq_length


@dataclass(frozen=True)
class DataFinding:
    """One finding about the data; :func:`allhands.data.findings.words_of` has the words for it.

    Attributes:
        code: stable name.
        severity: "ruins": training would stop, or its result would be of no use; "harms": the
            result would be worse; "note": good to know.
        split: the split with the fault; None if the fault is in the model.
        count: examples concerned (0 if it is not about examples), of ``total`` that were rendered.
        places: ``file:line`` of the first of them.
        details: further values for the words.
    """

    code: str
    severity: Severity
    split: str | None
    count: int = 0
    total: int = 0
    places: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class SplitReport:
    """The numbers of one split. Tokens are counted after the cut, in the examples that are trained
    on.

    Attributes:
        examples: examples that training gets.
        shapes: rows by the shape in which they are written, the left-out ones included.
        bad_rows: rows that cannot be read or rendered.
        left_out: examples without a trained token.
        lengths: tokens of each rendered example before the cut, and how many the limit takes away.
        tokens: tokens of all examples after the cut.
        trained: trained tokens of each example.
        counts: examples by code, such as "answers-cut", also where they are too few for a finding.
        padding: estimate of the padding in the batches.
    """

    name: str
    examples: int
    shapes: dict[str, int]
    bad_rows: int
    left_out: int
    lengths: LengthSummary
    tokens: int
    trained: LengthSummary
    counts: dict[str, int]
    padding: Padding

    @property
    def trained_share(self) -> float:
        """Share of the tokens that is trained, 0 to 1."""
        return self.trained.total / self.tokens if self.tokens else 0.0


def check(
    splits: Mapping[str, Iterable[Example | DataError]],
    examiner: Examiner,
    *,
    report: Callable[[str, int], None] | None = None,
) -> tuple[list[SplitReport], list[DataFinding]]:
    """Examine every record of ``splits`` as training would see it.

    Args:
        splits: examples by name of the split, "train" first, with an error for each unusable row.
            An empty split counts as missing.
        examiner: renders the records; has the options.
        report: called after each record with the split and the records done in it.

    Returns:
        The numbers of each split, and the findings.
    """
    overlap = Overlap(examiner.options.near_limit)
    tallies = {name: _Tally(name, examiner, overlap) for name in splits}
    for name, tally in tallies.items():
        for done, item in enumerate(splits[name], start=1):
            tally.add(item)
            if report is not None:
                report(name, done)
    findings = [finding for tally in tallies.values() for finding in tally.findings()]
    return [tally.report() for tally in tallies.values()], findings


# --- one example ----------------------------------------------------------------------------------


class Examiner:
    """Renders records and knows which tokens are special."""

    def __init__(self, tokenizer: Any, options: CheckOptions) -> None:
        self.tokenizer = tokenizer
        self.options = options
        same: Any = {"max_seq_length": None, "moment": datetime.now()}
        self._renderer = Renderer(
            tokenizer, mask_prompt=options.mask_prompt, train_on=options.train_on, **same
        )
        self._answers = Renderer(tokenizer, mask_prompt=True, **same)
        self.stops = stop_tokens(tokenizer)
        # A begin-of-text token that also ends texts may occur twice in a row without a fault.
        self.bos: int | None = (
            None if tokenizer.bos_token_id in self.stops else tokenizer.bos_token_id
        )
        self.special = special_tokens(tokenizer)
        self.special_ids = np.array(sorted({*self.special, *self.stops}), dtype=np.int64)
        own = own_tokens(tokenizer).values()
        # Patterns of tokens that may be written out in words: under "special" the special tokens;
        # under "own" those that were added to the vocabulary, if training does not change the
        # embedding.
        self.spelled = {
            "special": pattern_of(set(self.special.values()) - set(own)),
            "own": None if options.trains_embedding else pattern_of(own),
        }

    def view(self, record: Record) -> tuple[Rendered, Bools | None]:
        """Render a record without the cut; return it and the mask of its answers.

        The mask, (L,), includes the answers' end-of-turn tokens; None if it cannot be found.

        Raises:
            AllhandsError: the renderer's own.
        """
        rendered = self._renderer.render(record)
        if record.kind == "text" or self.options.masks:
            return rendered, rendered.mask
        try:
            alone = self._answers.render(record)
        except AllhandsError:  # prompts are trained too, so training does not mind
            return rendered, None
        return rendered, alone.mask if np.array_equal(alone.tokens, rendered.tokens) else None

    @cached_property
    def opening(self) -> str:
        """Text that the chat template writes after the header of generated answers only."""
        return _openings(self.tokenizer)[1]

    def opens_otherwise(self, record: Record) -> bool:
        """Return True if the last answer does not begin as the template begins generated ones."""
        answer = next(
            (message for message in reversed(record.turns) if message["role"] == "assistant"), None
        )
        if (
            not self.opening
            or answer is None
            or any(isinstance(answer.get(key), str) for key in REASONING_KEYS)
        ):
            return False
        return not answer["content"].lstrip().startswith(self.opening)


def _openings(tokenizer: Any) -> tuple[str, str]:
    if has_chat_template(tokenizer):
        return openings(ChatTemplate(tokenizer, datetime.now()))
    return ("", "")


def template_findings(
    tokenizer: Any, reports: Sequence[SplitReport] | None = None
) -> list[DataFinding]:
    """Compare the beginning of an answer in generation with that in training.

    Args:
        reports: reports of the data, whose answers may have the generated beginning themselves;
            None if there are no data.
    """
    header, opening = _openings(tokenizer)
    if header:
        return [DataFinding("no-generation-prompt", "harms", None, details={"header": header})]
    count = sum(report.counts.get(_OPENED_OTHERWISE, 0) for report in reports or ())
    if not opening or (reports is not None and not count):
        return []
    total = sum(report.lengths.count for report in reports or ())
    return [
        DataFinding(
            "other-generation-prompt", "harms", None, count, total, details={"header": opening}
        )
    ]


# --- one split ------------------------------------------------------------------------------------

# Findings that are counted example by example: severity, share of the examples from which on they
# are reported, and share from which on they ruin the run.
_RULES: dict[str, tuple[Severity, float, float]] = {
    **dict.fromkeys(
        ("answers-lost", "answers-cut", "nothing-trained", "no-end-of-turn"), ("harms", 0.0, 0.1)
    ),
    **dict.fromkeys(("cut", "empty-answers", "bos-twice", "special-text"), ("harms", 0.0, 2.0)),
    **dict.fromkeys(("end-not-eos", "own-tokens", "near-train"), ("note", 0.0, 2.0)),
    "vocabulary": ("ruins", 0.0, 0.0),
    # What the chat template leaves out.
    **dict.fromkeys(
        (
            *("reasoning-dropped", "reasoning-key-unread", "calls-dropped", "arguments-dropped"),
            *("results-dropped", "media-dropped", "answers-dropped", "questions-dropped"),
            "in-train",
        ),
        ("harms", 0.0, 0.1),
    ),
    **dict.fromkeys(
        ("words-beside-calls", "system-dropped", "tools-dropped", "weights-unused"),
        ("harms", 0.0, 2.0),
    ),
    **dict.fromkeys(
        ("earlier-reasoning-dropped", "names-dropped", "fields-dropped", "dated"),
        ("note", 0.0, 2.0),
    ),
    "short-answers": ("note", 0.1, 2.0),
    "repeats": ("note", 0.05, 2.0),
}


@dataclass
class _Hits:
    """Count of a finding, with its first places."""

    count: int = 0
    places: list[str] = field(default_factory=list[str])

    def add(self, where: str) -> None:
        self.count += 1
        if len(self.places) < _PLACES:
            self.places.append(where)


class _Tally:
    """Counts and findings of one split, added up row by row."""

    def __init__(self, name: str, examiner: Examiner, overlap: Overlap) -> None:
        self.name = name
        self._examiner, self._options, self._overlap = examiner, examiner.options, overlap
        self._numbers = {key: array("q") for key in ("length", "kept", "trained", "work")}
        self._hits = defaultdict[str, _Hits](_Hits)
        self._answer_places = defaultdict[bytes, _Hits](_Hits)
        self._errors, self._warnings = defaultdict[str, Reasons](Reasons), Reasons()
        self._shapes, self._answers = Counter[str](), Counter[bytes]()
        self._texts = {kind: Counter[str]() for kind in ("special", "own", "end", "dates")}
        self._samples: dict[str, str] = {}
        self._largest, self._trained_prompt = -1, 0

    def add(self, item: Example | DataError) -> None:
        """Count one row."""
        if isinstance(item, DataError):
            code = "empty-rows" if "nothing to learn" in item.message else "bad-rows"
            self._errors[code].add(item.message, item.hint, item.where or "")
            return
        record, words = item.record, item.texts()
        assert record is not None, "preference data is refused where it is read"
        self._shapes[item.shape] += 1
        for warning in item.warnings:
            self._warnings.add(warning, remedy_of_warning(warning), record.where)
        try:
            rendered, answer = self._examiner.view(record)
        except AllhandsError as error:
            code = "model-cannot" if type(error) is ModelError else "cannot-render"
            self._errors[code].add(error.message, error.hint, record.where)
            return
        self._measure(record, rendered, answer)
        found = [*self._cuts(record, rendered, answer), *self._contents(record, rendered, answer)]
        found += self._words(record, rendered, answer, words)
        repeated = self._overlap.add(self.name, words)
        for code in [*found, repeated] if repeated else found:
            self._hits[code].add(record.where)

    def _measure(self, record: Record, rendered: Rendered, answer: Bools | None) -> None:
        limit = self._options.limit
        kept = (
            np.flatnonzero(rendered.mask[:limit])
            if not record.is_blank
            else np.empty(0, dtype=np.int64)
        )
        numbers = (
            {"kept": len(rendered.tokens[:limit]), "trained": len(kept), "work": int(kept[-1])}
            if len(kept)
            else {}
        )
        for name, number in ({"length": len(rendered.tokens)} | numbers).items():
            self._numbers[name].append(number)
        self._largest = max(self._largest, int(rendered.tokens.max(initial=-1)))
        if record.kind != "text":
            if answer is not None:
                self._trained_prompt += int((rendered.mask & ~answer)[:limit].sum())
            answers = [message for message in record.turns if message["role"] == "assistant"]
            words = "\n".join(spoken_words(answers[-1:])).strip()
            key = hashlib.blake2b(words.encode(), digest_size=8).digest()
            self._answers[key] += 1
            # A frequent answer comes early, so places are kept for the first answers only.
            if key in self._answer_places or len(self._answer_places) < _FIRST_ANSWERS:
                self._answer_places[key].add(record.where)

    def _cuts(self, record: Record, rendered: Rendered, answer: Bools | None) -> Iterator[str]:
        limit = self._options.limit
        if limit is not None and len(rendered.tokens) > limit:
            if record.kind == "text" or answer is None:
                yield "cut"
            elif not answer[:limit].any():
                yield "answers-lost"
            elif answer[limit:].any():
                yield "answers-cut"
        elif not rendered.mask.any() and not record.is_blank:  # blank records have a warning
            yield "nothing-trained"

    def _contents(self, record: Record, rendered: Rendered, answer: Bools | None) -> Iterator[str]:
        examiner, tokens, size = self._examiner, rendered.tokens, self._options.vocab_size
        for code, sample in rendered.unheard:
            self._samples.setdefault(code, sample)
            yield code
        if not self._options.masks and any(map(is_untrained, record.turns)):
            yield "weights-unused"
        if examiner.opens_otherwise(record):
            yield _OPENED_OTHERWISE
        yield from self._ending(tokens, answer)
        if (bos := examiner.bos) is not None and np.any((tokens[1:] == bos) & (tokens[:-1] == bos)):
            yield "bos-twice"
        if size is not None and tokens.max(initial=-1) >= size:
            yield "vocabulary"
        if rendered.dates:
            self._texts["dates"].update(rendered.dates)
            yield "dated"

    def _ending(self, tokens: Int32s, answer: Bools | None) -> Iterator[str]:
        examiner = self._examiner
        ends = tokens if answer is None else tokens[answer][-1:]
        if (answer is None or len(ends)) and not examiner.stops.intersection(ends.tolist()):
            name = None if answer is None else examiner.special.get(int(ends[0]))
            self._texts["end"].update([name] if name else [])
            yield "end-not-eos" if name else "no-end-of-turn"

    def _words(
        self, record: Record, rendered: Rendered, answer: Bools | None, text: str
    ) -> Iterator[str]:
        for name, pattern in self._examiner.spelled.items():
            found: list[str] = pattern.findall(text) if pattern else []
            if found and (name == "own" or record.kind != "text"):
                self._texts[name].update(found)
                yield f"{name}-{'text' if name == 'special' else 'tokens'}"
        if record.kind != "text" and answer is not None:
            words = int((answer & ~np.isin(rendered.tokens, self._examiner.special_ids)).sum())
            if words < _SHORT_TOKENS:
                yield "short-answers" if words else "empty-answers"

    def report(self) -> SplitReport:
        """Return the numbers."""
        lengths, kept, trained, work = (
            np.array(numbers, dtype=np.int64) for numbers in self._numbers.values()
        )
        return SplitReport(
            name=self.name,
            examples=len(kept),
            shapes=dict(self._shapes.most_common()),
            bad_rows=sum(
                reason.count for reasons in self._errors.values() for reason in reasons.listed()
            ),
            left_out=len(lengths) - len(kept),
            lengths=LengthSummary.of(lengths, self._options.limit),
            tokens=int(kept.sum()),
            trained=LengthSummary.of(trained),
            counts={code: hits.count for code, hits in self._hits.items()},
            padding=estimate_padding(work, int(kept.sum()), self._options),
        )

    def findings(self) -> Iterator[DataFinding]:
        """Yield the findings about the split."""
        for code, reasons in self._errors.items():
            yield from self._reasons(code, "ruins", reasons)
        yield from self._reasons("suspicious-rows", "note", self._warnings)
        total, details = len(self._numbers["length"]), self._facts()
        for code, (severity, told_from, ruins_from) in _RULES.items():
            hits = self._hits.get(code)
            if hits and hits.count >= told_from * total:
                more = details | ({"sample": self._samples[code]} if code in self._samples else {})
                yield self._finding(
                    code, "ruins" if hits.count >= ruins_from * total else severity, hits, **more
                )
        yield from self._about_the_whole()

    def _reasons(self, code: str, severity: Severity, reasons: Reasons) -> Iterator[DataFinding]:
        """Yield a finding for each reason, with the reason's own words."""
        for reason in reasons.listed():
            hits = _Hits(reason.count, reason.places[:_PLACES])
            # The reason's own hint names a file that only `data prepare` writes.
            hint = "repair the others first" if reason.message == _OTHER_REASONS else reason.hint
            yield self._finding(code, severity, hits, message=reason.message, hint=hint)

    def _finding(
        self, code: str, severity: Severity, hits: _Hits | None = None, **details: Any
    ) -> DataFinding:
        hits, total = hits or _Hits(), len(self._numbers["length"])
        return DataFinding(
            code, severity, self.name, hits.count, total, tuple(hits.places), details
        )

    def _facts(self) -> dict[str, Any]:
        limit = self._options.max_seq_length
        lengths = np.array(self._numbers["length"], dtype=np.int64)
        return {
            "limit": limit,
            "longest": int(lengths.max(initial=0)),
            "cut_tokens": int(np.maximum(lengths - limit, 0).sum()),
            "largest": self._largest,
            "vocab_size": self._options.vocab_size,
            **{
                name: [text for text, _ in found.most_common(3)]
                for name, found in self._texts.items()
            },
        }

    def _about_the_whole(self) -> Iterator[DataFinding]:
        """Findings that are not counted example by example."""
        options = self._options
        number = len(self._numbers["kept"])
        total = len(self._numbers["length"])
        missing = self.name != "train" and not total and not self._errors
        if number == 0 and not missing:
            yield self._finding("no-examples", "ruins")
        elif missing and self.name == "valid":
            yield self._finding("no-split", "note")
        elif self.name == "train" and number < options.batch_size:
            yield self._finding(
                "few-examples", "harms", examples=number, batch_size=options.batch_size
            )
        yield from self._about_answers(total)

    def _about_answers(self, total: int) -> Iterator[DataFinding]:
        options = self._options
        key, count = self._answers.most_common(1)[0] if self._answers else (b"", 0)
        if count >= _SAME_ANSWERS and count > _SAME_ANSWER_SHARE * total:
            yield self._finding(
                "same-answer", "harms", _Hits(count, self._answer_places[key].places)
            )
        texts = self._shapes["text"]
        if texts and options.masks:
            code, severity = ("all-texts", "ruins") if texts >= total else ("some-texts", "note")
            yield self._finding(code, severity, _Hits(texts))
        if self._trained_prompt and not options.mask_prompt and self.name == "train":
            share = self._trained_prompt / sum(self._numbers["trained"])
            yield self._finding("mask-prompt-off", "note", share=share)
