"""Recordings of templates: their keys and prompts, what edits record and take, and later attempts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from bottega import kinds, rules
from bottega.addons.edits.engine.masked.checks import LEAST_COSINE, PromptCosines
from bottega.addons.edits.engine.recordings.recording import rounded, step_key
from bottega.addons.edits.engine.recordings.step import RecordedStep
from bottega.engine.addon import EngineAddOn, JobAddOn
from bottega.engine.encode import encode_prompts
from bottega.engine.events import EngineRecord, JobCheckpointed, JobFailed
from bottega.engine.job import EngineOrder
from bottega.engine.request import Request
from bottega.engine.spec import ControlSpec
from bottega.errors import InvalidRequest
from bottega.model.model import Model
from bottega.model.rows import Half
from bottega.model.samplers import Sampler
from bottega.model.schedulers import KARRAS, SamplerKind
from bottega.v1.activations_pb2 import EditDecision
from tests.samples.edits import box_mask, edit_order, template
from tests.samples.engine_loras import LorasByHand, lora_spec, random_layers
from tests.samples.masked_edits import (
    ELSEWHERE,
    FIRST,
    LEFT,
    SECOND,
    SPEC,
    EditDesk,
    drawn_alone,
    edit_record,
    edited,
    inside,
    masked_order,
    outside,
)
from tests.support.schedulers import BASIC

# Its timesteps are not those of the others, but for some.
FURTHER = replace(SECOND, spec=replace(SECOND.spec, num_inference_steps=7))


@pytest.fixture
def desk(model: Model) -> EditDesk:
    """It has recorded FIRST."""
    desk = EditDesk(model)
    desk.draw(FIRST)
    return desk


def recorded(step: RecordedStep, name: str) -> Tensor:
    tensor = step.get(name)
    assert tensor is not None
    return tensor


def test_the_first_edit_computes_in_full_and_records_and_the_second_one_uses_it(model: Model) -> None:
    desk = EditDesk(model)
    first, second = desk.draw(FIRST), desk.draw(SECOND)
    assert first.record.exact
    assert first.record.provenance.mask.recorded
    assert first.record.provenance.mask.computed_all_because == "it is the first edit of this image"
    assert first.record.provenance.blocks_total == 0
    torch.testing.assert_close(first.latents[0], drawn_alone(model, FIRST).latents[0], atol=1e-5, rtol=0)
    record = second.record.provenance
    assert not second.record.exact
    # Four transformer blocks, two halves, three steps.
    assert (record.blocks_reused, record.blocks_total) == (24, 24)
    assert record.mask.recording == desk.source.recordings[0].id
    assert 0 < record.mask.computed_share < 0.6
    assert first.record.provenance.mask.dilated_share == record.mask.dilated_share == record.mask.computed_share
    assert not record.mask.computed_all_because
    assert desk.edits.counts["blocks_reused"] == 24
    assert desk.edits.counts["hits"] == 1


def test_an_edit_that_takes_the_noise_of_a_recording_alone_names_it(desk: EditDesk) -> None:
    (recording,) = desk.source.recordings
    recording.forget_steps(lambda step: True)  # as a store that has lost its sections
    drawn = desk.draw(SECOND)
    assert (drawn.record.provenance.blocks_reused, drawn.record.exact) == (0, False)
    assert drawn.record.provenance.mask.recording == recording.id


def test_two_seeds_on_one_template_differ_inside_only(model: Model, desk: EditDesk) -> None:
    first = desk.drawings[FIRST.key]
    one, other = desk.draw(SECOND), desk.draw(replace(SECOND, key="third", spec=replace(SECOND.spec, seed=99)))
    assert torch.equal(edited(one).image_latent, edited(other).image_latent)
    for drawing in (one, other):
        assert torch.equal(outside(edited(drawing).noise, SECOND), outside(edited(first).noise, SECOND))
    alone = drawn_alone(model, SECOND)
    assert torch.equal(inside(edited(one).noise, SECOND), inside(edited(alone).noise, SECOND))
    assert not torch.equal(inside(edited(one).noise, SECOND), inside(edited(other).noise, SECOND))
    assert torch.equal(outside(one.latents[0], SECOND), outside(other.latents[0], SECOND))
    assert not torch.equal(inside(one.latents[0], SECOND), inside(other.latents[0], SECOND))


def test_the_same_edit_again_draws_what_the_full_computation_draws_of_the_same_noise(model: Model) -> None:
    """The recording is of this very edit: what it does not compute is what it would have computed."""
    desk = EditDesk(model)
    first, again = desk.draw(FIRST), desk.draw(replace(FIRST, key="again"))
    assert again.record.provenance.blocks_reused
    # Activations are kept in float16.
    torch.testing.assert_close(again.latents[0], first.latents[0], atol=0.02, rtol=0)


def test_an_edit_of_the_same_place_completes_nothing(desk: EditDesk) -> None:
    """What it computes there is its own."""
    (recording,) = desk.source.recordings
    share = recording.valid_share
    again = desk.draw(SECOND)
    assert not again.record.provenance.mask.recorded
    assert recording.valid_share == share < 1.0


def test_what_completes_a_recording_is_what_the_template_puts_out_there(desk: EditDesk) -> None:
    """The second edit computes the place of the first one's mask, and writes it; nothing else is touched."""
    (recording,) = desk.source.recordings
    before = {(key, name): recorded(step, name).clone() for key, step in recording.steps.items() for name in step.names}
    valid, share = {key: step.valid for key, step in recording.steps.items()}, recording.valid_share
    completing = desk.draw(ELSEWHERE).record.provenance.mask
    assert completing.recorded
    assert share < recording.valid_share == 1.0
    for key, step in recording.steps.items():
        tokens = valid[key][::2, ::2].flatten()
        for name in desk.edits.blocks:
            tensor = recorded(step, name)
            assert torch.equal(tensor[tokens], before[key, name][tokens])
            assert not torch.equal(tensor[~tokens], before[key, name][~tokens])
    again = desk.draw(replace(ELSEWHERE, key="again")).record.provenance.mask
    assert not again.recorded
    assert again.computed_share < completing.computed_share


