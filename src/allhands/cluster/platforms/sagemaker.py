"""SageMaker: the computers of a training job, and its directories below ``/opt/ml``.

Both are in the platform's files, and also in the variables of SageMaker's training toolkit if the
image has it.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from allhands.cluster.place import (
    Given,
    LaunchPlace,
    Paths,
    Platform,
    below,
    contradiction,
    meeting_at,
    one_of_nodes,
    parse_object,
)
from allhands.errors import DistributedError

_RESOURCES = "/opt/ml/input/config/resourceconfig.json"
_CHANNELS = "/opt/ml/input/config/inputdataconfig.json"
_PORT = 7777  # the port that SageMaker's own torchrun uses
_GRACE_S = 120.0


def launch(given: Given) -> LaunchPlace | None:
    """Recognise the one process that SageMaker starts on each computer of a training job.

    All hosts and the name of this one are in SageMaker's file or in the variables of its toolkit;
    if they are in both, these must agree. If MLX has CUDA, ``SM_NUM_GPUS`` of the toolkit sets the
    number of ranks on each.

    Raises:
        DistributedError: the file or the variables are not understood, or contradict each other.
    """
    found, text = list[tuple[list[str], str, str]](), given.read(_RESOURCES)
    if text is not None:
        content = parse_object(text, _RESOURCES)
        hosts = _names(_RESOURCES, content.get("hosts"))
        found.append((hosts, str(content.get("current_host", "")), _RESOURCES))
    variables = ("SM_HOSTS", "SM_CURRENT_HOST")
    if given.has(*variables) or (text is None and given.first(*variables)):
        hosts = _names("SM_HOSTS", given.env.get("SM_HOSTS"))
        found.append((hosts, given.env.get("SM_CURRENT_HOST", ""), " and ".join(variables)))
    if not found:
        return None
    hosts, current, source = found[0]
    if found[-1][:2] != (hosts, current):
        raise contradiction(
            "sagemaker", f"{given.shown(*variables)}, and {_RESOURCES} says something else"
        )
    names = ", ".join(hosts)
    if current not in hosts:
        raise contradiction(
            "sagemaker", f"this host is {current!r}, the hosts are {names} ({source})"
        )
    node, gpus = hosts.index(current), max(1, given.number("SM_NUM_GPUS", 1))
    ranks = gpus if given.has_cuda else 1
    note = (
        f"SM_NUM_GPUS={gpus}, but MLX here is a build without CUDA: pip install 'allhands[cuda13]'"
    )
    job = given.shown("TRAINING_JOB_NAME", "TRAINING_JOB_ARN") or " ".join(hosts)
    return one_of_nodes(
        given,
        LaunchPlace(
            "sagemaker",
            node,
            len(hosts),
            reason=f"computer {node} of {len(hosts)}: {current} of {names} in {source}",
            hosts=tuple(hosts),
            ranks_per_node=ranks,
            facts=(f"{gpus} ranks a computer: SM_NUM_GPUS",) * (ranks > 1),
            notes=(note,) * (gpus > ranks),
        ),
        meeting_at(hosts[0], _PORT, f"sagemaker {job}"),
    )


def _names(source: str, listed: Any) -> list[str]:
    """Return the names in a list or in its JSON, sorted.

    Raises:
        DistributedError: it is no list.
    """
    if isinstance(listed, str):
        with suppress(ValueError):
            listed = json.loads(listed)
    if not isinstance(listed, list):
        raise DistributedError(
            "there is no list of names",
            code="launcher-file-invalid",
            where=source,
            hint="correct or remove it",
        )
    return sorted(map(str, cast("list[Any]", listed)))


def platform(given: Given) -> Platform | None:
    """Return SageMaker's directories, failure file and deadline; ``None`` elsewhere.

    Raises:
        DistributedError: the data channels cannot be read, or one has a name that is no directory.
    """
    named = given.first("SM_CURRENT_HOST", "SM_HOSTS", "SM_MODEL_DIR")
    if named is None and given.read(_RESOURCES) is None:
        return None
    if source := given.first("SM_CHANNELS"):
        channels = _names(source, given.env[source])
    else:
        source = _CHANNELS
        channels = sorted(parse_object(given.read(source) or "{}", source))
    for name in channels:
        if not re.fullmatch(r"[A-Za-z0-9._-]+", name) or name in (".", ".."):
            raise DistributedError(
                f"{name!r} is not the name of a data channel",
                code="variable-invalid",
                hint="rename the channel of the job",
            )
    why = (
        f"SageMaker: {named or _RESOURCES}",
        f"{_GRACE_S:g} s from SIGTERM to SIGKILL: SageMaker's rule",
        *(f"data channels {', '.join(channels)}: {source}" for _ in channels[:1]),
    )

    def place(path: str, variable: str = "") -> Path:
        return below(given.root, given.env.get(variable, f"/opt/ml/{path}"))

    paths = Paths(
        {name: place(f"input/data/{name}", f"SM_CHANNEL_{name.upper()}") for name in channels},
        model=place("model", "SM_MODEL_DIR"),
        checkpoints=place("checkpoints"),
        output=place("output/data", "SM_OUTPUT_DATA_DIR"),
        config=place("input/config", "SM_INPUT_CONFIG_DIR"),
    )
    return Platform("sagemaker", _GRACE_S, place("output/failure"), paths, why=why)
