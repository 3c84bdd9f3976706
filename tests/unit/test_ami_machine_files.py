"""What is laid over the image for one machine, and what the bridge is told."""

from __future__ import annotations

import json
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rehearsal.interfaces import MachineSpec, RehearsalError, SubnetSpec, VpcSpec
from rehearsal.machines.files import NEURON_DEVICES, lay_down, machine_files
from rehearsal.network import Rules, _addresses
from rehearsal.resolver import dnsmasq_arguments
from rehearsal.tls import api_names, ensure_tls

NEURON_LS = Path(__file__).resolve().parents[2] / "rehearsal/neuron/neuron-ls"
SPEC = MachineSpec(
    instance_id="i-0123456789abcdef0",
    private_ip="10.20.1.17",
    prefix_len=16,
    gateway="10.20.1.1",
    hostname="ip-10-20-1-17.ec2.internal",
    instance_type="inf2.8xlarge",
    image_id="ami-1",
    egress=True,
    mac="06:00:0a:14:01:11",
    cpus=32,
)


def files(spec: MachineSpec = SPEC) -> dict[str, str]:
    made = machine_files(spec, b"AUTHORITY\n", b"IMAGE STORE\n\n", "deb [trusted=yes] http://m.test/d x main")
    return {name: content.decode() for name, content in made.files.items()}


def test_the_network_is_static_and_comes_before_the_containers_own() -> None:
    made = files()
    (name,) = [name for name in made if name.startswith("etc/systemd/network/")]
    assert name < "etc/systemd/network/80-container-host0.network"
    for line in ("Address=10.20.1.17/16", "Gateway=10.20.1.1", "MACAddress=06:00:0a:14:01:11", "DHCP=no"):
        assert line in made[name]
    assert made["etc/resolv.conf"].splitlines()[0] == "nameserver 169.254.169.253"
    assert "10.20.1.17 ip-10-20-1-17.ec2.internal ip-10-20-1-17" in made["etc/hosts"]


def test_cloud_init_asks_the_metadata_service_and_nothing_else() -> None:
    config = yaml.safe_load(files()["etc/cloud/cloud.cfg.d/99-rehearsal.cfg"])
    assert config["datasource_list"] == ["Ec2"]
    assert config["datasource"]["Ec2"]["metadata_urls"] == ["http://169.254.169.254:8775"]
    assert config["network"] == {"config": "disabled"}
    assert "scripts-user" in config["cloud_final_modules"]


def test_each_instance_has_an_identity_of_its_own() -> None:
    other = machine_files(MachineSpec(**{**SPEC.__dict__, "instance_id": "i-1"}), b"", b"", "")
    ids = {files()["etc/machine-id"], other.files["etc/machine-id"].decode()}
    assert len(ids) == 2 and all(len(i.strip()) == 32 for i in ids)


@pytest.mark.parametrize("instance_type", [*NEURON_DEVICES, "m7i.large"])
def test_as_many_device_nodes_as_the_emulated_tool_tells_of(instance_type: str) -> None:
    spec = MachineSpec(**{**SPEC.__dict__, "instance_type": instance_type})
    nodes = files(spec)["etc/tmpfiles.d/neuron-emulated.conf"].splitlines()
    shown = subprocess.run(
        [sys.executable, str(NEURON_LS), "-j"],
        env={"NEURON_EMULATED_INSTANCE_TYPE": instance_type, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    devices = len(json.loads(shown.stdout)) if shown.returncode == 0 else 0
    assert len(nodes) == devices == NEURON_DEVICES.get(instance_type, 0)


def test_laid_down_files_can_be_read_by_every_user(tmp_path: Path) -> None:
    made = machine_files(SPEC, b"AUTHORITY\n", b"IMAGE STORE\n\n", "deb x y z")
    lay_down(made, tmp_path)
    store = tmp_path / "etc/ssl/certs/ca-certificates.crt"
    assert store.read_text() == "IMAGE STORE\nAUTHORITY\n"
    assert stat.S_IMODE(store.stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "etc/ssl").stat().st_mode) == 0o755
    assert (tmp_path / "etc/systemd/system/getty.target").readlink() == Path("/dev/null")


def test_rules_open_the_mirror_to_subnets_with_a_way_out_only() -> None:
    text = Rules("nf-br0", ("10.20.1.0/24",)).render()
    assert "elements = { 10.20.1.0/24 }" in text
    assert "tcp dport 80 ip saddr @egress accept" in text
    accepted = [line.strip() for line in text.splitlines() if "169.254.169.253 tcp dport 80" in line]
    assert len(accepted) == 1
    assert text.index("reject with tcp reset") > text.index("@egress accept")
    assert "elements" not in Rules("nf-br0", ()).render()


def test_the_bridge_has_each_subnets_router() -> None:
    subnets = (SubnetSpec("s-1", "10.20.1.0/24", "a", True), SubnetSpec("s-2", "10.20.2.0/24", "b", False))
    assert set(_addresses([VpcSpec("vpc-1", "10.20.0.0/16", subnets)])) == {
        "169.254.169.254/32",
        "169.254.169.253/32",
        "10.20.1.1/16",
        "10.20.2.1/16",
    }
    with pytest.raises(RehearsalError, match=r"vpc-1 .* and vpc-2 .* overlap"):
        _addresses([VpcSpec("vpc-1", "10.20.0.0/16", ()), VpcSpec("vpc-2", "10.20.8.0/24", ())])


def test_the_resolver_asks_nobody_and_denies_what_it_does_not_know() -> None:
    argv = dnsmasq_arguments("nf-br0", "169.254.169.253", ["m.test"], ["10.20.0.0/16"])
    assert "--no-resolv" in argv and "--interface=nf-br0" in argv and "--except-interface=lo" in argv
    assert "--address=/m.test/169.254.169.253" in argv and argv[-1] == "--address=/#/"
    assert "--synth-domain=ec2.internal,10.20.0.0/16,ip-" in argv


def test_the_authority_is_made_once_and_its_keys_are_private(tmp_path: Path) -> None:
    first = ensure_tls(tmp_path / "tls", "eu-west-1")
    kept = first.authority.read_bytes(), first.server.read_bytes()
    again = ensure_tls(tmp_path / "tls", "eu-west-1")
    assert (again.authority.read_bytes(), again.server.read_bytes()) == kept
    assert stat.S_IMODE((tmp_path / "tls").stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "tls").iterdir()} == {0o600}
    context = ssl.create_default_context(cafile=str(first.authority))
    assert len(context.get_ca_certs()) == 1
    # Another region is another server certificate of the same authority.
    other = ensure_tls(tmp_path / "tls", "us-east-1")
    assert other.authority.read_bytes() == kept[0] and other.server.read_bytes() != kept[1]
    verified = subprocess.run(
        ["openssl", "verify", "-x509_strict", "-CAfile", str(other.authority), "-verify_hostname",
         "a-bucket.s3.us-east-1.amazonaws.com", str(other.server)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert verified.returncode == 0, verified.stderr


def test_names_of_every_api_that_boot_calls_are_covered() -> None:
    names = set(api_names("us-east-1"))
    assert {"*.us-east-1.amazonaws.com", "*.s3.us-east-1.amazonaws.com", "*.amazonaws.com"} <= names
