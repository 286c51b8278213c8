"""The shape in which the figures of every benchmark are kept, and what can be read out of it.

A record has ``name, date, time, commit, environment, settings, rows`` and, under ``details``, what
only its own benchmark understands. Nothing beyond Python's own library is imported here: see
``harness.py`` for why.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

OURS = "allhands"
RESULTS = Path(__file__).resolve().parent / "results"
Better = Literal["higher", "lower"]
# How often something was measured, and beside whom, does not change what was measured.
EFFORT = ("peers", "repeat", "rounds", "steps", "warmup", "mlx_lm_steps", "mlx_lm_warmup")
EFFORT += ("works", "methods", "kinds", "gpus", "scaling", "bucket_mb")  # the rows' names say these
_OWN = ("benchmark", "name", "date", "time", "commit", "machine", "versions", "settings", "rows")


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        name: what was measured; the same for everybody who is compared in it.
        who: ``"allhands"``, a variant of it (``"allhands, --compile off"``), or a peer.
        least: the lowest of the repeats; ``most`` the highest.
        ratios: how many times as good ours is as each peer: above 1 allhands is ahead, below 1 the
            peer is.
        work: what was computed, as :mod:`roofline` reads it.
    """

    name: str
    who: str
    unit: str
    median: float
    least: float
    most: float
    repeats: int
    better: Better
    ratios: dict[str, float] = field(default_factory=dict)
    work: dict[str, Any] | None = None

    @property
    def key(self) -> tuple[str, ...]:
        """Equal for the same figure in two records."""
        # Of chosen examples the mean length is a result, not a setting.
        work = {key: value for key, value in (self.work or {}).items() if key != "mean_length"}
        return self.name, self.who, self.unit, json.dumps(work, sort_keys=True)


def row_of(
    name: str, who: str, unit: str, values: Sequence[float], better: Better, **more: Any
) -> Row:
    """The row of one figure's repeats."""
    return Row(
        name,
        who,
        unit,
        statistics.median(values),
        min(values),
        max(values),
        len(values),
        better,
        **more,
    )


def is_ours(who: str) -> bool:
    """Whether it is allhands, in whatever variant."""
    return who == OURS or who.startswith((f"{OURS},", f"{OURS} ", f"{OURS}-"))


def with_ratios(rows: Iterable[Row]) -> list[Row]:
    """The rows, ours compared with every peer's of the same name."""
    every = list(rows)
    found: list[Row] = []
    for row in every:
        ratios = {
            peer.who: row.median / peer.median
            if row.better == "higher"
            else peer.median / row.median
            for peer in every
            if row.who == OURS
            and peer.name == row.name
            and not is_ours(peer.who)
            and row.median
            and peer.median
        }
        found.append(replace(row, ratios=ratios))
    return found


def rows_in(record: Mapping[str, Any]) -> list[Row]:
    """The rows of a record that was read."""
    return [Row(**row) for row in record["rows"]]


def work_rows(found: Mapping[str, Any]) -> list[Row]:
    """Rows of training steps: ``found["results"]`` has, by work and peer, ``tokens_per_s`` and
    ``step_s``.

    ``step_s`` has ``median``, ``best`` and ``worst``; ``peak_bytes`` and ``first_step_s`` may be
    there. A peer with an ``error`` has no rows. ``found["works"]`` describes each work,
    ``found["titles"]`` may name peers.
    """
    titles = found.get("titles", {})
    rows: list[Row] = []
    for work, peers in found["results"].items():
        about = found.get("works", {}).get(work)
        for peer, one in peers.items():
            if "error" in one:
                continue
            who, repeats, step = (
                titles.get(peer, peer),
                one.get("repeats", found.get("steps", 1)),
                one["step_s"],
            )
            speed, tokens = one["tokens_per_s"], one["tokens_per_s"] * step["median"]
            spread = (tokens / step["worst"], tokens / step["best"])
            rows.append(
                Row(
                    f"{work}: speed", who, "tokens/s", speed, *spread, repeats, "higher", work=about
                )
            )
            if one.get("peak_bytes"):
                rows.append(
                    row_of(
                        f"{work}: peak memory",
                        who,
                        "GB",
                        [one["peak_bytes"] / 1e9],
                        "lower",
                        work=about,
                    )
                )
            if "first_step_s" in one:
                rows.append(
                    row_of(
                        f"{work}: first step", who, "s", [one["first_step_s"]], "lower", work=about
                    )
                )
    return rows


def make_record(
    name: str, found: Mapping[str, Any], rows: Iterable[Row], time_of_day: str = ""
) -> dict[str, Any]:
    """What is written of what a benchmark has found (``date, commit, machine, versions, settings``
    and its own).
    """
    versions = found.get("versions", {})
    # Of one environment, or by the name of each.
    if any(isinstance(value, str) for value in versions.values()):
        versions = {OURS: versions}
    return {
        "name": name,
        "date": found["date"],
        "time": time_of_day,
        "commit": found["commit"],
        "environment": {"machine": found["machine"], "versions": versions},
        "settings": found.get("settings", {}),
        "rows": [_plain(row) for row in with_ratios(rows)],
        "details": {key: value for key, value in found.items() if key not in _OWN},
    }


