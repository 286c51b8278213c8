"""Platforms that start one process a computer, and what each of them offers: rows of variables and
files.
"""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from allhands.cluster.environment import recognise
from allhands.cluster.join import join_group, patience_for, take_device
from allhands.cluster.place import LaunchPlace, Paths
from allhands.cluster.platforms.vertex import from_bucket
from allhands.errors import DistributedError

RESOURCES = "/opt/ml/input/config/resourceconfig.json"
CHANNELS = "/opt/ml/input/config/inputdataconfig.json"


def found_in(
    environ: dict[str, str], files: dict[str, str] | None = None, *, has_cuda: bool = False
) -> LaunchPlace:
    """The launch on a computer with these variables and files."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        for name, text in (files or {}).items():
            (root / name[1:]).parent.mkdir(parents=True, exist_ok=True)
            (root / name[1:]).write_text(text)
        return _at_root(recognise(environ, has_cuda=has_cuda, root=root), root)


def _at_root(found: LaunchPlace, root: Path) -> LaunchPlace:
    """The same launch with ``/`` in place of ``root``."""

    def at_root(path: Path | None) -> Path | None:
        return path and Path("/", path.relative_to(root))

    paths = {
        name: at_root(getattr(found.paths, name))
        for name in Paths.__dataclass_fields__
        if name != "data"
    }
    data = {name: Path("/", path.relative_to(root)) for name, path in found.paths.data.items()}
    file = at_root(found.failure_file)
    return replace(
        found, platform=replace(found.platform, paths=Paths(data, **paths), failure_file=file)
    )


def _cluster(kind: str, index: int, workers: int = 2, **pools: list[str]) -> dict[str, str]:
    """A Vertex custom job's variables."""
    content = {
        "cluster": {
            "workerpool0": ["cmle-training-workerpool0-ab-0:2222"],
            "workerpool1": [f"cmle-training-workerpool1-ab-{i}:2222" for i in range(workers)],
            **pools,
        },
        "environment": "cloud",
        "task": {"type": kind, "index": index, "trial": "7"},
        "job": '{"scheduling": {}}',
    }
    tensorflow = {
        "cluster": {
            "chief": content["cluster"]["workerpool0"],
            "worker": content["cluster"]["workerpool1"],
        },
        "task": {"type": "chief" if kind == "workerpool0" else "worker", "index": index},
        "environment": "cloud",
    }
    return {
        "CLUSTER_SPEC": json.dumps(content),
        "TF_CONFIG": json.dumps(tensorflow),
        "CLOUD_ML_JOB_ID": "4567",
        "AIP_MODEL_DIR": "gs://bucket/job/model/",
        "AIP_CHECKPOINT_DIR": "gs://bucket/job/checkpoints/",
        "AIP_TENSORBOARD_LOG_DIR": "gs://bucket/job/logs/",
        "AIP_TRAINING_DATA_URI": "gs://bucket/data/train",
        "AIP_VALIDATION_DATA_URI": "bq://project.set.table",
        "AIP_DATA_FORMAT": "jsonl",
        "AIP_HTTP_HANDLER_PORT": "8080",
    }


def _resources(current: str, *hosts: str) -> dict[str, str]:
    content = {
        **{"current_host": current, "hosts": list(hosts), "network_interface_name": "eth0"},
        **{"current_instance_type": "ml.g5.12xlarge", "current_group_name": "homogeneousCluster"},
        "instance_groups": [{"instance_group_name": "homogeneousCluster", "hosts": list(hosts)}],
    }
    return {RESOURCES: json.dumps(content), CHANNELS: json.dumps({"train": {}, "validation": {}})}


