"""Loss and gradient of every architecture that mlx_lm has, against its unmodified models in a process of their own.

The comparison itself is ``benchmarks/gradients.py``: what runs here on a CPU can be run on a GPU by one command.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import architectures
import pytest
from benchmark_scripts import scripts_on_the_path

with scripts_on_the_path():
    import gradients
    from gradients_workers import Settings
    from gradients_workers import compare as compare_all

CHUNKS = 8
Compare = Callable[..., list[Any]]


@pytest.fixture
def compare(tmp_path: Path) -> Compare:
    """The verdicts on all runs of some configurations."""

    def run(names: Sequence[str], **settings: Any) -> list[Any]:
        return compare_all(names, Settings(tmp_path, **settings), jobs=2)

    return run


def listed(verdicts: Sequence[Any]) -> str:
    return "\n".join(gradients.grouped([verdict for verdict in verdicts if not verdict.is_good], named=True))


def test_every_architecture_has_a_configuration() -> None:
    assert sorted(architectures.modules()) == architectures.installed()
    assert len(set(architectures.SAMPLE)) == 12
    assert set(architectures.SAMPLE) <= set(architectures.every())


def test_a_thousandth_of_one_array_is_noticed(compare: Compare) -> None:
    verdicts = compare(["llama"], spoil=True, ways=("lora", "full"))
    assert [verdict.kind for verdict in verdicts] == ["wrong"] * 8
    # With the same in order nothing is said.
    assert {verdict.kind for verdict in compare(["llama~tied"], ways=("lora",), forms=("cpu",))} == {"right"}


@pytest.mark.slow
def test_the_most_different_ones_have_mlx_lms_gradients(compare: Compare) -> None:
    verdicts = compare(architectures.SAMPLE, ways=("lora", "full"))
    assert listed(verdicts) == ""
    assert len(verdicts) == 12 * 8
    assert {verdict.kind for verdict in verdicts} == {"right"}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_architecture_has_mlx_lms_gradients(compare: Compare, chunk: int) -> None:
    names = [name for module in architectures.modules()[chunk::CHUNKS] for name in architectures.names(module)]
    verdicts = compare(names)
    assert listed(verdicts) == ""
    # What mlx_lm itself cannot compute is known, and nothing else is passed over.
    beyond = {(v.name, v.run.way) for v in verdicts if v.kind == "beyond mlx_lm"}
    assert beyond == {(name, way) for name in names for way in architectures.architecture(name).beyond}
