"""Whether to distribute a training, as a chart of questions: the path that is taken, and what it leads to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from allhands.formatting import format_duration
from allhands.plan.strategies import QUANTISE, SHARD

Outcome = Literal[
    "one machine", "data parallel", "accumulate", "faster link", "smaller", "divide the optimizer", "framework"
]

HOUR_S = 3600.0
# Of a step on two computers: beyond the first an exchange is felt, beyond the second it eats what two save.
_FELT, _EATEN = 0.2, 0.5
_WORTH = 1.3  # of a speed-up
_SETUP_S = 4 * HOUR_S  # what it may take to make several computers ready for the first time


@dataclass(frozen=True)
class Situation:
    """What the chart asks for; times in seconds.

    Attributes:
        again: whether such a training is needed more than once.
        alone_s: of the whole training on one computer.
        fits_one: whether it fits there as it is asked for; ``fits_smaller`` with flags that change no result.
        fits_divided: the flags with which it fits on several, the optimizer's state divided; empty if it never does.
        machines: that there are, or could be.
        speed_up: on all of them; ``exposed`` the part of a step on them that is waiting for the exchange.
        accumulated_speed_up: if four batches' gradients are exchanged as one.
        enough: computers beyond which another saves less than 5 %.
        together: whether the machines are processes of one.
        faster: what to put in place of the link; ``adapters`` whether only small ones are trained and exchanged.
    """

    again: bool
    alone_s: float
    fits_one: bool
    fits_smaller: str
    fits_divided: str
    machines: int
    speed_up: float
    exposed: float
    accumulated_speed_up: float
    enough: int
    together: bool = False
    faster: str = ""
    adapters: bool = False

    @property
    def several(self) -> str:
        """How many there are, in words."""
        return f"{self.machines} {'processes' if self.together else 'machines'}"


@dataclass(frozen=True)
class Question:
    """A station of the chart, and what was found there.

    ``answer`` is yes or no, or the exception by which the path goes elsewhere ("no, but long", "yes, and long").
    """

    text: str
    answer: str
    why: str


@dataclass(frozen=True)
class Advice:
    """Where the path leads.

    Attributes:
        path: questions in the order in which they were asked.
        title: what to do, in a few words; ``reasons`` why, a sentence each.
    """

    path: tuple[Question, ...]
    outcome: Outcome
    title: str
    reasons: tuple[str, ...]


AGAIN = "Is it needed more than once?"
LONG = "Does it take an hour or more on one machine?"
FITS = "Does it fit one machine?"
SMALLER = "Does it fit with flags that save memory?"
MORE = "Are there others to help?"
DIVIDED = "Does it fit with the optimizer divided?"
FAST = "Is the link fast enough?"
LARGER = "Would larger batches pay?"


class _Walk:
    """The questions that were asked so far."""

    def __init__(self) -> None:
        self._path: list[Question] = []
        self.flags = ""  # with which alone it fits

    def ask(self, text: str, yes: bool, why: str, but: str = "", besides: str = "") -> bool:
        """Whether it is so; ``but`` or ``besides`` is why the path does not go where a "no" or "yes" usually leads."""
        answer = f"no{f', but {but}' if but else ''}" if not yes else f"yes{f', and {besides}' if besides else ''}"
        self._path.append(Question(text, answer, why))
        return yes

    def end(self, outcome: Outcome, title: str, *reasons: str) -> Advice:
        if self.flags:
            title, reasons = f"{title}, each with {self.flags}", (_same(self.flags), *reasons)
        return Advice(tuple(self._path), outcome, title, reasons)


def advise(at: Situation) -> Advice:
    """Follow the chart."""
    walk = _Walk()
    saved = max(0.0, at.alone_s * (1 - 1 / max(at.speed_up, 1e-9)))
    large = "" if at.fits_one else "too large"
    again = walk.ask(AGAIN, at.again, _why_again(at, saved), large or ("long" if saved >= _SETUP_S else ""))
    if not again and at.fits_one and saved < _SETUP_S:
        return walk.end(
            "one machine",
            "stay on one machine, and let it run",
            f"a single training would be done {format_duration(saved)} sooner: setting up may take as long",
        )
    long = walk.ask(LONG, at.alone_s >= HOUR_S, f"about {format_duration(at.alone_s)}", large)
    if not long and at.fits_one:
        return walk.end(
            "one machine",
            "stay on one machine",
            "it is done within the hour: "
            + ("what several processes" if at.together else "several computers must be set up, and what they")
            + " would save is not felt",
        )
    pays = at.speed_up >= _WORTH and at.exposed < _EATEN
    if not walk.ask(FITS, at.fits_one, "as it is asked for"):
        if not (
            at.fits_smaller and long and pays and at.machines > 1 and not at.together and (again or saved >= _SETUP_S)
        ):
            return _too_large(at, walk)
        walk.ask(SMALLER, True, at.fits_smaller, besides="long")
        walk.flags = at.fits_smaller
    if not walk.ask(MORE, at.machines > 1, f"{at.machines}"):
        return walk.end("one machine", "stay on one machine", "there is none")
    waiting = f"{100 * at.exposed:.0f} % of a step would be waiting for it"
    if walk.ask(FAST, at.exposed < _FELT, waiting, "it pays" if pays else ""):
        return walk.end("data parallel", "plain data parallel", *_beyond(at))
    if pays:
        return walk.end(
            "data parallel",
            "plain data parallel, knowing that the link takes its part",
            f"{100 * at.exposed:.0f} % of each step is waiting; a faster link would give it back",
            *_beyond(at),
        )
    if walk.ask(LARGER, at.accumulated_speed_up >= _WORTH, f"{as_fast(at.accumulated_speed_up)} with four in one"):
        return walk.end(
            "accumulate",
            "larger batches, or accumulate gradients over several",
            "then ranks exchange a quarter as often: --grad-accumulation-steps 4, or four times --batch-size",
            "a larger batch is another training: look at the validation loss, and raise the learning rate with care",
        )
    better = "; or ".join(filter(None, [at.faster, "" if at.adapters else "LoRA, whose gradients are small"]))
    return walk.end(
        "faster link",
        "stay on one machine until the link is faster",
        f"on {at.several} the training would be {as_fast(at.speed_up)}: the link eats the rest",
        *([better] if better else []),
        "what exchanges rarely (local SGD, DiLoCo) or compressed is another training: DeepSpeed and Horovod have it",
    )


def as_fast(times: float) -> str:
    """A speed-up in words, of which one far below 1 says how many times slower it is."""
    if times >= 0.1:
        return f"{times:.2f} times as fast"
    return f"about {float(f'{1 / max(times, 1e-9):.1g}'):,.0f} times slower"


def _why_again(at: Situation, saved_s: float) -> str:
    if at.again:
        return "as long as you do not say --once"
    if not at.fits_one:
        return "--once; it does not fit one machine as it is"
    return "--once" + (f"; several would save {format_duration(saved_s)}" if saved_s >= _SETUP_S else "")


def _too_large(at: Situation, walk: _Walk) -> Advice:
    if walk.ask(SMALLER, bool(at.fits_smaller), at.fits_smaller or "none of them is enough"):
        return walk.end("smaller", f"one machine, with {at.fits_smaller}", _same(at.fits_smaller))
    several = at.machines > 1
    over = f"over {at.several}" if several else "there is no other machine"
    if walk.ask(DIVIDED, several and bool(at.fits_divided), over):
        return _divided(at, walk)
    return walk.end(
        "framework",
        "a framework that divides the model itself",
        "weights, tensors or layers must be spread over devices: torchtitan or DeepSpeed (ZeRO-3) on NVIDIA GPUs; "
        "SageMaker or Vertex AI where you have none of your own",
        "or a smaller model, LoRA in place of full training, 4 bits (allhands model get MODEL --quantize 4)",
        "what you have goes there: allhands export --to peft for an adapter; data and model are files as they are",
    )


def _same(flags: str) -> str:
    same = "nearly the same (weights in 4 bits are rounded)" if QUANTISE in flags else "the same"
    return f"it computes {same} in less memory"


def _divided(at: Situation, walk: _Walk) -> Advice:
    before, divided, more = at.fits_divided.partition(SHARD)
    if not divided:
        return walk.end(
            "divide the optimizer", "data parallel, each with its share", f"a share takes less memory: {before}"
        )
    return walk.end(
        "divide the optimizer",
        f"data parallel with the optimizer divided{f', and{more}' if more else ''}",
        f"each rank keeps a part of the optimizer's state: {at.fits_divided}",
    )


def _beyond(at: Situation) -> Sequence[str]:
    told = [f"{at.speed_up:.2f} times as fast on {at.several}"]
    if at.enough < at.machines:
        told.append(f"beyond {at.enough} another {'process' if at.together else 'machine'} saves less than 5 %")
    return told
