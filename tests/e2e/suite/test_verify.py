"""`bottega verify` tells a genuine picture from a changed one, and the same picture from another one."""

from __future__ import annotations

import asyncio
import io
from pathlib import Path
from typing import Any

import PIL.Image
from PIL.PngImagePlugin import PngInfo

from bottega.client import Client
from bottega.client.types.picture import Picture
from bottega.content_credentials import PictureSigner
from bottega.v1.generation_pb2 import GenerationSpec, Provenance
from tests.e2e.conftest import Suite
from tests.support.picture_certificates import PictureAuthority
from tests.support.terminal import run

_STEPS = 4


def _signed(path: Path, folder: Path, provenance: Provenance, *, metadata: bool = True) -> PictureAuthority:
    authority = PictureAuthority()
    certificate, key = authority.issue(folder)
    signer = PictureSigner(certificate.read_bytes(), key.read_bytes(), version="1")
    (data,) = asyncio.run(signer.sign([path.read_bytes()], GenerationSpec(metadata=metadata), provenance))
    path.write_bytes(data)
    return authority


def _facts(picture: Picture, **changes: Any) -> Provenance:
    made = picture.provenance
    facts: dict[str, Any] = {"model_hash": made.model_hash, "exact": True, "dtype": made.dtype}
    return Provenance(bottega_version=made.bottega_version, **facts | changes)


def test_a_genuine_picture_a_changed_one_and_another_one(suite: Suite, client: Client, tmp_path: Path) -> None:
    path, anchors, other = tmp_path / "star.png", tmp_path / "anchors.pem", tmp_path / "other.png"
    picture = client.generate("a big red star", seed=7, num_inference_steps=_STEPS)
    picture.save(path)
    found = run("verify", str(path), address=suite.gateway.address)
    assert (found.exit_code, "not signed" in found.stdout, "equal:" in found.stdout) == (0, True, True), found.output

    authority = _signed(path, tmp_path, _facts(picture))
    anchors.write_text(authority.pem)
    found = run("verify", str(path), "--trust", str(anchors), address=suite.gateway.address)
    assert (found.exit_code, "signed by pictures.example" in found.stdout) == (0, True), found.output
    anchors.write_text(PictureAuthority().pem)
    found = run("verify", str(path), "--trust", str(anchors), "--no-replay")
    assert (found.exit_code, "whose authority is not in" in found.stdout) == (3, True), found.output

    data = path.read_bytes()
    path.write_bytes(data.replace(b"a big red star", b"a big red ring"))
    found = run("verify", str(path), address="127.0.0.1:1")  # no suite is needed to see that
    assert (found.exit_code, "the signature is not valid" in found.stdout) == (3, True), found.output

    other.write_bytes(picture.data.replace(b'"7"', b'"8"'))
    found = run("verify", str(other), address=suite.gateway.address)
    assert found.exit_code == 2, "a text with a wrong checksum"


def test_a_picture_that_others_have_changed_is_another_one(suite: Suite, client: Client, tmp_path: Path) -> None:
    picture = client.generate("a ring", seed=3, num_inference_steps=_STEPS, format="jpeg")
    path = picture.save(tmp_path / "ring.jpeg")
    found = run("verify", str(path), address=suite.gateway.address)
    assert (found.exit_code, "equal:" in found.stdout) == (0, True), found.output
    image = PIL.Image.open(io.BytesIO(picture.data))
    exif = image.info["exif"]
    image.paste("white", (0, 0, 32, 32))
    image.save(path, exif=exif)
    found = run("verify", str(path), address=suite.gateway.address)
    assert (found.exit_code, "different:" in found.stdout) == (4, True), found.output


def test_what_cannot_be_drawn_again_says_what_is_missing(client: Client, suite: Suite, tmp_path: Path) -> None:
    source = client.generate("a ring", seed=3, num_inference_steps=_STEPS)
    path = client.generate("a star", image=source, seed=4, num_inference_steps=_STEPS).save(tmp_path / "star.png")
    found = run("verify", str(path), address=suite.gateway.address)
    assert (found.exit_code, "--image" in found.output) == (2, True)
    image = source.save(tmp_path / "ring.png")
    found = run("verify", str(path), "--image", str(image), address=suite.gateway.address)
    assert (found.exit_code, "equal:" in found.stdout) == (0, True), found.output
    picture = client.generate("a ring", seed=3, num_inference_steps=_STEPS, metadata=False)
    bare = picture.save(tmp_path / "bare.png")
    found = run("verify", str(bare))
    assert (found.exit_code, "drawn without metadata" in found.output) == (2, True), found.output
    _signed(bare, tmp_path, _facts(picture), metadata=False)
    found = run("verify", str(bare))
    assert (found.exit_code, "signed; it was drawn without metadata" in found.stdout) == (0, True), found.output


def test_a_picture_that_the_suite_would_draw_otherwise_cannot_be_compared(
    client: Client, suite: Suite, tmp_path: Path
) -> None:
    picture = client.generate("a ring", seed=3, num_inference_steps=_STEPS, shared_turns=True)
    texts = PngInfo()
    for keyword, text in picture.pil().info.items():
        texts.add_text(str(keyword), str(text))
    image = picture.pil().convert("RGB")
    image.paste("white", (0, 0, 32, 32))
    path = tmp_path / "ring.png"
    cases: tuple[tuple[dict[str, Any], int, str], ...] = (
        ({"exact": False}, 5, "approximate"),
        ({"dtype": "float16"}, 5, "dtype was float16"),
        ({"model_hash": "ab" * 32}, 5, "the model has changed"),
        ({}, 4, "column "),
    )
    for changes, status, reason in cases:
        image.save(path, pnginfo=texts)
        _signed(path, tmp_path, _facts(picture, **changes))
        found = run("verify", str(path), address=suite.gateway.address)
        assert (found.exit_code, reason in found.output) == (status, True), found.output
    again = client.list_jobs(page_size=1).jobs[0].parameters
    assert (again.shared_turns, again.approximate_cache) == (False, False), "it was signed as exact"
