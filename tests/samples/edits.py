"""Images and masks for tests of edits, and the orders of an engine that they make."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import numpy as np
import PIL.Image
import PIL.ImageDraw
import torch

from bottega.engine.job import EngineOrder
from bottega.engine.spec import EditSpec, ResolvedSpec


def template(width: int = 64, height: int = 64) -> PIL.Image.Image:
    """A picture that is nowhere equal to its neighbours."""
    x, y = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
    bands = np.stack([x, y, 0.5 + 0.4 * np.sin(9 * x + 5 * y)], axis=-1)
    return PIL.Image.fromarray((bands * 255).round().astype(np.uint8))


def box_mask(box: tuple[int, int, int, int] = (12, 20, 40, 52), width: int = 64, height: int = 64) -> PIL.Image.Image:
    """Grey: white in the box (left, upper, right, lower; exclusive), black elsewhere."""
    mask = PIL.Image.new("L", (width, height))
    mask.paste(255, box)
    return mask


def ellipse_mask(box: tuple[int, int, int, int] = (4, 8, 50, 40), width: int = 64, height: int = 64) -> PIL.Image.Image:
    """Grey: white in the ellipse, black elsewhere."""
    mask = PIL.Image.new("L", (width, height))
    PIL.ImageDraw.Draw(mask).ellipse(box, fill=255)
    return mask


def edit_order(
    spec: ResolvedSpec, image: PIL.Image.Image, mask: PIL.Image.Image, *, key: object = "edit", preview: bool = False
) -> EngineOrder:
    """An edit as an engine takes it; both are of the spec's size."""
    edit = EditSpec(mask_digest=_digest(mask), image_digest=_digest(image))
    return EngineOrder(
        key=key,
        spec=replace(spec, edit=edit),
        image=torch.from_numpy(np.array(image.convert("RGB"))),
        mask=torch.from_numpy((np.array(mask.convert("L")) >= 128).astype(np.uint8)),
        preview=preview,
    )


def _digest(image: PIL.Image.Image) -> str:
    return hashlib.sha256(image.tobytes()).hexdigest()
