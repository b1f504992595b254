"""Pictures are signed with what drew them, and a reader sees whether a file is as it was signed, and by whom."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from PIL import Image

from bottega import content_credentials
from bottega.codec import images
from bottega.content_credentials import PictureSigner, read
from bottega.errors import BadImage, ConfigError, InvalidRequest
from bottega.gateway.config import GatewayConfig, SigningConfig, check_files
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import GenerationSpec, ImageFormat, Provenance
from tests.support.picture_certificates import PictureAuthority

AUTHORITY = PictureAuthority()
FORMATS = pytest.mark.parametrize(
    "image_format",
    [generation_pb2.IMAGE_FORMAT_PNG, generation_pb2.IMAGE_FORMAT_JPEG, generation_pb2.IMAGE_FORMAT_WEBP],
    ids=["png", "jpeg", "webp"],
)
PROVENANCE = Provenance(model_hash="ab" * 32, dtype="float32", exact=True, parameters=GenerationSpec(model="shapes"))


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> PictureSigner:
    certificate, key = AUTHORITY.issue(tmp_path_factory.mktemp("certificate"))
    return PictureSigner(certificate.read_bytes(), key.read_bytes(), version="1.2")


async def signed(signer: PictureSigner, image_format: ImageFormat.ValueType, *, metadata: bool = True) -> bytes:
    picture = images.encode_image(Image.new("RGB", (8, 8), "red"), image_format, 90, {"bottega": "{}"})
    (data,) = await signer.sign([picture], GenerationSpec(format=image_format, metadata=metadata), PROVENANCE)
    return data


@FORMATS
async def test_a_signed_picture_says_who_signed_it_and_what_drew_it(
    signer: PictureSigner, image_format: ImageFormat.ValueType
) -> None:
    data = await signed(signer, image_format)
    found = read(data)
    assert found is not None
    assert (found.state, found.signer, found.failures) == ("valid", "pictures.example, Example Studio", ())
    assert (found.facts["model"], found.facts["model_hash"]) == ("shapes", "ab" * 32)
    for anchors, state in ((AUTHORITY.pem, "trusted"), (PictureAuthority().pem, "valid")):
        found = read(data, anchors=anchors)
        assert found is not None
        assert found.state == state
    assert images.inspect(data).width == 8, "a later edit may start from it"
    bare = read(await signed(signer, image_format, metadata=False))
    assert bare is not None
    assert (bare.state, bare.facts) == ("valid", {})


@FORMATS
async def test_a_changed_file_is_not_what_was_signed(
    signer: PictureSigner, image_format: ImageFormat.ValueType
) -> None:
    data, chance = await signed(signer, image_format), random.Random(7)
    whole = read(data, anchors=AUTHORITY.pem)
    for _ in range(50):
        changed = bytearray(data)
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
        found = read(bytes(changed), anchors=AUTHORITY.pem)
        if found is not None and found.valid:  # padding behind the signature or its checksum, which are not signed
            assert found == whole
            with contextlib.suppress(BadImage):
                assert images.decode(bytes(changed), 0, 0) == images.decode(data, 0, 0)
        read(bytes(changed[: chance.randrange(len(changed))]))
    assert read(b"jumb c2pa") is not None
    assert read(images.encode_image(Image.new("RGB", (8, 8)), image_format, 90, {})) is None


def _unusable(folder: Path) -> Iterator[tuple[bytes, bytes, str]]:
    certificate, key = (path.read_bytes() for path in AUTHORITY.issue(folder))
    yield b"hello", key, "no certificate"
    yield certificate, b"hello", "no private key"
    yield certificate, AUTHORITY.issue(folder)[1].read_bytes(), "not that of the first certificate"
    for given, text in (({"days": 0}, "not valid at time of signing"), ({"for_pictures": False}, "certificate")):
        certificate, key = (path.read_bytes() for path in AUTHORITY.issue(folder, **given))
        yield certificate, key, text


def test_what_cannot_sign_is_refused_before_a_picture_is_drawn(tmp_path: Path) -> None:
    for certificate, key, text in _unusable(tmp_path):
        with pytest.raises(ConfigError, match=text):
            PictureSigner(certificate, key, version="1")
    path, key_path = AUTHORITY.issue(tmp_path)
    check_files(_config(path, key_path))
    key_path.chmod(0o644)
    with pytest.raises(ConfigError, match=r"signing: .*chmod 600"):
        check_files(_config(path, key_path))
    check_files(_config(path, Path("/run/credentials/bottega-gateway.service/key")))  # there while the unit runs
    with pytest.raises(ValueError, match="both certificate and key"):
        SigningConfig(certificate="a")


def _config(certificate: Path, key: Path) -> GatewayConfig:
    files = SigningConfig(certificate=str(certificate), key=str(key))
    return GatewayConfig(signing=files)


def test_a_missing_package_is_named_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "c2pa", None)
    assert read(b"no picture") is None
    for call in (lambda: read(b"jumb c2pa"), lambda: PictureSigner(b"", b"", version="1")):
        with pytest.raises(ConfigError, match=r"c2pa-python.*bottega-libs\[credentials\]"):
            call()
    assert content_credentials.INSTALL


def test_anchors_that_are_no_certificates_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="trusted certificates"):
        read(b"jumb c2pa", anchors="-----BEGIN CERTIFICATE-----\nx\n-----END CERTIFICATE-----\n")
