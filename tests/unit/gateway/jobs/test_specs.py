"""What the gateway reads from a complete spec: its input images wherever they are, its rows, steps, latent, key."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import psutil
import pytest
from google.protobuf.message import Message

from bottega.gateway.api.reuse import outline_of
from bottega.gateway.jobs import specs
from bottega.gateway.jobs.specs import has_images, input_images, key_of_result, result_key, without_images
from bottega.gateway.jobs.storage import digest
from bottega.v1 import generation_pb2, image_pb2
from bottega.v1.generation_pb2 import ControlNet, ControlNetUse, GenerationSpec, Lora, MaskUse, Provenance, Techniques

# Names: the model, LoRAs and ControlNets count by their hashes. identical_results says how a request may be answered.
_NO_PART = {"model", "loras.name", "controlnets.name", "techniques.identical_results"}
# A request that measures has no key at all.
_MEASURES = {"loras.measure_similarity", "controlnets.measure_similarity"}


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


def test_a_request_with_nothing_but_the_switch_among_its_techniques_is_as_one_without_techniques() -> None:
    plain, switched = _spec(), _spec()
    plain.ClearField("techniques")
    switched.techniques.Clear()
    switched.techniques.identical_results = True
    assert _key(switched) == _key(plain) != _key(_spec())


@pytest.mark.parametrize(
    "facts",
    [
        {"model_hash": "n" * 64},
        {"dtype": "float32"},
        {"versions": ["v1", "v3"]},
        {"versions": ["v2", "v1"]},
        {"tenant": "somebody"},
        {"tenant": "somebody else"},
    ],
)
def test_another_model_weights_or_tenant_is_another_key(facts: dict[str, object]) -> None:
    assert _key(_spec(), **facts) not in ("", _key(_spec()))
    assert _key(_spec(), **{"tenant": "x", **facts}) != _key(_spec(), tenant="x")


def test_the_order_of_adapters_counts_as_sums_are_rounded() -> None:
    turned = _spec()
    turned.loras.reverse()
    assert _key(turned) != _key(_spec())


@pytest.mark.parametrize("facts", [{"model_hash": ""}, {"dtype": ""}, {"versions": ["v1", ""]}, {"versions": ["v1"]}])
def test_without_all_that_a_picture_is_made_of_there_is_no_key(facts: dict[str, object]) -> None:
    assert _key(_spec(), **facts) == ""


def _without_lora_digest(spec: GenerationSpec) -> None:
    spec.loras[1].ClearField("digest")


def _without_control_image(spec: GenerationSpec) -> None:
    spec.controlnets[1].ClearField("image")


@pytest.mark.parametrize("change", [_without_lora_digest, _without_control_image])
def test_a_spec_that_does_not_say_all_has_no_key(change: Callable[[GenerationSpec], None]) -> None:
    spec = _spec()
    change(spec)
    assert _key(spec) == ""


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


async def test_every_input_image_that_is_served_counts_by_its_digest() -> None:
    images = {field.name for field in GenerationSpec.DESCRIPTOR.fields if field.cpp_type == field.CPPTYPE_STRING}
    images = {name for name in images if isinstance(getattr(GenerationSpec(), name), bytes)}
    assert images == {"image", "mask_image"}
    for name in images:
        other = _edit()
        setattr(other, name, b"another one")
        assert _key(await outline_of(other)) != _key(await outline_of(_edit()))


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
