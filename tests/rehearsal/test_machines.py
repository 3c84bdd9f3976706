"""Machines: booted by cloud-init over the real image, on a bridge with AWS's addresses; gone when removed."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from rehearsal import processes
from rehearsal.home import default_home
from rehearsal.image import ensure_image
from rehearsal.interfaces import (
    Machines,
    MachineSpec,
    MachineState,
    Network,
    RehearsalError,
    SubnetSpec,
    VpcSpec,
)
from rehearsal.machines import NspawnMachines, cgroups
from rehearsal.network import METADATA_ADDRESS, BridgeNetwork
from rehearsal.tls import Tls, ensure_tls
from tests.rehearsal.namespace import network_namespace

pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("systemd-nspawn") is None,
        reason="machines need root and systemd-nspawn (scripts/debian_packages.sh)",
    ),
]
ONE, TWO = "i-0aaaaaaaaaaaaaaa1", "i-0aaaaaaaaaaaaaaa2"
IDENTITY = {
    "": "instance-id\nlocal-hostname\nlocal-ipv4\n",
    "instance-id": ONE,
    "local-hostname": "ip-10-42-1-10.ec2.internal",
    "local-ipv4": "10.42.1.10",
}
USER_DATA = """#!/bin/bash
echo "user data ran on $(hostname)" | tee /dev/console
echo done >/var/tmp/user-data
"""


def _serve(
    address: str, port: int, answer: Callable[[BaseHTTPRequestHandler], str | None]
) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = answer(self)
            self.send_response(404 if text is None else 200)
            self.send_header("Content-Length", str(len((text or "").encode())))
            self.end_headers()
            self.wfile.write((text or "").encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer((address, port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def _metadata(request: BaseHTTPRequestHandler) -> str | None:
    _, _, rest = request.path.lstrip("/").partition("/")
    if rest == "user-data":
        return USER_DATA
    return IDENTITY.get(rest.removeprefix("meta-data/")) if rest.startswith("meta-data/") else None


@dataclass
class Bench:
    """A bridge with one VPC: ``subnet-out`` leads out, ``subnet-in`` does not."""

    home: Path
    machines: NspawnMachines
    network: BridgeNetwork

    def spec(self, instance_id: str, ip: str, *, egress: bool) -> MachineSpec:
        return MachineSpec(
            instance_id=instance_id,
            private_ip=ip,
            prefix_len=16,
            gateway=ip.rsplit(".", 1)[0] + ".1",
            hostname=f"ip-{ip.replace('.', '-')}.ec2.internal",
            instance_type="inf2.24xlarge",
            image_id="ami-0e0e0e0e0e0e0e0e0",
            egress=egress,
            mac=f"06:00:0a:2a:{int(ip.split('.')[2]):02x}:{int(ip.split('.')[3]):02x}",
            cpus=96,
        )

    def sh(self, command: str, instance_id: str = ONE) -> subprocess.CompletedProcess[str]:
        return self.machines.run(instance_id, ["bash", "-c", command], timeout_s=120)


def _wait(what: Callable[[], bool], seconds: float, why: str) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, why
        time.sleep(0.1)


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    image = ensure_image(default_home(), print)
    home = tmp_path_factory.mktemp("home")

    def tls() -> Tls:
        return ensure_tls(home / "tls", "us-east-1")

    with network_namespace():
        api = _serve("127.0.0.1", 0, lambda request: f"{request.headers['Host']}{request.path}")
        network = BridgeNetwork(home, int(api.server_address[1]), tls, lambda: image)
        machines = NspawnMachines(home, network.bridge, lambda _: image, lambda: tls().authority)
        subnets = (
            SubnetSpec("subnet-out", "10.42.1.0/24", "us-east-1a", True),
            SubnetSpec("subnet-in", "10.42.2.0/24", "us-east-1b", False),
        )
        try:
            network.ensure([VpcSpec("vpc-1", "10.42.0.0/16", subnets)])
            metadata = _serve(METADATA_ADDRESS, 8775, _metadata)
            bench = Bench(home, machines, network)
            machines.start(bench.spec(ONE, "10.42.1.10", egress=True))
            machines.start(bench.spec(TWO, "10.42.2.10", egress=False))
            for name in (ONE, TWO):
                _wait(
                    lambda name=name: (
                        machines.leader(name) is not None  # type: ignore[misc]
                        and bench.sh("test -e /var/tmp/user-data", name).returncode == 0
                    ),
                    90,
                    f"{name} ran no user data; console: {machines.console(name)}",
                )
            yield bench
            metadata.shutdown()
        finally:
            machines.remove_all()
            network.remove_all()
            api.shutdown()


def test_implements_the_seams(bench: Bench) -> None:
    assert isinstance(bench.machines, Machines) and isinstance(bench.network, Network)


def test_user_data_ran_under_real_cloud_init(bench: Bench) -> None:
    assert bench.machines.states() == {ONE: MachineState.RUNNING, TWO: MachineState.RUNNING}
    assert "user data ran on ip-10-42-1-10" in bench.machines.console(ONE).read_text(errors="replace")
    status = bench.sh("cloud-init status --wait --long")
    assert "status: done" in status.stdout and "DataSourceEc2" in status.stdout
    assert bench.sh("systemctl is-system-running --wait").stdout.strip() == "running"


def test_the_machine_is_the_instance(bench: Bench) -> None:
    shown = bench.sh("hostname --fqdn; ip -br address show host0; cat /sys/class/net/host0/address").stdout
    assert "ip-10-42-1-10.ec2.internal" in shown and "10.42.1.10/16" in shown
    assert "06:00:0a:2a:01:0a" in shown
    assert bench.sh("getent hosts ip-10-42-2-10.ec2.internal").stdout.split()[0] == "10.42.2.10"
    assert bench.sh("ping -c1 -W2 10.42.2.10").returncode == 0
    assert bench.sh("ls -d /dev/neuron* | wc -l").stdout.strip() == "6"
    devices = bench.sh("/opt/aws/neuron/bin/neuron-ls -j | grep -c neuron_device").stdout
    assert devices.strip() == "6"


def test_the_stock_image_holds_what_the_dlami_holds_and_no_more(bench: Bench) -> None:
    venv = "/opt/aws_neuronx_venv_pytorch_inference_vllm"
    assert bench.sh(f"{venv}/bin/python -c 'import vllm, torch'", TWO).returncode == 0
    assert bench.sh(f"{venv}/bin/python -c 'import ray'", TWO).returncode != 0
    assert bench.sh("command -v numactl", TWO).returncode != 0


def test_aws_names_lead_to_the_api_over_trusted_tls(bench: Bench) -> None:
    for name in ("s3.us-east-1.amazonaws.com", "a-bucket.s3.us-east-1.amazonaws.com", "sts.amazonaws.com"):
        answer = bench.sh(f"curl -sS https://{name}/path?x=1")
        assert answer.stdout == f"{name}/path?x=1", answer.stderr


def test_every_other_name_is_unknown_at_once(bench: Bench) -> None:
    started = time.monotonic()
    answer = bench.sh("curl -sS https://huggingface.co/")
    assert answer.returncode == 6 and time.monotonic() - started < 5


def test_nothing_else_of_this_machine_answers(bench: Bench) -> None:
    server = _serve("0.0.0.0", 0, lambda _: "a service of this machine")
    port = server.server_address[1]
    for address in ("10.42.1.1", "169.254.169.253", METADATA_ADDRESS):
        answer = bench.sh(f"curl -sS -m 5 http://{address}:{port}/")
        assert answer.returncode in (7, 28) and not answer.stdout
    server.shutdown()


def test_numactl_comes_from_the_mirror_with_a_way_out_and_binds(bench: Bench) -> None:
    installed = bench.sh("apt-get update && apt-get install -y numactl")
    assert installed.returncode == 0, installed.stdout + installed.stderr
    # The binding itself, as the kernel says it of a process that numactl started.
    bound = bench.sh("numactl --cpunodebind=0 --membind=0 cat /proc/self/numa_maps | head -1")
    assert "bind:0" in bound.stdout, bound.stderr


def test_without_a_way_out_the_mirror_refuses_at_once(bench: Bench) -> None:
    started = time.monotonic()
    refused = bench.sh("apt-get update && apt-get install -y numactl", TWO)
    assert refused.returncode != 0 and time.monotonic() - started < 15
    assert "refused" in refused.stdout + refused.stderr


def test_shared_memory_is_large_enough_for_an_object_store(bench: Bench) -> None:
    total_kib = int(Path("/proc/meminfo").read_text().split()[1])
    shm_kib = int(bench.sh("df --output=size /dev/shm | tail -1").stdout)
    assert shm_kib > 0.45 * total_kib


def test_stop_is_graceful_and_leaves_nothing(bench: Bench) -> None:
    three = "i-0aaaaaaaaaaaaaaa3"
    bench.machines.start(bench.spec(three, "10.42.1.30", egress=True))
    _wait(lambda: bench.machines.states()[three] is MachineState.RUNNING, 30, "did not start")
    _wait(lambda: bench.sh("systemctl is-active basic.target", three).returncode == 0, 60, "did not boot")
    unit = r"[Service]\nType=oneshot\nRemainAfterExit=yes\nExecStart=/bin/true\n"
    unit += r"ExecStop=/bin/sh -c 'sleep 1; echo drained >/dev/console'\n"
    made = bench.sh(f'printf "{unit}" >/run/systemd/system/drain.service; systemctl start drain', three)
    assert made.returncode == 0, made.stderr
    bench.machines.stop(three)
    assert bench.machines.states()[three] is MachineState.STOPPING
    bench.machines.stop(three)
    _wait(lambda: three not in bench.machines.states(), 60, "did not stop")
    assert "drained" in bench.machines.console(three).read_text(errors="replace")
    assert not (bench.home / "machines" / three).exists()
    assert not cgroups.processes(bench.network.bridge, three)
    assert three not in Path("/proc/mounts").read_text()
    with pytest.raises(RehearsalError, match="not running"):
        bench.sh("true", three)


def test_a_machine_that_died_says_so_and_a_later_daemon_removes_it(bench: Bench) -> None:
    four = "i-0aaaaaaaaaaaaaaa4"
    bench.machines.start(bench.spec(four, "10.42.1.40", egress=True))
    _wait(lambda: bench.machines.states()[four] is MachineState.RUNNING, 30, "did not start")
    process = processes.recorded(bench.home / "machines" / four / "process")
    assert process is not None
    process.signal(9)
    _wait(lambda: bench.machines.states()[four] is MachineState.DEAD, 5, "not seen to be dead")
    nobody = lambda *_: pytest.fail("a later daemon needs no image to remove")  # noqa: E731
    later = NspawnMachines(bench.home, bench.network.bridge, nobody, nobody)
    assert later.states()[four] is MachineState.DEAD
    later.stop(four)
    _wait(lambda: four not in later.states(), 20, "not removed")
    assert not cgroups.processes(bench.network.bridge, four)


def test_ensure_again_changes_nothing_and_a_second_rehearsal_is_refused(bench: Bench, tmp_path: Path) -> None:
    links = subprocess.run(["ip", "-br", "address"], capture_output=True, text=True, check=True).stdout
    subnets = (
        SubnetSpec("subnet-out", "10.42.1.0/24", "us-east-1a", True),
        SubnetSpec("subnet-in", "10.42.2.0/24", "us-east-1b", False),
    )
    vpc = VpcSpec("vpc-1", "10.42.0.0/16", subnets)
    bench.network.ensure([vpc])
    again = subprocess.run(["ip", "-br", "address"], capture_output=True, text=True, check=True).stdout
    assert links == again
    other = BridgeNetwork(tmp_path, None, lambda: ensure_tls(tmp_path, "us-east-1"), lambda: None)
    with pytest.raises(RehearsalError, match="another rehearsal is up"):
        other.ensure([])
    overlapping = VpcSpec("vpc-2", "10.42.128.0/17", ())
    with pytest.raises(RehearsalError, match="overlap"):
        bench.network.ensure([vpc, overlapping])
