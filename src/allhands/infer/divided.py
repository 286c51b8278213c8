"""Answer with a model of which each rank has some blocks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import make_prompt_cache

from allhands.config.schema import TrainConfig
from allhands.data.templates import ChatChoice
from allhands.infer.generate import load_for_generation
from allhands.model.load import LoadedModel
from allhands.model.stages import Stage
from allhands.parallel.pipeline import PipedModel
from allhands.parallel.piping import Piping
from allhands.run.dividing import Divided, split_agreed, stages_of
from allhands.run.piping import piped, piping_of
from allhands.run.preparing import RunContext
from allhands.runtime.accelerator import detect


class AnsweringModel(PipedModel):
    """As :class:`PipedModel`, with caches for ``mlx_lm.generate``: those of other ranks' blocks count tokens alone."""

    def __init__(self, piping: Piping) -> None:
        super().__init__(piping)
        self._mine = {at for stage in piping.stages for at in range(stage.blocks.first, stage.blocks.stop)}

    def make_cache(self) -> list[Any]:
        """One for each block."""
        caches: list[Any] = make_prompt_cache(self.model)
        return caches

    def __call__(self, inputs: mx.array, cache: Any = None, **more: Any) -> mx.array:
        logits = super().__call__(inputs, cache, **more)
        # Masks follow from the caches of certain blocks, whoever has these.
        nothing = mx.zeros((len(inputs), 1, inputs.shape[1], 1))
        for place, each in enumerate(cache or ()):
            if place not in self._mine:
                each.update_and_fetch(nothing, nothing)
        return logits


def load_divided(config: TrainConfig, surroundings: RunContext, chat: ChatChoice) -> LoadedModel:
    """As :func:`load_for_generation`, with this rank's blocks alone; called on all ranks together.

    Raises:
        AllhandsError: as there, or the ranks do not make up a pipeline.
    """
    mesh, stages = piped(config, surroundings.mesh), list[Stage]()
    communicator = surroundings.connect()

    def cut(loaded: LoadedModel) -> None:
        divided = Divided(loaded.model, loaded.config, for_answers=True)
        split, _ = split_agreed(config, divided, mesh, detect(), communicator)
        stages.extend(stages_of(loaded.model, split, mesh))

    adapter = Path(config.adapter_path) if config.adapter_path else None
    loaded = load_for_generation(
        config.model,
        adapter,
        trust_remote_code=config.trust_remote_code,
        chat=chat,
        cut=cut,
    )
    surroundings.started()
    answering: Any = AnsweringModel(piping_of(config, tuple(stages), communicator, mesh))
    return replace(loaded, model=answering)
