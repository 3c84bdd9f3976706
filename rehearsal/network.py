"""The VPC on this machine: one bridge, its addresses, its resolver, and the doors that AWS has there.

Nothing on the bridge is routed anywhere: machines reach each other and, on this machine, the metadata
service, the resolver, the API's door (HTTPS) and, from subnets with a way out, the packages' mirror. All else
of this machine refuses them.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from rehearsal.haproxy import HaProxy
from rehearsal.image import RootImage
from rehearsal.interfaces import RehearsalError, VpcSpec
from rehearsal.machines.files import RESOLVER_ADDRESS
from rehearsal.mirror import MirrorServer
from rehearsal.processes import run
from rehearsal.resolver import Resolver
from rehearsal.tls import Tls

METADATA_ADDRESS = "169.254.169.254"
METADATA_PORTS = (80, 8775)
_DEFAULT_HOME = "/var/lib/neuronfleet-rehearsal"


def bridge_name(home: Path) -> str:
    """The bridge of a home: ``nf-br0`` for the default one, else one of its own (15 characters at most)."""
    path = str(home.resolve())
    if path == _DEFAULT_HOME:
        return "nf-br0"
    return "nf-" + hashlib.sha256(path.encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Rules:
    """What machines may reach on this machine, as nftables says it."""

    bridge: str
    egress: tuple[str, ...]
    """CIDRs of the subnets with a way out."""

    @property
    def table(self) -> str:
        """The table's name; the bridge's is unique on this machine."""
        return f"neuronfleet_{self.bridge.replace('-', '_')}"

    def render(self) -> str:
        """The whole table, replaced in one transaction."""
        ports = ", ".join(str(port) for port in METADATA_PORTS)
        out = f"elements = {{ {', '.join(self.egress)} }}" if self.egress else ""
        return f"""\
table inet {self.table}
delete table inet {self.table}
table inet {self.table} {{
  set egress {{
    type ipv4_addr
    flags interval
    {out}
  }}
  chain input {{
    type filter hook input priority filter; policy accept;
    iifname != "{self.bridge}" accept
    ct state established,related accept
    icmp type echo-request accept
    ip daddr {METADATA_ADDRESS} tcp dport {{ {ports} }} accept
    ip daddr {RESOLVER_ADDRESS} meta l4proto {{ tcp, udp }} th dport 53 accept
    ip daddr {RESOLVER_ADDRESS} tcp dport 443 accept
    ip daddr {RESOLVER_ADDRESS} tcp dport 80 ip saddr @egress accept
    meta l4proto tcp reject with tcp reset
    reject
  }}
  chain forward {{
    type filter hook forward priority filter; policy accept;
    iifname "{self.bridge}" oifname != "{self.bridge}" drop
    iifname != "{self.bridge}" oifname "{self.bridge}" drop
  }}
}}
"""


def api_config(tls: Tls, api_port: int, stats_socket: Path) -> str:
    """HAProxy's configuration of the API's door: TLS ends here, the name asked for is passed on."""
    return f"""\
global
  maxconn 2000
  stats socket {stats_socket} mode 600 level admin
  ssl-default-bind-options ssl-min-ver TLSv1.2
defaults
  mode http
  timeout connect 5s
  timeout client 300s
  timeout server 300s
  timeout http-request 30s
  option forwardfor
frontend api
  bind {RESOLVER_ADDRESS}:443 ssl crt {tls.server} alpn http/1.1
  http-request set-header X-Forwarded-Proto https
  default_backend api
backend api
  server api 127.0.0.1:{api_port}
