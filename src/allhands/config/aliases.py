"""Other trainers' names for options and commands: the understood ones, and advice for all others.

The names are in ``aliases.toml``. This module is separate from the options, because the command
line needs the names for all of its tasks. In advice ``[[key]]`` and ``[[key: value]]`` stand for an
option; :func:`for_key` and :func:`for_flag` spell it.
"""

from __future__ import annotations

import difflib
import re
import shlex
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any


def _each_name(table: Mapping[str, str]) -> dict[str, str]:
    """Give each name its text; a key of the table lists the names of one text."""
    return {name: text for names, text in table.items() for name in names.split(", ")}


_TABLES: dict[str, Any] = tomllib.loads(
    Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
)
# Other trainers' names for our keys.
ALIASES = {name: key for key, names in _TABLES["aliases"].items() for name in names.split(", ")}
OUTDATED, ELSEWHERE, OF_MLX_LM, COMMANDS = (
    _each_name(_TABLES[name]) for name in ("outdated", "elsewhere", "mlx_lm", "commands")
)
OF_VERBS = {verb: _each_name(table) for verb, table in _TABLES["verbs"].items()}
_MARK = re.compile(r"\[\[(\w+)(?:: (.*?))?\]\]")
ALIKE = 0.75  # least similarity of names; with less, "merge" would match "serve"


def for_key(text: str) -> str:
    """Spell the options in ``text`` as keys of a YAML file or of a call."""
    return _MARK.sub(lambda found: found[0][2:-2], text)


def for_flag(text: str) -> str:
    """Spell the options in ``text`` as flags of a command line."""

    def flag(found: re.Match[str]) -> str:
        name, value = f"--{found[1].replace('_', '-')}", found[2]
        if value is None or value == "on":
            return name
        return f"{name} {value if value.isupper() or '/' in value else shlex.quote(value)}"

    return _MARK.sub(flag, text)


def instead_of_flag(flag: str, verb: str, options: Iterable[str]) -> str | None:
    """Return advice on a flag that ``verb``, with its ``options``, does not have; ``None`` if there
    is none.
    """
    key = flag.lstrip("-").replace("-", "_")
    text = {**OF_MLX_LM, **ELSEWHERE, **OF_VERBS.get(verb, {})}.get(key)
    if text is None:
        return None
    foreign = {found[1] for found in _MARK.finditer(text)} - set(options)
    return f"{'it is about training, allhands train: ' if foreign else ''}{for_flag(text)}"


def instead_of_command(
    words: str, siblings: Iterable[str], commands: Callable[[], Iterable[str]]
) -> str:
    """Return advice on ``words``: an unknown command, perhaps after the name of a group.

    Args:
        siblings: commands that could replace the last word.
        commands: returns all commands with their groups, such as ``model get``.
    """
    group, _, word = words.lower().replace("_", "-").rpartition(" ")
    name = re.sub(r"^(mlx[-.]lm|allhands)[-.]?", "", word)
    beside = {sibling: f"{group} {sibling}".strip() for sibling in siblings}
    if near := difflib.get_close_matches(name, beside, n=1, cutoff=ALIKE):
        return f"did you mean `allhands {beside[near[0]]}`?"
    if text := COMMANDS.get(f"{group} {name}", COMMANDS.get(name)):
        return text
    if inner := [command for command in commands() if command.rpartition(" ")[2] == name]:
        return f"did you mean {' or '.join(f'`allhands {command}`' for command in inner)}?"
    if near := difflib.get_close_matches(name, COMMANDS, n=1, cutoff=ALIKE):
        return COMMANDS[near[0]]
    return f"`{f'allhands {group}'.strip()} --help` lists the commands"


def take_outdated(content: dict[str, Any]) -> list[str]:
    """Remove from a file's ``content`` keys that later versions of mlx_lm ignore; return a note for
    each key that has a value.
    """
    found = {raw: str(raw).replace("-", "_") for raw in content}
    gone = {
        raw: key
        for raw, key in found.items()
        if key in OUTDATED and not (content[raw] and key in ELSEWHERE)
    }
    values = {raw: content.pop(raw) for raw in gone}
    return [
        f"{raw} has no effect: {OUTDATED[gone[raw]]}"
        for raw, value in values.items()
        if value is not None
    ]


def canonical_flag(name: str) -> str:
    """Return the flag that ``name`` means, without dashes before it.

    ``name``: an alias, or a name with underscores.
    """
    key = name.replace("-", "_")
    return (ALIASES.get(key, key) if len(key) > 1 else key).replace("_", "-")