@pytest.mark.parametrize("order", [ELSEWHERE, FURTHER], ids=["parts", "steps"])
def test_an_edit_beyond_float16_leaves_the_recording_as_it_was(
    model: Model, desk: EditDesk, order: EngineOrder
) -> None:
    """What it completed would be read by every later edit of the template."""
    (recording,) = desk.source.recordings
    before = {key: step.valid for key, step in recording.steps.items()}
    (block,) = desk.edits.blocks[-1:]
    last = model.backbone.network.get_submodule(block)
    hook = last.register_forward_hook(lambda module, given, output: output * 1e9)
    try:
        beyond = desk.draw(order)
    finally:
        hook.remove()
    assert beyond.record.provenance.blocks_reused
    assert not beyond.record.provenance.mask.recorded
    assert recording.steps.keys() == before.keys()
    assert all(torch.equal(step.valid, before[key]) for key, step in recording.steps.items())
    assert all(bool(recorded(step, block).isfinite().all()) for step in recording.steps.values())
    later = desk.draw(replace(order, key="later"))
    assert later.record.provenance.mask.recorded
    assert bool(later.latents[0].isfinite().all())


def test_while_a_template_is_recorded_others_of_it_compute_in_full_and_record_nothing(model: Model) -> None:
    desk = EditDesk(model)
    drawings = desk.run({0: [FIRST, SECOND]})
    record = drawings["second"].record.provenance.mask
    assert record is not None
    assert record.computed_all_because == "another edit is recording this image"
    assert drawings["second"].record.exact
    assert len(desk.source.recordings) == 1
    assert desk.source.counts["recorded"] == 1


