"""Directories that are exchanged whole: whatever interrupts it, what stood there is not lost."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from allhands.errors import StorageError
from allhands.staging import locked_now, publish, staging

# Killed between the two renames of an exchange.
KILLED = """
import os, signal, sys
from pathlib import Path
from allhands.staging import publish, staging
with staging(Path(sys.argv[1])) as staged:
    (staged / "new").touch()
    real = Path.rename
    def rename(self, target):
        if self == staged:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, target)
    Path.rename = rename
    publish(staged, Path(sys.argv[1]))
"""


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def out(tmp_path: Path) -> Path:
    path = tmp_path / "out"
    path.mkdir()
    (path / "old").touch()
    return path


def fail(staged: Path) -> None:
    raise OSError(5, "Input/output error", str(staged))


def stage(out: Path, use: Callable[[Path], None]) -> None:
    with staging(out) as staged:
        assert names(out) == ["old"]
        (staged / "new").touch()
        use(staged)


def test_an_exchange_that_is_killed_is_undone_by_the_next_run(out: Path) -> None:
    subprocess.run([sys.executable, "-c", KILLED, str(out)], check=False)
    assert not out.exists()
    # Put back before anything else happens, so that a failure of the next run loses nothing either.
    with pytest.raises(StorageError):
        stage(out, fail)
    assert names(out.parent) == ["out"]
    assert names(out) == ["old"]


def test_an_exchange_that_fails_is_undone(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        if (self / "new").exists():
            fail(self)
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(StorageError):
        stage(out, lambda staged: publish(staged, out))
    assert names(out) == ["old"]
    assert names(out.parent) == ["out"]


def test_a_link_to_a_directory_stays_one(out: Path) -> None:
    link = out.parent / "link"
    link.symlink_to(out)
    with staging(link) as staged:
        (staged / "new").touch()
        publish(staged, link)
    assert os.readlink(link) == str(out)
    assert names(out) == ["new"]
    assert names(out.parent) == ["link", "out"]


def test_a_lock_is_had_at_once_or_not(tmp_path: Path) -> None:
    with locked_now(tmp_path / "lock") as first, locked_now(tmp_path / "lock") as second:
        assert (first, second) == (True, False)
    with locked_now(tmp_path / "lock") as third:
        assert third
