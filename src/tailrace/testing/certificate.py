"""A temporary certificate authority for tests of TLS, with certificates for a server on 127.0.0.1 and its clients."""

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
    """PEM files: the CA certificate that both sides trust, and certificates with keys for the server and a client.

    `expired_file` is an expired certificate for the server's key.
    """

    ca_file: Path
    cert_file: Path
    key_file: Path
    expired_file: Path
    client_cert_file: Path
    client_key_file: Path


def make_authority(directory: Path) -> Authority:
    """Create the files in `directory`, or return those that an earlier call created there."""
    names = ("ca.pem", "server.pem", "server.key", "expired.pem", "client.pem", "client.key")
    made = Authority(*(directory / name for name in names))
    if made.ca_file.exists():
        return made
    directory.mkdir(parents=True, exist_ok=True)
    ca_key, server_key, client_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(3))
    ca_name = _name("tailrace test authority")
    ca = (
        _builder(ca_name, ca_name, ca_key.public_key())
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(ca_key, hashes.SHA256())
    )
    hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    for file, ended in ((made.cert_file, datetime.timedelta()), (made.expired_file, 2 * _VALID)):
        server = (
            _builder(_name("localhost"), ca_name, server_key.public_key(), ended)
            .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
            .sign(ca_key, hashes.SHA256())
        )
        file.write_bytes(server.public_bytes(serialization.Encoding.PEM))
    client = _builder(_name("a client"), ca_name, client_key.public_key()).sign(ca_key, hashes.SHA256())
    made.client_cert_file.write_bytes(client.public_bytes(serialization.Encoding.PEM))
    _write_key(made.key_file, server_key)
    _write_key(made.client_key_file, client_key)
    made.ca_file.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    return made


def _write_key(file: Path, key: ec.EllipticCurvePrivateKey) -> None:
    file.touch(mode=0o600)
    file.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    ended: datetime.timedelta = datetime.timedelta(),
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC) - ended
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _VALID)
        .not_valid_after(now + _VALID)
    )
