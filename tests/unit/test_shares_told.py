"""Changes of the ranks' shares as events: a line for people, a line of the file, and back."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path

from test_metrics import STARTED, console, train

from allhands.observe.metrics import (
    ConsoleSink,
    JsonlSink,
    SharesChanged,
    decode_event,
    encode_event,
    read_metrics,
)


def test_a_change_of_shares_is_one_line_with_its_reason(tmp_path: Path) -> None:
    changed = SharesChanged(40, 43, (0.98, 0.02), (0.5, 0.5), (3405.0, 61.2), (True, False))
    many = SharesChanged(80, 83, (0.1,) * 10, (0.1,) * 10, (5.0,) * 10, (True,) * 10)
    plain, out = console(terminal=False, width=20)
    with ConsoleSink(plain) as sink:
        sink.emit(changed)
        sink.emit(many)
    lines = out.getvalue().splitlines()
    assert "50 : 50 % -> 98 : 2 % from step 44" in lines[0]
    assert "3,405, 61 tokens/s" in lines[0]
    assert "rank 1 would need longer for one row" in lines[0]
    assert len(lines) == 2
    assert len(lines[1]) < 200
    assert decode_event(encode_event(changed)) == changed
    with closing(JsonlSink(tmp_path / "metrics.jsonl")) as file:
        for event in (STARTED, changed, replace(train(45), shares=(0.98, 0.02))):
            file.emit(event)
    history = read_metrics(tmp_path / "metrics.jsonl")
    assert history.shares == [changed]
    assert history.train[-1].shares == (0.98, 0.02)
