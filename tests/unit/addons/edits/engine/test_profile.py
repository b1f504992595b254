"""The measured seconds of blocks, and the blocks of a template that are recorded where not all may be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bottega.addons.edits.engine.masked.work import BlockKind, blocks_of
from bottega.addons.edits.engine.profile import kept_names
from bottega.device.devices import CpuDevice
from bottega.engine.job import EngineOrder
from bottega.engine.spec import ResolvedSpec
from bottega.errors import InvalidRequest, MethodNotServed, TooLarge, Unavailable
from bottega.model.model import Model
from bottega.v1.activations_pb2 import BlockCost, BlockProfile
from tests.samples.masked_edits import EditDesk
from tests.samples.masked_networks import LATENT, small_unet

SIZE = (8, 8)


def test_every_block_is_measured_in_full_and_at_each_share(model: Model) -> None:
    desk = EditDesk(model)
    profile = desk.edits.profile_blocks(desk.engine, 0, 0)
    blocks = desk.edits.times.blocks(SIZE)
    assert [block.name for block in profile.blocks] == [block.name for block in blocks]
    assert [block.size_bytes for block in profile.blocks] == [block.size_bytes for block in blocks]
    assert list(profile.shares) == [0.05, 0.2, 0.4]
    for block in profile.blocks:
        assert block.full_s > 0
        assert len(block.masked_s) == 3
        assert all(seconds > 0 for seconds in block.masked_s)
    assert sum(block.full_s for block in profile.blocks) <= profile.forward_s * 1.2
    assert (profile.width, profile.height) == (32, 32)
    assert (profile.model_hash, profile.dtype) == (model.digest, "float32")


class CountingDevice(CpuDevice):
    """waits: how often it was waited for."""

    waits = 0

    def synchronize(self) -> None:
        self.waits += 1


def test_the_device_that_is_waited_for_is_the_models_own(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: pytest.fail("the current device may be another one"))
    device = CountingDevice()
    desk = EditDesk(replace(model, runtime=device))
    desk.edits.profile_blocks(desk.engine, 0, 0)
    assert device.waits > len(desk.edits.times.blocks(SIZE))


def test_plans_count_with_what_was_measured_of_this_size_alone(model: Model) -> None:
    desk = EditDesk(model)
    times = desk.edits.times
    profile = desk.edits.profile_blocks(desk.engine, 32, 32)
    assert times.profile(SIZE) == profile
    assert times.profile((16, 16)) is None
    full_s, known = times.full_s(SIZE), [block.full_s for block in profile.blocks]
    scale = full_s[0] / known[0]
    assert full_s == pytest.approx([scale * seconds for seconds in known])


def test_what_cannot_be_measured_is_refused(model: Model) -> None:
    desk = EditDesk(model)
    with pytest.raises(InvalidRequest, match="width"):
        desk.edits.profile_blocks(desk.engine, 63, 64)
    with pytest.raises(TooLarge, match="max_pixels"):
        desk.edits.profile_blocks(desk.engine, 8192, 8192)
    without = EditDesk(model, mib=0)
    with pytest.raises(MethodNotServed, match="keeps no activations"):
        without.edits.profile_blocks(without.engine, 0, 0)
    desk.submit(
        EngineOrder(key="plain", spec=ResolvedSpec(prompt="a star", num_inference_steps=4, width=64, height=64))
    )
    with pytest.raises(Unavailable, match="draws pictures now"):
        desk.edits.profile_blocks(desk.engine, 0, 0)


BLOCKS = blocks_of(small_unet(), LATENT)
TOTAL = sum(block.size_bytes for block in BLOCKS)


def profile(*saving: str) -> BlockProfile:
    """One by which these blocks alone save anything."""
    costs = [
        BlockCost(name=block.name, full_s=1.0, masked_s=[0.5, 0.5 if block.name in saving else 1.0, 0.5])
        for block in BLOCKS
    ]
    return BlockProfile(shares=[0.05, 0.2, 0.4], blocks=costs)


def test_all_is_recorded_where_there_is_room() -> None:
    assert kept_names(BLOCKS, budget_bytes=0, forwards=6) is None
    assert kept_names(BLOCKS, budget_bytes=6 * TOTAL, forwards=6) is None


def test_a_budget_is_that_of_all_forwards_and_whole_blocks_are_recorded() -> None:
    kept = kept_names(BLOCKS, budget_bytes=6 * TOTAL // 2, forwards=6)
    assert kept
    taken = [block for block in BLOCKS if kept.issuperset(block.names)]
    assert sum(block.size_bytes for block in taken) <= TOTAL // 2
    assert kept == {name for block in taken for name in block.names}
    assert any(block.kind is BlockKind.TRANSFORMER for block in taken)


def test_nothing_is_recorded_where_no_block_has_room() -> None:
    assert kept_names(BLOCKS, budget_bytes=6, forwards=6) == frozenset()


def test_what_was_measured_counts_more_than_operations() -> None:
    worst = min(BLOCKS, key=lambda block: block.flops / block.size_bytes)
    kept = kept_names(BLOCKS, budget_bytes=TOTAL - 1, forwards=1, profile=profile(worst.name))
    assert kept == frozenset(worst.names)
