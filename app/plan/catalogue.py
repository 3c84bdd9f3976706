"""The hardware catalogue: every figure about an Inf2 size, once, with where it comes from and when.

Bandwidths are decimal (1 GB/s = 1e9 B/s) except NeuronLink, which AWS states in GiB/s; memory is binary (MiB,
GiB), as ``DescribeInstanceTypes`` has it. A figure that no source gives is ``None``, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ConfigDict

GIB = 1 << 30
MIB = 1 << 20


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Source(_Frozen):
    """Where a figure was read, and the date of what was read (ISO 8601)."""

    title: str
    where: str
    dated: str


SOURCES: Mapping[str, Source] = MappingProxyType(
    {
        "describe-instance-types": Source(
            title="EC2 DescribeInstanceTypes, as recorded in moto 5.2.5",
            where="moto/ec2/resources/instance_types.json.gz",
            dated="2026-12-01",
        ),
        "inf2-arch": Source(
            title="AWS Neuron documentation: Amazon EC2 Inf2 architecture",
            where="aws-neuron/aws-neuron-sdk@2.32.0 about-neuron/arch/neuron-hardware/inf2-arch.rst",
            dated="2026-08-21",
        ),
        "performance-tips": Source(
            title="AWS Neuron documentation: runtime performance tips (NUMA table of inf2.48xlarge)",
            where="aws-neuron/aws-neuron-sdk@2.32.0 neuron-runtime/explore/runtime-performance-tips.rst",
            dated="2026-08-21",
        ),
        "driver": Source(
            title="AWS Neuron driver: device connection tables by device count",
            where="aws-neuron/aws-neuron-driver v2/neuron_dhal_v2.c",
            dated="2026-08-21",
        ),
        "feature-guide": Source(
            title="NxD Inference features guide: tensor parallel degrees on Inf2",
            where="aws-neuron-sdk@v2.25.0 libraries/nxd-inference/developer_guides/feature-guide.rst",
            dated="2025-07-31",
        ),
        "quotas": Source(
            title="EC2 service quotas for Inf instances (vCPUs; the default is 0)",
            where="L-1945791B (on demand), L-B5D1601B (spot)",
            dated="2026-12-01",
        ),
        "datasheets": Source(
            title="GPU vendor data sheets: dense BF16 rate and memory bandwidth",
            where="NVIDIA A10G, L40S, A100 40GB SXM and H100 SXM data sheets",
            dated="2024-11-01",
        ),
    }
)

# Documented for LLM serving on Inf2. The vendor's calculator also offers 12, which no guide lists.
DOCUMENTED_TP_DEGREES: tuple[int, ...] = (1, 2, 4, 8, 24)

QUOTA_ON_DEMAND = "L-1945791B"
QUOTA_SPOT = "L-B5D1601B"


class NeuronDevice(_Frozen):
    """Where one Neuron device of a size hangs: PCI address (bus:device.function), NUMA node, its CPUs."""

    index: int
    bdf: str
    numa_node: int
    cpus: str


class InstanceType(_Frozen):
    """One Inf2 size. ``FIELD_SOURCES`` names the source of each field.

    ``hbm_gb_per_s`` and ``bf16_tflops`` are for the whole instance, ``neuronlink_gib_per_s`` for one chip.
    ``network_gbps`` and ``ebs_gbps`` are what can be sustained, the ``_peak`` ones what can be reached in
    bursts. ``neuron_devices`` is empty where no source gives the NUMA map.
    """

    name: str
    vcpus: int
    memory_mib: int
    chips: int
    cores: int
    hbm_mib: int
    hbm_gb_per_s: float
    bf16_tflops: float
    network_gbps: float
    network_gbps_peak: float
    ebs_gbps: float
    ebs_gbps_peak: float
    neuronlink: Literal["none", "chain", "ring"]
    neuronlink_gib_per_s: float | None
    efa: bool
    numa_nodes: int | None
    neuron_devices: tuple[NeuronDevice, ...] = ()

    @property
    def hbm_bytes_per_core(self) -> int:
        """HBM of one NeuronCore, bytes (each chip's memory is split evenly between its two cores)."""
        return self.hbm_mib * MIB // self.cores

    @property
    def hbm_bytes_per_s_per_core(self) -> float:
        """HBM bandwidth of one NeuronCore, B/s."""
        return self.hbm_gb_per_s * 1e9 / self.cores

    @property
    def flops_per_core(self) -> float:
        """Peak dense BF16 rate of one NeuronCore, FLOP/s."""
        return self.bf16_tflops * 1e12 / self.cores

    @property
    def memory_bytes(self) -> int:
        """Host memory, bytes."""
        return self.memory_mib * MIB


FIELD_SOURCES: Mapping[str, str] = MappingProxyType(
    {
        "name": "describe-instance-types",
        "vcpus": "describe-instance-types",
        "memory_mib": "describe-instance-types",
        "chips": "describe-instance-types",
        "cores": "describe-instance-types",
        "hbm_mib": "describe-instance-types",
        "hbm_gb_per_s": "inf2-arch",
        "bf16_tflops": "inf2-arch",
        "network_gbps": "describe-instance-types",
        "network_gbps_peak": "describe-instance-types",
        "ebs_gbps": "describe-instance-types",
        "ebs_gbps_peak": "describe-instance-types",
        "neuronlink": "driver",
        "neuronlink_gib_per_s": "inf2-arch",
        "efa": "describe-instance-types",
        "numa_nodes": "performance-tips",
        "neuron_devices": "performance-tips",
    }
)

_CHIP_GB_PER_S = 820.0  # inf2-arch; that page writes "GiB/sec", its totals (9,840 for 12) are plain multiples
_CHIP_BF16_TFLOPS = 190.0

_NODE_CPUS = {0: "0-23,96-119", 1: "24-47,120-143", 2: "48-71,144-167", 3: "72-95,168-191"}
_48XL_DEVICES = (
    ("80:1e.0", 2),
    ("90:1e.0", 3),
    ("80:1d.0", 2),
    ("90:1f.0", 3),
    ("80:1f.0", 2),
    ("90:1d.0", 3),
    ("20:1e.0", 1),
    ("20:1f.0", 1),
    ("10:1e.0", 0),
    ("10:1f.0", 0),
    ("10:1d.0", 0),
    ("20:1d.0", 1),
)


def _inf2(
    size: str,
    *,
    vcpus: int,
    memory_gib: int,
    chips: int,
    network_gbps: tuple[float, float],
    ebs_gbps: tuple[float, float],
    neuronlink: Literal["none", "chain", "ring"],
    numa_nodes: int | None,
    neuron_devices: tuple[NeuronDevice, ...] = (),
) -> InstanceType:
    return InstanceType(
        name=f"inf2.{size}",
        vcpus=vcpus,
        memory_mib=memory_gib * 1024,
        chips=chips,
        cores=2 * chips,
        hbm_mib=chips * 32 * 1024,
        hbm_gb_per_s=chips * _CHIP_GB_PER_S,
        bf16_tflops=chips * _CHIP_BF16_TFLOPS,
        network_gbps=network_gbps[0],
        network_gbps_peak=network_gbps[1],
        ebs_gbps=ebs_gbps[0],
        ebs_gbps_peak=ebs_gbps[1],
        neuronlink=neuronlink,
        neuronlink_gib_per_s=None if neuronlink == "none" else 192.0,
        efa=False,
        numa_nodes=numa_nodes,
        neuron_devices=neuron_devices,
    )


INF2: Mapping[str, InstanceType] = MappingProxyType(
    {
        item.name: item
        for item in (
            _inf2(
                "xlarge",
                vcpus=4,
                memory_gib=16,
                chips=1,
                network_gbps=(2.083, 15.0),
                ebs_gbps=(1.25, 10.0),
                neuronlink="none",
                numa_nodes=None,
            ),
            _inf2(
                "8xlarge",
                vcpus=32,
                memory_gib=128,
                chips=1,
                network_gbps=(16.667, 25.0),
                ebs_gbps=(10.0, 10.0),
                neuronlink="none",
                numa_nodes=None,
            ),
            _inf2(
                "24xlarge",
                vcpus=96,
                memory_gib=384,
                chips=6,
                network_gbps=(50.0, 50.0),
                ebs_gbps=(30.0, 30.0),
                neuronlink="chain",
                numa_nodes=None,
            ),
            _inf2(
                "48xlarge",
                vcpus=192,
                memory_gib=768,
                chips=12,
                network_gbps=(100.0, 100.0),
                ebs_gbps=(60.0, 60.0),
                neuronlink="ring",
                numa_nodes=4,
                neuron_devices=tuple(
                    NeuronDevice(index=index, bdf=bdf, numa_node=node, cpus=_NODE_CPUS[node])
                    for index, (bdf, node) in enumerate(_48XL_DEVICES)
                ),
            ),
        )
    }
)


class UnknownNameError(ValueError):
    """A name that the plan does not know; the message lists those it does."""


def get_instance(name: str) -> InstanceType:
    """The Inf2 size of that name.

    Raises:
        UnknownNameError: no such size; the message lists the sizes that exist.
    """
    try:
        return INF2[name]
    except KeyError:
        raise UnknownNameError(f"unknown instance type {name!r}; expected one of {', '.join(INF2)}") from None
