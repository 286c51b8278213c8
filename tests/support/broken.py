"""A cluster to be broken: three computers with files, homes and firewalls of their own, and a
person before them.

``allhands cluster check`` examines them as it would for that person, remedies are typed as the
person would type them, and after every test all is as it was.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from command_line import changed
from namespaces import Cluster, namespaces

NAMES = ("node0", "node1", "node2")
_PASSWORD = "swordfish"
# What sshd finds in /etc/shadow for it: crypt with SHA-512.
_SHADOW = "$6$brokencluster$a8gmvXuO0tEccrGk5i/tFW../ufF4.n0IxoebPuktymjrYJmcR4tv6P5e61ybH9SVjSrEQ2Q7O2TVgydSCNDf/"
_CHECK_S, _REPAIR_S, _UP_S = 240.0, 120.0, 10.0
# What a person answers, by the end of the question.
_ANSWERS = (
    (r"\(yes/no(/\[fingerprint\])?\)\? ?$", "yes"),
    (r"assword: ?$", _PASSWORD),
    (r"\[y/N\] $", "y"),
)
Told = tuple[str, str, tuple[str, ...]]


@dataclass(frozen=True)
class Answer:
    """What the command has said: its exit code, and the findings of its JSON."""

    code: int
    content: dict[str, Any]

    @property
    def findings(self) -> list[dict[str, Any]]:
        """As told, the worst first."""
        return self.content["findings"]

    @property
    def told(self) -> list[Told]:
        """Severity, check and hosts of every finding."""
        return [(one["severity"], one["check"], tuple(one["hosts"])) for one in self.findings]


@dataclass
class Broken:
    """The computers, what a test does to them, and what is said about them.

    Attributes:
        own: the directory of which every computer, and the person, has another one under the same
            name; in it are ``home``, ``work``, ``model`` and ``data``.
        entries: what stands in the hostfile about each computer; a test changes it.
        undo: what is done after the test.
        usual: what is found without a fault: what this very machine has too little of.
    """

    cluster: Cluster
    own: Path
    pristine: Path
    entries: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    undo: ExitStack = field(default_factory=ExitStack)
    usual: list[Told] = field(default_factory=list[Told])

    # --- what is asked ----------------------------------------------------------------------------

    @property
    def work(self) -> Path:
        """Where the person, and every rank, works."""
        return self.own / "work"

    @property
    def trees(self) -> list[str]:
        """The options that name model and data."""
        return ["--model", str(self.own / "model"), "--data", str(self.own / "data")]

    def hostfile(self) -> Path:
        """The person's hostfile, as the test wants it."""
        path = self.work / "hosts.json"
        path.write_text(json.dumps(list(self.entries.values())))
        return path

    def check(self, *options: str, named: Sequence[str] | None = None) -> Answer:
        """Run the command, with ``named`` in place of the hostfile."""
        named = ["--hostfile", str(self.hostfile())] if named is None else named
        argv = [sys.executable, "-m", "allhands", "cluster", "check", "--json", *named, *options]
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_CHECK_S,
            check=False,
            cwd=self.work,
            env=self.environment(),
        )
        assert done.stderr == "", done.stderr
        return Answer(done.returncode, json.loads(done.stdout))

    def finds(
        self, *expected: Told, options: Sequence[str] = (), named: Sequence[str] | None = None
    ) -> list[str]:
        """Assert that the command finds exactly this, and return the remedies and messages,
        alternating.

        The network is not measured; model and data are compared.
        """
        answer = self.check("--no-bench", *map(str, changed(self.trees, options)), named=named)
        told = answer.told
        for one in self.usual:
            if one in told:
                told.remove(one)
        assert sorted(told) == sorted(expected), answer.findings
        stops = any(severity == "stop" for severity, *_ in expected)
        assert (answer.code, answer.content["stops"]) == (7 if stops else 0, stops)
        assert not {check for _, check, _ in expected} & set(answer.content["well"])
        by_told = dict(zip(answer.told, answer.findings, strict=True))
        return [by_told[one][part] for one in expected for part in ("remedy", "message")]

    def is_well(self, options: Sequence[str] = (), named: Sequence[str] | None = None) -> None:
        """Assert that nothing is wrong any more."""
        self.finds(options=options, named=named)

    # --- what the person types --------------------------------------------------------------------

    def environment(self) -> dict[str, str]:
        """The person's."""
        path = f"{self.pristine / 'bin'}:{os.environ['PATH']}:/usr/sbin:/sbin"
        return {**os.environ, "HOME": str(self.own / "home"), "PATH": path, "LC_ALL": "C"}

    def type(self, command: str, succeeds: bool = True) -> str:
        """Type a command at a terminal, answer its questions, and return what it has shown."""
        terminal, inside = pty.openpty()
        argv = ["setsid", "--ctty", "sh", "-c", command]
        process = subprocess.Popen(
            argv, stdin=inside, stdout=inside, stderr=inside, cwd=self.work, env=self.environment()
        )
        os.close(inside)
        try:
            shown = _conversation(terminal)
            code = process.wait(5)
        finally:
            os.close(terminal)
            if process.poll() is None:
                process.kill()
                process.wait()
        assert not succeeds or code == 0, f"{command}\nended with code {code}:\n{shown}"
        return shown

    # --- what is done to the computers ------------------------------------------------------------

    def files(self, name: str) -> Path:
        """That computer's own directory, as it is seen from here."""
        return self.cluster.directory / f"files-{name}-0"

    def on(self, name: str, command: str) -> str:
        """Run a shell's command on that computer, as root."""
        return self.cluster.run(name, ["sh", "-ec", command]).stdout

    def profile(self, name: str, line: str) -> None:
        """Add a line to what that computer's shell reads at every login."""
        with (self.files(name) / "home" / ".bashrc").open("a") as stream:
            stream.write(line + "\n")

    def firewall(self, name: str, *rules: str) -> None:
        """Add rules of iptables on that computer, such as ``INPUT -p tcp --dport 99 -j DROP``."""
        if shutil.which("iptables", path=f"{os.environ['PATH']}:/usr/sbin:/sbin") is None:
            pytest.skip("no iptables here: scripts/install_test_tools.sh")
        self.undo.callback(self.on, name, "iptables -F; iptables -t raw -F")
        self.on(
            name,
            "; ".join(
                f"iptables -A {rule}" if rule[0] != "-" else f"iptables {rule}" for rule in rules
            ),
        )

    def join(self, first: str, second: str, device: str) -> tuple[str, str]:
        """Lay a further cable between two computers, with an interface of that name at each; their
        addresses on it.
        """
        network = self.cluster.network.replace("10.77.", "10.78.").removesuffix("0/24")
        ends = [
            (self.cluster.nodes[name].namespace, f"{network}{10 + i}")
            for i, name in enumerate((first, second))
        ]
        (one, _), (other, _) = ends
        _do(f"ip -n {one} link add {device} type veth peer name {device} netns {other}")
        self.undo.callback(_do, f"ip -n {one} link delete {device}")
        for namespace, address in ends:
            _do(f"ip -n {namespace} address add {address}/24 dev {device}")
            _do(f"ip -n {namespace} link set {device} up")
        for namespace, _ in ends:
            # The kernel tells of a change once a second; until then the interface counts as down.
            deadline = time.monotonic() + 5
            while "state UP" not in _do(f"ip -n {namespace} link show {device}"):
                assert time.monotonic() < deadline, f"{device} stays down"
                time.sleep(0.05)
        return ends[0][1], ends[1][1]

    def small_disk(self, name: str, place: Path, megabytes: int, used: int) -> None:
        """Mount a disk of its own at a directory of that computer, and fill a part of it."""
        self.on(name, f"mkdir -p {place}; mount -t tmpfs -o size={megabytes}m tmpfs {place}")
        self.undo.callback(self.on, name, f"umount {place}")
        if used:
            # The last block does not fit any more where all is to be used.
            self.on(
                name, f"dd if=/dev/zero of={place}/other bs=1M count={used} 2>/dev/null || true"
            )

    def known_hosts(self) -> Path:
        """The person's, which their computers happen to share."""
        return self.cluster.directory / "known_hosts"

    def forget_key(self, name: str, another: str = "") -> None:
        """Take the host key of that computer from the known ones, or put ``another`` in its place."""
        path, address = self.known_hosts(), self.cluster.nodes[name].address
        lines = path.read_text().splitlines()
        assert sum(line.startswith(f"{address} ") for line in lines) == 1
        kept = [line for line in lines if not line.startswith(f"{address} ")]
        path.write_text(
            "".join(f"{line}\n" for line in [*kept, *([f"{address} {another}"] if another else [])])
        )

    def other_key(self) -> str:
        """A public key that nobody has the other half of."""
        path = self.cluster.directory / "other_key"
        if not path.exists():
            _do(f"ssh-keygen -q -t ed25519 -N '' -C test -f {shlex.quote(str(path))}")
        return " ".join(Path(f"{path}.pub").read_text().split()[:2])

    def afresh(self) -> None:
        """Everything as it was in the beginning."""
        self.undo.close()
        for place in (self.own, *(self.files(name) for name in NAMES)):
            for old in place.iterdir():
                shutil.rmtree(old)
            for part in ("home", "model", "data"):
                shutil.copytree(self.pristine / part, place / part)
            (place / "work").mkdir()
        shutil.copy(self.pristine / "known_hosts", self.known_hosts())
        self.entries = {
            name: {"ssh": name, "ips": [node.address], "slots": 1, "python": sys.executable}
            for name, node in self.cluster.nodes.items()
        }


