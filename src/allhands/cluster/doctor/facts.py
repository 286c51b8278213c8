"""Typed facts about the computers, parsed from the probes' JSON.

Sizes are bytes, times seconds. An unknown fact is empty or ``None``, and named in ``missing``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal[
    "wifi", "ethernet", "thunderbolt", "infiniband", "bridge", "loopback", "tunnel", "virtual"
]
Outcome = Literal[
    "ok", "refused", "timeout", "unreachable", "forbidden", "stranger", "stalls", "failed"
]
# Reasons why a computer could not be asked, or why ssh from it to another one fails.
TroubleKind = Literal[
    "name",
    "auth",
    "unknown-key",
    "changed-key",
    "refused",
    "timeout",
    "unreachable",
    "no-ssh",
    "no-python",
    "old-python",
    "login",
    "address",
    "other",
]


class Fact(BaseModel):
    """Base of all facts: immutable, and ignores additional fields of a newer probe."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Address(Fact):
    """An address of an interface, with the bits of its network."""

    ip: str
    prefix: int = 32


class Interface(Fact):
    """A network interface; ``members`` are those that a bridge joins."""

    name: str
    kind: Kind = "ethernet"
    up: bool = True
    mtu: int | None = None
    speed_mbps: int | None = None
    addresses: tuple[Address, ...] = ()
    members: tuple[str, ...] = ()


class Route(Fact):
    """The way to ``ip``: leaving by ``interface``, with ``source`` as the own address."""

    ip: str
    interface: str | None = None
    gateway: str | None = None
    source: str | None = None
    error: str | None = None


class System(Fact):
    """The system; the three ids together identify the computer."""

    hostname: str = ""
    user: str = ""
    system: str = ""
    release: str = ""
    machine: str = ""
    machine_id: str = ""
    boot_id: str = ""
    network_id: str = ""


class Python(Fact):
    """The interpreter that was asked, and its packages."""

    python_version: str = ""
    python_path: str = ""
    versions: dict[str, str] = Field(default_factory=dict)


class Processor(Fact):
    """The processor; ``usable`` cores may be fewer than ``count``."""

    model: str = ""
    count: int = 1
    usable: int = 1


class MemoryFacts(Fact):
    """Memory of the computer."""

    total: int = 0
    free: int = 0


class GpuFacts(Fact):
    """A GPU that MLX can use; 0 bytes: not known."""

    kind: Literal["metal", "cuda"]
    name: str = ""
    memory: int = 0
    free: int = 0
    driver: str = ""


class LimitFacts(Fact):
    """Limits of a process; ``None``: no limit. Anybody may raise ``files`` to ``most_files``."""

    files: int | None = None
    most_files: int | None = None
    locked: int | None = None


class Disk(Fact):
    """The disk for files of ``role``: ``path`` was asked for, ``place`` is the part of it that
    exists.
    """

    role: str
    path: str = ""
    place: str = ""
    total: int = 0
    free: int = 0
    device: int | None = None
    error: str | None = None


class Firewall(Fact):
    """A firewall that blocks connections: incoming (``in``), outgoing (``out``), or both."""

    name: str
    ways: tuple[Literal["in", "out"], ...] = ("in",)


class Mpi(Fact):
    """The mpirun that would be taken, and its Open MPI's version."""

    path: str
    version: str = ""


class Rdma(Fact):
    """RDMA devices; ``status`` is printed by ``rdma_ctl`` on a Mac that has it."""

    devices: tuple[str, ...] = ()
    status: str | None = None


class ThunderboltPort(Fact):
    """A receptacle; ``domain`` is its own end's id, ``peers`` those of the computers plugged in."""

    receptacle: str = "?"
    connected: bool = False
    speed: str = ""
    domain: str = ""
    peers: tuple[str, ...] = ()


