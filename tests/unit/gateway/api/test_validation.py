"""Every bound of the contract, at its limit and one past, and all violations at once."""

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
NAN, INF = float("nan"), float("inf")
PNG = b"as good as an image"
ADDONS = sample_addons()


def _fields(spec: GenerationSpec, model: image_pb2.Model = MODEL) -> list[str]:
    found = [*validation.check_spec(spec, ADDONS, max_image_bytes=100), *validation.check_model(spec, model, ADDONS)]
    return [violation.field.removeprefix("spec.") for violation in found]


BOUNDS: dict[str, tuple[list[Any], list[Any]]] = {
    "num_inference_steps": ([1, 200], [0, -1, 201, 2**31 - 1]),
    "guidance_scale": ([0, 50], [-0.001, 50.001, NAN, INF, -INF]),
    "guidance_rescale": ([0, 1], [-0.001, 1.001, NAN, INF]),
    "width": ([8, 64, 512], [0, -8, 7, 63, 2**31 - 1]),
    "height": ([8, 64, 512], [0, -8, 7, 63, 16392]),
    "seed": ([0, 2**53 - 8], [2**53 - 7, 2**64 - 1]),
    "num_images": ([1, 8], [0, -1, 9]),
    "quality": ([1, 100], [0, 101, -1]),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (good, _) in BOUNDS.items() for value in good])
def test_a_value_at_its_bound_is_taken(name: str, value: Any) -> None:
    assert _fields(GenerationSpec(**{name: value})) == []


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, (_, bad) in BOUNDS.items() for value in bad])
def test_a_value_past_its_bound_is_refused(name: str, value: Any) -> None:
    assert _fields(GenerationSpec(**{name: value})) == [name]


@pytest.mark.parametrize("value", [0.0, -0.1, 1.001, NAN, INF])
def test_strength_is_above_0_and_at_most_1(value: float) -> None:
    assert _fields(GenerationSpec(image=PNG, strength=value)) == ["strength"]


def test_strength_that_leaves_no_step_is_refused_as_in_diffusers() -> None:
    assert _fields(GenerationSpec(image=PNG, strength=0.03)) == ["strength"]  # 30 x .03 = .9
    # The strength that is filled in counts as well: .3.
    assert _fields(GenerationSpec(image=PNG, num_inference_steps=3)) == ["strength"]
    assert _fields(GenerationSpec(image=PNG, num_inference_steps=4)) == []
    assert _fields(GenerationSpec(image=PNG, strength=0.04)) == []
    assert _fields(GenerationSpec(image=PNG, strength=0.3, num_inference_steps=3)) == ["strength"]


@pytest.mark.parametrize("name", ["prompt", "prompt_2", "negative_prompt", "negative_prompt_2"])
def test_prompts_are_bounded_in_bytes_not_in_characters(name: str) -> None:
    assert _fields(GenerationSpec(**{name: "x" * 16384})) == []  # type: ignore[arg-type]
    assert _fields(GenerationSpec(**{name: "x" * 16385})) == [name]  # type: ignore[arg-type]
    assert _fields(GenerationSpec(**{name: "é" * 8193})) == [name]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["sampler", "fidelity", "format"])
def test_an_unknown_enum_value_is_refused(name: str) -> None:
    assert _fields(GenerationSpec(**{name: 99})) == [name]  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["strength", "mask_image"])
def test_what_needs_an_image_is_refused_without_one(name: str) -> None:
    value: Any = 0.5 if name == "strength" else PNG
    assert _fields(GenerationSpec(**{name: value})) == [name]
    assert _fields(GenerationSpec(image=PNG, **{name: value})) == []


def test_the_name_of_a_cache_entry_is_bounded() -> None:
    assert _fields(GenerationSpec(techniques=Techniques(cache_entry="x" * 128))) == []
    assert _fields(GenerationSpec(techniques=Techniques(cache_entry="x" * 129))) == ["techniques.cache_entry"]


def test_images_are_bounded_in_bytes_and_not_empty() -> None:
    assert _fields(GenerationSpec(image=b"x" * 100)) == []
    assert _fields(GenerationSpec(image=b"x" * 101)) == ["image"]
    assert _fields(GenerationSpec(image=b"")) == ["image"]


def test_a_size_is_bounded_by_the_models_pixels_with_defaults_counted() -> None:
    assert _fields(GenerationSpec(width=4096, height=64)) == []
    assert _fields(GenerationSpec(width=4096, height=72)) == ["width"]
    assert _fields(GenerationSpec(width=4104)) == ["width"]


@pytest.mark.parametrize(
    ("sampler", "default", "good"),
    [
        (generation_pb2.SAMPLER_EULER, generation_pb2.SAMPLER_DDIM, True),
        (generation_pb2.SAMPLER_DPMPP_2M, generation_pb2.SAMPLER_DDIM, True),
        (generation_pb2.SAMPLER_DDIM, generation_pb2.SAMPLER_EULER, False),
        (generation_pb2.SAMPLER_EULER_ANCESTRAL, generation_pb2.SAMPLER_EULER, False),
        (generation_pb2.SAMPLER_UNSPECIFIED, generation_pb2.SAMPLER_EULER, True),
        (generation_pb2.SAMPLER_UNSPECIFIED, generation_pb2.SAMPLER_DDIM, False),
    ],
)
def test_karras_sigmas_go_with_two_samplers_only(
    sampler: generation_pb2.Sampler.ValueType, default: generation_pb2.Sampler.ValueType, good: bool
) -> None:
    model = image_pb2.Model()
    model.CopyFrom(MODEL)
    model.default_sampler = default
    spec = GenerationSpec(sampler=sampler, use_karras_sigmas=True)
    assert _fields(spec, model) == ([] if good else ["use_karras_sigmas"])


