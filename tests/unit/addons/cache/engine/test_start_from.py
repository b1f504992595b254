"""A picture that goes on from another one's latent is what stock Diffusers makes of that latent, to 1e-4."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from bottega.addons.cache.starts import format_start
from bottega.engine.job import EngineOrder
from bottega.engine.limits import EngineLimits
from bottega.engine.spec import ResolvedSpec
from bottega.model.model import Model
from bottega.model.sampler_choices import ModelSamplers
from bottega.model.samplers import Sampler
from bottega.model.schedulers import KARRAS, SamplerKind, draws_noise
from tests.fakes.scripted_latents import Cached, cached, entry
from tests.samples.small_model import small_model
from tests.support.schedulers import BASIC
from tests.support.stock import assert_close, load_stock

SAMPLERS = [*((kind, False) for kind in BASIC), *((kind, True) for kind in BASIC if kind in KARRAS)]
NAMES = [f"{kind.name}{'_KARRAS' if karras else ''}" for kind, karras in SAMPLERS]
SPEC = ResolvedSpec(
    prompt="a big red star on the left on a blue background", num_inference_steps=10, width=32, height=32, seed=3
)
ALONE = EngineLimits(max_rows=2)
STEPS = 4


class Pipeline:
    """Stock Diffusers' parts, in its own order, begun at any step with any latent."""

    def __init__(self) -> None:
        self._stock = load_stock(small_model())

    def scheduler(self, spec: ResolvedSpec) -> Any:
        extra = {"use_karras_sigmas": spec.use_karras_sigmas} if spec.sampler in KARRAS else {}
        made = spec.sampler.scheduler_class.from_config(self._stock.scheduler.config, **extra)
        made.set_timesteps(spec.num_inference_steps)
        return made

    @torch.inference_mode()
    def denoise(self, spec: ResolvedSpec, latent: Tensor, first: int, generator: torch.Generator) -> list[Tensor]:
        """The latents after the steps from `first` on."""
        scheduler = self.scheduler(spec)
        if spec.sampler is not SamplerKind.DDIM:
            scheduler.set_begin_index(first)
        prompt, negative, pooled, negative_pooled = self._stock.encode_prompt(spec.prompt)
        sizes = torch.tensor([[spec.height, spec.width, 0, 0, spec.height, spec.width]] * 2, dtype=prompt.dtype)
        added = {"text_embeds": torch.cat([negative_pooled, pooled]), "time_ids": sizes}
        hidden = torch.cat([negative, prompt])
        extra = {"generator": generator} if draws_noise(spec.sampler, self._stock.scheduler.config) else {}
        made = []
        for timestep in scheduler.timesteps[first:]:
            scaled = scheduler.scale_model_input(torch.cat([latent] * 2), timestep)
            noise = self._stock.unet(scaled, timestep, encoder_hidden_states=hidden, added_cond_kwargs=added).sample
            unconditional, conditional = noise.chunk(2)
            guided = unconditional + spec.guidance_scale * (conditional - unconditional)
            latent = scheduler.step(guided, timestep, latent, **extra, return_dict=False)[0]
            made.append(latent)
        return made

    def draw(self, spec: ResolvedSpec) -> list[Tensor]:
        """All latents of a picture from noise."""
        generator = torch.Generator("cpu").manual_seed(spec.seed)
        noise = torch.randn(1, 4, 8, 8, generator=generator)
        return self.denoise(spec, noise * self.scheduler(spec).init_noise_sigma, 0, generator)


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return Pipeline()


@pytest.mark.parametrize(("kind", "karras"), SAMPLERS, ids=NAMES)
def test_it_goes_on_as_stock_does_from_the_same_latent(
    model: Model, pipeline: Pipeline, kind: SamplerKind, karras: bool
) -> None:
    other = replace(SPEC, prompt="a small green circle", seed=11, sampler=kind, use_karras_sigmas=karras)
    spec = replace(SPEC, sampler=kind, use_karras_sigmas=karras)
    recorded = pipeline.draw(other)[STEPS - 1]
    generator = torch.Generator("cpu").manual_seed(spec.seed)
    if draws_noise(kind, model.scheduler_config):  # its own first steps have drawn as often
        for _ in range(1 + STEPS):
            torch.randn(1, 4, 8, 8, generator=generator)
        first, latent = STEPS, recorded
    else:
        torch.randn(1, 4, 8, 8, generator=generator)
        fresh = torch.randn(1, 4, 8, 8, generator=generator)
        first, latent = STEPS - 1, noised(pipeline.scheduler(spec), kind, recorded, fresh)
    expected = pipeline.denoise(spec, latent, first, generator)[-1]
    order = cached(EngineOrder(key=1, spec=spec))
    drawing = Cached(model, limits=ALONE).draw(order, hits=[(entry(1), STEPS, recorded[0])])
    assert_close(drawing.latents[0], expected)
    (start,) = drawing.record.provenance.cached_starts
    assert (start.entry, start.from_step) == (format_start(entry(1), STEPS), first)
    assert not drawing.record.exact


def noised(scheduler: Any, kind: SamplerKind, latent: Tensor, noise: Tensor) -> Tensor:
    """The latent before step STEPS at the level of the step before, by the numbers of Diffusers' own schedulers."""
    if kind is SamplerKind.EULER:
        high, low = (float(scheduler.sigmas[step]) for step in (STEPS - 1, STEPS))
        return latent + math.sqrt(high**2 - low**2) * noise
    if kind is SamplerKind.DDIM:
        high, low = (float(scheduler.alphas_cumprod[scheduler.timesteps[step]]) for step in (STEPS - 1, STEPS))
    else:
        high, low = (float(1 / (1 + scheduler.sigmas[step] ** 2)) for step in (STEPS - 1, STEPS))
    return math.sqrt(high / low) * latent + math.sqrt(1 - high / low) * noise


@pytest.mark.parametrize(("kind", "karras"), SAMPLERS, ids=NAMES)
@pytest.mark.parametrize("step", [1, 3, 9])
def test_fresh_noise_brings_a_latent_to_the_level_of_the_step_before(
    model: Model, kind: SamplerKind, karras: bool, step: int
) -> None:
    now, before = (Sampler(kind, model.scheduler_config, steps=10, begin=at, karras=karras) for at in (step, step - 1))
    one, none = torch.ones(1, 4, 2, 2), torch.zeros(1, 4, 2, 2)
    # Diffusers says what a picture, and noise, are multiplied by at a step.
    picture, noise = now.add_noise(one, none, step), now.add_noise(none, one, step)
    picture_before, noise_before = before.add_noise(one, none, step - 1), before.add_noise(none, one, step - 1)
    assert torch.allclose(now.renoise(picture, none, step), picture_before, rtol=1e-5)
    kept, fresh = now.renoise(noise, none, step), now.renoise(none, one, step)
    assert torch.allclose(kept**2 + fresh**2, noise_before**2, rtol=1e-4)
    assert bool((fresh > 0).all())


def test_samplers_that_draw_no_noise_make_one_step_again() -> None:
    plain, stochastic = (ModelSamplers(config, steps=5) for config in ({}, {"algorithm_type": "sde-dpmsolver++"}))
    assert [plain.first_step_from(kind, 5) for kind in BASIC] == [4, 5, 4, 4]
    assert [stochastic.first_step_from(kind, 5) for kind in BASIC] == [4, 5, 4, 5]
