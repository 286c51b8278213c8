"""Search for the computers that differ from the others, with the differences and a remedy.

If a fact is not equal everywhere, the most frequent value is taken for right, and the computers
with other values are named. If no value is the most frequent, no computer is blamed, and the
message has all values.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import chain
from pathlib import PurePath
from typing import Any, Literal, cast

from allhands.errors import DistributedError
from allhands.runtime.versions import MUST_BE_EQUAL, TOKEN_MAKERS, described

# The section of the facts with versions, and the kind of differences in packages that make tokens.
# Below, the sections that are made of files, with the roles of the files.
SOFTWARE, TOKENS = "software", "tokens"
_MADE_OF = {"data": ("data", "tokenizer"), "model": ("model",), "resume_adapter_file": ("adapter",)}
_GENERIC = "give every rank the same command, configuration, model, data and versions"
_MOST_TOLD = 3
# Words for facts whose values are hashes, which say nothing to people.
_SUMS = {
    "model.weights": "the weights (model*.safetensors)",
    "resume_adapter_file.weights": "the weights to start from (--resume-adapter-file)",
    **{f"data.{split}": f"the tokens of {split}" for split in ("train", "valid", "test")},
}
_MISSING = "missing"


class MisfitError(DistributedError):
    """Raised if computers differ in facts that must be equal.

    Attributes:
        misfits: ranks of the computers that differ from the others; empty if that is not certain.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        where: str | None = None,
        hint: str | None = None,
        misfits: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message, code=code, where=where, hint=hint)
        self.misfits = misfits


@dataclass(frozen=True)
class Statement:
    """The facts that one computer states about itself.

    Attributes:
        name: name of the computer, or of the rank if ranks of one computer must be told apart.
        facts: the facts that must be equal, as nested JSON; the section :data:`SOFTWARE` is from
            :func:`allhands.runtime.versions.required`.
        files: SHA-256 by ``role/name`` of the files behind the differing facts, as far as they were
            read.
        places: directories by role (``model``, ``data``).
        software: all versions, also those that may differ; from
            :func:`allhands.runtime.versions.software`.
    """

    name: str
    facts: Mapping[str, Any]
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    places: Mapping[str, str] = field(default_factory=dict[str, str])
    software: Mapping[str, str] = field(default_factory=dict[str, str])


@dataclass(frozen=True)
class Circumstances:
    """The context on which the message and its remedy depend.

    Attributes:
        launcher: name of the computer at which the person sits, as in the statements.
        option: option with which the person named the computers, such as ``--hostfile hosts.json``;
            empty if another launcher was used.
        model: value of ``--model``.
        data: value of ``--data``, if it is a path.
        adapter: value of ``--resume-adapter-file``.
        config: value of ``--config``.
        trusted: computers that have trained together already: their facts are right.
        exemplary: whether the launcher's facts are known to be right though it takes no part.
    """

    launcher: str = ""
    option: str = ""
    model: str = ""
    data: str = ""
    adapter: str = ""
    config: str = ""
    trusted: frozenset[str] = frozenset()
    exemplary: bool = False


# Environment variables with which a supervisor gives these circumstances to its ranks.
COMPUTER_VARIABLE = "ALLHANDS_HOST"
LAUNCHER_VARIABLE = "ALLHANDS_LAUNCHER_HOST"
OPTION_VARIABLE = "ALLHANDS_HOSTS_OPTION"
TRUSTED_VARIABLE = "ALLHANDS_TRUSTED_HOSTS"


def circumstances_in(environ: Mapping[str, str], launcher: str = "") -> Circumstances:
    """Return the circumstances that a supervisor has put into the environment."""
    trusted = environ.get(TRUSTED_VARIABLE, "")
    return Circumstances(
        launcher or environ.get(LAUNCHER_VARIABLE, ""),
        environ.get(OPTION_VARIABLE, ""),
        trusted=frozenset(trusted.split(",")) if trusted else frozenset(),
    )


@dataclass(frozen=True)
class BlameVerdict:
    """The result of :func:`judge`.

    Attributes:
        message: the differences, in words.
        hint: the remedy.
        misfits: names of computers without which the others agree; empty: no computer can be
            blamed.
    """

    message: str
    hint: str
    misfits: tuple[str, ...] = ()


