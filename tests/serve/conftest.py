"""Real Ray and real HTTP for every test here. One Ray a session; one application a module.

Run with the engine venv: ``.venv-engine/bin/python -m pytest tests/serve``.
"""

from __future__ import annotations

import atexit
import os
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.serve.inprocess import Local

# Ray reads its authentication mode when it is imported, which other test modules do at collection.
_HOME = Path(tempfile.mkdtemp(prefix="nf-test-"))
atexit.register(shutil.rmtree, _HOME, ignore_errors=True)
_TOKEN = _HOME / "token"
_TOKEN.write_text("0" * 64)
_TOKEN.chmod(0o600)
NODE_CONFIG = _HOME / "node.json"
ROOT = Path(__file__).resolve().parents[2]
# Replicas have the environment of this process, which starts their Ray: it stands for a host's.
os.environ.update(
    RAY_AUTH_MODE="token",
    RAY_AUTH_TOKEN_PATH=str(_TOKEN),
    RAY_USAGE_STATS_ENABLED="0",
    NEURONFLEET_NODE_CONFIG=str(NODE_CONFIG),
    NEURONFLEET_TOPOLOGY=str(_HOME / "no-topology.json"),
)

_NEEDED = ("vllm", "ray")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Without the engine venv nothing here can run: say so once, as a skip with its reason."""
    import importlib.util

    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        reason = f"{sys.prefix} lacks {', '.join(missing)}: run with .venv-engine (scripts/engine_venv.sh)"
        for item in items:
            if Path(item.path).is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.skip(reason=reason))


def free_port() -> int:
    """A TCP port of loopback that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class App:
    """A deployed application: URL, model name, and a file that freezes the engine while it exists."""

    url: str
    model: str
    freeze: Path


@pytest.fixture(scope="session")
def model_dir() -> Path:
    """The embedded model, converted once."""
    from app.compile.embedded_model import ensure_embedded_model

    return ensure_embedded_model()


@pytest.fixture(scope="session")
def ray_http(model_dir: Path) -> Iterator[int]:
    """A Ray of this session's own with Serve's proxy on loopback; gives the port."""
    from app.serve.local import local_ray, start_http

    port = free_port()
    os.environ["NEURONFLEET_SERVE_MODEL_DIR"] = str(model_dir)
    with local_ray(cores=4):
        start_http(port)
        yield port
        from ray import serve

        serve.shutdown()


Deploy = Callable[..., App]


@pytest.fixture(scope="session")
def deploy(ray_http: int, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Deploy:
    """Deploys an application in place of the one before; the same settings again cost nothing."""
    from app.serve.local import deploy_local, wait_until_running

    freeze = tmp_path_factory.mktemp("engine") / "freeze"
    deployed: list[Any] = []

    def make(timeout_s: float = 240, **settings: Any) -> App:
        overrides = {
            "profile": "emulated",
            "model_dir": str(model_dir),
            "model_name": "SmolLM2-135M-Instruct",
            "emulated_freeze_file": str(freeze),
            **settings,
        }
        if deployed != [overrides]:
            take_down()
            deploy_local(overrides)
            wait_until_running(timeout_s)
            deployed[:] = [overrides]
        return App(f"http://127.0.0.1:{ray_http}", overrides["model_name"], freeze)

    return make


@pytest.fixture(scope="module")
def emulated(deploy: Deploy) -> App:
    """One replica of the emulated engine, shared by the modules that ask for it."""
    return deploy(
        emulated_ttft_ms="120",
        emulated_itl_ms="40",
        batch_size="4",
        queue_limit="4",
        max_model_len="512",
        ready_fresh_s="0.5",
        ready_deadline_s="1.5",
    )


@pytest.fixture(scope="session")
def local(model_dir: Path) -> Iterator[Local]:
    """The front and our own server over an emulated engine in this process."""
    from tests.serve.inprocess import local_front

    with local_front(
        model_dir, emulated_ttft_ms=5, emulated_itl_ms=1, batch_size=8, queue_limit=64, max_model_len=4096
    ) as running:
        yield running


def take_down() -> None:
    """Delete the application, whoever deployed it."""
    from ray import serve

    from app.serve.serve_llm import APPLICATION_NAME

    serve.delete(APPLICATION_NAME)
