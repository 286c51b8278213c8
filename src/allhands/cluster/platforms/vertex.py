"""Vertex AI, and other platforms with TensorFlow's ``TF_CONFIG``: the replica that this process is,
and buckets as directories.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from allhands.cluster.place import (
    USUAL_PORT,
    Given,
    LaunchPlace,
    Paths,
    Platform,
    below,
    meeting_at,
    one_of_nodes,
    parse_object,
)
from allhands.errors import DistributedError
from allhands.io.strict_json import is_text, list_of

# By variable: the launcher, the roles that train, and the reason why others do not. Rank 0 is a
# replica of the first role that has replicas.
_CLUSTERS = {
    "CLUSTER_SPEC": (
        "vertex",
        ("workerpool0", "workerpool1"),
        "worker pools 2 and 3 are for Vertex's reduction servers and evaluators",
    ),
    "TF_CONFIG": (
        "tf_config",
        ("chief", "master", "worker"),
        "there are no parameter servers and evaluators here",
    ),
}
_DATA = {
    "train": "AIP_TRAINING_DATA_URI",
    "valid": "AIP_VALIDATION_DATA_URI",
    "test": "AIP_TEST_DATA_URI",
}
_OUTPUTS = ("AIP_MODEL_DIR", "AIP_CHECKPOINT_DIR", "AIP_TENSORBOARD_LOG_DIR")


def launch(given: Given) -> LaunchPlace | None:
    """Recognise a replica of a Vertex AI custom job, or of an operator that sets only TensorFlow's
    ``TF_CONFIG``.

    Raises:
        DistributedError: this process has a role that does not train, or the variable is not
            understood.
    """
    if (variable := given.first(*_CLUSTERS)) is None:
        return None
    launcher, training, others = _CLUSTERS[variable]
    content = parse_object(given.env[variable], variable)
    cluster, task = content.get("cluster"), content.get("task")
    if variable == "TF_CONFIG" and not cluster:
        return None  # some tools set it like this for a single process
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise _odd(variable, "it has no cluster and task")
    addresses = _addresses(variable, cast("dict[str, Any]", cluster), training)
    asked = cast("dict[str, Any]", task)
    role, index = mine = str(asked.get("type")), asked.get("index", 0)
    if role not in training:
        raise DistributedError(
            f"this is {role} {index}, not one of those that train: {others}",
            code="replica-not-training",
            where=variable,
            hint=f"start allhands only in {' and '.join(training)}",
        )
    if mine not in addresses:
        raise _odd(variable, f"there is no {role} {index} in its cluster")
    rank, size, listed = list(addresses).index(mine), len(addresses), list(addresses.values())
    hosts = tuple(address.rpartition(":")[0] or address for address in listed)
    port = listed[0].rpartition(":")[2]
    first = int(port) if port.isdigit() and 0 < int(port) < 65536 else USUAL_PORT
    reason = f"computer {rank} of {size}: {role} {index} in {variable}"
    return one_of_nodes(
        given,
        LaunchPlace(launcher, rank, size, reason=reason, hosts=hosts),
        meeting_at(hosts[0], first, f"{launcher} {given.env.get('CLOUD_ML_JOB_ID', '')} {listed}"),
    )


def _addresses(
    variable: str, cluster: Mapping[str, Any], training: Sequence[str]
) -> dict[tuple[str, Any], str]:
    """Return the address of each replica that trains, by role and index, in the order of ranks.

    Raises:
        DistributedError: a role has no list of addresses.
    """
    found: dict[tuple[str, Any], str] = {}
    for role in training:
        listed: Any = cluster.get(role) or []
        if not list_of(is_text)(listed):
            raise _odd(variable, f"{role} is not a list of addresses")
        found |= {(role, index): one for index, one in enumerate(cast("list[str]", listed))}
    return found


def _odd(variable: str, what: str) -> DistributedError:
    return DistributedError(
        f"{variable} is not valid: {what}",
        code="variable-invalid",
        hint=f"correct or unset {variable}",
    )


def platform(given: Given) -> Platform | None:
    """Return Vertex AI's directories, which are mounted buckets; ``None`` elsewhere."""
    named = given.first("CLUSTER_SPEC", "CLOUD_ML_JOB_ID", "AIP_MODEL_DIR", "AIP_CHECKPOINT_DIR")
    if named is None:
        return None
    paths = {
        name: from_bucket(given.env[name], given.root)
        for name in (*_DATA.values(), *_OUTPUTS)
        if name in given.env
    }
    model, checkpoints, tensorboard = map(paths.get, _OUTPUTS)
    data = {channel: path for channel, name in _DATA.items() if (path := paths.get(name))}
    return Platform(
        "vertex",
        paths=Paths(data, model, checkpoints, tensorboard=tensorboard),
        why=(
            f"Vertex AI: {named}",
            *(f"{path}: {name}" for name, path in paths.items() if path),
        ),
        notes=tuple(
            f"{name} is {given.env[name]}, which is not mounted as files"
            for name, path in paths.items()
            if path is None
        ),
    )


def from_bucket(uri: str, root: Path = Path("/")) -> Path | None:
    """Return the path at which Vertex mounts ``uri``; ``None`` if it is not mounted.

    ``gs://bucket/path`` is mounted at ``/gcs/bucket/path``.
    """
    path = re.sub("^gs://", "/gcs/", uri)
    return below(root, path) if path.startswith("/") else None
