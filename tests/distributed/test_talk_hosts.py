"""Answers of a pipeline over two computers that share nothing but a network: the words of one
process.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty import files_left
from hostile import until
from namespaces import Cluster, namespaces
from tiny import run_allhands, write_model

pytestmark = pytest.mark.long

LINES = "What is dew?\nAnd fog?\n/reset\nWhat is dew?\n"
PIPELINE = ("--strategy", "pipeline")


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, as this computer and all others have it at the same path, and a place that each has
    for itself.
    """
    directory = tmp_path_factory.mktemp("talk") / "work"
    write_model(directory / "model", layers=4, hidden=64, seed=7)
    (directory / "temporary").mkdir()
    return directory


@pytest.fixture(scope="module")
def cluster(work: Path) -> Iterator[Cluster]:
    directory = work.parent / "cluster"
    directory.mkdir()
    with namespaces(1, directory, [work]) as made:
        shutil.copytree(work, made.directory / "files-node0-0", dirs_exist_ok=True)
        yield made


def hostfile(cluster: Cluster, path: Path, *names: str) -> tuple[str, ...]:
    """The option for these computers, of which ``localhost`` is this one."""
    addresses = {
        "localhost": cluster.address,
        **{name: node.address for name, node in cluster.nodes.items()},
    }
    entries: list[dict[str, Any]] = [
        {
            "ssh": name,
            "ips": [addresses[name]],
            "slots": names.count(name),
            "python": sys.executable,
        }
        for name in dict.fromkeys(names)
    ]
    path.write_text(json.dumps(entries))
    return (*PIPELINE, "--hostfile", str(path))


def answered(
    work: Path, verb: str, *more: str, lines: str = ""
) -> subprocess.CompletedProcess[str]:
    where = {"TMPDIR": str(work / "temporary")}
    return run_allhands(
        verb, "--model", "model", "--max-tokens", "12", *more, cwd=work, env=where, lines=lines
    )


def nothing_is_left(cluster: Cluster, work: Path) -> None:
    assert files_left(work / "temporary") == []
    cluster.wait_for_none("node0", 5.0)
    until(
        lambda: files_left(cluster.nodes["node0"].temporary) == [], 5.0, "something is left there"
    )


@pytest.mark.parametrize(
    "names", [("localhost", "node0"), ("node0", "localhost"), ("node0", "localhost", "localhost")]
)
def test_whoever_sits_at_one_of_the_computers_can_talk(
    work: Path, cluster: Cluster, tmp_path: Path, names: tuple[str, ...]
) -> None:
    one = answered(work, "chat", lines=LINES)
    several = answered(
        work, "chat", *hostfile(cluster, tmp_path / "hosts.json", *names), lines=LINES
    )
    assert one.returncode == several.returncode == 0, several.stderr
    assert several.stdout == one.stdout
    assert len(one.stdout) > 20
    assert "(forgotten)" in several.stderr
    nothing_is_left(cluster, work)


def test_whoever_sits_elsewhere_gets_one_answer_but_cannot_talk(
    work: Path, cluster: Cluster, tmp_path: Path
) -> None:
    there = hostfile(cluster, tmp_path / "hosts.json", "node0", "node0")
    began = time.monotonic()
    refused = answered(work, "chat", *there, lines=LINES)
    assert refused.returncode == 2, refused.stderr
    assert "--hostfile" in refused.stderr
    assert "Traceback" not in refused.stderr
    assert time.monotonic() - began < 10, "before anything is started"
    one, several = (
        answered(work, "generate", "--prompt", "What is dew?", *more) for more in ((), there)
    )
    assert one.returncode == several.returncode == 0, several.stderr
    assert several.stdout.partition("=====")[0] == one.stdout.partition("=====")[0]
    nothing_is_left(cluster, work)
