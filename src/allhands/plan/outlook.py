"""Predictions for a training on one computer and on several: memory, time, cost, and advice."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from allhands.io.formatting import format_bytes
from allhands.parallel.costs import Memory, Work
from allhands.plan.advice import Advice, Offer, Situation, advise
from allhands.plan.asked import best_divided, divided_ways
from allhands.plan.computers import (
    Computer,
    Team,
    all_hold,
    alone,
    fractions,
    largest,
    names,
    ordered,
    shown,
)
from allhands.plan.job import Job
from allhands.plan.lighter import Lighter, lighter_ways
from allhands.plan.links import Link, faster_than
from allhands.plan.meshes import PlannedRanks
from allhands.plan.pipelines import FEWER, Pipelined, best_pipeline, pipelined
from allhands.plan.speed import Prediction, enough, laws, predict
from allhands.plan.strategies import (
    CHECKPOINT,
    QUANTISE,
    Setting,
    Way,
    all_ways,
    cheapest,
    those_told,
)
from allhands.run.training_memory import DecoderShape

_FOUR = 4  # number of batches whose gradients are exchanged as one
_MOST = 1024  # most computers for which a step is predicted
_INSIDE = {"tensor", "context", "expert"}  # ways in which ranks compute rows together
_NO_LINK = Link("", math.inf, 0.0)


@dataclass(frozen=True)
class OutlookLine:
    """Prediction for ``machines`` computers: a step, the whole training in seconds, and its costs.

    Attributes:
        money: price of the training; ``None`` if not known.
        kwh: kilowatt hours of the training; ``None`` if not known.
        start_s: seconds until the first step, included in ``training_s``.
        validation_s: seconds of all validations, of which each rank computes its share; included in
            ``training_s``.
        fits: True if each computer holds its part, without further flags; ``None`` if that is not
            known.
        weights: values for ``--rank-weights``, in the order of ``computers``; empty if shares are
            equal.
        computers: names of the computers.
        short: names of the computers that have too little memory.
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
    """Everything that follows from a :class:`Job`.

    Attributes:
        lines: one prediction for each number of computers.
        enough: number of computers beyond which another saves less than 5 % of a step; all of them
            if they differ.
        memory: ways of dividing the work, each with the bytes of a rank: on one computer, then for
            each line.
        alone: the computer that "one computer" means.
        alone_s: seconds of the training by one process that has this whole computer.
        lighter: ways to send less, on the computers of the last line, if the link is slow.
        pipelines: pipelines of several computers, if the model does not fit one computer or a
            pipeline was requested.
    """

    job: Job
    lines: tuple[OutlookLine, ...]
    enough: int
    memory: tuple[Way, ...]
    advice: Advice
    alone: Computer
    alone_s: float
    lighter: tuple[Lighter, ...] = ()
    pipelines: tuple[Pipelined, ...] = ()

    @property
    def advised(self) -> int:
        """The advised number of computers; one of :attr:`lines` has it."""
        return self.advice.machines

    def line(self, machines: int) -> OutlookLine:
        """Return the line for ``machines`` computers."""
        return next(line for line in self.lines if line.machines == machines)

    @property
    def laws(self) -> dict[int, dict[str, float]]:
        """Speed-ups by Amdahl's and Gustafson's laws, by number of computers."""
        serial = self.job.step.serial_s / self.lines[0].prediction.step_s
        return {line.machines: laws(serial, line.prediction.capacity) for line in self.lines}

    def as_json(self) -> dict[str, Any]:
        """Return plain values, in seconds and bytes."""
        job, step = self.job, self.job.step
        return {
            **{
                name: getattr(job, name)
                for name in ("steps", "start_s", "first_s", "validations", "validation_s")
            },
            "one_process_s": job.whole_s,
            "step": {
                **asdict(step),
                "alone_s": step.alone_s,
                "serial_fraction": step.serial_fraction,
            },
            "link": None if job.link is None else getattr(job.link, "name", "measured"),
            "usable_bytes": largest(job.computers).usable_bytes,
            "computers": [asdict(computer) for computer in job.computers],
            "alone_s": self.alone_s,
            "doubt": job.doubt or None,
            "machines": [
                {
                    **asdict(line),
                    "prediction": {
                        **asdict(line.prediction),
                        "efficiency": line.prediction.efficiency,
                    },
                }
                for line in self.lines
            ],
            "enough_machines": self.enough,
            "advised_machines": self.advised,
            "laws": self.laws,
            "memory": [_plain(way) for way in self.memory],
            "lighter": [asdict(each) for each in self.lighter],
            "pipelines": [asdict(each) for each in self.pipelines],
            "advice": asdict(self.advice),
        }


