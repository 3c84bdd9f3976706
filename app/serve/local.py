"""``python -m app.serve.local``: the Serve app alone, on any machine. No AWS, no root, no NeuronCores.

Starts a Ray of its own (temporary folder, free ports, token authentication), serves the embedded model or the
one that is named, prints the URL and an example, and ends all of it on Ctrl-C.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.compile.embedded_model import EmbeddedModelError
from app.serve.settings import SettingsError, environment_settings, resolve_settings

# Ray reads its authentication mode when it is imported, so nothing here imports it before local_ray() has set
# it.

NAMESPACE = "neuronfleet-local"
LOOPBACK = "127.0.0.2"
"""The private Ray's address. Ray replaces 127.0.0.1 by one that others reach, and some of its ports listen on
every interface whatever this says: they answer to the token alone."""


class LocalServeError(Exception):
    """The app could not be served here; the message says why and what to do."""


@contextlib.contextmanager
def local_ray(num_cpus: int | None = None, cores: int = 0) -> Iterator[Path]:
    """A Ray of this process's own: others on the machine are neither joined nor stopped.

    With ``cores``, it offers that many NeuronCores by name only. Yields its temporary folder. Its processes
    are this process's children and end with it.

    Raises:
        LocalServeError: Ray was imported before, without token authentication.
    """
    if "ray" in sys.modules and os.environ.get("RAY_AUTH_MODE") != "token":
        raise LocalServeError("Ray was imported before RAY_AUTH_MODE=token was set: set it earlier")
    folder = Path(tempfile.mkdtemp(prefix="nf-ray-"))
    token = folder / "token"
    token.touch(mode=0o600)
    token.write_text(secrets.token_hex(32))
    changed = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ADDRESS": None,
        "RAY_AUTH_TOKEN": None,
    }
    before = {name: os.environ.get(name) for name in changed}
    _set_environment(changed)
    import ray

    try:
        ray.init(
            address="local",
            namespace=NAMESPACE,
            _node_ip_address=LOOPBACK,
            _temp_dir=str(folder),
            include_dashboard=False,
            num_cpus=num_cpus or max(4, os.cpu_count() or 1),
            resources={"neuron_cores": cores} if cores else None,
            object_store_memory=200 * 1024 * 1024,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        yield folder
    finally:
        with contextlib.suppress(Exception):
            ray.shutdown()
        _set_environment(before)
        shutil.rmtree(folder, ignore_errors=True)


def _set_environment(values: dict[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def start_http(port: int) -> None:
    """Start Serve with its HTTP proxy on loopback.

    Raises:
        LocalServeError: the port is taken.
    """
    from ray import serve

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise LocalServeError(
                f"port {port} is taken ({error.strerror}): give another with --port"
            ) from error
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": "127.0.0.1", "port": port, "keep_alive_timeout_s": 75},
        logging_config={"enable_access_log": False},
    )


def deploy_local(overrides: dict[str, Any], replicas: int = 1) -> None:
    """Deploy the app with these replica settings, without waiting for it."""
    from ray import serve

    from app.serve.serve_llm import APPLICATION_NAME, build, shape_from

    shape = shape_from(overrides, cores_per_replica=0, num_replicas=replicas)
    app = build({"overrides": overrides, "shape": shape.model_dump()})
    target = serve.RunTarget(app, name=APPLICATION_NAME)
    serve.run_many([target], wait_for_applications_running=False)


def wait_until_running(timeout_s: float, stop: threading.Event | None = None) -> None:
    """Wait until every replica has given its first token.

    Raises:
        LocalServeError: it failed, or took longer than ``timeout_s``.
    """
    from ray import serve

    from app.serve.serve_llm import APPLICATION_NAME

    until = time.monotonic() + timeout_s
    while time.monotonic() < until and not (stop and stop.is_set()):
        status = serve.status().applications.get(APPLICATION_NAME)
        if status is not None and status.status == "RUNNING":
            return
        if status is not None and status.status == "DEPLOY_FAILED":
            details = " ".join(item.message for item in status.deployments.values())
            raise LocalServeError(f"the engine did not start: {status.message} {details}".strip())
        time.sleep(0.2)
    if not (stop and stop.is_set()):
        raise LocalServeError(f"the engine did not start within {timeout_s:g} s")


def main(arguments: list[str] | None = None) -> int:
    """Serve until Ctrl-C or SIGTERM; 1 with the reason if it cannot."""
    parser = argparse.ArgumentParser(prog="python -m app.serve.local", description=__doc__)
    parser.add_argument(
        "--engine", default="cpu", choices=("cpu", "emulated"), help="default: %(default)s (vLLM)"
    )
    parser.add_argument("--model", type=Path, help="a model's folder (default: the embedded model)")
    parser.add_argument("--port", type=int, default=8000, help="default: %(default)s")
    parser.add_argument("--replicas", type=int, default=1, help="a vLLM replica takes 3.5 GB; default: 1")
    options = parser.parse_args(arguments)
    stop = threading.Event()
    started = time.monotonic()
    try:
        overrides = _overrides(options.engine, options.model)
        name = resolve_settings(overrides).model_name
        with local_ray():
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, lambda *_: stop.set())
            start_http(options.port)
            print(f"serve: starting {options.replicas} x {options.engine} engine with {name} …", flush=True)
            deploy_local(overrides, options.replicas)
            wait_until_running(1800, stop)
            if not stop.is_set():
                _print_ready(f"http://127.0.0.1:{options.port}", name, time.monotonic() - started)
            stop.wait()
            print("serve: stopping", flush=True)
            _shutdown_serve()
    except (LocalServeError, SettingsError, EmbeddedModelError) as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    return 0


def _overrides(engine: str, model: Path | None) -> dict[str, Any]:
    from app.compile.embedded_model import MODEL_NAME, ensure_embedded_model

    settings: dict[str, Any] = {**environment_settings(os.environ), "profile": engine}
    if model is not None:
        settings["model_dir"] = str(model.resolve())
    elif "model_dir" not in settings:
        folder = ensure_embedded_model(progress=lambda step: print(f"serve: model: {step}", flush=True))
        settings["model_dir"] = str(folder)
        settings.setdefault("model_name", MODEL_NAME)
    return settings


def _shutdown_serve() -> None:
    from ray import serve

    with contextlib.suppress(Exception):
        serve.shutdown()


def _print_ready(url: str, model: str, seconds: float) -> None:
    question = '{"role": "user", "content": "What is the capital of France?"}'
    body = '{"model": "%s", "stream": true, "messages": [' + question + "]}"
    print(f"serve: ready after {seconds:.0f} s at {url}\n\ntry:")
    print(
        f"  curl -N {url}/v1/chat/completions -H 'Content-Type: application/json' \\\n    -d '{body % model}'"
    )
    print(f'  curl -N {url}/generate -d \'{{"prompt": "The capital of France is", "max_tokens": 32}}\'')
    print("\nCtrl-C ends it.", flush=True)


if __name__ == "__main__":
    sys.exit(main())
