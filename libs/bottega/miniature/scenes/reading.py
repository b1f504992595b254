"""Reads sentences back that describe all of a scene."""

from __future__ import annotations

import re

from bottega.miniature.scenes.captions import caption, placed_caption
from bottega.miniature.scenes.grammar import COLOURS, PLACES, SHAPES, SIZES, Scene, Thing

_COLOUR, _SHAPE = "|".join(COLOURS), "|".join(SHAPES)
_ONE = re.compile(
    rf"an? ({'|'.join(SIZES)}) ({_COLOUR}) ({_SHAPE}) (?:on|at|in) the ({'|'.join(PLACES)})"
    rf" on an? ({_COLOUR}) background"
)
_TWO = re.compile(
    rf"an? ({_COLOUR}) ({_SHAPE}) (left of|above|on the left and|at the top and) an? ({_COLOUR}) ({_SHAPE})"
    rf"(?: on the right| at the bottom)? on an? ({_COLOUR}) background"
)
_RELATIONS = {"on the left and": "left of", "at the top and": "above"}


def read_caption(text: str) -> Scene | None:
    """Return the scene of which `text` is the caption or the placed caption; None for any other text."""
    try:
        scene = _read(text)
    except ValueError:  # a thing of the ground's colour, or the same thing twice
        return None
    captions = [] if scene is None else [caption(scene), placed_caption(scene)]
    return scene if text in captions else None


def _read(text: str) -> Scene | None:
    if found := _ONE.fullmatch(text):
        size, colour, shape, place, ground = found.groups()
        return Scene(things=(Thing(shape=shape, colour=colour),), ground=ground, size=size, place=place)
    if found := _TWO.fullmatch(text):
        colour, shape, relation, other_colour, other_shape, ground = found.groups()
        things = (Thing(shape=shape, colour=colour), Thing(shape=other_shape, colour=other_colour))
        return Scene(things=things, ground=ground, relation=_RELATIONS.get(relation, relation))
    return None
