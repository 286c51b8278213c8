"""The token store on disk: what comes back, who builds it, and what happens when files or processes
are damaged.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allhands.data import store
from allhands.data.render import Rendered
from allhands.data.store import StoredTokens, StoreWriter, TokenSetReport, open_store, store_key
from allhands.data.tokens import TokenSet
from allhands.errors import DataError, ModelError, StorageError
from allhands.io.staging import locked

Example = tuple[list[int], list[bool]]
ARRAYS = ("tokens", "mask_bits", "offsets", "work", "num_targets")
CONTENT: list[Example] = [
    ([5, 6, 7], [False, True, False]),
    ([8, 9], [False, True]),
    ([1, 2, 3, 4, 5, 6], [False, False, True, True, False, True]),
]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory for this test's stores."""
    path = tmp_path / "stores"
    monkeypatch.setenv("ALLHANDS_TOKEN_CACHE", str(path))
    return path


def rendered(example: Example) -> Rendered:
    ids, mask = example
    return Rendered(np.array(ids, dtype=np.int32), np.array(mask, dtype=np.bool_), 0)


def report_of(content: Sequence[Example]) -> TokenSetReport:
    tokens, trained = sum(len(ids) for ids, _ in content), sum(sum(mask) for _, mask in content)
    return TokenSetReport(
        len(content) + 1, 0, len(content), 0, 0, 1, ("train.jsonl:9",), tokens, trained, 0.25
    )


def building(
    content: Sequence[Example], sizes: Sequence[int] = ()
) -> Callable[[StoreWriter], TokenSetReport]:
    """Appends ``content`` in parts of ``sizes`` examples, the rest at once."""

    def build(writer: StoreWriter) -> TokenSetReport:
        left = list(content)
        for size in [*sizes, len(left)]:
            part, left = left[:size], left[size:]
            if part:
                writer.append([rendered(example) for example in part])
        return report_of(content)

    return build


def checked_files(path: Path) -> list[Path]:
    found = sorted(path.glob("checked-*.json"))
    assert len(found) == len(ARRAYS)
    return found


def never(_: StoreWriter) -> TokenSetReport:
    raise AssertionError("built again")


def make(key: str = "k", content: Sequence[Example] = CONTENT) -> StoredTokens:
    return open_store(key, 100, building(content))


def examples_of(tokens: TokenSet) -> list[Example]:
    return [(ids.tolist(), mask.tolist()) for ids, mask in map(tokens.example, range(len(tokens)))]


def files_in(directory: Path) -> list[str]:
    """What is there besides locks."""
    return sorted(path.name for path in directory.iterdir() if not path.name.endswith(".lock"))


# --- what comes back ------------------------------------------------------------------------------


@st.composite
def contents(draw: st.DrawFn) -> tuple[list[Example], list[int], int]:
    """Examples, how many of them each append takes, and the size of the vocabulary."""
    vocabulary = draw(st.sampled_from([50, 65_536, 65_537, 1 << 31]))
    found: list[Example] = []
    for _ in range(draw(st.integers(1, 12))):
        ids = draw(st.lists(st.integers(0, vocabulary - 1), min_size=2, max_size=13))
        mask = [False, *draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))]
        mask[draw(st.integers(1, len(ids) - 1))] = True
        found.append((ids, mask))
    return found, draw(st.lists(st.integers(1, 5), max_size=6)), vocabulary


@settings(max_examples=40, deadline=None, database=None)
@given(contents())
def test_what_was_appended_is_read_back(drawn: tuple[list[Example], list[int], int]) -> None:
    content, sizes, vocabulary = drawn
    key = uuid.uuid4().hex
    stored = open_store(key, vocabulary, building(content, sizes))
    assert stored.built
    assert examples_of(stored.tokens) == content
    assert stored.tokens.tokens.dtype == (np.uint16 if vocabulary <= 65_536 else np.int32)
    assert stored.tokens.largest_token == max(max(ids) for ids, _ in content)
    assert stored.tokens.num_targets.tolist() == [sum(mask) for _, mask in content]
    assert stored.tokens.work.tolist() == [
        max(i for i, flag in enumerate(mask) if flag) for _, mask in content
    ]
    memory = TokenSet.of_examples(
        [(np.array(ids), np.array(mask, dtype=np.bool_)) for ids, mask in content]
    )
    for name in ARRAYS:
        assert np.array_equal(getattr(stored.tokens, name), getattr(memory, name)), name
    assert stored.fingerprint == stored.tokens.fingerprint()
    if vocabulary > 65_536:
        assert stored.fingerprint == memory.fingerprint()
    assert stored.report == report_of(content)
    again = open_store(key, vocabulary, never)
    assert not again.built
    assert examples_of(again.tokens) == content
    assert (again.report, again.fingerprint, again.path) == (
        stored.report,
        stored.fingerprint,
        stored.path,
    )
    shutil.rmtree(stored.path)