def _toolkit(current: str, *hosts: str, gpus: int = 0) -> dict[str, str]:
    """What sagemaker-training-toolkit adds to the platform's own variables."""
    return {
        **{
            "TRAINING_JOB_NAME": "pirate-1",
            "SM_HOSTS": json.dumps(hosts),
            "SM_CURRENT_HOST": current,
        },
        **{
            "SM_NUM_GPUS": str(gpus),
            "SM_NETWORK_INTERFACE_NAME": "eth0",
            "SM_MODEL_DIR": "/opt/ml/model",
        },
        **{"SM_CHANNELS": '["train"]', "SM_CHANNEL_TRAIN": "/opt/ml/input/data/train"},
        **{
            "SM_OUTPUT_DATA_DIR": "/opt/ml/output/data",
            "SM_INPUT_CONFIG_DIR": "/opt/ml/input/config",
        },
    }


def _job(index: int, **more: str) -> dict[str, str]:
    """A pod of a Kubernetes Indexed Job."""
    return {
        **{
            "JOB_COMPLETION_INDEX": str(index),
            "HOSTNAME": f"pirate-{index}",
            "KUBERNETES_SERVICE_HOST": "10.96.0.1",
        },
        **more,
    }


_SIZED = {"ALLHANDS_NUM_NODES": "3", "ALLHANDS_PEERS_SERVICE": "peers"}
_TF = {
    "cluster": {"worker": ["w0:1", "w1:1"], "ps": ["p:1"]},
    "task": {"type": "worker", "index": 1},
}

# variables, files, (launcher, rank, size), the first and last of the peers, the port of the meeting
_ROWS: dict[
    str, tuple[dict[str, str], dict[str, str], tuple[str, int, int], tuple[str, str] | None, int]
] = {
    "Vertex, the chief": (
        *(_cluster("workerpool0", 0), {}, ("vertex", 0, 3)),
        *(("cmle-training-workerpool0-ab-0", "cmle-training-workerpool1-ab-1"), 2222),
    ),
    "Vertex, a worker": (
        *(_cluster("workerpool1", 1), {}, ("vertex", 2, 3)),
        *(("cmle-training-workerpool0-ab-0", "cmle-training-workerpool1-ab-1"), 2222),
    ),
    "Vertex beside a reduction server": (
        *(
            _cluster("workerpool1", 0, 1, workerpool2=["r:2222"], workerpool3=["e:2222"]),
            {},
            ("vertex", 1, 2),
        ),
        *(("cmle-training-workerpool0-ab-0", "cmle-training-workerpool1-ab-0"), 2222),
    ),
    "Vertex, one replica": (_cluster("workerpool0", 0, 0), {}, ("single", 0, 1), None, 0),
    "TF_CONFIG alone": ({"TF_CONFIG": json.dumps(_TF)}, {}, ("tf_config", 1, 2), ("w0", "w1"), 1),
    "TF_CONFIG with a chief": (
        {
            "TF_CONFIG": json.dumps(
                {"cluster": {"chief": ["c"], "worker": ["w:1"]}, "task": {"type": "worker"}}
            )
        },
        *({}, ("tf_config", 1, 2), ("c", "w"), 29400),
    ),
    "TF_CONFIG of one process": ({"TF_CONFIG": '{"cluster": {}}'}, {}, ("single", 0, 1), None, 0),
    "SageMaker, bare": (
        *(
            {"TRAINING_JOB_NAME": "pirate-1"},
            _resources("algo-2", "algo-2", "algo-1"),
            ("sagemaker", 1, 2),
        ),
        *(("algo-1", "algo-2"), 7777),
    ),
    "SageMaker, toolkit": (
        *(
            _toolkit("algo-1", "algo-1", "algo-2"),
            _resources("algo-1", "algo-1", "algo-2"),
            ("sagemaker", 0, 2),
        ),
        *(("algo-1", "algo-2"), 7777),
    ),
    "SageMaker, toolkit without the file": (
        *(
            _toolkit("algo-1", "algo-1", "algo-2"),
            {},
            ("sagemaker", 0, 2),
            ("algo-1", "algo-2"),
            7777,
        ),
    ),
    "SageMaker, one host": ({}, _resources("algo-1", "algo-1"), ("single", 0, 1), None, 0),
    "Indexed Job": (
        *(_job(1, **_SIZED), {}, ("kubernetes", 1, 3), ("pirate-0.peers", "pirate-2.peers"), 29400),
    ),
    "Indexed Job, WORLD_SIZE": (
        *(_job(1, WORLD_SIZE="2", ALLHANDS_PEERS_SERVICE="p.ns.svc"), {}, ("kubernetes", 1, 2)),
        *(("pirate-0.p.ns.svc", "pirate-1.p.ns.svc"), 29400),
    ),
    "Indexed Job, service from /etc/hosts": (
        _job(1, NUM_NODES="2", MASTER_PORT="5000"),
        {
            "/etc/hosts": "127.0.0.1 localhost\n10.1.2.3\tpirate-1.peers.ns.svc.cluster.local\tpirate-1\n"
        },
        *(
            ("kubernetes", 1, 2),
            ("pirate-0.peers.ns.svc.cluster.local", "pirate-1.peers.ns.svc.cluster.local"),
            5000,
        ),
    ),
    "Indexed Job, only pod 0 known": (
        _job(1, NUM_NODES="2", MASTER_ADDR="head"),
        {},
        ("kubernetes", 1, 2),
        None,
        29400,
    ),
    "Indexed Job, each by itself": (_job(2, ALLHANDS_NUM_NODES="1"), {}, ("single", 0, 1), None, 0),
    "StatefulSet": (
        *(
            {"HOSTNAME": "web-2", "KUBERNETES_SERVICE_HOST": "10.96.0.1"} | _SIZED,
            {},
            ("kubernetes", 2, 3),
        ),
        *(("web-0.peers", "web-2.peers"), 29400),
    ),
    "a pod": (
        {"HOSTNAME": "web-2", "KUBERNETES_SERVICE_HOST": "10.96.0.1"},
        {},
        ("single", 0, 1),
        None,
        0,
    ),
}


