"""The files that a sync shall copy: those of the options, and with ``--stages`` only the weight files
of each computer's stages.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

from allhands.cluster.hosts import Host
from allhands.cluster.sync.plan import FoundFile, SyncPlan, make_plan
from allhands.config.schema import build_config
from allhands.distributed.mesh import Mesh
from allhands.errors import ConfigError, DataError
from allhands.io.files import write_whole
from allhands.io.formatting import counted
from allhands.io.terminal import say
from allhands.model.weight_files import LIST_FILE, names_by_file, needed, present
from allhands.runtime.blas import cache_dir
from allhands.runtime.libraries import leave_torch_out


def plan_of(
    paths: Sequence[str],
    model: str | None,
    data: str | None,
    pipeline: Mapping[str, Any] | None,
    hosts: Sequence[Host],
) -> SyncPlan:
    """List the files to copy; a model that is not a directory is fetched to the cache first.

    Args:
        paths: further files and directories.
        pipeline: options of a training that divide the model's blocks; ``None``: every host gets
            all files.

    Raises:
        AllhandsError: a file does not exist, or the model cannot be divided in this way.
    """
    words = list(paths)
    if model is not None:
        model = _directory_of(model)
        words.append(model)
    if data is not None and data != "demo":  # the demo data are part of allhands
        if not Path(os.path.expanduser(data)).exists():
            raise DataError(  # training raises the same error
                "the data folder does not exist",
                code="data-missing",
                where=data,
                hint="check --data; nothing has been sent",
            )
        words.append(data)
    plan = make_plan(words)
    if pipeline is None or model is None:
        return plan
    return _plan_stages(plan, Path(model), pipeline, hosts)


def _plan_stages(
    plan: SyncPlan, model: Path, options: Mapping[str, Any], hosts: Sequence[Host]
) -> SyncPlan:
    """Divide the weight files of ``model`` among the hosts; each gets only the files of its stages.

    Raises:
        AllhandsError: the model cannot be divided in this way.
    """
    model = Path(os.path.abspath(model.expanduser()))
    names = names_by_file(model)
    needs = _needs(model, names, options, hosts)
    weights = [file for file in plan.files if file.path.parent == model and file.path.name in names]
    others = [file for file in plan.files if file not in weights and file.path != model / LIST_FILE]
    if any(len(files) < len(names) for files in needs.values()):
        others.append(_list_of(model, weights[0]))
    notes: list[str] = []
    for host, own in needs.items():
        parts = "; ".join(dict.fromkeys(map(", ".join, own.values())))
        notes.append(f"{host}: {len(own)} of {counted(len(names), 'file')} of weights, for {parts}")
    by_host = {
        host: [*others, *(file for file in weights if file.path.name in own)]
        for host, own in needs.items()
    }
    return SyncPlan((*others, *weights), (*plan.notes, *notes), by_host)


def _needs(
    model: Path, names: Mapping[str, list[str]], options: Mapping[str, Any], hosts: Sequence[Host]
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
    config = build_config({"strategy": "pipeline", **options})
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
    ranks = itertools.count()
    for host in hosts:
        places = [mesh.coordinates(rank).pipe for rank in itertools.islice(ranks, host.slots)]
        parts = [part for place in places for part in stages[place :: mesh.pipe]]
        found[host.name] = needed(names, parts)
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


def _directory_of(model: str) -> str:
    """Return the directory of a model; a model of another name is fetched to the cache first."""
    if model != "demo" and Path(os.path.expanduser(model)).is_dir():
        return model
    leave_torch_out()
    from allhands.model.sources import resolve

    return str(resolve(model, report=say).absolute())
