"""Tokenisation of records into a token store, on all cores of the host.

The tokenizer library's own threads encode plain text. Chats go through a template first, which is
Python: if that takes more than a few seconds, other processes help. Examples are stored in the
order of the records in any case.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil

from allhands.data.dates import asks_date, date_facts
from allhands.data.records import Record
from allhands.data.render import Rendered, Renderer, Tokenizer, TrainOn
from allhands.data.store import LeftOutPart, StoreWriter, TokenSetReport, file_hash
from allhands.errors import AllhandsError, ConfigError, DataError
from allhands.runtime.versions import version_of

# A chunk's encodings are alive at once: some 100 bytes a character.
CHUNK_CHARACTERS = 1 << 20
CHUNK_RECORDS = 1024
# Seconds before helpers are started; a start takes about as long.
ALONE_S = 3.0
# Memory that a helper needs at most: the libraries, a tokenizer and some chunks.
HELPER_BYTES = 500_000_000
_SHOWN = 5
_POLL_S = 1.0
_COUNTS = [field.name for field in fields(TokenSetReport) if field.name.startswith("num_")]
# Files of a model's directory that a tokenizer may be made of.
_TOKENIZER_FILES = (
    "*token*",
    "vocab*",
    "merges*",
    "*.model",
    "*.tiktoken",
    "*.jinja",
    "chat_template*",
    "*.py",
)

Progress = Callable[[int, int], None]


def no_progress(_records: int, _tokens: int) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class Rendering:
    """Options of turning records into tokens; may be sent to another process.

    Attributes:
        tokenizer: the model's tokenizer.
        mask_prompt: train on answers only.
        train_on: the answers to train on.
        max_seq_length: longer examples are cut; ``None`` keeps them whole, to be packed.
        reload: makes the tokenizer anew in another process: a function of a module and its
            arguments. ``None`` if that is impossible; this process then renders alone.
        files: :func:`tokenizer_files` of the directory that the tokenizer was loaded from.
        moment: moment whose date a chat template writes as the current date.
    """

    tokenizer: Any
    mask_prompt: bool
    train_on: TrainOn
    max_seq_length: int | None
    reload: tuple[Callable[..., Tokenizer], tuple[Any, ...]] | None = None
    files: str | None = None
    moment: datetime = field(default_factory=datetime.now)

    def renderer(self) -> Renderer:
        """Return a renderer with these options."""
        options: Any = {
            "mask_prompt": self.mask_prompt,
            "train_on": self.train_on,
            "moment": self.moment,
        }
        return Renderer(self.tokenizer, max_seq_length=self.max_seq_length, **options)

    @property
    def masks(self) -> bool:
        """True if prompts are kept from the loss."""
        return self.mask_prompt and self.train_on != "all"

    def facts(self) -> dict[str, Any]:
        """Return the facts, besides the records, that determine the tokens, as JSON values."""
        names = ("files", "mask_prompt", "train_on", "max_seq_length")
        facts = {name: getattr(self, name) for name in names}
        return {"tokenizer": tokenizer_facts(self.tokenizer, self.moment), **facts}


def tokenizer_facts(tokenizer: Any, moment: datetime) -> dict[str, Any]:
    """Return the facts that determine a tokenizer's output, as JSON values.

    ``moment``: see :class:`Rendering`.
    """
    import tokenizers
    import transformers

    backend = getattr(tokenizer, "backend_tokenizer", None)
    model = (
        backend.to_str()
        if backend is not None
        else json.dumps(tokenizer.get_vocab(), sort_keys=True)
    )
    template = getattr(tokenizer, "chat_template", None)
    facts: dict[str, Any] = {
        "model": hashlib.sha256(model.encode()).hexdigest(),
        "template": template
        if template is None or isinstance(template, str)
        else json.dumps(template, sort_keys=True),
        "special": [tokenizer.bos_token_id, tokenizer.eos_token_id],
        # A template may write any of them.
        "named": {
            name: str(token) for name, token in getattr(tokenizer, "special_tokens_map", {}).items()
        },
        "class": type(getattr(tokenizer, "_tokenizer", tokenizer)).__name__,
        # mlx_lm has templates of its own for some models.
        "versions": [tokenizers.__version__, transformers.__version__, version_of("mlx-lm")],
    }
    # mlx_lm's wrapper may have a template of its own in place of the tokenizer's.
    own = getattr(tokenizer, "_chat_template", None)
    if callable(own):
        facts["own_template"] = (
            f"{getattr(own, '__module__', '')}.{getattr(own, '__qualname__', '')}"
        )
    if asks_date(tokenizer):
        facts["now"] = date_facts(tokenizer, moment)
    return facts


def tokenizer_files(directory: Path) -> str:
    """Return the SHA-256 of the files in a model's directory that its tokenizer may be made of."""
    digest = hashlib.sha256()
    for path in tokenizer_files_of(directory):
        digest.update(f"{path.name} {file_hash(path)}\n".encode())
    return digest.hexdigest()


