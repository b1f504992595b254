"""Edits by the SDK and by `bottega edit`, against a gateway that follows a script."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import PIL.Image
import PIL.PngImagePlugin
import pytest
from google.protobuf import json_format

from bottega.client import AsyncClient, Box, Client
from bottega.errors import BadImage, InvalidRequest, RecordingNotKept, Violation
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import GenerationSpec, SourceUse, Techniques
from tests.fakes.scripted_gateway import ScriptedGateway, completed, image
from tests.support.terminal import run

pytestmark = pytest.mark.usefixtures("files")


@pytest.fixture
def files(own_folder: Path) -> None:
    """star.png, a picture of the size that is drawn; mask.png, a mask of it."""
    PIL.Image.new("RGB", (64, 64), "red").save("star.png")
    PIL.Image.new("L", (64, 64), 255).save("mask.png")


def white(mask: bytes) -> tuple[int, int, int, int] | None:
    """The rectangle around what is white."""
    return PIL.Image.open(io.BytesIO(mask)).getbbox()


def drawn(path: str, **fields: Any) -> None:
    """A file that is said to be drawn so."""
    info = PIL.PngImagePlugin.PngInfo()
    info.add_itxt("bottega", json_format.MessageToJson(GenerationSpec(**fields)))
    PIL.Image.new("RGB", (8, 8)).save(path, pnginfo=info)


def test_the_sdk_edits_a_file_and_a_picture_of_its_own(gateway: ScriptedGateway, address: str) -> None:
    data = Path("star.png").read_bytes()
    gateway.scripts = [[completed(image(0, data))], [completed()]]
    with Client(address) as client:
        picture = client.edit("star.png", "mask.png", "a green star", strength=0.8, mask_feather=2, masked_blocks=True)
        client.edit(picture, Box(8, 16, 4, 2), "a star", padding_mask_crop=3, keep_unmasked=False)
    first, second = (request.spec for request in gateway.requests)
    techniques = Techniques(masked_blocks=True)
    mask = Path("mask.png").read_bytes()
    assert first == GenerationSpec(
        prompt="a green star", image=data, mask_image=mask, strength=0.8, mask_feather=2, techniques=techniques
    )
    assert (second.image, white(second.mask_image)) == (data, (8, 16, 12, 18))
    assert (second.padding_mask_crop, second.HasField("keep_unmasked"), second.keep_unmasked) == (3, True, False)


async def test_an_edit_without_its_image_or_its_mask_is_refused(gateway: ScriptedGateway, address: str) -> None:
    """None means no such argument elsewhere, and an image without a mask is redrawn as a whole."""
    nothing: Any = None
    missing = [Violation(field=name, description="must be given") for name in ("image", "mask_image")]
    with Client(address) as client:
        with pytest.raises(InvalidRequest) as one:
            client.edit("star.png", nothing, "a star")
        with pytest.raises(InvalidRequest) as both:
            client.edit(nothing, nothing, "a star")
    async with AsyncClient(address) as asynchronous:
        with pytest.raises(InvalidRequest) as other:
            await asynchronous.edit(nothing, b"mask", "a star")
    assert [list(each.value.violations) for each in (one, both, other)] == [missing[1:], missing, missing[:1]]
    assert not gateway.requests


def test_every_option_reaches_the_gateway(gateway: ScriptedGateway, address: str) -> None:
    gateway.scripts = [[completed()]]
    options = (
        "--mask=mask.png --alpha --strength=0.4 --padding-mask-crop=12 --feather=3 --no-keep-unmasked --masked-blocks"
        " --seed=7 --steps=20 --guidance-scale=4.5 --width=64 --height=128 --sampler=ddim --fidelity=balanced"
    )
    assert run("edit", "star.png", "a star", *options.split(), address=address).exit_code == 0
    assert gateway.requests[0].spec == GenerationSpec(
        prompt="a star",
        image=Path("star.png").read_bytes(),
        mask_image=Path("mask.png").read_bytes(),
        mask_alpha=True,
        strength=0.4,
        padding_mask_crop=12,
        mask_feather=3,
        keep_unmasked=False,
        seed=7,
        num_inference_steps=20,
        guidance_scale=4.5,
        width=64,
        height=128,
        sampler=generation_pb2.SAMPLER_DDIM,
        fidelity=generation_pb2.FIDELITY_BALANCED,
        format=generation_pb2.IMAGE_FORMAT_PNG,
        techniques=Techniques(masked_blocks=True),
    )


def test_boxes_and_ellipses_are_one_mask(gateway: ScriptedGateway, address: str) -> None:
    gateway.scripts = [[completed()], [completed()]]
    shapes = ("--box", "8,16,4,2", "--ellipse", "40,40,10,10", "--box", "-2,0,4,4")
    assert run("edit", "star.png", "a star", *shapes, address=address).exit_code == 0
    spec = gateway.requests[0].spec
    assert white(spec.mask_image) == (0, 0, 50, 50)
    assert not spec.mask_alpha
    assert run("edit", "star.png", "a star", "--alpha", address=address).exit_code == 0
    spec = gateway.requests[1].spec
    assert (spec.mask_image, spec.mask_alpha) == (spec.image, True), "what is transparent in the image"


def test_it_is_said_what_the_mask_did_and_where_the_picture_is(gateway: ScriptedGateway, address: str) -> None:
    plain, cropped = completed(), completed()
    plain.completed.provenance.mask.share = 0.23456
    use = cropped.completed.provenance.mask
    use.share, use.width, use.height, use.resized, use.converted = 0.5, 32, 16, True, True
    use.transparency_unread = True
    use.crop_x, use.crop_y, use.crop_width, use.crop_height = 4, 8, 40, 30
    gateway.scripts = [[plain], [cropped]]
    result = run("edit", "star.png", "a star", "--mask", "mask.png", "-o", "out.png", address=address)
    assert result.stdout.splitlines()[0] == "out.png  64x64  seed 7"
    assert "mask: it covers 23.5 % of what was drawn\n" in result.stdout
    assert "resized" not in result.stderr
    said = run("edit", "star.png", "a star", "--mask", "mask.png", address=address).stdout
    unread = "its transparency was ignored (--alpha redraws transparent parts)"
    assert f"drew 40x30 pixels at 4,8, resized from 32x16, converted to grey, {unread}\n" in said
    assert "transparent" not in result.stdout


def test_it_is_said_what_was_computed_and_what_reused(gateway: ScriptedGateway, address: str) -> None:
    reused, recorded = completed(), completed()
    provenance = reused.completed.provenance
    provenance.blocks_reused, provenance.blocks_total = 450, 600
    provenance.mask.recording, provenance.mask.computed_share = "5a" * 16, 0.1875
    recorded.completed.provenance.mask.computed_all_because = "nothing is recorded of the image yet"
    recorded.completed.provenance.mask.recorded = recorded.completed.provenance.mask.kept_latents = True
    gateway.scripts = [[reused], [recorded], [completed()]]
    said = [run("edit", "star.png", "a star", "--mask", "mask.png", address=address).stdout for _ in range(3)]
    assert said[0].splitlines()[-2:] == [
        "masked blocks: 75 % of all blocks reused the recording 5a5a5a5a5a5a outside the mask (approximate)",
        "masked blocks: they computed 18.8 % of their tokens",
    ]
    assert said[1].splitlines()[-3:] == [
        "everything was computed: nothing is recorded of the image yet",
        "kept for editing: the latents outside the mask are those that drew the image",
        "recorded: later edits of this image can compute only the masked part",
    ]
    assert "mask" not in said[2], "of an edit of which the gateway says nothing"


def test_what_cannot_be_edited_is_said_before_anything_is_asked_for(gateway: ScriptedGateway, address: str) -> None:
    cases: tuple[tuple[tuple[str, ...], str], ...] = (
        (("a star",), "give the part to redraw: --mask FILE, --box X,Y,WIDTH,HEIGHT or --ellipse"),
        (("--mask", "mask.png"), "the prompt is missing"),
        (("a star", "--mask", "no.png"), "File 'no.png' does not exist"),
        (("a star", "--mask", "mask.png", "--box", "0,0,4,4"), "--mask and --box or --ellipse are two masks"),
        (("a star", "--alpha", "--ellipse", "0,0,4,4"), "--alpha and --box or --ellipse are two masks"),
        (("a star", "--ellipse", "0,0,4,4.5"), "'0,0,4,4.5': give X,Y,WIDTH,HEIGHT in whole pixels"),
        (("a star", "--box", "64,0,4,4"), "--box 64,0,4,4: the box 64,0,4,4 is outside the image, which is 64x64"),
        (("a star", "--box", "\x1b[2J,0,0,0"), "'\\x1b[2J,0,0,0'"),
    )
    for arguments, said in cases:
        result = run("edit", "star.png", *arguments, address=address)
        assert (result.exit_code, gateway.requests) == (2, [])
        assert said in " ".join(result.stderr.split())
        assert "\x1b" not in result.output


def test_what_the_gateway_refuses_is_named_as_it_was_given(gateway: ScriptedGateway, address: str) -> None:
    for field, arguments, said in (
        ("spec.mask_image", ("--mask", "mask.png"), "--mask mask.png"),
        ("spec.mask_image", ("--box", "1,2,3,4"), "--box 1,2,3,4"),
        ("spec.image", ("--mask", "mask.png"), "IMAGE star.png"),
        ("spec.mask_feather", ("--mask", "mask.png"), "mask_feather"),
    ):
        violation = Violation(field=field, description="has no white")
        gateway.scripts = [[BadImage("1 field", violations=[violation])]]
        result = run("edit", "star.png", "a star", *arguments, address=address)
        assert (result.exit_code, result.stderr) == (2, f"error: this cannot be drawn\n  {said}: has no white\n")


def test_an_edit_is_done_again_with_its_image_and_mask_given(gateway: ScriptedGateway, address: str) -> None:
    drawn("edit.png", prompt="a star", seed=7, strength=0.9, mask_alpha=True, keep_unmasked=True, mask_feather=4)
    refused = [
        run("edit", "star.png", "--like", "edit.png", address=address),
        run("generate", "--like", "edit.png", address=address),
    ]
    said = [" ".join(result.stderr.split()) for result in refused]
    assert "edit.png does not contain its mask: give it with --mask FILE" in said[0]
    assert "edit.png is an edit; give its image and mask again: bottega edit IMAGE --like edit.png" in said[1]
    gateway.scripts = [[completed()] for _ in range(3)]
    again = ("edit", "star.png", "--like", "edit.png")
    assert run(*again, "--mask", "mask.png", address=address).exit_code == 0
    assert run(*again, "--box", "0,0,4,4", "--strength", "0.5", address=address).exit_code == 0
    assert run(*again, "--mask", "mask.png", "--no-alpha", "--no-keep-unmasked", address=address).exit_code == 0
    first, second, third = (request.spec for request in gateway.requests)
    assert (first.prompt, first.seed, first.strength, first.mask_feather) == ("a star", 7, 0.9, 4)
    assert [spec.mask_alpha for spec in (first, second, third)] == [True, False, False]
    assert (second.strength, third.keep_unmasked, third.HasField("mask_feather")) == (0.5, False, False)


def test_what_an_edit_took_is_asked_for_unless_the_command_says_what_it_may(
    gateway: ScriptedGateway, address: str
) -> None:
    taken = Techniques(recording="ab" * 16)
    drawn("taken.png", prompt="a star", keep_unmasked=True, fidelity=2, techniques=taken)
    refusal = RecordingNotKept(f"took from {taken.recording}", metadata={"recording": taken.recording})
    gateway.scripts = [[refusal], [completed()], [completed()], [completed()]]
    again = ("edit", "star.png", "--like", "taken.png", "--mask", "mask.png")
    refused = run(*again, address=address)
    assert refused.exit_code == 1
    assert refused.stderr.startswith(f"error: took from {taken.recording}\n  --no-masked-blocks computes everything")
    for words in (("--no-masked-blocks",), ("--masked-blocks",), ("--fidelity", "fast")):
        assert run(*again, *words, address=address).exit_code == 0
    said = [request.spec.techniques for request in gateway.requests]
    assert said == [taken, Techniques(masked_blocks=False), Techniques(masked_blocks=True), Techniques()]


def test_it_is_said_that_the_source_of_image_to_image_was_resized(gateway: ScriptedGateway, address: str) -> None:
    resized = completed()
    resized.completed.provenance.parameters.CopyFrom(GenerationSpec(width=64, height=48))
    resized.completed.provenance.source.CopyFrom(SourceUse(width=300, height=200, resized=True))
    gateway.scripts = [[resized]]
    result = run("generate", "a star", "--image", "star.png", address=address)
    assert "the image was resized from 300x200 to 64x48\n" in result.stderr
