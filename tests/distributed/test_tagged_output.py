"""The lines of every rank on one screen, from this computer and from others; and computers given by
name.
"""

from __future__ import annotations

import re
import shutil
import signal
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from command_line import changed
from hostile import Job
from namespaces import namespaces
from tiny import run_allhands

PROGRAM = """
import os, sys
rank = os.environ["ALLHANDS_RANK"]
for line in range(3):
    print("line", line, "of", rank, flush=True)
print("trouble of", rank, file=sys.stderr)
print("no end of", rank, end="")
"""


def _expected(rank: int) -> list[str]:
    return [
        *(f"line {line} of {rank}" for line in range(3)),
        f"trouble of {rank}",
        f"no end of {rank}",
    ]


def _by_tag(output: str) -> dict[str, list[str]]:
    """The lines of each rank, without its tag."""
    found: dict[str, list[str]] = defaultdict(list)
    for line in output.splitlines():
        tag = re.fullmatch(r"\[rank (\d+(?: \S+)?)\] (.*)", line)
        assert tag, f"a line of nobody: {line!r}"
        found[tag[1]].append(tag[2])
    return found


@pytest.fixture
def program(tmp_path: Path) -> str:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return str(path)


@pytest.mark.parametrize("backend", ["ring", "mpi"])
def test_every_line_has_its_rank(tmp_path: Path, program: str, backend: str) -> None:
    words = [
        "launch",
        "-n",
        "2",
        "--backend",
        backend,
        "--log-dir",
        str(tmp_path / "logs"),
        "--",
        sys.executable,
        program,
    ]
    done = run_allhands(*words)
    assert done.returncode == 0, done.stderr
    assert _by_tag(done.stdout) == {"0": _expected(0), "1": _expected(1)}
    logs = [(tmp_path / "logs" / f"rank-{rank}.log").read_text() for rank in range(2)]
    assert [log.splitlines() for log in logs] == [_expected(0), _expected(1)]


def test_one_rank_and_untagged_ones_speak_for_themselves(tmp_path: Path, program: str) -> None:
    alone = run_allhands(
        "launch", "--log-dir", str(tmp_path / "one"), "--", sys.executable, program
    )
    words = [
        "launch",
        "-n",
        "2",
        "--no-tag-output",
        "--log-dir",
        str(tmp_path / "two"),
        "--",
        sys.executable,
        program,
    ]
    untagged = run_allhands(*words)
    for done in (alone, untagged):
        assert done.returncode == 0, done.stderr
        assert (done.stdout + "\n").splitlines() == [
            *(f"line {line} of 0" for line in range(3)),
            "no end of 0",
        ]
        assert "trouble of 0" in done.stderr
    assert (tmp_path / "two" / "rank-1.log").read_text().splitlines() == _expected(1)


def test_training_shows_all_ranks_if_asked(
    tmp_path: Path, tiny_model: Path, tiny_data: Path
) -> None:
    words = [
        "train",
        "--train",
        "--model",
        str(tiny_model),
        "--data",
        str(tiny_data),
        "--iters",
        "2",
        "-n",
        "2",
    ]
    words += [
        "--val-batches",
        "0",
        "--steps-per-report",
        "1",
        "--backend",
        "ring",
        "--adapter-path",
        str(tmp_path),
    ]
    done = run_allhands(*words, "--tag-output")
    assert done.returncode == 0, done.stderr
    lines = _by_tag(done.stdout)
    losses = {
        rank: re.findall(r"step (\d)/2  loss ([\d.]+)", "\n".join(told))
        for rank, told in lines.items()
    }
    assert [step for step, _ in losses["0"]] == ["1", "2"]
    assert losses["0"] == losses["1"]


@pytest.mark.slow
def test_several_ranks_of_one_other_computer_are_joined_by_the_ring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    """It has MPI, too, but nobody who starts it there."""
    (tmp_path / "cluster").mkdir()
    with namespaces(1, tmp_path / "cluster"):
        monkeypatch.chdir(tmp_path)
        for number, words in enumerate((["--hosts", "node0:2"], ["--hosts", "localhost:2"])):
            logs = ["--log-dir", f"logs-{number}"]
            done = run_allhands("launch", *words, *logs, "--", sys.executable, program)
            assert done.returncode == 0, done.stderr
            assert "2 processes, ring: 2 ranks on" in done.stderr
            assert sorted(_by_tag(done.stdout).items())[1][1] == _expected(1)
            assert len(_by_tag(done.stdout)) == 2


