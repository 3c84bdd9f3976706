"""Public AMIs and the public SSM parameters that name them.

PutParameter refuses names under ``/aws/``, so they are put into moto's backend in process. All point at the
rehearsal's stock image: a root that holds what the Neuron DLAMI holds. NeuronFleet's own image, with numactl
baked in, has an id of its own.
"""

from __future__ import annotations

from rehearsal.api.world import World

STOCK_IMAGE_ID = "ami-0e0e0e0e0e0e0e0e0"
BAKED_IMAGE_ID = "ami-0b0b0b0b0b0b0b0b0"
AMAZON = "137112412989"

_NEURON = "/aws/service/neuron/dlami"
# As the Neuron SDK's DLAMI page lists them, 2.24 to 2.32.
DLAMI_PREFIXES = tuple(
    f"{_NEURON}/{name}"
    for name in (
        "pytorch-inference-vllm-0.13/ubuntu-24.04",
        "pytorch-inference-vllm/ubuntu-24.04",
        "pytorch-inference-vllm/amazon-linux-2023",
        "pytorch-inference-vllm-0.16/ubuntu-24.04",
        "pytorch-inference-vllm-0.21.0.1.0.0/ubuntu-24.04",
        "pytorch-inference-vllm-0.24.0.1.1.0/ubuntu-24.04",
        "multi-framework/ubuntu-24.04",
        "multi-framework/ubuntu-22.04",
        "multi-framework/amazon-linux-2023",
        "pytorch-2.9/ubuntu-24.04",
        "pytorch-2.9/amazon-linux-2023",
        "pytorch-2.8/ubuntu-22.04",
        "pytorch-2.8/amazon-linux-2023",
        "pytorch-2.7/ubuntu-22.04",
        "pytorch-2.7/amazon-linux-2023",
        "pytorch-2.6/ubuntu-22.04",
        "pytorch-2.6/amazon-linux-2023",
        "pytorch-2.5/ubuntu-22.04",
        "pytorch-2.5/amazon-linux-2023",
        "tensorflow-2.10/ubuntu-22.04",
        "base/ubuntu-24.04",
        "base/ubuntu-22.04",
        "base/amazon-linux-2023",
    )
)


def publish(world: World, image_id: str = STOCK_IMAGE_ID) -> None:
    """Register ``image_id`` as a public AMI that every DLAMI parameter names, and the baked image."""
    from moto.ssm.models import Parameter

    _register(
        world,
        image_id,
        "neuronfleet-rehearsal-stock (emulates the Neuron Deep Learning AMI)",
        "Rehearsal root: holds what the Neuron DLAMI holds",
    )
    _register(
        world,
        BAKED_IMAGE_ID,
        "neuronfleet-rehearsal-baked (emulates an image built from ami/)",
        "Rehearsal root: what the Neuron DLAMI holds and what ami/ adds",
    )
    parameters = world.backend("ssm")._parameters
    for prefix in DLAMI_PREFIXES:
        name = f"{prefix}/latest/image_id"
        parameters[name] = [
            Parameter(
                account_id=world.account,
                name=name,
                value=image_id,
                parameter_type="String",
                description=None,
                allowed_pattern=None,
                keyid=None,
                last_modified_date=0,
                version=1,
                data_type="aws:ec2:image",
            )
        ]


def _register(world: World, image_id: str, name: str, description: str) -> None:
    from moto.ec2.models.amis import Ami

    ec2 = world.backend("ec2")
    ec2.amis[image_id] = Ami(
        ec2,
        image_id,
        name=name,
        description=description,
        owner_id=AMAZON,
        owner_alias="amazon",
        public=True,
        virtualization_type="hvm",
        architecture="x86_64",
        root_device_type="ebs",
        root_device_name="/dev/sda1",
        hypervisor="xen",
    )
