"""Captions of scenes: full sentences for prompts, which can be read back, and other phrasings for training.

Nearly every word is one token of the miniature's tokenizers, and every sentence fits their 24.
"""

from __future__ import annotations

import random
import re

from bottega.miniature.scenes.grammar import COLOURS, PLACES, RELATIONS, SHAPES, SIZES, Scene, Thing

_AT = {"left": "on the left", "right": "on the right", "top": "at the top", "bottom": "at the bottom"}
_PLACED = {**_AT, "center": "in the center"}
_ENDS = {"left of": ("left", "right"), "above": ("top", "bottom")}
# A short phrasing leaves the rest to chance, as users' prompts do.
_SHORT_SHARE = 0.2

_OTHER_WORDS = ("a", "an", "and", "at", "background", "image", "in", "of", "on", "the", "to", "with")

WORDS = frozenset(" ".join((*COLOURS, *SHAPES, *SIZES, *PLACES, *RELATIONS, *_OTHER_WORDS)).split())
"""All words that captions have, and so all that the miniature was trained on."""
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


def caption(scene: Scene) -> str:
    """Return the sentence that describes all of the scene: "a big red star on the left on a blue background"."""
    if len(scene.things) == 1:
        return f"{_a(f'{scene.size} {_name(scene.things[0])}')} {_PLACED[scene.place]} on {_ground(scene)}"
    first, second = (_a(_name(thing)) for thing in scene.things)
    return f"{first} {scene.relation} {second} on {_ground(scene)}"


def placed_caption(scene: Scene) -> str:
    """Return a longer sentence that describes all of the scene, with the place of each of two things."""
    if len(scene.things) == 1:
        return caption(scene)
    first, second = (_a(_name(thing)) for thing in scene.things)
    near, far = _ENDS[scene.relation]
    return f"{first} {_AT[near]} and {second} {_AT[far]} on {_ground(scene)}"


def unplaced_caption(scene: Scene) -> str:
    """Return a sentence that describes all of the scene but the places: "a big red star on a blue background"."""
    if len(scene.things) == 1:
        return f"{_a(f'{scene.size} {_name(scene.things[0])}')} on {_ground(scene)}"
    first, second = (_a(_name(thing)) for thing in scene.things)
    return f"{first} and {second} on {_ground(scene)}"


def any_caption(scene: Scene, rng: random.Random) -> str:
    """Return one of the scene's phrasings, all of which are true of it."""
    if len(scene.things) == 1:
        return _any_of_one(scene, rng)
    return _any_of_two(scene, rng)


def _any_of_one(scene: Scene, rng: random.Random) -> str:
    name, place, ground = _name(scene.things[0]), _PLACED[scene.place], _ground(scene)
    sized = f"{scene.size} {name}"
    if rng.random() < _SHORT_SHARE:
        short = [f"{_a(name)} on {ground}", f"{_a(sized)} {place}", f"{_a(name)} {place} on {ground}", sized, name]
        return rng.choice([*short, f"{_a(sized)} on {ground}"])
    if rng.random() < 0.5:
        return caption(scene)
    full = [
        f"{_a(sized)} on {ground} {place}",
        f"{ground} with {_a(sized)} {place}",
        f"{place} {_a(sized)} on {ground}",
        f"an image of {_a(sized)} {place} on {ground}",
        f"{sized} {place} {scene.ground} background",
    ]
    return rng.choice(full)


def _any_of_two(scene: Scene, rng: random.Random) -> str:
    names = [_name(thing) for thing in scene.things]
    (first, second), ground = (_a(name) for name in names), _ground(scene)
    if rng.random() < _SHORT_SHARE / 2:
        both = [f"{first} and {second} on {ground}", f"{second} and {first} on {ground}"]
        return rng.choice([*both, f"{first} {scene.relation} {second}"])
    if rng.random() < 0.5:
        return caption(scene)
    lateral = scene.relation == "left of"
    near, far = _ENDS[scene.relation]
    full = [
        f"{ground} with {first} {scene.relation} {second}",
        f"an image of {first} {scene.relation} {second} on {ground}",
        placed_caption(scene),
        f"{second} {_AT[far]} and {first} {_AT[near]} on {ground}",
        f"{names[0]} {scene.relation} {names[1]} {scene.ground} background",
    ]
    if lateral:
        full += [f"{second} right of {first} on {ground}", f"{first} to the left of {second} on {ground}"]
        full += [f"{second} to the right of {first} on {ground}"]
    return rng.choice(full)


def unknown_words(text: str) -> list[str]:
    """Return the words of a prompt that the miniature was not trained on, in their order."""
    return [word for word in re.findall(r"[^\W_]+", text.casefold()) if word not in WORDS]


def _name(thing: Thing) -> str:
    return f"{thing.colour} {thing.shape}"


def _ground(scene: Scene) -> str:
    return f"{_a(scene.ground)} background"


def _a(name: str) -> str:
    return f"an {name}" if name.startswith("orange") else f"a {name}"


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