@dataclass(frozen=True)
class _FactPart:
    """One difference between computers.

    Attributes:
        kind: ``software``, ``tokens``, a role of files, or a section of the facts.
        style: form of the difference in messages.
        key: name of the package, file or fact.
        values: value of each computer, for comparison.
        shown: value of each computer, for messages.
    """

    kind: str
    style: Literal["version", "file", "value"]
    key: str
    values: Mapping[str, str]
    shown: Mapping[str, str]


def judge(statements: Sequence[Statement], given: Circumstances) -> BlameVerdict | None:
    """Return the verdict on computers that differ; ``None`` if all agree."""
    names = [one.name for one in statements]
    parts = _parts(statements)
    parts = parts if _are_ranks(names) else _causes(parts)
    if not parts:
        return None
    misfits = _misfits(parts, names, given)
    told = [_told(part, names, given) for part in parts]
    more = len(told) - _MOST_TOLD
    text = "; ".join(told[:_MOST_TOLD] + ([f"and {more} more"] if more > 0 else []))
    return BlameVerdict(
        f"{_title(names, misfits)}: {text}",
        _Remedy(parts, statements, misfits, given).hint(),
        misfits,
    )


def _misfits(
    parts: Sequence[_FactPart], names: Sequence[str], given: Circumstances
) -> tuple[str, ...]:
    """Return the computers that differ from the right values, if the others agree; else ()."""
    odd = {
        name
        for part in parts
        if (right := _right(part, given)) is not None
        for name in names
        if part.values[name] != right
    }
    rest = [name for name in names if name not in odd]
    settled = bool(rest) and not any(_differ(part.values[name] for name in rest) for part in parts)
    return tuple(name for name in names if name in odd) if settled else ()


def _differ(values: Iterable[str]) -> bool:
    return len(set(values)) > 1


def init_command(names: Iterable[str], option: str = "") -> str:
    """Return the command that gives these computers the environment of the computer where it is
    typed.
    """
    words = ["allhands", "cluster", "init", "--hosts", ",".join(names)]
    flag, _, file = option.partition(" ")
    ours = flag == "--hostfile" and file.endswith(".json")
    if ours and file != "hosts.json":
        words += ["--hostfile", *shlex.split(file)]
    return shlex.join(words)


# --- differences ----------------------------------------------------------------------------------


def _parts(statements: Sequence[Statement]) -> list[_FactPart]:
    found = _versions(statements)
    flat = {
        one.name: _flatten({k: v for k, v in one.facts.items() if k != SOFTWARE})
        for one in statements
    }
    explained: dict[str, list[_FactPart]] = {}
    for key in sorted(
        set[str]().union(*flat.values()), key=lambda key: (key.startswith("model."), key)
    ):
        facts = {name: of_one.get(key) for name, of_one in flat.items()}
        values = {
            name: json.dumps(fact, sort_keys=True, default=str) for name, fact in facts.items()
        }
        if not _differ(values.values()):
            continue
        section = key.partition(".")[0]
        if section not in explained:
            # Ranks of one computer have the same files, so files do not explain the difference.
            explained[section] = [] if _are_ranks(list(flat)) else _sources(section, statements)
            found += explained[section]
        if not (explained[section] and all(map(_is_sum, facts.values()))):
            found.append(
                _FactPart(
                    section,
                    "value",
                    key,
                    values,
                    {name: _short(fact) for name, fact in facts.items()},
                )
            )
    return found


def _versions(statements: Sequence[Statement]) -> list[_FactPart]:
    found: list[_FactPart] = []
    for name in MUST_BE_EQUAL:
        values = {one.name: str(one.facts.get(SOFTWARE, {}).get(name)) for one in statements}
        shown = {one.name: described(name, one.software) for one in statements}
        found += _if_different(_FactPart(SOFTWARE, "version", name, values, shown))
    return found


def _sources(section: str, statements: Sequence[Statement]) -> list[_FactPart]:
    """Return the differing files behind a section of the facts; or, for data without differing
    files, the differing packages that make tokens.
    """
    found: list[_FactPart] = []
    roles = _MADE_OF.get(section, ())
    for key in sorted(
        {key for one in statements for key in one.files if key.partition("/")[0] in roles}
    ):
        role, _, name = key.partition("/")
        values = {one.name: one.files.get(key, _MISSING) for one in statements}
        found += _if_different(
            _FactPart(role, "file", name, values, {n: value[:8] for n, value in values.items()})
        )
    for name in TOKEN_MAKERS if section == "data" and not found else ():
        values = {one.name: one.software.get(name, _MISSING) for one in statements}
        shown = {one: f"{name} {value}" for one, value in values.items()}
        found += _if_different(_FactPart(TOKENS, "version", name, values, shown))
    return found


