"""Collectives with the right gradients for divided models.

MLX's own gradients are wrong for such models, without an error. The gradient of ``all_gather`` is
only this rank's slice of its own cotangent, without the cotangents of other ranks. The gradient of
``all_max`` is the identity. ``recv`` ends the gradient, and ``sum_scatter`` and ``send`` have none.

Here each forward operation has the right backward operation for a loss that is the sum of all
ranks' parts or, if stated, the same on all ranks.

=====================  ==============  ==============  ===========================================================
function               forward         backward        between
=====================  ==============  ==============  ===========================================================
:func:`replicated`     identity        sum             the same on all ranks -> used differently (Megatron's *f*)
:func:`summed`         sum             identity        parts of a sum -> used in the same way on all ranks (its *g*)
:func:`gathered`       gather          reduce-scatter  a part each -> all parts, used differently
:func:`scattered`      reduce-scatter  gather          parts of a sum -> a part of the sum each
:func:`sent`,          send,           receive,        one stage -> the next
:func:`received`       receive         send
=====================  ==============  ==============  ===========================================================

All are lazy and may be compiled. All ranks of the communicator call them in the same order (the
last two only both ends). Sums have the array's own type: half precision is rounded on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from allhands.distributed.backend import Communicator, MlxGroup, sum_scatter
from allhands.distributed.groups import GroupWithinWorld
from allhands.errors import ConfigError


def replicated(communicator: Communicator, array: mx.array) -> mx.array:
    """Return ``array``, which is the same on all ranks; its gradient is the sum of all ranks'."""
    if communicator.size == 1:
        return array
    return _with_gradient(
        _same, lambda primal, cotangent, output: communicator.all_sum(cotangent), array
    )


def summed(communicator: Communicator, array: mx.array) -> mx.array:
    """Return the sum over ranks; its gradient, which must be the same on all ranks, is passed on
    unchanged.
    """
    if communicator.size == 1:
        return array
    return _with_gradient(communicator.all_sum, lambda primal, cotangent, output: cotangent, array)


def gathered(communicator: Communicator, array: mx.array) -> mx.array:
    """Return the ranks' arrays joined along the first axis.

    The gradient is this rank's part of the sum of all ranks' gradients.
    """
    if communicator.size == 1:
        return array

    def backward(primal: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        return sum_scatter(communicator, cotangent).reshape(primal.shape)

    return _with_gradient(communicator.all_gather, backward, array)


def scattered(communicator: Communicator, array: mx.array) -> mx.array:
    """Return this rank's equal part, along the first axis, of the sum over ranks.

    The gradient is all parts' gradients joined.
    """
    if communicator.size == 1:
        return array

    def forward(whole: mx.array) -> mx.array:
        return sum_scatter(communicator, whole)

    return _with_gradient(
        forward, lambda primal, cotangent, output: communicator.all_gather(cotangent), array
    )


def sent(communicator: Communicator, array: mx.array, peer: int) -> mx.array:
    """Send ``array`` to rank ``peer`` and return it; its gradient is what that rank's
    :func:`received` sends back.

    The array is sent only if the result is computed. So a loss of this rank must depend on the
    result, for example by ``mx.sum(0 * sent(...))``.
    """
    group, there = _way(communicator, peer)

    def forward(mine: mx.array) -> mx.array:
        return group.send(mine, there)

    def backward(primal: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        back = group.receive(primal.shape, primal.dtype, there)
        # Receives only after sending: otherwise both ranks would wait for each other.
        return cotangent + mx.depends([back], [output])[0]

    return _with_gradient(forward, backward, array)


def received(
    communicator: Communicator, shape: Sequence[int], dtype: mx.Dtype, peer: int, *, after: mx.array
) -> mx.array:
    """Return the array that rank ``peer`` sends by :func:`sent`; its gradient travels back there.

    Args:
        after: array that is computed before anything is received. Its gradient is 0, and must be
            computed by differentiation with respect to it or its inputs, because this sends the
            received array's gradient back.
    """
    group, there = _way(communicator, peer)

    def forward(before: mx.array) -> mx.array:
        return mx.depends([group.receive(shape, dtype, there)], [before])[0]

    def backward(primal: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        return mx.depends([mx.zeros_like(primal)], [group.send(cotangent, there)])[0]

    return _with_gradient(forward, backward, after)


def all_max(communicator: Communicator, array: mx.array) -> mx.array:
    """Return the element-wise maximum over ranks, as a constant without a gradient.

    Used for the maximum that is subtracted from logits.
    """
    array = mx.stop_gradient(array)
    if isinstance(communicator, MlxGroup):
        return communicator.all_max(array)
    return mx.max(communicator.all_gather(array[None]), axis=0)


def _with_gradient(
    forward: Callable[[mx.array], mx.array],
    backward: Callable[[mx.array, mx.array, mx.array], mx.array],
    array: mx.array,
) -> mx.array:
    """Return ``forward(array)`` with ``backward`` as its gradient.

    ``backward`` gets the array, the cotangent and the output.
    """
    function: Any = mx.custom_function(forward)
    function.vjp(backward)
    return function(array)


def _same(array: mx.array) -> mx.array:
    return array


def _way(communicator: Communicator, peer: int) -> tuple[MlxGroup, int]:
    """Return MLX's group through which a rank is reached, and the rank's number in it.

    Raises:
        ConfigError: there is no other process.
    """
    if isinstance(communicator, GroupWithinWorld):
        return _way(communicator.world, communicator.members[peer])
    if isinstance(communicator, MlxGroup):
        return communicator, peer
    where = f"--backend {communicator.backend}"
    raise ConfigError(
        f"there is no rank {peer} to send to",
        code="rank-out-of-range",
        where=where,
        hint="start more ranks",
    )
