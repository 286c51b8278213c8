"""Clusters broken on purpose, seen by ``allhands cluster check``: models, data, disks, and several
faults at once.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from broken import Broken, broken_cluster

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def computers(
    tmp_path_factory: pytest.TempPathFactory, tiny_model: Path, tiny_data: Path
) -> Iterator[Broken]:
    with broken_cluster(tmp_path_factory.mktemp("broken"), tiny_model, tiny_data) as found:
        yield found


@pytest.fixture
def sick(computers: Broken) -> Iterator[Broken]:
    yield computers
    computers.afresh()


def flip_a_byte(path: Path) -> None:
    """In the middle; the size stays."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


# --- model and data -------------------------------------------------------------------------------


def test_a_file_of_the_model_is_missing(sick: Broken) -> None:
    (sick.files("node1") / "model/tokenizer.json").unlink()
    remedy, message = sick.finds(("stop", "model", ("node1",)))
    assert message.endswith("node0, node2: tokenizer.json missing")
    sick.type(remedy)
    assert (sick.files("node1") / "model/tokenizer.json").exists()
    sick.is_well()


def test_a_model_that_is_missing(sick: Broken) -> None:
    shutil.rmtree(sick.files("node2") / "model")
    remedy, message = sick.finds(("stop", "model", ("node2",)))
    assert message == f"it does not have the model {sick.own / 'model'}"
    sick.type(remedy)
    sick.is_well()


def test_a_model_that_differs_by_a_byte(sick: Broken) -> None:
    flip_a_byte(sick.files("node0") / "model/model.safetensors")
    sick.is_well(options=["--quick"])  # which compares sizes, and says so
    remedy, message = sick.finds(("stop", "model", ("node0",)))
    assert message.endswith("node1, node2: model.safetensors different")
    sick.type(remedy)
    sick.is_well()


def test_a_model_without_its_configuration(sick: Broken) -> None:
    (sick.files("node1") / "model/config.json").unlink()
    remedy, message = sick.finds(("stop", "model", ("node1",)))
    assert message.endswith("config.json missing")
    sick.type(remedy)
    sick.is_well()


def test_data_that_differ(sick: Broken) -> None:
    path = sick.files("node2") / "data/train.jsonl"
    path.write_text(path.read_text() + path.read_text().splitlines()[0] + "\n")
    remedy, message = sick.finds(("stop", "data", ("node2",)))
    assert message.endswith("node0, node1: train.jsonl different")
    sick.type(remedy)
    sick.is_well()


def test_data_that_are_missing(sick: Broken) -> None:
    shutil.rmtree(sick.files("node0") / "data")
    remedy, message = sick.finds(("stop", "data", ("node0",)))
    assert message == f"it does not have the data {sick.own / 'data'}"
    sick.type(remedy)
    sick.is_well()


def test_data_that_cannot_be_read(sick: Broken) -> None:
    path = sick.files("node1") / "data/train.jsonl"
    path.unlink()
    path.symlink_to("nowhere")
    remedy, message = sick.finds(("stop", "data", ("node1",)))
    assert "No such file or directory" in message
    assert "train.jsonl -> nowhere" in sick.type(remedy)


def test_a_model_that_nobody_has(sick: Broken) -> None:
    names = ("node0", "node1", "node2")
    _, message = sick.finds(("stop", "model", names), options=["--model", str(sick.own / "modle")])
    assert message == f"no computer has the model {sick.own / 'modle'}"


def test_a_file_that_hangs_as_on_a_disk_of_a_network_that_is_gone(sick: Broken) -> None:
    os.mkfifo(sick.files("node2") / "data/more.jsonl")
    began = time.monotonic()
    remedy, message = sick.finds(("stop", "answers", ("node2",)), options=["--timeout-s", "15"])
    assert time.monotonic() - began < 100
    assert message == "it stopped answering: reading its files, no answer for 15 s"
    assert "load average" in sick.type(remedy)


# --- disks and directories ------------------------------------------------------------------------


def test_a_full_disk(sick: Broken) -> None:
    adapters = sick.own / "adapters"
    sick.small_disk("node1", adapters, megabytes=4, used=8)
    remedy, message = sick.finds(
        ("stop", "disk", ("node1",)), options=["--adapter-path", str(adapters)]
    )
    assert message == f"nothing can be written in {adapters} (checkpoints): No space left on device"
    shown = sick.type(remedy)
    assert "100%" in shown
    assert str(adapters) in shown


