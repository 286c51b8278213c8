"""The doctor's checks of ssh, shells, Pythons, versions and clocks: each finds its illness, and
nothing in the well.
"""

from __future__ import annotations

import shlex
from typing import Any

import pytest
from computers import VERSIONS, cluster, facts, host, mac_facts, only, told, with_outcomes

from allhands.cluster.doctor.access import ssh_trouble
from allhands.cluster.doctor.facts import FactTrouble, HostFacts, Login
from allhands.cluster.doctor.run import CHECKS, findings_of, well


def python(version: str = "3.11.7", **versions: str) -> dict[str, Any]:
    packages = {**VERSIONS, **{name.replace("_", "-"): value for name, value in versions.items()}}
    return {"python_version": version, "python_path": "/env/bin/python", "versions": packages}


def test_healthy_computers_have_nothing() -> None:
    assert findings_of(cluster()) == []
    assert findings_of(cluster(host(1, mac_facts(1)), host(2, mac_facts(2)))) == []
    assert {check.name for check in well(cluster())} >= {
        "ssh",
        "versions",
        "clock",
        "ports",
        "route",
        "disk",
    }


def test_every_check_has_a_name_of_its_own_and_does_not_fail_on_computers_that_told_nothing() -> (
    None
):
    assert len({check.name for check in CHECKS}) == len(CHECKS)
    bare = cluster(host(1, HostFacts()), host(2, HostFacts()))
    assert {finding.check for finding in findings_of(bare)} <= {"mpi", "network", "address"}
    mute = cluster(host(1).model_copy(update={"facts": None}))
    assert told(mute) == []


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("name", "echo 'ADDRESS node2' | sudo tee -a /etc/hosts"),
        ("auth", "ssh-copy-id me@node2"),
        ("unknown-key", "ssh me@node2 true"),
        ("changed-key", "ssh-keygen -R node2 && ssh me@node2 true"),
        ("timeout", "ping -c 3 10.0.0.2"),
        ("unreachable", "ping -c 3 10.0.0.2"),
        ("refused", "nc -vz 10.0.0.2 22   # on 10.0.0.2: sudo systemctl"),
        ("no-ssh", "sudo apt install openssh-client"),
        ("login", "ssh me@node2 '/env/bin/python --version'"),
        ("address", "getent hosts node2"),
        ("other", "ssh -v me@node2 true"),
    ],
)
def test_a_computer_that_cannot_be_asked_stops_training(kind: str, remedy: str) -> None:
    ill = host(
        2,
        ssh="me@node2",
        facts=None,
        trouble=FactTrouble.model_validate({"kind": kind, "reason": "said so"}),
    )
    finding = only(cluster(host(1), ill, host(3)))
    assert (finding.check, finding.severity, finding.hosts) == ("ssh", "stop", ("node2",))
    assert "said so" in finding.message
    assert finding.remedy.startswith(remedy)


@pytest.mark.parametrize(
    ("code", "said", "kind"),
    [
        (255, "ssh: Could not resolve hostname node9: Name or service not known\r\n", "name"),
        (255, "Warning: x\nme@node2: Permission denied (publickey).\n", "auth"),
        (
            255,
            "Received disconnect from 10.0.0.2 port 22:2: Too many authentication failures",
            "auth",
        ),
        (
            255,
            "No ED25519 host key is known for node2.\nHost key verification failed.\n",
            "unknown-key",
        ),
        (
            255,
            "@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nOffending key in x\nHost key verification failed.\n",
            "changed-key",
        ),
        (255, "ssh: connect to host 10.0.0.2 port 22: Connection refused", "refused"),
        (255, "ssh: connect to host 10.0.0.2 port 22: Connection timed out", "timeout"),
        (
            255,
            "ssh: connect to host 10.0.0.2 port 22: Operation timed out",
            "timeout",
        ),  # as a Mac says it
        (255, "ssh: connect to host 10.0.0.2 port 22: No route to host", "unreachable"),
        (255, "kex_exchange_identification: Connection closed by remote host", "other"),
        (255, "", "other"),
        (None, "", "timeout"),
        (127, "bash: line 1: /env/bin/python: No such file or directory", "no-python"),
        (126, "sh: /env/bin/python: Permission denied", "no-python"),
        (127, "there is no ssh program", "no-ssh"),
        (1, "This account is currently not available.", "login"),
    ],
)
def test_the_words_of_ssh_are_understood(code: int | None, said: str, kind: str) -> None:
    trouble = ssh_trouble(code, said)
    assert trouble.kind == kind
    lines = said.split("\n")
    assert trouble.reason in (line.strip() for line in lines) or not said


def test_what_ssh_says_cannot_steer_a_terminal() -> None:
    assert ssh_trouble(255, "\x1b[2Jodd\x07 words").reason == "[2Jodd words"


