"""Edits whose recordings are elsewhere: what is loaded in time is taken, all else is computed, to the same picture."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from PIL import ImageOps
from torch import Tensor

from bottega.addons.edits.engine.recordings.source import MemoryActivations
from bottega.addons.edits.engine.recordings.step import MemoryStep
from bottega.addons.edits.engine.times import WorkCost, WorkFit
from bottega.engine.job import EngineOrder
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from tests.samples.activations_elsewhere import ActivationsElsewhere, StepElsewhere
from tests.samples.edits import template
from tests.samples.masked_edits import RIGHT, SPEC, EditDesk, masked_order
from tests.support.manual_engine import Drawing

FIRST = masked_order(key="first")
SECOND = masked_order(replace(SPEC, prompt="a red star", seed=6), key="second")
# What is taken from a recording is in half precision; see also test_recordings.
FLOAT16 = 0.02


class _Device(WorkFit):
    """per_flop_s: of a floating-point operation. So slow a device gives no block up because the host is busy: what
    takes it least is waited for 130 ms.
    """

    per_flop_s = 1e-6

    @property
    def cost(self) -> WorkCost:
        pace = self.per_flop_s
        return WorkCost(per_flop_s=pace, per_map_flop_s=pace, per_byte_s=0.0, fixed_s=0.0)


class LoadingDesk(EditDesk):
    """Its recordings can be moved elsewhere. device: that plans count with."""

    source: ActivationsElsewhere

    def __init__(self, model: Model) -> None:
        super().__init__(model)
        self.device = self.edits.times.fit = _Device()

    def make_source(self, budget_bytes: int) -> MemoryActivations:
        return ActivationsElsewhere(budget_bytes)

    def move(self, load_bytes_per_s: float = 1e9) -> list[StepElsewhere]:
        return self.source.move(load_bytes_per_s)


@pytest.fixture
def desk(model: Model) -> LoadingDesk:
    made = LoadingDesk(model)
    made.draw(FIRST)
    return made


def load_counts(desk: EditDesk) -> tuple[int, int]:
    return desk.edits.counts["blocks_loaded"], desk.edits.counts["blocks_recomputed"]


def assert_close(drawing: Drawing, other: Drawing, atol: float) -> None:
    for one, another in zip(drawing.latents, other.latents, strict=True):
        torch.testing.assert_close(one, another, atol=atol, rtol=0)


def test_what_is_loaded_gives_the_picture_that_memory_gives(desk: LoadingDesk) -> None:
    from_memory = desk.draw(SECOND)
    desk.move()
    loaded = desk.draw(replace(SECOND, key="loaded"))
    assert_close(loaded, from_memory, atol=0)
    assert loaded.record.provenance.blocks_reused == loaded.record.provenance.blocks_total == 24
    blocks, recomputed = load_counts(desk)
    assert blocks > 24, "feature maps are loaded, too"
    assert recomputed == 0


def test_what_does_not_come_is_waited_for_no_longer_than_its_computation_and_then_computed(desk: LoadingDesk) -> None:
    in_full = desk.drawings[FIRST.key]
    steps = desk.move()
    desk.source.comes, desk.device.per_flop_s = lambda name: False, 1e-10
    drawn = desk.draw(replace(FIRST, key="nothing came"))
    assert_close(drawn, in_full, FLOAT16)
    record = drawn.record
    assert record.provenance.HasField("mask")
    assert record.provenance.blocks_reused == 0
    assert record.provenance.mask.computed_all_because == "its recorded activations did not arrive in time"
    assert load_counts(desk)[0] == 0
    assert load_counts(desk)[1] > 24
    assert any(step.requested for step in steps)
    # The whole network in these steps, as a plan counts it.
    rows, size = 6, (16, 16)
    most_s = rows * 2 * sum(desk.edits.times.full_s(size))
    asked_s = sum(sum(step.waits_s) for step in steps)
    assert 0.0 < asked_s < most_s
    assert record.seconds["activations"] >= asked_s, "it waited so long, and on a busy machine longer"
    assert desk.edits.counts["load_wait_ms"] == pytest.approx(1000 * record.seconds["activations"], abs=50)


def test_all_is_taken_of_what_this_host_has_however_slow_loads_have_been(desk: LoadingDesk) -> None:
    from_memory = desk.draw(SECOND)
    for step in desk.move(load_bytes_per_s=1.0):
        step.mapped = True
    mapped = desk.draw(replace(SECOND, key="mapped"))
    assert_close(mapped, from_memory, atol=0)
    assert load_counts(desk)[1] == 0


def test_what_is_here_is_not_requested(desk: LoadingDesk) -> None:
    steps = desk.move()
    for step in steps:
        step.load()
    drawn = desk.draw(SECOND)
    assert drawn.record.provenance.blocks_reused == 24
    assert not any(step.requested for step in steps)
    assert load_counts(desk) == (0, 0)


def test_requests_of_an_edit_that_is_over_are_dropped_but_not_those_of_others(desk: LoadingDesk) -> None:
    steps = desk.move()
    third = masked_order(replace(SPEC, prompt="a yellow ring", seed=9), key="third")
    desk.submit(SECOND)
    desk.submit(third)
    (recording,) = desk.source.recordings
    while recording.readers < 2:
        desk.turn()
    assert any(step.requested for step in steps)
    desk.engine.cancel(SECOND.key)
    assert not any(step.drops for step in steps)
    desk.engine.cancel(third.key)
    assert any(step.drops for step in steps)


def test_a_step_elsewhere_is_copied_before_an_edit_completes_it(desk: LoadingDesk) -> None:
    steps = desk.move()
    before: dict[tuple[int, str], Tensor] = {}
    for step in steps:
        step.load()
        before |= {(id(step), name): step._outputs[name].clone() for name in step.names}
    (recording,) = desk.source.recordings
    share = recording.valid_share
    drawn = desk.draw(masked_order(replace(SPEC, prompt="a red star", seed=7), RIGHT, key="elsewhere"))
    assert drawn.record.provenance.mask.recorded
    assert recording.valid_share > share
    assert all(step.writable for step in recording.steps.values())
    for step in steps:
        for name in step.names:
            assert torch.equal(step._outputs[name], before[id(step), name])


def test_a_step_that_is_not_whole_here_is_read_and_not_completed(desk: LoadingDesk) -> None:
    desk.move()
    (recording,) = desk.source.recordings
    share = recording.valid_share
    drawn = desk.draw(masked_order(replace(SPEC, prompt="a red star", seed=7), RIGHT, key="elsewhere"))
    assert drawn.record.provenance.blocks_reused
    assert recording.valid_share == share


def test_a_recording_of_another_size_is_not_used(desk: LoadingDesk) -> None:
    (recording,) = desk.source.recordings
    recording.shape = (8, 8)
    drawn = desk.draw(replace(FIRST, key="again"))
    assert drawn.record.provenance.mask.computed_all_because == "the recording of this image has another size"
    assert recording.is_idle


def test_loads_in_a_busy_batch_change_nobodys_picture(desk: LoadingDesk) -> None:
    """Edits that load, or wait in vain, and plain jobs share turns: each edit is what its template's first one was."""
    other = masked_order(
        replace(SPEC, prompt="a yellow ring", seed=9), RIGHT, image=ImageOps.mirror(template()), key="other"
    )
    plain = EngineOrder(key="plain", spec=ResolvedSpec(prompt="a star", num_inference_steps=4, width=64, height=64))
    alone = {order.key: desk.draw(order) for order in (other, plain)} | {FIRST.key: desk.drawings[FIRST.key]}
    desk.move()
    turns = iter(range(10**6))
    desk.source.comes, desk.device.per_flop_s = lambda name: next(turns) % 3 > 0, 2e-9
    together = desk.run({0: [replace(order, key=("busy", order.key)) for order in (FIRST, other, plain)]})
    assert together["busy", "plain"].record.provenance.mean_group_requests > 1
    for key, tolerance in {FIRST.key: FLOAT16, other.key: FLOAT16, plain.key: 1e-4}.items():
        assert_close(together["busy", key], alone[key], tolerance)
    loaded, recomputed = load_counts(desk)
    assert loaded > 0
    assert recomputed > 0


