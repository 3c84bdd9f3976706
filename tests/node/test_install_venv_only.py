"""install.sh for the compile job's host: the venv, and nothing that serves."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from tests.node.test_install_script import Host


@pytest.fixture
def made(tmp_path: Path) -> Host:
    """A host on which this bundle's venv is made already, so that what comes after it shows."""
    host = Host(tmp_path)
    host.make_engine_venv()
    (host.bundle / "requirements.lock").write_text("")
    content = (host.bundle / "requirements.lock").read_bytes() + (host.bundle / "bundle.env").read_bytes()
    venv = host.root / "opt/neuronfleet/venv"
    venv.mkdir()
    (venv / ".made-from").write_text(hashlib.sha256(content).hexdigest())
    return host


def install(host: Host, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["/bin/bash", str(host.bundle / "install.sh")],
        capture_output=True,
        text=True,
        env={"PATH": str(host.bin), "NEURONFLEET_ROOT": str(host.root), **environment},
        timeout=60,
        check=False,
    )


def test_no_numactl_no_user_no_unit(made: Host) -> None:
    done = install(made, NEURONFLEET_INSTALL="venv")
    assert done.returncode == 0, done.stderr
    assert "without units" in done.stdout
    assert not (made.root / "etc/systemd").exists()
    assert not (made.root / "etc/tmpfiles.d").exists()
    assert install(made).returncode != 0, "a serving host needs numactl and units"


def test_a_bundle_of_another_profile_is_still_refused(made: Host) -> None:
    made.write_config(profile="vllm-neuron-2.28")
    done = install(made, NEURONFLEET_INSTALL="venv")
    assert "this bundle is for cpu" in done.stderr
