"""What the gateway reads from a complete spec: its input images wherever they are, its rows, steps, latent, key."""

from __future__ import annotations

import ast
import importlib.util
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.message import Message

from bottega import adapter_rules, rules
from bottega.addons.controlnets.gateway.addon import ResolvedControlNets
from bottega.addons.controlnets.gateway.hosts import ControlNetHosts
from bottega.addons.interface.views import ANYTHING
from bottega.addons.loras.gateway.addon import ResolvedLoras
from bottega.gateway.api import validation
from bottega.gateway.api.reuse import outline_of
from bottega.gateway.jobs import specs
from bottega.gateway.jobs.specs import has_images, input_images, key_of_result, result_key, without_images
from bottega.gateway.jobs.storage import digest
from bottega.v1 import generation_pb2, image_pb2
from bottega.v1.generation_pb2 import ControlNet, ControlNetUse, GenerationSpec, Lora, MaskUse, Provenance, Techniques
from bottega.v1.lora_pb2 import LoraBound, StoredLora
from tests.fakes.fake_time import FakeTime
from tests.samples.addons import sample_addons

# The model, LoRAs and ControlNets count by their hashes. identical_results says how a request may be answered.
_NO_PART = {"model", "loras.name", "loras.denoiser_only", "controlnets.name", "techniques.identical_results"}
# A request that measures has no key at all.
_MEASURES = {"loras.measure_similarity", "controlnets.measure_similarity"}

MODEL = image_pb2.Model(
    name="m",
    default_width=64,
    default_height=48,
    default_steps=30,
    default_guidance_scale=4.5,
    default_sampler=generation_pb2.SAMPLER_DDIM,
    vae_scale_factor=4,
)


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


def test_a_guided_request_puts_two_rows_an_image_into_each_turn_and_image_to_image_skips_the_first_steps() -> None:
    spec = GenerationSpec(num_images=3, num_inference_steps=30, guidance_scale=4.5)
    assert (specs.rows(spec), specs.steps_to_run(spec)) == (6, 30)
    assert specs.rows(GenerationSpec(num_images=1, guidance_scale=1)) == 1
    assert specs.steps_to_run(GenerationSpec(num_inference_steps=30, strength=0.5)) == 15


def test_an_embedded_guidance_puts_one_row_into_a_turn_unless_true_cfg_is_on() -> None:
    model = image_pb2.Model()
    model.CopyFrom(MODEL)
    model.embeds_guidance = True
    plain, true = GenerationSpec(), GenerationSpec(true_cfg_scale=2, negative_prompt="")
    assert [specs.rows(specs.complete(spec, model)) for spec in (plain, true)] == [1, 2]
    assert specs.complete(plain, model).true_cfg_scale == 1
    # With other models the guidance scale decides, and the field is of no use.
    without = specs.complete(GenerationSpec(true_cfg_scale=1), MODEL)
    assert (specs.rows(without), without.HasField("true_cfg_scale")) == (2, False)


def test_guidance_that_is_counted_from_0_puts_two_rows_into_a_turn_below_1() -> None:
    model = image_pb2.Model()
    model.CopyFrom(MODEL)
    model.guidance_from_zero = True
    for scale, rows in ((0.0, 1), (0.5, 2)):
        full = specs.complete(GenerationSpec(guidance_scale=scale), model)
        assert (specs.rows(full), full.cfg_normalization, full.cfg_truncation) == (rows, 0.0, 1.0)
    full = specs.complete(GenerationSpec(cfg_normalization=1.5, cfg_truncation=0.0), model)
    assert (full.cfg_normalization, full.cfg_truncation) == (1.5, 0.0)
    without = specs.complete(GenerationSpec(cfg_truncation=1.0, cfg_normalization=0.0), MODEL)
    assert not without.HasField("cfg_truncation")
    assert not without.HasField("cfg_normalization")


def test_a_latent_is_smaller_by_the_models_factor() -> None:
    spec = GenerationSpec(width=64, height=48)
    assert specs.latent_shape(spec, image_pb2.Model(size_multiple=8, vae_scale_factor=4)) == (12, 16)
    assert specs.latent_shape(spec, image_pb2.Model(size_multiple=8)) == (6, 8)


