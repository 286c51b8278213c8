"""Events of a training run: what they hold, where they go (file, terminal) and how they are read
back.

The training loop emits events on rank 0 into :class:`Sinks`. ``metrics.jsonl`` in the run directory
is the record; ``plots`` reads it with :func:`read_metrics`. Nothing here needs a device.
"""

from allhands.io.names import ANSWERS_FILE, METRICS_FILE
from allhands.observe.metrics.console import ConsoleSink
from allhands.observe.metrics.events import (
    Event,
    RunEnded,
    RunStarted,
    Sampled,
    SavedReport,
    SharesChanged,
    StepReport,
    StepSkipped,
    TrainReport,
    ValidReport,
    Warned,
    decode_event,
    encode_event,
)
from allhands.observe.metrics.history import RunHistory, read_metrics, typical
from allhands.observe.metrics.sinks import JsonlSink, Sink, Sinks

__all__ = [
    "ANSWERS_FILE",
    "METRICS_FILE",
    "ConsoleSink",
    "Event",
    "JsonlSink",
    "RunEnded",
    "RunHistory",
    "RunStarted",
    "Sampled",
    "SavedReport",
    "SharesChanged",
    "Sink",
    "Sinks",
    "StepReport",
    "StepSkipped",
    "TrainReport",
    "ValidReport",
    "Warned",
    "decode_event",
    "encode_event",
    "read_metrics",
    "typical",
]
