"""What a block profile says of templates: sizes, savings, and what a budget keeps."""

from __future__ import annotations

import pytest

from bottega.addons.edits.client.cli_profile import HALVES, worth
from bottega.addons.edits.client.types import profile_from
from bottega.v1.activations_pb2 import BlockProfile

MIB = 1 << 20
STEPS = 10
ATTENTION = "down_blocks.1.attentions.0"


def _profile() -> BlockProfile:
    """Two blocks of a transformer that save 6 ms a MiB at a fifth, a resnet that saves 1, and one that costs some."""
    profile = BlockProfile(dtype="float32", width=64, height=64, shares=[0.05, 0.21, 0.4], forward_s=0.030)
    for place in range(2):
        name = f"{ATTENTION}.transformer_blocks.{place}"
        profile.blocks.add(name=name, size_bytes=MIB, full_s=0.008, masked_s=[0.001, 0.002, 0.004])
    profile.blocks.add(name="up_blocks.0.resnets.0", size_bytes=4 * MIB, full_s=0.006, masked_s=[0.001, 0.002, 0.003])
    profile.blocks.add(name="conv_out", size_bytes=MIB, full_s=0.001, masked_s=[0.002, 0.003, 0.004])
    return profile


def test_what_saves_most_for_its_bytes_comes_first_siblings_together() -> None:
    found = worth(profile_from(_profile()), steps=STEPS, budget_bytes=0)
    assert [group.name for group in found.groups] == [ATTENTION, "up_blocks.0.resnets.0", "conv_out"]
    first, _, last = found.groups
    assert (first.blocks, first.kept, first.size_bytes) == (2, 2, 2 * MIB)
    assert first.saved_s_per_mib == pytest.approx(0.006)
    assert (last.kept, last.saved_s < 0) == (1, True), "all have room"
    assert found.share == 0.21, "the nearest to a fifth"


def test_a_template_has_both_halves_of_every_step() -> None:
    found = worth(profile_from(_profile()), steps=STEPS, budget_bytes=0)
    assert found.template_bytes == HALVES * STEPS * 7 * MIB
    assert found.kept_bytes == found.template_bytes
    assert (found.kept, found.blocks, found.kept_share) == (4, 4, 1.0)
    assert found.masked_s == pytest.approx(0.030 - 0.012 - 0.004)


def test_a_budget_keeps_what_saves_most_and_says_how_much_that_is() -> None:
    found = worth(profile_from(_profile()), steps=STEPS, budget_bytes=HALVES * STEPS * 3 * MIB)
    assert [group.kept for group in found.groups] == [2, 0, 0]
    assert found.kept_bytes == HALVES * STEPS * 2 * MIB
    assert found.kept_share == pytest.approx(12 / 16)
    nearly_all = worth(profile_from(_profile()), steps=STEPS, budget_bytes=HALVES * STEPS * 7 * MIB - 1)
    assert [group.kept for group in nearly_all.groups] == [2, 1, 0], "what costs more than it saves goes first"
