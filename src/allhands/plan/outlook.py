"""What is to be expected of a training on one computer and on several: memory, time, cost, and the advice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from allhands.io.formatting import format_bytes
from allhands.plan.advice import Advice, Offer, Situation, advise
from allhands.plan.computers import Computer, Team, alone, fractions, largest, names, ordered, shown
from allhands.plan.job import Job
from allhands.plan.lighter import Lighter, lighter_ways
from allhands.plan.links import faster_than
from allhands.plan.pipelines import Pipelined, best_pipeline, pipelined
from allhands.plan.speed import Prediction, StepModel, amdahl, enough_of, gustafson, predict
from allhands.plan.speed import enough as enough_of_equal
from allhands.plan.strategies import CHECKPOINT, QUANTISE, Way, costs, those_told, ways_of_one, ways_of_team
from allhands.run.training_memory import RING_BYTES, Memory, of_process

_FOUR = 4  # batches whose gradients are exchanged as one


@dataclass(frozen=True)
class OutlookLine:
    """So many computers: a step, the time to the first one, the whole training, and what it costs.

    Attributes:
        validation_s: of all validations, of which each rank computes its share; ``training_s`` has it.
        fits: whether each of them holds its part, without further flags; ``None`` if that is not known.
        weights: for ``--rank-weights``, in the order of ``computers``; empty where shares are equal.
        computers: which they are.
        short: of them those that have too little memory for that.
    """

    machines: int
    prediction: Prediction
    training_s: float
    money: float | None
    kwh: float | None
    start_s: float
    validation_s: float = 0.0
    fits: bool | None = None
    weights: tuple[float, ...] = ()
    computers: str = ""
    short: tuple[str, ...] = ()


@dataclass(frozen=True)
class Outlook:
    """All that is told of a :class:`Job`.

    Attributes:
        lines: by numbers of computers.
        enough: computers beyond which another saves less than 5 % of a step, of all there are where they differ.
        laws: by number of computers, Amdahl's speed-up and Gustafson's, in which nothing is exchanged.
        memory: ways of dividing the work, each with the bytes of a rank: on one computer, then for each line.
        fits: of each of them whether it fits; ``None`` where that is not known.
        alone: the computer that is meant by one.
        alone_s: seconds of the training on it, by a process that has all of it.
        advised: of the lines the number of computers that is advised; 1 where none of several is.
        lighter: what sends less, on as many computers as the last line has, where the link is slow.
        pipelines: the model's blocks divided among several computers, where it does not fit one.
    """

    job: Job
    lines: tuple[OutlookLine, ...]
    enough: int
    laws: dict[int, tuple[float, float]]
    memory: tuple[Way, ...]
    fits: tuple[bool | None, ...]
    advice: Advice
    alone: Computer
    alone_s: float
    advised: int = 1
    lighter: tuple[Lighter, ...] = ()
    pipelines: tuple[Pipelined, ...] = ()

    def line(self, machines: int) -> OutlookLine:
        """That of so many computers."""
        return next(line for line in self.lines if line.machines == machines)

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
            "usable_bytes": largest(self.job.computers).usable_bytes,
            "computers": [computer.as_json() for computer in self.job.computers],
            "alone_s": self.alone_s,
            "doubt": self.job.doubt or None,
            "machines": [
                {**asdict(line), "prediction": {**asdict(line.prediction), "efficiency": line.prediction.efficiency}}
                for line in self.lines
            ],
            "enough_machines": self.enough,
            "advised_machines": self.advised,
            "laws": {str(n): {"amdahl": a, "gustafson": g} for n, (a, g) in self.laws.items()},
            "memory": [{**_plain(strategy), "fits": fit} for strategy, fit in fits],
            "lighter": [asdict(each) for each in self.lighter],
            "pipelines": [asdict(each) for each in self.pipelines],
            "advice": asdict(self.advice),
        }


def _plain(way: Way) -> dict[str, Any]:
    """Each rank's bytes only where they differ."""
    values = asdict(way)
    return values if len(set(way.by_rank)) > 1 else {**values, "by_rank": ()}


