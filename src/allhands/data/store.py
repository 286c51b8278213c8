"""Store of tokenised sets on disk: written once by one process, mapped by every process of the
host.

A store is a directory of arrays and a manifest, written last, with their sizes and SHA-256 sums.
The complete directory is renamed into its place. One process builds it while others wait. A torn or
altered file is noticed at the next opening, and the store is built again. Opening takes
milliseconds: the sums are computed again only if a file's size, times or inode number have changed,
or the machine was started again.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np
import psutil

from allhands.data.arrays import Array
from allhands.data.render import Rendered
from allhands.data.tokens import SMALL_VOCABULARY, TokenSet, joined_fingerprint, pack_mask
from allhands.errors import ModelError, StorageError
from allhands.io.files import boot_id, make_directory, write_whole
from allhands.io.staging import locked, locked_now, publish, staging
from allhands.runtime.blas import cache_dir

if TYPE_CHECKING:
    from pydantic import TypeAdapter

# Raise this number whenever the layout of the files, or the output for the same input, changes.
FORMAT = 1
MANIFEST = "manifest.json"
_ATTEMPTS = 3
_KEPT_DAYS = 30
_POLL_S = 0.05
_DTYPES = {"mask_bits": "|u1", "offsets": "<i8", "work": "<i4", "num_targets": "<i4"}
# Smaller files are read again each time, which is faster than to remember them.
_REMEMBERED_BYTES = 4 << 20


@dataclass(frozen=True)
class LeftOutPart:
    """A part that a chat template leaves out: number of records, beginning of the first part, first
    places.
    """

    code: str
    count: int
    sample: str
    places: tuple[str, ...]


@dataclass(frozen=True)
class TokenSetReport:
    """Counts of the records that were rendered.

    Attributes:
        num_records: records read.
        num_texts: those of them that are plain texts, without prompt and answer.
        num_examples: examples in the set.
        num_truncated: examples (kept ones) that lost tokens to the length limit.
        num_truncated_tokens: tokens that these examples lost.
        num_dropped: records left out because no trained token remained.
        dropped: ``file:line`` of the first records left out.
        num_tokens: tokens in the set.
        num_trained_tokens: tokens in the set that the loss is computed on.
        build_s: seconds that the building took.
        num_text_bytes: UTF-8 bytes of the records that are plain texts; 0 in sets from before this
            count existed.
        left_out: parts of records that the chat template leaves out.
    """

    num_records: int
    num_texts: int
    num_examples: int
    num_truncated: int
    num_truncated_tokens: int
    num_dropped: int
    dropped: tuple[str, ...]
    num_tokens: int
    num_trained_tokens: int
    build_s: float
    num_text_bytes: int = 0
    left_out: tuple[LeftOutPart, ...] = ()

    @property
    def tokens_per_byte(self) -> float | None:
        """Tokens for each byte of the texts; ``None`` if the set has other records, or if texts
        were cut or left out.
        """
        whole = self.num_texts == self.num_records and not self.num_truncated
        return self.num_tokens / self.num_text_bytes if whole and self.num_text_bytes else None


@dataclass(frozen=True)
class StoredTokens:
    """A set in a store.

    Attributes:
        tokens: the set's arrays, mapped from the files.
        report: counts of the records from the building.
        fingerprint: the set's :meth:`TokenSet.fingerprint`, taken from the manifest.
        path: the store's directory.
        built: True if this process has just built it.
    """

    tokens: TokenSet
    report: TokenSetReport
    fingerprint: str
    path: Path
    built: bool

    def targets_per_byte(self, bos: int | None) -> float | None:
        """Return the predicted tokens for each byte of the texts, if each text is a row.

        A begin-of-text token, ``bos``, has no bytes and is never predicted. ``None``: as
        :attr:`TokenSetReport.tokens_per_byte`.
        """
        ratio, report = self.report.tokens_per_byte, self.report
        if ratio is None or not report.num_tokens or self.tokens.tokens[0] != bos:
            return ratio
        return ratio * (1 - report.num_examples / report.num_tokens)


class StoreWriter:
    """Appends examples to the files of a store; memory does not grow with them."""

    def __init__(self, directory: Path, vocabulary: int, files: ExitStack) -> None:
        """``vocabulary``: largest token id plus 1; ``files`` closes the files opened here."""
        self._directory, self._vocabulary = directory, vocabulary
        self.dtypes = {"tokens": "<u2" if vocabulary <= SMALL_VOCABULARY else "<i4", **_DTYPES}
        self._files = {
            name: _Appended(files.enter_context((directory / f"{name}.bin").open("wb")), dtype)
            for name, dtype in self.dtypes.items()
        }
        self._files["offsets"].append(np.zeros(1, dtype=np.int64))
        self._end = 0
        self._bits = np.zeros(0, dtype=np.bool_)
        self.largest_token = -1

    def append(self, examples: Sequence[Rendered]) -> None:
        """Add examples, each with at least one target.

        Raises:
            ModelError: a token is outside the vocabulary.
        """
        part = TokenSet.of_examples([(example.tokens, example.mask) for example in examples])
        least = int(part.tokens.min(initial=0))
        token = least if least < 0 else part.largest_token
        if not 0 <= token < self._vocabulary:
            raise ModelError(
                f"the tokenizer gave token {token} but says that its vocabulary ends at {self._vocabulary - 1}",
                code="vocabulary-mismatch",
                hint="the tokenizer's files do not match: fetch the model again",
            )
        arrays = {"tokens": part.tokens, "offsets": part.offsets[1:] + self._end}
        for name, array in (arrays | {"work": part.work, "num_targets": part.num_targets}).items():
            self._files[name].append(array)
        # Only whole bytes are written; the remaining bits wait for the next examples.
        bits = np.concatenate([self._bits, *(example.mask for example in examples)])
        whole = len(bits) // 8 * 8
        self._files["mask_bits"].append(pack_mask(bits[:whole]))
        self._bits = bits[whole:]
        self._end += len(part.tokens)
        self.largest_token = max(self.largest_token, part.largest_token)

    def finish(self, report: TokenSetReport, key: str) -> None:
        """Write the manifest, after which the store can be opened."""
        self._files["mask_bits"].append(pack_mask(self._bits))
        arrays = {name: file.finish() for name, file in self._files.items()}
        facts = {"largest_token": self.largest_token, "arrays": arrays, "report": asdict(report)}
        manifest = {"format": FORMAT, "key": key, **facts}
        whole = manifest | {"sha256": _sum(manifest)}
        (self._directory / MANIFEST).write_text(json.dumps(whole, indent=1), encoding="utf-8")


class _Appended:
    """A file of one array's bytes, hashed while it is written."""

    def __init__(self, stream: BinaryIO, dtype: str) -> None:
        self._stream = stream
        self._dtype = dtype
        self._digest = hashlib.sha256()
        self._size = 0

    def append(self, array: Array) -> None:
        data = np.ascontiguousarray(array, dtype=self._dtype).tobytes()
        self._stream.write(data)
        self._digest.update(data)
        self._size += len(data)

    def finish(self) -> dict[str, Any]:
        self._stream.flush()
        return {"dtype": self._dtype, "bytes": self._size, "sha256": self._digest.hexdigest()}


