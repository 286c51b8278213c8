"""What is sent to hosts that may have nothing but an old Python, and what a manifest may not ask for there."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allhands.cluster.sync import blocks, member
from allhands.cluster.sync.blocks import BLOCK_BYTES, BlockEntry, BlockRefused, HashCache, read_manifest, safe_parts

FOLDER = Path(blocks.__file__).parent
HASH = "ab" * 32


def entry(path: Any = "a", size: Any = 1, root: Any = 0, mtime: Any = 0, mode: Any = 0o644, digests: Any = HASH) -> Any:
    return [root, path, size, mtime, mode, digests]


# --- the code --------------------------------------------------------------------------------------------


def test_shipped_modules_need_the_standard_library_and_python_3_9_only() -> None:
    known: set[str] = set()
    for name in member.SHIPPED:
        tree = ast.parse((FOLDER / f"{name}.py").read_text(), feature_version=(3, 9))
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        imported |= {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        own = {str(module) for module in imported if str(module).startswith("allhands")}
        # Only what has been sent before, in this order.
        assert own <= known, name
        assert {str(module).split(".")[0] for module in imported - own} <= set(sys.stdlib_module_names)
        assert ("__future__", ["annotations"]) in futures(tree), name  # else 3.9 would evaluate them
        known.add(f"{member.PACKAGE}.{name}")


def futures(tree: ast.Module) -> list[tuple[str | None, list[str]]]:
    return [(node.module, [a.name for a in node.names]) for node in tree.body if isinstance(node, ast.ImportFrom)]


def other_pythons() -> list[str]:
    found = [shutil.which(f"python3.{minor}") for minor in (9, 10, 12, 13)]
    versions = Path.home() / ".pyenv" / "versions"
    found += [str(path) for minor in (9, 10, 12, 13) for path in versions.glob(f"3.{minor}.*/bin/python")]
    return [path for path in found if path and not Path(path).is_relative_to(versions.parent / "shims")]


@pytest.mark.parametrize("python", [sys.executable, *other_pythons()])
def test_a_worker_starts_in_any_python_and_talks(python: str, tmp_path: Path) -> None:
    """Spoken to by hand: the frames are what wire.py says they are."""
    start = {"kind": "start", "envs": {"ALLHANDS_CACHE": str(tmp_path)}, "dry": True, "transport": "ssh"}
    frames = [(3, b"m" * 64), (1, json.dumps(start).encode()), (1, b'{"kind": "end"}')]
    spoken = b"".join(len(content).to_bytes(4, "big") + bytes([kind]) + content for kind, content in frames)
    done = subprocess.run(
        member.worker_command(python), input=member.worker_code() + spoken, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    noise, mark, answers = done.stdout.partition(b"\n" + b"m" * 64)
    assert (noise, mark) == (b"", b"\n" + b"m" * 64)
    length = int.from_bytes(answers[:4], "big")
    hello = json.loads(answers[5 : 5 + length])
    assert (hello["kind"], hello["addresses"]) == ("hello", [])
    version = subprocess.run([python, "-c", "import platform; print(platform.python_version())"], capture_output=True)
    assert hello["python"] == version.stdout.decode().strip()


def test_a_host_without_that_python_uses_the_one_on_its_path(tmp_path: Path) -> None:
    own = tmp_path / "python3"
    own.write_text('#!/bin/sh\necho "mine $1"\n')
    own.chmod(0o755)
    argv = member.worker_command("/nowhere/python")
    done = subprocess.run(argv, capture_output=True, text=True, env={"PATH": f"{tmp_path}:/bin:/usr/bin"}, check=True)
    assert done.stdout == "mine -I\n"


# --- manifests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *("", "/", "/etc/passwd", "..", "../a", "a/../../b", "a/..", "./a", "a/.", "a//b", "a/", "\0", "a\0b"),
        *("a" * 256, "/".join(["a" * 200] * 30), "\ud800", ".allhands-0123.part", "a/.allhands-x.part", None, 3, ["a"]),
    ],
)
def test_hostile_names_are_refused(path: object) -> None:
    with pytest.raises(BlockRefused):
        safe_parts(path)
    with pytest.raises(BlockRefused):
        read_manifest([entry(path=path)], 1)


@given(st.text())
def test_what_is_let_through_stays_below_its_root(path: str) -> None:
    try:
        parts = safe_parts(path)
    except BlockRefused:
        return
    joined = os.path.normpath(os.path.join("/root/of/files", *parts))
    assert joined == f"/root/of/files/{path}"
    assert "\0" not in joined


@pytest.mark.parametrize("path", ["a", "a/b", "..a", "a..", "-rf", "~", "$(touch x)", "ü", "a b\n", "\udcff", "a\\b"])
def test_unusual_names_are_names(path: str) -> None:
    assert "/".join(safe_parts(path)) == path


@pytest.mark.parametrize(
    "listed",
    [
        *({}, None, "x", [3], [[]], [entry(root=1)], [entry(root=-1)], [entry(root="0")], [entry(size=-1)]),
        *([entry(size=1 << 60)], [entry(size=1.5)], [entry(size=None)], [entry(mode=0o4755)], [entry(mode=-1)]),
        *([entry(mtime=1 << 64)], [entry(digests="zz" * 32)], [entry(digests="ab")], [entry(digests=None)]),
        *([entry(size=0)], [entry(size=BLOCK_BYTES + 1)], [entry(), entry()], [[*entry(), 1]]),
    ],
)
def test_manifests_that_make_no_sense_are_refused(listed: object) -> None:
    with pytest.raises(BlockRefused):
        read_manifest(listed, 1)


def test_a_manifest_comes_back_as_it_was() -> None:
    size = 2 * BLOCK_BYTES + 7
    before = BlockEntry(1, ("a", "\udcff"), size, 12345678901234567, 0o640, bytes(range(96)))
    after = read_manifest(json.loads(json.dumps([before.as_json()])), 2)[0]
    assert vars(after) == vars(before)
    assert [after.block_size(block) for block in range(after.num_blocks)] == [BLOCK_BYTES, BLOCK_BYTES, 7]
    assert after.digest(2) == bytes(range(64, 96))


# --- hashes that are known -------------------------------------------------------------------------------


def aged(path: Path, content: bytes) -> Path:
    """A file that has been there for a while: its times are those of its last change."""
    path.write_bytes(content)
    time.sleep(1.6)
    return path


def test_hashes_are_those_of_the_blocks_and_are_remembered(tmp_path: Path) -> None:
    content = os.urandom(BLOCK_BYTES + 10)
    path, where = aged(tmp_path / "file", content), tmp_path / "cache" / "hashes.json"
    reference = [hashlib.sha256(part).digest() for part in (content[:BLOCK_BYTES], content[BLOCK_BYTES:])]
    cache, read = HashCache(str(where)), list[int]()
    status, digests = cache.digests(str(path), read.append)
    assert (status.st_size, digests, read) == (len(content), b"".join(reference), [BLOCK_BYTES, 10])
    cache.save()
    assert (where.stat().st_mode & 0o777, where.parent.stat().st_mode & 0o777) == (0o600, 0o700)
    # Known by its times: were it read, the fault that is put in here would show.
    known = json.loads(where.read_text())
    known[str(path)][5] = HASH * 2
    where.write_text(json.dumps(known))
    assert HashCache(str(where)).digests(str(path), read.append)[1].hex() == HASH * 2
    # Another time, another size, another inode: read again.
    os.utime(path, ns=(0, 12345))
    assert HashCache(str(where)).digests(str(path), read.append)[1] == b"".join(reference)


def test_a_file_that_has_just_changed_is_not_remembered(tmp_path: Path) -> None:
    path, where = tmp_path / "file", tmp_path / "hashes.json"
    path.write_bytes(b"now")
    cache = HashCache(str(where))
    cache.digests(str(path), lambda count: None)
    cache.save()
    assert not where.exists()


@pytest.mark.parametrize("content", ["", "[]", "{", '{"/a": 1}', '{"/a": [1,2,3,4,5,"zz"]}', '{"/a": [1,1,1,1,1,"a"]}'])
def test_a_damaged_cache_is_an_empty_one(tmp_path: Path, content: str) -> None:
    where, path = tmp_path / "hashes.json", tmp_path / "file"
    where.write_text(content)
    path.write_bytes(b"x")
    assert HashCache(str(where)).digests(str(path), lambda count: None)[1] == hashlib.sha256(b"x").digest()


def test_pipes_directories_and_what_is_not_there_are_not_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("pipe", ".", "absent"):
        with pytest.raises(FileNotFoundError):
            HashCache(None).digests(str(tmp_path / name), lambda count: None)
