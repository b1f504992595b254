"""What the gateway reads from a complete spec: its input images wherever they are, its rows, steps and latent."""

from __future__ import annotations

import psutil

from bottega.gateway.jobs import specs
from bottega.gateway.jobs.specs import has_images, input_images, without_images
from bottega.v1 import generation_pb2, image_pb2
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


def test_only_input_images_are_left_out_of_what_is_shown() -> None:
    shown = GenerationSpec(
        prompt="p",
        negative_prompt="",
        seed=0,
        guidance_scale=4.0,
        use_karras_sigmas=True,
        sampler=generation_pb2.SAMPLER_DDIM,
        prompts=["p", "q"],
        loras=[Lora(name="pastel", scale=0.5), Lora(name="ink")],
        controlnets=[ControlNet(name="edges", control_guidance_start=0)],
        techniques=Techniques(masked_blocks=False),
    )
    spec = GenerationSpec(image=b"x", mask_image=b"y")
    spec.MergeFrom(shown)
    spec.controlnets[0].image = b"z"
    assert without_images(spec) == shown
    assert spec.image == b"x"
    assert without_images(GenerationSpec(techniques=Techniques())).HasField("techniques")


def test_a_spec_without_images_does_not_keep_their_memory() -> None:
    spec = GenerationSpec(prompt="a star", image=bytes(8 << 20), mask_image=bytes(1 << 20))
    process = psutil.Process()
    before = process.memory_info().rss
    kept = [without_images(spec) for _ in range(10)]
    assert process.memory_info().rss - before < 16 << 20
    assert all(bare == GenerationSpec(prompt="a star") for bare in kept)


def test_a_guided_request_puts_two_rows_an_image_into_each_turn_and_image_to_image_skips_the_first_steps() -> None:
    spec = GenerationSpec(num_images=3, num_inference_steps=30, guidance_scale=4.5)
    assert (specs.rows(spec), specs.steps_to_run(spec)) == (6, 30)
    assert specs.rows(GenerationSpec(num_images=1, guidance_scale=1)) == 1
    assert specs.steps_to_run(GenerationSpec(num_inference_steps=30, strength=0.5)) == 15


def test_a_latent_is_smaller_by_the_models_factor() -> None:
    spec = GenerationSpec(width=64, height=48)
    assert specs.latent_shape(spec, image_pb2.Model(size_multiple=8, vae_scale_factor=4)) == (12, 16)
    assert specs.latent_shape(spec, image_pb2.Model(size_multiple=8)) == (6, 8)


def test_of_a_cancelled_job_only_the_beginnings_of_its_prompts_are_kept() -> None:
    short = specs.with_short_texts(GenerationSpec(prompt="p" * 300, prompts=["p" * 300, "q"]))
    assert [short.prompt, *short.prompts] == ["p" * 200 + "…", "p" * 200 + "…", "q"]
    spec = GenerationSpec(prompt="p", prompts=["p", "q"])
    assert specs.with_short_texts(spec) is spec
