"""What a request must be where several of its fields meet, or the model is asked; and all violations at once.

Each field by itself is at its limit and one past in the fuzz corpus (tests/fuzz/specs.py and drawings.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from bottega import rules
from bottega.errors import FieldNotServed, InvalidRequest
from bottega.gateway.api import validation
from bottega.v1 import generation_pb2, image_pb2
from bottega.v1.generation_pb2 import ControlNet, GenerationSpec, Lora, Techniques
from tests.samples.addons import sample_addons

MODEL = image_pb2.Model(
    name="m",
    default_width=64,
    default_height=64,
    size_multiple=8,
    max_pixels=512 * 512,
    default_steps=30,
    default_sampler=generation_pb2.SAMPLER_EULER,
)
NAN = float("nan")
PNG = b"as good as an image"
ADDONS = sample_addons()


def _fields(spec: GenerationSpec, model: image_pb2.Model = MODEL) -> list[str]:
    found = [*validation.check_spec(spec, ADDONS, max_image_bytes=100), *validation.check_model(spec, model, ADDONS)]
    return [violation.field.removeprefix("spec.") for violation in found]


def test_strength_that_leaves_no_step_is_refused_as_in_diffusers() -> None:
    assert _fields(GenerationSpec(image=PNG, strength=0.03)) == ["strength"]  # 30 x .03 = .9
    # The strength that is filled in counts as well: .3.
    assert _fields(GenerationSpec(image=PNG, num_inference_steps=3)) == ["strength"]
    assert _fields(GenerationSpec(image=PNG, num_inference_steps=4)) == []
    assert _fields(GenerationSpec(image=PNG, strength=0.04)) == []
    assert _fields(GenerationSpec(image=PNG, strength=0.3, num_inference_steps=3)) == ["strength"]


def test_a_side_is_a_multiple_of_the_models() -> None:
    assert _fields(GenerationSpec(width=63, height=63)) == ["width", "height"]
    assert _fields(GenerationSpec(width=8, height=8)) == []


def test_a_size_is_bounded_by_the_models_pixels_with_defaults_counted() -> None:
    assert _fields(GenerationSpec(width=4096, height=64)) == []
    assert _fields(GenerationSpec(width=4096, height=72)) == ["width"]
    assert _fields(GenerationSpec(width=4104)) == ["width"]


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (GenerationSpec(sampler=generation_pb2.SAMPLER_EULER), []),
        (GenerationSpec(sampler=generation_pb2.SAMPLER_EULER_ANCESTRAL), ["use_karras_sigmas"]),
        (GenerationSpec(), ["use_karras_sigmas"]),
    ],
)
def test_karras_sigmas_go_with_the_sampler_that_is_said_else_with_the_models(
    spec: GenerationSpec, fields: list[str]
) -> None:
    spec.use_karras_sigmas = True
    model = image_pb2.Model()
    model.CopyFrom(MODEL)
    model.default_sampler = generation_pb2.SAMPLER_DDIM
    assert _fields(spec, model) == fields


def _ink(*, steps: int = 10, **facts: Any) -> GenerationSpec:
    return GenerationSpec(num_inference_steps=steps, loras=[Lora(name="ink", **facts)])


def test_a_lora_is_in_at_a_step_that_there_is() -> None:
    assert _fields(_ink(max_step=10)) == []
    assert _fields(_ink(max_step=11)) == ["loras[0].max_step"]
    assert _fields(_ink(from_step=9)) == []
    assert _fields(_ink(from_step=10)) == ["loras[0].from_step"]
    assert _fields(_ink(steps=0, max_step=11)) == ["num_inference_steps"], "of which number else?"
    assert _fields(_ink(max_step=201)) == ["loras[0].max_step"], "once"
    usual = GenerationSpec(loras=[Lora(name="ink", max_step=31)])
    assert _fields(usual) == ["loras[0].max_step"], "the model's own number counts as well"


@pytest.mark.parametrize(
    ("image", "first"),
    [({}, 0), ({"image": PNG, "strength": 0.5}, 5), ({"image": PNG, "strength": 1.0}, 0), ({"image": PNG}, 7)],
)
def test_a_lora_that_is_measured_goes_in_at_the_first_step_that_is_made(image: dict[str, Any], first: int) -> None:
    for step, found in ((first, []), (first + 1, ["loras[0].from_step"])):
        spec = _ink(from_step=step, measure_similarity=True)
        spec.MergeFrom(GenerationSpec(**image))
        assert _fields(spec) == found
        spec.loras[0].measure_similarity = False
        assert _fields(spec) == []
    for strength in (NAN, -1.0, 0.0):
        odd = _ink(from_step=1, measure_similarity=True)
        odd.MergeFrom(GenerationSpec(image=PNG, strength=strength))
        assert _fields(odd) == ["strength"]


@pytest.mark.parametrize("seed", [{}, {"seed": 1}], ids=["", "seed"])
@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ({}, ""),
        ({"fidelity": generation_pb2.FIDELITY_EXACT}, "fidelity EXACT"),
        ({"fidelity": generation_pb2.FIDELITY_BALANCED}, ""),
        ({"techniques": Techniques(bounded_lora_loading=False)}, "techniques.bounded_lora_loading false"),
        ({"techniques": Techniques(bounded_lora_loading=True)}, ""),
        (
            {"fidelity": generation_pb2.FIDELITY_FAST, "techniques": Techniques(bounded_lora_loading=False)},
            "techniques.bounded_lora_loading false",
        ),
        ({"fidelity": generation_pb2.FIDELITY_EXACT, "techniques": Techniques(bounded_lora_loading=True)}, ""),
        ({"fidelity": generation_pb2.FIDELITY_EXACT, "techniques": Techniques(stale_residuals=True)}, "fidelity EXACT"),
    ],
)
def test_a_request_that_waits_for_its_loras_and_lets_them_be_late_is_refused_in_both_words(
    words: dict[str, Any], seed: dict[str, Any], refused: str
) -> None:
    late = GenerationSpec(loras=[Lora(name="ink", max_step=0), Lora(name="wash", max_step=1)], **words, **seed)
    found = list(validation.check_spec(late, ADDONS, max_image_bytes=100))
    assert [violation.field for violation in found] == (["spec.loras[1].max_step"] if refused else [])
    assert all(refused in violation.description for violation in found)
    for lora in late.loras:
        lora.from_step = 5
    assert _fields(late) == [], "as a provenance says it: nothing depends on when it comes"


def test_a_request_id_has_128_characters_at_most() -> None:
    assert list(validation.check_request_id("x" * 128)) == []
    assert [violation.field for violation in validation.check_request_id("x" * 129)] == ["request_id"]


def test_all_violations_come_at_once() -> None:
    spec = GenerationSpec(width=7, height=-1, num_images=0, guidance_scale=NAN, sampler=99, strength=0.5)  # type: ignore[arg-type]
    assert set(_fields(spec)) == {"width", "height", "num_images", "guidance_scale", "sampler", "strength"}
    with pytest.raises(InvalidRequest) as caught:
        rules.refuse(list(validation.check_spec(spec, ADDONS, max_image_bytes=100)))
    assert len(caught.value.violations) == 5
    assert "and 4 more" in caught.value.message


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (GenerationSpec(image=PNG, mask_image=PNG), "spec.mask_image"),
        (GenerationSpec(techniques=Techniques(masked_blocks=True)), "spec.techniques"),
        (GenerationSpec(techniques=Techniques(stale_residuals=True, masked_blocks=False)), "spec.techniques"),
    ],
)
def test_what_is_not_served_yet_is_named(spec: GenerationSpec, field: str) -> None:
    with pytest.raises(FieldNotServed) as caught:
        validation.refuse_unserved(spec)
    assert caught.value.metadata == {"field": field}


def test_controlnets_and_exact_or_asked_for_techniques_are_served() -> None:
    validation.refuse_unserved(GenerationSpec(techniques=Techniques()))
    nets = [ControlNet(name="edges", image=PNG)]
    techniques = Techniques(
        stale_residuals=False,
        latent_parallelism=False,
        approximate_cache=True,
        cache_entry="x",
        identical_results=True,
    )
    validation.refuse_unserved(GenerationSpec(controlnets=nets, techniques=techniques))
