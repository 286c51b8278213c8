"""Set-up, from names of computers to a hostfile. A fault of one computer does not stop the others."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from allhands.cluster.doctor.paths import choose
from allhands.cluster.hosts import host_from_name
from allhands.cluster.setup import hostfile, plan, thunderbolt
from allhands.cluster.setup.outcome import Person, SetupOutcome, SetupReport, Wishes
from allhands.cluster.setup.plan import Step
from allhands.cluster.setup.shell import Failed, Shell, access_of, run_step
from allhands.cluster.setup.source import find_source
from allhands.cluster.setup.state import Access, CannotSetUp, Installed, SetupHostState, SetupSource
from allhands.cluster.setup.survey import facts_of, installed_in
from allhands.errors import AllhandsError, ConfigError
from allhands.io.formatting import counted
from allhands.runtime.threads import side_by_side

_CONNECT_S = 10.0
_ROUNDS = 3  # an unknown key, then a refused one, then the last look
_PACK_S = 600.0


class SetUp:
    """One run of set-up; see :meth:`run`."""

    def __init__(self, wishes: Wishes, person: Person) -> None:
        self._wishes = wishes
        self._person = person
        self._shell = Shell()
        self._wanted = wishes.wanted
        self._only_shows = wishes.mode in ("dry-run", "refuse")
        self.report = SetupReport(
            [SetupOutcome(name, host_from_name(name)) for name in wishes.names]
        )

    def run(self) -> SetupReport:
        """Set the computers up; running commands are ended if this is interrupted."""
        try:
            self._gain_access()
            self._survey()
            with tempfile.TemporaryDirectory(prefix="allhands-") as scratch:
                self._equip(Path(scratch))
            self._write()
        except BaseException:
            self._shell.stop()
            raise
        return self.report

    def _usable(self) -> list[SetupOutcome]:
        return [outcome for outcome in self.report.outcomes if outcome.trouble is None]

    def _agreed(self, title: str, steps: Sequence[Step], question: str) -> bool:
        """Show steps, and tell if they may be run."""
        if self._only_shows:
            self.report.shown += steps
            return False
        self._person.tell("\n".join((title, *plan.listed(steps, "  "))))
        return self._wishes.mode == "yes" or self._person.agrees(question)

    def _refuse(self, outcome: SetupOutcome, message: str, hint: str) -> None:
        """Note that a computer's steps are only shown, or that the person refuses them."""
        outcome.fail(message, hint)
        outcome.pending = self._only_shows
        self.report.refused += [] if self._only_shows else [outcome.name]

    def _run_steps(self, steps: Sequence[Step]) -> None:
        for step in steps:
            self._person.begins(step)
            run_step(self._shell, step)

    def _run(self, steps: Sequence[Step], *outcomes: SetupOutcome) -> bool:
        """Run steps for computers, and tell if all of them worked."""
        try:
            self._run_steps(steps)
        except AllhandsError as error:
            for outcome in outcomes:
                outcome.fail(error.message, error.hint or "")
            return False
        return True

    # --- access -----------------------------------------------------------------------------------

    def _gain_access(self) -> None:
        self._person.tell("looking: which computers can be reached")
        waiting = [outcome for outcome in self.report.outcomes if outcome.host.ssh is not None]
        for _ in range(_ROUNDS):
            found = dict(
                zip([o.name for o in waiting], side_by_side(self._access, waiting), strict=True)
            )
            waiting = [outcome for outcome in waiting if found[outcome.name].kind != "ok"]
            tried = self._meet(waiting, found) | self._install_keys(waiting, found)
            for outcome in waiting:
                access = found[outcome.name]
                if outcome.name not in tried:
                    asks = access.takes_key and not self._wishes.install_key
                    add = "add --install-key, which puts your public key there"
                    outcome.fail(access.reason, add if asks else access.hint)
            waiting = [outcome for outcome in waiting if outcome.trouble is None]
        for outcome in waiting:
            outcome.fail(
                "it still refuses", f"make `ssh {outcome.host.ssh} true` work without a question"
            )

    def _meet(self, waiting: Sequence[SetupOutcome], found: Mapping[str, Access]) -> set[str]:
        """Accept the keys of unknown computers, one computer at a time; return those whose keys
        were accepted.
        """
        tried: set[str] = set()
        for outcome in waiting:
            steps = plan.key_steps(outcome.name, found[outcome.name])
            title = f"{outcome.name} is not known yet. Compare with what `ssh-keygen -lf` says there of its key:"
            if steps and not self._agreed(title, steps, f"is this the key of {outcome.name}?"):
                self._refuse(
                    outcome,
                    "its host key is not known",
                    f"run `ssh {outcome.host.ssh} true` once by hand",
                )
            elif steps and self._run(steps, outcome):
                tried.add(outcome.name)
        return tried

    def _install_keys(
        self, waiting: Sequence[SetupOutcome], found: Mapping[str, Access]
    ) -> set[str]:
        """Put the person's key onto computers that refuse it; return those that accepted the
        command.
        """
        denied = [outcome for outcome in waiting if found[outcome.name].takes_key]
        if not denied or not self._wishes.install_key:
            return set()
        own = Path.home() / ".ssh"
        accesses = [(o.name, o.host.ssh or o.name, found[o.name]) for o in denied]
        steps = plan.login_steps(accesses, None if own.is_dir() else own)
        if not self._agreed("These computers refuse your key:", steps, "install your key there?"):
            for outcome in denied:
                self._refuse(outcome, found[outcome.name].reason, f"ssh-copy-id {outcome.host.ssh}")
            return set()
        return self._put_keys(denied, steps)

    def _put_keys(self, denied: Sequence[SetupOutcome], steps: Sequence[Step]) -> set[str]:
        if not self._run([step for step in steps if not step.host], *denied):
            return set()
        tried = [o for o in denied if self._run([step for step in steps if step.host == o.name], o)]
        # A second round would ask for the password again.
        for outcome in tried:
            if self._access(outcome).kind == "denied":
                outcome.fail(
                    "it refuses your key all the same",
                    "if the key has a passphrase, run ssh-add first",
                )
        return {outcome.name for outcome in tried}

    def _access(self, outcome: SetupOutcome) -> Access:
        assert outcome.host.ssh is not None
        try:
            return access_of(self._shell, outcome.host.ssh, _CONNECT_S)
        except AllhandsError as error:
            return Access("failed", error.message, error.hint or "")

    # --- environments -----------------------------------------------------------------------------

    def _survey(self) -> None:
        self._person.tell("looking: what each of them has")

        def ask(outcome: SetupOutcome) -> None:
            more = [path for path in (self._wishes.candidates.get(outcome.name),) if path]
            try:
                outcome.state = self._wishes.surveyor.look_at(self._shell, outcome.host, more)
            except AllhandsError as error:
                outcome.fail(error.message, error.hint or "")

        side_by_side(ask, self._usable())
        seen: dict[tuple[str, ...], str] = {}
        for outcome in self._usable():
            if outcome.facts is not None:
                system = outcome.facts.system
                same = (system.machine_id, system.boot_id, system.network_id, system.hostname)
                if same in seen:
                    outcome.fail(
                        f"it is the same computer as {seen[same]}",
                        "name it once; slots are ranks on a host",
                    )
                seen.setdefault(same, outcome.name)

    def _equip(self, scratch: Path) -> None:
        """Give every computer its environment and directory."""
        plans = {outcome.name: self._planned(outcome) for outcome in self._usable()}
        packing: list[Step] = []
        copied = any(step.feed is not None for steps in plans.values() for step in steps)
        if copied:
            self._wanted = replace(self._wanted, source=self._prepared(scratch))
            plans = {outcome.name: self._planned(outcome) for outcome in self._usable()}
        if copied and (made_by := self._wanted.source.made_by):
            packing = [Step("", "pack the allhands that runs here", made_by, changes=False)]
        steps = [*packing, *(step for steps in plans.values() for step in steps)]
        if steps:
            self._equip_all(plans, steps)

    def _equip_all(self, plans: Mapping[str, Sequence[Step]], steps: Sequence[Step]) -> None:
        lacking = [outcome for outcome in self._usable() if plans[outcome.name]]
        count = counted(len(lacking), "computer")
        if self._agreed(f"To be done on {count}:", steps, f"do this on {count}?"):
            side_by_side(lambda outcome: self._equip_one(outcome, plans[outcome.name]), lacking)
        elif not self._only_shows:
            for outcome in lacking:
                self._refuse(
                    outcome,
                    "it lacks the part that you did not agree to install",
                    "run this again, and agree",
                )

    def _prepared(self, scratch: Path) -> SetupSource:
        """Make the wheel in a temporary directory.

        If commands are only shown, the source keeps the path at which they make the wheel.
        """
        source = self._wanted.source
        if not source.made_by or source.wheel is None:
            return source
        self._person.tell("looking: what runs here, to pack it")
        own = find_source(self._wishes.origin, scratch)
        try:
            self._run_steps(
                [Step("", "pack allhands", own.made_by, changes=False, timeout_s=_PACK_S)]
            )
        except Failed as failed:
            raise ConfigError(
                failed.message,
                code="install-source-invalid",
                where="--from",
                hint="name a wheel or a release with --from",
            ) from None
        found = find_source(str(scratch / source.wheel.name), scratch)
        return (
            replace(source, size=found.size, fingerprint=found.fingerprint)
            if self._only_shows
            else found
        )

    def _planned(self, outcome: SetupOutcome) -> list[Step]:
        state = outcome.state
        assert state is not None
        try:
            found = plan.fitting(state, self._wanted)
            outcome.python = found.python if found else plan.environment_python(state)
            outcome.unused = self._unused(state, found) if found else ()
            steps = [] if found else plan.environment_steps(state, self._wanted)
        except CannotSetUp as error:
            outcome.fail(error.message, error.hint or "")
            return []
        return [*steps, *plan.directory_steps(state)]

    def _unused(self, state: SetupHostState, found: Installed) -> tuple[str, ...]:
        """Return the options that only matter if an environment has to be made."""
        elsewhere = self._wishes.place_named and found.python != plan.environment_python(state)
        python = self._wanted.python_path not in (None, found.python)
        return ("--env-dir",) * elsewhere + ("--python",) * python

    def _equip_one(self, outcome: SetupOutcome, steps: Sequence[Step]) -> None:
        """Run a computer's steps; the note that its environment is finished is written after a
        check.
        """
        state = outcome.state
        assert state is not None
        last = next(
            (i for i, step in enumerate(steps) if step.argv[-1] == plan.FINISHED), len(steps)
        )
        if not self._run(steps[:last], outcome) or last == len(steps):
            return
        python = plan.environment_python(state)
        installed = installed_in(self._shell, state.ssh, python)
        if state.facts is None:
            outcome.state = replace(state, facts=facts_of(self._shell, state.ssh, python))
        wrong = ["its Python does not run"]
        if installed is not None:
            wrong = plan.lacks(installed, self._wanted, plan.extra_of(state))
        if wrong:
            outcome.fail(
                f"after the installation: {'; '.join(wrong)}",
                "see what pip says there, or try --from",
            )
            return
        self._run(steps[last:], outcome)

    # --- the hostfile -----------------------------------------------------------------------------

    def _write(self) -> None:
        ready = [
            outcome for outcome in self._usable() if outcome.facts is not None and outcome.python
        ]
        for outcome in self._usable():
            if outcome not in ready and not self._only_shows:
                outcome.fail(
                    "its Python does not tell what the computer has",
                    "see what `allhands env` says there",
                )
        # A person who does not agree has not asked for a hostfile without that computer.
        if not ready or self.report.refused:
            return
        wiring = self._wired(ready)
        self._address(ready)
        report, output, old = (
            self.report,
            self._wishes.output,
            hostfile.read_old(self._wishes.output),
        )
        report.text = hostfile.compose([_entry(outcome) for outcome in ready], wiring, old)
        report.hosts = hostfile.names_in(report.text)
        report.up_to_date = old is not None and output.read_text(encoding="utf-8") == report.text
        if not report.up_to_date and self._may_write(old is None):
            report.kept = hostfile.write(output, report.text)
            report.written = output

    def _may_write(self, new: bool) -> bool:
        """Tell if the hostfile may be written; a new file overwrites nothing, so it needs no
        question.
        """
        mode, output = self._wishes.mode, self._wishes.output
        if mode == "dry-run" or (mode == "refuse" and (self.report.shown or not new)):
            return False
        question = (
            f"{output} is there: bring it up to date (the old one is kept as {output.name}.bak)?"
        )
        return new or mode == "yes" or self._person.agrees(question)

    def _address(self, ready: Sequence[SetupOutcome]) -> None:
        chosen = choose({outcome.name: outcome.facts for outcome in ready if outcome.facts})
        self.report.why, self.report.warning = chosen.why, chosen.warning
        if len(ready) > 1 and not chosen.choices:
            self.report.warning = "write their addresses into the hostfile as ips"
        for outcome in ready:
            outcome.choice = chosen.choices.get(outcome.name)

    def _wired(self, ready: Sequence[SetupOutcome]) -> thunderbolt.Wiring | None:
        """Run MLX's configurator for Macs with Thunderbolt cables, if the person agrees."""
        facts = [outcome.facts for outcome in ready if outcome.facts]
        if not thunderbolt.joined(facts):
            return None
        names = [outcome.name for outcome in ready]
        with tempfile.TemporaryDirectory(prefix="allhands-") as scratch:
            output = Path(scratch) / "hosts.json"
            step = thunderbolt.configure_step(names, thunderbolt.backend_of(facts), output)
            if not self._agreed(
                "These Macs are joined by Thunderbolt cables:", [step], "set their ports up?"
            ):
                return None
            try:
                self._run_steps([step])
                found = thunderbolt.read_wiring(output)
            except AllhandsError as error:
                self._person.tell(
                    f"Thunderbolt is left as it is: {error.message}\n  by hand: {plan.shown(step)}"
                )
                return None
        return found if set(found.hosts) == set(names) else None


def _entry(outcome: SetupOutcome) -> dict[str, Any]:
    assert outcome.state is not None
    assert outcome.facts is not None
    gpus = [gpu for gpu in outcome.facts.gpus if gpu.kind == "cuda"]
    ips = (outcome.choice.ip,) if outcome.choice else outcome.host.ips
    return hostfile.host_entry(
        outcome.name, ips, max(1, len(gpus)), outcome.python or "", outcome.state.cwd
    )
