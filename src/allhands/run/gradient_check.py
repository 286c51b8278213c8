"""Check of a training step before the first step: its loss and gradient are compared with those of
mlx_lm's own model.

mlx_lm's own model computes them with MLX's operations, and the model computes them again with the
faster forms of this package. Both compute the same two rows: a short one, and one as long as the
longest of the data. Gradients are compared by random projections, so that no copy of a large
model's gradient is held.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from allhands.config.schema import TrainConfig
from allhands.errors import ModelError, StorageError
from allhands.io.files import make_directory, write_whole
from allhands.io.trees import flatten, number
from allhands.model import moments
from allhands.model.adapters import ADAPTER_LEAVES
from allhands.model.dropout import DropoutKeys
from allhands.model.load import LoadedModel
from allhands.parallel.gradient import make_gradient
from allhands.run.datasets import Datasets
from allhands.run.gradient_cost import SHORT_TOKENS, TRAINED, PassCost
from allhands.run.kernel_forms import KernelForms
from allhands.runtime.accelerator import Accelerator
from allhands.runtime.blas import cache_dir, give_back_freed_pages
from allhands.runtime.versions import versions_of

_BINS = 1024  # numbers of a projection: a norm's relative error is about 1 / sqrt(2 * 1024)
_LIMITS = {"float32": 5e-3, "float16": 0.15, "bfloat16": 0.15}
# In half precision two right computations may differ by more: routers choose other experts, large
# activations are rounded. So the distance of mlx_lm's result from float32 is measured, and ours may
# differ from mlx_lm's by this multiple of it.
_TIMES_NOISE = 3.0
_LIMIT_UNMEASURED = 0.6
# Float32 products may be computed with shorter factors on a GPU.
_LIMIT_GPU_FLOAT32 = 0.03
_LOSS_LIMITS = {"float32": 1e-3, "float16": 0.03, "bfloat16": 0.03}
_SHORT_S, _LONG_S = 1.0, 2.0  # seconds for the short and the long row
# In half precision a router may choose another expert in one row by chance. So if the first row
# differs, the middle one of this many rows decides.
_DRAWS = 3
_FORMAT = 1


@dataclass(frozen=True)
class Compared:
    """One row, computed by both.

    Attributes:
        tokens: number of tokens of the row.
        blocks: number of blocks in use; these are the model's last ones.
        loss: loss of this package, a mean over the trained places.
        expected_loss: loss of mlx_lm's own model.
        difference: norm of the difference of the gradients, as a share of the norm of mlx_lm's.
        limit: largest difference that counts as rounding.
        loss_limit: the same for the loss, as a share of it.
        worst: the array that differs most, and its difference as a share of its norm (at least 1 %
            of the gradient's).
    """

    tokens: int
    blocks: int
    loss: float
    expected_loss: float
    difference: float
    limit: float
    loss_limit: float
    worst: tuple[str, float]

    @property
    def excess(self) -> float:
        """The difference of gradients or losses in multiples of rounding; infinite if it is no
        number.
        """
        loss = abs(self.loss - self.expected_loss) / max(abs(self.expected_loss), 1.0)
        found = max(self.difference / self.limit, loss / self.loss_limit)
        return found if math.isfinite(found) and math.isfinite(loss) else math.inf

    @property
    def is_off(self) -> bool:
        """True if this row differs by more than rounding."""
        return self.excess > 1.0


@dataclass(frozen=True)
class GradientVerdict:
    """The result of a check.

    Attributes:
        compared: comparison of each row.
        notes: comparisons that were not possible, with the reasons.
        is_complete: True if every row was compared; if not, the reason may be gone the next time.
    """

    compared: tuple[Compared, ...]
    notes: tuple[str, ...] = ()
    is_complete: bool = True

    @property
    def is_right(self) -> bool:
        """True if nothing that was compared differs by more than rounding."""
        return not any(row.is_off for row in self.compared)

    def raise_if_wrong(self, model: str) -> None:
        """Raise an error if a row differs; ``model`` is named in it.

        Raises:
            ModelError: a row differs by more than rounding.
        """
        row = next((each for each in self.compared if each.is_off), None)
        if row is None:
            return
        name, share = row.worst
        raise ModelError(
            f"on a row of {row.tokens} tokens this step's gradient differs from that of mlx_lm's own model by "
            f"{row.difference:.2g} of its norm (up to {row.limit:.2g} is rounding), most in {name} ({share:.2g}); "
            f"the loss is {row.loss:.4f} and mlx_lm's {row.expected_loss:.4f}",
            code="gradient-differs",
            where=model,
            hint="please report it with the model's config.json; ALLHANDS_KERNELS=plain computes more of the model as "
            "mlx_lm does, and --gradient-check off goes on regardless",
        )


# --- the two passes -------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Row:
    """A row that both models compute, and the number of the last blocks that they use."""

    tokens: mx.array
    blocks: int

    @property
    def places(self) -> int:
        """Number of inputs: the last token is only a target."""
        return len(self.tokens) - 1

    @property
    def trained(self) -> int:
        """Number of places whose loss counts; these are the last ones."""
        return min(TRAINED, len(self.tokens) - 1)


@dataclass(frozen=True)
class _Pass:
    """Loss, and projections and norms of the gradient by the names of its arrays."""

    loss: float
    projections: dict[str, mx.array]
    norms: dict[str, float]

    @property
    def is_finite(self) -> bool:
        return all(map(math.isfinite, (self.loss, *self.norms.values())))


@dataclass(frozen=True)
class _Told:
    """A row, mlx_lm's pass over it, and the largest differences of gradient and loss that count as
    rounding.
    """

    row: _Row
    theirs: _Pass
    limit: float
    loss_limit: float


class GradientCheck:
    """Comparison of our gradient with mlx_lm's on two rows.

    The constructor computes mlx_lm's part, while the model is still as mlx_lm made it.
    """

    def __init__(
        self,
        model: nn.Module,
        accelerator: Accelerator,
        config: Mapping[str, Any],
        *,
        longest: int,
        largest_token: int,
        bounded: bool = True,
    ) -> None:
        """Compute mlx_lm's part.

        Args:
            model: the model as mlx_lm loaded it, after the choice of trained weights.
            config: configuration of the model.
            longest: tokens of the longest row that will be trained.
            largest_token: largest token id of the data; the rows are made of random tokens up to
                it.
            bounded: True to limit the check to a few seconds, with fewer blocks or a shorter row if
                necessary.
        """
        self._accelerator = accelerator
        self._largest_token = largest_token
        self._rows: list[list[_Told]] = []
        self.notes: list[str] = []
        self._is_complete = True
        self._dtype = "float32" if accelerator.kind == "cpu" else _computed_in(model)
        self._sizes = PassCost.of(model, config, accelerator, bounded=bounded)
        lengths = [SHORT_TOKENS, longest] if longest > SHORT_TOKENS else [max(longest, 3)]
        speed = 1.0
        for length in lengths:
            seconds = _SHORT_S if length <= SHORT_TOKENS else _LONG_S
            started = time.perf_counter()
            first = self._first(model, length, seconds * speed if bounded else math.inf)
            if first is None:
                break
            speed = min(1.0, seconds / max(time.perf_counter() - started, 1e-3))
            rows = [first, *self._draws(model, first.row, seconds if bounded else math.inf)]
            # A difference that is rounding in one row may be rounding in another.
            limits = {
                name: max(getattr(row, name) for row in rows) for name in ("limit", "loss_limit")
            }
            self._rows.append([replace(row, **limits) for row in rows])

    def _first(self, model: nn.Module, length: int, seconds: float) -> _Told | None:
        """Compute mlx_lm's part of a row of this length, or of fewer tokens or blocks if it would
        take more than ``seconds``.

        Returns ``None``, and adds a note, if mlx_lm's model cannot compute it.
        """
        blocks, tokens = self._sizes.affordable(length, seconds)
        if tokens < length:
            self.notes.append(
                f"the gradient was compared with mlx_lm's on {tokens} of {length} tokens: "
                "more would take too long, or too much memory, here"
            )
        told, problem = self._told(model, self._random_row(tokens, blocks))
        if problem and blocks < self._sizes.blocks:
            # Some models need all of their blocks; then a short row must do.
            told, problem = self._told(
                model, self._random_row(min(tokens, SHORT_TOKENS), self._sizes.blocks)
            )
        if problem:
            self._is_complete = False
            self.notes.append(
                f"mlx_lm's own model cannot compute this gradient, so there is no comparison: {problem}"
            )
        return told

    def _draws(self, model: nn.Module, row: _Row, seconds: float) -> Iterator[_Told]:
        """Compute mlx_lm's part of further rows like ``row``, in half precision, for about
        ``seconds``.
        """
        started = time.perf_counter()
        for draw in range(1, _DRAWS if self._dtype != "float32" else 1):
            told, _ = self._told(model, self._random_row(len(row.tokens), row.blocks, draw))
            if told is not None:
                yield told
            if time.perf_counter() - started > seconds:
                return

    def _random_row(self, tokens: int, blocks: int, draw: int = 0) -> _Row:
        key = mx.random.key(tokens + (draw << 32))
        return _Row(mx.random.randint(0, self._largest_token + 1, (tokens,), key=key), blocks)

    def _told(self, model: nn.Module, row: _Row) -> tuple[_Told | None, str | None]:
        """Compute mlx_lm's part of a row; return it (``None`` if impossible), and a problem.

        If the pass in half precision is not finite, the pass in float32 takes its place.
        """
        try:
            theirs = self.theirs(model, row, exact=self._accelerator.kind == "cpu")
            if self._dtype == "float32":
                limit = (
                    _LIMITS["float32"] if self._accelerator.kind == "cpu" else _LIMIT_GPU_FLOAT32
                )
                return _Told(row, theirs, limit, _LOSS_LIMITS["float32"]), None
            exact = (
                self.theirs(model, row, exact=True) if self._sizes.fits_exact(row.blocks) else None
            )
        except Exception as error:  # an architecture's code may raise any error
            return None, _in_short(error)
        limit, loss_limit = _LIMITS[self._dtype], _LOSS_LIMITS[self._dtype]
        if not theirs.is_finite:
            problem = f"in {self._dtype} it is not a number on this device"
            if exact is None or not exact.is_finite:
                return None, problem
            return _Told(
                row, exact, _LIMIT_UNMEASURED, _TIMES_NOISE * loss_limit
            ), f"{problem}; one in float32 is"
        if exact is None:
            return _Told(row, theirs, _LIMIT_UNMEASURED, _TIMES_NOISE * loss_limit), None
        noise = _TIMES_NOISE * _apart(exact, theirs)[0]
        loss_noise = _TIMES_NOISE * abs(exact.loss - theirs.loss) / max(abs(exact.loss), 1.0)
        return _Told(row, theirs, max(limit, noise), max(loss_limit, loss_noise)), None

    def theirs(self, model: Any, row: _Row, *, exact: bool) -> _Pass:
        """Return loss and gradient of a row by mlx_lm's modules; ``exact``: in float32."""
        targets = row.tokens[-row.trained :]

        def loss(model: Any) -> mx.array:
            logits = model(row.tokens[None, :-1])[:, -row.trained :].astype(mx.float32)
            return nn.losses.cross_entropy(logits[0], targets, reduction="sum")

        floats = moments.in_float32(model) if exact else nullcontext()
        with (
            moments.one_pass(model, row.blocks),
            floats,
            moments.last_places(model, row.places, row.trained),
        ):
            value, gradient = nn.value_and_grad(model, loss)(model)
            return _passed(value / row.trained, gradient)

    def compare(
        self, model: nn.Module, *, cpu_native: bool, dropout: DropoutKeys | None
    ) -> GradientVerdict:
        """Compare the gradient of ``model``, which now has its passes and kernels, with mlx_lm's.

        Raises:
            ModelError: our step cannot compute a gradient that mlx_lm's model can.
        """
        compared = [self._decided(model, each, cpu_native, dropout) for each in self._rows]
        self._rows.clear()
        # The memory that a step will need is estimated from what the process holds before it.
        mx.clear_cache()
        give_back_freed_pages()
        return GradientVerdict(tuple(compared), tuple(self.notes), self._is_complete)

    def _decided(
        self, model: nn.Module, rows: list[_Told], cpu_native: bool, dropout: DropoutKeys | None
    ) -> Compared:
        """Compare the first of these rows; if it differs, return the middle one of all rows."""
        found = [self._compared(model, rows[0], cpu_native, dropout)]
        if found[0].is_off:
            found += [self._compared(model, told, cpu_native, dropout) for told in rows[1:]]
        return sorted(found, key=lambda row: row.excess)[(len(found) - 1) // 2]

    def _compared(
        self, model: nn.Module, told: _Told, cpu_native: bool, dropout: DropoutKeys | None
    ) -> Compared:
        try:
            ours = _ours(model, told.row, cpu_native, dropout)
        except MemoryError:
            raise
        except Exception as error:  # as above: mlx_lm's own model has computed it
            raise ModelError(
                f"this step cannot compute the gradient that mlx_lm's own model computes: {_in_short(error)}",
                code="gradient-not-computed",
                where="--gradient-check",
                hint="please report it with the model's config.json",
            ) from error
        difference, worst = _apart(told.theirs, ours)
        sizes, losses = (len(told.row.tokens), told.row.blocks), (ours.loss, told.theirs.loss)
        return Compared(*sizes, *losses, difference, told.limit, told.loss_limit, worst)


def _apart(expected: _Pass, found: _Pass) -> tuple[float, tuple[str, float]]:
    """Return the norm of the difference as a share of the expected norm, and the array that differs
    most, with its share.
    """
    whole = math.sqrt(sum(norm**2 for norm in expected.norms.values()))
    off = {
        name: _norm(found.projections.get(name), expected.projections[name])
        for name in expected.norms
    }
    floor = max(0.01 * whole, 1e-30)
    shares = {name: off[name] / max(expected.norms[name], floor) for name in off}
    worst = max(shares, key=lambda name: shares[name])
    return math.sqrt(sum(value**2 for value in off.values())) / max(whole, 1e-30), (
        worst,
        shares[worst],
    )


def _ours(model: Any, row: _Row, cpu_native: bool, dropout: DropoutKeys | None) -> _Pass:
    count, last = row.trained, len(row.tokens) - 1
    batch = [row.tokens[None, :-1], mx.arange(last - count, last), row.tokens[-count:]]
    if dropout is not None:
        batch.insert(0, dropout.of(np.zeros(1, dtype=np.int64), last, 0))
    with moments.one_pass(model, row.blocks):
        value, gradient = make_gradient(
            model, cpu_native=cpu_native, compiled=False, dropout=dropout
        )(*batch)
        return _passed(value / count, gradient)


def _passed(loss: mx.array, gradient: Any) -> _Pass:
    projections: dict[str, mx.array] = {}
    norms: dict[str, float] = {}
    for index, (name, array) in enumerate(flatten(gradient)):
        array = array.astype(mx.float32)
        projections[name] = _projected(array, index)
        norms[name] = number(mx.sqrt(mx.square(array).sum()))
        mx.eval(projections[name])
    return _Pass(number(loss), projections, norms)


def _projected(array: mx.array, index: int) -> mx.array:
    """Project an array to ``_BINS`` numbers: sums of its numbers with random signs.

    The expected squared norm is that of the array. A small array is returned unchanged, flat.
    """
    flat = array.reshape(-1)
    if flat.size <= _BINS:
        return flat
    signs = mx.random.bernoulli(0.5, flat.shape, key=mx.random.key(index))
    flat = mx.where(signs, flat, -flat)
    padded = mx.pad(flat, [(0, -flat.size % _BINS)])
    return padded.reshape(-1, _BINS).sum(axis=0)


def _norm(one: mx.array | None, other: mx.array) -> float:
    """Return the norm of the difference; infinite if an array is missing or not finite."""
    if one is None or one.shape != other.shape:
        return math.inf
    found = number(mx.sqrt(mx.square(one - other).sum()))
    return found if math.isfinite(found) else math.inf


def _in_short(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__


def _computed_in(model: nn.Module) -> str:
    """Return the type of most of the model's weights; adapters do not count: they follow it."""
    kinds: dict[str, int] = {}
    for name, array in flatten(model.parameters()):
        if ADAPTER_LEAVES & {*name.split(".")}:
            continue
        if mx.issubdtype(array.dtype, mx.floating):
            name = str(array.dtype).rpartition(".")[2]
            kinds[name] = kinds.get(name, 0) + array.size
    found = max(kinds, key=lambda name: kinds[name], default="float32")
    return found if found in _LIMITS else "float32"


# --- record of passed checks ----------------------------------------------------------------------

# Options that decide how a step computes: with another value, it is another kind of step.
_SETTINGS = ("fine_tune_type", "lora_parameters", "num_layers", "grad_checkpoint", "compile")


def memory_of(
    config: TrainConfig,
    model: Mapping[str, Any],
    accelerator: Accelerator,
    kernels: KernelForms,
    longest: int,
) -> Path:
    """Return the path of the record of a passed check.

    The path depends on the kind of step, the device, and ``longest`` rounded up to a power of 2.
    """
    facts = {
        "format": _FORMAT,
        "settings": config.model_dump(mode="json", include=set(_SETTINGS)),
        "model": {name: value for name, value in model.items() if not name.startswith("_")},
        "device": accelerator.name,
        "kernels": kernels.recorded(),
        "versions": versions_of("allhands", "mlx", "mlx-lm"),
        "source": _source(),
        "longest": 1 << max(longest - 1, 1).bit_length(),
    }
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[
        :24
    ]
    return cache_dir() / "gradient-checks" / f"{digest}.json"


@cache
def _source() -> str:
    """Return the hash of the code that computes a step: during development it changes without a new
    version number.
    """
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for room in ("model", "kernels", "runtime/native", "objectives", "parallel"):
        for file in sorted((package / room).rglob("*.*")):
            if file.suffix in (".py", ".c", ".h", ".cu", ".cuh"):
                digest.update(file.read_bytes())
    return digest.hexdigest()


def remember(path: Path, verdict: GradientVerdict) -> None:
    """Record that a step was right; if that cannot be written, the next run checks again."""
    content = json.dumps(
        {"compared": [asdict(row) for row in verdict.compared], "notes": verdict.notes}, indent=1
    )
    with suppress(StorageError):
        make_directory(path.parent, private=True)
        write_whole(path, lambda draft: draft.write_text(content), private=True)


def start_check(
    config: TrainConfig,
    loaded: LoadedModel,
    accelerator: Accelerator,
    kernels: KernelForms,
    data: Datasets,
    say: Callable[[str], None],
) -> Callable[[DropoutKeys | None], list[str]] | None:
    """Begin the check before the first step of a training; it is done once for each kind of step.

    Computes mlx_lm's part while ``loaded`` is as mlx_lm made it.

    Args:
        say: prints a line that the check begins.

    Returns:
        A function that compares our part, returns notes for the user, and raises ModelError if they
        differ. ``None`` if no check is wanted, or an earlier one was recorded.
    """
    if not config.train or data.train is None or config.gradient_check == "off":
        return None
    longest = int(data.train.work.max()) + 1
    memory = memory_of(config, loaded.config, accelerator, kernels, longest)
    if config.gradient_check == "auto" and memory.is_file():
        return None
    if accelerator.kind != "cpu":  # where kernels may have to be built for it
        say(
            "comparing the first gradient with that of mlx_lm's own model, once for each kind of step"
        )
    check = GradientCheck(
        loaded.model, accelerator, loaded.config, longest=longest, largest_token=data.largest_token
    )

    def finish(dropout: DropoutKeys | None) -> list[str]:
        cpu_native = accelerator.runs_natively(config.compile)
        verdict = check.compare(loaded.model, cpu_native=cpu_native, dropout=dropout)
        verdict.raise_if_wrong(str(loaded.path))
        if verdict.is_complete:
            remember(memory, verdict)
        return list(verdict.notes)

    return finish
