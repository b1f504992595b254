"""What a request must be where several of its fields meet, or the model is asked; and all violations at once.

Each field by itself is at its limit and one past in the fuzz corpus (tests/fuzz/specs.py and drawings.py).
"""

from __future__ import annotations

from typing import Any

import pytest

from bottega import rules
from bottega.codec import ImageSize, MaskOrder
from bottega.errors import BadImage, InvalidRequest, Violation
from bottega.fair_order import Share
from bottega.gateway.api import validation
from bottega.gateway.jobs import specs
from bottega.gateway.jobs.specs import steps_to_run, without_images
from bottega.schedules import keeps_steps
from bottega.v1 import generation_pb2, image_pb2
from bottega.v1.fleet_pb2 import MaskTokens
from bottega.v1.generation_pb2 import ControlNet, GenerationSpec, Lora, MaskUse, Techniques
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


def test_a_strength_that_keeps_all_steps_leaves_some_at_any_strength() -> None:
    model = image_pb2.Model()
    model.CopyFrom(MODEL)
    model.strength_keeps_steps, model.default_sampler = True, generation_pb2.SAMPLER_LCM
    spec = GenerationSpec(image=PNG, strength=0.1, num_inference_steps=4)
    assert _fields(spec, model) == []
    full = specs.complete(spec, model)
    assert steps_to_run(full, keeps_steps=keeps_steps(without_images(full), True)) == 4
    # Listed timesteps are skipped, and edits are drawn by another pipeline.
    assert _fields(GenerationSpec(image=PNG, strength=0.1, timesteps=[999, 500]), model) == ["strength"]
    edit = GenerationSpec(image=PNG, mask_image=PNG, strength=0.1, num_inference_steps=4)
    assert _fields(edit, model) == ["strength"]
    other = GenerationSpec(image=PNG, sampler=generation_pb2.SAMPLER_EULER)
    other.controlnets.add(name="edges", image=PNG)
    assert _fields(other, model) == ["sampler", "controlnets"]


def test_no_more_layers_are_skipped_than_the_models_text_encoders_have() -> None:
    model = image_pb2.Model()
    model.CopyFrom(MODEL)
    assert _fields(GenerationSpec(clip_skip=100), model) == []
    model.max_clip_skip = 11
    assert _fields(GenerationSpec(clip_skip=11), model) == []
    (violation,) = validation.check_model(GenerationSpec(clip_skip=12), model, ADDONS)
    rule = "must be 0 to 11 with this model, by the layers of its text encoders"
    assert violation == Violation(field="spec.clip_skip", description=rule)


def test_true_cfg_is_for_models_that_take_it_and_needs_a_negative_prompt() -> None:
    model = image_pb2.Model()
    model.CopyFrom(MODEL)
    model.embeds_guidance, model.takes_true_cfg, model.max_clip_skip = True, True, 0
    assert _fields(GenerationSpec(true_cfg_scale=2.0, negative_prompt=""), model) == []
    assert _fields(GenerationSpec(true_cfg_scale=1.0), model) == []
    assert _fields(GenerationSpec(true_cfg_scale=1.0)) == []
    (violation,) = validation.check_model(GenerationSpec(true_cfg_scale=2.0), model, ADDONS)
    assert violation == Violation(field="spec.true_cfg_scale", description="needs negative_prompt, which may be empty")
    (violation,) = validation.check_model(GenerationSpec(true_cfg_scale=2.0, negative_prompt="x"), MODEL, ADDONS)
    assert violation.description.startswith("must be at most 1, which is off: only models of Flux.1 take it")
    (violation,) = validation.check_model(GenerationSpec(clip_skip=1), model, ADDONS)
    assert violation.description.startswith("must be 0 with this model, which reads no")


def test_bounds_of_guidance_are_for_models_that_take_them() -> None:
    asked, off = GenerationSpec(cfg_normalization=1.0, cfg_truncation=0.5), GenerationSpec(cfg_truncation=1.0)
    assert _fields(asked) == ["cfg_normalization", "cfg_truncation"]
    assert _fields(off) == _fields(GenerationSpec(cfg_normalization=0.0)) == []
    assert _fields(GenerationSpec(cfg_truncation=0.0)) == ["cfg_truncation"]
    model = image_pb2.Model()
    model.CopyFrom(MODEL)
    model.guidance_from_zero = True
    assert _fields(asked, model) == []


