"""Random requests of every kind that a suite draws, for tests of whether a provenance draws its picture again."""

from __future__ import annotations

import io
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import PIL.Image

from bottega.client import Box, ControlNet, Ellipse, Lora, Picture
from bottega.client.types.options import SAMPLERS
from tests.samples.edits import box_mask, ellipse_mask, template

CONTROLNETS = ("edges", "layout")
PROMPTS = (
    "a big red star on the left on a blue background",
    "a small red star on the left on a blue background",
    "a small green circle on a white background",
    "a yellow square and a purple ring",
    "a big pink diamond at the top on a black background",
    "an orange cross",
)
_KARRAS = frozenset({"euler", "dpmpp_2m"})
_FORMATS: tuple[Mapping[str, Any], ...] = (
    *({} for _ in range(8)),
    {"format": "webp", "quality": 100},
    {"format": "webp"},
    {"format": "jpeg", "quality": 95},
)
_SIZES: tuple[Mapping[str, Any], ...] = (
    *({} for _ in range(8)),
    {"width": 80, "height": 64},
    {"width": 48, "height": 72},
    {"width": 144, "height": 120},
)
# What requests that may start from each other's latents have in common.
_CACHED: tuple[Mapping[str, Any], ...] = (
    {"num_inference_steps": 10, "guidance_scale": 4.0},
    {"num_inference_steps": 10, "guidance_scale": 4.0, "sampler": "euler_ancestral"},
    {"num_inference_steps": 9, "sampler": "dpmpp_2m", "use_karras_sigmas": True},
    {"num_inference_steps": 10, "sampler": "ddim", "negative_prompt": "a star"},
)
# What edits that may use each other's recordings have in common.
_EDITED: Mapping[str, Any] = {"num_inference_steps": 6, "guidance_scale": 4.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomRequest:
    """A request and what has to be given again to draw it again."""

    kind: str
    prompt: str
    num_images: int = 1
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def inputs(self) -> dict[str, Any]:
        """The source and the mask, which a picture does not carry."""
        return {name: self.options[name] for name in ("image", "mask_image") if name in self.options}

    @property
    def control_images(self) -> list[Any]:
        """The images of its ControlNets, in their order."""
        return [net.image for net in self.options.get("controlnets", ())]


class RandomRequests:
    """Makes requests of every kind in turn.

    Args:
        rng: Decides everything.
        loras: Names of the LoRAs that the suite has.
        late_loras: Names of LoRAs that take so long to load that bounded loading begins without them.
        few: Whether there are few requests, so that what may start from each other's latents has to be alike.
    """

    def __init__(
        self, rng: random.Random, *, loras: Sequence[str], late_loras: Sequence[str], few: bool = False
    ) -> None:
        self._rng = rng
        self._cached_keys = _CACHED[: 1 if few else None]
        self._few = few
        self._loras = loras
        self._late_loras = late_loras
        self._kept: list[Picture] = []
        self._sources = _sources()
        self._makers: dict[str, Callable[[], RandomRequest]] = {
            "text": self._text,
            "several pictures": self._several,
            "image to image": self._image_to_image,
            "ControlNets": self._controlled,
            "LoRAs": self._styled,
            "late LoRAs": self._styled_late,
            "LoRAs from a step": self._styled_from,
            "cached start": self._cached,
            "cached start with add-ons": self._cached_with_addons,
            "exact edit": self._exact_edit,
            "edit": self._edit,
            "edit of a crop": self._cropped_edit,
            "kept for editing": self._kept_for_editing,
            "edit of a kept picture": self._edit_of_kept,
            "everything": self._everything,
        }

    def to_begin_with(self) -> list[RandomRequest]:
        """Return requests after which others find latents to start from, and images of which edits are recorded."""
        cached = [
            RandomRequest(kind="cached start", prompt=prompt, options={**common, **addons, "fidelity": "exact"})
            for common, addons in (
                *((common, {}) for common in self._cached_keys),
                *((_CACHED[0], each) for each in self._addons() if not self._few),
            )
            for prompt in PROMPTS[:2]
        ]
        edited = [
            RandomRequest(
                kind="edit", prompt=PROMPTS[0], options={**_EDITED, "image": source, "mask_image": _masks()[0]}
            )
            for source in self._sources[: 1 if self._few else 2]
        ]
        return [*cached, *edited]

    @property
    def kinds(self) -> list[str]:
        """The kinds, in the order in which they take turns."""
        return list(self._makers)

    def make(self, number: int) -> RandomRequest:
        """Return the request of this number in the sequence."""
        return self._makers[self.kinds[number % len(self._makers)]]()

    def keep(self, picture: Picture) -> None:
        """Note a picture that was drawn to be edited."""
        self._kept.append(picture)

    def _request(self, kind: str, *parts: Mapping[str, Any], num_images: int = 1) -> RandomRequest:
        options: dict[str, Any] = {}
        for part in parts:
            options |= part
        prompt = self._rng.choice(PROMPTS)
        return RandomRequest(kind=kind, prompt=prompt, num_images=num_images, options=options)

    def _text(self) -> RandomRequest:
        return self._request("text", self._basics(), self._second_prompt(), self._format())

    def _several(self) -> RandomRequest:
        num_images = self._rng.randint(2, 4)
        return self._request("several pictures", self._basics(), self._format(), num_images=num_images)

    def _image_to_image(self) -> RandomRequest:
        source = {"image": self._source(), **self._maybe(0.7, strength=self._rng.uniform(0.3, 1.0))}
        basics = self._basics(least_steps=5)
        return self._request("image to image", basics, source, self._format(), num_images=self._rng.choice((1, 1, 2)))

    def _controlled(self) -> RandomRequest:
        nets = {"controlnets": self._controlnets(self._rng.randint(1, 2))}
        stale = self._maybe(0.4, stale_residuals=self._rng.random() < 0.7)
        image = self._maybe(0.3, image=self._source(), strength=0.7)
        return self._request("ControlNets", self._basics(stale=stale), nets, stale, image)

    def _styled(self) -> RandomRequest:
        chosen = self._rng.sample(self._loras, self._rng.randint(1, min(3, len(self._loras))))
        measured = self._rng.random() < 0.15
        scales = [round(self._rng.uniform(0.3, 1.1), 2) for _ in chosen]
        loras = [Lora(name, scale, measure_similarity=measured) for name, scale in zip(chosen, scales, strict=True)]
        return self._request("LoRAs", self._basics(), {"lora": loras}, self._format())

    def _styled_late(self) -> RandomRequest:
        basics = self._basics(seed=self._rng.random() < 0.5, least_steps=6)
        basics.pop("fidelity", None)
        bound = self._rng.choice((None, 2, 4))
        chosen = self._rng.sample(self._late_loras, self._rng.randint(1, min(2, len(self._late_loras))))
        loras = [Lora(name, 0.8, max_step=bound) for name in chosen]
        late = {"bounded_lora_loading": True, "lora": loras}
        return self._request("late LoRAs", basics, late, num_images=self._rng.choice((1, 1, 2)))

    def _styled_from(self) -> RandomRequest:
        basics = self._basics(least_steps=5)
        basics["fidelity"] = self._rng.choice(("balanced", "fast"))
        step = self._rng.randint(0, 3)
        loras = [Lora(name, 0.7, from_step=step) for name in self._rng.sample(self._loras, 2)]
        return self._request("LoRAs from a step", basics, {"lora": loras})

    def _cached(self) -> RandomRequest:
        seed = self._maybe(0.3, seed=self._rng.randrange(1000))
        fidelity = {"fidelity": self._rng.choice(("balanced", "fast"))}
        num_images = self._rng.choice((1, 1, 1, 3))
        return self._request(
            "cached start", self._rng.choice(self._cached_keys), seed, fidelity, self._format(), num_images=num_images
        )

    def _cached_with_addons(self) -> RandomRequest:
        addons = self._rng.choice((*self._addons(), {"lora": [Lora(self._loras[0], 0.8, max_step=5)]}))
        fidelity = {"fidelity": self._rng.choice(("balanced", "fast"))}
        return self._request("cached start with add-ons", _CACHED[0], addons, fidelity)

    def _addons(self) -> tuple[Mapping[str, Any], ...]:
        """Return add-ons with which requests find latents that were recorded with the same."""
        return (
            {"lora": [Lora(self._loras[1], 0.8)], "bounded_lora_loading": False},
            {"controlnets": [ControlNet(CONTROLNETS[0], self._sources[0])], "stale_residuals": False},
        )

    def _exact_edit(self) -> RandomRequest:
        exact = {"seed": self._rng.randrange(1 << 32), **self._maybe(0.5, fidelity="exact")}
        return self._request("exact edit", self._drawing(), self._editing(), exact, num_images=self._rng.choice((1, 2)))

    def _edit(self) -> RandomRequest:
        drawing = _EDITED if self._rng.random() < 0.7 else self._drawing()
        num_images = self._rng.choice((1, 1, 3))
        return self._request("edit", drawing, self._editing(few=True), self._approximate_edit(), num_images=num_images)

    def _cropped_edit(self) -> RandomRequest:
        crop = {"padding_mask_crop": self._rng.choice((0, 8, 24))}
        seed = self._maybe(0.5, seed=self._rng.randrange(1000))
        return self._request("edit of a crop", self._drawing(), self._editing(), crop, seed)

    def _kept_for_editing(self) -> RandomRequest:
        kept = {"keep_for_editing": True, **self._maybe(0.5, seed=self._rng.randrange(1000))}
        return self._request("kept for editing", self._drawing(), kept, num_images=self._rng.choice((1, 2)))

    def _edit_of_kept(self) -> RandomRequest:
        source = self._rng.choice(self._kept).data if self._kept else self._source()
        editing = {**self._editing(), "image": source}
        return self._request("edit of a kept picture", self._drawing(), editing, self._approximate_edit())

    def _everything(self) -> RandomRequest:
        """Every add-on at once, so that their decisions are pinned beside each other."""
        parts: list[Mapping[str, Any]] = [
            self._drawing(),
            {"lora": [Lora(name, 0.5) for name in self._rng.sample(self._loras, 2)]},
            {"controlnets": self._controlnets(2)},
            self._maybe(0.5, **self._editing()),
            self._maybe(0.5, seed=self._rng.randrange(1000)),
            self._maybe(0.5, fidelity="fast"),
        ]
        return self._request("everything", *parts)

    def _drawing(self) -> dict[str, Any]:
        """Return how it is drawn, without a seed and a fidelity."""
        rng = self._rng
        options: dict[str, Any] = {"num_inference_steps": rng.randint(4, 10)}
        options |= self._maybe(0.7, guidance_scale=rng.choice((1.0, 2.5, 4.0, 7.0)))
        options |= self._maybe(0.2, guidance_rescale=0.6)
        options |= self._maybe(0.3, negative_prompt=rng.choice(("", "a circle")))
        options |= self._maybe(0.2, prompt_syntax=rng.choice(("plain", "weighted")))
        options |= self._maybe(0.1, clip_skip=1)
        options |= self._maybe(0.7, sampler=rng.choice(list(SAMPLERS)))
        if options.get("sampler") in _KARRAS:
            options |= self._maybe(0.5, use_karras_sigmas=rng.random() < 0.7)
        return options

    def _basics(
        self, *, seed: bool | None = None, least_steps: int = 4, stale: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        options = {**self._drawing(), **self._rng.choice(_SIZES)}
        options["num_inference_steps"] = self._rng.randint(least_steps, 10)
        if self._rng.random() < 0.6 if seed is None else seed:
            options["seed"] = self._rng.randrange(1 << 40)
        choices = ["balanced", "fast"] if stale else ["exact", "balanced", "fast"]
        return options | self._maybe(0.5, fidelity=self._rng.choice(choices))

    def _second_prompt(self) -> dict[str, Any]:
        return {
            **self._maybe(0.25, prompt_2=self._rng.choice(PROMPTS)),
            **self._maybe(0.2, negative_prompt_2="a square"),
        }

    def _format(self) -> Mapping[str, Any]:
        return self._rng.choice(_FORMATS)

    def _source(self) -> bytes:
        return self._rng.choice(self._sources)

    def _controlnets(self, count: int) -> list[ControlNet]:
        names = self._rng.sample(CONTROLNETS, count)
        return [
            ControlNet(
                name,
                self._source(),
                controlnet_conditioning_scale=round(self._rng.uniform(0.4, 1.0), 2),
                control_guidance_start=self._rng.choice((0.0, 0.0, 0.2)),
                control_guidance_end=self._rng.choice((1.0, 1.0, 0.7)),
                guess_mode=self._rng.random() < 0.2,
                measure_similarity=self._rng.random() < 0.1,
            )
            for name in names
        ]

    def _editing(self, *, few: bool = False) -> dict[str, Any]:
        """Return source, mask and how they are read. few: of sources that come again, so that recordings are used."""
        rng = self._rng
        options: dict[str, Any] = {
            "image": rng.choice(self._sources[: 1 if self._few else 2]) if few else self._source(),
            **(rng.choice([{"mask_image": mask} for mask in _masks()] + [_alpha_mask()])),
            **self._maybe(0.3, strength=rng.uniform(0.5, 1.0)),
            **self._maybe(0.25, keep_unmasked=False),
        }
        if "keep_unmasked" not in options:
            options |= self._maybe(0.3, mask_feather=rng.choice((0, 3, 16)))
        return options

    def _approximate_edit(self) -> dict[str, Any]:
        return self._rng.choice(
            (
                {},
                {"fidelity": "balanced"},
                {"fidelity": "fast"},
                {"fidelity": "balanced", "seed": self._rng.randrange(1000)},
                {"fidelity": "fast", "seed": self._rng.randrange(1000)},
                {"masked_blocks": True},
                {"masked_blocks": False},
            )
        )

    def _maybe(self, share: float, **options: Any) -> dict[str, Any]:
        return options if self._rng.random() < share else {}


def _sources() -> list[bytes]:
    """Return images of several sizes and formats."""
    noise = np.random.default_rng(3).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    photo = io.BytesIO()
    template(100, 80).save(photo, format="JPEG", quality=92)
    return [
        _encoded(template()),
        _encoded(template().rotate(90)),
        _encoded(PIL.Image.fromarray(noise)),
        _encoded(template(72, 96).convert("L")),
        photo.getvalue(),
        _transparent(template(80, 80)),
    ]


def _masks() -> list[Any]:
    return [
        Box(8, 12, 30, 28),
        [Box(0, 0, 20, 20), Ellipse(30, 30, 25, 20)],
        _encoded(box_mask()),
        _encoded(ellipse_mask()),
        _encoded(ellipse_mask((10, 4, 90, 60), 120, 90)),
    ]


def _alpha_mask() -> dict[str, Any]:
    """Return a mask whose transparency says what is redrawn."""
    return {"mask_image": _transparent(template()), "mask_alpha": True}


def _transparent(image: PIL.Image.Image) -> bytes:
    """Return the image with an ellipse that is transparent."""
    image = image.convert("RGBA")
    image.putalpha(ellipse_mask((10, 10, 50, 44), *image.size).point(lambda value: 255 - value))
    return _encoded(image)


def _encoded(image: PIL.Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()
