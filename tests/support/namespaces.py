"""Several computers on one: namespaces with an address, a host name, an sshd and, if wanted, files
of their own.

They hang on one bridge, at which the test's own processes have an address too. ``ALLHANDS_SSH``
leads to them, and they know each other by name.
"""

from __future__ import annotations

import json
import os
import random
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

import psutil
import pytest

needs_rsync = pytest.mark.skipif(
    shutil.which("rsync") is None, reason="no rsync here: scripts/install_test_tools.sh"
)
_TOOLS = ("ip", "tc", "sshd", "ssh", "ssh-keygen", "unshare", "nsenter", "mount")
_SBIN = "/usr/sbin:/sbin"
_PATH = f"{os.environ.get('PATH', '')}:{_SBIN}"
_UP_S = 20.0


@dataclass
class Node:
    """One of the computers.

    Attributes:
        name: what ssh calls it, and its host name.
        address: its own, in the network of this cluster.
        login: the script that every ssh session runs; a test may have it print things first.
        temporary: where its ssh sessions put temporary files.
        sshd: the server, whose mount and network namespaces are the computer's.
    """

    name: str
    address: str
    namespace: str
    port: str  # its end at the bridge
    login: Path
    temporary: Path
    sshd: subprocess.Popen[bytes] | None = None


