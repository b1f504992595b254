"""The two sides of the bench of mixed requests, each in a process of its own: stock Diffusers, and the suite's engine.

`python -m load.bench.edit_sides SIDE --model FOLDER --threads N` answers one JSON line for each that it is given:
{"draw": {"shares": [...], "steps": N}} draws a request for each share: an edit whose mask has it, or, of 0, a picture.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import PIL.Image

from load.bench.edit_model import SIZE, square_mask
from load.bench.side_process import SideProcess, serve, stock_pipeline

PROMPT = "a big red star on the left on a blue background"
GUIDANCE_SCALE = 5.0
STRENGTH = 0.9999
# All templates of a round, and what is recorded of them.
_RECORDINGS_BYTES = 4 << 30

Draw = Callable[[Sequence[float], int], Mapping[str, float]]


class Side(SideProcess):
    """One side's process, driven from here. side: diffusers or suite. Stop it (`with` does)."""

    def __init__(self, side: str, model: Path, threads: int) -> None:
        super().__init__("load.bench.edit_sides", side, "--model", model, "--threads", threads, exclusive_cores=True)

    def draw(self, shares: Sequence[float], *, steps: int) -> Mapping[str, float]:
        """Seconds for all of them. The suite says also which share of the edits' blocks it reused (reused_share)."""
        return self.ask({"draw": {"shares": list(shares), "steps": steps}})


def diffusers_side(model: Path) -> Draw:
    """One by one, edits by the inpainting pipeline."""
    import torch
    from diffusers import StableDiffusionXLInpaintPipeline

    plain = stock_pipeline(model)
    inpaint = StableDiffusionXLInpaintPipeline(
        **plain.components,
        force_zeros_for_empty_prompt=plain.config.force_zeros_for_empty_prompt,
        add_watermarker=False,
    )
    inpaint.set_progress_bar_config(disable=True)

    def draw(shares: Sequence[float], steps: int) -> Mapping[str, float]:
        began_s = perf_counter()
        for number, share in enumerate(shares):
            options: dict[str, Any] = {"generator": torch.Generator().manual_seed(number)}
            options |= {"num_inference_steps": steps, "guidance_scale": GUIDANCE_SCALE, "width": SIZE, "height": SIZE}
            if share:
                mask = PIL.Image.fromarray(square_mask(share))
                inpaint(PROMPT, image=template(number), mask_image=mask, strength=STRENGTH, **options)
            else:
                plain(PROMPT, **options)
        return {"seconds": perf_counter() - began_s}

    return draw


def suite_side(model: Path) -> Draw:
    """All at once. Templates have been edited before: the first request for a set of shares does that, not timed."""
    import torch

    from bottega.addons.edits.engine.addon import EngineEdits
    from bottega.addons.edits.engine.recordings.memory import MemoryActivations
    from bottega.diffusion.engine.engine import Engine
    from bottega.diffusion.engine.events import JobFailed, JobFinished
    from bottega.diffusion.engine.job import EngineOrder
    from bottega.diffusion.engine.limits import EngineLimits
    from bottega.diffusion.model.model import load_model
    from bottega.diffusion.spec import EditSpec, ResolvedSpec

    loaded = load_model(model, name="bench", device=torch.device("cpu"), dtype=torch.float32)
    addon = EngineEdits(loaded, MemoryActivations(_RECORDINGS_BYTES))
    engine = Engine(loaded, EngineLimits(), addons=(addon,))
    engine.warm_up()
    known: set[tuple[tuple[float, ...], int]] = set()

    def order(number: int, share: float, steps: int) -> EngineOrder:
        spec = ResolvedSpec(
            prompt=PROMPT,
            num_inference_steps=steps,
            guidance_scale=GUIDANCE_SCALE,
            width=SIZE,
            height=SIZE,
            seed=number,
            strength=STRENGTH if share else None,
            edit=EditSpec(mask_digest=str(share), image_digest=_digest(number), masked_blocks=True) if share else None,
        )
        if not share:
            return EngineOrder(key=number, spec=spec)
        return EngineOrder(
            key=number,
            spec=spec,
            image=torch.from_numpy(np.array(template(number))),
            mask=torch.from_numpy(square_mask(share) // 255),
        )

    def run(orders: Sequence[EngineOrder]) -> tuple[int, int]:
        """Blocks reused, and in all."""
        reused = total = 0
        for each in orders:
            engine.submit(each)
        while engine.busy:
            for event in engine.turn():
                if isinstance(event, JobFailed):
                    raise event.error
                if isinstance(event, JobFinished) and event.record.edit is not None:
                    reused += event.record.edit.blocks_reused
                    total += event.record.edit.blocks_total
        return reused, total

    def draw(shares: Sequence[float], steps: int) -> Mapping[str, float]:
        orders = [order(number, share, steps) for number, share in enumerate(shares)]
        if (tuple(shares), steps) not in known:
            known.add((tuple(shares), steps))
            run([each for each in orders if each.spec.edit is not None])
        began_s = perf_counter()
        reused, total = run(orders)
        return {"seconds": perf_counter() - began_s, "reused_share": reused / total if total else 0.0}

    return draw


def template(number: int) -> PIL.Image.Image:
    """The picture that request `number` edits: noise, as nobody looks at it."""
    pixels = np.random.default_rng(number).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def _digest(number: int) -> str:
    return hashlib.sha256(template(number).tobytes()).hexdigest()


def main() -> None:
    """Loads the side's model, says so with a line, then answers every line of stdin."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m load.bench.edit_sides", description=__doc__)
    parser.add_argument("side", choices=["diffusers", "suite"])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    draw = diffusers_side(options.model) if options.side == "diffusers" else suite_side(options.model)
    serve(lambda question: draw(question["draw"]["shares"], question["draw"]["steps"]))


if __name__ == "__main__":
    main()
