"""What is done to workers that edit: killed at a random step, and the picture is the same."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from tests.chaos.scene import Scene
from tests.chaos.workers import kill_workers
from tests.samples.edits import box_mask, ellipse_mask, template
from tests.samples.hostile_images import saved

# What is edited, or kept for it, by seed: no seed of other parts. Engines with fixed_rows compute all of masked blocks.
EDITS: Mapping[int, Mapping[str, Any]] = {
    11: {"image": saved(template()), "mask_image": saved(box_mask())},
    12: {"image": saved(template(), "JPEG"), "mask_image": saved(ellipse_mask()), "keep_unmasked": False},
    13: {
        "image": saved(template(160, 120)),
        "mask_image": saved(box_mask((60, 40, 90, 70), 160, 120)),
        "padding_mask_crop": 12,
    },
    14: {"image": saved(template()), "mask_image": saved(box_mask()), "masked_blocks": True},
    15: {"keep_for_editing": True},
}


def kill_editing_workers(scene: Scene, *, times: int, rng: random.Random) -> None:
    """kill -9 at a random step of an edit, until so many kills have landed inside one. As kill_workers."""
    scene.additions |= EDITS
    kill_workers(scene, times=times, rng=rng, seeds=tuple(EDITS))
