"""Whole syncs on one computer: a pretended ssh runs the workers here, each host with a home of its own."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
import typer
from typer.testing import CliRunner

from allhands.cli import cluster_sync
from allhands.cli.cluster_sync import WantedSync, run_sync
from allhands.cluster.hosts import Host
from allhands.cluster.sync import SyncOptions, SyncState, make_plan, run, synchronise
from allhands.cluster.sync.blocks import BLOCK_BYTES
from allhands.errors import ConfigError, DataError, DistributedError, StorageError

# Runs here what a host would run, in its own home; a host named "down" does not answer, one named "noisy" greets.
PRETENDED = """#!/bin/sh
while [ "$1" != "--" ]; do shift; done
name=$2
shift 2
HOME="{homes}/$name"; SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22"; unset ALLHANDS_CACHE XDG_CACHE_HOME
export HOME SSH_CONNECTION
cd "$HOME" || {{ echo "ssh: connect to host $name port 22: Connection refused" >&2; exit 255; }}
case $name in noisy) echo "Welcome! {mark}"; echo "a second line";; empty) PATH=/nowhere; export PATH;; esac
exec /bin/sh -c "$*"
"""
SIZES = {"model/weights": 3 * BLOCK_BYTES + 17, "model/config.json": 2, "model/empty": 0, "data/train.jsonl": 5000}


class Hosts:
    """A person's directory here, and the homes of pretended hosts."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.work = place / "work"
        for name, size in SIZES.items():
            path = self.work / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(os.urandom(size))
        self.config = place / "ssh"
        self.config.write_text(PRETENDED.format(homes=place / "homes", mark="{" * 3))
        self.config.chmod(0o755)

    def make(self, *names: str, **fields: Any) -> list[Host]:
        for name in names:
            if name != "down":
                self.home(name).mkdir(parents=True, exist_ok=True)
        return [Host(name, name, cwd="there", python=sys.executable, **fields) for name in names]

    def home(self, name: str) -> Path:
        return self.place / "homes" / name

    def got(self, name: str) -> dict[str, bytes]:
        """Every file below that host's working directory."""
        top = self.home(name) / "there"
        return {str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()}

    def has(self) -> dict[str, bytes]:
        return {name: (self.work / name).read_bytes() for name in SIZES}


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    found = Hosts(tmp_path)
    monkeypatch.chdir(found.work)
    monkeypatch.setenv("ALLHANDS_SSH", str(found.config))
    monkeypatch.setattr(run, "_END_S", 5.0)
    yield found
    left = [process for process in psutil.Process().children(recursive=True) if "_sync_" not in process.name()]
    _, alive = psutil.wait_procs(left, 5)
    assert alive == []


def bring(hosts: Sequence[Host], *words: str, **options: Any) -> SyncState:
    return synchronise(make_plan(words or ("model", "data")), hosts, SyncOptions(**options))


@pytest.mark.parametrize(
    ("topology", "transport"),
    [("chain", "tls"), ("tree", "tls"), ("star", "tls"), ("chain", "tcp"), ("chain", "ssh"), ("star", "ssh")],
)
def test_every_host_gets_everything_once(hosts: Hosts, topology: Any, transport: Any) -> None:
    names = ["a", "noisy", "c", "d"]
    state = bring(hosts.make(*names), topology=topology, transport=transport)
    assert (state.errors, state.exit_code) == ([], 0)
    for name, host in zip(names, state.hosts, strict=True):
        assert hosts.got(name) == hosts.has()
        assert (host.state, host.received) == ("done", sum(SIZES.values()))
    times = 4 if transport == "ssh" else {"chain": 1, "tree": 2, "star": 4}[topology]
    assert state.sent == times * sum(SIZES.values())
    assert state.sent + sum(host.sent for host in state.hosts) == 4 * sum(SIZES.values())
    again = bring(hosts.make(*names), topology=topology, transport=transport)
    assert (again.sent, [host.lacking for host in again.hosts]) == (0, [()] * 4)


