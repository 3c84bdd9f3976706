"""The metadata service with real curl and botocore's own fetcher, each from a loopback address of its own."""

from __future__ import annotations

import json
import socket
import struct
import subprocess
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from botocore.utils import InstanceMetadataFetcher

from rehearsal.interfaces import RehearsalError
from rehearsal.metadata import Credentials, InstanceMetadata, MetadataService

HOST, OTHER, STRANGER = "127.0.0.5", "127.0.0.6", "127.0.0.7"
TTL = "X-aws-ec2-metadata-token-ttl-seconds: 60"


def metadata(address: str) -> InstanceMetadata | None:
    if address not in {HOST, OTHER, "127.0.0.1"}:
        return None
    issued = datetime.now(UTC)
    keys = Credentials("ASIAKEY", "secret", "session", issued, issued + timedelta(hours=6))
    return InstanceMetadata(
        instance_id="i-" + address.replace(".", ""),
        instance_type="inf2.8xlarge",
        image_id="ami-0e0e0e0e0e0e0e0e0",
        private_ip=address,
        hostname="ip-10-0-0-4.ec2.internal",
        mac="02:00:00:00:00:01",
        availability_zone="us-east-1a",
        availability_zone_id="use1-az1",
        region="us-east-1",
        account="123456789012",
        reservation_id="r-1",
        launched=issued,
        security_groups=("hosts",),
        user_data=b"#!/bin/bash\necho \xc3\xa9\n",
        hop_limit=2,
        enabled=True,
        instance_profile_arn="arn:aws:iam::123456789012:instance-profile/p",
        role="host-role",
        credentials=lambda: keys,
    )


@pytest.fixture
def service() -> Iterator[MetadataService]:
    made = MetadataService(metadata, "127.0.0.1", port=0, v1_port=0)
    made.start()
    yield made
    made.stop()


def curl(port: int, path: str, *more: str, source: str = HOST) -> tuple[int, str]:
    """Status and body."""
    command = ["curl", "-sS", "--interface", source, "-w", "\n%{http_code}", *more]
    done = subprocess.run(
        [*command, f"http://127.0.0.1:{port}{path}"], capture_output=True, text=True, timeout=20, check=True
    )
    body, _, status = done.stdout.rpartition("\n")
    return int(status), body


def token(port: int, source: str = HOST) -> str:
    status, body = curl(port, "/latest/api/token", "-X", "PUT", "-H", TTL, source=source)
    assert status == 200
    return body


def get(service: MetadataService, path: str) -> tuple[int, str]:
    header = f"X-aws-ec2-metadata-token: {token(service.port)}"
    return curl(service.port, path, "-H", header)


def test_no_token_no_answer(service: MetadataService) -> None:
    assert curl(service.port, "/latest/meta-data/instance-id")[0] == 401
    assert curl(service.port, "/latest/meta-data/", "-H", "X-aws-ec2-metadata-token: made-up")[0] == 401


def test_a_token_is_its_hosts_alone(service: MetadataService) -> None:
    header = f"X-aws-ec2-metadata-token: {token(service.port, HOST)}"
    assert curl(service.port, "/latest/meta-data/instance-id", "-H", header) == (200, "i-127005")
    assert curl(service.port, "/latest/meta-data/instance-id", "-H", header, source=OTHER)[0] == 401


def test_a_token_ends(service: MetadataService, monkeypatch: pytest.MonkeyPatch) -> None:
    import time

    header = f"X-aws-ec2-metadata-token: {token(service.port)}"
    real = time.monotonic
    monkeypatch.setattr("rehearsal.metadata.service.time.monotonic", lambda: real() + 61)
    assert curl(service.port, "/latest/meta-data/instance-id", "-H", header)[0] == 401


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        (["-X", "PUT"], 400),
        (["-X", "PUT", "-H", "X-aws-ec2-metadata-token-ttl-seconds: 0"], 400),
        (["-X", "PUT", "-H", "X-aws-ec2-metadata-token-ttl-seconds: 21601"], 400),
        (["-X", "PUT", "-H", TTL, "-H", "X-Forwarded-For: 10.0.0.1"], 403),
    ],
)
def test_a_bad_token_request_is_refused(service: MetadataService, arguments: list[str], status: int) -> None:
    assert curl(service.port, "/latest/api/token", *arguments)[0] == status


