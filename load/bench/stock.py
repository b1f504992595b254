"""Stock Diffusers as a side of a bench: pictures and edits, with ControlNets and LoRAs."""

from __future__ import annotations

import functools
import io
import json
import time
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from load.bench.framework import GUIDANCE_SCALE
from load.bench.side_process import Answer

# Diffusers' own default of inpainting, and the suite's.
STRENGTH = 0.9999
# Of T5 with Flux.1 schnell, whose topology the bench's models have: the suite's default, as Diffusers' is that of dev.
_SCHNELL_TOKENS = 256
LATENT = "latent"
"""Name of the tensor in a file of a latent."""


def stock_pipeline(model: Any, kind: Any = None, **parts: Any) -> Any:
    """Return a pipeline as Diffusers ships it, without progress bars.

    Args:
        model: Its folder.
        kind: Its class; by default the one that the folder names.
        parts: Other arguments of `from_pretrained`, such as its dtype, float32 by default.
    """
    import torch
    import transformers
    from diffusers import DiffusionPipeline
    from diffusers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # it warns of casts that it does itself
    transformers.logging.disable_progress_bar()
    # Diffusers asks for parts that a model leaves out, such as T5, by name.
    index = json.loads((Path(model) / "model_index.json").read_text())
    absent = {name: None for name, entry in index.items() if entry == [None, None]}
    pipeline = (kind or DiffusionPipeline).from_pretrained(
        model, **{"use_safetensors": True, "dtype": torch.float32, "add_watermarker": False, **absent, **parts}
    )
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def controlnet_classes(pipeline: Any) -> tuple[Any, Any]:
    """Return the classes of the ControlNets for a pipeline's network, and of a pipeline with them."""
    import diffusers

    name = type(pipeline).__name__
    series = {"StableDiffusion3Pipeline": "SD3", "FluxPipeline": "Flux"}.get(name, "")
    kind = name.replace("Pipeline", "ControlNetPipeline")
    return getattr(diffusers, f"{series}ControlNetModel"), getattr(diffusers, kind)


def control_argument(pipeline: Any) -> str:
    """Return the argument of such a pipeline that takes control images."""
    return "image" if hasattr(pipeline, "unet") else "control_image"


def stock(*, model: str) -> Answer:
    """Make a side that draws; its questions are the arguments of `Stock.draw`."""
    return Stock(model).draw


