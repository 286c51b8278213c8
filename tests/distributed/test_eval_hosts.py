"""``allhands eval --hosts`` on computers that share nothing but a network: the number of one
process.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from faulty import files_left
from hostile import until
from namespaces import Cluster, namespaces
from tiny import run_allhands, write_adapter

pytestmark = pytest.mark.long

WORDS = ["eval", "--json", "--model", "model", "--data", "data", "--split", "train"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_data: Path) -> Path:
    """Model and data, as this computer and all others have them at the same path."""
    directory = tmp_path_factory.mktemp("eval") / "work"
    shutil.copytree(tiny_model, directory / "model")
    shutil.copytree(tiny_data, directory / "data")
    return directory


@pytest.fixture(scope="module")
def cluster(work: Path) -> Iterator[Cluster]:
    directory = work.parent / "cluster"
    directory.mkdir()
    with namespaces(2, directory, [work]) as made:
        for name in made.names:
            shutil.copytree(work, made.directory / f"files-{name}-0", dirs_exist_ok=True)
            write_adapter(work / "model", made.directory / f"files-{name}-0" / "adapters")
        yield made


def evaluated(work: Path, temporary: Path, *words: str) -> dict[str, Any]:
    done = run_allhands(*WORDS, *words, cwd=work, env={"TMPDIR": str(temporary)})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_two_computers_give_the_number_of_one_process(
    work: Path, cluster: Cluster, tmp_path: Path
) -> None:
    temporary = work / "temporary"  # a path at which every computer has a directory of its own
    temporary.mkdir(exist_ok=True)
    alone = evaluated(work, temporary)
    assert alone["num_ranks"] == 1
    for words in (
        ["--hosts", "node0,node1"],
        ["--hostfile", str(cluster.hostfile(tmp_path / "hosts.json"))],
    ):
        both = evaluated(work, temporary, *words)
        assert both["num_ranks"] == 2
        assert both["num_tokens"] == alone["num_tokens"]
        assert both["loss"] == pytest.approx(alone["loss"], rel=1e-6)
    three = evaluated(work, temporary, "--hosts", "node0:2,node1")
    assert three["num_ranks"] == 3
    assert three["loss"] == pytest.approx(alone["loss"], rel=1e-6)

    # The adapter is on the computers that compute, and not on this one.
    adapted = evaluated(work, temporary, "--hosts", "node0,node1", "--adapter-path", "adapters")
    shutil.copytree(cluster.directory / "files-node0-0" / "adapters", work / "adapters")
    expected = evaluated(work, temporary, "--adapter-path", "adapters")
    shutil.rmtree(work / "adapters")
    assert adapted["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    assert abs(adapted["loss"] - alone["loss"]) > 1e-3

    done = run_allhands(
        *WORDS,
        "--hosts",
        "node0,node1",
        "--adapter-path",
        "nowhere",
        cwd=work,
        env={"TMPDIR": str(tmp_path)},
    )
    assert done.returncode == 4, done.stderr
    assert done.stderr.count("there is no adapter") == 1
    assert "Traceback" not in done.stderr

    assert {path.name for path in work.iterdir()} == {"model", "data", "temporary"}
    assert files_left(temporary) == []
    for name, node in cluster.nodes.items():
        cluster.wait_for_none(name, 5.0)
        until(lambda place=node.temporary: files_left(place) == [], 5.0, "something is left there")
        there = {
            path.name for path in (cluster.directory / f"files-{name}-0").rglob("allhands-eval-*")
        }
        assert there == set()
