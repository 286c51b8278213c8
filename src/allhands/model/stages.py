"""Division of an mlx_lm model into stages from outside: a rank keeps and computes some of its
blocks.

The model's own code runs unchanged. A block of another rank is replaced by its outline: a module
with the settings that the model's code may look at, without weights, that passes its input on. The
last outline before the rank's blocks returns the hidden states from the stage before. The first
outline after them takes the hidden states to send, and ends the pass by an exception. So masks,
places of caches and all else that depends on the number of a block are as in the whole model.

Only architectures whose divided models have been compared with mlx_lm's own are divided:
:data:`CAN_BE_CUT`.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, cast

import mlx.core as mx
import mlx.nn as nn

from allhands.errors import ModelError
from allhands.io.trees import flatten

_PACKAGE = "mlx_lm.models."
# Names of modules in mlx_lm.models whose blocks pass on nothing but hidden states, each block once
# in a pass, to the next block. `tests/parity/test_stages.py` compares all of them.
CAN_BE_CUT = frozenset(
    """
    Klear afmoe apertus baichuan_m1 bailing_hybrid bailing_moe bailing_moe_linear bailing_moe_v3 cohere cohere2
    dbrx deepseek deepseek_v2 deepseek_v3 deepseek_v32 dots1 ernie4_5 ernie4_5_moe exaone exaone4 exaone_moe
    falcon_h1 gear gemma gemma2 gemma3 gemma3_text glm glm4 glm4_moe glm4_moe_lite glm_moe_dsa gpt_neox gpt_oss
    granite granitemoe granitemoehybrid hunyuan_v1_dense internlm2 internlm3 jamba kimi_k25 kimi_linear kimi_vl
    laguna lfm2 lfm2-vl lfm2_moe lille-130m llama llama4 llama4_text longcat_flash mamba mamba2 mellum mimo
    mimo_v2_flash minicpm minicpm3 minimax minimax_m3_vl ministral3 mistral3 mistral4 mixtral muse_glimmer
    nanochat nemotron nemotron-nas nemotron_h olmo2 olmo3 olmo_hybrid olmoe openelm phi phi3 phi3small phimoe
    pixtral qwen qwen2 qwen2_moe qwen2_vl qwen3 qwen3_5 qwen3_5_moe qwen3_moe qwen3_next qwen3_vl qwen3_vl_moe
    seed_oss smollm3 solar_open spark2_5 stablelm starcoder2 step3p5 telechat3 youtu_llm
    """.split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Blocks:
    """The blocks of a stage: ``first`` to ``stop - 1`` of ``count``."""

    first: int
    stop: int
    count: int

    @property
    def is_first(self) -> bool:
        """True if the stage has the embedding."""
        return self.first == 0

    @property
    def is_last(self) -> bool:
        """True if the stage has the final norm and the head."""
        return self.stop == self.count

    @property
    def places(self) -> range:
        """The numbers of the blocks."""
        return range(self.first, self.stop)

    def needs_embedding(self, *, tied: bool) -> bool:
        """Return True if the stage needs the embedding; ``tied``: it is also the head."""
        return self.is_first or (self.is_last and tied)


def blocks_of_stages(sizes: Sequence[int]) -> list[Blocks]:
    """Return the blocks of each stage, given the number of blocks of each, in order."""
    stops = list(accumulate(sizes))
    return [Blocks(stop - size, stop, stops[-1]) for stop, size in zip(stops, sizes, strict=True)]


def kind_of(model: nn.Module) -> str:
    """Return the name of the module in mlx_lm.models that the model's class is from."""
    return type(model).__module__.removeprefix(_PACKAGE)


def check_cut(model: nn.Module) -> None:
    """Refuse an architecture that is not in :data:`CAN_BE_CUT`.

    Raises:
        ModelError: it is not there.
    """
    kind = kind_of(model)
    if kind not in CAN_BE_CUT:
        raise ModelError(
            f"models of the kind {kind} cannot be divided into stages",
            code="model-not-divisible",
            where="--strategy pipeline",
            hint=f"use --strategy data, or a model of one of these kinds: {', '.join(sorted(CAN_BE_CUT))}",
        )


