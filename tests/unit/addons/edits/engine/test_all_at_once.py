"""One edit with all there is, two LoRAs and two ControlNets, beside plain pictures and the edits of others."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from diffusers import (
    ControlNetModel,
    StableDiffusionXLControlNetInpaintPipeline,
    StableDiffusionXLInpaintPipeline,
)
from torch import Tensor

from bottega.addons.controlnets.engine import ControlNetCache, LocalControlNets
from bottega.engine.job import EngineOrder
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from bottega.model.schedulers import SamplerKind
from tests.samples.controlnets import control_spec, random_controlnet, save, shelf_of, stock_options
from tests.samples.edits import box_mask, edit_order, ellipse_mask, template
from tests.samples.engine_loras import LorasByHand, lora_spec, styled_latent, styled_stock
from tests.samples.small_model import small_model
from tests.support.controlled_engine import IMAGES, NAMES
from tests.support.engines import TOGETHER, FixedCosts, lora_weights, make_engine
from tests.support.manual_engine import Drawing, ManualEngine
from tests.support.stock import assert_close, edit_options, variant

IMAGE = template()
PLAIN = ResolvedSpec(
    prompt="a big red star on the left on a blue background", num_inference_steps=6, width=64, height=64, seed=3
)
EDIT = replace(PLAIN, prompt="a small green circle on a white background", strength=0.9999, seed=4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """One request. scales: of its LoRAs, by name; controls: of its ControlNets, by place in NAMES; mask: of an edit."""

    spec: ResolvedSpec
    mask: PIL.Image.Image | None = None
    scales: Mapping[str, float]
    controls: Mapping[int, float]

    def order(self, key: Hashable) -> EngineOrder:
        """It, as an engine takes it."""
        controls = tuple(
            control_spec(NAMES[place], IMAGES[place], scale, digest=f"{place}" * 64)
            for place, scale in self.controls.items()
        )
        loras = tuple(lora_spec(name, scale) for name, scale in self.scales.items())
        spec = replace(self.spec, loras=loras, controlnets=controls)
        images = tuple(IMAGES[place] for place in self.controls)
        order = EngineOrder(key=key, spec=spec)
        if self.mask is not None:
            order = edit_order(spec, IMAGE, self.mask, key=key)
        return replace(order, control_images=images)


ALL = "everything at once"
CAST = {
    ALL: Asked(
        spec=replace(EDIT, sampler=SamplerKind.EULER_ANCESTRAL),
        mask=ellipse_mask(),
        scales={"outline": 0.8, "pastel": 1.1},
        controls={0: 0.8, 1: 1.3},
    ),
    "a plain picture": Asked(spec=PLAIN, scales={}, controls={}),
    "a plain picture with a LoRA": Asked(
        spec=replace(PLAIN, seed=5, num_inference_steps=8), scales={"pixel": 0.7}, controls={}
    ),
    "another edit with a LoRA": Asked(
        spec=replace(EDIT, seed=7, strength=0.6), mask=box_mask((0, 0, 20, 64)), scales={"outline": 0.4}, controls={}
    ),
    "another edit with a ControlNet": Asked(
        spec=replace(EDIT, seed=8, guidance_scale=1.0), mask=ellipse_mask(), scales={}, controls={2: 0.9}
    ),
}


class Stock:
    """Diffusers with PEFT's adapters and random ControlNets: what it makes of one request that is alone."""

    def __init__(self, nets: Mapping[str, ControlNetModel]) -> None:
        self._text, self.loras = styled_stock(small_model())
        self._nets = nets

    def latent(self, asked: Asked) -> Tensor:
        """[1, channels, height, width], finished."""
        pipeline, options = self.pipeline(asked)
        return styled_latent(pipeline, asked.spec, asked.scales, **options)

    def pipeline(self, asked: Asked) -> tuple[Any, dict[str, Any]]:
        """The pipeline that is meant for it, and what else it is given."""
        spec = asked.spec
        scheduler = spec.sampler.scheduler_class.from_config(self._text.scheduler.config)
        if asked.mask is None:
            return variant(self._text, scheduler=scheduler), {"width": spec.width, "height": spec.height}
        options = edit_options(spec, IMAGE, asked.mask)
        if not asked.controls:
            return variant(self._text, StableDiffusionXLInpaintPipeline, scheduler=scheduler), options
        order = asked.order("")
        used = [self._nets[control.name] for control in order.spec.controlnets]
        controls = stock_options(order.spec.controlnets, order.control_images)
        options |= {"control_image": controls.pop("image"), **controls}
        parts = {"controlnet": used if len(used) > 1 else used[0], "scheduler": scheduler}
        return variant(self._text, StableDiffusionXLControlNetInpaintPipeline, **parts), options


@pytest.fixture(scope="module")
def nets(model: Model) -> dict[str, ControlNetModel]:
    return {name: random_controlnet(model.backbone.network, seed) for seed, name in enumerate(NAMES)}


@pytest.fixture(scope="module")
def stock(nets: Mapping[str, ControlNetModel]) -> Stock:
    return Stock(nets)


@pytest.fixture(scope="module")
def shelf(
    model: Model, nets: Mapping[str, ControlNetModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ControlNetCache]:
    folders: dict[str, Path] = save(nets, tmp_path_factory.mktemp("controlnets"))
    with shelf_of(model, folders) as shelf:
        yield shelf


@pytest.fixture(scope="module")
def exact(model: Model, shelf: ControlNetCache, stock: Stock) -> Mapping[Hashable, Drawing]:
    """All of the cast: the first three at once, the others two steps later.

    LoRAs go beside the weights: only so do rows with unlike ones share a group.
    """
    engine = make_engine(model, TOGETHER, controlnets=LocalControlNets(shelf), loras=LorasByHand.of(stock.loras))
    lora_weights(engine).costs = FixedCosts(pays=False)
    orders = [asked.order(name) for name, asked in CAST.items()]
    return ManualEngine(engine).run({0: orders[:3], 2: orders[3:]})


@pytest.mark.parametrize("name", CAST)
def test_exact_each_is_what_diffusers_draws_of_it_alone(
    exact: Mapping[Hashable, Drawing], stock: Stock, name: str
) -> None:
    drawing = exact[name]
    assert drawing.record.provenance.mean_group_requests > 2
    assert drawing.record.exact
    assert_close(drawing.latents[0], stock.latent(CAST[name]))