@pytest.mark.parametrize(
    ("environ", "files", "place", "peers", "port"), _ROWS.values(), ids=_ROWS.keys()
)
def test_place_and_peers(
    environ: dict[str, str],
    files: dict[str, str],
    place: tuple[str, int, int],
    peers: tuple[str, str] | None,
    port: int,
) -> None:
    found = found_in(environ, files)
    assert (found.launcher, found.rank, found.size) == place
    assert (found.hosts[0], found.hosts[-1]) == peers if peers else found.hosts == ()
    assert (found.meeting.ports[0] if found.meeting else 0) == port
    assert found.backend == ("ring" if found.size > 1 else "none")
    if found.size > 1:
        assert (found.node, found.num_nodes, found.local_size) == (found.rank, found.size, 1)
        assert found.meeting is not None
        assert found.meeting.host == (peers[0] if peers else "head")
        cuda = found_in(environ, files, has_cuda=True)
        assert (cuda.backend, dict(cuda.exports)) == ("nccl", {"CUDA_VISIBLE_DEVICES": "0"})


# variables, files, a piece of the message
_WRONG: dict[str, tuple[dict[str, str], dict[str, str], str]] = {
    "a reduction server": (
        _cluster("workerpool2", 0, workerpool2=["r:1"]),
        {},
        "this is workerpool2 0",
    ),
    "an evaluator": (_cluster("workerpool3", 0, workerpool3=["e:1"]), {}, "evaluators"),
    "a parameter server": (
        *(
            {"TF_CONFIG": json.dumps({**_TF, "task": {"type": "ps", "index": 0}})},
            {},
            "this is ps 0",
        ),
    ),
    "a replica too many": (_cluster("workerpool1", 5), {}, "there is no workerpool1 5"),
    "not JSON": ({"CLUSTER_SPEC": "{"}, {}, "CLUSTER_SPEC is not JSON"),
    "not an object": ({"CLUSTER_SPEC": "[]"}, {}, "CLUSTER_SPEC is not a JSON object"),
    "no task": (
        {"CLUSTER_SPEC": '{"cluster": {"workerpool0": ["a:1"]}}'},
        {},
        "no cluster and task",
    ),
    "not addresses": (
        *(
            {
                "CLUSTER_SPEC": '{"cluster": {"workerpool0": "a"}, "task": {"type": "workerpool0", "index": 0}}'
            },
            {},
        ),
        "workerpool0 is not a list",
    ),
    "SageMaker, stranger": ({}, _resources("algo-3", "algo-1"), "this host is 'algo-3'"),
    "SageMaker, file and variables": (
        *(_toolkit("algo-1", "algo-1", "algo-2"), _resources("algo-2", "algo-1", "algo-2")),
        "contradict each other: SM_HOSTS",
    ),
    "SageMaker, no hosts": (
        {},
        {RESOURCES: '{"current_host": "algo-1"}'},
        f"{RESOURCES}: there is no list",
    ),
    "SageMaker, empty hosts": (
        {},
        {RESOURCES: '{"current_host": "algo-1", "hosts": []}'},
        "this host is 'algo-1'",
    ),
    "SageMaker, no host": ({}, {RESOURCES: '{"hosts": ["algo-1"]}'}, "this host is ''"),
    "SageMaker, half set": ({"SM_CURRENT_HOST": "algo-1"}, {}, "SM_HOSTS: there is no list"),
    "SageMaker, other half": ({"SM_HOSTS": '["algo-1"]'}, {}, "this host is ''"),
    "SageMaker, no list": ({"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"}, {}, "SM_HOSTS"),
    "SageMaker, odd channel": (_toolkit("a", "a") | {"SM_CHANNELS": '["../x"]'}, {}, "../x"),
    "SageMaker, odd channel in the file": (
        {},
        _resources("a", "a") | {CHANNELS: '{"../x": {}}'},
        "../x",
    ),
    "Indexed Job without a size": (_job(0), {}, "nothing says how many pods"),
    "Indexed Job, index too large": (
        _job(3, **_SIZED),
        {},
        "JOB_COMPLETION_INDEX=3, ALLHANDS_NUM_NODES=3",
    ),
    "Indexed Job without names": (_job(1, NUM_NODES="2"), {}, "names of the other pods"),
    "StatefulSet, odd size": (
        {"ALLHANDS_NUM_NODES": "abc", "HOSTNAME": "web"},
        {},
        "ALLHANDS_NUM_NODES",
    ),
    "StatefulSet without a number": (_SIZED | {"HOSTNAME": "web"}, {}, "ends in no number"),
    "odd grace": (_job(1, **_SIZED, ALLHANDS_GRACE_S="soon"), {}, "ALLHANDS_GRACE_S=soon"),
}


