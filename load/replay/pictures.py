"""Images that requests bring along: templates to edit, the masks of edits, and control images.

They are scenes of the embedded model's world, which any model takes; to a suite they cost what any image of their size
costs. The same plan has the same images each time.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Iterable

import PIL.Image

from bottega.client import Box
from bottega.miniature.scenes import draw_edges, random_layout, random_scene, render
from load.replay.requests import PlannedRequest

# Control images differ by user, and some are used often; how often, no paper says.
_CONTROL_IMAGES = 16
# Pixels a side of a latent element, or more, with the models that are known: a smaller mask may redraw none of them,
# and is refused.
_LEAST_MASK = 8
# Pixels a side that scenes are drawn at; more would be drawn for seconds, and shows nothing more.
_MOST_DRAWN = 256


class Pictures:
    """Images of one size, in pixels, each drawn once: as many as a mix has templates, and 16."""

    def __init__(self, *, width: int, height: int) -> None:
        self._width = width
        self._height = height
        self._templates: dict[int, bytes] = {}
        self._controls: dict[int, bytes] = {}

    def prepare(self, plan: Iterable[PlannedRequest]) -> None:
        """Draw all that a plan needs, so that no request waits for it."""
        for request in plan:
            if request.template is not None:
                self.template(request.template)
            if request.controlnets:
                self.control_image(request)

    def template(self, rank: int) -> bytes:
        """Return the image of that rank, as PNG."""
        if rank not in self._templates:
            self._templates[rank] = self._drawn(f"template {rank}", edges=False)
        return self._templates[rank]

    def control_image(self, request: PlannedRequest) -> bytes:
        """Return outlines, as PNG, for all ControlNets of a request."""
        number = request.seed % _CONTROL_IMAGES
        if number not in self._controls:
            self._controls[number] = self._drawn(f"control image {number}", edges=True)
        return self._controls[number]

    def mask(self, request: PlannedRequest) -> Box:
        """Return a box in the template, of its shape, with the share of its pixels that the request redraws, or 8 by 8.

        Raises ValueError for a request that is no edit.
        """
        if request.mask_ratio is None:
            raise ValueError("a draw has no mask")
        side = math.sqrt(request.mask_ratio)
        width, height = (max(_LEAST_MASK, round(side * whole)) for whole in (self._width, self._height))
        chance = random.Random(f"mask {request.seed}")
        x, y = chance.randint(0, self._width - width), chance.randint(0, self._height - height)
        return Box(x, y, width, height)

    def _drawn(self, what: str, *, edges: bool) -> bytes:
        chance = random.Random(what)
        layout = random_layout(random_scene(chance, things=chance.choice((1, 2))), chance)
        side = min(max(self._width, self._height), _MOST_DRAWN)
        image = draw_edges(layout, side) if edges else render(layout, side)
        file = io.BytesIO()
        image.resize((self._width, self._height), PIL.Image.Resampling.BICUBIC).save(file, "PNG")
        return file.getvalue()
