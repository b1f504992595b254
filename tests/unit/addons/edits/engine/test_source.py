"""Recordings in a worker's memory: whole templates within a budget, none under a job that uses it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from bottega.addons.edits.engine.recordings.image_reader import whole_cells
from bottega.addons.edits.engine.recordings.recording import DrawnTemplate, Recording, RecordingKey, StepKey
from bottega.addons.edits.engine.recordings.source import MemoryActivations
from bottega.addons.edits.engine.recordings.step_access import StepCompleter, StepReader, StepRecorder, level_of
from bottega.model.rows import Half
from tests.support.staged_device import StagedDevice

# Of one step of a recording here: 16 tokens of 8 channels, and a map of 8x8 with 2, in two bytes.
STEP_BYTES = (16 * 8 + 2 * 64) * 2
VALID = torch.ones(8, 8, dtype=torch.bool)


def key(template: str) -> RecordingKey:
    return RecordingKey(model_hash="ab", dtype="float32", template=template)


def step(timestep: float) -> StepKey:
    return StepKey(timestep=timestep, noise_level=1.0, half=Half.CONDITIONAL)


def drawn() -> DrawnTemplate:
    return DrawnTemplate(image_latent=torch.zeros(1, 4, 8, 8), noise=torch.zeros(1, 4, 8, 8), seed=3)


def outputs(value: float = 1.0) -> StepRecorder:
    sink = StepRecorder()
    sink.put("block", torch.full((16, 8), value))
    sink.put("resnet:map", torch.full((2, 8, 8), value))
    return sink


def record(memory: MemoryActivations, template: str, steps: int = 2) -> Recording:
    begun = memory.begin(key(template), (8, 8), drawn())
    assert begun is not None
    assert memory.reserve(begun, steps * STEP_BYTES)
    for number in range(steps):
        begun.add(step(number), outputs().outputs, VALID)
    memory.complete(begun)
    return begun


@pytest.fixture
def memory() -> MemoryActivations:
    """With room for three recordings of two steps."""
    clock: Iterator[int] = iter(range(1000))
    return MemoryActivations(6 * STEP_BYTES, clock=lambda: float(next(clock)))


def test_the_template_used_longest_ago_goes_first_and_as_a_whole(memory: MemoryActivations) -> None:
    for template in "abc":
        assert record(memory, template).size_bytes == 2 * STEP_BYTES
    used = memory.find(key("a"))
    assert used is not None
    memory.release(used)
    record(memory, "d")
    assert memory.find(key("b")) is None
    assert [each.key.template for each in memory.recordings] == ["d", "a", "c"]
    assert memory.counts["evictions"] == 1
    assert sum(each.size_bytes for each in memory.recordings) <= memory.budget_bytes


def test_a_recording_in_use_is_never_evicted(memory: MemoryActivations) -> None:
    for template in "abc":
        record(memory, template)
    held = [memory.find(key(template)) for template in "abc"]
    begun = memory.begin(key("d"), (8, 8), drawn())
    assert begun is not None
    assert not memory.reserve(begun, STEP_BYTES)
    assert len(memory.recordings) == 4
    assert held[0] is not None
    memory.release(held[0])
    assert memory.reserve(begun, STEP_BYTES)
    assert memory.find(key("a")) is None


def test_one_job_records_a_template_and_nobody_reads_it_before_it_is_whole(memory: MemoryActivations) -> None:
    begun = memory.begin(key("a"), (8, 8), drawn())
    assert begun is not None
    assert memory.begin(key("a"), (8, 8), drawn()) is None
    assert memory.find(key("a")) is None
    memory.abandon(begun)
    assert memory.begin(key("a"), (8, 8), drawn()) is not None
    assert memory.counts["given_up"] == 1


def test_recordings_are_dropped_by_the_beginning_of_their_ids_but_for_those_in_use(memory: MemoryActivations) -> None:
    one, other = record(memory, "a"), record(memory, "b")
    assert memory.find(key("b")) is other
    assert memory.drop(one.id[:8]) == 1
    assert memory.drop("") == 0
    memory.release(other)
    assert memory.drop("") == 1
    assert not memory.recordings


# What a recording holds.


def test_what_is_read_is_what_was_put_in_half_precision(memory: MemoryActivations) -> None:
    recording = record(memory, "a")
    reader = StepReader(recording.steps[step(0)], torch.device("cpu"))
    taken = reader.get("block")
    assert taken is not None
    assert taken.dtype == torch.float16
    assert torch.equal(taken, torch.ones(16, 8, dtype=torch.float16))
    assert reader.get("another block") is None
    assert reader.reused == {"block"}


def test_what_a_store_has_mapped_goes_to_the_device_through_pinned_memory(
    memory: MemoryActivations, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = StagedDevice()
    monkeypatch.setattr("bottega.addons.edits.engine.recordings.step_access.open_device", lambda _: device)
    recorded = record(memory, "a").steps[step(0)]
    reader = StepReader(recorded, torch.device("cpu"))
    taken, stored = reader.get("block"), reader.stored("block")
    assert taken is not None
    assert stored is not None
    assert device.staged == 1
    assert taken.data_ptr() != stored.data_ptr()
    assert torch.equal(taken, stored)
    assert reader.stored("block") is stored


def test_a_copy_is_kept_and_beyond_half_precision_is_noticed() -> None:
    sink, live = StepRecorder(), torch.ones(16, 8)
    sink.put("block", live)
    live.zero_()
    kept = sink.get("block")
    assert kept is not None
    assert bool(kept.all())
    assert sink.finite
    sink.put("block", torch.full((16, 8), 1e6))
    assert not sink.finite


def test_a_completed_area_is_written_at_every_level_and_nothing_else(memory: MemoryActivations) -> None:
    recording = record(memory, "a")
    area = torch.zeros(8, 8, dtype=torch.bool)
    area[:4, 4:] = True
    completer = StepCompleter(recording.steps[step(0)], area)
    for name, output in outputs(5.0).outputs.items():
        completer.put(name, output)
    completer.put("new", torch.zeros(16, 8))
    assert completer.write()
    tokens, whole = recording.steps[step(0)].get("block"), recording.steps[step(0)].get("resnet:map")
    assert tokens is not None
    assert whole is not None
    assert torch.equal(tokens[:, 0].reshape(4, 4) == 5, area[::2, ::2])
    assert torch.equal(whole[0] == 5, area)
    assert "new" not in recording.steps[step(0)].names
    untouched = recording.steps[step(1)].get("block")
    assert untouched is not None
    assert bool((untouched == 1).all())


@pytest.mark.parametrize("value", [1e6, float("nan")], ids=["beyond float16", "nan"])
def test_an_area_with_anything_beyond_half_precision_is_not_written(memory: MemoryActivations, value: float) -> None:
    recording = record(memory, "a")
    area = torch.zeros(8, 8, dtype=torch.bool)
    area[:4, 4:] = True
    completer = StepCompleter(recording.steps[step(0)], area)
    completer.put("block", torch.full((16, 8), 5.0))
    completer.put("resnet:map", torch.full((2, 8, 8), value))
    assert not completer.write()
    for name in recording.steps[step(0)].names:
        kept = recording.steps[step(0)].get(name)
        assert kept is not None
        assert bool((kept == 1).all())


def test_steps_with_equal_maps_share_one_and_growing_one_leaves_the_others(memory: MemoryActivations) -> None:
    begun = memory.begin(key("a"), (8, 8), drawn())
    assert begun is not None
    half = VALID.clone()
    half[:, 4:] = False
    for number in range(2):
        begun.add(step(number), outputs().outputs, half.clone())
    first, second = begun.steps[step(0)], begun.steps[step(1)]
    assert first.valid is second.valid
    begun.grow(first, ~half, prompt="")
    assert bool(first.valid.all())
    assert begun.valid_share == 0.5
    begun.grow(second, ~half, prompt="")
    assert first.valid is second.valid


def test_the_level_of_tokens_is_found_by_their_number_rounded_up() -> None:
    assert [level_of((8, 8), tokens) for tokens in (64, 16, 1)] == [(8, 8), (4, 4), (1, 1)]
    assert level_of((7, 9), 20) == (4, 5)
    with pytest.raises(ValueError, match="no level"):
        level_of((8, 8), 17)


def test_whole_cells_are_those_without_a_gap() -> None:
    area = torch.ones(5, 6, dtype=torch.bool)
    area[1, 1] = False
    cells = whole_cells(area, 2)
    assert not cells[:2, :2].any()
    assert bool(cells[:2, 2:].all())
    assert bool(cells[2:].all())
