"""The rehearsal's certificate authority: hosts reach ``https://<service>.<region>.amazonaws.com`` here.

Machines trust the authority by their own CA store, as a host trusts Amazon's; nothing on this machine does.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

_LIFETIME = datetime.timedelta(days=397)
_RENEW_BEFORE = datetime.timedelta(days=30)


@dataclass(frozen=True)
class Tls:
    """Files of the authority, all under one folder of mode 0700.

    Attributes:
        authority: its certificate (PEM), which machines trust.
        server: certificate and key (PEM, one file, as HAProxy wants it) of the API's names.
    """

    authority: Path
    server: Path


def api_names(region: str) -> list[str]:
    """Names that the API's certificate covers: one label deep, and buckets and accounts one deeper."""
    suffix = f"{region}.amazonaws.com"
    return [
        "amazonaws.com",
        "*.amazonaws.com",
        suffix,
        f"*.{suffix}",
        f"*.s3.{suffix}",
        "*.s3.amazonaws.com",
        f"*.dkr.ecr.{suffix}",
        f"*.s3.dualstack.{suffix}",
        f"*.s3-control.{suffix}",
        # The load balancer's HTTPS listener, as AWS names it and as a client on this machine reaches it.
        f"*.{region}.elb.amazonaws.com",
        "localhost",
    ]


def ensure_tls(folder: Path, region: str, extra_names: tuple[str, ...] = ()) -> Tls:
    """Make the authority and the server certificate, unless they are there and good for 30 more days.

    Args:
        folder: where they live; made with mode 0700.
        region: AWS region of the names.
        extra_names: more DNS names for the server (a load balancer's).
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)
    tls = Tls(folder / "authority.pem", folder / "server.pem")
    key_file = folder / "authority.key"
    if not (_good(tls.authority) and key_file.exists()):
        key, certificate = _make_authority()
        _write(key_file, _key_pem(key))
        _write(tls.authority, certificate.public_bytes(serialization.Encoding.PEM))
        tls.server.unlink(missing_ok=True)
    names = [*api_names(region), *extra_names]
    if not (_good(tls.server) and _names(tls.server) >= set(names)):
        signer = serialization.load_pem_private_key(key_file.read_bytes(), None)
        assert isinstance(signer, ec.EllipticCurvePrivateKey)
        issuer = x509.load_pem_x509_certificate(tls.authority.read_bytes())
        key, certificate = _make_server(names, signer, issuer)
        _write(tls.server, certificate.public_bytes(serialization.Encoding.PEM) + _key_pem(key))
    return tls


def _subject(name: str) -> x509.Name:
    return x509.Name(
        [
            x509.NameAttribute(NameOID.ORGANIZATION_NAME, "NeuronFleet rehearsal"),
            x509.NameAttribute(NameOID.COMMON_NAME, name),
        ]
    )


def _builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + _LIFETIME)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _make_authority() -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _subject("NeuronFleet rehearsal authority")
    # Of a key's uses, an authority has the two that sign.
    others = "digital_signature content_commitment key_encipherment data_encipherment key_agreement"
    usage = dict.fromkeys([*others.split(), "encipher_only", "decipher_only"], False)
    certificate = (
        _builder(subject, key)
        .issuer_name(subject)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
        .sign(key, hashes.SHA256())
    )
    return key, certificate


def _make_server(
    names: list[str], signer: ec.EllipticCurvePrivateKey, issuer: x509.Certificate
) -> tuple[ec.EllipticCurvePrivateKey, x509.Certificate]:
    key = ec.generate_private_key(ec.SECP256R1())
    dns = [x509.DNSName(name) for name in names]
    loopback = x509.IPAddress(ipaddress.IPv4Address("127.0.0.1"))
    certificate = (
        _builder(_subject("NeuronFleet rehearsal API"), key)
        .issuer_name(issuer.subject)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False
        )
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([*dns, loopback]), critical=False)
        .sign(signer, hashes.SHA256())
    )
    return key, certificate


def _good(path: Path) -> bool:
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return False
    return certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC) > _RENEW_BEFORE


def _names(path: Path) -> set[str]:
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return set(names.get_values_for_type(x509.DNSName))


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, content: bytes) -> None:
    part = path.with_name(path.name + ".part")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
    part.replace(path)
