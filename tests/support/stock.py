"""Stock Diffusers, in this process: the reference that latents and pictures are compared with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import numpy as np
import PIL.Image
import torch
from diffusers import (
    StableDiffusionXLImg2ImgPipeline,
    StableDiffusionXLInpaintPipeline,
    StableDiffusionXLPipeline,
)
from numpy.typing import NDArray
from torch import Tensor

from bottega.engine.spec import ResolvedSpec
from bottega.miniature import WEIGHTS

Pixels = NDArray[np.uint8]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Reference:
    """What stock draws. latent: [1, channels, height, width], finished; pixels: uint8 [height, width, 3]."""

    latent: Tensor
    pixels: Pixels


class Stock:
    """Draws with the pipelines as Diffusers ships them; `pixels` are uint8 [height, width, 3]."""

    def __init__(self, folder: Path = WEIGHTS, *, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
        self.text = load_stock(folder, dtype).to(device)
        self._image = variant(self.text, StableDiffusionXLImg2ImgPipeline)
        self._inpaint = variant(self.text, StableDiffusionXLInpaintPipeline)
        self._scheduler_config = self.text.scheduler.config

    def draw(self, prompt: str, *, seed: int, scheduler: str = "", karras: bool = False, **options: Any) -> Pixels:
        """Text to image. scheduler: name of a class of Diffusers; the model's own without one."""
        self.text.scheduler = self._scheduler(scheduler, karras)
        return pixels_of(self.text(prompt, generator=_generator(seed), **options).images[0])

    def redraw(self, prompt: str, image: PIL.Image.Image, *, seed: int, **options: Any) -> Pixels:
        """Image to image, with the model's own scheduler."""
        self._image.scheduler = self._scheduler("", False)
        return pixels_of(self._image(prompt, image=image, generator=_generator(seed), **options).images[0])

    def reference(
        self,
        spec: ResolvedSpec,
        *,
        index: int = 0,
        image: PIL.Image.Image | None = None,
        layout: torch.memory_format = torch.preserve_format,
    ) -> Reference:
        """Image `index` of a spec: a single run with its seed plus `index`.

        image: source of image-to-image. layout: of the first latent in memory. Diffusers leaves that of a picture as
        the VAE made it, channels last; sums are made in another order then, and differ in their last bits.
        """
        pipeline = self.text if image is None else self._image
        options: dict[str, Any] = {"width": spec.width, "height": spec.height}
        if image is not None:
            options = {"image": image, "strength": spec.strength}
        pipeline.scheduler = self._scheduler_of(spec)
        prepare, latents = pipeline.prepare_latents, list[Tensor]()

        def prepared(*args: Any, **kwargs: Any) -> Tensor:
            latent: Tensor = prepare(*args, **kwargs)
            return latent.clone(memory_format=layout)

        def keep(_: Any, __: int, ___: Any, kept: dict[str, Tensor]) -> dict[str, Tensor]:
            latents.append(kept["latents"])
            return kept

        generator = _generator(spec.seed + index)
        with patch.object(pipeline, "prepare_latents", prepared):
            out = pipeline(
                **said(spec), **options, **custom_lists(spec), generator=generator, callback_on_step_end=keep
            )
        return Reference(latent=latents[-1], pixels=pixels_of(out.images[0]))

    def reference_list(self, spec: ResolvedSpec) -> list[Reference]:
        """All images of a spec with several prompts: one run with their list, and a generator for each."""
        self.text.scheduler = self._scheduler_of(spec)
        latents = list[Tensor]()

        def keep(_: Any, __: int, ___: Any, kept: dict[str, Tensor]) -> dict[str, Tensor]:
            latents.append(kept["latents"])
            return kept

        count = len(spec.prompts)
        # Diffusers takes lists of the second prompts beside a list of the first ones.
        texts = {name: [text] * count for name, text in said(spec).items() if isinstance(text, str)}
        out = self.text(
            **(said(spec) | texts | {"prompt": list(spec.prompts)}),
            width=spec.width,
            height=spec.height,
            generator=[_generator(spec.seed + index) for index in range(count)],
            callback_on_step_end=keep,
        )
        return [
            Reference(latent=latents[-1][index : index + 1], pixels=pixels_of(image))
            for index, image in enumerate(out.images)
        ]

    def edit(
        self,
        spec: ResolvedSpec,
        image: PIL.Image.Image,
        mask: PIL.Image.Image,
        *,
        index: int = 0,
        padding_mask_crop: int | None = None,
    ) -> Reference:
        """Image `index` of an edit: the inpainting pipeline, with the model's own UNet of four channels."""
        pipeline = self._inpaint
        pipeline.scheduler = self._scheduler_of(spec)
        latents = list[Tensor]()

        def keep(_: Any, __: int, ___: Any, kept: dict[str, Tensor]) -> dict[str, Tensor]:
            latents.append(kept["latents"])
            return kept

        out = pipeline(
            **said(spec),
            **custom_lists(spec),
            **edit_options(spec, image, mask),
            padding_mask_crop=padding_mask_crop,
            generator=_generator(spec.seed + index),
            callback_on_step_end=keep,
        )
        return Reference(latent=latents[-1], pixels=pixels_of(out.images[0]))

    def _scheduler(self, name: str, karras: bool, **overrides: Any) -> Any:
        kind = getattr(diffusers, name or self._scheduler_config["_class_name"])
        extra = {"use_karras_sigmas": True} if karras else {}
        return kind.from_config(self._scheduler_config, **overrides, **extra)

    def _scheduler_of(self, spec: ResolvedSpec) -> Any:
        kind = spec.sampler
        karras = spec.use_karras_sigmas
        return self._scheduler(
            kind.scheduler_class.__name__, karras, **kind.overrides, **spec.schedule.overrides(kind.value, None)
        )


