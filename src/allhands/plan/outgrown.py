"""Signs that a run needs another way of training, and what to do about them."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allhands.io.formatting import counted, format_duration
from allhands.observe.metrics import RunHistory, RunStarted
from allhands.observe.monitor.samples import Sample
from allhands.parallel.registry import ELEMENTWISE, STRATEGIES

# Least parts of a step that waiting for ranks, waiting for data and all else must take for a sign.
_EXCHANGE, _DATA, _REST = 0.2, 0.05, 0.25
_FULL = 0.9  # part of a GPU's memory
_RESTARTS = 3
_MANY = 8  # ranks: with more, plain data parallel is rarely the best way
_LARGE = 1e9  # parameters: from this number on, dividing the model itself may pay
_DAY_S = 86_400.0
_LEAST = 3  # reports: from fewer nothing follows


@dataclass(frozen=True)
class Sign:
    """A sign in numbers (``seen``), and what to do about it (``advice``)."""

    seen: str
    advice: str


def signs_of(
    history: RunHistory, samples: Sequence[Sample] = (), config: Mapping[str, Any] | None = None
) -> list[Sign]:
    """Return the signs in the metrics of a run and in the monitor's samples; empty if all is well,
    or if there are too few reports.

    Args:
        config: the options of the run by name, if they are known.
    """
    started = history.started
    if started is None or len(history.train) < _LEAST:
        return []
    way = _Way.of(started, config or {})
    signs = (
        _of_steps(history, started, samples, way),
        _of_memory(samples, way),
        _of_faults(history, samples),
        _of_length(history, started),
    )
    return [sign for some in signs for sign in some]


@dataclass(frozen=True)
class _Way:
    """The way in which ranks divide the work of a run, and what can still be changed in it.

    Attributes:
        name: the strategy's name; empty if not known.
        parts: whether each rank has a part of the model or of the rows only.
        config: the options of the run; empty if not known.
    """

    name: str
    parts: bool
    config: Mapping[str, Any]

    @classmethod
    def of(cls, started: RunStarted, config: Mapping[str, Any]) -> _Way:
        """Return the way that the run took, whatever ``--strategy auto`` was; an old file does not
        name it.
        """
        title, *flags = started.strategy.split(", ")
        asked = "pipeline" if (config.get("pp") or 1) > 1 else str(config.get("strategy") or "")
        asked = "fsdp" if asked in ("zero2", "zero3") else asked
        name = next((key for key, entry in STRATEGIES.items() if entry.title == title), asked)
        divided = name in STRATEGIES and STRATEGIES[name].divides_model
        sizes = (config.get(each) or 1 for each in ("tp", "ep", "cp"))
        return cls(name, divided or bool(flags) or any(size > 1 for size in sizes), config)

    @property
    def takes_zero1(self) -> bool:
        """Return whether ``--strategy zero1`` is possible, and would change something."""
        plain = self.name in ("data", "auto", "") and not self.parts
        return plain and (self.config.get("optimizer") or ELEMENTWISE[0]) in ELEMENTWISE

    def shares(self, backend: str) -> str:
        """Return advice on unequal computers; empty if shares follow the speeds anyway."""
        if backend == "nccl":  # speeds are not known there
            return "; unequal GPUs want unequal shares (--rank-weights with numbers)"
        # Between computers "auto" is the default.
        follow = bool(self.config) and self.config.get("rank_weights") in (None, "auto")
        return "" if follow else "; unequal computers want unequal shares (--rank-weights auto)"


def _of_steps(
    history: RunHistory, started: RunStarted, samples: Sequence[Sample], way: _Way
) -> Iterator[Sign]:
    """Yield signs in the mean parts of a step."""
    reports = (
        history.train[1:] if len(history.train) > _LEAST else history.train
    )  # the first includes the start
    names = ("step_time_s", "comm_s", "data_wait_s", "compute_s")
    step, *seconds = (
        statistics.mean(getattr(report, name) for report in reports) for name in names
    )
    exchange, data, compute = (each / step for each in seconds)
    rest = max(0.0, 1.0 - compute - exchange - data) if compute else 0.0
    several = started.num_ranks > 1
    if several and exchange > _EXCHANGE:
        told = f"{100 * exchange:.0f} % of a step was waiting for other ranks"
        if way.name == "pipeline":
            # Rank 0 has other blocks than the other ranks: its work says nothing about theirs.
            yield Sign(
                f"{told} (rank 0, the first stage)",
                "a larger --batch-size has more micro-batches, and a pipeline waits less for each of them; "
                "a model that one computer holds is often trained sooner without --strategy pipeline",
            )
        else:
            yield Sign(told, _of_exchange(started, step, exchange, samples, way))
    if data > _DATA:
        yield Sign(
            f"{100 * data:.0f} % of a step was waiting for data",
            "a separate disk for the token store, or longer rows; run nothing else on these processors",
        )
    if several and rest > _REST:
        yield Sign(
            f"{100 * rest:.0f} % of a step gets no shorter with more ranks",
            f"a larger batch{'; --strategy zero1 divides the update' * way.takes_zero1}",
        )


def _of_memory(samples: Sequence[Sample], way: _Way) -> Iterator[Sign]:
    used = [
        one.gpu_used_bytes / one.gpu_total_bytes
        for one in samples
        if one.gpu_used_bytes and one.gpu_total_bytes
    ]
    if (most := max(used, default=0.0)) > _FULL:
        advice = ["fewer --micro-batch-tokens"]
        if way.takes_zero1:
            advice.insert(0, "--strategy zero1")
        if not way.config.get("grad_checkpoint"):
            advice.insert(0, "--grad-checkpoint")
        larger = (
            "; what is larger is divided among several: --strategy fsdp over a fast link, --strategy pipeline over a "
            "slow one"
        )
        yield Sign(
            f"{100 * most:.0f} % of a GPU's memory was in use",
            f"{', '.join(advice)}{larger * (not way.parts)}",
        )


def _of_faults(history: RunHistory, samples: Sequence[Sample]) -> Iterator[Sign]:
    # A person's --resume does not count: it is the first attempt of another command.
    faults = sum(start.attempt > 1 for start in history.starts)
    if faults >= _RESTARTS:
        advice = (
            "read the causes in events.jsonl: a rank that was killed often had too little memory (allhands plan)"
            if _is_one_computer(samples)
            else "allhands cluster check; for computers that come and go Slurm, Kubernetes, SageMaker or Vertex AI"
        )
        yield Sign(f"it was started again {counted(faults, 'time')} after faults", advice)


def _of_length(history: RunHistory, started: RunStarted) -> Iterator[Sign]:
    total = history.trained_s or history.train[-1].elapsed_s
    if started.num_ranks > _MANY and total > _DAY_S:
        yield Sign(
            f"{started.num_ranks} ranks computed for {counted(total / _DAY_S, 'day')}",
            "at this size dividing a model in two ways together pays: --strategy fsdp or pipeline with --tp"
            if started.total_params >= _LARGE
            else "allhands plan says how many ranks a model of this size is worth",
        )


def _is_one_computer(samples: Sequence[Sample]) -> bool:
    """Return whether all ranks are known to be on the same computer."""
    return len({sample.host for sample in samples if sample.role == "rank"}) == 1


def _of_exchange(
    started: RunStarted, step_s: float, share: float, samples: Sequence[Sample], way: _Way
) -> str:
    """Return the remedy for an exchange that takes this ``share`` of a step.

    A single process would need, for each rank, the time of a step without the exchange; less if it
    has more cores.
    """
    ranks, one_computer = started.num_ranks, _is_one_computer(samples)
    alone_s = ranks * (1.0 - share) * step_s
    more_work = "a larger batch, or accumulation (--grad-accumulation-steps)"
    if way.parts:  # perhaps because a single process cannot hold all of it
        return (
            f"{more_work}, so that each exchange has more to compute; a faster link. What one rank holds is often "
            "trained sooner undivided: allhands plan tells the time of each way"
        )
    if one_computer and alone_s < step_s:
        whole, alone = format_duration(step_s), format_duration(alone_s)
        return (
            f"leave -n {ranks} out: steps of {whole} are too short for {ranks} processes; a single one takes about "
            f"{alone}, or less, for the same batch. With {more_work} each exchange has more to compute"
        )
    if one_computer and started.backend != "nccl":
        return (
            f"{more_work}, so that each exchange has more to compute; see that each process has cores of its own, "
            "which nothing else uses; or fewer processes"
        )
    advice = f"a faster link, {more_work}{way.shares(started.backend)}"
    if alone_s < step_s:
        advice += f". One of these {ranks} processes alone would need {format_duration(alone_s)} for the same batch"
        advice += f", and together they take {format_duration(step_s)}"
    if started.total_params < _LARGE:
        return advice
    divided = "--strategy pipeline sends hidden states in place of gradients; allhands plan tells the time of each way"
    return f"{advice}. Where nothing of it helps: {divided}"