def test_of_a_cancelled_job_only_the_beginnings_of_its_prompts_are_kept() -> None:
    short = specs.with_short_texts(GenerationSpec(prompt="p" * 300, prompts=["p" * 300, "q"]))
    assert [short.prompt, *short.prompts] == ["p" * 200 + "…", "p" * 200 + "…", "q"]
    spec = GenerationSpec(prompt="p", prompts=["p", "q"])
    assert specs.with_short_texts(spec) is spec


def _spec() -> GenerationSpec:
    """Complete, with something in every part; its images are their digests."""
    return GenerationSpec(
        model="miniature",
        prompt="a star",
        seed=7,
        image=b"1" * 64,
        strength=0.5,
        num_images=2,
        loras=[Lora(name="ink", digest="a" * 64, scale=0.5), Lora(name="wash", digest="b" * 64, scale=1.0)],
        controlnets=[ControlNet(name="edges", image=b"2" * 64), ControlNet(name="depth", image=b"3" * 64)],
        techniques=Techniques(stale_residuals=False),
    )


def _key(spec: GenerationSpec, **facts: object) -> str:
    given = {"model_hash": "m" * 64, "dtype": "float16", "versions": ["v1", "v2"], "tenant": "", **facts}
    return result_key(spec, **given)  # type: ignore[arg-type]


def _parts(spec: GenerationSpec) -> dict[str, Message]:
    """The messages of a spec whose fields are changed one by one, by the path that leads there."""
    return {
        "": spec,
        "loras.": spec.loras[0],
        "controlnets.": spec.controlnets[0],
        "techniques.": spec.techniques,
    }


def _change(message: Message, name: str) -> None:
    """Gives the field a value that it does not have. A switch that is absent differs from one that is off."""
    field, now = message.DESCRIPTOR.fields_by_name[name], getattr(message, name)
    if field.is_repeated:
        now.append("x" if field.cpp_type == field.CPPTYPE_STRING else 1)
        return
    if isinstance(now, bytes):
        other: object = now + b"x"
    elif isinstance(now, str):
        other = now + "x"
    elif isinstance(now, bool):
        other = not now if not field.has_presence or message.HasField(name) else False
    else:
        other = now + 1
    setattr(message, name, other)


def _changed() -> Iterator[tuple[str, GenerationSpec]]:
    """The spec with another value in each of its fields, one at a time, by path."""
    for prefix, part in _parts(_spec()).items():
        for field in part.DESCRIPTOR.fields:
            if field.message_type is None:
                spec = _spec()
                _change(_parts(spec)[prefix], field.name)
                yield prefix + field.name, spec


def test_another_value_in_any_field_is_another_key_but_for_names_and_the_switch() -> None:
    plain = _key(_spec())
    keys = {path: _key(spec) for path, spec in _changed()}
    assert len(keys) >= 40
    assert {path for path, key in keys.items() if key == plain} == _NO_PART
    assert {path for path, key in keys.items() if not key} == _MEASURES
    others = [key for path, key in keys.items() if path not in _NO_PART | _MEASURES]
    assert len(set(others)) == len(others)


def test_another_model_weights_or_tenant_is_another_key() -> None:
    other_facts: list[dict[str, object]] = [
        {"model_hash": "n" * 64},
        {"dtype": "float32"},
        {"versions": ["v1", "v3"]},
        {"versions": ["v2", "v1"]},
        {"tenant": "somebody"},
        {"tenant": "somebody", "dtype": "float32"},
    ]
    keys = {_key(_spec()), *(_key(_spec(), **facts) for facts in other_facts)}
    assert len(keys) == 1 + len(other_facts)
    assert "" not in keys


def test_the_order_of_adapters_counts_as_sums_are_rounded() -> None:
    turned = _spec()
    turned.loras.reverse()
    assert _key(turned) != _key(_spec())