def tokenizer_files_of(directory: Path) -> list[Path]:
    """Return the files in a model's directory that its tokenizer may be made of, by their names."""
    found = {
        path.name: path
        for pattern in _TOKENIZER_FILES
        for path in directory.glob(pattern)
        if path.is_file()
    }
    return [path for _, path in sorted(found.items())]


def vocabulary_of(tokenizer: Any) -> int:
    """Return the largest token id plus 1."""
    return max(tokenizer.get_vocab().values(), default=-1) + 1


def fill_store(
    records: Iterable[Record],
    rendering: Rendering,
    writer: StoreWriter,
    progress: Progress = no_progress,
) -> TokenSetReport:
    """Render every record and append it; records without a trained token are left out and counted.

    Args:
        progress: called now and then with the numbers of records and tokens done.

    Raises:
        AllhandsError: a record cannot be rendered, see :meth:`Renderer.render`.
        DataError: no record has a trained token.
        ConfigError: prompts are to be masked, and the data have no prompts.
    """
    started = time.perf_counter()
    counts: Counter[str] = Counter(dict.fromkeys(_COUNTS, 0))
    dropped: list[str] = []
    left_out: dict[str, LeftOutPart] = {}
    with every_core():
        for chunk, results in _rendered(_chunks(records), rendering):
            kept: list[Rendered] = []
            for record, result in zip(chunk, results, strict=True):
                if isinstance(result, AllhandsError):
                    raise result
                _count_unheard(left_out, record, result)
                counts["num_records"] += 1
                counts["num_texts"] += record.kind == "text"
                if not result.mask.any() or record.is_blank:
                    dropped += [record.where] * (len(dropped) < _SHOWN)
                    counts["num_dropped"] += 1
                    continue
                kept.append(result)
                counts["num_examples"] += 1
                counts["num_text_bytes"] += len((record.text or "").encode())
                counts["num_truncated"] += result.truncated > 0
                counts["num_truncated_tokens"] += result.truncated
                counts["num_tokens"] += len(result.tokens)
                counts["num_trained_tokens"] += int(result.mask.sum())
            if kept:
                writer.append(kept)
            progress(counts["num_records"], counts["num_tokens"])
    _require_trained(counts, dropped, masks=rendering.masks)
    build_s = time.perf_counter() - started
    return TokenSetReport(
        **counts, dropped=tuple(dropped), build_s=build_s, left_out=tuple(left_out.values())
    )


def _require_trained(counts: Counter[str], dropped: Sequence[str], *, masks: bool) -> None:
    only_texts = counts["num_texts"] == counts["num_records"]
    if masks and only_texts and counts["num_records"]:
        raise ConfigError(
            "all records are plain texts, which have no prompt that could be masked",
            code="option-without-effect",
            where="--mask-prompt",
            hint="leave it out, or give the data as prompt and completion, or as messages",
        )
    if not counts["num_examples"]:
        raise DataError(
            f"none of the {counts['num_dropped']} examples has a token to train on",
            code="no-trained-tokens",
            where=dropped[0] if dropped else None,
            hint="check that the texts are not empty"
            if only_texts
            else "raise --max-seq-length (long prompts push answers out), and check that the answers exist",
        )


def _count_unheard(left_out: dict[str, LeftOutPart], record: Record, result: Rendered) -> None:
    for code, sample in result.unheard:
        known = left_out.get(code) or LeftOutPart(code, 0, sample, ())
        places = known.places if len(known.places) >= _SHOWN else (*known.places, record.where)
        left_out[code] = replace(known, count=known.count + 1, places=places)


def _chunks(records: Iterable[Record]) -> Iterator[list[Record]]:
    chunk: list[Record] = []
    size = 0
    for record in records:
        chunk.append(record)
        size += _characters(record)
        if len(chunk) >= CHUNK_RECORDS or size >= CHUNK_CHARACTERS:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _characters(record: Record) -> int:
    parts = [
        record.text,
        record.prompt,
        record.completion,
        *(m.get("content") for m in record.messages or ()),
    ]
    return sum(len(part) if isinstance(part, str) else 1000 for part in parts if part is not None)


