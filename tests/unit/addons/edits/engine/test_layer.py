"""Statistics of feature maps of which parts are computed and the rest is recorded."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

from bottega.addons.edits.engine.masked.tokens import adjacent
from bottega.addons.edits.engine.sparse import layer as norms
from bottega.addons.edits.engine.sparse.layer import RecordedStatistics, Statistics, moments, of_tiles, scale_and_shift
from bottega.addons.edits.engine.sparse.pieces import Rectangle

GROUPS, CHANNELS, SIZE = 4, 12, 16
FIRST = (Rectangle(top=2, left=3, height=5, width=4), Rectangle(top=9, left=9, height=7, width=3))
SECOND = (Rectangle(top=0, left=0, height=16, width=6),)
ALL = (Rectangle(top=0, left=0, height=SIZE, width=SIZE),)


def feature_map(seed: int) -> Tensor:
    """Far from zero, where differences of squares would have no digits left."""
    made = torch.randn(CHANNELS, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    return made * 0.2 + 30.0 + seed


def trained(seed: int) -> nn.GroupNorm:
    norm = nn.GroupNorm(GROUPS, CHANNELS, eps=1e-6)
    generator = torch.Generator().manual_seed(seed)
    norm.weight.data = torch.randn(CHANNELS, generator=generator)
    norm.bias.data = torch.randn(CHANNELS, generator=generator)
    return norm


def parts(norm: nn.GroupNorm, recorded: Tensor, now: Tensor, rectangles: tuple[Rectangle, ...]) -> list[Statistics]:
    of_map = moments(recorded[None], GROUPS)[0]
    known = RecordedStatistics().outside(of_map, rectangles, stored=of_map)
    tiles = [of_tiles(norm, now[None, :, each.rows, each.columns])[0] for each in rectangles]
    return [known, *tiles]


def changed(recorded: Tensor, rectangles: tuple[Rectangle, ...]) -> Tensor:
    now = recorded.clone()
    for each in rectangles:
        now[:, each.rows, each.columns] = feature_map(7)[:, each.rows, each.columns] - 5.0
    return now


@torch.inference_mode()
def test_parts_give_the_norm_of_the_whole_map_as_it_is_now() -> None:
    norm = trained(1)
    masks = (FIRST, SECOND, ALL)  # rows with three parts and with two, and one of which nothing is recorded any more
    recorded = [feature_map(seed) for seed in range(3)]
    now = [changed(each, mask) for each, mask in zip(recorded, masks, strict=True)]
    rows = [parts(norm, before, after, mask) for before, after, mask in zip(recorded, now, masks, strict=True)]
    scale, shift = scale_and_shift(norm, rows)
    whole = torch.stack(now)
    assert (whole * scale + shift - norm(whole)).abs().max() < 2e-3
    before = torch.stack(recorded)
    assert (before * scale + shift - norm(before)).abs().max() > 0.5


@torch.inference_mode()
def test_what_records_say_outside_a_mask_is_computed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[object] = []
    real = norms._outside

    def counted(recorded: Tensor, rectangles: tuple[Rectangle, ...]) -> Statistics:
        computed.append(rectangles)
        return real(recorded, rectangles)

    monkeypatch.setattr(norms, "_outside", counted)
    statistics, recorded = RecordedStatistics(), moments(feature_map(1)[None], GROUPS)[0]
    other = recorded.clone()
    first = statistics.outside(recorded, FIRST, stored=recorded)
    assert statistics.outside(recorded, FIRST, stored=recorded) is first
    assert statistics.outside(recorded.clone(), FIRST, stored=recorded) is first  # as a device gets it
    assert statistics.outside(recorded, SECOND, stored=recorded) is not first
    assert statistics.outside(other, FIRST, stored=other) is not first
    assert computed == [FIRST, SECOND, FIRST]


@torch.inference_mode()
def test_what_is_kept_of_a_record_is_bounded_and_goes_with_it() -> None:
    statistics, recorded = RecordedStatistics(), moments(feature_map(1)[None], GROUPS)[0]
    for width in range(1, 12):
        statistics.outside(recorded, (Rectangle(top=0, left=0, height=4, width=width),), stored=recorded)
    (kept,) = statistics._known.values()
    assert len(kept) == norms._KNOWN_MASKS
    del recorded, kept
    gc.collect()
    assert not statistics._known


def test_tensors_side_by_side_are_one_without_a_copy() -> None:
    whole = torch.arange(24.0).view(3, 2, 4)
    joined = adjacent(list(whole))
    assert joined is not None
    assert torch.equal(joined, whole)
    assert joined.data_ptr() == whole.data_ptr()
    assert adjacent([whole[1], whole[0]]) is None
    assert adjacent([whole[0], whole[2]]) is None
    assert adjacent([whole[0], whole[1].clone()]) is None
    assert adjacent([whole[0].T, whole[1].T]) is None
