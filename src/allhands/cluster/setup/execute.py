"""Running steps, and the reasons why they fail."""

from __future__ import annotations

import re
import subprocess

from allhands.cluster.setup.plan import Step, shown
from allhands.cluster.setup.shell import CommandDone, Shell, on
from allhands.errors import AllhandsError

# On another computer a command outlives its ssh. This one ends with its input, which this process
# holds.
_WATCHED = (
    'exec 3<&0; "$@" </dev/null 3<&- & work=$!; '
    '{ cat <&3; pkill -P "$work"; kill "$work"; } >/dev/null 2>&1 & watch=$!; exec 3<&-; '
    'wait "$work"; code=$?; kill "$watch" 2>/dev/null; exit "$code"'
)
_NO_NETWORK = "let it reach the package index, or name a mirror in its pip.conf (for uv: uv.toml)"
_MEND = "mend that Python, install uv there, or name another Python with --python"
# Words of pip and uv. A connection may break and come back, so the last line has to say that
# nothing was found.
_BROKEN = re.compile(
    r"connection broken by|Max retries exceeded|error sending request|Failed to fetch|dns error"
)
_NOT_FOUND = re.compile(
    r"No matching distribution|Could not find a version|Max retries|Request failed|Failed to fetch"
)
_WHY_BROKEN = re.compile(
    r"Temporary failure in name resolution|Name or service not known|nodename nor servname provided|"
    r"Network is unreachable|No route to host|Connection refused|(?:connection|connect|read) timed out|"
    r"certificate verify failed|Tunnel connection failed[^')]*",
    re.IGNORECASE,
)
_DEBIANS_PACKAGE = re.compile(r"apt install (\S+-venv)")


class Failed(AllhandsError):
    """A step that failed; ``hint`` tells the person what to do."""

    def __init__(self, step: Step, done: CommandDone) -> None:
        cause, mend = cause_of(done)
        by_hand = f"by hand: {shown(step)}"
        super().__init__(
            f"{step.why}: {cause}",
            code="setup-step-failed",
            hint=f"{mend}, then run this again; {by_hand}" if mend else f"run it {by_hand}",
        )


def cause_of(done: CommandDone) -> tuple[str, str]:
    """Return the cause of a command's failure, and a hint; an empty one if it is best to try by
    hand.
    """
    said, last = f"{done.errors}\n{done.output}", done.last_line
    if _BROKEN.search(said) and _NOT_FOUND.search(last):
        why = _WHY_BROKEN.search(said)
        return (
            f"it cannot reach the package index{f': {why.group()}' if why else ''} ({last})",
            _NO_NETWORK,
        )
    if "ensurepip is not" in said:
        package = _DEBIANS_PACKAGE.search(said)
        hint = f"install it there: sudo apt install {package.group(1)}" if package else _MEND
        return "its Python has no ensurepip, which puts pip into an environment", hint
    if "'ensurepip'" in last:
        return "ensurepip of its Python does not work, which puts pip into an environment", _MEND
    return last, ""


def run_step(shell: Shell, step: Step) -> None:
    """Run a step.

    Raises:
        Failed: it did not work, or the shell was stopped.
        ConfigError: there is no ssh.
    """
    done = _with_terminal(step) if step.terminal else _quietly(shell, step)
    if done.code != 0:
        raise Failed(step, done)


def _quietly(shell: Shell, step: Step) -> CommandDone:
    if step.feed is not None:
        with step.feed.open("rb") as feed:
            return shell.run(
                on(step.ssh, step.argv), feed, step.timeout_s, remote=step.ssh is not None
            )
    if step.ssh is None:
        return shell.run(step.argv, subprocess.DEVNULL, step.timeout_s, remote=False)
    argv = on(step.ssh, ("sh", "-c", _WATCHED, "sh", *step.argv))
    return shell.run(argv, subprocess.PIPE, step.timeout_s, remote=True)


def _with_terminal(step: Step) -> CommandDone:
    """Run a step in the foreground, on the person's own terminal: passwords go to the program,
    never through us.
    """
    try:
        done = subprocess.run(on(step.ssh, step.argv), timeout=step.timeout_s, check=False)
    except subprocess.TimeoutExpired:
        return CommandDone(None)
    except OSError as error:
        return CommandDone(127, errors=f"{step.argv[0]}: {error.strerror}")
    return CommandDone(done.returncode)
