"""Templates of the embedded model, and edits of them that say what is to come of it: one thing becomes another.

A template is a rendered scene and the box of the thing that is edited. What an edit wants is held out from training.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import PIL.Image
import PIL.ImageDraw

from bottega.miniature.scenes import (
    COLOURS,
    SHAPES,
    SIDE,
    Placed,
    Scene,
    Thing,
    caption,
    random_layout,
    random_scene,
    render,
)

# A thing is drawn as it is told where the mask leaves it room: of single things the oracle read .78 right with half of
# this margin, .88 with this one, .90 with half as much again (40, 60 and 60 held-out scenes; .91 without a mask).
MARGIN = 0.08
"""Around a thing, in sides of the picture."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Template:
    """A picture to be edited. mask: white where it is redrawn. wanted: scenes that edits of it may ask for."""

    picture: PIL.Image.Image
    mask: PIL.Image.Image
    wanted: tuple[Scene, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EditCase:
    """One edit of a template: what it shall show then. again: whether the edit before it had the same prompt."""

    template: Template
    wanted: Scene
    seed: int
    again: bool = False

    @property
    def prompt(self) -> str:
        """As people say it: all of the picture, not the masked part alone."""
        return caption(self.wanted)


def templates(count: int, prompts: int, *, seed: int = 0) -> list[Template]:
    """Every second one with two things; for each edits with so many prompts. The same ones every time."""
    rng = random.Random(seed)
    return [_template(rng, prompts, things=1 + number % 2) for number in range(count)]


def edits_of(template: Template, seed: int) -> Iterator[EditCase]:
    """Its edits, with seeds from `seed` on: as people do who try a prompt twice, and then another one."""
    for number in range(2 * len(template.wanted)):
        wanted = template.wanted[number // 2]
        yield EditCase(template=template, wanted=wanted, seed=seed + number, again=bool(number % 2))


def box(placed: Placed, margin: float = MARGIN, side: int = SIDE) -> PIL.Image.Image:
    """A mask of the square around a thing, white on black. margin: around it, in sides of the picture."""
    mask = PIL.Image.new("L", (side, side), 0)
    reach = placed.radius + margin
    corners = (placed.x - reach, placed.y - reach, placed.x + reach, placed.y + reach)
    PIL.ImageDraw.Draw(mask).rectangle([round(corner * side) for corner in corners], fill=255)
    return mask


def _template(rng: random.Random, prompts: int, *, things: int) -> Template:
    while True:
        scene = random_scene(rng, things=things)
        at = rng.randrange(things)
        wanted = [other for other in _others(scene, at) if other.held_out]
        if len(wanted) >= prompts:
            layout = random_layout(scene, rng)
            chosen = tuple(rng.sample(wanted, prompts))
            return Template(picture=render(layout), mask=box(layout.placed[at]), wanted=chosen)


def _others(scene: Scene, at: int) -> Iterator[Scene]:
    """The scenes that differ in one thing alone, that at place `at`."""
    for thing in (Thing(shape=shape, colour=colour) for shape in SHAPES for colour in COLOURS):
        if thing.colour != scene.ground and thing not in scene.things:
            yield replace(scene, things=(*scene.things[:at], thing, *scene.things[at + 1 :]))
