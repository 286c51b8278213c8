"""Start and end of a worker process.

A rank that is blocked inside a collective runs no Python signal handler and cannot be unblocked. So
a thread watches instead. It notices signals through the wake-up descriptor, and the death of the
supervisor by polling, and it can end the process although the call is still blocked.

After an error a rank ends at once and calls no collective again. A slow end would keep the other
ranks waiting, and a normal end would hang in MPI's finalizer.
"""

from __future__ import annotations

import atexit
import errno
import faulthandler
import io
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, Self

import psutil

from allhands.cluster.environment import LaunchPlace, launch_here
from allhands.cluster.guard import TAG_VARIABLE, die_with_parent, write_whole
from allhands.cluster.outcome import REGROUP_CODE
from allhands.cluster.pace import Pace, too_short
from allhands.cluster.ranks import TRIAL_VARIABLE
from allhands.cluster.runfiles import ATTESTED_FILE, BEAT_BYTES
from allhands.errors import (
    AllhandsError,
    DistributedError,
    Interrupted,
    PeerLostError,
    behind_import,
    peer_lost,
)
from allhands.io.files import private_opener, storage_error_of
from allhands.io.terminal import is_screen, tell
from allhands.observe.monitor import Identity, ProcessSampler, monitor_file
from allhands.runtime.command import Echoes, keep_interrupts
from allhands.runtime.jit_cache import prepare_process, publish

_POLL_S = 0.5
_KEEP_KERNELS_S = 10.0
_START_GRACE_S = 2.0  # for a stop during start-up, when there is nothing to save
SPEAK_AFTER_S = 1.0  # so that the rank that is the cause reports its error before the others
_ORPHAN_CODE = 128 + signal.SIGTERM
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_TELL_S = 1.0
_LOOK_AGAIN_S = 0.2  # between two looks for a word from the supervisor


