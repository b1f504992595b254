"""The sides of the bench of edits, each in a process of its own: stock Diffusers, and the suite's engine.

`python -m load.bench.edit_steps SIDE --model FOLDER --threads N` answers one JSON line for each that it is given: an
EditAsk. It knows nothing of rounds, nor of what is compared.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import PIL.Image

from load.bench.edit_model import SIZE, square_mask
from load.bench.side_process import SideProcess, serve, stock_pipeline

PROMPT = "a big red star on the left on a blue background"
GUIDANCE_SCALE = 5.0
# Diffusers' own default of inpainting.
STRENGTH = 0.9999
LATENT = "latent"
"""Of the tensor in the file of an EditAsk."""

SIDES = ("diffusers", "suite", "suite-sparse")
# Of all recordings. One template's with sparse convolutions takes 50 MB a step.
_ACTIVATIONS_BYTES = 4 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class EditAsk:
    """One edit of the one template. share: of tokens that its mask has, with its margin.

    exact: computes all, as Diffusers does. latent: a file of safetensors that the finished latent is
    written to; empty for none.
    """

    share: float
    steps: int
    seed: int = 0
    exact: bool = False
    latent: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Edited:
    """seconds: of the whole edit, from decoded pixels to decoded pixels. denoise_s: of its steps.

    computed_share: of tokens at the finest attention level that were computed. reused: share of its transformer blocks,
    over all steps, of which only those tokens were.
    """

    seconds: float
    denoise_s: float
    computed_share: float = 1.0
    reused: float = 0.0


class Side(SideProcess):
    """One side's process, driven from here. Stop it (`with` does)."""

    def __init__(self, side: str, model: Path, threads: int) -> None:
        super().__init__("load.bench.edit_steps", side, "--model", model, "--threads", threads, exclusive_cores=True)

    def edit(self, ask: EditAsk) -> Edited:
        """Draws; returns what it took in its process."""
        return Edited(**self.ask(asdict(ask)))


def diffusers_side(model: Path) -> Callable[[EditAsk], Edited]:
    """Stock inpainting."""
    import torch
    from diffusers import StableDiffusionXLInpaintPipeline
    from diffusers.utils import logging
    from safetensors.torch import save_file

    # It warns of casts of the VAE that it does itself.
    logging.set_verbosity_error()
    pipeline = stock_pipeline(model, StableDiffusionXLInpaintPipeline)
    times: list[float] = []
    # The first call of the network is where the steps begin: before it the prompt and the image are encoded.
    pipeline.unet.register_forward_pre_hook(lambda *_: times.append(perf_counter()))

    def stepped(_: Any, __: int, ___: Any, tensors: dict[str, Any]) -> dict[str, Any]:
        times.append(perf_counter())
        return tensors

    def draw(ask: EditAsk) -> Edited:
        times.clear()
        began_s = perf_counter()
        made = pipeline(
            PROMPT,
            image=template(),
            mask_image=PIL.Image.fromarray(square_mask(ask.share)),
            strength=STRENGTH,
            num_inference_steps=ask.steps,
            guidance_scale=GUIDANCE_SCALE,
            width=SIZE,
            height=SIZE,
            generator=torch.Generator().manual_seed(ask.seed),
            callback_on_step_end=stepped,
            output_type="latent" if ask.latent else "pil",
        )
        if ask.latent:
            save_file({LATENT: made.images.contiguous()}, ask.latent)
        return Edited(seconds=perf_counter() - began_s, denoise_s=times[-1] - times[0])

    return draw


def suite_side(model: Path, *, sparse: bool) -> Callable[[EditAsk], Edited]:
    """The suite's engine, with recordings in its memory."""
    import torch
    from safetensors.torch import save_file

    from bottega.addons.edits.engine.addon import EngineEdits
    from bottega.addons.edits.engine.recordings.memory import MemoryActivations
    from bottega.diffusion.engine.engine import Engine
    from bottega.diffusion.engine.events import EditRecord, JobFailed, JobFinished, JobStarted
    from bottega.diffusion.engine.job import EngineOrder
    from bottega.diffusion.engine.limits import EngineLimits
    from bottega.diffusion.model.model import load_model
    from bottega.diffusion.spec import EditSpec, ResolvedSpec
    from load.bench.accelerations import accelerate

    loaded = load_model(model, name="bench", device=torch.device("cpu"), dtype=torch.float32)
    addon = EngineEdits(loaded, MemoryActivations(_ACTIVATIONS_BYTES), sparse=sparse)
    engine = Engine(loaded, EngineLimits(), addons=(addon,))
    accelerate(engine)
    engine.warm_up()
    pixels = torch.from_numpy(np.array(template()))
    digest = hashlib.sha256(template().tobytes()).hexdigest()

    def draw(ask: EditAsk) -> Edited:
        spec = ResolvedSpec(
            prompt=PROMPT,
            num_inference_steps=ask.steps,
            guidance_scale=GUIDANCE_SCALE,
            width=SIZE,
            height=SIZE,
            seed=ask.seed,
            strength=STRENGTH,
            edit=EditSpec(
                mask_digest=f"{ask.share}", image_digest=digest, masked_blocks=not ask.exact, any_prompt=not ask.exact
            ),
        )
        mask = torch.from_numpy(square_mask(ask.share) // 255)
        began_s = perf_counter()
        engine.submit(EngineOrder(key="edit", spec=spec, image=pixels, mask=mask))
        while engine.busy:
            for event in engine.turn():
                match event:
                    case JobStarted():
                        job = engine.jobs[event.key]
                    case JobFinished():
                        record = event.record
                    case JobFailed():
                        raise event.error
        seconds = perf_counter() - began_s
        if ask.latent:
            save_file({LATENT: job.requests[0].latent.contiguous()}, ask.latent)
        edited = record.edit or EditRecord()
        return Edited(
            seconds=seconds,
            denoise_s=record.seconds["denoise"] + record.seconds["batch"],
            computed_share=edited.computed_share or 1.0,
            reused=edited.blocks_reused / edited.blocks_total if edited.blocks_total else 0.0,
        )

    return draw


def template() -> PIL.Image.Image:
    """The picture that is edited: noise, as nobody looks at it."""
    pixels = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels)


def main() -> None:
    """Loads the side's model, says so with a line, then answers every line of stdin."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m load.bench.edit_steps", description=__doc__)
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--threads", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.side == "diffusers":
        draw = diffusers_side(options.model)
    else:
        draw = suite_side(options.model, sparse=options.side == "suite-sparse")
    serve(lambda question: asdict(draw(EditAsk(**question))))


if __name__ == "__main__":
    main()
