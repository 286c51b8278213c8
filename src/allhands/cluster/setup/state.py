"""The state of each computer before set-up, and the software that every one of them shall have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from allhands.cluster.doctor.facts import HostFacts
from allhands.errors import AllhandsError
from allhands.runtime.versions import SOURCE, TOKEN_MAKERS

Version = tuple[int, ...]
# At the place of the environment: nothing; one of ours, finished or not; or something that is not
# ours.
PlaceKind = Literal["absent", "unfinished", "complete", "foreign"]
AccessKind = Literal["ok", "unknown-key", "denied", "failed"]

# Packages that a new environment gets in this computer's versions, besides allhands itself.
PINNED = ("mlx", "mlx-lm", "numpy", *TOKEN_MAKERS)
# The packages that hold MLX's back-ends, by the extra of allhands that brings them.
BACKENDS = {"cpu": "mlx-cpu", "cuda12": "mlx-cuda-12", "cuda13": "mlx-cuda-13", "": "mlx-metal"}


@dataclass(frozen=True)
class HostKey:
    """A key that a computer shows: the line for ``known_hosts``, and the fingerprint that people
    compare.
    """

    line: str
    fingerprint: str


@dataclass(frozen=True)
class SetupIdentity:
    """The private key that ssh uses for a host; ``exists`` is false where it would have to be made."""

    path: Path
    exists: bool


@dataclass(frozen=True)
class Access:
    """The answer of ssh to a computer's name.

    Attributes:
        reason: ssh's own words.
        hint: a remedy.
        keys: the unknown keys that the computer shows.
        known_hosts: the file in which ssh looks for them.
        identity: the person's key; ``None``: not known, or not usable.
    """

    kind: AccessKind
    reason: str = ""
    hint: str = ""
    keys: tuple[HostKey, ...] = ()
    known_hosts: Path | None = None
    identity: SetupIdentity | None = None

    @property
    def takes_key(self) -> bool:
        """True if the person's key can be installed there."""
        return self.kind == "denied" and self.identity is not None


@dataclass(frozen=True)
class Interpreter:
    """A Python; ``makes`` is true if it can make environments with pip."""

    path: str
    version: Version
    makes: bool = True


@dataclass(frozen=True)
class Installed:
    """A Python and its packages; ``problem`` is the reason why a rank would not start."""

    python: str
    version: Version
    versions: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    fingerprint: str | None = None
    problem: str | None = None

    @property
    def software(self) -> dict[str, str]:
        """The versions that are compared; see :mod:`allhands.runtime.versions`."""
        source = {SOURCE: self.fingerprint} if self.fingerprint else {}
        return {**self.versions, **source, "python": ".".join(map(str, self.version))}


@dataclass(frozen=True)
class SetupHostState:
    """The state of one computer.

    Attributes:
        name: the name that the person wrote.
        ssh: the name for ssh; ``None`` for this computer.
        system: the system of ``uname``: Linux or Darwin.
        driver: version of the NVIDIA driver; empty: there is none.
        home: the account's home directory.
        env_dir: the absolute directory of its environment.
        place: the content of that directory.
        pythons: interpreters that could make environments.
        uv: the program, if it is there.
        installed: interpreters that may have allhands, the preferred ones first.
        facts: hardware and network; ``None``: no Python there could find out.
        cwd: the working directory; ``cwd_exists`` is false if it has to be made.
    """

    name: str
    ssh: str | None = None
    system: str = ""
    driver: str = ""
    home: str = ""
    env_dir: str = ""
    place: PlaceKind = "absent"
    pythons: tuple[Interpreter, ...] = ()
    uv: str | None = None
    installed: tuple[Installed, ...] = ()
    facts: HostFacts | None = None
    cwd: str = ""
    cwd_exists: bool = True


@dataclass(frozen=True)
class SetupSource:
    """The source of allhands for other computers.

    Attributes:
        version: the version of allhands.
        wheel: the file to copy; ``None``: the release comes from the package index.
        fingerprint: the fingerprint of the package in the wheel; ``None``: any code of that version
            will do.
        made_by: the command, on this computer, that writes the wheel; empty: it exists.
        size: bytes of the wheel, once it exists.
        code: the fingerprint of this installation, if it is that release.
    """

    version: str
    wheel: Path | None = None
    fingerprint: str | None = None
    made_by: tuple[str, ...] = ()
    size: int = 0
    code: str | None = None

    @property
    def wanted_code(self) -> str | None:
        """The fingerprint that the package must have; ``None``: any code of the version will do."""
        return self.fingerprint or self.code


@dataclass(frozen=True)
class WantedSetup:
    """The software that every computer shall have.

    Attributes:
        python: major and minor version.
        python_path: the interpreter to make environments with, if the person named one.
        versions: the versions of packages besides allhands.
        mpi: the version of Open MPI, if that is wanted.
    """

    source: SetupSource
    python: Version
    python_path: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    mpi: str | None = None

    @property
    def minor(self) -> str:
        """The version of Python: ``3.11``."""
        return ".".join(map(str, self.python))

    @property
    def software(self) -> dict[str, str]:
        """The versions that are compared; see :mod:`allhands.runtime.versions`."""
        source = {SOURCE: code} if (code := self.source.wanted_code) else {}
        return {**self.versions, **source, "allhands": self.source.version, "python": self.minor}


class CannotSetUp(AllhandsError):
    """A computer lacks something that no command of ours can give it."""
