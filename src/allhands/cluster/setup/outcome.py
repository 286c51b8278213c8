"""The wishes of the person for set-up, the person to ask, and the outcome."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from allhands.cluster.doctor.facts import HostFacts
from allhands.cluster.doctor.paths import NetworkChoice
from allhands.cluster.hosts import Host, host_from_name
from allhands.cluster.setup.plan import Step
from allhands.cluster.setup.state import SetupHostState, WantedSetup
from allhands.cluster.setup.survey import Surveyor
from allhands.errors import ConfigError

# Ask before changes; agree to all; only show steps; only show steps, and fail if there are any.
Mode = Literal["ask", "yes", "dry-run", "refuse"]


@dataclass(frozen=True)
class Wishes:
    """The options of set-up.

    Attributes:
        names: the names of the computers.
        output: the hostfile to write.
        install_key: install the person's key on computers that refuse it.
        wanted: the software that every computer shall have.
        surveyor: asks the computers.
        origin: the source of allhands; see :func:`allhands.cluster.setup.source.find_source`.
        candidates: interpreters that an earlier hostfile names, by host.
        place_named: true if the person chose the directory of environments.
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
    """The person at the command line, or a test that stands in."""

    def begins(self, step: Step) -> None:
        """Announce a step that begins; may be called from several threads."""

    def tell(self, text: str) -> None:
        """Print a message; may be called from several threads."""

    def agrees(self, question: str) -> bool:
        """Ask a question."""
        ...


@dataclass
class SetupOutcome:
    """The outcome for one computer.

    Attributes:
        state: its state before set-up; ``None``: it could not be asked.
        python: the interpreter to use there.
        unused: options for a new environment, where a fitting one exists.
        choice: its address.
        trouble: the reason why it cannot be used; ``hint`` is the remedy.
        pending: true if steps that were only shown would remove the trouble.
    """

    name: str
    host: Host
    state: SetupHostState | None = None
    python: str | None = None
    unused: tuple[str, ...] = ()
    choice: NetworkChoice | None = None
    trouble: str | None = None
    hint: str = ""
    pending: bool = False

    @property
    def facts(self) -> HostFacts | None:
        """Hardware and network, if they are known."""
        return self.state.facts if self.state else None

    def fail(self, message: str, hint: str = "") -> None:
        """Note the reason why it cannot be used; the first one counts."""
        if self.trouble is None:
            self.trouble, self.hint = message, hint


@dataclass
class SetupReport:
    """The outcome of set-up.

    Attributes:
        shown: the steps that were only shown.
        refused: names of the computers with steps that the person did not agree to; then nothing is
            written.
        written: the hostfile; ``kept`` is the copy of an earlier one.
        text: the content of the hostfile; ``hosts`` are the computers in it.
        up_to_date: true if an earlier hostfile has the same content.
        why: the reason for the addresses; ``warning`` is a possible fault of them.
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
        return [
            o.name
            for o in self.outcomes
            if o.trouble and not o.pending and o.name not in self.hosts
        ]

    @property
    def stays(self) -> list[str]:
        """Computers that stay in the hostfile although they cannot be used now."""
        return [
            outcome.name
            for outcome in self.outcomes
            if outcome.trouble and outcome.name in self.hosts
        ]

    @property
    def also(self) -> list[str]:
        """Computers that are in the hostfile only because an earlier one had them."""
        good = {outcome.name for outcome in self.outcomes if outcome.trouble is None}
        return [name for name in self.hosts if name not in good]


def names_of(text: str) -> list[str]:
    """Return the names of computers in a text that separates them by commas.

    Raises:
        ConfigError: one of them is no name, or is given twice.
    """
    names = [name.strip() for name in text.split(",")]
    targets = [host_from_name(name, "--hosts").ssh for name in names]
    for place, target in enumerate(targets):
        if (first := targets.index(target)) < place:
            raise ConfigError(
                f"{names[first]} and {names[place]} are the same computer",
                code="host-given-twice",
                where="--hosts",
                hint="name it once",
            )
    return names
