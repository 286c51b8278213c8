"""Events of a training run, and their conversion to lines of strict JSON and back.

A *step* is one optimizer update, and an *iteration* is one batch. A step takes
``grad_accumulation_steps`` iterations (fewer at the end). Every event has the number of completed
steps, and some have that of iterations, which is ``None`` if nobody counts them, as in a person's
own loop. A skipped step counts, too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, Literal, TypeAlias, cast

from pydantic import TypeAdapter


@dataclass(frozen=True)
class RunStarted:
    """A run, or the restart of one, begins. ``time`` is Unix time in seconds.

    ``step`` counts the updates done before this start, which took ``elapsed_s`` seconds;
    ``attempt`` counts the supervisor's starts, from 1. ``resumed_from`` is the checkpoint that it
    goes on from, if that is not the run's own. ``largest`` is what rank 0 computes at once at most,
    in padded tokens, and into how many such parts a batch is cut. ``longest`` is the longest row,
    ``vocabulary`` among how many tokens the model chooses.
    """

    name: str
    model: str
    method: str
    num_ranks: int
    backend: str
    batch_size: int
    total_steps: int
    trainable_params: int
    total_params: int
    num_train_examples: int
    cores_per_rank: int | None
    versions: dict[str, str]
    time: float
    step: int = 0
    attempt: int = 1
    elapsed_s: float = 0.0
    resumed_from: str | None = None
    largest: tuple[int, int] | None = None
    longest: int | None = None
    vocabulary: int | None = None
    iteration: int | None = None
    total_iterations: int | None = None
    grad_accumulation_steps: int = 1


@dataclass(frozen=True)
class TrainReport:
    """Training since the last report; times are seconds, and those of rank 0 in a step the mean
    over its steps.

    Parts of ``step_time_s`` are: ``compute_s`` for forward and backward (on one rank of a GPU the
    update, too), ``comm_s`` for the exchange of gradients with the wait for slower ranks, and
    ``data_wait_s`` for the wait for data. The rest is the update.

    ``loss`` is the mean over the tokens trained since the last report, ``tokens_per_s`` counts all
    tokens of all ranks (prompt included), ``trained_tokens`` is the sum since step 0, ``elapsed_s``
    counts from the latest start of the run (:func:`read_metrics` adds the time before a restart),
    and ``peak_memory_bytes`` has one entry a rank: the peak of the process on a CPU, of MLX's
    memory on a GPU; ``peak_rss_bytes`` and ``peak_mlx_bytes`` have both everywhere.
    ``needed_bytes`` is what a rank's largest step so far held of MLX's memory when nothing was
    computed ahead of its use; it is empty where nothing ever is (on a CPU). ``shapes`` counts the
    different shapes of micro-batches of rank 0 so far, each of which cost some time when it came.
    ``metrics`` are those of the objective besides the loss, by name. ``iterations_per_s`` are
    batches: for whoever counts as mlx_lm does. ``sent_bytes`` is what rank 0 has sent in a step,
    the mean over the steps: of a sum over N ranks 2 (N - 1) / N of its bytes, as a ring sends them.
    ``shares`` are the ranks' parts of a batch, which add up to 1; empty on one rank.
    """

    step: int
    loss: float
    learning_rate: float
    grad_norm: float
    tokens_per_s: float
    trained_tokens_per_s: float
    trained_tokens: int
    step_time_s: float
    data_wait_s: float
    comm_s: float
    elapsed_s: float
    peak_memory_bytes: tuple[int, ...]
    epoch: float
    compute_s: float = 0.0  # earlier versions did not write it, nor what follows
    peak_rss_bytes: tuple[int, ...] = ()
    peak_mlx_bytes: tuple[int, ...] = ()
    needed_bytes: tuple[int, ...] = ()
    shapes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    iteration: int | None = None
    iterations_per_s: float = 0.0
    sent_bytes: float = 0.0
    shares: tuple[float, ...] = ()


@dataclass(frozen=True)
class ValidReport:
    """Mean validation loss a token after ``step`` updates; ``best`` if no earlier one was lower.

    ``bits_per_byte`` of text is the same loss whatever the tokenizer; where all examples are plain
    texts. ``metrics`` are those of the objective besides the loss, by name.
    """

    step: int
    loss: float
    num_tokens: int
    elapsed_s: float
    duration_s: float
    best: bool
    bits_per_byte: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    iteration: int | None = None


@dataclass(frozen=True)
class Sampled:
    """The model's continuation of ``prompt`` after ``step`` updates, without the prompt."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True)
class SavedReport:
    """A checkpoint or adapter lies complete at ``path``.

    Training stood still for ``pause_s`` seconds; ``write_s`` it took to write, mostly while
    training went on.
    """

    step: int
    path: str
    pause_s: float = 0.0
    write_s: float = 0.0


