"""install.sh: what it refuses and how it says so, and one real installation of the bundle, offline."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "app/node/install.sh"
ENGINE_VENV = "/opt/aws_neuronx_venv_pytorch_inference_vllm"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
# All that the script calls but numactl and apt-get, so that a test decides about those two.
TOOLS = (
    *("bash", "cat", "chmod", "cut", "dirname", "env", "getent", "grep", "install", "rm"),
    *("sha256sum", "tail", "timeout", "touch"),
)


class Host:
    """A folder in place of a host's /, with what user data and the image would have put there."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.bundle = root / "opt/neuronfleet/bundle"
        self.bin = root / "test-bin"
        self.bundle.mkdir(parents=True)
        self.bin.mkdir()
        shutil.copy(SCRIPT, self.bundle / "install.sh")
        self.write_env(PYTHON)
        self.write_config()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")

    def write_env(self, python: str) -> None:
        text = f"PROFILE='cpu'\nENGINE_VENV='{ENGINE_VENV}'\nPYTHON_VERSION='{python}'\n"
        (self.bundle / "bundle.env").write_text(text)

    def write_config(self, numactl_from: str = "image", profile: str = "cpu") -> None:
        path = self.root / "etc/neuronfleet/node.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"numactl_from": numactl_from, "engine": {"profile": profile}}))

    def make_engine_venv(self) -> Path:
        venv = self.root / ENGINE_VENV.lstrip("/")
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
        return venv

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{text}\n")
        (self.bin / name).chmod(0o755)

    def install(self, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": str(self.bin), "NEURONFLEET_ROOT": str(self.root)}
        command = ["/bin/bash", str(self.bundle / "install.sh")]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=timeout_s)

    def refusal(self) -> str:
        """Run it; it must fail, with its reason as the last line on standard error."""
        done = self.install()
        assert done.returncode != 0, done.stdout
        return done.stderr.strip().splitlines()[-1]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_shellcheck_has_nothing_to_say() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    done = subprocess.run([str(shellcheck), str(SCRIPT)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_no_node_config(host: Host) -> None:
    (host.root / "etc/neuronfleet/node.json").unlink()
    assert "no node config at" in host.refusal()


def test_an_image_without_the_engine_venv(host: Host) -> None:
    assert f"needs its engine venv at {ENGINE_VENV} and this image has none: wrong AMI" in host.refusal()


def test_an_engine_venv_of_another_python(host: Host) -> None:
    host.make_engine_venv()
    host.write_env("3.9")
    assert f"has Python {PYTHON}, the bundle of profile cpu is for 3.9: wrong AMI" in host.refusal()


def test_a_bundle_of_another_profile(host: Host) -> None:
    host.make_engine_venv()
    host.write_config(profile="vllm-neuron-2.28")
    assert "the node config names profile vllm-neuron-2.28, this bundle is for cpu" in host.refusal()


def test_numactl_must_be_in_the_image_that_should_have_it(host: Host) -> None:
    host.make_engine_venv()
    assert "numactl is not on this image and the node config says numactl_from=image" in host.refusal()


def test_a_mirror_that_cannot_be_reached(host: Host) -> None:
    host.make_engine_venv()
    host.write_config(numactl_from="mirror")
    host.program(
        "apt-get", f'echo "$*" >>{host.root}/asked; echo "E: Unable to connect to mirror" >&2; exit 100'
    )
    reason = host.refusal()
    assert "numactl cannot be installed from the mirror (E: Unable to connect to mirror)" in reason
    assert "numactl_from=image" in reason
    asked = (host.root / "asked").read_text().splitlines()
    assert len(asked) == 2, "the image's lists first, fresh ones only then"
    assert "Timeout=10" in asked[0] and asked[1].endswith("update -q")


def test_a_wheel_that_is_missing_is_named(host: Host) -> None:
    host.make_engine_venv()
    host.program("numactl", "exit 0")
    (host.bundle / "requirements.lock").write_text(f"nowhere==1.0 --hash=sha256:{'0' * 64}\n")
    (host.bundle / "wheels").mkdir()
    lock = ROOT / ".cache/wheels"
    uv = next(lock.glob("*/uv-*.whl"), None)
    assert uv is not None, "make setup has built the bundles, and so has the wheels"
    shutil.copy(uv, host.bundle / "wheels")
    done = host.install()
    assert done.returncode != 0
    assert "nowhere" in done.stderr
    assert "could not be installed into" in done.stderr.strip().splitlines()[-1]
    assert not (host.root / "opt/neuronfleet/venv/.made-from").exists(), "the next run starts over"


@pytest.mark.skipif(PYTHON != "3.11", reason="the cpu profile's bundle is for Python 3.11")
def test_the_real_bundle_offline_over_an_engine_venv(host: Host) -> None:
    bundle = ROOT / "dist/bundle-cpu.zip"
    build = [sys.executable, str(ROOT / "scripts/build_bundle.py"), "--profile", "cpu"]
    subprocess.run(build, check=True, capture_output=True)
    shutil.rmtree(host.bundle)
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(bundle), str(host.bundle)], check=True)
    host.program("numactl", "exit 0")
    engine = host.make_engine_venv()
    engine_packages = engine / f"lib/python{PYTHON}/site-packages"
    # As an editable install on the image leaves it: found only if the engine's .pth files count.
    (host.root / "elsewhere").mkdir()
    (host.root / "elsewhere/engine_plugin.py").write_text("NAME = 'plugin'\n")
    (engine_packages / "plugin.pth").write_text(f"{host.root}/elsewhere\n")
    (engine_packages / "engine_module.py").write_text("NAME = 'engine'\n")
    before = sorted(str(path) for path in engine.rglob("*") if "__pycache__" not in path.parts)

    # No network: the namespace has not even loopback up.
    unshare = [found, "--net"] if os.geteuid() == 0 and (found := shutil.which("unshare")) else []
    environment = {"PATH": str(host.bin), "NEURONFLEET_ROOT": str(host.root)}
    command = [*unshare, "/bin/bash", str(host.bundle / "install.sh")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr

    python = host.root / "opt/neuronfleet/venv/bin/python"
    check = (
        "import ray, boto3, app.node.cli, engine_module, engine_plugin; print(ray.__version__, app.__file__)"
    )
    shown = subprocess.run([str(python), "-c", check], capture_output=True, text=True, cwd="/")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.startswith("2.60.0 ") and "/opt/neuronfleet/venv/" in shown.stdout
    after = sorted(str(path) for path in engine.rglob("*") if "__pycache__" not in path.parts)
    assert after == before, "the image's venv is never written to"
    for unit in ("neuronfleet-configure.service", "neuronfleet-failed@.service"):
        assert (host.root / "etc/systemd/system" / unit).is_file()

    mark = host.root / "opt/neuronfleet/venv/.made-from"
    made = mark.stat().st_mtime_ns
    again = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert again.returncode == 0 and "is this bundle's already" in again.stdout
    assert mark.stat().st_mtime_ns == made
