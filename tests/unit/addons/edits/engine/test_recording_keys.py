"""What a recording is found by, and which of its steps: images, LoRAs and noise, but no sampler."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from bottega import rules
from bottega.addons.edits.engine.recordings.keys import rounded
from bottega.engine.spec import ControlSpec
from bottega.model.model import Model
from bottega.model.samplers import KARRAS, Sampler, SamplerKind
from tests.samples.engine_loras import lora_spec
from tests.samples.masked_edits import (
    ELSEWHERE,
    FIRST,
    SECOND,
    SPEC,
    EditDesk,
    masked_order,
)


def test_other_images_loras_and_sizes_are_other_templates(model: Model) -> None:
    desk = EditDesk(model)
    desk.draw(FIRST)
    flipped = replace(SECOND, image=torch.flip(FIRST.image, (1,)) if FIRST.image is not None else None)
    drawing = desk.draw(flipped)
    assert drawing.record.edit is not None
    assert not drawing.record.edit.blocks_reused
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


def test_timesteps_that_were_not_recorded_are_computed_and_added(model: Model) -> None:
    desk = EditDesk(model)
    desk.draw(FIRST)
    (recording,) = desk.source.recordings
    assert recording.step_count == 3
    other = replace(SECOND, spec=replace(SECOND.spec, num_inference_steps=7))
    first = desk.draw(other)
    assert first.record.edit is not None
    assert 0 < first.record.edit.blocks_reused < first.record.edit.blocks_total / 2  # the last one is the same
    assert first.record.edit.recorded
    assert recording.step_count > 3
    again = desk.draw(replace(other, key="again"))
    assert again.record.edit is not None
    assert again.record.edit.blocks_reused == again.record.edit.blocks_total


def test_at_one_timestep_all_samplers_give_the_model_the_same_input(model: Model) -> None:
    """So that the sampler is no part of what a recording is found by."""
    generator = torch.Generator().manual_seed(0)
    latent, noise = torch.randn(2, 1, 4, 16, 16, generator=generator)
    inputs: dict[float, Tensor] = {}
    met = 0
    for kind in SamplerKind:
        sampler = Sampler(kind, model.scheduler_config, steps=10)
        for step in range(sampler.steps):
            sampler = Sampler(kind, model.scheduler_config, steps=10, begin=step)
            timestep = float(sampler.timestep(step))
            given = sampler.model_input(sampler.add_noise(latent, noise, step), step)
            if timestep in inputs:
                met += 1
                torch.testing.assert_close(given, inputs[timestep], atol=1e-4, rtol=0)
            inputs.setdefault(timestep, given)
    assert met >= 10


def test_a_recording_serves_edits_with_another_sampler(model: Model) -> None:
    desk = EditDesk(model)
    desk.draw(FIRST)
    other = desk.draw(replace(SECOND, spec=replace(SECOND.spec, sampler=SamplerKind.EULER_ANCESTRAL)))
    assert other.record.edit is not None
    assert other.record.edit.blocks_reused == other.record.edit.blocks_total


def test_of_two_steps_at_one_timestep_each_takes_what_its_own_noise_made(model: Model) -> None:
    """Karras' sigmas of DPM++, whose timesteps are rounded: each step has a recording of its own."""
    karras = replace(SPEC, sampler=SamplerKind.DPMPP_2M, use_karras_sigmas=True, num_inference_steps=60, strength=0.1)
    desk = EditDesk(model)
    first = desk.draw(masked_order(karras, key="first"))
    (recording,) = desk.source.recordings
    assert recording.step_count == 6
    assert len({key.timestep for key in recording.steps}) < 6
    again = desk.draw(masked_order(karras, key="again"))
    assert again.record.edit is not None
    assert again.record.edit.blocks_reused == again.record.edit.blocks_total
    # Activations are kept in float16.
    torch.testing.assert_close(again.latents[0], first.latents[0], atol=2e-3, rtol=0)


def test_a_recording_with_karras_sigmas_is_not_taken_for_other_noise_at_its_timesteps(model: Model) -> None:
    karras = replace(SPEC, sampler=SamplerKind.DPMPP_2M, use_karras_sigmas=True, num_inference_steps=60, strength=0.1)
    desk = EditDesk(model)
    desk.draw(masked_order(karras, key="karras"))
    (recording,) = desk.source.recordings
    order = masked_order(replace(SPEC, num_inference_steps=100, strength=0.1), key="plain")
    plain = desk.draw(order)
    assert plain.job is not None
    request = plain.job.requests[0]
    timesteps = {request.timestep_of(step) for step in range(request.begin, request.end)}
    assert timesteps & {key.timestep for key in recording.steps}, "else there is nothing to tell apart"
    assert plain.record.edit is not None
    assert plain.record.edit.blocks_reused == 0
    assert plain.record.edit.computed_all_because == "the recording has none of its steps"


def test_keys_tell_all_steps_apart_though_the_last_bits_of_their_noise_do_not_count(model: Model) -> None:
    """Two kinds of processors compute those otherwise, and their workers may share a store."""
    told_apart = levels = 0
    for kind in SamplerKind:
        for karras in (False, True) if kind in KARRAS else (False,):
            for count in range(1, rules.MAX_STEPS + 1, 3):
                sampler = Sampler(kind, model.scheduler_config, steps=count, karras=karras)
                said = [sampler.noise_level(step) for step in range(count)]
                keys = [rounded(level) for level in said]
                assert len(set(keys)) == count
                assert all(math.isclose(key, level, rel_tol=5e-5) for key, level in zip(keys, said, strict=True))
                elsewhere = [rounded(float(np.nextafter(np.float32(level), np.float32(np.inf)))) for level in said]
                told_apart += sum(key != other for key, other in zip(keys, elsewhere, strict=True))
                levels += count
    assert told_apart < levels / 50
