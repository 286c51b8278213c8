"""What transformers finds in its sources is found once, is the same, and is looked for again when they change."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import import_utils

from allhands.kept_structures import Structures

MODELS = Path(str(import_utils.__file__)).parents[1] / "models"
LOOK: Callable[[Any], dict[Any, Any]] = import_utils.create_import_structure_from_path
MARK = ["of the test", 1]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ALLHANDS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def refuse(path: Any) -> dict[Any, Any]:
    raise AssertionError(f"looked into {path}")


def test_it_is_what_transformers_finds_and_is_found_once(cache: Path) -> None:
    wanted = LOOK(str(MODELS))
    assert len(wanted) > 200
    assert Structures(LOOK, MODELS, MARK)(MODELS) == wanted
    (file,) = cache.rglob("*.json")
    kept = Structures(refuse, MODELS, MARK)
    assert kept(str(MODELS / "__init__.py")) == wanted == kept(MODELS)
    assert [list(kept(MODELS)[name]) for name in wanted] == [list(wanted[name]) for name in wanted]  # their order, too
    assert kept(str(MODELS / "auto" / "__init__.py")) == kept(MODELS / "auto") == wanted["auto"]
    assert file.stat().st_mode & 0o777 == 0o600


def test_other_places_are_left_to_transformers(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "configuration_mine.py").write_text('__all__ = ["MineConfig"]\n')
    assert Structures(LOOK, MODELS, MARK)(tmp_path) == {frozenset(): {"configuration_mine": {"MineConfig"}}}
    asked: list[Any] = []
    Structures(lambda path: asked.append(path) or {}, MODELS, MARK)(MODELS / "no such model")
    assert asked == [str(MODELS), MODELS / "no such model"]


def broken(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


def of_another_installation(file: Path) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | {"mark": ["of the test", 2]}))


def of_another_form(file: Path) -> None:
    file.write_text(json.dumps({"mark": MARK, "structure": {"own": [["torch"]], "inner": {}}}))


@pytest.mark.parametrize("harm", [broken, of_another_installation, of_another_form, Path.unlink])
def test_what_is_not_whole_or_not_of_this_installation_is_looked_for_again(
    cache: Path, harm: Callable[[Path], None]
) -> None:
    wanted = Structures(LOOK, MODELS, MARK)(MODELS)
    (file,) = cache.rglob("*.json")
    whole = file.read_text()
    harm(file)
    assert Structures(LOOK, MODELS, MARK)(MODELS) == wanted
    assert file.read_text() == whole


def test_without_a_place_to_keep_it_all_is_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLHANDS_CACHE", "/dev/null/cache")
    assert Structures(LOOK, MODELS, MARK)(MODELS) == LOOK(str(MODELS))


def test_what_cannot_be_written_down_is_not(cache: Path) -> None:
    structure = {frozenset(): {"a": {"A"}}, ("a", "tuple"): {}}
    assert Structures(lambda path: structure, MODELS, MARK)(MODELS) == structure
    assert list(cache.rglob("*.json")) == []


# A process as the command line's are; it tells the files of models that it opens.
PROCESS = """
import builtins, sys
import allhands.import_structures, allhands.without_torch
allhands.import_structures.keep_import_structures()
allhands.without_torch.leave_torch_out()
opened = []
usual = builtins.open
def count(file, *more, **named):
    opened.append(str(file))
    return usual(file, *more, **named)
builtins.open = count
import transformers, transformers.models
from transformers import AutoConfig, AutoTokenizer, LlamaConfig
import transformers.models.auto, transformers.models.llama
print(sum("/models/" in name for name in opened), LlamaConfig.__module__, len(dir(transformers)))
print(type(transformers.utils.import_utils.__spec__.loader).__name__)
"""


def ran(environ: dict[str, str]) -> list[str]:
    found = subprocess.run(
        [sys.executable, "-c", PROCESS], env=environ, capture_output=True, text=True, timeout=100, check=True
    )
    return found.stdout.split()


def test_processes_after_the_first_read_no_sources(cache: Path) -> None:
    environ = {**os.environ, "ALLHANDS_CACHE": str(cache)}
    first, second = ran(environ), ran(environ)
    assert int(first[0]) > 1000
    assert int(second[0]) < 10
    assert first[1:] == second[1:]
    assert (second[1], second[3]) == ("transformers.models.llama.configuration_llama", "SourceFileLoader")


def test_sources_that_somebody_works_on_are_read(cache: Path, tmp_path: Path) -> None:
    """A checkout in place of an installation."""
    package = MODELS.parent
    shutil.copytree(package, tmp_path / "src" / "transformers", ignore=shutil.ignore_patterns("__pycache__"))
    environ = {**os.environ, "ALLHANDS_CACHE": str(cache), "PYTHONPATH": str(tmp_path / "src")}
    assert int(ran(environ)[0]) > 1000
    assert list(cache.rglob("*.json")) == []
