"""What the deployer asks of Serve: how many replicas, and each default that must not stay."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ray", reason="Ray is not installed in this environment")

from app.node.config import NodeConfig
from app.serve.cluster import SHRINK_AFTER_S, ReplicaTarget, offered
from app.serve.deploy import http_options, serve_config
from app.serve.serve_llm import build, deployment_options, shape_from


def node(**engine: Any) -> NodeConfig:
    return NodeConfig.model_validate(
        {
            "version": 1,
            "environment": "test",
            "region": "eu-west-1",
            "role": "cell",
            "signal": {"stack": "s", "logical_id": "l"},
            "artifact": {"bucket": "b", "digest": "0" * 64},
            "engine": {
                "profile": "cpu",
                "model": "M",
                "tp_degree": 2,
                "batch_size": 4,
                "max_model_len": 512,
                **engine,
            },
            "serve": {"keep_alive_s": 650, "http_port": 8000, "request_timeout_s": 900},
            "numactl_from": "image",
        }
    )


def raylet(cores: float, alive: bool = True) -> dict[str, Any]:
    return {"Alive": alive, "Resources": {"neuron_cores": cores, "CPU": 8.0}}


def test_blocks_are_counted_per_raylet_and_only_on_living_ones() -> None:
    offer = offered([raylet(12), raylet(7), raylet(8, alive=False), {"Alive": True, "Resources": {}}], 8)
    assert (offer.blocks, offer.cores, offer.raylets) == (1, 19, 2)
    assert offer.describe(8) == "2 raylets offer 19 neuron_cores = 1 blocks of 8 (11 cores in no block)"


def test_the_target_grows_at_once_and_shrinks_when_a_loss_lasts() -> None:
    now = [0.0]
    target = ReplicaTarget(lambda: now[0])
    assert target.update(0) == 0
    assert target.update(3) == 3
    assert target.update(2) == 3
    now[0] += SHRINK_AFTER_S - 1
    assert target.update(2) == 3
    assert target.update(3) == 3, "back in time: the loss is forgotten"
    assert target.update(1) == 3
    now[0] += SHRINK_AFTER_S
    assert target.update(1) == 1
    now[0] += SHRINK_AFTER_S
    target.update(0)
    now[0] += SHRINK_AFTER_S
    assert target.update(0) == 1, "one stays wanted, so that a lost raylet's return serves again"


def test_every_default_that_hurts_is_set() -> None:
    options = deployment_options(shape_from({"batch_size": 4, "queue_limit": 16}, 2, 3))
    assert options["max_ongoing_requests"] == 4 + 16 + 64
    assert options["max_queued_requests"] > 0
    assert options["graceful_shutdown_timeout_s"] >= 300
    assert options["ray_actor_options"] == {"num_cpus": 0, "resources": {"neuron_cores": 2}}
    assert options["num_replicas"] == 3
    without_cores = deployment_options(shape_from({}, 0, 1))
    assert "resources" not in without_cores["ray_actor_options"]


def test_http_options_follow_the_node_config() -> None:
    assert http_options(node()) == {
        "host": "0.0.0.0",
        "port": 8000,
        "keep_alive_timeout_s": 650,
        "request_timeout_s": 900.0,
    }


def test_replica_count_alone_does_not_change_the_code_version() -> None:
    """Serve restarts replicas when import path, arguments or runtime environment change."""
    from ray.serve._private.deploy_utils import get_app_code_version
    from ray.serve.schema import ServeDeploySchema

    def version(replicas: int, **engine: Any) -> str:
        schema = ServeDeploySchema.model_validate(serve_config(node(**engine), replicas))
        assert schema.applications[0].deployments[0].num_replicas == replicas
        return str(get_app_code_version(schema.applications[0]))

    assert version(1) == version(7)
    assert version(1) != version(1, tp_degree=1)


def test_the_declarative_form_builds() -> None:
    arguments = serve_config(node(), 2)["applications"][0]["args"]
    built = build(arguments)
    assert built._bound_deployment.name == "engine"
