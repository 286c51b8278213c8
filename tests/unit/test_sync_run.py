"""Whole syncs on one computer: a pretended ssh runs the probes and rsync here, each host with a
home of its own.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer
from typer.testing import CliRunner

from allhands.cli.cluster_sync import run_sync
from allhands.cli.commands import function_of
from allhands.cli.verbs_cluster import ClusterSync
from allhands.cluster.hosts import Host
from allhands.cluster.probes.files import STAGING
from allhands.cluster.sync.plan import make_plan
from allhands.cluster.sync.run import synchronise
from allhands.cluster.sync.state import SyncOptions, SyncState
from allhands.errors import ConfigError, DataError, DistributedError, StorageError

RSYNC = shutil.which("rsync")
pytestmark = pytest.mark.skipif(
    RSYNC is None, reason="no rsync here: scripts/install_test_tools.sh"
)

# Runs here what a host would run, in its own home. A host named "down" does not answer, one named
# "noisy" greets, and one named "shy" lets in this computer alone.
PRETENDED = """#!/bin/sh
while [ "$1" != "--" ]; do shift; done
name=$2
shift 2
case $name in shy) [ -z "$SSH_CONNECTION" ] || {{ echo "shy: Permission denied (publickey)." >&2; exit 255; }};; esac
HOME="{homes}/$name"; SSH_CONNECTION="127.0.0.1 1 127.0.0.1 22"; unset ALLHANDS_CACHE XDG_CACHE_HOME
export HOME SSH_CONNECTION
cd "$HOME" || {{ echo "ssh: connect to host $name port 22: Connection refused" >&2; exit 255; }}
case $name in
    noisy) echo "Welcome! {mark}"; printf "a second line";;
    empty) PATH=/nowhere; export PATH;;
    bare) PATH="{bare}"; export PATH;;
esac
exec setsid -w /bin/sh -c "$*"
"""
# rsync of whoever sends, after something has happened; the one that receives is the real one.
MEDDLING = """#!/bin/sh
case " $* " in *" --server "*) exec {rsync} "$@";; esac
{meddle}
exec {rsync} {options} "$@"
"""
MB = 1 << 20
SIZES = {
    "model/weights": 3 * MB + 17,
    "model/config.json": 2,
    "model/empty": 0,
    "data/it's\n $(x) *.jsonl": 5000,
}
TOTAL = sum(SIZES.values())


class Hosts:
    """A person's directory here, and the homes of pretended hosts."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.work = place / "my work"
        for name, size in SIZES.items():
            self.write(name, os.urandom(size))
        for program in ("sh", "env", "python3", "setsid"):
            found = shutil.which(program)
            assert found is not None
            (place / "bare").mkdir(exist_ok=True)
            (place / "bare" / program).symlink_to(found)
        self.script(
            "ssh", PRETENDED.format(homes=place / "homes", mark="{" * 3, bare=place / "bare")
        )

    def write(self, name: str, content: bytes) -> Path:
        path = self.work / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        return path

    def script(self, name: str, text: str) -> Path:
        path = self.place / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def meddle(self, monkeypatch: pytest.MonkeyPatch, meddle: str = "", options: str = "") -> None:
        """Let that happen before rsync sends, and have it send so."""
        text = MEDDLING.format(rsync=RSYNC, meddle=meddle, options=options)
        monkeypatch.setenv("PATH", f"{self.script('bin/rsync', text).parent}:{os.environ['PATH']}")

    def make(self, *names: str, **fields: Any) -> list[Host]:
        for name in names:
            if name != "down":
                self.home(name).mkdir(parents=True, exist_ok=True)
        return [
            Host(name, name, cwd="over there", python=sys.executable, **fields) for name in names
        ]

    def home(self, name: str) -> Path:
        return self.place / "homes" / name

    def got(self, name: str) -> dict[str, bytes]:
        """Every file below that host's working directory."""
        return content_of(self.home(name) / "over there")

    def has(self) -> dict[str, bytes]:
        return content_of(self.work)


def content_of(top: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(top)): path.read_bytes() for path in top.rglob("*") if path.is_file()
    }


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    found = Hosts(tmp_path)
    monkeypatch.chdir(found.work)
    monkeypatch.setenv("ALLHANDS_SSH", str(found.place / "ssh"))
    monkeypatch.delenv("SSH_CONNECTION", raising=False)
    yield found
    _, alive = psutil.wait_procs(processes_in(tmp_path), 5)
    assert alive == []


def processes_in(place: Path) -> list[psutil.Process]:
    """Every process that works below this directory, or in the home of a pretended host there."""
    found: list[psutil.Process] = []
    for process in psutil.process_iter():
        try:
            home = process.environ().get("HOME", "")
            if process.pid != os.getpid() and f"{home}/".startswith(f"{place}/"):
                found.append(process)
        except (psutil.Error, OSError):
            continue
    return found


