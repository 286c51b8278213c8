"""What the processes of a run have together, beside what each of them has."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from test_monitor import SAMPLE

from allhands.observe.monitor import Board


def test_together_is_never_below_the_highest_of_one_process() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        board = Board()
        number = int(random.integers(1, 4))
        for place in range(int(random.integers(1, 30))):
            rank = int(random.integers(0, number))
            rss = int(random.integers(1, 10**9))
            board.add(
                replace(
                    SAMPLE,
                    rank=rank,
                    pid=10 + rank,
                    host=f"node{rank % 2}",
                    time=1000.0 + 2.5 * place,
                    rss_bytes=rss,
                    pss_bytes=int(rss * random.uniform(0.3, 1.0)),
                    peak_rss_bytes=rss + int(random.integers(0, 10**8)),
                    ended=bool(random.integers(0, 4) == 0),
                )
            )
            assert board.together_bytes(1000.0 + 2.5 * place) <= board.peak_together_bytes
        for row in board.rows():
            assert board.peak_together_bytes >= max(
                row.peak_pss_bytes, row.peak_rss_bytes, row.last.pss_bytes
            )
            assert board.peak_together_bytes >= board.peak_ranks_bytes >= row.peak_pss_bytes


def test_what_a_process_held_to_its_end_was_held_together() -> None:
    board = Board(
        [SAMPLE, replace(SAMPLE, time=1002.0, pss_bytes=290_000_000, peak_rss_bytes=0, ended=True)]
    )
    assert board.peak_together_bytes >= 290_000_000
    # Two computers have what each has; one computer no more than all its processes.
    both = [
        replace(SAMPLE, peak_rss_bytes=0),
        replace(SAMPLE, peak_rss_bytes=0, host="there", rank=1, pid=11),
    ]
    assert Board(both).peak_together_bytes == 2 * SAMPLE.rss_bytes
    one = [replace(SAMPLE, peak_rss_bytes=0), replace(SAMPLE, peak_rss_bytes=0, rank=1, pid=11)]
    assert Board(one).peak_together_bytes == 2 * SAMPLE.pss_bytes
