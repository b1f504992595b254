"""ControlNets for tests: small random ones that matter, as folders, control images, and what stock Diffusers draws."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import PIL.Image
import torch
from diffusers import (
    ControlNetModel,
    ControlNetUnionModel,
    StableDiffusionXLControlNetPipeline,
    StableDiffusionXLControlNetUnionPipeline,
    UNet2DConditionModel,
)
from diffusers.models.controlnets.multicontrolnet_union import MultiControlNetUnionModel
from torch import Tensor

from bottega.addons.controlnets.engine import (
    ControlLayout,
    ControlNetCache,
    ControlNetSource,
    LoadedControlNet,
    base_layout,
    find_controlnet,
    load_controlnet,
)
from bottega.engine.spec import ControlSpec, ResolvedSpec
from bottega.errors import Unavailable
from bottega.model.model import Model
from tests.support.stock import latent_of, variant

# Room for any number of the miniature's.
ROOM_BYTES = 1 << 30
GATE_S = 30.0


def random_controlnet(unet: UNet2DConditionModel, seed: int, **options: Any) -> ControlNetModel:
    """One of the UNet's layout whose zero convolutions are not zero any more, so that it matters."""
    options = {"conditioning_embedding_out_channels": (16, 32, 64)} | options
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = ControlNetModel.from_unet(unet, **options)
        for convolution in (*net.controlnet_down_blocks, net.controlnet_mid_block):
            torch.nn.init.normal_(convolution.weight, std=0.05)
        for module in net.controlnet_cond_embedding.modules():
            if isinstance(module, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(module.weight)
    return net.eval()


def random_union(unet: UNet2DConditionModel, seed: int, modes: int = 8) -> ControlNetUnionModel:
    """A union of the UNet's layout, all of whose weights matter."""
    config = dict(random_controlnet(unet, seed).config)
    width = config["block_out_channels"][0]
    union = {"num_control_type": modes, "num_trans_channel": width, "num_proj_channel": width, "num_trans_head": 4}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = ControlNetUnionModel.from_config({**config, **union})
        for layer in (*net.controlnet_down_blocks, net.controlnet_mid_block, net.spatial_ch_projs):
            torch.nn.init.normal_(layer.weight, std=0.05)
        for module in net.controlnet_cond_embedding.modules():
            if isinstance(module, torch.nn.Conv2d):
                torch.nn.init.kaiming_normal_(module.weight)
    return net.eval()


def union_latent(
    stock: Any, nets: Mapping[str, ControlNetUnionModel], spec: ResolvedSpec, images: Sequence[Tensor]
) -> Tensor:
    """What Diffusers makes of a spec whose ControlNets are all unions: images of one, or one of each."""
    names = [control.name for control in spec.controlnets]
    several_nets = len(names) > 1 and len(set(names)) > 1
    net = MultiControlNetUnionModel([nets[name] for name in names]) if several_nets else nets[names[0]]
    options = stock_options(spec.controlnets, images)
    scheduler = spec.sampler.scheduler_class.from_config(stock.scheduler.config, **spec.sampler.overrides)
    pipeline = variant(stock, StableDiffusionXLControlNetUnionPipeline, controlnet=net, scheduler=scheduler)

    def call(*, guidance_rescale: float, **arguments: Any) -> Any:
        assert guidance_rescale == 0.0, "Diffusers' pipeline for unions has none"
        return pipeline(**arguments)

    return latent_of(
        call,
        spec,
        width=spec.width,
        height=spec.height,
        control_image=options.pop("image"),
        control_mode=[control.control_mode for control in spec.controlnets],
        **options,
    )


def save(nets: Mapping[str, ControlNetModel | ControlNetUnionModel], folder: Path) -> dict[str, Path]:
    """Writes them as Diffusers does; their folders by name."""
    for name, net in nets.items():
        net.save_pretrained(folder / name, safe_serialization=True)
    return {name: folder / name for name in nets}


def layout_of(model: Model) -> ControlLayout:
    """What ControlNets of this model look like."""
    return base_layout(model.backbone.network.config, model.latent_scale)


def sources(model: Model, folders: Mapping[str, Path]) -> dict[str, ControlNetSource]:
    base = layout_of(model)
    return {name: find_controlnet(name, folder, base=base, dtype=model.dtype) for name, folder in folders.items()}


@contextmanager
def shelf_of(
    model: Model, folders: Mapping[str, Path], *, budget_bytes: int = ROOM_BYTES, **options: Any
) -> Iterator[ControlNetCache]:
    """A shelf of these for the block."""
    shelf = ControlNetCache(sources(model, folders), budget_bytes=budget_bytes, device=model.device, **options)
    try:
        yield shelf
    finally:
        shelf.close()


class Gate:
    """Loads when it is open; `waiting` says that a load stands before it."""

    def __init__(self) -> None:
        self.waiting = threading.Event()
        self._open = threading.Event()

    def open(self) -> None:
        self._open.set()

    def __call__(self, source: ControlNetSource, device: torch.device) -> LoadedControlNet:
        self.waiting.set()
        if not self._open.wait(GATE_S):
            raise Unavailable("the test did not open its gate")
        return load_controlnet(source, device)


def control_image(seed: int, height: int = 64, width: int = 64) -> Tensor:
    """uint8 [height, width, 3], of random rectangles."""
    generator = torch.Generator("cpu").manual_seed(seed)
    image = torch.zeros(height, width, 3, dtype=torch.uint8)
    for _ in range(6):
        top, left = (int(torch.randint(0, side - 8, (), generator=generator)) for side in (height, width))
        colour = torch.randint(0, 256, (3,), generator=generator, dtype=torch.uint8)
        image[top : top + height // 3, left : left + width // 3] = colour
    return image


def control_spec(name: str, image: Tensor, scale: float = 1.0, **options: Any) -> ControlSpec:
    """A ControlNet of a job with this image."""
    digest = hashlib.sha256(image.numpy().tobytes()).hexdigest()
    return ControlSpec(name=name, image_digest=digest, controlnet_conditioning_scale=scale, **options)


def stock_options(specs: Sequence[ControlSpec], images: Sequence[Tensor]) -> dict[str, Any]:
    """What a job says of its ControlNets, as arguments of Diffusers' pipelines."""
    pictures = [PIL.Image.fromarray(image.numpy()) for image in images]
    many: dict[str, list[Any]] = {
        "image": pictures,
        "controlnet_conditioning_scale": [spec.controlnet_conditioning_scale for spec in specs],
        "control_guidance_start": [spec.control_guidance_start for spec in specs],
        "control_guidance_end": [spec.control_guidance_end for spec in specs],
    }
    said = many if len(specs) > 1 else {name: values[0] for name, values in many.items()}
    return {**said, "guess_mode": specs[0].guess_mode}


def controlled_latent(
    stock: Any, nets: Mapping[str, ControlNetModel], spec: ResolvedSpec, images: Sequence[Tensor] = ()
) -> Tensor:
    """What Diffusers makes of a spec and its control images, with these ControlNets: [1, channels, height, width]."""
    parts: dict[str, Any] = {
        "scheduler": spec.sampler.scheduler_class.from_config(stock.scheduler.config, **spec.sampler.overrides)
    }
    used = [nets[control.name] for control in spec.controlnets]
    if not used:
        return latent_of(variant(stock, **parts), spec, width=spec.width, height=spec.height)
    pipeline = variant(
        stock, StableDiffusionXLControlNetPipeline, controlnet=used if len(used) > 1 else used[0], **parts
    )
    options = stock_options(spec.controlnets, images)
    return latent_of(pipeline, spec, width=spec.width, height=spec.height, **options)
