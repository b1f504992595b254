"""Masked blocks through a whole suite: the first edit of an image records, the next compute the masked part alone.

And a picture that was drawn to be edited: its latents outlive the worker, and its first edit needs no second pass.
"""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image

from bottega.client import Box, Client, parameters_of
from bottega.client.types.picture import Picture
from bottega.errors import RecordingNotKept
from tests.e2e.conftest import Suite
from tests.samples.edits import box_mask, template
from tests.support.stock import pixels_of

PROMPT = "a big green star on a blue background"
OPTIONS: dict[str, Any] = {"num_inference_steps": 6, "guidance_scale": 4.0}
IMAGE, BOX = template(), (12, 20, 40, 52)
EDITS = 8
MASK = box_mask(BOX)
FEATHER = 8
DRAWN: dict[str, Any] = {**OPTIONS, "width": 64, "height": 64}
KEPT_BOX = Box(0, 0, 20, 20)
# So far from that mask that a decoder makes next to nothing of it there.
FAR = (slice(48, None), slice(48, None))


def assert_own_pixels_outside(picture: PIL.Image.Image, image: PIL.Image.Image) -> None:
    ours, own = pixels_of(picture).copy(), pixels_of(image).copy()
    for pixels in (ours, own):
        pixels[BOX[1] - FEATHER : BOX[3] + FEATHER, BOX[0] - FEATHER : BOX[2] + FEATHER] = 0
    assert np.array_equal(ours, own)


def test_the_first_edit_records_and_the_second_computes_the_masked_part_alone(client: Client) -> None:
    first = client.edit(IMAGE, MASK, PROMPT, seed=5, fidelity="balanced", **OPTIONS)
    second = client.edit(IMAGE, MASK, PROMPT, seed=6, fidelity="balanced", **OPTIONS)
    exact = client.edit(IMAGE, MASK, PROMPT, seed=6, **OPTIONS)
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


def _random_edit(rng: random.Random) -> dict[str, Any]:
    """What an edit of any fidelity says, on one of four images, so that recordings are used and changed."""
    x, y = rng.randrange(0, 36, 4), rng.randrange(0, 36, 4)
    said: dict[str, Any] = {
        "image": rng.choice((IMAGE, IMAGE.rotate(90), IMAGE.rotate(180), IMAGE.rotate(270))),
        "mask_image": Box(x, y, rng.randrange(12, 28), rng.randrange(12, 28)),
        "prompt": rng.choice((PROMPT, "a small red circle")),
        "fidelity": rng.choice((None, "exact", "balanced", "balanced", "fast")),
        "masked_blocks": rng.choice((None, None, False)),
        "strength": rng.choice((0.6, 0.9999, 1.0)),
        "keep_unmasked": rng.random() < 0.5,
    }
    return {**said, "seed": rng.choice((None, rng.randrange(100))), "num_images": rng.choice((1, 1, 2, 3))}


def _drawn_again(client: Client, file: Path, **sources: Any) -> Picture | str:
    """The picture that a file's parameters draw, or the recording for which they are refused."""
    prompt, options = parameters_of(file)
    options["identical_results"] = False
    try:
        return client.generate(prompt, **options, **sources)
    except RecordingNotKept as error:
        return error.metadata["recording"]


def test_parameters_draw_an_edit_again_or_name_the_recording_it_took(client: Client, tmp_path: Path) -> None:
    rng, outcomes = random.Random(34), Counter[str]()
    for _ in range(EDITS):
        said = _random_edit(rng)
        sources = {"image": said.pop("image"), "mask_image": said.pop("mask_image")}
        drawn = client.generate_many(said.pop("prompt"), **said, **sources, num_inference_steps=4, guidance_scale=4.0)
        for picture in drawn:
            taken = picture.provenance.mask.recording
            assert picture.provenance.exact == (not taken)
            assert picture.provenance.parameters.recording == (taken or None)
            again = _drawn_again(client, picture.save(tmp_path / "drawn.png"), **sources)
            if isinstance(again, str):
                assert again == taken != ""
                outcomes["refused"] += 1
            else:
                off = np.abs(pixels_of(again.pil()).astype(int) - pixels_of(picture.pil()).astype(int))
                assert off.max() <= 1
                outcomes["drawn again" if picture.index == 0 else "drawn again, of several"] += 1
    assert len(outcomes) == 3, outcomes
    assert min(outcomes.values()) > EDITS // 6, outcomes


def _changed(edited: Picture, picture: Picture) -> float:
    """How much of the picture was changed far from the mask, in levels of 255, on average."""
    after, before = pixels_of(edited.pil())[FAR].astype(float), pixels_of(picture.pil())[FAR].astype(float)
    return float(np.abs(after - before).mean())


def _edited(client: Client, picture: Picture, **said: Any) -> Picture:
    """As Diffusers leaves it, so that what the autoencoder does to it is seen."""
    options = {**DRAWN, "seed": 5, "keep_unmasked": False, "identical_results": False, **said}
    return client.edit(picture, KEPT_BOX, "a big green star on a blue background", **options)


def test_the_first_edit_reuses_blocks_and_after_the_worker_is_gone_the_latents_are_still_there(suite: Suite) -> None:
    client = suite.client
    picture = client.generate("a big red star on a blue background", seed=3, keep_for_editing=True, **DRAWN)
    exact = _edited(client, picture)
    assert exact.provenance.exact
    encoded = _changed(exact, picture)

    first = _edited(client, picture, masked_blocks=True)
    mask = first.provenance.mask
    assert mask is not None
    assert (mask.recording != "", first.provenance.blocks_reused > 0, first.provenance.exact) == (True, True, False)
    assert _changed(first, picture) < encoded / 2, "nothing was encoded again"

    suite.worker.kill()
    suite.restart_worker()
    again = _edited(client, picture, masked_blocks=True)
    assert again.provenance.blocks_reused == 0, "what was recorded has gone with the worker"
    assert _changed(again, picture) < encoded / 2, "the latents have not"
