"""An authority that issues certificates for signing pictures (C2PA), for tests."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID

_NO_USAGE = {
    "content_commitment": False,
    "key_encipherment": False,
    "data_encipherment": False,
    "key_agreement": False,
    "encipher_only": False,
    "decipher_only": False,
}


def _name(text: str) -> x509.Name:
    names = ((x509.NameOID.COMMON_NAME, text), (x509.NameOID.ORGANIZATION_NAME, "Example Studio"))
    return x509.Name([x509.NameAttribute(oid, value) for oid, value in names])


def _key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureAuthority:
    key: ec.EllipticCurvePrivateKey = field(default_factory=_key)

    @property
    def pem(self) -> str:
        return self._certificate("Root", self.key, days=30, is_authority=True).public_bytes(Encoding.PEM).decode()

    def issue(self, folder: Path, *, days: int = 5, for_pictures: bool = True) -> tuple[Path, Path]:
        """Writes a certificate and its key, which only the user can read. days: 0 has expired."""
        key = _key()
        certificate = self._certificate("pictures.example", key, days=days, for_pictures=for_pictures)
        paths = folder / "pictures.pem", folder / "pictures.key"
        paths[0].write_bytes(certificate.public_bytes(Encoding.PEM))
        paths[1].touch(0o600)
        paths[1].write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return paths

    def _certificate(
        self,
        name: str,
        key: ec.EllipticCurvePrivateKey,
        *,
        days: int,
        is_authority: bool = False,
        for_pictures: bool = True,
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        usage = x509.KeyUsage(
            digital_signature=not is_authority, key_cert_sign=is_authority, crl_sign=is_authority, **_NO_USAGE
        )
        purpose = ExtendedKeyUsageOID.EMAIL_PROTECTION if for_pictures else ExtendedKeyUsageOID.SERVER_AUTH
        issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key())
        builder = (
            x509.CertificateBuilder(_name("Root"), _name(name), key.public_key(), x509.random_serial_number())
            .not_valid_before(now - dt.timedelta(days=2))
            .not_valid_after(now + dt.timedelta(days=days or -1))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(issuer, critical=False)
        )
        if not is_authority:
            builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        return builder.sign(self.key, hashes.SHA256())