def test_of_several_images_the_first_one_is_recorded_and_all_read(model: Model) -> None:
    desk = EditDesk(model)
    desk.draw(replace(FIRST, spec=replace(FIRST.spec, num_images=2)))
    both = desk.draw(replace(SECOND, spec=replace(SECOND.spec, num_images=2)))
    assert both.record.provenance.blocks_reused == both.record.provenance.blocks_total == 48
    assert torch.equal(outside(both.latents[0], SECOND), outside(both.latents[1], SECOND))


def test_within_a_template_s_budget_the_blocks_that_save_most_are_recorded_and_reused(model: Model) -> None:
    whole, desk = EditDesk(model), EditDesk(model)
    in_full = whole.draw(FIRST)
    size_bytes = whole.source.recordings[0].size_bytes
    desk.edits.template_budget_bytes = size_bytes // 3
    desk.draw(FIRST)
    (recording,) = desk.source.recordings
    assert 0 < recording.size_bytes <= size_bytes // 3
    (names,) = {frozenset(step.names) for step in recording.steps.values()}
    everything = next(iter(whole.source.recordings[0].steps.values()))
    assert names < set(everything.names)
    again = desk.draw(replace(FIRST, key="again"))
    assert again.record.provenance.blocks_reused
    torch.testing.assert_close(again.latents[0], in_full.latents[0], atol=0.02, rtol=0)
    desk.draw(replace(SECOND, spec=replace(SECOND.spec, num_inference_steps=7)))
    assert recording.size_bytes <= size_bytes // 3, "further timesteps have no more room"


def test_other_images_loras_and_sizes_are_other_templates(desk: EditDesk) -> None:
    flipped = replace(SECOND, image=torch.flip(FIRST.image, (1,)) if FIRST.image is not None else None)
    drawing = desk.draw(flipped)
    assert not drawing.record.provenance.blocks_reused
    keys = {
        desk.edits.key(order).digest
        for order in (
            FIRST,
            flipped,
            replace(FIRST, spec=replace(FIRST.spec, loras=(lora_spec("style"),))),
            replace(FIRST, spec=replace(FIRST.spec, loras=(lora_spec("style", 0.5),))),
        )
    }
    assert len(keys) == 4
    assert desk.edits.key(FIRST).digest == desk.edits.key(ELSEWHERE).digest


def test_steps_with_other_active_controlnets_are_other_steps(model: Model) -> None:
    first = ControlSpec(name="edges", image_digest="5a" * 32, control_guidance_end=0.5)
    second = ControlSpec(name="depth", image_digest="a5" * 32, control_guidance_start=0.5)
    spec = replace(SPEC, strength=None, controlnets=(first, second))
    request = Request(model, spec, encode_prompts(model, spec))
    keys = [step_key(request, Half.CONDITIONAL, turn) for turn in range(4)]
    assert [key.controls for key in keys] == [(0,), (0,), (1,), (1,)]


@pytest.mark.parametrize(("crop", "templates"), [(None, 1), (8, 2)])
def test_of_cropped_control_images_the_part_that_is_drawn_counts(
    model: Model, crop: int | None, templates: int
) -> None:
    """Two places of an image may look alike where its control image does not."""
    control = ControlSpec(name="edges", image_digest="5a" * 32, digest="a5" * 32)
    assert FIRST.spec.edit is not None
    edit = replace(FIRST.spec.edit, padding_mask_crop=crop)
    order = replace(FIRST, spec=replace(FIRST.spec, controlnets=(control,), edit=edit))
    parts = [torch.full((64, 64, 3), value, dtype=torch.uint8) for value in (1, 2)]
    keys = {EditDesk(model).edits.key(replace(order, control_images=(part,))).digest for part in parts}
    assert len(keys) == templates


