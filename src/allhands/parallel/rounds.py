"""Rounds of local steps: their length, and the outer step by the ranks' mean change. Loads no MLX."""

from __future__ import annotations

from dataclasses import dataclass

from allhands.config.schema import TrainConfig


@dataclass(frozen=True)
class Rounds:
    """Rounds of steps that ranks take alone before they average their weights.

    Attributes:
        every: steps of a round.
        learning_rate: of the outer step, whose direction is the mean of the ranks' changes; 1: the
            weights become the ranks' mean.
        momentum: of the outer step, which is Nesterov's (DiLoCo, arXiv 2311.08105).
        fragments: parts of the weights that are exchanged in turn, each once a round (Streaming
            DiLoCo, arXiv 2501.18512).
        delay: steps during which an exchange runs beside the computation.
    """

    every: int = 1
    learning_rate: float = 1.0
    momentum: float = 0.0
    fragments: int = 1
    delay: int = 0

    @property
    def streams(self) -> bool:
        """True if ranks have different weights between two rounds."""
        return self.fragments > 1 or self.delay > 0

    def sent_after(self, steps: int) -> list[int]:
        """Return the fragments whose exchange begins after this number of steps."""
        ends = ((number + 1) * self.every // self.fragments for number in range(self.fragments))
        return [number for number, end in enumerate(ends) if (steps - end) % self.every == 0]

    @property
    def beside(self) -> int:
        """Number of steps of a round with a running exchange."""
        return self.fragments * self.delay

    @property
    def flags(self) -> str:
        """The flags that ask for these rounds."""
        told = f"--sync-every {self.every}"
        if not self.is_mean:
            told += f" --outer-lr {self.learning_rate:g} --outer-momentum {self.momentum:g}"
        return (
            f"{told} --sync-fragments {self.fragments} --sync-delay {self.delay}"
            if self.streams
            else told
        )

    @property
    def is_mean(self) -> bool:
        """True if the weights after a round are the mean of the ranks' weights."""
        return self.learning_rate == 1.0 and self.momentum == 0.0


def rounds_of(config: TrainConfig) -> Rounds:
    """Return the rounds of ``--sync-every`` and its further options."""
    return Rounds(
        config.sync_every,
        config.outer_lr,
        config.outer_momentum,
        config.sync_fragments,
        config.sync_delay,
    )
