"""Versions, where allhands is installed and where it runs from its source alone."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

import allhands
from allhands.cluster.setup.source import find_source
from allhands.errors import ConfigError
from allhands.runtime.versions import version_of, versions_of


@pytest.fixture
def not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """allhands on the path, and nothing of it among the installed packages."""
    found = importlib.metadata.Distribution.from_name

    def look(name: str) -> importlib.metadata.Distribution:
        if name == "allhands":
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    monkeypatch.setattr(importlib.metadata.Distribution, "from_name", look)
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("allhands")


@pytest.mark.usefixtures("not_installed")
def test_a_source_tree_that_is_not_installed_knows_its_version() -> None:
    from allhands.run.preparing import versions

    assert version_of("allhands") == allhands.__version__
    assert versions()["allhands"] == allhands.__version__


def test_of_others_what_is_installed_counts() -> None:
    assert versions_of("numpy", "no-such-package") == {"numpy": importlib.metadata.version("numpy")}


@pytest.mark.usefixtures("not_installed")
def test_preparing_other_computers_says_what_it_cannot_send(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="without being installed") as told:
        find_source(None, tmp_path)
    assert told.value.where == "--from"
