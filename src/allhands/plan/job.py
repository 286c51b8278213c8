"""The training that ``allhands plan`` plans: its measured or described facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from allhands.config.schema import TrainConfig
from allhands.parallel.rounds import Rounds
from allhands.plan.computers import Computer
from allhands.plan.dividing import Dividing
from allhands.plan.links import ExchangeTimes
from allhands.plan.speed import StepModel
from allhands.run.training_memory import BACKEND_BYTES, DecoderShape, Memory, Work, of_process


@dataclass(frozen=True)
class Prices:
    """Costs of an hour of a computer; ``None`` if they are not known.

    Attributes:
        per_hour: price of an hour of a whole computer.
        watts: power of a computer during training, if the computer itself has no figure.
        per_kwh: price of a kilowatt hour.
    """

    per_hour: float | None = None
    watts: float | None = None
    per_kwh: float | None = None

    def costs(
        self, computers: Sequence[Computer], hours: float
    ) -> tuple[float | None, float | None]:
        """Return the money and the kilowatt hours for ``hours`` on these computers; ``None`` if not
        known.
        """
        watts = [self.watts if each.watts is None else each.watts for each in computers]
        power = [
            each * one.part for each, one in zip(watts, computers, strict=True) if each is not None
        ]
        kwh = hours * sum(power) / 1000 if len(power) == len(computers) else None
        paid = (
            []
            if self.per_hour is None
            else [hours * sum(each.part for each in computers) * self.per_hour]
        )
        paid += [] if self.per_kwh is None or kwh is None else [kwh * self.per_kwh]
        return sum(paid) if paid else None, kwh


@dataclass(frozen=True)
class SmallPasses:
    """A step of one process that cuts a batch into micro-batches as a pipeline does.

    Attributes:
        tokens: tokens of the largest micro-batch, padding included.
        limit: most tokens that a micro-batch was allowed to have.
        longest: tokens of the longest row; 0 if a person has set the size of micro-batches for any
            number of stages.
        batches: number of micro-batches of this step.
        usual: number of micro-batches of a step as one process usually cuts it.
        seconds: seconds of the step.
    """

    tokens: int
    limit: int
    longest: int
    batches: int
    usual: int
    seconds: float


@dataclass(frozen=True)
class Job:
    """The training that is planned.

    Attributes:
        steps: optimizer updates of the training.
        start_s: seconds until the first update, for one process.
        step: model of a step's time on a computer of speed 1.
        link: link between computers; ``None`` if there is no second one.
        computers: all computers.
        numbers: numbers of computers to show, if ``computers`` has only one.
        imagined: True if these ``numbers`` of computers are only imagined.
        blocks: blocks of the model; ``None`` if it is not built of equal blocks.
        work: work of one rank, with the whole batch in micro-batches as one computer cuts it.
        of: function that returns the memory of a rank's arrays, by blocks and work.
        batch_rows: rows of a batch, which cannot be cut further; 0 if not known.
        present_bytes: bytes of a process on a CPU besides the arrays of its training; 0 on a GPU.
        needed_bytes: measured need of steps of ``work`` on a GPU, or of a process on a CPU if MLX
            compiles its passes; 0 if none were made.
        quantised: True if the weights are quantised.
        once: True if the training is needed only once.
        together: True if the ranks are processes of one computer, with one price.
        shares: True if the ranks of one computer share its memory; False if each has a GPU.
        room: number of processes for which the cores of the one computer suffice; more processes
            take turns; 0: each has cores of its own.
        started: a number of ranks, and the measured seconds until their first step.
        whole_s: seconds of a step by one process with a whole computer, if ``step`` is of one of
            several that share it.
        first_s: additional seconds of the first steps, all together.
        validations: number of validations of the whole training.
        validation_s: seconds of each validation on one computer.
        doubt: reason why the measurements cannot be trusted; empty if they can.
        about: the training in a few words.
        again_s: time of a step with recomputed activations, relative to one without.
        rounds: rounds of local steps, or of one step with a delay, if requested.
        kind: kind of processor.
        tied: True if the model's embedding is also its head.
        forms: for each form in which a rank may hold quantised weights, the fastest first: bytes of
            a block, and of an embedding; empty if all weights take the same bytes.
        small: a step in small micro-batches, if one was measured.
        dividing: further ways of dividing the model; ``None``: none is planned.
        wants_stages: True if pipelines are planned even if one computer is enough.
        asked: the training's options, if they ask for a way of dividing the model or its rows.
        backend: the back-end, if it is known; empty: that of the link.
        compiled: True if MLX compiles the passes on a CPU, which then has no native operations.
    """

    steps: int
    start_s: float
    step: StepModel
    link: ExchangeTimes | None
    computers: tuple[Computer, ...]
    numbers: tuple[int, ...]
    blocks: DecoderShape | None
    work: Work | None
    of: Callable[[DecoderShape, Work], Memory]
    imagined: bool = False
    batch_rows: int = 0
    present_bytes: int = 0
    needed_bytes: int = 0
    quantised: bool = False
    once: bool = False
    prices: Prices = Prices()
    together: bool = False
    shares: bool = False
    room: int = 0
    started: tuple[int, float] | None = None
    first_s: float = 0.0
    whole_s: float | None = None
    validations: int = 0
    validation_s: float = 0.0
    doubt: str = ""
    about: str = ""
    again_s: float = 1.0
    rounds: Rounds | None = None
    kind: str = ""
    tied: bool = False
    forms: tuple[tuple[float, float], ...] = ()
    small: SmallPasses | None = None
    dividing: Dividing | None = None
    wants_stages: bool = False
    asked: TrainConfig | None = None
    backend: str = ""
    compiled: bool = False

    @property
    def fetched_s(self) -> float:
        """Return the time of a step that fetches the weights of its blocks, relative to a step that
        does not.

        A CPU recomputes such blocks in the backward pass; a GPU only if they have experts.
        """
        once = self.kind not in ("", "cpu") and self.blocks is not None and not self.blocks.experts
        return 1.0 if once else self.again_s

    @property
    def mixed(self) -> bool:
        """Return whether the computers are of several kinds."""
        return len({each.name for each in self.computers}) > 1

    @property
    def takes_stages(self) -> bool:
        """Return whether the ranks can be a pipeline: they must not share one memory, and local
        steps and packed gradients exclude it.
        """
        packs = self.work is not None and self.work.packed is not None
        return not self.shares and self.rounds is None and not packs

    @property
    def backend_bytes(self) -> int:
        """Bytes that the communication back-end takes in a process on a CPU; those of the ring if
        the back-end is not known.
        """
        return BACKEND_BYTES.get(
            self.backend or getattr(self.link, "name", ""), BACKEND_BYTES["ring"]
        )

    def of_rank(self, memory: Memory) -> int:
        """Return the bytes of a rank with these arrays: of the whole process on a CPU."""
        return of_process(memory, self.present_bytes, 0) if self.present_bytes else memory.arrays

    def start_of(self, ranks: int) -> float:
        """Return the seconds until the first step of ``ranks`` ranks, interpolated from
        :attr:`started`.
        """
        if self.started is None:
            return self.start_s
        most, seconds = self.started
        return self.start_s + (seconds - self.start_s) * (ranks - 1) / (most - 1)

    def alone_step_s(self, speed: float = 1.0, batches: int = 1) -> float:
        """Return the seconds of a step with ``batches`` times the rows, by one process with a whole
        computer of this speed.
        """
        if self.whole_s:
            return batches * self.whole_s
        return self.step.serial_s + batches * self.step.tokens * self.step.token_s / speed

    def alone_s(self, speed: float = 1.0) -> float:
        """Return the seconds of the training by one process with a whole computer of this speed."""
        step_s = self.alone_step_s(speed)
        validations_s = self.validations * self.validation_s * step_s / self.step.alone_s
        return self.start_s + self.first_s + self.steps * step_s + validations_s
