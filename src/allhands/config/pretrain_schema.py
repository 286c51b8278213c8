"""The options of ``allhands pretrain``: those of :class:`TrainConfig`, a model's shape, and
defaults of their own.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal, cast

from pydantic import Field, model_validator

from allhands.config.combinations import refuse_where
from allhands.config.schema import LrSchedule, TrainConfig
from allhands.config.values import LocalPath

NUMBERS = (
    "layers",
    "dims",
    "mlp_dims",
    "heads",
    "kv_heads",
    "head_dim",
    "vocabulary",
    "block_size",
    "rope_theta",
    "tied",
    "experts",
    "experts_per_token",
)


class PretrainConfig(TrainConfig):
    """Everything a pre-training run depends on."""

    VERB: ClassVar[str] = "pretrain"
    # Options that come first in the help, and options that are not in it, because a new model has
    # no use for them.
    FIRST: ClassVar[tuple[str, ...]] = (
        "data",
        "tokenizer",
        "shape",
        *NUMBERS,
        "dtype",
        "adapter_path",
    )
    HIDDEN: ClassVar[frozenset[str]] = frozenset(
        {"model", "train", "fine_tune_type", "num_layers", "lora_parameters"}
    )

    tokenizer: LocalPath = Field(
        "", description="Directory or Hub repository whose tokenizer is used. Required."
    )
    shape: str = Field(
        "llama-15m",
        description="Size by name, or a family (llama, qwen3, mixtral) with all numbers.",
    )
    layers: int | None = Field(
        None, ge=1, description="Blocks. [the shape's value, also for the next options]"
    )
    dims: int | None = Field(None, ge=1, description="Width of the residual stream.")
    mlp_dims: int | None = Field(
        None, ge=1, description="Width inside the MLP, or inside each expert."
    )
    heads: int | None = Field(None, ge=1, description="Heads of the queries.")
    kv_heads: int | None = Field(None, ge=1, description="Heads of keys and values.")
    head_dim: int | None = Field(None, ge=1, description="Width of a head. [dims / heads]")
    vocabulary: int | None = Field(
        None, ge=1, description="Rows of the embedding. [the tokenizer's]"
    )
    block_size: int | None = Field(
        None,
        ge=2,
        description="Positions of the model, and tokens of a row unless --max-seq-length is less.",
    )
    rope_theta: float | None = Field(
        None, gt=0, description="Base of the rotary position embedding."
    )
    tied: bool | None = Field(None, description="Use the embedding as the output layer.")
    experts: int | None = Field(None, ge=0, description="Experts of each block (mixtral).")
    experts_per_token: int | None = Field(
        None, ge=0, description="Experts that compute a token (mixtral)."
    )
    router_aux_loss: float = Field(
        0.01, ge=0, description="Coefficient of the load-balancing loss of experts."
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Data type of the weights; auto: bfloat16 with float32 copies on GPUs, else float32.",
    )
    # Usual defaults of pre-training, see docs/pretraining.md.
    adapter_path: LocalPath = Field(
        "pretrained", description="Directory for the model, checkpoints, metrics, plot and logs."
    )
    seed: int = Field(
        0, ge=0, lt=2**32, description="Seed of the initial weights and of the data's order."
    )
    resume_adapter_file: LocalPath | None = Field(
        None, description="Weights to start from: model.safetensors of a pre-training."
    )
    keep_best: bool = Field(
        True, description="Also keep the model with the best validation loss: model-best."
    )
    data: LocalPath = Field(
        "",
        description="Directory with train and valid texts, one file of texts, or a Hub dataset. Required.",
    )
    fine_tune_type: Literal["lora", "dora", "full"] = Field(
        "full", description="full: all weights are trained."
    )
    optimizer: Literal["adam", "adamw", "muon", "sgd", "adafactor"] = Field(
        "adamw",
        description="Optimizer; muon is for the matrices of the blocks, with adamw for the rest.",
    )
    learning_rate: float = Field(
        1e-3, gt=0, description="Learning rate (the peak, with a schedule)."
    )
    lr_schedule: LrSchedule | None = Field(
        LrSchedule.model_validate({"name": "cosine"}),
        description="constant, linear or cosine by name, or mlx_lm's schedule as JSON. [cosine]",
    )
    warmup_steps: int | None = Field(
        None,
        ge=0,
        description="Steps (optimizer updates) of linear warm-up. [a twentieth of all, at most 1000]",
    )
    weight_decay: float | None = Field(
        0.1, ge=0, description="Weight decay of adamw, muon, sgd, adafactor."
    )
    weight_decay_on: Literal["all", "matrices"] = Field(
        "matrices", description="matrices: no weight decay of norms and biases."
    )
    master_weights: bool = Field(
        True,
        description="Update float32 copies of half-precision weights, then round them to the weights.",
    )
    max_grad_norm: float | None = Field(
        1.0, gt=0, description="Clip the global gradient norm to this."
    )
    packing: bool = Field(
        True, description="Join all texts and cut them into rows of --max-seq-length."
    )
    sample_prompts: list[str] | None = Field(
        default_factory=lambda: ["Once upon a time"],
        description="Texts that the model continues at each validation (JSON).",
    )

    @model_validator(mode="before")
    @classmethod
    def _rows_of_the_block(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        given = cast("dict[str, Any]", values)
        block = given.get("block_size")
        # A block size of 1 is refused by the name of its own option.
        if given.get("max_seq_length") is None and block and block not in (1, "1"):
            return {**given, "max_seq_length": block}
        return given

    @model_validator(mode="after")
    def _from_scratch(self) -> PretrainConfig:
        refuse_where(
            (
                not self.tokenizer,
                "--tokenizer is missing: the directory of a tokenizer, as `allhands tokenizer train` makes one",
            ),
            (
                not self.data,
                "--data is missing: a folder with train.txt, .jsonl or .parquet, or a Hub dataset",
            ),
            code="option-missing",
        )
        no_adapter = (
            type(self).model_fields["lora_parameters"].get_default(call_default_factory=True)
        )
        refuse_where(
            (
                self.fine_tune_type != "full",
                "--fine-tune-type: a new model is always trained in full",
            ),
            (
                self.num_layers not in (None, -1),
                "--num-layers is for fine-tuning; the blocks of a new model are --layers",
            ),
            (
                self.lora_parameters != no_adapter,
                "--lora-parameters is for fine-tuning: all of a new model is trained",
            ),
            (
                self.model != "demo",
                "--model is not used: the model is a new one, of --shape and --tokenizer",
            ),
            code="option-without-effect",
        )
        if self.block_size is not None and self.max_seq_length > self.block_size:
            raise ValueError(
                f"rows of {self.max_seq_length} tokens do not fit a block size of {self.block_size}"
            )
        return self

    def numbers(self) -> dict[str, Any]:
        """Return the shape's numbers that were given."""
        return {name: value for name in NUMBERS if (value := getattr(self, name)) is not None}


def pretraining(config: TrainConfig) -> PretrainConfig | None:
    """Return ``config`` if it describes pre-training; else ``None``."""
    return config if isinstance(config, PretrainConfig) else None


def model_name(config: TrainConfig) -> str:
    """Return the model's name for people; a new model is named by its shape."""
    fresh = pretraining(config)
    return config.model if fresh is None else f"{fresh.shape}, new"
