"""The examination: all computers asked at the same time, in phases with deadlines; what they say is put together.

A computer that cannot be asked, or stops answering, is a fact like any other and holds nobody up.
"""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from allhands.cluster import ssh
from allhands.cluster.doctor.access import ssh_trouble
from allhands.cluster.doctor.checks import findings_of
from allhands.cluster.doctor.facts import Cluster, FactTrouble, HostFacts, HostReport, Login, Network, Reach, Tree
from allhands.cluster.doctor.findings import Finding
from allhands.cluster.doctor.measured import measured
from allhands.cluster.doctor.session import Session, SessionRefused, Untold, clock_offset
from allhands.cluster.hosts import Host, below_home
from allhands.cluster.probes.network import source_for
from allhands.errors import AllhandsError

_CONNECT_S = 4.0  # for a connection between two computers
_LOGIN_S = 8.0  # for an ssh between them
_LOOK_S = 0.05  # between two looks whether all have ended


@dataclass(frozen=True)
class ClusterCheckOptions:
    """What is asked.

    Attributes:
        option: how the person named the computers, for remedies.
        backend: ``auto``, ``ring``, ``mpi``, ``nccl`` or ``jaccl``.
        model: a directory, a repository of the Hub, or ``demo``; looked for on every computer.
        hashed: whether files are read, not only their sizes compared.
        bench: whether a real group is measured, if nothing stands in its way.
        timeout_s: of silence, after which a computer counts as lost.
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
    """One computer while it is examined."""

    host: Host
    addresses: tuple[str, ...] = ()
    session: Session | None = None
    told: dict[str, Any] = field(default_factory=dict[str, Any])
    ports: dict[str, int] = field(default_factory=dict[str, int])
    reached: list[Reach] = field(default_factory=list[Reach])
    logins: list[Login] = field(default_factory=list[Login])
    user: str = ""
    well: bool = False  # it can be asked more

    def lose(self, doing: str, reason: str) -> None:
        """It has stopped answering."""
        self.well, self.told["lost"] = False, f"{doing}, {reason}"

    def report(self) -> HostReport:
        """What is known of it."""
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
    """Ask every computer everything, and measure the network between them unless something stops training.

    Takes no longer than a few times ``options.timeout_s``, however many computers hang, while nothing large is read.
    """
    patients = [Patient(host) for host in hosts]
    try:
        _phases(patients, options)
    finally:
        # Also after Ctrl-C: threads that wait for an answer then get to know that there is none.
        _each(patients, lambda patient: patient.session.close() if patient.session else None)
    cluster = _together(patients, options, None)
    if options.bench and _can_measure(hosts) and not any(f.severity == "stop" for f in findings_of(cluster)):
        options.progress("measuring the network with a real group of MLX")
        return _together(patients, options, measured(hosts, cluster, options.progress))
    return cluster


def ask_facts(hosts: Sequence[Host], timeout_s: float) -> dict[str, HostFacts]:
    """What each computer tells of itself, by name; without those that cannot be asked."""
    options = ClusterCheckOptions(timeout_s=timeout_s)
    patients = [Patient(host) for host in hosts]
    try:
        _each(patients, lambda patient: _begin(patient, options))
        _each(patients, lambda patient: _ask_facts(patient, options, ()))
    finally:
        _each(patients, lambda patient: patient.session.close() if patient.session else None)
    return {patient.host.name: patient.told["facts"] for patient in patients if "facts" in patient.told}


def diagnose(hosts: Sequence[Host], options: ClusterCheckOptions) -> tuple[Cluster, list[Finding]]:
    """:func:`examine`, and what is wrong, the worst first."""
    cluster = examine(hosts, options)
    return cluster, findings_of(cluster)


def _can_measure(hosts: Sequence[Host]) -> bool:
    return sum(host.slots for host in hosts) > 1


def _phases(patients: list[Patient], options: ClusterCheckOptions) -> None:
    options.progress(f"asking {len(patients)} computer{'s' * (len(patients) != 1)}")
    _each(patients, _find_addresses)
    _own_address(patients)
    _each(patients, lambda patient: _begin(patient, options))
    ips = [ip for patient in patients for ip in patient.addresses]
    _each(patients, lambda patient: _ask_facts(patient, options, ips))
    sources = _sources(options)
    if sources:
        options.progress("comparing " + " and ".join(sources))
        hashed = options.hashed and sum(patient.well for patient in patients) > 1
        _each(patients, lambda patient: _ask_trees(patient, sources, hashed))
    if len(patients) > 1:
        options.progress("trying every way between them")
        secret = secrets.token_hex(16)
        _each(patients, lambda patient: _listen(patient, secret))
        _each(patients, lambda patient: _reach(patient, patients, secret, options))


def _each(patients: Sequence[Patient], function: Callable[[Patient], Any]) -> None:
    """Do something with all of them at the same time."""
    pool = ThreadPoolExecutor(max(1, len(patients)))
    asked: list[Future[Any]] = []
    try:
        asked.extend(pool.submit(function, patient) for patient in patients)
        for future in asked:
            future.result()
    except BaseException:
        # Again and again: a session that was about to begin is known a moment later.
        while wait(asked, timeout=_LOOK_S).not_done:
            for patient in patients:
                if patient.session is not None:
                    patient.session.kill()
        raise
    finally:
        pool.shutdown()


# --- one computer -------------------------------------------------------------------------------------


def _find_addresses(patient: Patient) -> None:
    """The addresses by which others would connect to it, as the ring takes them."""
    host = patient.host
    if host.ips or host.ssh is None:
        patient.addresses = host.ips
        return
    name = host.ssh
    try:
        name = ssh.real_name(host.ssh)
        address = str(socket.getaddrinfo(name, None, socket.AF_INET)[0][4][0])
    except OSError as error:
        patient.told["trouble"] = FactTrouble(kind="address", reason=f"{name}: {error.strerror}")
        return
    except AllhandsError as error:
        patient.told["trouble"] = FactTrouble(kind="other", reason=error.message)
        return
    if address.startswith("127."):
        patient.told["trouble"] = FactTrouble(kind="address", reason=f"{name} is {address}, which is this computer")
        return
    patient.addresses = (address,)


def _own_address(patients: Sequence[Patient]) -> None:
    """This computer's address is the one on the way to the others."""
    others = [ip for patient in patients if patient.host.ssh is not None for ip in patient.addresses]
    for patient in patients:
        if patient.host.ssh is None and not patient.addresses and others and (own := source_for(others[0])):
            patient.addresses = (own,)


