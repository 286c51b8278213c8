"""Options of verbs about runs, plans and this computer: each class is the command line of a verb."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from typer import Argument, Option

from allhands.cli.verbs_models import Host, HostNames, Port, Seed, Token

Runs = Annotated[
    list[Path],
    Argument(
        metavar="RUN...",
        help="Run directories or metrics.jsonl files, compared with the first.",
    ),
]
Out = Annotated[
    Path | None,
    Option(
        "--out",
        "-o",
        help="File to write, .html or .md; the other is written beside it. [RUN/report.html; of several runs: report.html]",
    ),
]


Looked = Annotated[
    Path,
    Argument(
        metavar="PATH", help="Directory of a run, or a checkpoint. [adapters]", show_default=False
    ),
]
Quick = Annotated[bool, Option("--quick", help="Compare sizes only; do not read the contents.")]
AsJson = Annotated[bool, Option("--json", help="Print everything as JSON.")]
Inspected = Annotated[
    Path,
    Argument(
        metavar="PATH",
        help="A checkpoint, or a run with its latest checkpoint. [adapters]",
        show_default=False,
    ),
]


class Plan(NamedTuple):
    """Predict a training's time and memory, on one computer or more.

    The plan says whether the training fits, how long it takes, what it costs, and what to do.

    All other options describe the training, as for `allhands train` (with --shape or --tokenizer:
    `allhands pretrain`). A few steps of it are trained here first, unless --device names other
    computers. With --hosts, --hostfile or -n the link between those ranks is measured. The plan is
    kept as plan.json in the run's directory (--adapter-path), and `allhands report` compares it
    with the run.
    """

    context: typer.Context
    device: Annotated[
        list[str] | None,
        Option(
            help="Plan for these computers instead: 'M1 Pro 32GB, 2 x M1 16GB'. Repeatable.",
        ),
    ] = None
    link: Annotated[
        str | None,
        Option(
            help="Link between computers: thunderbolt4, 10GbE, 1GbE, wifi, or 400Mbit/s,2ms.",
        ),
    ] = None
    after: Annotated[
        Path | None,
        Option(
            metavar="RUN",
            help="Compare a run with its plan, and say whether it needs another computer.",
        ),
    ] = None
    machines: Annotated[
        str | None,
        Option(
            help="Numbers of equal computers to plan for, even imagined ones: 1,2,4,8.",
        ),
    ] = None
    once: Annotated[bool, Option("--once", help="The training is needed only once.")] = False
    timeout_s: Annotated[float, Option(min=1, help="Seconds for each measurement.")] = 300.0
    price_per_hour: Annotated[float | None, Option(help="Price of one computer for an hour.")] = (
        None
    )
    watts: Annotated[float | None, Option(help="Power of one computer while it trains.")] = None
    price_per_kwh: Annotated[float | None, Option(help="Price of a kilowatt-hour.")] = None
    picture: Annotated[
        Path | None,
        Option(help="Draw the decision chart into this file: PNG, SVG or PDF."),
    ] = None
    force: Annotated[
        bool, Option("--force", help="Replace a file that is no picture of allhands.")
    ] = False
    as_json: Annotated[bool, Option("--json", help="Print JSON for machines.")] = False


class Plot(NamedTuple):
    """Draw the loss curves of runs on one graph; print their times.

    For a single run the memory of its processes is drawn, too, as memory.png in the same directory.
    """

    runs: Annotated[
        list[Path],
        Argument(metavar="RUN...", help="Run directories or metrics.jsonl files."),
    ]
    out: Annotated[Path, Option("--out", "-o", help="Picture to write: .png, .svg or .pdf.")] = (
        Path("loss.png")
    )
    title: Annotated[str | None, Option(help="Title of the graph.")] = None
    force: Annotated[
        bool, Option("--force", help="Replace a file that is no picture of allhands.")
    ] = False


class Monitor(NamedTuple):
    """Show memory, load and phases of a run's processes, live.

    The monitor ends with the run. For an ended run it shows the last and the highest values.
    """

    run: Annotated[Path, Argument(metavar="RUN", help="Directory of a run.")]
    once: Annotated[bool, Option("--once", help="Print one table and end.")] = False
    as_json: Annotated[
        bool, Option("--json", help="Print every sample as a line of JSON instead.")
    ] = False
    every: Annotated[float, Option(min=0.1, help="Seconds between two updates.")] = 2.0
    hosts: Annotated[str | None, Option(help="Computers to ask over ssh, too: a,b.")] = None
    hostfile: Annotated[str | None, Option(help="File of computers to ask over ssh, too.")] = None


class Report(NamedTuple):
    """Write a report about a run, or compare several runs.

    Writes an HTML file that needs no network, and the same text and tables as Markdown: curves,
    overfitting and underfitting, speed, memory, restarts, machines, data, samples and
    configuration.
    """

    runs: Runs
    out: Out = None
    title: Annotated[str | None, Option(help="Title of the page.")] = None
    force: Annotated[bool, Option("--force", help="Replace a file that is no report.")] = False


class Dashboard(NamedTuple):
    """Show runs in the browser while they go on.

    The page has loss, speed, memory and phases of several runs, their processes, the end of their
    logs, and a button that asks a run to save and stop. Without --host it answers only this
    computer. Ctrl-C ends the dashboard.
    """

    runs: Annotated[
        Path,
        Argument(metavar="DIR", help="Directory with runs, at any depth."),
    ] = Path()
    host: Host = "127.0.0.1"
    port: Port = 8765
    token: Token = None
    name: HostNames = None


class Demo(NamedTuple):
    """Teach a small model to talk like a pirate, from start to end.

    The model is trained on one process and on two, and answers the same questions before and after.
    """

    out: Annotated[Path, Option("--out", "-o", help="Directory for everything the demo makes.")] = (
        Path("demo-run")
    )
    iters: Annotated[int, Option(min=2, help="Iterations: batches to train on.")] = 60
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
    """Compare every checkpoint of a run, or one, with its checksums.

    The exit code is 9 if any is damaged.
    """

    path: Looked = Path("adapters")


class Env(NamedTuple):
    """Show the launcher of this process, and its settings.

    Prints the back-end, the other ranks, paths and the time for saving. The exit code is 7 if the
    variables of the launcher contradict each other.
    """

    as_json: AsJson = False


class Version(NamedTuple):
    """Show the versions of allhands and its packages."""


class Container(NamedTuple):
    """Train in a container, on SageMaker, Vertex AI or Kubernetes.

    Reads the platform's options, model and data, and writes the model to the platform's directory.
    """

    arguments: Annotated[
        list[str] | None,
        Argument(
            metavar="[train] [OPTIONS]",
            help="Options of allhands train; or another program to run.",
        ),
    ] = None
