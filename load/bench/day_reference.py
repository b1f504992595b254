"""The plain Diffusers server's own process: it draws static batches, with ControlNets, LoRAs and masks.

`python -m load.bench.day_reference --model FOLDER --threads N` answers one JSON line for each PlainBatch. ControlNets
stay loaded; LoRAs stay in the weights until a batch wants others. Images come and go encoded, as at any server.
"""

from __future__ import annotations

import argparse
import io
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import PIL.ImageDraw

from load.bench.side_process import SideProcess, serve, stock_pipeline
from load.bench.stock_adapters import StockAdapters

GUIDANCE_SCALE = 5.0
# Diffusers' own default of inpainting, and the suite's.
STRENGTH = 0.9999


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPicture:
    """One of a batch. image: the file of a control image, or of what is edited; empty for neither. box: of an edit,
    what is redrawn: left, top, width and height in pixels.
    """

    prompt: str
    seed: int
    image: str = ""
    box: tuple[int, int, int, int] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainBatch:
    """One call of a pipeline: all with these steps, or all of them edits.

    nets: folders of ControlNets. loras: files, as Diffusers saves them; fuse: whether they go into the weights; stay:
    whether they are left there for a next batch with the same ones.
    """

    pictures: Sequence[PlainPicture]
    steps: int
    nets: Sequence[str] = ()
    loras: Sequence[str] = ()
    fuse: bool = True
    stay: bool = True


class DayReference(SideProcess):
    """The process, driven from here. Stop it (`with` does)."""

    def __init__(self, model: Path, threads: int) -> None:
        arguments = ("--model", model, "--threads", threads)
        super().__init__("load.bench.day_reference", *arguments, exclusive_cores=True)

    def draw(self, batch: PlainBatch) -> float:
        """The seconds that it took there. Raises RuntimeError when the process has ended."""
        return self.ask(asdict(batch))["seconds"]


class Stock:
    """The pipelines, over one model, and what is in its weights now."""

    def __init__(self, model: Path) -> None:
        from diffusers import StableDiffusionXLInpaintPipeline

        plain = stock_pipeline(model)
        self._adapters = StockAdapters(plain)
        self._inpaint = StableDiffusionXLInpaintPipeline(
            **plain.components,
            force_zeros_for_empty_prompt=plain.config.force_zeros_for_empty_prompt,
            add_watermarker=False,
        )
        self._inpaint.set_progress_bar_config(disable=True)
        self._loras: tuple[str, ...] = ()

    def draw(self, batch: Any) -> Mapping[str, float]:
        """batch: a PlainBatch, as JSON has it."""
        began_s = time.perf_counter()
        self._set_loras(tuple(batch["loras"]), fuse=batch["fuse"])
        options = {
            "prompt": [each["prompt"] for each in batch["pictures"]],
            "num_inference_steps": batch["steps"],
            "guidance_scale": GUIDANCE_SCALE,
            "generator": _generators(batch["pictures"]),
        }
        edits = batch["pictures"][0]["box"] is not None
        made = self._edit(batch, options) if edits else self._draw(batch, options)
        for image in made.images:
            image.save(io.BytesIO(), "PNG")
        if not batch["stay"]:
            self._set_loras((), fuse=False)
        return {"seconds": time.perf_counter() - began_s}

    def _set_loras(self, files: tuple[str, ...], *, fuse: bool) -> None:
        if files == self._loras:
            return
        if self._loras:
            self._adapters.unload_loras()
            self._loras = ()
        if files:
            self._adapters.load_loras(files, fuse=fuse)
            self._loras = files

    def _draw(self, batch: Any, options: dict[str, Any]) -> Any:
        pipeline = self._adapters.with_controlnets(batch["nets"])
        if batch["nets"]:
            # Of each ControlNet a tensor with every picture's image: lists of images it takes for one picture alone.
            images = _pixels(_open(batch["pictures"]))
            options |= {
                "image": [images] * len(batch["nets"]),
                "controlnet_conditioning_scale": [1.0] * len(batch["nets"]),
            }
        return pipeline(**options)

    def _edit(self, batch: Any, options: dict[str, Any]) -> Any:
        images = _open(batch["pictures"])
        masks = [_mask(image.size, each["box"]) for image, each in zip(images, batch["pictures"], strict=True)]
        width, height = images[0].size
        return self._inpaint(**options, image=images, mask_image=masks, strength=STRENGTH, width=width, height=height)


def _generators(pictures: Sequence[Any]) -> list[Any]:
    import torch

    return [torch.Generator("cpu").manual_seed(each["seed"]) for each in pictures]


def _open(pictures: Sequence[Any]) -> list[PIL.Image.Image]:
    return [PIL.Image.open(each["image"]).convert("RGB") for each in pictures]


def _pixels(images: Sequence[PIL.Image.Image]) -> Any:
    """[images, 3, height, width] in 0 to 1."""
    import torch

    return torch.from_numpy(np.stack([np.array(image) for image in images])).permute(0, 3, 1, 2).float() / 255


def _mask(size: tuple[int, int], box: Sequence[int]) -> PIL.Image.Image:
    """White where it is redrawn."""
    mask = PIL.Image.new("L", size, 0)
    left, top, width, height = box
    PIL.ImageDraw.Draw(mask).rectangle((left, top, left + width - 1, top + height - 1), fill=255)
    return mask


def main() -> None:
    """Loads the model, says so with a line, then answers every line of stdin."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m load.bench.day_reference", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    serve(Stock(options.model).draw)


if __name__ == "__main__":
    main()