def test_tokens_of_t5_are_bounded_by_the_model() -> None:
    model = image_pb2.Model()
    model.CopyFrom(MODEL)
    (violation,) = validation.check_model(GenerationSpec(max_sequence_length=8), model, ADDONS)
    rule = "must be absent: this model has neither T5 nor Qwen3"
    assert violation == Violation(field="spec.max_sequence_length", description=rule)
    model.max_sequence_length = 256
    assert _fields(GenerationSpec(max_sequence_length=256), model) == []
    assert _fields(GenerationSpec(max_sequence_length=257), model) == ["max_sequence_length"]
    assert _fields(GenerationSpec(max_sequence_length=0), model) == ["max_sequence_length"]


def test_a_size_is_bounded_by_the_models_pixels_with_defaults_counted() -> None:
    assert _fields(GenerationSpec(width=4096, height=64)) == []
    assert _fields(GenerationSpec(width=4096, height=72)) == ["width"]
    assert _fields(GenerationSpec(width=4104)) == ["width"]


def test_a_schedule_that_the_workers_do_not_list_is_left_to_the_one_that_draws() -> None:
    euler, trailing = generation_pb2.SAMPLER_EULER, generation_pb2.TIMESTEP_SPACING_TRAILING
    model = _with_refusals((euler, False))
    assert _fields(GenerationSpec(sampler=euler), model) == ["sampler"]
    assert _fields(GenerationSpec(sampler=euler, timestep_spacing=trailing), model) == []
    single = generation_pb2.SAMPLER_DPMPP_2S
    assert _fields(GenerationSpec(sampler=single, timestep_spacing=trailing), model) == ["timestep_spacing"]


def test_a_list_of_timesteps_is_refused_beside_the_models_karras_sigmas() -> None:
    euler = generation_pb2.SAMPLER_EULER
    model = _with_refusals()
    for choice in model.sampler_choices:
        choice.is_default = choice.use_karras_sigmas or not rules.takes_karras_sigmas(choice.sampler)
    listed = GenerationSpec(sampler=euler, timesteps=[9, 5])
    assert _fields(listed, model) == ["timesteps"]
    listed.use_karras_sigmas = False
    assert _fields(listed, model) == []
    assert _fields(GenerationSpec(sampler=euler, sigmas=[9, 5, 0]), model) == [], "Diffusers takes no notice of them"


def _with_refusals(*refused: tuple[generation_pb2.Sampler.ValueType, bool]) -> image_pb2.Model:
    """The model, where its workers refuse these samplers, with and without Karras' sigmas."""
    model = image_pb2.Model()
    model.CopyFrom(MODEL)
    for sampler in generation_pb2.Sampler.values()[1:]:
        for karras in (False, True) if rules.takes_karras_sigmas(sampler) else (False,):
            model.sampler_choices.add(
                sampler=sampler,
                use_karras_sigmas=karras,
                is_default=not karras,
                refused_because="beta_schedule is odd" if (sampler, karras) in refused else "",
            )
    return model


def test_a_sampler_that_the_model_rules_out_is_refused_with_its_reason() -> None:
    euler, ddim = generation_pb2.SAMPLER_EULER, generation_pb2.SAMPLER_DDIM
    model = _with_refusals((ddim, False), (euler, True))
    assert _fields(GenerationSpec(sampler=ddim), model) == ["sampler"]
    assert _fields(GenerationSpec(sampler=euler), model) == []
    assert _fields(GenerationSpec(sampler=euler, use_karras_sigmas=True), model) == ["use_karras_sigmas"]
    assert _fields(GenerationSpec(use_karras_sigmas=True), model) == ["use_karras_sigmas"], "of the model's own sampler"
    assert _fields(GenerationSpec(use_karras_sigmas=False), model) == []
    assert _fields(GenerationSpec(sampler=ddim, use_karras_sigmas=True), model) == ["use_karras_sigmas", "sampler"]
    (violation,) = validation.check_model(GenerationSpec(sampler=ddim), model, ADDONS)
    assert violation.description == "is refused by this model's scheduler configuration: beta_schedule is odd"
    both = _with_refusals((euler, False), (euler, True))
    assert _fields(GenerationSpec(sampler=euler, use_karras_sigmas=True), both) == ["sampler"]
    assert _fields(GenerationSpec(sampler=99), model) == ["sampler"], "once"  # type: ignore[arg-type]


