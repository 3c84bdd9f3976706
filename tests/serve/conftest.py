"""Real Ray and real HTTP for every test here. One Ray a session; one application a module.

Run with the engine venv: ``.venv-engine/bin/python -m pytest tests/serve``.
"""

from __future__ import annotations

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Ray reads its authentication mode when it is imported, which other test modules do at collection.
_TOKEN = Path(tempfile.mkdtemp(prefix="nf-test-")) / "token"
_TOKEN.write_text("0" * 64)
_TOKEN.chmod(0o600)
os.environ.update(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(_TOKEN), RAY_USAGE_STATS_ENABLED="0")

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
def ray_http() -> Iterator[int]:
    """A Ray of this session's own with Serve's proxy on loopback; gives the port."""
    from app.serve.local import local_ray, start_http

    port = free_port()
    with local_ray():
        start_http(port)
        yield port
        from ray import serve

        serve.shutdown()


Deploy = Callable[..., App]


@pytest.fixture(scope="module")
def deploy(ray_http: int, model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deploy]:
    """Deploys an application for this module and takes it down at its end."""
    from ray import serve

    from app.serve.local import deploy_local, wait_until_running
    from app.serve.serve_llm import APPLICATION_NAME

    freeze = tmp_path_factory.mktemp("engine") / "freeze"

    def make(replicas: int = 1, timeout_s: float = 240, **settings: Any) -> App:
        overrides = {
            "profile": "emulated",
            "model_dir": str(model_dir),
            "model_name": "SmolLM2-135M-Instruct",
            "emulated_freeze_file": str(freeze),
            **settings,
        }
        deploy_local(overrides, replicas)
        wait_until_running(timeout_s)
        return App(f"http://127.0.0.1:{ray_http}", overrides["model_name"], freeze)

    yield make
    freeze.unlink(missing_ok=True)
    serve.delete(APPLICATION_NAME)
