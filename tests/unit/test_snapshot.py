"""Where weights and optimizer state are held while they are written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
import pytest

from allhands.checkpoints import Tensor
from allhands.train import state
from allhands.train.state import OPTIMIZER_FILE, WEIGHTS_FILE, snapshot

SIZE = 3 * 16 * 8 * 4 + 4 + 8  # float32 weights and Adam's two moments of them, a rate and a step


@pytest.mark.parametrize(("spare", "there"), [(0, False), (2 * SIZE, False), (2 * SIZE + 1, True)])
def test_copies_stay_on_the_device_where_it_has_twice_their_room(
    spare: int, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[bool] = []
    hold = state.hold

    def seen(tree: Any, *, on_device: bool) -> Callable[[], list[Tensor]]:
        places.append(on_device)
        return hold(tree, on_device=on_device)

    monkeypatch.setattr(state, "hold", seen)
    model, optimizer = nn.Linear(16, 8, bias=False), optim.Adam(1e-3)
    optimizer.update(model, {"weight": mx.ones((8, 16))})
    mx.eval(model.parameters(), optimizer.state)
    before = np.array(model.weight)
    get = snapshot(model, optimizer, spare)
    optimizer.update(model, {"weight": mx.ones((8, 16))})
    mx.eval(model.parameters(), optimizer.state)
    found = get()
    assert places == [there, there]
    assert sum(len(each.data) for file in found.values() for each in file) == SIZE
    assert set(found) == {WEIGHTS_FILE, OPTIMIZER_FILE}
    assert np.frombuffer(found[WEIGHTS_FILE][0].data, np.float32).tolist() == before.ravel().tolist()
    assert get() is found  # brought from the device once