def look_ahead(job: Job) -> Outlook:
    """Everything that follows from a :class:`Job`."""
    ones = _with_all(job, _ways_of_one(job))
    first = alone(job.computers, ones[0].rank_bytes if ones else None)
    fits_one = not ones or first.holds(ones[0].rank_bytes) is not False
    order, most = _order(job, first, exact=fits_one)
    enough = _enough(job, order, most)
    groups = [order(number) for number in _numbers(job, most, enough)]
    ways = {len(team): _with_all(job, _ways_of_team(job, team)) for team in groups if len(team) > 1}
    memory = _told(job, ones, (largest(job.computers),))
    lines: list[OutlookLine] = []
    for team in groups:
        mine = memory if len(team) == 1 else _told(job, ways[len(team)], team)
        short = _short(job, mine[0][0], team) if mine and len(team) > 1 else ()
        lines.append(replace(_line(job, team), fits=mine[0][1] if mine else None, short=short))
        memory += mine if len(team) > 1 else []
    serial = job.step.serial_s / lines[0].prediction.step_s
    laws = {
        line.machines: (amdahl(serial, line.prediction.capacity), gustafson(serial, line.prediction.capacity))
        for line in lines
    }
    alone_s = job.alone_s(first.speed)
    pipelines = [] if fits_one else [each for team in groups[1:] if (each := pipelined(job, team)) is not None]
    offers = _offers(job, groups[1:], lines[1:], memory, first.speed)
    # Nobody who can train the model as it is trains another one to be done sooner.
    same = [each for each in offers if QUANTISE not in each.more or not fits_one]
    situation = Situation(
        again=not job.once,
        alone_s=alone_s,
        fits_one=fits_one,
        fits_smaller=_first_that_fits(memory),
        offer=_best(same, min(enough, most)),
        larger=max(same, key=lambda each: each.accumulated, default=None),
        rounded=_best(offers, min(enough, most)),
        machines=most if job.link is not None else 1,
        enough=enough,
        together=job.together,
        imagined=job.imagined,
        faster="" if job.link is None else faster_than(job.link),
        adapters=job.work is not None and job.work.method != "full",
        one=_shown_name(job, first),
        unable=_unable(job, groups[-1], memory, exact=fits_one),
        packed=job.step.packed is not None,
        rows=job.batch_rows,
        kind=job.kind,
        doubt=job.doubt,
        pipeline=best_pipeline(pipelines),
    )
    advice = advise(situation)
    several = advice.outcome in ("data parallel", "divide the optimizer", "accumulate")
    taken = (advice.outcome == "accumulate" and situation.larger) or situation.offer
    advised = taken.machines if several and taken else 1
    if advice.outcome == "pipeline" and situation.pipeline is not None:
        advised = situation.pipeline.machines
    told, fits = tuple(way for way, _ in memory), tuple(fit for _, fit in memory)
    speeds = [each.speed for each in groups[-1]]
    lighter = lighter_ways(job.step, job.link or _Nothing(), speeds, job.room, job.kind)
    more = (tuple(lighter), tuple(pipelines))
    return Outlook(job, tuple(lines), enough, laws, told, fits, advice, first, alone_s, advised, *more)


class _Nothing:
    """No exchange at all."""

    def seconds(self, num_bytes: float, ranks: int) -> float:
        return 0.0


# --- computers ----------------------------------------------------------------------------------------


def _order(job: Job, first: Computer, *, exact: bool) -> tuple[Callable[[int], Team], int]:
    """The first so many computers, and how many there are at most.

    Args:
        exact: whether weights in 4 bits are out of the question.
    """
    if len(job.computers) == 1:
        numbers = job.numbers or (1,)
        return lambda number: job.computers * number, max(numbers)
    able = _able(job, exact=exact)
    team = ordered(job.computers, first, lambda each: able.get(each, True))
    return lambda number: team[:number], len(team)


def _able(job: Job, *, exact: bool) -> dict[Computer, bool]:
    """Whether each computer holds its share of a batch that is divided among all, in any way."""
    ways = [way for way in _with_all(job, _ways_of_team(job, job.computers)) if _is_open(way, exact=exact)]
    return {
        each: not ways or any(each.holds(way.by_rank[place]) is not False for way in ways)
        for place, each in enumerate(job.computers)
    }


def _is_open(way: Way, *, exact: bool) -> bool:
    return way.built and not (exact and QUANTISE in way.flags)


