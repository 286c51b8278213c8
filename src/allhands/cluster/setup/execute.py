"""Runs steps: those of different computers at the same time, and everything ended when the person has had enough."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Sequence

from allhands.cluster.setup.causes import cause_of
from allhands.cluster.setup.plan import Step, shown
from allhands.cluster.setup.shell import CommandDone, Shell, on

# On another computer a command outlives its ssh. This one ends with its input, which is ours to hold.
_WATCHED = (
    'exec 3<&0; "$@" </dev/null 3<&- & work=$!; '
    '{ cat <&3; pkill -P "$work"; kill "$work"; } >/dev/null 2>&1 & watch=$!; exec 3<&-; '
    'wait "$work"; code=$?; kill "$watch" 2>/dev/null; exit "$code"'
)


class Failed(Exception):
    """A step has not done what it should; ``hint`` is what the person can do."""

    def __init__(self, step: Step, done: CommandDone) -> None:
        cause, by_hand = cause_of(done), f"by hand: {shown(step)}"
        super().__init__(f"{step.why}: {cause.text}")
        self.step = step
        self.hint = f"{cause.hint}, then run this again; {by_hand}" if cause.hint else f"run it {by_hand}"


class Runner:
    """Runs steps.

    Args:
        shell: for those without a terminal.
        tell: called before each step.
    """

    def __init__(self, shell: Shell, tell: Callable[[Step], None]) -> None:
        self._shell = shell
        self._tell = tell

    def run(self, steps: Sequence[Step]) -> None:
        """Run steps one after the other.

        Raises:
            Failed: one of them did not work; those after it are not begun. Also after the shell was stopped.
            ConfigError: there is no ssh.
        """
        for step in steps:
            self._tell(step)
            done = _with_terminal(step) if step.terminal else self._quietly(step)
            if done.code != 0:
                raise Failed(step, done)

    def _quietly(self, step: Step) -> CommandDone:
        remote = step.ssh is not None
        if step.feed is not None:
            with step.feed.open("rb") as feed:
                return self._shell.run(on(step.ssh, step.argv), feed, step.timeout_s, remote=remote)
        if not remote:
            return self._shell.run(step.argv, subprocess.DEVNULL, step.timeout_s, remote=False)
        argv = on(step.ssh, ("sh", "-c", _WATCHED, "sh", *step.argv))
        return self._shell.run(argv, subprocess.PIPE, step.timeout_s, remote=True)


def _with_terminal(step: Step) -> CommandDone:
    """In the foreground, with the person's own terminal: passwords go to the program, never through us."""
    try:
        done = subprocess.run(on(step.ssh, step.argv), timeout=step.timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return CommandDone(None)
    except OSError as error:
        return CommandDone(127, errors=f"{step.argv[0]}: {error.strerror}")
    return CommandDone(done.returncode)
