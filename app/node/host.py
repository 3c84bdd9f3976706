"""Who this host is: its identity from the instance metadata service, and the paths that boot steps share."""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
import tempfile
import time
from pathlib import Path

import httpx
from pydantic import BaseModel, ConfigDict

from app.node.config import NodeConfig
from app.node.ports import GCS_PORT

RUN_DIR = Path("/run/neuronfleet")
STATE_DIR = Path("/var/lib/neuronfleet")
ARTIFACTS_DIR = STATE_DIR / "artifacts"
VENV = Path("/opt/neuronfleet/venv")
CONFIG_DIR = Path("/etc/neuronfleet")
RAY_TOKEN_PATH = CONFIG_DIR / "ray-token"
HOST_ENV_PATH = RUN_DIR / "host.env"
HEAD_ENV_PATH = RUN_DIR / "head.env"
SERVICE_USER = "neuronfleet"

_METADATA = "http://169.254.169.254"
_METADATA_DEADLINE_S = 120.0

log = logging.getLogger(__name__)


class MetadataError(Exception):
    """The instance metadata service did not give what was asked; the message says what came instead."""


class Identity(BaseModel):
    """What the instance metadata service says of this instance."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    instance_id: str
    private_ip: str
    instance_type: str


def read_identity(deadline_s: float = _METADATA_DEADLINE_S) -> Identity:
    """Ask the instance metadata service (version 2) for this instance's identity.

    A service that is late or answers with errors is asked again until the deadline: it comes up with the
    network. ``AWS_EC2_METADATA_SERVICE_ENDPOINT`` names another address, as it does for boto3.

    Raises:
        MetadataError: no complete answer within ``deadline_s`` seconds.
    """
    base = os.environ.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", _METADATA).rstrip("/")
    until = time.monotonic() + deadline_s
    pause = 0.5
    # trust_env off: a proxy of the environment must never see metadata.
    with httpx.Client(base_url=base, timeout=5.0, trust_env=False) as client:
        while True:
            try:
                token = client.put(
                    "/latest/api/token", headers={"X-aws-ec2-metadata-token-ttl-seconds": "300"}
                )
                token.raise_for_status()
                headers = {"X-aws-ec2-metadata-token": token.text}
                values = {}
                for field, path in (
                    ("instance_id", "instance-id"),
                    ("private_ip", "local-ipv4"),
                    ("instance_type", "instance-type"),
                ):
                    answer = client.get(f"/latest/meta-data/{path}", headers=headers)
                    answer.raise_for_status()
                    values[field] = answer.text.strip()
                return Identity(**values)
            except httpx.HTTPError as error:
                if time.monotonic() + pause > until:
                    raise MetadataError(
                        f"the instance metadata service at {base} gave no identity within {deadline_s:.0f} s "
                        f"({type(error).__name__}: {error}); expected it to answer IMDSv2 requests from the "
                        "host itself"
                    ) from error
                log.warning("metadata service does not answer yet", extra={"reason": str(error)})
                time.sleep(pause)
                pause = min(pause * 2, 5.0)


def write_atomically(path: Path, content: str, mode: int = 0o644) -> None:
    """Write ``content`` so that a reader sees the old file or the new one, whole, and never another mode."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w") as stream:
            os.fchmod(stream.fileno(), mode)
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def interface_of(ip: str) -> str | None:
    """Name of the network interface that has the IPv4 address ``ip``; None if none has."""
    get_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), get_address, request)
            except OSError:  # an interface without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == ip:
                return name
    return None


def host_environment(config: NodeConfig, identity: Identity) -> str:
    """``host.env``: what every unit reads about its host. A worker host's head address comes later.

    The engine is told its address and interface, which it would else find by resolving the host's name: where
    no resolver answers, each of torch's process groups waits half a minute for that.
    """
    interface = interface_of(identity.private_ip)
    values = {
        "NEURONFLEET_INSTANCE_ID": identity.instance_id,
        "NEURONFLEET_INSTANCE_TYPE": identity.instance_type,
        "NEURONFLEET_ENVIRONMENT": config.environment,
        "NODE_IP_ADDRESS": identity.private_ip,
        "VLLM_HOST_IP": identity.private_ip,
        **({"GLOO_SOCKET_IFNAME": interface} if interface else {}),
        "AWS_REGION": config.region,
        "AWS_DEFAULT_REGION": config.region,
    }
    return "".join(f"{name}={value}\n" for name, value in values.items())


def head_environment(ip: str) -> str:
    """``head.env``: where the Ray cluster's head listens."""
    return f"HEAD_ADDRESS={ip}:{GCS_PORT}\n"
