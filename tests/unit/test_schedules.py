"""Schedules of a pipeline: nobody waits for ever, nothing is computed before what it needs, memory
and idle time.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allhands.parallel.schedules import Action, Schedule, ScheduleName, make_schedule

SHAPES = st.tuples(st.integers(1, 6), st.integers(1, 13), st.integers(1, 3))


def made(
    name: ScheduleName, ranks: int, batches: int, per_rank: int, first_trained: int = 0
) -> Schedule:
    return make_schedule(
        name, ranks, batches, max(2, per_rank) if name == "interleaved" else 1, first_trained
    )


def run(schedule: Schedule) -> list[tuple[int, Action]]:
    """What happens, in an order in which it can: a message takes place when both ends have come to
    it.

    Raises AssertionError where ranks wait for each other for ever, or take one message for another.
    """
    places, happened = [0] * len(schedule.ranks), list[tuple[int, Action]]()

    def now(rank: int) -> Action | None:
        return (
            schedule.ranks[rank][places[rank]] if places[rank] < len(schedule.ranks[rank]) else None
        )

    while any(now(rank) for rank in range(len(places))):
        moved = False
        for rank in range(len(places)):
            action = now(rank)
            if action is None or action.kind == "receive":
                continue
            if action.kind == "send":
                other = now(action.peer)
                if other is None or (other.kind, other.peer) != ("receive", rank):
                    continue
                assert (other.stage, other.micro_batch, other.to) == (
                    action.stage,
                    action.micro_batch,
                    action.to,
                )
                happened.append((action.peer, other))
                places[action.peer] += 1
            happened.append((rank, action))
            places[rank] += 1
            moved = True
        assert moved, [now(rank) for rank in range(len(places))]
    return happened


@pytest.mark.parametrize("name", ["1f1b", "interleaved", "zb"])
@settings(max_examples=120, deadline=None)
@given(shape=SHAPES, frozen=st.integers(0, 17))
def test_everything_is_done_once_after_what_it_needs(
    name: ScheduleName, shape: tuple[int, int, int], frozen: int
) -> None:
    ranks, batches, per_rank = shape
    last = ranks * (max(2, per_rank) if name == "interleaved" else 1) - 1
    first_trained = min(frozen, last)
    schedule = made(name, ranks, batches, per_rank, first_trained)
    assert schedule.num_stages == last + 1
    there = {("activations", 0, batch) for batch in range(batches)}
    done = set[tuple[str, int, int]]()
    for rank, action in run(schedule):
        stage, batch = action.stage, action.micro_batch
        if action.kind == "receive":
            there.add(("activations" if action.to > stage else "gradients", action.to, batch))
            continue
        if action.kind == "send":
            needed = ("forward",) if action.to > stage else ("backward", "inputs")
            assert any((kind, stage, batch) in done for kind in needed)
            continue
        assert stage % ranks == rank
        assert (action.kind, stage, batch) not in done
        if action.kind == "forward":
            assert ("activations", stage, batch) in there
            if stage < last and ranks == 1:
                there.add(("activations", stage + 1, batch))
        elif action.kind == "weights":
            assert ("inputs", stage, batch) in done
        else:
            assert ("forward", stage, batch) in done
            assert stage == last or ("gradients", stage, batch) in there
            if stage > first_trained and ranks == 1:
                there.add(("gradients", stage - 1, batch))
        done.add((action.kind, stage, batch))
    back = ("inputs", "weights") if name == "zb" else ("backward",)
    kinds = {s: ("forward", *(back if s >= first_trained else ())) for s in range(last + 1)}
    assert done == {(k, s, b) for s in range(last + 1) for k in kinds[s] for b in range(batches)}
    # Nobody sends a gradient to a stage that trains nothing.
    assert all(stage >= first_trained for kind, stage, _ in there if kind == "gradients")


@pytest.mark.parametrize(("ranks", "first_trained"), [(2, 1), (4, 1), (4, 3)])
def test_stages_that_train_nothing_run_ahead_by_as_many_micro_batches_as_there_are_ranks(
    ranks: int, first_trained: int
) -> None:
    schedule = made("1f1b", ranks, 8, 1, first_trained)
    ahead = most = 0
    for rank, action in run(schedule):
        if action.kind == "forward":
            ahead += (rank == first_trained - 1) - (rank == first_trained)
            most = max(most, ahead)
    assert most <= ranks + 1
    assert schedule.most_alive[0] == 1


@pytest.mark.parametrize("name", ["1f1b", "zb"])
@settings(max_examples=60, deadline=None)
@given(ranks=st.integers(1, 6), batches=st.integers(1, 13))
def test_no_rank_holds_more_micro_batches_than_there_are_ranks(
    name: ScheduleName, ranks: int, batches: int
) -> None:
    schedule = made(name, ranks, batches, 1)
    for rank, actions in enumerate(schedule.ranks):
        alive, most = 0, 0
        for action in actions:
            alive += (action.kind == "forward") - (action.kind in ("backward", "weights"))
            most = max(most, alive)
        assert most == schedule.most_alive[rank] <= (ranks if name == "zb" else ranks - rank)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("rounds", [1, 2, 4])
def test_the_idle_time_is_that_of_the_papers(ranks: int, rounds: int) -> None:
    batches = ranks * rounds
    assert made("1f1b", ranks, batches, 1).idle == pytest.approx(
        (ranks - 1) / (batches + ranks - 1)
    )
    for per_rank in (2, 3):
        bubble = (ranks - 1) / (per_rank * batches + ranks - 1)
        assert made("interleaved", ranks, batches, per_rank).idle == pytest.approx(bubble)
    assert made("zb", ranks, batches, 1).idle < made("1f1b", ranks, batches, 1).idle


def test_stages_that_a_schedule_does_not_have() -> None:
    for name, per_rank in (("1f1b", 2), ("zb", 2), ("interleaved", 1), ("1f1b", 0)):
        with pytest.raises(ValueError, match="stages a rank"):
            make_schedule(name, 2, 4, per_rank)  # pyright: ignore[reportArgumentType]
