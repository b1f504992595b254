"""Which blocks of a template are recorded where not all may be."""

from __future__ import annotations

from bottega.addons.edits.engine.loading.profile import kept_names
from bottega.addons.edits.engine.masked.work import BlockKind, blocks_of
from bottega.v1.activations_pb2 import BlockCost, BlockProfile
from tests.samples.masked_networks import LATENT, small_unet

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


def test_a_profile_of_another_network_says_nothing() -> None:
    budget_bytes = TOTAL // 2
    other = BlockProfile(shares=[0.2], blocks=[BlockCost(name="another", full_s=2.0, masked_s=[1.0])])
    assert kept_names(BLOCKS, budget_bytes=budget_bytes, forwards=1, profile=other) == kept_names(
        BLOCKS, budget_bytes=budget_bytes, forwards=1
    )
