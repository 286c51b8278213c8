"""Options of verbs about several computers: each class is the command line of a verb."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, NamedTuple

import typer

# Of the computers' back-ends, those that are measured and those that are trained with.
MEASURED = ("auto", "all", "ring", "mpi", "nccl")
BACKENDS = ("auto", "ring", "mpi", "nccl", "jaccl")
PLACE = "~/.allhands/env"


class ClusterInit(NamedTuple):
    """Make computers ready to train together, and write the hostfile.

    Looks what each of them has, and asks before anything is changed: ssh keys are
    accepted and installed, the same environment is made everywhere. What is there
    already stays. For example: allhands cluster init --hosts localhost,node1,node2

    If some cannot be used the hostfile is written without them (exit code 7); it
    stays as it is if none can, or if you do not agree to what one of them needs.
    """

    hosts: Annotated[str, typer.Option("--hosts", metavar="A,B,...", help="Names of the computers, as ssh has them.")]
    hostfile: Annotated[Path, typer.Option("--hostfile", metavar="FILE", help="Hostfile to write.")] = Path(
        "hosts.json"
    )
    python: Annotated[
        str | None, typer.Option("--python", metavar="VERSION|PATH", help="Python for all. [this one's version]")
    ] = None
    env_dir: Annotated[str, typer.Option("--env-dir", metavar="DIR", help="Place of the environments.")] = PLACE
    install_key: Annotated[
        bool, typer.Option("--install-key", help="Put your ssh key where it is refused (with ssh-copy-id).")
    ] = False
    origin: Annotated[
        str | None,
        typer.Option("--from", metavar="VERSION|WHEEL|DIR", help="Which allhands to install. [the one that runs here]"),
    ] = None
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands; change nothing.")] = False


class ClusterSync(NamedTuple):
    """Copy model, data and configuration to every host, by rsync over ssh.

    Only what differs is sent, and hosts pass it on; an interrupted transfer is resumed.
    """

    paths: Annotated[list[str] | None, typer.Argument(metavar="[PATH]...", help="Further files, directories.")] = None
    hostfile: Annotated[str | None, typer.Option("--hostfile", help="Hosts, as JSON of mlx.launch or MPI's.")] = None
    hosts: Annotated[str | None, typer.Option("--hosts", metavar="A,B,C", help="Hosts by name.")] = None
    model: Annotated[str | None, typer.Option("--model", help="Model directory, Hub repository, or 'demo'.")] = None
    data: Annotated[str | None, typer.Option("--data", help="Directory with training data.")] = None
    config: Annotated[
        str | None, typer.Option("--config", "-c", help="YAML file; also the model and data that it names.")
    ] = None
    stages: Annotated[
        bool, typer.Option("--stages", help="Only the weights that each host's stages of a pipeline need.")
    ] = False
    pp_split: Annotated[
        str | None, typer.Option("--pp-split", metavar="20,12", help="With --stages: blocks of each stage.")
    ] = None
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be sent.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False
    chain: Annotated[bool, typer.Option("--chain", help="From host to host, in order.")] = False
    tree: Annotated[
        bool, typer.Option("--tree", help="Every host that has everything sends to the next that waits. [default]")
    ] = False
    star: Annotated[bool, typer.Option("--star", help="This computer sends to all at once.")] = False
    transport: Annotated[
        str,
        typer.Option("--transport", metavar="auto|ssh", help="auto: hosts send to each other; ssh: from here only."),
    ] = "auto"
    delete: Annotated[str, typer.Option("--delete", metavar="no", help="Nothing is ever deleted elsewhere.")] = "no"


class ClusterCheck(NamedTuple):
    """Find what is wrong with a set of computers before training does.

    The exit code is 7 if something stops training, 0 if there are only warnings.
    """

    hostfile: Annotated[Path | None, typer.Option("--hostfile", help="MLX's JSON, or MPI's 'host slots=N'.")] = None
    hosts: Annotated[str | None, typer.Option("--hosts", metavar="A,B,C", help="Names, in place of a file.")] = None
    model: Annotated[str | None, typer.Option("--model", help="Is it there, and the same everywhere?")] = None
    data: Annotated[str | None, typer.Option("--data", help="Are they there, and the same everywhere?")] = None
    backend: Annotated[str, typer.Option("--backend", metavar="|".join(BACKENDS), help="Meant for training.")] = "auto"
    adapter_path: Annotated[str, typer.Option("--adapter-path", help="Where a run would write.")] = "adapters"
    quick: Annotated[bool, typer.Option("--quick", help="Compare sizes of files only; do not read them.")] = False
    bench: Annotated[bool, typer.Option("--bench/--no-bench", help="Measure a real group of MLX.")] = True
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=1.0, help="Seconds to wait for a computer.")] = 20.0
    as_json: Annotated[bool, typer.Option("--json", help="Print everything that was found out as JSON.")] = False


class ClusterBench(NamedTuple):
    """Measure how fast the computers exchange gradients.

    A real group is formed, and all-reduces of 4 KiB to 64 MiB are timed over all ranks; then each link by itself.
    """

    hostfile: Annotated[
        str | None, typer.Option("--hostfile", help="Computers to measure, in MLX's JSON or MPI's lines.")
    ] = None
    hosts: Annotated[str | None, typer.Option("--hosts", metavar="A,B,C", help="The same, by name.")] = None
    num_ranks: Annotated[
        int | None, typer.Option("-n", "--num-ranks", min=2, max=1024, help="Ranks on this computer alone. [2]")
    ] = None
    backend: Annotated[
        str, typer.Option("--backend", metavar="|".join(MEASURED), help="Back-end; 'all': each that is possible.")
    ] = "auto"
    links: Annotated[bool, typer.Option("--links/--no-links", help="Also measure each pair of computers.")] = True
    timeout_s: Annotated[float, typer.Option("--timeout-s", min=5.0, help="Seconds for each back-end, at most.")] = (
        120.0
    )
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False
