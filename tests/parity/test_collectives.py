"""Collectives with gradients, groups along axes and the one stream, over real back-ends: numbers of
one process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from ring_ranks import run_ring

from allhands.cluster.mpi import find_mpi, mpi_variables, mpirun_command

PROGRAM = Path(__file__).parents[1] / "support" / "collective_ranks.py"
PAIRS = ("replicated", "summed", "gathered", "scattered", "all_max", "chain")
CASES = [
    *(("ring", size) for size in (2, 3, 4)),
    *(
        pytest.param("mpi", n, marks=pytest.mark.skipif(find_mpi() is None, reason="no Open MPI"))
        for n in (2, 3, 4)
    ),
]
pytestmark = pytest.mark.parametrize(("backend", "size"), CASES)


@cache
def errors(backend: str, size: int) -> dict[str, float]:
    """What each rank has found of every case: the largest of all ranks' errors."""
    if backend == "ring":
        done = run_ring([[sys.executable, PROGRAM, "ring", str(size)]] * size, timeout=200)
        assert [(one.returncode, one.stderr) for one in done] == [(0, "")] * size
        texts = [one.stdout for one in done]
    else:
        texts = _told_by_mpi(size)
    found = [json.loads(text) for text in texts]
    assert len(found) == size
    return {name: max(one[name] for one in found) for name in found[0]}


def _told_by_mpi(size: int) -> list[str]:
    mpi = find_mpi()
    assert mpi is not None
    with TemporaryDirectory() as scratch:
        # Ranks that wait leave the cores to the others.
        given = {
            **mpi_variables(mpi, Path(scratch)),
            "OPENBLAS_NUM_THREADS": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }
        done = subprocess.run(
            mpirun_command(mpi, size, [sys.executable, str(PROGRAM), "mpi", str(size)]),
            env={**os.environ, **given},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=200,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def largest(backend: str, size: int, begins: str) -> float:
    """Of all cases whose names begin so; there must be one."""
    found = [error for name, error in errors(backend, size).items() if name.startswith(begins)]
    return max(found)


@pytest.mark.slow
@pytest.mark.parametrize("compiled", ["", " compiled"])
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-5), ("bfloat16", 4e-2)])
@pytest.mark.parametrize("pair", PAIRS)
def test_gradients_are_those_of_one_process(
    backend: str, size: int, pair: str, dtype: str, most: float, compiled: str
) -> None:
    assert errors(backend, size)[f"{pair} {dtype}{compiled}"] <= most


def test_what_is_larger_than_a_socket_holds_goes_down_a_chain_and_back(
    backend: str, size: int
) -> None:
    if size == 2:
        assert errors(backend, size)["chain of 64 MB"] <= 1e-5


def test_groups_along_axes_sum_and_gather_what_their_members_have(backend: str, size: int) -> None:
    sums = {name: error for name, error in errors(backend, size).items() if name.startswith("sum ")}
    assert (
        max(error for name, error in sums.items() if name.endswith("bfloat16")) <= 2e-2
    )  # in whatever order
    assert max(error for name, error in sums.items() if not name.endswith("bfloat16")) <= 1e-6
    assert largest(backend, size, "gather ") == 0
    # What is not finite in one group does not reach another.
    assert largest(backend, size, "nan") == 0


def test_pairs_within_groups(backend: str, size: int) -> None:
    if size == 4:
        assert largest(backend, size, "pair") <= 1e-5
        assert largest(backend, size, "chain of a group") <= 1e-5
        assert largest(backend, size, "unlike stages") == 0


@pytest.mark.parametrize(
    "case", ["another stream", "another thread", "default", "compiled", "moved", "after the move"]
)
def test_two_streams_of_a_group_are_refused(backend: str, size: int, case: str) -> None:
    assert errors(backend, size)[case] == 0


def test_streams_of_a_person_are_taken_one_after_the_other(backend: str, size: int) -> None:
    assert errors(backend, size)["of a person"] <= 1e-6


@pytest.mark.parametrize("pair", ["gathered", "all_max", "scattered", "sent"])
def test_rules_of_mlx_are_wrong_still(backend: str, size: int, pair: str) -> None:
    """Where this fails, MLX has mended its own, and a pair of ours may go."""
    assert errors(backend, size)[f"mlx {pair}"] > 0.1