def test_arrays_are_read_only_mapped_files(cache: Path) -> None:
    tokens = make().tokens
    for name in ARRAYS:
        array = getattr(tokens, name)
        assert type(array) is np.ndarray
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1
    if sys.platform == "linux":
        maps = Path("/proc/self/maps").read_text()
        for name in ARRAYS:
            lines = [
                line
                for line in maps.splitlines()
                if line.endswith(str(cache / "k" / f"{name}.bin"))
            ]
            # Shared with the page cache, never a copy: r--s.
            assert [line.split()[1] for line in lines] == ["r--s"], name


def test_keys_are_stores_of_their_own(cache: Path) -> None:
    one = {"records": "a", "rendering": {"mask_prompt": True, "max_seq_length": 512}}
    other = {"records": "a", "rendering": {"mask_prompt": True, "max_seq_length": 513}}
    assert store_key(one) == store_key(json.loads(json.dumps(one)))
    assert store_key(one) == store_key(
        {"rendering": {"max_seq_length": 512, "mask_prompt": True}, "records": "a"}
    )
    assert store_key(one) != store_key(other)
    make(store_key(one))
    second = make(store_key(other), CONTENT[:1])
    assert second.built
    assert examples_of(second.tokens) == CONTENT[:1]
    assert examples_of(open_store(store_key(one), 100, never).tokens) == CONTENT
    assert files_in(cache) == sorted([store_key(one), store_key(other)])


def test_the_largest_token_of_two_bytes(cache: Path) -> None:
    content: list[Example] = [([0, 65_535], [False, True])]
    stored = open_store("k", 65_536, building(content))
    assert stored.tokens.tokens.dtype == np.uint16
    assert examples_of(stored.tokens) == content


@pytest.mark.parametrize(("vocabulary", "token"), [(65_536, 65_536), (50, 50), (50, -1)])
def test_a_token_outside_the_vocabulary_is_refused(
    cache: Path, vocabulary: int, token: int
) -> None:
    # Two bytes would quietly make another token of it.
    with pytest.raises(ModelError, match=f"token {token} "):
        open_store("k", vocabulary, building([([3, token], [False, True])]))
    assert files_in(cache) == []


# --- damage ---------------------------------------------------------------------------------------


def assert_rebuilt() -> None:
    """The store is made anew, is right, and is then taken as it is."""
    repaired = make()
    assert repaired.built
    assert examples_of(repaired.tokens) == CONTENT
    assert repaired.fingerprint == repaired.tokens.fingerprint()
    assert not open_store("k", 100, never).built


def damaged(file: Path, content: bytes) -> None:
    """Give ``file`` other content and the times that it had."""
    before = file.stat()
    # File times tick every few milliseconds.
    time.sleep(0.02)
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_mtime_ns == before.st_mtime_ns


FILES = [*(f"{name}.bin" for name in ARRAYS), store.MANIFEST]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["truncated", "emptied", "deleted", "longer"])
def test_a_torn_file_is_noticed(cache: Path, name: str, damage: str) -> None:
    make()
    file = cache / "k" / name
    content = file.read_bytes()
    if damage == "deleted":
        file.unlink()
    else:
        damaged(file, {"truncated": content[:-1], "emptied": b"", "longer": content + b"x"}[damage])
    assert_rebuilt()


