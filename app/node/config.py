"""The node config: everything a host is told about itself, as versioned data.

User data writes it to ``/etc/neuronfleet/node.json``; every boot step reads it from there and from nowhere
else. It holds no secret: tokens are named by ARN and fetched with the instance's role.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

NODE_CONFIG_PATH = Path("/etc/neuronfleet/node.json")
NODE_CONFIG_VERSION = 1

Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class SignalConfig(_Frozen):
    """Where this host reports that it is up, or why it is not (CloudFormation SignalResource)."""

    stack: str = Field(description="stack name or ARN")
    logical_id: str = Field(description="logical id of the Auto Scaling group that waits for the signal")


class ArtifactConfig(_Frozen):
    """The model artifact that this host serves: a manifest digest in the artifact store."""

    bucket: str
    digest: Sha256


class EngineConfig(_Frozen):
    """What the engine replica is started with; limits are in tokens, ``batch_size`` in sequences."""

    profile: str = Field(description="engine profile, a name that app.plan.profiles knows")
    model: str = Field(description="model name as clients say it")
    tp_degree: int = Field(ge=1)
    batch_size: int = Field(ge=1)
    max_model_len: int = Field(ge=1)
    dtype: Literal["bf16", "int8"] = "bf16"


class ServeConfig(_Frozen):
    """The HTTP side: the one port that the load balancer sees, and times that must agree with it."""

    http_port: int = Field(default=8000, ge=1, le=65535)
    keep_alive_s: int = Field(ge=1, description="longer than the load balancer's idle timeout")
    request_timeout_s: int = Field(default=3600, ge=1)


class ClusterConfig(_Frozen):
    """How a host of the ``cluster`` topology finds its head: an SSM parameter that the head writes."""

    head_address_parameter: str
    auth_token_secret_arn: str = Field(description="Secrets Manager secret with Ray's authentication token")


class NodeConfig(_Frozen):
    """One host's config. ``role`` is ``cell`` (a whole Ray cluster of its own), ``head`` or ``worker``."""

    version: Literal[1]
    environment: str
    region: str
    role: Literal["cell", "head", "worker"]
    signal: SignalConfig
    artifact: ArtifactConfig
    engine: EngineConfig
    serve: ServeConfig
    cluster: ClusterConfig | None = None
    target_group_arn: str | None = None
    numactl_from: Literal["image", "mirror"] = Field(
        description="image: must already be there; mirror: installed from the distribution's mirror"
    )
    log_group: str | None = None


def load_node_config(path: Path = NODE_CONFIG_PATH) -> NodeConfig:
    """Read and validate the node config.

    Raises:
        FileNotFoundError: no file at ``path``.
        pydantic.ValidationError: every wrong field at once, each with its key and value.
    """
    return NodeConfig.model_validate(json.loads(path.read_text()))
