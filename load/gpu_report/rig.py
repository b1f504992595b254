"""What a part measures with: a device, a size and the model's folder."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from load.gpu_report.report import Figure
from load.gpu_report.topology import SDXL, SMALL, Topology

# Of torch, where the CPU computes: the report's own work beside the device.
THREADS = 2


class LeftOutError(Exception):
    """A part cannot be measured here; the text is the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is measured."""

    name: str
    topology: Topology
    side: int
    """Pixels of a side of a picture."""
    steps: int
    """Denoising steps of a picture."""
    edit_steps: int
    """Steps of an edit, whose recordings take memory for each."""
    rounds: int
    """Rounds of what is timed; one more runs before."""
    batches: tuple[int, ...]
    """Pictures at once."""
    dtype: str
    lora_ranks: tuple[int, ...]
    controlnets: int
    """The most in one request."""
    mask_shares: tuple[float, ...]
    """Shares of the tokens of an edit."""
    wanted: bool
    """Whether figures have bars."""


FULL = Size(
    name="full",
    topology=SDXL,
    side=1024,
    steps=50,
    edit_steps=20,
    rounds=3,
    batches=(1, 2, 4, 8),
    dtype="float16",
    lora_ranks=(32, 128),
    controlnets=3,
    mask_shares=(0.05, 0.11, 0.19, 0.35),
    wanted=True,
)
SMALL_SIZE = Size(
    name="small",
    topology=SMALL,
    side=64,
    steps=4,
    edit_steps=4,
    rounds=1,
    batches=(2,),
    dtype="float32",
    lora_ranks=(4,),
    controlnets=1,
    mask_shares=(0.19,),
    wanted=False,
)
SIZES: Mapping[str, Size] = {size.name: size for size in (FULL, SMALL_SIZE)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """A device, a size and a folder."""

    size: Size
    device: str
    """As torch names it."""
    folder: Path
    """For what is large and made once: the model, caches of compilers."""

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a CUDA device."""
        return self.device.startswith("cuda")

    @property
    def model(self) -> Path:
        """The model's folder, which the part `model` writes."""
        return self.folder / f"model-{self.size.name}"

    @property
    def controlnet(self) -> Path:
        """A ControlNet's folder, which the same part writes."""
        return self.folder / f"controlnet-{self.size.name}"

    @property
    def picture(self) -> dict[str, Any]:
        """Size and steps of a picture, as Diffusers' pipelines and the suite's client take them."""
        return {"num_inference_steps": self.size.steps, "width": self.size.side, "height": self.size.side}

    def wanted(self, figure: Figure) -> Figure:
        """Return the figure, without its bar where figures have none."""
        return figure if self.size.wanted else replace(figure, at_least=None, at_most=None)


def need(module: str, what: str) -> None:
    """Raise LeftOutError where a module that the part needs is not installed."""
    if not is_installed(module):
        raise LeftOutError(f"{what} is not installed")


def is_installed(module: str) -> bool:
    """Return whether a module can be imported."""
    return importlib.util.find_spec(module) is not None
