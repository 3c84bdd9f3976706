"""GPU instances that users compare Inf2 with: for the cost comparison only, nothing is planned on them.

Memory and counts are those of EC2's DescribeInstanceTypes; bandwidth and the dense BF16 rate are the GPU
vendor's data sheet figures (``SOURCES["datasheets"]``).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pydantic import BaseModel, ConfigDict


class GpuInstance(BaseModel):
    """One GPU size; ``gpu_memory_mib``, ``gpu_gb_per_s`` and ``gpu_bf16_tflops`` are of one GPU."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    gpu: str
    gpus: int
    vcpus: int
    memory_mib: int
    gpu_memory_mib: int
    gpu_gb_per_s: float
    gpu_bf16_tflops: float


_A10G = ("A10G", 22888, 600.0, 70.0)
_L40S = ("L40S", 45776, 864.0, 362.0)
_A100 = ("A100", 40960, 1555.0, 312.0)
_H100 = ("H100", 81920, 3350.0, 989.0)


def _gpu(
    name: str, kind: tuple[str, int, float, float], gpus: int, vcpus: int, memory_gib: int
) -> GpuInstance:
    return GpuInstance(
        name=name,
        gpu=kind[0],
        gpus=gpus,
        vcpus=vcpus,
        memory_mib=memory_gib * 1024,
        gpu_memory_mib=kind[1],
        gpu_gb_per_s=kind[2],
        gpu_bf16_tflops=kind[3],
    )


GPU: Mapping[str, GpuInstance] = MappingProxyType(
    {
        item.name: item
        for item in (
            _gpu("g5.2xlarge", _A10G, 1, 8, 32),
            _gpu("g5.12xlarge", _A10G, 4, 48, 192),
            _gpu("g5.48xlarge", _A10G, 8, 192, 768),
            _gpu("g6e.2xlarge", _L40S, 1, 8, 64),
            _gpu("g6e.12xlarge", _L40S, 4, 48, 384),
            _gpu("g6e.48xlarge", _L40S, 8, 192, 1536),
            _gpu("p4d.24xlarge", _A100, 8, 96, 1152),
            _gpu("p5.48xlarge", _H100, 8, 192, 2048),
        )
    }
)
