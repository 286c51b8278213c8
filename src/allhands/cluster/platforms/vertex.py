"""Vertex AI, and other platforms with TensorFlow's ``TF_CONFIG``: the replica that this process is,
and buckets as directories.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

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

_DATA = {
    "train": "AIP_TRAINING_DATA_URI",
    "valid": "AIP_VALIDATION_DATA_URI",
    "test": "AIP_TEST_DATA_URI",
}
_OUTPUTS = ("AIP_MODEL_DIR", "AIP_CHECKPOINT_DIR", "AIP_TENSORBOARD_LOG_DIR")


def launch(given: Given) -> LaunchPlace | None:
    """Recognise a replica of a Vertex AI custom job."""
    others = "worker pools 2 and 3 are for Vertex's reduction servers and evaluators"
    return _replica(given, "vertex", "CLUSTER_SPEC", ("workerpool0", "workerpool1"), others)


def tf_config(given: Given) -> LaunchPlace | None:
    """Recognise a replica of an operator that sets only TensorFlow's ``TF_CONFIG``."""
    others = "there are no parameter servers and evaluators here"
    return _replica(given, "tf_config", "TF_CONFIG", ("chief", "master", "worker"), others)


def _replica(
    given: Given, launcher: str, variable: str, training: Sequence[str], others: str
) -> LaunchPlace | None:
    """Return the place of this process among the replicas that train.

    Args:
        training: the roles that train; rank 0 is a replica of the first one that has replicas.
        others: says in an error what the other roles are for.

    Raises:
        DistributedError: this process has another role, or the variable is not understood.
    """
    if variable not in given.env:
        return None
    content = parse_object(given.env[variable], variable)
    cluster, task = content.get("cluster"), content.get("task")
    if variable == "TF_CONFIG" and not cluster:
        return None  # some tools set it like this for a single process
    if not isinstance(cluster, dict) or not isinstance(task, dict):
        raise _odd(variable, "it has no cluster and task")
    addresses = dict[tuple[str, Any], str]()  # by role and index, in the order of ranks
    for role in training:
        listed: Any = cluster.get(role) or []
        if not list_of(is_text)(listed):
            raise _odd(variable, f"{role} is not a list of addresses")
        addresses |= {(role, index): address for index, address in enumerate(listed)}
    role, index = mine = str(task.get("type")), task.get("index", 0)
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
    bucket = uri.removeprefix("gs://").strip("/")
    path = f"/gcs/{bucket}" if uri.startswith("gs://") else uri
    return below(root, path) if path.startswith("/") else None
