"""What is known of the computers, typed; made of the probes' JSON, which is checked on the way.

Sizes are bytes, times seconds. What a computer did not tell is empty or ``None``, and named in ``missing``.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

Kind = Literal["wifi", "ethernet", "thunderbolt", "infiniband", "bridge", "loopback", "tunnel", "virtual"]
Outcome = Literal["ok", "refused", "timeout", "unreachable", "forbidden", "stranger", "stalls", "failed"]
# Why a computer could not be asked, or another one from it.
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
    """Base of all: cannot be changed, and does not mind what a newer probe tells in addition."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Address(Fact):
    """An address of an interface, with the bits of its network."""

    ip: str
    prefix: int = 32

    @property
    def link_local(self) -> bool:
        """Whether it was made up by the computer itself."""
        return ipaddress.ip_address(self.ip).is_link_local


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
    """What the computer is; the three ids together are those of no other one."""

    hostname: str = ""
    user: str = ""
    system: str = ""
    release: str = ""
    machine: str = ""
    machine_id: str = ""
    boot_id: str = ""
    network_id: str = ""


class Python(Fact):
    """The interpreter that was asked, and the packages that it has."""

    python_version: str = ""
    python_path: str = ""
    versions: dict[str, str] = Field(default_factory=dict)


class Processor(Fact):
    """``usable`` cores may be fewer than there are."""

    model: str = ""
    count: int = 1
    usable: int = 1


class MemoryFacts(Fact):
    """Of the computer."""

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
    """``None``: no limit; ``files`` may be raised to ``most_files`` by anybody."""

    files: int | None = None
    most_files: int | None = None
    locked: int | None = None


class Disk(Fact):
    """Where files of ``role`` go: ``path`` was asked for, ``place`` is the part of it that exists."""

    role: str
    path: str = ""
    place: str = ""
    total: int = 0
    free: int = 0
    device: int | None = None
    error: str | None = None


class Firewall(Fact):
    """One that shuts something: what comes ``in``, what goes ``out``, or both, as far as that may be read."""

    name: str
    ways: tuple[Literal["in", "out"], ...] = ("in",)


class Mpi(Fact):
    """The mpirun that would be taken, and its Open MPI's version."""

    path: str
    version: str = ""


class Rdma(Fact):
    """Devices; ``status`` is what ``rdma_ctl`` says on a Mac that has it."""

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
    """What only macOS has; ``sleep_minutes`` 0 is never."""

    sleep_minutes: int | None = None
    kept_awake: bool = False
    displays_on: int | None = None
    wired_limit_mb: int | None = None
    firewall: bool | None = None
    blocks_all: bool = False
    thunderbolt: tuple[ThunderboltPort, ...] = ()

    def plugged_into(self, other: Mac) -> bool:
        """Tell if a Thunderbolt cable leads to the other Mac."""
        peers = {peer for port in self.thunderbolt for peer in port.peers}
        return any(port.domain and port.domain in peers for port in other.thunderbolt)


class File(Fact):
    """``sha256`` is ``None`` if it was not read."""

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
    """All that one computer tells of itself; ``starts`` is why a rank would not start there, ``None`` if it would."""

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
        """The interface of that name."""
        return next((one for one in self.interfaces if one.name == name), None)

    def interface_of(self, ip: str) -> Interface | None:
        """The interface that has the address."""
        return next((one for one in self.interfaces for address in one.addresses if address.ip == ip), None)

    def route_to(self, ip: str) -> Route | None:
        """The route to one of the addresses that were asked about."""
        return next((route for route in self.routes if route.ip == ip), None)

    def version(self, package: str) -> str | None:
        """Of an installed package, or of Python."""
        return self.python.python_version if package == "python" else self.python.versions.get(package)

    @property
    def software(self) -> dict[str, str]:
        """What is compared among computers; see :mod:`allhands.runtime.versions`."""
        return {**self.python.versions, "python": self.python.python_version}


class FactTrouble(Fact):
    """Why a computer could not be asked: the kind, and the words of ssh or of its shell.

    ``stale`` is the file of known host keys, and the name in it, whose key has changed; ``near`` are names that are
    known and look like the one that is not.
    """

    kind: TroubleKind
    reason: str = ""
    stale: tuple[str, str] | None = None
    near: tuple[str, ...] = ()


class HostReport(Fact):
    """One computer of the hostfile, and what came of asking it.

    Attributes:
        ssh: what ssh is given; ``None`` for this computer.
        addresses: by which the others connect to it: the hostfile's, or else what its name stands for.
        python: the interpreter that was asked.
        cwd: the directory to work in; ``cwd_given``: by the hostfile.
        rdma: how many devices the hostfile names for it.
        facts: ``None``: it could not be asked, and ``trouble`` says why.
        lost: what it was doing when it stopped answering.
        noise: what its shell printed before the first answer.
        login_s: from the start of ssh to the first answer.
        clock_offset_s: how far its clock is ahead of this computer's, known to half of ``round_trip_s``.
        bind_errors: addresses on which it cannot listen, with the reason.
    """

    name: str
    ssh: str | None = None
    addresses: tuple[str, ...] = ()
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
        """Its copy of the model or of the data, if that was asked about."""
        return next((tree for tree in self.trees if tree.role == role), None)

    def disk(self, role: str) -> Disk | None:
        """Where files of a role go."""
        return next((disk for disk in self.facts.disks if disk.role == role), None) if self.facts else None


class Reach(Fact):
    """What came of connecting from host ``source`` to an address of host ``target``."""

    source: str
    target: str
    ip: str
    outcome: Outcome = "ok"
    detail: str = ""
    ms: float | None = None
    own: str | None = None


class Login(Fact):
    """What came of ssh from host ``source`` to host ``target`` as ``name``; no ``trouble``: it works."""

    source: str
    target: str
    name: str
    trouble: FactTrouble | None = None


class LinkSpeed(Fact):
    """Two hosts alone: what an all-reduce costs at least, and bytes a second over the cable."""

    hosts: tuple[str, ...]
    latency_s: float
    bus_bytes_per_s: float


class NetworkFailure(Fact):
    """A group of MLX that did not work; ``hosts`` are those to blame, as far as that is known."""

    hosts: tuple[str, ...]
    message: str
    hint: str | None = None


class Network(Fact):
    """The measured all-reduce of a real group.

    Attributes:
        whole: of all computers; ``None``: it failed.
        slowest: the pair that holds the others up; empty with fewer than two links.
        seconds: what exchanging a step's gradients takes, by what is trained.
        speeds: products and sums a second of each computer, all its ranks together; empty where not measured.
    """

    backend: str = ""
    whole: LinkSpeed | None = None
    links: tuple[LinkSpeed, ...] = ()
    slowest: tuple[str, ...] = ()
    failures: tuple[NetworkFailure, ...] = ()
    seconds: dict[str, float] = Field(default_factory=dict)
    speeds: dict[str, float] = Field(default_factory=dict)


class Cluster(Fact):
    """Everything: what checks look at.

    Attributes:
        option: how the person named the computers, such as ``--hostfile hosts.json``.
        backend: the one asked for, or ``auto``.
        model: as given with ``--model``; ``data`` likewise.
        hashed: whether contents were compared.
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
        """The computers that told about themselves."""
        for host in self.hosts:
            if host.facts is not None:
                yield host, host.facts

    def host(self, name: str) -> HostReport:
        """The computer of that name.

        Raises:
            KeyError: there is none.
        """
        for host in self.hosts:
            if host.name == name:
                return host
        raise KeyError(name)