def test_timesteps_that_were_not_recorded_are_computed_and_added(desk: EditDesk) -> None:
    (recording,) = desk.source.recordings
    assert recording.step_count == 3
    other = replace(SECOND, spec=replace(SECOND.spec, num_inference_steps=7))
    first = desk.draw(other)
    assert (
        0 < first.record.provenance.blocks_reused < first.record.provenance.blocks_total / 2
    )  # the last one is the same
    assert first.record.provenance.mask.recorded
    assert recording.step_count > 3
    again = desk.draw(replace(other, key="again"))
    assert again.record.provenance.blocks_reused == again.record.provenance.blocks_total


def test_a_recording_serves_edits_with_another_sampler(desk: EditDesk) -> None:
    other = desk.draw(replace(SECOND, spec=replace(SECOND.spec, sampler=SamplerKind.EULER_ANCESTRAL)))
    assert other.record.provenance.blocks_reused == other.record.provenance.blocks_total


def test_of_two_steps_at_one_timestep_each_takes_what_its_own_noise_made(model: Model) -> None:
    """Karras' sigmas of DPM++, whose timesteps are rounded: each step has a recording of its own."""
    karras = replace(SPEC, sampler=SamplerKind.DPMPP_2M, use_karras_sigmas=True, num_inference_steps=60, strength=0.1)
    desk = EditDesk(model)
    first = desk.draw(masked_order(karras, key="first"))
    (recording,) = desk.source.recordings
    assert recording.step_count == 6
    assert len({key.timestep for key in recording.steps}) < 6
    again = desk.draw(masked_order(karras, key="again"))
    assert again.record.provenance.blocks_reused == again.record.provenance.blocks_total
    # Activations are kept in float16.
    torch.testing.assert_close(again.latents[0], first.latents[0], atol=2e-3, rtol=0)


def test_keys_tell_all_steps_apart_though_the_last_bits_of_their_noise_do_not_count(model: Model) -> None:
    """Two kinds of processors compute those otherwise, and their workers may share a store."""
    told_apart = levels = 0
    for kind in BASIC:
        for karras in (False, True) if kind in KARRAS else (False,):
            for count in range(1, rules.MAX_STEPS + 1, 13):
                sampler = Sampler(kind, model.scheduler_config, steps=count, karras=karras)
                said = [sampler.noise_level(step) for step in range(count)]
                keys = [rounded(level) for level in said]
                assert len(set(keys)) == count
                assert all(math.isclose(key, level, rel_tol=5e-5) for key, level in zip(keys, said, strict=True))
                elsewhere = [rounded(float(np.nextafter(np.float32(level), np.float32(np.inf)))) for level in said]
                told_apart += sum(key != other for key, other in zip(keys, elsewhere, strict=True))
                levels += count
    assert told_apart < levels / 50


def blocks_depend_on_prompt(desk: EditDesk) -> None:
    """Its model's blocks follow the prompt."""
    desk.edits.cosines = PromptCosines(cosines={"a": LEAST_COSINE - 0.1})


def test_blocks_are_measured_also_where_the_first_image_is_done(model: Model, desk: EditDesk) -> None:
    done = desk.draw(SECOND).job
    assert done is not None
    (first,) = done.requests
    assert first.evaluation == first.last_evaluation
    follows = desk.edits.blocks_depend_on_prompt(SECOND.spec, encode_prompts(model, SECOND.spec), first)
    assert desk.edits.cosines is not None
    assert follows is not desk.edits.cosines.reliable


def test_where_blocks_follow_the_prompt_the_half_that_has_it_is_computed_for_another_one(desk: EditDesk) -> None:
    blocks_depend_on_prompt(desk)
    other = replace(SECOND.spec, prompt="a yellow square")
    cautious = edit_record(desk, masked_order(other, key="cautious", any_prompt=False))
    assert cautious.blocks_reused == cautious.blocks_total / 2
    assert cautious.mask.recorded, "what was computed in full takes the other prompt's place"
    again = edit_record(desk, masked_order(other, key="again", any_prompt=False))
    assert again.blocks_reused == again.blocks_total
    insisting = edit_record(desk, masked_order(SECOND.spec, key="insisting"))
    assert insisting.blocks_reused == insisting.blocks_total
    (recording,) = desk.source.recordings
    assert recording.is_idle


