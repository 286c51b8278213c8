"""Where weights and optimizer state are held while they are written."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest

from allhands.checkpoints import Tensor, arrays
from allhands.checkpoints.arrays import snapshot
from allhands.checkpoints.format import OPTIMIZER_FILE, WEIGHTS_FILE
from allhands.train.sharded_state import sharded_state

SIZE = 3 * 16 * 8 * 4 + 4 + 8  # float32 weights and Adam's two moments of them, a rate and a step


@pytest.mark.parametrize(("spare", "there"), [(0, False), (2 * SIZE, False), (2 * SIZE + 1, True)])
def test_copies_stay_on_the_device_where_it_has_twice_their_room(
    spare: int, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[bool] = []
    held = arrays.held

    def seen(state: Any, *, on_device: bool) -> list[Tensor]:
        places.append(on_device)
        return held(state, on_device=on_device)

    monkeypatch.setattr(arrays, "held", seen)
    model, optimizer = nn.Linear(16, 8, bias=False), optim.Adam(1e-3)
    optimizer.update(model, {"weight": mx.ones((8, 16))})
    mx.eval(model.parameters(), optimizer.state)
    before = np.array(model.weight)
    get = snapshot(sharded_state(model, optimizer, None), spare)
    optimizer.update(model, {"weight": mx.ones((8, 16))})
    mx.eval(model.parameters(), optimizer.state)
    found = get()
    assert places == [there, there]
    assert sum(len(each.content()) for file in found.values() for each in file) == SIZE
    assert set(found) == {WEIGHTS_FILE, OPTIMIZER_FILE}
    assert (
        np.frombuffer(found[WEIGHTS_FILE][0].content(), np.float32).tolist()
        == before.ravel().tolist()
    )
