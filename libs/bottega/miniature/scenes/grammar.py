"""The grammar of the embedded model's scenes: shapes, colours, sizes, places, backgrounds, relations, and captions.

Captions are full sentences for prompts, which can be parsed, and other phrasings for training. Nearly every word is one
token of the model's tokenizers, and every sentence fits into their 24 tokens. Some scenes are held out from training.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

_AT = {"left": "on the left", "right": "on the right", "top": "at the top", "bottom": "at the bottom"}
_PLACED = {**_AT, "center": "in the center"}
_ENDS = {"left of": ("left", "right"), "above": ("top", "bottom")}
# A short phrasing leaves the rest to chance, as users' prompts do.
_SHORT_SHARE = 0.2

SHAPES = ("circle", "square", "triangle", "star", "ring", "cross", "heart", "diamond")
# Red, green and blue, 0 to 255. No two are similar, even after the VAE.
COLOURS: dict[str, tuple[int, int, int]] = {
    "red": (220, 32, 38),
    "green": (40, 176, 72),
    "blue": (48, 76, 214),
    "yellow": (242, 218, 60),
    "orange": (255, 146, 28),
    "purple": (146, 58, 182),
    "white": (245, 245, 245),
    "black": (20, 20, 24),
    "pink": (247, 152, 180),
    "cyan": (56, 186, 216),
}
SIZES = ("small", "big")
PLACES = ("left", "right", "top", "bottom", "center")
RELATIONS = ("left of", "above")
# One scene in this many is never trained on.
HELD_OUT_SHARE = 10

_OTHER_WORDS = ("a", "an", "and", "at", "background", "image", "in", "of", "on", "the", "to", "with")

WORDS = frozenset(" ".join((*COLOURS, *SHAPES, *SIZES, *PLACES, *RELATIONS, *_OTHER_WORDS)).split())
"""All words in captions, which are all words that the model was trained on."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Thing:
    """A shape in a colour, one of the one or two objects of a scene."""

    shape: str
    colour: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """A scene: one thing with a size and a place, or two with a relation, on a background ("ground") of another colour.

    "Right of" and "below" are "left of" and "above" with the things exchanged, so that a scene has only one form.
    """

    things: tuple[Thing, ...]
    ground: str
    size: str = ""
    """Size of a single thing; "" if there are two."""
    place: str = ""
    relation: str = ""
    """Relation of the first of two things to the second; "" if there is one."""

    def __post_init__(self) -> None:
        """Raise ValueError if the values do not fit together."""
        known = self.ground in COLOURS and all(t.shape in SHAPES and t.colour in COLOURS for t in self.things)
        one = len(self.things) == 1 and self.size in SIZES and self.place in PLACES and not self.relation
        two = len(set(self.things)) == 2 and self.relation in RELATIONS and not (self.size or self.place)
        if not (known and (one or two) and self.ground not in {thing.colour for thing in self.things}):
            raise ValueError(f"no scene: {self}")

    @property
    def held_out(self) -> bool:
        """Whether training never sees this scene. The same scenes are held out on every machine."""
        names = [f"{thing.colour} {thing.shape}" for thing in self.things]
        name = "|".join([*names, self.size, self.place, self.relation, self.ground])
        return hashlib.sha256(name.encode()).digest()[0] % HELD_OUT_SHARE == 0


def near_miss(scene: Scene, rng: random.Random) -> Scene:
    """Return a scene with one difference. Of two things, mostly the attributes or the places are exchanged."""
    while True:
        changed = rng.choice((_exchanged, _turned, _other_thing) if scene.relation else _CHANGES)(scene, rng)
        if changed is not None and changed != scene:
            return changed


def elsewhere(scene: Scene) -> list[Scene]:
    """Return the scenes with the same things in other places and no other difference.

    If both things have the same shape, they change only between side by side and one above the other, because
    silhouettes do not show whether they were exchanged.
    """
    if not scene.relation:
        return [replace(scene, place=place) for place in PLACES if place != scene.place]
    (turned,) = (replace(scene, relation=relation) for relation in RELATIONS if relation != scene.relation)
    first, second = scene.things
    return [turned] if first.shape == second.shape else [turned, replace(scene, things=(second, first))]


def random_scene(rng: random.Random, *, things: int) -> Scene:
    """Return a scene of one or two things, chosen uniformly, held out or not."""
    ground = rng.choice(tuple(COLOURS))
    colours = tuple(colour for colour in COLOURS if colour != ground)
    drawn = _thing(rng, colours)
    if things == 1:
        return Scene(things=(drawn,), ground=ground, size=rng.choice(SIZES), place=rng.choice(PLACES))
    other = _thing(rng, colours)
    while other == drawn:
        other = _thing(rng, colours)
    return Scene(things=(drawn, other), ground=ground, relation=rng.choice(RELATIONS))


