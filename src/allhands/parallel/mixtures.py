"""Mixtures of experts of which a rank has some: the routing of tokens, and the results of its own
experts.

A rank's experts compute only the tokens that are routed to them. Their number is known only once
the router has been computed, so a pass of such a mixture cannot be compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models.switch_layers import QuantizedSwitchLinear, SwitchLinear
from mlx_lm.tuner.lora import LoRASwitchLinear
from numpy.typing import NDArray

from allhands.errors import ConfigError
from allhands.io.formatting import counted
from allhands.io.regions import Region
from allhands.kernels.instances import mix_in
from allhands.model.dropout import DropoutKeys, dropout_keys_of
from allhands.parallel.parts import take

_LAYERS = ("gate_proj", "up_proj", "down_proj")
_BASES = (SwitchLinear, QuantizedSwitchLinear)
# (module, (..., D) inputs) -> (..., k) numbers of experts, and their weights.
_Route = Callable[[Any, mx.array], tuple[mx.array, mx.array]]


@dataclass(frozen=True)
class Mixture:
    """A kind of mixture in mlx_lm.

    Attributes:
        experts: name of the module with the stacked experts.
        route: its router, including what it does to the weights.
        shared: name of the shared experts, which take every token, in kinds that may have any.
    """

    experts: str
    route: _Route
    shared: str = ""

    def shared_part(self, module: Any, x: mx.array) -> mx.array | None:
        """Return the output of the shared experts; ``None``: there are none."""
        shared = module.get(self.shared) if self.shared else None
        return None if shared is None else shared(x)


def _mixtral(module: Any, x: mx.array) -> tuple[mx.array, mx.array]:
    gates, k = module.gate(x), module.num_experts_per_tok
    chosen = mx.stop_gradient(mx.argpartition(-gates, kth=k - 1, axis=-1)[..., :k])
    return chosen, mx.softmax(mx.take_along_axis(gates, chosen, axis=-1), axis=-1, precise=True)


def _qwen3_moe(module: Any, x: mx.array) -> tuple[mx.array, mx.array]:
    gates, k = mx.softmax(module.gate(x), axis=-1, precise=True), module.top_k
    chosen = mx.stop_gradient(mx.argpartition(gates, kth=-k, axis=-1)[..., -k:])
    weights = mx.take_along_axis(gates, chosen, axis=-1)
    return chosen, weights / mx.sum(
        weights, axis=-1, keepdims=True
    ) if module.norm_topk_prob else weights


def _gpt_oss(module: Any, x: mx.array) -> tuple[mx.array, mx.array]:
    gates, k = module.router(x), module.num_experts_per_tok
    chosen = mx.stop_gradient(mx.argpartition(gates, kth=-k, axis=-1)[..., -k:])
    return chosen, mx.softmax(mx.take_along_axis(gates, chosen, axis=-1), axis=-1, precise=True)


def _deepseek_v2(module: Any, x: mx.array) -> tuple[mx.array, mx.array]:
    return module.gate(x)


# Modules of mlx_lm.models whose source was read; `tests/unit/test_known.py` notices when it
# changes.
MIXTURES: Mapping[str, Mixture] = MappingProxyType(
    {
        "mixtral.MixtralSparseMoeBlock": Mixture("switch_mlp", _mixtral),
        "qwen3_moe.Qwen3MoeSparseMoeBlock": Mixture("switch_mlp", _qwen3_moe),
        "gpt_oss.MLPBlock": Mixture("experts", _gpt_oss),
        "deepseek_v2.DeepseekV2MoE": Mixture("switch_mlp", _deepseek_v2, "shared_experts"),
    }
)


@dataclass(frozen=True)
class RoutedTokens:
    """The tokens that go to a rank's experts; at least one, so that all ranks' graphs are alike.

    Attributes:
        at: (R,) numbers of the tokens, among M.
        among: (R,) numbers of the choices, among M * k.
        numbers: (R, 1) numbers of the experts, among those of the rank.
        nothing: True if no token goes to them; the one here then counts as zeros.
    """

    at: mx.array
    among: mx.array
    numbers: mx.array
    nothing: bool

    def of(self, array: mx.array, which: mx.array) -> mx.array:
        """Return the rows of ``array`` that ``which`` names; zeros if :attr:`nothing`."""
        found = array[which]
        return mx.where(mx.array(False), found, mx.zeros_like(found)) if self.nothing else found

    def spread(self, rows: mx.array, size: int) -> mx.array:
        """(size, D) sums of (R, D) rows by token."""
        return mx.zeros((size, rows.shape[-1]), dtype=rows.dtype).at[self.at].add(rows)


@dataclass(frozen=True)
class OwnExperts:
    """The experts of a mixture that this rank has.

    Attributes:
        module: the mixture.
        mixture: its kind.
        first: number of the first expert here.
        count: number of experts here.
    """

    module: nn.Module
    mixture: Mixture
    first: int
    count: int

    def compute_as(self, form: type, **attributes: Any) -> None:
        """Let the mixture compute as ``form``, a subclass of :class:`WithOwnExperts`."""
        mix_in(self.module, form, _own=self, _keys=None, **attributes)

    def drop_as_installed(self) -> None:
        """Let the experts use the dropout that has been installed since :meth:`compute_as`."""
        object.__setattr__(self.module, "_keys", dropout_keys_of(self.module))

    def routed(self, x: mx.array) -> tuple[mx.array, mx.array, mx.array]:
        """(M, D) inputs of M tokens, (M, k) numbers of the experts that they go to, and (M, k)
        weights.
        """
        chosen, weights = self.mixture.route(self.module, x)
        count = chosen.shape[-1]
        return x.reshape(-1, x.shape[-1]), chosen.reshape(-1, count), weights.reshape(-1, count)

    def chosen(self, numbers: mx.array, present: NDArray[np.bool_] | None = None) -> RoutedTokens:
        """Return the tokens that go to these experts.

        Args:
            numbers: (M, k) numbers of the experts that each token goes to, among those of all
                ranks.
            present: (M,) false for padding; default: true everywhere.
        """
        count = numbers.shape[-1]
        own = np.asarray(numbers).reshape(-1).astype(np.int64) - self.first
        here = (own >= 0) & (own < self.count)
        if present is not None:
            here &= np.repeat(present, count)
        found = np.flatnonzero(here)
        nothing = not len(found)
        among, own = (np.zeros(1, dtype=np.int64),) * 2 if nothing else (found, own[found])
        return RoutedTokens(
            mx.array(among // count),
            mx.array(among),
            mx.array(own.astype(np.uint32))[:, None],
            nothing,
        )

    def part(
        self,
        rows: mx.array,
        weights: mx.array,
        chosen: RoutedTokens,
        keys: DropoutKeys | None = None,
        keys_of_all: mx.array | None = None,
    ) -> mx.array:
        """(R, D) weighted outputs of these experts for the tokens that go to them.

        Args:
            rows: (R, D) inputs; ``weights``: (R,) weights of the experts.
            keys: dropout keys, if the experts have dropout.
            keys_of_all: (M, 2) keys of all tokens; default: those that are in use.
        """
        experts: Any = self.module[self.mixture.experts]
        with nullcontext() if keys is None else keys.at_places(chosen.at, keys_of_all):
            made = experts(rows, chosen.numbers)
        return made[:, 0] * weights[:, None]

    def of(self, x: mx.array, keys: DropoutKeys | None) -> mx.array:
        """(..., D) weighted outputs of these experts for (..., D) inputs; ``keys``: see
        :meth:`part`.
        """
        flat, numbers, weights = self.routed(x)
        chosen = self.chosen(numbers)
        rows, scores = chosen.of(flat, chosen.at), chosen.of(weights.reshape(-1), chosen.among)
        return chosen.spread(self.part(rows, scores, chosen, keys), len(flat)).reshape(x.shape)


class WithOwnExperts:
    """A mixture of which this rank has some experts. It computes their part of the result, for
    tokens that all ranks have.
    """

    _own: OwnExperts
    _keys: DropoutKeys | None
    training: bool

    def routed_part(self, x: mx.array, keys: DropoutKeys | None) -> mx.array:
        """Return the sum of the outputs of the routed experts."""
        return self._own.of(x, keys)

    def __call__(self, x: mx.array) -> mx.array:
        y = self.routed_part(x, self._keys if self.training else None)
        shared = self._own.mixture.shared_part(self, x)
        return y if shared is None else y + shared


def take_experts(
    path: str, module: Any, mixture: Mixture, rank: int, size: int, *, lazy: bool = False
) -> tuple[OwnExperts, dict[str, Region]]:
    """Reduce ``module`` to the ``rank``-th of ``size`` equal parts of its experts; return also the
    places of their arrays, by name.

    Raises:
        ConfigError: see :func:`check_layers`.
    """
    check_layers(path, module, mixture, size)
    experts: Any = module[mixture.experts]
    parts: dict[str, Region] = {}
    count = experts[_LAYERS[0]].num_experts // size
    for key in _LAYERS:
        name, layer = f"{path}.{mixture.experts}.{key}", experts[key]
        places = {}
        if isinstance(layer, LoRASwitchLinear):
            places = {
                f"{name}.{half}": take(layer, half, 0, rank, size, lazy=lazy)
                for half in ("lora_a", "lora_b")
            }
            layer.num_experts = count
            name, layer = f"{name}.linear", layer["linear"]
        for each in ("weight", "scales", "biases", "bias", "global_scale"):
            places[f"{name}.{each}"] = take(layer, each, 0, rank, size, lazy=lazy)
        parts |= {name: place for name, place in places.items() if place is not None}
    return OwnExperts(module, mixture, rank * count, count), parts


def check_layers(path: str, module: Any, mixture: Mixture, ranks: int) -> None:
    """Refuse experts that so many ranks cannot divide equally.

    Raises:
        ConfigError: they cannot, or a layer is of an unknown kind.
    """
    where = f"--ep {ranks}"
    for key in _LAYERS:
        layer: Any = module[mixture.experts][key]
        base = layer["linear"] if isinstance(layer, LoRASwitchLinear) else layer
        name = f"{path}.{mixture.experts}.{key}"
        if not isinstance(base, _BASES):
            what = f"{name} is a {type(layer).__name__}, whose experts are not divided"
            raise ConfigError(
                what, code="option-unsuited-to-model", where=where, hint="leave it out"
            )
        if base.num_experts % ranks:
            hint = "take a number of ranks that divides it, or leave --ep out"
            raise ConfigError(
                f"{name} has {counted(base.num_experts, 'expert')}",
                code="experts-not-divisible",
                where=where,
                hint=hint,
            )
