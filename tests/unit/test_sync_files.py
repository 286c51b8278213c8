"""A computer that receives: the hashes it knows, files that wait to be verified, and what is left
alone.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from allhands.cluster.probes import files
from allhands.cluster.probes.files import (
    STAGING,
    HashCache,
    all_digests,
    look,
    staged_bytes,
    staged_name,
)

TOKEN = "run-0123"
CONTENT = os.urandom(5000)


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLHANDS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "CLAIMED", {})


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "root").mkdir()
    return tmp_path / "root"


def told(root: Path, *wanted: tuple[str, bytes], dry: bool = False) -> dict[str, Any]:
    """The answer of a computer that is to have these contents below ``root``."""
    asked = [
        [0, path, len(content), digest(content), 0o640, 1_600_000_000_000_000_123]
        for path, content in wanted
    ]
    roots = [{"base": "absolute", "at": str(root)}]
    request = {"envs": {}, "roots": roots, "files": asked, "dry": dry, "token": TOKEN}
    return look(request, lambda read: None)


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def staged(root: Path, path: str) -> Path:
    return root / STAGING / staged_name(path)


def let_go() -> None:
    """As the end of the process would: the lock is the system's."""
    while files.CLAIMED:
        os.close(files.CLAIMED.popitem()[1])


def arrive(root: Path, path: str, content: bytes) -> None:
    """What rsync does: the file that it starts from keeps its other name."""
    draft = root / STAGING / f".{staged_name(path)}.Ab12Cd"
    draft.write_bytes(content)
    draft.rename(staged(root, path))


def test_a_file_appears_when_its_hash_is_right(root: Path) -> None:
    wanted = ("sub/it's\n", CONTENT)
    first = told(root, wanted)
    assert (first["lacking"], first["partial"]) == ([0], 0)
    assert (root / STAGING).stat().st_mode & 0o777 == 0o700
    for come in (CONTENT[:-1], bytes(len(CONTENT)), CONTENT + b"more"):
        arrive(root, wanted[0], come)
        assert told(root, wanted)["lacking"] == [0]
        assert not (root / "sub").exists()
    arrive(root, wanted[0], CONTENT)
    assert told(root, wanted)["lacking"] == []
    there = root / "sub" / "it's\n"
    assert there.read_bytes() == CONTENT
    assert (there.stat().st_mode & 0o777, there.stat().st_mtime_ns) == (
        0o640,
        1_600_000_000_000_000_123,
    )
    assert os.listdir(root) == ["sub"]


def test_a_transfer_goes_on_from_what_waits(root: Path) -> None:
    told(root, ("a", CONTENT))
    arrive(root, "a", CONTENT[:3000])
    assert staged_bytes([str(root)]) == 3000
    let_go()
    again = told(root, ("a", CONTENT))
    assert (again["lacking"], again["partial"]) == ([0], 3000)
    assert sorted(os.listdir(root / STAGING)) == sorted([staged_name("a"), TOKEN])


def test_what_a_killed_transfer_has_written_is_kept_if_it_is_more(root: Path) -> None:
    wanted = (("a", CONTENT), ("b", CONTENT + b"b"))
    told(root, *wanted)
    arrive(root, "a", CONTENT[:3000])
    arrive(root, "b", CONTENT[:1000])
    for name in "ab":
        (root / STAGING / f".{staged_name(name)}.Ab12Cd").write_bytes(CONTENT[:2000])
    let_go()
    assert told(root, *wanted)["partial"] == 3000 + 2000
    assert sorted(os.listdir(root / STAGING)) == sorted([staged_name("a"), staged_name("b"), TOKEN])


