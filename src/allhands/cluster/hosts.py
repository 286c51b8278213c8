"""Computers of a job: read from a hostfile of ``mlx.launch`` or of MPI, and checked before use.

A hostfile may come from somebody else. So it may contain plain names, addresses, numbers, paths and
variables, and everything else is refused.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NoReturn, cast

import psutil

from allhands.errors import ConfigError
from allhands.io.files import make_directory, write_whole
from allhands.io.paths import meant

_MOST_SLOTS = 4096
_MOST_BYTES = 1 << 20
_KEYS = ("ssh", "ips", "rdma", "envs", "slots", "python", "cwd")
_BACKENDS = ("ring", "mpi", "nccl", "jaccl", "jaccl-ring", "any", "")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,252}")
_USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_EXAMPLES = 'lines such as "node1 slots=2", or JSON such as [{"ssh": "node1", "ips": ["10.0.0.1"]}]'

Backend = Literal["ring", "mpi", "nccl", "jaccl"]
Rdma = str | tuple[str, ...] | None


@dataclass(frozen=True)
class Host:
    """One computer.

    Attributes:
        name: name in messages.
        ssh: argument for ssh, such as ``"user@node1"``; ``None`` for this computer.
        ips: addresses of the computer; if empty, its name is looked up.
        slots: highest number of ranks on the computer.
        python: path of the Python there that has allhands; ``None``: the same path as here.
        cwd: working directory there; ``None``: the same path as here or, if that does not exist,
            the directory of :func:`below_home`.
        envs: further environment variables for its ranks.
        rdma: JACCL's names of its devices, one for each host of the file.
    """

    name: str
    ssh: str | None = None
    ips: tuple[str, ...] = ()
    slots: int = 1
    python: str | None = None
    cwd: str | None = None
    envs: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    rdma: tuple[Rdma, ...] = ()


HERE = Host("localhost")


def read_hostfile(path: str | Path) -> tuple[Host, ...]:
    """Read a hostfile: the JSON of MLX or the lines of MPI.

    A host that is named more than once appears once, at its first place, with the sum of its slots.
    ``localhost``, ``127.0.0.1`` and this computer's own name and addresses mean this computer,
    which needs no ssh.

    Raises:
        ConfigError: the file cannot be read, or something in it is not understood; the error names
            the line if it is known.
    """
    text = _read(Path(path))
    hosts = _from_json(text, str(path)) if _is_json(text) else _from_lines(text, str(path))
    if not hosts:
        _refuse(str(path), "the hostfile names no host", f"write {_EXAMPLES}")
    return tuple(hosts)


def write_hosts(names: str, path: Path) -> Path:
    """Write the hostfile for ``names``, such as ``"node1,node2:2"``: names or addresses, with or
    without slots.

    As with any hostfile, users may add computers to it while the job runs.

    Raises:
        ConfigError: the names are not understood, or one is given twice.
        StorageError: the file cannot be written.
    """
    text = _lines_of(names)
    make_directory(path.parent, private=True)
    write_whole(path, lambda draft: draft.write_text(text, encoding="utf-8"), private=True)
    return path


def hosts_named(names: str | None, hostfile: str | Path | None) -> tuple[Host, ...]:
    """Return the computers of ``--hostfile`` or of ``--hosts``; empty if neither is given.

    Args:
        names: as in :func:`write_hosts`.

    Raises:
        ConfigError: both are given; or as in :func:`read_hostfile` and :func:`write_hosts`.
    """
    if names and hostfile:
        _refuse(
            "--hostfile, --hosts",
            "the computers are named twice",
            "give one of the two",
            code="options-conflict",
        )
    if hostfile:
        return read_hostfile(hostfile)
    return tuple(_from_lines(_lines_of(names), "--hosts")) if names else ()


def chosen_hosts(names: str | None, hostfile: str | Path | None) -> tuple[Host, ...]:
    """Return the computers as :func:`hosts_named` does, but require at least one.

    Raises:
        ConfigError: no computer is named; or as in :func:`hosts_named`.
    """
    found = hosts_named(names, hostfile)
    if not found:
        _refuse(
            "--hostfile, --hosts",
            "the computers are not named",
            "give --hostfile hosts.json, or --hosts node1,node2",
            code="option-missing",
        )
    return found


def _lines_of(names: str) -> str:
    where = "--hosts"
    lines: dict[str, str] = {}
    words = [part.strip() for part in names.split(",")]
    if not any(words):
        _refuse(where, "it names no host", "write --hosts node1,node2", code="value-empty")
    for word in words:
        name, slots = _split_slots(word)
        if not word:
            _refuse(
                where,
                "a name is missing beside a comma",
                "write --hosts node1,node2",
                code="value-invalid",
            )
        host_from_name(name, where)
        if name in lines:
            _refuse(
                where,
                f"{name} is given twice",
                f"write {name}:2 for two ranks on it",
                code="host-given-twice",
            )
        lines[name] = name if slots is None else f"{name} slots={_slots(slots, word, where)}"
    return "".join(f"{line}\n" for line in lines.values())


def hostfile_backend(path: str | Path) -> Backend | None:
    """Return the back-end that a hostfile in MLX's JSON names, or ``None``.

    Raises:
        ConfigError: the file cannot be read, is not JSON, or names an unknown back-end.
    """
    text = _read(Path(path))
    content = _parse(text, str(path)) if _is_json(text) else None
    backend: Any = content.get("backend") if isinstance(content, dict) else None
    if backend not in (None, *_BACKENDS):
        _refuse(f"{path}", f"backend is {_shown(backend)}", "use ring, mpi, nccl or jaccl")
    # The devices show whether the cables form a ring or connect each pair of computers.
    backend = "jaccl" if backend == "jaccl-ring" else backend
    return None if backend in (None, "", "any") else cast(Backend, backend)


def host_from_name(name: str, where: str | None = None) -> Host:
    """Return the host with this ``name``: a name or address, with or without ``user@`` before it.

    Raises:
        ConfigError: this cannot be the name of a host.
    """
    user, at, bare = name.rpartition("@")
    if bracketed := re.fullmatch(r"\[(.*)\]", bare):
        bare = bracketed[1]
    address = _as_address(bare)
    if (at and not _USER.fullmatch(user)) or (address is None and not _NAME.fullmatch(bare)):
        hint = "give a name or address, such as node1 or user@10.0.0.1; ports and other options go to ~/.ssh/config"
        if re.fullmatch(r"[^:]+:\d+", bare):
            hint = (
                "the number of its ranks belongs in the hostfile (slots), or in --hosts of allhands train; "
                + hint
            )
        _refuse(where, f"{_shown(name)} is not the name of a host", hint, code="host-name-invalid")
    ssh = None if not at and is_here(bare) else f"{user}{at}{bare}"
    return Host(ssh or bare, ssh, () if address is None or _is_loopback(address) else (address,))


def below_home(cwd: Path) -> str:
    """Return the directory that a computer without ``cwd`` uses, as a path below its home.

    ``cluster init`` makes this directory. It is ``cwd`` relative to the home here, or only the last
    part of ``cwd`` if that is not below home.
    """
    with suppress(ValueError):
        return str(cwd.relative_to(Path.home()))
    return cwd.name


def is_here(name: str) -> bool:
    """Return whether ``name`` is a name or address of this computer; asks no name server."""
    if (address := _as_address(name)) is not None:
        own = {entry.address for entries in psutil.net_if_addrs().values() for entry in entries}
        return _is_loopback(address) or address in own
    own_name = socket.gethostname().lower()
    return name.lower() in ("localhost", own_name, own_name.partition(".")[0])


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _read(path: Path) -> str:
    hint = f"give the path of a file with {_EXAMPLES}"
    try:
        with path.open("rb") as stream:
            content = stream.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            _refuse(str(path), "the hostfile is larger than 1 MB", hint)
        return content.decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text in UTF-8"
        raise ConfigError(
            f"the hostfile cannot be read: {reason}",
            code="hostfile-unreadable",
            where=str(path),
            hint=meant(path, hint, read_hostfile),
        ) from None


def _is_json(text: str) -> bool:
    # An MPI line may begin with an IPv6 address in brackets.
    return text.lstrip()[:1] in ("[", "{") and not re.match(r"\s*\[[0-9a-fA-F]*:", text)


# --- MPI's lines ----------------------------------------------------------------------------------


def _from_lines(text: str, path: str) -> list[Host]:
    found: list[Host] = []
    for number, line in enumerate(text.split("\n"), 1):
        words = line.partition("#")[0].split()
        if words:
            found.append(_from_words(words, f"{path}:{number}"))
    return _merged(found)


def _from_words(words: list[str], where: str) -> Host:
    name, *options = words
    name, colon_slots = _split_slots(name)
    values = dict[str, str]() if colon_slots is None else {"slots": colon_slots}
    for option in options:
        key, equals, value = option.partition("=")
        key = key.replace("-", "_")
        if not equals or key not in ("slots", "max_slots") or key in values:
            hint = "a line is 'name slots=N' or 'name:N'; for more about a host write the hostfile as JSON"
            _refuse(where, f"{_shown(option)} is not understood", hint)
        values[key] = value
    numbers = {key: _slots(value, f"{key}={value}", where) for key, value in values.items()}
    slots = numbers.get("slots", numbers.get("max_slots", 1))
    return replace(host_from_name(name, where), slots=min(slots, numbers.get("max_slots", slots)))


def _split_slots(word: str) -> tuple[str, str | None]:
    """Split ``node1:4`` into name and slots; an IPv6 address with slots must be in brackets."""
    name, colon, number = word.rpartition(":")
    if not colon or _as_address(word.rpartition("@")[2]) or word.endswith("]"):
        return word, None
    return name, number


def _slots(value: object, text: str, where: str) -> int:
    if isinstance(value, str) and value.isascii() and value.isdigit() and len(value) <= 8:
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MOST_SLOTS:
        _refuse(
            where,
            f"{_shown(text)}: not a number of ranks from 1 to {_MOST_SLOTS}",
            "give the number of its ranks",
            code="value-out-of-range",
        )
    return value


# --- MLX's JSON -----------------------------------------------------------------------------------


def _from_json(text: str, path: str) -> list[Host]:
    content = _parse(text, path)
    common: dict[str, str] = {}
    entries: Any = content
    if isinstance(content, dict):
        unknown = sorted(set(content) - {"hosts", "envs", "backend"})
        if unknown or "hosts" not in content:
            what = f"{_shown(unknown[0])} is not understood" if unknown else '"hosts" is missing'
            _refuse(path, what, 'an object holds "hosts", "envs" and "backend"')
        common = _variables(content.get("envs", []), path)
        entries = content["hosts"]
    if not isinstance(entries, list):
        _refuse(path, "the hosts are not a list", f"write {_EXAMPLES}")
    listed = cast(list[Any], entries)
    for number, entry in enumerate(listed, 1):
        if not isinstance(entry, dict):
            what = f"entry {number} of the list of hosts, {_shown(entry)}, is not an object"
            _refuse(path, what, 'write {"ssh": "node1", "ips": ["10.0.0.1"]}')
    lines = _lines_of_hosts(text)
    found: list[Host] = []
    for index, entry in enumerate(listed):
        where = f"{path}:{lines[index]}" if len(lines) == len(listed) else path
        found.append(_from_entry(entry, common, where, f"host {index + 1}"))
    return _merged(found)


def _parse(text: str, path: str) -> dict[str, Any] | list[Any] | str | float | None:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) < len(pairs):
            _refuse(path, "a key is given twice in one object", "remove one of the two")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        _refuse(f"{path}:{error.lineno}", f"not JSON: {error.msg}", f"write {_EXAMPLES}")
    except (RecursionError, ValueError):
        _refuse(path, "not a list of hosts", f"write {_EXAMPLES}")


def _lines_of_hosts(text: str) -> list[int]:
    """Return the line on which each object of the list of hosts begins."""
    lines: list[int] = []
    depth = ""
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"|[\[\]{}]', text, re.DOTALL):
        mark = found.group()
        if mark == "{" and depth in ("[", "{["):
            lines.append(text.count("\n", 0, found.start()) + 1)
        depth = depth + mark if mark in "[{" else depth[:-1] if mark in "]}" else depth
    return lines


def _from_entry(
    values: Mapping[str, Any], common: Mapping[str, str], where: str, which: str
) -> Host:
    if unknown := sorted(set(values) - set(_KEYS)):
        _refuse(
            where, f"{_shown(unknown[0])} is not understood", f"a host may have {', '.join(_KEYS)}"
        )
    if not isinstance(values.get("ssh"), str):
        _refuse(
            where,
            f'{which} has no "ssh" with its name',
            'write {"ssh": "node1", "ips": ["10.0.0.1"]}',
        )
    host = host_from_name(values["ssh"], where)
    return replace(
        host,
        ips=tuple(_ip(ip, where) for ip in _list(values, "ips", where)) or host.ips,
        slots=_slots(values.get("slots", 1), f"slots: {values.get('slots')}", where),
        python=_path(values, "python", where),
        cwd=_path(values, "cwd", where),
        envs={**common, **_variables(values.get("envs", []), where)},
        rdma=tuple(_rdma(device, where) for device in _list(values, "rdma", where)),
    )


def _list(values: Mapping[str, Any], key: str, where: str) -> list[Any]:
    found: object = values.get(key) or []
    if not isinstance(found, list):
        _refuse(where, f'"{key}" is not a list', f'write "{key}": [...]')
    return cast(list[Any], found)


def _ip(value: object, where: str) -> str:
    address = _as_address(value) if isinstance(value, str) else None
    if address is None:
        _refuse(
            where,
            f"{_shown(value)} is not an IP address",
            'write "ips": ["10.0.0.1"], or leave ips out',
        )
    return address


def _path(values: Mapping[str, Any], key: str, where: str) -> str | None:
    value = values.get(key)
    if value is None:
        return None
    if not isinstance(value, str) or not value or value.startswith("-") or not value.isprintable():
        _refuse(
            where, f'"{key}" is {_shown(value)}, which is not a path', "give the path on that host"
        )
    return value


def _variables(value: object, where: str) -> dict[str, str]:
    """Return the variables of ``["NAME=value", ...]``, which is MLX's form, or of an object."""
    if isinstance(value, dict):
        pairs: Iterable[tuple[object, object]] = cast(dict[str, object], value).items()
    elif isinstance(value, list):
        texts = [str(item) for item in cast(list[object], value)]
        pairs = [
            (name, content if equals else None)
            for name, equals, content in (t.partition("=") for t in texts)
        ]
    else:
        pairs = [(value, None)]
    found: dict[str, str] = {}
    for name, content in pairs:
        good = isinstance(name, str) and _VARIABLE.fullmatch(name)
        if not good or not isinstance(content, str) or "\0" in content:
            # The value is not printed, because it may be a secret.
            _refuse(
                where,
                f"envs: {_shown(name)} is not a variable with a value",
                'write "envs": ["NAME=value"]',
            )
        found[cast(str, name)] = content
    return found


