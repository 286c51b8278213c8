"""Codecs for compressed gradients: their bytes, and the way in which ranks exchange them.

This module has plain numbers, without MLX, so that ``allhands plan`` can use it. The computation
with arrays is in :mod:`allhands.distributed.packed`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from allhands.distributed.capabilities import can
from allhands.errors import ConfigError

# Count of the numbers that share a scale and an offset; below, the bytes of these two.
GROUP = 64
_SCALES = 8
_FLOAT = 4

# gather: each rank gets the packed numbers of every other rank, and adds them up itself. pass: each
# rank adds its part to the numbers from its neighbour, packs the sum and sends it on; the sums are
# gathered. sum: the back-end adds up numbers of two bytes.
Route = Literal["gather", "pass", "sum"]


@dataclass(frozen=True)
class Codec:
    """A packed form of float32 numbers.

    Attributes:
        name: value of ``--compress``.
        bits: bits of a packed number.
    """

    name: str
    bits: int

    @property
    def grouped(self) -> bool:
        """True if numbers share scales; the rounding errors are then large, and must be added in
        later steps.
        """
        return self.bits < 16

    @property
    def ratio(self) -> float:
        """Packed bytes divided by the bytes of float32."""
        return self.packed_bytes(GROUP) / (GROUP * _FLOAT)

    def packs(self, shape: tuple[int, ...], item_bytes: int = _FLOAT) -> bool:
        """Return True if an array of this shape and type is packed.

        It is not packed if it is shorter than a group, or would not become smaller.
        """
        numbers = math.prod(shape)
        return numbers >= GROUP and self.packed_bytes(numbers) < numbers * item_bytes

    def packed_bytes(self, numbers: int) -> int:
        """Return the packed bytes of an array of ``numbers`` numbers, filled up to whole groups."""
        groups = -(-numbers // GROUP)
        return groups * (GROUP * self.bits // 8 + _SCALES * self.grouped)

    def route(self, backend: str, ranks: int, item_bytes: int = _FLOAT) -> Route:
        """Return the way in which ranks exchange packed numbers of ``item_bytes`` over a back-end.

        Gathering rounds once, and each rank sends its packed row N - 1 times. It is chosen while
        these are fewer bytes than an unpacked sum: N < 2 / ratio. With more ranks parts are passed
        on, which sends 2 (N - 1) / N packed rows.
        """
        if not self.grouped:
            return "gather" if ranks == 2 else "sum"
        passes = can(backend, "send_recv") or can(backend, "send_recv_neighbours")
        return "gather" if ranks * self._against(item_bytes) < 2 or not passes else "pass"

    def gains(self, backend: str, ranks: int, item_bytes: int = _FLOAT) -> bool:
        """Return True if fewer bytes are sent than in an unpacked sum of ``item_bytes`` numbers."""
        gathers = self.route(backend, ranks, item_bytes) == "gather"
        return self._against(item_bytes) * (ranks if gathers else 2) < 2

    def _against(self, item_bytes: int) -> float:
        """Return the packed bytes divided by the bytes of unpacked ``item_bytes`` numbers."""
        return self.ratio * _FLOAT / item_bytes


def require_gain(codec: Codec, backend: str, ranks: int, item_bytes: int) -> None:
    """Refuse a codec that does not save bytes for numbers of ``item_bytes``.

    Raises:
        ConfigError: it saves none.
    """
    if codec.gains(backend, ranks, item_bytes):
        return
    what = "gradients in half precision" if item_bytes < _FLOAT else "gradients"
    less = [each.name for each in CODECS.values() if each.gains(backend, ranks, item_bytes)]
    raise ConfigError(
        f"{what} of {ranks} ranks over {backend} would take no fewer bytes",
        code="compression-without-gain",
        where=f"--compress {codec.name}",
        hint=f"leave it out, or take --compress {less[0]}" if less else "leave it out",
    )


CODECS = {each.name: each for each in (Codec("bf16", 16), Codec("int8", 8), Codec("int4", 4))}
