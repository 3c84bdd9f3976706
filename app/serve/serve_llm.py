"""The Serve application. On a host with Ray, the tutorial's own form works::

    serve run app.serve.serve_llm:app

It serves the model that the environment names (``NEURONFLEET_SERVE_MODEL_DIR``; see
:mod:`app.serve.settings`), or the host's node config, or, in a working tree, the embedded default model.
Deployments of a fleet use :func:`build`, which Serve calls with arguments (:mod:`app.serve.deploy`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from ray.serve import Application

from app.serve.cluster import CORE_RESOURCE
from app.serve.replica import EngineReplica
from app.serve.settings import ReplicaSettings, environment_settings, node_config_path

APPLICATION_NAME = "neuronfleet"


class DeploymentShape(BaseModel):
    """What Serve itself must know before any replica exists; times in seconds.

    ``cores_per_replica`` is 0 where raylets offer no NeuronCores. ``max_ongoing_requests`` and
    ``drain_timeout_s`` follow the replica's settings.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cores_per_replica: int = Field(default=0, ge=0)
    num_replicas: int = Field(default=1, ge=0)
    max_ongoing_requests: int = Field(ge=1)
    drain_timeout_s: int = Field(ge=1)


def shape_from(values: Mapping[str, Any], cores_per_replica: int, num_replicas: int) -> DeploymentShape:
    """The shape for replica settings as far as they are known where it is deployed from."""
    known = {"model_dir": "/", "model_name": "unknown", **values}
    settings = ReplicaSettings.model_validate(known)
    return DeploymentShape(
        cores_per_replica=cores_per_replica,
        num_replicas=num_replicas,
        max_ongoing_requests=settings.max_ongoing_requests,
        drain_timeout_s=settings.drain_timeout_s,
    )


def deployment_options(shape: DeploymentShape) -> dict[str, Any]:
    """Every Serve default that would hurt an LLM replica, set.

    - A replica's own admission decides, and says when to come back; Serve's limits stand well behind.
    - A stopping replica's streams may end (Serve's default cuts them after 20 s).
    - Cores are the scarce thing. No CPUs are asked for: the raylet's belong to its replicas already, and the
      engine sizes its threads by the block's.
    - Health is asked often and may be late: a busy event loop is not a dead engine.
    """
    actor: dict[str, Any] = {"num_cpus": 0}
    if shape.cores_per_replica:
        actor["resources"] = {CORE_RESOURCE: shape.cores_per_replica}
    else:
        actor["num_cpus"] = 1
    return {
        "num_replicas": shape.num_replicas,
        "ray_actor_options": actor,
        "max_ongoing_requests": shape.max_ongoing_requests,
        "max_queued_requests": shape.max_ongoing_requests,
        "graceful_shutdown_timeout_s": shape.drain_timeout_s,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": 5,
        "health_check_timeout_s": 60,
    }


def build(arguments: dict[str, Any]) -> Application:
    """The application, for Serve's declarative form: ``{"overrides": {…}, "shape": {…}}``."""
    overrides = dict(arguments.get("overrides", {}))
    shape = DeploymentShape.model_validate(arguments["shape"])
    deployment: Any = EngineReplica  # serve.deployment's type is unknown where Ray's stubs are skipped
    return deployment.options(**deployment_options(shape)).bind(overrides)


def default_overrides(environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Settings of this process's environment; the embedded model if nothing else names one.

    Replicas have their raylet's environment, not this process's, so it is passed on to them.
    """
    environment = os.environ if environment is None else environment
    overrides: dict[str, Any] = dict(environment_settings(environment))
    if "model_dir" not in overrides and not node_config_path(environment).exists():
        from app.compile.embedded_model import MODEL_NAME, ensure_embedded_model

        overrides["model_dir"] = str(ensure_embedded_model(progress=print))
        overrides.setdefault("model_name", MODEL_NAME)
    return overrides


def _tutorial_app() -> Application:
    overrides = default_overrides()
    cores = int(overrides.get("tp_degree", 0)) if _cluster_has_cores() else 0
    return build({"overrides": overrides, "shape": shape_from(overrides, cores, 1).model_dump()})


def _cluster_has_cores() -> bool:
    import ray

    return bool(ray.is_initialized() and ray.cluster_resources().get(CORE_RESOURCE, 0) > 0)


def __getattr__(name: str) -> Any:
    """``app`` is made when it is asked for: importing :func:`build` must not fetch or convert a model."""
    if name == "app":
        return _tutorial_app()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