def load_stock(
    folder: Path = WEIGHTS, dtype: torch.dtype = torch.float32, *, variant: str | None = None, **parts: Any
) -> Any:
    """Return the text-to-image pipeline of a model; of the embedded one without a folder.

    Args:
        folder: The model's.
        dtype: Element type of its weights in memory.
        variant: Of its files of weights, such as `fp16`.
        parts: Parts by name, in place of the folder's; None leaves one out.
    """
    pipeline = StableDiffusionXLPipeline.from_pretrained(
        folder, use_safetensors=True, dtype=dtype, variant=variant, add_watermarker=False, **parts
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def variant(stock: Any, kind: Any = StableDiffusionXLPipeline, **parts: Any) -> Any:
    """A stock pipeline with some parts replaced."""
    pipeline = kind(
        **(stock.components | parts),
        force_zeros_for_empty_prompt=stock.config.force_zeros_for_empty_prompt,
        add_watermarker=False,
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def said(spec: ResolvedSpec) -> dict[str, Any]:
    """What a spec says of the drawing itself, as arguments of a pipeline."""
    return {
        "prompt": spec.prompt,
        "prompt_2": spec.prompt_2,
        "negative_prompt": spec.negative_prompt,
        "negative_prompt_2": spec.negative_prompt_2,
        "num_inference_steps": spec.num_inference_steps,
        "guidance_scale": spec.guidance_scale,
        "guidance_rescale": spec.guidance_rescale,
        "clip_skip": spec.clip_skip,
        **({"max_sequence_length": spec.max_sequence_length} if spec.max_sequence_length else {}),
    }


def custom_lists(spec: ResolvedSpec) -> dict[str, Any]:
    """The timesteps or sigmas of a spec, as arguments of a pipeline."""
    lists = {"timesteps": spec.schedule.timesteps, "sigmas": spec.schedule.sigmas}
    return {name: list(values) for name, values in lists.items() if values}


def edit_options(spec: ResolvedSpec, image: PIL.Image.Image, mask: PIL.Image.Image) -> dict[str, Any]:
    """What a spec says of an edit of this image, as arguments of an inpainting pipeline."""
    size = {"width": spec.width, "height": spec.height}
    return {"image": image, "mask_image": mask, "strength": spec.strength, **size}


def latent_of(pipeline: Any, spec: ResolvedSpec, **options: Any) -> Tensor:
    """What a pipeline, with the scheduler that it has, makes of the spec."""
    latent: Tensor = pipeline(**said(spec), generator=_generator(spec.seed), output_type="latent", **options).images
    return latent


def deviation(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, as a share of max(1, max|theirs|)."""
    return float((ours - theirs).abs().max()) / max(1.0, float(theirs.abs().max()))


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    """Within 1e-4 x max(1, max|latent|)."""
    assert deviation(ours, theirs) <= 1e-4


def assert_same_image(ours: Pixels, theirs: Pixels) -> None:
    """The same image, as the project means it: no value off by more than 1, at most .1 % of them off."""
    assert ours.shape == theirs.shape
    off = np.abs(ours.astype(int) - theirs.astype(int))
    assert off.max() <= 1, f"a value is off by {off.max()}"
    share = float((off > 0).mean())
    assert share <= 0.001, f"{share:.2%} of the values are off"


def pixels_of(image: PIL.Image.Image) -> Pixels:
    """uint8 [height, width, 3]."""
    return np.asarray(image.convert("RGB"))


def _generator(seed: int) -> torch.Generator:
    return torch.Generator("cpu").manual_seed(seed)
