"""The road of set-up with computers that exist only on paper: what is asked, and what becomes of
the answers.
"""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import typer

from allhands.cli.cluster_init import run_init
from allhands.cli.commands import function_of
from allhands.cluster.doctor.facts import HostFacts
from allhands.cluster.hosts import Host
from allhands.cluster.setup import hostfile
from allhands.cluster.setup.flow import SetUp
from allhands.cluster.setup.outcome import Mode, SetupReport, Wishes
from allhands.cluster.setup.plan import Step
from allhands.cluster.setup.shell import Shell
from allhands.cluster.setup.state import (
    CannotSetUp,
    Installed,
    SetupHostState,
    SetupSource,
    WantedSetup,
)
from allhands.errors import ConfigError

HAS = {"allhands": "1.2", "mlx": "0.32.4", "mlx-metal": "0.32.4"}
WANTED = WantedSetup(SetupSource("1.2"), (3, 11), versions={"mlx": "0.32.4"})


def mac(number: int, peer: int, devices: Sequence[str] = ()) -> SetupHostState:
    """A Mac on Wi-Fi, with a Thunderbolt cable to another one, that has everything."""
    port = {"receptacle": "1", "connected": True, "domain": f"D{number}", "peers": [f"D{peer}"]}
    wifi = {"name": "en0", "kind": "wifi", "addresses": [{"ip": f"10.0.0.{number}", "prefix": 24}]}
    content: dict[str, Any] = {
        "system": {"hostname": f"mac{number}"},
        "interfaces": [wifi],
        "mac": {"thunderbolt": [port]},
        "rdma": {"devices": devices},
    }
    installed = Installed("/env/bin/python", (3, 11, 1), HAS)
    facts = HostFacts.model_validate(content)
    return SetupHostState(
        f"mac{number}", f"mac{number}", "Darwin", installed=(installed,), facts=facts, cwd="/work"
    )


@dataclass(frozen=True)
class OnPaper:
    """Stands for the surveyor."""

    states: dict[str, SetupHostState | CannotSetUp]

    def look_at(self, shell: Shell, host: Host, more: Sequence[str] = ()) -> SetupHostState:
        state = self.states[host.name]
        if isinstance(state, CannotSetUp):
            raise state
        return state


