"""What set-up makes of what computers say: by the real scripts on this computer, and by recorded
words.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from allhands.cluster.hosts import Host
from allhands.cluster.setup.outcome import names_of
from allhands.cluster.setup.shell import CommandDone, Shell, identity_of, known_hosts_of
from allhands.cluster.setup.source import package_root
from allhands.cluster.setup.state import CannotSetUp, SetupHostState, SetupIdentity, SetupSource
from allhands.cluster.setup.survey import Surveyor, state_from, version_of, wanted_from
from allhands.errors import ConfigError
from allhands.runtime.versions import fingerprint

PRETENDED = '#!/bin/sh\nwhile [ "$1" != "--" ]; do shift; done\nshift 2\n%s\nexec /bin/sh -c "$*"\n'
SAID = (
    ("home", "/home/me"),
    ("system", "Linux"),
    ("driver", ""),
    ("place", "/home/me/env"),
    ("end", ""),
)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The account's directory on the other computer, which is this one behind a pretended ssh."""
    directory = tmp_path / "a home"
    directory.mkdir()
    program = tmp_path / "ssh"
    noise = "echo 'Welcome to node1, user 17'; echo 'mesg: ttyname failed' >&2"
    program.write_text(PRETENDED % f"{noise}; export HOME='{directory}'; cd")
    program.chmod(0o700)
    monkeypatch.setenv("ALLHANDS_SSH", str(program))
    return directory


@pytest.fixture
def few_pythons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the system's own: each that is found is run and asked what it can do."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")


def looked(
    place: str = "~/.allhands/env", cwd: str = "/no/such/place", *, candidates: tuple[str, ...] = ()
) -> SetupHostState:
    return Surveyor(place, Path(cwd), candidates).look_at(Shell(), Host("node1", "node1"))


def test_a_bare_computer(home: Path) -> None:
    state = looked()
    assert (state.name, state.ssh, state.home) == ("node1", "node1", str(home))
    assert (state.env_dir, state.place) == (f"{home}/.allhands/env", "absent")
    assert (state.cwd, state.cwd_exists) == (f"{home}/place", False)
    assert state.installed == ()
    versions = [one.version for one in state.pythons]
    assert versions == sorted(versions, key=lambda version: -version[1])
    for one in state.pythons:
        code = "import sys; print(*sys.version_info[:3])"
        said = subprocess.run(
            [one.path, "-c", code], capture_output=True, text=True, check=True
        ).stdout
        assert tuple(map(int, said.split())) == one.version
    assert state.facts is not None
    assert list(home.iterdir()) == []


def test_this_interpreter_as_a_candidate(home: Path) -> None:
    state = looked("/somewhere/env", str(home), candidates=("/no/such/python", sys.executable))
    (one,) = state.installed
    assert (one.python, one.version, one.problem) == (sys.executable, sys.version_info[:3], None)
    assert one.versions["allhands"]
    assert one.fingerprint == fingerprint(str(package_root()))
    assert (state.env_dir, state.cwd, state.cwd_exists) == ("/somewhere/env", str(home), True)


@pytest.mark.usefixtures("few_pythons")
@pytest.mark.parametrize(
    ("note", "inside", "expected"),
    [
        (None, None, "absent"),
        (None, [], "absent"),
        ("unfinished", None, "absent"),
        ("complete", ["pyvenv.cfg"], "complete"),
        ("unfinished", ["pyvenv.cfg"], "unfinished"),
        (None, ["pyvenv.cfg"], "foreign"),
        ("complete", ["precious"], "foreign"),
        (None, ["precious"], "foreign"),
    ],
)
def test_what_stands_at_the_place(
    home: Path, note: str | None, inside: list[str] | None, expected: str
) -> None:
    if inside is not None:
        (home / "env").mkdir()
        for name in inside:
            (home / "env" / name).touch()
    if note is not None:
        (home / "env.allhands").write_text(f"{note}\n")
    before = sorted(home.rglob("*"))
    assert looked("~/env").place == expected
    assert sorted(home.rglob("*")) == before


