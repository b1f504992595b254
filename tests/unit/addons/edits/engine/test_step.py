"""Keys and values that are kept beside a recording: the same result with less work, and only where they hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from diffusers import UNet2DConditionModel
from torch import Tensor, nn

from bottega.addons.edits.engine.activations import Projections
from bottega.addons.edits.engine.masked.backbone import MaskedBackbone
from bottega.addons.edits.engine.recordings.recording import Recording, RecordingKey, StepKey
from bottega.addons.edits.engine.recordings.source import MemoryActivations
from bottega.addons.edits.engine.recordings.step import MemoryStep, ProjectionsRoom, StepProjections
from bottega.addons.edits.engine.sparse import SparseMaps
from bottega.model.model import Model
from bottega.model.rows import Half, Row
from tests.samples.masked_edits import SPEC, EditDesk, masked_order
from tests.samples.masked_networks import StepInMemory, box, denoiser_of, masked, plain_row, recording, small_unet

# Sums over other numbers of tokens have other last bits.
EXACT = 1e-5
ROOM = 1 << 30
SMALL, LARGE, ELSEWHERE = box(4, 4, 3, 3), box(2, 2, 8, 8), box(10, 10, 4, 4)
FULL_TOKENS, SMALL_TOKENS = 64, 9
"""Of the finest level with attention: all, and those under SMALL."""


@pytest.fixture(scope="module")
def unet() -> UNet2DConditionModel:
    return small_unet(down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"))


def template(unet: UNet2DConditionModel) -> StepInMemory:
    recorded = StepInMemory()
    denoise(unet, [recording(plain_row(1), recorded)])
    return recorded


def denoise(unet: UNet2DConditionModel, rows: Sequence[Row]) -> list[Tensor]:
    backbone = MaskedBackbone(unet, maps=SparseMaps())
    prediction = denoiser_of(unet, backbone).predict(rows)
    return [prediction.noise[row] for row in rows]


def keeping(recorded: StepInMemory, kept: StepProjections) -> StepInMemory:
    return replace(recorded, projections=kept)


def with_room(room_bytes: int = ROOM) -> StepProjections:
    return StepProjections(ProjectionsRoom(left_bytes=room_bytes))


@contextmanager
def projected(unet: UNet2DConditionModel) -> Iterator[list[int]]:
    """Tokens of each call of the second block's projection of keys, at the finest level with attention."""
    seen: list[int] = []
    layer = unet.get_submodule("up_blocks.1.attentions.0.transformer_blocks.1.attn1.to_k")
    assert isinstance(layer, nn.Linear)
    handle = layer.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].shape[:-1].numel()))
    try:
        yield seen
    finally:
        handle.remove()


def test_a_later_edit_projects_its_own_tokens_alone_and_draws_the_same(unet: UNet2DConditionModel) -> None:
    recorded, kept = template(unet), with_room()
    with projected(unet) as tokens:
        for number, seed in enumerate((2, 3, 4)):
            row = plain_row(seed)
            (plain,) = denoise(unet, [masked(row, recorded, SMALL)])
            (ours,) = denoise(unet, [masked(row, keeping(recorded, kept), SMALL)])
            assert (ours - plain).abs().max() < EXACT, number
    assert tokens[::2] == [FULL_TOKENS] * 3
    assert tokens[1] == FULL_TOKENS, "the first one makes them"
    assert tokens[3] == tokens[5] < SMALL_TOKENS + 8


def test_what_an_edit_computed_itself_is_no_part_of_them(unet: UNet2DConditionModel) -> None:
    recorded, kept = template(unet), with_room()
    denoise(unet, [masked(plain_row(2), keeping(recorded, kept), LARGE)])
    whole = []
    with projected(unet) as tokens:
        for mask in (SMALL, LARGE, ELSEWHERE, SMALL, ELSEWHERE):
            row = plain_row(5)
            (plain,) = denoise(unet, [masked(row, recorded, mask)])
            tokens.clear()
            (ours,) = denoise(unet, [masked(row, keeping(recorded, kept), mask)])
            assert (ours - plain).abs().max() < EXACT
            whole.append(tokens == [FULL_TOKENS])
    # Of LARGE's tokens nothing is known until an edit leaves them alone.
    assert whole == [True, False, True, False, False]


def test_rows_of_several_edits_and_plain_ones_share_a_forward(unet: UNet2DConditionModel) -> None:
    first, second, plain = template(unet), template(unet), plain_row(9)
    kept = [with_room(), with_room()]

    def rows(number: int, *, keeps: bool) -> list[Row]:
        sides = [keeping(each, by) if keeps else each for each, by in zip((first, second), kept, strict=True)]
        return [
            masked(plain_row(number), sides[0], SMALL),
            plain,
            masked(plain_row(number + 1), sides[1], ELSEWHERE),
        ]

    for number in (2, 4):
        wanted = denoise(unet, rows(number, keeps=False))
        ours = denoise(unet, rows(number, keeps=True))
        assert max(float((one - other).abs().max()) for one, other in zip(ours, wanted, strict=True)) < EXACT
    assert all(each.size_bytes for each in kept)