@pytest.mark.parametrize(("environ", "files", "piece"), _WRONG.values(), ids=_WRONG.keys())
def test_contradictions_are_refused(
    environ: dict[str, str], files: dict[str, str], piece: str
) -> None:
    with pytest.raises(DistributedError) as caught:
        found_in(environ, files)
    assert piece in f"{caught.value.where}: {caught.value.message}"
    assert caught.value.hint


# --- what platforms offer -------------------------------------------------------------------------


def test_vertex_offers_mounted_buckets() -> None:
    found = found_in(_cluster("workerpool0", 0))
    assert found.paths == Paths(
        data={"train": Path("/gcs/bucket/data/train")},
        model=Path("/gcs/bucket/job/model"),
        checkpoints=Path("/gcs/bucket/job/checkpoints"),
        tensorboard=Path("/gcs/bucket/job/logs"),
    )
    assert (found.grace_s, found.failure_file, found.requeue) == (None, None, ())
    assert found.notes == (
        "AIP_VALIDATION_DATA_URI is bq://project.set.table, which is not mounted as files",
    )


@pytest.mark.parametrize(
    ("uri", "path"),
    [("gs://b/p/", "/gcs/b/p"), ("gs://b", "/gcs/b"), ("/gcs/b/p", "/gcs/b/p"), ("s3://b", None)],
)
def test_from_bucket(uri: str, path: str | None) -> None:
    assert from_bucket(uri) == (Path(path) if path else None)