def test_a_part_without_room_for_its_copy_is_begun_anew(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told(root, ("a", CONTENT))
    arrive(root, "a", CONTENT[:3000])
    usage = shutil.disk_usage(root)
    for more, partial in ((3000, 3000), (2999, 0)):
        room = len(CONTENT) - 3000 + more
        monkeypatch.setattr(shutil, "disk_usage", lambda path, room=room: usage._replace(free=room))
        assert told(root, ("a", CONTENT))["partial"] == partial


def test_a_place_that_two_roots_lead_to_is_filled_once(root: Path) -> None:
    (root.parent / "link").symlink_to(root)
    told(root, ("a", CONTENT))
    arrive(root, "a", CONTENT)
    roots = [{"base": "absolute", "at": str(each)} for each in (root, root.parent / "link")]
    asked = [[number, "a", len(CONTENT), digest(CONTENT), 0o640, 1] for number in (0, 1)]
    request = {"envs": {}, "roots": roots, "files": asked, "dry": False, "token": TOKEN}
    assert look(request, lambda read: None)["lacking"] == []
    assert os.listdir(root) == ["a"]


def test_rsync_starts_from_an_old_file_and_from_one_of_another_name(root: Path) -> None:
    (root / "old").write_bytes(b"old")
    (root / "other").write_bytes(CONTENT)
    answer = told(root, ("old", b"new"), ("other", b"else"), ("moved", CONTENT))
    assert (answer["lacking"], answer["partial"]) == ([0, 1, 2], 0)
    assert staged(root, "old").read_bytes() == b"old"
    assert staged(root, "moved").samefile(root / "other")
    # A second name of a file that is in use is nothing that has come, though its content is right.
    assert told(root, ("moved", CONTENT))["lacking"] == [0]
    arrive(root, "old", b"new")
    told(root, ("old", b"new"))
    assert (root / "old").read_bytes() == b"new"


def test_a_link_to_equal_content_is_left_and_to_other_content_replaced_not_followed(
    tmp_path: Path, root: Path
) -> None:
    for name, content in (("a", b"same"), ("b", b"old")):
        (tmp_path / name).write_bytes(content)
        (root / name).symlink_to(tmp_path / name)
    assert told(root, ("a", b"same"), ("b", b"new"))["lacking"] == [1]
    arrive(root, "b", b"new")
    assert told(root, ("a", b"same"), ("b", b"new"))["lacking"] == []
    assert (root / "a").is_symlink()
    assert not (root / "b").is_symlink()
    assert ((root / "b").read_bytes(), (tmp_path / "b").read_bytes()) == (b"new", b"old")


@pytest.mark.parametrize("target", ["outside", "absent", "../outside"])
def test_a_link_below_the_root_is_no_way_out_of_it(tmp_path: Path, root: Path, target: str) -> None:
    (tmp_path / "outside").mkdir()
    told(root, ("sub/file", b"x"))
    arrive(root, "sub/file", b"x")
    (root / "sub").symlink_to(tmp_path / "outside" if target == "outside" else target)
    with pytest.raises(OSError, match="link or a file") as caught:
        told(root, ("sub/file", b"x"))
    assert caught.value.filename == str(root / "sub")
    assert os.listdir(tmp_path / "outside") == []


def test_a_directory_in_the_place_of_a_file_is_told_at_once(root: Path) -> None:
    (root / "file").mkdir()
    for dry in (True, False):
        with pytest.raises(IsADirectoryError) as caught:
            told(root, ("file", b"x"), dry=dry)
        assert caught.value.filename == str(root / "file")
    assert os.listdir(root) == ["file"]


def test_what_does_not_fit_is_refused_before_anything_is_written(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(root)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4999))
    with pytest.raises(OSError, match="needed") as caught:
        told(root, ("a", CONTENT))
    assert (caught.value.errno, os.listdir(root)) == (errno.ENOSPC, [])
    assert told(root, ("a", CONTENT), dry=True)["lacking"] == [0]


def test_two_syncs_do_not_write_one_place(root: Path) -> None:
    told(root, ("a", CONTENT))
    files.CLAIMED.clear()  # as another process would find it
    with pytest.raises(OSError, match="another sync") as caught:
        told(root, ("a", CONTENT))
    assert caught.value.errno == errno.EBUSY


def test_what_waits_for_a_file_that_is_there_is_removed(root: Path) -> None:
    told(root, ("a", CONTENT), ("b", b"b"))
    arrive(root, "a", CONTENT[:3000])
    (root / "a").write_bytes(CONTENT)
    assert told(root, ("a", CONTENT), ("b", b"b"))["lacking"] == [1]
    assert staged_bytes([str(root)]) == 0


def test_a_dry_run_writes_nothing(root: Path) -> None:
    assert told(root / "new", ("a", CONTENT), dry=True)["lacking"] == [0]
    assert os.listdir(root) == []


# --- hashes that are known ------------------------------------------------------------------------


def hashed(where: Path, path: Path) -> tuple[str, int]:
    """The hash of a file, and how many bytes of it were read or known."""
    read: list[int] = []
    found = all_digests([str(path)], HashCache(str(where)), read.append)[0]
    return found[1], read[-1]


def aged(path: Path, content: bytes) -> Path:
    """A file that has been there for a while: its times are those of its last change."""
    path.write_bytes(content)
    time.sleep(1.6)
    return path


def test_hashes_are_remembered_as_long_as_the_file_is_the_same(tmp_path: Path) -> None:
    path, where = aged(tmp_path / "file", CONTENT), tmp_path / "hashes" / "hashes.json"
    assert hashed(where, path) == (digest(CONTENT), len(CONTENT))
    assert (where.stat().st_mode & 0o777, where.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    # Known by its times: were it read, the fault that is put in here would show.
    known = json.loads(where.read_text())
    known[str(path)][-1] = "ab" * 32
    where.write_text(json.dumps(known))
    assert hashed(where, path) == ("ab" * 32, len(CONTENT))
    os.utime(path, ns=(0, 12345))
    assert hashed(where, path)[0] == digest(CONTENT)


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path) -> None:
    path, where = tmp_path / "file", tmp_path / "hashes.json"
    path.write_bytes(b"now")
    hashed(where, path)
    assert json.loads(where.read_text()) == {}


# The last one is of an earlier version, which hashed blocks of 4 MiB.
DAMAGED = [
    "",
    "[]",
    "{",
    "[1]",
    '{"%s": 1}',
    '{"%s": [1,2,3,4,5,"zz"]}',
    '{"%s": []}',
    '{"%s": [1,1,1,1,1,"abab"]}',
]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_cache_is_an_empty_one(tmp_path: Path, content: str) -> None:
    where, path = tmp_path / "hashes.json", tmp_path / "file"
    where.write_text(content.replace("%s", str(path)))
    path.write_bytes(b"x")
    assert hashed(where, path)[0] == digest(b"x")


def test_pipes_directories_and_what_is_not_there_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    paths = [str(tmp_path / name) for name in ("pipe", ".", "absent")]
    assert all(
        isinstance(each, OSError) for each in all_digests(paths, HashCache(None), lambda read: None)
    )