class Mac(Fact):
    """Facts that only macOS has; ``sleep_minutes`` 0 is never.

    Attributes:
        working_set: bytes that macOS lets the GPU use; ``None`` if that computer cannot tell.
        wired_limit_mb: the limit that a person has set for them; 0 for none.
    """

    sleep_minutes: int | None = None
    kept_awake: bool = False
    displays_on: int | None = None
    working_set: int | None = None
    wired_limit_mb: int | None = None
    firewall: bool | None = None
    blocks_all: bool = False
    thunderbolt: tuple[ThunderboltPort, ...] = ()

    def plugged_into(self, other: Mac) -> bool:
        """Tell if a Thunderbolt cable leads to the other Mac."""
        peers = {peer for port in self.thunderbolt for peer in port.peers}
        return any(port.domain and port.domain in peers for port in other.thunderbolt)


class File(Fact):
    """A file; ``sha256`` is ``None`` if it was not read."""

    name: str
    size: int
    sha256: str | None = None


class Tree(Fact):
    """Model or data on one computer; without a ``path`` it is not there."""

    role: Literal["model", "data"]
    source: str
    path: str | None = None
    error: str | None = None
    files: tuple[File, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)

    @property
    def weights(self) -> int:
        """Bytes of the weights."""
        return sum(file.size for file in self.files if file.name.endswith(".safetensors"))


class HostFacts(Fact):
    """All facts of one computer; ``starts`` is the reason why a rank would not start there,
    ``None`` if it would.
    """

    cwd: str = ""
    cwd_error: str | None = None
    system: System = System()
    python: Python = Python()
    starts: str | None = None
    processor: Processor = Processor()
    memory: MemoryFacts = MemoryFacts()
    gpus: tuple[GpuFacts, ...] = ()
    limits: LimitFacts = LimitFacts()
    variables: tuple[str, ...] = ()
    disks: tuple[Disk, ...] = ()
    mpi: Mpi | None = None
    rdma: Rdma = Rdma()
    interfaces: tuple[Interface, ...] = ()
    routes: tuple[Route, ...] = ()
    firewalls: tuple[Firewall, ...] = ()
    mac: Mac | None = None
    missing: dict[str, str] = Field(default_factory=dict)

    def interface(self, name: str | None) -> Interface | None:
        """Return the interface of that name."""
        return next((one for one in self.interfaces if one.name == name), None)

    def interface_of(self, ip: str) -> Interface | None:
        """Return the interface that has the address."""
        return next(
            (one for one in self.interfaces for address in one.addresses if address.ip == ip), None
        )

    def route_to(self, ip: str) -> Route | None:
        """Return the route to one of the addresses that were asked about."""
        return next((route for route in self.routes if route.ip == ip), None)

    def version(self, package: str) -> str | None:
        """Return the version of an installed package, or of Python."""
        return (
            self.python.python_version if package == "python" else self.python.versions.get(package)
        )

    @property
    def software(self) -> dict[str, str]:
        """Versions that are compared among computers; see :mod:`allhands.runtime.versions`."""
        return {**self.python.versions, "python": self.python.python_version}


class FactTrouble(Fact):
    """The reason why a computer could not be asked: the kind, and the words of ssh or of its shell.

    ``stale`` is a file of known host keys, and the name in it whose key has changed; ``near`` are
    known names that look like the unknown one.
    """

    kind: TroubleKind
    reason: str = ""
    stale: tuple[str, str] | None = None
    near: tuple[str, ...] = ()


