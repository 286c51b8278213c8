"""Packed gradients: what they are rounded to, who sends how many bytes by which way, and where that
is refused.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from command_line import parse
from twins import run_ranks

from allhands.config.schema import TrainConfig
from allhands.distributed.backend import SingleProcess
from allhands.distributed.codecs import CODECS
from allhands.distributed.packed import Packing, pack, unpack
from allhands.distributed.reduce import bucket_bytes_for
from allhands.errors import ConfigError
from allhands.kernels.fused.embedding import Apart
from allhands.parallel.costs import DataCosts, DividedOptimizerCosts, PackedGradients, Traffic
from allhands.parallel.registry import STRATEGIES, Entry
from allhands.plan.links import link_of
from allhands.plan.speed import StepModel, exchange_s
from allhands.run.strategy_choice import chosen_codec
from allhands.runtime.blas import native_library

ERRORS = {"bf16": 2e-3, "int8": 6e-3, "int4": 1e-1}


class Ranks(SingleProcess):
    """As many as there should be, over a back-end."""

    def __init__(self, size: int, backend: str) -> None:
        self.size, self.backend = size, backend


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("size", [1e-20, 1e-9, 1.0, 1e9])
def test_numbers_of_every_size_are_rounded_alike(codec, size: float) -> None:  # type: ignore[no-untyped-def]
    """MLX takes no scale below 1e-7, under which adapters' first gradients lie."""
    row = mx.random.normal((6400,), key=mx.random.key(3)) * size
    words = pack(codec, row)
    assert words.nbytes == codec.packed_bytes(6400) == round(codec.ratio * row.nbytes)
    found = np.array(unpack(codec, words, 6400)) / size
    exact = np.array(row) / size
    assert np.linalg.norm(found - exact) <= ERRORS[codec.name] * np.linalg.norm(exact)
    assert np.linalg.norm(found - exact) >= 0.1 * ERRORS[codec.name] * np.linalg.norm(exact)


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
def test_nothing_and_the_same_everywhere_stay_what_they_are(codec) -> None:  # type: ignore[no-untyped-def]
    for value in (0.0, 0.5, -0.25):
        row = mx.full((128,), value)
        assert mx.array_equal(unpack(codec, pack(codec, row), 128), row)


def test_groups_do_not_disturb_each_other() -> None:
    """A norm's gradient beside a matrix's, a million times as large."""
    row = mx.concatenate(
        [mx.random.normal((64,), key=mx.random.key(1)) * scale for scale in (1e6, 1.0, 1e-6)]
    )
    found = unpack(CODECS["int8"], pack(CODECS["int8"], row), 192)
    for place in range(3):
        part = slice(64 * place, 64 * place + 64)
        assert mx.linalg.norm(found[part] - row[part]) <= 0.01 * mx.linalg.norm(row[part])


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_stays_so(codec, value: float) -> None:  # type: ignore[no-untyped-def]
    row = mx.where(mx.arange(128) == 77, value, mx.ones((128,)))
    found = unpack(codec, pack(codec, row), 128)
    assert not mx.isfinite(found).all()
    assert mx.isnan(found).any() == np.isnan(value)


PACKED = """
import allhands, hashlib, sys
import mlx.core as mx, numpy as np
from allhands.distributed.codecs import CODECS
from allhands.distributed.packed import Packing, pack
from twins import run_ranks

def work(communicator):
    row = mx.random.normal((64 * 700,), key=mx.random.key(communicator.rank))
    row = row * 10.0 ** (mx.arange(64 * 700) // 2048 - 9)
    packing = Packing(communicator, CODECS[name])
    done = packing.sum([row], packing.nothing_left([row]))
    return [np.asarray(each).tobytes() for each in (pack(CODECS[name], row), done.sums[0], done.left[0])]

for name in ("int8", "int4"):
    print(name, [[hashlib.sha256(each).hexdigest() for each in of_rank] for of_rank in run_ranks(2, work)])
"""


@pytest.mark.skipif(native_library() is None, reason="there is no code of our own here")
def test_code_of_our_own_packs_and_adds_up_with_the_bits_of_mlx() -> None:
    told = list[str]()
    for native in ("on", "off"):
        environ = {**os.environ, "ALLHANDS_NATIVE": native, "PYTHONPATH": os.pathsep.join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", PACKED], capture_output=True, text=True, env=environ, check=True
        )
        told.append(done.stdout)
    assert told[0] == told[1]
    assert told[0].count("[") == 6


