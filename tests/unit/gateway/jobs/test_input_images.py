"""The input images of a request are found wherever they are, and left out of everything that is kept or shown."""

from __future__ import annotations

import psutil

from bottega.gateway.jobs.input_images import has_images, input_images, without_images
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import ControlNet, GenerationSpec, Lora, Techniques


def test_every_input_image_is_named_by_its_field() -> None:
    nets = [ControlNet(name="edges", image=b"z"), ControlNet(name="depth", image=b"w")]
    spec = GenerationSpec(prompt="p", image=b"x", mask_image=b"y", controlnets=nets)
    assert has_images(spec)
    assert dict(input_images(spec)) == {
        "spec.image": b"x",
        "spec.mask_image": b"y",
        "spec.controlnets[0].image": b"z",
        "spec.controlnets[1].image": b"w",
    }
    assert not has_images(GenerationSpec(prompt="p"))
    assert list(input_images(GenerationSpec(prompt="p"))) == []


def test_input_images_are_left_out_of_what_is_shown() -> None:
    spec = GenerationSpec(prompt="p", image=b"x", mask_image=b"y", controlnets=[ControlNet(name="edges", image=b"z")])
    assert without_images(spec) == GenerationSpec(prompt="p", controlnets=[ControlNet(name="edges")])
    assert spec.image == b"x"


def test_everything_but_images_is_shown_whether_empty_or_not() -> None:
    spec = GenerationSpec(
        prompt="p",
        negative_prompt="",
        seed=0,
        guidance_scale=4.0,
        use_karras_sigmas=True,
        sampler=generation_pb2.SAMPLER_DDIM,
        loras=[Lora(name="pastel", scale=0.5), Lora(name="ink")],
        controlnets=[ControlNet(name="edges", control_guidance_start=0)],
        techniques=Techniques(masked_blocks=False),
    )
    assert without_images(spec) == spec
    assert without_images(GenerationSpec(techniques=Techniques())).HasField("techniques")


def test_a_spec_without_images_does_not_keep_their_memory() -> None:
    spec = GenerationSpec(prompt="a star", image=bytes(8 << 20), mask_image=bytes(1 << 20))
    process = psutil.Process()
    before = process.memory_info().rss
    kept = [without_images(spec) for _ in range(10)]
    assert process.memory_info().rss - before < 16 << 20
    assert all(bare == GenerationSpec(prompt="a star") for bare in kept)
