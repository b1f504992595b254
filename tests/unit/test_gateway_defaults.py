"""What a request leaves open is filled in from the model, and what it says is kept."""

from __future__ import annotations

import pytest

from bottega.gateway import defaults
from bottega.v1 import generation_pb2, image_pb2
from bottega.v1.generation_pb2 import GenerationSpec, Lora
from bottega.v1.lora_pb2 import LoraBound, StoredLora

MODEL = image_pb2.Model(
    name="m",
    default_width=64,
    default_height=48,
    default_steps=30,
    default_guidance_scale=4.5,
    default_sampler=generation_pb2.SAMPLER_DDIM,
    vae_scale_factor=4,
)


def test_every_default_is_filled_in() -> None:
    full = defaults.complete(GenerationSpec(prompt="a star"), MODEL)
    assert 0 <= full.seed < 2**32
    assert full == GenerationSpec(
        model="m",
        prompt="a star",
        num_inference_steps=30,
        guidance_scale=4.5,
        guidance_rescale=0,
        width=64,
        height=48,
        seed=full.seed,
        num_images=1,
        sampler=generation_pb2.SAMPLER_DDIM,
        fidelity=generation_pb2.FIDELITY_BALANCED,
        format=generation_pb2.IMAGE_FORMAT_PNG,
        quality=90,
    )


def test_what_was_said_is_kept_and_the_callers_spec_is_not_touched() -> None:
    said = GenerationSpec(
        model="m",
        prompt="a star",
        negative_prompt="",
        num_inference_steps=5,
        guidance_scale=0,
        guidance_rescale=0.7,
        width=32,
        height=32,
        seed=0,
        num_images=3,
        sampler=generation_pb2.SAMPLER_EULER,
        image=b"x",
        strength=0.8,
        fidelity=generation_pb2.FIDELITY_FAST,
        format=generation_pb2.IMAGE_FORMAT_WEBP,
        quality=1,
    )
    before = said.SerializeToString(deterministic=True)
    assert defaults.complete(said, MODEL) == said
    assert said.SerializeToString(deterministic=True) == before


def test_absent_and_empty_prompts_stay_apart() -> None:
    full = defaults.complete(GenerationSpec(prompt_2=""), MODEL)
    assert full.HasField("prompt_2")
    assert not full.HasField("negative_prompt")


@pytest.mark.parametrize(
    ("spec", "fidelity"),
    [
        (GenerationSpec(seed=0), generation_pb2.FIDELITY_EXACT),
        (GenerationSpec(), generation_pb2.FIDELITY_BALANCED),
        (GenerationSpec(seed=1, fidelity=generation_pb2.FIDELITY_FAST), generation_pb2.FIDELITY_FAST),
    ],
)
def test_only_a_given_seed_asks_for_exactness(
    spec: GenerationSpec, fidelity: generation_pb2.Fidelity.ValueType
) -> None:
    assert defaults.complete(spec, MODEL).fidelity == fidelity


def test_strength_is_filled_in_only_for_image_to_image() -> None:
    assert not defaults.complete(GenerationSpec(), MODEL).HasField("strength")
    assert defaults.complete(GenerationSpec(image=b"x"), MODEL).strength == 0.3


@pytest.mark.parametrize(
    ("spec", "most"),
    [
        (GenerationSpec(num_inference_steps=50), 10),
        (GenerationSpec(num_inference_steps=50, image=b"x", strength=0.3), 3),
        (GenerationSpec(num_inference_steps=50, image=b"x", strength=1.0), 10),
    ],
)
@pytest.mark.parametrize("bounds", [[], [LoraBound(num_inference_steps=30, max_step=6)]], ids=["usual", "measured"])
def test_a_lora_may_be_late_for_a_share_of_the_steps_that_are_made(
    spec: GenerationSpec, most: int, bounds: list[LoraBound]
) -> None:
    named = GenerationSpec(loras=[Lora(name="ink")])
    named.MergeFrom(spec)
    full = defaults.complete(named, MODEL, [StoredLora(name="ink", digest="a" * 64, bounds=bounds)])
    assert full.loras[0].max_step == most
