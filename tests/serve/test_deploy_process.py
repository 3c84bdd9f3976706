"""``python -m app.serve.deploy`` as the unit runs it: a process of its own against a running Ray."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serve.client import TIMEOUT, Stream, stream, wait_for
from tests.serve.conftest import NODE_CONFIG, ROOT, free_port, take_down

pytestmark = pytest.mark.timeout(300)


def write_node_config(**engine: Any) -> None:
    """The config of a cluster's head: ending the deployer leaves the application to the workers."""
    NODE_CONFIG.write_text(
        json.dumps(
            {
                "version": 1,
                "environment": "test",
                "region": "eu-west-1",
                "role": "head",
                "signal": {"stack": "s", "logical_id": "l"},
                "artifact": {"bucket": "b", "digest": "0" * 64},
                "engine": {
                    "profile": "emulated",
                    "model": "served-by-name",
                    "tp_degree": 2,
                    "batch_size": 4,
                    "max_model_len": 512,
                    **engine,
                },
                "serve": {"keep_alive_s": 75, "http_port": free_port()},
                "numactl_from": "image",
            }
        )
    )


@pytest.fixture
def deployer(ray_http: int, model_dir: Path, tmp_path: Path) -> Iterator[Any]:
    """Starts the deployer against the session's Ray; its log is a file."""
    import ray

    started: list[subprocess.Popen[bytes]] = []
    log = tmp_path / "deploy.log"

    def start(**engine: Any) -> tuple[subprocess.Popen[bytes], Path]:
        write_node_config(**engine)
        environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address}
        with log.open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-m", "app.serve.deploy"],
                cwd=ROOT,
                env=environment,
                stdout=out,
                stderr=out,
            )
        started.append(process)
        return process, log

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.wait(10)
    NODE_CONFIG.unlink(missing_ok=True)
    take_down()


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]


def test_a_replica_for_each_block_and_a_clean_end(deployer: Any, ray_http: int) -> None:
    """Two blocks of two cores: two replicas, configured by the host's own node config."""
    process, log = deployer()
    url = f"http://127.0.0.1:{ray_http}"

    def served() -> bool:
        assert process.poll() is None, log.read_text()
        try:
            return httpx.get(url + "/readyz", timeout=TIMEOUT).status_code == 200
        except httpx.TransportError:
            return False

    wait_for(served, 150, "the deployed application is ready")
    wait_for(
        lambda: any(line.get("replica_states") == {"RUNNING": 2} for line in lines(log)),
        120,
        "two replicas run",
    )
    models = httpx.get(url + "/v1/models").json()["data"]
    assert [(model["id"], model["max_model_len"]) for model in models] == [("served-by-name", 512)]
    wanted = next(line for line in lines(log) if line["event"] == "replicas wanted")
    assert wanted["replicas"] == 2
    assert wanted["offer"] == "1 raylets offer 4 neuron_cores = 2 blocks of 2 (0 cores in no block)"
    both_replicas_serve(url)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    assert lines(log)[-1]["event"] == "stopped"
    assert httpx.get(url + "/readyz", timeout=TIMEOUT).status_code == 200, "the application goes on"


def both_replicas_serve(url: str) -> None:
    assert len({httpx.get(url + "/healthz").json()["replica"] for _ in range(60)}) == 2
    results: list[Stream] = []

    def ask() -> None:
        body = {"model": "served-by-name", "prompt": "x", "max_tokens": 30, "ignore_eos": True}
        results.append(stream(url, "/v1/completions", body))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [result.finish_reasons for result in results] == [["length"]] * 8
    assert {result.text for result in results} == {results[0].text}


def test_an_engine_that_cannot_start_ends_the_unit_with_its_reason(deployer: Any) -> None:
    process, log = deployer(tp_degree=4, profile="no-such-profile")
    assert process.wait(200) == 1, log.read_text()
    last = log.read_text().strip().splitlines()[-1]
    assert last.startswith("the Serve app could not be deployed")
    assert "no-such-profile" in last
