"""The world that the miniature draws: its grammar, its captions, its layouts and their pictures. No torch here."""

from bottega.miniature.scenes.captions import any_caption, caption
from bottega.miniature.scenes.grammar import (
    COLOURS,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    Scene,
    Thing,
    held_out_scenes,
    near_miss,
    random_scene,
    training_scene,
)
from bottega.miniature.scenes.layout import Layout, Placed, random_layout
from bottega.miniature.scenes.render import SIDE, coverage, render

__all__ = [
    "COLOURS",
    "PLACES",
    "RELATIONS",
    "SHAPES",
    "SIDE",
    "SIZES",
    "Layout",
    "Placed",
    "Scene",
    "Thing",
    "any_caption",
    "caption",
    "coverage",
    "held_out_scenes",
    "near_miss",
    "random_layout",
    "random_scene",
    "render",
    "training_scene",
]
