"""What is known of each computer before anything is planned, and what every one of them shall have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from allhands.cluster.doctor.facts import HostFacts
from allhands.errors import AllhandsError
from allhands.runtime.versions import SOURCE, TOKEN_MAKERS

Version = tuple[int, ...]
# What stands at the place of the environment: nothing; one of ours, whole or not; or something that is not ours.
PlaceKind = Literal["absent", "unfinished", "complete", "foreign"]
AccessKind = Literal["ok", "unknown-key", "denied", "failed"]

# What a new environment gets in this computer's versions, besides allhands itself.
PINNED = ("mlx", "mlx-lm", "numpy", *TOKEN_MAKERS)
# The packages that hold MLX's back-ends, by the extra of allhands that brings them.
BACKENDS = {"cpu": "mlx-cpu", "cuda12": "mlx-cuda-12", "cuda13": "mlx-cuda-13", "": "mlx-metal"}


@dataclass(frozen=True)
class HostKey:
    """A key that a computer shows: the line for ``known_hosts``, and the fingerprint that people compare."""

    line: str
    fingerprint: str


@dataclass(frozen=True)
class SetupIdentity:
    """The private key that ssh uses for a host; ``exists`` is false where it would have to be made."""

    path: Path
    exists: bool


@dataclass(frozen=True)
class Access:
    """Whether commands can be run on a computer, and if not, why.

    Attributes:
        reason: in ssh's own words.
        hint: what a person can do.
        keys: that it shows, if they are unknown.
        known_hosts: the file in which ssh would look for them.
        identity: of the person; ``None``: not known.
    """

    kind: AccessKind
    reason: str = ""
    hint: str = ""
    keys: tuple[HostKey, ...] = ()
    known_hosts: Path | None = None
    identity: SetupIdentity | None = None


@dataclass(frozen=True)
class Interpreter:
    """A Python without anything; ``makes`` is whether it can make environments with pip."""

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
        """What is compared of it; see :mod:`allhands.runtime.versions`."""
        source = {SOURCE: self.fingerprint} if self.fingerprint else {}
        return {**self.versions, **source, "python": ".".join(map(str, self.version))}


@dataclass(frozen=True)
class SetupHostState:
    """One computer as it is now.

    Attributes:
        name: as the person wrote it.
        ssh: what ssh is given; ``None`` for this computer.
        system: what ``uname`` calls it: Linux or Darwin.
        driver: version of the NVIDIA driver; empty: there is none.
        home: of the account there.
        env_dir: where its environment is, or would be made; absolute.
        place: what is there.
        pythons: what environments could be made with.
        uv: the program, if it is there.
        installed: interpreters that may have allhands, the preferred ones first.
        facts: hardware and network; ``None``: there is no Python yet that could tell.
        cwd: the directory to work in, and whether it is there.
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
    """Where the computers get allhands from.

    Attributes:
        version: its version.
        wheel: the file to copy; ``None``: that release is fetched from the package index.
        fingerprint: of the package in the wheel; ``None``: any of that version will do.
        made_by: the command, on this computer, that writes the wheel; empty: it exists.
        size: bytes of the wheel, once it exists.
        code: of a release that is also what runs here: the fingerprint of that.
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
    """What every computer shall have.

    Attributes:
        python: major and minor version.
        python_path: the interpreter to make environments with, if the person named one.
        versions: of packages besides allhands.
        mpi: whether Open MPI belongs to it, and its version.
    """

    source: SetupSource
    python: Version
    python_path: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    mpi: str | None = None

    @property
    def minor(self) -> str:
        """``3.11``."""
        return ".".join(map(str, self.python))

    @property
    def software(self) -> dict[str, str]:
        """What is compared of it; see :mod:`allhands.runtime.versions`."""
        source = {SOURCE: code} if (code := self.source.wanted_code) else {}
        return {**self.versions, **source, "allhands": self.source.version, "python": self.minor}


class CannotSetUp(AllhandsError):
    """A computer lacks something that no command of ours can give it."""
