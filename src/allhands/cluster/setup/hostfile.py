"""The hostfile that set-up writes: MLX's JSON object, merged with an earlier one."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from allhands.cluster.hosts import read_hostfile
from allhands.cluster.setup.thunderbolt import Wiring
from allhands.errors import ConfigError
from allhands.io.files import write_whole

# Settings that a person may have chosen in an earlier hostfile.
_KEPT = ("slots", "envs")
_ORDER = ("ssh", "ips", "slots", "python", "cwd", "envs", "rdma")


def host_entry(ssh: str, ips: Sequence[str], slots: int, python: str, cwd: str) -> dict[str, Any]:
    """Return one computer as MLX's JSON object; ``ssh`` is the name that the person gave."""
    return {"ssh": ssh, "ips": list(ips), "slots": slots, "python": python, "cwd": cwd, "envs": []}


def compose(
    entries: Sequence[dict[str, Any]],
    wiring: Wiring | None = None,
    old: Mapping[str, Any] | None = None,
) -> str:
    """Return the text of a hostfile.

    Args:
        entries: the computers, made by :func:`host_entry`.
        wiring: replaces the addresses, and sets the order.
        old: the content of an earlier hostfile. Settings that a person may have chosen stay. Other
            hosts stay unless there are RDMA devices, which are counted by the hosts' places.
    """
    wired, earlier = wiring or Wiring(None, (), {}), old or {}
    found = {entry["ssh"]: dict(entry) for entry in entries}
    found = {name: found[name] for name in wired.hosts} | found
    for name, (ips, rdma) in wired.hosts.items():
        found[name] |= {"ips": ips} | ({"rdma": rdma} if rdma else {})
    backend = wired.backend or earlier.get("backend")
    content: dict[str, Any] = {"backend": backend} if backend else {}
    content["envs"] = [*dict.fromkeys((*_words(earlier.get("envs", [])), *wired.envs))]
    hosts = _merged(found, earlier).values()
    content["hosts"] = [{key: one[key] for key in _ORDER if key in one} for one in hosts]
    return json.dumps(content, indent=2) + "\n"


def _words(envs: Any) -> list[str]:
    """Return variables as ``NAME=value``."""
    if not isinstance(envs, dict):
        return envs
    return [f"{name}={value}" for name, value in cast("dict[str, Any]", envs).items()]


def _merged(found: dict[str, dict[str, Any]], old: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Merge the entries of an earlier hostfile."""
    earlier = {
        entry["ssh"]: dict(entry) for entry in cast("list[dict[str, Any]]", old.get("hosts", []))
    }
    for name, entry in found.items():
        entry |= {key: earlier.get(name, {}).get(key, entry[key]) for key in _KEPT}
    return found if any("rdma" in entry for entry in found.values()) else earlier | found


def names_in(text: str) -> list[str]:
    """Return the names of the computers in a hostfile that :func:`compose` has made."""
    return [entry["ssh"] for entry in json.loads(text)["hosts"]]


def read_old(path: Path) -> dict[str, Any] | None:
    """Read an earlier hostfile, of any form, as an object of MLX's form; ``None`` if there is none.

    Raises:
        ConfigError: it is not understood.
    """
    if not path.exists():
        return None
    hosts = read_hostfile(path)
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError:
        content = [
            {"ssh": host.ssh or host.name, "ips": list(host.ips), "slots": host.slots}
            for host in hosts
        ]
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {"hosts": content}


def write(path: Path, text: str) -> Path | None:
    """Write a hostfile, completely or not at all; return the path of the copy of an earlier one.

    Raises:
        StorageError: it cannot be written; the earlier one is unchanged.
    """
    kept: Path | None = None
    if path.exists():
        kept = path.with_name(f"{path.name}.bak")
        write_whole(kept, lambda place: shutil.copyfile(path, place))
    write_whole(path, lambda place: place.write_text(text, encoding="utf-8"))
    return kept


def check_output(path: Path) -> None:
    """Refuse a path at which no hostfile can be written.

    Raises:
        ConfigError: there is no such directory, or something else of that name.
    """
    if not path.parent.is_dir():
        raise ConfigError(
            f"{path.parent} is no directory",
            code="path-missing",
            where="--hostfile",
            hint="make it, or choose another one",
        )
    if path.exists() and not path.is_file():
        raise ConfigError(
            f"{path} is no file", code="place-taken", where="--hostfile", hint="choose another name"
        )
