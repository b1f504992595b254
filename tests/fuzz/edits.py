"""The fixed corpus of edits: masks, what goes with them, and what is kept for them."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from PIL import Image

from bottega import rules
from bottega.v1.generation_pb2 import Techniques
from tests.fuzz.case import INVALID, OK, PRECONDITION, Case, shown
from tests.fuzz.images import good_images, some_bad_images, some_good_images, too_large_image
from tests.samples.hostile_images import saved

_EXACT, _BALANCED = 1, 2
_RECORDING = "0123456789abcdef" * 2
_BAD_RECORDINGS = ("", "x", _RECORDING[1:], f"{_RECORDING}0", _RECORDING.upper(), f"{_RECORDING}\n", "x" * (1 << 20))
_OF_MASKS: dict[str, Any] = {"mask_alpha": True, "padding_mask_crop": 8, "keep_unmasked": True, "mask_feather": 8}


@functools.cache
def mask() -> bytes:
    """One that redraws a part of a picture."""
    image = Image.new("L", (64, 64))
    image.paste(255, (16, 16, 48, 40))
    return saved(image)


@functools.cache
def alpha_mask() -> bytes:
    """One whose transparent part redraws a part of a picture."""
    image = Image.new("RGBA", (64, 64), "white")
    image.paste((0, 0, 0, 0), (16, 16, 48, 40))
    return saved(image)


def edit(**said: Any) -> dict[str, Any]:
    """The fields of an edit as the gateway fills them in."""
    filled = {"strength": 0.5, "keep_unmasked": True, "mask_feather": 8}
    return {"image": good_images()["png"], "mask_image": mask(), **filled, **said}


def edit_drawings(case: Any) -> Iterator[Case]:
    """Of callers. case: makes one."""
    image = good_images()["png"]
    yield case("an edit", image=image, mask_image=mask())
    yield case("an edit with all that is said of one", **edit(padding_mask_crop=8))
    for name, bad in some_bad_images().items():
        yield case(f"bad mask: {name}", INVALID, "spec.mask_image", image=image, mask_image=bad)
        yield case(f"bad image of a mask: {name}", INVALID, "spec.image", image=bad, mask_image=mask())
    yield from _empty_masks(case, image)
    yield from _contradictions(case)
    wrong = (*(f"spec.{name}" for name in _OF_MASKS), "spec.strength")
    out: dict[str, Any] = {
        **_OF_MASKS,
        "padding_mask_crop": -1,
        "mask_feather": 257,
        "keep_unmasked": False,
        "strength": 0.0,
    }
    yield case("an edit with all that is wrong", INVALID, *wrong, **out)
    yield case("a picture kept for editing", keep_for_editing=True)
    for value in (False, True):
        switched = Techniques(masked_blocks=value)
        for seed in (None, 1):
            yield case(f"masked_blocks {value}, seed {seed}", techniques=switched, seed=seed, **edit())
    on, field = Techniques(masked_blocks=True), "spec.techniques.masked_blocks"
    yield case("masked_blocks and exact", INVALID, field, techniques=on, fidelity=_EXACT, **edit())
    yield case("masked_blocks and balanced", techniques=on, fidelity=_BALANCED, **edit())
    taken = Techniques(recording=_RECORDING)
    for words in ({}, {"seed": 1}, {"fidelity": _BALANCED}):
        yield case(f"what an edit took, with {words}", PRECONDITION, techniques=taken, **edit(**words))
    yield from _bad_recordings(case)


def edit_attempts(case: Any) -> Iterator[Case]:
    """Of a gateway, to a worker. case: makes one."""
    yield case("an edit", **edit())
    said = edit(mask_image=alpha_mask(), padding_mask_crop=8, mask_alpha=True)
    yield case("an edit with all that is said of one", **said)
    for name, good in some_good_images().items():
        yield case(f"good mask: {name}", **edit(mask_image=good))
    for name, bad in {"empty": b"", "too large": too_large_image()}.items():
        yield case(f"bad mask: {name}", INVALID, "spec.mask_image", **edit(mask_image=bad))
    for name in ("strength", "keep_unmasked", "mask_feather"):
        yield case(f"an edit without {name}", INVALID, f"spec.{name}", **edit(**{name: None}))
    yield from _contradictions(case)
    yield case("a picture kept for editing", keep_for_editing=True)
    most = rules.MAX_KEPT_BYTES
    for size, code, *fields in ((most, OK), (most + 1, INVALID, "kept")):
        yield case(f"{size} bytes of kept latents", code, *fields, whole={"kept": bytes(size)}, **edit())
    yield case("kept latents without a mask", INVALID, "kept", whole={"kept": b"x"})
    taken, field = Techniques(recording=_RECORDING), "spec.techniques.recording"
    yield case("what an edit took", INVALID, field, techniques=taken, **edit())
    yield from _bad_recordings(case)


def _empty_masks(case: Any, image: bytes) -> Iterator[Case]:
    black, opaque = saved(Image.new("L", (64, 64))), saved(Image.new("RGB", (64, 64), "white"))
    speck = Image.new("L", (64, 64))
    speck.putpixel((33, 33), 255)
    empty: dict[str, dict[str, Any]] = {
        "black": {"mask_image": black},
        "opaque": {"mask_image": opaque, "mask_alpha": True},
    }
    empty |= {"black and cut": {"mask_image": black, "padding_mask_crop": 0}, "a speck": {"mask_image": saved(speck)}}
    for name, said in empty.items():
        yield case(f"an empty mask: {name}", INVALID, "spec.mask_image", image=image, width=64, height=64, **said)


def _bad_recordings(case: Any) -> Iterator[Case]:
    field = "spec.techniques.recording"
    for bad in _BAD_RECORDINGS:
        yield case(f"a recording {shown(bad)}", INVALID, field, techniques=Techniques(recording=bad), **edit())
    yield case("a recording without a mask", INVALID, field, techniques=Techniques(recording=_RECORDING))


def _contradictions(case: Any) -> Iterator[Case]:
    for name, value in _OF_MASKS.items():
        yield case(f"{name} without a mask", INVALID, f"spec.{name}", **{name: value})
    yield case("a mask without an image", INVALID, "spec.mask_image", **edit(image=None, strength=None))
    unkept = edit(keep_unmasked=False)
    yield case("a feather of nothing kept", INVALID, "spec.mask_feather", **unkept)
    yield case("unmasked pixels not kept", **{**unkept, "mask_feather": None})
    yield case("an edit kept for editing", INVALID, "spec.keep_for_editing", **edit(keep_for_editing=True))
