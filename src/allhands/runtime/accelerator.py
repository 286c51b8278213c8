"""Facts about the device that MLX computes on, and the settings that follow from them."""

from __future__ import annotations

import platform
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import mlx.core as mx
import psutil

from allhands.runtime.blas import available_cores, preload_blas
from allhands.runtime.memory import MLX_PEAK, peak_rss_bytes
from allhands.runtime.sizing import Sizing

# Small, because each length of batch would fill MLX's cache with buffers of other sizes. Buffers
# that the cache frees stay in the process for any size: allhands.runtime.blas tells malloc to keep
# freed pages.
CPU_CACHE_BYTES = 64 << 20


@dataclass(frozen=True)
class Accelerator:
    """The device that this process computes on.

    Attributes:
        kind: ``"cpu"``, ``"metal"`` or ``"cuda"``.
        name: name for people.
        memory_bytes: memory of the device (of the host, for a CPU and for unified memory).
        cores: processor cores that this process may use.
        cpu_native: True if operations of a step compute at once, without compiling: best on CPUs,
            where one thread of MLX computes everything.
        warning: reason why this device is slower than it should be, with the remedy; or ``None``.
        working_set_bytes: memory that macOS lets the GPU of a Mac use; ``None`` elsewhere.
    """

    kind: Literal["cpu", "metal", "cuda"]
    name: str
    memory_bytes: int
    cores: int
    cpu_native: bool
    warning: str | None
    working_set_bytes: int | None = None

    def runs_natively(self, compile: str) -> bool:
        """True if steps run in the CPU's native way, given the value of ``--compile``."""
        return self.cpu_native and compile != "on"

    def sizing(self, micro_batch_tokens: int | None, *, compiled: bool) -> Sizing:
        """Return the limits for micro-batches on this device.

        Args:
            micro_batch_tokens: the option of that name; ``None``: chosen by the kind of device.
            compiled: True if steps are compiled, so that there must be few shapes. CUDA always
                needs few shapes.
        """
        return sizing_of(self.kind, micro_batch_tokens, compiled=compiled)


def sizing_of(kind: str, micro_batch_tokens: int | None, *, compiled: bool) -> Sizing:
    """Return :meth:`Accelerator.sizing` of any device of this kind, also of another computer."""
    if kind == "cpu":
        return Sizing(micro_batch_tokens or 2048, overhead_tokens=24)
    if kind == "cuda":
        # On an H200 the host needs 25 ms to launch a pass over 1.2 billion parameters, in which the
        # GPU computes 3,000 tokens. A new length costs 40 ms and more, compiled or not: cuDNN makes
        # a new plan for attention.
        return Sizing(
            micro_batch_tokens or 16384, overhead_tokens=2048, few_shapes=True, num_rungs=24
        )
    return Sizing(micro_batch_tokens or 16384, overhead_tokens=256, few_shapes=compiled)


# Most bytes that MLX holds before it computes: the key of its random numbers, and one more number
# on CUDA.
_AT_START_BYTES = 24


def nothing_computed() -> bool:
    """True if MLX has not computed anything in this process yet; afterwards it no longer reads its
    environment variables.
    """
    return (
        max(mx.get_peak_memory(), mx.get_active_memory() + mx.get_cache_memory()) <= _AT_START_BYTES
    )


def detect() -> Accelerator:
    """Return the default device of MLX in this process, with its settings applied."""
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    memory = psutil.virtual_memory().total
    if not on_gpu:
        mx.set_cache_limit(CPU_CACHE_BYTES)
        cores = available_cores()
        return Accelerator("cpu", _processor(), memory, cores, True, slow_products())
    name, working_set = str(mx.device_info().get("device_name", "GPU")), working_set_bytes()
    if working_set is not None:
        mx.set_wired_limit(working_set)
    kind = "metal" if mx.metal.is_available() else "cuda"
    cores = available_cores()
    return Accelerator(kind, name, device_memory(), cores, False, None, working_set)


def working_set_bytes() -> int | None:
    """Return the bytes that macOS lets the GPU of this Mac use, two thirds of the memory or more;
    ``None`` elsewhere.
    """
    on_gpu = mx.default_device().type == mx.DeviceType.gpu
    if not (on_gpu and mx.metal.is_available()):
        return None
    return int(mx.device_info()["max_recommended_working_set_size"])


def _processor() -> str:
    """Return the name of the processor's model."""
    # Read up to the first name: the file has one for each core.
    with suppress(OSError), Path("/proc/cpuinfo").open(errors="replace") as lines:
        for line in lines:
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def slow_products() -> str | None:
    """Return the reason for slow matrix products here; ``None`` if they are fast."""
    if sys.platform != "linux" or mx.default_device().type == mx.DeviceType.gpu:
        return None
    blas = preload_blas()
    slow = f"matrix products use MLX's reference BLAS, about 30 times slower ({blas.reason})"
    return slow if blas.state == "slow" else blas.held_back


def device_memory() -> int:
    """Return the bytes of the default device's memory; of the computer's if MLX does not say."""
    info = mx.device_info() if mx.default_device().type == mx.DeviceType.gpu else {}
    return int(info.get("memory_size", info.get("total_memory", psutil.virtual_memory().total)))


def peak_memory_bytes(accelerator: Accelerator) -> int:
    """Return the peak bytes so far: of the process on a CPU, of MLX's device memory on a GPU."""
    if accelerator.kind != "cpu":
        return MLX_PEAK.whole()
    return peak_rss_bytes()