def _if_different(part: _FactPart) -> list[_FactPart]:
    return [part] if _differ(part.values.values()) else []


def _causes(parts: list[_FactPart]) -> list[_FactPart]:
    """Return the differences without those that only follow from others."""
    kinds = {part.kind for part in parts}
    # Options, model files and versions decide about trained parameters and about tokens.
    follows = {"parameters"} if kinds & {SOFTWARE, "config", "model"} else set[str]()
    follows |= {"data"} if kinds & {SOFTWARE, "config"} else set()
    return [part for part in parts if part.kind not in follows or part.style != "value"]


def _right(part: _FactPart, given: Circumstances) -> str | None:
    """Return the value of trusted computers, or the most frequent value; ``None`` if unclear."""
    trusted = {value for name, value in part.values.items() if name in given.trusted}
    if len(trusted) == 1:
        return trusted.pop()
    (first, most), *others = Counter(part.values.values()).most_common()
    return first if not others or most > others[0][1] else None


# --- words ----------------------------------------------------------------------------------------


def _title(names: Sequence[str], misfits: Sequence[str]) -> str:
    if _are_ranks(names):
        return "the ranks disagree"
    if not misfits:
        return f"{_listed(names)} do not match"
    rest = [name for name in names if name not in misfits]
    return f"{_listed(misfits)} {'does' if len(misfits) == 1 else 'do'} not match {_listed(rest)}"


def _told(part: _FactPart, names: Sequence[str], given: Circumstances) -> str:
    """Return a difference in words: the right value, or the first computer's, and the others."""
    right = _right(part, given)
    first = next(name for name in names if right in (None, part.values[name]))
    groups = _groups(part, names)
    del groups[part.values[first]]
    who = _listed([*chain(*groups.values())])
    shown = [(part.shown[group[0]], _listed(group)) for group in groups.values()]
    if part.style == "version":
        return _told_of_version(part, first, shown)
    if part.style == "file" and right is not None:
        return _told_of_file(part, first, who, lacks={what for what, _ in shown} == {_MISSING})
    if _are_ranks(names):  # only two ranks are named
        return f"{part.key} is {part.shown[first]} on {first} and {shown[0][0]} on {next(iter(groups.values()))[0]}"
    if part.style == "value" and right is not None and (words := _SUMS.get(part.key)):
        return f"{words} of {who} differ from {first}'s"
    return f"{part.key} is {part.shown[first]} on {first}" + "".join(
        f" and {what} on {who}" for what, who in shown
    )


def _groups(part: _FactPart, names: Sequence[str]) -> dict[str, list[str]]:
    """Return the names by their values."""
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(part.values[name], []).append(name)
    return groups


def _told_of_version(part: _FactPart, first: str, others: Sequence[tuple[str, str]]) -> str:
    made = " (other tokens of the same data)" if part.kind == TOKENS else ""
    own = part.shown[first].partition(" ")[2]
    return ", ".join(f"{who} has {what}" for what, who in others) + f", {first} {own}{made}"


def _told_of_file(part: _FactPart, first: str, who: str, *, lacks: bool) -> str:
    if part.shown[first] == _MISSING:
        return f"{who} has {part.key}, which {first} does not have"
    return (
        f"{part.key} is missing on {who}" if lacks else f"{who}'s {part.key} differs from {first}'s"
    )