def _numbers(job: Job, most: int, enough: int) -> list[int]:
    """Of computers, that have a line."""
    if job.numbers and len(job.computers) == 1:
        return sorted({1, *job.numbers, *({enough} if enough <= most else ())})
    return sorted({*shown(most), *({enough} if enough <= most else ())})


def _enough(job: Job, order: Callable[[int], Team], most: int) -> int:
    """Computers beyond which each further one saves less than 5 % of a step's time."""
    link = job.link or _Nothing()
    if len({(each.speed, each.usable_bytes) for each in job.computers}) == 1:
        return enough_of_equal(job.step, link, job.room) if job.room else enough_of_equal(job.step, link)
    seconds = {
        number: predict(job.step, link, [each.speed for each in order(number)]).step_s for number in range(1, most + 1)
    }
    return enough_of(seconds)


def _line(job: Job, team: Team) -> OutlookLine:
    speeds = [each.speed for each in team]
    found = predict(job.step, job.link or _Nothing(), speeds, job.room)
    start = job.start_of(len(team))
    validations = job.validations * job.validation_s / (found.capacity * max(speeds))
    training = start + job.first_s + job.steps * found.step_s + validations
    prices, hours = job.prices, training / 3600
    computers = 1.0 if job.together else sum(each.part for each in team)
    watts = [job.prices.watts if each.watts is None else each.watts for each in team]
    power = [(each or 0.0) * part.part for each, part in zip(watts, team, strict=True)]
    kwh = None if None in watts else hours * (power[0] if job.together else sum(power)) / 1000
    costs = [
        *([] if prices.per_hour is None else [hours * computers * prices.per_hour]),
        *([] if prices.per_kwh is None or kwh is None else [kwh * prices.per_kwh]),
    ]
    weights = tuple(round(speed / min(speeds), 2) for speed in speeds) if len(set(speeds)) > 1 else ()
    money = sum(costs) if costs else None
    return OutlookLine(len(team), found, training, money, kwh, start, validations, None, weights, names(team))


# --- memory -------------------------------------------------------------------------------------------


def _ways_of_one(job: Job) -> list[Way]:
    if job.blocks is None or job.work is None:
        return []
    blocks = job.blocks
    return list(ways_of_one(job.work, lambda work: job.of(blocks, work), quantised=job.quantised))


def _ways_of_team(job: Job, team: Sequence[Computer]) -> list[Way]:
    if job.blocks is None or job.work is None or len(team) < 2:
        return []
    blocks, rows = job.blocks, job.batch_rows
    # No rank gets a part of a row.
    shares = [math.ceil(rows * part - 1e-9) / rows if rows else part for part in fractions(team)]
    return list(
        ways_of_team(
            job.work,
            blocks,
            shares,
            min(job.step.bucket_bytes, job.step.gradient_bytes),
            lambda work: job.of(blocks, work),
            quantised=job.quantised,
            together=job.together,
            divides=not job.present_bytes,
            scatters=job.step.overlapped,
            rounds=job.rounds,
        )
    )


def _with_all(job: Job, ways: list[Way]) -> list[Way]:
    """With all that counts besides arrays."""
    if not ways or job.blocks is None or job.work is None:
        return ways
    if not job.present_bytes:
        # What the multiples leave out of what was seen is taken to be needed in every other way, too. The steps that
        # were made may not have met the largest batch, so that less than was computed proves nothing.
        more = max(0, job.needed_bytes - job.of(job.blocks, job.work).arrays)
        return [each.with_bytes(lambda known: known + more) for each in ways]
    # Of a process on a CPU everything counts, and the exchange's buckets beside it.
    beside = job.of(job.blocks, job.work).beside
    made: list[Way] = []
    for each in ways:
        buckets = each.parts["buckets"]
        ring = RING_BYTES if each.ranks > 1 else 0

        def whole(known: int, buckets: int = buckets, ring: int = ring) -> int:
            arrays = Memory(0, 0, known - buckets, 0, 0, beside=beside)
            return of_process(arrays, job.present_bytes, 0) + buckets + ring

        made.append(each.with_bytes(whole))
    return made


_Ways = list[tuple[Way, bool | None]]


def _told(job: Job, ways: list[Way], team: Team) -> _Ways:
    """Those that are worth telling, and whether each fits."""
    fits = [_fits(job, each, team) for each in ways]
    places = set(those_told(ways, fits))
    if len(team) > 1:
        places |= {*_chosen(ways, fits)}
    return [(ways[place], fits[place]) for place in sorted(places)]