def test_without_all_that_a_picture_is_made_of_there_is_no_key() -> None:
    lacks: list[dict[str, object]] = [
        {"model_hash": ""},
        {"dtype": ""},
        {"versions": ["v1", ""]},
        {"versions": ["v1"]},
    ]
    assert [_key(_spec(), **facts) for facts in lacks] == [""] * len(lacks)
    undetermined, unseen = _spec(), _spec()
    undetermined.loras[1].ClearField("digest")
    unseen.controlnets[1].ClearField("image")
    assert _key(undetermined) == _key(unseen) == ""


def _request() -> GenerationSpec:
    """The same with images in it, and EXACT."""
    spec = _spec()
    spec.fidelity = generation_pb2.FIDELITY_EXACT
    spec.image = b"a source"
    for net in spec.controlnets:
        net.image = b"control " + net.name.encode()
    return spec


def _edit() -> GenerationSpec:
    """The same as an edit of its image, with all that is said of one."""
    spec = _request()
    spec.mask_image = b"a mask"
    spec.mask_alpha, spec.padding_mask_crop, spec.keep_unmasked, spec.mask_feather = True, 8, True, 8
    return spec


async def _provenance(**facts: object) -> Provenance:
    uses = [
        ControlNetUse(name=net.name, digest=version, image_digest=await digest(net.image))
        for net, version in zip(_request().controlnets, ("v1", "v2"), strict=True)
    ]
    full = Provenance(
        model_hash="m" * 64, dtype="float16", exact=True, image_digest=await digest(b"a source"), controlnets=uses
    )
    full.MergeFrom(Provenance(**facts))  # type: ignore[arg-type]
    return full


async def test_a_finished_job_has_the_key_of_the_request_that_it_was_made_of() -> None:
    key = key_of_result(without_images(_request()), await _provenance(), tenant="")
    assert key == _key(await outline_of(_request())) != ""


async def test_exact_is_answered_by_what_is_exact_only() -> None:
    bare, provenance = without_images(_request()), await _provenance()
    provenance.exact = False
    assert key_of_result(bare, provenance, tenant="") == ""
    bare.fidelity = generation_pb2.FIDELITY_BALANCED
    assert key_of_result(bare, provenance, tenant="") != ""


async def test_a_job_whose_provenance_leaves_something_open_answers_nobody() -> None:
    bare = without_images(_request())
    for name in ("controlnets", "model_hash", "dtype"):
        provenance = await _provenance()
        provenance.ClearField(name)
        assert key_of_result(bare, provenance, tenant="") == ""


async def test_a_finished_edit_has_the_key_of_the_request_that_it_was_made_of() -> None:
    mask = MaskUse(digest=await digest(b"a mask"), width=64, share=0.2, recording="ab")
    key = key_of_result(without_images(_edit()), await _provenance(mask=mask), tenant="")
    assert key == _key(await outline_of(_edit())) != ""
    assert key != _key(await outline_of(_request()))
    assert key_of_result(without_images(_edit()), await _provenance(), tenant="") == "", "of which mask?"


async def test_what_shared_turns_rounded_answers_exact_requests_that_may_share_them() -> None:
    bare, provenance = without_images(_request()), await _provenance()
    provenance.exact, provenance.shared_in_half_precision = False, True
    assert key_of_result(bare, provenance, tenant="") == _key(await outline_of(_request())) != ""
    alone = _request()
    alone.techniques.shared_turns = False
    assert key_of_result(without_images(alone), provenance, tenant="") == ""
    assert _key(await outline_of(alone)) not in ("", _key(await outline_of(_request())))


def test_in_float32_shared_turns_make_no_other_key() -> None:
    plain, alone = _spec(), _spec()
    plain.ClearField("techniques")
    alone.techniques.Clear()
    alone.techniques.shared_turns = False
    assert _key(plain, dtype="float32") == _key(alone, dtype="float32") != ""
    assert _key(plain, dtype="bfloat16") != _key(alone, dtype="bfloat16")


def _resolved(*stored: StoredLora) -> list[ResolvedLoras]:
    return [ResolvedLoras(stored=stored)]


