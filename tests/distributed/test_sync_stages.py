"""Computers that get the files of their own stages alone, and what trains there.

The computers are network namespaces on this one, each with an sshd and files of its own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from faulty import Bench, Trial, share_compiled
from hostile import Job, run
from namespaces import Cluster, namespaces, needs_rsync
from tiny import in_files

from allhands.model.weight_files import LIST_FILE

pytestmark = [pytest.mark.long, needs_rsync]

# Of four blocks: the second file has the end of the first stage and the beginning of the second
# one.
FILES = [["layers.0.", "embed"], ["layers.1.", "layers.2."], ["layers.3.", "norm", "lm_head"]]
NAMES = [f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3)]
ITERS = 8


class Site:
    """Two computers; ``shown`` is where each sees its own files, and this one the whole model."""

    def __init__(self, cluster: Cluster, bench: Bench) -> None:
        self.cluster, self.bench = cluster, bench
        self.shown = cluster.directory / "own"
        self.hostfile = cluster.hostfile(cluster.directory / "hosts.json")

    def model(self, name: str) -> Path:
        """The model's directory on that computer, as this process sees it."""
        return self.cluster.directory / f"files-{name}-0" / "model"

    def weights(self, name: str) -> list[str]:
        return sorted(file.name for file in self.model(name).glob("*.safetensors"))

    def sync(self, *more: str) -> dict[str, Any]:
        paths = ["--model", self.shown / "model", "--data", self.shown / "data"]
        job = run("cluster", "sync", "--hostfile", self.hostfile, *paths, "--json", *more)
        return json.loads(job.out)

    def start(self, trial: Trial, *more: str | Path) -> Job:
        trial.out = self.shown / trial.token
        paths = [
            "--model",
            self.shown / "model",
            "--data",
            self.shown / "data",
            "--adapter-path",
            trial.out,
        ]
        how = ["--strategy", "pipeline", "--hostfile", self.hostfile]
        return trial.start(*how, *paths, *more, ranks=1, iters=ITERS)

    def losses(self, trial: Trial) -> list[float]:
        """Of a run whose files the first computer has."""
        lines = (
            (self.cluster.directory / "files-node0-0" / trial.token / "metrics.jsonl")
            .read_text()
            .splitlines()
        )
        return [event["loss"] for event in map(json.loads, lines) if event["event"] == "train"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("stages"), layers=4)


@pytest.fixture
def site(bench: Bench, tmp_path: Path) -> Iterator[Site]:
    shown = tmp_path / "own"
    with namespaces(2, tmp_path, [shown]) as cluster:
        for node in cluster.nodes.values():
            share_compiled(node.temporary)
        yield Site(cluster, bench)


@pytest.fixture(autouse=True)
def whole(bench: Bench, site: Site) -> Path:
    """The model here, in files."""
    import shutil

    shutil.copytree(bench.model, site.shown / "model")
    shutil.copytree(bench.data, site.shown / "data")
    return in_files(site.shown / "model", FILES)


@pytest.fixture
def alone(bench: Bench) -> list[float]:
    """The losses of one process with the whole model."""
    with bench.trial("alone") as trial:
        trial.run(ranks=1, iters=ITERS)
        return [loss for _, loss in trial.result().losses]


@pytest.mark.timeout(240)
def test_each_gets_its_own_files_and_a_pipeline_trains_there(
    site: Site, bench: Bench, whole: Path, alone: list[float]
) -> None:
    told = site.sync("--stages", "--pp-split", "2,2")
    sizes = {name: (whole / name).stat().st_size for name in NAMES}
    # The table of tokens is the head, and in the first file: the last stage needs that, too.
    assert site.weights("node0") == NAMES[:2]
    assert site.weights("node1") == NAMES
    told = {host["name"]: host for host in told["hosts"]}
    lists = [(site.model(name) / LIST_FILE).stat().st_size for name in ("node0", "node1")]
    assert told["node1"]["bytes_received"] - told["node0"]["bytes_received"] == sizes[NAMES[2]]
    small = sum(
        file.stat().st_size for part in ("model", "data") for file in (site.shown / part).rglob("*")
    )
    assert told["node0"]["bytes_received"] == small - sizes[NAMES[2]] + lists[0]
    again = site.sync("--stages", "--pp-split", "2,2")
    assert [host["bytes_received"] for host in again["hosts"]] == [0, 0]

    with bench.trial("pipeline") as trial:
        assert site.start(trial, "--pp-split", "2,2").finish(120) == 0
        np.testing.assert_allclose(site.losses(trial), alone, rtol=1e-5)


@pytest.mark.timeout(240)
def test_another_split_than_the_one_brought_is_refused_before_it_starts(
    site: Site, bench: Bench, whole: Path
) -> None:
    site.sync("--stages", "--pp-split", "1,3")
    assert site.weights("node0") == NAMES[:1]
    with bench.trial("split") as trial:
        job = site.start(trial, "--pp-split", "2,2")
        job.fails(4, NAMES[1], "block 1", "cluster sync --stages", timeout=120)
    with bench.trial("whole") as trial:
        argv = ["--model", site.model("node0"), "--data", bench.data]
        trial.start(*argv, ranks=1).fails(4, NAMES[1], NAMES[2], "--strategy pipeline", timeout=60)


@pytest.mark.timeout(240)
def test_another_model_is_found_though_nobody_has_all_files(
    site: Site, bench: Bench, whole: Path
) -> None:
    """In a file that one computer alone has, and in one that both have."""
    site.sync("--stages", "--pp-split", "2,2")
    for name in (NAMES[2], NAMES[1]):
        file = site.model("node1") / name
        content = file.read_bytes()
        file.write_bytes(content[:-4] + bytes(4))
        with bench.trial("other") as trial:
            job = site.start(trial, "--pp-split", "2,2")
            job.fails(7, name, timeout=120)
        file.write_bytes(content)
