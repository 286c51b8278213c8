"""The examination: real probes over an ssh that is a script, on computers that fail in every phase."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from allhands.cluster import probe
from allhands.cluster.doctor import run, session
from allhands.cluster.doctor.facts import Cluster
from allhands.cluster.doctor.findings import Finding
from allhands.cluster.doctor.run import ClusterCheckOptions, diagnose
from allhands.cluster.hosts import Host

# What ssh is: it goes by the name of the host. Its last words are the host and the command.
SSH = r"""#!/bin/sh
for word; do
    if [ "$word" = -G ]; then echo "hostname 127.0.0.1"; exit 0; fi
done
while [ "$1" != -- ]; do shift; done
case "$2" in
    denied*) echo "me@denied: Permission denied (publickey)." >&2; exit 255;;
    silent*) exec sleep 60;;
    noisy*) echo "Welcome to noisy"; echo "You have no mail.";;
    odd*) echo "This account is currently not available."; exit 1;;
    breaks*) sed -u '/"kind": "trees"/Q' | sh -c "$3"; exit 255;;
    hangs*) sed -u '/"kind": "trees"/d' | sh -c "$3"; exit 255;;
    lies-time) sh -c "$3" | sed -u 's/"time": [0-9.]*/"time": "noon"/'; exit;;
    lies-nan) sh -c "$3" | sed -u 's/"time": [0-9.]*/"time": NaN/'; exit;;
    lies-deep) sh -c "$3" | sed -u "s/\"time\": [0-9.]*/\"time\": $(printf '%5000s' | tr ' ' '[')/"; exit;;
    lies-ports) sh -c "$3" | sed -u 's/"ports": {[^}]*}/"ports": {"127.0.0.1": true}/'; exit;;
    lies-reach) sh -c "$3" | sed -u 's/"outcome": "ok"/"outcome": "fine"/'; exit;;
    lies-less) sh -c "$3" | sed -u 's/"reached": .*/"reached": []}/'; exit;;
    lies-trees) sh -c "$3" | sed -u 's/"trees": .*/"trees": [{"role": 5}]}/'; exit;;
    lies-logins) sh -c "$3" | sed -u 's/"logins": .*/"logins": [{"code": "0", "said": ""}]}/'; exit;;
    babbles*) echo "0123 {"; echo '{"time": 1}';;
esac
exec sh -c "$3"
"""


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An ssh to any host of a telling name; whatever it starts is gone afterwards."""
    script = tmp_path / "ssh"
    script.write_text(SSH)
    script.chmod(0o700)
    monkeypatch.setenv("ALLHANDS_SSH", str(script))
    monkeypatch.chdir(tmp_path)
    before = set(psutil.Process().children(recursive=True))
    yield
    deadline = time.monotonic() + 5
    while left := set(psutil.Process().children(recursive=True)) - before:
        assert time.monotonic() < deadline, left
        time.sleep(0.02)


def hosts(*names: str, **more: Any) -> list[Host]:
    return [Host(name, name, ("127.0.0.1",), **more) for name in names]


def asked(*names: str, **options: Any) -> tuple[Cluster, list[Finding]]:
    return diagnose(
        hosts(*names), ClusterCheckOptions(**{"bench": False, "timeout_s": 15.0, **options})
    )


def found(findings: list[Finding], *checks: str) -> list[tuple[str, tuple[str, ...]]]:
    """Check and hosts of what was found, of some checks or of all but the one that is true of these
    tests.
    """
    return [
        (f.check, f.hosts)
        for f in findings
        if (
            f.check in checks
            if checks
            else f.check not in ("same-computer", "slots", "memory", "disk")
        )
    ]


@pytest.mark.usefixtures("remote")
def test_all_is_well() -> None:
    cluster, findings = asked("good1", "good2")
    assert found(findings) == []
    assert {(reach.source, reach.target, reach.outcome) for reach in cluster.reached} == {
        ("good1", "good2", "ok"),
        ("good2", "good1", "ok"),
    }
    assert cluster.logins == ()  # nothing needs them
    for host in cluster.hosts:
        assert host.clock_offset_s == pytest.approx(0.0, abs=1.0)
        assert host.noise == ""
    # One computer under two names is seen, too.
    assert [f.hosts for f in findings if f.check == "same-computer"] == [("good2", "good1")]