def _chosen(ways: Sequence[Way], fits: Sequence[bool | None]) -> list[int]:
    """The place of the way that costs the least of those that are here and fit; empty if none does."""
    able = [place for place, (way, fit) in enumerate(zip(ways, fits, strict=True)) if way.built and fit is not False]
    return sorted(able, key=lambda place: costs(ways[place]))[:1]


def _fits(job: Job, way: Way, team: Team) -> bool | None:
    if job.shares:
        return team[0].holds(way.rank_bytes * way.ranks)
    found = [each.holds(num_bytes) for each, num_bytes in zip(team, way.by_rank, strict=True)]
    return False if False in found else None if None in found else True


def _first_that_fits(memory: _Ways) -> str:
    """The flags of the first way for one computer that fits, other than the plain one."""
    return next((way.flags for way, fit in memory if fit and way.ranks == 1 and way.flags), "")


def _shown_name(job: Job, computer: Computer) -> str:
    """Which computer is meant, where there is more than one kind."""
    return computer.name if len({each.name for each in job.computers}) > 1 else ""


def _short(job: Job, way: Way, team: Team) -> tuple[str, ...]:
    """The computers that do not hold their part, where that is a matter of each."""
    if job.shares:
        return ()
    pairs = zip(team, way.by_rank, strict=True)
    return tuple(dict.fromkeys(each.name for each, num_bytes in pairs if each.holds(num_bytes) is False))


def _unable(job: Job, team: Team, memory: _Ways, *, exact: bool) -> tuple[str, ...]:
    """Computers that cannot take part, each with what its share takes at least and what it has."""
    ways = [way for way, _ in memory if way.ranks == len(team) > 1 and _is_open(way, exact=exact)]
    if not ways or job.shares:
        return ()
    found: dict[str, None] = {}
    for place, each in enumerate(team):
        if all(each.holds(way.by_rank[place]) is False for way in ways):
            least = min(way.by_rank[place] for way in ways)
            has = format_bytes(each.usable_bytes or 0)
            found[f"{each.name}: its share takes {format_bytes(least)} at least, and it has {has}"] = None
    return tuple(found)


# --- what is offered ----------------------------------------------------------------------------------


def _offers(
    job: Job, groups: Sequence[Team], lines: Sequence[OutlookLine], memory: _Ways, one_speed: float
) -> list[Offer]:
    """Each number of several computers on which it fits, with the flags that it takes there."""
    made: list[Offer] = []
    link, alone_s = job.link or _Nothing(), job.alone_s(one_speed)
    for team, line in zip(groups, lines, strict=True):
        ways = [(way, fit) for way, fit in memory if way.ranks == len(team)]
        chosen = _chosen([way for way, _ in ways], [fit for _, fit in ways])
        if ways and not chosen:
            continue
        way = ways[chosen[0]][0] if chosen else None
        training_s = line.training_s
        if way is not None and CHECKPOINT in way.flags:  # the passes take longer
            slower = predict(_longer(job.step, job.again_s), link, [each.speed for each in team], job.room)
            training_s += job.steps * (slower.step_s - line.prediction.step_s)
        step, four = line.prediction, job.step.times(_FOUR)
        speeds = [each.speed for each in team]
        made.append(
            Offer(
                machines=len(team),
                names=names(team),
                training_s=training_s,
                speed_up=alone_s / training_s,
                exposed=step.exposed_s / step.step_s,
                # The speed-up if four batches are one, here and on one computer.
                accumulated=job.alone_step_s(one_speed, _FOUR) / predict(four, link, speeds, job.room).step_s,
                flags="" if way is None else way.flags,
                more="" if way is None else way.more,
                weights=line.weights,
            )
        )
    return made


def _longer(step: StepModel, times: float) -> StepModel:
    return replace(step, token_s=step.token_s * times)


def _best(offers: Sequence[Offer], enough: int) -> Offer | None:
    """That with as many as are enough, or the most below; where one computer is enough, the quickest of several."""
    found = [each for each in offers if each.machines <= enough]
    if found:
        return max(found, key=lambda each: each.machines)
    return min(offers, key=lambda each: each.training_s, default=None)