@pytest.mark.parametrize(
    ("changes", "reused"),
    [
        ({"clip_skip": 1}, 0.5),
        ({"weighted": True, "prompt": f"{SPEC.prompt} BREAK"}, 0.0),
    ],
)
def test_a_prompt_that_is_read_in_another_way_is_another_prompt(
    desk: EditDesk, changes: dict[str, Any], reused: float
) -> None:
    blocks_depend_on_prompt(desk)
    record = edit_record(desk, masked_order(replace(FIRST.spec, **changes), key="other", any_prompt=False))
    assert record.blocks_reused == reused * record.blocks_total


def test_where_blocks_follow_the_prompt_two_prompts_on_one_image_do_not_drive_each_other_out(desk: EditDesk) -> None:
    blocks_depend_on_prompt(desk)
    (recording,) = desk.source.recordings
    alone_bytes = recording.size_bytes
    prompts = ("a yellow square", FIRST.spec.prompt, "a yellow square", FIRST.spec.prompt)
    records = [
        edit_record(desk, masked_order(replace(FIRST.spec, prompt=prompt), key=number, any_prompt=False))
        for number, prompt in enumerate(prompts)
    ]
    assert [record.blocks_reused / record.blocks_total for record in records] == [0.5, 1.0, 1.0, 1.0]
    assert recording.size_bytes == 1.5 * alone_bytes
    edit_record(desk, masked_order(replace(FIRST.spec, prompt="a blue ring"), key="third", any_prompt=False))
    assert recording.size_bytes == 1.5 * alone_bytes, "no third one is kept"


def test_without_room_for_two_prompts_the_newer_one_stays(desk: EditDesk) -> None:
    blocks_depend_on_prompt(desk)
    (recording,) = desk.source.recordings
    recording.budget_bytes = recording.size_bytes
    other = replace(FIRST.spec, prompt="a yellow square")
    records = [
        edit_record(desk, masked_order(spec, key=number, any_prompt=False))
        for number, spec in enumerate((other, other, FIRST.spec))
    ]
    assert [record.blocks_reused / record.blocks_total for record in records] == [0.5, 1.0, 0.5]
    assert recording.size_bytes == recording.budget_bytes


def test_how_far_blocks_follow_the_prompt_is_measured_before_the_first_use(desk: EditDesk) -> None:
    before = desk.edits.cosines
    assert before is None
    long = replace(SECOND.spec, prompt="a red BREAK (star:1.2)", weighted=True)
    desk.draw(masked_order(long, key="asked", any_prompt=False))
    measured: PromptCosines | None = desk.edits.cosines
    assert measured is not None
    cosines: Mapping[str, float] = measured.cosines
    assert set(cosines) == set(desk.edits.blocks)
    assert all(-1 <= cosine < 1 for cosine in cosines.values())


def test_an_edit_that_fails_before_its_first_step_gives_the_recording_back(model: Model, desk: EditDesk) -> None:

    def fail(*_: object) -> None:
        raise RuntimeError("the device is lost")

    hook = model.backbone.network.mid_block.register_forward_pre_hook(fail)
    try:
        # How far blocks follow the prompt is measured first.
        failed = desk.draw(masked_order(replace(SECOND.spec, prompt="a yellow square"), key="failed", any_prompt=False))
    finally:
        hook.remove()
    (recording,) = desk.source.recordings
    assert isinstance(failed.events[-1], JobFailed)
    assert recording.uses == 1
    assert recording.is_idle


def half_drawn(desk: EditDesk, order: EngineOrder) -> tuple[bytes, dict[str, bytes]]:
    """A checkpoint of an attempt that ends in the middle, and what it has decided."""
    drawing = desk.submit(order)
    while not drawing.all(JobCheckpointed):
        desk.turn()
    desk.engine.cancel(order.key)
    assert drawing.job is not None
    return drawing.all(JobCheckpointed)[-1].data, dict(drawing.job.decided)


