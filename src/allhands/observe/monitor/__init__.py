"""Memory, load and phases of every process of a run: sampled, kept beside its logs, and read back.

Nothing here imports MLX; MLX is asked for its memory only where it is loaded already.
"""

from allhands.observe.monitor.board import Board, BoardRow, gone_here
from allhands.observe.monitor.sampler import Identity, ProcessSampler
from allhands.observe.monitor.samples import (
    Follower,
    Sample,
    decode_sample,
    encode_sample,
    monitor_file,
    read_samples,
)

__all__ = [
    "Board",
    "BoardRow",
    "Follower",
    "Identity",
    "ProcessSampler",
    "Sample",
    "decode_sample",
    "encode_sample",
    "gone_here",
    "monitor_file",
    "read_samples",
]