Build = Callable[[StoreWriter], TokenSetReport]


def stores() -> Path:
    """Return the directory that holds all token stores of this user: ``$ALLHANDS_TOKEN_CACHE``, or
    one in the cache.
    """
    chosen = os.environ.get("ALLHANDS_TOKEN_CACHE")
    return Path(os.path.expanduser(chosen)) if chosen else cache_dir() / "tokens"


def open_store(key: str, vocabulary: int, build: Build, *, patience_s: float = 0.0) -> StoredTokens:
    """Return the store of ``key``; build it if it is absent, torn or altered.

    Several processes may call this at once.

    Args:
        key: names everything that the tokens depend on; see :func:`store_key`.
        vocabulary: one more than the largest token id.
        build: appends all examples and returns their counts; called in one process only, while
            others wait.
        patience_s: seconds to wait for another process to build the store, before this process
            waits for the lock or builds it.

    Raises:
        StorageError: the store cannot be written, or is removed again and again.
        AllhandsError: an error of ``build``; then nothing of the store stays.
    """
    path = stores() / key
    until = time.monotonic() + patience_s
    while (found := _opened(path)) is None and time.monotonic() < until:
        time.sleep(_POLL_S)
    try:
        for _ in range(_ATTEMPTS):
            if found is not None:
                return found
            found = _made(path, vocabulary, build)
    except StorageError as error:
        raise StorageError(
            error.message,
            code=error.code,
            where=error.where,
            hint=f"{error.hint}. This is the token cache: ALLHANDS_TOKEN_CACHE=DIRECTORY puts it elsewhere",
        ) from error.__cause__
    raise StorageError(
        "the stored tokens disappear at once",
        code="token-cache-removed",
        where=str(path),
        hint="another program removes files there: stop it, or choose another place with ALLHANDS_TOKEN_CACHE",
    )


def _made(path: Path, vocabulary: int, build: Build) -> StoredTokens | None:
    """Return the store at ``path``, built if there is none; None if it was removed meanwhile."""
    with locked(_lock_of(path), private=True):
        if (found := _opened(path)) is not None:
            return found
        # A process that has mapped the old files keeps them until it ends.
        shutil.rmtree(path, ignore_errors=True)
        if path.is_file():
            path.unlink()
        _remove_unused()
        with staging(path, private=True) as staged:
            with ExitStack() as files:
                writer = StoreWriter(staged, vocabulary, files)
                writer.finish(build(writer), path.name)
            publish(staged, path, private=True)
        return _opened(path, built=True)