def test_a_resumed_edit_whose_recording_is_gone_keeps_its_noise(model: Model, desk: EditDesk) -> None:
    whole = desk.draw(SECOND)
    checkpoint, decisions = half_drawn(desk, replace(SECOND, key="half"))
    elsewhere = EditDesk(model).draw(replace(SECOND, checkpoint=checkpoint, decisions=decisions))
    assert torch.equal(edited(elsewhere).noise, edited(whole).noise)
    assert torch.equal(outside(elsewhere.latents[0], SECOND), outside(whole.latents[0], SECOND))
    said = "the recording that an earlier attempt used is gone; step 2 is the first that was made without it"
    assert elsewhere.record.provenance.mask.computed_all_because == said
    assert not elsewhere.record.provenance.mask.recorded
    assert not elsewhere.record.exact
    assert elsewhere.record.provenance.mask.recording == desk.source.recordings[0].id


def test_an_attempt_that_finds_the_recording_goes_on_with_it(desk: EditDesk) -> None:
    whole = desk.draw(SECOND)
    checkpoint, decisions = half_drawn(desk, replace(SECOND, key="half"))
    resumed = desk.draw(replace(SECOND, key="resumed", checkpoint=checkpoint, decisions=decisions))
    assert 0 < resumed.record.provenance.blocks_reused < whole.record.provenance.blocks_reused
    torch.testing.assert_close(resumed.latents[0], whole.latents[0], atol=1e-5, rtol=0)


def test_an_attempt_that_began_with_its_own_noise_never_turns_to_a_recording(model: Model) -> None:
    desk = EditDesk(model)
    alone = EditDesk(model)
    whole = alone.draw(SECOND)
    assert whole.job is not None
    decisions = dict(whole.job.decided)
    desk.draw(FIRST)
    again = desk.draw(replace(SECOND, decisions=decisions))
    assert torch.equal(edited(again).noise, edited(whole).noise)
    assert again.record.exact
    assert again.record.provenance.mask.computed_all_because == "an earlier attempt began without the recording"


@pytest.mark.parametrize("decision", [b"\xff", EditDecision(recording="x").SerializeToString()])
def test_a_decision_that_nobody_has_made_is_refused(model: Model, decision: bytes) -> None:
    with pytest.raises(InvalidRequest):
        EditDesk(model).engine.submit(replace(FIRST, decisions={kinds.ACTIVATIONS: decision}))


def test_exact_edits_neither_read_nor_record(model: Model) -> None:
    desk = EditDesk(model)
    plain = replace(edit_order(SPEC, template(), LEFT), key="plain")
    before = desk.draw(plain)
    assert not desk.source.recordings
    assert not before.record.provenance.HasField("mask")
    desk.draw(FIRST)
    after = desk.draw(replace(plain, key="after"))
    assert torch.equal(before.latents[0], after.latents[0])
    assert after.record.exact


@pytest.mark.parametrize("late", [True, False])
def test_a_late_lora_leaves_no_recording(model: Model, late: bool) -> None:
    layers = {"style": {"unet": random_layers(model.backbone.network, 1)}}
    source = LorasByHand.of(layers, here=not late)
    source.text |= {"style"}
    desk = EditDesk(model, loras=source)
    order = replace(FIRST, spec=replace(FIRST.spec, loras=(lora_spec("style", bound=3),)))
    drawing = desk.submit(order)
    desk.turn()
    desk.turn()
    source.come("style")
    desk.run()
    assert drawing.record.provenance.mask.recorded is not late
    assert len(desk.source.recordings) == (0 if late else 1)
    if late:
        assert drawing.record.provenance.mask.computed_all_because.endswith("a LoRA arrived only after the first step")


