"""Computers that are only named: their memory, and a rough time of a training of known size."""

from __future__ import annotations

import re
from dataclasses import dataclass

from allhands.errors import ConfigError
from allhands.runtime.memory import usual_working_set

# Part of a GPU's peak FLOP/s that a training reaches; an estimate within a factor of 1.5.
_USED = {"cuda": 0.45, "metal": 0.35}
# Part of a GPU's memory that arrays may take: a driver with its kernels takes about a GB.
USABLE = 0.94
MAC_KEEPS = "macOS keeps the rest from the GPU"
DRIVER_TAKES = "the driver and its kernels take the rest"
# Least bytes that the system takes, which is a larger part of a small memory.
_SYSTEM = {"cuda": 500_000_000, "metal": 2_000_000_000}
_MOST_DEVICES = 1024


@dataclass(frozen=True)
class PlannedDevice:
    """A computer that is known by its name only.

    Attributes:
        kind: "metal" or "cuda".
        memory_bytes: memory of the GPU, or of a whole Mac.
        flops: peak floating-point operations a second in half precision.
        watts: power during training.
    """

    name: str
    kind: str
    memory_bytes: int
    flops: float
    watts: float

    @property
    def usable_bytes(self) -> int:
        """Return the bytes that arrays may take."""
        usable = self._working_set if self.kind == "metal" else int(USABLE * self.memory_bytes)
        return min(usable, self.memory_bytes - _SYSTEM[self.kind])

    @property
    def _working_set(self) -> int:
        # Apple's GB of memory are 2**30 bytes.
        return usual_working_set(round(self.memory_bytes / 1e9 * 2**30))

    @property
    def why(self) -> str:
        """Return the reason why arrays may not take all memory."""
        if self.kind == "cuda":
            return DRIVER_TAKES
        if self.usable_bytes >= self._working_set:
            return MAC_KEEPS
        return "macOS takes the rest"

    def seconds(self, flops: float) -> float:
        """Return the estimated seconds of ``flops`` floating-point operations."""
        return flops / (_USED[self.kind] * self.flops)


# For each device: dense TFLOP/s in half precision with sums in single precision (the makers'
# figures; for Apple computed from cores and clock), usual memory in GB, and watts.
_METAL = {
    "m1": (2.6, 8, 20),
    "m1 pro": (5.2, 16, 40),
    "m1 max": (10.4, 32, 60),
    "m1 ultra": (20.8, 64, 110),
    "m2": (3.6, 8, 22),
    "m2 pro": (6.8, 16, 45),
    "m2 max": (13.6, 32, 70),
    "m2 ultra": (27.2, 64, 130),
    "m3": (3.5, 8, 22),
    "m3 pro": (6.4, 18, 45),
    "m3 max": (14.1, 36, 75),
    "m3 ultra": (28.2, 96, 160),
    "m4": (4.3, 16, 25),
    "m4 pro": (8.6, 24, 50),
    "m4 max": (17.2, 36, 80),
    "m5": (8.0, 16, 28),
}
_CUDA = {
    "rtx 3060": (25, 12, 170),
    "rtx 3080": (60, 10, 320),
    "rtx 3090": (71, 24, 350),
    "rtx 4060": (30, 8, 115),
    "rtx 4070": (58, 12, 200),
    "rtx 4080": (97, 16, 320),
    "rtx 4090": (165, 24, 450),
    "rtx 5090": (209, 32, 575),
    "t4": (65, 16, 70),
    "l4": (121, 24, 72),
    "l40s": (362, 48, 350),
    "a10g": (70, 24, 150),
    "a100": (312, 40, 400),
    "h100": (989, 80, 700),
    "h200": (989, 141, 700),
    "b200": (2250, 180, 1000),
}
_MEMORY = re.compile(r"\s*(\d+(?:\.\d+)?)\s*gi?b\s*$", re.I)


def device_of(text: str) -> PlannedDevice:
    """Return the computer of a description such as ``M1 Pro 32GB``, ``RTX 4090`` or ``A100 80GB``.

    Raises:
        ConfigError: the computer is unknown, or cannot have so much or so little memory.
    """
    memory = _MEMORY.search(text)
    name = text[: memory.start()] if memory else text
    words = " ".join(re.sub("apple|nvidia|geforce", "", name.lower()).split())
    if words and words[0].isdigit():
        words = f"rtx {words}"
    for kind, table in (("metal", _METAL), ("cuda", _CUDA)):
        if words in table:
            teraflops, usual, watts = table[words]
            gigabytes = float(memory[1]) if memory else float(usual)
            if not _SYSTEM[kind] < 1e9 * gigabytes < 1e15:
                small = f"no more memory than the system itself takes, {_SYSTEM[kind] / 1e9:g} GB"
                what = "more memory than there is" if gigabytes > 1e3 else small
                raise ConfigError(
                    f"{text.strip()!r} has {what}",
                    code="value-unknown",
                    where="--device",
                    hint=f"give all of its memory, as '{words.upper()} {usual}GB'",
                )
            return PlannedDevice(
                text.strip(), kind, int(gigabytes * 1e9), teraflops * 1e12, float(watts)
            )
    raise ConfigError(
        f"{text!r} is not a computer that is known",
        code="value-unknown",
        where="--device",
        hint=f"one of {', '.join(name.upper() for name in (*_METAL, *_CUDA))}, with its memory: 'M1 Pro 32GB'",
    )


def devices_of(text: str | None) -> list[PlannedDevice]:
    """Return the computers in a text such as ``M1 Pro 32GB, 2 x M1 16GB``; none for ``None``.

    All must be of one kind, because Macs and NVIDIA GPUs cannot train together.

    Raises:
        ConfigError: the computers are not known, too many, or of several kinds.
    """
    found: list[PlannedDevice] = []
    for part in (text or "").split(","):
        if not part.strip():
            continue
        number, x, rest = part.strip().partition(" x ")
        several = bool(x) and number.isdecimal()
        times = min(int(number[:9]), _MOST_DEVICES + 1) if several else 1
        found += [device_of(rest if several else part)] * times
        if len(found) > _MOST_DEVICES:
            raise ConfigError(
                f"more than {_MOST_DEVICES:,} computers cannot be planned",
                code="value-out-of-range",
                where="--device",
                hint=f"look at up to {_MOST_DEVICES:,}: each further one saves less than 5 % of a step",
            )
    if text is not None and not found:
        raise ConfigError(
            "no computer is named",
            code="value-empty",
            where="--device",
            hint="as in --device 'M1 Pro 32GB'",
        )
    if len({each.kind for each in found}) > 1:
        raise ConfigError(
            "Macs and NVIDIA GPUs cannot train together",
            code="options-conflict",
            where="--device",
            hint="MLX has no back-end for both in one group: plan for one kind",
        )
    return found