def _plain(way: Way) -> dict[str, Any]:
    """Return plain values of a way; with each rank's bytes only if they differ."""
    values = asdict(way)
    return values if len(set(way.by_rank)) > 1 else {**values, "by_rank": ()}


def look_ahead(job: Job) -> Outlook:
    """Return all predictions and the advice for a :class:`Job`."""
    return _Planner(job).outlook()


class _Planner:
    """Planner of a job; it has the computers in the order in which they are added."""

    def __init__(self, job: Job) -> None:
        self.job, self.link = job, job.link or _NO_LINK
        self.ones = self._ways((largest(job.computers),))
        self.told = those_told(self.ones)
        needed = self.ones[0].rank_bytes if self.ones else None
        self.first = alone(job.computers, needed)
        # If the model fits one computer as it is, weights in 4 bits are not planned: they would
        # change the model only to be faster.
        self.fits_one = needed is None or self.first.holds(needed) is not False
        self.alone_s = job.alone_s(self.first.speed)
        if len(job.computers) == 1:
            self.most = max(job.numbers or (1,))
        else:
            self.most = len(job.computers)
            self._order = ordered(job.computers, self.first, self._able())
        self.enough = self._enough()

    def outlook(self) -> Outlook:
        """Return all predictions, with the advice."""
        job = self.job
        teams = [self._team(number) for number in self._numbers()]
        lines: list[OutlookLine] = []
        ways: list[Sequence[Way]] = []
        for team in teams:
            told = those_told(self._ways(team)) if len(team) > 1 else self.told
            line = self._line(team, told)
            lines.append(line)
            ways.append([self._timed(way, line) for way in told])
        pipelines = self._pipelines(teams[1:])
        divided = [way for team in teams for way in self._divided(team)]
        situation = self._situation(teams, lines, ways, pipelines)
        situation = replace(situation, **self._parts(divided, situation))
        speeds, lighter = [each.speed for each in teams[-1]], list[Lighter]()
        if job.asked is None:  # else ranks do not exchange whole gradients
            lighter = lighter_ways(job.step, self.link, speeds, job.room, job.kind)
        return Outlook(
            job=job,
            lines=tuple(lines),
            enough=self.enough,
            memory=(*(way for some in ways for way in some), *divided),
            advice=advise(situation),
            alone=self.first,
            alone_s=self.alone_s,
            lighter=tuple(lighter),
            pipelines=tuple(pipelines),
        )

    def _situation(
        self,
        teams: Sequence[Team],
        lines: Sequence[OutlookLine],
        ways: Sequence[Sequence[Way]],
        pipelines: Sequence[Pipelined],
    ) -> Situation:
        job, each_has = self.job, zip(teams[1:], lines[1:], ways[1:], strict=True)
        offers = [offer for each in each_has if (offer := self._offer(*each)) is not None]
        same = [each for each in offers if self._is_open(each.more)]
        enough = min(self.enough, self.most)
        return Situation(
            again=not job.once,
            alone_s=self.alone_s,
            fits_one=self.fits_one,
            fits_smaller=next((way.flags for way in self.told if way.fits and way.flags), ""),
            offer=_best(same, enough),
            larger=max(same, key=lambda each: each.accumulated, default=None),
            rounded=_best(offers, enough),
            machines=self.most if job.link is not None else 1,
            enough=self.enough,
            together=job.together,
            imagined=job.imagined,
            faster="" if job.link is None else faster_than(job.link),
            adapters=job.work is not None and job.work.method != "full",
            one=self.first.name if job.mixed else "",
            unable=self._unable(teams[-1], ways[-1]),
            packed=job.step.packed is not None,
            rows=job.batch_rows,
            kind=job.kind,
            doubt=job.doubt,
            pipeline=None if self.fits_one else best_pipeline(pipelines),
        )

    # --- computers --------------------------------------------------------------------------------

    def _team(self, number: int) -> Team:
        """Return the first ``number`` computers, or ``number`` times the only one."""
        return self.job.computers * number if len(self.job.computers) == 1 else self._order[:number]

    def _able(self) -> Callable[[Computer], bool]:
        """Return a function that tells whether a computer, in any way of dividing the work among
        all computers, holds its part.
        """
        team = self.job.computers
        ways = [way for way in self._ways(team) if self._is_open(way.flags)] + self._divided(team)
        places = {each: place for place, each in enumerate(self.job.computers)}
        return lambda each: (
            not ways or any(each.holds(way.by_rank[places[each]]) is not False for way in ways)
        )

    def _is_open(self, flags: str) -> bool:
        return not (self.fits_one and QUANTISE in flags)

    def _numbers(self) -> list[int]:
        """Return the numbers of computers that have a line."""
        asked = (
            {1, *self.job.numbers}
            if self.job.numbers and len(self.job.computers) == 1
            else {*shown(self.most)}
        )
        return sorted(asked | ({self.enough} if self.enough <= self.most else set()))

    def _enough(self) -> int:
        """Return the number of computers beyond which each further one saves less than 5 % of a
        step's time.
        """
        job, limit = self.job, self.most
        if equal := len({(each.speed, each.usable_bytes) for each in job.computers}) == 1:
            limit = max(1, min(job.room or _MOST, job.step.rows))

        def step_s(number: int) -> float:
            speeds = [1.0] * number if equal else [each.speed for each in self._team(number)]
            return predict(job.step, self.link, speeds).step_s

        return enough({number: step_s(number) for number in range(1, limit + 1)})

    def _line(self, team: Team, ways: Sequence[Way]) -> OutlookLine:
        job = self.job
        speeds = [each.speed for each in team]
        found = predict(job.step, self.link, speeds, job.room)
        start_s = job.start_of(len(team))
        validations_s = job.validations * job.validation_s / (found.capacity * max(speeds))
        training_s = start_s + job.first_s + job.steps * found.step_s + validations_s
        # Processes of one computer have one price.
        money, kwh = job.prices.costs(team[:1] if job.together else team, training_s / 3600)
        return OutlookLine(
            machines=len(team),
            prediction=found,
            training_s=training_s,
            money=money,
            kwh=kwh,
            start_s=start_s,
            validation_s=validations_s,
            fits=ways[0].fits if ways else None,
            weights=tuple(round(speed / min(speeds), 2) for speed in speeds)
            if len(set(speeds)) > 1
            else (),
            computers=names(team),
            short=self._short(team, ways),
        )

    def _short(self, team: Team, ways: Sequence[Way]) -> tuple[str, ...]:
        """Return the names of computers with too little memory for their share without further
        flags.
        """
        if not ways or len(team) == 1 or self.job.shares:
            return ()
        pairs = zip(team, ways[0].by_rank, strict=True)
        return tuple(
            dict.fromkeys(each.name for each, needed in pairs if each.holds(needed) is False)
        )

    # --- memory -----------------------------------------------------------------------------------

    def _ways(self, team: Team) -> list[Way]:
        """Return all ways in which these computers divide batches, and whether each way fits."""
        job = self.job
        if job.blocks is None or job.work is None:
            return []
        held = self._needs(team, job.blocks, job.work)
        setting = Setting(
            of=partial(job.of, job.blocks),
            needed=held.needed,
            quantised=job.quantised,
            bucket_bytes=held.bucket_bytes,
            together=job.together,
            divides=not job.present_bytes or job.compiled,
            scatters=job.step.overlapped,
            rounds=job.rounds,
        )
        return [self._held_to(way, team) for way in all_ways(job.work, held.shares, setting)]

    def _needs(self, team: Team, blocks: DecoderShape, work: Work) -> PlannedRanks:
        """Return the facts from which the memory of each of these computers follows."""
        job = self.job
        # A measured need beyond the computed one is added to every other way, too. A smaller
        # measured need proves nothing: the measured steps may not have met the largest batch.
        seen = job.of(blocks, work)
        more = max(0, job.needed_bytes - job.of_rank(seen))

        def needed(memory: Memory, ranks: int) -> int:
            backend = job.backend_bytes if job.present_bytes and ranks > 1 else 0
            # Compiled steps of a CPU hold old and new values of what a rank updates.
            part = memory.optimizer / seen.optimizer if job.compiled and seen.optimizer else 1.0
            return job.of_rank(memory) + int(part * more) + backend

        rows = job.batch_rows
        # No rank gets a part of a row.
        shares = [
            math.ceil(rows * part - 1e-9) / rows if rows else part for part in fractions(team)
        ]
        return PlannedRanks(needed, min(job.step.bucket_bytes, job.step.gradient_bytes), shares)

    def _divided(self, team: Team) -> list[Way]:
        """Return the ways in which these computers divide arrays, matrices, experts or token
        positions, and whether each fits.

        Combined ways are added only if no single way fits.
        """
        job = self.job
        if job.blocks is None or job.work is None:
            return []
        held = self._needs(team, job.blocks, job.work)
        ways = [self._held_to(way, team) for way in divided_ways(job, team, self.link, held)]
        if ways and not any(way.fits for way in ways):
            both = divided_ways(job, team, self.link, held, together=True)
            ways += [self._held_to(way, team) for way in both]
        return ways

    def _timed(self, way: Way, line: OutlookLine) -> Way:
        """Return a way in which all ranks have the model, with its time, if its flags do not change
        the time.
        """
        if way.ranks == 1 or way.combined or QUANTISE in way.flags:
            return way
        more = 0.0
        if (
            way.strategy == "zero1" and not self.job.step.overlapped
        ):  # an all-gather of new weights takes half as long as a sum of them
            more = self.link.seconds(self.job.step.gradient_bytes, way.ranks) / 2
        step_s = line.prediction.step_s + more
        return replace(way, step_s=step_s, training_s=line.training_s + self.job.steps * more)

    def _pipelines(self, teams: Sequence[Team]) -> list[Pipelined]:
        """Return the pipelines of these computers, if no single computer is enough or a pipeline
        was requested.
        """
        if self.fits_one and not self.job.wants_stages:
            return []
        return [each for team in teams if (each := pipelined(self.job, team)) is not None]

    def _parts(self, ways: Sequence[Way], at: Situation) -> dict[str, Way | None]:
        """Return the best way that divides more than a batch, as a field of :class:`Situation`.

        It is ``parts`` if the training does not fit one computer. Otherwise it is ``inside``, and
        must save enough time.
        """
        if self.job.link is None:
            return {}
        if not self.fits_one:
            return {"parts": best_divided(ways)}
        best = best_divided([way for way in ways if _INSIDE & {*way.strategy.split("+")}])
        least = self.alone_s if at.offer is None else min(self.alone_s, at.offer.training_s)
        return {"inside": None if best is None or best.training_s > FEWER * least else best}

    def _held_to(self, way: Way, team: Team) -> Way:
        if self.job.shares:
            return replace(way, fits=team[0].holds(way.rank_bytes * way.ranks))
        return replace(way, fits=all_hold(team, way.by_rank))

    def _unable(self, team: Team, ways: Sequence[Way]) -> tuple[str, ...]:
        """Return a text for each computer that cannot take part: the least bytes of its share, and
        its memory.
        """
        ways = [way for way in ways if self._is_open(way.flags)]
        if not ways or self.job.shares or len(team) < 2:
            return ()
        found: list[str] = []
        for place, each in enumerate(team):
            least = min(way.by_rank[place] for way in ways)
            if each.holds(least) is False:
                has = format_bytes(each.usable_bytes or 0)
                found.append(
                    f"{each.name}: its share takes {format_bytes(least)} at least, and it has {has}"
                )
        return tuple(dict.fromkeys(found))

    # --- offers -----------------------------------------------------------------------------------

    def _offer(self, team: Team, line: OutlookLine, ways: Sequence[Way]) -> Offer | None:
        """Return the offer to train on these computers, with the needed flags; ``None`` if the
        training does not fit them.
        """
        way = cheapest(ways)
        if ways and way is None:
            return None
        job, speeds, step = self.job, [each.speed for each in team], line.prediction
        training_s = line.training_s
        if way is not None and CHECKPOINT in way.flags:  # the passes take longer
            longer = replace(job.step, token_s=job.step.token_s * job.again_s)
            training_s += job.steps * (
                predict(longer, self.link, speeds, job.room).step_s - step.step_s
            )
        four = predict(job.step.times(_FOUR), self.link, speeds, job.room)
        return Offer(
            machines=len(team),
            names=line.computers,
            training_s=training_s,
            speed_up=self.alone_s / training_s,
            exposed=step.exposed_s / step.step_s,
            # The speed-up if both these computers and one computer exchange four batches as one.
            accumulated=job.alone_step_s(self.first.speed, _FOUR) / four.step_s,
            flags="" if way is None else way.flags,
            more="" if way is None else way.more,
            weights=line.weights,
        )


def _best(offers: Sequence[Offer], enough: int) -> Offer | None:
    """Return the offer with the most computers, up to ``enough``; if there is none, the fastest."""
    found = [each for each in offers if each.machines <= enough]
    if found:
        return max(found, key=lambda each: each.machines)
    return min(offers, key=lambda each: each.training_s, default=None)