def _net(**facts: Any) -> GenerationSpec:
    return GenerationSpec(controlnets=[ControlNet(**{"name": "edges", "image": PNG, **facts})])


def test_as_many_controlnets_as_allowed_are_taken_and_one_more_is_not() -> None:
    nets = [ControlNet(name=f"net-{index}", image=PNG) for index in range(9)]
    assert _fields(GenerationSpec(controlnets=nets[:8])) == []
    assert _fields(GenerationSpec(controlnets=nets)) == ["controlnets"]


@pytest.mark.parametrize(
    "facts",
    [
        {"name": "x" * 200},
        {"name": "lllyasviel/control_v11p+sd15-canny.2"},
        {"image": b"x" * 100},
        {"controlnet_conditioning_scale": -1e300},
        {"controlnet_conditioning_scale": 0.0},
        {"control_guidance_start": 0.0, "control_guidance_end": 1.0},
        {"control_guidance_start": 0.999},
        {"control_guidance_end": 0.001},
        {"guess_mode": True},
    ],
)
def test_a_controlnet_at_its_limits_is_taken(facts: dict[str, Any]) -> None:
    assert _fields(_net(**facts)) == []


@pytest.mark.parametrize(
    ("facts", "field"),
    [
        *(({"name": name}, "name") for name in ("", "x" * 201, "a b", "a:b", "../up", "/etc", "ü", "a\n")),
        ({"image": b""}, "image"),
        ({"image": b"x" * 101}, "image"),
        *(({"controlnet_conditioning_scale": scale}, "controlnet_conditioning_scale") for scale in (NAN, INF, -INF)),
        ({"control_guidance_start": 1.0}, "control_guidance_start"),
        ({"control_guidance_start": -0.001}, "control_guidance_start"),
        ({"control_guidance_start": NAN}, "control_guidance_start"),
        ({"control_guidance_end": 0.0}, "control_guidance_start"),
        ({"control_guidance_end": 1.001}, "control_guidance_start"),
        ({"control_guidance_end": NAN}, "control_guidance_start"),
        ({"control_guidance_start": 0.5, "control_guidance_end": 0.5}, "control_guidance_start"),
    ],
)
def test_a_controlnet_past_its_limits_is_named(facts: dict[str, Any], field: str) -> None:
    assert _fields(_net(**facts)) == [f"controlnets[0].{field}"]


def test_adapters_are_checked_before_they_are_served() -> None:
    spec = GenerationSpec(
        loras=[Lora(name="", scale=NAN, from_step=-1)],
        controlnets=[ControlNet(name="edges", image=PNG, control_guidance_start=0.8, control_guidance_end=0.2)],
    )
    assert _fields(spec) == [
        "loras[0].name",
        "loras[0].scale",
        "loras[0].from_step",
        "controlnets[0].control_guidance_start",
    ]
    assert _fields(GenerationSpec(loras=[Lora(name="pastel")] * 9)) == ["loras"]
    late = [Lora(name="pastel"), Lora(name="ink", from_step=3, digest="A" * 64, max_step=201)]
    assert _fields(GenerationSpec(loras=late)) == ["loras[1].digest", "loras[1].max_step", "loras[1].from_step"]


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


def test_all_violations_come_at_once() -> None:
    spec = GenerationSpec(width=7, height=-1, num_images=0, guidance_scale=NAN, sampler=99, strength=0.5)  # type: ignore[arg-type]
    assert set(_fields(spec)) == {"width", "height", "num_images", "guidance_scale", "sampler", "strength"}
    with pytest.raises(InvalidRequest) as caught:
        rules.refuse(list(validation.check_spec(spec, ADDONS, max_image_bytes=100)))
    assert len(caught.value.violations) == 5
    assert "and 4 more" in caught.value.message


@pytest.mark.parametrize("request_id", ["", "a", "A-Z_0.9:x", "x" * 128])
def test_a_request_id_of_the_right_kind_is_taken(request_id: str) -> None:
    assert list(validation.check_request_id(request_id)) == []


@pytest.mark.parametrize("request_id", [" ", "a b", "x" * 129, "ü", "a\n", "../etc"])
def test_a_request_id_of_another_kind_is_refused(request_id: str) -> None:
    assert [v.field for v in validation.check_request_id(request_id)] == ["request_id"]


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (GenerationSpec(image=PNG, mask_image=PNG), "spec.mask_image"),
        (GenerationSpec(techniques=Techniques(approximate_cache=True)), "spec.techniques"),
        (GenerationSpec(techniques=Techniques(stale_residuals=True, masked_blocks=False)), "spec.techniques"),
    ],
)
def test_what_is_not_served_yet_is_named(spec: GenerationSpec, field: str) -> None:
    with pytest.raises(FieldNotServed) as caught:
        validation.refuse_unserved(spec)
    assert caught.value.metadata == {"field": field}


def test_an_empty_switchboard_switches_nothing() -> None:
    validation.refuse_unserved(GenerationSpec(techniques=Techniques()))


def test_controlnets_and_exact_or_asked_for_techniques_are_served() -> None:
    nets = [ControlNet(name="edges", image=PNG)]
    techniques = Techniques(stale_residuals=False, latent_parallelism=False)
    validation.refuse_unserved(GenerationSpec(controlnets=nets, techniques=techniques))
