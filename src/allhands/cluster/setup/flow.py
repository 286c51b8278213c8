"""From names of computers to a hostfile: look, plan, ask, do, look again. One host's trouble does not stop another."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from allhands.cluster.setup import hostfile, network, plan, thunderbolt
from allhands.cluster.setup.execute import Failed, Runner
from allhands.cluster.setup.outcome import Person, Report, SetupOutcome, Wishes, hosts_of
from allhands.cluster.setup.plan import Step
from allhands.cluster.setup.shell import Shell, access_of
from allhands.cluster.setup.source import find_source
from allhands.cluster.setup.state import Access, CannotSetUp, Installed, SetupHostState, SetupSource
from allhands.cluster.setup.survey import facts_of, installed_in
from allhands.errors import AllhandsError, ConfigError
from allhands.runtime.threads import side_by_side

_CONNECT_S = 10.0
_ROUNDS = 3  # an unknown key, then a refused one, then the last look
_PACK_S = 600.0


class SetUp:
    """One run of set-up, for :meth:`run`."""

    def __init__(self, wishes: Wishes, person: Person) -> None:
        self._wishes = wishes
        self._person = person
        self._shell = Shell()
        self._runner = Runner(self._shell, person.begins)
        self._wanted = wishes.wanted
        self.report = Report([SetupOutcome(name, host) for name, host in hosts_of(",".join(wishes.names))])

    def run(self) -> Report:
        """Do everything; what is running is ended if this is interrupted."""
        try:
            self._gain_access()
            self._survey()
            self._equip()
            self._write()
        except BaseException:
            self._shell.stop()
            raise
        return self.report

    @property
    def _only_shows(self) -> bool:
        return self._wishes.mode in ("dry-run", "refuse")

    def _usable(self) -> list[SetupOutcome]:
        return [outcome for outcome in self.report.outcomes if outcome.trouble is None]

    def _agreed(self, title: str, steps: Sequence[Step], question: str) -> bool:
        """Show steps; whether to run them."""
        self._person.show(title, steps)
        self.report.shown += steps if self._only_shows else []
        return not self._only_shows and (self._wishes.mode == "yes" or self._person.agrees(question))

    def _refuse(self, outcome: SetupOutcome, message: str, hint: str) -> None:
        """What a computer needs is not done: it is only shown, or the person does not want it."""
        outcome.fail(message, hint)
        outcome.pending = self._only_shows
        self.report.refused += [] if self._only_shows else [outcome.name]

    # --- access -----------------------------------------------------------------------------------------

    def _gain_access(self) -> None:
        self._person.looks("which computers can be reached")
        waiting = [outcome for outcome in self.report.outcomes if outcome.host.ssh is not None]
        for _ in range(_ROUNDS):
            found = dict(zip([o.name for o in waiting], side_by_side(self._access, waiting), strict=True))
            waiting = [outcome for outcome in waiting if found[outcome.name].kind != "ok"]
            tried = self._meet(waiting, found) | self._install_keys(waiting, found)
            for outcome in waiting:
                if outcome.name not in tried:
                    access = found[outcome.name]
                    outcome.fail(access.reason, _hint(access, outcome, self._wishes.install_key))
            waiting = [outcome for outcome in waiting if outcome.trouble is None]
        for outcome in waiting:
            outcome.fail("it still refuses", f"make `ssh {outcome.host.ssh} true` work without a question")

    def _meet(self, waiting: Sequence[SetupOutcome], found: Mapping[str, Access]) -> set[str]:
        """Accept the keys of unknown computers, one computer at a time; those whose keys were accepted."""
        tried: set[str] = set()
        for outcome in waiting:
            steps = plan.key_steps(outcome.name, found[outcome.name])
            if not steps:
                continue
            title = f"{outcome.name} is not known yet. Compare with what `ssh-keygen -lf` says there of its key:"
            if self._agreed(title, steps, f"is this the key of {outcome.name}?"):
                tried |= {outcome.name} if self._run(steps, outcome) else set()
            else:
                self._refuse(outcome, "its host key is not known", f"run `ssh {outcome.host.ssh} true` once by hand")
        return tried

    def _install_keys(self, waiting: Sequence[SetupOutcome], found: Mapping[str, Access]) -> set[str]:
        denied = [o for o in waiting if found[o.name].kind == "denied" and found[o.name].identity is not None]
        if not denied or not self._wishes.install_key:
            return set()
        own = Path.home() / ".ssh"
        lacking = None if own.is_dir() else own
        steps = plan.login_steps([(o.name, o.host.ssh or o.name, found[o.name]) for o in denied], lacking)
        if not self._agreed("These computers refuse your key:", steps, "install your key there?"):
            for outcome in denied:
                self._refuse(outcome, found[outcome.name].reason, f"ssh-copy-id {outcome.host.ssh}")
            return set()
        if not all(self._run([step], *denied) for step in steps if not step.host):
            return set()
        tried = {o.name for o in denied if self._run([step for step in steps if step.host == o.name], o)}
        # A second round would ask for the password again.
        for outcome in denied:
            access = self._access(outcome) if outcome.name in tried else None
            if access is not None and access.kind == "denied":
                outcome.fail("it refuses your key all the same", "if the key has a passphrase, run ssh-add first")
        return tried

    def _access(self, outcome: SetupOutcome) -> Access:
        assert outcome.host.ssh is not None
        try:
            return access_of(self._shell, outcome.host.ssh, _CONNECT_S)
        except AllhandsError as error:
            return Access("failed", error.message, error.hint or "")

    # --- environments -----------------------------------------------------------------------------------

    def _survey(self) -> None:
        self._person.looks("what each of them has")

        def ask(outcome: SetupOutcome) -> None:
            more = [path for path in (self._wishes.candidates.get(outcome.name),) if path]
            try:
                outcome.state = self._wishes.surveyor.look_at(self._shell, outcome.host, more)
            except (CannotSetUp, AllhandsError) as error:
                outcome.fail(error.message, error.hint or "")

        side_by_side(ask, self._usable())
        seen: dict[tuple[str, ...], str] = {}
        for outcome in self._usable():
            if outcome.facts is not None:
                system = outcome.facts.system
                same = (system.machine_id, system.boot_id, system.network_id, system.hostname)
                if same in seen:
                    outcome.fail(f"it is the same computer as {seen[same]}", "name it once; slots are ranks on a host")
                seen.setdefault(same, outcome.name)

    def _equip(self) -> None:
        """Give every computer what it lacks."""
        plans = {outcome.name: self._planned(outcome) for outcome in self._usable()}
        if _needs_wheel(plans.values()):
            with tempfile.TemporaryDirectory(prefix="allhands-") as scratch:
                prepared = self._prepared(Path(scratch))
                self._wanted = replace(self._wanted, source=prepared)
                plans = {outcome.name: self._planned(outcome) for outcome in self._usable()}
                self._equip_with(plans)
        else:
            self._equip_with(plans)

    def _prepared(self, scratch: Path) -> SetupSource:
        """The wheel, made in a directory that is gone afterwards: nothing of it is left here.

        What is only shown makes it in the place from which the shown commands take it.
        """
        source = self._wanted.source
        if not source.made_by or source.wheel is None:
            return source
        self._person.looks("what runs here, to pack it")
        own = find_source(self._wishes.origin, scratch)
        try:
            self._runner.run([Step("", "pack allhands", own.made_by, changes=False, timeout_s=_PACK_S)])
            found = find_source(str(scratch / source.wheel.name), scratch)
        except Failed as failed:
            raise ConfigError(str(failed), where="--from", hint="name a wheel or a release with --from") from None
        return replace(source, size=found.size, fingerprint=found.fingerprint) if self._only_shows else found

    def _planned(self, outcome: SetupOutcome) -> list[Step]:
        state = outcome.state
        assert state is not None
        try:
            found = plan.fitting(state, self._wanted)
            outcome.python = found.python if found else plan.environment_python(state)
            outcome.unused = self._unused(state, found) if found else ()
            steps = [] if found else plan.environment_steps(state, self._wanted)
        except CannotSetUp as error:
            outcome.fail(error.message, error.hint)
            return []
        return [*steps, *plan.directory_steps(state)]

    def _unused(self, state: SetupHostState, found: Installed) -> tuple[str, ...]:
        """The options that would have a say if an environment had to be made."""
        elsewhere = self._wishes.place_named and found.python != plan.environment_python(state)
        python = self._wanted.python_path not in (None, found.python)
        return ("--env-dir",) * elsewhere + ("--python",) * python

    def _equip_with(self, plans: Mapping[str, Sequence[Step]]) -> None:
        steps = [step for steps in plans.values() for step in steps]
        if not steps:
            return
        if (made_by := self._wanted.source.made_by) and _needs_wheel([steps]):
            steps.insert(0, Step("", "pack the allhands that runs here", made_by, changes=False))
        lacking = [outcome for outcome in self._usable() if plans[outcome.name]]
        count = f"{len(lacking)} computer{'s' if len(lacking) > 1 else ''}"
        if self._agreed(f"To be done on {count}:", steps, f"do this on {count}?"):
            side_by_side(lambda outcome: self._equip_one(outcome, plans[outcome.name]), lacking)
        elif not self._only_shows:
            for outcome in lacking:
                self._refuse(outcome, "it lacks what was not to be installed", "run this again, and agree")

    def _equip_one(self, outcome: SetupOutcome, steps: Sequence[Step]) -> None:
        """Run a computer's steps; the note that its environment is finished is written when that has been seen."""
        state = outcome.state
        assert state is not None
        if not any(step.argv[-1] == plan.FINISHED for step in steps):
            self._run(steps, outcome)
            return
        last = next(i for i, step in enumerate(steps) if step.argv[-1] == plan.FINISHED)
        if not self._run(steps[:last], outcome):
            return
        installed = installed_in(self._shell, state.ssh, plan.environment_python(state))
        if state.facts is None:
            outcome.state = replace(state, facts=facts_of(self._shell, state.ssh, plan.environment_python(state)))
        wrong = ["its Python does not run"] if installed is None else self._wrong(installed, state)
        if wrong:
            outcome.fail(f"after the installation: {'; '.join(wrong)}", "see what pip says there, or try --from")
            return
        self._run(steps[last:], outcome)

    def _wrong(self, installed: Installed, state: SetupHostState) -> list[str]:
        return plan.lacks(installed, self._wanted, plan.extra_of(state))

    def _run(self, steps: Sequence[Step], *outcomes: SetupOutcome) -> bool:
        """Run steps for computers; whether that worked."""
        try:
            self._runner.run(steps)
        except (Failed, AllhandsError) as error:
            for outcome in outcomes:
                outcome.fail(str(error) if isinstance(error, Failed) else error.message, error.hint or "")
            return False
        for outcome in outcomes:
            outcome.done += [step.why for step in steps if step.changes]
        return True

    # --- the hostfile -----------------------------------------------------------------------------------

    def _write(self) -> None:
        ready = [outcome for outcome in self._usable() if outcome.facts is not None and outcome.python]
        if not self._only_shows:
            for outcome in self._usable():
                if outcome not in ready:
                    outcome.fail("its Python does not tell what the computer has", "see what `allhands env` says there")
        # Whoever says no has not asked for a hostfile without that computer.
        if not ready or self.report.refused:
            return
        wiring = self._wired(ready)
        self._address(ready)
        if not (ready := [outcome for outcome in ready if outcome.trouble is None]):
            return
        entries = [_entry(outcome) for outcome in ready]
        output, old = self._wishes.output, hostfile.read_old(self._wishes.output)
        self.report.text = hostfile.compose(entries, wiring, old)
        self.report.hosts = hostfile.names_in(self.report.text)
        self.report.up_to_date = old is not None and output.read_text(encoding="utf-8") == self.report.text
        # A new file harms nobody, so it needs no question.
        asks = self._wishes.mode == "ask" or (self._wishes.mode == "refuse" and not self.report.shown and old is None)
        if self.report.up_to_date or not (asks or self._wishes.mode == "yes"):
            return
        question = f"{output} is there: bring it up to date (the old one is kept as {output.name}.bak)?"
        if old is None or self._wishes.mode == "yes" or self._person.agrees(question):
            self.report.kept = hostfile.write(output, self.report.text)
            self.report.written = output

    def _address(self, ready: Sequence[SetupOutcome]) -> None:
        chosen = network.choose({outcome.name: outcome.facts for outcome in ready if outcome.facts})
        self.report.why, self.report.warning = chosen.why, chosen.warning
        if len(ready) > 1 and not chosen.choices:
            self.report.warning = "write their addresses into the hostfile as ips"
        for outcome in ready:
            outcome.choice = chosen.choices.get(outcome.name)

    def _wired(self, ready: Sequence[SetupOutcome]) -> thunderbolt.Wiring | None:
        """What MLX's configurator makes of Macs with Thunderbolt cables, if the person wants it."""
        facts = [outcome.facts for outcome in ready if outcome.facts]
        if not thunderbolt.joined(facts):
            return None
        names = [outcome.name for outcome in ready]
        with tempfile.TemporaryDirectory(prefix="allhands-") as scratch:
            output = Path(scratch) / "hosts.json"
            step = thunderbolt.configure_step(names, thunderbolt.backend_of(facts), output)
            title = "These Macs are joined by Thunderbolt cables:"
            if not self._agreed(title, [step], "set their ports up?"):
                return None
            try:
                self._runner.run([step])
                found = thunderbolt.read_wiring(output)
            except (Failed, AllhandsError) as error:
                text = str(error) if isinstance(error, Failed) else error.message
                self._person.tell(f"Thunderbolt is left as it is: {text}\n  by hand: {plan.shown(step)}")
                return None
        return found if set(found.hosts) == set(names) else None


def _needs_wheel(plans: Iterable[Sequence[Step]]) -> bool:
    """Whether a wheel of allhands is copied to anybody."""
    return any(step.feed is not None for steps in plans for step in steps)


def _hint(access: Access, outcome: SetupOutcome, install_key: bool) -> str:
    if access.kind != "denied" or access.identity is None:
        return access.hint
    return access.hint if install_key else "add --install-key, which puts your public key there"


def _entry(outcome: SetupOutcome) -> hostfile.HostEntry:
    state = outcome.state
    assert state is not None
    assert state.facts is not None
    assert outcome.python is not None
    gpus = [gpu for gpu in state.facts.gpus if gpu.kind == "cuda"]
    ips = (outcome.choice.ip,) if outcome.choice else outcome.host.ips
    return hostfile.HostEntry(outcome.name, ips, max(1, len(gpus)), outcome.python, state.cwd)
