"""Stock Diffusers, in this process: the reference that the suite's pictures are compared with.

It knows nothing of Bottega but where its embedded model is.
"""

from __future__ import annotations

from typing import Any

import diffusers
import numpy as np
import PIL.Image
import torch
from diffusers import StableDiffusionXLImg2ImgPipeline, StableDiffusionXLPipeline
from numpy.typing import NDArray

from bottega.miniature import WEIGHTS

Pixels = NDArray[np.uint8]


class Stock:
    """Draws with the pipelines as Diffusers ships them; `pixels` are uint8 [height, width, 3]."""

    def __init__(self) -> None:
        self._text = StableDiffusionXLPipeline.from_pretrained(
            WEIGHTS, use_safetensors=True, dtype=torch.float32, add_watermarker=False
        )
        parts = dict(self._text.components)
        settings = {"force_zeros_for_empty_prompt": self._text.config.force_zeros_for_empty_prompt}
        self._image = StableDiffusionXLImg2ImgPipeline(**parts, **settings, add_watermarker=False)
        self._scheduler_config = self._text.scheduler.config
        for pipeline in (self._text, self._image):
            pipeline.set_progress_bar_config(disable=True)

    def draw(self, prompt: str, *, seed: int, scheduler: str = "", karras: bool = False, **options: Any) -> Pixels:
        """Text to image. scheduler: name of a class of Diffusers; the model's own without one."""
        self._text.scheduler = self._scheduler(scheduler, karras)
        return _pixels(self._text(prompt, generator=_generator(seed), **options).images[0])

    def redraw(self, prompt: str, image: PIL.Image.Image, *, seed: int, **options: Any) -> Pixels:
        """Image to image, with the model's own scheduler."""
        self._image.scheduler = self._scheduler("", False)
        return _pixels(self._image(prompt, image=image, generator=_generator(seed), **options).images[0])

    def _scheduler(self, name: str, karras: bool) -> Any:
        kind = getattr(diffusers, name or self._scheduler_config["_class_name"])
        extra = {"use_karras_sigmas": True} if karras else {}
        return kind.from_config(self._scheduler_config, **extra)


def assert_same_image(ours: PIL.Image.Image, stock: Pixels) -> None:
    """The same image, as the project means it: no value off by more than 1, at most .1 % of them off."""
    assert ours.size == (stock.shape[1], stock.shape[0])
    off = np.abs(_pixels(ours).astype(int) - stock.astype(int))
    assert off.max() <= 1, f"a value is off by {off.max()}"
    share = float((off > 0).mean())
    assert share <= 0.001, f"{share:.2%} of the values are off"


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)


def _pixels(image: PIL.Image.Image) -> Pixels:
    return np.asarray(image.convert("RGB"))