def test_a_disk_with_little_room(sick: Broken) -> None:
    adapters = sick.own / "adapters"
    sick.small_disk("node2", adapters, megabytes=120, used=60)
    _, message = sick.finds(("stop", "disk", ("node2",)), options=["--adapter-path", str(adapters)])
    assert message == f"the disk of {adapters} (checkpoints) has 63 MB left"
    sick.on("node2", f"mount -o remount,size=1g {adapters}")
    _, message = sick.finds(("warn", "disk", ("node2",)), options=["--adapter-path", str(adapters)])
    assert message == f"the disk of {adapters} (checkpoints) has 1.01 GB left"


def test_a_disk_that_cannot_be_written(sick: Broken) -> None:
    adapters = sick.own / "adapters"
    sick.small_disk("node0", adapters, megabytes=3000, used=0)
    sick.on("node0", f"mount -o remount,ro {adapters}")
    remedy, message = sick.finds(
        ("stop", "disk", ("node0",)), options=["--adapter-path", str(adapters)]
    )
    assert message == f"nothing can be written in {adapters} (checkpoints): Read-only file system"
    assert str(adapters) in sick.type(remedy)


def test_a_directory_to_work_in_that_is_missing(sick: Broken) -> None:
    for entry in sick.entries.values():
        entry["cwd"] = str(sick.own / "project")
    for name in ("node0", "node2"):
        (sick.files(name) / "project").mkdir()
    remedy, message = sick.finds(("stop", "directory", ("node1",)))
    assert f"{sick.own / 'project'} cannot be entered (No such file or directory)" in message
    sick.type(remedy)
    assert (sick.files("node1") / "project").is_dir()
    sick.is_well()


# --- several at once ------------------------------------------------------------------------------


def test_two_faults_of_two_computers(sick: Broken) -> None:
    flip_a_byte(sick.files("node2") / "model/model.safetensors")
    sick.firewall(
        "node0",
        "INPUT -p tcp ! --dport 22 -m conntrack --ctstate NEW -j REJECT --reject-with tcp-reset",
    )
    told = sick.finds(("stop", "model", ("node2",)), ("stop", "ports", ("node0", "node1", "node2")))
    # The model comes over the very ports that are shut, so they are opened first.
    sick.type(told[2])
    sick.type(told[0])
    sick.is_well()


def test_a_computer_that_cannot_be_asked_hides_no_other_fault(sick: Broken) -> None:
    sick.forget_key("node1")
    shutil.rmtree(sick.files("node2") / "data")
    sick.profile("node0", "echo hello")
    sick.finds(
        ("stop", "ssh", ("node1",)), ("stop", "data", ("node2",)), ("warn", "shell", ("node0",))
    )


def test_two_faults_of_one_computer(sick: Broken) -> None:
    (sick.files("node1") / "data/valid.jsonl").unlink()
    sick.small_disk("node1", sick.own / "adapters", megabytes=1, used=2)
    sick.profile("node1", "export MLX_RANK=0")
    expected = [
        ("stop", "data", ("node1",)),
        ("stop", "disk", ("node1",)),
        ("warn", "variables", ("node1",)),
    ]
    sick.finds(*expected, options=["--adapter-path", str(sick.own / "adapters")])


def test_what_a_person_sees(sick: Broken) -> None:
    (sick.files("node1") / "data/valid.jsonl").unlink()
    sick.forget_key("node2")
    words = ["cluster", "check", "--hostfile", str(sick.hostfile()), "--no-bench", *sick.trees]
    done = subprocess.run(
        [sys.executable, "-m", "allhands", *words],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=sick.work,
        env={**sick.environment(), "COLUMNS": "80"},
    )
    assert (done.returncode, done.stderr) == (7, "")
    lines = done.stdout.splitlines()
    assert [line.split()[2:4] for line in lines if line.split()[1:2] == ["stop"]] == [
        ["ssh", "node2"],
        ["data", "node1"],
    ]
    assert "  1. ssh node2 true" in lines
    assert (
        f"  2. allhands cluster sync --hostfile {sick.work / 'hosts.json'} --data {sick.own / 'data'}"
        in lines
    )
    assert lines[-1].startswith("2 things would stop training")
