"""``mpirun --hostfile`` and ``allhands train --hostfile`` over three computers that share no files,
on the demo model.

The computers are network namespaces with an address, a host name, an sshd, and a copy of model and
data each.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from faulty import files_left
from hosts import sharing_compiled
from namespaces import Cluster
from ring_ranks import allhands_command
from runs import read_run
from tiny import run_allhands, write_chat_data, write_model

from allhands.cluster.mpi import find_mpi
from allhands.data.demo import write_demo_data
from allhands.distributed import backend
from allhands.errors import DistributedError, ModelError
from allhands.model.sources import demo_model

Done = subprocess.CompletedProcess[str]
ITERS = 3
_needs_mpi = pytest.mark.skipif(find_mpi() is None, reason="Open MPI is not installed")


class Hosts:
    """Three computers; what each has at ``shown`` is its own."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.shown = cluster.directory / "own"

    def files(self, name: str) -> Path:
        """Where this process sees what that computer has at ``shown``."""
        return self.cluster.directory / f"files-{name}-0"

    def mpirun(
        self,
        names: Sequence[str],
        arguments: Sequence[str],
        timeout: float,
        path: str | None = None,
        network: Sequence[str] | None = None,
    ) -> Done:
        """As a person calls it on the first computer, whose ssh knows the others."""
        hostfile = self.files("node0") / "hostfile"
        hostfile.write_text("".join(f"{name} slots=1\n" for name in names))
        mpi = find_mpi()
        assert mpi is not None
        # The network to the bit: addresses of a wider one that come and go meanwhile, as those of
        # other tests may, crash mpirun (PRRTE 3: SIGSEGV in 6 of 160 starts with a /16, in none of
        # 160 with the /24).
        usual = ["--prtemca", "prte_if_include", self.cluster.network]
        usual += ["--mca", "btl_tcp_if_include", self.cluster.network]
        network = usual if network is None else network
        ssh = ["--prtemca", "plm_ssh_agent", self.cluster.ssh_command, "-x", "OPENBLAS_NUM_THREADS"]
        ranks = ["--hostfile", str(self.shown / "hostfile"), "-np", str(len(names))]
        command = self.cluster.command(
            "node0", [str(mpi.mpirun), *ssh, *network, *ranks, *arguments]
        )
        root = {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OPENBLAS_NUM_THREADS": "1",
        }
        temporary = {"TMPDIR": str(self.cluster.nodes["node0"].temporary)}
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **root, **temporary, **({"PATH": path} if path else {})},
            timeout=timeout,
            check=False,
        )


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    directory = tmp_path_factory.mktemp("cluster")
    with sharing_compiled(3, directory, [directory / "own"]) as cluster:
        made = Hosts(cluster)
        for name in cluster.names:
            write_model(made.files(name) / "tiny")
            write_chat_data(made.files(name) / "chats")
        yield made


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "hosts" in request.fixturenames:
        cluster: Cluster = request.getfixturevalue("hosts").cluster
        for name, node in cluster.nodes.items():
            cluster.wait_for_none(name, 5.0)
            assert files_left(node.temporary) == []