def bring(hosts: Sequence[Host], *words: str, **options: Any) -> SyncState:
    return synchronise(make_plan(words or ("model", "data")), hosts, SyncOptions(**options))


@pytest.mark.parametrize("topology", ["tree", "chain", "star"])
def test_every_host_gets_everything_once(hosts: Hosts, topology: Any) -> None:
    names = ["a", "noisy", "c", "d"]
    state = bring(hosts.make(*names), topology=topology)
    assert (state.errors, state.exit_code) == ([], 0)
    for name, host in zip(names, state.hosts, strict=True):
        assert hosts.got(name) == hosts.has()
        assert (host.state, host.received) == ("done", TOTAL)
    least, most = {"tree": (1, 3), "chain": (1, 1), "star": (4, 4)}[topology]
    assert least * TOTAL <= state.sent <= most * TOTAL
    assert state.sent + sum(host.sent for host in state.hosts) == 4 * TOTAL
    assert topology != "chain" or [host.parent for host in state.hosts] == [
        "this computer",
        *names[:-1],
    ]
    again = bring(hosts.make(*names), topology=topology)
    assert (again.sent, [host.lacking for host in again.hosts]) == (0, [()] * 4)


def test_a_file_keeps_mode_and_time(hosts: Hosts) -> None:
    path = hosts.work / "model/config.json"
    path.chmod(0o640)
    os.utime(path, ns=(1, 1_600_000_000_000_000_123))
    bring(hosts.make("a"))
    there = (hosts.home("a") / "over there/model/config.json").stat()
    assert (there.st_mode & 0o777, there.st_mtime_ns) == (0o640, 1_600_000_000_000_000_123)


def test_only_what_differs_is_sent(hosts: Hosts) -> None:
    bring(hosts.make("a", "b"))
    (hosts.home("b") / "over there" / "own").write_bytes(b"stays")
    weights = bytearray((hosts.work / "model/weights").read_bytes())
    weights[MB + 5] ^= 1
    old = (hosts.home("a") / "over there/model/weights").open("rb")
    hosts.write("model/weights", bytes(weights))
    (hosts.home("a") / "over there/model/config.json").unlink()
    state = bring(hosts.make("a", "b"))
    assert all(0 < host.received < 100_000 for host in state.hosts)
    lacking = [
        [state.names[file].rpartition("/")[2] for file in host.lacking] for host in state.hosts
    ]
    assert lacking == [["config.json", "weights"], ["weights"]]
    assert hosts.got("a") == hosts.has()
    assert hosts.got("b") == {**hosts.has(), "own": b"stays"}
    with old:  # who reads the old file goes on
        assert old.read() != bytes(weights)


def test_a_dry_run_writes_nothing(hosts: Hosts) -> None:
    state = bring(hosts.make("a", "b"), dry_run=True)
    assert [(host.state, host.needed, len(host.lacking)) for host in state.hosts] == [
        ("done", TOTAL, 4)
    ] * 2
    assert [list((hosts.home(name) / "over there").rglob("*")) for name in "ab"] == [[], []]
    assert state.sent == 0


def test_one_that_is_down_does_not_stop_the_others(hosts: Hosts) -> None:
    state = bring(hosts.make("a", "down", "c"), topology="chain")
    assert [host.state for host in state.hosts] == ["done", "failed", "done"]
    assert hosts.got("c") == hosts.has()
    assert state.hosts[2].parent == "a"
    error = state.hosts[1].error
    assert isinstance(error, DistributedError)
    assert "Connection refused" in str(error)
    assert error.hint
    assert state.exit_code == 7


def test_a_host_without_python_is_told(hosts: Hosts) -> None:
    made = [replace(host, python="/nowhere/python") for host in hosts.make("empty", "c")]
    state = bring(made)
    assert [host.state for host in state.hosts] == [
        "failed",
        "done",
    ]  # c takes the first Python on its path
    assert state.exit_code == 7


def test_a_host_without_rsync_is_told_with_the_command_that_installs_it(hosts: Hosts) -> None:
    hosts.script("bare/dnf", "")
    state = bring(hosts.make("a", "bare"))
    assert [host.state for host in state.hosts] == ["done", "failed"]
    error = state.hosts[1].error
    assert isinstance(error, DistributedError)
    assert error.hint == "ssh -t bare 'sudo dnf install -y rsync'"
    assert state.exit_code == 7


def test_who_has_everything_and_no_rsync_sends_nothing(hosts: Hosts) -> None:
    made = hosts.make("bare", "b")
    shutil.copytree(hosts.work, hosts.home("bare") / "over there")
    state = bring(made, topology="chain")
    assert (state.errors, state.hosts[0].lacking) == ([], ())
    assert state.hosts[1].parent == "this computer"
    assert "there is no rsync" in state.notes[0]
    assert hosts.got("b") == hosts.has()


