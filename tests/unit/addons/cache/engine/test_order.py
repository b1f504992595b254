"""The key of a job: equal where its latents can be exchanged with another's, else never."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest

from bottega.addons.cache.engine.order import has_key, start_key
from bottega.engine.spec import ControlSpec, EmbeddingSpec, LoraSpec, ResolvedSpec
from bottega.model.schedulers import SamplerKind
from bottega.schedules import Schedule

CONTROL = ControlSpec(name="edges", image_digest="a" * 64, digest="b" * 64)
EMBEDDING = EmbeddingSpec(name="toy", digest="e" * 64, token="<toy>")
LORA = LoraSpec(name="ink", digest="c" * 64)
SPEC = ResolvedSpec(prompt="a star")
WHOLE = replace(SPEC, loras=(LORA,), controlnets=(CONTROL,), embeddings=(EMBEDDING,))
# By kind and field, values that are not the usual one; a number differs in its last digit.
OTHERS: dict[type, dict[str, list[Any]]] = {
    ResolvedSpec: {
        "negative_prompt": ["", " ", "a circle"],
        "negative_prompt_2": ["", "a circle"],
        "clip_skip": [0, 1],
        "max_sequence_length": [77, 512],
        "num_inference_steps": [SPEC.num_inference_steps + 1],
        "guidance_scale": [math.nextafter(SPEC.guidance_scale, math.inf)],
        "guidance_rescale": [math.nextafter(SPEC.guidance_rescale, math.inf)],
        "true_cfg_scale": [math.nextafter(1.0, math.inf)],
        "cfg_normalization": [math.nextafter(0.0, math.inf)],
        "cfg_truncation": [math.nextafter(1.0, 0.0)],
        "width": [SPEC.width + 8],
        "height": [SPEC.height + 8],
        "sampler": [kind for kind in SamplerKind if kind is not SPEC.sampler],
        "use_karras_sigmas": [True],
        "schedule": [
            Schedule(use_beta_sigmas=True),
            Schedule(use_exponential_sigmas=True),
            Schedule(timestep_spacing="trailing"),
            Schedule(final_sigmas_type="sigma_min"),
        ],
        "loras": [(), (LORA, LORA)],
        "controlnets": [(), (CONTROL, CONTROL)],
        "embeddings": [(), (EMBEDDING, EMBEDDING)],
    },
    LoraSpec: {"digest": ["c" * 63 + "d"], "scale": [math.nextafter(1.0, math.inf), -1.0]},
    EmbeddingSpec: {"digest": ["e" * 63 + "d"]},
    ControlSpec: {
        "image_digest": ["a" * 63 + "b"],
        "digest": ["b" * 63 + "a"],
        "guess_mode": [True],
        "control_mode": [1],
        "controlnet_conditioning_scale": [math.nextafter(1.0, math.inf)],
        "control_guidance_start": [math.nextafter(0.0, math.inf)],
        "control_guidance_end": [math.nextafter(1.0, 0.0)],
    },
}


def key(spec: ResolvedSpec, **said: str) -> str:
    return start_key(spec, **{"model_hash": "m", "dtype": "float32", "tenant": "", **said})


def others() -> Iterator[ResolvedSpec]:
    """Yield jobs that differ from WHOLE in one field."""
    places: dict[type, str] = {LoraSpec: "loras", EmbeddingSpec: "embeddings", ControlSpec: "controlnets"}
    for kind, by_name in OTHERS.items():
        for change in ({name: value} for name, values in by_name.items() for value in values):
            if kind is ResolvedSpec:
                yield replace(WHOLE, **change)
            else:
                (part,) = getattr(WHOLE, places[kind])
                changed: dict[str, Any] = {places[kind]: (replace(part, **change),)}
                yield replace(WHOLE, **changed)


# What is not in the key: the prompt, which is what may be similar; what latents are drawn from besides; what makes a
# job have no key at all (has_key); and what only says when, how fast or where something is done.
NO_KEY = {
    ResolvedSpec: {
        "prompt",
        "prompts",
        "prompt_2",
        "weighted",
        "seed",
        "num_images",
        "strength",
        "stale_residuals",
        "edit",
        "keep_for_editing",
        # Latents of steps that reused blocks are not exact, and are not recorded.
        "step_caching",
    },
    ControlSpec: {"name", "measured"},
    # What a LoRA changes is said by its digest.
    LoraSpec: {"name", "measured", "bound", "from_step", "denoiser_only"},
    # The digest is of the token, too.
    EmbeddingSpec: {"name", "token"},
}


def test_every_field_of_a_job_is_in_the_key_or_known_to_be_out_of_it() -> None:
    for kind, by_name in OTHERS.items():
        assert {field.name for field in fields(kind)} == by_name.keys() | NO_KEY[kind]
        assert not by_name.keys() & NO_KEY[kind]


def test_jobs_that_differ_in_one_field_have_different_keys() -> None:
    keys = [key(WHOLE), *(key(other) for other in others())]
    keys += [key(WHOLE, **other) for other in ({"model_hash": "n"}, {"dtype": "float16"}, {"tenant": "t"})]
    assert len(set(keys)) == len(keys) > 30


@pytest.mark.parametrize(
    "same",
    [
        lambda spec: replace(spec, prompt="a circle"),
        lambda spec: replace(spec, seed=7),
        lambda spec: replace(spec, num_images=3),
        lambda spec: replace(spec, stale_residuals=True),
        lambda spec: replace(spec, loras=spec.loras[::-1]),
        lambda spec: replace(spec, loras=tuple(replace(lora, name="other", bound=3) for lora in spec.loras)),
        lambda spec: replace(spec, guidance_scale=5),
    ],
    ids=["prompt", "seed", "images", "staleness", "order of LoRAs", "names and bounds", "an integer"],
)
def test_what_may_differ_changes_no_key(same: Callable[[ResolvedSpec], ResolvedSpec]) -> None:
    spec = replace(SPEC, loras=(LORA, replace(LORA, digest="d" * 64, scale=0.5)), controlnets=(CONTROL,))
    assert key(same(spec)) == key(spec)


def test_the_order_of_controlnets_is_that_of_their_sums() -> None:
    two = (CONTROL, replace(CONTROL, digest="e" * 64))
    assert key(replace(SPEC, controlnets=two)) != key(replace(SPEC, controlnets=two[::-1]))


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, strength=0.5),
        replace(SPEC, prompt_2="a heart"),
        replace(SPEC, weighted=True),
        replace(SPEC, controlnets=(replace(CONTROL, digest=""),)),
        replace(SPEC, controlnets=(replace(CONTROL, measured=True),)),
        replace(SPEC, loras=(replace(LORA, measured=True),)),
    ],
    ids=[
        "from a picture",
        "second prompt",
        "weighted prompt",
        "unknown weights",
        "measured ControlNet",
        "measured LoRA",
    ],
)
def test_a_job_with_more_to_it_has_no_key(spec: ResolvedSpec) -> None:
    assert has_key(SPEC)
    assert not has_key(spec)
