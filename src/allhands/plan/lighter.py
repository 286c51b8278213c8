"""Ways to send fewer bytes over a slow link, with the predicted time of a step and the bytes that a
rank sends.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from allhands.distributed.codecs import CODECS
from allhands.parallel.costs import DataCosts, LocalCosts, PackedGradients
from allhands.parallel.rounds import Rounds
from allhands.plan.links import ExchangeTimes
from allhands.plan.speed import StepModel, predict

# Part of a step that must be waiting for the link, so that ways to send less are shown.
_FELT = 0.1
_BATCHES = 4
_ROUNDS = Rounds(50)
_STREAMED = replace(_ROUNDS, fragments=5, delay=10)
# Relative change of the validation loss against plain training, after 2,000 steps of pre-training
# on two ranks (benchmarks/slow_links.py).
PRICES = {
    "--compress bf16": -0.0002,
    "--compress int8": 0.0001,
    "--compress int4": -0.0017,
    "--compress int4 --sync-delay 1": 0.009,
    "--sync-every 20": 0.056,
    "--sync-every 50": 0.073,
    "--sync-every 50 --compress int4": 0.073,
    f"{_STREAMED.flags} --compress int4": 0.078,
}


@dataclass(frozen=True)
class Lighter:
    """One way to send fewer bytes.

    Attributes:
        flags: flags that switch it on; empty: the present way.
        step_s: seconds for one batch.
        exposed_s: the part of ``step_s`` in which ranks wait for the exchange.
        sent_bytes: bytes that a rank sends for one batch.
        price: relative increase of the validation loss in one measured pre-training; ``None`` if
            not measured.
    """

    flags: str
    step_s: float
    exposed_s: float
    sent_bytes: int
    price: float | None = None


def lighter_ways(
    step: StepModel, link: ExchangeTimes, speeds: Sequence[float], room: int, kind: str
) -> list[Lighter]:
    """Return the present way, then all ways that send less; none if steps hardly wait for the link,
    or if the present way already sends less.

    Args:
        speeds: speeds of the computers.
        room: number of processes for which the cores of one computer suffice; 0: no limit.
        kind: kind of processor.
    """
    if (
        len(speeds) < 2
        or step.every > 1
        or step.beside
        or step.packed is not None
        or not step.gradient_bytes
    ):
        return []
    ways: list[Lighter] = []
    for flags, model, batches in _models(step, kind, speeds):
        found, gradient = predict(model, link, speeds, room), model.gradient_bytes
        packed = None if model.packed is None else model.packed.traffic(gradient, len(speeds))
        costs = DataCosts() if model.every == 1 else LocalCosts(Rounds(model.every))
        traffic = costs.traffic(gradient, gradient, scatters=False, packed=packed)
        ways.append(
            Lighter(
                flags,
                found.step_s / batches,
                found.exposed_s / batches,
                round(traffic.sent(len(speeds)) / batches),
                PRICES.get(flags),
            )
        )
    return ways if ways[0].exposed_s >= _FELT * ways[0].step_s else []


def _models(
    step: StepModel, kind: str, speeds: Sequence[float]
) -> Iterator[tuple[str, StepModel, int]]:
    """Yield each way: its flags, its step, and the batches of a step."""
    backend = "nccl" if kind == "cuda" else "ring"
    packed = {
        name: PackedGradients(codec, backend, step.word)
        for name, codec in CODECS.items()
        if codec.gains(backend, len(speeds), step.word)
    }
    yield "", step, 1
    yield f"--grad-accumulation-steps {_BATCHES}", step.times(_BATCHES), _BATCHES
    for name, way in packed.items():
        yield f"--compress {name}", replace(step, packed=way), 1
    if "int4" in packed:
        yield (
            "--compress int4 --sync-delay 1",
            replace(step, packed=packed["int4"], overlapped=False, beside=1),
            1,
        )
    local = replace(step, every=_ROUNDS.every, overlapped=False)
    yield _ROUNDS.flags, local, 1
    if "int4" in packed:
        local = replace(local, packed=packed["int4"])
        yield f"{_ROUNDS.flags} --compress int4", local, 1
        yield f"{_STREAMED.flags} --compress int4", replace(local, beside=_STREAMED.beside), 1
