"""Options of verbs about several computers: each class is the command line of a verb."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple

from typer import Argument, Option

from allhands.cli.verbs_models import Backend

PLACE = "~/.allhands/env"


class ClusterInit(NamedTuple):
    """Make computers ready to train together, and write the hostfile.

    The command asks before each change: it accepts and installs ssh keys, and makes
    the same environment on all computers. Finished work is not repeated. For
    example: allhands cluster init --hosts localhost,node1,node2

    Computers that cannot be used are left out of the hostfile (exit code 7). It
    stays unchanged if none can be used, or if you refuse a change.
    """

    hosts: Annotated[
        str,
        Option(metavar="A,B,...", help="Names of the computers, as for ssh."),
    ]
    hostfile: Annotated[Path, Option(metavar="FILE", help="Hostfile to write.")] = Path(
        "hosts.json"
    )
    python: Annotated[
        str | None,
        Option(metavar="VERSION|PATH", help="Python for all. [this one's version]"),
    ] = None
    env_dir: Annotated[str, Option(metavar="DIR", help="Place of the environments.")] = PLACE
    install_key: Annotated[
        bool,
        Option(
            "--install-key", help="Install your ssh key on computers that refuse it (ssh-copy-id)."
        ),
    ] = False
    origin: Annotated[
        str | None,
        Option(
            "--from",
            metavar="VERSION|WHEEL|DIR",
            help="Version, wheel or directory of allhands to install. [this one]",
        ),
    ] = None
    yes: Annotated[bool, Option("--yes", "-y", help="Do not ask.")] = False
    dry_run: Annotated[bool, Option("--dry-run", help="Print the commands; change nothing.")] = (
        False
    )


class ClusterSync(NamedTuple):
    """Copy model, data and configuration to every host, by rsync over ssh.

    Only differences are sent, and hosts pass them on. An interrupted transfer is resumed.
    """

    paths: Annotated[
        list[str] | None, Argument(metavar="[PATH]...", help="Further files, directories.")
    ] = None
    hostfile: Annotated[str | None, Option(help="Hostfile: MLX's JSON or MPI's lines.")] = None
    hosts: Annotated[str | None, Option(metavar="A,B,C", help="Hosts by name.")] = None
    model: Annotated[str | None, Option(help="Model directory, Hub repository, or 'demo'.")] = None
    data: Annotated[str | None, Option(help="Directory with training data.")] = None
    config: Annotated[
        str | None,
        Option("--config", "-c", help="YAML file to copy, with the model and data that it names."),
    ] = None
    stages: Annotated[
        bool,
        Option("--stages", help="Copy to each host only the weights of its pipeline stages."),
    ] = False
    pp_split: Annotated[
        str | None,
        Option(metavar="20,12", help="With --stages: blocks of each stage."),
    ] = None
    dry_run: Annotated[bool, Option("--dry-run", help="Only list what would be sent.")] = False
    as_json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False
    chain: Annotated[bool, Option("--chain", help="Send from host to host, in order.")] = False
    tree: Annotated[
        bool,
        Option("--tree", help="Hosts with all files send to waiting hosts. [default]"),
    ] = False
    star: Annotated[bool, Option("--star", help="Send from this computer to all at once.")] = False
    transport: Annotated[
        str,
        Option(
            metavar="auto|ssh",
            help="auto: hosts send to each other; ssh: from here only.",
        ),
    ] = "auto"
    delete: Annotated[
        str, Option(metavar="no", help="Only no: nothing is deleted on other hosts.")
    ] = "no"


class ClusterCheck(NamedTuple):
    """Check computers for faults before training.

    The exit code is 7 if something stops training, 0 if there are only warnings.
    """

    hostfile: Annotated[Path | None, Option(help="Hostfile: MLX's JSON or MPI's lines.")] = None
    hosts: Annotated[str | None, Option(metavar="A,B,C", help="Hosts by name.")] = None
    model: Annotated[str | None, Option(help="Model that must be equal everywhere.")] = None
    data: Annotated[str | None, Option(help="Data that must be equal everywhere.")] = None
    backend: Annotated[
        Backend, Option(metavar="|".join(Backend), help="Back-end of the training.")
    ] = Backend.auto
    adapter_path: Annotated[str, Option(help="Directory that the training will write to.")] = (
        "adapters"
    )
    quick: Annotated[
        bool, Option("--quick", help="Compare sizes of files only; do not read them.")
    ] = False
    bench: Annotated[
        bool, Option("--bench/--no-bench", help="Measure an exchange of gradients.")
    ] = True
    timeout_s: Annotated[float, Option(min=1.0, help="Seconds to wait for a computer.")] = 20.0
    as_json: Annotated[bool, Option("--json", help="Print all findings as JSON.")] = False


# Back-ends that are measured.
MeasuredBackend = StrEnum("MeasuredBackend", ["auto", "all", "ring", "mpi", "nccl"])


class ClusterBench(NamedTuple):
    """Measure how fast the computers exchange gradients.

    All-reduces of 4 KiB to 64 MiB are timed over all ranks, then each link by itself.
    """

    hostfile: Annotated[
        str | None,
        Option(help="Computers to measure, in MLX's JSON or MPI's lines."),
    ] = None
    hosts: Annotated[str | None, Option(metavar="A,B,C", help="Computers to measure, by name.")] = (
        None
    )
    num_ranks: Annotated[
        int | None,
        Option("-n", "--num-ranks", min=2, max=1024, help="Ranks on this computer alone. [2]"),
    ] = None
    backend: Annotated[
        MeasuredBackend,
        Option(
            metavar="|".join(MeasuredBackend),
            help="Back-end; 'all' measures each possible one.",
        ),
    ] = MeasuredBackend.auto
    links: Annotated[
        bool, Option("--links/--no-links", help="Also measure each pair of computers.")
    ] = True
    timeout_s: Annotated[float, Option(min=5.0, help="Seconds for each back-end, at most.")] = 120.0
    as_json: Annotated[bool, Option("--json", help="Print JSON for machines.")] = False
