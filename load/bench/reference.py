"""Stock Diffusers in a process of its own: what every bench compares with.

`python -m load.bench.reference --model FOLDER --threads N` answers one JSON line for each that it is given.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from load.bench.side_process import SideProcess, serve, stock_pipeline


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """One call of the pipeline: a picture for every prompt, all with the same steps."""

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    steps: int
    guidance_scale: float


class Reference(SideProcess):
    """The pipeline's process, driven from here. Stop it (`with` does)."""

    def __init__(self, model: Path, threads: int) -> None:
        super().__init__("load.bench.reference", "--model", model, "--threads", threads)

    def draw(self, batch: Batch) -> float:
        """Draws; returns the seconds of the pipeline's call alone, as measured in its process."""
        return self.ask(asdict(batch))["seconds"]


def answers(model: Path, threads: int) -> Callable[[Any], Mapping[str, float]]:
    """Loads the pipeline; what it gives draws a batch."""
    import torch

    torch.set_num_threads(threads)
    pipeline = stock_pipeline(model)

    def draw(batch: Any) -> Mapping[str, float]:
        generators = [torch.Generator("cpu").manual_seed(seed) for seed in batch["seeds"]]
        began = time.perf_counter()
        pipeline(
            list(batch["prompts"]),
            num_inference_steps=batch["steps"],
            guidance_scale=batch["guidance_scale"],
            generator=generators,
        )
        return {"seconds": time.perf_counter() - began}

    return draw


def main() -> None:
    """Serves the arguments' model until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    serve(answers(arguments.model, arguments.threads))


if __name__ == "__main__":
    main()