@pytest.mark.parametrize("environ", [{}, _toolkit("algo-1", "algo-1")])
def test_sagemaker_offers_its_directories(environ: dict[str, str]) -> None:
    found = found_in(environ, _resources("algo-1", "algo-1"))
    channels = ["train"] if environ else ["train", "validation"]
    assert found.paths == Paths(
        data={name: Path("/opt/ml/input/data", name) for name in channels},
        model=Path("/opt/ml/model"),
        checkpoints=Path("/opt/ml/checkpoints"),
        output=Path("/opt/ml/output/data"),
        config=Path("/opt/ml/input/config"),
    )
    assert (found.grace_s, found.failure_file) == (120.0, Path("/opt/ml/output/failure"))
    assert found.platform.name == "sagemaker"


def test_sagemakers_toolkit_may_place_directories_elsewhere() -> None:
    elsewhere = {
        "SM_MODEL_DIR": "/m",
        "SM_CHANNELS": '["tales"]',
        "SM_CHANNEL_TALES": "/data/tales",
    }
    found = found_in({**elsewhere, "SM_OUTPUT_DATA_DIR": "/o", "SM_INPUT_CONFIG_DIR": "/c"})
    assert (found.launcher, found.platform.name) == ("single", "sagemaker")
    assert found.paths == Paths(
        *({"tales": Path("/data/tales")}, Path("/m"), Path("/opt/ml/checkpoints"), Path("/o")),
        config=Path("/c"),
    )


def test_the_platform_is_found_whoever_has_started_the_ranks() -> None:
    ranks = {"ALLHANDS_RANK": "0", "ALLHANDS_WORLD_SIZE": "2", "ALLHANDS_BACKEND": "ring"}
    found = found_in(ranks, _resources("algo-1", "algo-1"))
    assert (found.launcher, found.failure_file) == ("allhands", Path("/opt/ml/output/failure"))


def test_kubernetes_gives_half_a_minute_and_reads_a_file() -> None:
    found = found_in(_job(1, **_SIZED))
    assert (found.grace_s, found.failure_file) == (30.0, Path("/dev/termination-log"))
    assert found_in(_job(1, **_SIZED, ALLHANDS_GRACE_S="90")).grace_s == 90.0


