"""What a part measures with: a device, a size, the model's folder; and how it says that it cannot."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from load.gpu_report.figures import Figure
from load.gpu_report.size import Size

PROMPT = "a big red star on the left on a blue background"
GUIDANCE_SCALE = 5.0
# Of torch, where the CPU computes: the report's own work beside the device.
THREADS = 2


class LeftOutError(Exception):
    """A part cannot be measured here; the text says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rig:
    """device: as torch names it. folder: for what is large and made once: the model, caches of compilers."""

    size: Size
    device: str
    folder: Path

    @property
    def on_gpu(self) -> bool:
        """Whether it is a CUDA device."""
        return self.device.startswith("cuda")

    @property
    def model(self) -> Path:
        """The model's folder, which the part `model` writes."""
        return self.folder / f"model-{self.size.name}"

    @property
    def controlnet(self) -> Path:
        """A ControlNet's folder, which it writes, too."""
        return self.folder / f"controlnet-{self.size.name}"

    def wanted(self, figure: Figure) -> Figure:
        """The figure; without what was wanted of it where that is no matter."""
        if self.size.wanted:
            return figure
        return Figure(name=figure.name, label=figure.label, value=figure.value, unit=figure.unit, group=figure.group)


def need(module: str, what: str) -> None:
    """Raises LeftOutError where a module that the part needs is not installed."""
    if not is_installed(module):
        raise LeftOutError(f"{what} is not installed")


def is_installed(module: str) -> bool:
    """Whether it can be imported."""
    return importlib.util.find_spec(module) is not None
