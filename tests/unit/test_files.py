"""Files are whole or absent: killed, out of space, without permission, or interrupted."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import pytest

from allhands.errors import StorageError
from allhands.io.files import claimed, make_directory, private_opener, require_writable, write_whole


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture(params=[0o000, 0o022, 0o027, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def test_a_file_is_written_under_its_name(tmp_path: Path) -> None:
    seen: list[str] = []

    def write(temporary: Path) -> None:
        seen.append(temporary.suffix)
        assert temporary.parent == tmp_path
        temporary.write_bytes(b"new")

    target = tmp_path / "adapters.safetensors"
    target.write_bytes(b"old")
    write_whole(target, write)
    assert target.read_bytes() == b"new"
    assert seen == [".safetensors"]
    assert names(tmp_path) == ["adapters.safetensors"]


def test_the_umask_gives_the_modes_of_what_is_not_private(tmp_path: Path, umask: int) -> None:
    while_written: list[int] = []
    target = tmp_path / "file"
    target.touch(0o600)

    def write(temporary: Path) -> None:
        while_written.append(mode(temporary))
        temporary.write_bytes(b"new")

    write_whole(target, write)
    assert mode(target) == 0o666 & ~umask
    assert while_written == [mode(target)]
    assert mode(make_directory(tmp_path / "directory")) == 0o777 & ~umask


# The last one would take rights even from the owner.
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077, 0o377], indirect=True, ids=oct)
def test_what_is_private_is_for_its_owner_alone_under_every_umask(
    tmp_path: Path, umask: int
) -> None:
    while_written: list[int] = []
    inner = make_directory(tmp_path / "a" / "b" / "c", private=True)
    assert [mode(path) for path in (inner, inner.parent, inner.parent.parent)] == [0o700] * 3
    write_whole(inner / "file", lambda draft: while_written.append(mode(draft)), private=True)
    assert while_written == [mode(inner / "file")] == [0o600]
    with open(inner / "log", "a", opener=private_opener) as stream:
        stream.write("line")
    assert mode(inner / "log") == 0o600
    with claimed(tmp_path / "run"):
        assert mode(tmp_path / "run") == 0o700
    with claimed(tmp_path / "shared", private=False):
        assert mode(tmp_path / "shared") == 0o777 & ~umask


def test_what_fails_leaves_no_empty_directory_behind(tmp_path: Path) -> None:
    for there in (False, True):
        place = tmp_path / "runs" / "first"
        if there:
            place.mkdir(parents=True)
        with pytest.raises(KeyError), claimed(place):
            raise KeyError
        assert place.exists() == there
        assert (tmp_path / "runs").exists() == there
    with suppress(KeyError), claimed(tmp_path / "second"):
        (tmp_path / "second" / "note").touch()
        raise KeyError
    assert (tmp_path / "second" / "note").exists()


def test_modes_of_what_exists_stay(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o750)
    make_directory(shared / "new", private=True)
    with claimed(shared):
        assert mode(shared) == 0o750
    assert mode(shared / "new") == 0o700
    log = shared / "log"
    log.write_text("first ")
    log.chmod(0o640)
    with open(log, "a", opener=private_opener) as stream:
        stream.write("second")
    assert log.read_text() == "first second"
    assert mode(log) == 0o640


def test_a_private_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone" / "away")
    for path in (tmp_path / "file", tmp_path / "file" / "deeper", tmp_path / "link" / "deeper"):
        with pytest.raises(StorageError, match=str(path)):
            make_directory(path, private=True)


def test_a_link_under_the_drafts_name_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("secrets.token_hex", lambda _: "known")
    (tmp_path / "victim").write_text("mine")
    draft = tmp_path / ".draft-a-known.txt"
    draft.symlink_to(tmp_path / "victim")
    for private in (True, False):
        with pytest.raises(StorageError) as caught:
            write_whole(tmp_path / "a.txt", lambda d: d.write_text("new"), private=private)
        assert caught.value.code == "place-taken"
    assert (tmp_path / "victim").read_text() == "mine"
    assert draft.is_symlink()


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interruption_leaves_the_old_file_and_nothing_else(
    error: type[BaseException], tmp_path: Path
) -> None:
    target = tmp_path / "a.json"
    target.write_text("old")

    def write(temporary: Path) -> None:
        temporary.write_text("half of")
        raise error

    with pytest.raises(error):
        write_whole(target, write)
    assert target.read_text() == "old"
    assert names(tmp_path) == ["a.json"]


KILLED = """
import sys, time
from pathlib import Path
from allhands.io.files import write_whole

def write(temporary):
    with temporary.open("wb") as file:
        file.write(b"n" * 100_000)
        file.flush()
        print("half", flush=True)
        time.sleep(60)

