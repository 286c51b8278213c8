"""Computers that do not match the others: named, and left out where the others are enough; nobody
else is blamed.

Each computer is a network namespace with an sshd and with model, data and results of its own.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from command_line import changed
from faulty import Bench, Trial
from hostile import Job, until
from hosts import sharing_compiled
from namespaces import Cluster
from slurm import slurm

import allhands
from allhands.observe.metrics import read_metrics

pytestmark = pytest.mark.long

ITERS = 8


class Hosts:
    """Four computers, each with the model and the data; a test spoils copies, and all are put back
    after it.
    """

    def __init__(self, cluster: Cluster, bench: Bench) -> None:
        self.cluster = cluster
        self.bench = bench
        self.shown = cluster.directory / "own"  # every computer sees its own files here
        self.put_back()

    def put_back(self) -> None:
        for name in self.cluster.names:
            for part, source in (("model", self.bench.model), ("data", self.bench.data)):
                shutil.rmtree(self.files(name) / part, ignore_errors=True)
                shutil.copytree(source, self.files(name) / part)

    def files(self, name: str) -> Path:
        """Where this process sees what that computer has at ``shown``."""
        return self.cluster.directory / f"files-{name}-0"

    def start(
        self, trial: Trial, names: Sequence[str], *more: str | Path, hostfile: Path | None = None
    ) -> Job:
        """Start the run on these computers."""
        trial.out = self.shown / trial.token
        paths = [
            "--model",
            self.shown / "model",
            "--data",
            self.shown / "data",
            "--adapter-path",
            trial.out,
        ]
        hostfile = hostfile or self.cluster.hostfile(
            self.cluster.directory / "hosts.json", names=names
        )
        return trial.start(*changed([*paths, "--hostfile", hostfile], more), ranks=1, iters=ITERS)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hosts]:
    directory = tmp_path_factory.mktemp("misfits")
    with sharing_compiled(4, directory, [directory / "own"]) as cluster:
        yield Hosts(cluster, Bench(tmp_path_factory.mktemp("bench")))


@pytest.fixture
def trial(hosts: Hosts, request: pytest.FixtureRequest) -> Iterator[Trial]:
    with hosts.bench.trial(request.node.name.split("[")[0][:30]) as trial:
        yield trial
    hosts.put_back()


def flip(path: Path) -> None:
    """Change one bit in the last byte of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def letter(path: Path) -> None:
    """Change one letter of the data."""
    text = path.read_text()
    at = next(
        i for i in range(len(text) // 2, len(text)) if text[i].islower() and text[i + 1].islower()
    )
    path.write_text(text[:at] + ("b" if text[at] == "a" else "a") + text[at + 1 :])


def epsilon(path: Path) -> None:
    """Change a number that the model computes with."""
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "rms_norm_eps": 2 * config["rms_norm_eps"]}))


SPOILT = {
    "model.safetensors": ("model", flip),
    "config.json": ("model", epsilon),
    "train.jsonl": ("data", letter),
    "valid.jsonl": ("data", letter),
}


def spoil(hosts: Hosts, host: str, name: str) -> None:
    folder, how = SPOILT[name]
    how(hosts.files(host) / folder / name)


@pytest.mark.parametrize("name", SPOILT)
def test_the_one_that_differs_is_named_and_nothing_is_tried_again(
    hosts: Hosts, trial: Trial, name: str
) -> None:
    spoil(hosts, "node1", name)
    job = hosts.start(trial, ["node0", "node1", "node2"])
    job.fails(7, "node1", name, "allhands cluster sync --hostfile")
    assert not trial.events("restarting")
    assert not trial.events("left out")


def test_the_others_go_on_without_it(hosts: Hosts, trial: Trial) -> None:
    spoil(hosts, "node1", "train.jsonl")
    job = hosts.start(trial, ["node0", "node1", "node2"], "--min-ranks", "2")
    assert job.finish() == 0, job.err
    assert [event["host"] for event in trial.events("left out")] == ["node1"]
    assert not trial.events("fault")


