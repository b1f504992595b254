"""Content Credentials (C2PA): a signature in a picture's file that says that a model drew it, and with what.

The signature covers the whole file, and with it the parameters in its metadata. An operator's certificate signs, and a
reader of the file chooses the authorities to trust. The package c2pa-python is optional, and imported when it is
needed. Nothing is fetched from the network: neither manifests elsewhere nor lists of revoked certificates.

Source: C2PA specification 2.2.
"""

from __future__ import annotations

import asyncio
import importlib
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from bottega.errors import ConfigError, InternalError, InvalidRequest
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import GenerationSpec, ImageFormat, Provenance

if TYPE_CHECKING:
    from cryptography import x509

INSTALL = "pip install 'bottega-libs[credentials]'"
"""Command that installs the package that signs and verifies."""

_ASSERTION = "org.bottega.provenance"
# IPTC's terms for the origin of a picture: drawn by a model, or a model changed what it was given.
_DRAWN = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"
_CHANGED = "http://cv.iptc.org/newscodes/digitalsourcetype/compositeWithTrainedAlgorithmicMedia"
_MEDIA_TYPES: Mapping[ImageFormat.ValueType, str] = {
    generation_pb2.IMAGE_FORMAT_JPEG: "image/jpeg",
    generation_pb2.IMAGE_FORMAT_WEBP: "image/webp",
}
# What a file with C2PA's boxes contains: the type of their superbox, and the label of the outermost one.
_MARKS = (b"jumb", b"c2pa")
_OFFLINE = {"remote_manifest_fetch": False, "ocsp_fetch": False}
# One red pixel, which a certificate signs on trial.
_TRIAL = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108020000009077"
    "53de0000000c49444154789c63f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)
# Failures and texts of a hostile file that are shown.
_MOST_FAILURES, _MOST_LETTERS = 5, 200


class PictureSigner:
    """Signs pictures with an operator's certificate.

    Args:
        certificate: The certificate, then the intermediate ones, without the root, in PEM.
        key: Its private key, in PEM.
        version: Version of the suite, which the credentials name.

    Raises:
        ConfigError: The package is missing, or no valid signature can be made with the certificate and the key.
    """

    def __init__(self, certificate: bytes, key: bytes, *, version: str) -> None:
        self._c2pa = _library()
        self._certificate, self._key, self._algorithm = certificate, key, _algorithm(certificate, key)
        self.expires_wall = _expires_wall(certificate)
        """Unix time in seconds at which the first of the certificates expires."""
        self._agent = {"name": "Bottega", "version": version}
        try:
            trial = read(self._sign(_TRIAL, "image/png", {}, _DRAWN))
        except self._c2pa.C2paError as error:
            raise ConfigError(f"nothing can be signed with the certificate: {_short(str(error))}") from None
        if trial is None or not trial.valid:
            failures = "; ".join(trial.failures) if trial else ""
            raise ConfigError(f"the certificate does not make valid signatures: {failures}")

    async def sign(self, pictures: Sequence[bytes], spec: GenerationSpec, provenance: Provenance) -> list[bytes]:
        """Return the pictures of a request with signatures. Without metadata they say nothing about the request.

        Raises:
            InternalError: A picture cannot be signed, for example because the certificate has expired.
        """
        media_type = _MEDIA_TYPES.get(spec.format, "image/png")
        origin = _CHANGED if provenance.image_digest else _DRAWN
        facts = _facts(provenance) if spec.metadata or not spec.HasField("metadata") else {}
        try:
            return [await asyncio.to_thread(self._sign, picture, media_type, facts, origin) for picture in pictures]
        except self._c2pa.C2paError as error:
            raise InternalError(f"the picture cannot be signed: {_short(str(error))}") from None

    def _sign(self, picture: bytes, media_type: str, facts: Mapping[str, object], origin: str) -> bytes:
        created = {"action": "c2pa.created", "digitalSourceType": origin, "softwareAgent": self._agent}
        assertions: list[dict[str, object]] = [{"label": "c2pa.actions.v2", "data": {"actions": [created]}}]
        if facts:
            assertions.append({"label": _ASSERTION, "data": facts})
        manifest = {"claim_generator_info": [self._agent], "assertions": assertions}
        signed = io.BytesIO()
        info = self._c2pa.C2paSignerInfo(self._algorithm, self._certificate, self._key, None)
        with (
            self._context({"verify": _OFFLINE | {"verify_after_sign": False}}) as context,
            self._c2pa.Signer.from_info(info) as signer,
            self._c2pa.Builder(json.dumps(manifest), context) as builder,
        ):
            builder.sign(signer, media_type, io.BytesIO(picture), signed)
        return signed.getvalue()

    def _context(self, settings: Mapping[str, object]) -> Any:
        thumbnail = {"builder": {"thumbnail": {"enabled": False}}}
        return self._c2pa.Context(self._c2pa.Settings.from_dict({**settings, **thumbnail}))


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """The Content Credentials in a file."""

    state: Literal["invalid", "valid", "trusted"]
    """`valid`: the file is as it was signed. `trusted`: by a certificate of a given authority, too."""
    signer: str
    """Name and organization in the certificate that signed; they prove nothing unless the state is `trusted`."""
    failures: tuple[str, ...]
    """The checks that failed."""
    facts: Mapping[str, object]
    """What the signer says of the picture, such as `model_hash`; empty if the signature is invalid."""

    @property
    def valid(self) -> bool:
        """Whether the file is as it was signed."""
        return self.state != "invalid"