class _Outline(nn.Module):
    """A module's settings, and its children's, without arrays; it returns its first argument."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        kind = vars(original)["_kind"] if isinstance(original, _Outline) else type(original)
        object.__setattr__(self, "_kind", kind)
        for name, value in vars(original).items():
            if not name.startswith("_") and not isinstance(value, mx.array):
                object.__setattr__(self, name, value)
        for name, value in original.items():
            if isinstance(value, nn.Module):
                object.__setattr__(self, name, _Outline(value))

    def __getattr__(self, key: str) -> Any:
        # A property of the original's class, computed from the settings.
        kind = self.__dict__.get("_kind")
        found = None if kind is None else vars(kind).get(key)
        if isinstance(found, property) and found.fget is not None:
            return found.fget(self)
        return super().__getattr__(key)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


class _Inlet(_Outline):
    """Outline of the last block before a stage: returns the hidden states from the stage before."""

    received: mx.array | None = None

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.received is not None, "a stage was computed without its input"
        return self.received


class _Reached(Exception):
    """Raised when a stage's last block is done; carries its hidden states."""

    def __init__(self, hidden: mx.array) -> None:
        super().__init__()
        self.hidden = hidden


class _Outlet(_Outline):
    """Outline of the first block after a stage: takes the hidden states to send."""

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        raise _Reached(x)


class _NoEmbedding(nn.Module):
    """Replacement of the embedding in a stage that does not use its output."""

    def __init__(self, features: int, dtype: mx.Dtype) -> None:
        super().__init__()
        object.__setattr__(self, "made", (features, dtype))

    def __call__(self, tokens: mx.array) -> mx.array:
        features, dtype = cast("Any", self).made
        return mx.zeros((*tokens.shape, features), dtype=dtype)


@dataclass(frozen=True)
class Stage:
    """Some blocks of a model, which can be computed by themselves.

    Attributes:
        model: the model with all arrays that this rank has, under their names in the whole model.
        blocks: the blocks of the stage.
        features: width of the hidden states that stages hand on.
        dtype: type of these hidden states.
        shared: name of the embedding if it is also the head, so that the first and the last stage
            have it; else "".
    """

    model: nn.Module
    blocks: Blocks
    features: int
    dtype: mx.Dtype
    shared: str
    _table: tuple[nn.Module, str]
    _layers: list[nn.Module]
    _view: list[nn.Module]

    @property
    def table(self) -> nn.Module:
        """The embedding."""
        body, name = self._table
        return cast("Any", body)[name]

    @property
    def trains(self) -> bool:
        """True if the stage trains a weight of its blocks or, at an end of the model, a weight
        outside the blocks.
        """
        blocks = self._view[self.blocks.first : self.blocks.stop]
        if any(flatten(block.trainable_parameters()) for block in blocks):
            return True
        if not (self.blocks.is_first or self.blocks.is_last):
            return False
        within = {
            id(array)
            for block in self._layers
            for _, array in flatten(block.trainable_parameters())
        }
        return any(
            id(array) not in within for _, array in flatten(self.model.trainable_parameters())
        )

    def by_block(self) -> list[Stage]:
        """Return the stage as stages of one block each."""
        outlines: list[nn.Module] = list(map(_Outline, self._layers))
        parts = (Blocks(at, at + 1, self.blocks.count) for at in self.blocks.places)
        return [
            replace(self, blocks=part, _view=_view(part, self._layers, outlines)) for part in parts
        ]

    def type_of_hidden(self) -> mx.Dtype | None:
        """Return the type of the embedding's rows; ``None`` if another stage has the embedding."""
        table: Any = self.table
        return table(mx.zeros((1, 1), dtype=mx.int32)).dtype if self.blocks.is_first else None

    @contextmanager
    def computing(self, received: mx.array | None) -> Generator[None]:
        """Let the model compute this stage in a ``with`` block.

        ``received``: hidden states from the stage before; ``None`` for the first stage.
        """
        before, first = list(self._layers), self.blocks.first
        self._layers[:] = self._view
        if first:
            object.__setattr__(self._view[first - 1], "received", received)
        try:
            yield
        finally:
            self._layers[:] = before
            if first:
                object.__setattr__(self._view[first - 1], "received", None)

    def hidden(self, *arguments: Any, **more: Any) -> mx.array:
        """Return the stage's hidden states for (B, T) tokens.

        Call it in :meth:`computing`; not for the last stage, where the model returns logits.
        """
        try:
            self.model(*arguments, **more)
        except _Reached as reached:
            return reached.hidden.astype(self.dtype)
        raise AssertionError("the model's code has not come to the end of the stage")