def test_the_others_go_on_without_one_that_lacks_the_data(hosts: Hosts, trial: Trial) -> None:
    shutil.rmtree(hosts.files("node0") / "data")
    job = hosts.start(trial, ["node0", "node1", "node2"])
    job.fails(3, "on node0", "the data folder does not exist")
    job = hosts.start(trial, ["node0", "node1", "node2"], "--min-ranks", "2", "--max-restarts", "0")
    assert job.finish() == 0, job.err
    assert [event["host"] for event in trial.events("left out")] == ["node0"]
    # What all lack is nobody's own.
    for name in ("node1", "node2"):
        shutil.rmtree(hosts.files(name) / "data")
    hosts.start(trial, ["node0", "node1", "node2"], "--min-ranks", "1").fails(
        3, "the data folder does not exist"
    )


def test_options_that_differ_by_a_file_of_them(hosts: Hosts, trial: Trial) -> None:
    """Each computer reads its own; the last one has a letter more, which changes nothing."""
    for name, size in (("node0", 4), ("node1", 5), ("node2", 4)):
        (hosts.files(name) / "run.yaml").write_text(
            f"grad_accumulation_steps: {size}\n" + "#" * (name == "node2")
        )
    (hosts.shown / "run.yaml").write_text("grad_accumulation_steps: 4\n")
    job = hosts.start(trial, ["node0", "node1", "node2"], "--config", hosts.shown / "run.yaml")
    job.fails(
        7,
        "grad_accumulation_steps is 4 on node0 and 5 on node1",
        "cluster sync",
        "--config",
        "run.yaml",
    )


def slowly(trial: Trial, seconds: float) -> None:
    """Steps of the tiny model take milliseconds: time for a computer to come."""
    steps = range(2, ITERS - 1)
    trial.plan(
        *(
            {"rank": 0, "step": step, "kind": "slow", "seconds": seconds, "attempt": 1}
            for step in steps
        )
    )


def steps(hosts: Hosts, trial: Trial, host: str = "node0") -> list[int]:
    return [report.step for report in read_metrics(hosts.files(host) / trial.token).train]


def starts(hosts: Hosts, trial: Trial, host: str = "node0") -> list[int]:
    """The ranks of every start that is told of there."""
    lines = (hosts.files(host) / trial.token / "metrics.jsonl").read_text().splitlines()
    return [one["num_ranks"] for one in map(json.loads, lines) if one["event"] == "started"]


@pytest.mark.parametrize("name", ["train.jsonl", "data", "Python"])
def test_a_newcomer_that_does_not_fit_is_refused_and_nobody_is_disturbed(
    hosts: Hosts, trial: Trial, name: str, tmp_path: Path
) -> None:
    here = sys.executable
    if name in SPOILT:
        spoil(hosts, "node2", name)
    elif name == "data":
        shutil.rmtree(hosts.files("node2") / "data")
    else:
        here = str(python(tmp_path / "python", another(sys.version_info[1] + 1, patch=False)))
    slowly(trial, 3.0)
    hostfile = hosts.cluster.hostfile(tmp_path / "hosts.json", names=["node0", "node1"])
    job = hosts.start(trial, [], "--min-ranks", "1", "--hang-timeout-s", "60", hostfile=hostfile)
    until(lambda: bool(trial.events("started")), 60.0, "it does not start")
    with_python(hosts, hostfile, "node2", Path(here))
    assert job.finish(120) == 0, job.err
    (left_out,) = trial.events("left out")
    assert left_out["host"] == "node2"
    assert name in left_out["message"]
    assert not trial.events("regrouping")
    assert starts(hosts, trial) == [2]
    assert steps(hosts, trial) == list(range(1, ITERS + 1))
    assert not hosts.cluster.processes("node2")


def test_a_newcomer_that_fits_joins(hosts: Hosts, trial: Trial, tmp_path: Path) -> None:
    slowly(trial, 3.0)
    hostfile = hosts.cluster.hostfile(tmp_path / "hosts.json", names=["node0", "node1"])
    job = hosts.start(trial, [], "--min-ranks", "1", "--hang-timeout-s", "60", hostfile=hostfile)
    until(lambda: bool(trial.events("started")), 60.0, "it does not start")
    hosts.cluster.hostfile(hostfile, names=["node0", "node1", "node2"])
    assert job.finish(120) == 0, job.err
    assert not trial.events("left out")
    assert starts(hosts, trial) == [2, 3]
    assert steps(hosts, trial) == list(range(1, ITERS + 1))


