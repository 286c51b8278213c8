"""``allhands cluster sync``: copies model, data and configuration to every host."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import typer
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from allhands.cli.parser import refuse_idle
from allhands.cli.verbs_cluster import ClusterSync
from allhands.cluster.hosts import Host, chosen_hosts
from allhands.cluster.sync.plan import SyncPlan
from allhands.cluster.sync.run import Show, synchronise
from allhands.cluster.sync.state import HostState, SyncOptions, SyncState
from allhands.cluster.sync.wanted import plan_of
from allhands.config.yaml_files import read_yaml
from allhands.errors import ConfigError
from allhands.io.formatting import counted, format_duration, format_size
from allhands.io.terminal import print_json, progress_console, say
from allhands.runtime.blas import cache_dir

_SHOWN_FILES = 8


def sync(asked: ClusterSync) -> None:
    """Run the verb."""
    if asked.delete != "no":
        raise ConfigError(
            "sync deletes nothing on other hosts",
            code="option-unsupported",
            where="--delete",
            hint="files that exist only there are kept: remove them by hand",
        )
    hosts = chosen_hosts(asked.hosts, asked.hostfile)
    raise typer.Exit(run_sync(asked, hosts, _options(asked)))


def _options(asked: ClusterSync) -> SyncOptions:
    named = {"chain": asked.chain, "tree": asked.tree, "star": asked.star}
    topologies = [name for name, chosen in named.items() if chosen]
    transport = asked.transport
    if len(topologies) > 1:
        where = " ".join(f"--{name}" for name in topologies)
        raise ConfigError(
            "these exclude each other",
            code="options-conflict",
            where=where,
            hint="give one of them, or none",
        )
    if transport in ("tls", "tcp"):
        raise ConfigError(
            f"there is no {transport} any more",
            code="value-unknown",
            where="--transport",
            hint="leave it out: all files go over ssh, from host to host if they can log in to each other",
        )
    if transport not in ("auto", "ssh"):
        raise ConfigError(
            f"{transport!r} is not a transport",
            code="value-unknown",
            where="--transport",
            hint="use auto or ssh",
        )
    topology: Any = "star" if transport == "ssh" else topologies[0] if topologies else "tree"
    return SyncOptions(topology, asked.dry_run, cache_dir() / "sync-hashes.json")


def run_sync(wanted: ClusterSync, hosts: Sequence[Host], options: SyncOptions) -> int:
    """Copy the wanted files to these hosts and print the result; return the exit code.

    Raises:
        AllhandsError: no file could be copied to any host.
    """
    plan = _planned(wanted, hosts)
    with _progress(
        shown=sys.stderr.isatty() and not wanted.as_json and not options.dry_run
    ) as show:
        state = synchronise(plan, hosts, options, show)
    if wanted.as_json:
        print_json(as_record(state, options.dry_run))
    else:
        for line in report_lines(state, options.dry_run):
            typer.echo(line)
    for error in state.errors:
        say(f"error: {error}")
    return state.exit_code


def _planned(wanted: ClusterSync, hosts: Sequence[Host]) -> SyncPlan:
    """Return the files to copy; flags win over the configuration."""
    content = {} if wanted.config is None else read_yaml(wanted.config)
    model, data = wanted.model or content.get("model"), wanted.data
    pipeline = _pipeline(wanted, content, model)
    paths = list(wanted.paths or ())
    if wanted.config is not None:
        paths.append(wanted.config)
    named = content.get("data")
    if data is None and isinstance(named, str) and Path(os.path.expanduser(named)).exists():
        data = named
    return plan_of(paths, None if model is None else str(model), data, pipeline, hosts)


def _pipeline(
    wanted: ClusterSync, content: Mapping[str, Any], model: str | None
) -> dict[str, Any] | None:
    """Return the options of the requested pipeline; ``None``: every host gets all files.

    Args:
        content: the configuration file.

    Raises:
        ConfigError: an option has no effect, or there is no model.
    """
    if not wanted.stages:
        refuse_idle({"--pp-split": wanted.pp_split}, "without --stages", "add it")
        return None
    if model is None:
        raise ConfigError(
            "there is no model to divide",
            code="option-missing",
            where="--stages",
            hint="add --model",
        )
    named = ("pp", "pp_split", "pp_schedule")
    given = {name: content[name] for name in named if content.get(name) is not None}
    return given if wanted.pp_split is None else {**given, "pp_split": wanted.pp_split}


# --- output ---------------------------------------------------------------------------------------


def report_lines(state: SyncState, dry_run: bool) -> list[str]:
    """Return the result as lines for people."""
    head = f"{counted(len(state.sizes), 'file')}, {format_size(state.total)}"
    lines = [f"note: {note}" for note in state.notes] + [head]
    for host in state.hosts:
        lines.append(f"{host.name}: {_outcome(host, dry_run)}")
        if dry_run:
            more = len(host.paths) - _SHOWN_FILES
            lines += [f"  {path}" for path in host.paths[:_SHOWN_FILES]] + [
                f"  and {more} more"
            ] * (more > 0)
    return lines


def _outcome(host: HostState, dry_run: bool) -> str:
    files = counted(len(host.lacking), "file")
    if host.state == "failed":
        kept = f"; {format_size(host.received)} received, which are kept" if host.received else ""
        return f"failed{kept}"
    if not host.lacking:
        return "has everything already"
    if dry_run:
        return f"lacks {files}; at most {format_size(host.needed)} would be sent"
    if host.done_s is None:
        return "not finished"
    origin = f" from {host.parent}" if host.received and host.parent else ""
    return f"{files}, {format_size(host.received)} received{origin}, done after {format_duration(host.done_s)}"


def as_record(state: SyncState, dry_run: bool) -> dict[str, Any]:
    """Return the result for machines, in bytes and seconds."""
    hosts = [
        {
            "name": host.name,
            "state": host.state,
            "files": [state.names[file] for file in host.lacking],
            "paths": list(host.paths),
            "bytes_needed": host.needed,
            "bytes_received": host.received,
            "bytes_sent": host.sent,
            "from": host.parent,
            "seconds": host.done_s,
            "error": None if host.error is None else str(host.error),
            "code": None if host.error is None else host.error.code,
        }
        for host in state.hosts
    ]
    return {
        "dry_run": dry_run,
        "files": len(state.sizes),
        "bytes": state.total,
        "bytes_sent": state.sent,
        "seconds": state.seconds,
        "hosts": hosts,
        "changed_while_sent": state.withdrawn,
        "notes": state.notes,
        "exit_code": state.exit_code,
    }


@contextmanager
def _progress(*, shown: bool) -> Generator[Show]:
    """Yield a function that shows the state: a bar for every host and one for all.

    A host's bar first shows the bytes that the host reads, then the bytes that it receives.
    """
    if not shown:
        yield lambda state: None
        return

    text = TextColumn("{task.description}", markup=False)
    rest = (DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn(compact=True))
    with Progress(text, BarColumn(bar_width=None), *rest, console=progress_console()) as bars:
        tasks: dict[str, Any] = {}

        def put(key: str, text: str, done: int, total: int | None) -> None:
            if key not in tasks:
                tasks[key] = bars.add_task(text, total=total)
            bars.update(tasks[key], description=text, completed=done, total=total)

        def show(state: SyncState) -> None:
            for host in state.hosts:
                if host.state in ("connecting", "looking"):
                    put(host.name, f"{host.name} {host.state}", host.read, state.total)
                else:
                    word = host.state if host.state != "receiving" else ""
                    put(host.name, f"{host.name} {word}".strip(), _come(host), host.needed)
            if not state.sizes:
                put("", "reading here", state.hashed, None)
            else:
                known = [
                    host for host in state.hosts if host.state in ("waiting", "receiving", "done")
                ]
                put("", "all", sum(map(_come, known)), sum(host.needed for host in known))

        yield show


def _come(host: HostState) -> int:
    """Return received bytes for the bar: all at the end, although rsync may send less."""
    return host.needed if host.state == "done" else min(host.needed, host.received)
