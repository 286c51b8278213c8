"""Cut a model of mlx_lm into stages from outside: a rank keeps some of its blocks, and computes
those alone.

The model's own code runs unchanged. In the place of a block that another rank has stands its
outline: it has the settings that the model's code may look at, no weights, and passes its input on.
The last outline before the rank's blocks gives what the stage before has sent; the first one after
them takes what the stage is to send, and the model's code is left there. So masks, places of caches
and whatever else follows from the number of a block are those of the whole model.

Only architectures whose cut models have been compared with mlx_lm's own are cut:
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
# Modules of mlx_lm.models whose blocks hand on nothing but hidden states: from one block to the
# next, each once in a pass. `tests/parity/test_stages.py` compares every one of them.
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
        """True if the stage needs the table of tokens; ``tied``: it is the head as well."""
        return self.is_first or (self.is_last and tied)


def blocks_of_stages(sizes: Sequence[int]) -> list[Blocks]:
    """Stages of so many blocks each, in order."""
    stops = list(accumulate(sizes))
    return [Blocks(stop - size, stop, stops[-1]) for stop, size in zip(stops, sizes, strict=True)]


def kind_of(model: nn.Module) -> str:
    """Return the module of mlx_lm.models that the model is from."""
    return type(model).__module__.removeprefix(_PACKAGE)


def check_cut(model: nn.Module) -> None:
    """Refuse an architecture that has not been compared with its cut form.

    Raises:
        ModelError: it has not.
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
    """A module's settings, and its children's, without arrays; passes its first argument on."""

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
        # A property of the original's class, which follows from its settings.
        kind = self.__dict__.get("_kind")
        found = None if kind is None else vars(kind).get(key)
        if isinstance(found, property) and found.fget is not None:
            return found.fget(self)
        return super().__getattr__(key)

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        return x


class _Inlet(_Outline):
    """The last block before a stage's own: gives what the stage before has sent."""

    received: mx.array | None = None

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        assert self.received is not None, "a stage was computed without its input"
        return self.received


class _Reached(Exception):
    """A stage's last block is done."""

    def __init__(self, hidden: mx.array) -> None:
        super().__init__()
        self.hidden = hidden


class _Outlet(_Outline):
    """The first block after a stage's own: takes what is to be sent."""

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        raise _Reached(x)


class _NoEmbedding(nn.Module):
    """Stand-in for the embedding where its output is not looked at."""

    def __init__(self, features: int, dtype: mx.Dtype) -> None:
        super().__init__()
        object.__setattr__(self, "made", (features, dtype))

    def __call__(self, tokens: mx.array) -> mx.array:
        features, dtype = cast("Any", self).made
        return mx.zeros((*tokens.shape, features), dtype=dtype)


@dataclass(frozen=True)
class Stage:
    """Some blocks of a model, which may be computed by themselves.

    Attributes:
        model: with all that its rank has, by the names that the arrays have in the whole.
        blocks: which are computed.
        features: of the hidden states that stages hand on; ``dtype`` is their type.
        shared: name of the embedding's table where it is the head too: then the first and the last
            stage have it.
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
        """The module with the table of tokens."""
        body, name = self._table
        return cast("Any", body)[name]

    @property
    def trains(self) -> bool:
        """True if the stage trains a weight of its blocks or, at either end of the model, one
        outside of all blocks.
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
        """Return the type of the embedding's rows; ``None`` where another stage has the embedding."""
        table: Any = self.table
        return table(mx.zeros((1, 1), dtype=mx.int32)).dtype if self.blocks.is_first else None

    @contextmanager
    def computing(self, received: mx.array | None) -> Generator[None]:
        """Compute this stage inside the block, from the output of the stage before; the first has
        none.
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
        """Return the stage's hidden states of (B, T) tokens; inside :meth:`computing`, not for the
        last stage.
        """
        try:
            self.model(*arguments, **more)
        except _Reached as reached:
            return reached.hidden.astype(self.dtype)
        raise AssertionError("the model's code has not come to the end of the stage")


def cut(model: nn.Module, parts: Sequence[Blocks]) -> list[Stage]:
    """Leave ``model`` with the blocks of these stages, and with what else they need; nothing is
    computed.

    Raises:
        ModelError: the architecture cannot be cut.
    """
    check_cut(model)
    body, layers = _body_of(model)
    name, embedding = _embedding_of(body)
    made = embedding(
        mx.zeros((1, 1), dtype=mx.int32)
    )  # lazily: nothing is looked at but its shape and type
    outside = _outside(model, body, embedding)
    # Where no module outside of the blocks has a weight for each token, the table of tokens is the
    # head.
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
    """The layers of the model while a stage computes: its own blocks between a way in and a way
    out.
    """
    view = [*outlines[: part.first], *blocks[part.first : part.stop], *outlines[part.stop :]]
    if not part.is_first:
        view[part.first - 1] = _Inlet(outlines[part.first - 1])
    if not part.is_last:
        view[part.stop] = _Outlet(outlines[part.stop])
    return view


def _body_of(model: nn.Module) -> tuple[nn.Module, list[nn.Module]]:
    """The module that has the blocks, and its list of them."""
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
    """Name and module of the table of tokens."""
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
    """Owner, name and module of what is neither block nor embedding, as far up as that is so."""
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
    """Return true if the module is a head: it has a weight for each of the table's tokens."""
    rows = embedding.weight.shape[:1]
    return any(
        value.ndim > 1 and value.shape[:1] == rows for _, value in flatten(module.parameters())
    )
