"""The examination of all computers, in phases with deadlines, and the list of all checks.

A computer that cannot be asked, or stops answering, is reported as a fact and delays no other.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from allhands.cluster import ssh
from allhands.cluster.addresses import remote_address
from allhands.cluster.doctor import access, devices, network, storage
from allhands.cluster.doctor.access import ssh_trouble
from allhands.cluster.doctor.facts import (
    Cluster,
    FactTrouble,
    HostFacts,
    HostReport,
    Login,
    Network,
    Reach,
    Tree,
)
from allhands.cluster.doctor.findings import ORDER, Check, Finding
from allhands.cluster.doctor.measured import measured
from allhands.cluster.doctor.session import (
    NOT_UNDERSTOOD,
    Session,
    SessionRefused,
    Untold,
    clock_offset,
)
from allhands.cluster.hosts import Host, below_home
from allhands.cluster.probes.network import source_for
from allhands.errors import AllhandsError
from allhands.io.formatting import counted
from allhands.runtime.threads import in_background

_CONNECT_S = 4.0  # for a connection between two computers
_LOGIN_S = 8.0  # for an ssh between them
_LOOK_S = 0.05  # between two looks if all have ended


@dataclass(frozen=True)
class ClusterCheckOptions:
    """Options of an examination.

    Attributes:
        option: how the person named the computers, for remedies.
        backend: ``auto``, ``ring``, ``mpi``, ``nccl`` or ``jaccl``.
        model: a directory, a repository of the Hub, or ``demo``; looked for on every computer.
        hashed: read files and compare their hashes, not only their sizes.
        bench: measure a real group, if no finding stops training.
        timeout_s: silence after which a computer counts as lost.
        progress: called with a few words when a phase begins.
    """

    option: str = "--hostfile hosts.json"
    backend: str = "auto"
    model: str | None = None
    data: str | None = None
    adapter_path: str = "adapters"
    hashed: bool = True
    bench: bool = True
    timeout_s: float = 20.0
    progress: Callable[[str], None] = field(default=lambda words: None, compare=False)


@dataclass
class Patient:
    """One computer during the examination."""

    host: Host
    addresses: tuple[str, ...] = ()
    session: Session | None = None
    told: dict[str, Any] = field(default_factory=dict[str, Any])
    ports: dict[str, int] = field(default_factory=dict[str, int])
    reached: list[Reach] = field(default_factory=list[Reach])
    logins: list[Login] = field(default_factory=list[Login])
    well: bool = False  # it answers

    def report(self) -> HostReport:
        """Return all facts about the computer."""
        host = self.host
        return HostReport(
            name=host.name,
            ssh=host.ssh,
            addresses=self.addresses,
            given=bool(host.ips),
            slots=host.slots,
            python=host.python or sys.executable,
            cwd=host.cwd or os.getcwd(),
            cwd_given=host.cwd is not None,
            rdma=sum(device is not None for device in host.rdma),
            noise=self.session.noise if self.session else "",
            **self.told,
        )


def examine(hosts: Sequence[Host], options: ClusterCheckOptions) -> Cluster:
    """Ask every computer, and measure the network between them unless a finding stops training.

    Unless large files are read, this takes at most a few times ``options.timeout_s``, however many
    computers hang.
    """
    with _patients(hosts) as patients:
        options.progress(f"asking {counted(len(patients), 'computer')}")
        _each(patients, _find_addresses)
        _own_address(patients)
        _begin(patients, options.timeout_s)
        _ask_facts(patients, options)
        _ask_trees(patients, options)
        if len(patients) > 1:
            options.progress("testing every connection between them")
            _connect(patients, options)
    cluster = _together(patients, options, None)
    stopped = any(finding.severity == "stop" for finding in findings_of(cluster))
    if stopped or not options.bench or sum(host.slots for host in hosts) < 2:
        return cluster
    options.progress("measuring the network with an MLX group")
    return _together(patients, options, measured(hosts, cluster, options.progress))


def ask_facts(hosts: Sequence[Host], timeout_s: float) -> dict[str, HostFacts]:
    """Return the facts of each computer that answers, by its name."""
    with _patients(hosts) as patients:
        _begin(patients, timeout_s)
        _ask_facts(patients, ClusterCheckOptions(timeout_s=timeout_s))
    return {
        patient.host.name: patient.told["facts"] for patient in patients if "facts" in patient.told
    }


def diagnose(hosts: Sequence[Host], options: ClusterCheckOptions) -> tuple[Cluster, list[Finding]]:
    """Examine the computers; return the facts, and the findings with the worst first."""
    cluster = examine(hosts, options)
    return cluster, findings_of(cluster)


@contextmanager
def _patients(hosts: Sequence[Host]) -> Generator[list[Patient]]:
    patients = [Patient(host) for host in hosts]
    try:
        yield patients
    finally:
        # Also after Ctrl-C: threads that wait for an answer then learn that there is none.
        _each(patients, lambda patient: patient.session.close() if patient.session else None)


def _each(patients: Sequence[Patient], function: Callable[[Patient], Any]) -> None:
    """Call a function for all computers at the same time."""
    asked = [in_background(partial(function, patient)) for patient in patients]
    try:
        for future in asked:
            future.result()
    except BaseException:
        # Repeatedly: a session that is just beginning is known only a moment later.
        while wait(asked, timeout=_LOOK_S).not_done:
            for patient in patients:
                if patient.session is not None:
                    patient.session.kill()
        raise


def _ask_each(
    patients: Sequence[Patient], doing: str, question: Callable[[Patient, Session], None]
) -> None:
    """Ask all computers that answer; one that does not, or not as expected, is lost."""

    def ask(patient: Patient) -> None:
        if patient.well and patient.session is not None:
            try:
                question(patient, patient.session)
                return
            except Untold as untold:
                reason = untold.reason
            except ValidationError as error:
                reason = f"{NOT_UNDERSTOOD}: {error.errors()[0]['msg']}"
            patient.well, patient.told["lost"] = False, f"{doing}, {reason}"

    _each(patients, ask)


# --- the phases -----------------------------------------------------------------------------------


def _find_addresses(patient: Patient) -> None:
    """Find the address by which others would connect to a computer, as the ring does."""
    patient.addresses = patient.host.ips
    if not patient.addresses and patient.host.ssh is not None:
        try:
            patient.addresses = (remote_address(patient.host),)
        except AllhandsError as error:
            patient.told["trouble"] = FactTrouble(kind="address", reason=error.message)


def _own_address(patients: Sequence[Patient]) -> None:
    """Give this computer the address from which it would connect to the others."""
    others = [
        ip for patient in patients if patient.host.ssh is not None for ip in patient.addresses
    ]
    for patient in patients:
        if (
            patient.host.ssh is None
            and not patient.addresses
            and others
            and (own := source_for(others[0]))
        ):
            patient.addresses = (own,)


def _begin(patients: Sequence[Patient], timeout_s: float) -> None:
    def begin(patient: Patient) -> None:
        began = time.monotonic()
        host = patient.host
        try:
            patient.session = Session(host, timeout_s)
            patient.session.wait_until_ready()
            patient.well = True
            patient.told["login_s"] = time.monotonic() - began
        except SessionRefused as refused:
            near = ssh.near_names(host.ssh) if refused.trouble.kind == "name" and host.ssh else ()
            patient.told["trouble"] = refused.trouble.model_copy(update={"near": near})
        except AllhandsError as error:
            patient.told["trouble"] = FactTrouble(kind="other", reason=error.message)
        except OSError as error:  # of this computer, which cannot start a process or make a file
            patient.told["trouble"] = FactTrouble(
                kind="other", reason=f"nothing can be started here: {error.strerror}"
            )

    _each(patients, begin)


def _ask_facts(patients: Sequence[Patient], options: ClusterCheckOptions) -> None:
    ips = [ip for patient in patients for ip in patient.addresses]

    def clock(patient: Patient, session: Session) -> None:
        offset, took = clock_offset(session)
        patient.told.update(clock_offset_s=offset, round_trip_s=took)

    def facts(patient: Patient, session: Session) -> None:
        host = patient.host
        answer = session.ask(
            "facts",
            options.timeout_s + 5.0,
            timeout_s=options.timeout_s,
            cwd=host.cwd or os.getcwd(),
            **({} if host.cwd else {"below_home": below_home(Path.cwd())}),
            places={"work": ".", "adapter": options.adapter_path},
            peers=[ip for ip in ips if ip not in patient.addresses],
        )
        patient.told["facts"] = HostFacts.model_validate(answer)

    _ask_each(patients, "asked for the time", clock)
    _ask_each(patients, "asked about itself", facts)


def _ask_trees(patients: Sequence[Patient], options: ClusterCheckOptions) -> None:
    # The demo's data are part of allhands.
    wanted = {"model": options.model, "data": None if options.data == "demo" else options.data}
    sources: Mapping[str, str] = {role: source for role, source in wanted.items() if source}
    hashed = options.hashed and sum(patient.well for patient in patients) > 1

    def trees(patient: Patient, session: Session) -> None:
        answer = session.ask("trees", sources=sources, hashed=hashed)["trees"]
        patient.told["trees"] = tuple(Tree.model_validate(tree) for tree in answer)

    if sources:
        options.progress("comparing " + " and ".join(sources))
        _ask_each(patients, "reading its files", trees)


def _connect(patients: Sequence[Patient], options: ClusterCheckOptions) -> None:
    """Connect every computer to all others, and log in to them where ``mpirun`` would."""
    secret, limit = secrets.token_hex(16), min(_CONNECT_S, options.timeout_s)

    def listen(patient: Patient, session: Session) -> None:
        answer = session.ask("listen", secret=secret, addresses=patient.addresses)
        patient.ports, patient.told["bind_errors"] = answer["ports"], answer["errors"]

    def reach(patient: Patient, session: Session) -> None:
        others = [other for other in patients if other is not patient and other.well]
        ways = [(other.host.name, ip, port) for other in others for ip, port in other.ports.items()]
        targets = [{"ip": ip, "port": port} for _, ip, port in ways]
        answers = session.ask(
            "reach", 4 * limit + options.timeout_s, targets=targets, secret=secret, timeout_s=limit
        )["reached"]
        if len(answers) != len(ways):
            raise Untold(NOT_UNDERSTOOD)
        patient.reached = [
            Reach.model_validate(
                {**answer, "source": patient.host.name, "target": name, "own": answer.get("source")}
            )
            for (name, *_), answer in zip(ways, answers, strict=True)
        ]
        # Only mpirun logs in from the first computer. Everything else starts from this computer,
        # which reaches all of them.
        if options.backend == "mpi" and patient is patients[0] and patient.host.ssh is not None:
            _log_in(patient, session, others, options)

    _ask_each(patients, "listening on a port", listen)
    _ask_each(patients, "connecting to the others", reach)


def _log_in(
    patient: Patient, session: Session, others: Sequence[Patient], options: ClusterCheckOptions
) -> None:
    """Try ssh from a computer to every other one."""
    limit = min(_LOGIN_S, options.timeout_s)
    settings = ssh.SshOptions(connect_timeout_s=max(1, round(limit) - 3))
    names = [(other.host.name, name) for other in others if (name := _login_name(other))]
    logins = [{"argv": ssh.command(name, ["true"], settings)} for _, name in names]
    answers = session.ask("logins", 4 * limit + options.timeout_s, logins=logins, timeout_s=limit)[
        "logins"
    ]
    if len(answers) != len(names):
        raise Untold(NOT_UNDERSTOOD)
    for (target, name), answer in zip(names, answers, strict=True):
        trouble = None if answer["code"] == 0 else ssh_trouble(answer["code"], answer["said"])
        patient.logins.append(
            Login(source=patient.host.name, target=target, name=name, trouble=trouble)
        )


def _login_name(other: Patient) -> str | None:
    """Return the name that a third computer would give to ssh."""
    if other.host.ssh is not None or not other.addresses or "facts" not in other.told:
        return other.host.ssh
    return f"{other.told['facts'].system.user}@{other.addresses[0]}"


def _together(
    patients: Sequence[Patient], options: ClusterCheckOptions, network: Network | None
) -> Cluster:
    return Cluster(
        hosts=tuple(patient.report() for patient in patients),
        option=options.option,
        backend=options.backend,
        model=options.model,
        data=options.data,
        hashed=options.hashed,
        reached=tuple(reach for patient in patients for reach in patient.reached),
        logins=tuple(login for patient in patients for login in patient.logins),
        network=network,
    )


# --- all checks, in the order in which their findings are reported --------------------------------

CHECKS: tuple[Check, ...] = (*access.CHECKS, *storage.CHECKS, *network.CHECKS, *devices.CHECKS)


def findings_of(cluster: Cluster) -> list[Finding]:
    """Return all findings, the worst first."""
    found = [
        finding for check in CHECKS if check.applies(cluster) for finding in check.findings(cluster)
    ]
    return sorted(found, key=lambda finding: ORDER.index(finding.severity))


def well(cluster: Cluster) -> list[Check]:
    """Return the checks that were made and passed."""
    made = [check for check in CHECKS if check.applies(cluster) and check.clean(cluster)]
    return [check for check in made if not check.findings(cluster)]