@dataclass
class Cluster:
    """The computers, and the faults that may befall them."""

    nodes: dict[str, Node]
    address: str
    directory: Path
    ssh_command: str
    _slowed: set[str] = field(default_factory=set[str])
    _relays: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    @property
    def names(self) -> list[str]:
        """The names of the computers, in order."""
        return list(self.nodes)

    @property
    def network(self) -> str:
        """The addresses of this cluster alone, as ``a.b.c.0/24``."""
        return f"{self.address.rpartition('.')[0]}.0/24"

    @property
    def hosts_file(self) -> Path:
        """What every computer has as ``/etc/hosts``."""
        return self.directory / "hosts"

    def call(self, name: str, alias: str) -> None:
        """Let all computers know that computer by a further name."""
        with self.hosts_file.open("a") as stream:
            stream.write(f"{self.nodes[name].address} {alias}\n")

    def rename(self, name: str, hostname: str) -> None:
        """Give that computer another host name, maybe one that another computer has."""
        self.run(name, ["sh", "-ec", 'echo "$1" > /proc/sys/kernel/hostname', "sh", hostname])

    def cut(self, name: str) -> None:
        """Pull the cable: packets vanish, nobody is told."""
        _do("ip", "link", "set", self.nodes[name].port, "down")

    def heal(self, name: str) -> None:
        """Put the cable back, at full speed."""
        node = self.nodes[name]
        _do("ip", "link", "set", node.port, "up")
        if name in self._slowed:
            _do("tc", "qdisc", "del", "dev", node.port, "root")
            _do("ip", "netns", "exec", node.namespace, "tc", "qdisc", "del", "dev", "eth0", "root")
            self._slowed.discard(name)

    def slow(self, name: str, rate: str, delay: str = "0ms", burst: str = "64kb") -> bool:
        """Make the cable slow in both directions, for example ``("10mbit", "20ms")``; whether
        packets are delayed too.

        A kernel without netem can only lower the rate, and lets ``burst`` through at once.
        """
        node = self.nodes[name]
        self._slowed.add(name)
        for in_namespace, device in (
            ([], node.port),
            (["ip", "netns", "exec", node.namespace], "eth0"),
        ):
            words = [*in_namespace, "tc", "qdisc", "replace", "dev", device, "root"]
            try:
                _do(*words, "netem", "rate", rate, "delay", delay)
            except subprocess.CalledProcessError:
                _do(*words, "tbf", "rate", rate, "burst", burst, "latency", "400ms")
                delay = "0ms"
        return delay != "0ms"

    def delay(self, name: str, seconds: float) -> None:
        """Make the cable long: what goes in comes out that much later, on either end, for good;
        only once.
        """
        port = self.nodes[name].port
        near, far = (port.replace("ahv", kind, 1) for kind in ("ahw", "ahx"))
        _do("ip", "link", "add", near, "type", "veth", "peer", "name", far)
        bridge = f"ahb{self.address.split('.')[2]}"
        _do("ip", "link", "set", port, "nomaster")
        _do("ip", "link", "set", far, "master", bridge, "up")
        _do("ip", "link", "set", near, "up")
        program = Path(__file__).with_name("delaying.py")
        self._relays.append(
            subprocess.Popen([sys.executable, str(program), port, near, str(seconds)])
        )

    @property
    def delayed(self) -> bool:
        """Whether a cable is long."""
        return bool(self._relays)

    def give_core(self, name: str, core: int) -> None:
        """Let everything that is started on that computer from now on run on one core."""
        sshd = self.nodes[name].sshd
        assert sshd is not None
        psutil.Process(sshd.pid).cpu_affinity([core])

    def stop_relays(self) -> None:
        """End what delays frames."""
        for relay in self._relays:
            _end(relay)

    def command(self, name: str, argv: Sequence[str]) -> list[str]:
        """The command line that runs ``argv`` on that computer, without ssh."""
        sshd = self.nodes[name].sshd
        assert sshd is not None
        return ["nsenter", "-t", str(sshd.pid), "-m", "-n", "-u", "--", *argv]

    def run(
        self, name: str, argv: Sequence[str], check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on that computer, without ssh, and wait for it."""
        return subprocess.run(
            self.command(name, argv),
            capture_output=True,
            text=True,
            timeout=60,
            check=check,
            env=_environment(),
        )

    def processes(self, name: str) -> list[psutil.Process]:
        """What runs on that computer, without its sshd, the sessions of that, and what has ended."""
        found: list[psutil.Process] = []
        for pid in _pids(self.nodes[name].namespace):
            with suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if process.status() != psutil.STATUS_ZOMBIE and not process.name().startswith(
                    "sshd"
                ):
                    found.append(process)
        return found

    def wait_for_none(self, name: str, timeout_s: float) -> float:
        """Wait until nothing is left on that computer and return how long it took; fails after
        ``timeout_s``.
        """
        began = time.monotonic()
        while left := self.processes(name):
            assert time.monotonic() < began + timeout_s, [
                _command_line(process) for process in left
            ]
            time.sleep(0.05)
        return time.monotonic() - began

    def hostfile(self, path: Path, slots: int = 1, names: Sequence[str] | None = None) -> Path:
        """Write a hostfile of MLX's form for these computers, with this Python."""
        entries = [
            {
                "ssh": name,
                "ips": [self.nodes[name].address],
                "slots": slots,
                "python": sys.executable,
            }
            for name in (self.names if names is None else names)
        ]
        path.write_text(json.dumps(entries))
        return path


@contextmanager
def namespaces(count: int, directory: Path, private: Sequence[Path] = ()) -> Iterator[Cluster]:
    """Make ``count`` computers, ``node0`` on, with ``ALLHANDS_SSH`` set; nothing of them is left
    afterwards.

    Skips the test where that cannot be done.

    Args:
        directory: for keys and configurations.
        private: directories, made if absent, of which every computer sees its own empty one: no
            shared file system.
    """
    require()
    number = _claim_network()
    bridge = f"ahb{number}"
    with ExitStack() as stack:
        stack.callback(_remove, bridge)
        _do("ip", "address", "add", f"10.77.{number}.1/24", "dev", bridge)
        _do("ip", "link", "set", bridge, "up")
        nodes: dict[str, Node] = {}
        for i in range(count):
            files = directory / f"login-{i}.sh", directory / f"temporary-{i}"
            node = Node(
                f"node{i}",
                f"10.77.{number}.{10 + i}",
                f"ahn{number}-{i}",
                f"ahv{number}-{i}",
                *files,
            )
            nodes[node.name] = node
        config = _write_keys(directory, list(nodes.values()))
        known = [
            ("127.0.0.1", "localhost"),
            *((node.address, node.name) for node in nodes.values()),
        ]
        (directory / "hosts").write_text("".join(f"{address} {name}\n" for address, name in known))
        cluster = Cluster(
            nodes, f"10.77.{number}.1", directory, f"ssh -F {shlex.quote(str(config))}"
        )
        stack.callback(cluster.stop_relays)
        for node in nodes.values():
            _plug_in(node, bridge)
            _start_sshd(node, directory, private)
            assert node.sshd is not None
            stack.callback(_end, node.sshd)
        stack.callback(_kill_all, list(nodes.values()))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("ALLHANDS_SSH", cluster.ssh_command)
        _wait_until_up(cluster)
        yield cluster


def require() -> None:
    """Skip the test where there are no namespaces, no sshd, or no rights."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("network namespaces need root on Linux")
    if missing := [tool for tool in _TOOLS if shutil.which(tool, path=_PATH) is None]:
        pytest.skip(f"not installed: {', '.join(missing)}")
    probe = f"ahprobe{os.getpid()}"
    try:
        _do("ip", "netns", "add", probe)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr}")
    _do("ip", "netns", "delete", probe)


def _claim_network() -> int:
    """A number of a network that nobody else uses: whoever makes the bridge of that name has it."""
    _remove_abandoned()
    for number in random.sample(range(1, 255), 254):
        with suppress(subprocess.CalledProcessError):
            _do("ip", "link", "add", "name", f"ahb{number}", "type", "bridge")
            _do("ip", "link", "set", f"ahb{number}", "alias", f"test process {os.getpid()}")
            return number
    pytest.skip("no bridge can be made")


def _remove_abandoned() -> None:
    """Take away what a test process that was killed has left."""
    for link in Path("/sys/class/net").glob("ahb*"):
        with suppress(OSError, ValueError):
            owner = int((link / "ifalias").read_text().split()[-1])
            if not psutil.pid_exists(owner):
                _remove(link.name)


def _remove(bridge: str) -> None:
    number = bridge.removeprefix("ahb")
    for namespace in Path("/run/netns").glob(f"ahn{number}-*"):
        for pid in _pids(namespace.name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _do("ip", "netns", "delete", namespace.name)
    # A pair of ends goes with its namespace, but only when the last process in there has been
    # cleared away.
    for kind in ("ahv", "ahw"):
        for end in Path("/sys/class/net").glob(f"{kind}{number}-*"):
            with suppress(subprocess.CalledProcessError):
                _do("ip", "link", "delete", end.name)
    _do("ip", "link", "delete", bridge)


def _plug_in(node: Node, bridge: str) -> None:
    _do("ip", "netns", "add", node.namespace)
    _do(
        "ip",
        "link",
        "add",
        node.port,
        "type",
        "veth",
        "peer",
        "name",
        "eth0",
        "netns",
        node.namespace,
    )
    _do("ip", "link", "set", node.port, "master", bridge, "up")
    for words in ("link set lo up", f"address add {node.address}/24 dev eth0", "link set eth0 up"):
        _do("ip", "-n", node.namespace, *words.split())


def _write_keys(directory: Path, nodes: Sequence[Node]) -> Path:
    """Make the keys, and return the configuration of ssh."""
    for name in ("host_key", "user_key"):
        _do(
            "ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(directory / name)
        )
    known = (directory / "host_key.pub").read_text().split()[:2]
    lines = [f"{node.address} {' '.join(known)}\n" for node in nodes]
    (directory / "known_hosts").write_text("".join(lines))
    config = directory / "ssh_config"
    blocks = [f"Host {node.name}\n  HostName {node.address}\n" for node in nodes]
    common = {
        "User": "root",
        "IdentityFile": directory / "user_key",
        "IdentitiesOnly": "yes",
        "IdentityAgent": "none",
        "UserKnownHostsFile": directory / "known_hosts",
        "GlobalKnownHostsFile": "/dev/null",
        "StrictHostKeyChecking": "yes",
    }
    config.write_text(
        "".join(blocks)
        + "Host *\n"
        + "".join(f"  {key} {value}\n" for key, value in common.items())
    )
    return config


def _start_sshd(node: Node, directory: Path, private: Sequence[Path]) -> None:
    node.login.write_text('exec /bin/sh -c "$SSH_ORIGINAL_COMMAND"\n')
    node.temporary.mkdir()
    settings = {
        "SetEnv": f"TMPDIR={node.temporary}",
        "ListenAddress": node.address,
        "HostKey": directory / "host_key",
        "AuthorizedKeysFile": directory / "user_key.pub",
        "PidFile": "none",
        "UsePAM": "no",
        "StrictModes": "no",
        "PermitRootLogin": "yes",
        "PasswordAuthentication": "no",
        "KbdInteractiveAuthentication": "no",
        "MaxStartups": "100",
        "ForceCommand": f"/bin/sh {node.login}",
    }
    config = directory / f"sshd-{node.name}.conf"
    config.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    sshd = shutil.which("sshd", path=_PATH)
    script = [
        f"echo {node.name} > /proc/sys/kernel/hostname",
        f"mount --bind {shlex.quote(str(directory / 'hosts'))} /etc/hosts",
        "mount -t tmpfs -o mode=755 tmpfs /run/sshd",
        # A new computer has none, and bash reads it for commands over ssh, too: seconds, or a lock
        # that waits.
        'if [ -f "$HOME/.bashrc" ]; then mount --bind /dev/null "$HOME/.bashrc"; fi',
    ]
    Path("/run/sshd").mkdir(exist_ok=True)
    for i, path in enumerate(private):
        own = directory / f"files-{node.name}-{i}"
        for place in (own, path):
            place.mkdir(parents=True, exist_ok=True)
        script.append(f"mount --bind {shlex.quote(str(own))} {shlex.quote(str(path))}")
    script.append(f"exec {sshd} -D -e -f {shlex.quote(str(config))}")
    log = directory / f"sshd-{node.name}.log"
    enter = [
        "nsenter",
        f"--net=/run/netns/{node.namespace}",
        "unshare",
        "-m",
        "-u",
        "--propagation",
        "private",
    ]
    with log.open("wb") as stream:
        node.sshd = subprocess.Popen(
            [*enter, "sh", "-ec", "; ".join(script)],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=stream,
            env=_environment(),
            start_new_session=True,
        )


def _wait_until_up(cluster: Cluster) -> None:
    deadline = time.monotonic() + _UP_S
    for node in cluster.nodes.values():
        argv = [
            *shlex.split(cluster.ssh_command),
            "-o",
            "BatchMode=yes",
            "-o",
            "ConnectTimeout=2",
            node.name,
            "true",
        ]
        while subprocess.run(argv, capture_output=True, check=False).returncode != 0:
            log = (cluster.directory / f"sshd-{node.name}.log").read_text()
            assert time.monotonic() < deadline, f"no answer from {node.name}: {log}"
            time.sleep(0.05)


def _kill_all(nodes: Sequence[Node]) -> None:
    for node in nodes:
        for pid in _pids(node.namespace):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _pids(namespace: str) -> list[int]:
    return [int(line) for line in _do("ip", "netns", "pids", namespace).split()]


def _command_line(process: psutil.Process) -> str:
    with suppress(psutil.NoSuchProcess):
        return shlex.join(process.cmdline())
    return "(ended)"


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _PATH}


def _do(*argv: str) -> str:
    done = subprocess.run(
        argv, capture_output=True, text=True, check=True, timeout=30, env=_environment()
    )
    return done.stdout
