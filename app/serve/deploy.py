"""``python -m app.serve.deploy``: the ``neuronfleet-serve`` unit. Deploys the app and keeps it fitting the
cluster.

It runs where the Ray head is (the host of a cell, the head host of a cluster), reads that host's node
config, and asks Serve for as many replicas as the living raylets offer blocks. It ends with 1, its last line
saying why, when the app cannot be deployed. On SIGTERM a cell's app ends with it, running streams first; a
cluster's head leaves the app to the workers, which go on serving.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from typing import Any

from app.node.config import NodeConfig, load_node_config
from app.serve.cluster import Offer, ReplicaTarget, offered
from app.serve.log import configure_logging
from app.serve.replica import DEPLOYMENT_NAME
from app.serve.serve_llm import APPLICATION_NAME, shape_from
from app.serve.settings import node_config_path, node_settings

NAMESPACE = "neuronfleet"
_PERIOD_S = 2.0
_SHORTAGE_LOG_S = 30.0
_STOP_MARGIN_S = 10.0


class DeployFailed(RuntimeError):
    """Serve gave the application up; the message is Serve's."""


def http_options(node: NodeConfig) -> dict[str, Any]:
    """The proxies' HTTP options: one port a host, kept alive longer than the load balancer keeps idle."""
    return {
        "host": "0.0.0.0",
        "port": node.serve.http_port,
        "keep_alive_timeout_s": node.serve.keep_alive_s,
        "request_timeout_s": float(node.serve.request_timeout_s),
    }


def serve_config(node: NodeConfig, replicas: int) -> dict[str, Any]:
    """The application in Serve's declarative form: a change of ``replicas`` alone restarts none.

    Nothing of the model is in it: each replica reads the node config of its own host.
    """
    shape = shape_from(
        {key: value for key, value in node_settings(node).items() if key != "compiled_dir"},
        cores_per_replica=node.engine.tp_degree,
        num_replicas=1,
    )
    return {
        "applications": [
            {
                "name": APPLICATION_NAME,
                "route_prefix": "/",
                "import_path": "app.serve.serve_llm:build",
                "args": {"overrides": {}, "shape": shape.model_dump()},
                "deployments": [{"name": DEPLOYMENT_NAME, "num_replicas": replicas}],
                # Each replica's front logs its requests; Serve's own access log would double every line.
                "logging_config": {"encoding": "JSON", "enable_access_log": False},
            }
        ]
    }


class Deployer:
    """Keeps the application deployed on the Ray cluster that this process is connected to."""

    def __init__(self, node: NodeConfig, log: logging.Logger) -> None:
        self._node = node
        self._log = log
        self._target = ReplicaTarget()
        self._applied = 0
        self._was_running = False
        self._seen: tuple[Any, ...] = ()
        self._shortage_logged = 0.0

    def step(self) -> None:
        """Look at the cluster once, and change the application if it no longer fits.

        Raises:
            DeployFailed: Serve gave up on the application before it ever ran.
        """
        import ray

        offer = offered(ray.nodes(), self._node.engine.tp_degree)
        wanted = self._target.update(offer.blocks)
        if wanted > offer.blocks or wanted == 0:
            self._tell_shortage(offer, wanted)
        if wanted and wanted != self._applied:
            self._apply(wanted)
            described = offer.describe(self._node.engine.tp_degree)
            self._log.info("replicas wanted", extra={"replicas": wanted, "offer": described})
            self._applied = wanted
        if self._applied:
            self._watch()

    def _apply(self, replicas: int) -> None:
        from ray.serve.context import _get_global_client  # the public way goes through the dashboard's HTTP
        from ray.serve.schema import ServeDeploySchema

        _get_global_client().deploy_apps(ServeDeploySchema.model_validate(serve_config(self._node, replicas)))

    def _tell_shortage(self, offer: Offer, wanted: int) -> None:
        now = time.monotonic()
        if now - self._shortage_logged < _SHORTAGE_LOG_S:
            return
        self._shortage_logged = now
        self._log.warning(
            "not enough cores",
            extra={
                "wanted_replicas": max(wanted, 1),
                "offer": offer.describe(self._node.engine.tp_degree),
                "next": "each raylet must be started with --resources naming its neuron_cores; "
                "a raylet that is gone comes back with its unit neuronfleet-ray-head or -worker@N",
            },
        )

    def _watch(self) -> None:
        from ray import serve

        status = serve.status().applications.get(APPLICATION_NAME)
        if status is None:
            return
        deployment = status.deployments.get(DEPLOYMENT_NAME)
        states = {} if deployment is None else {str(key): n for key, n in deployment.replica_states.items()}
        seen = (str(status.status), tuple(sorted(states.items())))
        if seen != self._seen:
            self._seen = seen
            self._log.info("application", extra={"status": seen[0], "replica_states": states})
        if status.status == "RUNNING":
            self._was_running = True
        elif status.status == "DEPLOY_FAILED" and not self._was_running:
            message = status.message if deployment is None else f"{status.message} {deployment.message}"
            raise DeployFailed(message)


def stop_application(log: logging.Logger, drain_timeout_s: float) -> None:
    """Take the application down: no new request, running streams may end, then Serve itself."""
    from ray import serve

    log.info("stopping", extra={"drain_timeout_s": drain_timeout_s})
    serve.delete(APPLICATION_NAME, _blocking=False)
    until = time.monotonic() + drain_timeout_s + _STOP_MARGIN_S
    while APPLICATION_NAME in serve.status().applications and time.monotonic() < until:
        time.sleep(0.5)
    serve.shutdown()


def run(node: NodeConfig, log: logging.Logger, stop: threading.Event) -> None:
    """Deploy, and keep deployed until ``stop`` is set.

    Raises:
        DeployFailed: see :meth:`Deployer.step`.
        ConnectionError: no Ray on this host.
    """
    import ray
    from ray import serve

    ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
    # ray.init takes SIGTERM for itself and would end the process in the middle of anything.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    serve.start(proxy_location="EveryNode", http_options=http_options(node))
    log.info("serve started", extra={"http": http_options(node), "role": node.role})
    deployer = Deployer(node, log)
    while not stop.is_set():
        try:
            deployer.step()
        except (ray.exceptions.RayError, TimeoutError) as error:
            # The head's control store may be away for a moment; replicas go on serving meanwhile.
            log.warning("cluster not reached", extra={"error": f"{type(error).__name__}: {error}"[:500]})
        stop.wait(_PERIOD_S)
    if node.role == "cell":
        stop_application(log, float(shape_from({}, 0, 1).drain_timeout_s))
    ray.shutdown()


def main() -> int:
    """Entry point of the unit: 0 after SIGTERM, 1 with the reason as the last line."""
    log = configure_logging(unit=os.environ.get("NEURONFLEET_UNIT", "neuronfleet-serve"))
    stop = threading.Event()
    try:
        run(load_node_config(node_config_path(os.environ)), log, stop)
    except Exception as error:
        log.error("serve failed", exc_info=True)
        print(
            f"the Serve app could not be deployed: {type(error).__name__}: {error}".replace("\n", " "),
            file=sys.stderr,
        )
        return 1
    log.info("stopped")
    return 0


if __name__ == "__main__":
    sys.exit(main())
