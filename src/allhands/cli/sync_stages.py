"""``allhands cluster sync --stages``: copy to each computer only the weight files of its stages."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from allhands.cli.parser import refuse_idle
from allhands.config.schema import TrainConfig, build_config
from allhands.distributed.mesh import Mesh
from allhands.errors import ConfigError
from allhands.io.files import write_whole
from allhands.io.formatting import counted
from allhands.model.weight_files import LIST_FILE, names_by_file, needed, present
from allhands.runtime.blas import cache_dir
from allhands.runtime.without_torch import leave_torch_out

if TYPE_CHECKING:
    from allhands.cluster.hosts import Host
    from allhands.cluster.sync.plan import FoundFile, SyncPlan


@dataclass(frozen=True)
class StagesWanted:
    """The pipeline for which the files are copied; its fields are options of a training."""

    pp_split: str = "auto"
    pp_schedule: str = "1f1b"
    pp: int | None = None

    def config(self) -> TrainConfig:
        """Return the configuration of a training with this pipeline."""
        return build_config({"strategy": "pipeline", **asdict(self)})


def plan_stages(
    plan: SyncPlan, model: Path, wanted: StagesWanted, hosts: Sequence[Host]
) -> tuple[SyncPlan, dict[str, list[FoundFile]]]:
    """Divide the weight files of ``model`` among the hosts; each gets only the files of its stages.

    Returns:
        The plan with notes on this, and the files for each host by its name.

    Raises:
        AllhandsError: the model cannot be divided in this way.
    """
    model = Path(os.path.abspath(model.expanduser()))
    names = names_by_file(model)
    needs = _needs(model, names, wanted, hosts)
    weights = [file for file in plan.files if file.path.parent == model and file.path.name in names]
    others = [file for file in plan.files if file not in weights and file.path != model / LIST_FILE]
    if any(len(files) < len(names) for files in needs.values()):
        others.append(_list_of(model, weights[0]))
    notes = [
        f"{host}: {len(files)} of {counted(len(names), 'file')} of weights, for {_joined(files.values())}"
        for host, files in needs.items()
    ]
    files = {
        host: [*others, *(file for file in weights if file.path.name in own)]
        for host, own in needs.items()
    }
    return replace(plan, files=(*others, *weights), notes=(*plan.notes, *notes)), files


def _needs(
    model: Path, names: Mapping[str, list[str]], wanted: StagesWanted, hosts: Sequence[Host]
) -> dict[str, dict[str, list[str]]]:
    """Return the weight files of each host's stages, and the parts of the model that need each
    file.
    """
    leave_torch_out()
    from allhands.model.divisible import split_given
    from allhands.model.load import build
    from allhands.model.stages import blocks_of_stages, check_cut
    from allhands.run.piping import piped

    built, _ = build(model, trust_remote_code=False)
    check_cut(built)
    config = wanted.config()
    mesh = piped(config, Mesh(size=sum(host.slots for host in hosts)))
    split = split_given(config, len(cast("Any", built).layers), mesh.pipe)
    if not split:
        raise ConfigError(
            "a run measures which blocks each computer gets, so they are not known before",
            code="option-missing",
            where="--stages",
            hint="give the split, for example --pp-split 20,12, and give the run the same"
            " (allhands plan proposes one)",
        )
    stages = blocks_of_stages(split)
    found: dict[str, dict[str, list[str]]] = {}
    rank = 0
    for host in hosts:
        ranks = range(rank, rank + host.slots)
        parts = [
            part for each in ranks for part in stages[mesh.coordinates(each).pipe :: mesh.pipe]
        ]
        found[host.name] = needed(names, parts)
        rank += host.slots
    return found


def _list_of(model: Path, beside: FoundFile) -> FoundFile:
    """Return a file with the list of all weight files, for hosts that get a part of them.

    It is kept in the cache.
    """
    from allhands.model.reading import list_of_files

    files = present(model)
    key = json.dumps(
        [str(model), *((file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files)]
    )
    path = cache_dir() / "weight-lists" / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
    if not path.is_file():
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {name: asdict(each) for name, each in list_of_files(files).items()}
        write_whole(path, lambda draft: draft.write_text(json.dumps(content), encoding="utf-8"))
    return replace(beside, path=path, parts=(*beside.parts[:-1], LIST_FILE))


def _joined(what: Any) -> str:
    return "; ".join(dict.fromkeys(", ".join(each) for each in what))


def wanted_stages(
    stages: bool, pp_split: str | None, content: Mapping[str, Any], model: str | None
) -> StagesWanted | None:
    """Return the requested pipeline; ``None``: every host gets all files.

    Args:
        stages: True if ``--stages`` is given.
        content: the configuration file.

    Raises:
        ConfigError: an option has no effect, or there is no model.
    """
    if not stages:
        refuse_idle({"--pp-split": pp_split}, "without --stages", "add it")
        return None
    if model is None:
        raise ConfigError(
            "there is no model to divide",
            code="option-missing",
            where="--stages",
            hint="add --model",
        )
    given = {
        name: content[name]
        for name in ("pp", "pp_split", "pp_schedule")
        if content.get(name) is not None
    }
    return replace(StagesWanted(**given), **({} if pp_split is None else {"pp_split": pp_split}))