def test_the_planned_seconds_of_steps_that_load_are_noted_for_the_gateway(desk: LoadingDesk) -> None:
    assert not list(desk.edits.step_table.entries())
    desk.draw(SECOND)
    assert not list(desk.edits.step_table.entries()), "all of it is here"
    desk.move()
    desk.draw(replace(SECOND, key="loaded"))
    entries = list(desk.edits.step_table.entries())
    assert {shape for shape, _, _ in entries} == {(16, 16)}
    whole_s = sum(desk.edits.times.full_s((16, 16)))
    for _, rows, seconds in entries:
        assert 0 < rows < 2
        assert 0 < seconds < 2 * whole_s * 1.01


def test_a_tensor_of_another_shape_is_not_taken(desk: LoadingDesk) -> None:
    """A store that lies costs no more than its lie is worth."""
    (recording,) = desk.source.recordings
    name = desk.edits.blocks[0]
    for step in recording.steps.values():
        assert isinstance(step, MemoryStep)
        tokens, channels = step.outputs[name].shape
        step.outputs[name] = step.outputs[name].reshape(channels, tokens)
    drawn = desk.draw(replace(FIRST, key="again"))
    assert drawn.record.provenance.blocks_reused == drawn.record.provenance.blocks_total - 6
    assert_close(drawn, desk.drawings[FIRST.key], FLOAT16)


def test_a_store_s_profile_counts_until_blocks_are_measured_here(desk: LoadingDesk) -> None:
    size, (recording,) = (16, 16), desk.source.recordings
    theirs = desk.edits.profile_blocks(desk.engine, 64, 64)
    other = LoadingDesk(desk.edits.model)
    other.draw(FIRST)
    other.source.recordings[0].profile = theirs
    other.draw(SECOND)
    assert other.edits.times.profile(size) == theirs
    ours = other.edits.profile_blocks(other.engine, 64, 64)
    other.draw(replace(SECOND, key="again"))
    assert other.edits.times.profile(size) == ours != theirs
    assert recording.profile is None
