"""Files that grow on a host: what an earlier run has left, what is found elsewhere, and what is refused."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
from pathlib import Path

import pytest

from allhands.cluster.sync.blocks import BLOCK_BYTES, BlockEntry, HashCache
from allhands.cluster.sync.shelf import Destination, WrongBlock

CONTENT = os.urandom(3 * BLOCK_BYTES + 100)


def pieces(content: bytes) -> list[bytes]:
    return [content[place : place + BLOCK_BYTES] for place in range(0, len(content), BLOCK_BYTES)]


def entry_of(content: bytes, *parts: str, mode: int = 0o640) -> BlockEntry:
    digests = b"".join(hashlib.sha256(piece).digest() for piece in pieces(content))
    return BlockEntry(0, parts or ("file",), len(content), 1_600_000_000_000_000_123, mode, digests)


def destination(root: Path, *entries: BlockEntry) -> Destination:
    found = Destination([str(root)], entries, HashCache(None))
    found.look(lambda count: None)
    return found


def partial(root: Path, entry: BlockEntry) -> Path:
    return root.joinpath(*entry.parts[:-1], entry.partial_name)


def fill(found: Destination, file: int, content: bytes) -> None:
    found.begin()
    for _, first, last in [row for row in found.missing() if row[0] == file]:
        for block in range(first, last + 1):
            found.write(file, block, pieces(content)[block])
    found.settle()


def test_a_file_appears_when_its_last_block_has_come(tmp_path: Path) -> None:
    entry = entry_of(CONTENT, "sub", "file")
    found = destination(tmp_path / "root", entry)
    assert (found.missing(), found.bytes_to_get()) == ([(0, 0, 3)], len(CONTENT))
    found.begin()
    target = tmp_path / "root" / "sub" / "file"
    for block in (2, 0, 3, 1):
        assert not target.exists()
        assert found.write(0, block, pieces(CONTENT)[block])
    found.settle()
    assert target.read_bytes() == CONTENT
    assert (target.stat().st_mode & 0o777, target.stat().st_mtime_ns) == (0o640, entry.mtime_ns)
    assert os.listdir(target.parent) == ["file"]
    assert found.since(0, 0.0) == [(0, 2), (0, 0), (0, 3), (0, 1)]
    assert found.read(0, 3) == CONTENT[3 * BLOCK_BYTES :]
    assert destination(tmp_path / "root", entry).missing() == []


def test_a_directory_in_the_place_of_a_file_is_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "sub" / "file").mkdir(parents=True)
    with pytest.raises(IsADirectoryError) as caught:
        destination(tmp_path, entry_of(CONTENT, "sub", "file"))
    assert (caught.value.filename, caught.value.strerror) == (
        str(tmp_path / "sub" / "file"),
        "it is a directory, and a file is to be brought",
    )
    # A link to a directory is no directory: the file takes the place of the link.
    (tmp_path / "link").symlink_to(tmp_path / "sub")
    entry = entry_of(CONTENT, "link")
    fill(destination(tmp_path, entry), 0, CONTENT)
    assert not (tmp_path / "link").is_symlink()
    assert (tmp_path / "link").read_bytes() == CONTENT


def test_a_directory_that_gets_in_between_is_named_by_its_own_name(tmp_path: Path) -> None:
    found = destination(tmp_path, entry_of(CONTENT))
    (tmp_path / "file").mkdir()
    with pytest.raises(OSError, match="directory") as caught:
        fill(found, 0, CONTENT)
    assert (caught.value.errno, caught.value.filename) == (errno.EISDIR, str(tmp_path / "file"))


def test_verified_blocks_of_an_earlier_run_are_kept_and_damaged_ones_are_not(tmp_path: Path) -> None:
    entry = entry_of(CONTENT)
    first = destination(tmp_path, entry)
    first.begin()
    for block in (0, 1, 3):
        first.write(0, block, pieces(CONTENT)[block])
    assert first.read(0, 1) == pieces(CONTENT)[1]
    os.close(first._growing[0].descriptor)  # as the end of its process would
    assert partial(tmp_path, entry).stat().st_mode & 0o777 == 0o600
    with partial(tmp_path, entry).open("r+b") as stream:
        stream.seek(BLOCK_BYTES + 1000)
        stream.write(b"damage")
    again = destination(tmp_path, entry)
    assert again.missing() == [(0, 1, 2)]
    assert again.since(0, 0.0) == [(0, 0), (0, 3)]
    fill(again, 0, CONTENT)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_whole_partial_file_needs_nothing(tmp_path: Path) -> None:
    entry = entry_of(CONTENT)
    partial(tmp_path, entry).write_bytes(CONTENT + b"more")
    found = destination(tmp_path, entry)
    assert found.missing() == []
    found.begin()
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_what_differs_is_replaced_in_one_moment_and_what_is_the_same_in_it_is_not_sent(tmp_path: Path) -> None:
    old = CONTENT[:BLOCK_BYTES] + os.urandom(BLOCK_BYTES) + CONTENT[2 * BLOCK_BYTES :]
    (tmp_path / "file").write_bytes(old)
    (tmp_path / "other").write_bytes(b"stays")
    found = destination(tmp_path, entry_of(CONTENT))
    assert found.bytes_to_get() == BLOCK_BYTES
    with (tmp_path / "file").open("rb") as reader:
        found.begin()
        assert found.missing() == [(0, 1, 1)]
        assert (tmp_path / "file").read_bytes() == old
        found.write(0, 1, pieces(CONTENT)[1])
        found.settle()
        assert reader.read() == old  # whoever reads the old one goes on
    assert (tmp_path / "file").read_bytes() == CONTENT
    assert sorted(os.listdir(tmp_path)) == ["file", "other"]


def test_a_file_under_another_name_is_copied_here(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(CONTENT)
    found = destination(tmp_path, entry_of(CONTENT, "new"), entry_of(b"different", "old"))
    assert found.bytes_to_get() == len(b"different")
    fill(found, 1, b"different")
    assert (tmp_path / "new").read_bytes() == CONTENT
    assert (tmp_path / "old").read_bytes() == b"different"


def test_empty_files_are_made_and_equal_ones_left_alone(tmp_path: Path) -> None:
    (tmp_path / "same").write_bytes(b"same")
    os.utime(tmp_path / "same", ns=(1, 2))
    found = destination(tmp_path, entry_of(b"", "empty"), entry_of(b"same", "same"))
    assert found.unfinished() == [0]
    found.begin()
    assert (tmp_path / "empty").read_bytes() == b""
    assert (tmp_path / "same").stat().st_mtime_ns == 2


def test_a_link_to_equal_content_is_left_and_to_other_content_replaced_not_followed(tmp_path: Path) -> None:
    root, blobs = tmp_path / "root", tmp_path / "blobs"
    root.mkdir()
    blobs.mkdir()
    (blobs / "a").write_bytes(b"same")
    (blobs / "b").write_bytes(b"old")
    for name in ("a", "b"):
        (root / name).symlink_to(blobs / name)
    found = destination(root, entry_of(b"same", "a"), entry_of(b"new", "b"))
    assert found.missing() == [(1, 0, 0)]
    fill(found, 1, b"new")
    assert (root / "a").is_symlink()
    assert not (root / "b").is_symlink()
    assert ((root / "b").read_bytes(), (blobs / "b").read_bytes()) == (b"new", b"old")


@pytest.mark.parametrize("target", ["outside", "../outside", "absent"])
def test_a_link_below_the_root_is_no_way_out_of_it(tmp_path: Path, target: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside").mkdir()
    (root / "sub").symlink_to(tmp_path / "outside" if target == "outside" else target)
    found = destination(root, entry_of(b"x", "sub", "deeper", "file"))
    found.begin()
    with pytest.raises(OSError, match="link or a file") as caught:
        found.write(0, 0, b"x")
    assert caught.value.filename == str(root / "sub")
    assert os.listdir(tmp_path / "outside") == []


def test_the_hidden_form_must_be_ones_own_file(tmp_path: Path) -> None:
    victim, root = tmp_path / "victim", tmp_path / "root"
    victim.write_bytes(b"precious")
    root.mkdir()
    entry = entry_of(b"x")
    for make in (os.link, os.symlink):
        make(victim, partial(root, entry))
        found = destination(root, entry)
        found.begin()
        with pytest.raises(OSError, match=r"somebody else|symbolic"):
            found.write(0, 0, b"x")
        partial(root, entry).unlink()
    assert victim.read_bytes() == b"precious"


@pytest.mark.parametrize(
    ("file", "block", "content"),
    [
        (0, 0, b"y" * BLOCK_BYTES),
        (0, 3, b"y" * 101),
        (0, 3, b""),
        (0, 4, b""),
        (0, -1, b"x"),
        (1, 0, b"x"),
        (-1, 0, b""),
    ],
)
def test_wrong_blocks_are_refused(tmp_path: Path, file: int, block: int, content: bytes) -> None:
    found = destination(tmp_path, entry_of(CONTENT))
    found.begin()
    with pytest.raises(WrongBlock):
        found.write(file, block, content)
    assert os.listdir(tmp_path) == []


def test_blocks_that_are_there_or_given_up_are_not_taken(tmp_path: Path) -> None:
    found = destination(tmp_path, entry_of(CONTENT), entry_of(b"b", "b"))
    found.begin()
    assert found.write(0, 0, pieces(CONTENT)[0])
    assert not found.write(0, 0, pieces(CONTENT)[0])
    found.withdraw(1)
    assert not found.write(1, 0, b"b")
    assert found.missing() == [(0, 1, 3)]
    assert found.unfinished() == [0]


def test_two_syncs_do_not_write_one_file(tmp_path: Path) -> None:
    entry = entry_of(CONTENT)
    first, second = destination(tmp_path, entry), destination(tmp_path, entry)
    first.begin()
    first.write(0, 0, pieces(CONTENT)[0])
    second.begin()
    with pytest.raises(OSError, match="another sync") as caught:
        second.write(0, 0, pieces(CONTENT)[0])
    assert caught.value.errno == errno.EBUSY
    fill(first, 0, CONTENT)
    assert (tmp_path / "file").read_bytes() == CONTENT


def test_a_hidden_form_that_has_changed_since_it_was_looked_at_is_not_trusted(tmp_path: Path) -> None:
    entry = entry_of(CONTENT)
    partial(tmp_path, entry).write_bytes(CONTENT[:BLOCK_BYTES])
    found = destination(tmp_path, entry)
    assert found.missing() == [(0, 1, 3)]
    partial(tmp_path, entry).write_bytes(b"\0" * BLOCK_BYTES)
    with pytest.raises(OSError, match="another sync"):
        fill(found, 0, CONTENT)


def test_a_full_disk_is_told_and_keeps_what_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = destination(tmp_path, entry_of(CONTENT))
    found.begin()
    found.write(0, 0, pieces(CONTENT)[0])
    real, calls = os.pwrite, list[int]()

    def full(descriptor: int, content: memoryview, offset: int) -> int:
        calls.append(offset)
        if len(calls) == 1:
            return real(descriptor, content[:1000], offset)  # a short write is gone on with
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        found.write(0, 1, pieces(CONTENT)[1])
    assert calls == [BLOCK_BYTES, BLOCK_BYTES + 1000]
    monkeypatch.undo()
    os.close(found._growing[0].descriptor)
    assert destination(tmp_path, entry_of(CONTENT)).missing() == [(0, 1, 3)]


def test_space_that_a_partial_file_has_is_not_asked_for_again(tmp_path: Path) -> None:
    entry = entry_of(CONTENT)
    assert destination(tmp_path, entry).bytes_to_store() == {str(tmp_path): len(CONTENT)}
    partial(tmp_path, entry).write_bytes(CONTENT[:BLOCK_BYTES])
    os.sync()
    assert destination(tmp_path, entry).bytes_to_store() == {str(tmp_path): len(CONTENT) - BLOCK_BYTES}


def test_the_lock_is_the_systems(tmp_path: Path) -> None:
    """It ends with its process, however that ends."""
    entry = entry_of(CONTENT)
    found = destination(tmp_path, entry)
    found.begin()
    found.write(0, 0, pieces(CONTENT)[0])
    with partial(tmp_path, entry).open("rb") as other, pytest.raises(BlockingIOError):
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
