"""The probe: the text that is sent, the conversation, and its facts against psutil's."""

from __future__ import annotations

import ast
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from allhands.cluster import probe
from allhands.cluster.doctor.facts import HostFacts
from allhands.cluster.probes import computer

SOURCE = Path(probe.__file__).parent
RUNTIME = [SOURCE.parent / "runtime" / f"{name}.py" for name in ("versions", "callers", "threads")]
PARTS = (*RUNTIME, *sorted((SOURCE / "probes").glob("*.py")), SOURCE / "probe.py")
TOLD = {part.stem for part in PARTS}  # modules whose text is sent
TOKEN = "0123456789abcdef"


class Conversation:
    """The probe in a process of its own, as it would be over ssh."""

    def __init__(self, python: str, **options: Any) -> None:
        self.process = subprocess.Popen(
            [python, "-u", "-c", probe.BOOTSTRAP],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            **options,
        )
        text = probe.program()
        self.write(f"{TOKEN} {len(text)}\n{text}")

    def write(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text)
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        token, _, text = line.partition(" ")
        assert token == TOKEN, line
        return json.loads(text)

    def ask(self, **request: Any) -> dict[str, Any]:
        self.write(json.dumps(request) + "\n")
        return self.answer()


@contextmanager
def talking(python: str = sys.executable, **options: Any) -> Iterator[Conversation]:
    found = Conversation(python, **options)
    with found.process:
        try:
            assert found.answer() == {"ready": True}
            yield found
        finally:
            assert found.process.stdin is not None
            found.process.stdin.close()
            code = found.process.wait(10)
        assert code == 0


# --- the text -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PARTS, ids=lambda path: path.stem)
def test_parts_need_the_standard_library_of_python_39_only(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="ascii"), feature_version=(3, 9))
    for node in ast.walk(tree):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        for name in names:
            package, _, module = name.partition(".")
            # What another module of allhands has is not in the text.
            told = package == "allhands" and module.rpartition(".")[2] in TOLD
            assert told or package in sys.stdlib_module_names, f"{path}: {name}"
        # Of a program on another Python's behalf: strict= of zip is of 3.10, match too.
        assert not isinstance(node, ast.Match)
        assert not (isinstance(node, ast.keyword) and node.arg == "strict")


def test_names_are_those_of_one_part() -> None:
    seen: dict[str, Path] = {}
    for path in PARTS:
        for node in ast.parse(path.read_text()).body:
            names = [node.name] if isinstance(node, ast.FunctionDef | ast.ClassDef) else []
            names += [t.id for t in getattr(node, "targets", []) if isinstance(t, ast.Name)]
            for name in names:
                assert seen.setdefault(name, path) == path, name


def test_the_text_holds_every_part_and_imports_none() -> None:
    text = probe.program()
    assert text.isascii()
    tree = ast.parse(text)
    modules = {
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
    }
    # One is told to the starter of ranks, in a string.
    assert not {module for module in modules if module.startswith("allhands")}
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for path in PARTS:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                assert node.name in defined


def pythons() -> list[str]:
    """Other Pythons of this computer, by their full paths, oldest first."""
    found: list[str] = []
    for version in ("2.7", "3.6", "3.8", "3.9", "3.10", "3.12", "3.13", "3.14"):
        roots = [Path(p) for p in os.environ.get("PATH", "").split(":") if "shims" not in p]
        roots += sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin"))
        candidates = [root / f"python{version}" for root in roots]
        found += [str(path) for path in candidates if path.exists()][:1]
    return found