@pytest.mark.parametrize("name", CODECS)
def test_ranks_with_nothing_and_with_everything_add_up(name: str) -> None:
    """One rank has no rows: what it had left out is sent all the same."""
    size = 3 if CODECS[name].grouped else 2

    def work(communicator):  # type: ignore[no-untyped-def]
        packing = Packing(communicator, CODECS[name])
        rank = communicator.rank
        arrays = [mx.random.normal((50, 70), key=mx.random.key(rank)), mx.ones((3,))]
        total, left = mx.zeros((50, 70)), packing.nothing_left(arrays)
        for step in range(3):
            given = arrays if step == 0 or rank else [mx.zeros_like(each) for each in arrays]
            done = packing.sum(given, left, mx.array([1.0]))
            total, left = total + done.sums[0], done.left
            assert done.scalars is not None
            assert done.scalars.item() == size
            # The small one travels as it is.
            assert done.sums[1].tolist() == [size - (step > 0)] * 3
            mx.eval(total)
        kept = [np.array(each) for each in left if each is not None]
        return np.array(total), kept

    found = run_ranks(size, work)
    assert not any(isinstance(each, Exception) for each in found), found
    brought = [
        np.array(mx.random.normal((50, 70), key=mx.random.key(rank))) for rank in range(size)
    ]
    exact = brought[0] + 3 * sum(brought[1:])
    totals = [each[0] for each in found]  # type: ignore[index]
    assert all(np.array_equal(each, totals[0]) for each in totals)
    if CODECS[name].grouped:
        kept = sum(each[1][0] for each in found)  # type: ignore[index]
        np.testing.assert_allclose(totals[0] + kept, exact, atol=1e-5)
    else:
        np.testing.assert_allclose(totals[0], exact, atol=0.05)


# --- bytes and ways -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "backend", "ranks", "route"),
    [
        *(("int8", "ring", ranks, "gather" if ranks <= 7 else "pass") for ranks in range(2, 10)),
        *(
            ("int4", "mpi", ranks, "gather" if ranks <= 12 else "pass")
            for ranks in (2, 3, 12, 13, 64)
        ),
        *(("bf16", "ring", ranks, "gather" if ranks == 2 else "sum") for ranks in (2, 3, 8)),
        ("int8", "nccl", 8, "gather"),
    ],
)
def test_the_way_with_the_fewest_roundings_that_saves_bytes(
    name: str, backend: str, ranks: int, route: str
) -> None:
    assert CODECS[name].route(backend, ranks) == route


def test_gradients_in_half_precision_are_gathered_by_fewer() -> None:
    routes = [CODECS["int8"].route("ring", ranks, 2) for ranks in (2, 3, 4)]
    assert routes == ["gather", "gather", "pass"]
    assert not CODECS["bf16"].packs((64, 64), 2)
    # Two groups of 72 bytes are more than 65 numbers of two.
    assert [CODECS["int8"].packs((count,), 2) for count in (63, 64, 65, 128)] == [
        False,
        True,
        False,
        True,
    ]
    assert CODECS["int8"].packs((65,), 4)


@pytest.mark.parametrize("ranks", [2, 3, 7, 8, 12, 13, 32])
@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("backend", ["ring", "mpi"])
def test_packed_never_sends_more(name: str, backend: str, ranks: int) -> None:
    packed, plain = PackedGradients(CODECS[name], backend), Traffic(all_reduced=60_000_000)
    traffic = packed.traffic(60_000_000, ranks)
    assert traffic.sent(ranks) < plain.sent(ranks)
    assert CODECS[name].gains(backend, ranks)
    if ranks == 2:
        bars = {"bf16": 0.5, "int8": 0.30, "int4": 0.17}
        assert traffic.sent(2) <= bars[name] * plain.sent(2)
    # A divided optimizer's weights travel besides.
    divided = DividedOptimizerCosts().traffic(60_000_000, 60_000_000, scatters=True, packed=traffic)
    assert divided.sent(ranks) == pytest.approx(
        traffic.sent(ranks) + 60_000_000 * (ranks - 1) / ranks, abs=2
    )
    assert DataCosts().traffic(60_000_000, 0, scatters=True, packed=traffic) == traffic