write_whole(Path(sys.argv[1]), write)
"""


def test_kill_9_in_the_middle_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "weights.bin"
    target.write_bytes(b"old")
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(target)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "half\n"
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert target.read_bytes() == b"old"
    # The half is there, hidden and under another name; the next write is not disturbed by it.
    assert [path.stat().st_size for path in tmp_path.iterdir() if path != target] == [100_000]
    write_whole(target, lambda temporary: temporary.write_bytes(b"new"))
    assert target.read_bytes() == b"new"


def in_child(work: Callable[[], str], prepare: Callable[[], None]) -> str:
    """What ``work`` returns in a forked process that ``prepare`` has put limits on."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            prepare()
            os.write(writer, work().encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        text = stream.read()
    os.waitpid(child, 0)
    return text


def storage_message(target: Path, write: Callable[[Path], object]) -> str:
    try:
        write_whole(target, write)
    except StorageError as error:
        return str(error)
    return "written"


def small_files() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


# Python 3.12 warns about forking a process that has threads; this child only runs what it is given.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_room_leaves_the_old_file_and_names_it(tmp_path: Path) -> None:
    target = tmp_path / "a.bin"
    target.write_bytes(b"old")
    text = in_child(
        lambda: storage_message(target, lambda t: t.write_bytes(b"n" * 10_000)), small_files
    )
    assert text.startswith(f"{target}: cannot be written: File too large")
    assert "what to do: " in text
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["a.bin"]


MLX_WRITER = """
import resource, sys
from pathlib import Path
import mlx.core as mx
from allhands.errors import StorageError
from allhands.io.files import write_whole
array = mx.zeros((10_000,))
mx.eval(array)
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try:
    write_whole(Path(sys.argv[1]), lambda t: mx.save_safetensors(str(t), {"a": array}))
except StorageError as error:
    print("StorageError", error)
"""


def test_mlxs_own_writer_out_of_room_is_a_storage_error_too(tmp_path: Path) -> None:
    target = tmp_path / "a.safetensors"
    target.write_bytes(b"old")
    done = subprocess.run(
        [sys.executable, "-c", MLX_WRITER, str(target)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"StorageError {target}: cannot be written")
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["a.safetensors"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)],
        capture_output=True,
        check=False,
    )
    if mounted.returncode:
        pytest.skip("a small file system cannot be mounted here (needs root)")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_full_disk_is_named_as_such(small_disk: Path) -> None:
    target = small_disk / "adapters.safetensors"
    mx.save_safetensors(str(target), {"a": mx.ones((1000,))})
    old = target.read_bytes()
    big = mx.zeros((200_000,))
    text = storage_message(
        target, lambda temporary: mx.save_safetensors(str(temporary), {"a": big})
    )
    assert "No space left on device" in text
    assert "free some space" in text
    assert target.read_bytes() == old
    assert names(small_disk) == ["adapters.safetensors"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_no_permission_is_named_as_such(tmp_path: Path) -> None:
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o555)
    for path in (*tmp_path.parents[:2], tmp_path):
        if path.owner() == "root":
            path.chmod(path.stat().st_mode | 0o555)

    def nobody() -> None:
        if os.getuid() == 0:
            os.setuid(65534)

    def both() -> str:
        first = storage_message(closed / "a.txt", lambda t: t.write_text("x"))
        try:
            make_directory(closed / "deeper")
        except StorageError as error:
            return f"{first}\n{error}"
        return "made"

    text = in_child(both, nobody)
    assert f"{closed / 'a.txt'}: cannot be written: Permission denied" in text
    assert f"{closed / 'deeper'}: cannot be written: Permission denied" in text
    assert text.count("choose another directory or change its rights") == 2


def test_a_missing_directory_and_a_file_in_the_way_are_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "No such file or directory" in storage_message(
        tmp_path / "no" / "a.txt", lambda t: t.write_text("x")
    )
    assert "a part of the path is a file" in storage_message(
        tmp_path / "file" / "a.txt", lambda t: t.write_text("x")
    )
    with pytest.raises(StorageError) as caught:
        make_directory(tmp_path / "file" / "deeper")
    assert caught.value.code == "place-taken"
    with pytest.raises(StorageError) as caught:
        make_directory(tmp_path / "file")
    assert caught.value.code == "place-taken"
    assert caught.value.exit_code == 2  # as of every output whose place is taken


@pytest.mark.parametrize("name", ["", ".", "..", "inner", "inner/.."])
def test_a_directory_is_no_name_of_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("inner").mkdir()
    for ask in (require_writable, lambda path: write_whole(path, Path.touch)):
        with pytest.raises(StorageError) as caught:
            ask(Path(name))
        assert caught.value.message == "cannot be written: Is a directory"
        assert (
            caught.value.hint
            == "there is a directory of that name: move it away, or choose another name"
        )
    assert names(tmp_path) == ["inner"]