@dataclass
class Answers:
    """A person who says the same to everything."""

    answer: bool = True
    asked: list[str] = field(default_factory=list[str])
    told: list[str] = field(default_factory=list[str])
    begun: list[Step] = field(default_factory=list[Step])

    def begins(self, step: Step) -> None:
        self.begun.append(step)

    def tell(self, text: str) -> None:
        self.told.append(text)

    def agrees(self, question: str) -> bool:
        self.asked.append(question)
        return self.answer


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the hostfile goes; every computer lets ssh in."""
    (tmp_path / "ssh").write_text("#!/bin/sh\nexit 0\n")
    (tmp_path / "ssh").chmod(0o700)
    monkeypatch.setenv("ALLHANDS_SSH", str(tmp_path / "ssh"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wishes_for(
    place: Path, *states: SetupHostState, mode: Mode = "ask", wanted: WantedSetup = WANTED
) -> Wishes:
    surveyor: Any = OnPaper({state.name: state for state in states})
    return Wishes(
        [state.name for state in states], place / "hosts.json", wanted, surveyor, mode=mode
    )


def set_up(
    place: Path,
    person: Answers,
    *states: SetupHostState,
    mode: Mode = "ask",
    wanted: WantedSetup = WANTED,
) -> SetupReport:
    return SetUp(wishes_for(place, *states, mode=mode, wanted=wanted), person).run()


def addresses(place: Path) -> dict[str, list[str]]:
    content = json.loads((place / "hosts.json").read_text())
    return {entry["ssh"]: entry["ips"] for entry in content["hosts"]}


# --- Thunderbolt ----------------------------------------------------------------------------------

CONFIGURATOR = """#!{python}
import json, sys
words = sys.argv[1:]
option = lambda name: words[words.index(name) + 1]
assert option("--over") == "thunderbolt" and "--auto-setup" in words
names = option("--hosts").split(",")
hosts = [dict(ssh=n, ips=["192.168.0.%d" % i], rdma=[]) for i, n in enumerate(reversed(names), 1)]
json.dump(dict(backend=option("--backend"), envs=[], hosts=hosts), open(option("--output-hostfile"), "w"))
"""


@pytest.fixture
def configurator(place: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """MLX's, which on paper finds that each Mac is the other's neighbour."""
    tool = place / "bin" / "mlx.distributed_config"
    tool.parent.mkdir()
    tool.write_text(CONFIGURATOR.format(python=sys.executable))
    tool.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(tool.with_name("python")))
    return tool


def test_macs_on_a_cable_get_what_mlxs_configurator_finds(place: Path, configurator: Path) -> None:
    person = Answers()
    report = set_up(place, person, mac(1, 2), mac(2, 1))
    assert [step.argv[0] for step in person.begun] == [str(configurator)]
    assert person.asked == ["set their ports up?"]
    assert addresses(place) == {"mac2": ["192.168.0.1"], "mac1": ["192.168.0.2"]}
    assert json.loads((place / "hosts.json").read_text())["backend"] == "ring"
    assert report.written == place / "hosts.json"


def test_with_rdma_it_is_asked_for_jaccl(place: Path, configurator: Path) -> None:
    set_up(place, Answers(), mac(1, 2, ["rdma_en2"]), mac(2, 1, ["rdma_en2"]))
    assert json.loads((place / "hosts.json").read_text())["backend"] == "jaccl"


def test_macs_whose_ports_shall_stay_as_they_are(place: Path, configurator: Path) -> None:
    person = Answers(answer=False)
    set_up(place, person, mac(1, 2), mac(2, 1))
    assert person.begun == []
    assert addresses(place) == {"mac1": ["10.0.0.1"], "mac2": ["10.0.0.2"]}


def test_a_configurator_that_fails_is_told_and_harms_nothing(
    place: Path, configurator: Path
) -> None:
    configurator.write_text("#!/bin/sh\nexit 3\n")
    person = Answers()
    report = set_up(place, person, mac(1, 2), mac(2, 1), mode="yes")
    assert "by hand:" in person.told[-1]
    assert (
        "mlx.distributed_config --hosts mac1,mac2 --over thunderbolt --backend ring"
        in person.told[-1]
    )
    assert addresses(place) == {"mac1": ["10.0.0.1"], "mac2": ["10.0.0.2"]}
    assert "over Wi-Fi" in (report.warning or "")


def test_without_a_cable_nothing_is_asked(place: Path, configurator: Path) -> None:
    person = Answers()
    set_up(place, person, mac(1, 7), mac(2, 8))
    assert (person.asked, person.begun) == ([], [])


@pytest.mark.parametrize("mode", ["dry-run", "refuse"])
def test_what_is_only_shown_is_not_run(place: Path, configurator: Path, mode: Mode) -> None:
    person = Answers()
    report = set_up(place, person, mac(1, 2), mac(2, 1), mode=mode)
    assert [step.argv[0] for step in report.shown] == [str(configurator)]
    assert (person.asked, person.begun) == ([], [])
    assert not (place / "hosts.json").exists()


# --- one computer's trouble -----------------------------------------------------------------------


def test_one_that_cannot_be_set_up_does_not_stop_the_others(place: Path) -> None:
    other = replace(mac(2, 9), installed=(), env_dir="/home/me/env", home="/home/me")
    report = set_up(place, Answers(), mac(1, 9), other)
    first, second = report.outcomes
    assert (first.trouble, first.python) == (None, "/env/bin/python")
    assert "there is no Python 3.11" in (second.trouble or "")
    assert second.hint
    assert addresses(place) == {"mac1": ["10.0.0.1"]}


def test_refused_changes_are_not_made(place: Path) -> None:
    lacking = replace(mac(2, 9), cwd_exists=False)
    person = Answers(answer=False)
    report = set_up(place, person, mac(1, 9), lacking)
    assert person.asked == ["do this on 1 computer?"]
    assert person.begun == []
    assert report.outcomes[1].trouble == "it lacks the part that you did not agree to install"
    assert report.refused == ["mac2"]
    # Without it: that was not asked for.
    assert (report.text, report.written) == (None, None)
    assert not (place / "hosts.json").exists()


def test_a_step_that_fails_is_told_with_its_last_word_and_how_to_run_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (place / "ssh").write_text(
        '#!/bin/sh\ncase "$*" in *mkdir*) echo "disk full" >&2; exit 1;; esac\n'
    )
    report = set_up(place, Answers(), mac(1, 9), replace(mac(2, 9), cwd_exists=False))
    assert report.outcomes[0].trouble is None
    assert report.outcomes[1].trouble == "make the directory to work in: disk full"
    assert report.outcomes[1].hint == f"run it by hand: {place}/ssh mac2 'mkdir -p -- /work'"


def test_nobody_can_be_used(place: Path) -> None:
    report = set_up(
        place, Answers(), replace(mac(1, 9), facts=None, installed=(), env_dir="/home/me/env")
    )
    assert report.outcomes[0].trouble
    assert report.text is None
    assert not (place / "hosts.json").exists()


def test_one_that_tells_nothing_of_itself_is_not_passed_over(place: Path) -> None:
    report = set_up(place, Answers(), mac(1, 9), replace(mac(2, 9), facts=None))
    assert report.outcomes[1].trouble == "its Python does not tell what the computer has"
    assert (report.hosts, report.without) == (["mac1"], ["mac2"])


def test_what_runs_here_is_packed_only_for_who_needs_it(place: Path) -> None:
    pack = (sys.executable, "-c", "raise SystemExit(1)")
    wanted = replace(WANTED, source=SetupSource("1.2", place / "allhands.whl", made_by=pack))
    lacks_a_directory = replace(mac(1, 9), cwd_exists=False)
    shown = set_up(place, Answers(), lacks_a_directory, mode="dry-run", wanted=wanted).shown
    assert [step.argv[0] for step in shown] == ["mkdir"]
    person = Answers()
    set_up(place, person, lacks_a_directory, mode="yes", wanted=wanted)
    assert [step.argv[0] for step in person.begun] == ["mkdir"]


def test_hosts_with_gpus_get_a_rank_for_each(place: Path) -> None:
    gpu = {"kind": "cuda", "name": "H100", "driver": "580.1"}
    state = mac(1, 9)
    assert state.facts is not None
    facts = HostFacts.model_validate(state.facts.model_dump() | {"gpus": [gpu, gpu]})
    versions = {"allhands": "1.2", "mlx": "0.32.4", "mlx-cuda-13": "0.32.4"}
    installed = Installed("/env/bin/python", (3, 11, 1), versions)
    set_up(
        place,
        Answers(),
        replace(state, system="Linux", driver="580.1", facts=facts, installed=(installed,)),
    )
    assert json.loads((place / "hosts.json").read_text())["hosts"][0]["slots"] == 2


# --- what is told at the end ----------------------------------------------------------------------


class Typed(io.StringIO):
    """A person at a terminal."""

    def isatty(self) -> bool:
        return True


def at_terminal(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", Typed(text))


NEEDS_A_DIRECTORY = replace(mac(2, 9), cwd_exists=False)


def test_what_is_refused_leaves_an_earlier_hostfile_as_it_was(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = earlier(place)
    at_terminal(monkeypatch, "n\n")
    assert run_init(wishes_for(place, mac(1, 9), NEEDS_A_DIRECTORY, mode="ask")) == 7
    assert "hosts.json is not written" in capsys.readouterr().err
    with pytest.raises(ConfigError) as caught:
        run_init(wishes_for(place, mac(1, 9), NEEDS_A_DIRECTORY, mode="refuse"))
    assert caught.value.code == "consent-missing"
    assert (place / "hosts.json").read_text() == before
    assert not (place / "hosts.json.bak").exists()


@pytest.mark.parametrize("answer", ["n\n", "maybe\n", ""], ids=["no", "maybe", "Ctrl-D"])
def test_a_refusal_writes_no_hostfile_and_says_so(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], answer: str
) -> None:
    at_terminal(monkeypatch, answer)
    assert run_init(wishes_for(place, mac(1, 9), NEEDS_A_DIRECTORY)) == 7
    assert not (place / "hosts.json").exists()
    said = capsys.readouterr()
    assert (
        "hosts.json is not written, because you did not agree to the changes needed on mac2"
        in said.err
    )
    assert "what to do: run this again and agree, or leave mac2 out of --hosts" in said.err
    assert "train" not in said.out + said.err


def test_who_fails_is_missing_from_the_hostfile_and_that_is_told(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (place / "ssh").write_text(
        '#!/bin/sh\ncase "$*" in *mkdir*) echo "disk full" >&2; exit 1;; esac\n'
    )
    assert run_init(wishes_for(place, mac(1, 9), NEEDS_A_DIRECTORY, mac(3, 9), mode="yes")) == 7
    assert list(addresses(place)) == ["mac1", "mac3"]
    said = capsys.readouterr().out
    assert said.startswith("hosts.json written without mac2 (see above)\n")
    assert "allhands train --hostfile hosts.json" in said


@pytest.mark.parametrize("again", [False, True])
def test_one_that_is_left_alone_is_not_sent_to_train(
    place: Path, capsys: pytest.CaptureFixture[str], again: bool
) -> None:
    (place / "ssh").write_text('#!/bin/sh\ncase "$*" in *mkdir*) exit 1;; esac\n')
    for _ in range(1 + again):
        capsys.readouterr()
        assert run_init(wishes_for(place, mac(1, 9), NEEDS_A_DIRECTORY, mode="yes")) == 7
    said = capsys.readouterr().out
    assert said == (
        f"hosts.json {'is up to date' if again else 'written'} without mac2 (see above)\n"
        "it has only one computer: correct the faults of the others, and run this again\n"
    )


def test_one_that_was_asked_for_alone_may_train(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_init(wishes_for(place, mac(1, 9), mode="yes")) == 0
    assert capsys.readouterr().out.startswith("hosts.json written\nnext:\n")


def test_only_shown_it_says_who_would_be_missing(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lacking = replace(mac(2, 9), installed=(), env_dir="/home/me/env", home="/home/me")
    assert run_init(wishes_for(place, mac(1, 9), lacking, mac(3, 9), mode="dry-run")) == 7
    assert f"# {place}/hosts.json without mac2\ncat > " in capsys.readouterr().out


OLD = {"mac1": "10.0.0.1", "mac2": "10.0.0.2", "far": "10.0.9.1", "farther": "10.0.9.2"}


def earlier(place: Path) -> str:
    """A hostfile of an earlier run, over more computers."""
    entries = [
        hostfile.host_entry(name, (ip,), 1, "/env/bin/python", "/work") for name, ip in OLD.items()
    ]
    (place / "hosts.json").write_text(hostfile.compose(entries))
    return (place / "hosts.json").read_text()


def test_who_else_is_in_the_hostfile_is_told(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = earlier(place)
    assert run_init(wishes_for(place, mac(1, 9), mac(2, 9), mode="yes")) == 0
    assert (place / "hosts.json").read_text() == before
    said = capsys.readouterr().out
    assert said.startswith("hosts.json is up to date\nit also has far, farther, as before\nnext:\n")


def test_one_that_fails_stays_in_an_earlier_hostfile(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = earlier(place)
    (place / "ssh").write_text('#!/bin/sh\ncase "$*" in *mkdir*) exit 1;; esac\n')
    assert run_init(wishes_for(place, mac(1, 9), NEEDS_A_DIRECTORY, mode="yes")) == 7
    assert (place / "hosts.json").read_text() == before
    said = capsys.readouterr().out
    assert "it also has far, farther, as before" in said
    assert "mac2 stays in it, as before, and cannot be used now (see above)" in said


def test_a_plan_has_no_step_that_changes_nothing(place: Path) -> None:
    earlier(place)
    with pytest.raises(ConfigError) as caught:
        run_init(wishes_for(place, mac(1, 9), NEEDS_A_DIRECTORY, mode="refuse"))
    lines = caught.value.message.splitlines()[1:]
    assert lines == [
        "  # mac2: make the directory to work in",
        f"  {place}/ssh mac2 'mkdir -p -- /work'",
    ]


@pytest.mark.parametrize(
    ("wishes", "flags"),
    [
        ({"place_named": True}, "--env-dir is"),
        ({"wanted": replace(WANTED, python_path="/no/python3.11")}, "--python is"),
        (
            {"place_named": True, "wanted": replace(WANTED, python_path="/no/python3.11")},
            "--env-dir and --python are",
        ),
        ({}, None),
        ({"wanted": replace(WANTED, python_path="/env/bin/python")}, None),
    ],
)
def test_what_is_asked_for_and_not_needed_is_told(
    place: Path, capsys: pytest.CaptureFixture[str], wishes: dict[str, Any], flags: str | None
) -> None:
    wanted = replace(wishes_for(place, replace(mac(1, 9), env_dir="/X"), mode="yes"), **wishes)
    assert run_init(wanted) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "kept" in line]
    text = f"  kept: /env/bin/python is there and has everything, so {flags} not used"
    assert said == ([] if flags is None else [text])


def test_an_environment_in_the_named_place_is_what_was_asked_for(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wishes = wishes_for(place, replace(mac(1, 9), env_dir="/env"), mode="yes")
    assert run_init(replace(wishes, place_named=True)) == 0
    assert "kept" not in capsys.readouterr().err


# --- the command ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "where"),
    [
        ("--hosts a,,b", "--hosts"),
        ("--hosts a --env-dir relative/place", "--env-dir"),
        ("--hosts a --hostfile none/hosts.json", "--hostfile"),
        ("--hosts a --python 2.7", "--python"),
        ("--hosts a --from nothing", "--from"),
    ],
)
def test_wrong_options_are_refused_before_anybody_is_asked(
    place: Path, arguments: str, where: str
) -> None:
    (place / "ssh").write_text(f"#!/bin/sh\ntouch {place}/asked\n")
    app = typer.Typer()
    app.command()(function_of("cluster.ClusterInit cluster_init:cluster_init"))
    with pytest.raises(ConfigError) as caught:
        app(arguments.split(), standalone_mode=False)
    assert (caught.value.where, bool(caught.value.hint)) == (where, True)
    assert not (place / "asked").exists()
