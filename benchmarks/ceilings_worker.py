"""One library's part of ``ceilings.py``, in a process of its own: the fastest matrix products and
copies it does here.

    python benchmarks/ceilings_worker.py mlx '{"dtypes": ["float32"], "sizes": [1024], "repeat": 5,
    ...}'

Prints one line of JSON: a list of figures.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

_ROUND_S = 0.2
_LONGEST_CHAIN = 50


class Library(Protocol):
    """What is asked of MLX and of PyTorch alike. ``run`` returns when the work is done."""

    device: str

    def product(self, size: int, dtype: str) -> Callable[[int], None]:
        """A chain of so many products of square matrices."""
        ...

    def copy(self, num_bytes: int) -> Callable[[int], None]:
        """So many passes over an array that read it and write another."""
        ...


class Mlx:
    """MLX as allhands sets it up: with its BLAS on a Linux CPU."""

    def __init__(self) -> None:
        import allhands  # noqa: F401 - before MLX, for its BLAS

        # isort: split
        import mlx.core as mx

        from allhands.runtime.accelerator import detect

        self._mx = mx
        self.device = {"cpu": "cpu"}.get(detect().kind, "gpu")

    def product(self, size: int, dtype: str) -> Callable[[int], None]:
        mx = self._mx
        left = (mx.random.normal((size, size), key=mx.random.key(0)) / size**0.5).astype(
            getattr(mx, dtype)
        )
        right = mx.random.normal((size, size), key=mx.random.key(1)).astype(getattr(mx, dtype))
        mx.eval(left, right)

        def run(times: int) -> None:
            value = right
            for _ in range(times):
                value = left @ value
            mx.eval(value)

        return run

    def copy(self, num_bytes: int) -> Callable[[int], None]:
        mx = self._mx
        source = mx.zeros((num_bytes // 4,), dtype=mx.float32)
        mx.eval(source)

        def run(times: int) -> None:
            for number in range(times):
                mx.eval(source + float(number))

        return run


class Torch:
    """PyTorch, with as little precision in float32 products as MLX takes on a GPU."""

    def __init__(self, threads: int) -> None:
        import torch

        self._torch = torch
        self.device = "gpu" if torch.cuda.is_available() else "cpu"
        self._place = "cuda" if self.device == "gpu" else "cpu"
        if self.device == "cpu":
            torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("high")

    def _wait(self) -> None:
        if self.device == "gpu":
            self._torch.cuda.synchronize()

    def product(self, size: int, dtype: str) -> Callable[[int], None]:
        torch = self._torch
        kind = getattr(torch, dtype)
        left = (torch.randn(size, size, device=self._place) / size**0.5).to(kind)
        right = torch.randn(size, size, device=self._place).to(kind)

        def run(times: int) -> None:
            value = right
            for _ in range(times):
                value = left @ value
            self._wait()

        return run

    def copy(self, num_bytes: int) -> Callable[[int], None]:
        source = self._torch.zeros(num_bytes // 4, device=self._place)
        target = self._torch.empty_like(source)

        def run(times: int) -> None:
            for _ in range(times):
                target.copy_(source)
            self._wait()

        return run


class Memory:
    """The processor's own copies, by as many threads: what its memory can do, whatever a library
    makes of it.
    """

    device = "cpu"

    def __init__(self, threads: int) -> None:
        self._threads = threads

    def product(self, size: int, dtype: str) -> Callable[[int], None]:
        raise NotImplementedError

    def copy(self, num_bytes: int) -> Callable[[int], None]:
        import numpy as np

        source = np.zeros(num_bytes // 4, dtype=np.float32)
        target = np.ones_like(source)
        pairs = list(
            zip(
                np.array_split(target, self._threads),
                np.array_split(source, self._threads),
                strict=True,
            )
        )

        def run(times: int) -> None:
            with ThreadPoolExecutor(self._threads) as pool:
                for _ in range(times):
                    # numpy lets go of the interpreter's lock for this.
                    list(pool.map(lambda pair: np.copyto(*pair), pairs))

        return run


def per_second(run: Callable[[int], None], amount: float, repeat: int) -> list[float]:
    """How much of ``amount`` a second each of ``repeat`` rounds does; one before them warms up."""
    run(1)
    began = time.perf_counter()
    run(1)
    times = max(1, min(_LONGEST_CHAIN, round(_ROUND_S / (time.perf_counter() - began))))
    rates: list[float] = []
    for _ in range(repeat):
        began = time.perf_counter()
        run(times)
        rates.append(times * amount / (time.perf_counter() - began))
    return rates


def main() -> None:
    """Measure what the arguments ask for."""
    name, asked = sys.argv[1], json.loads(sys.argv[2])
    makers: dict[str, Callable[[], Library]] = {
        "mlx": Mlx,
        "torch": lambda: Torch(asked["threads"]),
        "memory": lambda: Memory(asked["threads"]),
    }
    library = makers[name]()
    sizes = asked["sizes"] or ([4096, 8192] if library.device == "gpu" else [512, 1024, 2048])
    dtypes = (
        []
        if name == "memory"
        else ["float32", "bfloat16"]
        if library.device == "gpu"
        else ["float32"]
    )
    found: list[dict[str, Any]] = []
    for dtype in dtypes:
        for size in sizes:
            rates = per_second(library.product(size, dtype), 2.0 * size**3, asked["repeat"])
            found.append({"kind": "matmul", "dtype": dtype, "size": size, "flops_per_s": rates})
    # Each pass reads and writes the array once.
    rates = per_second(
        library.copy(asked["copy_bytes"]), 2.0 * asked["copy_bytes"], asked["repeat"]
    )
    found.append({"kind": "copy", "bytes_per_s": rates})
    print(json.dumps({"device": library.device, "figures": found}), flush=True)


if __name__ == "__main__":
    main()