def test_a_first_edit_that_redraws_all_records_nothing(model: Model) -> None:
    """It would take room, and give nobody anything."""
    desk = EditDesk(model)
    record = edit_record(desk, masked_order(mask=box_mask((0, 0, 64, 64)), key="full")).mask
    said = "it redraws the whole image, its mask's margin included"
    assert (record.recorded, record.computed_all_because) == (False, said)
    assert not desk.source.recordings
    assert edit_record(desk, SECOND).mask.recorded
    again = edit_record(desk, masked_order(mask=box_mask((0, 0, 64, 64)), key="again"))
    assert (again.blocks_reused, again.mask.computed_all_because) == (0, said)


def test_the_first_step_with_strength_1_is_neither_recorded_nor_taken(model: Model) -> None:
    """It begins with noise alone, outside the mask as well; other edits have the image there at its timestep."""
    desk = EditDesk(model)
    full = masked_order(replace(SPEC, strength=1.0), key="full")
    first = desk.draw(full)
    (recording,) = desk.source.recordings
    assert recording.step_count == 3
    assert first.job is not None
    assert rounded(first.job.requests[0].noise_levels[0]) not in {key.noise_level for key in recording.steps}
    # Half as large steps come by the same timestep, and record it.
    finer = edit_record(desk, masked_order(replace(SPEC, num_inference_steps=8), key="finer"))
    assert finer.mask.recorded
    assert rounded(first.job.requests[0].noise_levels[0]) in {key.noise_level for key in recording.steps}
    again = edit_record(desk, replace(full, key="again"))
    assert again.blocks_reused == again.blocks_total * 3 / 4
    alone = edit_record(desk, masked_order(replace(SPEC, strength=1.0, num_inference_steps=1), key="alone"))
    assert alone.mask.computed_all_because == "at strength 1 it begins with noise alone"


class _StaleJob(JobAddOn):
    def report(self, record: EngineRecord) -> None:
        record.provenance.controlnets.add(name="edges", end_step=4, stale_steps=1)


class _Stale(EngineAddOn):
    """ControlNets whose residuals were stale in one step."""

    kind: ClassVar[str] = "stale"

    def open(self, order: EngineOrder) -> JobAddOn:
        return _StaleJob()


def test_stale_residuals_leave_no_recording(model: Model) -> None:
    desk = EditDesk(model, addons=(_Stale(),))
    drawing = desk.draw(FIRST)
    assert not drawing.record.provenance.mask.recorded
    assert "stale" in drawing.record.provenance.mask.computed_all_because
    assert not desk.source.recordings


def test_an_edit_that_is_cancelled_leaves_no_recording(model: Model) -> None:
    desk = EditDesk(model)
    desk.submit(FIRST)
    desk.turn()
    assert len(desk.source.recordings) == 1
    desk.engine.cancel(FIRST.key)
    assert not desk.source.recordings
    assert desk.source.counts["given_up"] == 1


@pytest.mark.parametrize(
    ("fixed_rows", "mib", "because"), [(8, 64, "fixed_rows is set"), (0, 0, "keeps no activations")]
)
def test_a_worker_that_cannot_reuse_says_why(model: Model, fixed_rows: int, mib: int, because: str) -> None:
    threads = torch.get_num_threads()
    desk = EditDesk(model, mib=mib, fixed_rows=fixed_rows * threads)
    for order in (FIRST, SECOND):
        record = desk.draw(order).record
        assert record.exact
        assert record.provenance.HasField("mask")
        assert because in record.provenance.mask.computed_all_because
        assert 0 < record.provenance.mask.dilated_share < 0.6


def test_a_recording_without_room_is_given_up(model: Model) -> None:
    desk = EditDesk(model, mib=64)
    desk.source = type(desk.source)(1000)
    desk.edits.source = desk.source
    record = desk.draw(FIRST).record.provenance.mask
    assert record is not None
    assert not record.recorded
    assert record.computed_all_because.endswith("its activations do not fit into memory")
    assert not desk.source.recordings
