"""``allhands env``: the launcher of this process, its settings, and the source of each value."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import asdict
from typing import Any

import typer
from rich.table import Table
from rich.text import Text

from allhands.cli.verbs_runs import Env, Version
from allhands.cluster.environment import recognise_here
from allhands.cluster.place import LaunchPlace
from allhands.io.formatting import counted, format_bytes
from allhands.io.terminal import console_for, print_json, printable
from allhands.runtime.versions import version_of

_WIDTH = 80
_MOST_PEERS = 8
_PACKAGES = ("allhands", "mlx", "mlx-lm")


def show_environment(asked: Env) -> None:
    """Run the verb."""
    launch, versions, device = recognise_here(), _versions(), _device()
    if asked.as_json:
        print_json(as_dictionary(launch, versions, device), default=str)
        return
    console = console_for()
    console.width = min(console.width, _WIDTH) if sys.stdout.isatty() else _WIDTH
    with console.capture() as shown:
        console.print(_headline(launch))
        for title, rows in (
            ("recognised", [("", fact) for fact in launch.why]),
            ("would be used", _used(launch)),
            ("ignored", [("", text) for text in _ignored(launch)]),
            ("note", [("", note) for note in launch.notes]),
            ("here", _here(versions, device)),
        ):
            if rows:
                console.print(f"\n{title}:")
                console.print(_table(rows))
    for line in shown.get().splitlines():
        typer.echo(line.rstrip())


def version(_: Version) -> None:
    """Run the verb."""
    for name in ("allhands", "mlx", "mlx-lm", "numpy"):
        typer.echo(f"{name} {version_of(name) or 'is not installed'}")


def as_dictionary(
    launch: LaunchPlace, versions: dict[str, str], device: dict[str, Any]
) -> dict[str, Any]:
    """Return the report for JSON; unknown values are ``None``."""
    content = {**asdict(launch), **asdict(launch.platform)}
    for name in ("reason", "facts", "exports", "name"):
        del content[name]
    point = launch.meeting
    return {
        **content,
        "meeting": {"host": point.host, "ports": point.ports} if point else None,
        "platform": launch.platform.name or None,
        "why": launch.why,
        "notes": launch.notes,
        "versions": versions,
        "device": device,
    }


def _versions() -> dict[str, str]:
    found = {package: version_of(package) or "not installed" for package in _PACKAGES}
    return {"python": platform.python_version(), **found}


def _device() -> dict[str, Any]:
    """Return facts of MLX's device, or MLX's error: this command must work without MLX, too."""
    try:
        from allhands.runtime.accelerator import detect

        found = detect()
    except Exception as error:
        return {"error": f"MLX does not work here: {error}"}
    return {name: getattr(found, name) for name in ("kind", "name", "memory_bytes", "cores")}


def _headline(launch: LaunchPlace) -> str:
    if launch.launcher == "single" and not launch.platform.name and not launch.reason:
        return "nothing recognised: one process; allhands train -n N starts several here"
    if launch.ranks_per_node > 1:
        nodes = f"computer {launch.rank} of {launch.size}" if launch.size > 1 else "this computer"
        return f"{launch.launcher}: one process for the {launch.ranks_per_node} ranks of {nodes}"
    if launch.size == 1:
        by = f"{launch.launcher}: " if launch.launcher != "single" else ""
        on = (
            f" on {launch.platform.name}"
            if launch.platform.name not in ("", launch.launcher)
            else ""
        )
        return f"{by}one process{on}"
    here = f", {launch.local_rank} of {launch.local_size} on this computer"
    return f"{launch.launcher}: rank {launch.rank} of {launch.size}{here}"


def _used(launch: LaunchPlace) -> list[tuple[str, str]]:
    rows = [
        ("back-end", launch.backend if launch.size > 1 else "none: one process exchanges nothing")
    ]
    if launch.meeting is not None:
        ports = f"{launch.meeting.ports[0]} to {launch.meeting.ports[-1]}, the first that is free"
        rows.append(("meeting", f"of all ranks at {launch.meeting.host}, port {ports}"))
    if launch.hosts:
        names = [*dict.fromkeys(launch.hosts)]
        more = f" and {len(names) - _MOST_PEERS} more" if len(names) > _MOST_PEERS else ""
        rows.append(("peers", ", ".join(names[:_MOST_PEERS]) + more))
    paths = launch.paths
    rows += [(f"data, {channel}", str(path)) for channel, path in paths.data.items()]
    for title in ("model", "checkpoints", "output", "tensorboard", "config"):
        if (path := getattr(paths, title)) is not None:
            rows.append((title, str(path)))
    if launch.grace_s is not None:
        rows.append(("time to end", f"{launch.grace_s:g} s after SIGTERM"))
    if launch.failure_file is not None:
        rows.append(("failure file", str(launch.failure_file)))
    if launch.requeue:
        rows.append(("to requeue", " ".join(launch.requeue)))
    return rows


def _ignored(launch: LaunchPlace) -> list[str]:
    """Return a line for each variable of another launcher; long and unprintable values are left
    out.
    """
    alone = launch.launcher == "single"
    why = "this variable alone does not make a rank" if alone else f"{launch.launcher} comes first"
    values = {name: os.environ.get(name, "") for name in launch.ignored}
    return [
        f"{name}={value}: {why}" if len(value) < 40 and value.isprintable() else f"{name}: {why}"
        for name, value in values.items()
    ]


def _here(versions: dict[str, str], device: dict[str, Any]) -> list[tuple[str, str]]:
    others = [f"{name} {version}" for name, version in versions.items() if name != "allhands"]
    if "error" in device:
        shown = str(device["error"])
    else:
        memory, cores = format_bytes(device["memory_bytes"]), counted(device["cores"], "core")
        shown = f"{device['kind']} ({device['name']}), {memory}, {cores}"
    return [
        ("allhands", versions["allhands"]),
        ("versions", ", ".join(others)),
        ("device", shown),
    ]


def _table(rows: list[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    titled = any(title for title, _ in rows)
    table.add_column(width=2)
    if titled:
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for title, text in rows:
        table.add_row("", *([title] if titled else []), Text(printable(text)))
    return table