class Stock:
    """The pipelines of one model. ControlNets stay loaded, and LoRAs come and go.

    Args:
        model: Its folder.
    """

    def __init__(self, model: str) -> None:
        # PEFT's, of every LoRA beside another one.
        warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
        warnings.filterwarnings("ignore", message="`FluxPosEmbed` is deprecated")  # Diffusers uses it itself.
        self.pipeline = stock_pipeline(model)
        self._is_flux = type(self.pipeline).__name__ == "FluxPipeline"
        self._nets: dict[str, Any] = {}
        self._loras: tuple[str, ...] = ()
        self._fused = False
        self._begun_s: list[float] = []
        # The steps begin with the first call of the network: before it, prompt and image are encoded.
        network = getattr(self.pipeline, "transformer", None) or self.pipeline.unet
        network.register_forward_pre_hook(lambda *_: self._begun_s.append(time.perf_counter()))

    def draw(
        self,
        *,
        prompts: Sequence[str],
        seeds: Sequence[int],
        steps: int,
        guidance_scale: float = GUIDANCE_SCALE,
        size: int | None = None,
        nets: Sequence[str] = (),
        images: Sequence[Any] = (),
        net_scale: float = 1.0,
        cold: bool = False,
        boxes: Sequence[Sequence[int]] = (),
        loras: Sequence[str] = (),
        fetch_s: float = 0.0,
        fuse: bool = True,
        stay: bool = False,
        latent: str = "",
        encoded: bool = False,
    ) -> dict[str, float]:
        """Draw a batch in one call of a pipeline.

        Args:
            size: Pixels a side; None is the model's own.
            nets: Folders of ControlNets.
            images: Files: of each ControlNet a list with an image for each picture, or of each edit its image.
            cold: Whether ControlNets are loaded for this batch.
            boxes: Of edits, what is redrawn: left, top, width and height in pixels.
            loras: Files as Diffusers saves them.
            fetch_s: Seconds that the LoRAs take to come from a remote store.
            fuse: Whether LoRAs go into the weights.
            stay: Whether they are left there for a next batch with the same ones.
            latent: A safetensors file for the finished latent, which is not decoded then.
            encoded: Whether pictures are encoded as PNG.

        Returns:
            seconds: Of all of it. lora_s: Of LoRAs. denoise_s: Of the steps. step_s: Of a step in the middle.
            processor_s: Of all cores.
        """
        import torch

        began_s, processor_s = time.perf_counter(), time.process_time()
        pipeline, options = self._with_controlnets(nets, cold=cold), dict[str, Any]()
        if nets:
            options = {
                # Lists of images would be taken for one picture alone.
                control_argument(pipeline): [_pixels(of_net) for of_net in images],
                "controlnet_conditioning_scale": [net_scale] * len(nets),
            }
        if boxes:
            pipeline, opened = self._inpaint, [_opened(image) for image in images]
            masks = [_mask(image.size, tuple(box)) for image, box in zip(opened, boxes, strict=True)]
            width, height = opened[0].size
            options = {"image": opened, "mask_image": masks, "strength": STRENGTH, "width": width, "height": height}
        elif size:
            options |= {"width": size, "height": size}
        lora_s = self._set_loras(tuple(loras), fuse=fuse, fetch_s=fetch_s)
        ends_s: list[float] = []

        def step_ended(*_: object) -> dict[str, Any]:
            ends_s.append(time.perf_counter())
            return {}

        self._begun_s.clear()
        if self._is_flux:
            options["max_sequence_length"] = _SCHNELL_TOKENS
        made = pipeline(
            list(prompts),
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
            generator=[torch.Generator("cpu").manual_seed(seed) for seed in seeds],
            callback_on_step_end=step_ended,
            output_type="latent" if latent else "pil",
            **options,
        ).images
        for image in made if encoded else ():
            image.save(io.BytesIO(), "PNG")
        if latent:
            from safetensors.torch import save_file

            if self._is_flux:
                sides = options["height"], options["width"]
                made = pipeline._unpack_latents(made, *sides, pipeline.vae_scale_factor)
            save_file({LATENT: made.contiguous()}, latent)
        if not stay:
            lora_s += self._set_loras((), fuse=False)
        return {
            "seconds": time.perf_counter() - began_s,
            "lora_s": lora_s,
            "denoise_s": ends_s[-1] - self._begun_s[0],
            "step_s": median([after - before for before, after in pairwise(ends_s)] or [0.0]),
            "processor_s": time.process_time() - processor_s,
        }

    @functools.cached_property
    def _inpaint(self) -> Any:
        import diffusers

        name = type(self.pipeline).__name__.replace("Pipeline", "InpaintPipeline")
        return self._sibling(getattr(diffusers, name))

    def _with_controlnets(self, folders: Sequence[str], *, cold: bool) -> Any:
        if not folders:
            return self.pipeline
        network, kind = controlnet_classes(self.pipeline)
        for folder in folders:
            if cold or folder not in self._nets:
                self._nets[folder] = network.from_pretrained(
                    folder, use_safetensors=True, torch_dtype=self.pipeline.dtype
                )
        return self._sibling(kind, controlnet=[self._nets[folder] for folder in folders])

    def _sibling(self, kind: Any, **parts: Any) -> Any:
        """Return a pipeline of another kind over the same networks."""
        names = ("force_zeros_for_empty_prompt", "requires_safety_checker")  # of SDXL, and of Stable Diffusion
        options = {name: self.pipeline.config[name] for name in names if name in self.pipeline.config}
        if "force_zeros_for_empty_prompt" in options:
            options["add_watermarker"] = False
        sibling = kind(**self.pipeline.components, **options, **parts)
        sibling.set_progress_bar_config(disable=True)
        return sibling

    def _set_loras(self, files: tuple[str, ...], *, fuse: bool, fetch_s: float = 0.0) -> float:
        """Put these LoRAs in, in place of those that are; return the seconds that it took."""
        began_s = time.perf_counter()
        if files == self._loras:
            return 0.0
        if self._loras:
            if self._fused:
                self.pipeline.unfuse_lora()
            self.pipeline.unload_lora_weights()
        if files:
            time.sleep(fetch_s)
            for number, file in enumerate(files):
                self.pipeline.load_lora_weights(file, use_safetensors=True, adapter_name=f"lora{number}")
            if len(files) > 1:
                self.pipeline.set_adapters([f"lora{number}" for number in range(len(files))])
            if fuse:
                self.pipeline.fuse_lora()
        self._loras, self._fused = files, fuse
        return time.perf_counter() - began_s


@functools.lru_cache(maxsize=32)
def _opened(file: str) -> Any:
    import PIL.Image

    return PIL.Image.open(file).convert("RGB")


@functools.lru_cache(maxsize=32)
def _mask(size: tuple[int, int], box: tuple[int, int, int, int]) -> Any:
    """Return a mask that is white where the picture is redrawn."""
    import PIL.Image
    import PIL.ImageDraw

    mask = PIL.Image.new("L", size, 0)
    left, top, width, height = box
    PIL.ImageDraw.Draw(mask).rectangle((left, top, left + width - 1, top + height - 1), fill=255)
    return mask


def _pixels(files: Sequence[str]) -> Any:
    """Return images as a tensor [images, 3, height, width] in 0 to 1."""
    import numpy as np
    import torch

    images = np.stack([np.array(_opened(file)) for file in files])
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