def test_of_several_prompts_each_is_one_image_and_a_single_one_is_the_prompt() -> None:
    spec = GenerationSpec(prompts=["a star", "a ring"])
    full = specs.complete(spec, MODEL)
    assert (full.prompt, list(full.prompts), full.num_images) == ("a star", ["a star", "a ring"], 2)
    again = specs.as_before(spec, full)
    assert again == full
    assert list(validation.check_spec(full, sample_addons(), max_image_bytes=1)) == []
    single = specs.complete(GenerationSpec(prompts=["a star"]), MODEL)
    assert (single.prompt, list(single.prompts), single.num_images) == ("a star", [], 1)


def test_every_default_is_filled_in() -> None:
    full = specs.complete(GenerationSpec(prompt="a star"), MODEL)
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
        prompt_syntax=generation_pb2.PROMPT_SYNTAX_PLAIN,
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
        prompt_syntax=generation_pb2.PROMPT_SYNTAX_WEIGHTED,
        clip_skip=1,
        max_sequence_length=77,
    )
    before = said.SerializeToString(deterministic=True)
    assert specs.complete(said, MODEL) == said
    assert said.SerializeToString(deterministic=True) == before


def _choices(*, karras: bool) -> list[image_pb2.SamplerChoice]:
    """What a model's workers say whose scheduler configuration says this of Karras' sigmas."""
    return [
        image_pb2.SamplerChoice(sampler=sampler, use_karras_sigmas=use, is_default=use == (karras and takes))
        for sampler in generation_pb2.Sampler.values()[1:]
        for takes in [rules.takes_karras_sigmas(sampler)]
        for use in ((False, True) if takes else (False,))
    ]


@pytest.mark.parametrize("sampler", generation_pb2.Sampler.values())
def test_what_a_request_does_not_say_of_karras_sigmas_is_the_models(
    sampler: generation_pb2.Sampler.ValueType,
) -> None:
    for default, configured in itertools.product(
        (generation_pb2.SAMPLER_EULER, generation_pb2.SAMPLER_DDIM), (False, True)
    ):
        model = image_pb2.Model(name="m", default_sampler=default, sampler_choices=_choices(karras=configured))
        takes = rules.takes_karras_sigmas(sampler or default)
        full = specs.complete(GenerationSpec(sampler=sampler), model)
        # The provenance has it, so that a picture is the same when the model's default is another one.
        assert full.HasField("use_karras_sigmas") == takes
        assert full.use_karras_sigmas == (takes and configured)
        for said in (False, True):
            full = specs.complete(GenerationSpec(sampler=sampler, use_karras_sigmas=said), model)
            assert full.use_karras_sigmas == said
    unknown = image_pb2.Model(name="m", default_sampler=generation_pb2.SAMPLER_EULER)
    assert not specs.complete(GenerationSpec(), unknown).HasField("use_karras_sigmas"), "the worker knows it"


def test_other_sigmas_of_a_request_replace_the_models_karras_sigmas() -> None:
    sampler = generation_pb2.SAMPLER_EULER
    model = image_pb2.Model(name="m", default_sampler=sampler, sampler_choices=_choices(karras=True))
    for said in ({"use_beta_sigmas": True}, {"use_exponential_sigmas": True}, {"sigmas": [9.0, 0.0]}):
        full = specs.complete(GenerationSpec(**said), model)
        assert full.HasField("use_karras_sigmas")
        assert not full.use_karras_sigmas
        assert specs.complete(full, model) == full
    assert specs.complete(GenerationSpec(use_beta_sigmas=False), model).use_karras_sigmas


def test_a_list_of_timesteps_or_sigmas_sets_the_steps() -> None:
    assert specs.complete(GenerationSpec(timesteps=[9, 5, 1]), MODEL).num_inference_steps == 3
    assert specs.complete(GenerationSpec(sigmas=[9, 5, 1]), MODEL).num_inference_steps == 2


