"""The file ``plan.json`` with a plan, in the directory of the planned run.

It is written before the run, and compared with the run afterwards.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, cast

from pydantic import Field, TypeAdapter, ValidationError

from allhands.errors import DataError, StorageError
from allhands.io.files import make_directory, storage_error, unused_name, write_whole
from allhands.io.formatting import format_duration
from allhands.io.names import PLAN_FILE
from allhands.io.paths import meant
from allhands.observe.metrics import METRICS_FILE, read_metrics

VERSION = 1
_MOST_BYTES = 4_000_000
_HINT = "plan again: allhands plan with the options of the training"

# Options that change the time or the memory of a training. By these a run is compared with its
# plan.
OPTIONS = (
    "model",
    "data",
    "hf_dataset",
    "fine_tune_type",
    "optimizer",
    "num_layers",
    "batch_size",
    "iters",
    "epochs",
    "grad_accumulation_steps",
    "max_seq_length",
    "packing",
    "isolate_documents",
    "lora_parameters",
    "mask_prompt",
    "train_on",
    "grad_checkpoint",
    "micro_batch_tokens",
    "compile",
    "clear_cache_threshold",
    "master_weights",
    "rank_weights",
    "bucket_mb",
    "strategy",
    "tp",
    "cp",
    "ep",
    "pp",
    "dp_shard",
    "reshard",
    "compress",
    "backend",
    "tokenizer",
    "shape",
    "layers",
    "dims",
    "mlp_dims",
    "heads",
    "sync_every",
    "outer_lr",
    "outer_momentum",
    "sync_fragments",
    "sync_delay",
    "kv_heads",
    "head_dim",
    "vocabulary",
    "tied",
    "experts",
    "experts_per_token",
    "dtype",
    "steps_per_eval",
    "val_batches",
)

_Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Bytes = Annotated[int, Field(gt=0)]


@dataclass(frozen=True)
class KeptStep:
    """The part of the planned step that is compared: its mean number of tokens."""

    tokens: _Seconds


@dataclass(frozen=True)
class KeptPrediction:
    """Seconds of a step on some computers, and the part in which ranks wait for the exchange."""

    step_s: _Seconds
    exposed_s: _Time


@dataclass(frozen=True)
class KeptLine:
    """Prediction for ``machines`` computers; ``training_s`` includes the time to the first step and
    all validations.
    """

    machines: Annotated[int, Field(ge=1)]
    prediction: KeptPrediction
    training_s: _Seconds
    start_s: _Time | None = None
    validation_s: _Time = 0.0


@dataclass(frozen=True)
class KeptMemory:
    """A way of dividing the work, and the bytes of a rank at its peak.

    ``step_s`` and ``training_s`` are 0 if they were not predicted.
    """

    name: str
    ranks: int
    rank_bytes: _Bytes
    flags: str
    strategy: str
    step_s: _Time = 0.0
    training_s: _Time = 0.0


@dataclass(frozen=True)
class KeptMeasured:
    """Facts of the short training: numbers of trained parameters and of cores of each rank."""

    exchanged: int
    cores_per_rank: int | None = None


@dataclass(frozen=True)
class KeptPlan:
    """The part of ``plan.json`` that is compared with a run.

    Attributes:
        time: time at which the plan was made, Unix time in seconds.
        options: planned values of :data:`OPTIONS`.
        processor: ``cpu`` or ``gpu``: whose memory is planned.
        device: the described computers, if nothing was measured.
        steps: number of planned optimizer updates.
        start_s: seconds to the first step; 0 if not known.
        machines: a prediction for each number of computers.
        memory: ways of dividing the work; empty for models that are not built of equal blocks.
        measured: ``None`` if the computers were only described.
        doubt: why the times are not reliable; empty or ``None`` if they are.
    """

    time: _Time
    options: dict[str, Any]
    processor: str
    device: str | None
    steps: Annotated[int, Field(ge=1)]
    start_s: _Time
    step: KeptStep
    machines: tuple[KeptLine, ...]
    memory: tuple[KeptMemory, ...]
    measured: KeptMeasured | None
    doubt: str | None = None


@cache
def _reader() -> TypeAdapter[KeptPlan]:
    return TypeAdapter(KeptPlan)


# --- writing --------------------------------------------------------------------------------------


def keep_plan(directory: Path, plan: Mapping[str, Any]) -> str:
    """Write ``plan.json``, whole or not at all; return a line for people that says where it is.

    An earlier plan is replaced. If a run in this directory began after it, it is first copied to a
    file with a number.

    Args:
        plan: the whole plan as plain values, with those of :class:`KeptPlan`.

    Raises:
        StorageError: the file could not be written; an earlier plan is unchanged.
    """
    file = directory / PLAN_FILE
    record = {"version": VERSION, **plan}
    make_directory(directory, private=True)
    begun = runs_begun(directory)
    aside = unused_name(file) if _was_used(file, begun) else None
    if aside is not None:  # copied, not renamed, so that there is a plan at any moment
        try:
            earlier = file.read_bytes()
        except OSError as error:
            raise storage_error(file, error) from None
        write_whole(aside, lambda draft: draft.write_bytes(earlier), private=True)
    text = json.dumps(record, indent=1)
    write_whole(file, lambda draft: draft.write_text(f"{text}\n", encoding="utf-8"), private=True)
    told = f"the plan is kept in {file}: allhands report compares the next run there with it"
    if aside is not None:
        return f"{told}; the plan of an earlier run there is kept as {aside.name}"
    return f"{told}, not the one that is there already" if begun else told


def runs_begun(directory: Path) -> list[float]:
    """Return the start times of a directory's runs, including those that were set aside."""
    usual, found = Path(METRICS_FILE), list[float]()
    for file in directory.glob(f"{usual.stem}*{usual.suffix}"):
        with suppress(DataError):
            found += [start.time for start in read_metrics(file).starts[:1]]
    return found


