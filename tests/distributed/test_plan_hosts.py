"""A plan for computers that answer over ssh: each with its own memory, and shares as
``--rank-weights`` says.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import Cluster, namespaces
from planned_training import words_of, write_texts
from tiny import run_allhands

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with namespaces(2, tmp_path_factory.mktemp("cluster")) as made:
        yield made


def test_each_computer_is_listed_with_what_it_has(cluster: Cluster, tmp_path: Path) -> None:
    write_texts(tmp_path, 100)
    hosts = ("--hostfile", str(cluster.hostfile(tmp_path / "hosts.json")), "--cores-per-rank", "1")
    words = (
        *words_of(tmp_path),
        *hosts,
        "--adapter-path",
        str(tmp_path / "run"),
        "--iters",
        "1000",
    )
    done = run_allhands("plan", *words, "--rank-weights", "[2, 1]", "--json", timeout=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [each["name"] for each in found["computers"]] == cluster.names
    assert all(0 < each["usable_bytes"] <= each["memory_bytes"] for each in found["computers"])
    assert [each["speed"] for each in found["computers"]] == [1.0, 0.5]
    assert [line["machines"] for line in found["machines"]] == [1, 2]
    assert found["machines"][1]["weights"] == [2.0, 1.0]
    assert all(any(note.startswith(name) for note in found["notes"]) for name in cluster.names)
    # One machine has all of its cores, whatever each of several ranks gets.
    assert found["one_process_s"] is not None
    assert found["doubt"] or found["one_process_s"] <= 1.05 * found["step"]["alone_s"]
    # Nothing said, they are measured: both are this computer, whatever else it does.
    found = json.loads(run_allhands("plan", *words, "--json", timeout=300).stdout)
    first, second = (each["speed"] for each in found["computers"])
    assert first == 1.0
    assert 0.2 < second < 5.0
    assert any("measured" in note and "all ranks at once" in note for note in found["notes"])
    few = run_allhands("plan", *words, "--rank-weights", "[1]", "--json", timeout=300)
    assert (few.returncode, "--rank-weights" in few.stderr, "training" in few.stderr) == (
        2,
        True,
        False,
    )