def test_a_sampler_of_two_evaluations_a_step_costs_them() -> None:
    heun = generation_pb2.SAMPLER_HEUN
    choice = image_pb2.SamplerChoice(sampler=heun, is_default=True, evaluations_per_step=2, extra_evaluations=-1)
    model = image_pb2.Model(name="m", default_sampler=heun, sampler_choices=[choice, *_choices(karras=False)])
    half = GenerationSpec(image=b"x", strength=0.5)
    for sampler, rest, evaluations in (
        (heun, GenerationSpec(), 1.9),
        (heun, half, 1.8),
        (generation_pb2.SAMPLER_EULER, half, 1.0),
    ):
        spec = GenerationSpec(sampler=sampler, num_inference_steps=10)
        spec.MergeFrom(rest)
        assert specs.evaluations_per_step(specs.complete(spec, model), model) == pytest.approx(evaluations)


def test_no_number_of_a_request_is_without_presence() -> None:
    """Else a caller who says nothing overwrites the model's default, or Diffusers'. Enums have UNSPECIFIED for 0."""
    for message in (GenerationSpec, ControlNet, Lora, Techniques):
        for field in message.DESCRIPTOR.fields:
            if not (field.has_presence or field.is_repeated or field.enum_type):
                assert field.type in (field.TYPE_STRING, field.TYPE_BYTES, field.TYPE_BOOL), field.full_name


# What an SDXL-shaped model has whose folder says nothing of its own.
_PLAIN = image_pb2.Model(
    name="m", default_steps=50, default_guidance_scale=5.0, default_edit_guidance_scale=7.5, vae_scale_factor=8
)
_STABLE_DIFFUSION = image_pb2.Model(
    name="m",
    default_steps=50,
    default_guidance_scale=7.5,
    default_strength=0.8,
    default_edit_strength=1.0,
    default_edit_controlnet_scale=0.5,
)
_CONTROLLED = {"controlnets": [ControlNet(name="edges")]}
# By Diffusers' pipeline: fields that a request of its kind has, with the image's and the mask's bytes.
_PIPELINES: dict[str, dict[str, Any]] = {
    "stable_diffusion/pipeline_stable_diffusion": {},
    "stable_diffusion/pipeline_stable_diffusion_img2img": {"image": b"x"},
    "stable_diffusion/pipeline_stable_diffusion_inpaint": {"image": b"x", "mask_image": b"y"},
    "controlnet/pipeline_controlnet": _CONTROLLED,
    "controlnet/pipeline_controlnet_img2img": {**_CONTROLLED, "image": b"x"},
    "controlnet/pipeline_controlnet_inpaint": {**_CONTROLLED, "image": b"x", "mask_image": b"y"},
    "stable_diffusion_xl/pipeline_stable_diffusion_xl": {},
    "stable_diffusion_xl/pipeline_stable_diffusion_xl_img2img": {"image": b"x"},
    "stable_diffusion_xl/pipeline_stable_diffusion_xl_inpaint": {"image": b"x", "mask_image": b"y"},
    "controlnet/pipeline_controlnet_sd_xl": {"controlnets": [ControlNet(name="edges")]},
    "controlnet/pipeline_controlnet_sd_xl_img2img": {"controlnets": [ControlNet(name="edges")], "image": b"x"},
    "controlnet/pipeline_controlnet_inpaint_sd_xl": {
        "controlnets": [ControlNet(name="edges")] * 2,
        "image": b"x",
        "mask_image": b"y",
    },
}
# Not of a request: of another kind of model, of tensors and callbacks, or always the same here.
_NO_FIELDS = frozenset(
    {
        "aesthetic_score",
        "callback_on_step_end_tensor_inputs",
        "crops_coords_top_left",
        "eta",
        "negative_aesthetic_score",
        "negative_crops_coords_top_left",
        "output_type",
        "return_dict",
    }
)
_NAMES = {"num_images_per_prompt": "num_images"}


def _defaults_of(pipeline: str) -> dict[str, Any]:
    """The defaults of its call that are values, read without importing it."""
    (folder,) = importlib.util.find_spec("diffusers").submodule_search_locations  # type: ignore[union-attr,misc]
    source = ast.parse((Path(folder) / "pipelines" / f"{pipeline}.py").read_text())
    (call,) = (node for node in ast.walk(source) if isinstance(node, ast.FunctionDef) and node.name == "__call__")
    names = [argument.arg for argument in call.args.args][-len(call.args.defaults) :]
    values = {name: ast.literal_eval(value) for name, value in zip(names, call.args.defaults, strict=True)}
    return {name: value for name, value in values.items() if value is not None}