def test_hosts_by_name_are_joined_shown_and_tagged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    (tmp_path / "cluster").mkdir()
    with namespaces(2, tmp_path / "cluster") as cluster:
        monkeypatch.chdir(tmp_path)
        words = [
            "launch",
            "--hosts",
            "node0:2,node1",
            "--log-dir",
            "logs",
            "--",
            sys.executable,
            program,
        ]
        done = run_allhands(*words)
        addresses = [cluster.nodes[name].address for name in cluster.names]
    assert done.returncode == 0, done.stderr
    assert _by_tag(done.stdout) == {f"{rank} node{rank // 2}": _expected(rank) for rank in range(3)}
    told = re.search(
        r"allhands: 3 processes, ring: 2 ranks on node0 (\S+) \(over (\S+)\), node1 (\S+) \(over",
        done.stderr,
    )
    assert told, done.stderr
    assert [told[1], told[3]] == addresses
    assert told[2].startswith("ahb"), "not the bridge on which the computers hang"


@pytest.mark.long
def test_training_on_several_computers_shows_all_ranks_and_tells_an_error_once(
    tmp_path: Path, tiny_model: Path, tiny_data: Path
) -> None:
    """By default; and that of one rank by the supervisor, with the computer on which it was."""
    (tmp_path / "cluster").mkdir()
    own = tmp_path / "own"  # every computer's, and this one's
    with namespaces(2, tmp_path / "cluster", [own]) as cluster:
        places = [own, *(cluster.directory / f"files-{name}-0" for name in cluster.names)]
        for place in places:
            shutil.copytree(tiny_model, place / "model")
        for place in places[:2]:
            shutil.copytree(tiny_data, place / "data")
        hostfile = cluster.hostfile(tmp_path / "hosts.json")
        words = [
            "train",
            "--train",
            "--model",
            str(own / "model"),
            "--data",
            str(own / "data"),
            "--iters",
            "3",
        ]
        words += [
            "--val-batches",
            "0",
            "--steps-per-report",
            "1",
            "--adapter-path",
            str(own / "run"),
        ]
        words += ["--hostfile", str(hostfile)]

        done = run_allhands(*words)
        assert done.returncode == 3, done.stderr
        problem = f"{own / 'data'}: the data folder does not exist"
        assert f"allhands: error: on node1 (rank 1): {problem}\n" in done.stderr
        assert (done.stdout + done.stderr).count("the data folder does not exist") == 1
        assert (
            f"\n  log of rank 1, on node1: {own / 'run' / 'logs' / 'rank-1.log'}\n" in done.stderr
        )
        sync = f"allhands cluster sync --hostfile {hostfile} --model {own / 'model'} --data {own / 'data'}"
        assert f"\n  if node1 has no copy, or an old one: {sync}\n" in done.stderr
        log = (places[2] / "run" / "logs" / "rank-1.log").read_text()
        assert problem in log

        shutil.copytree(tiny_data, places[2] / "data")
        done = run_allhands(*words)
        assert done.returncode == 0, done.stderr
        found = _by_tag(done.stdout)
        assert set(found) == {"0 node0", "1 node1"}
        losses = {
            rank: re.findall(r"step (\d)/3  (loss \S+)", "\n".join(told))
            for rank, told in found.items()
        }
        assert [step for step, _ in losses["0 node0"]] == ["1", "2", "3"]
        assert losses["0 node0"] == losses["1 node1"]
        assert max(len(line) for line in done.stdout.splitlines() if "  loss " in line) < 100
        assert found["0 node0"][-1].startswith(f"saved in {own / 'run'}")

        plain = run_allhands(*words, "--no-tag-output")
        assert plain.returncode == 0, plain.stderr
        assert "[rank" not in plain.stdout
        assert "step 3/3  loss " in plain.stdout

        job = Job(*changed(words, ["--iters", "100000"]))
        job.wait_for("train", places[1] / "run", 5)
        job.signal(signal.SIGINT)
        assert job.finish(60) == 130
        assert (job.out + job.err).count("the weights are saved in") == 1, (job.out, job.err)
        assert "[rank 0 node0] allhands: stopped after" in job.out
        assert job.out.count("[rank 0 node0] note: what an earlier run left in") == 1
        assert job.out.count("stopping after this step") == 1