def training_scene(rng: random.Random, *, things: int) -> Scene:
    """Return a scene that is not held out."""
    return _scene_where(rng, things, held_out=False)


def held_out_scenes(count: int, *, things: int, seed: int = 0) -> list[Scene]:
    """Return distinct scenes that training never saw. There are about 720 with one thing.

    Args:
        seed: Selects the scenes.
    """
    rng = random.Random(seed)
    found: dict[Scene, None] = {}
    while len(found) < count:
        found[_scene_where(rng, things, held_out=True)] = None
    return list(found)


def _scene_where(rng: random.Random, things: int, *, held_out: bool) -> Scene:
    while True:
        scene = random_scene(rng, things=things)
        if scene.held_out == held_out:
            return scene


def _exchanged(scene: Scene, rng: random.Random) -> Scene | None:
    first, second = scene.things
    swapped = (Thing(shape=first.shape, colour=second.colour), Thing(shape=second.shape, colour=first.colour))
    return replace(scene, things=rng.choice((swapped, swapped[::-1], (second, first))))


def _turned(scene: Scene, rng: random.Random) -> Scene | None:
    """Return the scene with the other relation; None if there is only one thing."""
    return replace(scene, relation=next(relation for relation in RELATIONS if relation != scene.relation))


def _other_thing(scene: Scene, rng: random.Random) -> Scene | None:
    """Return the scene with another shape or colour of one thing; None if that is not a scene."""
    at = rng.randrange(len(scene.things))
    old = scene.things[at]
    shape, colour = rng.choice(((rng.choice(SHAPES), old.colour), (old.shape, rng.choice(tuple(COLOURS)))))
    things = (*scene.things[:at], Thing(shape=shape, colour=colour), *scene.things[at + 1 :])
    fits = colour != scene.ground and len(set(things)) == len(things)
    return replace(scene, things=things) if fits else None


def _other_place(scene: Scene, rng: random.Random) -> Scene | None:
    return replace(scene, place=rng.choice(PLACES))


def _other_size(scene: Scene, rng: random.Random) -> Scene | None:
    return replace(scene, size=rng.choice(SIZES))


_CHANGES = (_other_thing, _other_place, _other_size)


def _thing(rng: random.Random, colours: tuple[str, ...]) -> Thing:
    return Thing(shape=rng.choice(SHAPES), colour=rng.choice(colours))


def refine(scene: Scene, rng: random.Random) -> Scene:
    """Return a scene that differs in one property: a shape, a colour, the background, the place, relation or size."""
    parts = [(name, at) for at in range(len(scene.things)) for name in ("shape", "colour")]
    parts += [(name, 0) for name in (("ground", "relation") if scene.relation else ("ground", "size", "place"))]
    while True:
        try:
            return _changed(scene, *rng.choice(parts), rng)
        except ValueError:  # a thing of the ground's colour, or the same thing twice
            continue


def _changed(scene: Scene, part: str, at: int, rng: random.Random) -> Scene:
    thing = scene.things[at]
    match part:
        case "shape":
            return _with(scene, at, replace(thing, shape=_other(thing.shape, SHAPES, rng)))
        case "colour":
            return _with(scene, at, replace(thing, colour=_other(thing.colour, tuple(COLOURS), rng)))
        case "ground":
            return replace(scene, ground=_other(scene.ground, tuple(COLOURS), rng))
        case "relation":
            return replace(scene, relation=_other(scene.relation, RELATIONS, rng))
        case "size":
            return replace(scene, size=_other(scene.size, SIZES, rng))
    return replace(scene, place=_other(scene.place, PLACES, rng))


def _with(scene: Scene, at: int, thing: Thing) -> Scene:
    return replace(scene, things=(*scene.things[:at], thing, *scene.things[at + 1 :]))


def _other(value: str, values: Sequence[str], rng: random.Random) -> str:
    return rng.choice([other for other in values if other != value])


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
    """Return a sentence that describes all of the scene except for places: "a big red star on a blue background"."""
    if len(scene.things) == 1:
        return f"{_a(f'{scene.size} {_name(scene.things[0])}')} on {_ground(scene)}"
    first, second = (_a(_name(thing)) for thing in scene.things)
    return f"{first} and {second} on {_ground(scene)}"


def any_caption(scene: Scene, rng: random.Random) -> str:
    """Return one of the phrasings that describe the scene, chosen at random."""
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
    """Return the words of a prompt that the model was not trained on, in their order."""
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