# --- who is to blame ------------------------------------------------------------------------------


def test_of_two_that_differ_nobody_is_blamed(hosts: Hosts, trial: Trial) -> None:
    spoil(hosts, "node1", "model.safetensors")
    message = hosts.start(trial, ["node0", "node1"], "--min-ranks", "1").fails(
        7, "node0", "node1", "do not match"
    )
    first, second = (
        digest(hosts.files(name) / "model" / "model.safetensors") for name in ("node0", "node1")
    )
    assert f"model.safetensors is {first} on node0 and {second} on node1" in message
    assert not trial.events("left out") + trial.events("restarting")


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:8]


def test_the_computer_at_which_the_person_sits_may_be_the_odd_one(
    hosts: Hosts, trial: Trial, tmp_path: Path
) -> None:
    for part in ("model", "data"):
        shutil.copytree(hosts.files("node0") / part, hosts.shown / part, dirs_exist_ok=True)
    letter(hosts.shown / "data" / "train.jsonl")
    entries = json.loads(
        hosts.cluster.hostfile(tmp_path / "hosts.json", names=["node0", "node1"]).read_text()
    )
    here = {"ssh": "localhost", "ips": [hosts.cluster.address], "slots": 1}
    (tmp_path / "hosts.json").write_text(json.dumps([here, *entries]))
    message = hosts.start(trial, [], hostfile=tmp_path / "hosts.json").fails(
        7, "localhost does not match node0 and node1"
    )
    # What it says brings the right copy here.
    (copied,) = [line for line in message.splitlines() if "what to do: " in line]
    command = shlex.split(copied.partition("what to do: ")[2])
    assert command[:2] == ["scp", "-p"]
    shutil.copy(
        hosts.files("node0") / "data" / "train.jsonl", command[-1]
    )  # as scp would, whose ssh has no settings here
    job = hosts.start(trial, [], hostfile=tmp_path / "hosts.json")
    assert job.finish() == 0, job.err


def test_what_it_says_to_do_helps(hosts: Hosts, trial: Trial) -> None:
    """Two computers of four, each in something else; one of them in two things."""
    for part in ("model", "data"):
        shutil.copytree(hosts.files("node0") / part, hosts.shown / part, dirs_exist_ok=True)
    spoil(hosts, "node1", "model.safetensors")
    spoil(hosts, "node1", "valid.jsonl")
    spoil(hosts, "node3", "train.jsonl")
    message = hosts.start(trial, hosts.cluster.names).fails(
        7, "node1 and node3 do not match node0 and node2"
    )
    for words in ("node1's model.safetensors", "node1's valid.jsonl", "node3's train.jsonl"):
        assert words in message
    command = shlex.split(message.partition("what to do: ")[2].splitlines()[0])
    subprocess.run(
        [sys.executable, "-m", *command], check=True, capture_output=True, env=os.environ
    )
    job = hosts.start(trial, hosts.cluster.names)
    assert job.finish() == 0, job.err


# --- without a supervisor of ours -----------------------------------------------------------------

_STRANGE = ("SLURM_", "OMPI_", "PMIX_", "PMI_", "MLX_", "ALLHANDS_MEETING", "TORCHELASTIC_")
# What is installed here, in a Python that says of itself that it is of the next minor version.
_NEXT_PYTHON = """
import sys
from allhands.runtime import versions
real = versions.software
versions.software = lambda *given: {**real(*given), "python": f"3.{sys.version_info[1] + 1}.0"}
from allhands.__main__ import main
sys.argv[0] = "allhands"
main()
"""