@pytest.mark.parametrize("python", pythons(), ids=lambda path: Path(path).name)
def test_any_python_answers_or_says_that_it_is_old(python: str) -> None:
    version = tuple(int(part) for part in Path(python).name.removeprefix("python").split("."))
    if version >= probe.OLDEST:
        with talking(python) as found:
            facts = HostFacts.model_validate(
                found.ask(kind="facts", timeout_s=20, places={"work": "."}, peers=[])
            )
        assert facts.python.python_version.startswith(".".join(map(str, version)))
        assert facts.missing == {}
        return
    argv = [python, "-u", "-c", probe.BOOTSTRAP]
    done = subprocess.run(
        argv, input=f"{TOKEN} 5\n12345", capture_output=True, text=True, check=True
    )
    token, _, text = done.stdout.partition(" ")
    assert token == TOKEN
    assert json.loads(text)["old"].startswith(".".join(map(str, version)))


# --- facts ----------------------------------------------------------------------------------------


# Macs have other names of interfaces, no boot id, and no limits or affinity that psutil can read.
on_linux = pytest.mark.skipif(sys.platform != "linux", reason="compares with files of Linux")


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> HostFacts:
    place = tmp_path_factory.mktemp("work")
    (place / "json.py").write_text(
        "raise SystemExit('a module of the working directory was imported')"
    )
    environ = {**os.environ, "MLX_RANK": "secret-value", "NCCL_DEBUG": "secret-value"}
    with talking(cwd=place, env=environ) as found:
        answer = found.ask(
            kind="facts",
            timeout_s=30,
            cwd=str(place),
            places={"work": ".", "adapter": str(place / "not" / "there")},
            peers=["127.0.0.1"],
        )
    assert "secret-value" not in json.dumps(answer)
    assert answer["missing"] == {}
    return HostFacts.model_validate(answer)


@on_linux
def test_memory_and_cores_are_psutils(facts: HostFacts) -> None:
    limit = Path("/sys/fs/cgroup/memory.max")
    limited = limit.exists() and limit.read_text().strip().isdigit()
    if not limited:
        assert facts.memory.total == psutil.virtual_memory().total
    assert 0 < facts.memory.free <= facts.memory.total
    assert facts.processor.count == psutil.cpu_count()
    assert facts.processor.usable == len(psutil.Process().cpu_affinity() or [])
    assert facts.limits.files == psutil.Process().rlimit(psutil.RLIMIT_NOFILE)[0]


@on_linux
def test_interfaces_are_psutils(facts: HostFacts) -> None:
    wanted = {
        name: {entry.address for entry in entries if entry.family == socket.AF_INET}
        for name, entries in psutil.net_if_addrs().items()
    }
    stats = psutil.net_if_stats()
    stable = [
        one for one in facts.interfaces if not one.name.startswith("ah")
    ]  # of tests that run beside this one
    assert {"lo"} <= {one.name for one in stable} <= set(wanted)
    for one in stable:
        assert {address.ip for address in one.addresses if ":" not in address.ip} == wanted[
            one.name
        ]
        assert one.mtu == stats[one.name].mtu
    loopback = facts.interface("lo")
    assert loopback is not None
    assert (loopback.kind, loopback.addresses[0].prefix) == ("loopback", 8)


@on_linux
def test_system_python_and_packages(facts: HostFacts) -> None:
    import importlib.metadata

    assert facts.system.hostname == socket.gethostname()
    assert facts.system.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert facts.python.python_path == sys.executable
    for name in ("allhands", "mlx", "mlx-lm"):
        assert facts.version(name) == importlib.metadata.version(name)
    assert facts.starts is None
    assert facts.variables[:1] == ("MLX_RANK",)
    assert "NCCL_DEBUG" in facts.variables


@on_linux
def test_disks_and_routes(facts: HostFacts) -> None:
    by_role = {disk.role: disk for disk in facts.disks}
    for disk in by_role.values():
        assert disk.total == psutil.disk_usage(disk.place).total
        assert disk.error is None
    assert by_role["adapter"].place == by_role["work"].place == facts.cwd
    route = facts.route_to("127.0.0.1")
    assert route is not None
    assert (route.interface, route.source) == ("lo", "127.0.0.1")


