"""The bundle: byte-for-byte reproducible, found again at once, and clear about what is missing."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bundle_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build_bundle", ROOT / "scripts/build_bundle.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_bundle"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def small(bundle_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The builder with two small wheels for the profile's, and a project wheel that is really built."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    for name in ("a-1-py3-none-any.whl", "b-2-py3-none-any.whl"):
        (wheels / name).write_bytes(name.encode() * 100)
    monkeypatch.setattr(bundle_module, "wheelhouse", lambda profile, lock: wheels)
    return bundle_module


def test_same_inputs_same_bytes(small: ModuleType, tmp_path: Path) -> None:
    first = small.build("cpu", tmp_path / "one")
    second = small.build("cpu", tmp_path / "two")
    assert (first.cached, second.cached) == (False, False)
    assert first.sha256 == second.sha256 == hashlib.sha256(first.path.read_bytes()).hexdigest()
    record = json.loads((tmp_path / "one/bundle-cpu.json").read_text())
    assert (record["sha256"], record["size"]) == (first.sha256, first.size)


def test_what_it_holds(small: ModuleType, tmp_path: Path) -> None:
    with zipfile.ZipFile(small.build("vllm-neuron-2.28", tmp_path).path) as archive:
        names = archive.namelist()
        assert names == sorted(names)
        assert {"install.sh", "bundle.env", "requirements.lock", "wheels/a-1-py3-none-any.whl"} < set(names)
        assert {info.date_time for info in archive.infolist()} == {(1980, 1, 1, 0, 0, 0)}
        assert archive.getinfo("install.sh").external_attr >> 16 == 0o100755
        env = archive.read("bundle.env").decode()
        own = next(name for name in names if name.startswith("wheels/neuronfleet-"))
        digest = hashlib.sha256(archive.read(own)).hexdigest()
        last = archive.read("requirements.lock").decode().splitlines()[-1]
    assert "PYTHON_VERSION='3.12'" in env and "PROFILE='vllm-neuron-2.28'" in env
    assert last == f"neuronfleet==0.1.0 --hash=sha256:{digest}"


def test_found_again_until_an_input_changes(
    small: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = small.build("cpu", tmp_path)
    monkeypatch.setattr(small, "build_wheel", lambda into: pytest.fail("built again"))
    assert small.build("cpu", tmp_path).cached
    monkeypatch.setattr(small, "inputs_digest", lambda profile, lock: "another")
    with pytest.raises(pytest.fail.Exception):
        small.build("cpu", tmp_path)
    assert first.path.exists()


def test_a_damaged_bundle_is_built_again(small: ModuleType, tmp_path: Path) -> None:
    first = small.build("cpu", tmp_path)
    first.path.write_bytes(first.path.read_bytes()[:-1])
    again = small.build("cpu", tmp_path)
    assert not again.cached and again.sha256 == first.sha256


def test_readme_and_tests_do_not_change_the_bundle(bundle_module: ModuleType) -> None:
    names = {str(path.relative_to(ROOT)) for path in bundle_module.project_files()}
    assert "app/node/install.sh" in names and "app/compile/manifest.py" in names
    assert not any(
        name.startswith(("README", "docs/", "tests/", "infra/")) or ".pyc" in name for name in names
    )


def test_a_profile_without_a_lock_is_named(bundle_module: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(bundle_module.BundleError, match=r"transformers-neuronx-2\.25 has no bundle"):
        bundle_module.build("transformers-neuronx-2.25", tmp_path)


def test_a_wheel_that_cannot_be_had_is_named(
    bundle_module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = ROOT / ".cache/test-missing.lock"
    lock.parent.mkdir(exist_ok=True)
    lock.write_text(f"neuronfleet-no-such-package==9.9 --hash=sha256:{'0' * 64}\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    try:
        with pytest.raises(bundle_module.BundleError, match=r"neuronfleet-no-such-package==9\.9") as caught:
            bundle_module.wheelhouse(bundle_module.get_profile("cpu"), lock)
    finally:
        lock.unlink()
    assert "Is the package index reachable?" in str(caught.value)


@pytest.mark.parametrize("name", ["cpu", "vllm-neuron-2.28"])
def test_locks_name_uv_and_ray_and_hash_everything(bundle_module: ModuleType, name: str) -> None:
    lock = bundle_module.LOCKS[name]
    names = bundle_module.locked_names(lock)
    assert "ray==2.60.0" in names and any(item.startswith("uv==") for item in names)
    assert lock.read_text().count("--hash=sha256:") >= len(names)
