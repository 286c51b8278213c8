"""Where a text must stay as it is: code, addresses, numbers, formulas, quotations, names."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from itertools import pairwise

from allhands.data.styles import WORD, Protected

_UNITS = (
    r"(?:%|°\s?[CF]?|(?:[kcm]?m|[km]?g|lbs?|oz|ft|in(?!\s+[a-z])|mi|[mc]?l|tsp|tbsp|hrs?|min|h|s|ms|[KMGT]B|[kMG]?Hz|"
    r"[kM]?Wh?|V|mph|km/h|am|pm|a\.m\.|p\.m\.)(?!\w))"
)
# Lines of programs that stand in an answer without a fence, as they often do.
_CODE_LINES = r"""(?mx)^[ \t]*+(?:
      (?:def|class|if|elif|for|while|with|except)\ [^\n]*:[ \t]*$ | (?:else|try|finally):[ \t]*$
    | (?:import|from|package|using|namespace)\ [\w.*]+(?:\ import\ [^\n]*|\ as\ \w+)?;?[ \t]*$
    | (?:const|let|var|int|float|double|char|void|public|private|static|function|func)\ [^\n]*[=({;][^\n]*$
    | [\w.\[\]'"]+(?:\ [\w.]+)?\ *[-+*/]?=(?!=)\ *\S[^\n]*$
    | (?:[^\n]*(?:[{}]|\)\ *;)|[^=\n]*=[^\n]*;)[ \t]*$
    | (?://|/\*|\#include|\#!|<[?!/a-zA-Z])[^\n]*$
    | (?:SELECT|INSERT|UPDATE|DELETE|CREATE|ALTER|DROP|FROM|WHERE|SET|VALUES
        |(?:LEFT\ |INNER\ )?JOIN|ORDER\ BY|GROUP\ BY)\ [^\n]*$
    )"""
_PATTERNS: dict[Protected, tuple[str, ...]] = {
    "code": (
        r"(?ms)^[ \t]*+(`{3,}|~{3,})[^\n]*(?:\n.*?(?:^[ \t]*\1[`~]*[ \t]*$|\Z)|\Z)",
        r"(?s)(?<!`)(`+)(?!`)(?:(?!\n[ \t]*\n).)+?(?<!`)\1(?!`)",
        r"(?s)<(tool_call|functioncall|function_call|think|script|style|pre|code)\b[^>]*>(?:.*?</\1>|.*\Z)",
        r"</?[a-zA-Z][^<>\n]*>|<\|[^<>\n]*\|>",
        r"(?m)^(?: {4}|\t)(?![ \t]*+(?:[-*+•]|\d+[.)])\s)[^\n]*$",
        r"(?<![\w.])[A-Za-z_][\w.]*+\([^()\n]*\)",
        r"(?<!\w)[^\W_]*_\w*|(?<!\w)[a-z]+[A-Z]\w*",
        _CODE_LINES,
    ),
    "urls": (
        r"(?:(?<![\w+.-])[a-zA-Z][\w+.-]*+://|www\.)[^\s<>\"]*[^\s<>\".,;:!?)\]'*_]",
        r"(?<=\])\([^()\s]+(?:\s+\"[^\"\n]*\")?\)",
        r"(?<![\w/])(?:~|\.{1,2})?/(?:[\w.-]+/)*[\w.-]*\w|(?<!\w)[A-Za-z]:\\[\w\\.-]+",
        r"(?<![\w-])\w++(?:-\w++)*+(?:\.[\w-]*\w)+(?!\w)",
        r"(?<!\w)[#@]\w+",
    ),
    "emails": (r"(?<![\w.+%-])[\w.+%-]++@[\w-]+(?:\.[\w-]+)+",),
    "numbers": (rf"[$€£¥]?\d+(?:[.,:/×x-]\d+)*(?:\s?{_UNITS})?",),
    "latex": (
        r"(?s)\$\$.+?\$\$|\\\[.+?\\\]|\\\(.+?\\\)|\\begin\{(\w+\*?)\}.*?\\end\{\1\}",
        r"\$(?!\s)[^$\n]+(?<!\s)\$(?!\d)",
        r"\\[a-zA-Z]+(?:\{[^{}\n]*\})+",
    ),
    "quotes": (r'"[^"\n]+"|“[^”\n]+”|«[^»\n]+»',),
    "names": (),
}
_COMPILED = {kind: tuple(re.compile(text) for text in patterns) for kind, patterns in _PATTERNS.items()}
_BEFORE_SENTENCE = re.compile(
    r"(?:^|[.!?:…][\"'”’)\]*_]*\s)[\s\"'“‘(\[*_#>|•–—-]*(?:(?:\d+|[a-zA-Z])[.)]\s+)?[\"'“‘(\[*_]*$"
)
_TITLE = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|vs|etc|No)|(?<!\w)[A-Z])\.\s+$")


def protected_mask(text: str, kinds: Iterable[Protected], patterns: Iterable[re.Pattern[str]] = ()) -> bytearray:
    """One byte for each character of ``text``: 1 where no rule may change it.

    Args:
        kinds: what to protect. ``patterns``: more of it, the caller's own.
    """
    if "code" in (kinds := tuple(kinds)) and is_json(text):
        return bytearray(b"\1" * len(text))
    mask = bytearray(len(text))
    for start, end in _spans(text, kinds, patterns):
        mask[start:end] = b"\1" * (end - start)
    return mask


def _spans(text: str, kinds: tuple[Protected, ...], patterns: Iterable[re.Pattern[str]]) -> Iterator[tuple[int, int]]:
    for pattern in (*(pattern for kind in kinds for pattern in _COMPILED[kind]), *patterns):
        yield from (match.span() for match in pattern.finditer(text))
    if "names" in kinds:
        yield from _names(text)


def is_json(text: str) -> bool:
    """Whether the whole text is one JSON object or list: data, not words."""
    if text.strip()[:1] not in ("{", "["):
        return False
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _names(text: str) -> Iterator[tuple[int, int]]:
    """Capitalised words inside sentences, and abbreviations in capitals; not the word I."""
    words = list(re.finditer(WORD, text))
    capitals = [match[0].isupper() and len(match[0]) > 1 for match in words]
    # Whether a word and the next one stand in one sentence.
    joined = [not set(text[one.end() : two.start()]) & set(".!?…\n") for one, two in pairwise(words)]
    for index, match in enumerate(words):
        beside = [capitals[index - 1]] if index and joined[index - 1] else []
        beside += [capitals[index + 1]] if index + 1 < len(words) and joined[index] else []
        # Capitals among capitals, or alone in their sentence, are shouting, which has a style too.
        if capitals[index]:
            named = bool(beside) and not any(beside)
        else:
            named = match[0][0].isupper() and re.split("['’]", match[0])[0] != "I"
            named = named and not begins_sentence(text, match.start())
        if named:
            yield match.span()


def begins_sentence(text: str, position: int) -> bool:
    """Whether the word at ``position`` is the first of a line, of a list item, or after the end of a sentence."""
    line = text.rfind("\n", 0, position) + 1
    # The end of a long line decides; what stands in for its beginning is no beginning.
    before = text[line:position] if position - line <= 60 else "x" + text[position - 60 : position]
    return bool(_BEFORE_SENTENCE.search(before)) and not _TITLE.search(before)