@contextmanager
def broken_cluster(directory: Path, model: Path, data: Path) -> Iterator[Broken]:
    """Three computers that are well; what even they lack is in ``usual``, which must not stop
    training.
    """
    own, pristine = directory / "own", directory / "pristine"
    with namespaces(len(NAMES), directory, [own]) as cluster:
        shutil.copytree(model, pristine / "model")
        shutil.copytree(data, pristine / "data")
        _write_home(pristine / "home", directory)
        shutil.copy(directory / "known_hosts", pristine)
        _write_programs(pristine / "bin", directory)
        broken = Broken(cluster, own, pristine)
        broken.afresh()
        _as_a_person_has_it(cluster, broken)
        answer = broken.check("--no-bench", *broken.trees)
        # Whatever this very machine has too little of; one that is large and idle has enough of
        # everything.
        assert {check for _, check, _ in answer.told} <= {"memory", "disk", "limits"}, (
            answer.findings
        )
        assert answer.code == 0
        broken.usual = answer.told
        yield broken
        broken.undo.close()


def _write_home(home: Path, directory: Path) -> None:
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    for suffix in ("", ".pub"):
        shutil.copy(directory / f"user_key{suffix}", home / ".ssh" / f"id_ed25519{suffix}")
    shutil.copy(directory / "user_key.pub", home / ".ssh" / "authorized_keys")


