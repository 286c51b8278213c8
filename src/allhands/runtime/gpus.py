"""Number of NVIDIA GPUs, without MLX: checks and choices of options need not load it."""

from __future__ import annotations

import os
import shutil
import subprocess


def nvidia_gpus() -> int:
    """Return the number of NVIDIA GPUs that this process may use: the entries of
    ``CUDA_VISIBLE_DEVICES``, or the GPUs that nvidia-smi lists.
    """
    program = shutil.which("nvidia-smi")
    if not program:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip()])
    listed = subprocess.run(
        [program, "-L"], capture_output=True, text=True, timeout=20, check=False
    )
    return listed.stdout.count("GPU ")
