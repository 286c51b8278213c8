"""Training on several computers where a platform starts one process on each, and there is no ssh.

The processes of all computers meet, and then each starts and watches its own share of the ranks. It
does not see the other computers. When a rank fails, the ranks that wait for it fail or are ended.
Every process then reports a failure, and the platform starts the job again.
"""

from __future__ import annotations

import signal
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, wait
from functools import partial

from allhands.cluster.attempt import Attempt
from allhands.cluster.environment import gathered
from allhands.cluster.meeting import meet
from allhands.cluster.patience import Patience
from allhands.cluster.place import MeetingPoint
from allhands.cluster.processes import Share
from allhands.cluster.ranks import LaunchSpec
from allhands.cluster.supervisor import workroom
from allhands.io.files import make_directory
from allhands.observe.journal import SupervisorEvent
from allhands.runtime.threads import in_background

_TICK_S = 0.05
_TOLD_EVENTS = ("stopping", "cancelling", "killing")


def run_node(
    spec: LaunchSpec,
    own: range,
    meeting: MeetingPoint,
    tell: Callable[[str], None],
) -> tuple[int, str | None]:
    """Start this computer's ranks, watch them to the end, and leave no process behind.

    Signals have the same effect as under the supervisor: after the first one the ranks save and
    end; the second one ends them at once. Call this in the main thread.

    Args:
        spec: the whole job: ``num_processes`` counts the ranks of all computers.
        own: the ranks of this computer.
        meeting: where the processes of all computers meet.
        tell: called with lines for the user.

    Returns:
        The exit code, and the reason of a failure in words, or ``None``.

    Raises:
        DistributedError: the computers did not meet, or the ranks could not be started.
        StorageError: the directory for logs cannot be made.
    """

    def told(event: SupervisorEvent) -> None:
        if event.kind in _TOLD_EVENTS:
            tell(event.message)

    def meet_others(ports: Sequence[int]) -> tuple[str, ...] | None:
        # In threads, so that a signal is noticed at once.
        size, patience = spec.num_processes, Patience(tell=tell)
        visits = [
            in_background(partial(meet, meeting, rank, size, port, patience, spec.backend))
            for rank, port in zip(own, ports, strict=True)
        ]
        while True:
            done, left = wait(visits, _TICK_S, FIRST_EXCEPTION)
            peers = [one.result() for one in done]
            if not left:
                return peers[0]
            if room.signals:
                return None

    make_directory(spec.log_dir, private=True)
    for rank in own:  # remove the error files of an earlier start
        (spec.log_dir / f"error-rank-{rank}.json").unlink(missing_ok=True)
    with workroom() as room, gathered(len(own), spec.backend, meet_others) as peers:
        if peers is None:
            tell("stopped before the first step")
            return 130 if room.signals[0] == signal.SIGINT else 143, None
        share = Share(own.start, len(own), peers, socket.gethostname())
        outcome = Attempt(
            spec, room.private / "ranks", room.signals, told, room.reaper, share=share
        ).run()
    if (fault := outcome.fault) is None:
        return outcome.code, None
    text = f"rank {fault.rank}: {fault.explanation}" if fault.explanation else fault.message
    return outcome.code, "\n  ".join([text, *(() if fault.explanation else fault.log_tail[-3:])])
