"""What one engine replica serves, resolved on the replica's own host.

In a cluster the head deploys and worker hosts hold the artifact, so a replica reads the node config of the
host that it landed on. Where there is none (``make serve``, ``serve run``), the environment and defaults say
it. Settings given at deployment (``overrides``) win over the host's environment, and that over the node
config.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, ValidationError

from app.node.config import NODE_CONFIG_PATH, NodeConfig, load_node_config
from app.serve.admission_settings import AdmissionSettings

ARTIFACTS = Path("/var/lib/neuronfleet/artifacts")
ENVIRONMENT_PREFIX = "NEURONFLEET_SERVE_"
NODE_CONFIG_VARIABLE = "NEURONFLEET_NODE_CONFIG"


class SettingsError(ValueError):
    """Replica settings are wrong or missing; the message names every wrong one and what is expected."""


class ReplicaSettings(AdmissionSettings):
    """One replica. Lengths are in tokens, ``batch_size`` and ``queue_limit`` in sequences, times in seconds.

    ``model_dir`` is a folder in Hugging Face layout. ``compiled_dir`` holds the compiled model of a Neuron
    profile. Each field can be set by the variable ``NEURONFLEET_SERVE_<FIELD>``.
    """

    profile: str = "cpu"
    model_dir: Path
    model_name: str = Field(min_length=1)
    compiled_dir: Path | None = None
    tp_degree: int = Field(default=1, ge=1)
    batch_size: int = Field(default=8, ge=1)
    max_model_len: int = Field(default=2048, ge=1)
    dtype: Literal["bf16", "int8"] = "bf16"
    buckets: tuple[int, ...] = ()

    request_timeout_s: int = Field(default=3600, ge=1)
    drain_timeout_s: int = Field(
        default=300, ge=1, description="how long a stopping replica's streams may go on"
    )
    ready_fresh_s: float = Field(default=10.0, gt=0, description="a token this recent proves readiness")
    ready_deadline_s: float = Field(default=4.0, gt=0, description="how long one canary token may take")

    front_door: Literal["proxy", "direct"] = Field(
        default="proxy", description="direct: the host's one replica listens on http_port itself"
    )
    http_port: int = Field(default=8000, ge=0, le=65535, description="of a direct replica; 0: any")
    http_host: str = Field(default="0.0.0.0", description="address of a direct replica")
    keep_alive_s: int = Field(default=75, ge=1, description="a direct replica keeps idle connections so long")
    heartbeat_s: float = Field(default=15.0, gt=0, description="a silent stream gets a comment this often")
    body_timeout_s: float = Field(default=30.0, gt=0, description="for the request's body to come")
    first_token_timeout_s: float = Field(default=600.0, gt=0, description="queue and prefill of a stream")
    token_timeout_s: float = Field(default=60.0, gt=0, description="between two tokens of a stream")
    write_timeout_s: float = Field(
        default=20.0, gt=0, description="a client that reads nothing for so long is dropped"
    )
    max_body_bytes: int = Field(default=4 * 1024 * 1024, ge=1024, description="of a request")

    emulated_ttft_ms: float = Field(default=50.0, ge=0)
    emulated_itl_ms: float = Field(default=10.0, ge=0)
    emulated_output_tokens: int = Field(
        default=256, ge=1, description="length at which an answer ends itself"
    )
    emulated_plan_model: str | None = Field(
        default=None, description="static graphs at the pace that the plan predicts for this model on Inf2"
    )
    emulated_plan_instance: str = "inf2.xlarge"
    emulated_freeze_file: Path | None = Field(default=None, description="while it exists, no token comes")

    @property
    def max_ongoing_requests(self) -> int:
        """What Serve lets into a replica: all that its own admission decides on, and headroom for health."""
        return self.batch_size + self.queue_limit + 64


def environment_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Settings that the environment names, by field (``NEURONFLEET_SERVE_BATCH_SIZE`` -> ``batch_size``).

    Raises:
        SettingsError: a variable with the prefix that is no setting.
    """
    found = {
        name.removeprefix(ENVIRONMENT_PREFIX).lower(): value
        for name, value in environment.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    unknown = sorted(set(found) - set(ReplicaSettings.model_fields))
    if unknown:
        names = ", ".join(ENVIRONMENT_PREFIX + name.upper() for name in unknown)
        raise SettingsError(
            f"unknown setting {names}; known: "
            + ", ".join(ENVIRONMENT_PREFIX + name.upper() for name in ReplicaSettings.model_fields)
        )
    return found


def node_config_path(environment: Mapping[str, str]) -> Path:
    """Where this host's node config is: its fixed place unless a variable says otherwise (tests)."""
    return Path(environment.get(NODE_CONFIG_VARIABLE, str(NODE_CONFIG_PATH)))


def node_settings(node: NodeConfig, artifacts: Path = ARTIFACTS) -> dict[str, Any]:
    """Settings that a host's node config gives.

    An artifact's folder is the model's folder itself, or holds ``model/`` and ``compiled/``.
    """
    artifact = artifacts / node.artifact.digest
    model, compiled = artifact / "model", artifact / "compiled"
    return {
        "profile": node.engine.profile,
        "model_dir": model if model.is_dir() else artifact,
        "compiled_dir": compiled if compiled.is_dir() else None,
        "model_name": node.engine.model,
        "tp_degree": node.engine.tp_degree,
        "batch_size": node.engine.batch_size,
        "max_model_len": node.engine.max_model_len,
        "dtype": node.engine.dtype,
        "request_timeout_s": node.serve.request_timeout_s,
        "http_port": node.serve.http_port,
        "keep_alive_s": node.serve.keep_alive_s,
    }


def resolve_settings(
    overrides: Mapping[str, Any], environment: Mapping[str, str] | None = None, artifacts: Path = ARTIFACTS
) -> ReplicaSettings:
    """This host's replica settings.

    Raises:
        SettingsError: every missing or wrong setting at once, or a model folder that is not one.
    """
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = {}
    config = node_config_path(environment)
    if config.exists():
        values.update(node_settings(load_node_config(config), artifacts))
    values.update(environment_settings(environment))
    values.update(overrides)
    if "model_dir" not in values:
        raise SettingsError(
            f"no model to serve: there is no {config} and {ENVIRONMENT_PREFIX}MODEL_DIR is not set: set it "
            "to a model's folder (python -m app.compile.embedded_model makes one)"
        )
    values.setdefault("model_name", Path(values["model_dir"]).name)
    try:
        settings = ReplicaSettings.model_validate(values)
    except ValidationError as error:
        problems = "; ".join(
            f"{'.'.join(str(part) for part in item['loc'])}={item.get('input')!r}: {item['msg']}"
            for item in error.errors()
        )
        raise SettingsError(f"wrong replica settings: {problems}") from error
    if not (settings.model_dir / "config.json").is_file():
        raise SettingsError(
            f"{settings.model_dir} is no model folder: it has no config.json; the artifact was not fetched "
            "to this host, or model_dir names another folder"
        )
    return settings
