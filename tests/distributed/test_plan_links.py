"""Steps over links of several speeds take as long as ``allhands plan`` says.

Each of two computers has a core of its own, and the cable between them is slowed and lengthened.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from namespaces import Cluster, namespaces
from tiny import run_allhands, write_tokenizer

from allhands.metrics import read_metrics

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not os.environ.get("ALLHANDS_TEST_TIMES"), reason="ALLHANDS_TEST_TIMES: on a quiet computer"),
    pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs a core for each of two computers"),
]

SHAPE = ("--shape", "llama", "--layers", "4", "--dims", "256", "--mlp-dims", "768", "--heads", "4")
TRAINING = (*SHAPE, "--block-size", "256", "--batch-size", "16", "--packing", "--sample-prompts", "[]")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with namespaces(2, tmp_path_factory.mktemp("cluster")) as made:
        for core, name in enumerate(made.names):
            made.give_core(name, core)
        yield made


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    folder = tmp_path_factory.mktemp("data")
    write_tokenizer(folder / "tokenizer")
    (folder / "texts").mkdir()
    lines = [json.dumps({"text": " ".join(f"word{(7 * i + j) % 97}" for j in range(120))}) for i in range(400)]
    (folder / "texts" / "train.jsonl").write_text("\n".join(lines) + "\n")
    return "--data", str(folder / "texts"), "--tokenizer", str(folder / "tokenizer"), *TRAINING


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
    cluster: Cluster, words: tuple[str, ...], tmp_path: Path, link: str, record_property: pytest.RecordProperty
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
    few = ("--iters", "20", "--steps-per-report", "1", "--val-batches", "0", "--save-every", "20")
    done = run_allhands("pretrain", *words, *hosts, *run, *few, timeout=300)
    assert done.returncode == 0, done.stderr
    really = statistics.median(report.step_time_s for report in read_metrics(tmp_path / "run").train[4:])
    record_property("seconds", (planned, really))
    print(f"{link}: {really:.3f} s, {planned['step_s']:.3f} planned, of which {planned['exposed_s']:.3f} waiting")
    assert planned["step_s"] == pytest.approx(really, rel=0.15)
