"""Memory and load of one NVIDIA GPU, from the driver's own library, which answers in microseconds;
nvidia-smi would need a process.

The calls and structures are those of NVML's first version, which later ones keep
(developer.nvidia.com, "NVML API Reference Guide").
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from contextlib import suppress

_LIBRARY = "libnvidia-ml.so.1"


class _Memory(ctypes.Structure):
    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


class _Utilization(ctypes.Structure):
    _fields_ = (("gpu", ctypes.c_uint), ("memory", ctypes.c_uint))


class Gpu:
    """The GPU that this process computes on: the first of ``CUDA_VISIBLE_DEVICES``.

    Args:
        uuid: MLX's identity of this GPU (``"GPU-..."``). A number in the variable is not enough:
            CUDA counts the fastest GPU first, NVML goes by their slots.

    Raises:
        OSError: there is no driver, or no such GPU.
    """

    def __init__(self, uuid: str = "", environ: Mapping[str, str] = os.environ) -> None:
        self._library = ctypes.CDLL(_LIBRARY)
        self._device = ctypes.c_void_p()
        self._do("nvmlInit_v2")
        first = environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip() or "0"
        first = uuid if uuid and first.isdigit() else first
        if first.isdigit():
            self._do(
                "nvmlDeviceGetHandleByIndex_v2",
                ctypes.c_uint(int(first)),
                ctypes.byref(self._device),
            )
        else:
            self._do(
                "nvmlDeviceGetHandleByUUID",
                ctypes.c_char_p(first.encode()),
                ctypes.byref(self._device),
            )

    def read(self) -> dict[str, int | float]:
        """Return the bytes in use by any process, the total bytes, and the share of the last moment
        in which the GPU computed.

        The share is 0 where the driver does not know it (parts of a GPU).

        Raises:
            OSError: the driver does not answer.
        """
        memory, load = _Memory(), _Utilization()
        self._do("nvmlDeviceGetMemoryInfo", self._device, ctypes.byref(memory))
        with suppress(OSError):
            self._do("nvmlDeviceGetUtilizationRates", self._device, ctypes.byref(load))
        used, total = int(memory.used), int(memory.total)
        return {"gpu_used_bytes": used, "gpu_total_bytes": total, "gpu_load": int(load.gpu) / 100}

    def _do(self, function: str, *arguments: object) -> None:
        code = getattr(self._library, function)(*arguments)
        if code != 0:
            raise OSError(code, f"{function} failed with NVML's code {code}")
