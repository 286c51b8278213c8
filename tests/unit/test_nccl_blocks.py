"""How many blocks of a GPU NCCL is asked to take."""

from __future__ import annotations

import pytest

from allhands.distributed.backend import prepare_nccl


@pytest.mark.parametrize(
    ("environ", "gpu", "expected"),
    [
        ({}, "NVIDIA H100 80GB HBM3", {"NCCL_MIN_CTAS": "32"}),
        ({}, "NVIDIA H200", {"NCCL_MIN_CTAS": "32"}),
        ({}, "NVIDIA H100 PCIe", {}),
        ({}, "NVIDIA GeForce RTX 4090", {}),
        ({"NCCL_MIN_CTAS": "8"}, "NVIDIA H200", {"NCCL_MIN_CTAS": "8"}),
        ({"NCCL_MAX_CTAS": "16"}, "NVIDIA H200", {"NCCL_MAX_CTAS": "16"}),
        ({"NCCL_MAX_NCHANNELS": "16"}, "NVIDIA H200", {"NCCL_MAX_NCHANNELS": "16"}),
        ({"NCCL_DEBUG": "INFO"}, "NVIDIA H200", {"NCCL_DEBUG": "INFO", "NCCL_MIN_CTAS": "32"}),
    ],
)
def test_only_gpus_that_were_measured_and_nobody_has_set(
    environ: dict[str, str], gpu: str, expected: dict[str, str]
) -> None:
    prepare_nccl(environ, gpu)
    assert environ == expected
