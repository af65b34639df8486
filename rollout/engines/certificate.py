"""A self-signed TLS certificate of one server, made on its host. Clients pin it; no authority vouches for it."""

from __future__ import annotations

import datetime
import ipaddress
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from .access import ServerFiles, fingerprint, write_private

VALID = datetime.timedelta(days=3650)  # pinned for the life of one process, or of a file of keys
EARLY = datetime.timedelta(days=1)  # clocks of hosts differ


def write_certificate(files: ServerFiles, host: str) -> str:
    """A new key and its certificate for the address `host`, in the server's private folder; the certificate's SHA-256 in hex."""
    key, certificate = make_certificate(host)
    write_private(Path(files.key), key.encode())
    write_private(Path(files.certificate), certificate.encode())
    return fingerprint(certificate)


def make_certificate(host: str) -> tuple[str, str]:
    """A new key, and its certificate for the address `host`, both in PEM."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "slipstream")])
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - EARLY)
        .not_valid_after(now + VALID)
        .add_extension(x509.SubjectAlternativeName([_alternative(host)]), critical=False)
    )
    certificate = builder.sign(key, hashes.SHA256())
    plain = serialization.NoEncryption()
    pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(pem, pkcs8, plain).decode(), certificate.public_bytes(pem).decode()


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