def test_without_rsync_here_nothing_is_begun(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, path: name if name == "apt-get" else None)
    with pytest.raises(ConfigError, match="rsync") as caught:
        bring(hosts.make("a"))
    assert caught.value.hint == "sudo apt-get install -y rsync"


def test_what_cannot_be_written_fails_that_host_alone(hosts: Hosts) -> None:
    made = hosts.make("a", "b", "c")
    blocked = hosts.home("b") / "over there" / "model" / "weights"
    blocked.mkdir(parents=True)  # where a file must be
    state = bring(made, topology="chain")
    assert [host.state for host in state.hosts] == ["done", "failed", "done"]
    error = state.hosts[1].error
    assert isinstance(error, StorageError)
    assert error.where == f"b:{blocked}"
    # Found before anything is sent, and so nothing is left there.
    assert (state.hosts[1].received, hosts.got("b")) == (0, {})
    assert (hosts.got("a"), hosts.got("c")) == (hosts.has(), hosts.has())
    assert state.exit_code == 2
    assert bring(made, dry_run=True).hosts[1].state == "failed"
    blocked.rmdir()
    state = bring(made)
    assert state.exit_code == 0
    assert hosts.got("b") == hosts.has()


def test_a_source_that_changes_while_it_is_sent_is_told_and_nowhere_half(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hosts.write("model/big", os.urandom(MB))
    hosts.meddle(
        monkeypatch, f"printf changed | dd of='{path}' bs=1 seek=500000 conv=notrunc 2>/dev/null"
    )
    made = hosts.make("a", "b")
    state = bring(made)
    assert state.withdrawn == [str(path)]
    assert isinstance(state.errors[0], DataError)
    assert state.exit_code == 3
    has = hosts.has()
    del has["model/big"]
    for name in "ab":
        got = {key: value for key, value in hosts.got(name).items() if STAGING not in key}
        assert got == has
    # What has come of it is still good where it has not changed.
    hosts.meddle(monkeypatch)
    again = bring(made)
    assert again.exit_code == 0
    assert (
        min(host.received for host in again.hosts) < 50_000
    )  # who came second has not got any of it
    assert hosts.got("b") == hosts.has()


def test_a_sender_whose_files_are_not_right_is_not_believed(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts.meddle(
        monkeypatch,
        '[ -z "$SSH_CONNECTION" ] || printf damage > "$HOME/over there/model/config.json"',
    )
    state = bring(hosts.make("a", "b"), topology="chain")
    assert state.errors == []
    assert hosts.got("b") == hosts.has()
    assert state.hosts[1].parent == "this computer"


def test_who_cannot_log_in_leaves_it_to_this_computer(hosts: Hosts) -> None:
    state = bring(hosts.make("a", "shy"), topology="chain")
    assert state.errors == []
    assert [host.parent for host in state.hosts] == ["this computer", "this computer"]
    assert "Permission denied" in state.notes[0]
    assert hosts.got("shy") == hosts.has()


@pytest.mark.slow
def test_a_host_that_is_lost_on_the_way_is_left_out_and_goes_on_later(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = hosts.write("model/big", os.urandom(8 * MB))
    hosts.meddle(monkeypatch, options="--bwlimit=1500")
    made = hosts.make("a", "b", "c")
    done: list[int] = []

    def kill(state: SyncState) -> None:
        if not done and state.hosts[1].received > 2 * MB:
            for process in processes_in(hosts.home("b")):
                if (
                    "allhands_probe" in " ".join(process.cmdline())
                    or "--server" in process.cmdline()
                ):
                    process.terminate()
                    done.append(process.pid)

    state = synchronise(make_plan(["model"]), made, SyncOptions(topology="chain"), kill)
    assert done
    assert [host.state for host in state.hosts] == ["done", "failed", "done"]
    assert state.exit_code == 7
    assert state.hosts[2].parent == "a"
    assert "model/big" not in hosts.got("b")
    hosts.meddle(monkeypatch)
    again = bring(made, "model")
    assert again.exit_code == 0
    assert again.hosts[1].received < path.stat().st_size + SIZES["model/weights"] - MB
    assert hosts.got("b") == hosts.got("a")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_it_ends_everywhere_when_it_is_stopped_and_goes_on_where_it_was(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    path = hosts.write("model/big", os.urandom(8 * MB))
    hosts.meddle(monkeypatch, options="--bwlimit=1500")
    argv = [sys.executable, "-c", COMMAND, "--hostfile", hostfile_of(hosts, "a", "b"), "model"]
    job = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    staging = hosts.home("a") / "over there/model" / STAGING
    deadline = time.monotonic() + 30
    while (
        not staging.is_dir() or sum(file.stat().st_size for file in staging.glob(".*.*")) < 2 * MB
    ):
        assert time.monotonic() < deadline
        assert job.poll() is None
        time.sleep(0.01)
    job.send_signal(number)
    job.wait(5)
    _, alive = psutil.wait_procs(processes_in(hosts.place), 5)
    assert alive == []
    assert "model/big" not in hosts.got("a")
    hosts.meddle(monkeypatch)
    state = bring(hosts.make("a", "b"), "model")
    assert state.exit_code == 0
    assert state.hosts[0].received < path.stat().st_size + SIZES["model/weights"] - MB
    assert [hosts.got(name) for name in "ab"] == [
        {k: v for k, v in hosts.has().items() if k.startswith("model")}
    ] * 2


def test_nothing_to_do_and_nobody_to_do_it_with(hosts: Hosts) -> None:
    with pytest.raises(ConfigError) as caught:
        bring([Host("localhost")])
    assert caught.value.code == "nothing-to-do"


def test_a_file_that_cannot_be_read_here_is_told(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def denied(path: Any, *rest: Any, **named: Any) -> int:
        if str(path).endswith("weights"):
            raise PermissionError(13, "Permission denied", path)
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(DataError) as caught:
        bring(hosts.make("a"))
    assert caught.value.code == "data-unreadable"


# --- the command ----------------------------------------------------------------------------------

COMMAND = "import sys; from allhands.cli.main import main; main(['cluster', 'sync', *sys.argv[1:]])"


def command(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(function_of("cluster.ClusterSync cluster_sync:sync"))
    return CliRunner().invoke(app, list(arguments))


def hostfile_of(hosts: Hosts, *names: str) -> str:
    path = hosts.place / "hosts.json"
    made = hosts.make(*names)
    path.write_text(json.dumps([{"ssh": h.ssh, "cwd": h.cwd, "python": h.python} for h in made]))
    return str(path)


def test_the_command_says_what_it_has_done(hosts: Hosts) -> None:
    hostfile = hostfile_of(hosts, "a", "b")
    dry = command("--hostfile", hostfile, "--model", "model", "--dry-run")
    assert dry.exit_code == 0
    # Where they would come to, and not where they are here.
    for name in "ab":
        assert f"  {hosts.home(name)}/over there/model/weights\n" in dry.output
    done = command("--hostfile", hostfile, "--model", "model", "--data", "data", "--chain")
    assert "4 files, 3.2 MB" in done.output
    assert "a: 4 files, 3.2 MB received from this computer, done after" in done.output
    assert "b: 4 files, 3.2 MB received from a, done after" in done.output
    again = command("--hostfile", hostfile, "--model", "model", "--data", "data")
    assert again.output.splitlines()[1:] == [
        "a: has everything already",
        "b: has everything already",
    ]


def test_the_command_in_json_and_its_exit_code(hosts: Hosts) -> None:
    found = command("--hostfile", hostfile_of(hosts, "a", "down"), "--data", "data", "--json")
    record = json.loads(found.stdout)
    assert (found.exit_code, record["exit_code"]) == (7, 7)
    assert [host["state"] for host in record["hosts"]] == ["done", "failed"]
    assert record["hosts"][0]["bytes_received"] == record["bytes"] == 5000
    (name,) = [name for name in SIZES if name.startswith("data")]
    assert record["hosts"][0]["files"] == [str(hosts.work / name)]
    assert record["hosts"][0]["paths"] == [f"{hosts.home('a')}/over there/{name}"]
    assert "Connection refused" in record["hosts"][1]["error"]
    assert "host down cannot be reached" in found.stderr


def test_the_configuration_names_more(hosts: Hosts) -> None:
    (hosts.work / "train.yaml").write_text("model: model\ndata: data\n")
    assert command("--hostfile", hostfile_of(hosts, "a"), "-c", "train.yaml").exit_code == 0
    assert hosts.got("a") == hosts.has()


def test_the_demo_model_goes_to_the_cache(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    own = hosts.place / "cache"
    monkeypatch.setenv("ALLHANDS_CACHE", str(own))
    model = own / "SmolLM"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    monkeypatch.setattr("allhands.model.sources.resolve", lambda source, report: model)
    made = [replace(hosts.make("a")[0], envs={"ALLHANDS_CACHE": str(hosts.place / "other")})]
    assert run_sync(ClusterSync(model="demo", data="demo"), made, SyncOptions()) == 0
    assert (hosts.place / "other" / "SmolLM" / "config.json").read_text() == "{}"


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        (["--hosts", "a", "--chain", "--star"], "--chain --star"),
        (["--hosts", "a", "--transport", "pigeon"], "--transport"),
        (["--hosts", "a", "--transport", "tcp"], "--transport"),
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
