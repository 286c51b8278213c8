"""The hostfile that set-up writes: MLX's JSON object, with what an earlier one says besides."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from allhands.cluster.hosts import read_hostfile
from allhands.cluster.setup.thunderbolt import Wiring
from allhands.errors import ConfigError
from allhands.io.files import write_whole

# What a person may have chosen in an earlier hostfile, and set-up has no better knowledge of.
_KEPT = ("slots", "envs")
_ORDER = ("ssh", "ips", "slots", "python", "cwd", "envs", "rdma")


@dataclass(frozen=True)
class HostEntry:
    """One computer, by the name that the person gave."""

    ssh: str
    ips: tuple[str, ...]
    slots: int
    python: str
    cwd: str

    def as_json(self) -> dict[str, Any]:
        """The object in MLX's form."""
        return {
            "ssh": self.ssh,
            "ips": list(self.ips),
            "slots": self.slots,
            "python": self.python,
            "cwd": self.cwd,
            "envs": [],
        }


def compose(entries: Sequence[HostEntry], wiring: Wiring | None = None, old: Mapping[str, Any] | None = None) -> str:
    """The text of a hostfile.

    Args:
        wiring: takes the place of the addresses, and says the order.
        old: an earlier one's content; what it says of hosts that are not set up, and what a person may have chosen
            for others, stays, but RDMA devices are counted by their places, so then other hosts do not.
    """
    found = {entry.ssh: entry.as_json() for entry in entries}
    envs: list[str] = []
    content: dict[str, Any] = {}
    if wiring is not None:
        found = {name: found[name] for name in wiring.hosts if name in found} | found
        for name, (ips, rdma) in wiring.hosts.items():
            found[name] |= {"ips": list(ips)} | ({"rdma": [_plain(one) for one in rdma]} if rdma else {})
        envs = list(wiring.envs)
        content |= {"backend": wiring.backend} if wiring.backend else {}
    if old is not None:
        found = _merged(found, old, keep_others=not any("rdma" in entry for entry in found.values()))
        content = {key: old[key] for key in ("backend",) if key in old} | content
        envs = [*dict.fromkeys((*_words(old.get("envs", [])), *envs))]
    content |= {"envs": envs, "hosts": [_ordered(entry) for entry in found.values()]}
    return json.dumps(content, indent=2) + "\n"


def names_in(text: str) -> list[str]:
    """The computers of what :func:`compose` has made."""
    return [entry["ssh"] for entry in json.loads(text)["hosts"]]


def read_old(path: Path) -> dict[str, Any] | None:
    """An earlier hostfile as an object of MLX's form, whatever its own; ``None`` if there is none.

    Raises:
        ConfigError: it is there, but is not understood.
    """
    if not path.exists():
        return None
    hosts = read_hostfile(path)
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8-sig"))
    except ValueError:
        content = [{"ssh": host.ssh or host.name, "ips": list(host.ips), "slots": host.slots} for host in hosts]
    return cast("dict[str, Any]", content) if isinstance(content, dict) else {"hosts": content}


def write(path: Path, text: str) -> Path | None:
    """Write it whole or not at all; return where an earlier one that differs is now.

    Raises:
        StorageError: it cannot be written; what was there is there still.
    """
    kept: Path | None = None
    if path.exists():
        kept = path.with_name(f"{path.name}.bak")
        write_whole(kept, lambda place: shutil.copyfile(path, place))
    write_whole(path, lambda place: place.write_text(text, encoding="utf-8"))
    return kept


def check_output(path: Path) -> None:
    """Refuse a place where no hostfile can be written, before anything else is done.

    Raises:
        ConfigError: there is no such directory, or something else of that name.
    """
    if not path.parent.is_dir():
        raise ConfigError(f"{path.parent} is no directory", where="--hostfile", hint="make it, or choose another one")
    if path.exists() and not path.is_file():
        raise ConfigError(f"{path} is no file", where="--hostfile", hint="choose another name")


def _merged(found: dict[str, dict[str, Any]], old: Mapping[str, Any], *, keep_others: bool) -> dict[str, Any]:
    earlier = {entry["ssh"]: dict(entry) for entry in cast("list[dict[str, Any]]", old.get("hosts", []))}
    merged = {
        name: entry | {key: earlier.get(name, {}).get(key, entry[key]) for key in _KEPT}
        for name, entry in found.items()
    }
    if not keep_others:
        return merged
    in_place = {name: merged.get(name, entry) for name, entry in earlier.items()}
    return in_place | merged


def _ordered(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {key: entry[key] for key in _ORDER if key in entry}


def _words(envs: Any) -> list[str]:
    return [f"{name}={value}" for name, value in envs.items()] if isinstance(envs, dict) else list(envs)


def _plain(device: Any) -> Any:
    return list(device) if isinstance(device, tuple) else device
