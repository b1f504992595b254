"""The key of a job: equal where its latents can be exchanged with another's, else never."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import pytest

from bottega.addons.cache.engine.order import has_key, start_key
from bottega.engine.spec import ControlSpec, EmbeddingSpec, LoraSpec, ResolvedSpec
from bottega.model.schedulers import SamplerKind
from bottega.schedules import Schedule

PAIRS = 10_000
SPEC = ResolvedSpec(prompt="a star")
CONTROL = ControlSpec(name="edges", image_digest="a" * 64, digest="b" * 64)
EMBEDDING = EmbeddingSpec(name="toy", digest="e" * 64, token="<toy>")
LORA = LoraSpec(name="ink", digest="c" * 64)


def key(spec: ResolvedSpec, **said: str) -> str:
    return start_key(spec, **{"model_hash": "m", "dtype": "float32", "tenant": "", **said})


def hexes(draw: random.Random) -> str:
    return f"{draw.getrandbits(256):064x}"


def some_spec(draw: random.Random) -> ResolvedSpec:
    loras = [LoraSpec(name="x", digest=hexes(draw), scale=draw.uniform(-2, 2)) for _ in range(draw.randint(0, 3))]
    controls = [
        ControlSpec(
            name="y",
            image_digest=hexes(draw),
            digest=hexes(draw),
            controlnet_conditioning_scale=draw.uniform(0, 2),
            control_guidance_start=draw.uniform(0, 0.4),
            control_guidance_end=draw.uniform(0.6, 1),
            guess_mode=draw.random() < 0.5,
            control_mode=draw.randrange(8),
        )
        for _ in range(draw.randint(0, 3))
    ]
    return ResolvedSpec(
        prompt="a star",
        negative_prompt=draw.choice([None, "", "a circle"]),
        negative_prompt_2=draw.choice([None, "", "a square"]),
        clip_skip=draw.choice([None, 0, 1, 2]),
        num_inference_steps=draw.randint(1, 100),
        guidance_scale=draw.uniform(1, 12),
        guidance_rescale=draw.uniform(0, 1),
        width=8 * draw.randint(1, 256),
        height=8 * draw.randint(1, 256),
        sampler=draw.choice(list(SamplerKind)),
        use_karras_sigmas=draw.random() < 0.5,
        schedule=draw.choice(SCHEDULES),
        controlnets=tuple(controls),
        loras=tuple(loras),
    )


def another(value: Any, draw: random.Random) -> Any:
    """A value of the same kind that differs, if only in its last digit."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + draw.choice([1, 8])
    if isinstance(value, float):
        return math.nextafter(value, math.inf)
    if isinstance(value, Schedule):
        return draw.choice([schedule for schedule in SCHEDULES if schedule != value])
    if isinstance(value, SamplerKind):
        return draw.choice([kind for kind in SamplerKind if kind is not value])
    if value is None or value == "":
        return draw.choice([said for said in (None, "", " ") if said != value])
    place = draw.randrange(len(value))
    return value[:place] + chr(ord(value[place]) ^ 1) + value[place + 1 :]


SCHEDULES = (
    Schedule(),
    Schedule(use_beta_sigmas=True),
    Schedule(use_exponential_sigmas=True),
    Schedule(timestep_spacing="trailing"),
    Schedule(final_sigmas_type="sigma_min"),
)
FIELDS = ["negative_prompt", "negative_prompt_2", "num_inference_steps", "width", "height", "sampler"]
FIELDS += ["guidance_scale", "guidance_rescale", "use_karras_sigmas", "schedule", "clip_skip"]
CONTROL_FIELDS = ["image_digest", "digest", "guess_mode", "control_mode"]
CONTROL_FIELDS += ["controlnet_conditioning_scale", "control_guidance_start", "control_guidance_end"]


def changed_part(parts: tuple[Any, ...], fields: list[str], new: Any, draw: random.Random) -> tuple[Any, ...]:
    """The list with one more, one less, or one field of one of them changed."""
    if not parts or draw.random() < 0.2:
        return (*parts, new)
    place = draw.randrange(len(parts))
    if draw.random() < 0.2:
        return parts[:place] + parts[place + 1 :]
    field = draw.choice(fields)
    part = replace(parts[place], **{field: another(getattr(parts[place], field), draw)})
    return (*parts[:place], part, *parts[place + 1 :])


def changed(spec: ResolvedSpec, draw: random.Random) -> ResolvedSpec:
    """The same but for one field."""
    field = draw.choice([*FIELDS, "controlnets", "loras", "embeddings"])
    if field == "controlnets":
        return replace(spec, controlnets=changed_part(spec.controlnets, CONTROL_FIELDS, CONTROL, draw))
    if field == "loras":
        return replace(spec, loras=changed_part(spec.loras, ["digest", "scale"], LORA, draw))
    if field == "embeddings":
        return replace(spec, embeddings=changed_part(spec.embeddings, ["digest"], EMBEDDING, draw))
    return replace(spec, **{field: another(getattr(spec, field), draw)})


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
    },
    ControlSpec: {"name", "measured"},
    LoraSpec: {"name", "measured", "bound", "from_step"},
    # The digest is of the token, too.
    EmbeddingSpec: {"name", "token"},
}


def test_every_field_of_a_job_is_in_the_key_or_known_to_be_out_of_it() -> None:
    varied = {
        ResolvedSpec: {*FIELDS, "controlnets", "loras", "embeddings"},
        ControlSpec: set(CONTROL_FIELDS),
        LoraSpec: {"digest", "scale"},
        EmbeddingSpec: {"digest"},
    }
    for kind, names in varied.items():
        assert {field.name for field in fields(kind)} == names | NO_KEY[kind]
        assert not names & NO_KEY[kind]


def test_ten_thousand_pairs_that_differ_in_one_field_have_different_keys() -> None:
    draw = random.Random(0)
    for _ in range(PAIRS):
        spec = some_spec(draw)
        said = {"model_hash": hexes(draw), "dtype": "float16", "tenant": "t"}
        if draw.random() < 0.2:
            other, field = spec, draw.choice(sorted(said))
            others = {**said, field: another(said[field], draw)}
        else:
            other, others = changed(spec, draw), said
        assert key(spec, **said) != key(other, **others), (spec, other, said, others)


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
