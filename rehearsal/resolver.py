"""The VPC's resolver: dnsmasq on the bridge, with no other resolver behind it.

AWS's names and the package mirror's name are the bridge itself; every other name does not exist, at once,
whatever this machine could resolve. A machine behind a dead resolver boots minutes slower.
"""

from __future__ import annotations

import time
from pathlib import Path

from rehearsal import processes
from rehearsal.interfaces import RehearsalError


def dnsmasq_arguments(bridge: str, address: str, mirror_hosts: list[str], vpc_cidrs: list[str]) -> list[str]:
    """dnsmasq's command line.

    Args:
        bridge: it answers on this interface only.
        address: what AWS's names and ``mirror_hosts`` resolve to.
        mirror_hosts: host names of the image's apt sources.
        vpc_cidrs: their addresses have names of the form ``ip-10-0-0-12.ec2.internal``.
    """
    argv = ["dnsmasq", "--keep-in-foreground", "--conf-file=/dev/null", "--no-resolv", "--no-hosts"]
    argv += ["--no-poll", "--log-facility=-", "--user=nobody", "--group=nogroup", "--pid-file="]
    argv += [f"--interface={bridge}", "--except-interface=lo", "--bind-dynamic", "--cache-size=0"]
    for name in ["amazonaws.com", "amazonaws.com.cn", "aws", *mirror_hosts]:
        # "local" too: no other record type of the name is asked elsewhere.
        argv += [f"--address=/{name}/{address}", f"--local=/{name}/"]
    argv += [f"--synth-domain=ec2.internal,{cidr},ip-" for cidr in vpc_cidrs]
    # Everything else: no such name.
    return [*argv, "--local=/ec2.internal/", "--address=/#/"]


class Resolver:
    """Runs dnsmasq for one rehearsal and follows changes of its arguments."""

    def __init__(self, home: Path, bridge: str, address: str) -> None:
        self._record = home / "run/dnsmasq.process"
        self._arguments = home / "run/dnsmasq.arguments"
        self._log = home / "logs/dnsmasq.log"
        self._bridge = bridge
        self._address = address

    def ensure(self, mirror_hosts: list[str], vpc_cidrs: list[str]) -> None:
        """Run it with these names; running already with the same, nothing changes.

        Raises:
            RehearsalError: it ends at once (its log's last line is the reason).
        """
        argv = dnsmasq_arguments(self._bridge, self._address, mirror_hosts, vpc_cidrs)
        wanted = "\n".join(argv)
        running = processes.recorded(self._record)
        if running and self._arguments.exists() and self._arguments.read_text() == wanted:
            return
        self.stop()
        process = processes.spawn(argv, self._record, self._log)
        self._arguments.write_text(wanted)
        deadline = time.monotonic() + 0.3
        while time.monotonic() < deadline:
            processes.reap(process)
            if not process.alive():
                raise RehearsalError(
                    f"the resolver does not start: {processes.last_line(self._log)}. Its log: {self._log}"
                )
            time.sleep(0.02)

    def stop(self) -> None:
        """End it, also one that an earlier daemon left."""
        processes.end(self._record)
        self._arguments.unlink(missing_ok=True)
