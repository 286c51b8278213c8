"""Rule sets that turn text into another style: what a YAML file may say, and reading it with exact complaints.

The shipped rule sets lie beside this module. Every scalar of the file is text (``no: nay`` is a rule, not a
boolean). :mod:`allhands.data.style` applies a rule set.
"""

from __future__ import annotations

import difflib
import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from allhands.errors import ConfigError
from allhands.io.paths import meant

WORD = r"(?<!\w)[^\W\d_]+(?:['’][^\W\d_]+)*(?!\w)"
"""One word: letters, with apostrophes inside. What touches a digit or an underscore is none."""

Protected = Literal["code", "urls", "emails", "numbers", "latex", "quotes", "names"]
_Lines = dict[tuple[str | int, ...], int]


def _one_word(key: str) -> str:
    if not re.fullmatch(WORD, key):
        raise ValueError("this is not one word; a rule for several words or with signs belongs under phrases")
    return key


def _phrase(key: str) -> str:
    if not re.search(WORD, key):
        raise ValueError("there is no word in it; use a rule under regex")
    if re.search(r"[\d_]", key):
        raise ValueError("digits and _ cannot stand in a phrase; use a rule under regex")
    return key


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _pattern(text: str) -> str:
    try:
        compiled = re.compile(text)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if compiled.search(""):
        raise ValueError("it matches the empty string, that is everywhere; let it match at least one character")
    return text


Alternatives = Annotated[list[str], BeforeValidator(_as_list), Field(min_length=1)]
Pattern = Annotated[str, AfterValidator(_pattern)]


class _StrictStyle(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)


class SuffixRule(_StrictStyle):
    """Another ending for words: ``suffix`` becomes ``to`` where the rest of the word fits ``stem``."""

    suffix: str = Field(min_length=1)
    to: str
    stem: Annotated[str, AfterValidator(_pattern)] = r"\w+"
    exceptions: frozenset[str] = Field(frozenset(), alias="except")


class RegexRule(_StrictStyle):
    """A Python regular expression and its replacement, which may name groups (``\\1``, ``\\g<name>``)."""

    pattern: Pattern
    to: str

    @model_validator(mode="after")
    def _groups_exist(self) -> RegexRule:
        try:
            re.sub(self.pattern, self.to, "")
        except (re.error, IndexError) as error:
            raise ValueError(f"the replacement does not fit the pattern: {error}") from None
        return self


class Extras(_StrictStyle):
    """Texts of which one is put before (or after) an answer, with the given probability."""

    probability: float = Field(ge=0, le=1)
    texts: list[str] = Field(min_length=1)


class StyleSample(_StrictStyle):
    """A sentence and what the rules must make of it (first alternatives, no opening, no closing)."""

    before: str = Field(alias="from")
    after: str = Field(alias="to")


class RuleSet(_StrictStyle):
    """A style. Which rule wins where several fit: protection, regex in their order, the longest phrase, a
    word, the first suffix that fits; each looks at the original text only."""

    name: str
    description: str = ""
    protect: tuple[Protected, ...] = ("code", "urls", "emails", "numbers", "latex")
    protect_patterns: list[Pattern] = Field(default_factory=list)
    fix_articles: bool = False
    words: dict[Annotated[str, AfterValidator(_one_word)], Alternatives] = Field(default_factory=dict)
    phrases: dict[Annotated[str, AfterValidator(_phrase)], Alternatives] = Field(default_factory=dict)
    suffixes: list[SuffixRule] = Field(default_factory=list)
    regex: list[RegexRule] = Field(default_factory=list)
    openings: Extras | None = None
    closings: Extras | None = None
    examples: list[StyleSample] = Field(default_factory=list)

    @property
    def num_rules(self) -> int:
        """Rules of all kinds, each opening and closing counted."""
        extras = sum(len(part.texts) for part in (self.openings, self.closings) if part)
        return len(self.words) + len(self.phrases) + len(self.suffixes) + len(self.regex) + extras