def _was_used(file: Path, begun: list[float]) -> bool:
    """Return whether a run began after this plan; also true if the plan cannot be read."""
    if not os.path.exists(file):  # unlike Path.exists this never raises
        return False
    try:
        made = read_plan(file).time
    except DataError:
        return True
    return any(began >= made for began in begun)


def keep_in(directory: Path, plan: Mapping[str, Any]) -> tuple[Path | None, str]:
    """Keep the plan in a run's directory; return the file and a line for people.

    The file is ``None`` if the plan is not kept; the line then has the reason. A plan of computers
    that are only described is not kept beside a run, whose plan a report would take it for.

    Args:
        plan: as for :func:`keep_plan`.
    """
    if plan["device"] is not None and runs_begun(directory):
        hint = "these computers are only described; choose another --adapter-path to keep it for a run on them"
        return None, f"the plan is not kept: {directory} already holds a run, and {hint}"
    try:
        return directory / PLAN_FILE, keep_plan(directory, plan)
    except StorageError as error:
        hint = "no report will compare a run with it: choose another --adapter-path"
        return None, f"the plan is not kept, because {error.where} {error.message}; {hint}"


# --- reading --------------------------------------------------------------------------------------


def read_plan(file: Path) -> KeptPlan:
    """Read a kept plan.

    Raises:
        DataError: the file cannot be read, is too large or torn, has another version, or a value is
            missing or wrong.
    """
    try:
        if file.stat().st_size > _MOST_BYTES:
            raise _fault(file, "this is too large to be a plan")
        content: Any = json.loads(file.read_bytes())
    except OSError as error:
        told = f"the plan cannot be read: {error.strerror}"
        raise _fault(file, told, hint=meant(file, _HINT, read_plan)) from None
    except (ValueError, RecursionError):
        raise _fault(file, "the plan is torn: it is no whole JSON") from None
    if not isinstance(content, dict):
        raise _fault(file, "this is no plan: it holds no object")
    version = cast("dict[str, Any]", content).get("version")
    if version != VERSION:
        told = "no version" if version is None else f"version {version!r}"
        raise _fault(
            file,
            f"the plan has {told}, and this allhands reads version {VERSION}",
            code="plan-of-other-version",
        )
    try:
        return _reader().validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise _fault(file, f"the plan has a fault at {place}: {first['msg']}") from None


def _fault(file: Path, told: str, code: str = "plan-invalid", hint: str = _HINT) -> DataError:
    return DataError(told, code=code, where=str(file), hint=hint)


def plan_before(directory: Path, began: float | None) -> tuple[KeptPlan | None, list[str]]:
    """Return the latest plan in a directory that was made before a run began there, and notes for
    people on plans that are not compared.

    Args:
        began: time at which the run began, Unix time in seconds; ``None`` if not known.
    """
    usual, notes, plans = Path(PLAN_FILE), list[str](), list[KeptPlan]()
    others = sorted(directory.glob(f"{usual.stem}.*{usual.suffix}"))
    numbered = [one for one in others if one.name.split(".")[1].isdigit()]
    for file in filter(os.path.exists, [directory / PLAN_FILE, *numbered]):
        try:
            plans.append(read_plan(file))
        except DataError as error:
            notes.append(f"{file.name} is not compared: {error.message}.")
    if plans and began is None:
        notes.append(f"{PLAN_FILE} is not compared: nothing says when the run began.")
    if not plans or began is None:
        return None, notes
    earlier = [plan for plan in plans if plan.time <= began]
    if not earlier:
        late = format_duration(min(plan.time for plan in plans) - began)
        notes.append(
            f"{PLAN_FILE} was made {late} after this run had begun: it is no prediction, and is not compared."
        )
        return None, notes
    return max(earlier, key=lambda plan: plan.time), notes


def plan_record(
    options: Mapping[str, Any], *, processor: str, device: str | None, now: float | None = None
) -> dict[str, Any]:
    """Return the values of a plan that tell when and for which training it was made."""
    return {
        "time": time.time() if now is None else now,
        "options": {name: options[name] for name in OPTIONS if name in options},
        "processor": processor,
        "device": device,
    }
