"""Advice on distributing a training: the path through a chart of questions, and its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from allhands.io.formatting import format_bytes, format_duration
from allhands.plan.pipelines import Pipelined
from allhands.plan.strategies import CHECKPOINT, QUANTISE, SHARD, Way

Outcome = Literal[
    "one machine",
    "data parallel",
    "accumulate",
    "faster link",
    "smaller",
    "divide the optimizer",
    "pipeline",
    "fully sharded",
    "tensor parallel",
    "expert parallel",
    "context parallel",
    "framework",
    "measure again",
]

HOUR_S = 3600.0
# Several computers are advised only if they save at least this part of one computer's time.
SAVED = 0.15
_WORTH = 1.0 / (1.0 - SAVED)  # as a speed-up
# Larger batches change the training: they must make it at least this many times as fast.
_WORTH_ANOTHER = 1.3
_FELT = 0.2  # part of a step from which on the exchange is mentioned
_SETUP_S = 4 * HOUR_S  # time to make several computers ready for the first time


@dataclass(frozen=True)
class Offer:
    """Several computers on which the training fits.

    Attributes:
        machines: number of computers.
        names: names of the computers.
        training_s: seconds of the whole training.
        speed_up: speed-up against one process that has a whole computer.
        exposed: the part of a step in which ranks wait for the exchange.
        accumulated: the speed-up if the gradients of four batches are exchanged as one.
        flags: flags that start the training there.
        more: flags that save memory, a part of ``flags``.
        weights: values for ``--rank-weights``; empty if the computers are equal.
    """

    machines: int
    names: str
    training_s: float
    speed_up: float
    exposed: float
    accumulated: float
    flags: str = ""
    more: str = ""
    weights: tuple[float, ...] = ()

    def fast(self, at: Situation) -> str:
        """Return the speed-up on these computers, in words."""
        return f"{as_fast(self.speed_up)} on {at.several(self.machines)}"


@dataclass(frozen=True)
class Situation:
    """Facts for the questions of the chart; times in seconds.

    Attributes:
        again: True if such a training is needed more than once.
        alone_s: seconds of the whole training on one computer.
        fits_one: True if the training fits one computer as requested.
        fits_smaller: flags with which the training fits one computer; empty if there are none.
        offer: the computers that are worth taking, without a change of the model. If none are: the
            best of several computers. ``None`` if the training does not fit several computers, or
            there are no others.
        machines: number of computers that exist or are imagined.
        enough: number of computers beyond which each further one saves less than 5 %.
        together: True if the machines are processes of one computer.
        imagined: True if the other computers are only imagined.
        faster: a faster link in place of this one, in words.
        adapters: True if only small adapters are trained and exchanged.
        one: the computer that "one machine" means, if they differ.
        unable: computers that cannot hold their share, each with its figures.
        packed: True if gradients are already sent in fewer bytes.
        rows: rows of a batch; 0 if not known.
        kind: kind of processor.
        doubt: reason not to conclude anything; empty if there is none.
        rounded: like ``offer``, but also with weights in 4 bits.
        larger: the computers that gain most if the gradients of four batches are exchanged as one;
            ``None``: those of ``offer``.
        pipeline: several computers that divide the model's blocks, if the model fits no single one.
        parts: several computers that divide arrays, matrices or rows, if the model fits no single
            one.
        inside: several computers that divide matrices, experts or rows, if that takes less time
            than every other way.
    """

    again: bool
    alone_s: float
    fits_one: bool
    fits_smaller: str
    offer: Offer | None
    machines: int
    enough: int
    together: bool = False
    imagined: bool = False
    faster: str = ""
    adapters: bool = False
    one: str = ""
    unable: tuple[str, ...] = ()
    packed: bool = False
    rows: int = 0
    kind: str = ""
    doubt: str = ""
    rounded: Offer | None = None
    larger: Offer | None = None
    pipeline: Pipelined | None = None
    parts: Way | None = None
    inside: Way | None = None

    @property
    def several_hold(self) -> bool:
        """Return whether several computers can hold the model, divided among them."""
        return self.pipeline is not None or self.parts is not None

    @property
    def smaller(self) -> str:
        """Flags with which the training fits one computer.

        Not weights in 4 bits if several computers can hold the model as it is.
        """
        return "" if self.several_hold and QUANTISE in self.fits_smaller else self.fits_smaller

    @property
    def divided(self) -> Offer | None:
        """The offer; none with weights in 4 bits if several computers can hold the model."""
        rounded = self.offer is not None and QUANTISE in f"{self.offer.flags} {self.offer.more}"
        return None if self.several_hold and rounded else self.offer

    @property
    def long(self) -> bool:
        """Return whether one computer takes an hour or more."""
        return self.alone_s >= HOUR_S

    @property
    def saved_s(self) -> float:
        """Return the seconds that several computers save."""
        seconds = [each.training_s for each in (self.offer, self.inside) if each is not None]
        return max(0.0, self.alone_s - min(seconds, default=self.alone_s))

    @property
    def pays(self) -> bool:
        """Return whether several computers save enough time."""
        return (
            self.offer is not None
            and self.offer.speed_up >= _WORTH
            and self.offer.machines <= self.enough
        )

    @property
    def stay(self) -> str:
        """The advice against several, in words."""
        return f"stay on one {'process' if self.together else 'machine'}"

    @property
    def which(self) -> str:
        """The single computer, as an addition to the advice."""
        return f": {self.one}" if self.one else ""

    def several(self, number: int) -> str:
        """Return a number of machines or processes in words."""
        return f"{number} {'processes' if self.together else 'machines'}"


@dataclass(frozen=True)
class Question:
    """A question of the chart, with its answer.

    ``answer`` is yes or no, or an exception that changes the path ("no, but long", "yes, and
    long").
    """

    text: str
    answer: str
    why: str


@dataclass(frozen=True)
class Advice:
    """Advice at the end of the path.

    Attributes:
        path: the questions in their order.
        outcome: the end of the path.
        title: the advice in a few words.
        reasons: a sentence for each reason.
        machines: the advised number of computers.
    """

    path: tuple[Question, ...]
    outcome: Outcome
    title: str
    reasons: tuple[str, ...]
    machines: int = 1


AGAIN = "Is it needed more than once?"
LONG = "Does it take an hour or more on one machine?"
FITS = "Does it fit one machine?"
SMALLER = "Does it fit with flags that save memory?"
MORE = "Are there others to help?"
DIVIDED = "Does it fit if several share each batch?"
STAGES = "Does it fit if the model is divided?"
PAYS = f"Do they save {100 * SAVED:.0f} % of the time or more?"
FAST = "Is the link fast enough?"
LARGER = "Would larger batches pay?"
# For each strategy: the answer of the chart that leads to it, its outcome, and a rank's part in
# words.
_DIVIDED: dict[str, tuple[str, Outcome, str]] = {
    "pipeline": ("by blocks", "pipeline", "each with some of the blocks"),
    "fsdp": ("by arrays", "fully sharded", "each with a part of every array"),
    "tensor": ("by matrices", "tensor parallel", "each with a part of every matrix"),
    "expert": ("by experts", "expert parallel", "each with some of the experts"),
    "context": ("by rows", "context parallel", "each with a part of every row"),
}
_INSIDE = "if they compute rows together"


def _divided_by(way: Way) -> tuple[str, Outcome, str]:
    """Return the entry of :data:`_DIVIDED` for the first strategy of a combined way."""
    first, _, _ = way.strategy.partition("+")
    return _DIVIDED["fsdp" if first == "zero2" else first]


class _Walk:
    """Recorder of the questions that were asked so far."""

    def __init__(self) -> None:
        self._path: list[Question] = []

    def ask(self, text: str, yes: bool, why: str, but: str = "", besides: str = "") -> bool:
        """Record a question, and return the answer ``yes``.

        Args:
            why: reason for the answer.
            but: words after "no" if the path goes on in an unusual way.
            besides: words after "yes" if the path goes on in an unusual way.
        """
        more = f", {besides}" * bool(besides) if yes else f", but {but}" * bool(but)
        answer = f"{'yes' if yes else 'no'}{more}"
        self._path.append(Question(text, answer, why))
        return yes

    def end(self, outcome: Outcome, title: str, *reasons: str, machines: int = 1) -> Advice:
        return Advice(tuple(self._path), outcome, title, tuple(filter(None, reasons)), machines)


def advise(at: Situation) -> Advice:
    """Return the advice: answer the chart's questions until the path ends."""
    walk = _Walk()
    if at.doubt:
        return walk.end(
            "measure again", "no advice: measure again when nothing else computes here", at.doubt
        )
    return _done_soon(at, walk) or _unfit(at, walk) or _helped(at, walk)


def _done_soon(at: Situation, walk: _Walk) -> Advice | None:
    """End if one machine finishes before several are worth it; ``None``: the path goes on."""
    large = "" if at.fits_one else "too large"
    # Processes of one computer need nothing set up.
    worth = "long" if at.saved_s >= _SETUP_S else "nothing to set up" if at.together else ""
    again = walk.ask(
        AGAIN,
        at.again,
        "unless --once is given" if at.again else "--once",
        large or worth,
    )
    if at.fits_one and not (again or worth):
        return walk.end(
            "one machine",
            f"{at.stay}, and let it run",
            _saved(at, "setting up may take as long"),
        )
    long = walk.ask(LONG, at.long, f"about {format_duration(at.alone_s)}", large)
    if at.fits_one and not long:
        return walk.end(
            "one machine",
            at.stay,
            f"it is done within the hour; {_saved(at, 'too little to matter')}",
        )
    return None


def _saved(at: Situation, judged: str) -> str:
    """Return the saving of several computers in words, with a judgement."""
    if at.offer is None and at.inside is None:
        return "no other computer is named"
    if at.saved_s <= 0.0:
        return "several would take longer"
    return f"several would be done {format_duration(at.saved_s)} sooner: {judged}"


def _unfit(at: Situation, walk: _Walk) -> Advice | None:
    """End if one machine cannot hold the training as requested; ``None``: it can, or several
    machines save much time.
    """
    not_so = "" if at.fits_one else "not "
    if walk.ask(FITS, at.fits_one, f"{at.one and f'{at.one}, '}{not_so}as it is asked for"):
        return None
    worth = at.long and at.pays and not at.together and (at.again or at.saved_s >= _SETUP_S)
    if not (at.smaller and worth):
        return _too_large(at, walk)
    walk.ask(SMALLER, True, at.fits_smaller, besides="and long")
    return None


def _helped(at: Situation, walk: _Walk) -> Advice:
    """Return the advice if one machine is enough, by the time that others save."""
    there = (
        f"{'if there were ' if at.imagined else ''}{at.machines} in all"
        if at.machines > 1
        else "none is named"
    )
    if at.offer is None and at.inside is None:
        walk.ask(MORE, False, "not all can hold their share" if at.machines > 1 else there)
        return walk.end("one machine", f"{at.stay}{at.which}", *_why_no_others(at))
    walk.ask(MORE, True, there)
    if at.inside is not None:
        walk.ask(
            PAYS, True, f"{_fast(at, at.inside)} on {at.several(at.inside.ranks)}", besides=_INSIDE
        )
        return _inside(at, at.inside, walk)
    assert at.offer is not None
    little = ", less than 5 % for each" if at.offer.speed_up >= _WORTH and not at.pays else ""
    if walk.ask(PAYS, at.pays, f"{at.offer.fast(at)}{little}"):
        return _data_parallel(at, at.offer, walk)
    return _too_little(at, at.offer, walk)


def _why_no_others(at: Situation) -> tuple[str, ...]:
    """Return why no other computer can help, and the offer with weights in 4 bits, if any."""
    reasons = at.unable or ("no other computer with memory enough is named",)
    if at.rounded is None:
        return reasons
    return (*reasons, f"with weights in 4 bits ({at.rounded.more}) it is {at.rounded.fast(at)}")


def _too_little(at: Situation, offer: Offer, walk: _Walk) -> Advice:
    """End if several computers save too little."""
    waiting = f"ranks would wait for it in {100 * offer.exposed:.0f} % of a step"
    if walk.ask(FAST, offer.exposed < _FELT, waiting):
        one_row = (
            "a batch of one row cannot be divided: --batch-size 2 or more can"
            if at.rows == 1
            else ""
        )
        too_small = f"{offer.fast(at)}: too little to be worth the trouble"
        return walk.end("one machine", f"{at.stay}{at.which}", too_small, one_row)
    larger = at.larger or offer
    four = (
        f"{as_fast(larger.accumulated)} on {at.several(larger.machines)} with four batches a step"
    )
    if walk.ask(LARGER, larger.accumulated >= _WORTH_ANOTHER, four):
        return walk.end(
            "accumulate",
            "larger batches, or gradient accumulation",
            f"as it is: {larger.fast(at)}; {four}",
            "then ranks exchange a quarter as often: --grad-accumulation-steps 4, or four times --batch-size with a "
            "quarter of --iters",
            "a larger batch changes the training: watch the validation loss, and raise the learning rate with care",
            machines=larger.machines,
        )
    # No cable makes processes of one computer exchange faster.
    outcome, title = (
        ("one machine", at.stay)
        if at.together
        else ("faster link", f"{at.stay} until the link is faster")
    )
    faster = "" if at.together else at.faster
    return walk.end(
        outcome,
        title,
        f"{offer.fast(at)}: the {'exchange' if at.together else 'link'} takes the rest",
        "; or ".join(
            filter(None, [faster, "" if at.adapters else "LoRA, whose gradients are small"])
        ),
        ""
        if at.packed
        else "fewer bytes change the result a little: add --compress int8 to this plan to see the time",
        "with --sync-every 50 ranks average weights every 50 steps, which changes the training (docs/slow-links.md)",
    )


def _data_parallel(at: Situation, offer: Offer, walk: _Walk) -> Advice:
    each = f", each with {offer.more}" if offer.more else ""
    fits = (
        _same(offer.more)
        if offer.more
        else f"each machine can hold its share; one machine needs {at.fits_smaller}"
    )
    imagined = (
        "the other machines are imagined: you would need as many of the same kind, and this link"
    )
    beyond = "one more saves less than 5 % of a step, or makes it longer"
    if at.unable and offer.machines < at.enough:
        beyond = "; ".join(at.unable)
    return walk.end(
        "data parallel",
        f"data parallel on {at.several(offer.machines)}{each}",
        "" if at.fits_one and not offer.more else fits,
        f"{offer.fast(at)}: {format_duration(offer.training_s)} in place of {format_duration(at.alone_s)}",
        f"these are {offer.names}" if at.one else "",
        imagined if at.imagined else "",
        f"ranks wait for the link in {100 * offer.exposed:.0f} % of each step"
        if offer.exposed >= _FELT
        else "",
        _weights_told(offer),
        f"not more of them: {beyond}" if offer.machines < at.machines else "",
        machines=offer.machines,
    )


def _weights_told(offer: Offer) -> str:
    if not offer.weights:
        return ""
    numbers = ", ".join(f"{weight:g}" for weight in offer.weights)
    return (
        "shares of a batch follow the computers' speeds as they train (--rank-weights auto), about "
        f"--rank-weights '[{numbers}]' for {offer.names}, in this order"
    )


def as_fast(times: float) -> str:
    """Return a speed-up in words; far below 1 it says how many times slower it is."""
    if times >= 0.1:
        return f"{times:.2f} times as fast"
    return f"about {float(f'{1 / max(times, 1e-9):.1g}'):,.0f} times slower"


def _too_large(at: Situation, walk: _Walk) -> Advice:
    """End if one machine cannot hold the training: with less memory, on several machines, or with
    advice to get more.
    """
    rounded = (
        "only with weights in 4 bits, which are rounded"
        if at.fits_smaller
        else "none of them is enough"
    )
    if walk.ask(SMALLER, bool(at.smaller), at.smaller or rounded):
        slow = (
            f"{at.offer.fast(at)}: not worth the trouble"
            if at.offer is not None and not at.pays
            else ""
        )
        title = f"{at.one or 'one machine'}, with {at.fits_smaller}"
        return walk.end("smaller", title, _same(at.fits_smaller), slow)
    over = "there is no other machine" if at.machines < 2 else f"over {at.several(at.machines)}"
    walk.ask(DIVIDED, at.divided is not None, over)
    if at.divided is not None:
        return _divided(at, at.divided, walk)
    return _model_divided(at, walk) or _nowhere(at, walk, over)


def _model_divided(at: Situation, walk: _Walk) -> Advice | None:
    """End with the fastest way in which several computers divide the model or rows; ``None``: no
    way fits.
    """
    parts, stages = at.parts, at.pipeline
    if stages is not None and (parts is None or stages.training_s <= parts.training_s):
        walk.ask(STAGES, True, f"over {at.several(stages.machines)}")
        return _in_stages(at, stages, walk)
    if parts is not None:
        walk.ask(STAGES, True, f"over {at.several(parts.ranks)}", besides=_divided_by(parts)[0])
        return _in_parts(at, parts, walk)
    return None


def _nowhere(at: Situation, walk: _Walk, over: str) -> Advice:
    """End if the model does not fit these computers in any way."""
    walk.ask(STAGES, False, over)
    where = "more of them may hold it, fully sharded (--strategy fsdp) or as a pipeline"
    if at.kind == "cuda":
        where += "; DeepSpeed (ZeRO-Infinity) keeps weights and states in the computer's memory, or on its disk"
    smaller = "shorter rows (--max-seq-length)" if at.adapters else "LoRA in place of full training"
    return walk.end(
        "framework",
        "more computers, or more memory in them",
        *at.unable,
        f"no strategy fits these machines: {where}",
        f"or a smaller model, {smaller}, 4 bits ({QUANTISE}); or a computer with more memory",
        "you can take your results along: allhands export --to peft converts an adapter; data and model are plain files",
    )


def _same(flags: str) -> str:
    same = "nearly the same (weights in 4 bits are rounded)" if QUANTISE in flags else "the same"
    slower = ", but takes longer" if CHECKPOINT in flags else ""
    return f"it computes {same} in less memory{slower}"


def _divided(at: Situation, offer: Offer, walk: _Walk) -> Advice:
    """End with data parallel on several computers, because of their memory and not for speed."""
    before, divided, more = offer.flags.partition(SHARD)
    title, why = "data parallel, each with its share", f"a share takes less memory: {before}"
    if divided:
        title = f"data parallel with the optimizer divided{f', and{more}' if more else ''}"
        why = f"each rank keeps a part of the optimizer's state: {offer.flags}"
    time = f"{format_duration(offer.training_s)} on {at.several(offer.machines)}; on one it does not fit"
    which = f"these are {offer.names}" if at.one else ""
    return walk.end(
        "divide the optimizer",
        title,
        why,
        time,
        which,
        _weights_told(offer),
        machines=offer.machines,
    )


def _in_stages(at: Situation, found: Pipelined, walk: _Walk) -> Advice:
    """End with a pipeline: the model fits no single computer, but its blocks fit several."""
    waiting = f"bubble: {100 * found.bubble:.0f} % of a step with {found.micro_batches} "
    return walk.end(
        "pipeline",
        f"a pipeline on {at.several(found.machines)}, each with some of the blocks: {found.flags}",
        found.told,
        f"{format_duration(found.training_s)} on {at.several(found.machines)}; on one it does not fit",
        f"{waiting}micro-batches; less with a larger --batch-size, or --pp-schedule interleaved",
        f"on one machine only with {at.fits_smaller}" if at.fits_smaller else "",
        machines=found.machines,
    )


def _fast(at: Situation, way: Way) -> str:
    return as_fast(at.alone_s / way.training_s)


def _in_parts(at: Situation, way: Way, walk: _Walk) -> Advice:
    """End with divided arrays, matrices, experts or rows: the model or a row fits no single
    computer, but its parts fit several.
    """
    other = at.pipeline
    slower = other and f"a pipeline would take {format_duration(other.training_s)}: {other.flags}"
    _, outcome, each = _divided_by(way)
    return walk.end(
        outcome,
        f"{way.name} over {at.several(way.ranks)}, {each}: {way.flags}",
        f"at most {format_bytes(way.rank_bytes)} on a rank; a rank sends {format_bytes(way.sent_bytes)} in a step",
        f"{format_duration(way.training_s)} on {at.several(way.ranks)}; on one it does not fit",
        slower or "",
        f"on one machine only with {at.fits_smaller}" if at.fits_smaller else "",
        machines=way.ranks,
    )


def _inside(at: Situation, way: Way, walk: _Walk) -> Advice:
    """End with divided matrices, experts or rows: one machine is enough, but this way is the
    fastest.
    """
    other = at.offer
    shares = (
        "the batch has too few rows for so many ranks"
        if other is None
        else f"data parallel: {other.fast(at)}"
    )
    _, outcome, each = _divided_by(way)
    return walk.end(
        outcome,
        f"{way.name} over {at.several(way.ranks)}, {each}: {way.flags}",
        f"{_fast(at, way)} on {at.several(way.ranks)}: {format_duration(way.training_s)} in place of "
        f"{format_duration(at.alone_s)}",
        shares,
        "the other machines are imagined: you would need as many of the same kind, and this link"
        if at.imagined
        else "",
        machines=way.ranks,
    )