@pytest.mark.parametrize("boot", ["same", "other"])
@pytest.mark.parametrize("name", [f"{name}.bin" for name in ARRAYS])
def test_one_flipped_bit_is_noticed(
    cache: Path, name: str, boot: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    file = cache / "k" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    damaged(file, bytes(content))
    if boot == "other":
        monkeypatch.setattr(store, "this_boot", lambda: "after")
    assert_rebuilt()


def test_a_flipped_bit_in_the_manifest_changes_nothing(cache: Path) -> None:
    made = make()
    file = cache / "k" / store.MANIFEST
    length = len(file.read_bytes())
    for place in range(0, length, 23):
        content = bytearray(file.read_bytes())
        content[place % len(content)] ^= 1
        file.write_bytes(bytes(content))
        for note in checked_files(cache / "k"):
            note.unlink()
        stored = make()
        assert examples_of(stored.tokens) == CONTENT, place
        assert (stored.report, stored.fingerprint) == (made.report, made.fingerprint), place
        assert stored.tokens.largest_token == 9, place


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest | {"format": store.FORMAT + 1},
        lambda manifest: manifest | {"key": "other"},
        lambda manifest: manifest | {"largest_token": 8},
        lambda manifest: manifest | {"report": manifest["report"] | {"num_dropped": 0}},
        lambda manifest: manifest | {"report": None},
        lambda manifest: manifest | {"arrays": 5},
        lambda manifest: manifest | {"arrays": dict.fromkeys(ARRAYS)},
        lambda manifest: manifest | {"arrays": {name: {} for name in ARRAYS}},
        lambda manifest: [manifest],
    ],
)
def test_another_manifest_is_not_believed(cache: Path, change: Callable[[Any], Any]) -> None:
    make()
    file = cache / "k" / store.MANIFEST
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    assert_rebuilt()