def _write_programs(place: Path, directory: Path) -> None:
    """What a person has on every computer: ssh with its configuration, sudo, allhands."""
    ssh = f"exec {shutil.which('ssh')} -F {shlex.quote(str(directory / 'ssh_config'))}"
    programs = {
        "ssh": ssh,
        "sudo": "exec",
        "allhands": f"exec {shlex.quote(sys.executable)} -m allhands",
    }
    place.mkdir()
    for name, words in programs.items():
        (place / name).write_text(f'#!/bin/sh\n{words} "$@"\n')
        (place / name).chmod(0o755)


def _as_a_person_has_it(cluster: Cluster, broken: Broken) -> None:
    """ssh asks about unknown keys; there are homes with a profile, keys in them, and passwords."""
    config = cluster.directory / "ssh_config"
    config.write_text(
        config.read_text().replace("StrictHostKeyChecking yes", "StrictHostKeyChecking ask")
    )
    home, shadow = broken.own / "home", cluster.directory / "shadow"
    shadow.write_text(f"root:{_SHADOW}:19000:0:99999:7:::\n")
    shadow.chmod(0o600)
    for name, node in cluster.nodes.items():
        lines = [
            f"export HOME={shlex.quote(str(home))} PATH={shlex.quote(str(broken.pristine / 'bin'))}:$PATH",
            'cd; if [ -f ~/.bashrc ]; then . "$HOME/.bashrc"; fi',
            'exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"',
        ]
        node.login.write_text("\n".join(lines) + "\n")
        settings = cluster.directory / f"sshd-{name}.conf"
        text = re.sub(
            r"(?m)^AuthorizedKeysFile .*",
            f"AuthorizedKeysFile {home}/.ssh/authorized_keys",
            settings.read_text(),
        )
        settings.write_text(text.replace("PasswordAuthentication no", "PasswordAuthentication yes"))
        broken.on(name, f"mount --bind {shlex.quote(str(shadow))} /etc/shadow")
        assert node.sshd is not None
        node.sshd.send_signal(signal.SIGHUP)
    for name in cluster.names:
        _wait_for_log(cluster.directory / f"sshd-{name}.log", "Received SIGHUP; restarting.")


def _wait_for_log(path: Path, words: str) -> None:
    """Until the server listens again after having said so."""
    deadline = time.monotonic() + _UP_S
    while (
        "Server listening" not in path.read_text().rpartition(words)[2]
        or words not in path.read_text()
    ):
        assert time.monotonic() < deadline, path.read_text()
        time.sleep(0.02)


def _conversation(terminal: int) -> str:
    """What is shown until the end, with the questions answered on the way."""
    shown, answered, deadline = "", 0, time.monotonic() + _REPAIR_S
    while time.monotonic() < deadline:
        if not select.select([terminal], [], [], 1.0)[0]:
            continue
        data = b""
        with suppress(OSError):  # the other end is closed
            data = os.read(terminal, 4096)
        if not data:
            return shown
        shown += data.decode(errors="replace")
        for question, words in _ANSWERS:
            if re.search(question, shown[answered:]):
                answered = len(shown)
                os.write(terminal, f"{words}\n".encode())
    raise AssertionError(f"the command does not end: {shown}")


def _do(command: str) -> str:
    argv = shlex.split(command)
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    env = {**os.environ, "PATH": path}
    return subprocess.run(
        argv, check=True, capture_output=True, text=True, timeout=30, env=env
    ).stdout