@pytest.mark.usefixtures("remote")
def test_ssh_from_the_first_to_the_others_is_for_mpirun() -> None:
    cluster, _ = asked("good1", "good2", "good3", backend="mpi")
    assert [(one.source, one.target, one.trouble) for one in cluster.logins] == [
        ("good1", "good2", None),
        ("good1", "good3", None),
    ]


@pytest.mark.usefixtures("remote")
def test_each_fault_is_told_of_its_host_and_holds_up_no_other() -> None:
    began = time.monotonic()
    cluster, findings = asked("good", "denied", "silent", "noisy", "odd", timeout_s=3.0)
    assert time.monotonic() - began < 30
    kinds = {host.name: host.trouble.kind for host in cluster.hosts if host.trouble}
    assert kinds == {"denied": "auth", "silent": "timeout", "odd": "login"}
    assert found(findings, "ssh") == [("ssh", ("denied",)), ("ssh", ("silent",)), ("ssh", ("odd",))]
    assert found(findings, "shell") == [("shell", ("noisy",))]
    assert cluster.host("noisy").noise.splitlines() == ["Welcome to noisy", "You have no mail."]
    assert "not available" in next(f.message for f in findings if f.hosts == ("odd",))
    # Those that answer are asked to the end.
    assert {(reach.source, reach.outcome) for reach in cluster.reached} == {
        ("good", "ok"),
        ("noisy", "ok"),
    }


@pytest.mark.usefixtures("remote")
def test_the_probe_is_composed_by_one_thread_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    busy, most = threading.Semaphore(1), []
    compose = probe.joined_text

    def joined() -> str:
        most.append(busy.acquire(blocking=False))
        time.sleep(0.2)
        busy.release()
        return compose()

    monkeypatch.setattr(probe, "_TEXT", [])
    monkeypatch.setattr(probe, "joined_text", joined)
    assert found(asked("good1", "good2", "good3")[1]) == []
    assert most == [True]


@pytest.mark.usefixtures("remote")
def test_what_looks_like_an_answer_is_none_without_the_token() -> None:
    cluster, _ = asked("babbles")
    assert cluster.host("babbles").facts is not None
    assert cluster.host("babbles").clock_offset_s == pytest.approx(0.0, abs=1.0)


@pytest.mark.slow
@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize(
    "what", ["time", "nan", "deep", "ports", "reach", "less", "trees", "logins"]
)
def test_a_computer_whose_answers_are_of_other_types_is_told_of_and_the_others_are_well(
    what: str, tmp_path: Path
) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    name = f"lies-{what}"
    # Only the first is asked whether it can log in to the others, and only for mpirun.
    names, more = (
        (["good1", name, "good2"], {})
        if what != "logins"
        else ([name, "good1", "good2"], {"backend": "mpi"})
    )
    cluster, findings = asked(*names, data=str(tmp_path / "train.jsonl"), timeout_s=3.0, **more)
    assert found(findings, "answers") == [("answers", (name,))]
    reached = {(reach.source, reach.target) for reach in cluster.reached}
    assert {("good1", "good2"), ("good2", "good1")} <= reached


