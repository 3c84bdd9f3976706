"""Replica settings: where each comes from, and what is said when one is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.serve.settings import SettingsError, resolve_settings

DIGEST = "ab" * 32


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text('{"model_type": "llama"}')
    return path


def node_config(tmp_path: Path) -> dict[str, str]:
    config = tmp_path / "node.json"
    config.write_text(
        json.dumps(
            {
                "version": 1,
                "environment": "test",
                "region": "eu-west-1",
                "role": "worker",
                "signal": {"stack": "s", "logical_id": "l"},
                "artifact": {"bucket": "b", "digest": DIGEST},
                "engine": {
                    "profile": "vllm-neuron-2.28",
                    "model": "Llama",
                    "tp_degree": 8,
                    "batch_size": 4,
                    "max_model_len": 4096,
                },
                "serve": {"keep_alive_s": 75},
                "numactl_from": "image",
            }
        )
    )
    return {"NEURONFLEET_NODE_CONFIG": str(config)}


def nowhere(tmp_path: Path) -> dict[str, str]:
    return {"NEURONFLEET_NODE_CONFIG": str(tmp_path / "missing.json")}


def test_a_host_is_read_from_its_node_config(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "artifacts" / DIGEST)
    settings = resolve_settings({}, node_config(tmp_path), tmp_path / "artifacts")
    assert (settings.model_dir, settings.model_name, settings.tp_degree) == (folder, "Llama", 8)
    assert (settings.profile, settings.batch_size, settings.max_model_len) == ("vllm-neuron-2.28", 4, 4096)
    assert settings.compiled_dir is None


def test_an_artifact_may_hold_model_and_compiled_apart(tmp_path: Path) -> None:
    artifact = tmp_path / "artifacts" / DIGEST
    model_folder(artifact / "model")
    (artifact / "compiled").mkdir()
    settings = resolve_settings({}, node_config(tmp_path), tmp_path / "artifacts")
    assert (settings.model_dir, settings.compiled_dir) == (artifact / "model", artifact / "compiled")


def test_overrides_win_over_the_environment_and_that_over_the_node_config(tmp_path: Path) -> None:
    model_folder(tmp_path / "artifacts" / DIGEST)
    environment = {
        **node_config(tmp_path),
        "NEURONFLEET_SERVE_PROFILE": "emulated",
        "NEURONFLEET_SERVE_BATCH_SIZE": "9",
    }
    settings = resolve_settings({"batch_size": 11}, environment, tmp_path / "artifacts")
    assert (settings.profile, settings.batch_size, settings.tp_degree) == ("emulated", 11, 8)


def test_every_wrong_setting_is_named_at_once(tmp_path: Path) -> None:
    overrides = {"model_dir": str(model_folder(tmp_path / "m")), "batch_size": 0, "dtype": "fp4"}
    with pytest.raises(SettingsError) as caught:
        resolve_settings(overrides, nowhere(tmp_path))
    assert "batch_size=0" in str(caught.value)
    assert "dtype='fp4'" in str(caught.value)


def test_an_unknown_variable_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    environment = {**nowhere(tmp_path), "NEURONFLEET_SERVE_BATCHSIZE": "4"}
    with pytest.raises(SettingsError, match=r"NEURONFLEET_SERVE_BATCHSIZE.*NEURONFLEET_SERVE_BATCH_SIZE"):
        resolve_settings({}, environment)


def test_no_model_says_how_to_name_one(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="NEURONFLEET_SERVE_MODEL_DIR"):
        resolve_settings({}, nowhere(tmp_path))


def test_a_folder_that_holds_no_model(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no config\.json"):
        resolve_settings({"model_dir": str(tmp_path)}, nowhere(tmp_path))