def read(data: bytes, *, anchors: str = "") -> Credentials | None:
    """Return the Content Credentials in a picture's file; None if it has none. The file may be hostile.

    Args:
        data: The file.
        anchors: Certificates of authorities to trust, in PEM.

    Raises:
        ConfigError: The file seems to be signed, and the package is missing.
        InvalidRequest: The anchors cannot be used.
    """
    if not all(mark in data for mark in _MARKS):
        return None
    c2pa = _library()
    settings: dict[str, object] = {"verify": _OFFLINE | {"verify_trust": bool(anchors)}}
    if anchors:
        settings["trust"] = {"trust_anchors": anchors}
    try:
        context = c2pa.Context(c2pa.Settings.from_dict(settings))
    except c2pa.C2paError as error:
        raise InvalidRequest(f"the trusted certificates cannot be used: {_short(str(error))}") from None
    try:
        with context, c2pa.Reader(io.BytesIO(data), context=context) as reader:
            report = json.loads(reader.json())
    except c2pa.C2paError.ManifestNotFound:
        return None
    except (c2pa.C2paError, ValueError, RecursionError) as error:
        return Credentials(state="invalid", signer="", failures=(_short(str(error)),), facts={})
    # Not the reader's own getters: they raise KeyError for a report without the manifest.
    state, results = report.get("validation_state"), report.get("validation_results") or {}
    manifest = (report.get("manifests") or {}).get(report.get("active_manifest")) or {}
    valid = state in ("Valid", "Trusted")
    return Credentials(
        state="trusted" if state == "Trusted" else "valid" if valid else "invalid",
        signer=_signer(manifest.get("signature_info") or {}),
        failures=tuple(_failures((results.get("activeManifest") or {}).get("failure") or ())),
        facts=_asserted(manifest.get("assertions") or ()) if valid else {},
    )


def _library() -> Any:
    try:
        return importlib.import_module("c2pa")
    except (ImportError, OSError) as error:  # OSError: its native library cannot be loaded
        raise ConfigError(f"Content Credentials need the package c2pa-python ({error}): {INSTALL}") from None


def _facts(provenance: Provenance) -> Mapping[str, object]:
    """Return what a signature says of a picture beside the parameters in its metadata: no names of machines."""
    return {
        "model": provenance.parameters.model,
        "model_hash": provenance.model_hash,
        "dtype": provenance.dtype,
        "exact": provenance.exact,
        "bottega_version": provenance.bottega_version,
    }


def _asserted(assertions: Iterable[Mapping[str, Any]]) -> Mapping[str, object]:
    for assertion in assertions:
        if assertion.get("label") == _ASSERTION and isinstance(assertion.get("data"), dict):
            return dict(assertion["data"])
    return {}


def _signer(info: Mapping[str, object]) -> str:
    names = [info.get("common_name"), info.get("issuer")]
    return _short(", ".join(dict.fromkeys(str(name) for name in names if name)))


def _failures(results: Iterable[Mapping[str, object]]) -> Iterable[str]:
    for _, result in zip(range(_MOST_FAILURES), results, strict=False):
        yield _short(f"{result.get('code')}: {result.get('explanation')}")


def _short(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}..."


def _algorithm(certificate: bytes, key: bytes) -> str:
    """Return C2PA's name of the algorithm of a key. Raise ConfigError if it cannot be used, or is another one's."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        own = x509.load_pem_x509_certificate(certificate)
    except ValueError:
        raise ConfigError("the certificate is no certificate in PEM") from None
    try:
        private = load_pem_private_key(key, None)
    except (TypeError, ValueError):
        raise ConfigError("the key is no private key in PEM without a passphrase") from None
    if not _belong_together(own, private):
        raise ConfigError("the key is not that of the first certificate in the file")
    match private:
        case ec.EllipticCurvePrivateKey() if private.curve.name in ("secp256r1", "secp384r1", "secp521r1"):
            return {"secp256r1": "es256", "secp384r1": "es384", "secp521r1": "es512"}[private.curve.name]
        case ed25519.Ed25519PrivateKey():
            return "ed25519"
        case rsa.RSAPrivateKey():
            return "ps256"
    raise ConfigError("the key must be of P-256, P-384, P-521, Ed25519 or RSA")


def _expires_wall(certificates: bytes) -> float:
    from cryptography import x509

    ends = [certificate.not_valid_after_utc for certificate in x509.load_pem_x509_certificates(certificates)]
    return min(ends).timestamp()


def _belong_together(certificate: x509.Certificate, private: Any) -> bool:
    return bool(certificate.public_key() == private.public_key())
