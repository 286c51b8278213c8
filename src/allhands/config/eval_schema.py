"""The options of ``allhands eval`` for each rank: those of a test, on any part of the data."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field, field_validator

from allhands.config.schema import TrainConfig
from allhands.config.values import LocalPath


class EvalConfig(TrainConfig):
    """Options on which the loss of a split depends."""

    VERB: ClassVar[str] = "eval"

    adapter_path: LocalPath = Field(
        "", description="Directory of a training run. [none: the model as it is]"
    )
    split: Literal["train", "valid", "test"] = Field("test", description="Part of the data.")
    test: bool = Field(True, description="Evaluate.")
    test_batches: int = Field(-1, ge=-1, description="Batches; -1 is the whole split.")
    mask_prompt: bool = Field(False, description="Count the answers only.")
    batch_size: int = Field(
        8, ge=1, description="Examples per batch; the result does not depend on it."
    )

    @field_validator("test_batches")
    @classmethod
    def _something(cls, value: int) -> int:
        # Before training's own check, whose message names an option that this command does not
        # have.
        if value == 0:
            raise ValueError("0 batches evaluate nothing: give a number from 1, or -1 for all")
        return value


def evaluated_split(config: TrainConfig) -> str:
    """Return the part of the data that a test is run on: the test set, except in
    ``allhands eval --split``.
    """
    return config.split if isinstance(config, EvalConfig) else "test"
