"""``allhands cluster init``: from names of computers to a hostfile that works."""

from __future__ import annotations

import shlex
import sys
import threading
from functools import partial
from pathlib import Path

import typer

from allhands.cli.verbs_cluster import PLACE, ClusterInit
from allhands.cluster.setup import hostfile
from allhands.cluster.setup.flow import SetUp
from allhands.cluster.setup.outcome import Mode, SetupOutcome, SetupReport, Wishes, names_of
from allhands.cluster.setup.plan import Step, listed
from allhands.cluster.setup.source import find_source, wheel_store
from allhands.cluster.setup.survey import Surveyor, wanted_from
from allhands.errors import ConfigError, DistributedError
from allhands.io.formatting import counted, format_bytes
from allhands.io.terminal import say

_END = "END_OF_HOSTFILE"
_note = partial(typer.echo, err=True)


def cluster_init(asked: ClusterInit) -> None:
    """Run the verb."""
    raise typer.Exit(run_init(_wishes(asked)))


def run_init(wishes: Wishes) -> int:
    """Set the computers up; return the exit code, which is 0 if all of them can be used.

    Raises:
        ConfigError: a question is necessary, and there is no terminal.
        AllhandsError: no computer could be set up.
    """
    report = SetUp(wishes, _Terminal()).run()
    if wishes.mode == "dry-run":
        _print_script(report, wishes.output)
    if wishes.mode == "refuse" and (
        report.shown or (report.text and not report.written and not report.up_to_date)
    ):
        _print_outcomes(report)
        _refuse(report, wishes.output)
    _print_outcomes(report)
    if wishes.mode != "dry-run":
        _print_end(report, wishes.output)
    if any(o.trouble and not o.pending for o in report.outcomes):
        return DistributedError.exit_code
    return 0


def _mode(asked: ClusterInit) -> Mode:
    if asked.dry_run:
        return "dry-run"
    if asked.yes:
        return "yes"
    return "ask" if sys.stdin.isatty() else "refuse"


def _wishes(asked: ClusterInit) -> Wishes:
    names = names_of(asked.hosts)
    output, env_dir = asked.hostfile.absolute(), asked.env_dir
    hostfile.check_output(output)
    if not env_dir.startswith(("/", "~/")):
        raise ConfigError(
            f"{env_dir!r} would be a different place on every computer",
            code="path-invalid",
            where="--env-dir",
            hint=f"give an absolute path, or one below ~/ such as {PLACE}",
        )
    old = hostfile.read_old(output) or {"hosts": []}
    wanted = wanted_from(find_source(asked.origin, wheel_store()), asked.python)
    return Wishes(
        names,
        output,
        wanted,
        Surveyor(env_dir.rstrip("/"), Path.cwd(), (sys.executable,), wanted.python_path or ""),
        asked.origin,
        _mode(asked),
        asked.install_key,
        {entry["ssh"]: entry["python"] for entry in old["hosts"] if entry.get("python")},
        place_named=env_dir != PLACE,
    )


class _Terminal:
    """Output and questions on standard error."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    def begins(self, step: Step) -> None:
        self.tell(step.title)

    def tell(self, text: str) -> None:
        with self._lock:
            say(text)

    def agrees(self, question: str) -> bool:
        print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
        return sys.stdin.readline().strip().lower() in ("y", "yes")


def _print_script(report: SetupReport, output: Path) -> None:
    """Print the changes as a script."""
    for line in listed(report.shown):
        typer.echo(line)
    for outcome in report.outcomes:
        if outcome.pending:
            typer.echo(f"# {outcome.name}: run this again afterwards: more may be missing")
    if report.up_to_date:
        typer.echo(f"# {output} stays as it is")
    elif report.text is not None:
        if report.without:
            typer.echo(f"# {output} without {', '.join(report.without)}")
        if output.exists():
            typer.echo(f"cp {shlex.quote(str(output))} {shlex.quote(f'{output}.bak')}")
        typer.echo(f"cat > {shlex.quote(str(output))} <<'{_END}'\n{report.text}{_END}")


def _refuse(report: SetupReport, output: Path) -> None:
    steps = listed(report.shown, "  ")
    if report.text is not None and not report.up_to_date and output.exists():
        steps.append(f"  # bring {output} up to date")
    raise ConfigError(
        "nothing has been changed, because there is no terminal to ask on. This would be done:\n"
        + "\n".join(steps),
        code="consent-missing",
        where="cluster init",
        hint="add --yes to agree to all of it, or run it in a terminal",
    )


def _print_outcomes(report: SetupReport) -> None:
    for outcome in report.outcomes:
        if outcome.trouble is not None:
            if not outcome.pending:
                _note(f"{outcome.name}: cannot be used: {outcome.trouble}")
                if outcome.hint:
                    _note(f"  what to do: {outcome.hint}")
            continue
        _note(f"{outcome.name}: {_described(outcome)}")
        if unused := " and ".join(outcome.unused):
            verb = "is" if len(outcome.unused) == 1 else "are"
            _note(
                f"  kept: {outcome.python} is there and has everything, so {unused} {verb} not used"
            )
    if report.why and len(report.outcomes) > 1:
        _note(f"network: {report.why}")
    if report.warning:
        _note(f"warning: {report.warning}")


def _described(outcome: SetupOutcome) -> str:
    parts: list[str] = []
    if outcome.choice is not None:
        kind = "Wi-Fi" if outcome.choice.kind == "wifi" else outcome.choice.kind
        parts.append(f"{outcome.choice.ip} ({outcome.choice.interface}, {kind})")
    if facts := outcome.facts:
        gpus = [gpu.name or gpu.kind for gpu in facts.gpus]
        parts += [
            counted(facts.processor.usable, "core"),
            format_bytes(facts.memory.total),
            ", ".join(gpus) or "no GPU",
        ]
    if outcome.python:
        parts.append(outcome.python)
    return "; ".join(parts)


def _print_end(report: SetupReport, output: Path) -> None:
    """Print the hostfile, and what to do next."""
    try:
        name = str(output.relative_to(Path.cwd()))
    except ValueError:
        name = str(output)
    name = shlex.quote(name)
    if report.refused:
        names = ", ".join(report.refused)
        _note(f"{name} is not written, because you did not agree to the changes needed on {names}")
        _note(f"  what to do: run this again and agree, or leave {names} out of --hosts")
    elif not (report.up_to_date or report.written):
        _note(f"{name} is not written")
    else:
        _print_hostfile(report, name)


def _print_hostfile(report: SetupReport, name: str) -> None:
    """Print the members of the hostfile, the missing computers, and the next commands."""
    missing = f" without {', '.join(report.without)} (see above)" if report.without else ""
    kept = f"; the earlier one is {report.kept.name}" if report.kept else ""
    typer.echo(
        f"{name} is up to date{missing}" if report.up_to_date else f"{name} written{missing}{kept}"
    )
    if others := [name for name in report.also if name not in report.stays]:
        typer.echo(f"it also has {', '.join(others)}, as before")
    if report.stays:
        typer.echo(
            f"{', '.join(report.stays)} stays in it, as before, and cannot be used now (see above)"
        )
    if len(report.hosts) == 1 and report.without:
        typer.echo("it has only one computer: correct the faults of the others, and run this again")
        return
    typer.echo(
        f"next:\n  allhands cluster check --hostfile {name}\n  allhands train --hostfile {name} ..."
    )
