"""An authority, and certificates of it, for tests."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from bottega.rpc.channel import Channels
from bottega.rpc.security.caller import identity_from
from bottega.rpc.security.certificates import CertificateFolder
from bottega.rpc.security.tls import TlsConfig, TlsFiles


class Authority:
    """In a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = CertificateFolder(folder)
        self.folder.make_authority(days=100)

    def issue(self, name: str, *, days: int = 5) -> TlsConfig:
        """The files of ROLE/NAME, new ones each time. days: 0 has expired."""
        identity = identity_from(name)
        assert identity is not None
        paths = self.folder.issue(identity, days=days)
        return TlsConfig(
            certificate=str(paths.certificate), key=str(paths.key), authority=str(self.folder.authority_path)
        )

    def channels(self, name: str, *, days: int = 5) -> Channels:
        """What opens channels in the name of ROLE/NAME."""
        return Channels(TlsFiles(self.issue(name, days=days)))


def self_signed(folder: Path, name: str) -> Path:
    """Write a certificate for a name, signed by itself, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder(subject, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / "receiver.pem"
    path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        + certificate.public_bytes(serialization.Encoding.PEM)
    )
    return path
