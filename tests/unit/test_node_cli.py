"""``neuronfleet-node``: a step's failure is exit code 1 and its reason as the last log line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.node import cli, report
from app.node.config import NODE_CONFIG_PATH


@pytest.fixture
def node_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "node.json"
    monkeypatch.setattr(
        cli, "load_node_config", lambda: cli.NodeConfig.model_validate(json.loads(path.read_text()))
    )
    monkeypatch.setenv("NEURONFLEET_UNIT", "neuronfleet-fetch.service")
    return path


def last_line(stderr: str) -> dict[str, str]:
    line: dict[str, str] = json.loads(stderr.strip().splitlines()[-1])
    return line


def test_a_bad_node_config_names_every_key_with_its_value(node_json: Path) -> None:
    node_json.write_text(json.dumps({"version": 2, "role": "boss", "stray": 1}))
    result = CliRunner().invoke(cli.app, ["fetch"])
    assert result.exit_code == 1
    line = last_line(result.stderr)
    assert line["level"] == "error" and line["unit"] == "neuronfleet-fetch.service"
    assert f"node config {NODE_CONFIG_PATH} cannot be used" in line["message"]
    for part in ("version: ", "(found 2)", "role: ", "(found 'boss')", "stray: ", "artifact: Field required"):
        assert part in line["message"]


def test_a_failure_without_a_config_still_reaches_the_console(
    node_json: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node_json.write_text("not json")
    said: list[str] = []
    monkeypatch.setattr(report, "not_to_report", lambda unit: None)
    monkeypatch.setattr(report, "last_message", lambda unit: "configure failed: no metadata")
    monkeypatch.setattr(report, "write_console", said.append)
    result = CliRunner().invoke(cli.app, ["fail", "neuronfleet-configure.service"])
    assert result.exit_code == 1
    assert said == ["neuronfleet-failed: neuronfleet-configure.service: configure failed: no metadata"]


def test_an_unexpected_error_keeps_its_traceback(node_json: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise RuntimeError("disk on fire")

    monkeypatch.setattr(cli, "load_node_config", broken)
    result = CliRunner().invoke(cli.app, ["ready"])
    assert result.exit_code == 1
    line = last_line(result.stderr)
    assert line["message"] == "ready failed" and line["error"] == "RuntimeError: disk on fire"
    assert "Traceback" in line["traceback"]


def test_units_are_installed_under_a_root(tmp_path: Path) -> None:
    result = CliRunner().invoke(cli.app, ["install-units", "--root", str(tmp_path)])
    assert result.exit_code == 0
    assert sorted(path.name for path in (tmp_path / "etc/systemd/system").iterdir()) == [
        "neuronfleet-configure.service",
        "neuronfleet-failed@.service",
    ]