@pytest.mark.parametrize("content", [None, "", "{", "null", "[]", '"x"'])
def test_a_lost_note_of_the_check_costs_a_check_only(cache: Path, content: str | None) -> None:
    make()
    for note in checked_files(cache / "k"):
        note.unlink() if content is None else note.write_text(content)
    assert not open_store("k", 100, never).built
    assert all(json.loads(note.read_text())["sha256"] for note in checked_files(cache / "k"))


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the files that were read through, in order."""
    names: list[str] = []
    original = store.file_hash

    def counted(path: Path) -> str:
        names.append(path.name)
        return original(path)

    monkeypatch.setattr(store, "file_hash", counted)
    return names


def test_sums_are_computed_once_a_boot(
    cache: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    open_store("k", 100, never)
    assert hashed == []
    monkeypatch.setattr(store, "this_boot", lambda: "after")
    assert not open_store("k", 100, never).built
    assert sorted(hashed) == sorted(f"{name}.bin" for name in ARRAYS)
    hashed.clear()
    open_store("k", 100, never)
    assert hashed == []


def test_a_change_during_the_check_is_not_remembered_as_right(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    for note in checked_files(cache / "k"):
        note.unlink()
    original = store.file_hash

    def changed_after(path: Path) -> str:
        found = original(path)
        content = bytearray(path.read_bytes())
        content[0] ^= 1
        if path.name == "tokens.bin":
            damaged(path, bytes(content))
        return found

    monkeypatch.setattr(store, "file_hash", changed_after)
    make()
    monkeypatch.setattr(store, "file_hash", original)
    assert examples_of(make().tokens) == CONTENT


def test_a_store_that_vanishes_while_it_is_opened_is_built(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    original = store.file_stamp

    def after_removal(file: Path) -> list[int]:
        # Another process replaces the store at this moment.
        shutil.rmtree(cache / "k", ignore_errors=True)
        monkeypatch.setattr(store, "file_stamp", original)
        return original(file)

    monkeypatch.setattr(store, "file_stamp", after_removal)
    assert_rebuilt()


@pytest.mark.parametrize(
    "error",
    [
        DataError("bad", code="any-fault", where="train.jsonl:3"),
        KeyboardInterrupt(),
        ValueError("bug"),
    ],
)
def test_a_failing_build_leaves_nothing(cache: Path, error: BaseException) -> None:
    def build(writer: StoreWriter) -> TokenSetReport:
        writer.append([rendered(CONTENT[0])])
        raise error

    with pytest.raises(type(error)) as caught:
        open_store("k", 100, build)
    assert caught.value is error
    assert files_in(cache) == []
    assert_rebuilt()


def test_what_is_not_ours_is_never_removed(cache: Path) -> None:
    """The variable may name a folder in which a person keeps other things."""
    cache.mkdir(parents=True, exist_ok=True)
    (cache / "thesis").mkdir()
    (cache / "thesis" / "chapter.txt").write_text("years of work")
    (cache / "model.safetensors").write_text("weights")
    for path in (cache / "thesis" / "chapter.txt", cache / "thesis", cache / "model.safetensors"):
        os.utime(path, (0, 0))
    make()
    assert (cache / "thesis" / "chapter.txt").read_text() == "years of work"
    assert (cache / "model.safetensors").exists()


def test_a_store_that_is_being_built_anew_is_not_removed(cache: Path) -> None:
    make("old")
    os.utime(cache / "old", (0, 0))
    with locked(cache / ".old.lock"):
        make("new")
    assert (cache / "old").is_dir()
    make("newer")
    assert not (cache / "old").exists()


def test_two_hosts_with_one_cache_leave_each_other_their_notes(
    cache: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make()
    for boot in ("host a", "host b", "host a", "host b"):
        monkeypatch.setattr(store, "this_boot", lambda boot=boot: boot)
        open_store("k", 100, never)
    assert sorted(hashed) == sorted(2 * [f"{name}.bin" for name in ARRAYS])


def test_a_store_that_vanishes_as_it_is_made_is_an_error_of_storage(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def vanish(staged: Path, target: Path, *, private: bool) -> None:
        assert private
        built.append(target.name)

    monkeypatch.setattr(store, "publish", vanish)
    with pytest.raises(StorageError) as caught:
        make()
    assert caught.value.code == "token-cache-removed"
    assert built == ["k"] * 3


def test_stores_that_nobody_opens_are_removed_after_a_month(cache: Path) -> None:
    days = {"fresh": 0, "recent": 29, "old": 31, "opened": 31}
    for key in days:
        make(key)
    for key, age in days.items():
        then = time.time() - age * 86_400
        os.utime(cache / key, (then, then))
    open_store("opened", 100, never)
    assert files_in(cache) == sorted(days)
    make("new")
    assert files_in(cache) == ["fresh", "new", "opened", "recent"]


# --- inputs ---------------------------------------------------------------------------------------


def test_large_inputs_are_read_once(
    cache: Path, tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "train.jsonl"
    file.write_bytes(b"one" * 1000)
    wanted = hashlib.sha256(b"one" * 1000).hexdigest()
    monkeypatch.setattr(store, "_REMEMBERED_BYTES", 3001)
    assert [store.input_hash(file), store.input_hash(file)] == [wanted, wanted]
    assert len(hashed) == 2, "a small one is read each time"
    monkeypatch.setattr(store, "_REMEMBERED_BYTES", 3000)
    hashed.clear()
    monkeypatch.chdir(tmp_path)
    names = [file, tmp_path / ".." / tmp_path.name / "train.jsonl", Path("train.jsonl")]
    assert [store.input_hash(name) for name in names] == [wanted] * 3
    assert hashed == ["train.jsonl"]


def test_a_changed_input_is_noticed(
    cache: Path, tmp_path: Path, hashed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "_REMEMBERED_BYTES", 0)
    file, other = tmp_path / "train.jsonl", tmp_path / "other.jsonl"
    contents = [b"one" * 1000, b"two" * 1000, b"three" * 600]
    file.write_bytes(contents[0])
    seen = [store.input_hash(file)]
    # The same size, and the time put back.
    damaged(file, contents[1])
    seen.append(store.input_hash(file))
    # Another file moved into its place, of the same size and time.
    other.write_bytes(contents[2])
    os.utime(other, ns=(file.stat().st_atime_ns, file.stat().st_mtime_ns))
    other.replace(file)
    seen.append(store.input_hash(file))
    assert seen == [hashlib.sha256(content).hexdigest() for content in contents]
    assert len(hashed) == 3
    for memory in (cache / "inputs").iterdir():
        memory.write_text("[")
    assert store.input_hash(file) == seen[-1]


def test_a_missing_input_is_an_oserror(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.input_hash(tmp_path / "absent")


def test_a_cache_that_cannot_be_made_is_a_storage_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ALLHANDS_TOKEN_CACHE", str(tmp_path / "file" / "stores"))
    with pytest.raises(StorageError):
        make()


def test_who_does_not_lead_leaves_the_building_to_others(cache: Path) -> None:
    leader = threading.Timer(0.2, make, ["k"])
    leader.start()
    try:
        assert not open_store("k", 100, never, patience_s=20.0).built
    finally:
        leader.join()
    # Nobody comes: it does the work itself.
    assert open_store("other", 100, building(CONTENT), patience_s=0.2).built
