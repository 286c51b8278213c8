"""Checks of the way to each computer and of its Python: ssh, shell, versions, clock."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

from allhands.cluster import ssh
from allhands.cluster.doctor.facts import Cluster, FactTrouble, HostFacts, HostReport, Login
from allhands.cluster.doctor.findings import (
    Check,
    Found,
    Severity,
    listed,
    on,
    on_mac,
    pip_install,
    usual,
)
from allhands.distributed.blame import init_command
from allhands.io.formatting import format_duration
from allhands.runtime.versions import (
    MAY_DIFFER,
    MLX_BACKENDS,
    MUST_BE_EQUAL,
    SOURCE,
    described,
    harmless,
    merely_different,
    required,
    software_here,
    unequal,
)

OLDEST_PYTHON = (3, 11)
CLOCK_WARN_S = 2.0
SLOW_LOGIN_S = 5.0
# A rank with one of these variables would believe that another launcher has started it.
_LAUNCHERS = (
    *("MLX_RANK", "MLX_HOSTFILE", "MLX_WORLD_SIZE", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"),
)
_INIT = "allhands cluster init --hosts {target}"
_PING = "ping -c 3 {place}"
# By kind of trouble: message and remedy.
_TROUBLES = {
    "name": ("its name cannot be resolved", "echo 'ADDRESS {bare}' | sudo tee -a /etc/hosts"),
    "auth": ("it refuses the key", "ssh-copy-id {target}"),
    "unknown-key": ("its host key is not known yet", "ssh {target} true"),
    "changed-key": ("its host key has changed", "ssh-keygen -R {bare} && ssh {target} true"),
    "refused": (
        "it refuses the connection: no ssh server listens",
        "nc -vz {place} 22   # on {place}: sudo systemctl enable --now ssh; a Mac: sudo systemsetup -setremotelogin on",
    ),
    "timeout": ("no answer", _PING),
    "unreachable": ("there is no route to it", _PING),
    "no-ssh": ("there is no ssh program here", "sudo apt install openssh-client"),
    "no-python": ("there is no Python at {python}", _INIT),
    "old-python": ("its Python is too old", _INIT),
    "login": ("its shell does not run Python", "ssh {target} {ask}"),
    "address": (
        "its address cannot be found",
        'getent hosts {bare}   # and write it as "ips" into the hostfile',
    ),
    "other": ("it cannot be asked", "ssh -v {target} true"),
}
_CUT = ("timeout", "unreachable", "refused")
_PYTHON_KINDS = ("no-python", "old-python")


def ssh_trouble(code: int | None, said: str) -> FactTrouble:
    """Classify a failure of ssh by exit code and error output; code ``None``: no answer in time."""
    kind, reason, stale = ssh.classified(code, said)
    return FactTrouble.model_validate({"kind": kind, "reason": reason[:200], "stale": stale})


def trouble_remedy(host: HostReport, trouble: FactTrouble) -> str:
    """Return the command that helps; it uses the names that ssh itself printed."""
    name = host.ssh or host.name
    user, at, bare = name.rpartition("@")
    if trouble.near:
        return f"ssh {shlex.quote(f'{user}{at}{trouble.near[0]}')} true   # and write {trouble.near[0]} for {bare}"
    target, bare = shlex.quote(name), shlex.quote(bare)
    if trouble.stale is not None:
        # ssh may know the computer by another name than the person, and keep its keys elsewhere.
        return f"{shlex.join(['ssh-keygen', '-f', trouble.stale[0], '-R', trouble.stale[1]])} && ssh {target} true"
    place = shlex.quote(host.addresses[0]) if host.addresses else bare
    ask = shlex.quote(f"{shlex.quote(host.python)} --version")
    return _TROUBLES[trouble.kind][1].format(target=target, bare=bare, place=place, ask=ask)


def _message(trouble: FactTrouble, python: str) -> str:
    said = f": {trouble.reason}" if trouble.reason else ""
    near = f"; did you mean {' or '.join(trouble.near)}?" if trouble.near else ""
    return _TROUBLES[trouble.kind][0].format(python=python) + said + near


def _troubles(cluster: Cluster, *, of_python: bool) -> Iterator[Found]:
    for host in cluster.hosts:
        if (trouble := host.trouble) is not None and (trouble.kind in _PYTHON_KINDS) == of_python:
            yield host.name, "stop", _message(trouble, host.python), trouble_remedy(host, trouble)


def check_ssh(cluster: Cluster) -> Iterator[Found]:
    """Check that every computer accepts ssh without a question."""
    return _troubles(cluster, of_python=False)


def check_answers(cluster: Cluster) -> Iterator[Found]:
    """Check that no computer stopped answering during the examination."""
    for host in cluster.hosts:
        if host.lost:
            remedy = on(host, "uptime; df -h .; dmesg | tail -n 20")
            yield host.name, "stop", f"it stopped answering: {host.lost}", remedy


def check_shell(cluster: Cluster) -> Iterator[Found]:
    """Check that login shells are quick and print nothing."""
    for host, _ in cluster.answered():
        if host.login_s > SLOW_LOGIN_S:
            taken = format_duration(host.login_s)
            message = f"a login takes {taken}: its shell or its name server is slow"
            yield host.name, "warn", message, f"time ssh {shlex.quote(host.ssh or host.name)} true"
    for host, _ in cluster.answered():
        if noise := host.noise.strip():
            message = f"its shell prints on every login, which breaks scp, rsync and mpirun: {ascii(noise)[:80]}"
            remedy = on(
                host, "grep -n 'echo\\|printf' ~/.bashrc ~/.zshenv ~/.profile ~/.ssh/rc 2>/dev/null"
            )
            yield host.name, "warn", message, remedy


def check_ssh_between(cluster: Cluster) -> Iterator[Found]:
    """Check that the first computer reaches the others over ssh; only ``mpirun`` there needs that."""
    for login in cluster.logins:
        if login.trouble is not None and not _is_cut(cluster, login, login.trouble.kind):
            yield _failed_login(cluster, login, login.trouble)


def _is_cut(cluster: Cluster, login: Login, kind: str) -> bool:
    """Tell if the checks of ports and packets report the fault already."""
    ends = {login.source, login.target}
    outcomes = {reach.outcome for reach in cluster.reached if {reach.source, reach.target} == ends}
    return bool(kind in _CUT and outcomes - {"ok", "stalls"}) or (
        kind == "timeout" and "stalls" in outcomes
    )


def _failed_login(cluster: Cluster, login: Login, trouble: FactTrouble) -> Found:
    source, target = cluster.host(login.source), cluster.host(login.target)
    # The person may mean to start mpirun on this computer.
    severity: Severity = "note" if target.ssh is None else "warn"
    command = trouble_remedy(
        HostReport(name=login.name, ssh=login.name, addresses=target.addresses), trouble
    )
    if trouble.kind == "auth":
        # The source may have no key of its own yet.
        command = f"test -f ~/.ssh/id_ed25519 || ssh-keygen -t ed25519 -N '' -f ~/.ssh/id_ed25519; {command}"
    if source.ssh is not None:  # with a terminal, on which ssh can ask
        command = on(source, command).replace("ssh ", "ssh -t ", 1)
    return (
        (source.name, target.name),
        severity,
        f"from here ssh {login.name} fails: {_message(trouble, '')}",
        command,
    )


def check_python(cluster: Cluster) -> Iterator[Found]:
    """Check that every computer has a Python that is new enough."""
    yield from _troubles(cluster, of_python=True)
    for host, facts in cluster.answered():
        if not _new_enough(facts):
            python, oldest = facts.python, ".".join(map(str, OLDEST_PYTHON))
            message = f"{python.python_path} is Python {python.python_version}, {oldest} is needed"
            yield host.name, "stop", message, trouble_remedy(host, FactTrouble(kind="old-python"))


def _new_enough(facts: HostFacts) -> bool:
    version = tuple(
        int(part) for part in facts.python.python_version.split(".")[:2] if part.isdigit()
    )
    return not version or version >= OLDEST_PYTHON


def check_allhands(cluster: Cluster) -> Iterator[Found]:
    """Check that a rank would start: allhands and MLX can be imported."""
    versions = [
        version for _, facts in cluster.answered() if (version := facts.version("allhands"))
    ]
    for host, facts in cluster.answered():
        if "python" in facts.missing or not _new_enough(facts):
            continue
        if facts.starts is not None:
            absent = facts.version("allhands") is None
            fault = "allhands is not installed" if absent else f"a rank fails with {facts.starts}"
            extra = (
                ""
                if on_mac(host)
                else "[cuda13]"
                if any(gpu.kind == "cuda" for gpu in facts.gpus)
                else "[cpu]"
            )
            wanted = f"allhands{extra}" + (f"=={usual(versions)}" if versions else "")
            yield host.name, "stop", f"{fault} in {host.python}", pip_install(host, facts, wanted)
        elif "starts" in facts.missing:
            remedy = on(host, f"{host.python} -m allhands")
            yield host.name, "warn", "allhands did not start in time", remedy


def check_versions(cluster: Cluster) -> Iterator[Found]:
    """Check that versions are equal where :mod:`allhands.runtime.versions` demands it; note other
    differences.
    """
    known = [
        (host, facts)
        for host, facts in cluster.answered()
        if facts.python.python_version and _new_enough(facts)
    ]
    for name in MUST_BE_EQUAL:
        for host, facts, wanted, message in _other_versions(known, name, name, required):
            remade = name == "python" or (name == "allhands" and SOURCE in wanted)
            remedy = (
                _init(cluster, host, wanted) if remade else _same_package(host, facts, name, wanted)
            )
            yield host.name, "stop", message, remedy
    for name in MAY_DIFFER:
        for host, facts, wanted, message in _other_versions(known, name, "allhands", dict):
            if name in merely_different(facts.software, wanted):
                yield (
                    host.name,
                    "note",
                    f"{message}: {harmless(name)}",
                    _same_package(host, facts, name, wanted),
                )


def _other_versions(
    known: Sequence[tuple[HostReport, HostFacts]],
    name: str,
    needs: str,
    compared: Callable[[Mapping[str, str]], Mapping[str, str]],
) -> Iterator[tuple[HostReport, HostFacts, Mapping[str, str], str]]:
    """Yield each computer without the usual version, with the usual software and a message.

    Computers without the package ``needs`` do not count; ``compared`` selects the versions to
    compare from a computer's software.
    """
    have = [
        (one, facts, compared(facts.software).get(name, ""))
        for one, facts in known
        if facts.version(needs)
    ]
    if not have:
        return
    common = usual([value for *_, value in have])
    same = listed(host.name for host, _, value in have if value == common)
    wanted = next(facts.software for _, facts, value in have if value == common)
    for host, facts, value in have:
        if value != common:
            other = described(name, wanted).split(" ", 1)[1]
            yield (
                host,
                facts,
                wanted,
                f"{described(name, facts.software, wanted)}, but {other} on {same}",
            )


def _same_package(host: HostReport, facts: HostFacts, name: str, wanted: Mapping[str, str]) -> str:
    """Return the command that installs the others' version of a package; for Python it shows the
    version.
    """
    if name == "python":
        return on(host, f"{shlex.quote(host.python)} --version   # nothing has to be done")
    backends = [
        one
        for one in MLX_BACKENDS
        if name == "mlx" and facts.version(one) not in (None, wanted[name])
    ]
    return pip_install(host, facts, *(f"{one}=={wanted[name]}" for one in (name, *backends)))


def _init(cluster: Cluster, host: HostReport, wanted: Mapping[str, str]) -> str:
    """Return the command that makes this computer's environment on the host, or on all hosts if
    this computer is the one that differs.
    """
    alike = host.ssh is not None and not unequal(software_here(), wanted)
    hosts = [host] if alike else cluster.hosts
    return init_command([one.ssh for one in hosts if one.ssh is not None], cluster.option)


def check_clock(cluster: Cluster) -> Iterator[Found]:
    """Check that clocks agree, within the error of the measurement."""
    known = [
        (host, host.clock_offset_s) for host in cluster.hosts if host.clock_offset_s is not None
    ]
    # The median, including this computer's clock; of two in the middle the one nearer to it.
    ranked = sorted([0.0, *(offset for _, offset in known)])
    reference = min(ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2], key=abs)
    for host, offset in known:
        off = offset - reference
        if abs(off) - host.round_trip_s / 2 > CLOCK_WARN_S:
            way = "ahead" if off > 0 else "behind"
            message = f"its clock is {format_duration(abs(off))} {way}: times in logs are wrong, and the Hub may refuse"
            command = (
                "sudo sntp -sS time.apple.com" if on_mac(host) else "sudo timedatectl set-ntp true"
            )
            yield host.name, "warn", message, on(host, command)


def _repeated(
    identities: Iterable[tuple[HostReport, Hashable]],
) -> Iterator[tuple[HostReport, str]]:
    """Yield each computer with the identity of an earlier one, and the name of that one."""
    seen: dict[Hashable, str] = {}
    for host, identity in identities:
        if (first := seen.setdefault(identity, host.name)) != host.name:
            yield host, first


def _same_computers(cluster: Cluster) -> Iterator[tuple[HostReport, str]]:
    systems = [(host, facts.system) for host, facts in cluster.answered() if facts.system.boot_id]
    return _repeated((host, (one.machine_id, one.boot_id, one.network_id)) for host, one in systems)


def check_same(cluster: Cluster) -> Iterator[Found]:
    """Check that no computer is listed under two names."""
    for host, first in _same_computers(cluster):
        message = f"it is the same computer as {first}: ranks would share its cores and memory"
        remedy = f"{on(host, 'hostname')}   # keep one of the two, with slots for both"
        yield (host.name, first), "warn", message, remedy


def check_names(cluster: Cluster) -> Iterator[Found]:
    """Check that no two computers have the same hostname: MPI would take them for one, and its sums
    would be wrong.
    """
    several = {host.name for host, _ in _same_computers(cluster)}
    systems = [
        (host, facts.system) for host, facts in cluster.answered() if host.name not in several
    ]
    names = {host.name: system.hostname.lower() for host, system in systems if system.hostname}
    for host, first in _repeated(
        (host, names[host.name]) for host, _ in systems if host.name in names
    ):
        name = names[host.name]
        message = f"its host name is {name}, like that of {first}: MPI would take both for one, and sums would be wrong"
        new = shlex.quote(f"{name.partition('.')[0]}-2")
        command = (
            f"sudo scutil --set HostName {new}"
            if on_mac(host)
            else f"sudo hostnamectl set-hostname {new}"
        )
        yield (host.name, first), "warn", message, on(host, command)


def check_directory(cluster: Cluster) -> Iterator[Found]:
    """Check that the working directory can be entered."""
    for host, facts in cluster.answered():
        if facts.cwd_error is not None:
            severity: Severity = "stop" if host.cwd_given else "note"
            message = (
                f"{host.cwd} cannot be entered ({facts.cwd_error}); ranks would work in {facts.cwd}"
            )
            yield host.name, severity, message, on(host, f"mkdir -p {shlex.quote(host.cwd)}")


def check_variables(cluster: Cluster) -> Iterator[Found]:
    """Check that a login sets no variables of another launcher."""
    where = "grep -n 'MLX_\\|OMPI_\\|PMI\\|NCCL_' ~/.bashrc ~/.zshenv ~/.profile ~/.ssh/environment 2>/dev/null"
    for host, facts in cluster.answered():
        if launchers := [name for name in facts.variables if name in _LAUNCHERS]:
            message = f"{listed(launchers)} set for every login: a rank would expect that launcher"
            yield host.name, "warn", message, on(host, where)
        if others := [name for name in facts.variables if name not in _LAUNCHERS]:
            yield host.name, "note", f"{listed(others)} set for every login", on(host, where)


def _asked(cluster: Cluster) -> bool:
    return bool(cluster.hosts)


CHECKS = (
    Check("ssh", "ssh without a question", check_ssh, _asked),
    Check(
        "answers",
        "all computers answered",
        check_answers,
        _asked,
        lambda cluster: all(host.facts is not None for host in cluster.hosts),
    ),
    Check("python", "Python", check_python, _asked),
    Check("shell", "quiet, quick shells", check_shell, _asked),
    Check("allhands", "allhands starts", check_allhands),
    Check("versions", "versions", check_versions),
    Check("clock", "clocks", check_clock),
    Check("same-computer", "no computer is listed twice", check_same),
    Check("names", "different host names", check_names),
    Check("directory", "working directory", check_directory),
    Check("variables", "environment", check_variables),
    Check(
        "ssh-between",
        "ssh for mpirun",
        check_ssh_between,
        lambda cluster: bool(cluster.logins),
        lambda cluster: all(login.trouble is None for login in cluster.logins),
    ),
)
