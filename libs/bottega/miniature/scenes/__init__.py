"""The scenes that the miniature draws: their grammar, captions, layouts and pictures. No torch here."""

from bottega.miniature.scenes.captions import (
    WORDS,
    any_caption,
    caption,
    placed_caption,
    read_caption,
    unknown_words,
    unplaced_caption,
)
from bottega.miniature.scenes.controls import DRAWN, draw_edges, draw_layout, find_edges
from bottega.miniature.scenes.grammar import (
    COLOURS,
    PLACES,
    RELATIONS,
    SHAPES,
    SIZES,
    Scene,
    Thing,
    elsewhere,
    held_out_scenes,
    near_miss,
    random_scene,
    refine,
    training_scene,
)
from bottega.miniature.scenes.layout import Placed, SceneLayout, random_layout
from bottega.miniature.scenes.render import SIDE, coverage, render
from bottega.miniature.scenes.styles import STYLES

__all__ = [
    "COLOURS",
    "DRAWN",
    "PLACES",
    "RELATIONS",
    "SHAPES",
    "SIDE",
    "SIZES",
    "STYLES",
    "WORDS",
    "SceneLayout",
    "Placed",
    "Scene",
    "Thing",
    "any_caption",
    "caption",
    "coverage",
    "draw_edges",
    "draw_layout",
    "elsewhere",
    "find_edges",
    "held_out_scenes",
    "near_miss",
    "placed_caption",
    "random_layout",
    "random_scene",
    "read_caption",
    "refine",
    "render",
    "training_scene",
    "unknown_words",
    "unplaced_caption",
]
