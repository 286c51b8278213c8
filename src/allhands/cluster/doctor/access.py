"""Checks of the way to each computer and of the Python there: ssh, shell, versions, clock."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

from allhands.cluster.doctor.facts import Cluster, FactTrouble, HostFacts, HostReport, Login
from allhands.cluster.doctor.findings import Check, Finding, Severity, listed, on, on_mac, usual
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
# Ranks with one of these set would believe that another launcher has started them.
_LAUNCHERS = (
    *("MLX_RANK", "MLX_HOSTFILE", "MLX_WORLD_SIZE", "MLX_IBV_DEVICES", "MLX_JACCL_COORDINATOR"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK", "PMI_SIZE"),
)
_WORDS = {
    "name": "its name cannot be resolved",
    "auth": "it refuses the key",
    "unknown-key": "its host key is not known yet",
    "changed-key": "its host key has changed",
    "refused": "it refuses the connection: no ssh server listens",
    "timeout": "no answer",
    "unreachable": "there is no way to it",
    "no-ssh": "there is no ssh program here",
    "no-python": "there is no Python at {python}",
    "old-python": "its Python is too old",
    "login": "its shell does not run Python",
    "address": "its address cannot be found",
    "other": "it cannot be asked",
}
_CUT = ("timeout", "unreachable", "refused")
_PYTHON_KINDS = ("no-python", "old-python")
# In OpenSSH's words, the most telling first: a changed key also ends with a failed verification.
_SAID = (
    ("remote host identification has changed", "changed-key"),
    ("could not resolve hostname", "name"),
    ("host key verification failed", "unknown-key"),
    ("permission denied", "auth"),
    ("too many authentication failures", "auth"),
    ("connection refused", "refused"),
    ("connection timed out", "timeout"),
    ("operation timed out", "timeout"),
    ("no route to host", "unreachable"),
    ("network is unreachable", "unreachable"),
)
_SSH_FAILED = 255
# The file, and the name in it, of a key that is not the right one any more.
_STALE = re.compile(r"^Offending [^\n]*key in ([^\n]+):\d+\n(?:[^\n]*\n)*?Host key for (\S+) has changed", re.MULTILINE)


def ssh_trouble(code: int | None, said: str) -> FactTrouble:
    """Why an ssh with this exit code and error output has failed; ``None`` is no answer in time."""
    lines = ["".join(c for c in line if c.isprintable()).strip() for line in said.splitlines()]
    last = next((line for line in reversed(lines) if line), "")[:200]
    if code is None:
        return FactTrouble(kind="timeout", reason=last)
    if code == _SSH_FAILED:
        for words, kind in _SAID:
            if any(words in line.lower() for line in lines):
                stale = _STALE.search("\n".join(lines)) if kind == "changed-key" else None
                return FactTrouble.model_validate({"kind": kind, "reason": last, "stale": stale and stale.groups()})
        return FactTrouble(kind="other", reason=last or "ssh has failed without a word")
    if code in (126, 127):
        return FactTrouble(kind="no-ssh" if "no ssh program" in said else "no-python", reason=last)
    return FactTrouble(kind="login", reason=last or f"it ended with code {code}")


def ssh_remedy(host: HostReport, kind: str) -> str:
    """The command that helps against a kind of trouble."""
    target = shlex.quote(host.ssh or host.name)
    bare = shlex.quote((host.ssh or host.name).rpartition("@")[2])
    place = shlex.quote(host.addresses[0]) if host.addresses else bare
    return {
        "name": f"echo 'ADDRESS {bare}' | sudo tee -a /etc/hosts",
        "auth": f"ssh-copy-id {target}",
        "unknown-key": f"ssh {target} true",
        "changed-key": f"ssh-keygen -R {bare} && ssh {target} true",
        "refused": f"nc -vz {place} 22   # on {place}: sudo systemctl enable --now ssh; a Mac: sudo systemsetup "
        "-setremotelogin on",
        "timeout": f"ping -c 3 {place}",
        "unreachable": f"ping -c 3 {place}",
        "no-ssh": "sudo apt install openssh-client",
        "no-python": f"allhands cluster init --hosts {target}",
        "old-python": f"allhands cluster init --hosts {target}",
        "login": f"ssh {target} {shlex.quote(shlex.quote(host.python) + ' --version')}",
        "address": f'getent hosts {bare}   # and write it as "ips" into the hostfile',
    }.get(kind, f"ssh -v {target} true")


def trouble_remedy(host: HostReport, trouble: FactTrouble) -> str:
    """The command that helps, with what ssh itself has said about it."""
    if trouble.near:
        user, at, bare = (host.ssh or host.name).rpartition("@")
        return f"ssh {shlex.quote(f'{user}{at}{trouble.near[0]}')} true   # and write {trouble.near[0]} for {bare}"
    if trouble.stale is None:
        return ssh_remedy(host, trouble.kind)
    # ssh may know the computer by another name than the person, and keep its keys elsewhere.
    forget = shlex.join(["ssh-keygen", "-f", trouble.stale[0], "-R", trouble.stale[1]])
    return f"{forget} && ssh {shlex.quote(host.ssh or host.name)} true"


def check_ssh(cluster: Cluster) -> list[Finding]:
    """Every computer can be asked, without a question from ssh."""
    return [
        _trouble_finding("ssh", host, host.trouble)
        for host in cluster.hosts
        if host.trouble is not None and host.trouble.kind not in _PYTHON_KINDS
    ]


def _trouble_finding(check: str, host: HostReport, trouble: FactTrouble) -> Finding:
    words = _WORDS[trouble.kind].format(python=host.python)
    said = f": {trouble.reason}" if trouble.reason else ""
    near = f"; did you mean {' or '.join(trouble.near)}?" if trouble.near else ""
    return Finding(check, (host.name,), "stop", words + said + near, trouble_remedy(host, trouble))


def check_answers(cluster: Cluster) -> list[Finding]:
    """No computer stopped answering while it was asked."""
    return [
        Finding(
            "answers",
            (host.name,),
            "stop",
            f"it stopped answering: {host.lost}",
            on(host, "uptime; df -h .; dmesg | tail -n 20"),
        )
        for host in cluster.hosts
        if host.lost
    ]


def check_shell(cluster: Cluster) -> list[Finding]:
    """Login shells keep quiet, and are quick."""
    slow = [
        Finding(
            "shell",
            (host.name,),
            "warn",
            f"a login takes {format_duration(host.login_s)}: its shell does too much, or its name server is slow",
            f"time ssh {shlex.quote(host.ssh or host.name)} true",
        )
        for host in cluster.hosts
        if host.login_s > SLOW_LOGIN_S and host.facts is not None
    ]
    return slow + [
        Finding(
            "shell",
            (host.name,),
            "warn",
            f"its shell prints on every login, which breaks scp, rsync and mpirun: {ascii(host.noise.strip())[:80]}",
            on(host, "grep -n 'echo\\|printf' ~/.bashrc ~/.zshenv ~/.profile ~/.ssh/rc 2>/dev/null"),
        )
        for host in cluster.hosts
        if host.noise.strip() and host.facts is not None
    ]


def check_ssh_between(cluster: Cluster) -> list[Finding]:
    """The first computer reaches the others over ssh, if ``mpirun`` is to be started there: nothing else needs that."""
    # Where no connection passes at all that is told with the ports, and where large packets get lost, with those.
    cut = {(reach.source, reach.target) for reach in cluster.reached if reach.outcome not in ("ok", "stalls")}
    stalled = {(reach.source, reach.target) for reach in cluster.reached if reach.outcome == "stalls"}

    def is_told(login: Login, kind: str) -> bool:
        ways = {(login.source, login.target), (login.target, login.source)}
        return bool(kind in _CUT and ways & cut) or (kind == "timeout" and bool(ways & stalled))

    return [
        _login_finding(cluster, login, login.trouble)
        for login in cluster.logins
        if login.trouble is not None and not is_told(login, login.trouble.kind)
    ]


def _login_finding(cluster: Cluster, login: Login, trouble: FactTrouble) -> Finding:
    source, target = cluster.host(login.source), cluster.host(login.target)
    # The person may mean to start mpirun here.
    severity: Severity = "note" if target.ssh is None else "warn"
    said = f": {trouble.reason}" if trouble.reason else ""
    words = _WORDS[trouble.kind].format(python="")
    other = HostReport(name=login.name, ssh=login.name, addresses=target.addresses)
    message = f"from here ssh {login.name} fails: {words}{said}"
    command = trouble_remedy(other, trouble)
    if trouble.kind == "auth":
        # It may have no key of its own yet.
        command = f"test -f ~/.ssh/id_ed25519 || ssh-keygen -t ed25519 -N '' -f ~/.ssh/id_ed25519; {command}"
    return Finding("ssh-between", (source.name, target.name), severity, message, _in_person(source, command))


def _in_person(host: HostReport, command: str) -> str:
    """With a terminal: it may ask."""
    return on(host, command).replace("ssh ", "ssh -t ", 1) if host.ssh is not None else command


def check_python(cluster: Cluster) -> list[Finding]:
    """There is a Python that is new enough."""
    findings = [
        _trouble_finding("python", host, host.trouble)
        for host in cluster.hosts
        if host.trouble is not None and host.trouble.kind in _PYTHON_KINDS
    ]
    for host, facts in cluster.answered():
        version = facts.python.python_version
        if version and _numbers(version) < OLDEST_PYTHON:
            oldest = ".".join(map(str, OLDEST_PYTHON))
            message = f"{facts.python.python_path} is Python {version}, {oldest} is needed"
            findings.append(Finding("python", (host.name,), "stop", message, ssh_remedy(host, "old-python")))
    return findings


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdigit())


def _new_enough(facts: HostFacts) -> bool:
    return not facts.python.python_version or _numbers(facts.python.python_version) >= OLDEST_PYTHON


def check_allhands(cluster: Cluster) -> list[Finding]:
    """A rank would start: allhands and MLX can be imported."""
    findings: list[Finding] = []
    for host, facts in cluster.answered():
        reason = facts.starts
        if "python" in facts.missing or not _new_enough(facts):
            continue
        if reason is None and "starts" in facts.missing:
            message = "allhands could not be started in time"
            findings.append(Finding("allhands", (host.name,), "warn", message, on(host, f"{host.python} -m allhands")))
        elif reason is not None:
            what = "allhands is not installed" if facts.version("allhands") is None else f"a rank fails with {reason}"
            findings.append(
                Finding("allhands", (host.name,), "stop", f"{what} in {host.python}", _install(cluster, host, facts))
            )
    return findings


def _install(cluster: Cluster, host: HostReport, facts: HostFacts) -> str:
    """The pip command that gives the host what the others have."""
    versions = [other.version("allhands") for _, other in cluster.answered() if other.version("allhands")]
    extra = "" if on_mac(host) else "[cuda13]" if any(gpu.kind == "cuda" for gpu in facts.gpus) else "[cpu]"
    wanted = f"allhands{extra}" + (f"=={usual(versions)}" if versions else "")
    return on(host, shlex.join([facts.python.python_path or host.python, "-m", "pip", "install", wanted]))


def check_versions(cluster: Cluster) -> list[Finding]:
    """What must be equal is so everywhere, by the rule of :mod:`allhands.runtime.versions`; the rest is told."""
    known = [(host, facts) for host, facts in cluster.answered() if facts.python.python_version and _new_enough(facts)]
    findings: list[Finding] = []
    for name in MUST_BE_EQUAL:
        have = [(host, facts, required(facts.software)[name]) for host, facts in known if facts.version(name)]
        findings += _other_versions(cluster, name, have, noted=False)
    for name in MAY_DIFFER:
        have = [(host, facts, facts.version(name) or "") for host, facts in known if facts.version("allhands")]
        findings += _other_versions(cluster, name, have, noted=True)
    return findings


def _other_versions(
    cluster: Cluster, name: str, have: Sequence[tuple[HostReport, HostFacts, str]], *, noted: bool
) -> list[Finding]:
    """Who has not what most have; what may differ is told only where it is not forbidden anyway."""
    if len({value for *_, value in have}) < 2:
        return []
    common = usual([value for *_, value in have])
    same = listed(host.name for host, _, value in have if value == common)
    wanted = next(facts.software for _, facts, value in have if value == common)
    findings: list[Finding] = []
    for host, facts, value in have:
        if value == common or (noted and name not in merely_different(facts.software, wanted)):
            continue
        message = f"{described(name, facts.software, wanted)}, but {described(name, wanted).split(' ', 1)[1]} on {same}"
        remedy = _same_package(host, facts, name, wanted)
        if not noted and (name == "python" or (name == "allhands" and SOURCE in wanted)):
            remedy = _init(cluster, host, wanted)
        message += f": {harmless(name)}" if noted else ""
        findings.append(Finding("versions", (host.name,), "note" if noted else "stop", message, remedy))
    return findings


def _same_package(host: HostReport, facts: HostFacts, name: str, wanted: Mapping[str, str]) -> str:
    """The command that gives a host the others' version of a package; of Python it lists what there is."""
    if name == "python":
        return on(host, f"{shlex.quote(host.python)} --version   # nothing has to be done")
    names = [name]
    if name == "mlx":
        names += [one for one in MLX_BACKENDS if facts.version(one) not in (None, wanted[name])]
    packages = [f"{one}=={wanted[name]}" for one in names]
    return on(host, shlex.join([facts.python.python_path or host.python, "-m", "pip", "install", *packages]))