def options(hosts: Hosts, out: Path) -> list[str]:
    paths = [
        "--model",
        hosts.shown / "model",
        "--data",
        hosts.shown / "data",
        "--adapter-path",
        out,
    ]
    return [
        *map(str, paths),
        *f"--iters {ITERS} --batch-size 8 --num-layers 2 --val-batches 0".split(),
    ]


def are_told(texts: Sequence[str], codes: Sequence[int | None], *words: str) -> None:
    """Every rank has ended alike, and says who differs and in what, once, and nothing of trying
    again.
    """
    assert set(codes) == {7}, (codes, texts)
    for text in texts:
        assert text.count("allhands: error: ") == 1, text
        assert all(word in text for word in words), text
        assert not [
            word for word in ("Traceback", "restart", "--resume", "timeout") if word in text
        ], text


@pytest.mark.parametrize("odd", ["node0", "node1"])
@pytest.mark.parametrize("name", ["model.safetensors", "train.jsonl", "Python"])
def test_ranks_of_torchrun_end_alike_and_name_the_one_that_differs(
    hosts: Hosts, trial: Trial, name: str, odd: str
) -> None:
    """At once, although each would wait for others for ten minutes."""
    if name in SPOILT:
        spoil(hosts, odd, name)
    usual = {key: value for key, value in os.environ.items() if not key.startswith(_STRANGE)}
    usual |= {"MASTER_ADDR": "node0", "MASTER_PORT": "29519", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}
    usual |= {
        "LOCAL_WORLD_SIZE": "1",
        "ALLHANDS_PEERS_TIMEOUT_S": "600",
        "OPENBLAS_NUM_THREADS": "1",
    }
    ranks: list[subprocess.Popen[str]] = []
    began = time.monotonic()
    try:
        for rank in range(3):
            other = name == "Python" and odd == f"node{rank}"
            program = (
                [sys.executable, "-c", _NEXT_PYTHON]
                if other
                else [sys.executable, "-m", "allhands"]
            )
            argv = hosts.cluster.command(
                f"node{rank}", [*program, "train", "--train", *options(hosts, trial.out)]
            )
            pipes = {
                "stdin": subprocess.DEVNULL,
                "stdout": subprocess.PIPE,
                "stderr": subprocess.STDOUT,
            }
            ranks.append(
                subprocess.Popen(argv, text=True, env=usual | {"RANK": str(rank)}, **pipes)
            )  # type: ignore[call-overload]
        texts = [one.communicate(timeout=120)[0] for one in ranks]
    finally:
        for one in ranks:
            one.kill()
            one.communicate()
        for node in hosts.cluster.names:
            for left in hosts.cluster.processes(node):
                left.kill()
    assert time.monotonic() - began < 100.0
    are_told(texts, [one.returncode for one in ranks], f"{odd} does not match", name)


@pytest.mark.parametrize("name", ["model.safetensors", "train.jsonl"])
def test_tasks_of_slurm_end_alike_and_name_the_one_that_differs(
    hosts: Hosts, trial: Trial, name: str
) -> None:
    spoil(hosts, "node1", name)
    with slurm(hosts.cluster) as made:
        words = [
            "srun",
            "-n",
            "3",
            "--nodes=3",
            "--nodelist=node[0-2]",
            "--label",
            sys.executable,
            "-m",
            "allhands",
        ]
        began = time.monotonic()
        done = made.run(*words, "train", "--train", *options(hosts, trial.out))
        assert time.monotonic() - began < 100.0
        made.wait_until_idle()
    lines = (done.stdout + done.stderr).splitlines()
    texts = ["\n".join(line for line in lines if line.startswith(f"{rank}: ")) for rank in range(3)]
    are_told(texts, [done.returncode], "node1 does not match", name)


# --- versions -------------------------------------------------------------------------------------


def python(place: Path, interpreter: str, *first: Path) -> Path:
    """A Python that has what is installed here, after what is in ``first``."""
    paths = [*first, Path(allhands.__file__).parent.parent, sysconfig.get_path("purelib")]
    place.write_text(
        f'#!/bin/sh\nexport PYTHONPATH={":".join(map(str, paths))}\nexec {interpreter} "$@"\n'
    )
    place.chmod(0o755)
    return place


