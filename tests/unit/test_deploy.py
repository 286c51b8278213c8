"""The files in deploy/ are what Slurm, Kubernetes, Kubeflow and Docker take, and their commands are
ours.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from allhands.cli.options import parsed_options
from allhands.cluster.containers.options import hyperparameters, merged
from allhands.cluster.environment import recognise
from allhands.config.schema import TrainConfig, build_config
from allhands.errors import AllhandsError

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
DOCKERFILE = DEPLOY / "docker/Dockerfile"
SBATCH = DEPLOY / "slurm/allhands.sbatch"


def tool(name: str) -> str:
    """A program that a package of the extra `dev`, or the system, has installed."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


def documents(path: Path) -> list[dict[str, Any]]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one]


def of_kind(kind: str) -> dict[str, Any]:
    (found,) = (one for path in MANIFESTS for one in documents(path) if one["kind"] == kind)
    return found


def trained(words: list[str]) -> TrainConfig:
    """The configuration of a command that trains, by our own parser."""
    return build_config(parsed_options(words, "allhands train"))


# --- Kubernetes -----------------------------------------------------------------------------------


def pod_templates() -> Iterator[tuple[str, dict[str, Any]]]:
    yield "Job", of_kind("Job")["spec"]["template"]
    for role, replicas in of_kind("MPIJob")["spec"]["mpiReplicaSpecs"].items():
        yield f"MPIJob {role}", replicas["template"]


def test_there_is_each_kind_once() -> None:
    kinds = sorted(one["kind"] for path in MANIFESTS for one in documents(path))
    assert kinds == ["Job", "MPIJob", "PersistentVolumeClaim", "Service", "TrainJob"]


def test_the_schemas_of_kubernetes_take_them() -> None:
    validator = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    checked = 0
    for path in MANIFESTS:
        for document in documents(path):
            if document["kind"] not in ("MPIJob", "TrainJob"):
                validator.validate(document, validator.latest_version(), strict=True)
                checked += 1
    assert checked == 3
    for name, template in pod_templates():
        metadata = {**template.get("metadata", {}), "name": "pod"}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}
        validator.validate(pod, validator.latest_version(), strict=True)
        pod["spec"] = {**template["spec"], "terminationGracePeriod": 1}
        with pytest.raises(
            validator.ValidationError
        ):  # the schema of this very place refuses a misspelt key
            validator.validate(pod, validator.latest_version(), strict=True)
        assert name


def test_kubeflows_own_models_take_the_train_job() -> None:
    models = pytest.importorskip(
        "kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed"
    )
    document = of_kind("TrainJob")
    read = models.TrainerV1alpha1TrainJob.from_dict(document)
    # What the models do not know they leave out, so nothing may be missing.
    assert json.loads(json.dumps(read.to_dict(), default=str)) == document


# The fields of MPIJob v2beta1 that a person may write, but for the pods.
MPI_JOB: dict[str, type] = {
    "slotsPerWorker": int,
    "runLauncherAsWorker": bool,
    "runPolicy": dict,
    "mpiReplicaSpecs": dict,
    "sshAuthMountPath": str,
    "launcherCreationPolicy": str,
    "mpiImplementation": str,
}
RUN_POLICY = {
    *(
        "cleanPodPolicy",
        "ttlSecondsAfterFinished",
        "activeDeadlineSeconds",
        "backoffLimit",
        "schedulingPolicy",
    ),
    *("suspend", "managedBy"),
}


def test_the_mpi_job_has_only_fields_of_its_kind() -> None:
    document = of_kind("MPIJob")
    spec = document["spec"]
    assert document["apiVersion"] == "kubeflow.org/v2beta1"
    assert {name: type(value) for name, value in spec.items()} == {
        name: MPI_JOB[name] for name in spec
    }
    assert set(spec["runPolicy"]) <= RUN_POLICY
    assert spec["launcherCreationPolicy"] in ("AtStartup", "WaitForWorkersReady")
    assert spec["mpiImplementation"] in ("OpenMPI", "Intel", "MPICH")
    replicas = spec["mpiReplicaSpecs"]
    assert set(replicas) == {"Launcher", "Worker"}
    assert all(set(one) <= {"replicas", "restartPolicy", "template"} for one in replicas.values())
    assert replicas["Launcher"]["restartPolicy"] in ("Never", "OnFailure")


