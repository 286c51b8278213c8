"""The norm of gradients."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from allhands.kernels.fused import kernels


def sum_of_squares(gradients: Sequence[mx.array]) -> mx.array:
    """() the sum of squares of them all, in float32."""
    by_kernel, others = list[mx.array](), list[mx.array]()
    for gradient in gradients:
        fits = kernels.available() and gradient.size % kernels.width(gradient.dtype) == 0
        (by_kernel if fits else others).append(gradient)
    plain = sum((mx.square(g.astype(mx.float32)).sum() for g in others), mx.zeros(()))
    return plain + kernels.sum_of_squares(by_kernel) if by_kernel else plain