def _init(cluster: Cluster, host: HostReport, wanted: Mapping[str, str]) -> str:
    """The command that makes this computer's environment there, or on all others if it is itself the odd one."""
    alike = host.ssh is not None and not unequal(software_here(), wanted)
    names = [host.ssh] if alike else [other.ssh for other in cluster.hosts if other.ssh is not None]
    return init_command([name for name in names if name is not None], cluster.option)


def check_clock(cluster: Cluster) -> list[Finding]:
    """Clocks agree, as far as the way to them lets one know."""
    known = [(host, host.clock_offset_s) for host in cluster.hosts if host.clock_offset_s is not None]
    findings: list[Finding] = []
    # The person's own clock counts like one more; of two that disagree it is the one that is believed.
    reference = _middle([0.0, *(offset for _, offset in known)])
    for host, offset in known:
        off = offset - reference
        if abs(off) - host.round_trip_s / 2 > CLOCK_WARN_S:
            way = "ahead" if off > 0 else "behind"
            command = "sudo sntp -sS time.apple.com" if on_mac(host) else "sudo timedatectl set-ntp true"
            message = f"its clock is {format_duration(abs(off))} {way}: times in logs mislead, and the Hub may refuse"
            findings.append(Finding("clock", (host.name,), "warn", message, on(host, command)))
    return findings