def test_a_plan_takes_the_time_of_what_travels() -> None:
    link = link_of("100Mbit/s")
    plain = StepModel(0.1, 800.0, 1e-3, 8, 60_000_000, 32_000_000)
    packed = replace(plain, packed=PackedGradients(CODECS["int4"], "ring"))
    assert exchange_s(packed, link, 2) == pytest.approx(
        0.15625 * exchange_s(plain, link, 2), rel=0.01
    )


# --- what is refused ------------------------------------------------------------------------------


def model_of(dtype: mx.Dtype) -> nn.Module:
    model = nn.Linear(64, 64, bias=False)
    model.set_dtype(dtype)
    return model


@pytest.mark.parametrize(
    ("compress", "dtype", "ranks", "backend", "fits"),
    [
        ("int8", mx.float32, 2, "ring", True),
        ("int8", mx.float32, 64, "mpi", True),
        ("int8", mx.float32, 7, "nccl", True),
        ("int8", mx.float32, 8, "nccl", False),
        ("int4", mx.float32, 8, "nccl", True),
        ("bf16", mx.bfloat16, 2, "ring", False),
        ("bf16", mx.float32, 2, "ring", True),
        ("int8", mx.bfloat16, 4, "nccl", False),
        ("int8", mx.bfloat16, 4, "ring", True),
    ],
)
def test_what_saves_nothing_is_refused(
    compress: str, dtype: mx.Dtype, ranks: int, backend: str, fits: bool
) -> None:
    config = TrainConfig(compress=compress)  # type: ignore[arg-type]
    parts = (config, Ranks(ranks, backend), model_of(dtype), "data")
    if fits:
        codec = chosen_codec(*parts)
        assert codec is not None
        assert codec.name == compress
        return
    with pytest.raises(ConfigError) as caught:
        chosen_codec(*parts)
    assert caught.value.where == f"--compress {compress}"
    assert caught.value.exit_code == 2


def test_nothing_is_packed_unless_asked_for() -> None:
    assert chosen_codec(TrainConfig(), Ranks(2, "ring"), model_of(mx.float32), "data") is None
    assert (
        chosen_codec(TrainConfig(compress="int8"), Ranks(1, "none"), model_of(mx.float32), "data")
        is None
    )


def test_a_strategy_that_cannot_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(STRATEGIES, "other", Entry("another", DataCosts(), "nowhere:nothing"))
    with pytest.raises(ConfigError) as caught:
        chosen_codec(TrainConfig(compress="int8"), Ranks(2, "ring"), model_of(mx.float32), "other")
    assert caught.value.code == "strategy-unsuitable"
    hint = caught.value.hint.replace("--sync-every", "--sync-every 5")
    for flags in hint.removeprefix("leave it out, or take ").split(" or "):
        name, options = parse(["train", *flags.split()])
        assert (name, len(options)) == ("train", 1), flags


def test_rows_of_a_table_travel_where_they_are_fewer_bytes_than_the_packed_table() -> None:
    from allhands.parallel.lookups import TravellingLookups

    class Table:
        weight, apart = mx.zeros((1000, 64)), Apart()

    class Batch:
        sole, most = True, 300

    rows = TravellingLookups(Table(), 0, None, 2)  # type: ignore[arg-type]
    assert rows.fits(Batch())  # type: ignore[arg-type]
    rows = TravellingLookups(Table(), 0, None, 2, codec=CODECS["int8"])  # type: ignore[arg-type]
    assert not rows.fits(Batch())  # type: ignore[arg-type]
    Batch.most = 200
    assert rows.fits(Batch())  # type: ignore[arg-type]


def test_calls_are_as_large_as_asked_for_or_as_the_back_end_likes() -> None:
    assert bucket_bytes_for("nccl", 1.5) == bucket_bytes_for("ring", 1.5) == 1_500_000
    assert (
        bucket_bytes_for("nccl", None)
        > bucket_bytes_for("ring", None)
        == bucket_bytes_for("mpi", None)
    )