def test_a_row_that_records_gets_all_that_blocks_put_out(unet: UNet2DConditionModel) -> None:
    recorded, kept = template(unet), with_room()
    for seed in (2, 3):
        denoise(unet, [masked(plain_row(seed), keeping(recorded, kept), SMALL)])
    wanted, sink = StepInMemory(), StepInMemory()
    row = plain_row(4)
    denoise(unet, [masked(row, recorded, SMALL, wanted)])
    denoise(unet, [masked(row, keeping(recorded, kept), SMALL, sink)])
    assert sink.outputs.keys() == wanted.outputs.keys()
    assert all(torch.allclose(sink.outputs[name], wanted.outputs[name], atol=2e-3) for name in wanted.outputs)


def of_bytes(count: int) -> Projections:
    half = torch.zeros(count // 8, 1)
    return Projections(keys=half, values=half.clone(), unknown=0)


def test_their_room_shrinks_by_what_is_kept_and_a_newer_one_takes_the_older_ones_place() -> None:
    room = ProjectionsRoom(left_bytes=1000)
    kept = StepProjections(room)
    kept.put({"one": of_bytes(800)})
    kept.put({"two": of_bytes(800)})
    assert (kept.get("two"), kept.size_bytes) == (None, 800)
    newer = of_bytes(800)
    kept.put({"one": newer})
    assert (kept.get("one"), kept.size_bytes, room.left_bytes) == (newer, 800, 200)


def test_how_much_room_there_is_is_looked_up_once_a_turn(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many edits share it: adding up what all recordings take is long where there are many."""
    desk, looks = EditDesk(model), []

    def spare_bytes(memory: MemoryActivations) -> int:
        looks.append(memory)
        return 1000

    desk.draw(masked_order(key="first"))
    monkeypatch.setattr(MemoryActivations, "spare_bytes", property(spare_bytes))
    for seed in range(3):
        desk.submit(masked_order(replace(SPEC, seed=seed), key=seed))
    turns = 0
    while desk.engine.busy:
        desk.turn()
        turns += 1
    assert 3 <= len(looks) <= turns < 18, "three edits of three steps and two rows"
    assert desk.edits.projections_room.left_bytes == 1000


def a_recording(memory: MemoryActivations, template: str) -> Recording:
    begun = memory.begin(RecordingKey(model_hash="m", dtype="float32", template=template), (4, 4))
    assert begun is not None
    outputs = {"block": torch.zeros(50, 1, dtype=torch.float16)}
    begun.add(
        StepKey(timestep=1.0, noise_level=1.0, half=Half.CONDITIONAL), outputs, torch.ones(4, 4, dtype=torch.bool)
    )
    memory.complete(begun)
    return begun


def test_they_count_in_the_budget_and_go_before_any_recording_does() -> None:
    memory = MemoryActivations(1000)
    old, new = a_recording(memory, "old"), a_recording(memory, "new")
    (step,) = old.all_steps
    kept = old.projections(step, ProjectionsRoom(left_bytes=memory.spare_bytes))
    kept.put({"block": of_bytes(800)})
    assert (old.held_bytes, memory.spare_bytes) == (900, 0)
    assert memory.make_room(700)
    assert (old.held_bytes, memory.spare_bytes) == (100, 800)
    assert {each.key.template for each in memory.recordings} == {"old", "new"}
    assert new.held_bytes == 100


def test_a_step_that_is_replaced_takes_them_with_it() -> None:
    recording = a_recording(MemoryActivations(1000), "t")
    (key,) = recording.steps
    recording.projections(recording.steps[key], ProjectionsRoom(left_bytes=800)).put({"block": of_bytes(800)})
    recording.add(key, {"block": torch.zeros(50, 1, dtype=torch.float16)}, torch.ones(4, 4, dtype=torch.bool))
    assert recording.held_bytes == 100


def test_links_may_ask_how_much_there_is_while_the_engine_keeps_more() -> None:
    recording = a_recording(MemoryActivations(ROOM), "t")
    room = ProjectionsRoom(left_bytes=ROOM)
    steps = [MemoryStep(valid=torch.ones(1, 1, dtype=torch.bool), outputs={}) for _ in range(2000)]
    over = threading.Event()
    failures: list[BaseException] = []

    def ask() -> None:
        try:
            while not over.is_set():
                assert recording.held_bytes >= 100
        except BaseException as error:  # noqa: BLE001 - it is raised below
            failures.append(error)

    asking = threading.Thread(target=ask)
    asking.start()
    for _ in range(5):
        for step in steps:
            recording.projections(step, room)
        recording.drop_projections()
    over.set()
    asking.join(10.0)
    assert not failures
