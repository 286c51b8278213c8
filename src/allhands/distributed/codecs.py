"""Forms in which gradients take fewer bytes on the way: how many, and by which way ranks exchange
them.

Plain numbers, without MLX, so that ``allhands plan`` can ask. What computes with arrays is in
:mod:`allhands.distributed.packed`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from allhands.distributed.capabilities import can
from allhands.errors import ConfigError

# Numbers that share a scale and an offset, and the bytes of these two.
GROUP = 64
_SCALES = 8
_FLOAT = 4

# gather: each rank gets what every other one has packed, and adds it up itself. pass: each rank
# adds its part to what its neighbour has sent, packs the sum and sends it on; the sums are
# gathered. sum: the back-end adds up numbers of two bytes.
Route = Literal["gather", "pass", "sum"]


@dataclass(frozen=True)
class Codec:
    """A packed form of float32 numbers.

    Attributes:
        name: of ``--compress``.
        bits: of a number.
    """

    name: str
    bits: int

    @property
    def grouped(self) -> bool:
        """True if numbers share scales, which leaves so much out that it has to be made up for in
        later steps.
        """
        return self.bits < 16

    @property
    def ratio(self) -> float:
        """Bytes against those of float32."""
        return self.packed_bytes(GROUP) / (GROUP * _FLOAT)

    def packs(self, shape: tuple[int, ...], item_bytes: int = _FLOAT) -> bool:
        """True if an array of this shape and type is packed: not if it is shorter than a group, or
        short already.
        """
        numbers = math.prod(shape)
        return numbers >= GROUP and self.packed_bytes(numbers) < numbers * item_bytes

    def packed_bytes(self, numbers: int) -> int:
        """Bytes of an array of so many numbers, which is filled up to whole groups."""
        groups = -(-numbers // GROUP)
        return groups * (GROUP * self.bits // 8 + _SCALES * self.grouped)

    def route(self, backend: str, ranks: int, item_bytes: int = _FLOAT) -> Route:
        """Return the way in which ranks exchange packed numbers of ``item_bytes`` over a back-end.

        Gathering rounds once and takes N - 1 rows of each rank; while these are fewer bytes than a
        sum of what is not packed, N < 2 / ratio, it is taken. Beyond, parts are passed on, in 2 (N
        - 1) / N rows.
        """
        if not self.grouped:
            return "gather" if ranks == 2 else "sum"
        passes = can(backend, "send_recv") or can(backend, "send_recv_neighbours")
        return "gather" if ranks * self._against(item_bytes) < 2 or not passes else "pass"

    def gains(self, backend: str, ranks: int, item_bytes: int = _FLOAT) -> bool:
        """True if fewer bytes travel than of numbers of ``item_bytes`` that the back-end adds up."""
        gathers = self.route(backend, ranks, item_bytes) == "gather"
        return self._against(item_bytes) * (ranks if gathers else 2) < 2

    def _against(self, item_bytes: int) -> float:
        """Bytes against those of numbers of so many."""
        return self.ratio * _FLOAT / item_bytes


def require_gain(codec: Codec, backend: str, ranks: int, item_bytes: int) -> None:
    """Refuse a form in which numbers of ``item_bytes`` take no fewer bytes than as they are.

    Raises:
        ConfigError: it is one.
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