def test_mpi_is_the_one_that_training_would_take(facts: HostFacts) -> None:
    from allhands.cluster.mpi import find_mpi

    wanted = find_mpi()
    assert (facts.mpi is None) == (wanted is None)
    if wanted is not None and facts.mpi is not None:
        assert facts.mpi.path == str(wanted.mpirun)
        assert facts.mpi.version == ".".join(map(str, wanted.version))


def test_a_full_disk_is_seen_by_writing(tmp_path: Path) -> None:
    mount = shutil.which("mount")
    if os.geteuid() != 0 or mount is None or sys.platform != "linux":
        pytest.skip("a small disk can only be mounted by root")
    done = subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], check=False
    )
    if done.returncode != 0:
        pytest.skip("no tmpfs can be mounted here")
    try:
        (tmp_path / "large").write_bytes(bytes(60 << 10))
        full = computer.disk_fact("adapter", str(tmp_path / "adapters"))
        assert (full["place"], full["error"]) == (str(tmp_path), "No space left on device")
        assert {path.name for path in tmp_path.iterdir()} == {"large"}
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_directory_that_cannot_be_entered_is_told(tmp_path: Path) -> None:
    with talking(cwd=tmp_path) as found:
        answer = found.ask(kind="facts", timeout_s=20, cwd="/no/such/place", places={}, peers=[])
    assert answer["cwd_error"] == "No such file or directory"
    assert answer["cwd"] == str(tmp_path)


# --- what programs print --------------------------------------------------------------------------


def test_nvidia_smi() -> None:
    text = "NVIDIA H100 80GB HBM3, 81559, 80990, 550.54.15\nNVIDIA GB10, [N/A], [N/A], 580.95.05\n"
    assert computer.parse_nvidia_smi(text) == [
        {"kind": "cuda", "name": "NVIDIA H100 80GB HBM3", "memory": 81559 << 20, "free": 80990 << 20,
         "driver": "550.54.15"},
        {"kind": "cuda", "name": "NVIDIA GB10", "memory": 0, "free": 0, "driver": "580.95.05"},
    ]  # fmt: skip
    assert computer.parse_nvidia_smi("No devices were found\n") == []


@pytest.mark.parametrize(
    ("text", "version"),
    [
        (
            "mpirun (Open MPI) 5.0.8\n\nReport bugs to https://www.open-mpi.org/community/help/\n",
            "5.0.8",
        ),
        ("mpirun (Open MPI) 4.1.6\n", "4.1.6"),
        ("HYDRA build details:\n    Version:  4.2.0\n", "HYDRA build details:"),
        ("", "unknown"),
    ],
)
def test_mpirun(text: str, version: str) -> None:
    assert computer.parse_mpirun(text) == version


def test_ibv_devices() -> None:
    text = (
        "    device          \t   node GUID\n"
        "    ------          \t----------------\n"
        "    rdma_en2        \t8c7fb2a1c3d00000\n"
        "    rdma_en3        \t8d7fb2a1c3d00000\n"
    )
    assert computer.parse_ibv_devices(text) == ["rdma_en2", "rdma_en3"]
    assert computer.parse_ibv_devices("No IB devices found\n") == []


SEVERAL_THREADS = """
import gc, time
from concurrent.futures import ThreadPoolExecutor
from allhands.cluster import probe
# Another thread goes on wherever objects are made: with computers in threads of their own that happens by chance.
gc.set_threshold(50)
gc.callbacks.append(lambda *_: time.sleep(1e-5))
with ThreadPoolExecutor(4) as pool:
    texts = set(pool.map(lambda _: probe.program(), range(8)))
print(len(texts))
"""


def test_several_threads_may_ask_for_the_program() -> None:
    """Python 3.11 takes one thread's depth for another's where two parse at once: "recursion depth
    mismatch".
    """
    done = subprocess.run(
        [sys.executable, "-c", SEVERAL_THREADS], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.stderr) == ("1\n", "")
