"""What ``neuronfleet status`` shows of a host's fetch."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from app.node import progress, status
from app.operate.show import render
from app.operate.status import Host, Status
from tests.unit.test_node_boot_steps import config


def shown(artifact: dict[str, Any]) -> str:
    host = Host("i-1", "10.0.0.1", "inf2.8xlarge", "cell", "running", "initial", artifact=artifact)
    console = Console(file=io.StringIO(), width=160)
    console.print(render(Status("dev", "http://u", True, [], [host], [])))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_fetch_shows_how_far_it_is_and_how_fast() -> None:
    fetching = {
        "digest": "a",
        "state": "fetching",
        "bytes": 4e9,
        "total_bytes": 16e9,
        "rate_bytes_per_s": 812e6,
    }
    text = shown(fetching)
    assert "artifact 25% of 16.0 GB" in text and "812 MB/s" in text
    assert "artifact" not in shown(fetching | {"state": "whole"})
    assert "artifact not fetched" in shown(fetching | {"state": "failed"})
    assert "artifact" not in shown({"digest": "a"})


def test_a_host_tells_of_its_own_artifact_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node, path = config(), tmp_path / "fetch.json"
    (tmp_path / "node.json").write_text(node.model_dump_json())
    monkeypatch.setattr(status, "unit_states", list)
    monkeypatch.setattr(status, "read_progress", lambda digest: progress.read_progress(digest, path))

    def artifact() -> dict[str, Any]:
        found: dict[str, Any] = status.host_status(tmp_path / "node.json", tmp_path / "none")["artifact"]
        return found

    assert artifact() == {"digest": node.artifact.digest}
    path.write_text(json.dumps({"digest": "other", "bytes": 1}))
    assert artifact() == {"digest": node.artifact.digest}
    told = {
        "digest": node.artifact.digest,
        "state": "fetching",
        "bytes": 1,
        "total_bytes": 2,
        "rate_bytes_per_s": 3,
    }
    path.write_text(json.dumps(told))
    assert artifact() == told
