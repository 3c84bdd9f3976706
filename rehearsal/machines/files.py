"""What is a machine's own: the files laid over the image before it boots.

On EC2 these come from the hypervisor and the VPC (addresses, resolver), or are the AMI's (cloud-init's
configuration, the CA store). Here they are data laid over the image, so that one image serves every machine.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from rehearsal.interfaces import MachineSpec

METADATA_V1_URL = "http://169.254.169.254:8775"
RESOLVER_ADDRESS = "169.254.169.253"
"""The VPC resolver's address on EC2; here also where the API and the packages' mirror listen."""

_MASKED_UNITS = (
    # They wait for hardware, terminals or logins that a machine does not have; each costs boot time.
    "systemd-pcrphase-sysinit.service",
    "systemd-pcrphase.service",
    "systemd-binfmt.service",
    "systemd-modules-load.service",
    "systemd-random-seed.service",
    "systemd-repart.service",
    "systemd-firstboot.service",
    "systemd-machine-id-commit.service",
    "systemd-resolved.service",
    "systemd-timesyncd.service",
    "e2scrub_reap.service",
    "getty.target",
    "console-getty.service",
    "apt-daily.timer",
    "apt-daily-upgrade.timer",
    "dpkg-db-backup.timer",
    "e2scrub_all.timer",
    "fstrim.timer",
    "sys-kernel-config.mount",
    "sys-kernel-debug.mount",
    "sys-kernel-tracing.mount",
    "sys-fs-fuse-connections.mount",
    "dev-hugepages.mount",
    "proc-sys-fs-binfmt_misc.automount",
)

_CLOUD_CONFIG = f"""\
# Laid down by the NeuronFleet rehearsal.
datasource_list: [Ec2]
datasource:
  Ec2:
    # The machine's DMI does not say EC2, and then this cloud-init speaks IMDSv1 only: a door of its own.
    metadata_urls: ['{METADATA_V1_URL}']
    strict_id: false
    timeout: 5
    max_wait: 60
# The network is as the VPC gives it (05-vpc.network), before cloud-init runs.
network: {{config: disabled}}
manage_etc_hosts: false
resize_rootfs: false
growpart: {{mode: 'off'}}
ssh_deletekeys: false
ssh_genkeytypes: []
disable_ec2_metadata: false
# What a user-data host needs of cloud-init's modules: the others cost boot time or touch hardware.
cloud_init_modules: [bootcmd, write-files, set_hostname]
cloud_config_modules: [runcmd]
cloud_final_modules: [package-update-upgrade-install, write-files-deferred, scripts-vendor, scripts-per-once,
  scripts-per-boot, scripts-per-instance, scripts-user, final-message]
"""


NEURON_DEVICES = {"inf2.xlarge": 1, "inf2.8xlarge": 1, "inf2.24xlarge": 6, "inf2.48xlarge": 12}
"""Inferentia2 chips of each size (Amazon EC2 Inf2 instances, product page); other types have none."""


@dataclass(frozen=True)
class MachineFiles:
    """Files (path without leading slash -> content) and links (path -> target) of one machine."""

    files: dict[str, bytes]
    links: dict[str, str]


def machine_files(
    spec: MachineSpec, authority: bytes, image_ca_store: bytes, apt_source: str
) -> MachineFiles:
    """Everything that makes the image this machine.

    Args:
        spec: the instance.
        authority: the rehearsal's CA certificate, PEM.
        image_ca_store: the image's ``/etc/ssl/certs/ca-certificates.crt``.
        apt_source: the one line of its apt sources, the distribution's mirror.
    """
    short = spec.hostname.split(".")[0]
    domain = spec.hostname.partition(".")[2]
    network = f"""\
[Match]
Name=host0

[Link]
MACAddress={spec.mac}

[Network]
Address={spec.private_ip}/{spec.prefix_len}
Gateway={spec.gateway}
DHCP=no
LinkLocalAddressing=no
IPv6AcceptRA=no

[Route]
Destination=169.254.169.252/30
Scope=link
"""
    texts = {
        "etc/hostname": f"{short}\n",
        "etc/hosts": f"127.0.0.1 localhost\n{spec.private_ip} {spec.hostname} {short}\n::1 localhost\n",
        "etc/machine-id": hashlib.sha256(spec.instance_id.encode()).hexdigest()[:32] + "\n",
        "etc/systemd/network/05-vpc.network": network,
        "etc/resolv.conf": f"nameserver {RESOLVER_ADDRESS}\n"
        + (f"search {domain}\n" if domain else "")
        + "options timeout:2\n",
        "etc/cloud/cloud.cfg.d/99-rehearsal.cfg": _CLOUD_CONFIG,
        "etc/apt/sources.list": apt_source + "\n",
        # A mirror that does not answer is an error in seconds, not minutes.
        "etc/apt/apt.conf.d/90-rehearsal": 'Acquire::Retries "0";\nAcquire::http::Timeout "5";\n'
        'Acquire::Languages "none";\n',
        "etc/neuron-emulated.json": json.dumps({"instance_type": spec.instance_type}) + "\n",
    }
    # EMULATED device nodes: what looks for them finds as many as the size has. Each is /dev/null.
    devices = range(NEURON_DEVICES.get(spec.instance_type, 0))
    nodes = [f"c /dev/neuron{device} 0666 root root - 1:3" for device in devices]
    texts["etc/tmpfiles.d/neuron-emulated.conf"] = "".join(f"{node}\n" for node in nodes)
    files = {path: text.encode() for path, text in texts.items()}
    files["etc/ssl/certs/ca-certificates.crt"] = image_ca_store.rstrip() + b"\n" + authority
    files["usr/local/share/ca-certificates/neuronfleet-rehearsal.crt"] = authority
    links = {f"etc/systemd/system/{unit}": "/dev/null" for unit in _MASKED_UNITS}
    return MachineFiles(files, links)


def lay_down(files: MachineFiles, upper: Path) -> None:
    """Write ``files`` below ``upper``, the machine's writable layer; folders get mode 0755."""
    for name, content in files.files.items():
        path = upper / name
        _folders(path.parent, upper)
        path.write_bytes(content)
        path.chmod(0o644)
    for name, target in files.links.items():
        path = upper / name
        _folders(path.parent, upper)
        path.symlink_to(target)


def _folders(folder: Path, upper: Path) -> None:
    missing = []
    while folder != upper and not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for path in reversed(missing):
        path.mkdir()
        path.chmod(0o755)