def _begin(patient: Patient, options: ClusterCheckOptions) -> None:
    began = time.monotonic()
    try:
        patient.session = Session(patient.host, options.timeout_s)
        patient.session.wait_until_ready()
        patient.well = True
        patient.told["login_s"] = time.monotonic() - began
    except SessionRefused as refused:
        near = ssh.near_names(patient.host.ssh) if refused.trouble.kind == "name" and patient.host.ssh else ()
        patient.told["trouble"] = refused.trouble.model_copy(update={"near": near})
    except AllhandsError as error:
        patient.told["trouble"] = FactTrouble(kind="other", reason=error.message)
    except OSError as error:  # this computer's own: no processes, no temporary file
        patient.told["trouble"] = FactTrouble(kind="other", reason=f"nothing can be started here: {error.strerror}")


def _ask_facts(patient: Patient, options: ClusterCheckOptions, ips: Sequence[str]) -> None:
    if not patient.well or patient.session is None:
        return
    session, host = patient.session, patient.host
    doing = "asked for the time"
    try:
        offset, took = clock_offset(session)
        patient.told.update(clock_offset_s=offset, round_trip_s=took)
        doing = "asked about itself"
        answer = session.ask(
            "facts",
            options.timeout_s + 5.0,
            timeout_s=options.timeout_s,
            cwd=host.cwd or os.getcwd(),
            **({} if host.cwd else {"below_home": below_home(Path.cwd())}),
            places={"work": ".", "adapter": options.adapter_path},
            peers=[ip for ip in ips if ip not in patient.addresses],
        )
        patient.told["facts"] = facts = HostFacts.model_validate(answer)
        patient.user = facts.system.user
    except Untold as untold:
        patient.lose(doing, untold.reason)
    except ValidationError as error:
        patient.lose(doing, _not_understood(error))


