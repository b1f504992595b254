"""Stock Diffusers with ControlNets and LoRAs, in a process of its own: one thing after the other.

`python -m load.bench.addon_reference --model FOLDER --threads N` answers one JSON line for each that it is given.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from load.bench.side_process import SideProcess, serve, stock_pipeline
from load.bench.stock_adapters import StockAdapters

PROMPT = "a big red star on the left on a blue background"
GUIDANCE_SCALE = 5.0
CONTROL_SCALE = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One picture. nets: folders of ControlNets; images: one for each. loras: files, as Diffusers saves them.

    fetch_s: that the LoRAs take to come from a remote store. fuse: whether they go into the weights. cold: whether the
    ControlNets are loaded for this picture.
    """

    seed: int
    steps: int
    nets: Sequence[str] = ()
    images: Sequence[str] = ()
    loras: Sequence[str] = ()
    fetch_s: float = 0.0
    fuse: bool = True
    cold: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """seconds: of all. lora_s: of fetching, loading, fusing and taking out LoRAs. processor_s: of all cores."""

    seconds: float
    lora_s: float
    processor_s: float


class AddonReference(SideProcess):
    """The pipeline's process, driven from here. Stop it (`with` does)."""

    def __init__(self, model: Path, threads: int) -> None:
        super().__init__("load.bench.addon_reference", "--model", model, "--threads", threads)

    def draw(self, ask: Ask) -> Answer:
        """Draws; returns what it took in its process."""
        return Answer(**self.ask(asdict(ask)))


class Stock:
    """The pipeline, and what it draws with beside its model."""

    def __init__(self, model: Path) -> None:
        self._adapters = StockAdapters(stock_pipeline(model))

    def draw(self, ask: Ask) -> Answer:
        """Fetches, loads, draws, and takes out again."""
        began_s, processor_s = time.perf_counter(), time.process_time()
        pipeline = self._adapters.with_controlnets(ask.nets, cold=ask.cold)
        lora_s = self._load(ask) if ask.loras else 0.0
        self._draw(pipeline, ask)
        lora_s += self._unload() if ask.loras else 0.0
        return Answer(
            seconds=time.perf_counter() - began_s,
            lora_s=lora_s,
            processor_s=time.process_time() - processor_s,
        )

    def _load(self, ask: Ask) -> float:
        began_s = time.perf_counter()
        time.sleep(ask.fetch_s)
        self._adapters.load_loras(ask.loras, fuse=ask.fuse)
        return time.perf_counter() - began_s

    def _unload(self) -> float:
        began_s = time.perf_counter()
        self._adapters.unload_loras()
        return time.perf_counter() - began_s

    def _draw(self, pipeline: Any, ask: Ask) -> None:
        import torch
        from diffusers.utils import load_image

        controlled: dict[str, Any] = {}
        if ask.nets:
            images = [load_image(image) for image in ask.images]
            controlled = {"image": images, "controlnet_conditioning_scale": [CONTROL_SCALE] * len(images)}
        pipeline(
            PROMPT,
            num_inference_steps=ask.steps,
            guidance_scale=GUIDANCE_SCALE,
            generator=torch.Generator("cpu").manual_seed(ask.seed),
            **controlled,
        )


def main() -> None:
    """Loads the model, says so with a line, then answers every line of stdin."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m load.bench.addon_reference", description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    stock = Stock(options.model)
    serve(lambda question: asdict(stock.draw(Ask(**question))))


if __name__ == "__main__":
    main()