def test_the_mpi_job_starts_a_rank_a_slot_with_what_mpirun_and_we_understand() -> None:
    spec = of_kind("MPIJob")["spec"]
    (launcher,) = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"]
    words = [*launcher["command"], *launcher["args"]]
    ours = words.index("/opt/allhands/bin/allhands")
    assert (
        int(words[words.index("-np") + 1])
        == spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    )
    assert words[ours + 1] == "train"
    config = trained(words[ours + 2 :])
    assert config.train
    assert config.resume == "auto"
    (worker,) = spec["mpiReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    assert worker["command"] == ["/usr/sbin/sshd"]
    home = str(Path(spec["sshAuthMountPath"]).parent)
    assert worker["args"][-1] == f"{home}/.sshd_config"
    sshd = (DEPLOY / "docker/sshd_config").read_text()
    assert f"HostKey {spec['sshAuthMountPath']}/id_rsa" in sshd
    port = re.search(r"^Port (\d+)$", sshd, re.MULTILINE)
    assert port is not None
    assert worker["ports"][0]["containerPort"] == int(port[1])
    assert f"Port {port[1]}\n" in (DEPLOY / "docker/ssh_config").read_text()


def test_mpirun_asks_ssh_for_the_workers_by_their_full_names(tmp_path: Path) -> None:
    """Ours, with the manifest's own words; only the hostfile and the program in ssh's place are
    others.
    """
    from allhands.cluster.mpi import find_mpi, mpi_variables

    mpi = find_mpi()
    if mpi is None:
        pytest.skip("Open MPI is not installed")
    (launcher,) = of_kind("MPIJob")["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"][
        "containers"
    ]
    hostfile, ssh, asked = tmp_path / "hostfile", tmp_path / "ssh", tmp_path / "asked"
    hostfile.write_text(
        "".join(f"allhands-worker-{n}.allhands.default.svc slots=1\n" for n in (0, 1))
    )
    ssh.write_text(f'#!/bin/sh\necho "$@" >> {shlex.quote(str(asked))}\nexit 1\n')
    ssh.chmod(0o755)
    words = [str(hostfile) if word == "/etc/mpi/hostfile" else word for word in launcher["args"]]
    options = [str(mpi.mpirun), "--prtemca", "plm_ssh_agent", str(ssh)]
    done = subprocess.run(
        [*options, *words],
        env={**os.environ, **mpi_variables(mpi, tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert asked.exists(), done.stderr
    names = re.findall(r"allhands-worker-\S*", asked.read_text())
    assert names
    assert set(names) <= {f"allhands-worker-{n}.allhands.default.svc" for n in (0, 1)}


def test_pods_of_the_indexed_job_recognise_each_other() -> None:
    job, service = of_kind("Job"), of_kind("Service")
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    (train,) = pod["containers"]
    variables = {one["name"]: one["value"] for one in train["env"]}
    assert spec["completionMode"] == "Indexed"
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"] == variables["ALLHANDS_PEERS_SERVICE"]
    assert spec["completions"] == spec["parallelism"] == int(variables["ALLHANDS_NUM_NODES"])
    names = [
        f"{job['metadata']['name']}-{n}.{pod['subdomain']}" for n in range(spec["completions"])
    ]
    for index, name in enumerate(names):
        own = {
            "JOB_COMPLETION_INDEX": str(index),
            "HOSTNAME": name.partition(".")[0],
            "KUBERNETES_SERVICE_HOST": "::1",
        }
        launch = recognise({**variables, **own}, root=Path("/nonexistent"))
        assert (launch.launcher, launch.rank, launch.size) == ("kubernetes", index, 2)
        assert launch.hosts == tuple(names)
        assert launch.grace_s == pod["terminationGracePeriodSeconds"]
    assert train["args"][0] == "train"
    assert trained(train["args"][1:]).adapter_path == "/storage/run"


def test_exit_codes_that_end_the_job_are_those_of_our_mistakes() -> None:
    from allhands import errors

    (rule,) = (
        one
        for one in of_kind("Job")["spec"]["podFailurePolicy"]["rules"]
        if one["action"] == "FailJob"
    )
    codes = {
        kind.exit_code
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, AllhandsError)
    }
    lasting = codes - {
        1,
        7,
        8,
        75,
        130,
    }  # defects, peers that are lost, and stops may be other the next time
    assert set(rule["onExitCodes"]["values"]) == lasting


def test_pods_of_the_train_job_recognise_each_other() -> None:
    trainer = of_kind("TrainJob")["spec"]["trainer"]
    variables = {one["name"]: one["value"] for one in trainer["env"]}
    for node in range(trainer["numNodes"]):
        set_by_kubeflow = {
            "PET_NNODES": str(trainer["numNodes"]),
            "PET_NPROC_PER_NODE": str(trainer["numProcPerNode"]),
            "PET_NODE_RANK": str(node),
            "PET_MASTER_ADDR": "allhands-node-0-0.allhands",
            "PET_MASTER_PORT": "29500",
        }
        launch = recognise(
            {**variables, **set_by_kubeflow, "KUBERNETES_SERVICE_HOST": "::1"},
            root=Path("/nonexistent"),
        )
        assert (launch.rank, launch.size, launch.node, launch.num_nodes) == (node, 2, node, 2)
        assert launch.meeting is not None
        assert launch.meeting.host == "allhands-node-0-0.allhands"
        assert launch.grace_s == 120
    assert trainer["command"][1:] == ["container"]
    assert trainer["args"][0] == "train"
    assert trained(trainer["args"][1:]).resume == "auto"
    (patch,) = of_kind("TrainJob")["spec"]["runtimePatches"]
    (node_job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node_job["template"]["spec"]["template"]["spec"]
    assert str(pod["terminationGracePeriodSeconds"]) == variables["ALLHANDS_GRACE_S"]


def test_pods_have_no_rights_and_shared_memory() -> None:
    for name, template in pod_templates():
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"], name
        assert not spec["automountServiceAccountToken"], name
        for one in spec["containers"]:
            assert one["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "capabilities": {"drop": ["ALL"]},
            }
            mounts = {mount["name"]: mount["mountPath"] for mount in one.get("volumeMounts", [])}
            if "launcher" not in name.lower():
                assert mounts == {"storage": "/storage", "shared-memory": "/dev/shm"}
                memory = next(
                    volume for volume in spec["volumes"] if volume["name"] == "shared-memory"
                )
                assert memory["emptyDir"]["medium"] == "Memory"
    claim = of_kind("PersistentVolumeClaim")["metadata"]["name"]
    named = re.findall(r"claimName: (\S+)", "".join(path.read_text() for path in MANIFESTS))
    assert set(named) == {claim}


# --- Slurm ----------------------------------------------------------------------------------------


def test_scripts_are_sound() -> None:
    for path in (SBATCH, DEPLOY / "docker/train"):
        done = subprocess.run(
            [tool("shellcheck"), str(path)], capture_output=True, text=True, timeout=30, check=False
        )
        assert done.returncode == 0, done.stdout


def submit(
    tmp_path: Path, code: int, state: str, *words: str, **variables: str
) -> tuple[int, list[list[str]], str]:
    """Run the batch script with programs in the place of Slurm's that write down how they were
    called.
    """
    (tmp_path / "bin").mkdir(exist_ok=True)
    log = tmp_path / "called"
    log.unlink(missing_ok=True)
    for name, answer in (
        ("srun", f"exit {code}"),
        ("scontrol", f'[ "$1" = show ] && echo "   JobState={state} x"; true'),
    ):
        path = tmp_path / "bin" / name
        record = f"{sys.executable} -c 'import json, sys; print(json.dumps(sys.argv[1:]))' {name} \"$@\" >> {log}"
        path.write_text(f"#!/bin/sh\n{record}\n{answer}\n")
        path.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    env |= {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "77",
        "VENV": "",
        **variables,
    }
    done = subprocess.run(
        ["bash", str(SBATCH), *words],
        env=env,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    calls = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return done.returncode, calls, done.stdout + done.stderr


def test_the_batch_script_trains_with_our_options(tmp_path: Path) -> None:
    variables = {"MODEL": "a model", "DATA": "my data", "OUT": "runs/x", "SLURM_CPUS_PER_TASK": "6"}
    code, calls, text = submit(tmp_path, 0, "RUNNING", "--iters", "7", "--mask-prompt", **variables)
    assert code == 0, text
    (srun,) = calls
    ours = srun.index("allhands")
    assert srun[:ours] == [
        "srun",
        "--distribution=block",
        "--kill-on-bad-exit=1",
        "--cpus-per-task=6",
    ]
    assert srun[ours + 1] == "train"
    config = trained(srun[ours + 2 :])
    said = (
        config.model,
        config.data,
        config.adapter_path,
        config.resume,
        config.iters,
    )
    assert said == ("a model", "my data", "runs/x", "auto", 7)
    assert config.mask_prompt
    warning = re.search(r"^#SBATCH --signal=USR1@(\d+)$", SBATCH.read_text(), re.MULTILINE)
    assert warning is not None
    assert config.stop_grace_s < int(warning[1])


@pytest.mark.parametrize(
    ("code", "state", "before", "again"),
    [
        (143, "RUNNING", "0", True),
        (130, "RUNNING", "19", True),
        (143, "RUNNING", "20", False),
        (143, "CANCELLED", "0", False),
        (7, "RUNNING", "0", False),
        (0, "RUNNING", "0", False),
    ],
)
def test_it_goes_back_into_the_queue_only_with_a_checkpoint(
    tmp_path: Path, code: int, state: str, before: str, again: bool
) -> None:
    ended, calls, text = submit(tmp_path, code, state, SLURM_RESTART_COUNT=before)
    assert ended == code, text
    assert (["scontrol", "requeue", "77"] in calls) is again
    assert ("a checkpoint" in text) is (code in (130, 143))


def test_a_gpu_job_without_gpus_is_refused(tmp_path: Path) -> None:
    if shutil.which("nvidia-smi"):
        pytest.skip("there is an NVIDIA GPU")
    code, calls, text = submit(tmp_path, 0, "RUNNING", DEVICE="gpu")
    assert (code, calls) == (2, [])
    assert "--gpus-per-task=1" in text


# --- Docker ---------------------------------------------------------------------------------------


def test_the_dockerfile_is_sound() -> None:
    done = subprocess.run(
        [tool("hadolint"), str(DOCKERFILE)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout
    assert done.stdout == ""


def instructions(name: str) -> list[str]:
    text = re.sub(r"^#.*\n", "", DOCKERFILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return [line.split(None, 1)[1] for line in text.splitlines() if line.startswith(f"{name} ")]


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    copied = 0
    ignored = (DEPLOY / "docker/Dockerfile.dockerignore").read_text().splitlines()
    kept = [line[1:] for line in ignored if line.startswith("!")]
    for words in (line.split() for line in instructions("COPY")):
        if any(word.startswith("--from=") for word in words):
            continue
        for source in [word for word in words if not word.startswith("--")][:-1]:
            assert (ROOT / source).exists(), source
            assert any(source == place or source.startswith(f"{place}/") for place in kept), source
            copied += 1
    assert copied >= 7
    assert (DEPLOY / "docker/train").stat().st_mode & stat.S_IXUSR


def test_stages_are_made_of_stages_and_end_without_rights() -> None:
    stages: dict[str, str] = {}
    for line in instructions("FROM"):
        base, _, name = line.partition(" AS ")
        known = base in stages or base in ("${BASE}", "${DEVICE}")
        assert known, line
        stages[name or "last"] = base
    assert {"cpu", "cuda", "mpi", "last"} <= set(stages)
    assert [user for user in instructions("USER") if user != "0"] == [
        "${RUN_AS}",
        "${RUN_AS}",
        "1000",
    ]
    arguments = dict(line.split("=", 1) for line in instructions("ARG"))
    assert arguments["RUN_AS"] == "1000"
    assert re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", arguments["BASE"])
    assert [json.loads(words) for words in instructions("ENTRYPOINT")] == [
        ["/opt/allhands/bin/allhands", "container"]
    ]


def test_constraints_fit_what_the_project_asks_for() -> None:
    text = (DEPLOY / "docker/constraints.txt").read_text()
    pins = dict(line.split("==") for line in text.splitlines() if line and not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    optional = project["optional-dependencies"]
    extras = [text for name in ("cpu", "cuda12", "cuda13", "mpi") for text in optional[name]]
    linux = {"platform_system": "Linux", "sys_platform": "linux"}
    for asked in map(Requirement, [*project["dependencies"], *extras]):
        if asked.marker is None or asked.marker.evaluate(linux):
            name = canonicalize_name(asked.name)
            assert name in pins, f"{name}: renew deploy/docker/constraints.txt"
            assert asked.specifier.contains(pins[name]), asked
    assert all(pins[name] == pins["mlx"] for name in ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13"))
    for line in instructions("RUN"):
        if "pip install" in line:
            assert "--constraint constraints.txt" in line


@pytest.mark.long
def test_the_constraints_can_be_installed(tmp_path: Path) -> None:
    """As the image for CPUs does; needs a package index."""
    index = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--quiet",
        "--dest",
        str(tmp_path),
        "typer",
    ]
    if subprocess.run(index, capture_output=True, timeout=120, check=False).returncode:
        pytest.skip("there is no package index")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    constraints = ["--constraint", str(DEPLOY / "docker/constraints.txt")]
    report = tmp_path / "report.json"
    done = subprocess.run(
        [*command, *constraints, "--report", str(report), f"{ROOT}[cpu,mpi]"],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    names = {
        canonicalize_name(entry["metadata"]["name"])
        for entry in json.loads(report.read_text())["install"]
    }
    assert {"allhands", "mlx", "mlx-cpu", "openmpi"} <= names


# --- docs/servers.md ------------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```$",
        (ROOT / "docs/servers.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )


def test_the_files_and_stages_that_the_page_names_exist() -> None:
    text = "".join(blocks("bash"))
    for path in re.findall(r"\bdeploy/[\w./-]+", text):
        assert (ROOT / path).is_file(), path
    targets = {line.partition(" AS ")[2] for line in instructions("FROM")}
    assert set(re.findall(r"--target (\S+)", text)) <= targets
    arguments = {line.partition("=")[0] for line in instructions("ARG")}
    assert set(re.findall(r"--build-arg (\w+)=", text)) <= arguments


def test_options_in_containers_are_ours(tmp_path: Path) -> None:
    for line in "".join(blocks("bash")).replace("\\\n", " ").splitlines():
        words = shlex.split(line)
        if words[:2] == ["docker", "run"] and "train" in words:
            assert trained(words[words.index("train") + 1 :]).iters == 100
    (job,) = blocks("json")
    (tmp_path / "hyperparameters.json").write_text(json.dumps(json.loads(job)["HyperParameters"]))
    config = merged({}, hyperparameters({}, tmp_path / "hyperparameters.json"))
    assert (
        config.iters,
        config.learning_rate,
        config.mask_prompt,
        config.lora_parameters.rank,
    ) == (
        1000,
        1e-4,
        True,
        16,
    )
    (vertex,) = (yaml.safe_load(text) for text in blocks("text"))
    (pool,) = vertex["workerPoolSpecs"]
    arguments = pool["containerSpec"]["args"]
    assert arguments[0] == "train"
    assert trained(arguments[1:]).data == "gs://BUCKET/data"


def test_options_after_the_batch_script_are_ours() -> None:
    found = 0
    for line in [*"".join(blocks("bash")).splitlines(), *SBATCH.read_text().splitlines()]:
        words = line.strip("# ").split()
        script = next(
            (i for i, word in enumerate(words) if word.endswith("/allhands.sbatch")), None
        )
        if script is not None and "sbatch" in words[:script]:
            trained(words[script + 1 :])
            found += 1
    assert found >= 4