def _not_understood(error: ValidationError) -> str:
    return f"it answered what is not understood: {error.errors()[0]['msg']}"


def _sources(options: ClusterCheckOptions) -> dict[str, str]:
    """What every computer needs a copy of; the demo's data are part of allhands."""
    found = {"model": options.model, "data": None if options.data == "demo" else options.data}
    return {role: source for role, source in found.items() if source}


def _ask_trees(patient: Patient, sources: Mapping[str, str], hashed: bool) -> None:
    if patient.well and patient.session is not None:
        try:
            trees = patient.session.ask("trees", sources=dict(sources), hashed=hashed)["trees"]
            patient.told["trees"] = tuple(Tree.model_validate(tree) for tree in trees)
        except Untold as untold:
            patient.lose("reading its files", untold.reason)
        except ValidationError as error:
            patient.lose("reading its files", _not_understood(error))


def _listen(patient: Patient, secret: str) -> None:
    if patient.well and patient.session is not None:
        try:
            answer = patient.session.ask("listen", secret=secret, addresses=list(patient.addresses))
            patient.ports, patient.told["bind_errors"] = answer["ports"], answer["errors"]
        except Untold as untold:
            patient.lose("listening on a port", untold.reason)


def _reach(patient: Patient, patients: Sequence[Patient], secret: str, options: ClusterCheckOptions) -> None:
    """Connect to all others; and log in to them where ``mpirun`` would."""
    if not patient.well or patient.session is None:
        return
    others = [other for other in patients if other is not patient and other.well]
    targets = [(other.host.name, ip, port) for other in others for ip, port in other.ports.items()]
    limit = min(_CONNECT_S, options.timeout_s)
    try:
        asked: dict[str, Any] = {
            "targets": [{"ip": ip, "port": port} for _, ip, port in targets],
            "secret": secret,
            "timeout_s": limit,
        }
        answers = patient.session.ask("reach", 4 * limit + options.timeout_s, **asked)["reached"]
        if len(answers) != len(targets):
            raise Untold("it answered what is not understood")
        patient.reached = [
            Reach.model_validate({**answer, "source": patient.host.name, "target": name, "own": answer.get("source")})
            for (name, *_), answer in zip(targets, answers, strict=True)
        ]
        # Whoever starts mpirun there needs it. Everything else comes from this computer, which reaches all of them.
        if options.backend == "mpi" and patient is patients[0] and patient.host.ssh is not None:
            _log_in(patient, others, options)
    except Untold as untold:
        patient.lose("connecting to the others", untold.reason)
    except ValidationError as error:
        patient.lose("connecting to the others", _not_understood(error))


def _log_in(patient: Patient, others: Sequence[Patient], options: ClusterCheckOptions) -> None:
    """What comes of ssh from there to every other computer."""
    assert patient.session is not None
    limit = min(_LOGIN_S, options.timeout_s)
    settings = ssh.SshOptions(connect_timeout_s=max(1, round(limit) - 3))
    names = [(other, name) for other in others if (name := _login_name(other))]
    logins = [{"target": o.host.name, "argv": ssh.command(name, ["true"], settings)} for o, name in names]
    answers = patient.session.ask("logins", 4 * limit + options.timeout_s, logins=logins, timeout_s=limit)
    if len(answers["logins"]) != len(names):
        raise Untold("it answered what is not understood")
    for (other, name), answer in zip(names, answers["logins"], strict=True):
        trouble = None if answer["code"] == 0 else ssh_trouble(answer["code"], answer["said"])
        patient.logins.append(Login(source=patient.host.name, target=other.host.name, name=name, trouble=trouble))


def _login_name(other: Patient) -> str | None:
    """What a third computer would give to ssh; names of this computer's own configuration may mean nothing there."""
    if other.host.ssh is not None:
        return other.host.ssh
    return f"{other.user}@{other.addresses[0]}" if other.addresses and other.user else None


def _together(patients: Sequence[Patient], options: ClusterCheckOptions, network: Network | None) -> Cluster:
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
