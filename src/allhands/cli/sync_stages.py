"""``allhands cluster sync --stages``: to each computer those files of weights alone that its stages need."""

from __future__ import annotations

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from allhands.errors import ConfigError
from allhands.io.files import write_whole
from allhands.model.weight_files import LIST_FILE, names_by_file, needed, present
from allhands.runtime.blas import cache_dir
from allhands.runtime.without_torch import leave_torch_out

if TYPE_CHECKING:
    from allhands.cluster.hosts import Host
    from allhands.cluster.sync import HostState, Plan, SyncOptions, SyncState
    from allhands.cluster.sync.plan import FoundFiles
    from allhands.cluster.sync.run import Show
    from allhands.config.schema import TrainConfig


@dataclass(frozen=True)
class StagesWanted:
    """Which pipeline the files are for, as training's options of the same names have it."""

    pp_split: str = "auto"
    pp_schedule: str = "1f1b"
    pp: int | None = None

    def config(self) -> TrainConfig:
        """Training's options."""
        from allhands.config.schema import build_config

        return build_config({"strategy": "pipeline", **asdict(self)})


def synchronise_stages(
    plan: Plan, model: Path, wanted: StagesWanted, hosts: Sequence[Host], options: SyncOptions, show: Show
) -> SyncState:
    """Bring the files of ``plan`` to every host, but of the weights in ``model`` only what its stages need.

    Hosts with the same stages feed each other; what all need goes from host to host.

    Raises:
        AllhandsError: as :func:`~allhands.cluster.sync.synchronise`, or the model cannot be divided so.
    """
    from allhands.cluster.sync import synchronise

    model = Path(os.path.abspath(model.expanduser()))
    names = names_by_file(model)
    needs = _needs(model, names, wanted, hosts)
    weights = {file.path: file for file in plan.files if file.path.parent == model and file.path.name in names}
    lists = [] if all(len(each) == len(names) for each in needs.values()) else [_list_of(model, weights)]
    to_all = set(names).intersection(*map(set, needs.values()))
    shared = [file for file in plan.files if file.path not in weights or file.path.name in to_all]
    shared = [file for file in shared if file.parts[-1] != LIST_FILE or file.path.parent != model]
    notes = [*plan.notes, *_told(needs, len(names))]
    state = synchronise(replace(plan, files=(*shared, *lists), notes=tuple(notes)), hosts, options, show)
    groups: defaultdict[tuple[str, ...], list[Host]] = defaultdict(list)
    failed = {host.name for host in state.hosts if host.state == "failed"}
    for host in hosts:
        own = tuple(sorted(set(needs[host.name]) - to_all))
        if own and host.ssh is not None and host.name not in failed:
            groups[own].append(host)
    for own, members in groups.items():
        files = tuple(file for file in weights.values() if file.path.name in own)
        _add(state, synchronise(replace(plan, files=files, notes=()), members, options, show))
    return state


def _needs(
    model: Path, names: Mapping[str, list[str]], wanted: StagesWanted, hosts: Sequence[Host]
) -> dict[str, dict[str, list[str]]]:
    """For each host the files that its ranks' stages need, and what of each."""
    leave_torch_out()
    from allhands.distributed.mesh import Mesh
    from allhands.model.load import build
    from allhands.model.stages import blocks_of_stages, check_cut
    from allhands.run.dividing import split_given
    from allhands.run.piping import piped

    built, _ = build(model, trust_remote_code=False)
    check_cut(built)
    config = wanted.config()
    mesh = piped(config, Mesh(size=sum(host.slots for host in hosts)))
    split = split_given(config, len(cast("Any", built).layers), mesh.pipe)
    if not split:
        raise ConfigError(
            "which blocks each computer has is measured by a run, and not known before",
            where="--stages",
            hint="say it: --pp-split 20,12, say, and the same to the run (allhands plan proposes one)",
        )
    stages = blocks_of_stages(split)
    found: dict[str, dict[str, list[str]]] = {}
    rank = 0
    for host in hosts:
        ranks = range(rank, rank + host.slots)
        parts = [part for each in ranks for part in stages[mesh.coordinates(each).pipe :: mesh.pipe]]
        found[host.name] = needed(names, parts)
        rank += host.slots
    return found


def _list_of(model: Path, weights: Mapping[Path, FoundFiles]) -> FoundFiles:
    """The list of all files, for those who get some; made once for a model as it is."""
    from allhands.model.reading import list_of_files

    files = present(model)
    key = json.dumps([str(model), *((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)])
    path = cache_dir() / "weight-lists" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {name: asdict(each) for name, each in list_of_files(files).items()}
        write_whole(path, lambda draft: draft.write_text(json.dumps(content), encoding="utf-8"))
    beside = next(iter(weights.values()))
    return replace(beside, path=path, parts=(*beside.parts[:-1], LIST_FILE))


def _told(needs: Mapping[str, Mapping[str, Sequence[str]]], count: int) -> list[str]:
    """For each host what its files are for."""
    return [
        f"{host}: {len(files)} of {count} files of weights, for {_joined(files.values())}"
        for host, files in needs.items()
    ]


def _joined(what: Any) -> str:
    return "; ".join(dict.fromkeys(", ".join(each) for each in what))


def _add(state: SyncState, more: SyncState) -> None:
    """Count what was done after the rest to some of the hosts."""
    known = {name: number for number, name in enumerate(state.names)}
    new = [number for number, name in enumerate(more.names) if name not in known]
    if more.sizes:
        state.names += tuple(more.names[number] for number in new)
        state.sizes += tuple(more.sizes[number] for number in new)
        state.total += sum(more.sizes[number] for number in new)
    state.sent += more.sent
    state.seconds += more.seconds
    state.notes += more.notes
    state.withdrawn += more.withdrawn
    hosts: dict[str, HostState] = {host.name: host for host in state.hosts}
    for host in more.hosts:
        own = hosts[host.name]
        own.needed, own.received, own.sent = (
            own.needed + host.needed,
            own.received + host.received,
            own.sent + host.sent,
        )
        own.lacking += tuple(state.names.index(more.names[number]) for number in host.lacking)
        own.paths += host.paths
        own.state, own.error, own.parent = host.state, host.error or own.error, host.parent or own.parent
        own.done_s = None if host.done_s is None else state.seconds


def wanted_stages(
    stages: bool, pp_split: str | None, content: Mapping[str, Any], model: str | None
) -> StagesWanted | None:
    """What the options ask for, with those of the configuration; ``None``: all files to everybody.

    Raises:
        ConfigError: options that have no effect.
    """
    if not stages:
        if pp_split is not None:
            raise ConfigError("a split alone brings no less", where="--pp-split", hint="add --stages")
        return None
    if model is None:
        raise ConfigError("there is no model to divide", where="--stages", hint="add --model")
    given = {name: content[name] for name in ("pp", "pp_split", "pp_schedule") if content.get(name) is not None}
    return replace(StagesWanted(**given), **({} if pp_split is None else {"pp_split": pp_split}))