@pytest.mark.slow
@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize(
    ("name", "words"),
    [("breaks", "reading its files, the connection broke"), ("hangs", "no answer for 5 s")],
)
def test_a_computer_that_is_lost_midway(name: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    cluster, findings = asked(
        "good1", name, "good2", data=str(tmp_path / "train.jsonl"), timeout_s=5.0
    )
    assert found(findings, "answers") == [("answers", (name,))]
    assert words in next(f.message for f in findings if f.check == "answers")
    assert cluster.host(name).facts is not None
    assert {(reach.source, reach.target) for reach in cluster.reached} == {
        ("good1", "good2"),
        ("good2", "good1"),
    }


@pytest.mark.usefixtures("remote")
def test_pythons_that_are_missing_or_old() -> None:
    computers = [
        Host("gone", "gone", ("127.0.0.1",), python="/no/such/python"),
        Host("here", None, ("127.0.0.1",), python="/no/such/python"),
    ]
    cluster, findings = diagnose(computers, ClusterCheckOptions(bench=False))
    assert [host.trouble.kind for host in cluster.hosts if host.trouble] == [
        "no-python",
        "no-python",
    ]
    assert found(findings) == [("python", ("gone",)), ("python", ("here",))]


@pytest.mark.usefixtures("remote")
def test_directories_models_and_addresses(tmp_path: Path) -> None:
    for name, content in (("one", "{}"), ("two", "{ }")):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "config.json").write_text(content)
    computers = [
        Host("a", "a", ("127.0.0.1",), cwd=str(tmp_path / "one")),
        Host("b", "b", ("127.0.0.1", "192.0.2.9"), cwd=str(tmp_path / "two")),
        Host("c", "c", ("127.0.0.1",), cwd=str(tmp_path / "three")),
    ]
    cluster, findings = diagnose(computers, ClusterCheckOptions(bench=False, model="model"))
    assert found(findings, "model") == [("model", ("c",)), ("model", ("b",))]
    assert "config.json different" in next(
        f.message for f in findings if f.hosts == ("b",) and f.check == "model"
    )
    assert found(findings, "directory", "address") == [("directory", ("c",)), ("address", ("b",))]
    trees = [host.tree("model") for host in cluster.hosts]
    assert [tree.path for tree in trees if tree] == [
        str(tmp_path / n / "model") for n in ("one", "two")
    ] + [None]


@pytest.mark.usefixtures("remote")
def test_sizes_only_do_not_read(tmp_path: Path) -> None:
    for name, content in (("one", "{}"), ("two", "[]")):
        (tmp_path / name / "model").mkdir(parents=True)
        (tmp_path / name / "model" / "config.json").write_text(content)
    computers = [Host(n, n, ("127.0.0.1",), cwd=str(tmp_path / n)) for n in ("one", "two")]
    quick = ClusterCheckOptions(bench=False, model="model", hashed=False)
    assert found(diagnose(computers, quick)[1], "model") == []
    assert found(
        diagnose(computers, ClusterCheckOptions(bench=False, model="model"))[1], "model"
    ) == [("model", ("two",))]


@pytest.mark.usefixtures("remote")
def test_names_are_looked_up_as_ssh_would(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, findings = diagnose([Host("x", "x"), Host("y", "y")], ClusterCheckOptions(bench=False))
    # An alias of this computer's own loopback: others could not connect to that.
    assert found(findings, "ssh") == [("ssh", ("x",)), ("ssh", ("y",))]
    assert {host.trouble.kind for host in cluster.hosts if host.trouble} == {"address"}
    assert all(host.facts is not None for host in cluster.hosts)


@pytest.mark.usefixtures("remote")
def test_nothing_is_measured_where_something_stops_training(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called: list[bool] = []
    monkeypatch.setattr(run, "measured", lambda *arguments: called.append(True))
    asked("good", "denied", bench=True)
    assert called == []
    asked("good1", "good2", bench=True)
    assert called == [True]


@pytest.mark.usefixtures("remote")
@pytest.mark.parametrize("slow_s", [0.0, 1.0])
def test_ctrl_c_ends_everything_at_once(slow_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while a session begins, whose process is there and which nobody knows yet; the fixture
    looks for those.
    """

    class Slow(session.Session):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            time.sleep(slow_s)

    monkeypatch.setattr(run, "Session", Slow)
    main = threading.get_ident()
    began = time.monotonic()

    def interrupt() -> None:
        import signal

        while not any("sleep" in p.name() for p in psutil.Process().children(recursive=True)):
            assert time.monotonic() < began + 30
            time.sleep(0.02)
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        asked("good", "silent", timeout_s=60.0)
    thread.join()
    assert time.monotonic() - began < 40


@pytest.mark.usefixtures("remote")
def test_this_computer_needs_no_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLHANDS_SSH", "/no/such/ssh")
    cluster, findings = diagnose([Host("localhost")], ClusterCheckOptions(bench=False))
    assert found(findings) == []
    assert cluster.hosts[0].facts is not None
    assert cluster.hosts[0].facts.cwd == os.getcwd()
    gone = diagnose([Host("other", "other", ("127.0.0.1",))], ClusterCheckOptions(bench=False))[0]
    assert gone.hosts[0].trouble is not None
    assert gone.hosts[0].trouble.kind == "no-ssh"
