"""Stock Diffusers with one ControlNet in a process of its own, one part after the other; and what the parts take alone.

`python -m load.bench.controlnet_reference --model FOLDER --controlnet FOLDER` answers one JSON line for each that it is
given: {"draw": ...} or {"parts": rounds}. It knows no suite.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any

START_TIMEOUT_S = 120.0


class ControlledReference:
    """The pipeline's process, driven from here, with one thread. Stop it (`with` does)."""

    def __init__(self, model: Path, controlnet: Path) -> None:
        module = "load.bench.controlnet_reference"
        command = [sys.executable, "-m", module, "--model", str(model), "--controlnet", str(controlnet)]
        env = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        self._answer()

    def __enter__(self) -> ControlledReference:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate(timeout=START_TIMEOUT_S)

    def step_s(self, *, image: Path, prompt: str, seed: int, steps: int, guidance_scale: float) -> float:
        """Draws; returns the seconds of a step, in the middle of all."""
        said = {"image": str(image), "prompt": prompt, "seed": seed, "steps": steps, "guidance_scale": guidance_scale}
        return self._ask({"draw": said})["step_s"]

    def parts(self, rounds: int) -> Mapping[str, float]:
        """Seconds of each part of a guided step, alone: encoder_s, decoder_s, controlnet_s."""
        return self._ask({"parts": rounds})

    def _ask(self, question: object) -> Mapping[str, float]:
        assert self._process.stdin
        self._process.stdin.write(json.dumps(question) + "\n")
        self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> Mapping[str, float]:
        assert self._process.stdout
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the reference ended with {self._process.wait(START_TIMEOUT_S)}")
        answer: Mapping[str, float] = json.loads(line)
        return answer


def serve(model: Path, controlnet: Path) -> None:
    """Loads the pipeline, says so with a line, then answers every line of stdin."""
    import torch
    import transformers
    from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline
    from diffusers.utils import logging as diffusers_logging

    diffusers_logging.disable_progress_bar()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    net = ControlNetModel.from_pretrained(controlnet, use_safetensors=True, torch_dtype=torch.float32)
    pipeline = StableDiffusionXLControlNetPipeline.from_pretrained(
        model, controlnet=net, use_safetensors=True, dtype=torch.float32, add_watermarker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    _say({})
    for line in sys.stdin:
        question = json.loads(line)
        _say(_draw(pipeline, question["draw"]) if "draw" in question else _parts(pipeline, question["parts"]))


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


def _say(answer: Mapping[str, float]) -> None:
    print(json.dumps(answer), flush=True)


def main() -> None:
    """Serves until stdin ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--controlnet", type=Path, required=True)
    arguments = parser.parse_args()
    serve(arguments.model, arguments.controlnet)


if __name__ == "__main__":
    main()