def shipped_styles() -> list[str]:
    """The names of the rule sets that come with allhands."""
    names = (entry.name for entry in files(__name__).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def rules_text(style: str) -> tuple[str, str]:
    """The YAML text of a rule set and the name to complain with. ``style`` is a shipped name or a file.

    Raises:
        ConfigError: there is no such style, or the file cannot be read.
    """
    if style in shipped_styles():
        return (files(__name__) / f"{style}.yaml").read_text(encoding="utf-8"), f"{style}.yaml"
    try:
        return Path(style).read_text(encoding="utf-8-sig"), style
    except FileNotFoundError:
        near = difflib.get_close_matches(style, shipped_styles(), n=1)
        hint = f"shipped are {', '.join(shipped_styles())}; or name a YAML file"
        hint = f"did you mean {near[0]}?" if near else meant(style, hint)
        raise ConfigError("there is no such style and no such file", where=style, hint=hint) from None
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise ConfigError(
            f"the rules cannot be read: {reason}", where=style, hint="name a YAML file with rules, saved as UTF-8"
        ) from None


def load_rules(style: str) -> RuleSet:
    """The rule set of a shipped name or a YAML file.

    Raises:
        ConfigError: with ``file:line``, the rule and what to do about it.
    """
    return parse_rules(*rules_text(style))


def parse_rules(text: str, source: str) -> RuleSet:
    """Check the YAML text of a rule set; ``source`` names it in messages.

    Raises:
        ConfigError: as :func:`load_rules`.
    """
    lines: _Lines = {}
    try:
        node = yaml.compose(text, yaml.BaseLoader)
        content = _plain(node, (), lines, source) if node else {}
    except yaml.YAMLError as error:
        mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        hint = "write 'from: to', one rule a line; put what holds : # ' or starts with a sign in double quotes"
        raise ConfigError(f"not valid YAML: {problem or error}", where=where, hint=hint) from None
    except RecursionError:
        raise ConfigError(
            "the YAML contains itself", where=source, hint="remove the anchors (&) and aliases (*)"
        ) from None
    if not isinstance(content, dict):
        raise ConfigError("the rules must be 'key: value' pairs", where=source, hint=_SEE)
    try:
        # A section without rules is as good as none.
        given = {key: value for key, value in content.items() if value != ""}
        rules = RuleSet.model_validate({"name": Path(source).stem, **given})
    except ValidationError as error:
        raise _explain(error, lines, source) from None
    _refuse_doubles(rules, lines, source)
    return rules


_SEE = "see a complete rule set: allhands data style --show pirate"


def _plain(node: yaml.Node, path: tuple[str | int, ...], lines: _Lines, source: str) -> Any:
    """The node as dictionaries, lists and strings; the line of everything goes into ``lines``."""
    lines.setdefault(path, node.start_mark.line + 1)
    if isinstance(node, yaml.SequenceNode):
        return [_plain(item, (*path, index), lines, source) for index, item in enumerate(node.value)]
    if not isinstance(node, yaml.MappingNode):
        return str(node.value)
    result: dict[str, Any] = {}
    for key, value in node.value:
        here = (*path, str(key.value))
        if here in lines:
            raise ConfigError(
                f"{key.value!r} is there twice, first on line {lines[here]}",
                where=f"{source}:{key.start_mark.line + 1}: {_rule_name(path)}",
                hint="keep one of them; several replacements are written as a list: [one, two]",
            )
        lines[here] = key.start_mark.line + 1
        result[str(key.value)] = _plain(value, here, lines, source)
    return result


def _rule_name(path: tuple[str | int, ...]) -> str:
    """``words: you`` or ``regex: 2`` (counted from 1)."""
    return ": ".join(str(part + 1) if isinstance(part, int) else part for part in path[:2]) or "the file"


def _explain(error: ValidationError, lines: _Lines, source: str) -> ConfigError:
    """The first complaint of pydantic, with the line of the rule it is about."""
    first = error.errors()[0]
    path = tuple(part for part in first["loc"] if part != "[key]")
    known = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in lines), ())
    message, hint = str(first["msg"]).removeprefix("Value error, "), _SEE
    if first["type"] == "extra_forbidden":
        fields = _fields_beside(path)
        near = difflib.get_close_matches(str(path[-1]), fields, n=1)
        message, hint = (
            f"unknown key {path[-1]!r}",
            f"did you mean {near[0]}?" if near else f"known: {', '.join(fields)}",
        )
    elif first["type"] == "missing":
        message, hint = f"{path[-1]!r} is missing", f"add the key {path[-1]!r}"
    elif first["type"] == "value_error":
        message, _, hint = message.partition("; ")
    message = message.replace("Input should be", "must be")
    where = f"{source}:{lines.get(known, 1)}: {_rule_name(path)}"
    return ConfigError(message, where=where, hint=hint or _SEE)


def _fields_beside(path: tuple[str | int, ...]) -> list[str]:
    """The keys that are known where an unknown one was met."""
    inner = {
        "suffixes": SuffixRule,
        "regex": RegexRule,
        "openings": Extras,
        "closings": Extras,
        "examples": StyleSample,
    }
    model = inner.get(str(path[0]), RuleSet) if len(path) > 1 else RuleSet
    return [field.alias or name for name, field in model.model_fields.items()]


def normalised(word: str) -> str:
    """A word as rules compare it: case and the form of the apostrophe do not count."""
    return word.replace("’", "'").casefold()


def _refuse_doubles(rules: RuleSet, lines: _Lines, source: str) -> None:
    """Two rules for the same words, in another case or section: one of them could never apply."""
    seen: dict[str, int] = {}
    for section, keys in (("words", rules.words), ("phrases", rules.phrases)):
        for key in keys:
            line, same = lines[(section, key)], " ".join(normalised(key).split())
            if same in seen:
                raise ConfigError(
                    f"the same words have a rule on line {seen[same]}",
                    where=f"{source}:{line}: {section}: {key}",
                    hint="keep one of them; upper and lower case are the same for a rule",
                )
            seen[same] = line
