"""Masked blocks through a whole suite: the first edit of an image records, the next compute the masked part alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import PIL.Image
import pytest

from bottega.client import Client
from tests.samples.edits import box_mask, template
from tests.support.services import SMALL_ENGINE, Services, gateway_config, worker_config
from tests.support.stock import pixels_of
from tests.support.waiting import wait_until

PROMPT = "a big green star on a blue background"
OPTIONS: dict[str, Any] = {"num_inference_steps": 6, "guidance_scale": 4.0}
IMAGE, BOX = template(), (12, 20, 40, 52)
MASK = box_mask(BOX)
FEATHER = 8


def assert_own_pixels_outside(picture: PIL.Image.Image, image: PIL.Image.Image) -> None:
    """Beyond the feather."""
    ours, own = pixels_of(picture).copy(), pixels_of(image).copy()
    for pixels in (ours, own):
        pixels[BOX[1] - FEATHER : BOX[3] + FEATHER, BOX[0] - FEATHER : BOX[2] + FEATHER] = 0
    assert np.array_equal(ours, own)


def test_a_worker_with_fixed_rows_computes_all_and_says_so(client: Client) -> None:
    for _ in range(2):
        use = client.edit(IMAGE, MASK, PROMPT, fidelity="balanced", **OPTIONS).provenance.mask
        assert "fixed_rows" in use.computed_all_because
        assert (use.recording, use.recorded, use.computed_share) == ("", False, 0.0)


@pytest.fixture(scope="module")
def masking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A suite whose worker may compute masked blocks alone."""
    with Services(tmp_path_factory.mktemp("masking")) as services:
        gateway = services.start("gateway", gateway_config())
        services.start("worker", worker_config(gateway.fleet, name="w", engine=SMALL_ENGINE))
        with Client(gateway.address, timeout_s=60.0) as client:
            wait_until(lambda: bool(client.models()), "the worker to join")
            yield client


def test_the_first_edit_records_and_the_second_computes_the_masked_part_alone(masking: Client) -> None:
    first = masking.edit(IMAGE, MASK, PROMPT, seed=5, fidelity="balanced", **OPTIONS)
    second = masking.edit(IMAGE, MASK, PROMPT, seed=6, fidelity="balanced", **OPTIONS)
    exact = masking.edit(IMAGE, MASK, PROMPT, seed=6, **OPTIONS)
    assert first.provenance.mask.recorded
    assert first.provenance.blocks_reused == 0
    assert 0 < second.provenance.blocks_reused == second.provenance.blocks_total
    assert 0 < second.provenance.mask.computed_share < 1
    # The mask's .219 of the tokens, and a token around it on each side; in an exact edit no tokens are told apart.
    dilated = [each.provenance.mask.dilated_share for each in (first, second, exact)]
    assert dilated == [second.provenance.mask.computed_share] * 2 + [0.0]
    assert dilated[0] > second.provenance.mask.share
    assert len(second.provenance.mask.recording) == 32
    assert [each.provenance.exact for each in (first, second, exact)] == [True, False, True]
    for each in (first, second, exact):
        assert_own_pixels_outside(each.pil(), IMAGE)


def test_the_first_edit_of_a_picture_that_was_kept_computes_the_masked_part_alone(masking: Client) -> None:
    drawn = masking.generate("a small red circle on a blue background", seed=4, keep_for_editing=True, **OPTIONS)
    edited = masking.edit(drawn, MASK, PROMPT, fidelity="balanced", **OPTIONS)
    # The embedded model's blocks follow the prompt: another one than the picture's uses the unconditional half alone.
    assert edited.provenance.blocks_reused == edited.provenance.blocks_total / 2 > 0
    assert edited.provenance.mask.kept_latents
    again = masking.edit(drawn, MASK, PROMPT, fidelity="fast", **OPTIONS)
    assert again.provenance.blocks_reused == again.provenance.blocks_total
    other = masking.generate("a small red circle on a blue background", seed=5, **OPTIONS)
    assert masking.edit(other, MASK, PROMPT, fidelity="balanced", **OPTIONS).provenance.blocks_reused == 0