class HostReport(Fact):
    """One computer of the hostfile, and its facts.

    Attributes:
        ssh: the name for ssh; ``None`` for this computer.
        addresses: the addresses for the others: the hostfile's (``given`` is true), or else those
            of its name.
        python: the interpreter that was asked.
        cwd: the working directory; ``cwd_given``: the hostfile names it.
        rdma: number of its RDMA devices in the hostfile.
        facts: ``None``: it could not be asked; ``trouble`` is the reason.
        lost: the phase in which it stopped answering, and the reason.
        noise: the output of its shell before the first answer.
        login_s: time from the start of ssh to the first answer.
        clock_offset_s: its clock minus this computer's, known to half of ``round_trip_s``.
        bind_errors: addresses on which it cannot listen, with the reason.
    """

    name: str
    ssh: str | None = None
    addresses: tuple[str, ...] = ()
    given: bool = False
    slots: int = 1
    python: str = "python3"
    cwd: str = ""
    cwd_given: bool = False
    rdma: int = 0
    facts: HostFacts | None = None
    trouble: FactTrouble | None = None
    lost: str | None = None
    noise: str = ""
    login_s: float = 0.0
    clock_offset_s: float | None = None
    round_trip_s: float = 0.0
    bind_errors: dict[str, str] = Field(default_factory=dict)
    trees: tuple[Tree, ...] = ()

    def tree(self, role: str) -> Tree | None:
        """Return its copy of the model or of the data, if that was asked about."""
        return next((tree for tree in self.trees if tree.role == role), None)

    def disk(self, role: str) -> Disk | None:
        """Return the disk for files of a role."""
        return (
            next((disk for disk in self.facts.disks if disk.role == role), None)
            if self.facts
            else None
        )


class Reach(Fact):
    """The outcome of a connection from host ``source`` to an address of host ``target``."""

    source: str
    target: str
    ip: str
    outcome: Outcome = "ok"
    detail: str = ""
    ms: float | None = None
    own: str | None = None


class Login(Fact):
    """The outcome of ssh from host ``source`` to host ``target`` as ``name``; no ``trouble``: it
    works.
    """

    source: str
    target: str
    name: str
    trouble: FactTrouble | None = None


class LinkSpeed(Fact):
    """A link of two hosts, or of all: latency of an all-reduce, bytes per second over the cable."""

    hosts: tuple[str, ...]
    latency_s: float
    bus_bytes_per_s: float


class NetworkFailure(Fact):
    """A group of MLX that failed; ``hosts`` are the cause, as far as that is known."""

    hosts: tuple[str, ...]
    message: str
    hint: str | None = None
    code: str | None = None


class Network(Fact):
    """The measured all-reduce of a real group.

    Attributes:
        whole: the group of all computers; ``None``: it failed.
        slowest: the slowest pair; empty with fewer than two links.
        seconds: time to exchange a step's gradients, by the kind of training.
        speeds: FLOP/s of each computer, all its ranks together; empty where not measured.
    """

    backend: str = ""
    whole: LinkSpeed | None = None
    links: tuple[LinkSpeed, ...] = ()
    slowest: tuple[str, ...] = ()
    failures: tuple[NetworkFailure, ...] = ()
    seconds: dict[str, float] = Field(default_factory=dict)
    speeds: dict[str, float] = Field(default_factory=dict)


class Cluster(Fact):
    """All facts for the checks.

    Attributes:
        option: the person's option that names the computers, such as ``--hostfile hosts.json``.
        backend: the requested back-end, or ``auto``.
        model: the value of ``--model``; ``data`` likewise.
        hashed: true if contents were compared.
        network: ``None``: not measured.
    """

    hosts: tuple[HostReport, ...]
    option: str = "--hostfile hosts.json"
    backend: str = "auto"
    model: str | None = None
    data: str | None = None
    hashed: bool = True
    reached: tuple[Reach, ...] = ()
    logins: tuple[Login, ...] = ()
    network: Network | None = None

    def answered(self) -> Iterator[tuple[HostReport, HostFacts]]:
        """Yield the computers that answered, with their facts."""
        for host in self.hosts:
            if host.facts is not None:
                yield host, host.facts

    def host(self, name: str) -> HostReport:
        """Return the computer of that name.

        Raises:
            KeyError: there is none.
        """
        return {host.name: host for host in self.hosts}[name]
