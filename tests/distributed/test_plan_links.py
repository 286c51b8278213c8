"""Steps over links of several speeds take as long as ``allhands plan`` says.

Each of two computers has a core of its own, and the cable between them is slowed and lengthened.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import Cluster, namespaces
from planned_training import TWENTY_STEPS, seconds_of_a_step, words_of, write_texts
from tiny import run_allhands

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not os.environ.get("ALLHANDS_TEST_TIMES"), reason="ALLHANDS_TEST_TIMES: on a quiet computer"
    ),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs a core for each of two computers"),
]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with namespaces(2, tmp_path_factory.mktemp("cluster")) as made:
        for core, name in enumerate(made.names):
            made.give_core(name, core)
        yield made


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("data")
    write_texts(folder, 400)
    return words_of(folder)


def round_trip_s(cluster: Cluster) -> float:
    """Of a connection to the second computer, at best."""
    connect = "import socket, sys, time; t = time.perf_counter(); socket.create_connection((sys.argv[1], 22)); "
    command = [
        sys.executable,
        "-c",
        connect + "print(time.perf_counter() - t)",
        cluster.nodes[cluster.names[1]].address,
    ]
    return min(float(cluster.run(cluster.names[0], command).stdout) for _ in range(5))


@pytest.mark.parametrize("link", ["10gbit", "1gbit", "100mbit", "1gbit+5ms", "100mbit+5ms"])
def test_a_step_takes_as_long_as_planned(
    cluster: Cluster,
    words: list[str],
    tmp_path: Path,
    link: str,
    record_property: pytest.RecordProperty,
) -> None:
    rate, _, delay = link.partition("+")
    second = cluster.names[1]
    if delay and not cluster.delayed:
        cluster.delay(second, float(delay.removesuffix("ms")) / 1e3)
    cluster.slow(second, rate, burst="256kb")
    # There and back.
    assert (round_trip_s(cluster) > 0.0099) == bool(delay)
    hosts = ("--hostfile", str(cluster.hostfile(tmp_path / "hosts.json")), "--cores-per-rank", "1")
    run = ("--adapter-path", str(tmp_path / "run"))
    done = run_allhands("plan", *words, *hosts, *run, "--iters", "1000", "--json", timeout=300)
    assert done.returncode == 0, done.stderr
    planned = json.loads(done.stdout)["machines"][1]["prediction"]
    done = run_allhands("pretrain", *words, *hosts, *run, *TWENTY_STEPS, timeout=300)
    assert done.returncode == 0, done.stderr
    really = seconds_of_a_step(tmp_path / "run")
    record_property("seconds", (planned, really))
    print(
        f"{link}: {really:.3f} s, {planned['step_s']:.3f} planned, of which {planned['exposed_s']:.3f} waiting"
    )
    assert planned["step_s"] == pytest.approx(really, rel=0.15)