def test_a_number_of_steps_that_the_sampler_cannot_make_is_refused_with_its_reason() -> None:
    model = _with_refusals()
    for choice in model.sampler_choices:
        if choice.sampler == generation_pb2.SAMPLER_EULER and not choice.use_karras_sigmas:
            choice.refused_steps[61] = "62 steps of 61"
    (violation,) = validation.check_model(GenerationSpec(num_inference_steps=61), model, ADDONS)
    assert (violation.field, violation.description) == ("spec.num_inference_steps", "62 steps of 61")
    assert _fields(GenerationSpec(num_inference_steps=60), model) == []
    assert _fields(GenerationSpec(num_inference_steps=61, use_karras_sigmas=True), model) == []
    assert _fields(GenerationSpec(num_inference_steps=61, sampler=generation_pb2.SAMPLER_DDIM), model) == []
    model.default_steps = 61
    assert _fields(GenerationSpec(), model) == ["num_inference_steps"], "the model's own number counts as well"


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


@pytest.mark.parametrize(("image", "first"), [({}, 0), ({"image": PNG, "strength": 0.5}, 5), ({"image": PNG}, 7)])
def test_a_lora_that_is_measured_goes_in_at_the_first_step_that_is_made(image: dict[str, Any], first: int) -> None:
    for step, found in ((first, []), (first + 1, ["loras[0].from_step"])):
        spec = _ink(from_step=step, measure_similarity=True)
        spec.MergeFrom(GenerationSpec(**image))
        assert _fields(spec) == found
        spec.loras[0].measure_similarity = False
        assert _fields(spec) == []
    for strength in (NAN, 0.0):
        odd = _ink(from_step=1, measure_similarity=True)
        odd.MergeFrom(GenerationSpec(image=PNG, strength=strength))
        assert _fields(odd) == ["strength"]


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        ({}, ""),
        ({"fidelity": generation_pb2.FIDELITY_EXACT}, "fidelity EXACT"),
        ({"techniques": Techniques(bounded_lora_loading=False)}, "techniques.bounded_lora_loading false"),
        ({"fidelity": generation_pb2.FIDELITY_EXACT, "techniques": Techniques(bounded_lora_loading=True)}, ""),
        ({"fidelity": generation_pb2.FIDELITY_EXACT, "techniques": Techniques(stale_residuals=True)}, "fidelity EXACT"),
    ],
)
def test_a_request_that_waits_for_its_loras_and_lets_them_be_late_is_refused_in_both_words(
    words: dict[str, Any], refused: str
) -> None:
    seeds: list[dict[str, Any]] = [{}, {"seed": 1}]
    for seed in seeds:
        late = GenerationSpec(loras=[Lora(name="ink", max_step=0), Lora(name="wash", max_step=1)], **words, **seed)
        found = list(validation.check_spec(late, ADDONS, max_image_bytes=100))
        assert [violation.field for violation in found] == (["spec.loras[1].max_step"] if refused else [])
        assert all(refused in violation.description for violation in found)
        for lora in late.loras:
            lora.from_step = 0
        assert _fields(late) == [], "as a provenance says it: nothing depends on when it comes"


@pytest.mark.parametrize(("image", "first"), [({}, 0), ({"image": PNG, "strength": 0.5}, 5)])
def test_an_exact_request_pins_no_step_after_the_first_that_is_made(image: dict[str, Any], first: int) -> None:
    """As it pins no cached latent. What a BALANCED picture's provenance says is drawn again as it was."""
    words: list[tuple[dict[str, Any], bool]] = [
        ({"fidelity": generation_pb2.FIDELITY_EXACT}, True),
        ({"fidelity": generation_pb2.FIDELITY_EXACT, "techniques": Techniques(bounded_lora_loading=True)}, False),
        ({"fidelity": generation_pb2.FIDELITY_BALANCED}, False),
        ({"seed": 1}, False),
        ({"seed": 1, "techniques": Techniques(bounded_lora_loading=False)}, True),
    ]
    for said, refused in words:
        for step, late in ((first, False), (first + 1, True)):
            spec = _ink(from_step=step)
            spec.MergeFrom(GenerationSpec(**image, **said))
            assert _fields(spec) == (["loras[0].from_step"] if refused and late else []), (said, step)
    after_the_end = _ink(from_step=10)
    after_the_end.fidelity = generation_pb2.FIDELITY_EXACT
    assert _fields(after_the_end) == ["loras[0].from_step"], "once"


def test_what_several_prompts_cannot_be_used_with_is_named() -> None:
    net, lora = ControlNet(name="edges", image=PNG), Lora(name="ink")
    measured = Lora(name="ink", measure_similarity=True)
    cases: list[tuple[list[str], dict[str, Any], list[str]]] = [
        (["a"], {"controlnets": [net]}, []),
        (["a", "b"], {"controlnets": [net]}, ["prompts"]),
        (["a", "b"], {"image": PNG, "loras": [lora]}, []),
        (["a", "b"], {"loras": [measured]}, ["loras[0].measure_similarity"]),
    ]
    for prompts, said, found in cases:
        assert _fields(GenerationSpec(prompts=prompts, **said)) == found, said


