"""MLX's facts as on a Mac of 32 GB with Metal; it computes on this computer's CPU.

``mlx.core`` gets them when it is imported. A call of what only CUDA has is written down. Packages
that load libraries of the system when they are imported find the real one meanwhile.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import mac_journal
from mac_system import MEMORY_BYTES, on_the_real_system

# An M1 Pro of 32 GB, macOS 15.
FACTS = {
    "device_name": "Apple M1 Pro",
    "architecture": "applegpu_g13s",
    "memory_size": MEMORY_BYTES,
    "max_recommended_working_set_size": 22906503168,
    "max_buffer_length": 17179869184,
    "resource_limit": 499000,
}


_OF_THE_SYSTEM = ("truststore._api",)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds these modules where they are, and lets :class:`_Loader` load them."""

    def find_spec(
        self, name: str, path: Any, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in ("mlx.core", *_OF_THE_SYSTEM):
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, real: Any) -> None:
        self._real = real

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        with on_the_real_system():
            self._real.exec_module(module)
        if module.__name__ == "mlx.core":
            _become_metal(module)


def install() -> None:
    """Have ``mlx.core`` show a Mac's GPU as soon as it is imported."""
    sys.meta_path.insert(0, _Finder())


def _become_metal(mx: Any) -> None:
    gpu = mx.Device(mx.DeviceType.gpu, 0)
    default = [gpu]

    def computing(chosen: Any) -> Any:
        """The device or stream that computes in place of the one that was asked for."""
        kind = getattr(chosen, "type", chosen)
        is_gpu = isinstance(chosen, (mx.Device, mx.DeviceType)) and kind == mx.DeviceType.gpu
        return mx.cpu if is_gpu else chosen

    def replaced(name: str) -> None:
        real = getattr(mx, name)
        setattr(mx, name, lambda device, *more: real(computing(device), *more))

    for name in ("default_stream", "new_stream", "stream", "new_thread_local_stream"):
        replaced(name)
    mx.default_device = lambda: default[0]
    mx.set_default_device = lambda device: default.__setitem__(
        0, device if isinstance(device, mx.Device) else mx.Device(device, 0)
    )
    mx.is_available = lambda device: True
    mx.device_info = lambda *_: dict(FACTS)
    mx.metal.is_available = lambda: True
    mx.metal.device_info = lambda: dict(FACTS)
    mx.set_wired_limit = _wired_limit
    for name, has in {"cuda_kernel": _no_cuda}.items():
        setattr(mx.fast, name, has)


def _wired_limit(limit: int) -> int:
    """MLX refuses more than the system recommends."""
    if limit > FACTS["max_recommended_working_set_size"]:
        raise ValueError("[metal::set_wired_limit] Setting a wired limit larger than the maximum")
    return 0


def _no_cuda(*_: object, **__: object) -> Any:
    if where := mac_journal.caller():
        mac_journal.note("mlx", "fast.cuda_kernel", where)
    raise RuntimeError("[cuda_kernel] No CUDA back-end.")
