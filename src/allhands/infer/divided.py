"""Answer with a model of which each rank has some blocks."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from allhands.config.schema import TrainConfig
from allhands.data.templates import ChatChoice
from allhands.distributed.backend import Communicator
from allhands.distributed.handout import gather_json
from allhands.errors import ConfigError, Interrupted
from allhands.infer.dialogue import Talks, Wire, answer
from allhands.infer.generate import load_for_generation
from allhands.io.trees import numbers
from allhands.model.load import LoadedModel
from allhands.model.sources import resolve
from allhands.model.stages import Stage
from allhands.model.weight_files import require_files
from allhands.parallel.pipeline import PipedModel
from allhands.parallel.piping import Piping
from allhands.run.context import RunContext
from allhands.run.dividing import STAGES, DividedModel, split_agreed, stages_of
from allhands.run.piping import piped, piping_of
from allhands.runtime.accelerator import detect

# Seconds between two checks of idle ranks, because a rank that waits in an exchange takes a core.
_LOOK_S = 0.05


class AnsweringModel(PipedModel):
    """A :class:`PipedModel` with caches for ``mlx_lm.generate``; caches of other ranks' blocks only
    count tokens.
    """

    def __init__(self, piping: Piping) -> None:
        super().__init__(piping)
        self._mine = {at for stage in piping.stages for at in stage.blocks.places}

    def make_cache(self) -> list[Any]:
        """Return a cache for each block."""
        caches: list[Any] = make_prompt_cache(self.model)
        return caches

    def __call__(self, inputs: mx.array, cache: Any = None, **more: Any) -> mx.array:
        logits = super().__call__(inputs, cache, **more)
        # Masks follow from the caches of certain blocks, on any rank.
        nothing = mx.zeros((len(inputs), 1, inputs.shape[1], 1))
        for place, each in enumerate(cache or ()):
            if place not in self._mine:
                each.update_and_fetch(nothing, nothing)
        return logits


class AnsweringRanks:
    """The ranks that answer together; each method is called on all of them.

    Attributes:
        model: the last one that was loaded.
    """

    model: AnsweringModel

    def __init__(self, config: TrainConfig, surroundings: RunContext) -> None:
        self._config, self._surroundings = config, surroundings
        self._mesh = piped(config, surroundings.mesh)
        self._communicator: Communicator | None = None
        self._split: tuple[int, ...] = ()

    def load(self, adapter: Path | None, chat: ChatChoice | None) -> LoadedModel:
        """Load the model for generation with this rank's blocks alone.

        Raises:
            AllhandsError: as there, or the ranks make no pipeline.
        """
        config, mesh, stages, notes = self._config, self._mesh, list[Stage](), list[str]()
        path = resolve(config.model)

        first = self._communicator is None
        communicator = self._communicator = self._communicator or self._surroundings.connect()

        def cut(loaded: LoadedModel) -> None:
            divided = DividedModel(loaded.model, loaded.config, for_answers=True)
            recorded = {STAGES: list(self._split)} if self._split else None
            self._split, told = split_agreed(
                config, divided, mesh, detect(), communicator, recorded
            )
            notes.extend(told if config.pp_split != "auto" else ())
            stages.extend(stages_of(loaded.model, self._split, mesh))
            require_files(path, [stage.blocks for stage in stages])

        loaded = load_for_generation(
            config.model,
            adapter,
            trust_remote_code=config.trust_remote_code,
            chat=chat,
            cut=cut,
            mesh=mesh,
        )
        if first:
            self._surroundings.started()
        self.model = AnsweringModel(piping_of(config, tuple(stages), communicator, mesh))
        answering: Any = self.model
        return replace(loaded, model=answering, notes=(*loaded.notes, *notes))

    def converse(self, conversation: Talks, path: str) -> None:
        """Answer until the terminal at ``path`` is closed; a rank on its computer connects to it.

        Raises:
            ConfigError: no rank is on that computer.
            Interrupted: a rank was asked to stop.
        """
        assert self._communicator is not None
        wire = Wire.to(path) if self._mesh.local_rank == 0 else None
        if not any(gather_json(self._communicator, wire is not None)):
            raise ConfigError(
                "no rank can reach the terminal",
                code="terminal-unreachable",
                where="allhands chat",
                hint="name this computer in --hosts, too",
            )

        def enough() -> bool:
            with suppress(EOFError):
                return bool(self._surroundings.stop_requested()) or bool(wire and wire.take(0.0))
            return True

        self.model.stops = enough
        while "end" not in (word := self._next_word(wire)):
            if "reset" in word:
                conversation.reset()
            elif "ask" in word:
                answer(conversation, word["ask"], wire, lambda: self.model.stopped)

    def _next_word(self, wire: Wire | None) -> dict[str, Any]:
        """Return the terminal's next message, on every rank."""
        assert self._communicator is not None
        while True:
            word = None
            if wire is None:
                time.sleep(_LOOK_S)
            else:
                try:
                    word = wire.take(_LOOK_S)
                except EOFError:
                    word = {"end": True}
            mine = [float(word is not None), float(bool(self._surroundings.stop_requested()))]
            said, stopped = numbers(self._communicator.all_sum(mx.array(mine)))
            if stopped:
                raise Interrupted("the conversation was ended", code="stopped")
            if said:
                return next(
                    each for each in gather_json(self._communicator, word) if each is not None
                )
