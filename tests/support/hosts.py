"""Computers that share nothing but a network, each with a model and data, and what runs of allhands
leave on each.
"""

from __future__ import annotations

import shutil
from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from command_line import changed
from faulty import Bench, Trial, files_left, share_compiled
from hostile import Job, until
from namespaces import Cluster, namespaces

ITERS = 16


@contextmanager
def sharing_compiled(
    count: int, directory: Path, private: Sequence[Path] = ()
) -> Generator[Cluster]:
    """Computers that find what this one has compiled already; see :func:`namespaces`."""
    with namespaces(count, directory, private) as cluster:
        for node in cluster.nodes.values():
            share_compiled(node.temporary)
        yield cluster


@contextmanager
def trial_among(bench: Bench, cluster: Cluster, name: str) -> Generator[Trial]:
    """A trial whose cables are whole again afterwards; it leaves nothing on any of the computers."""
    with bench.trial(name) as trial:
        yield trial
        for each in cluster.names:
            cluster.heal(each)
    assert not any(cluster.processes(each) for each in cluster.names)
    assert not any(files_left(node.temporary) for node in cluster.nodes.values())


@contextmanager
def hosts_of(count: int, bench: Bench, directory: Path) -> Generator[Hosts]:
    """So many computers, each with a file tree of its own at ``directory/own``."""
    with sharing_compiled(count, directory, [directory / "own"]) as cluster:
        yield Hosts(cluster, bench)


class Hosts:
    """Computers, each with the model and the data, and what one run leaves on each."""

    def __init__(self, cluster: Cluster, bench: Bench) -> None:
        self.cluster = cluster
        self.shown = cluster.directory / "own"  # every computer sees its own files here
        for name in cluster.names:
            shutil.copytree(bench.model, self.files(name) / "model")
            shutil.copytree(bench.data, self.files(name) / "data")

    def files(self, name: str) -> Path:
        """Where this process sees what that computer has at ``shown``."""
        return self.cluster.directory / f"files-{name}-0"

    def out(self, name: str, trial: Trial) -> Path:
        """The adapter directory of a run on that computer."""
        return self.files(name) / trial.token

    def start(self, trial: Trial, hostfile: Path, *more: str | Path) -> Job:
        """Start the run on the computers of the hostfile, or start it again."""
        trial.out = self.shown / trial.token
        paths = [
            "--model",
            self.shown / "model",
            "--data",
            self.shown / "data",
            "--adapter-path",
            trial.out,
        ]
        return trial.start(*changed([*paths, "--hostfile", hostfile], more), ranks=1, iters=ITERS)

    def on(self, name: str, command: str) -> str:
        """Run a shell's command on that computer, as root."""
        return self.cluster.run(name, ["sh", "-ec", command]).stdout

    def power_off(self, name: str, *, keeps_files: bool = False) -> None:
        """Nothing runs there any more, and nobody is told; ``keeps_files``: temporary ones are not
        in memory there.
        """
        self.cluster.cut(name)
        sshd = self.cluster.nodes[name].sshd
        assert sshd is not None
        killed = [*self.cluster.processes(name), *psutil.Process(sshd.pid).children(recursive=True)]
        assert any(
            "allhands.cluster.agent" in process.cmdline()
            for process in self.cluster.processes(name)
        )
        # First who would clear up after the others.
        for process in sorted(
            killed, key=lambda one: not any("reaper.py" in word for word in _words(one))
        ):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        until(lambda: not self.cluster.processes(name), 5.0, f"{name} is still at work")
        # A computer that starts again finds these empty.
        temporary = self.cluster.nodes[name].temporary
        for file in [] if keeps_files else files_left(temporary):
            shutil.rmtree(temporary / file)

    def ports(self, name: str) -> list[int]:
        """TCP ports on which somebody listens there, but for ssh's."""
        lines = self.cluster.run(name, ["cat", "/proc/net/tcp"]).stdout.splitlines()[1:]
        listening = [line.split()[1] for line in lines if line.split()[3] == "0A"]
        return [port for word in listening if (port := int(word.rpartition(":")[2], 16)) != 22]


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []
