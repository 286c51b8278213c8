"""The token store between processes: one builds, and a killed, full or read-only one leaves nothing
wrong.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_store import CONTENT, assert_rebuilt, cache, checked_files, files_in, make, never

from allhands.data.store import open_store

__all__ = ["cache"]

# What a child does: build the store of CONTENT, with something on the way.
CHILD = """
import json, os, resource, signal, sys, time
from pathlib import Path
import test_store
from allhands.data.store import open_store
from allhands.errors import StorageError

def lines(name, wanted):
    while len(Path(name).read_text().splitlines()) < wanted:
        time.sleep(0.005)

def note(name):
    with open(name, "a") as stream:
        stream.write(f"{os.getpid()}\\n")

def tell(stored):
    print(json.dumps([stored.built, stored.fingerprint, test_store.examples_of(stored.tokens)]))
"""


def child(program: str, cwd: Path) -> subprocess.Popen[str]:
    here = Path(__file__)
    paths = os.pathsep.join([str(here.parent), str(here.parents[1] / "support")])
    return subprocess.Popen(
        [sys.executable, "-c", CHILD + program],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=60)
    assert process.returncode == 0, err
    return out


def test_of_four_processes_one_builds(cache: Path, tmp_path: Path) -> None:
    program = """
def build(writer):
    note("builds")
    # Everybody is here while the first one builds.
    lines("started", 4)
    return test_store.building(test_store.CONTENT)(writer)

note("started")
tell(open_store("k", 100, build))
"""
    told = [
        json.loads(finished(process)) for process in [child(program, tmp_path) for _ in range(4)]
    ]
    assert len((tmp_path / "builds").read_text().splitlines()) == 1
    assert sorted(built for built, _, _ in told) == [False, False, False, True]
    assert {fingerprint for _, fingerprint, _ in told} == {open_store("k", 100, never).fingerprint}
    for _, _, examples in told:
        assert [tuple(example) for example in examples] == CONTENT


def test_kill_9_while_building(cache: Path, tmp_path: Path) -> None:
    program = """
def build(writer):
    report = test_store.building(test_store.CONTENT)(writer)
    for file in writer._files.values():
        file._stream.flush()
    note("built")
    time.sleep(600)

open_store("k", 100, build)
"""
    process = child(program, tmp_path)
    while not (tmp_path / "built").exists():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    left = files_in(cache)
    assert len(left) == 1
    assert left[0].startswith(".k.partial-")
    assert (cache / left[0] / "tokens.bin").stat().st_size > 0
    assert_rebuilt()
    assert files_in(cache) == ["k"]


def test_full_disk(cache: Path, tmp_path: Path) -> None:
    # The limit on a file's size stands for the disk's: too little for an array, then for the
    # manifest alone.
    program = """
for limit, count in ((4096, 20_000), (300, 1)):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        open_store("k", 100, test_store.building(test_store.CONTENT * count))
    except StorageError as error:
        print(json.dumps([error.where, error.hint]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
"""
    told = [json.loads(line) for line in finished(child(program, tmp_path)).splitlines()]
    assert len(told) == 2
    for where, hint in told:
        assert where == str(cache / "k")
        assert "ulimit" in hint
    assert files_in(cache) == []


# Root may write where it must not; without these capabilities it is a person like any other.
NOT_ROOT = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
header, sets = (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
for i in (0, 1):
    sets[i] &= ~0b110  # DAC_OVERRIDE, DAC_READ_SEARCH
assert libc.capset(header, sets) == 0
"""


@pytest.mark.skipif(
    os.getuid() == 0 and sys.platform != "linux", reason="root can write everywhere"
)
def test_a_store_that_may_only_be_read_is_opened(cache: Path, tmp_path: Path) -> None:
    program = (
        (NOT_ROOT if os.getuid() == 0 else "")
        + """
from allhands.data import store
tell(open_store("k", 100, test_store.never))
# After a boot it is checked, each time, because that cannot be noted.
store.this_boot = lambda: "after"
hashed = []
original = store.file_hash
store.file_hash = lambda path: hashed.append(path.name) or original(path)
for _ in range(2):
    tell(open_store("k", 100, test_store.never))
    print(len(hashed))
try:
    open_store("other", 100, test_store.never)
except StorageError as error:
    print(error.hint)
"""
    )
    made = make()
    places = [cache, cache / "k"]
    try:
        for lock in cache.glob(".*.lock"):
            lock.chmod(0o444)
        for place in places:
            place.chmod(0o555)
        out = finished(child(program, tmp_path)).splitlines()
    finally:
        for place in places:
            place.chmod(0o755)
    told = json.dumps([False, made.fingerprint, CONTENT])
    assert out[:5] == [told, told, "5", told, "10"]
    assert out[5].startswith("no permission")
    assert all(
        json.loads(note.read_text())["stamp"][0] != "after" for note in checked_files(cache / "k")
    )
