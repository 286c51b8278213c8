"""What the person wants of set-up, who is asked, and what has become of it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from allhands.cluster.doctor.facts import HostFacts
from allhands.cluster.hosts import Host, host_from_name
from allhands.cluster.setup.network import NetworkChoice
from allhands.cluster.setup.plan import Step
from allhands.cluster.setup.state import SetupHostState, WantedSetup
from allhands.cluster.setup.survey import Surveyor
from allhands.errors import ConfigError

# Ask before changes; agree to all; only show; only show, and refuse if there is anything.
Mode = Literal["ask", "yes", "dry-run", "refuse"]


@dataclass(frozen=True)
class Wishes:
    """What the person has asked for.

    Attributes:
        names: of the computers.
        output: the hostfile to write.
        install_key: whether computers that refuse the person's key shall get it.
        wanted: what every computer shall have.
        surveyor: how they are asked.
        origin: where allhands comes from; see :func:`allhands.cluster.setup.source.find_source`.
        candidates: interpreters that an earlier hostfile names, by host.
        place_named: whether the person has said where environments shall be.
    """

    names: Sequence[str]
    output: Path
    wanted: WantedSetup
    surveyor: Surveyor
    origin: str | None = None
    mode: Mode = "ask"
    install_key: bool = False
    candidates: Mapping[str, str] = field(default_factory=dict[str, str])
    place_named: bool = False


class Person(Protocol):
    """Who is told and asked; the command line, or a test."""

    def begins(self, step: Step) -> None:
        """A step is about to be run; may be called from several threads."""

    def looks(self, what: str) -> None:
        """What is being found out now."""

    def tell(self, text: str) -> None:
        """Something that is good to know."""

    def show(self, title: str, steps: Sequence[Step]) -> None:
        """These commands would be run."""

    def agrees(self, question: str) -> bool:
        """Ask a question."""
        ...


@dataclass
class SetupOutcome:
    """What has become of one computer.

    Attributes:
        state: as it was found; ``None``: it could not be asked.
        python: the interpreter to use there.
        unused: options that ask for an environment, where one is there that will do.
        choice: its address.
        done: what was done.
        trouble: why it cannot be used, and ``hint`` what to do.
        pending: whether that is so only because nothing is done.
    """

    name: str
    host: Host
    state: SetupHostState | None = None
    python: str | None = None
    unused: tuple[str, ...] = ()
    choice: NetworkChoice | None = None
    done: list[str] = field(default_factory=list[str])
    trouble: str | None = None
    hint: str = ""
    pending: bool = False

    @property
    def facts(self) -> HostFacts | None:
        """Hardware and network, if they are known."""
        return self.state.facts if self.state else None

    def fail(self, message: str, hint: str = "") -> None:
        """Note why it cannot be used; the first reason counts."""
        if self.trouble is None:
            self.trouble, self.hint = message, hint


@dataclass
class Report:
    """What has become of everything.

    Attributes:
        shown: the steps that were only shown.
        refused: names of the computers that need what the person did not agree to; then nothing is written.
        written: the hostfile; ``kept`` is where an earlier one is now.
        text: its content, and ``hosts`` the computers in it; ``None``: there is none.
        up_to_date: whether it said the same before.
        why: what made the addresses these, and ``warning`` what may be wrong with them.
    """

    outcomes: list[SetupOutcome] = field(default_factory=list[SetupOutcome])
    shown: list[Step] = field(default_factory=list[Step])
    refused: list[str] = field(default_factory=list[str])
    written: Path | None = None
    kept: Path | None = None
    text: str | None = None
    hosts: list[str] = field(default_factory=list[str])
    up_to_date: bool = False
    why: str = ""
    warning: str | None = None

    @property
    def without(self) -> list[str]:
        """Computers that should be in the hostfile and are not."""
        return [o.name for o in self.outcomes if o.trouble and not o.pending and o.name not in self.hosts]

    @property
    def stays(self) -> list[str]:
        """Computers that are in the hostfile, because an earlier one had them, though they cannot be used now."""
        bad = {outcome.name for outcome in self.outcomes if outcome.trouble is not None}
        return [name for name in self.hosts if name in bad]

    @property
    def also(self) -> list[str]:
        """Computers that are in the hostfile only because an earlier one had them."""
        good = {outcome.name for outcome in self.outcomes if outcome.trouble is None}
        return [name for name in self.hosts if name not in good]


def hosts_of(text: str) -> list[tuple[str, Host]]:
    """Names as the person wrote them, separated by commas, and the computers that they mean.

    Raises:
        ConfigError: one of them is no name, or stands there twice.
    """
    names = [name.strip() for name in text.split(",")]
    found = [(name, host_from_name(name, "--hosts")) for name in names]
    for one, other in itertools.combinations(found, 2):
        if one[1].ssh == other[1].ssh:
            raise ConfigError(f"{one[0]} and {other[0]} are the same computer", where="--hosts", hint="name it once")
    return found