@pytest.mark.usefixtures("few_pythons")
def test_the_directory_below_home_is_that_below_the_other_home(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/root-of-mine")
    state = looked(cwd="/root-of-mine/projects/llm")
    assert (state.cwd, state.cwd_exists) == (f"{home}/projects/llm", False)
    (home / "projects" / "llm").mkdir(parents=True)
    assert looked(cwd="/root-of-mine/projects/llm").cwd_exists


@pytest.mark.usefixtures("few_pythons")
def test_a_directory_outside_of_home_is_found_where_it_was_made(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/root-of-mine")
    elsewhere = (
        tmp_path / "data disk" / "work"
    )  # not on the other computer: that is a directory of the same name
    state = looked(cwd=str(elsewhere))
    assert (state.cwd, state.cwd_exists) == (f"{home}/work", False)
    (home / "work").mkdir()
    state = looked(cwd=str(elsewhere))
    assert (state.cwd, state.cwd_exists) == (f"{home}/work", True)
    elsewhere.mkdir(parents=True)
    state = looked(cwd=str(elsewhere))
    assert (state.cwd, state.cwd_exists) == (str(elsewhere), True)


@pytest.mark.usefixtures("few_pythons")
def test_the_home_itself_is_the_other_home(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/root-of-mine")
    state = looked(cwd="/root-of-mine")
    assert (state.cwd, state.cwd_exists) == (str(home), True)


def test_pythons_are_told_with_what_they_can_do() -> None:
    lines = [
        *SAID,
        ("python", "3.11.2 no /usr/bin/python3.11"),
        ("python", "3.13.0 yes /opt/my pythons/python3.13"),
    ]
    lines += [("python", "3.8.1 yes /old"), ("has", "/a b/python"), ("uv", "/opt/uv")]
    state, others = state_from(SetupHostState("a", "a"), lines, Path("/work"))
    assert [(one.path, one.version, one.makes) for one in state.pythons] == [
        ("/opt/my pythons/python3.13", (3, 13, 0), True),
        ("/usr/bin/python3.11", (3, 11, 2), False),
    ]
    assert (state.uv, others, state.system, state.driver) == (
        "/opt/uv",
        ["/a b/python"],
        "Linux",
        "",
    )


def test_a_shell_that_stops_midway_is_no_answer() -> None:
    with pytest.raises(CannotSetUp) as caught:
        state_from(SetupHostState("a", "a"), SAID[:-1], Path("/work"))
    assert caught.value.code == "host-shell-unusable"


def test_a_computer_that_runs_no_commands(
    home: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\necho 'This account is \033[31mlocked.' >&2\nexit 1\n")
    with pytest.raises(CannotSetUp, match=r"does not run commands: This account is \[31mlocked\."):
        looked()


# --- ssh's own settings ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("/home/me/.ssh/known_hosts /home/me/.ssh/known_hosts2", "/home/me/.ssh/known_hosts"),
        ("~/.ssh/known_hosts", str(Path.home() / ".ssh" / "known_hosts")),
        ("/dev/null", None),
        ("none", None),
        ("/keys/%h", None),
        ("", None),
    ],
)
def test_where_host_keys_are_noted(value: str, expected: str | None) -> None:
    found = known_hosts_of({"userknownhostsfile": [value]})
    assert (str(found) if found else None) == expected


def test_the_persons_key(tmp_path: Path) -> None:
    rsa, ed25519, other = (tmp_path / name for name in ("id_rsa", "id_ed25519", "other"))
    usual = {"identityfile": [str(rsa), str(ed25519)]}
    assert identity_of(usual) == SetupIdentity(ed25519, False)
    assert identity_of({"identityfile": [str(other)]}) == SetupIdentity(other, False)
    # A private key without its public half is never written over.
    ed25519.touch()
    assert identity_of(usual) is None
    rsa.touch()
    rsa.with_name("id_rsa.pub").touch()
    assert identity_of(usual) == SetupIdentity(rsa, True)
    ed25519.with_name("id_ed25519.pub").touch()
    assert identity_of(usual) == SetupIdentity(ed25519, True)


@pytest.mark.parametrize(
    ("done", "said"),
    [
        (CommandDone(None), "no answer in time"),
        (CommandDone(3), "it ended with code 3"),
        (CommandDone(1, "out\n", "first\n\nlast\x1b[2J  \n\n"), "last[2J"),
        (CommandDone(1, "out\n"), "out"),
        (
            CommandDone(1, "", "ERROR: a\nERROR: no mlx==9\n\nnote: see the\nmanual"),
            "ERROR: no mlx==9",
        ),
        (
            CommandDone(2, "", "  \u00d7 No interpreter found\n  hint: look\n"),
            "\u00d7 No interpreter found",
        ),
    ],
)
def test_the_last_word_of_a_command(done: CommandDone, said: str) -> None:
    assert done.last_line == said


# --- what the person asks for ---------------------------------------------------------------------


def test_names_of_computers() -> None:
    assert names_of("node1, me@10.0.0.1 ,localhost") == ["node1", "me@10.0.0.1", "localhost"]


@pytest.mark.parametrize(
    "text", ["", "a,,b", "a,a", "localhost,127.0.0.1", "-oProxyCommand=x", "a;b"]
)
def test_what_are_no_names(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        names_of(text)
    assert caught.value.where == "--hosts"


def test_the_python_that_is_asked_for() -> None:
    source = SetupSource("1.0")
    own = sys.version_info[:2]
    assert wanted_from(source, None).python == own
    assert wanted_from(source, "3.12").python == (3, 12)
    assert wanted_from(source, "3.12").minor == "3.12"
    named = wanted_from(source, "/opt/bin/python3.13")
    assert (named.python, named.python_path) == ((3, 13), "/opt/bin/python3.13")
    assert wanted_from(source, "/opt/bin/python").python == own
    for text in ("python3", "3", "3.10", "2.7", "bin/python3.12", ""):
        with pytest.raises(ConfigError) as caught:
            wanted_from(source, text)
        assert caught.value.where == "--python"


def test_versions_are_numbers() -> None:
    assert version_of("3.11.2") == (3, 11, 2)
    assert version_of("3.14.0rc1") == (3, 14, 0)