def test_all_violations_come_at_once() -> None:
    spec = GenerationSpec(width=7, height=-1, num_images=0, guidance_scale=NAN, strength=0.5)
    with pytest.raises(InvalidRequest, match="and 3 more") as caught:
        rules.refuse(list(validation.check_spec(spec, ADDONS, max_image_bytes=100)))
    assert len(caught.value.violations) == 4


def _edit(**said: Any) -> GenerationSpec:
    return GenerationSpec(**{"image": PNG, "mask_image": PNG, **said})


def test_an_edit_redraws_almost_all_by_default_so_that_one_step_is_too_few() -> None:
    assert _fields(_edit(num_inference_steps=1)) == ["strength"]  # 1 x .9999
    assert _fields(_edit(num_inference_steps=2)) == []
    assert _fields(_edit(num_inference_steps=1, strength=1.0)) == []


class _Inspector:
    """Masks of b"empty" redraw nothing; images are 96x80. orders: how masks were read."""

    def __init__(self) -> None:
        self.orders: list[MaskOrder] = []

    async def inspect(self, image: bytes, *, share: Share) -> ImageSize:
        del share
        if image == b"broken":
            raise BadImage("the bytes are no image")
        return ImageSize(width=96, height=80)

    async def inspect_mask(self, mask: bytes, order: MaskOrder, *, share: Share) -> MaskUse:
        del share
        self.orders.append(order)
        if mask == b"empty":
            raise BadImage("redraws nothing")
        return MaskUse(width=48, height=40)


async def _inspected(spec: GenerationSpec, *, model: image_pb2.Model | None = MODEL) -> _Inspector:
    inspector = _Inspector()
    await validation.check_images(spec, [], inspector, max_pixels=96 * 80, share=Share(), model=model)
    return inspector


async def test_a_mask_is_read_at_the_size_at_which_the_image_is_drawn() -> None:
    assert (await _inspected(_edit())).orders == [MaskOrder(width=64, height=64, latent_scale=8)]
    whole = _edit(width=128, height=40, mask_alpha=True, padding_mask_crop=0)
    expected = MaskOrder(
        width=128, height=40, latent_scale=8, alpha=True, padding=0, image_size=ImageSize(width=96, height=80)
    )
    assert (await _inspected(whole)).orders == [expected]


async def test_what_a_mask_leaves_to_compute_is_found_out_as_the_workers_say() -> None:
    tokens = MaskTokens(token_elements=2, margin_tokens=1)
    seen = await validation.check_images(
        _edit(), [], inspector := _Inspector(), max_pixels=96 * 80, share=Share(), model=MODEL, tokens=tokens
    )
    assert inspector.orders == [MaskOrder(width=64, height=64, latent_scale=8, token=2, margin=1)]
    assert (seen.size, seen.mask) == (ImageSize(width=96, height=80), MaskUse(width=48, height=40))


async def test_where_that_size_is_not_known_a_mask_is_only_decoded() -> None:
    for field in ("width", "height", "padding_mask_crop"):
        wrong = [Violation(field=f"spec.{field}", description="wrong")]
        inspector = _Inspector()
        with pytest.raises(InvalidRequest) as caught:
            await validation.check_images(
                _edit(mask_image=b"broken"), wrong, inspector, max_pixels=96 * 80, share=Share(), model=MODEL
            )
        assert [violation.field for violation in caught.value.violations] == [f"spec.{field}", "spec.mask_image"]
        assert inspector.orders == []
    assert (await _inspected(_edit(), model=None)).orders == []


async def test_all_that_is_wrong_with_image_and_mask_comes_at_once() -> None:
    with pytest.raises(BadImage) as caught:
        await _inspected(_edit(image=b"broken", mask_image=b"empty"))
    assert {violation.field: violation.description for violation in caught.value.violations} == {
        "spec.image": "the bytes are no image",
        "spec.mask_image": "redraws nothing",
    }
    with pytest.raises(BadImage, match="mask_image: is 48x40 pixels; at most 100 pixels are allowed"):
        await validation.check_images(
            GenerationSpec(mask_image=PNG), [], _Inspector(), max_pixels=100, share=Share(), model=MODEL
        )
