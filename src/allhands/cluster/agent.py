"""The agent, which does the supervisor's work on another computer. The supervisor starts it over
ssh with ``python -P -m allhands.cluster.agent``.

It reads :mod:`frames <allhands.cluster.frames>` from its standard input and answers on its standard
output. The first frame, ``hello``, brings the secret of the run and says what to start. The answer
``ready`` names the ports that are reserved for the ranks. ``start`` brings the addresses of all
ranks. After that the agent reports changes as they happen. When the supervisor is silent or gone,
or when this process is killed, all processes that it has started are ended.
"""

from __future__ import annotations

import contextlib
import os
import queue
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from allhands.cluster.frames import FROM_SUPERVISOR, GARBLED, Frame, FrameLink
from allhands.cluster.processes import Share, reserve_ports, start
from allhands.cluster.ranks import LaunchSpec, Marks, RankProcesses
from allhands.cluster.reaper import Reaper
from allhands.errors import AllhandsError, ConfigError, DistributedError, Interrupted, StorageError
from allhands.io.files import make_directory, private_opener, storage_error_of
from allhands.io.staging import Scratch
from allhands.observe.monitor import Follower, Identity, ProcessSampler, monitor_file
from allhands.runtime.blas import allowed_cores
from allhands.runtime.versions import software_here

SILENCE_S = 15.0  # without a frame from the supervisor, after which the ranks are ended
_TICK_S = 0.05
_SAMPLES_S = 1.0
_HELLO_S = 30.0
# If the loop does not run for this long, for example because a file system hangs, the kernel ends
# this process. Its reaper then ends the ranks.
_STUCK_S = 40
_FLUSH_S = 2.0