@pytest.mark.parametrize("pipeline", _PIPELINES)
def test_what_a_request_leaves_open_is_what_the_pipeline_of_its_kind_has(pipeline: str) -> None:
    said = GenerationSpec(**_PIPELINES[pipeline])
    names = ("edges",) * len(said.controlnets)
    hosts = ControlNetHosts(grace_s=lambda _: 1.0, clock=FakeTime().clock())
    controlnets = ResolvedControlNets(names=names, modes=[None] * len(names), access=ANYTHING, hosts=hosts)
    full = specs.complete(said, _PLAIN if "xl" in pipeline else _STABLE_DIFFUSION, [controlnets])
    theirs = _defaults_of(pipeline)
    assert {"guidance_scale", "num_inference_steps"} <= theirs.keys()
    assert ("strength" in theirs) == full.HasField("strength")
    for name, value in theirs.items():
        if name not in _NO_FIELDS:
            field = _NAMES.get(name, name)
            found = full.controlnets if field in ControlNet.DESCRIPTOR.fields_by_name else (full,)
            assert [getattr(each, field) for each in found] == [value] * len(found), name
            assert found, name


def test_a_model_with_a_guidance_of_its_own_has_it_in_edits_too() -> None:
    assert specs.complete(_edit_spec(), MODEL).guidance_scale == 4.5
    assert specs.complete(_edit_spec(guidance_scale=2), _PLAIN).guidance_scale == 2


_EDIT = GenerationSpec(image=b"x", mask_image=b"y")


def _edit_spec(**said: Any) -> GenerationSpec:
    spec = GenerationSpec(**said)
    spec.MergeFrom(_EDIT)
    return spec


def test_what_an_edit_leaves_open_is_filled_in_as_in_diffusers_with_its_own_pixels_kept() -> None:
    full = specs.complete(_edit_spec(), MODEL)
    assert (full.strength, full.keep_unmasked, full.mask_feather) == (0.9999, True, 8)
    assert not full.HasField("padding_mask_crop")
    assert specs.complete(full, MODEL) == full
    assert specs.as_before(_edit_spec(), full) == full
    assert specs.complete(_edit_spec(strength=0.5, mask_feather=0), MODEL).mask_feather == 0
    unkept = specs.complete(_edit_spec(keep_unmasked=False), MODEL)
    assert (unkept.keep_unmasked, unkept.HasField("mask_feather")) == (False, False)
    plain = specs.complete(GenerationSpec(image=b"x"), MODEL)
    assert not any(plain.HasField(name) for name in ("keep_unmasked", "mask_feather", "padding_mask_crop"))


def test_an_exact_that_only_a_seed_stands_for_gives_way_to_masked_blocks() -> None:
    on, off = Techniques(masked_blocks=True), Techniques(masked_blocks=False)
    for spec, exact in (
        (_edit_spec(seed=1), True),
        (_edit_spec(), False),
        (_edit_spec(seed=1, techniques=on), False),
        (_edit_spec(seed=1, techniques=off), True),
        (GenerationSpec(seed=0, techniques=on), True),
    ):
        expected = generation_pb2.FIDELITY_EXACT if exact else generation_pb2.FIDELITY_BALANCED
        assert specs.complete(spec, MODEL).fidelity == expected, spec


def test_a_lora_may_be_late_for_a_share_of_the_steps_that_are_made() -> None:
    cases: list[tuple[dict[str, Any], int]] = [
        ({}, 10),
        ({"image": b"x", "strength": 0.3}, 3),
        ({"image": b"x", "strength": 1.0}, 10),
    ]
    for image, most in cases:
        for bounds in ([], [LoraBound(num_inference_steps=30, max_step=6)]):
            named = GenerationSpec(loras=[Lora(name="ink")], num_inference_steps=50, **image)
            full = specs.complete(named, MODEL, _resolved(StoredLora(name="ink", digest="a" * 64, bounds=bounds)))
            assert full.loras[0].max_step == most


