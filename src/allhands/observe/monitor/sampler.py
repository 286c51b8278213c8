"""Sampler: a thread that measures its own process every two seconds and writes the samples."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import psutil

from allhands.observe.lines import LineFile
from allhands.observe.monitor.process import NetworkTraffic, OwnGpu, ProportionalMemory, began_at
from allhands.observe.monitor.samples import Role, Sample, encode_sample
from allhands.runtime.memory import mlx_memory, peak_rss_bytes

EVERY_VARIABLE = "ALLHANDS_MONITOR_EVERY_S"
_EVERY_S = 2.0
_THIN_AFTER = (
    3600  # samples, after which they are taken half as often: a file of a month's run stays small
)
_RAREST_S = 30.0
_MOST_FAILURES = 5
_JOIN_S = 1.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Identity:
    """Identity of a process in its run; see :class:`~allhands.observe.monitor.samples.Sample`."""

    role: Role
    rank: int | None = None
    run: str = ""
    attempt: int = 1
    estimated_bytes: int | None = None
    mlx_estimated_bytes: int | None = None


class PhaseClock:
    """Counter of the training thread's time by phase; ``phase`` is the one before the first beat."""

    def __init__(self, phase: str | None = None) -> None:
        self._lock = threading.Lock()
        self._phase = phase
        self._step: int | None = None
        self._since = time.perf_counter()
        self._spent: dict[str, float] = {}

    def beat(self, phase: str, step: int) -> None:
        """Note that ``phase`` begins, after ``step`` updates; takes a microsecond."""
        with self._lock:
            self._count()
            self._phase, self._step = phase, step

    def take(self) -> tuple[str | None, int | None, dict[str, float]]:
        """Return phase and step now, and the seconds of each phase since the last call."""
        with self._lock:
            self._count()
            spent, self._spent = self._spent, {}
            return (
                self._phase,
                self._step,
                {phase: round(seconds, 6) for phase, seconds in spent.items()},
            )

    def _count(self) -> None:
        now = time.perf_counter()
        if self._phase is not None:
            self._spent[self._phase] = self._spent.get(self._phase, 0.0) + now - self._since
        self._since = now


class ProcessSampler:
    """Samples of this process, from the start of the ``with`` block to its end.

    They are kept in memory until :meth:`write_to`. A failure is logged once, and does not end the
    run.

    Args:
        identity: who this process is.
        environ: ``ALLHANDS_MONITOR_EVERY_S`` is the time between samples; 0 takes none.
    """

    def __init__(self, identity: Identity, environ: Mapping[str, str] = os.environ) -> None:
        self.clock = PhaseClock("start" if identity.role == "rank" else None)
        self._identity = identity
        self._every_s = _wanted(environ.get(EVERY_VARIABLE))
        self._host = socket.gethostname()
        self._waiting: deque[Sample] = deque(maxlen=_THIN_AFTER)
        self._lock = threading.Lock()
        self._lines: LineFile | None = None
        self._told = False
        self._ended = threading.Event()
        self._process = psutil.Process()
        self._began = began_at(self._process)
        self._proportional = ProportionalMemory(self._process)
        self._gpu = OwnGpu()
        self._traffic: NetworkTraffic | None = None
        self._cpu = (time.monotonic(), time.process_time())
        self._thread = threading.Thread(target=self._work, name="allhands-monitor", daemon=True)

    def __enter__(self) -> Self:
        if self._every_s:
            self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def beat(self, phase: str, step: int) -> None:
        """See :meth:`PhaseClock.beat`."""
        self.clock.beat(phase, step)

    def expect(self, estimated_bytes: int, *, arrays: bool = False) -> None:
        """Note in all later samples the memory that this process, or its ``arrays`` on a GPU, are
        expected to need.
        """
        with self._lock:
            name = "mlx_estimated_bytes" if arrays else "estimated_bytes"
            self._identity = replace(self._identity, **{name: estimated_bytes})

    def resident(self) -> int:
        """Return the memory of this process now, in bytes."""
        return self._process.memory_info().rss

    def write_to(self, file: Path, run: str | None = None) -> None:
        """Append all samples to ``file``, also those taken already.

        Args:
            run: the name of the job, if it has become known only now.
        """
        if not self._every_s:
            return
        try:
            with self._lock:
                self._lines = LineFile(file, "samples")
                if run is not None:
                    self._identity = replace(self._identity, run=run)
                while self._waiting:
                    self._lines.append(
                        encode_sample(replace(self._waiting.popleft(), run=self._identity.run))
                    )
        except Exception as error:
            self._tell(error)

    def close(self) -> None:
        """Take the last sample; may be called again, and before the block has been entered."""
        if self._ended.is_set() or self._thread.ident is None:
            return
        self._ended.set()
        self._thread.join(_JOIN_S)
        try:
            self._keep(replace(self.sample(last=True), ended=True))
        except Exception as error:
            self._tell(error)
        with self._lock, suppress(OSError):
            if self._lines is not None:
                self._lines.close()
            self._lines = None

    def sample(self, *, last: bool = False) -> Sample:
        """Return a sample of this process; its loads and phases are those since the previous call.

        Args:
            last: true if no other follows.

        Raises:
            Exception: whatever the system, or MLX, raises.
        """
        self._traffic = self._traffic or NetworkTraffic()
        phase, step, phases = self.clock.take()
        rss_bytes = self.resident()
        pss_bytes, pss_kind = self._proportional.read(rss_bytes, last=last)
        # MLX is asked only once the training thread has used it, so that nothing is set up in this
        # one.
        device: dict[str, Any] = {**mlx_memory(), **self._gpu.read()} if step is not None else {}
        return Sample(
            **vars(self._identity),
            time=round(time.time(), 3),
            host=self._host,
            pid=self._process.pid,
            every_s=self._every_s,
            rss_bytes=rss_bytes,
            pss_bytes=pss_bytes,
            pss_kind=pss_kind,
            peak_rss_bytes=peak_rss_bytes(),
            cpu_cores=self._busy_cores(),
            net=self._traffic.read(),
            step=step,
            phase=phase,
            phases=phases,
            began=self._began,
            **device,
        )

    def _work(self) -> None:
        failures, taken = 0, 0
        while failures < _MOST_FAILURES:
            try:
                self._keep(self.sample())
                failures, taken = 0, taken + 1
            except Exception as error:
                failures += 1
                self._tell(error)
            if taken == _THIN_AFTER:
                self._every_s, taken = max(self._every_s, min(2 * self._every_s, _RAREST_S)), 0
            if self._ended.wait(self._every_s):
                return

    def _keep(self, sample: Sample) -> None:
        with self._lock:
            if self._lines is None:
                self._waiting.append(sample)
            else:
                self._lines.append(encode_sample(sample))

    def _busy_cores(self) -> float:
        before, (now, spent) = self._cpu, (time.monotonic(), time.process_time())
        self._cpu = now, spent
        return round((spent - before[1]) / (now - before[0]), 3) if now > before[0] else 0.0

    def _tell(self, error: Exception) -> None:
        if not self._told:
            self._told = True
            _log.warning("the memory of this process is not recorded (%s)", error)


def _wanted(text: str | None) -> float:
    """Return the seconds between samples; the default if ``text`` is no time: the run goes on."""
    try:
        seconds = _EVERY_S if text is None else float(text)
    except ValueError:
        return _EVERY_S
    return seconds if 0 <= seconds < float("inf") else _EVERY_S
