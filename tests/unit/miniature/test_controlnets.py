"""The embedded ControlNets load into stock Diffusers, and pictures follow them where the prompt says another place."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from diffusers import ControlNetModel, StableDiffusionXLControlNetPipeline

from bottega.miniature import WEIGHTS
from bottega.miniature.scenes import DRAWN, Scene, Thing, caption, random_layout
from bottega.quality import oracle
from tests.support.torch_threads import torch_threads

SHOWN = Scene(things=(Thing(shape="circle", colour="red"),), ground="white", size="big", place="right")
SAID = Scene(things=SHOWN.things, ground="white", size="big", place="left")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As quick for one picture, and it leaves the other cores to other tests."""
    with torch_threads(1):
        yield


@pytest.mark.parametrize("kind", ["edges", pytest.param("layout", marks=pytest.mark.slow)])
def test_a_picture_follows_its_control_image_and_not_the_prompts_place(kind: str) -> None:
    folder = WEIGHTS / "controlnets" / kind
    net = ControlNetModel.from_pretrained(folder, use_safetensors=True, dtype=torch.float32)
    pipeline = StableDiffusionXLControlNetPipeline.from_pretrained(
        WEIGHTS, controlnet=net, dtype=torch.float32, use_safetensors=True, add_watermarker=False
    )
    pipeline.set_progress_bar_config(disable=True)
    control = DRAWN[kind](random_layout(SHOWN, random.Random(0)))

    seen = [
        oracle.read(
            pipeline(
                caption(SAID),
                image=control,
                num_inference_steps=15,
                guidance_scale=4.0,
                controlnet_conditioning_scale=scale,
                generator=torch.Generator().manual_seed(1),
            ).images[0]
        )
        for scale in (1.0, 0.0)
    ]

    assert [reading.things[0].place for reading in seen] == ["right", "left"]
    assert oracle.agrees(seen[0], SHOWN)
    assert (folder / "diffusion_pytorch_model.safetensors").stat().st_size < 3.5e6