def _middle(values: Sequence[float]) -> float:
    """The median; of two in the middle the one nearer to 0."""
    ranked = sorted(values)
    return min(ranked[(len(ranked) - 1) // 2], ranked[len(ranked) // 2], key=abs)


def check_same(cluster: Cluster) -> list[Finding]:
    """No computer stands in the list under two names."""
    seen: dict[tuple[str, str, str], str] = {}
    findings: list[Finding] = []
    for host, facts in cluster.answered():
        identity = (facts.system.machine_id, facts.system.boot_id, facts.system.network_id)
        if not facts.system.boot_id:
            continue
        first = seen.setdefault(identity, host.name)
        if first != host.name:
            message = f"it is the same computer as {first}: ranks would share its cores and memory"
            remedy = f"{on(host, 'hostname')}   # keep one of the two, with slots for both"
            findings.append(Finding("same-computer", (host.name, first), "warn", message, remedy))
    return findings


def check_names(cluster: Cluster) -> list[Finding]:
    """No two computers call themselves the same: MPI would take them for one, and its sums would be wrong."""
    seen: dict[str, str] = {}
    findings: list[Finding] = []
    several = {name for f in check_same(cluster) for name in f.hosts[:1]}
    for host, facts in cluster.answered():
        name = facts.system.hostname.lower()
        if not name or host.name in several:
            continue
        first = seen.setdefault(name, host.name)
        if first != host.name:
            message = f"it calls itself {name}, as {first} does: MPI would take the two for one, and add up wrongly"
            new = shlex.quote(f"{name.partition('.')[0]}-2")
            command = f"sudo scutil --set HostName {new}" if on_mac(host) else f"sudo hostnamectl set-hostname {new}"
            findings.append(Finding("names", (host.name, first), "warn", message, on(host, command)))
    return findings


def check_directory(cluster: Cluster) -> list[Finding]:
    """The directory to work in can be entered."""
    findings: list[Finding] = []
    for host, facts in cluster.answered():
        if facts.cwd_error is None:
            continue
        severity: Severity = "stop" if host.cwd_given else "note"
        message = f"{host.cwd} cannot be entered ({facts.cwd_error}); ranks would work in {facts.cwd}"
        remedy = on(host, f"mkdir -p {shlex.quote(host.cwd)}")
        findings.append(Finding("directory", (host.name,), severity, message, remedy))
    return findings


def check_variables(cluster: Cluster) -> list[Finding]:
    """No variables of another launcher, or of another job, wait in the environment of a login."""
    findings: list[Finding] = []
    for host, facts in cluster.answered():
        launchers = [name for name in facts.variables if name in _LAUNCHERS]
        others = [name for name in facts.variables if name not in _LAUNCHERS]
        where = "grep -n 'MLX_\\|OMPI_\\|PMI\\|NCCL_' ~/.bashrc ~/.zshenv ~/.profile ~/.ssh/environment 2>/dev/null"
        if launchers:
            message = f"{listed(launchers)} set for every login: a rank takes them for its own"
            findings.append(Finding("variables", (host.name,), "warn", message, on(host, where)))
        if others:
            message = f"{listed(others)} set for every login"
            findings.append(Finding("variables", (host.name,), "note", message, on(host, where)))
    return findings


def _asked(cluster: Cluster) -> bool:
    return bool(cluster.hosts)


def _all_answered(cluster: Cluster) -> bool:
    return all(host.facts is not None for host in cluster.hosts)


def _all_logins(cluster: Cluster) -> bool:
    return all(login.trouble is None for login in cluster.logins)


CHECKS = (
    Check("ssh", "ssh without a question", check_ssh, _asked),
    Check("answers", "all answer to the end", check_answers, _asked, _all_answered),
    Check("python", "Python", check_python, _asked),
    Check("shell", "quiet, quick shells", check_shell, _asked),
    Check("allhands", "allhands starts", check_allhands),
    Check("versions", "versions", check_versions),
    Check("clock", "clocks", check_clock),
    Check("same-computer", "each is another computer", check_same),
    Check("names", "names of their own", check_names),
    Check("directory", "working directory", check_directory),
    Check("variables", "environment", check_variables),
    Check("ssh-between", "ssh for mpirun", check_ssh_between, lambda cluster: bool(cluster.logins), _all_logins),
)