def with_python(hosts: Hosts, path: Path, host: str, python: Path) -> Path:
    entries = json.loads(
        hosts.cluster.hostfile(path, names=["node0", "node1", "node2"]).read_text()
    )
    next(entry for entry in entries if entry["ssh"] == host)["python"] = str(python)
    path.write_text(json.dumps(entries))
    return path


def checked(hostfile: Path) -> tuple[int, list[tuple[str, tuple[str, ...]]]]:
    """Exit code of the doctor, and what it finds about versions."""
    words = ["cluster", "check", "--hostfile", str(hostfile), "--no-bench", "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "allhands", *words], capture_output=True, text=True, env=os.environ
    )
    found = [f for f in json.loads(done.stdout)["findings"] if f["check"] == "versions"]
    return done.returncode, [(f["severity"], tuple(f["hosts"])) for f in found]


def another(minor: int, patch: bool) -> str:
    """A Python of that minor version and, if it is this one's, of another patch; skips where there
    is none.
    """
    usual = [
        f"/usr/bin/python3.{minor}",
        *map(str, sorted(Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"))),
    ]
    for path in filter(os.path.exists, usual):
        told = subprocess.run(
            [path, "-c", "import sys; print(sys.version_info[2])"], capture_output=True, text=True
        )
        if not patch or int(told.stdout) != sys.version_info[2]:
            return path
    pytest.skip(f"there is no other Python 3.{minor}")


def test_another_patch_of_python_trains(hosts: Hosts, trial: Trial, tmp_path: Path) -> None:
    other = python(tmp_path / "python", another(sys.version_info[1], patch=True))
    hostfile = with_python(hosts, tmp_path / "hosts.json", "node1", other)
    assert checked(hostfile) == (0, [("note", ("node1",))])
    job = hosts.start(trial, [], hostfile=hostfile)
    assert job.finish() == 0, job.err


def test_another_minor_version_of_python_does_not(
    hosts: Hosts, trial: Trial, tmp_path: Path
) -> None:
    other = python(tmp_path / "python", another(sys.version_info[1] + 1, patch=False))
    hostfile = with_python(hosts, tmp_path / "hosts.json", "node1", other)
    code, found = checked(hostfile)
    assert (code, found) == (7, [("stop", ("node1",))])
    job = hosts.start(trial, [], hostfile=hostfile)
    job.fails(
        7,
        "node1 does not match",
        f"Python 3.{sys.version_info[1] + 1}",
        "allhands cluster init --hosts node1",
    )
    assert not trial.events("launched")
    job = hosts.start(trial, [], "--min-ranks", "2", hostfile=hostfile)
    assert job.finish() == 0, job.err
    assert [event["host"] for event in trial.events("left out")] == ["node1"]


@pytest.mark.parametrize("other", ["source", "metadata"])
def test_of_allhands_the_source_counts_and_not_the_metadata(
    hosts: Hosts, trial: Trial, tmp_path: Path, other: str
) -> None:
    first = tmp_path / "first"
    if other == "source":
        bytecode = shutil.ignore_patterns("__pycache__")
        shutil.copytree(Path(allhands.__file__).parent, first / "allhands", ignore=bytecode)
        with (first / "allhands" / "train" / "step.py").open("a") as stream:
            stream.write("# one line more\n")
    else:
        (first / "allhands-0.0.9.dist-info").mkdir(parents=True)
        (first / "allhands-0.0.9.dist-info" / "METADATA").write_text(
            "Metadata-Version: 2.1\nName: allhands\nVersion: 0.0.9\n"
        )
    hostfile = with_python(
        hosts, tmp_path / "hosts.json", "node2", python(tmp_path / "python", sys.executable, first)
    )
    code, found = checked(hostfile)
    job = hosts.start(trial, [], hostfile=hostfile)
    if other == "metadata":
        assert (code, found) == (0, [])
        assert job.finish() == 0, job.err
    else:
        assert (code, found) == (7, [("stop", ("node2",))])
        job.fails(
            7, "node2 does not match node0 and node1", "allhands", "cluster init --hosts node2"
        )