class WorkerContext:
    """A worker's contact with its supervisor; made by :func:`install`.

    It is a context manager: if an exception leaves the block, also a ``sys.exit`` with an error, it
    calls :meth:`fail`.

    Attributes:
        run_id: the supervisor's id of the run, the same in all attempts; empty if there is none.
        attempt: number of this start of the job, from 1.
        unstarted: message for a user who stops the run before it has started.
        stop_grace_s: seconds for saving after a stop, in addition to the time of the running step.
    """

    unstarted = "stopped before the first step"
    stop_grace_s = float("inf")

    def __init__(
        self,
        launch: LaunchPlace,
        run_dir: Path | None,
        log_dir: Path | None,
        run_id: str = "",
        attempt: int = 1,
    ) -> None:
        self.launch = launch
        self.run_id = run_id
        self.attempt = attempt
        self._run_dir = run_dir
        self._log_dir = log_dir
        self._stop_signal = 0
        self._started = False
        self._announce: Callable[[str], None] | None = None
        self._way_on: Callable[[], str | None] | None = None
        self._beat_file = -1
        self._beats = 0
        self._regroup = False
        self._looked = float("-inf")
        self._sampler: ProcessSampler | None = None
        self._pace = Pace()
        self._warned = False
        self._echoes = Echoes()

    def observe(self) -> None:
        """From now on sample this process's memory and phases, into a file beside its log.

        It does nothing if the process has no log.
        """
        if self._log_dir is None or self._sampler is not None:
            return
        self._sampler = ProcessSampler(
            Identity("rank", self.launch.rank, self.run_id, self.attempt)
        )
        self._sampler.write_to(monitor_file(self._log_dir, "rank", self.launch.rank))
        self._sampler.__enter__()
        atexit.register(self._sampler.close)

    def mark_ready(self) -> None:
        """Tell the supervisor that this rank now only waits for the others."""
        self._mark("ready")

    def mark_busy(self) -> None:
        """Tell the supervisor that this rank is busy with something that may take longer than the
        time limit for a start.
        """
        if self._run_dir:
            with suppress(OSError):
                (self._run_dir / f"rank-{self.launch.rank}.busy").touch()

    def attest(self, content: Mapping[str, Any]) -> None:
        """Tell the supervisor what the ranks have agreed on; a rank on trial ends here."""
        if self._run_dir:
            write_whole(self._run_dir / ATTESTED_FILE, json.dumps(content, default=str))
        if TRIAL_VARIABLE in os.environ:
            publish(os.environ)
            os._exit(0)

    def beat(self, phase: str, step: int, waited_s: float = 0.0) -> None:
        """Tell the supervisor what the training thread does after ``step`` updates.

        The training thread itself must call this. It takes microseconds and never fails: a full
        disk must not end a run here.

        Args:
            waited_s: for how long the thing that the thread waits for now has already been loading.
        """
        if self._sampler is not None:
            self._sampler.beat(phase, step)
        self._pace.beat(phase, step)
        if not self._warned and self._announce and (told := too_short(self._pace, self.launch)):
            self._warned = True
            self._announce(f"note: {told}")
        if self._run_dir is None:
            return
        self._beats += 1
        try:
            if self._beat_file < 0:
                path = self._run_dir / f"rank-{self.launch.rank}.beat"
                self._beat_file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            line = f'{{"step": {step:d}, "phase": "{phase}", "count": {self._beats}, "waited_s": {waited_s:.3f}}}'
            os.pwrite(self._beat_file, line.ljust(BEAT_BYTES - 1).encode() + b"\n", 0)
        except OSError:
            return

    def regroup_requested(self) -> bool:
        """Return whether the supervisor wants the ranks to end at the next checkpoint, to start
        again with other members.

        It is cheap, because it looks at most five times a second. Ranks may notice the request at
        different steps.
        """
        now = time.monotonic()
        if self._run_dir is not None and not self._regroup and now > self._looked + _LOOK_AGAIN_S:
            self._looked = now
            self._regroup = (self._run_dir / "regroup").exists()
        return self._regroup

    def end_for_regroup(self) -> NoReturn:
        """End this rank at once, with the code at which the supervisor starts all ranks again.

        Its checkpoint must be complete.
        """
        try:
            publish(os.environ)
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(REGROUP_CODE)

    def mark_started(self) -> None:
        """Tell the supervisor that start-up is over: the group is formed and the model is loaded.

        After this a stop signal is only recorded, for :meth:`stop_requested`. Before, it raises
        KeyboardInterrupt.
        """
        self._started = True
        self._mark("started")

    def _mark(self, name: str) -> None:
        if self._run_dir:
            write_whole(self._run_dir / f"rank-{self.launch.rank}.{name}", "")

    def announce_stops(
        self, say: Callable[[str], None], way_on: Callable[[], str | None] | None = None
    ) -> None:
        """From now on tell the user when a stop signal has been noticed.

        Args:
            say: called with a line for the user, in another thread.
            way_on: returns a text that says how to resume if the process ends without saving. It is
                called in another thread, only without a supervisor, and for at most a second.
        """
        self._announce, self._way_on = say, way_on

    def stop_requested(self) -> int:
        """Return the signal that asks the rank to finish its step, save and end; 0 if none came."""
        return self._stop_signal

    def fail(self, error: BaseException) -> NoReturn:
        """Write the error file, report the error, and end the process at once with its exit code.

        Each error should be shown once. Under our supervisor a rank writes it to its own log, and
        the supervisor reads the error files and reports for all ranks. Under another launcher the
        first rank that fails prints it.
        """
        known = as_allhands_error(behind_import(error))
        code = self._exit_code(known)
        try:
            try:
                self._write_error_file(known, code)
            except OSError:
                self._log_dir = None  # the disk is full, so report the error on standard error
            self._say(known)
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0)):
            self.fail(error)

    def handle_signal(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal in the main thread; it runs late if that is blocked in a collective."""
        self._stop_signal = self._stop_signal or _meaning(number)
        if not self._started and not self._echoes.has(number):
            raise KeyboardInterrupt

    def watch(self, signals: socket.socket, supervisor: psutil.Process | None) -> NoReturn:
        """End the process on a second signal, a stop that takes too long, or the supervisor's
        death.

        Under our supervisor a second signal is ignored. A scheduler sends its signal to every
        process, so a rank gets it both directly and from the supervisor, which passes it on. If the
        supervisor wants to end the process at once, it sends SIGKILL.
        """
        deadline, echoes = float("inf"), Echoes()
        while True:
            ready, _, _ = select.select([signals], [], [], _POLL_S)
            received = signals.recv(64) if ready else b""
            stops = (caught for caught in received if caught in _STOPS)
            for number in (_meaning(caught) for caught in stops if not echoes.has(caught)):
                if deadline < float("inf"):
                    if supervisor is not None:
                        continue
                    self._end_at_once(number)
                deadline = time.monotonic() + self._begin_stop(number)
            if time.monotonic() > deadline:
                self._end_at_once(self._stop_signal, late=True)
            if supervisor is not None and not _alive(supervisor):
                os._exit(_ORPHAN_CODE)

    def _begin_stop(self, number: int) -> float:
        """Record a stop, tell the user, and return the seconds in which the process must end."""
        self._stop_signal = self._stop_signal or number
        if (
            self._announce
            and self._started
            and not (self._run_dir and (self._run_dir / "failed").exists())
        ):
            # Only a user can press Ctrl-C, not a scheduler.
            more = "; press Ctrl-C again to stop at once" if number == signal.SIGINT else ""
            # In a thread of its own: a blocked terminal must not block this thread.
            threading.Thread(
                target=self._announce, args=(f"{self._pace.told()}{more}",), daemon=True
            ).start()
        grace = min(self.stop_grace_s + self._pace.longest_s, sys.float_info.max / 2)
        return grace if self._started else min(grace, _START_GRACE_S)

    def _say(self, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt) and self._log_dir is None:
            error = Interrupted(self.unstarted, code="stopped-before-start")
        if isinstance(error, SystemExit | KeyboardInterrupt):
            return
        if not isinstance(error, AllhandsError):
            traceback.print_exception(error)
        elif self._log_dir is not None:
            self._say_supervised(error)
        elif self._turn_to_speak(error):
            tell(as_message(error, self.launch.rank if self.launch.size > 1 else None))

    def _say_supervised(self, error: AllhandsError) -> None:
        """Write the error into this rank's log; rank 0 also shows how a stopped run has ended.

        With tagged output rank 0 does not, because its log is shown on the screen.
        """
        assert self._log_dir is not None
        rank = self.launch.rank
        with (
            suppress(OSError),  # if the disk is full, the error file says so
            open(
                self._log_dir / f"rank-{rank}.log", "a", encoding="utf-8", opener=private_opener
            ) as log,
        ):
            print(as_message(error), file=log)
        if rank == 0 and isinstance(error, Interrupted) and TAG_VARIABLE not in os.environ:
            tell(as_message(error))

    def _turn_to_speak(self, error: AllhandsError) -> bool:
        """Wait until the rank that is the cause, or rank 0, has had time to report its error.

        Return false if the launcher has asked this rank to stop meanwhile: then another rank has
        reported the cause.
        """
        if self.launch.rank == 0 and not isinstance(error, PeerLostError):
            return True
        deadline = time.monotonic() + SPEAK_AFTER_S
        while time.monotonic() < deadline and not self._stop_signal:
            time.sleep(0.02)
        return not self._stop_signal

    def _end_at_once(self, number: int, *, late: bool = False) -> NoReturn:
        """End the process because of a signal.

        Before that, show the terminal's cursor again, which a progress display hides.
        """
        if self._announce and is_screen(sys.stdout):
            _write(1, "\x1b[?25h\n")
        if self._announce and self._log_dir is None:
            how = (
                "ended at once"
                if not late
                else f"not ended within {self.stop_grace_s:g} s (--stop-grace-s)"
            )
            _write(2, f"allhands: {how}; what was not saved is lost\n")
            # In a thread of its own: a disk that does not answer must not delay the end.
            told = threading.Thread(target=self._tell_way_on, daemon=True)
            told.start()
            told.join(_TELL_S)
        os._exit(128 + number)

    def _tell_way_on(self) -> None:
        # Before this run has started, the checkpoints in the directory may be another run's.
        if self._way_on and self._started:
            with suppress(Exception):  # if the advice fails, show none rather than a traceback
                if text := self._way_on():
                    _write(2, f"  {text}\n")

    def _exit_code(self, error: BaseException) -> int:
        if isinstance(error, Interrupted | KeyboardInterrupt):
            return 128 + (self._stop_signal or signal.SIGINT)
        if isinstance(error, AllhandsError):
            return error.exit_code
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            return error.code & 0xFF or 1
        return 1

    def _write_error_file(self, error: BaseException, code: int) -> None:
        if self._log_dir is None:
            return
        known = error if isinstance(error, AllhandsError) else None
        content = {
            "rank": self.launch.rank,
            "type": type(error).__name__,
            "message": known.message if known else str(error),
            **{
                name: getattr(known, name, None)
                for name in ("code", "where", "hint", "misfits", "peer", "problem")
            },
            "text": str(known) if known else None,
            "exit_code": code,
            "time": time.time(),
            "traceback": "".join(traceback.format_exception(error)),
        }
        name, text = f"error-rank-{self.launch.rank}.json", json.dumps(content, indent=1)
        try:
            write_whole(self._log_dir / name, text)
        except OSError:  # the disk is full, which may be the error itself
            if self._run_dir is None:
                raise
            write_whole(self._run_dir / name, text)


def install(launch: LaunchPlace, environ: Mapping[str, str]) -> WorkerContext:
    """Prepare this process to work under a supervisor, under mpirun, or alone.

    Call this once, in the main thread. After it:

    - An uncaught exception calls :meth:`WorkerContext.fail`.
    - Once training has started (:meth:`WorkerContext.mark_started`), SIGINT, SIGTERM and SIGUSR1 (a
      scheduler's warning) only ask the process to stop. Without our supervisor, the second signal
      ends it at once.
    - The process ends when its supervisor has ended.
    - At SIGUSR2 from the supervisor it writes the stacks of its threads into its log.

    While MLX's ring waits for its peers in ``init``, it holds Python's global lock, so the watching
    thread cannot run. Only the supervisor's start deadline ends that wait.

    Args:
        environ: variables; those that begin with ``ALLHANDS_`` come from the supervisor.
    """
    context = _context(launch, environ)
    prepare_process()
    if launch.launcher == "openmpi":
        die_with_parent()  # started by mpirun itself, without our guard
    with suppress(RuntimeError, io.UnsupportedOperation):  # no standard error to write to
        faulthandler.enable()
    keep_interrupts()
    sys.excepthook = lambda kind, error, trace: context.fail(error)
    if "ALLHANDS_RUN_DIR" in environ and (log_dir := environ.get("ALLHANDS_LOG_DIR")):
        _trace_on_signal(Path(log_dir, f"rank-{launch.rank}.log"))
    supervisor = _supervisor(environ)
    context.stop_grace_s = float(environ.get("ALLHANDS_STOP_GRACE_S", "inf"))
    arguments = (_signal_descriptor(context), supervisor)
    threading.Thread(
        target=context.watch, args=arguments, name="allhands-watch", daemon=True
    ).start()
    if "ALLHANDS_RUN_DIR" in environ:
        threading.Thread(target=_keep_kernels, name="allhands-kernels", daemon=True).start()
    return context


def _context(launch: LaunchPlace, environ: Mapping[str, str]) -> WorkerContext:
    run_dir, log_dir = environ.get("ALLHANDS_RUN_DIR"), environ.get("ALLHANDS_LOG_DIR")
    return WorkerContext(
        launch,
        Path(run_dir) if run_dir else None,
        Path(log_dir) if log_dir else None,
        environ.get("ALLHANDS_RUN_ID", ""),
        int(environ.get("ALLHANDS_ATTEMPT", "1")),
    )


def end_at_errors(launch: LaunchPlace, environ: Mapping[str, str]) -> None:
    """Let an uncaught exception end this process at once and tell the supervisor, as
    :func:`install` does.

    This is for a user's own program, which handles signals itself. Without this a failed rank may
    wait at its end for the others (MPI does so), while they wait for it.
    """
    if sys.excepthook is sys.__excepthook__:
        context = _context(launch, environ)
        sys.excepthook = lambda kind, error, trace: context.fail(error)


@cache
def contact() -> WorkerContext:
    """Return this process's contact with its supervisor.

    The first call makes it with :func:`install`, in the main thread. From then on the memory of
    this process is sampled.
    """
    context = install(launch_here(), os.environ)
    context.observe()
    return context


def _keep_kernels() -> NoReturn:
    """From time to time store the kernels that MLX has compiled, so that they are not lost if this
    attempt ends suddenly.
    """
    while True:
        time.sleep(_KEEP_KERNELS_S)
        publish(os.environ)


def as_message(error: AllhandsError, rank: int | None = None) -> str:
    """Return an error as a message of allhands: the rank if it is given, what is wrong, where, and
    what to do.
    """
    kind = "" if isinstance(error, Interrupted) else "error: "
    return f"allhands: {kind}{'' if rank is None else f'rank {rank}: '}{error}"


def as_allhands_error(error: BaseException) -> BaseException:
    """Return our exception for a full disk, or for an error of MLX's communication back-ends.

    Any other ``error`` is returned unchanged. MLX raises plain RuntimeErrors; "[ring] connection to
    a peer was lost" means that another rank has ended before.
    """
    if isinstance(error, OSError) and error.errno in (
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EROFS,
        errno.EFBIG,
    ):
        return storage_error_of(error, "standard output or a file")
    if not isinstance(error, RuntimeError):
        return error
    text = str(error)
    if "peer was lost" in text:
        ours = peer_lost()
    elif any(mark in text for mark in ("[ring]", "[mpi]", "[nccl]", "[jaccl]")):
        ours = DistributedError(f"MLX could not communicate: {text}", code="communication-failed")
    else:
        return error
    ours.__cause__ = error
    return ours


def _signal_descriptor(context: WorkerContext) -> socket.socket:
    """Return a socket from which another thread can read the signals that ask to stop, even while
    the main thread is blocked.
    """
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach(), warn_on_full_buffer=False)
    for number in _STOPS:
        signal.signal(number, context.handle_signal)
    return reader


def _write(file: int, text: str) -> None:
    """Write ``text`` if possible: an output that fails must not prevent the process from ending."""
    with suppress(OSError):
        os.write(file, text.encode())


def _meaning(number: int) -> int:
    """Return the signal with the same meaning: SIGUSR1, a scheduler's warning, means SIGTERM."""
    return signal.SIGTERM if number == signal.SIGUSR1 else number


def _trace_on_signal(log: Path) -> None:
    """Let SIGUSR2 write the stacks of all threads into ``log``, even while the main thread is in a
    call that never returns.
    """
    with suppress(OSError):  # if the log cannot be opened, the stacks are not written
        # Not closed: the handler, which is not Python code, writes to this descriptor.
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        faulthandler.register(signal.SIGUSR2, file=descriptor, all_threads=True)


def _supervisor(environ: Mapping[str, str]) -> psutil.Process | None:
    number = environ.get("ALLHANDS_SUPERVISOR_PID")
    if number is None:
        return None
    try:
        return psutil.Process(int(number))
    except psutil.NoSuchProcess:
        os._exit(_ORPHAN_CODE)


def _alive(process: psutil.Process) -> bool:
    try:
        # is_running also compares the start time, so another process with the same id does not
        # count.
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
