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
    """A run, or the restart of one, begins.

    Attributes:
        name: name of the run: its directory.
        model: name or path of the model.
        method: ``lora``, ``dora``, ``full`` or ``pre-training``.
        num_ranks: number of processes.
        backend: library that connects them; ``none`` for one.
        batch_size: examples of a global batch.
        total_steps: steps of the whole run.
        trainable_params: number of trained weights.
        total_params: number of all weights.
        num_train_examples: examples of the training set.
        cores_per_rank: processor cores of each rank, if it is limited.
        versions: versions of allhands, Python and libraries, and the platform.
        time: Unix time in seconds.
        step: steps done before this start.
        attempt: number of this start by the supervisor, from 1.
        elapsed_s: seconds of earlier starts.
        resumed_from: checkpoint of another run from which this one goes on.
        largest: padded tokens that rank 0 computes at once at most, and the number of such parts in
            a batch.
        longest: tokens of the longest row.
        lengths: number of lengths that rows have.
        vocabulary: number of tokens among which the model chooses.
        iteration: iterations done before this start.
        total_iterations: iterations of the whole run.
        grad_accumulation_steps: iterations of a step.
        seen: share of the validation examples that are trained on, too.
        strategy: the way in which several ranks divide the work, in words and flags.
        validated: the validated examples: fingerprint of the data, ``/``, number of examples.
            ``None``: none, or unknown.
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
    lengths: int | None = None
    vocabulary: int | None = None
    iteration: int | None = None
    total_iterations: int | None = None
    grad_accumulation_steps: int = 1
    seen: float = 0.0
    strategy: str = ""
    validated: str | None = None


@dataclass(frozen=True)
class TrainReport:
    """Training since the last report.

    The time of a step consists of ``compute_s``, ``comm_s``, ``data_wait_s`` and the update. Times
    of a step are means over the steps of rank 0.

    Attributes:
        step: steps done.
        loss: mean over the tokens trained since the last report.
        learning_rate: learning rate of the last step.
        grad_norm: norm of the last gradient, before clipping.
        tokens_per_s: all tokens of all ranks in a second, prompts included.
        trained_tokens_per_s: tokens in a second on which the loss was computed.
        trained_tokens: tokens on which the loss was computed, since step 0.
        step_time_s: seconds of a step.
        data_wait_s: seconds of a step that wait for data.
        comm_s: seconds of a step for the exchange of gradients, including the wait for slower
            ranks.
        elapsed_s: seconds since the latest start of the run; :func:`read_metrics` adds earlier
            starts.
        peak_memory_bytes: peak memory of each rank: of the process on a CPU, of MLX on a GPU.
        epoch: passes over the data so far.
        compute_s: seconds of a step for forward and backward; on one rank of a GPU also the update.
        peak_rss_bytes: peak resident memory of each rank.
        peak_mlx_bytes: peak memory of each rank's MLX arrays.
        needed_bytes: MLX memory of each rank's largest step so far, without work queued ahead;
            only on NVIDIA GPUs, else empty.
        shapes: number of different shapes of micro-batches of rank 0 so far; each cost time when it
            first came.
        metrics: further numbers of the objective, by name.
        iteration: iterations done.
        iterations_per_s: iterations in a second.
        sent_bytes: bytes that rank 0 sends in a step; a sum over N ranks counts 2 (N - 1) / N
            times.
        shares: ranks' parts of a batch, whose sum is 1; empty on one rank.
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
    compute_s: float = 0.0
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
    """A validation.

    Attributes:
        step: steps done.
        loss: mean over the tokens of the validation.
        num_tokens: number of these tokens.
        elapsed_s: seconds since the latest start of the run.
        duration_s: seconds of the validation.
        best: whether no earlier validation had a lower loss.
        bits_per_byte: the loss in bits for each byte, if all examples are plain texts.
        metrics: further numbers of the objective, by name.
        iteration: iterations done.
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
    """A text that the model has written.

    Attributes:
        step: steps done.
        prompt: beginning of the text, from ``sample_prompts``.
        text: the model's continuation, without the prompt.
        duration_s: seconds in which it was written.
    """

    step: int
    prompt: str
    text: str
    duration_s: float = 0.0


@dataclass(frozen=True)
class SavedReport:
    """A checkpoint or an adapter is complete.

    Attributes:
        step: steps done.
        path: its place.
        pause_s: seconds in which training stood still.
        write_s: seconds of writing, mostly while training went on.
    """

    step: int
    path: str
    pause_s: float = 0.0
    write_s: float = 0.0


@dataclass(frozen=True)
class StepSkipped:
    """A step that has changed no weight.

    Attributes:
        step: number of the step.
        reason: for example "the gradient is nan".
        examples: numbers of the training examples that may be the cause.
        where: files and lines of these examples, in the same order, if known.
    """

    step: int
    reason: str
    examples: tuple[int, ...]
    where: tuple[str, ...] = ()


@dataclass(frozen=True)
class SharesChanged:
    """Ranks have agreed on other shares of the batches.

    Attributes:
        step: steps done at the agreement.
        from_step: the new shares hold for the steps after this one.
        shares: ranks' parts of a batch, whose sum is 1.
        before: the same before the change.
        speeds: tokens in a second of each rank's passes; 0 for a rank without rows.
        rows: whether each rank gets rows.
    """

    step: int
    from_step: int
    shares: tuple[float, ...]
    before: tuple[float, ...]
    speeds: tuple[float, ...]
    rows: tuple[bool, ...]


@dataclass(frozen=True)
class Logged:
    """Numbers of a person's own loop; the line also has these numbers, by their names.

    Attributes:
        step: steps done.
        elapsed_s: seconds since the latest start of the run.
    """

    step: int
    elapsed_s: float


@dataclass(frozen=True)
class Warned:
    """A warning for a person that does not end the run.

    Only the last warning with the same ``about`` counts, and none if it is ``over``.

    Attributes:
        step: steps done.
        message: the warning.
        about: subject, by which a later warning replaces this one.
        over: whether the subject has ended.
    """

    step: int
    message: str
    about: str = ""
    over: bool = False


@dataclass(frozen=True)
class RunEnded:
    """The end of the run.

    Attributes:
        step: steps done.
        reason: how it ended.
        total_time_s: seconds since the latest start of the run.
        best_step: step of the lowest validation loss.
        best_valid_loss: this loss.
        test_loss: loss on the test set, with ``--test``.
        iteration: iterations done.
        error: message of the error that ended the run, if it failed.
    """

    step: int
    reason: Literal["finished", "stopped early", "interrupted", "failed"]
    total_time_s: float
    best_step: int | None = None
    best_valid_loss: float | None = None
    test_loss: float | None = None
    iteration: int | None = None
    error: str | None = None


StepReport: TypeAlias = (
    TrainReport | ValidReport | SavedReport | StepSkipped | Sampled | SharesChanged
)
Event: TypeAlias = RunStarted | StepReport | Logged | Warned | RunEnded

# The first line of a file, which no event follows if a run ends before it starts.
OPENED = '{"event": "opened", "format": 1}'
KINDS: dict[str, type[Event]] = {
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
_KIND_NAMES = {kind: name for name, kind in KINDS.items()}
_READERS: dict[str, TypeAdapter[Any]] = {name: TypeAdapter(kind) for name, kind in KINDS.items()}


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
    return not isinstance(kind, str) or kind in KINDS