def test_slurm_gives_its_kill_wait_and_takes_jobs_back() -> None:
    job = {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": "2", "SBATCH_SIGNAL": "B:USR1@120"}
    found = found_in(job)
    assert (found.grace_s, found.requeue, found.platform.restarts) == (
        30.0,
        ("scontrol", "requeue", "77"),
        2,
    )
    assert any("signal USR1 comes 120 s before the time limit" in fact for fact in found.why)
    files = {
        "/etc/slurm/slurm.conf": "ClusterName=x\nKillWait=90\n",
        "/etc/other.conf": "# KillWait=5\n killwait = 7",
    }
    assert found_in(job, files).grace_s == 90.0
    assert found_in(job | {"SLURM_CONF": "/etc/other.conf"}, files).grace_s == 7.0


def test_a_computer_by_itself_offers_nothing() -> None:
    found = found_in({})
    assert (found.paths, found.grace_s, found.failure_file, found.requeue) == (
        Paths(),
        None,
        None,
        (),
    )
    assert found.why == ()


def test_torchruns_restarts_are_counted() -> None:
    assert found_in({"TORCHELASTIC_RESTART_COUNT": "2"}).platform.restarts == 2


# --- several ranks a computer ---------------------------------------------------------------------


def test_one_process_stands_for_all_gpus_of_its_host() -> None:
    environ = _toolkit("algo-2", "algo-1", "algo-2", gpus=4)
    found = found_in(environ, has_cuda=True)
    assert (found.rank, found.size, found.ranks_per_node, found.backend) == (1, 2, 4, "nccl")
    assert found.exports == {}
    assert found.meeting == found_in(environ | {"SM_CURRENT_HOST": "algo-1"}, has_cuda=True).meeting
    with pytest.raises(DistributedError, match="one process for the 4 ranks of this computer"):
        join_group(found, 1.0)


def test_without_cuda_gpus_are_not_counted_but_mentioned() -> None:
    found = found_in(_toolkit("algo-1", "algo-1", gpus=4))
    assert found.ranks_per_node == 1
    assert "without CUDA" in found.notes[0]


def test_one_host_with_gpus_is_a_single_process_that_may_start_several() -> None:
    found = found_in(_toolkit("algo-1", "algo-1", gpus=4), has_cuda=True)
    assert (found.launcher, found.size, found.ranks_per_node) == ("single", 1, 4)
    assert "-n 4" in found.notes[0]


# --- MPIJob ---------------------------------------------------------------------------------------

_MPI_FILES = {
    "/etc/mpi/hostfile": "pi-worker-0.pi.ns.svc slots=2\npi-worker-1.pi.ns.svc slots=2\n",
    "/etc/mpi/discover_hosts.sh": "#!/bin/sh\necho pi-worker-0.pi.ns.svc\n",
}


@pytest.mark.parametrize(
    "environ",
    [
        {"K_MPI_JOB_ROLE": "launcher", "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile"},
        {
            "OMPI_MCA_orte_default_hostfile": "/etc/mpi/hostfile",
            "OMPI_MCA_orte_keep_fqdn_hostnames": "true",
        },
        {"I_MPI_HYDRA_HOST_FILE": "/etc/mpi/hostfile", "I_MPI_PERHOST": "2"},
        {"HYDRA_HOST_FILE": "/etc/mpi/hostfile", "JOB_COMPLETION_INDEX": "0"},
    ],
)
def test_the_launcher_of_an_mpi_job_is_told_to_call_mpirun(environ: dict[str, str]) -> None:
    found = found_in(environ, _MPI_FILES)
    assert (found.launcher, found.size) == ("single", 1)
    assert "mpirun -np 4 allhands train" in found.notes[0]
    assert "2 computers with 4 slots: /etc/mpi/hostfile" in found.why
    assert "1 of them run now: /etc/mpi/discover_hosts.sh" in found.why


def test_hostfiles_of_mpich_are_read_too() -> None:
    found = found_in({"K_MPI_JOB_ROLE": "launcher"}, {"/etc/mpi/hostfile": "a:3\nb:4\n# c:9\nd\n"})
    assert "mpirun -np 8 " in found.notes[0]


def test_a_rank_in_an_mpi_job_is_open_mpis() -> None:
    ranks = {f"OMPI_COMM_WORLD_{name}": value for name, value in (("RANK", "1"), ("SIZE", "2"))}
    ranks |= {
        "OMPI_COMM_WORLD_LOCAL_RANK": "0",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
        "K_MPI_JOB_ROLE": "worker",
    }
    found = found_in(ranks, _MPI_FILES)
    assert (found.launcher, found.backend, found.notes) == ("openmpi", "mpi", ())


# --- waiting for the others -----------------------------------------------------------------------


def test_clouds_get_a_quarter_of_an_hour(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("ALLHANDS_PEERS_TIMEOUT_S", raising=False)
    cloud, here = found_in(_job(1, **_SIZED)), found_in({})
    assert patience_for(cloud, 300.0).total_s == 900.0
    assert patience_for(cloud, 1200.0).total_s == 1200.0
    assert patience_for(here, 300.0).total_s == 300.0
    monkeypatch.setenv("ALLHANDS_PEERS_TIMEOUT_S", "45")
    assert patience_for(cloud, 300.0).total_s == 45.0
    patience_for(cloud, 300.0).tell("waiting for rank 2 of 3 (15 s)")
    assert [record.getMessage() for record in caplog.records] == [
        "rank 1 of 3: waiting for rank 2 of 3 (15 s)"
    ]
    for text in ("soon", "0", "nan", "inf"):
        monkeypatch.setenv("ALLHANDS_PEERS_TIMEOUT_S", text)
        with pytest.raises(DistributedError, match=f"ALLHANDS_PEERS_TIMEOUT_S is '{text}'"):
            patience_for(cloud, 300.0)


def test_a_rank_takes_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    ranks = {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_PORT": "29500",
    }
    take_device(found_in(ranks))
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "to be restored")
    take_device(found_in(ranks, has_cuda=True))
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