def test_only_what_differs_is_sent(hosts: Hosts) -> None:
    bring(hosts.make("a", "b"))
    (hosts.home("b") / "there" / "own").write_bytes(b"stays")
    weights = bytearray((hosts.work / "model/weights").read_bytes())
    weights[BLOCK_BYTES + 5] ^= 1
    (hosts.work / "model/weights").write_bytes(weights)
    (hosts.home("a") / "there/data/train.jsonl").unlink()
    state = bring(hosts.make("a", "b"))
    assert [host.received for host in state.hosts] == [BLOCK_BYTES + 5000, BLOCK_BYTES]
    assert [[state.names[file].rpartition("/")[2] for file in host.lacking] for host in state.hosts] == [
        ["train.jsonl", "weights"],
        ["weights"],
    ]
    assert hosts.got("a") == hosts.has()
    assert hosts.got("b") == {**hosts.has(), "own": b"stays"}


def test_a_dry_run_writes_nothing(hosts: Hosts) -> None:
    state = bring(hosts.make("a", "b"), dry_run=True)
    assert [(host.state, host.needed, len(host.lacking)) for host in state.hosts] == [
        ("done", sum(SIZES.values()), 4)
    ] * 2
    assert (hosts.got("a"), hosts.got("b"), state.sent) == ({}, {}, 0)


def test_one_that_is_down_does_not_stop_the_others(hosts: Hosts) -> None:
    state = bring(hosts.make("a", "down", "c"))
    assert [host.state for host in state.hosts] == ["done", "failed", "done"]
    assert hosts.got("c") == hosts.has()
    assert state.hosts[2].parent == "a"
    error = state.hosts[1].error
    assert isinstance(error, DistributedError)
    assert "host down cannot be reached" in str(error)
    assert "Connection refused" in str(error)
    assert "start the ssh server" in str(error.hint)
    assert state.exit_code == 7


def test_a_host_without_python_is_told(hosts: Hosts) -> None:
    made = [replace(host, python="/nowhere/python") for host in hosts.make("empty")]
    state = bring(made)
    assert "host empty cannot take part" in str(state.errors[0])
    assert '"python" in the hostfile' in str(state.errors[0])
    assert state.exit_code == 7


def test_what_cannot_be_written_fails_that_host_and_the_chain_goes_on(hosts: Hosts) -> None:
    made = hosts.make("a", "b", "c")
    (hosts.home("b") / "there" / "model" / "weights").mkdir(parents=True)  # where a file must be
    state = bring(made)
    assert [host.state for host in state.hosts] == ["done", "failed", "done"]
    error = state.hosts[1].error
    assert isinstance(error, StorageError)
    assert error.where == f"b:{hosts.home('b')}/there/model/weights"
    assert "it is a directory, and a file is to be brought" in error.message
    assert "move it away" in str(error.hint)
    # Found before anything is sent, and so nothing is left there.
    assert (state.hosts[1].received, hosts.got("b")) == (0, {})
    assert (hosts.got("a"), hosts.got("c")) == (hosts.has(), hosts.has())
    assert state.exit_code == 2
    assert bring(made, dry_run=True).hosts[1].state == "failed"
    (hosts.home("b") / "there" / "model" / "weights").rmdir()
    state = bring(made)
    assert state.exit_code == 0
    assert hosts.got("b") == hosts.has()


def test_too_little_space_is_found_before_anything_is_sent(hosts: Hosts) -> None:
    with (hosts.work / "model" / "huge").open("wb") as stream:
        stream.truncate(64 * BLOCK_BYTES)
    made = hosts.make("a")
    site = hosts.place / "small"
    site.mkdir()
    # A worker of that host sees a file system that is nearly full.
    worker = Path(run.__file__).with_name("worker.py").read_text()
    small = worker.replace("status.f_bavail * status.f_frsize", "1000")
    assert small != worker
    with pytest.MonkeyPatch.context() as patch:
        real = Path.read_text
        patch.setattr(
            Path, "read_text", lambda path, **named: small if path.name == "worker.py" else real(path, **named)
        )
        state = bring(made)
    assert (state.sent, state.exit_code, hosts.got("a")) == (0, 5, {})
    assert "needed" in str(state.errors[0])
    assert "free some space" in str(state.errors[0])


class Meddler:
    """Does something once, when the first host has begun to receive, and when that is true."""

    def __init__(self, what: Any, when: Callable[[], bool] = lambda: True) -> None:
        self.what, self.when, self.done = what, when, False

    def show(self, state: SyncState) -> None:
        if not self.done and state.hosts[0].received and self.when():
            self.done = True
            self.what()


