"""Directories that are exchanged whole: whatever interrupts it, what stood there is not lost."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from allhands.errors import ConfigError, StorageError
from allhands.io.staging import Scratch, locked, locked_now, publish, require_place, staging

# Killed between the two renames of an exchange.
KILLED = """
import os, signal, sys
from contextlib import nullcontext
from pathlib import Path
from allhands.io.staging import publish, staging
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

PUBLISHES = """
import sys
from pathlib import Path
from allhands.io.staging import publish, staging
with staging(Path(sys.argv[1])) as staged:
    (staged / "new").touch()
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


def test_a_copy_that_fails_names_the_copy_or_what_was_asked_for(out: Path, tmp_path: Path) -> None:
    """Not the file that is only read, nor a directory that is gone when a person reads this."""
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere" / "file"

    def copy(to: Path) -> None:
        raise OSError(28, "No space left on device", str(source), None, str(to))

    with pytest.raises(StorageError) as caught:
        stage(out, lambda staged: copy(staged / "file"))
    assert caught.value.where == str(out)
    with pytest.raises(StorageError) as caught:
        stage(out, lambda staged: copy(elsewhere))
    assert caught.value.where == str(elsewhere)
    assert names(out) == ["old"]


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


def modes(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.stat().st_mode & 0o777
        for path in (folder, *folder.rglob("*"))
    }


@pytest.fixture(params=[0o000, 0o027, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def fill(staged: Path) -> None:
    (staged / "inner").mkdir()
    (staged / "inner" / "file").touch()


def test_the_umask_gives_the_modes_of_what_is_not_private(tmp_path: Path, umask: int) -> None:
    target = tmp_path / "made" / "target"
    with staging(target) as staged:
        fill(staged)
        publish(staged, target)
    directory = 0o777 & ~umask
    assert modes(target) == {".": directory, "inner": directory, "inner/file": 0o666 & ~umask}
    assert modes(tmp_path / "made")["."] == directory


def test_what_is_private_is_for_its_owner_alone_at_every_moment(tmp_path: Path, umask: int) -> None:
    target = tmp_path / "made" / "target"
    with staging(target, private=True) as staged:
        assert modes(staged) == {".": 0o700}
        fill(staged)
        (tmp_path / "elsewhere").touch(0o644)
        (staged / "link").symlink_to(tmp_path / "elsewhere")
        elsewhere = modes(tmp_path)["elsewhere"]
        publish(staged, target, private=True)
    assert modes(tmp_path)["elsewhere"] == elsewhere
    (target / "link").unlink()
    assert modes(tmp_path / "made") == {
        **{".": 0o700, "target": 0o700, "target/inner": 0o700},
        "target/inner/file": 0o600,
    }
    with (
        locked(tmp_path / "locks" / "lock", private=True),
        locked_now(tmp_path / "locks" / "now", private=True),
    ):
        assert modes(tmp_path / "locks") == {".": 0o700, "lock": 0o600, "now": 0o600}


@pytest.mark.parametrize("private", [True, False])
def test_a_directory_that_is_replaced_hands_on_its_mode(out: Path, private: bool) -> None:
    out.chmod(0o750)
    with staging(out, private=private) as staged:
        (staged / "new").touch()
        publish(staged, out, private=private)
    assert modes(out)["."] == 0o750
    assert names(out) == ["new"]


def test_the_new_name_is_on_the_disk_before_anybody_is_told(
    out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real = Path.rename

    def rename(self: Path, target: Path) -> Path:
        done.append("rename")
        return real(self, target)

    def sync(path: Path) -> None:
        done.append("parent" if path == out.parent else "staged")

    monkeypatch.setattr(Path, "rename", rename)
    monkeypatch.setattr("allhands.io.staging.sync", sync)
    stage(out, lambda staged: publish(staged, out))
    assert done == ["staged", "staged", "rename", "rename", "parent"]


def test_a_lock_is_had_at_once_or_not(tmp_path: Path) -> None:
    with locked_now(tmp_path / "lock") as first, locked_now(tmp_path / "lock") as second:
        assert (first, second) == (True, False)
    with locked_now(tmp_path / "lock") as third:
        assert third


# --- temporary directories ------------------------------------------------------------------------

_HOLDER = """
import sys, time
from allhands.io.staging import Scratch
print(Scratch(sys.argv[1]).path, flush=True)
time.sleep(60)
"""


def test_what_a_killed_process_left_goes_and_what_a_living_one_has_stays(tmp_path: Path) -> None:
    holders = [
        subprocess.Popen(
            [sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    try:
        dead, living = (
            Path(holder.stdout.readline().strip()) for holder in holders if holder.stdout
        )
        (dead / "more").mkdir()
        (dead / "more" / "file").write_text("something")
        # Not ours: by its name alone, a link, one that is just being made, a file.
        (tmp_path / "allhands-of-a-person").mkdir()
        (tmp_path / "allhands-link").symlink_to(living)
        (tmp_path / "allhands-new").mkdir()
        (tmp_path / "allhands-new" / ".owner").touch()
        (tmp_path / "allhands-file").touch()
        holders[0].kill()
        holders[0].wait()
        with Scratch(str(tmp_path)) as own:
            assert own.stat().st_mode & 0o777 == 0o700
            assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
                [
                    "allhands-of-a-person",
                    "allhands-link",
                    "allhands-new",
                    "allhands-file",
                    living.name,
                    own.name,
                ]
            )
        assert not own.exists()
        assert living.exists()
    finally:
        for holder in holders:
            holder.kill()
            holder.communicate()


@pytest.mark.parametrize(
    ("held", "force", "told"),
    [
        (["notes.txt"], False, "another directory"),
        (["notes.txt"], True, "another directory"),
        (["a.bin", "notes.txt"], False, "another directory"),
        (["README.md"], True, "another directory"),  # a person's own, as far as can be seen
        (["a.bin", "README.md"], False, "--force"),
        (["a.bin", "README.md"], True, None),
        ([], False, None),
    ],
)
def test_force_is_offered_only_where_it_helps(
    tmp_path: Path, held: list[str], force: bool, told: str | None
) -> None:
    for name in held:
        (tmp_path / name).touch()
    with pytest.raises(ConfigError) if told else nullcontext() as caught:
        require_place(tmp_path, "an export", ("a.bin", "README.md"), force=force)
    assert told is None or told in (caught.value.hint or "")
    file = tmp_path / "README.md"
    file.touch()
    for forced in (False, True):
        with pytest.raises(ConfigError) as caught:
            require_place(file, "an export", ("a.bin", "README.md"), force=forced)
        assert "--force" not in (caught.value.hint or "")


def test_a_job_that_has_locked_the_directory_above_stops_nobody(tmp_path: Path) -> None:
    """A running job has the lock on its run directory, in which its ranks publish ``best``."""
    job = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(job, fcntl.LOCK_EX)
    done = [sys.executable, "-c", PUBLISHES, str(tmp_path / "out")]
    try:
        subprocess.run(done, check=True, timeout=60)
    finally:
        os.close(job)
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out") == ["new"]


def test_one_staged_directory_can_hold_another(tmp_path: Path) -> None:
    with staging(tmp_path / "out") as staged:
        with staging(staged / "inner") as inner:
            (inner / "new").touch()
            publish(inner, staged / "inner")
        publish(staged, tmp_path / "out")
    assert names(tmp_path) == ["out"]
    assert names(tmp_path / "out" / "inner") == ["new"]


def test_a_lock_that_a_killed_process_left_is_taken(tmp_path: Path) -> None:
    (tmp_path / ".allhands-publishing").touch()
    subprocess.run([sys.executable, "-c", PUBLISHES, str(tmp_path / "out")], check=True, timeout=60)
    assert names(tmp_path) == ["out"]


def test_a_file_that_appears_meanwhile_does_not_cost_the_result(tmp_path: Path) -> None:
    target = tmp_path / "model"
    target.mkdir()
    (target / "config.json").write_text("old")
    seen = require_place(target, "a model", ("config.json",), force=True)
    with staging(target) as staged:
        (staged / "config.json").write_text("new")
        (target / ".DS_Store").touch()
        publish(staged, target, seen)
    assert (target / "config.json").read_text() == "new"
