"""Ranks that die in every phase of a round of local steps: the run ends as if nothing had happened,
bit for bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from faulty import ITERS, SAVE_EVERY, Bench

pytestmark = pytest.mark.long

ROUNDS = {
    "mean": ("--sync-every", "5"),
    "nesterov": (
        "--sync-every",
        "5",
        "--outer-lr",
        "0.7",
        "--outer-momentum",
        "0.9",
        "--compress",
        "int8",
    ),
    "delayed": ("--sync-delay", "1", "--compress", "int8"),
    # Parts are on their way after steps 5 and 7 (of the first) and 10 and 12 (of the second), and
    # so on.
    "fragments": (
        "--sync-every",
        "10",
        "--sync-fragments",
        "2",
        "--sync-delay",
        "3",
        "--save-every",
        "10",
    ),
}


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(tmp_path_factory.mktemp("rounds"))


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ROUNDS)
def test_ranks_that_die_in_every_phase_of_a_round(bench: Bench, name: str, tmp_path: Path) -> None:
    """Within it, while gradients or weights travel, before an update, and while its end is saved."""
    flags = ROUNDS[name]
    with bench.trial(f"{name}-undisturbed") as trial:
        trial.run(*flags)
        assert trial.steps() == list(range(1, ITERS + 1))
        undisturbed = trial.result()
    with bench.trial(name) as trial:
        trial.plan(
            {"rank": 1, "step": 3, "kind": "kill"},
            {"rank": 2, "step": 4, "kind": "exit", "code": 7, "at": "round"},
            {"rank": 0, "step": 8, "kind": "kill", "at": "round"},
            {"rank": 1, "step": 12, "kind": "kill", "at": "reduce"},
            {"rank": 2, "step": 14, "kind": "raise", "at": "update"},
            {"rank": 0, "step": 15, "kind": "kill", "at": "save", "write": 3},
        )
        job = trial.start(*flags)
        assert job.finish(200) == 0, (job.out, job.err)
        assert [fault.index for fault in trial.fired()] == [0, 1, 2, 3, 4, 5]
        assert len(trial.events("restarting")) == 6
        assert trial.result() == undisturbed
        assert ITERS % SAVE_EVERY == 0