def big(hosts: Hosts, blocks: int = 20) -> Path:
    """A file that takes a while."""
    path = hosts.work / "model" / "big"
    path.write_bytes(os.urandom(blocks * BLOCK_BYTES))
    return path


def slowed(monkeypatch: pytest.MonkeyPatch, pause_s: float = 0.05) -> None:
    """This computer takes its time to read each block."""
    real = run.SourceShelf.read

    def read(shelf: Any, file: int, block: int) -> bytes:
        time.sleep(pause_s)
        return real(shelf, file, block)

    monkeypatch.setattr(run.SourceShelf, "read", read)


def test_a_source_that_changes_while_it_is_sent_is_told_and_nowhere_half(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = big(hosts)
    slowed(monkeypatch)

    def change() -> None:
        with path.open("r+b") as stream:
            stream.seek(19 * BLOCK_BYTES)
            stream.write(b"changed")

    meddler = Meddler(change)
    made = hosts.make("a", "b")
    state = synchronise(make_plan(["model", "data"]), made, SyncOptions(), meddler.show)
    assert meddler.done
    assert state.withdrawn == [str(path)]
    assert isinstance(state.errors[0], DataError)
    assert state.exit_code == 3
    for name in ("a", "b"):
        got = hosts.got(name)
        assert {key: got[key] for key in SIZES} == hosts.has()
        assert "model/big" not in got
    # What has come of it is still good where it has not changed.
    again = bring(made)
    assert again.exit_code == 0
    assert again.hosts[0].received <= 3 * BLOCK_BYTES
    assert (hosts.home("b") / "there/model/big").read_bytes() == path.read_bytes()


def workers(name: str) -> list[psutil.Process]:
    """The worker processes of that host."""
    found: list[psutil.Process] = []
    for process in psutil.Process().children(recursive=True):
        try:
            if "-I" in process.cmdline() and process.environ().get("HOME", "").endswith(f"/homes/{name}"):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def test_a_host_that_is_lost_on_the_way_is_left_out_and_goes_on_later(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = big(hosts)
    slowed(monkeypatch)
    killed: list[int] = []

    def kill() -> None:
        for process in workers("b"):
            process.kill()
            killed.append(process.pid)

    made = hosts.make("a", "b", "c")
    meddler = Meddler(kill, when=lambda: _right_blocks(path, hosts.home("b") / "there" / "model") > 0)
    state = synchronise(make_plan(["model"]), made, SyncOptions(), meddler.show)
    assert killed
    assert [host.state for host in state.hosts] == ["done", "failed", "done"]
    assert "host b has been lost" in str(state.errors[0])
    assert state.exit_code == 7
    assert state.hosts[2].parent == "a"
    total = path.stat().st_size + sum(size for name, size in SIZES.items() if name.startswith("model"))
    assert state.hosts[2].received <= total + 3 * BLOCK_BYTES  # what was on its way from b
    assert (hosts.home("c") / "there/model/big").read_bytes() == path.read_bytes()
    again = bring(made, "model")
    assert again.exit_code == 0
    assert 0 < again.hosts[1].received < total
    assert again.hosts[1].received + state.hosts[1].received <= total + 3 * BLOCK_BYTES
    assert (hosts.home("b") / "there/model/big").read_bytes() == path.read_bytes()


COMMAND = """
import time
import typer
from allhands.cli import cluster_sync
from allhands.cluster.sync import run
real = run.SourceShelf.read
run.SourceShelf.read = lambda shelf, file, block: time.sleep(0.2) or real(shelf, file, block)
app = typer.Typer(add_completion=False)
app.command()(cluster_sync.sync)
app()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_ends_everywhere_when_it_is_stopped_and_goes_on_where_it_was(hosts: Hosts, number: int) -> None:
    path = big(hosts, 15)
    made = hosts.make("a", "b")
    hostfile = hosts.place / "hosts.json"
    hostfile.write_text(json.dumps([{"ssh": h.ssh, "cwd": h.cwd, "python": h.python} for h in made]))
    argv = [sys.executable, "-c", COMMAND, "--hostfile", str(hostfile), "model"]
    job = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while _right_blocks(path, hosts.home("b") / "there" / "model") < 2:
        assert time.monotonic() < deadline
        assert job.poll() is None
        time.sleep(0.005)
    family = psutil.Process(job.pid).children(recursive=True)
    assert len(workers("a")) == len(workers("b")) == 1
    job.send_signal(number)
    job.wait(5)
    _, alive = psutil.wait_procs(family, 2.0)
    assert alive == []
    there = [piece for name in "ab" for piece in (hosts.home(name) / "there" / "model").glob(".allhands-*.part")]
    assert there, "it was over before it was stopped"
    before = {name: _right_blocks(path, hosts.home(name) / "there" / "model") for name in "ab"}
    assert before["a"] > 0
    state = bring(made, "model")
    assert state.exit_code == 0
    others = sum(size for name, size in SIZES.items() if name.startswith("model"))
    for host in state.hosts:
        missing = path.stat().st_size - before[host.name] * BLOCK_BYTES
        assert missing <= host.received <= missing + others  # not one block twice
        assert (hosts.home(host.name) / "there/model/big").read_bytes() == path.read_bytes()


def _right_blocks(path: Path, folder: Path) -> int:
    """Blocks of the unfinished file that are as they must be; all of them if it is whole."""
    grown = folder / "big" if (folder / "big").exists() else next(folder.glob(".allhands-*.part"), Path(os.devnull))
    with path.open("rb") as source, grown.open("rb") as there:
        return sum(
            source.read(BLOCK_BYTES) == there.read(BLOCK_BYTES) for _ in range(path.stat().st_size // BLOCK_BYTES)
        )


def test_no_way_between_hosts_is_no_trouble(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are told wrong ports, as behind a firewall: this computer feeds them over ssh."""
    real = run._SyncRun._on_hello

    def elsewhere(self: Any, number: int, said: dict[str, Any]) -> None:
        real(self, number, {**said, "addresses": [["127.0.0.1", 1]], "source": "192.0.2.1"})

    monkeypatch.setattr(run._SyncRun, "_on_hello", elsewhere)
    state = bring(hosts.make("a", "b"))
    assert state.exit_code == 0
    assert [host.parent for host in state.hosts] == ["this computer over ssh"] * 2
    assert (hosts.got("a"), hosts.got("b")) == (hosts.has(), hosts.has())


@pytest.mark.parametrize(("number", "told"), [(errno.EMFILE, True), (errno.EADDRNOTAVAIL, False)])
def test_who_is_deaf_feeds_over_ssh(hosts: Hosts, monkeypatch: pytest.MonkeyPatch, number: int, told: bool) -> None:
    monkeypatch.setattr(socket, "create_server", mock.Mock(side_effect=OSError(number, "a reason")))
    state = bring(hosts.make("a"))
    assert (state.exit_code, state.hosts[0].parent) == (0, "this computer over ssh")
    assert ["a reason" in note for note in state.notes] == [True] * told


def test_without_openssl_everything_goes_over_ssh_and_is_told(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "has_openssl", lambda: False)
    state = bring(hosts.make("a"))
    assert (state.exit_code, hosts.got("a")) == (0, hosts.has())
    assert state.notes == [run.NO_OPENSSL]


def test_secrets_are_on_no_command_line(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    big(hosts, 10)
    slowed(monkeypatch)
    seen: list[str] = []

    def look() -> None:
        children = psutil.Process().children(recursive=True)
        seen.extend(" ".join(process.cmdline()) + json.dumps(process.environ()) for process in children)

    tokens = ["5ec2e7" * 10]
    monkeypatch.setattr(run.secrets, "token_hex", lambda count: tokens[0])
    certificates: list[str] = []
    real = run.make_certificate
    monkeypatch.setattr(run, "make_certificate", lambda: certificates.append(real()) or certificates[0])
    synchronise(make_plan(["model"]), hosts.make("a"), SyncOptions(), Meddler(look).show)
    assert any("-I" in text for text in seen)
    hidden = [*tokens, *(line for line in certificates[0].splitlines() if len(line) > 40)]
    assert len(hidden) > 20
    assert [text for text in seen for word in hidden if word in text] == []


def test_nothing_to_do_and_nobody_to_do_it_with(hosts: Hosts) -> None:
    with pytest.raises(ConfigError, match="all hosts are this computer"):
        bring([Host("localhost")])


def test_a_file_that_cannot_be_read_here_is_told(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    from allhands.cluster.sync import blocks

    def denied(path: str) -> Any:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(blocks, "open_regular", denied)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        bring(hosts.make("a"))
    assert not [thread for thread in threading.enumerate() if thread.name == "sync-hash" and thread.is_alive()]


# --- the command -----------------------------------------------------------------------------------------


def command(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(cluster_sync.sync)
    return CliRunner().invoke(app, list(arguments))


def hostfile_of(hosts: Hosts, *names: str) -> str:
    path = hosts.place / "hosts.json"
    made = hosts.make(*names)
    path.write_text(json.dumps([{"ssh": h.ssh, "cwd": h.cwd, "python": h.python} for h in made]))
    return str(path)


def test_the_command_says_what_it_has_done(hosts: Hosts) -> None:
    hostfile = hostfile_of(hosts, "a", "b")
    dry = command("--hostfile", hostfile, "--model", "model", "--data", "data", "--dry-run")
    assert dry.exit_code == 0
    assert "a: lacks 4 files; 13 MB would be sent" in dry.output
    # Where they would come to, and not where they are here.
    assert f"a: lacks 4 files; 13 MB would be sent\n  {hosts.home('a')}/there/data/train.jsonl\n" in dry.output
    assert f"  {hosts.home('b')}/there/model/weights\n" in dry.output
    small = command("--hostfile", hostfile, "--data", "data", "--dry-run")
    assert "1 files, 5.0 kB\na: lacks 1 file; 5.0 kB would be sent\n" in small.output
    done = command("--hostfile", hostfile, "--model", "model", "--data", "data")
    assert "4 files, 13 MB" in done.output
    assert "a: 4 files, 13 MB received from this computer, done after" in done.output
    assert "b: 4 files, 13 MB received from a, done after" in done.output
    again = command("--hostfile", hostfile, "--model", "model", "--data", "data")
    assert again.output.splitlines()[1:] == ["a: has everything already", "b: has everything already"]


def test_the_command_in_json_and_its_exit_code(hosts: Hosts) -> None:
    found = command("--hostfile", hostfile_of(hosts, "a", "down"), "--data", "data", "--json")
    record = json.loads(found.stdout)
    assert (found.exit_code, record["exit_code"]) == (7, 7)
    assert [host["state"] for host in record["hosts"]] == ["done", "failed"]
    assert record["hosts"][0]["bytes_received"] == record["bytes"] == 5000
    assert record["hosts"][0]["files"] == [str(hosts.work / "data/train.jsonl")]
    assert record["hosts"][0]["paths"] == [f"{hosts.home('a')}/there/data/train.jsonl"]
    assert "Connection refused" in record["hosts"][1]["error"]
    assert "host down cannot be reached" in found.stderr


def test_the_configuration_names_more(hosts: Hosts) -> None:
    (hosts.work / "train.yaml").write_text("model: model\ndata: data\n")
    assert command("--hostfile", hostfile_of(hosts, "a"), "-c", "train.yaml").exit_code == 0
    assert hosts.got("a") == {**hosts.has(), "train.yaml": b"model: model\ndata: data\n"}


def test_the_demo_model_goes_to_the_cache(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    own = hosts.place / "cache"
    monkeypatch.setenv("ALLHANDS_CACHE", str(own))
    model = own / "SmolLM"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    monkeypatch.setattr("allhands.model.sources.resolve", lambda source, report: model)
    made = [replace(hosts.make("a")[0], envs={"ALLHANDS_CACHE": str(hosts.place / "other")})]
    assert run_sync(WantedSync("demo", "demo", None, ()), made, SyncOptions(), as_json=False) == 0
    assert (hosts.place / "other" / "SmolLM" / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["--hosts", "a", "--chain", "--star"], "--chain --star"),
        (["--hosts", "a", "--transport", "pigeon"], "--transport"),
        (["--hosts", "a", "--delete", "yes"], "--delete"),
        ([], "--hostfile, --hosts"),
        (["--hosts", "a", "--hostfile", "b"], "--hostfile, --hosts"),
        (["--hosts", "a,-oProxyCommand=x"], "--hosts"),
    ],
)
def test_wrong_options_are_told(hosts: Hosts, arguments: list[str], where: str) -> None:
    error = command(*arguments, "model").exception
    assert isinstance(error, ConfigError)
    assert error.where == where
