"""The table of what was measured on this device, in the user's cache: one file for each device and version.

What is damaged, was made by another version or belongs to another device is left alone, and said; training then goes
by the rules of :mod:`allhands.kernels.selection`.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from allhands.io.files import make_directory, write_whole
from allhands.kernels import native
from allhands.kernels.fused import kernels
from allhands.kernels.selection import FORMS, FormTimes
from allhands.runtime.accelerator import Accelerator
from allhands.runtime.blas import cache_dir
from allhands.runtime.versions import version_of

Facts = dict[str, str | int]
_ROWS = TypeAdapter(list[FormTimes])
_FORMAT = 1


def missing_forms(accelerator: Accelerator, *, cpu_native: bool) -> frozenset[str]:
    """The forms of this kind of device that a process cannot compute; native ones are for ``cpu_native`` steps."""
    if accelerator.kind == "cpu":
        return frozenset() if cpu_native and native.available() else frozenset({"native"})
    return frozenset({"fused"}) if accelerator.kind == "cuda" and not kernels.available() else frozenset()


def device_facts(accelerator: Accelerator) -> Facts:
    """What a measurement holds for: the device as it is used here, the versions, and the forms that were compared."""
    return {
        "kind": accelerator.kind,
        "name": _processor() if accelerator.kind == "cpu" else accelerator.name,
        "cores": accelerator.cores if accelerator.kind == "cpu" else 0,
        "missing": " ".join(sorted(missing_forms(accelerator, cpu_native=True))),
        "allhands": version_of("allhands") or "",
        "mlx": version_of("mlx") or "",
        "forms": hashlib.sha256(repr(FORMS).encode()).hexdigest()[:16],
    }


def _processor() -> str:
    """The model of the processor, for people too."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else "processor"


def table_path(facts: Facts) -> Path:
    """The file of a device."""
    words = re.sub(r"[^a-z0-9]+", "-", str(facts["name"]).lower()).strip("-")[:40]
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:12]
    return cache_dir() / "choices" / f"{words}-{digest}.json"


def load_table(facts: Facts) -> tuple[list[FormTimes], str | None]:
    """What was measured on a device, and what a person should know if the file cannot be used."""
    path = table_path(facts)
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        return [], None
    except (OSError, ValueError) as error:
        return [], _notice(path, str(error).splitlines()[0])
    if not isinstance(content, dict) or content.get("format") != _FORMAT or content.get("device") != facts:
        return [], _notice(path, "it is of another device or version")
    try:
        return rows_of(content.get("measured")), None
    except ValueError:
        return [], _notice(path, "it is damaged")


def _notice(path: Path, reason: str) -> str:
    return f"{path} is not used: {reason}; `allhands bench kernels` makes it anew"


def save_table(facts: Facts, measured: Sequence[FormTimes]) -> Path:
    """Add ``measured`` to the table of a device, in place of what it says of the same problems.

    Raises:
        StorageError: it cannot be written.
    """
    before, _ = load_table(facts)
    rows = list({(each.problem, each.kind): each for each in (*before, *measured)}.values())
    path = table_path(facts)
    make_directory(path.parent, private=True)
    content = {"format": _FORMAT, "device": facts, "measured": as_rows(rows)}
    write_whole(path, lambda draft: draft.write_text(json.dumps(content, indent=1)), private=True)
    return path


def as_rows(measured: Sequence[FormTimes]) -> list[dict[str, Any]]:
    """As JSON values."""
    return _ROWS.dump_python(list(measured), mode="json")


def rows_of(values: Any) -> list[FormTimes]:
    """The reverse of :func:`as_rows`; forms that there are not are left out.

    Raises:
        ValueError: they are something else.
    """
    try:
        found = _ROWS.validate_python(values, strict=False)
    except ValidationError as error:
        raise ValueError("these are no measurements") from error
    known = [each for each in found if each.kind in FORMS.get(each.problem.name, {})]
    return [replace(each, ms=_possible(each.ms), least_ms=_possible(each.least_ms)) for each in known]


def _possible(times: Mapping[str, float]) -> dict[str, float]:
    return {form: ms for form, ms in times.items() if 0 < ms < math.inf}
