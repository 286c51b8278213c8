"""Options of verbs about runs, plans and this computer: each class is the command line of a verb."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from allhands.cli.verbs_models import Host, HostNames, Port, Seed, Token

Runs = Annotated[list[Path], typer.Argument(help="Run directories or metrics.jsonl files; the first is compared with.")]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        help="HTML file to write, and Markdown beside it. [RUN/report.html; of several runs: report.html]",
    ),
]


Looked = Annotated[
    Path, typer.Argument(metavar="PATH", help="A run's directory, or one checkpoint. [adapters]", show_default=False)
]
Quick = Annotated[bool, typer.Option("--quick", help="Compare sizes only; do not read the contents.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]
Inspected = Annotated[
    Path,
    typer.Argument(metavar="PATH", help="A checkpoint, or a run: its latest. [adapters]", show_default=False),
]


class Plan(NamedTuple):
    """Predict a training's time and memory, on one computer or more.

    Will it fit, how long will it take on one computer and on several, what does it cost, and what to do.

    All other options are those of `allhands train` (with --shape or --tokenizer: `allhands pretrain`), and mean the
    training that is planned. Six steps of it are trained here first, unless --device names other computers. With
    --hosts, --hostfile or -n the link between those ranks is measured, too. The plan is kept as plan.json in the run's
    directory (--adapter-path), and compared with the run by `allhands report`.
    """

    context: typer.Context
    device: Annotated[
        list[str] | None,
        typer.Option("--device", help="Other computers than this one: 'M1 Pro 32GB, 2 x M1 16GB'. Repeatable."),
    ] = None
    link: Annotated[
        str | None, typer.Option("--link", help="Between them: thunderbolt4, 10GbE, 1GbE, wifi, or 400Mbit/s,2ms.")
    ] = None
    after: Annotated[
        Path | None,
        typer.Option(
            "--after", metavar="RUN", help="Only tell what a run shows: is it as planned, has it outgrown this?"
        ),
    ] = None
    machines: Annotated[
        str | None, typer.Option("--machines", help="Imagine so many computers of the one kind: 1,2,4,8.")
    ] = None
    once: Annotated[bool, typer.Option("--once", help="Such a training is needed only once.")] = False
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=1, help="For each of its two runs.")] = 300.0
    price_per_hour: Annotated[float | None, typer.Option("--price-per-hour", help="Of one computer.")] = None
    watts: Annotated[float | None, typer.Option("--watts", help="Of one computer while it trains.")] = None
    price_per_kwh: Annotated[float | None, typer.Option("--price-per-kwh", help="Of its energy.")] = None
    picture: Annotated[Path | None, typer.Option("--picture", help="Draw the chart here: PNG, SVG or PDF.")] = None
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is no picture of ours.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False


class Plot(NamedTuple):
    """Draw the loss curves of runs on one graph; print their times.

    Of a single run the memory of its processes is drawn, too, beside it.
    """

    runs: Annotated[list[Path], typer.Argument(help="Run directories or metrics.jsonl files.")]
    out: Annotated[Path, typer.Option("--out", "-o", help="PNG to write.")] = Path("loss.png")
    title: Annotated[str | None, typer.Option("--title", help="Title of the graph.")] = None
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is no such picture.")] = False


class Monitor(NamedTuple):
    """Show memory, load and phases of a run's processes, live.

    Ends when the run does; of one that has ended the last values and the highest are shown.
    """

    run: Annotated[Path, typer.Argument(help="Directory of a run that goes on, or has ended.")]
    once: Annotated[bool, typer.Option("--once", help="Print one table and end.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print every sample as a line of JSON instead.")] = False
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 2.0
    hosts: Annotated[str | None, typer.Option("--hosts", help="Look there too, over ssh: a,b.")] = None
    hostfile: Annotated[str | None, typer.Option("--hostfile", help="The same, of the computers of a file.")] = None


class Report(NamedTuple):
    """Write a page about a run, or several compared.

    One HTML file that needs no network, and the same words and tables as Markdown: curves, what they say of
    overfitting and underfitting, speed, memory, restarts, machines, data, samples and configuration.
    """

    runs: Runs
    out: Out = None
    title: Annotated[str | None, typer.Option("--title", help="Title of the page.")] = None
    force: Annotated[bool, typer.Option("--force", help="Replace a file that is no report.")] = False


class Dashboard(NamedTuple):
    """Show runs in the browser while they go on.

    Loss, speed, memory and phases of several runs, their processes side by side, the end of their logs, and a button
    that asks a run to save and stop. Only this computer is answered, unless --host says otherwise. Ends with Ctrl-C.
    """

    runs: Annotated[Path, typer.Argument(help="Directory below which the runs are.")] = Path()
    host: Host = "127.0.0.1"
    port: Port = 8765
    token: Token = None
    name: HostNames = None


class Demo(NamedTuple):
    """Teach a small model to talk like a pirate, from start to end.

    It is trained on one process and on two, and asked before and after.
    """

    out: Annotated[Path, typer.Option("--out", "-o", help="Directory for everything the demo makes.")] = Path(
        "demo-run"
    )
    iters: Annotated[int, typer.Option("--iters", min=2, help="Iterations: batches to train on.")] = 60
    seed: Seed = 0


class CheckpointList(NamedTuple):
    """List the checkpoints of a run: step, time, size, and whether they are whole.

    The exit code is 9 if none is whole.
    """

    path: Looked = Path("adapters")
    quick: Quick = False


class CheckpointInspect(NamedTuple):
    """Show what a checkpoint holds: progress, settings, files and arrays."""

    path: Inspected = Path("adapters")
    as_json: AsJson = False


class CheckpointVerify(NamedTuple):
    """Read every checkpoint of a run, or one, and compare it with its sums.

    The exit code is 9 if any is damaged.
    """

    path: Looked = Path("adapters")


class Env(NamedTuple):
    """Show the launcher of this process, and its settings.

    These are the back-end, peers, paths and the time to end. The exit code is 7 if the
    launcher's variables contradict each other.
    """

    as_json: AsJson = False


class Version(NamedTuple):
    """Show the versions of allhands and its packages."""


class Container(NamedTuple):
    """Train in a container, on SageMaker, Vertex AI or Kubernetes.

    Reads what SageMaker, Vertex AI or Kubernetes hand to it, and leaves the model where they look for it.
    """

    arguments: Annotated[
        list[str] | None,
        typer.Argument(metavar="[train] [OPTIONS]", help="Options of allhands train; or another program to run."),
    ] = None