Result = Rendered | AllhandsError


def _rendered(
    chunks: Iterator[list[Record]], rendering: Rendering
) -> Iterator[tuple[list[Record], Sequence[Result]]]:
    """Yield each chunk with its results, in order."""
    renderer = rendering.renderer()
    alone_until = time.perf_counter() + ALONE_S
    task, ahead = replace(rendering, tokenizer=None), 1
    with (
        ThreadPoolExecutor(1, thread_name_prefix="allhands-render") as thread,
        ExitStack() as stack,
    ):
        pool: Any = None
        waiting: deque[tuple[list[Record], Any]] = deque()
        for chunk in chunks:
            chats = any(record.kind != "text" for record in chunk)
            late = chats and rendering.reload and time.perf_counter() > alone_until
            if late and pool is None and (workers := num_helpers()) > 1:
                # multiprocessing would run the main module of the user's script again in each
                # helper; loky does not.
                from loky import ProcessPoolExecutor  # pyright: ignore[reportMissingTypeStubs]

                with _quiet_tracker():
                    pool = ProcessPoolExecutor(
                        workers, timeout=600, initializer=_end_with, initargs=(os.getpid(),)
                    )
                # After an error the helpers are killed: the rest of the data need not be rendered.
                stack.callback(pool.shutdown, wait=True, kill_workers=True)
                ahead = 2 * workers  # a chunk for each worker in the making, one ready
            # One chunk is rendered while the next is read and the one before is stored: the encoder
            # releases Python's lock.
            future: Any = None
            with suppress(BrokenExecutor, OSError):
                future = (
                    pool.submit(_render, task, chunk)
                    if pool
                    else thread.submit(renderer.render_many, chunk)
                )
            waiting.append((chunk, future))
            if len(waiting) > ahead:
                first, future = waiting.popleft()
                yield first, _result(future, first, renderer)
        for first, future in waiting:
            yield first, _result(future, first, renderer)


@contextmanager
def _quiet_tracker() -> Generator[None]:
    """Let loky start the process that removes its locks without warnings.

    If this process ends suddenly, as a rank does at an error, the locks are removed all the same.
    """
    before = os.environ.get("PYTHONWARNINGS")
    ours = "ignore:resource_tracker:UserWarning"
    os.environ["PYTHONWARNINGS"] = f"{before},{ours}" if before else ours
    try:
        yield
    finally:
        del os.environ["PYTHONWARNINGS"]
        if before is not None:
            os.environ["PYTHONWARNINGS"] = before


def _end_with(parent: int) -> None:
    """In a helper: end this process when its parent has ended, however the parent ends."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="allhands-watch", daemon=True).start()


def _result(future: Any, chunk: list[Record], alone: Renderer) -> Sequence[Result]:
    """Return a helper's results; render the chunk here if the system has ended the helpers, as it
    does when memory is short.
    """
    with suppress(BrokenExecutor):
        if future is not None:
            return future.result()
    return alone.render_many(chunk)


def _render(task: Rendering, chunk: list[Record]) -> Sequence[Result]:
    """In a helper: render one chunk."""
    return _helpers_renderer(task).render_many(chunk)


@lru_cache(maxsize=1)
def _helpers_renderer(task: Rendering) -> Renderer:
    assert task.reload is not None
    make, arguments = task.reload
    return replace(task, tokenizer=make(*arguments)).renderer()


def num_helpers() -> int:
    """Return the number of processes to render with: one a core, fewer if affinity, a container's
    limits or free memory allow fewer.
    """
    from loky import cpu_count  # pyright: ignore[reportMissingTypeStubs]

    return max(1, min(cpu_count(), psutil.virtual_memory().available // HELPER_BYTES))


@contextmanager
def every_core() -> Generator[None]:
    """Let this rank use the cores of the host's other ranks in a ``with`` block: they wait for its
    result.
    """
    allowed = os.environ.get("ALLHANDS_HOST_CORES", "")
    if not (allowed and hasattr(os, "sched_setaffinity")):
        yield
        return
    own = os.sched_getaffinity(0)
    with suppress(OSError, ValueError):
        os.sched_setaffinity(0, {int(core) for core in allowed.split(",")})
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, own)