def test_a_stranger_is_told_nothing(service: MetadataService) -> None:
    assert curl(service.port, "/latest/api/token", "-X", "PUT", "-H", TTL, source=STRANGER)[0] == 404
    assert curl(service.v1_port, "/latest/user-data", source=STRANGER)[0] == 404


def test_the_tree(service: MetadataService) -> None:
    listed = get(service, "/latest/meta-data/")[1].split("\n")
    assert {"ami-id", "iam/", "instance-id", "instance-type", "local-ipv4", "mac", "placement/"} <= set(
        listed
    )
    assert "tags/" not in listed
    assert get(service, "/2021-03-23/meta-data/placement/region") == (200, "us-east-1")
    assert get(service, "/latest/meta-data/placement/") == (
        200,
        "availability-zone\navailability-zone-id\nregion",
    )
    assert get(service, "/latest/meta-data/nothing")[0] == 404
    assert get(service, "/latest/user-data") == (200, "#!/bin/bash\necho é\n")
    document = json.loads(get(service, "/latest/dynamic/instance-identity/document")[1])
    assert (document["instanceId"], document["region"]) == ("i-127005", "us-east-1")


def test_role_credentials(service: MetadataService) -> None:
    assert get(service, "/latest/meta-data/iam/security-credentials/") == (200, "host-role")
    status, body = get(service, "/latest/meta-data/iam/security-credentials/host-role")
    keys = json.loads(body)
    assert (status, keys["Code"], keys["AccessKeyId"]) == (200, "Success", "ASIAKEY")
    expires = datetime.fromisoformat(keys["Expiration"])
    assert timedelta(hours=5) < expires - datetime.now(UTC) < timedelta(hours=7)


def test_botocore_finds_the_role(service: MetadataService) -> None:
    fetcher = InstanceMetadataFetcher(base_url=f"http://127.0.0.1:{service.port}/", num_attempts=1)
    assert fetcher.retrieve_iam_role_credentials()["access_key"] == "ASIAKEY"


def test_the_other_door_needs_no_token(service: MetadataService) -> None:
    assert curl(service.v1_port, "/2009-04-04/meta-data/instance-id") == (200, "i-127005")
    assert curl(service.v1_port, "/latest/user-data")[0] == 200


def raw_socket() -> socket.socket | None:
    """A socket that sees IP headers, None where that is not allowed."""
    try:
        return socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP)
    except PermissionError:
        return None


def ttl_of_answer(raw: socket.socket, port: int, marker: bytes) -> int:
    """The IP TTL of the packet from ``port`` that holds ``marker``."""
    raw.settimeout(10)
    while True:
        packet = raw.recv(65_535)
        header = (packet[0] & 15) * 4
        if struct.unpack_from("!H", packet, header)[0] == port and marker in packet:
            return packet[8]


def test_the_token_travels_no_further_than_the_hop_limit(service: MetadataService) -> None:
    raw = raw_socket()
    if raw is None:
        pytest.skip("reading IP headers needs CAP_NET_RAW")
    with raw:
        got = token(service.port)
        assert ttl_of_answer(raw, service.port, got.encode()) == 2
        curl(service.port, "/latest/meta-data/mac", "-H", f"X-aws-ec2-metadata-token: {got}")
        assert ttl_of_answer(raw, service.port, b"02:00:00:00:00:01") == 64


def test_an_address_that_is_not_there_says_so() -> None:
    with pytest.raises(RehearsalError, match="must hold that address"):
        MetadataService(metadata, "192.0.2.1", port=0, v1_port=0)
