"""Number of NVIDIA GPUs, without MLX: checks and choices of options need not load it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from itertools import takewhile

_NAMES_A_GPU = re.compile(r"\d+|(?:GPU|MIG)-.+")


def nvidia_gpus() -> int:
    """Return the number of NVIDIA GPUs that this process may use: the entries of
    ``CUDA_VISIBLE_DEVICES`` before the first that names none, or the GPUs that nvidia-smi lists.
    """
    program = shutil.which("nvidia-smi")
    if not program:
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([*takewhile(_NAMES_A_GPU.fullmatch, map(str.strip, visible.split(",")))])
    try:
        listed = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=20, check=False
        )
    except (OSError, subprocess.TimeoutExpired):  # a driver that hangs computes nothing
        return 0
    return listed.stdout.count("GPU ")