def _lock_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.lock")


def store_key(facts: Any) -> str:
    """Return a name for everything that a store depends on, given as JSON values."""
    text = json.dumps([FORMAT, _code(), facts], sort_keys=True, ensure_ascii=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@cache
def _code() -> str:
    """SHA-256 of the modules that tokenise records: another version may make other tokens."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _opened(path: Path, *, built: bool = False) -> StoredTokens | None:
    """Return the store at ``path`` if it is whole, else None.

    Args:
        built: this process has just written the files, so their sums are right.
    """
    if (manifest := _manifest(path)) is None:
        return None
    try:
        for name, facts in manifest["arrays"].items():
            known = facts["sha256"] if built else None
            if (
                _remembered(path / f"{name}.bin", _note(path, name), this_boot(), known)
                != facts["sha256"]
            ):
                return None
        arrays = {
            name: _map(path / f"{name}.bin", facts) for name, facts in manifest["arrays"].items()
        }
        tokens = TokenSet(**arrays, largest_token=manifest["largest_token"])
        report = _reader().validate_python(manifest["report"])
        sums = [manifest["arrays"][name]["sha256"] for name in ("tokens", "mask_bits", "offsets")]
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AssertionError,
    ):  # another process may be replacing it
        return None
    # The time of the last use, for the removal of old stores.
    with suppress(OSError):
        os.utime(path)
    return StoredTokens(tokens, report, joined_fingerprint(sums), path, built)


def _note(path: Path, name: str) -> Path:
    """Return the path of the note that a sum was right: one for each boot of each host."""
    return path / f"checked-{hashlib.sha256(this_boot().encode()).hexdigest()[:12]}-{name}.json"


@cache
def _reader() -> TypeAdapter[TokenSetReport]:
    from pydantic import TypeAdapter  # helpers that only render do without

    return TypeAdapter(TokenSetReport)


def _map(file: Path, facts: dict[str, Any]) -> Array:
    if file.stat().st_size != facts["bytes"]:
        raise ValueError(f"{file} is torn")
    dtype = np.dtype(facts["dtype"])
    # An empty file cannot be mapped.
    mapped = np.memmap(file, dtype=dtype, mode="r") if facts["bytes"] else np.zeros(0, dtype=dtype)
    # A plain array on the same memory: indexing numpy's memmap class is several times slower.
    return np.asarray(mapped)


def _manifest(path: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((path / MANIFEST).read_bytes())
    except (OSError, ValueError):
        return None
    if not isinstance(manifest, dict):
        return None
    values = manifest
    whole = values.pop("sha256", None) == _sum(values)
    if whole and values.get("format") == FORMAT and values.get("key") == path.name:
        return values
    return None


def _sum(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def file_stamp(file: Path) -> list[int]:
    """Return numbers, at least one of which changes when a file is written or replaced."""
    facts = file.stat()
    return [facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino]


@cache
def this_boot() -> str:
    """Return an identifier of the computer's current boot."""
    return boot_id() or str(round(psutil.boot_time(), -1))


def _remove_unused() -> None:
    """Remove stores that were not opened for a month; other files stay."""
    oldest = time.time() - _KEPT_DAYS * 86400

    def unused(path: Path) -> bool:
        return path.stat().st_mtime < oldest and _manifest(path) is not None

    for path in stores().iterdir():
        with suppress(OSError):
            if unused(path):
                with locked_now(_lock_of(path), private=True) as free:
                    # Somebody may have opened it since.
                    if free and unused(path):
                        shutil.rmtree(path, ignore_errors=True)


# --- inputs ---------------------------------------------------------------------------------------


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's content."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def input_hash(path: Path) -> str:
    """Return the SHA-256 of an input file; a large file is read again only after a change.

    Raises:
        OSError: the file cannot be read.
    """
    if path.stat().st_size < _REMEMBERED_BYTES:
        return file_hash(path)
    place = str(path.resolve())
    return _remembered(
        path, stores() / "inputs" / f"{hashlib.sha256(place.encode()).hexdigest()[:32]}.json", place
    )


def _remembered(path: Path, note: Path, context: str, known: str | None = None) -> str:
    """Return the SHA-256 of a file; read the file only if it or ``context`` has changed.

    Args:
        note: file that keeps the sum with the file's stamp.
        known: the sum, if it was computed while the file was written.
    """
    stamp = [context, *file_stamp(path)]
    with suppress(OSError, ValueError, KeyError, TypeError):
        told = json.loads(note.read_bytes())
        if told["stamp"] == stamp:
            return told["sha256"]
    found = known or file_hash(path)
    # In a read-only cache no note can be written: the sum is computed at each opening.
    with suppress(Exception):
        make_directory(note.parent, private=True)
        text = json.dumps({"stamp": stamp, "sha256": found})
        write_whole(note, lambda draft: draft.write_text(text, encoding="utf-8"), private=True)
    return found
