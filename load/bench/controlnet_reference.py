"""Stock Diffusers with one ControlNet in a process of its own, one part after the other; and what the parts take alone.

`python -m load.bench.controlnet_reference --model FOLDER --controlnet FOLDER` answers one JSON line for each that it is
given: {"draw": ...} or {"parts": rounds}.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from load.bench.side_process import SideProcess, serve, stock_pipeline


class ControlledReference(SideProcess):
    """The pipeline's process, driven from here, with one thread. Stop it (`with` does)."""

    def __init__(self, model: Path, controlnet: Path) -> None:
        super().__init__("load.bench.controlnet_reference", "--model", model, "--controlnet", controlnet)

    def step_s(self, *, image: Path, prompt: str, seed: int, steps: int, guidance_scale: float) -> float:
        """Draws; returns the seconds of a step, in the middle of all."""
        said = {"image": str(image), "prompt": prompt, "seed": seed, "steps": steps, "guidance_scale": guidance_scale}
        return self.ask({"draw": said})["step_s"]

    def parts(self, rounds: int) -> Mapping[str, float]:
        """Seconds of each part of a guided step, alone: encoder_s, decoder_s, controlnet_s."""
        return self.ask({"parts": rounds})


def answers(model: Path, controlnet: Path) -> Callable[[Any], Mapping[str, float]]:
    """Loads the pipeline; what it gives draws, or measures the parts."""
    import torch
    from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline

    torch.set_num_threads(1)
    net = ControlNetModel.from_pretrained(controlnet, use_safetensors=True, torch_dtype=torch.float32)
    pipeline = stock_pipeline(model, StableDiffusionXLControlNetPipeline, controlnet=net)
    return lambda said: _draw(pipeline, said["draw"]) if "draw" in said else _parts(pipeline, said["parts"])


def _draw(pipeline: Any, said: Mapping[str, Any]) -> dict[str, float]:
    import torch
    from diffusers.utils import load_image

    ends: list[float] = []

    def note(_: Any, __: int, ___: Any, kept: dict[str, Any]) -> dict[str, Any]:
        ends.append(time.perf_counter())
        return kept

    pipeline(
        said["prompt"],
        image=load_image(said["image"]),
        num_inference_steps=said["steps"],
        guidance_scale=said["guidance_scale"],
        generator=torch.Generator("cpu").manual_seed(said["seed"]),
        callback_on_step_end=note,
    )
    return {"step_s": median(after - before for before, after in pairwise(ends))}


def _parts(pipeline: Any, rounds: int) -> dict[str, float]:
    """Each part by itself, in turns; the ControlNet without what is the same at every step."""
    import torch

    from bottega.diffusion.model.backbone import Inputs, UNetBackbone

    unet, net = pipeline.unet, pipeline.controlnet
    backbone = UNetBackbone(unet)
    half = next(index for index, block in enumerate(backbone.blocks) if block.needs)
    side, tokens = unet.config.sample_size, pipeline.tokenizer.model_max_length
    pooled = pipeline.text_encoder_2.config.projection_dim
    inputs = Inputs(
        sample=torch.randn(2, unet.config.in_channels, side, side),
        timestep=torch.tensor([500.0, 500.0]),
        prompt_embeds=torch.randn(2, tokens, unet.config.cross_attention_dim),
        pooled_embeds=torch.randn(2, pooled),
        time_ids=torch.zeros(2, 6),
    )
    embedding, net.controlnet_cond_embedding = net.controlnet_cond_embedding, torch.nn.Identity()
    embedded = torch.zeros(2, net.config.block_out_channels[0], side, side)
    taken: dict[str, list[float]] = {"encoder_s": [], "decoder_s": [], "controlnet_s": []}
    with torch.inference_mode():
        for _ in range(rounds):
            activations, seconds = _timed(lambda: _encoded(backbone, inputs, half))
            taken["encoder_s"].append(seconds)
            taken["decoder_s"].append(_timed(partial(_decoded, backbone, activations, half))[1])
            taken["controlnet_s"].append(
                _timed(
                    lambda: net(
                        inputs.sample,
                        inputs.timestep,
                        encoder_hidden_states=inputs.prompt_embeds,
                        controlnet_cond=embedded,
                        added_cond_kwargs={"text_embeds": inputs.pooled_embeds, "time_ids": inputs.time_ids},
                        return_dict=False,
                    )
                )[1]
            )
    net.controlnet_cond_embedding = embedding
    return {name: median(seconds) for name, seconds in taken.items()}


def _encoded(backbone: Any, inputs: Any, half: int) -> Any:
    activations = backbone.begin(inputs)
    for block in backbone.blocks[:half]:
        block.run(activations)
    return activations


def _decoded(backbone: Any, activations: Any, half: int) -> Any:
    for block in backbone.blocks[half:]:
        block.run(activations)
    return backbone.finish(activations)


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    began = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began


def main() -> None:
    """Serves until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--controlnet", type=Path, required=True)
    arguments = parser.parse_args()
    serve(answers(arguments.model, arguments.controlnet))


if __name__ == "__main__":
    main()