def test_a_computer_that_stops_answering_stops_training() -> None:
    finding = only(
        cluster(host(1), host(2, facts=None, lost="reading its files, no answer for 20 s"))
    )
    assert (finding.check, finding.severity, finding.hosts) == ("answers", "stop", ("node2",))
    assert "reading its files, no answer for 20 s" in finding.message


def test_a_shell_that_prints_is_warned_of() -> None:
    finding = only(cluster(host(1), host(2, noise="Welcome to node2!\n")))
    assert (finding.check, finding.severity, finding.hosts) == ("shell", "warn", ("node2",))
    assert "Welcome to node2!" in finding.message
    assert shlex.split(finding.remedy)[:2] == ["ssh", "node2"]


@pytest.mark.parametrize(
    ("login_s", "expected"), [(0.4, []), (61.0, [("warn", "shell", ("node2",))])]
)
def test_a_login_that_takes_long(login_s: float, expected: list[Any]) -> None:
    assert told(cluster(host(1), host(2, login_s=login_s))) == expected


def login(source: str, target: str, kind: str) -> Login:
    return Login(
        source=source,
        target=target,
        name=target,
        trouble=FactTrouble.model_validate({"kind": kind}),
    )


def test_ssh_between_two_computers() -> None:
    ill = cluster(logins=(login("node1", "node2", "unknown-key"),))
    finding = only(ill)
    assert (finding.check, finding.severity, finding.hosts) == (
        "ssh-between",
        "warn",
        ("node1", "node2"),
    )
    # To be run there, with a terminal on which ssh can ask.
    assert shlex.split(finding.remedy) == ["ssh", "-t", "node1", "ssh node2 true"]


def test_no_key_there_is_made_before_it_is_copied() -> None:
    remedy = only(cluster(logins=(login("node1", "node2", "auth"),))).remedy
    command = shlex.split(remedy)[-1]
    assert command.endswith("ssh-copy-id node2")
    assert command.startswith("test -f ~/.ssh/id_ed25519 || ssh-keygen ")


def test_no_way_back_to_the_persons_own_computer_is_only_noted() -> None:
    ill = cluster(host(1, ssh=None), host(2), logins=(login("node2", "node1", "refused"),))
    assert told(ill) == [("note", "ssh-between", ("node2", "node1"))]


def test_where_no_connection_passes_ssh_is_not_told_again() -> None:
    ill = with_outcomes(
        cluster(logins=(login("node1", "node2", "timeout"),)), {("node1", "node2"): "timeout"}
    )
    assert [check for _, check, _ in told(ill)] == ["ports"]
    assert "ssh-between" not in {check.name for check in well(ill)}


# --- Python and its packages ----------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["no-python", "old-python"])
def test_no_python_there(kind: str) -> None:
    ill = host(
        2, facts=None, trouble=FactTrouble.model_validate({"kind": kind, "reason": "because"})
    )
    finding = only(cluster(host(1), ill))
    assert (finding.check, finding.severity) == ("python", "stop")
    assert finding.remedy == "allhands cluster init --hosts node2"


def test_a_python_that_can_answer_but_is_too_old() -> None:
    old = facts(2, python={**python("3.9.18"), "versions": {}}, starts="No module named allhands")
    finding = only(cluster(host(1), host(2, old)))
    assert (finding.check, finding.severity, finding.hosts) == ("python", "stop", ("node2",))
    assert "3.9.18" in finding.message
    assert "3.11" in finding.message


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, "allhands[cpu]==0.1.0"),
        ({"gpus": [{"kind": "cuda", "name": "H100"}]}, "allhands[cuda13]==0.1.0"),
        ({"system": {"system": "Darwin"}}, "allhands==0.1.0"),
    ],
)
def test_allhands_missing_is_installed_as_the_others_have_it(
    changes: dict[str, Any], wanted: str
) -> None:
    bare = {**python(), "versions": {}}
    ill = facts(2, python=bare, starts="ModuleNotFoundError: No module named 'allhands'", **changes)
    found = [f for f in findings_of(cluster(host(1), host(2, ill))) if f.check == "allhands"]
    assert [(f.severity, f.hosts) for f in found] == [("stop", ("node2",))]
    assert "not installed" in found[0].message
    inner = shlex.split(shlex.split(found[0].remedy)[-1])
    assert inner == ["/env/bin/python", "-m", "pip", "install", wanted]


def test_an_mlx_that_does_not_load() -> None:
    ill = facts(2, starts="ImportError: libcuda.so.1: cannot open shared object file")
    finding = only(cluster(host(1), host(2, ill)))
    assert (finding.check, finding.severity) == ("allhands", "stop")
    assert "libcuda.so.1" in finding.message


def test_a_start_that_takes_too_long_is_no_proof() -> None:
    assert told(cluster(host(1), host(2, facts(2, missing={"starts": "no answer"})))) == [
        ("warn", "allhands", ("node2",))
    ]