class Agent:
    """The part of one attempt that runs on this computer."""

    def __init__(self, link: FrameLink, hello: Frame, reaper: Reaper) -> None:
        self._link = link
        self._hello = hello
        self._reaper = reaper
        self._first: int = hello["first"]
        self._count: int = hello["count"]
        self._scratch = Scratch()
        self._run_dir = self._scratch.path
        reaper.directory(self._run_dir)
        self._ports: list[socket.socket] = []
        self._ranks: RankProcesses | None = None
        self._told: dict[int, Marks] = {}
        self._exited: set[int] = set()
        self._attested = False
        self._outputs: list[threading.Thread] = []
        self._sampler = ProcessSampler(_identity(hello))
        self._samples: Follower | None = None
        self._told_samples = float("-inf")

    def prepare(self) -> None:
        """Reserve ports, look for a checkpoint, and report both to the supervisor.

        Raises:
            AllhandsError: the directory, the address or the checkpoints cannot be used.
        """
        hello = self._hello
        os.environ.update(hello["forwarded"])
        enter_directory(hello["cwd"], None if hello["cwd_required"] else hello["below_home"])
        ports = self._reserve(hello["address"])
        self._link.send("ready", ports=ports, versions=software_here(), **newest_step(hello))

    def start(self, peers: Sequence[str]) -> None:
        """Start the ranks of this computer; ``peers`` are the addresses of all ranks of the job.

        Raises:
            AllhandsError: they cannot be started.
        """
        spec = self._with_logs(self._spec())
        self._observe(spec.log_dir)
        if spec.backend != "ring" or sys.platform != "linux":
            self._release_ports()
        output = self._output() if self._first == 0 and not spec.tag_output else None
        share = Share(
            self._first, self._count, tuple(peers), self._hello["name"], output, self._tell_line
        )
        self._ranks = start(spec, self._run_dir, self._reaper, share)
        if output and not self._hello["descriptors"]:
            for descriptor in output:
                os.close(descriptor)

    def _with_logs(self, spec: LaunchSpec) -> LaunchSpec:
        """Return the spec with a directory in which logs can be written.

        If the directory of the run cannot be written, the logs go to a temporary directory. What
        matters in them is sent to the supervisor.

        Raises:
            StorageError, OSError: logs cannot be written, and rank 0 is on this computer. Its files
                belong to the run, so they cannot go elsewhere.
        """
        if not self._hello["log_dir"]:
            return replace(spec, log_dir=make_directory(self._run_dir / "logs", private=True))
        try:
            make_directory(spec.log_dir, private=True)
            for rank in self._own():
                set_aside(spec.log_dir, rank)
                with open(spec.log_dir / f"rank-{rank}.log", "ab", opener=private_opener):
                    pass
        except (StorageError, OSError) as error:
            if self._first == 0:
                raise
            own = make_directory(self._run_dir / "logs", private=True)
            _say(f"no logs are kept in {spec.log_dir}: {getattr(error, 'message', error)}")
            return replace(spec, log_dir=own)
        return spec

    def _observe(self, log_dir: Path) -> None:
        """Begin to sample this process.

        If the supervisor is on another computer, it also gets the samples of all processes here.
        """
        files = [monitor_file(log_dir, "agent", self._hello["name"])]
        files += [monitor_file(log_dir, "rank", rank) for rank in self._own()]
        for file in files if self._hello["env"].get("ALLHANDS_ATTEMPT") == "1" else ():
            with contextlib.suppress(OSError):  # usually there is no such file
                file.replace(file.with_name(f"{file.name}.previous"))
        if self._hello.get("relay"):
            self._samples = Follower(log_dir, [file.name for file in files])
            self._samples.lines()  # skip those of earlier attempts
        self._sampler.write_to(files[0])
        self._sampler.__enter__()

    def _tell_samples(self) -> None:
        if self._samples is not None:
            self._told_samples = time.monotonic()
            for line in self._samples.lines():
                self._link.send("sample", line=line)

    def tell_changes(self) -> None:
        """Send the supervisor what has changed since the last call."""
        if self._ranks is None:
            return
        now = time.monotonic()
        if now > self._told_samples + _SAMPLES_S:
            self._tell_samples()
        for rank in self._own():
            marks = self._ranks.marks(rank)
            if marks != self._told.get(rank, Marks()):
                self._told[rank] = marks
                self._link.send("marks", rank=rank, **_aged(marks, now))
        ends = self._ranks.exits()
        if not self._attested and (content := self._ranks.attested()) is not None:
            self._attested = True
            self._link.send("attested", content=content)
        for end in ends:
            if end.rank not in self._exited:
                self._exited.add(end.rank)
                self._link.send(
                    "exit",
                    rank=end.rank,
                    code=end.code,
                    age=now - end.time,
                    report=self._report(end.rank),
                )

    def obey(self, frame: Frame) -> bool:
        """Do what the supervisor asks for; return false when it asks the agent to end.

        Raises:
            AllhandsError: the frame is not understood, or the ranks cannot be started.
        """
        kind = frame["kind"]
        if kind == "end":
            return False
        if kind == GARBLED:
            raise DistributedError(
                f"the supervisor sent an unknown message ({frame['what']!a})",
                code="message-not-understood",
                hint="install the same version of allhands everywhere",
            )
        if kind == "ping":
            self._link.send("pong", number=frame["number"])
        elif kind == "start":
            self.start(frame["peers"])
        elif self._ranks is None:
            pass
        elif kind == "signal":
            self._ranks.signal(frame["rank"], frame["number"])
        elif kind == "tell":
            self._ranks.tell(frame["word"])
        elif kind == "report":
            self._link.send("report", rank=frame["rank"], report=self._report(frame["rank"]))
        return True

    def end(self) -> None:
        """End every process that is left, and remove what was private to this attempt."""
        if self._ranks is not None:
            self._ranks.kill()
            self.tell_changes()
        self._sampler.close()
        self._tell_samples()
        self._release_ports()
        for thread in self._outputs:
            thread.join(_FLUSH_S)
        self._scratch.close()
        if self._hello.get("log_dir") and not self._hello.get("keep_logs", True):
            self._remove_logs()

    def _remove_logs(self) -> None:
        """Remove the logs of a job that need not be kept, unless a rank has failed here."""
        ends = self._ranks.exits() if self._ranks is not None else []
        if {end.code for end in ends} <= {0, Interrupted.exit_code}:
            log_dir = Path(self._hello["log_dir"]).expanduser().absolute()
            shutil.rmtree(log_dir, ignore_errors=True)
            with contextlib.suppress(OSError):  # the directory above still has other files
                log_dir.parent.rmdir()

    def _own(self) -> range:
        return range(self._first, self._first + self._count)

    def _spec(self) -> LaunchSpec:
        hello = self._hello
        first, *rest = hello["command"]
        # Python has another path on this computer than on the supervisor's.
        command = [sys.executable if first == hello["python"] else first, *rest]
        log_dir = Path(hello["log_dir"]).expanduser().absolute()
        weights = None if hello["weights"] is None else tuple(hello["weights"])
        cores = hello["cores_per_rank"] or max(1, allowed_cores() // self._count)
        return LaunchSpec(
            command,
            hello["num_processes"],
            hello["backend"],
            log_dir,
            cores_per_rank=cores,
            env=hello["env"],
            stop_grace_s=hello["stop_grace_s"],
            weights=weights,
            tag_output=hello["tag_output"],
            rdma=hello["rdma"],
        )

    def _reserve(self, address: str) -> list[int]:
        ring = self._hello["backend"] == "ring"
        count = self._count if ring else int(self._first == 0)
        self._ports, numbers = reserve_ports(count, ring, address)
        return numbers

    def _release_ports(self) -> None:
        for one in self._ports:
            one.close()
        self._ports = []

    def _output(self) -> tuple[int, int]:
        """Return the two descriptors for the output of rank 0.

        On the supervisor's computer they are the supervisor's own; elsewhere they are pipes, whose
        content is sent to the supervisor.
        """
        if self._hello["descriptors"]:
            first, second = self._hello["descriptors"]
            return first, second
        ends = [os.pipe() for _ in range(2)]
        for stream, (reader, _) in enumerate(ends, 1):
            thread = threading.Thread(
                target=self._forward, args=(reader, stream), name=f"output-{stream}", daemon=True
            )
            self._outputs.append(thread)
            thread.start()
        return ends[0][1], ends[1][1]

    def _forward(self, reader: int, stream: int) -> None:
        with contextlib.suppress(OSError):
            while data := os.read(reader, 16384):
                self._link.send("output", stream=stream, data=data.decode("latin-1"))
                self._link.flush(SILENCE_S)  # so that a slow connection slows the writer down
        os.close(reader)

    def _tell_line(self, rank: int, line: bytes) -> None:
        self._link.send("line", rank=rank, data=line.decode("latin-1"))
        self._link.flush(SILENCE_S)

    def _report(self, rank: int) -> dict[str, Any]:
        assert self._ranks is not None
        return {
            "stopped": self._ranks.stopped(rank),
            "error": self._ranks.error(rank),
            "log_path": str(self._ranks.log_path(rank)),
            "log_tail": self._ranks.log_tail(rank),
            "out_of_memory": self._ranks.out_of_memory(rank),
        }


def _identity(hello: Frame) -> Identity:
    env: Mapping[str, str] = hello.get("env", {})
    return Identity(
        "agent", run=env.get("ALLHANDS_RUN_ID", ""), attempt=int(env.get("ALLHANDS_ATTEMPT", "1"))
    )


def enter_directory(path: str, below_home: str | None) -> None:
    """Make ``path`` the working directory; it may be absent if the hostfile does not ask for it.

    Args:
        below_home: path below the home directory that is tried instead; if that is absent too, the
            working directory stays as it is. ``None``: ``path`` is required.

    Raises:
        ConfigError: ``path`` is required and cannot be entered.
    """
    try:
        os.chdir(os.path.expanduser(path))
    except OSError as error:
        if below_home is None:
            raise ConfigError(
                f"{path} cannot be entered: {error.strerror}",
                code="directory-inaccessible",
                hint='correct "cwd" in the hostfile',
            ) from None
        with contextlib.suppress(OSError):
            os.chdir(Path.home() / below_home)
        _say(f"{path} is not here ({error.strerror}); working in {os.getcwd()}")


def set_aside(log_dir: Path, rank: int) -> None:
    """Keep a rank's log of the previous attempt beside the new one, and remove its old error file.

    The files of other ranks are left alone: on a shared file system they belong to other computers.
    """
    (log_dir / f"error-rank-{rank}.json").unlink(missing_ok=True)
    with contextlib.suppress(FileNotFoundError):
        (log_dir / f"rank-{rank}.log").replace(log_dir / f"rank-{rank}.previous.log")


def newest_step(hello: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``step`` of the newest checkpoint on this computer, and whether it is the run's
    ``own``.

    If the run has no checkpoint here, ``step`` is that of the run to resume from, or ``None``.
    """
    if hello["adapter_path"] is None:
        return {"step": None, "own": False}
    from allhands.checkpoints import quick_step

    if (step := quick_step(Path(hello["adapter_path"]).expanduser(), hello["run_id"])) is not None:
        return {"step": step, "own": True}
    source = hello["resume"]
    return {"step": None if source is None else quick_step(Path(source).expanduser()), "own": False}


def serve(link: FrameLink, frames: queue.SimpleQueue[Frame | None]) -> int:
    """Do one job until it has ended, and return the exit code."""
    try:
        hello = frames.get(timeout=_HELLO_S)
    except queue.Empty:
        hello = None
    if hello is None or hello["kind"] != "hello":
        _say(
            "no message from a supervisor that knows the secret; only allhands itself starts this program"
        )
        return ConfigError.exit_code
    with Reaper() as reaper:
        agent: Agent | None = None
        try:
            agent = Agent(link, hello, reaper)
            agent.prepare()
            _work(agent, frames)
        except (AllhandsError, OSError) as error:
            _refuse(link, error)
            _wait_for_end(frames)
        finally:
            if agent is not None:
                agent.end()
    link.send("ended")
    link.flush(_FLUSH_S)
    return 0


def _work(agent: Agent, frames: queue.SimpleQueue[Frame | None]) -> None:
    """Obey the supervisor until it asks the agent to end, closes the connection, or is silent for
    too long.
    """
    heard = time.monotonic()
    while time.monotonic() < heard + SILENCE_S:
        signal.alarm(_STUCK_S)
        try:
            frame = frames.get(timeout=_TICK_S)
        except queue.Empty:
            agent.tell_changes()
            continue
        if frame is None or not agent.obey(frame):
            return
        heard = time.monotonic()
        agent.tell_changes()
    _say(f"nothing heard from the supervisor for {SILENCE_S:g} s")


def _refuse(link: FrameLink, error: AllhandsError | OSError) -> None:
    if isinstance(error, OSError):
        error = storage_error_of(error, "a file")
    parts = {name: getattr(error, name) for name in ("message", "code", "where", "hint")}
    link.send("refused", type=type(error).__name__, **parts)


def _wait_for_end(frames: queue.SimpleQueue[Frame | None]) -> None:
    deadline = time.monotonic() + SILENCE_S
    with contextlib.suppress(queue.Empty):
        while (frame := frames.get(timeout=max(0.0, deadline - time.monotonic()))) and frame[
            "kind"
        ] != "end":
            pass


def _aged(marks: Marks, now: float) -> dict[str, Any]:
    """Return marks with ages instead of times, because another computer's clock differs."""
    beat = None
    if marks.beat is not None:
        beat = asdict(marks.beat)
        beat["age"] = now - beat.pop("time")
    busy_age = None if marks.busy_time is None else now - marks.busy_time
    told = {"ready": marks.ready, "started": marks.started, "listening": marks.listening}
    return {**told, "busy_age": busy_age, "beat": beat}


def _say(text: str) -> None:
    """Write a line into the log that the supervisor keeps for this computer."""
    with contextlib.suppress(OSError):
        os.write(2, f"allhands agent on {socket.gethostname()}: {text}\n".encode())


def main() -> int:
    """Entry point of the process."""
    signal.alarm(_STUCK_S)
    reader, writer = os.dup(0), os.dup(1)
    # Only frames may be written to the supervisor, so other output goes to standard error.
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    frames: queue.SimpleQueue[Frame | None] = queue.SimpleQueue()
    # A handler that does nothing: if SIGINT were ignored, the ranks would inherit this.
    signal.signal(signal.SIGINT, lambda number, frame: None)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: frames.put(None))
    link = FrameLink(
        reader,
        writer,
        FROM_SUPERVISOR,
        None,
        frames.put,
        lambda line: _say("a line without the secret is ignored"),
    )
    return serve(link, frames)


if __name__ == "__main__":
    code = main()
    # Do not wait for threads: one may be waiting for a network that is gone.
    os._exit(code)
