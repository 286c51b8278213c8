"""Applying a rule set to a text, once: no rule ever sees what another one wrote.

Every rule looks at the original text only and claims a span of it; a claim that touches a claimed or protected
character is refused. The result is the original with its claimed spans replaced, so each character of it is
either copied, or written by exactly one rule.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import pairwise

from allhands.data.styles import WORD, Extras, RuleSet, StyleSample, normalised
from allhands.data.styles.protect import begins_sentence, protected_mask

_WORD = re.compile(WORD)
_TOKEN = re.compile(rf"{WORD}|[^\w\s]")
_ARTICLE = re.compile(r"(?<![\w'’-])(an?)([ \t]+)$", re.IGNORECASE)
_AS_VOWEL = re.compile(
    r"(?:[aefhilmnorsx](?![a-z])|hour|honou?r|honest|heir|(?!uni(?!n|m)|us[aeiu]|eu|one\b|once\b|ut[ei])[aeiou])"
)
# Where an answer begins (or ends) with one of these, what is added stands in a paragraph of its own.
_BLOCK = re.compile(r"\s*(?:```|~~~|#|\||[-*+•]\s|\d+[.)]\s|>|<|\$\$|\\\[| {4}|\t)")
_ENDED = re.compile(r"[.!?…][\"'”’)*_]*\s*$")

OPENING, CLOSING = "opening", "closing"


@dataclass(frozen=True)
class Change:
    """``text[start:end]`` becomes ``new``; ``rule`` names the rule, empty for what only fits grammar to it."""

    start: int
    end: int
    new: str
    rule: str


@dataclass(frozen=True)
class Styled:
    """An answer in its new style.

    Attributes:
        words: number of words of the original; ``words_changed`` of them that a rule replaced.
        rules: the rule of each change, with ``opening`` and ``closing`` where one was added.
    """

    text: str
    words: int
    words_changed: int
    rules: tuple[str, ...]


@dataclass(frozen=True)
class _Phrase:
    """A word or phrase to look for: its tokens, and before which of them there is space."""

    source: str
    tokens: tuple[str, ...]
    spaced: tuple[bool, ...]
    choices: tuple[str, ...]

    @property
    def rule(self) -> str:
        return f"{self.source} -> {self.choices[0]}" if self.choices[0] else f"{self.source} (removed)"


@dataclass
class _Page:
    """One text while rules claim spans of it; ``taken`` has a 1 for each protected or claimed character."""

    text: str
    taken: bytearray
    key: str
    changes: list[Change] = field(default_factory=list[Change])

    def free(self, start: int, end: int) -> bool:
        return self.taken.find(1, start, end) < 0

    def claim(self, start: int, end: int, new: str, rule: str) -> None:
        """Replace a free span."""
        self.taken[start:end] = b"\1" * (end - start)
        self.changes.append(Change(start, end, new, rule))


class Styler:
    """A rule set ready for use.

    Args:
        seed: decides between alternatives, and which answers get an opening or closing.
    """

    def __init__(self, rules: RuleSet, seed: int = 0) -> None:
        self.rules = rules
        self._seed = seed
        self._patterns = [re.compile(pattern) for pattern in rules.protect_patterns]
        self._regex = [(re.compile(rule.pattern), rule) for rule in rules.regex]
        self._suffixes = [(rule, re.compile(rule.stem)) for rule in rules.suffixes]
        self._index: dict[str, list[_Phrase]] = {}
        for source, choices in (rules.words | rules.phrases).items():
            phrase = _compiled(source, tuple(choices))
            self._index.setdefault(phrase.tokens[0], []).append(phrase)
        for phrases in self._index.values():
            phrases.sort(key=lambda phrase: -len(phrase.tokens))

    def changes(self, text: str, key: str = "") -> list[Change]:
        """What the rules do to ``text``: disjoint spans in order.

        Args:
            key: with the seed, chooses among alternatives; empty takes the first.
        """
        return self._changes(_Page(text, self._mask(text), key))

    def restyle(self, text: str) -> str:
        """``text`` after the rules, with first alternatives and neither opening nor closing."""
        return spliced(text, self.changes(text))

    def answer(self, question: str, answer: str) -> Styled:
        """An answer after the rules, perhaps with an opening and a closing.

        An answer that is all code, data or numbers stays as it is.
        """
        words = [match.span() for match in _WORD.finditer(answer)]
        mask = self._mask(answer)
        if all(mask.find(1, *span) >= 0 for span in words):
            return Styled(answer, len(words), 0, ())
        key = json.dumps([question, answer])
        ends_protected = bool(mask[len(answer.rstrip()) - 1])
        changes = self._changes(_Page(answer, mask, key))
        rules = [change.rule for change in changes if change.rule]
        text, extras = self._with_extras(spliced(answer, changes), ends_protected, key)
        return Styled(text, len(words), _num_touched(words, changes), (*rules, *extras))

    def _mask(self, text: str) -> bytearray:
        return protected_mask(text, self.rules.protect, self._patterns)

    def _changes(self, page: _Page) -> list[Change]:
        self._claim_regex(page)
        self._claim_words(page)
        page.changes.sort(key=lambda change: change.start)
        _close_gaps(page)
        if self.rules.fix_articles:
            _fix_articles(page)
        _move_capitals(page)
        return page.changes

    def failures(self) -> list[tuple[int, StyleSample, str]]:
        """The examples that do not come out as they should: index, example, what came out instead."""
        results = ((i, sample, self.restyle(sample.before)) for i, sample in enumerate(self.rules.examples))
        return [(i, sample, result) for i, sample, result in results if result != sample.after]

    def _claim_regex(self, page: _Page) -> None:
        for pattern, rule in self._regex:
            for match in pattern.finditer(page.text):
                if match.end() > match.start() and page.free(*match.span()):
                    page.claim(*match.span(), match.expand(rule.to), f"/{rule.pattern}/")

    def _claim_words(self, page: _Page) -> None:
        """From left to right: at each free word the longest phrase, else the first suffix that fits."""
        tokens = list(_TOKEN.finditer(page.text))
        names = [normalised(token[0]) for token in tokens]
        for index, token in enumerate(tokens):
            if page.free(*token.span()) and not self._claim_phrase(page, tokens, names, index):
                self._claim_word(page, token)

    def _claim_phrase(self, page: _Page, tokens: Sequence[re.Match[str]], names: Sequence[str], index: int) -> bool:
        for phrase in self._index.get(names[index], ()):
            last = index + len(phrase.tokens)
            if tuple(names[index:last]) != phrase.tokens:
                continue
            gaps = (page.text[one.end() : other.start()] for one, other in pairwise(tokens[index:last]))
            start, end = tokens[index].start(), tokens[last - 1].end()
            fits = all(_is_gap(gap, spaced) for gap, spaced in zip(gaps, phrase.spaced, strict=True))
            if fits and page.free(start, end):
                self._replace(page, start, end, phrase)
                return True
        return False

    def _claim_word(self, page: _Page, token: re.Match[str]) -> None:
        """A possessive of a word that has a rule, or a suffix."""
        whole, tail = token[0], ""
        if whole[-2:] in ("'s", "’s", "'S", "’S"):
            whole, tail = whole[:-2], whole[-2:]
        name, end = normalised(whole), token.start() + len(whole)
        single = next((p for p in self._index.get(name, ()) if p.tokens == (name,)), None)
        if tail and single:
            if all(single.choices):
                self._replace(page, token.start(), end, single)
            return
        for rule, stem in self._suffixes:
            if name.endswith(rule.suffix) and name not in rule.exceptions:
                kept = whole[: -len(rule.suffix)]
                if stem.fullmatch(kept.lower()):
                    ending = rule.to.upper() if whole.isupper() and len(whole) > 1 else rule.to
                    page.claim(token.start(), end, kept + ending, f"-{rule.suffix} -> -{rule.to}")
                    return

    def _replace(self, page: _Page, start: int, end: int, phrase: _Phrase) -> None:
        new = phrase.choices[0]
        if len(phrase.choices) > 1 and page.key:
            new = phrase.choices[self._number(page.key, phrase.source, start) % len(phrase.choices)]
        old = page.text[start:end]
        cased = _in_case_of(old, phrase.source, new, begins_sentence(page.text, start))
        if not new:
            page.claim(start, end, "", phrase.rule)
        elif new == phrase.source or cased == old:
            # A rule that keeps its words only keeps other rules off them.
            page.taken[start:end] = b"\1" * (end - start)
        else:
            page.claim(start, end, cased, phrase.rule)

    def _with_extras(self, text: str, ends_protected: bool, key: str) -> tuple[str, list[str]]:
        added: list[str] = []
        opening = self._extra(self.rules.openings, OPENING, key)
        if opening and _first_word(opening) != _first_word(text):
            text, _ = f"{opening}{_joint(text)}{text}", added.append(OPENING)
        closing = self._extra(self.rules.closings, CLOSING, key)
        if closing and _ENDED.search(text) and not ends_protected:
            last = text.rstrip().rpartition("\n")[2]
            text, _ = f"{text.rstrip()}{_joint(last)}{closing}", added.append(CLOSING)
        return text, added

    def _extra(self, extras: Extras | None, what: str, key: str) -> str:
        if extras is None or self._number(key, what, -1) >= extras.probability * 2**64:
            return ""
        return extras.texts[self._number(key, what, -2) % len(extras.texts)].strip()

    def _number(self, *parts: str | int) -> int:
        """A number below 2^64 that depends on the seed and ``parts`` only, the same in every process."""
        return keyed_number(self._seed, *parts)


def keyed_number(*parts: str | int) -> int:
    """A number below 2^64 from the hash of ``parts``: the same in every process and on every machine."""
    return int.from_bytes(blake2b(json.dumps(parts).encode(), digest_size=8).digest(), "big")


def spliced(text: str, changes: Sequence[Change]) -> str:
    """``text`` with each change put in its place; the changes are disjoint and in order."""
    pieces: list[str] = []
    done = 0
    for change in changes:
        pieces += [text[done : change.start], change.new]
        done = change.end
    return "".join((*pieces, text[done:]))


def _compiled(source: str, choices: tuple[str, ...]) -> _Phrase:
    tokens = list(_TOKEN.finditer(source))
    spaced = tuple(one.end() < other.start() for one, other in pairwise(tokens))
    return _Phrase(source, tuple(normalised(token[0]) for token in tokens), spaced, choices)


def _is_gap(gap: str, spaced: bool) -> bool:
    """Whether what is between two tokens fits a phrase: blanks on the same line, or nothing."""
    return bool(gap) and not gap.strip(" \t\xa0") if spaced else not gap


def _in_case_of(old: str, source: str, new: str, at_start: bool) -> str:
    """``new`` in the case of ``old``: HELLO, Hello, hello. As written, where ``old`` is as the rule writes it."""
    if old == source:
        return _capitalised(new) if at_start and old[0].isupper() else new
    letters = [letter for letter in old if letter.isalpha()]
    if len(letters) > 1 and all(map(str.isupper, letters)):
        return new.upper()
    words = _WORD.findall(old)
    if len(words) > 1 and all(word[0].isupper() for word in words):
        return _WORD.sub(lambda word: _capitalised(word[0]), new)
    return _capitalised(new) if next(iter(letters), "").isupper() else new


def _capitalised(text: str) -> str:
    """With the first letter, which an apostrophe may precede, in upper case."""
    first = next((index for index, letter in enumerate(text) if letter.isalpha()), 0)
    return text[:first] + text[first : first + 1].upper() + text[first + 1 :]


def _close_gaps(page: _Page) -> None:
    """Where words are removed, blanks that would be left over go too: the right ones, before a stop the left."""
    text, changes = page.text, page.changes
    # From the end, because a removed word closes if what is removed behind it does.
    next_start, next_closes = -1, False
    for index in range(len(changes) - 1, -1, -1):
        change = changes[index]
        if not change.new:
            before, after = _blanks_before(page, change.start), _blanks_after(page, change.end)
            closes = next_closes if after == next_start else after == len(text) or text[after] in ".,;:!?)\n"
            if closes:
                change = replace(change, start=before)
            elif change.start == 0 or text[change.start - 1].isspace() or text[change.start - 1] in "([{\"'“‘*_":
                change = replace(change, end=after)
            page.taken[change.start : change.end] = b"\1" * (change.end - change.start)
            changes[index], next_start, next_closes = change, change.start, closes


def _blanks_before(page: _Page, position: int) -> int:
    while position > 0 and page.text[position - 1] in " \t" and not page.taken[position - 1]:
        position -= 1
    return position


def _blanks_after(page: _Page, position: int) -> int:
    while position < len(page.text) and page.text[position] in " \t" and not page.taken[position]:
        position += 1
    return position


def _move_capitals(page: _Page) -> None:
    """Where what began a sentence is removed, the next word begins it."""
    text, moved, result = page.text, False, list[Change]()
    for index, change in enumerate(page.changes):
        first = next((letter for letter in text[change.start : change.end] if letter.isalpha()), "")
        moved = moved or (first.isupper() and begins_sentence(text, change.start))
        if change.new and moved:
            change = replace(change, new=_capitalised(change.new))
        result.append(change)
        moved = moved and not change.new
        following = page.changes[index + 1].start if index + 1 < len(page.changes) else len(text)
        if moved and following > change.end:
            word = _WORD.search(text, change.end, following)
            if word and page.free(word.start(), word.start() + 1):
                result.append(Change(word.start(), word.start() + 1, word[0][0].upper(), ""))
            moved = False
    page.changes = result


def _fix_articles(page: _Page) -> None:
    """``a`` or ``an`` before a word that a rule has changed, where the new word needs the other one."""
    text, done = page.text, 0
    for index, change in enumerate(list(page.changes)):
        before = _ARTICLE.search(text, done, change.start)
        done = change.end
        if before is None or not page.free(*before.span(1)):
            continue
        needs_an = _sounds_open(_first_letters(page, index))
        if needs_an is not None and needs_an != _sounds_open(text[change.start : change.end]):
            article = "an" if needs_an else "a"
            page.claim(*before.span(1), article.capitalize() if before[1][0].isupper() else article, "")
    page.changes.sort(key=lambda change: change.start)


def _first_letters(page: _Page, index: int) -> str:
    """What follows an article after change ``index`` has been made."""
    new, start = page.changes[index].new, page.changes[index].end
    while not new.strip() and index + 1 < len(page.changes) and page.changes[index + 1].start == start:
        index += 1
        new, start = page.changes[index].new, page.changes[index].end
    return new if new.strip() else page.text[start : start + 20]


def _sounds_open(text: str) -> bool | None:
    """Whether ``text`` begins with the sound of a vowel; None where it begins with no word."""
    word = text.lstrip("'’\"“*_ \t").lower()
    return bool(_AS_VOWEL.match(word)) if word[:1].isalpha() else None


def _num_touched(words: Sequence[tuple[int, int]], changes: Sequence[Change]) -> int:
    """How many of ``words`` a rule has changed; both are in order, the changes disjoint."""
    count, index = 0, 0
    ruled = [change for change in changes if change.rule]
    for start, end in words:
        while index < len(ruled) and ruled[index].end <= start:
            index += 1
        count += index < len(ruled) and ruled[index].start < end
    return count


def _joint(block: str) -> str:
    return "\n\n" if _BLOCK.match(block) else " "


def _first_word(text: str) -> str:
    word = _WORD.search(text)
    return word[0].casefold() if word else ""
