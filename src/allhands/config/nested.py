"""Options that are objects, and the base class of all options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from allhands.config.values import LocalPath, expanded_in


class Strict(BaseModel):
    """Base class of options: unknown keys are refused, and values cannot change."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False, defer_build=True
    )

    @field_validator("*", mode="before")
    @classmethod
    def _booleans(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, bool) and info.field_name is not None:
            annotation = cls.model_fields[info.field_name].annotation
            kinds = {annotation, *get_args(annotation)}
            if {"on", "off"} <= kinds:
                return "on" if value else "off"  # what YAML makes of these words
            # In Python true equals 1, so `learning_rate: true` in a file would train with 1.
            if kinds & {int, float} and bool not in kinds:
                raise ValueError("must be a number")
        return value


class LoraParameters(Strict):
    """Shape of the adapters, as in mlx_lm: ``delta W = scale * A @ B``."""

    rank: int = Field(8, ge=1, description="Rank of the two adapter matrices.")
    scale: float = Field(
        20.0, gt=0, description="Factor on the adapter's output (alpha / rank in PEFT's terms)."
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="Dropout on the adapter's input.")
    keys: list[str] | None = Field(
        None, description="Module paths within a block; default: every linear layer."
    )

    @field_validator("keys")
    @classmethod
    def _some_keys(cls, value: list[str] | None) -> list[str] | None:
        if value == []:
            raise ValueError("names no layer: leave keys out for every linear layer, or name some")
        return value

    @model_validator(mode="before")
    @classmethod
    def _explain_alpha(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        given = dict(cast("Mapping[str, Any]", value))
        # alpha is ignored, as in mlx_lm; build_config notes this
        if "alpha" in given and given.get("scale") is None:
            raise ValueError("alpha is not used here: give scale = alpha / rank")
        given.pop("alpha", None)
        return given


class LrSchedule(Strict):
    """A learning-rate schedule: by name alone, or with mlx_lm's positional ``arguments``."""

    name: Literal[
        "constant",
        "linear",
        "cosine",
        "cosine_decay",
        "exponential_decay",
        "step_decay",
        "linear_schedule",
    ] = Field(description="Name of the schedule.")
    arguments: list[float] | None = Field(
        None, description="Arguments of mlx.optimizers' schedule of that name."
    )
    warmup: int = Field(
        0, ge=0, description="Steps (optimizer updates) of linear warm-up before the schedule."
    )
    warmup_init: float = Field(0.0, ge=0, description="Learning rate at the start of the warm-up.")

    @model_validator(mode="after")
    def _arguments_fit(self) -> LrSchedule:
        by_name = self.name in ("constant", "linear", "cosine")
        if by_name and self.arguments is not None:
            raise ValueError(
                f"{self.name} takes no arguments: it runs from learning_rate over the whole training"
            )
        if not by_name and not self.arguments:
            raise ValueError(f"{self.name} needs arguments, for example [1e-5, 1000]")
        return self


class HfDataset(Strict):
    """A dataset read through the ``datasets`` library, as in mlx_lm's ``hf_dataset``."""

    path: LocalPath = Field(description="Name on the Hub or path that datasets.load_dataset takes.")
    train_split: str = Field("train[:80%]", description="Split to train on.")
    valid_split: str | None = Field("train[-10%:]", description="Split to validate on.")
    test_split: str | None = Field(None, description="Split for --test.")
    prompt_feature: str | None = None
    completion_feature: str | None = None
    chat_feature: str | None = None
    text_feature: str | None = None
    config: dict[str, Any] = Field(
        default_factory=dict, description="Keyword arguments of load_dataset."
    )

    @model_validator(mode="before")
    @classmethod
    def _earlier_name(cls, value: Any) -> Any:
        # Files for mlx_lm before 0.20 have the dataset's name under this key.
        if not isinstance(value, Mapping):
            return value
        given = cast("Mapping[str, Any]", value)
        if "name" not in given or "path" in given:
            return given
        return {("path" if key == "name" else key): inner for key, inner in given.items()}

    @field_validator("config")
    @classmethod
    def _local_files(cls, value: dict[str, Any]) -> dict[str, Any]:
        return {
            key: expanded_in(inner) if key in ("data_files", "data_dir", "cache_dir") else inner
            for key, inner in value.items()
        }
