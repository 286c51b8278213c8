"""The page "Coming from mlx_lm": each old name is mlx_lm's, each new one is ours, in the real
parsers.
"""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import typer

from allhands.cli.main import make_app
from allhands.config.aliases import ELSEWHERE, OF_MLX_LM, OF_VERBS
from allhands.config.schema import TrainConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming-from-mlx-lm.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| `(mlx[^`]+)` \| `(allhands [^`]+)` \|", PAGE, re.MULTILINE)
THEIRS = {
    entry.name: entry
    for entry in entry_points(group="console_scripts")
    if entry.name.startswith("mlx")
}


class Parsed(Exception):
    pass


def options_of_theirs(command: str, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """What a command of mlx_lm's, or of MLX's, parses."""
    found: set[str] = set()

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> Any:
        found.update(name for action in parser._actions for name in action.option_strings)
        raise Parsed

    for name in ("parse_args", "parse_known_args"):
        monkeypatch.setattr(argparse.ArgumentParser, name, stop)
    monkeypatch.setattr(sys, "argv", [command])
    with pytest.raises(Parsed):
        THEIRS[command].load()()
    return found


def command_of_ours(words: list[str]) -> tuple[Any, list[str]]:
    """The verb that words name, and what is left of them."""
    found: Any = typer.main.get_command(make_app(words[0]))
    words = list(words)
    while words and words[0] in getattr(found, "commands", {}):
        found = found.commands[words.pop(0)]
    return found, words


@pytest.mark.parametrize(("old", "new"), ROWS)
def test_names_are_real(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    command, *options = old.split()
    assert command in THEIRS
    if options:
        assert set(options) <= options_of_theirs(command, monkeypatch)
    found, rest = command_of_ours(new.split()[1:])
    assert not hasattr(found, "commands"), "a group of verbs"
    assert set(rest) <= {name for option in found.params for name in option.opts}


def test_the_page_is_about_every_command() -> None:
    told = set(re.findall(r"`(mlx[_.][a-z_.]+?)[` ]", PAGE))
    others = {"mlx_lm", "mlx_lm.benchmark", "mlx_lm.cache_prompt", "mlx_lm.manage", "mlx_lm.share"}
    assert set(THEIRS) - told <= others
    assert len(ROWS) > 15


def test_every_option_of_their_training_is_one_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = command_of_ours(["train"])
    ours = {name for option in found.params for name in option.opts}
    assert options_of_theirs("mlx_lm.lora", monkeypatch) - {"-h", "--help"} <= ours
    defaults = importlib.import_module("mlx_lm.lora").CONFIG_DEFAULTS
    assert set(defaults) - {"config"} <= set(TrainConfig.model_fields)


@pytest.mark.parametrize(
    ("old", "verb"),
    [
        *(("mlx_lm.generate", "generate"), ("mlx_lm.chat", "chat"), ("mlx_lm.server", "serve")),
        *(("mlx_lm.convert", "model get"), ("mlx_lm.upload", "upload")),
    ],
)
def test_what_has_no_place_says_where_it_went(
    old: str, verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of those on the page, each; of all others that are told of, that they are mlx_lm's at all."""
    found, _ = command_of_ours(verb.split())
    ours = {name for option in found.params for name in option.opts}
    lost = {
        name[2:].replace("-", "_")
        for name in options_of_theirs(old, monkeypatch) - ours
        if name[:2] == "--"
    }
    on_page = {
        option[2:].replace("-", "_")
        for row in ROWS
        if row[0].startswith(f"{old} ")
        for option in row[0].split()[1:]
    }
    told = {*ELSEWHERE, *OF_MLX_LM, *OF_VERBS.get(verb, {})}
    assert on_page & lost <= told
    assert lost - told <= {"help", "verbose"}, "each is told of"
