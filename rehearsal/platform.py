"""The real platform that the daemon drives: machines, bridge and load balancer of this machine."""

from __future__ import annotations

from pathlib import Path

from rehearsal.api.public_images import BAKED_IMAGE_ID
from rehearsal.image import RootImage, Variant, ensure_image, find_image
from rehearsal.interfaces import Platform
from rehearsal.loadbalancer import HaProxyLoadBalancer
from rehearsal.machines import NspawnMachines
from rehearsal.network import METADATA_ADDRESS, BridgeNetwork
from rehearsal.tls import Tls, ensure_tls


def build(home: Path, *, api_port: int | None = None, region: str = "us-east-1") -> Platform:
    """The platform of ``home``; touches nothing of this machine until it is asked to.

    Args:
        home: the rehearsal's home.
        api_port: port of the API on loopback, which the bridge's HTTPS door leads to; None to only remove.
        region: the region whose names the door's certificate covers.
    """

    def tls() -> Tls:
        return ensure_tls(home / "tls", region)

    images: dict[Variant, RootImage] = {}

    def image(image_id: str) -> RootImage:
        # An AMI does not change while a fleet runs on it, whatever happens to the files that it was made of.
        variant = image_variant(image_id)
        if variant not in images or not images[variant].root.is_dir():
            images[variant] = ensure_image(home, variant=variant)
        return images[variant]

    network = BridgeNetwork(home, api_port, tls, lambda: find_image(home))
    return Platform(
        machines=NspawnMachines(home, network.bridge, image, lambda: tls().authority),
        load_balancer=HaProxyLoadBalancer(home, lambda: tls().server),
        network=network,
        metadata_address=METADATA_ADDRESS,
    )


def image_variant(image_id: str) -> Variant:
    """Which image stands for an AMI: NeuronFleet's own for its id, the emulated DLAMI for every other."""
    return "baked" if image_id == BAKED_IMAGE_ID else "stock"
