"""A throw-away certificate authority and a server certificate for 127.0.0.1, for tests of TLS."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_VALID = datetime.timedelta(days=2)


@dataclass(frozen=True)
class Authority:
    """Three PEM files: what clients trust, and the server's certificate with its key."""

    ca_file: Path
    cert_file: Path
    key_file: Path


def make_authority(directory: Path) -> Authority:
    """Make the files in `directory`, or return those that an earlier call made there."""
    made = Authority(directory / "ca.pem", directory / "server.pem", directory / "server.key")
    if made.ca_file.exists():
        return made
    directory.mkdir(parents=True, exist_ok=True)
    ca_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    ca_name = _name("tailrace test authority")
    ca = (
        _builder(ca_name, ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    server = (
        _builder(_name("localhost"), ca_name, server_key.public_key())
        .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        .sign(ca_key, hashes.SHA256())
    )
    made.key_file.touch(mode=0o600)
    made.key_file.write_bytes(
        server_key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    made.cert_file.write_bytes(server.public_bytes(serialization.Encoding.PEM))
    made.ca_file.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    return made


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID)
        .not_valid_after(now + _VALID)
    )