def test_a_lora_is_not_late_by_default_for_steps_that_the_request_lists() -> None:
    listed = GenerationSpec(loras=[Lora(name="ink"), Lora(name="ink", max_step=3)], timesteps=range(40, 0, -1))
    full = specs.complete(listed, MODEL, _resolved(*[StoredLora(name="ink", digest="a" * 64)] * 2))
    assert [lora.max_step for lora in full.loras] == [0, 3]


_EXACT, _BALANCED = generation_pb2.FIDELITY_EXACT, generation_pb2.FIDELITY_BALANCED


@pytest.mark.parametrize(
    ("spec", "switch"),
    [
        (GenerationSpec(seed=1, loras=[Lora(name="ink", max_step=9), Lora(name="ink")]), True),
        (GenerationSpec(loras=[Lora(name="ink", max_step=9), Lora(name="ink")]), None),
        (GenerationSpec(seed=1, loras=[Lora(name="ink", max_step=0), Lora(name="ink")]), None),
        (GenerationSpec(fidelity=_EXACT, loras=[Lora(name="ink", max_step=9, from_step=0)] * 2), None),
        (GenerationSpec(seed=1, image=b"x", strength=0.5, loras=[Lora(name="ink", from_step=15)] * 2), None),
        (GenerationSpec(seed=1, image=b"x", strength=0.5, loras=[Lora(name="ink", from_step=16)] * 2), True),
        (
            GenerationSpec(
                techniques=Techniques(bounded_lora_loading=False), loras=[Lora(name="ink", max_step=9, from_step=0)] * 2
            ),
            False,
        ),
    ],
)
def test_an_exact_that_nobody_asked_for_gives_way_to_a_step_that_is_told(
    spec: GenerationSpec, switch: bool | None
) -> None:
    """And what is drawn says so: asked for by its own words again, it is no contradiction."""
    stored = StoredLora(name="ink", digest="a" * 64)
    full = specs.complete(spec, MODEL, _resolved(stored, stored))
    assert full.fidelity == (_EXACT if spec.HasField("seed") or spec.fidelity else _BALANCED)
    assert full.loras[0].max_step == spec.loras[0].max_step
    techniques = full.techniques
    assert (techniques.bounded_lora_loading if techniques.HasField("bounded_lora_loading") else None) == switch
    assert list(adapter_rules.check_lateness(full)) == []
    strength = full.strength if full.HasField("strength") else None
    waits = adapter_rules.waits_for_loras(full)
    assert list(adapter_rules.check_lora_steps(full, full.num_inference_steps, strength, waits=waits)) == []
    again = specs.complete(full, MODEL, _resolved(stored, stored))
    if full.fidelity == _EXACT:
        full.techniques.shared_turns = False  # It says EXACT itself now.
    assert again == full
    assert specs.as_before(spec, full) == full


def test_what_is_drawn_again_has_the_full_names_of_before() -> None:
    spec = GenerationSpec(controlnets=[ControlNet(name="edges")], loras=[Lora(name="ink")])
    drawn = GenerationSpec(controlnets=[ControlNet(name="edges@shop")], loras=[Lora(name="ink@shop")])
    full = specs.as_before(spec, drawn)
    assert [net.name for net in full.controlnets] == ["edges@shop"]
    assert [lora.name for lora in full.loras] == ["ink@shop"]


def test_only_a_request_that_says_exact_itself_shares_no_turns() -> None:
    for spec, shares in (
        (GenerationSpec(fidelity=_EXACT, seed=1), False),
        (GenerationSpec(fidelity=_EXACT, techniques=Techniques(shared_turns=True)), True),
        (GenerationSpec(techniques=Techniques(shared_turns=False)), False),
        (GenerationSpec(seed=1), None),
    ):
        techniques = specs.complete(spec, MODEL).techniques
        assert (techniques.shared_turns if techniques.HasField("shared_turns") else None) is shares, spec
