"""The bench of edits: its masks, and what it makes of what was measured."""

from __future__ import annotations

import pytest
import torch

from bottega.diffusion.editing.masked.tokens import dilate, share
from load.bench.edit import Measured, table_of, values_of
from load.bench.edit_model import EDIT_SHAPE, MARGIN, RATIOS, SIZE, TOKEN, square_mask, square_share, square_side
from load.bench.edit_steps import SIDES, Edited


@pytest.mark.parametrize("ratio", RATIOS)
def test_a_mask_with_its_margin_is_the_share_of_tokens_that_it_is_named_by(ratio: float) -> None:
    stride = TOKEN * EDIT_SHAPE.sample_size // SIZE
    pixels = SIZE // EDIT_SHAPE.sample_size
    mask = torch.from_numpy(square_mask(ratio) > 0)[::pixels, ::pixels]
    computed = share(dilate(mask, MARGIN, stride), stride)
    assert computed == pytest.approx(square_share(ratio))
    assert computed == pytest.approx(ratio, rel=0.15)


def test_the_least_mask_has_a_token_inside_its_margin() -> None:
    assert square_side(0.0001) == 2 * MARGIN + 1
    assert square_mask(0.0001).sum() == 255 * TOKEN**2


def measured(seconds: dict[str, list[float]]) -> Measured:
    edits = {
        name: [Edited(seconds=2 * each, denoise_s=each, computed_share=0.191, reused=0.9) for each in of_side]
        for name, of_side in seconds.items()
    }
    forwards = {"plain": [4.0, 4.0], "outputs": [1.0, 1.0], "keys_values": [0.8, 0.8]}
    return Measured(edits={0.19: edits}, forwards={0.19: forwards}, transformer_shares=[0.8, 0.82, 0.81], off=2e-5)


def test_medians_over_diffusers_are_reported_by_share() -> None:
    values = values_of(measured(dict(zip(SIDES, ([6.0, 9.0, 5.0], [3.0, 2.0, 9.0], [2.0, 1.0, 3.0]), strict=True))))
    assert values == {
        "transformer_share": 0.81,
        "exact_off": 2e-5,
        "speedup_19": 2.0,
        "speedup_19_sparse": 3.0,
        "speedup_19_sparse_whole": 3.0,
        "computed_share_19": 0.191,
        "reused_19": 0.9,
        "forward_19_outputs": 4.0,
        "forward_19_keys_values": 5.0,
    }
    rows = table_of(values, [0.19])
    assert ("    steps, sparse convolutions (speedup_19_sparse)", "3.00 x", "at least 3") in rows
    assert ("    steps, convolutions in full (speedup_19)", "2.00 x", "at least 2.2") in rows