@dataclass(frozen=True)
class StepSkipped:
    """Update ``step`` changed no weight, for ``reason`` ("the gradient is nan").

    ``examples`` are the numbers of the training examples that may be the cause, ``where`` their
    files and lines, in the same order, where those are known.
    """

    step: int
    reason: str
    examples: tuple[int, ...]
    where: tuple[str, ...] = ()


@dataclass(frozen=True)
class SharesChanged:
    """After ``step`` updates all ranks agreed on other shares, which hold for those after update
    ``from_step``.

    ``shares`` and ``before`` are parts of a batch, one a rank, and add up to 1; ``speeds`` are the
    tokens a second of each rank's passes that they are based on, 0 where it had none. ``rows`` says
    of each rank whether it gets rows.
    """

    step: int
    from_step: int
    shares: tuple[float, ...]
    before: tuple[float, ...]
    speeds: tuple[float, ...]
    rows: tuple[bool, ...]


@dataclass(frozen=True)
class Logged:
    """Numbers of a person's own loop after ``step`` updates, by names of their own, that are
    written beside these.
    """

    step: int
    elapsed_s: float


@dataclass(frozen=True)
class Warned:
    """A warning for a person that does not end the run.

    Of warnings with the same ``about`` only the last one counts, and none if it is ``over``.
    """

    step: int
    message: str
    about: str = ""
    over: bool = False


@dataclass(frozen=True)
class RunEnded:
    """The run is over; ``total_time_s`` counts from its latest start, like ``elapsed_s``."""

    step: int
    reason: Literal["finished", "stopped early", "interrupted", "failed"]
    total_time_s: float
    best_step: int | None = None
    best_valid_loss: float | None = None
    test_loss: float | None = None
    iteration: int | None = None


StepReport: TypeAlias = (
    TrainReport | ValidReport | SavedReport | StepSkipped | Sampled | SharesChanged
)
Event: TypeAlias = RunStarted | StepReport | Logged | Warned | RunEnded

_KINDS: dict[str, type[Event]] = {
    "started": RunStarted,
    "train": TrainReport,
    "valid": ValidReport,
    "saved": SavedReport,
    "skipped": StepSkipped,
    "shares": SharesChanged,
    "sampled": Sampled,
    "logged": Logged,
    "warned": Warned,
    "ended": RunEnded,
}
_KIND_NAMES = {kind: name for name, kind in _KINDS.items()}
_READERS: dict[str, TypeAdapter[Any]] = {name: TypeAdapter(kind) for name, kind in _KINDS.items()}


# Of a report of training, what a person's own loop may not know, and what it then counts as.
UNKNOWN: Mapping[str, Any] = {
    **dict.fromkeys(
        ("learning_rate", "grad_norm", "tokens_per_s", "trained_tokens_per_s", "epoch"), math.nan
    ),
    "iteration": None,
    **dict.fromkeys(("data_wait_s", "comm_s", "compute_s", "iterations_per_s", "sent_bytes"), 0.0),
    **dict.fromkeys(
        ("peak_memory_bytes", "peak_rss_bytes", "peak_mlx_bytes", "needed_bytes", "shares"), ()
    ),
    **dict.fromkeys(("trained_tokens", "shapes"), 0),
    "metrics": {},
}


def encode_event(
    event: Event, more: Mapping[str, float] | None = None, without: Collection[str] = ()
) -> str:
    """Return the event as one line of strict JSON; non-finite numbers become "NaN", "Infinity",
    "-Infinity".

    ``more`` are numbers of other names, which :func:`decode_event` leaves out. ``without`` are
    names of :data:`UNKNOWN` that are not written.
    """
    record = {
        entry.name: _plain(getattr(event, entry.name))
        for entry in fields(event)
        if entry.name not in without
    }
    record = {**{name: _plain(number) for name, number in (more or {}).items()}, **record}
    return json.dumps({"event": _KIND_NAMES[type(event)], **record}, allow_nan=False)


def _plain(value: object) -> object:
    """Convert a value for ``json``: numpy scalars become numbers, anything unknown its text."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else json.dumps(number)
    if isinstance(value, Mapping):
        return {
            str(key): _plain(item) for key, item in cast("Mapping[object, object]", value).items()
        }
    if isinstance(value, Sequence):
        return [_plain(item) for item in cast("Sequence[object]", value)]
    return str(value)


def decode_event(line: str) -> Event | None:
    """Return the event of one line, or None if the line is torn, malformed or of an unknown kind."""
    try:
        record = json.loads(line)
        kind = record.pop("event")
        return _READERS[kind].validate_python({**UNKNOWN, **record} if kind == "train" else record)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None


def is_damaged(line: str) -> bool:
    """Return whether a line that :func:`decode_event` cannot read is damaged: not empty, and of no
    unknown kind.
    """
    try:
        record: Any = json.loads(line.strip() or '{"event": ""}')
        kind = record["event"]
    except (ValueError, LookupError, TypeError, RecursionError):
        return True
    return not isinstance(kind, str) or kind in _KINDS