def _rdma(value: object, where: str) -> Rdma:
    shown = _shown(value)
    devices = cast(list[object], value) if isinstance(value, list) else [value]
    names = [device for device in devices if isinstance(device, str) and _NAME.fullmatch(device)]
    if value is not None and len(names) < len(devices):
        _refuse(
            where,
            f"rdma: {shown} is not the name of a device",
            "write null, a name or a list of names",
        )
    return tuple(names) if isinstance(value, list) else cast("str | None", value)


# --- both -----------------------------------------------------------------------------------------


def _merged(hosts: Iterable[Host]) -> list[Host]:
    found: dict[str | None, Host] = {}
    for host in hosts:
        known = found.get(host.ssh)
        if known is None:
            found[host.ssh] = host
            continue
        ips = (*known.ips, *(ip for ip in host.ips if ip not in known.ips))
        found[host.ssh] = replace(
            known, slots=known.slots + host.slots, ips=ips, envs={**known.envs, **host.envs}
        )
    return list(found.values())


def _as_address(text: str) -> str | None:
    """Return an address in its usual form; ``None`` if ``text`` is not an address, but a name.

    An IPv6 address keeps its interface if it names one.
    """
    bare, percent, interface = text.partition("%")
    if percent and not _NAME.fullmatch(interface):
        return None
    try:
        address = ipaddress.ip_address(bare)
    except ValueError:
        return None
    return (
        f"{address}{percent}{interface}"
        if address.version == 6
        else None
        if percent
        else str(address)
    )


def _shown(value: object) -> str:
    """Return a value of the file as text that is safe for a terminal and not too long."""
    text = ascii(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _refuse(
    where: str | None, message: str, hint: str, *, code: str = "hostfile-invalid"
) -> NoReturn:
    raise ConfigError(message, code=code, where=where, hint=hint)