def demo(root: Path) -> list[str]:
    """The demo's fine-tune, shortened."""
    text = f"train --train --model {root / 'model'} --data {root / 'data'} --adapter-path {root / 'out'} --mask-prompt"
    numbers = f"--num-layers 8 --batch-size 6 --iters {ITERS} --steps-per-report 1 --steps-per-eval {ITERS}"
    return [*text.split(), *numbers.split(), "--val-batches", "1", "--learning-rate", "5e-4"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the demo's model and data, and the result of one process in ``out``."""
    root = tmp_path_factory.mktemp("alone")
    try:
        shutil.copytree(demo_model(), root / "model")
    except ModelError as error:
        pytest.skip(f"the demo model cannot be had: {error}")
    write_demo_data(root / "data")
    done = run_allhands(*demo(root), timeout=240)
    assert done.returncode == 0, done.stderr
    return root


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", [pytest.param("mpirun", marks=_needs_mpi), "allhands"])
def test_the_demo_on_three_computers_computes_what_one_process_does(
    hosts: Hosts, alone: Path, tmp_path: Path, how: str
) -> None:
    for name in hosts.cluster.names:
        for part in ("model", "data"):
            shutil.copytree(alone / part, hosts.files(name) / part, dirs_exist_ok=True)
        shutil.rmtree(hosts.files(name) / "out", ignore_errors=True)
    if how == "mpirun":
        done = hosts.mpirun(hosts.cluster.names, allhands_command(*demo(hosts.shown)), timeout=240)
    else:
        hostfile = hosts.cluster.hostfile(tmp_path / "hosts.json")
        # Each computer believes that all cores are its own.
        done = run_allhands(
            *demo(hosts.shown), "--hostfile", hostfile, "--cores-per-rank", "1", timeout=240
        )
    assert done.returncode == 0, done.stdout + done.stderr
    # mpirun shows what the ranks write, and only rank 0 reports; our own supervisor shows every
    # rank's report with its rank and computer before it.
    shown = re.findall(rf"^(.*)step {ITERS}/{ITERS} ", done.stdout, re.MULTILINE)
    names = hosts.cluster.names
    expected_prefixes = (
        [""] if how == "mpirun" else [f"[rank {rank} {name}] " for rank, name in enumerate(names)]
    )
    assert sorted(shown) == expected_prefixes
    found, expected = read_run(hosts.files("node0") / "out"), read_run(alone / "out")
    assert len(expected.losses) == ITERS
    np.testing.assert_allclose(found.losses, expected.losses, rtol=2e-5)
    np.testing.assert_allclose(found.valid_losses, expected.valid_losses, rtol=2e-5)
    assert not (hosts.shown / "out" / "adapters.safetensors").exists(), "files are shared"


PAGE = Path(__file__).parents[2] / "docs" / "several-processes.md"


@_needs_mpi
@pytest.mark.long
def test_the_pages_lines_find_the_command_on_the_other_computer(hosts: Hosts) -> None:
    """Its ssh sessions do not have the environment's directory in their PATH."""
    lines = re.findall(
        r"^mpirun --hostfile hosts -np 2 (.*)$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert len(lines) == 2
    own = Path(sys.executable).parent
    assert (
        str(own)
        not in hosts.cluster.run(
            "node0", [*shlex.split(hosts.cluster.ssh_command), "node1", "env"]
        ).stdout
    )
    for line in [*lines, lines[0].replace("-x PATH ", "")]:
        words = shlex.split(
            line.replace('"$(command -v allhands)"', str(own / "allhands")).replace(
                "--iters 20", ""
            )
        )
        values = [
            str(hosts.shown / {"--model": "tiny", "--data": "chats"}[flag])
            for flag in ("--model", "--data")
        ]
        for flag, value in zip(("--model", "--data"), values, strict=True):
            words[words.index(flag) + 1] = value
        out = ["--adapter-path", str(hosts.shown / "lines"), "--iters", "2"]
        path = f"{own}:{os.environ['PATH']}"
        done = hosts.mpirun(["node0", "node1"], [*words, *out], timeout=100, path=path)
        assert (done.returncode == 0) == (line in lines), done.stdout + done.stderr
    assert "unable to find the specified executable file" in done.stderr


SERIES = PAGE.with_name("coming-from-mlx-lm.md")


@_needs_mpi
@pytest.mark.long
def test_the_series_line_trains_on_both_computers(hosts: Hosts) -> None:
    """With the names of its own options for the network; of which there is no other here, so that a
    wrong one fails.
    """
    (line,) = re.findall(
        r"^mpirun --hostfile hosts -np 2 (.*)$", SERIES.read_text(encoding="utf-8"), re.MULTILINE
    )
    own = Path(sys.executable).parent
    for network in (hosts.cluster.network, "bridge0"):
        words = shlex.split(
            line.replace('"$(command -v allhands)"', str(own / "allhands")).replace(
                "bridge0", network
            )
        )
        for flag, value in {"--model": "tiny", "--data": "chats"}.items():
            words[words.index(flag) + 1] = str(hosts.shown / value)
        words[words.index("--iters") + 1] = "2"
        words[words.index("--num-layers") + 1] = "2"
        out = ["--adapter-path", str(hosts.shown / "series")]
        done = hosts.mpirun(["node0", "node1"], [*words, *out], timeout=100, network=[])
        assert (done.returncode == 0) == (network != "bridge0"), done.stdout + done.stderr
        assert ("2 (mpi)" in done.stdout) == (network != "bridge0"), done.stdout + done.stderr


# --- equal host names -----------------------------------------------------------------------------


@_needs_mpi
@pytest.mark.long
def test_two_computers_of_the_same_name_do_not_train(hosts: Hosts) -> None:
    """Open MPI takes them for one, and adds whatever it finds in the memory that it believes to be
    shared.
    """
    paths = f"--model {hosts.shown / 'tiny'} --data {hosts.shown / 'chats'} --adapter-path {hosts.shown / 'twins'}"
    options = f"train --train {paths} --iters 3 --batch-size 4 --start-timeout-s 20".split()
    for name in ("node1", "node2"):
        hosts.cluster.rename(name, "macbook")
    try:
        done = hosts.mpirun(["node1", "node2"], allhands_command(*options), timeout=100)
    finally:
        for name in ("node1", "node2"):
            hosts.cluster.rename(name, name)
    assert done.returncode != 0
    assert "step 1/" not in done.stdout
    for name in hosts.cluster.names:
        assert not list((hosts.files(name) / "twins").rglob("*.safetensors"))
    assert "allhands: error: " in done.stderr
    assert "give every computer a host name of its own" in done.stderr, done.stderr

    for node in hosts.cluster.nodes.values():
        for file in files_left(node.temporary):  # MPI aborts the other rank, which cannot clean up
            shutil.rmtree(node.temporary / file)
    again = hosts.mpirun(["node1", "node2"], allhands_command(*options), timeout=100)
    assert again.returncode == 0, again.stderr


@_needs_mpi
@pytest.mark.long
def test_the_computer_that_differs_is_named_under_mpirun(hosts: Hosts, tmp_path: Path) -> None:
    """It is rank 0's, which has other data and another file of options than the two others."""
    settings = "batch_size: 4\niters: 3\nval_batches: 0\n"
    for name in hosts.cluster.names:
        (hosts.files(name) / "run.yaml").write_text(
            settings.replace("4", "5") if name == "node0" else settings
        )
    data = hosts.files("node0") / "chats" / "train.jsonl"
    before = data.read_text()
    data.write_text(before.replace('"content": "', '"content": "b', 1))
    paths = f"--model {hosts.shown / 'tiny'} --data {hosts.shown / 'chats'} --adapter-path {hosts.shown / 'odd'}"
    options = (
        f"train --train --config {hosts.shown / 'run.yaml'} {paths} --start-timeout-s 20".split()
    )
    try:
        done = hosts.mpirun(hosts.cluster.names, allhands_command(*options), timeout=100)
    finally:
        data.write_text(before)
    for node in hosts.cluster.nodes.values():
        for file in files_left(node.temporary):  # MPI aborts the other ranks, which cannot clean up
            shutil.rmtree(node.temporary / file)
    assert done.returncode != 0
    assert "node0 does not match node1 and node2" in done.stderr, done.stderr
    assert "config.batch_size is 4 on node1 and 5 on node0" in done.stderr
    assert "node0's train.jsonl differs from node1's" in done.stderr
    assert "scp -p node1:" in done.stderr


class _Twice:
    """A group in which each of two ranks gets its own part twice, as Open MPI does with two of the
    same host name.
    """

    def rank(self) -> int:
        return 1

    def size(self) -> int:
        return 2


@pytest.mark.parametrize("name", ["mpi", "ring"])
def test_a_sum_without_the_others_is_found_at_once(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(backend, "initialise_group", lambda *_: _Twice())
    monkeypatch.setattr(backend.MlxGroup, "all_sum", lambda _, array: 2 * array)
    with pytest.raises(DistributedError) as found:
        backend.connect(name, 2, 1)
    assert "the first sum over 2 processes is wrong" in str(found.value)
    assert ("host name" in str(found.value)) == (name == "mpi")


def test_a_gathering_with_a_wrong_half_is_found_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a ring of JACCL."""
    whole = backend.mx.arange(2 << 15)
    monkeypatch.setattr(backend, "initialise_group", lambda *_: _Twice())
    monkeypatch.setattr(backend, "check_first_sum", lambda _: None)
    for right, found in ((True, whole), (False, whole % (3 << 14))):
        monkeypatch.setattr(backend.MlxGroup, "all_gather", lambda *_, found=found: found)
        if right:
            assert backend.connect("ring", 2, 1).size == 2
        else:
            with pytest.raises(
                DistributedError, match="the first gathering over 2 processes is wrong"
            ):
                backend.connect("ring", 2, 1)
