"""Loss and gradient of every architecture that mlx_lm has, against its unmodified models in a
process of their own.

The comparison itself is ``benchmarks/gradients.py``: what runs here on a CPU can be run on a GPU by
one command.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import architectures
import mlx.core as mx
import numpy as np
import pytest
from benchmark_scripts import scripts_on_the_path
from mlx_lm.utils import _get_classes

from allhands.kernels.known import sees_ahead

with scripts_on_the_path():
    from gradients_judge import BEYOND, grouped
    from gradients_workers import Settings
    from gradients_workers import compare as compare_all

CHUNKS = 8
Compare = Callable[..., list[Any]]


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    """The verdicts on all runs of some configurations."""
    numbers = iter(range(10))

    def run(names: Sequence[str], **settings: Any) -> list[Any]:
        return compare_all(names, Settings(tmp_path / str(next(numbers)), **settings), jobs=2)

    return run


def listed(verdicts: Sequence[Any]) -> str:
    """What is not right, in lines; the known limits of mlx_lm and refusals of ours apart."""
    return "\n".join(grouped([verdict for verdict in verdicts if not verdict.is_good], named=True))


def test_every_architecture_has_a_configuration() -> None:
    assert sorted(architectures.modules()) == architectures.installed()
    assert len(set(architectures.SAMPLE)) == 8
    assert set(architectures.SAMPLE) <= set(architectures.every())


@pytest.mark.slow
def test_a_thousandth_of_one_array_is_noticed(compare: Compare) -> None:
    assert {
        verdict.kind for verdict in compare(["llama~tied"], spoil=True, ways=("lora", "full"))
    } == {"wrong"}
    # With the same in order nothing is said.
    assert {verdict.kind for verdict in compare(["llama~tied"], ways=("lora", "full"))} == {"right"}


@pytest.mark.slow
def test_the_most_different_ones_have_mlx_lms_gradients(compare: Compare) -> None:
    verdicts = compare(architectures.SAMPLE, ways=("lora", "full"))
    assert listed(verdicts) == ""
    # Nothing is passed over but the recomputation of one.
    assert sum(verdict.kind == "right" for verdict in verdicts) == 8 * 8 - 4


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_architecture_has_mlx_lms_gradients(compare: Compare, chunk: int) -> None:
    names = [
        name
        for module in architectures.modules()[chunk::CHUNKS]
        for name in architectures.names(module)
    ]
    verdicts = compare(names)
    assert listed(verdicts) == ""
    assert {verdict.name for verdict in verdicts} == set(names)
    # What mlx_lm itself cannot compute is known, and nothing else is passed over.
    unknown = [
        (v.name, v.run.way, v.text) for v in verdicts if v.kind == BEYOND and not known_beyond(v)
    ]
    assert unknown == []
    # And what it can by now is asked of it.
    known = {(name, way) for name in names for way in architectures.architecture(name).beyond}
    beyond = {(v.name, way) for v in verdicts if v.kind == BEYOND for way in ("", v.run.way)}
    compared = {(v.name, way) for v in verdicts for way in ("", v.run.way)}
    assert known & compared <= beyond


def known_beyond(verdict: Any) -> bool:
    beyond = architectures.architecture(verdict.name).beyond
    return any(beyond[way] in verdict.text for way in ("", verdict.run.way) if way in beyond)


@pytest.mark.long
def test_architectures_whose_tokens_see_later_ones_are_known(uncompiled: None) -> None:
    """Told by mlx_lm's own models: what comes last in a row is changed."""
    row = mx.random.randint(1, 250, (1, 60), key=mx.random.key(3))
    other = mx.concatenate([row[:, :40], (row[:, 40:] + 7) % 250], axis=1)
    for name in architectures.every():
        described = architectures.architecture(name)
        if any(way in described.beyond for way in ("", "lora", "full")):
            continue
        model_class, arguments = _get_classes(described.config)
        model = model_class(arguments.from_dict(described.config))
        model.eval()
        before, after = (
            np.array(model(tokens).astype(mx.float32))[0, :40] for tokens in (row, other)
        )
        # A score of minus infinity is of no token.
        apart = np.abs(
            np.where(np.isfinite(before), before, 0.0) - np.where(np.isfinite(after), after, 0.0)
        ).max()
        assert (apart > 1e-4) == (sees_ahead(model) is not None), name


@pytest.fixture
def uncompiled() -> Iterator[None]:
    mx.disable_compile()
    yield
    mx.enable_compile()


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_check_before_training_finds_nothing_where_nothing_is_wrong(compare: Compare) -> None:
    names = [
        name for name in architectures.every() if not architectures.architecture(name).is_variant
    ]
    verdicts = compare(names, ways=("lora",), again=False, check="on")
    assert listed(verdicts) == ""