def _plain(row: Row) -> dict[str, Any]:
    """Without what is empty, and figures with the digits that mean something."""
    values = asdict(row) | {key: _rounded(getattr(row, key)) for key in ("median", "least", "most")}
    values["ratios"] = {peer: _rounded(ratio, 4) for peer, ratio in row.ratios.items()}
    return {key: value for key, value in values.items() if key != "work" or value is not None}


def _rounded(value: float, digits: int = 6) -> float:
    # An instruction count has more digits, and all of them mean something.
    return value if isinstance(value, int) else float(f"{value:.{digits}g}")


# --- the machine ----------------------------------------------------------------------------------


def gpus_of(machine: Mapping[str, Any]) -> list[str]:
    """The GPUs' names and power limits; a record of one GPU may have only that one's."""
    alone = [machine["gpu"]] if machine.get("gpu") not in (None, "none") else []
    return list(machine.get("gpus") or alone)


def machine_of(record: Mapping[str, Any]) -> str:
    """A line that is the same for records that can be compared: memory and load do not count."""
    machine = record["environment"]["machine"]
    gpus = gpus_of(machine)
    cpu = f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}"
    return f"{len(gpus)} x {gpus[0]}, {cpu}" if gpus else cpu


def device_of(record: Mapping[str, Any]) -> str:
    """The one device that computes: a GPU's model, or the processor with its cores."""
    machine = record["environment"]["machine"]
    gpus = gpus_of(machine)
    return gpus[0].partition(",")[0] if gpus else f"{machine['cpu']}, {machine['cores']} cores"


def environment_lines(record: Mapping[str, Any]) -> list[str]:
    """What the figures were measured on and with."""
    machine, versions = record["environment"]["machine"], record["environment"]["versions"]
    changed = " with changes that are not committed" if record["commit"].endswith("+") else ""
    system = machine.get("os") or machine["system"]
    memory = f"{machine['memory_gib']} GiB, " if "memory_gib" in machine else ""
    load = f"; load {machine['load_at_start']} at the start" if "load_at_start" in machine else ""
    lines = [
        f"{record['name']}, {record['date']} {record['time']}".rstrip()
        + f", commit {record['commit']}{changed}",
        f"{machine['cpu']}, {machine['cores']} cores, {memory}{system}{load}",
    ]
    lines += [f"{len(gpus)} x {gpus[0]}" for gpus in [gpus_of(machine)] if gpus]
    return lines + [
        f"{name}: " + ", ".join(f"{package} {version}" for package, version in found.items())
        for name, found in versions.items()
        if found
    ]


# --- files ----------------------------------------------------------------------------------------


def results_directory() -> Path:
    """Where records are kept; ``ALLHANDS_BENCHMARK_RESULTS`` names another place."""
    return Path(os.environ.get("ALLHANDS_BENCHMARK_RESULTS") or RESULTS)


def write_record(record: Mapping[str, Any]) -> Path:
    """Write it to ``NAME-DATE.json``, ``NAME-DATE-2.json`` and so on; returns that.

    Measured again on one day, on the same machine and with the same code, it takes the old one's
    place.
    """
    directory = results_directory()
    directory.mkdir(parents=True, exist_ok=True)
    out = next(
        path
        for path in _places(directory, record)
        if not path.exists() or same(_read(path), record)
    )
    out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return out


def _places(directory: Path, record: Mapping[str, Any]) -> Iterator[Path]:
    stem = f"{record['name']}-{record['date']}"
    yield directory / f"{stem}.json"
    for number in itertools.count(2):
        yield directory / f"{stem}-{number}.json"


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def same(other: Mapping[str, Any], record: Mapping[str, Any]) -> bool:
    """Whether two records are of the same code, with the same settings, on such a machine."""
    told = [[machine_of(one), one["commit"], one["settings"]] for one in (other, record)]
    # What is not committed may differ.
    return told[0] == told[1] and not record["commit"].endswith("+")


def read_records(directory: Path) -> list[dict[str, Any]]:
    """All records in a directory, the oldest first."""
    return oldest_first(_read(path) for path in sorted(directory.glob("*.json")))


def oldest_first(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sorted by when they were made."""
    return sorted(records, key=lambda record: (record["date"], record["time"]))


def not_measured_since(records: Sequence[Mapping[str, Any]]) -> list[tuple[int, dict[str, Any]]]:
    """Of records of one benchmark and machine, the oldest first: what no later one has of the same
    work, each with its place among them.

    A run of some of a benchmark's works does not take the place of the others' figures.
    """
    found: list[tuple[int, dict[str, Any]]] = []
    seen = set[str]()
    for place in range(len(records) - 1, -1, -1):
        record = records[place]
        results = record["details"].get("results", {})
        works = dict.fromkeys(_work_of(name) for name in results) or {"": None}
        left = [work for work in works if work not in seen]
        if len(left) == len(works):
            found.append((place, dict(record)))
        elif left:
            rows = [row for row in record["rows"] if _work_of(row["name"]) in left]
            kept = {name: one for name, one in results.items() if _work_of(name) in left}
            found.append(
                (place, {**record, "rows": rows, "details": {**record["details"], "results": kept}})
            )
        seen.update(works)
    return found[::-1]


def _work_of(name: str) -> str:
    """The work that a result or a row is of, as ``full`` of ``full, 2 GPUs: speed``."""
    return re.split("[,:]", name, maxsplit=1)[0]
