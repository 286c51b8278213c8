"""Expert parallelism: ranks divide the experts among them, and each rank computes rows of its own.

A rank has an equal part of the experts of every mixture, and everything else whole. In a mixture
the ranks of a group gather the hidden states of all their tokens, with the routers' choices and
weights. For all these tokens each rank computes what its experts add, and a reduce-scatter brings
the sums back to the rank that has the rows (the all-gather dispatcher of Megatron Core). So a
module needs two exchanges in the forward pass, and two in the backward pass.

Ranks have different numbers of tokens: before each pass they agree on the largest one, and all pad
to it. A rank without rows takes part with padding alone.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from numpy.typing import NDArray

from allhands.distributed.backend import Communicator, sum_scatter
from allhands.distributed.collectives import summed
from allhands.distributed.groups import GroupWithinWorld
from allhands.distributed.handout import gather_rows
from allhands.errors import ModelError
from allhands.io.regions import Region
from allhands.io.trees import flatten
from allhands.kernels.fastmath import with_vjp
from allhands.kernels.known import name_of
from allhands.model.dropout import DropoutKeys
from allhands.model.stages import kind_of
from allhands.parallel.mixtures import (
    MIXTURES,
    Mixture,
    OwnExperts,
    RoutedTokens,
    WithOwnExperts,
    check_layers,
    take_experts,
)
from allhands.parallel.parts import OwnedParts

# Modules of mlx_lm.models.
HAVE_EXPERTS = frozenset(name.partition(".")[0] for name in MIXTURES)
# Numbers of experts are sent as two digits, which types of two bytes hold exactly.
_DIGIT = 128


@dataclass
class ExpertPass:
    """A pass of all ranks of a group together.

    Attributes:
        counts: tokens of each rank; 0 for a rank without rows.
        most: tokens that each rank sends, with padding.
        keys: (ranks * most, 2) dropout keys of all tokens, once they have been exchanged.
    """

    counts: tuple[int, ...]
    most: int
    keys: mx.array | None = None

    @property
    def present(self) -> NDArray[np.bool_]:
        """(ranks * most,) true where the ranks send a token, false for padding."""
        return (np.arange(self.most) < np.array(self.counts)[:, None]).reshape(-1)


# A pass in which all ranks compute the same tokens, and one in which this rank computes only what
# its own experts add, as a probe does.
ALIKE, ALONE = ExpertPass((), 0), ExpertPass((), 0)


class Dispatch:
    """The exchange of tokens within a group; all mixtures of a model hold the same object."""

    def __init__(self, group: Communicator) -> None:
        self.group = group
        # If the world exchanges for all groups, these compute the same at the same time.
        self.in_step = group.world if isinstance(group, GroupWithinWorld) else group
        self._members = list(
            group.members if isinstance(group, GroupWithinWorld) else range(group.size)
        )
        self._now: ExpertPass | None = ALONE

    def most(self, mine: int) -> int:
        """Return the largest of all ranks' ``mine``; called on all ranks in step together."""
        return int(self._gathered(mine).max())

    def agree(self, tokens: int, least: int = 0) -> ExpertPass | None:
        """Return the next pass, in which this rank has so many tokens; ``None`` if no rank has any.

        Called on all ranks in step together.

        Args:
            least: smallest number of tokens of a pass, if there is a next pass in any case.
        """
        told = self._gathered(tokens)
        if not (most := max(int(told.max()), least)):
            return None
        return ExpertPass(tuple(told[self._members].tolist()), most)

    def _gathered(self, mine: int) -> NDArray[Any]:
        return gather_rows(self.in_step, np.array([mine], dtype=np.int32))[:, 0]

    @contextmanager
    def passing(self, now: ExpertPass) -> Generator[None]:
        """Let mixtures compute in the pass ``now`` inside the block."""
        before, self._now = self._now, now
        try:
            yield
        finally:
            self._now = before

    def start(self) -> None:
        """From now on, compute only inside :meth:`passing`."""
        self._now = None

    def compute(self, own: OwnExperts, x: mx.array, keys: DropoutKeys | None) -> mx.array:
        """(..., D) weighted outputs of all ranks' experts, for (..., D) inputs of this rank."""
        now = self._now
        assert now is not None, "experts of other ranks were requested outside of a pass"
        if now is ALONE:
            return own.of(x, keys)
        if now is ALIKE:
            return summed(self.group, own.of(x, None))
        flat, numbers, weights = own.routed(x)
        of_all = None if keys is None else self._keys_of_all(now, keys)
        chosen, rows, scores = self._fetched(now, own, flat, numbers, weights)
        added = own.part(rows, scores, chosen, keys, of_all)
        return self._returned(now, chosen, added, len(flat)).reshape(x.shape)

    def _fetched(
        self, now: ExpertPass, own: OwnExperts, x: mx.array, numbers: mx.array, weights: mx.array
    ) -> tuple[RoutedTokens, mx.array, mx.array]:
        """Gather the tokens of all ranks that go to this rank's experts, their (R, D) inputs and
        (R,) weights.

        Of what all ranks send, only these rows are kept for the backward pass. A single exchange
        carries everything, so that all ranks exchange in the same order.
        """
        (tokens, width), count = x.shape, numbers.shape[-1]
        digits = [each.astype(x.dtype) for each in (numbers // _DIGIT, numbers % _DIGIT)]
        mine = mx.stop_gradient(mx.concatenate([x, weights, *digits], axis=-1))
        everyone = self.group.all_gather(_filled(mine, now.most))
        ends = [width, width + count, width + 2 * count]
        inputs, scores, high, low = mx.split(everyone, ends, axis=-1)
        chosen = own.chosen(high.astype(mx.uint32) * _DIGIT + low.astype(mx.uint32), now.present)
        rows = chosen.of(inputs, chosen.at).astype(x.dtype)
        scores = chosen.of(scores.reshape(-1), chosen.among).astype(weights.dtype)

        def forward(*_: mx.array) -> tuple[mx.array, mx.array]:
            return rows, scores

        def backward(_: Any, cotangents: Any, __: Any) -> tuple[mx.array, mx.array]:
            in_rows, in_scores = cotangents
            size = len(everyone)
            in_weights = (
                mx.zeros((size * count,), dtype=in_scores.dtype).at[chosen.among].add(in_scores)
            )
            both = mx.concatenate(
                [chosen.spread(in_rows, size), in_weights.reshape(size, count)], axis=-1
            )
            own_part = sum_scatter(self.group, both)[:tokens]
            return own_part[:, :width].astype(x.dtype), own_part[:, width:].astype(weights.dtype)

        return chosen, *with_vjp(forward, backward)(x, weights)

    def _returned(
        self, now: ExpertPass, chosen: RoutedTokens, added: mx.array, tokens: int
    ) -> mx.array:
        """(tokens, D) sums of the outputs of all ranks' experts for this rank's tokens."""
        size = len(self._members) * now.most

        def forward(added: mx.array) -> mx.array:
            return sum_scatter(self.group, chosen.spread(added, size))[:tokens]

        def backward(_: mx.array, cotangent: mx.array, __: mx.array) -> mx.array:
            return chosen.of(self.group.all_gather(_filled(cotangent, now.most)), chosen.at)

        return with_vjp(forward, backward)(added)

    def _keys_of_all(self, now: ExpertPass, keys: DropoutKeys) -> mx.array:
        """(ranks * most, 2) keys of all tokens, exchanged once in a pass."""
        if now.keys is None:
            now.keys = self.group.all_gather(_filled(keys.present.reshape(-1, 2), now.most))
            mx.eval(now.keys)
        return now.keys


def _filled(rows: mx.array, most: int) -> mx.array:
    """Pad rows with zeros to (most, ...)."""
    return mx.pad(rows, [(0, most - len(rows)), (0, 0)]) if len(rows) < most else rows


@dataclass(frozen=True)
class Experts(OwnedParts):
    """This rank's part of a model whose experts are divided.

    Attributes:
        model: the model with this rank's experts.
        dispatch: the exchange with the ranks that have the other experts.
        data: the ranks that have the same experts, for other rows or other token positions.
        together: all ranks that compute at the same time: those of ``dispatch``, each with those
            that have the same rows.
        mixtures: all mixtures of the model.
    """

    model: nn.Module
    dispatch: Dispatch
    data: Communicator
    together: Communicator
    mixtures: tuple[OwnExperts, ...]

    @property
    def modules(self) -> frozenset[int]:
        """The identities of all modules with arrays of experts."""
        experts: list[Any] = [own.module[own.mixture.experts] for own in self.mixtures]
        return frozenset(id(module) for each in experts for module in each.modules())


def let_experts_compute(experts: Experts | None) -> None:
    """Let mixtures compute with the other ranks, if experts are divided; called after all other
    changes of modules.
    """
    if experts is None:
        return
    experts.dispatch.start()
    for own in experts.mixtures:
        own.drop_as_installed()


class _Dispatched(WithOwnExperts):
    """A mixture whose experts are divided among ranks, which compute rows of their own."""

    _dispatch: Dispatch

    def routed_part(self, x: mx.array, keys: DropoutKeys | None) -> mx.array:
        return self._dispatch.compute(self._own, x, keys)


def mixtures_of(model: Any) -> Iterator[tuple[str, nn.Module, Mixture]]:
    """Yield name, module and kind of all mixtures of the blocks.

    Raises:
        ModelError: experts of this architecture cannot be divided, or it has none.
    """
    kind, found = kind_of(model), 0
    hint = f"leave it out, or take a model of one of these kinds: {', '.join(sorted(HAVE_EXPERTS))}"
    if kind not in HAVE_EXPERTS:
        raise ModelError(
            f"models of the kind {kind} have no experts that can be divided",
            code="model-without-experts",
            where="--ep",
            hint=hint,
        )
    known = {id(module): path for path, module in model.named_modules()}
    for block in model.layers:
        for part in block.children().values():
            if isinstance(part, nn.Module) and (mixture := MIXTURES.get(name_of(part))) is not None:
                found += 1
                yield known[id(part)], part, mixture
    if not found:
        raise ModelError(
            "no block of this model has experts",
            code="model-without-experts",
            where="--ep",
            hint=hint,
        )


def check_experts(model: nn.Module, ranks: int) -> None:
    """Refuse a model whose experts so many ranks cannot divide.

    Raises:
        ModelError: the architecture has no experts that can be divided.
        ConfigError: this number of ranks cannot divide them.
    """
    for path, module, mixture in mixtures_of(model):
        check_layers(path, module, mixture, ranks)


def divide_experts(
    model: nn.Module,
    group: Communicator,
    data: Communicator,
    together: Communicator | None = None,
) -> Experts:
    """Reduce the model to this rank's part of every mixture's experts, read array by array.

    The model computes correctly once :func:`let_experts_compute` has been called; until then, for
    probes, mixtures return only what this rank's experts add.

    Args:
        group: the ranks that divide the experts; ``data``: those that have the same ones.
        together: see :class:`Experts`; default: those that are in step with ``group``.

    Raises:
        ModelError: the architecture has no experts that can be divided.
        ConfigError: this number of ranks cannot divide them.
    """
    trained = {name: tuple(array.shape) for name, array in flatten(model.trainable_parameters())}
    parts: dict[str, Region] = {}
    mixtures, dispatch = list[OwnExperts](), Dispatch(group)
    for path, module, mixture in list(mixtures_of(model)):
        own, taken = take_experts(path, module, mixture, group.rank, group.size)
        mixtures.append(own)
        own.compute_as(_Dispatched, _dispatch=dispatch)
        parts |= {name: place for name, place in taken.items() if name in trained}
    in_step = dispatch.in_step if together is None else together
    return Experts(trained, parts, model, dispatch, data, in_step, tuple(mixtures))
