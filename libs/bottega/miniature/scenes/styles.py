"""Draws layouts in styles that a LoRA of the miniature learns. In each style, every word of the caption stays true.

A style changes shades, not colours: the oracle takes anything that differs more from its ground for a thing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import PIL.Image
import PIL.ImageChops
import PIL.ImageFilter

from bottega.miniature.scenes.grammar import COLOURS
from bottega.miniature.scenes.layout import SceneLayout
from bottega.miniature.scenes.render import FINE, SIDE, coverage, render

# How much larger things are in every style, because the shapes of small ones are hard to see on a pattern. Small ones
# stay below the middle between the sizes.
_LARGER = 1.1
# Levels by which the light shade of a ground is above its colour, and above the dark shade. The oracle tolerates 36.
_LIGHT, _APART = 14, 28
# In pixels: a stripe and the gap to the next one along a row; a square; the plain ground around a thing.
_STRIPES, _SQUARE, _RIM = 16, 8, 2
# Levels by which the picture is lighter at the top and darker at the bottom. LoRAs that learned 24 drew the top of
# light grounds lighter than the oracle tolerates.
_DUSK = 18


def striped(layout: SceneLayout) -> PIL.Image.Image:
    """Return the layout on a ground of slanting stripes in two shades."""
    return _on_ground(layout, _stripes())


def checked(layout: SceneLayout) -> PIL.Image.Image:
    """Return the layout on a ground of squares in two shades, like a chess board."""
    return _on_ground(layout, _squares())


def dusk(layout: SceneLayout) -> PIL.Image.Image:
    """Return the layout with everything light at the top and dark at the bottom."""
    picture = render(_larger(layout))
    darkness = PIL.Image.linear_gradient("L").resize((SIDE, SIDE))
    return PIL.Image.composite(_shifted(picture, -_DUSK), _shifted(picture, _DUSK), darkness)


STYLES: dict[str, Callable[[SceneLayout], PIL.Image.Image]] = {"striped": striped, "checked": checked, "dusk": dusk}
"""Functions that draw the pictures that each of the miniature's LoRAs learns."""


def _on_ground(layout: SceneLayout, pattern: PIL.Image.Image) -> PIL.Image.Image:
    """Return the layout on a patterned ground.

    Args:
        pattern: Grey, white where the ground is dark.
    """
    larger = _larger(layout)
    plain = PIL.Image.new("RGB", (SIDE, SIDE), COLOURS[layout.ground])
    light = _shifted(plain, _LIGHT)
    ground = PIL.Image.composite(_shifted(light, -_APART), light, pattern)
    return PIL.Image.composite(render(larger), ground, _near_things(larger))


def _larger(layout: SceneLayout) -> SceneLayout:
    return replace(layout, placed=tuple(replace(one, radius=_LARGER * one.radius) for one in layout.placed))


def _near_things(layout: SceneLayout) -> PIL.Image.Image:
    """Return a grey mask, black where no thing is within the rim."""
    covered = PIL.Image.new("L", (SIDE, SIDE), 0)
    for placed in layout.placed:
        covered = PIL.ImageChops.lighter(covered, coverage(placed))
    return covered.filter(PIL.ImageFilter.MaxFilter(2 * _RIM + 1))


def _shifted(picture: PIL.Image.Image, levels: int) -> PIL.Image.Image:
    return picture.point([min(max(level + levels, 0), 255) for level in range(256)] * 3)


@cache
def _stripes() -> PIL.Image.Image:
    return _pattern(lambda x, y: (x + y) % _STRIPES < _STRIPES // 2)


@cache
def _squares() -> PIL.Image.Image:
    return _pattern(lambda x, y: (x // _SQUARE + y // _SQUARE) % 2 == 0)


def _pattern(dark: Callable[[float, float], bool]) -> PIL.Image.Image:
    """Return a grey pattern.

    Args:
        dark: Returns whether the point (x, y), in pixels, is dark.
    """
    fine = PIL.Image.new("L", (SIDE * FINE, SIDE * FINE))
    fine.putdata([255 * dark(x / FINE, y / FINE) for y in range(SIDE * FINE) for x in range(SIDE * FINE)])
    return fine.resize((SIDE, SIDE), PIL.Image.Resampling.BOX)
