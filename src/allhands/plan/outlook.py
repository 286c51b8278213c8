"""What is to be expected of a training on one computer and on several: memory, time, cost, and the advice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from allhands.plan.advice import Advice, Situation, advise
from allhands.plan.links import Exchange, faster_than
from allhands.plan.memory import Blocks, Memory, Work, of_process
from allhands.plan.speed import Prediction, StepModel, amdahl, enough, gustafson, predict
from allhands.plan.strategies import SHARD, Strategy, strategies, those_told

_FOUR = 4  # batches whose gradients are exchanged as one
_USUAL = (1, 2, 4, 8)


@dataclass(frozen=True)
class Prices:
    """What an hour costs; ``None`` where nobody said."""

    per_hour: float | None = None
    watts: float | None = None
    per_kwh: float | None = None


@dataclass(frozen=True)
class Job:
    """The training that is planned.

    Attributes:
        steps: optimizer updates of it.
        start_s: until the first one, of one process.
        step: on one computer.
        link: between computers; ``None`` if there is no second.
        speeds: of the computers that there are, 1 being that of the one ``step`` was measured on.
        numbers: of computers to show, where ``speeds`` are those of one kind.
        usable_bytes: of the smallest computer's memory; ``None`` if not known.
        blocks: of the model; ``None`` if it is not built of equal blocks.
        work: of one rank, with the whole batch in micro-batches as one computer cuts it.
        of: the arrays of a rank's work.
        present_bytes: of a process on a CPU what is no array of its training; 0 on a GPU.
        needed_bytes: what steps of ``work`` were seen to need on a GPU; 0 if none were made.
        quantised: whether the weights are.
        once: whether the training is needed once only.
        together: whether the ranks are processes of one computer, with one price.
        shares: whether they have one memory, too: not where each has a GPU.
        started: a number of ranks, and the seconds until their first step, where that was measured.
        whole_s: of a step by one process that has all of a computer, where ``step`` is of one of several that share it.
        first_s: by which the first steps take longer than the others, all together.
        validations: of the whole training, ``validation_s`` of each of them on one computer.
    """

    steps: int
    start_s: float
    step: StepModel
    link: Exchange | None
    speeds: tuple[float, ...]
    numbers: tuple[int, ...]
    usable_bytes: int | None
    blocks: Blocks | None
    work: Work | None
    of: Callable[[Blocks, Work], Memory]
    present_bytes: int = 0
    needed_bytes: int = 0
    quantised: bool = False
    once: bool = False
    prices: Prices = Prices()
    together: bool = False
    shares: bool = False
    started: tuple[int, float] | None = None
    first_s: float = 0.0
    whole_s: float | None = None
    validations: int = 0
    validation_s: float = 0.0

    def start_of(self, ranks: int) -> float:
        """Seconds until the first step of so many ranks."""
        if self.started is None:
            return self.start_s
        most, seconds = self.started
        return self.start_s + (seconds - self.start_s) * (ranks - 1) / (most - 1)

    @property
    def alone_s(self) -> float:
        """Seconds of the training by one process that has a whole computer."""
        step_s = self.whole_s or self.step.alone_s
        validations_s = self.validations * self.validation_s * step_s / self.step.alone_s
        return self.start_s + self.first_s + self.steps * step_s + validations_s


@dataclass(frozen=True)
class Line:
    """So many computers: a step, the time to the first one, the whole training, and what it costs.

    ``validation_s`` is of all validations, of which each rank computes its share; ``training_s`` has it.
    """

    machines: int
    prediction: Prediction
    training_s: float
    money: float | None
    kwh: float | None
    start_s: float
    validation_s: float = 0.0


@dataclass(frozen=True)
class Outlook:
    """All that is told of a :class:`Job`.

    Attributes:
        lines: by numbers of computers.
        enough: computers beyond which another saves less than 5 % of a step.
        laws: by number of computers, Amdahl's speed-up and Gustafson's, in which nothing is exchanged.
        memory: ways of dividing the work, each with the bytes of a rank.
        fits: of each of them whether it fits; ``None`` where that is not known.
    """

    job: Job
    lines: tuple[Line, ...]
    enough: int
    laws: dict[int, tuple[float, float]]
    memory: tuple[Strategy, ...]
    fits: tuple[bool | None, ...]
    advice: Advice

    def as_json(self) -> dict[str, Any]:
        """Plain values, in seconds and bytes."""
        step = asdict(self.job.step)
        fits = zip(self.memory, self.fits, strict=True)
        return {
            "steps": self.job.steps,
            "start_s": self.job.start_s,
            "first_s": self.job.first_s,
            "one_process_s": self.job.whole_s,
            "validations": self.job.validations,
            "validation_s": self.job.validation_s,
            "step": {**step, "alone_s": self.job.step.alone_s, "serial_fraction": self.job.step.serial_fraction},
            "link": None if self.job.link is None else getattr(self.job.link, "name", "measured"),
            "usable_bytes": self.job.usable_bytes,
            "machines": [
                {**asdict(line), "prediction": {**asdict(line.prediction), "efficiency": line.prediction.efficiency}}
                for line in self.lines
            ],
            "enough_machines": self.enough,
            "laws": {str(n): {"amdahl": a, "gustafson": g} for n, (a, g) in self.laws.items()},
            "memory": [{**asdict(strategy), "fits": fit} for strategy, fit in fits],
            "advice": asdict(self.advice),
        }


def look_ahead(job: Job) -> Outlook:
    """Everything that follows from a :class:`Job`."""
    groups = _groups(job)
    lines = tuple(_line(job, speeds) for speeds in groups)
    most = lines[-1]
    link = job.link or _Nothing()
    ways = _memory(job, most.machines)
    told = those_told(ways, [_fits(job, each) for each in ways])
    memory = tuple(ways[place] for place in told)
    fits = tuple(_fits(job, each) for each in memory)
    laws = {
        len(s): (amdahl(job.step.serial_fraction, len(s)), gustafson(job.step.serial_fraction, len(s))) for s in groups
    }
    there = len(groups[-1]) if job.link is not None else 1
    situation = Situation(
        again=not job.once,
        alone_s=job.alone_s,
        fits_one=not fits or fits[0] is not False,
        fits_smaller=_first_that_fits(memory, fits),
        fits_divided=_divided_that_fits(memory, fits),
        machines=there,
        speed_up=job.alone_s / most.training_s,
        exposed=most.prediction.exposed_s / most.prediction.step_s,
        accumulated_speed_up=_accumulated(job, link, groups[-1]),
        enough=enough(job.step, link),
        together=job.together,
        faster="" if job.link is None else faster_than(job.link),
        adapters=job.work is not None and job.work.method != "full",
    )
    return Outlook(job, lines, situation.enough, laws, memory, fits, advise(situation))


def _fits(job: Job, strategy: Strategy) -> bool | None:
    if job.usable_bytes is None:
        return None
    return strategy.rank_bytes * (strategy.ranks if job.shares else 1) <= job.usable_bytes


class _Nothing:
    """No exchange at all."""

    def seconds(self, num_bytes: float, ranks: int) -> float:
        return 0.0


def _groups(job: Job) -> list[tuple[float, ...]]:
    """Speeds of the computers of each line, the first computer first."""
    if len(job.speeds) > 1:
        return [job.speeds[:n] for n in range(1, len(job.speeds) + 1)]
    numbers = job.numbers or (_USUAL if job.link is not None else (1,))
    return [job.speeds * n for n in sorted({1, *numbers})]


def _line(job: Job, speeds: tuple[float, ...]) -> Line:
    found = predict(job.step, job.link or _Nothing(), speeds)
    start = job.start_of(len(speeds))
    validations = job.validations * job.validation_s / sum(speeds)
    training = start + job.first_s + job.steps * found.step_s + validations
    hours, prices = training / 3600 * (1 if job.together else len(speeds)), job.prices
    kwh = None if prices.watts is None else hours * prices.watts / 1000
    costs = [
        *([] if prices.per_hour is None else [hours * prices.per_hour]),
        *([] if prices.per_kwh is None or kwh is None else [kwh * prices.per_kwh]),
    ]
    return Line(len(speeds), found, training, sum(costs) if costs else None, kwh, start, validations)


def _accumulated(job: Job, link: Exchange, speeds: Sequence[float]) -> float:
    """The speed-up for the same tokens if four batches are one."""
    model = job.step.times(_FOUR)
    return _FOUR * job.step.alone_s / predict(model, link, speeds).step_s


def _memory(job: Job, ranks: int) -> tuple[Strategy, ...]:
    if job.blocks is None or job.work is None:
        return ()
    blocks = job.blocks
    found = list(
        strategies(
            job.work,
            blocks,
            ranks,
            min(job.step.bucket_bytes, job.step.gradient_bytes),
            lambda work: job.of(blocks, work),
            quantised=job.quantised,
            together=job.together,
            divides=not job.present_bytes,
        )
    )
    if not job.present_bytes:
        # What the multiples leave out of what was seen is taken to be needed in every other way, too. The steps that
        # were made may not have met the largest batch, so that less than was computed proves nothing.
        more = max(0, job.needed_bytes - found[0].rank_bytes)
        return tuple(replace(each, rank_bytes=each.rank_bytes + more) for each in found)
    # Of a process on a CPU everything counts, and the exchange's buckets beside it.
    made: list[Strategy] = []
    beside = job.of(blocks, job.work).beside
    for each in found:
        arrays = each.rank_bytes - each.parts["buckets"]
        memory = Memory(0, 0, arrays, 0, 0, beside=beside)
        whole = of_process(memory, job.present_bytes, 0) + each.parts["buckets"]
        made.append(replace(each, rank_bytes=whole))
    return tuple(made)


def _first_that_fits(memory: Sequence[Strategy], fits: Sequence[bool | None]) -> str:
    """The flags of the first way for one computer that fits, other than the plain one."""
    ones = [each for each, fit in zip(memory, fits, strict=True) if fit and each.ranks == 1 and each.flags]
    return ones[0].flags if ones else ""


def _divided_that_fits(memory: Sequence[Strategy], fits: Sequence[bool | None]) -> str:
    """The flags of the first way for several that fits; with the optimizer divided, where that is possible."""
    found = [each.flags for each, fit in zip(memory, fits, strict=True) if fit and each.built and each.ranks > 1]
    return next((flags for flags in found if SHARD in flags), found[0] if found else "")