def cut(model: nn.Module, parts: Sequence[Blocks]) -> list[Stage]:
    """Leave ``model`` with the blocks of these stages and the other modules that they need.

    Nothing is computed. Returns the stages, in the order of ``parts``.

    Raises:
        ModelError: the architecture cannot be divided.
    """
    check_cut(model)
    body, layers = _body_of(model)
    name, embedding = _embedding_of(body)
    made = embedding(mx.zeros((1, 1), dtype=mx.int32))  # lazy: only its shape and type are used
    outside = _outside(model, body, embedding)
    # If no module outside the blocks has a weight for each token, the embedding is the head.
    tied = not any(_has_rows(module, embedding) for _, _, module in outside)
    prefix = next(path for path, module in model.named_modules() if module is body)
    facts = int(made.shape[-1]), made.dtype, f"{prefix}.{name}" if tied else ""
    originals = list(layers)
    outlines: list[nn.Module] = list(map(_Outline, originals))
    layers[:] = outlines
    for part in parts:
        layers[part.first : part.stop] = originals[part.first : part.stop]
    if not any(part.needs_embedding(tied=tied) for part in parts):
        body[name] = _NoEmbedding(*facts[:2])
    if not any(part.is_last for part in parts):
        for owner, key, module in outside:
            owner[key] = _Outline(module)
    return [
        Stage(model, part, *facts, (body, name), layers, _view(part, originals, outlines))
        for part in parts
    ]


def _view(
    part: Blocks, blocks: Sequence[nn.Module], outlines: Sequence[nn.Module]
) -> list[nn.Module]:
    """Return the model's layers while a stage computes: its blocks between inlet and outlet."""
    view = [*outlines[: part.first], *blocks[part.first : part.stop], *outlines[part.stop :]]
    if not part.is_first:
        view[part.first - 1] = _Inlet(outlines[part.first - 1])
    if not part.is_last:
        view[part.stop] = _Outlet(outlines[part.stop])
    return view


def _body_of(model: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """Return the module that has the blocks, and its list of them (ModelError without one)."""
    blocks = cast("Any", model).layers
    for module in model.modules():
        for value in module.values():
            if (
                isinstance(value, list)
                and len(value) == len(blocks)
                and all(map(_same, value, blocks))
            ):
                return module, value
    raise ModelError(
        f"the blocks of the kind {kind_of(model)} are not found",
        code="model-not-divisible",
        where="--strategy pipeline",
    )


def _same(one: object, other: object) -> bool:
    return one is other


def _embedding_of(body: nn.Module) -> tuple[str, Any]:
    """Return the name and the module of the embedding."""
    tables = (nn.Embedding, nn.QuantizedEmbedding)
    found = (
        (name, child)
        for name, child in body.items()
        if isinstance(child, tables) or "embed" in name
    )
    return next((name, child) for name, child in found if isinstance(child, nn.Module))


def _outside(
    model: nn.Module, body: nn.Module, embedding: nn.Module
) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return owner, name and module of the largest modules without blocks, except the embedding."""
    found: list[tuple[nn.Module, str, nn.Module]] = []
    for module in model.modules():
        if not any(_same(each, body) for each in module.modules()):
            continue
        for name, child in module.items():
            if (
                isinstance(child, nn.Module)
                and child is not embedding
                and not any(_same(m, body) for m in child.modules())
            ):
                found.append((module, name, child))
    return found


def _has_rows(module: nn.Module, embedding: Any) -> bool:
    """Return True if the module has a weight for each of the embedding's tokens, as a head has."""
    rows = embedding.weight.shape[:1]
    return any(
        value.ndim > 1 and value.shape[:1] == rows for _, value in flatten(module.parameters())
    )
