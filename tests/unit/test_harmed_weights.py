"""Commands that answer refuse a model whose outputs are not numbers."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from tiny import write_model

from allhands.errors import ModelError
from allhands.infer.generate import load_for_generation


@pytest.mark.parametrize("bits", [None, 4])
def test_weights_that_are_no_numbers_do_not_answer(tmp_path: Path, bits: int | None) -> None:
    path = write_model(tmp_path / "model", hidden=64, bits=bits)
    load_for_generation(str(path), None)
    file = path / "model.safetensors"
    arrays: dict[str, mx.array] = mx.load(str(file))  # type: ignore[assignment]
    mx.eval(arrays)
    arrays["model.norm.weight"] = mx.full((64,), float("nan"))
    mx.save_safetensors(str(file), arrays, metadata={"format": "mlx"})
    with pytest.raises(ModelError) as error:
        load_for_generation(str(path), None)
    assert error.value.code == "weights-not-finite"