@pytest.mark.parametrize(
    ("package", "severity"),
    [("allhands", "stop"), ("mlx", "stop"), ("mlx_lm", "stop"), ("numpy", None)],
)
def test_the_odd_version_out_is_named(package: str, severity: str | None) -> None:
    ill = facts(2, python=python(**{package: "0.0.9"}))
    found = findings_of(cluster(host(1), host(2, ill), host(3)))
    if severity is None:
        assert found == []
        return
    (finding,) = found
    name = package.replace("_", "-")
    assert (finding.check, finding.severity, finding.hosts) == ("versions", severity, ("node2",))
    assert finding.message == f"{name} 0.0.9, but {VERSIONS[name]} on node1, node3"
    pip = f"/env/bin/python -m pip install {name}=={VERSIONS[name]}"
    assert shlex.split(finding.remedy) == ["ssh", "node2", pip]


def test_of_two_versions_the_first_computers_is_taken_for_right() -> None:
    ill = cluster(host(1, ssh=None), host(2, facts(2, python=python(mlx="0.31.0"))))
    assert only(ill).hosts == ("node2",)
    other = cluster(host(1, facts(1, python=python(mlx="0.31.0")), ssh=None), host(2))
    assert only(other).hosts == ("node2",)


@pytest.mark.parametrize(("version", "severity"), [("3.11.2", "note"), ("3.12.1", "stop")])
def test_other_pythons_are_told(version: str, severity: str) -> None:
    assert told(cluster(host(1), host(2, facts(2, python=python(version))), host(3))) == [
        (severity, "versions", ("node2",))
    ]


# --- clocks, names, directories, variables --------------------------------------------------------


@pytest.mark.parametrize(
    ("offsets", "off"),
    [
        ((0.0, 1.9, -1.9), []),
        ((0.0, 3600.0, 0.1), [("node2", "1h00m ahead")]),
        ((0.0, 0.0, -90.0), [("node3", "1m30s behind")]),
        ((0.0, 2.5, 0.0), [("node2", "2.5 s ahead")]),
        # The person's own clock counts as one: two of three are right.
        ((-10.0, -10.0, -10.0), []),
        ((None, 3600.0), [("node2", "1h00m ahead")]),
    ],
)
def test_clocks(offsets: tuple[float | None, ...], off: list[tuple[str, str]]) -> None:
    found = findings_of(
        cluster(*(host(i, clock_offset_s=offset) for i, offset in enumerate(offsets, 1)))
    )
    assert [(f.check, f.severity) for f in found] == [("clock", "warn")] * len(off)
    for finding, (name, words) in zip(found, off, strict=True):
        assert finding.hosts == (name,)
        assert words in finding.message
        assert finding.remedy == f"ssh -t {name} 'sudo timedatectl set-ntp true'"


def test_a_slow_way_does_not_make_a_wrong_clock() -> None:
    assert told(cluster(host(1), host(2, clock_offset_s=2.5, round_trip_s=2.0))) == []


def test_one_computer_under_two_names() -> None:
    ill = cluster(host(1), host(2, facts(2, system=facts(1).system.model_dump())))
    finding = only(ill)
    assert (finding.check, finding.severity, finding.hosts) == (
        "same-computer",
        "warn",
        ("node2", "node1"),
    )


@pytest.mark.parametrize("names", [("lab", "lab"), ("Lab", "lab"), ("lab.local", "LAB.local")])
def test_two_computers_that_call_themselves_the_same(names: tuple[str, str]) -> None:
    ill = cluster(
        *(
            host(i, facts(i, system={**facts(i).system.model_dump(), "hostname": n}))
            for i, n in enumerate(names, 1)
        )
    )
    finding = only(ill)
    assert (finding.check, finding.severity, finding.hosts) == ("names", "warn", ("node2", "node1"))
    assert "MPI" in finding.message
    assert finding.remedy == "ssh -t node2 'sudo hostnamectl set-hostname lab-2'"


def test_containers_of_one_computer_are_several() -> None:
    ids = {**facts(1).system.model_dump(), "network_id": "net:[2]", "hostname": "pod-2"}
    assert told(cluster(host(1), host(2, facts(2, system=ids)))) == []


@pytest.mark.parametrize(("given", "severity"), [(True, "stop"), (False, "note")])
def test_a_directory_that_cannot_be_entered(given: bool, severity: str) -> None:
    ill = host(
        2,
        facts(2, cwd_error="No such file or directory", cwd="/home/me"),
        cwd="/data/my work",
        cwd_given=given,
    )
    finding = only(cluster(host(1), ill))
    assert (finding.check, finding.severity) == ("directory", severity)
    assert shlex.split(shlex.split(finding.remedy)[-1]) == ["mkdir", "-p", "/data/my work"]


def test_variables_of_other_launchers() -> None:
    ill = facts(2, variables=["MLX_RANK", "NCCL_DEBUG", "OMPI_COMM_WORLD_RANK"])
    found = told(cluster(host(1), host(2, ill)))
    assert found == [("warn", "variables", ("node2",)), ("note", "variables", ("node2",))]
