"""``remove_all`` of network and machines: nothing stays, also what another daemon left."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rehearsal.interfaces import SubnetSpec, VpcSpec
from rehearsal.network import BridgeNetwork, bridge_name
from rehearsal.tls import ensure_tls
from tests.rehearsal.namespace import network_namespace

pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("dnsmasq") is None or shutil.which("nft") is None,
        reason="the bridge needs root, dnsmasq and nftables (scripts/debian_packages.sh)",
    ),
]


def _shown(*argv: str) -> str:
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_a_later_daemon_removes_the_whole_network(tmp_path: Path) -> None:
    with network_namespace():
        before = _shown("ip", "-br", "address"), _shown("nft", "list", "ruleset")

        def network() -> BridgeNetwork:
            return BridgeNetwork(tmp_path, 1, lambda: ensure_tls(tmp_path / "tls", "us-east-1"), lambda: None)

        subnet = SubnetSpec("subnet-1", "10.43.0.0/24", "us-east-1a", True)
        first = network()
        try:
            first.ensure([VpcSpec("vpc-1", "10.43.0.0/16", (subnet,))])
            addresses = _shown("ip", "-br", "address", "show", first.bridge)
            assert "10.43.0.1/16" in addresses and "169.254.169.254/32" in addresses
            assert "10.43.0.0/24" in _shown("nft", "list", "ruleset")
            first.ensure([])
            assert "10.43.0.1" not in _shown("ip", "-br", "address", "show", first.bridge)
        finally:
            network().remove_all()
        assert (_shown("ip", "-br", "address"), _shown("nft", "list", "ruleset")) == before
        assert [path for path in (tmp_path / "run").iterdir() if path.suffix == ".process"] == []
        network().remove_all()


def test_each_home_has_a_bridge_of_its_own(tmp_path: Path) -> None:
    assert bridge_name(Path("/var/lib/neuronfleet-rehearsal")) == "nf-br0"
    names = {bridge_name(tmp_path / "a"), bridge_name(tmp_path / "b")}
    assert len(names) == 2 and all(len(name) <= 15 for name in names)