"""


class BridgeNetwork:
    """Implements :class:`rehearsal.interfaces.Network`.

    Args:
        home: the rehearsal's home.
        api_port: port of the API on loopback.
        tls: gives the certificate files.
        image: gives the image whose mirror is served, None while there is none.
    """

    def __init__(
        self, home: Path, api_port: int | None, tls: Callable[[], Tls], image: Callable[[], RootImage | None]
    ) -> None:
        self.bridge = bridge_name(home)
        self._home = home
        self._api_port = api_port
        self._tls = tls
        self._image = image
        self._resolver = Resolver(home, self.bridge, RESOLVER_ADDRESS)
        self._door = HaProxy(home, "api")
        self._mirror: MirrorServer | None = None
        self._rules: Rules | None = None

    def ensure(self, vpcs: list[VpcSpec]) -> None:
        """See the interface.

        Raises:
            RehearsalError: overlapping VPCs, another rehearsal that is up, or a step that fails.
        """
        wanted = _addresses(vpcs)
        self._ensure_bridge()
        self._ensure_addresses(wanted)
        egress = [subnet.cidr for vpc in vpcs for subnet in vpc.subnets if subnet.egress]
        rules = Rules(self.bridge, tuple(str(net) for net in ipaddress.collapse_addresses(_networks(egress))))
        if rules != self._rules:
            run(["nft", "-f", "-"], "set the bridge's rules", input_text=rules.render())
            self._rules = rules
        # The image may still be being built when only the API runs; it is there before any instance is.
        image = self._image()
        hosts = [urlsplit(image.mirror_uri).hostname or ""] if image else []
        self._resolver.ensure(hosts, [vpc.cidr for vpc in vpcs])
        if self._api_port is not None:
            self._door.ensure(api_config(self._tls(), self._api_port, self._door.stats_socket))
        if image is not None and self._mirror is None:
            self._mirror = MirrorServer(image.mirror, RESOLVER_ADDRESS)

    def remove_all(self) -> None:
        """See the interface."""
        if self._mirror is not None:
            self._mirror.close()
            self._mirror = None
        self._door.stop()
        self._resolver.stop()
        table = Rules(self.bridge, ()).table
        # Naming the table first makes the deletion no error when it is not there.
        run(["nft", "-f", "-"], "remove the bridge's rules",
            input_text=f"table inet {table}\ndelete table inet {table}\n")  # fmt: skip
        self._rules = None
        if self._exists():
            for link in _show("link"):
                # Of a machine whose end nobody saw.
                if link.get("master") == self.bridge and link["ifname"].startswith("vb-"):
                    run(["ip", "link", "delete", link["ifname"]], "remove a machine's link")
            run(["ip", "link", "delete", self.bridge], "remove the bridge")

    def _exists(self) -> bool:
        return any(link["ifname"] == self.bridge for link in _show("link"))

    def _ensure_bridge(self) -> None:
        if self._exists():
            return
        for link in _show("address"):
            taken = {address["local"] for address in link.get("addr_info", [])}
            if METADATA_ADDRESS in taken:
                raise RehearsalError(
                    f"{METADATA_ADDRESS} is already on {link['ifname']} of this machine: another rehearsal "
                    "is up (run `make down` with its NEURONFLEET_REHEARSAL_HOME), or this is an EC2 instance "
                    "whose own metadata service it would hide"
                )
        # No delay before the bridge forwards, no IPv6 address of its own.
        add = ["ip", "link", "add", self.bridge, "type", "bridge", "forward_delay", "0", "stp_state", "0"]
        run(add, f"make the bridge {self.bridge}")
        ipv6 = Path(f"/proc/sys/net/ipv6/conf/{self.bridge}/disable_ipv6")
        if ipv6.exists():
            ipv6.write_text("1")
        run(["ip", "link", "set", self.bridge, "up"], f"bring {self.bridge} up")

    def _ensure_addresses(self, wanted: dict[str, str]) -> None:
        present = {
            f"{address['local']}/{address['prefixlen']}"
            for link in _show("address", self.bridge)
            for address in link.get("addr_info", [])
            if address["family"] == "inet"
        }
        for address in present - set(wanted):
            run(["ip", "address", "del", address, "dev", self.bridge], f"remove {address} from the bridge")
        for address in sorted(set(wanted) - present):
            run(
                ["ip", "address", "add", address, "dev", self.bridge], f"put {address} ({wanted[address]}) up"
            )


def _show(what: str, device: str | None = None) -> list[dict[str, Any]]:
    argv = ["ip", "-json", what, "show", *(["dev", device] if device else [])]
    links: list[dict[str, Any]] = json.loads(run(argv, "read this machine's links") or "[]")
    return links


def _networks(cidrs: list[str]) -> list[ipaddress.IPv4Network]:
    return [ipaddress.IPv4Network(cidr) for cidr in cidrs]


def _addresses(vpcs: list[VpcSpec]) -> dict[str, str]:
    """Addresses of the bridge with their prefix -> what each is: AWS's own, and each subnet's router."""
    wanted = {f"{METADATA_ADDRESS}/32": "metadata service", f"{RESOLVER_ADDRESS}/32": "resolver and API"}
    nets = {vpc.vpc_id: ipaddress.IPv4Network(vpc.cidr) for vpc in vpcs}
    for one, net in nets.items():
        for other, against in nets.items():
            if one < other and net.overlaps(against):
                raise RehearsalError(
                    f"VPCs {one} ({net}) and {other} ({against}) overlap: this machine has one bridge for "
                    "all of them; give each environment a CIDR of its own"
                )
    for vpc in vpcs:
        prefix = nets[vpc.vpc_id].prefixlen
        for subnet in vpc.subnets:
            router = next(ipaddress.IPv4Network(subnet.cidr).hosts())
            wanted[f"{router}/{prefix}"] = f"router of {subnet.subnet_id}"
    return wanted