@dataclass(frozen=True)
class _Remedy:
    """The commands that remove the differences."""

    parts: Sequence[_FactPart]
    statements: Sequence[Statement]
    misfits: Sequence[str]
    given: Circumstances

    def hint(self) -> str:
        names = [one.name for one in self.statements]
        kinds = {part.kind for part in self.parts}
        steps: list[str] = []
        if not _are_ranks(names):
            steps += [self._init(names)] if SOFTWARE in kinds else []
            steps += self._packages() if TOKENS in kinds else []
            steps += self._files(
                kinds & {"model", "data", "tokenizer", "adapter", "resume_adapter_file"}
            )
        if "config" in kinds:
            steps.append(self._options(names))
        return "; ".join(steps) or _GENERIC

    def _odd(self, kinds: Set[str]) -> list[str]:
        """Return the misfits with a difference of one of these kinds."""
        if not self.misfits:
            return []
        right = next(one.name for one in self.statements if one.name not in self.misfits)
        parts = [part for part in self.parts if part.kind in kinds]
        return [
            name
            for name in self.misfits
            if any(part.values[name] != part.values[right] for part in parts)
        ]

    def _init(self, names: Sequence[str]) -> str:
        """Return the command that copies the launcher's environment to misfits, or to all if the
        launcher itself may be wrong.
        """
        odd, launcher = self._odd({SOFTWARE}), self.given.launcher
        known = (launcher in names or self.given.exemplary) and launcher not in odd
        some = odd if odd and known else names
        return init_command([name for name in some if name != launcher], self.given.option)

    def _packages(self) -> list[str]:
        """Return the commands that install the right versions of packages that make tokens."""
        wrong = self.misfits or [
            one.name for one in self.statements if one.name != self.given.launcher
        ]
        right = next(one for one in self.statements if one.name not in wrong)
        pins = [
            f"{part.key}=={right.software[part.key]}" for part in self.parts if part.kind == TOKENS
        ]
        steps: list[str] = []
        for one in self.statements:
            if one.name in wrong:
                command = shlex.join(
                    [one.software.get("executable", "python"), "-m", "pip", "install", *pins]
                )
                here = one.name == self.given.launcher
                steps.append(command if here else shlex.join(["ssh", one.name, command]))
        return steps

    def _options(self, names: Sequence[str]) -> str:
        """Return the remedy for differing options.

        Options differ only if the configuration file differs, or if another launcher has given
        ranks different commands.
        """
        config, odd = self.given.config, self._odd({"config"})
        if not config or _are_ranks(names):
            return "give every rank the same command and configuration"
        if self.given.launcher in odd or not self.given.option:
            return f"give all computers the same {config}"
        return shlex.join(
            ["allhands", "cluster", "sync", *shlex.split(self.given.option), "--config", config]
        )

    def _files(self, roles: Set[str]) -> list[str]:
        if not roles:
            return []
        if self.given.launcher in self._odd(roles):
            return self._copies()
        option = self.given.option or "--hosts " + ",".join(one.name for one in self.statements)
        words = ["allhands", "cluster", "sync", *shlex.split(option)]
        paths = (
            ["--model", self.given.model]
            if roles & {"model", "tokenizer"} and self.given.model
            else []
        )
        paths += ["--data", self.given.data] if "data" in roles and self.given.data else []
        paths += (
            [self.given.adapter]
            if roles & {"adapter", "resume_adapter_file"} and self.given.adapter
            else []
        )
        return [shlex.join([*words, *paths])] if paths else []

    def _copies(self) -> list[str]:
        """Return the commands that copy files from a right computer to the launcher."""
        right = next(one for one in self.statements if one.name not in self.misfits)
        own = next(one for one in self.statements if one.name == self.given.launcher)
        steps: list[str] = []
        for part in self.parts:
            role = "model" if part.kind == "tokenizer" else part.kind
            if part.style == "file" and role in right.places and role in own.places:
                source, target = (
                    str(PurePath(one.places[role]) / part.key) for one in (right, own)
                )
                steps.append(shlex.join(["scp", "-p", f"{right.name}:{source}", target]))
        return steps


def _are_ranks(names: Sequence[str]) -> bool:
    return names[0].startswith("rank ")


def _listed(names: Sequence[str], most: int = 4) -> str:
    shown = (
        list(names) if len(names) <= most else [*names[: most - 1], f"{len(names) - most + 1} more"]
    )
    return shown[0] if len(shown) == 1 else f"{', '.join(shown[:-1])} and {shown[-1]}"


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {prefix: value}
    result: dict[str, Any] = {}
    for key, inner in cast("Mapping[Any, Any]", value).items():
        result |= _flatten(inner, f"{prefix}.{key}" if prefix else str(key))
    return result


def _is_sum(value: Any) -> bool:
    """Return True if the value is a SHA-256 or missing, which says nothing to people."""
    return value is None or (
        isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None
    )


def _short(value: Any) -> str:
    text = _MISSING if value is None else str(value)
    return text if len(text) <= 40 else text[:37] + "..."
