"""What samplers compute in place of Diffusers' schedulers, which would have a GPU's thread wait: to the last bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from bottega.diffusion.model.samplers import Sampler, SamplerKind
from tests.support.torch_threads import torch_threads

CONFIG = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "timestep_spacing": "leading",
    "steps_offset": 1,
}
STEPS = 6
SHAPE = (1, 4, 12, 20)


def scheduler_of(kind: SamplerKind, **config: object) -> Any:
    scheduler = kind.value.from_config({**CONFIG, **config})
    scheduler.set_timesteps(STEPS)
    return scheduler


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("step", [0, 3, STEPS - 1])
@pytest.mark.parametrize("kind", SamplerKind)
def test_noise_is_added_as_the_scheduler_adds_it(kind: SamplerKind, step: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(step)
    latent, noise = (torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(2))
    scheduler = scheduler_of(kind)
    if kind is not SamplerKind.DDIM:
        scheduler.set_begin_index(step)
    expected = scheduler.add_noise(latent, noise, scheduler.timesteps[step].repeat(1))
    made = Sampler(kind, CONFIG, steps=STEPS).add_noise(latent, noise, step)
    assert made.dtype == dtype
    assert torch.equal(made, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_ancestral_steps_are_the_schedulers(prediction: str, dtype: torch.dtype) -> None:
    kind = SamplerKind.EULER_ANCESTRAL
    scheduler = scheduler_of(kind, prediction_type=prediction)
    sampler = Sampler(kind, {**CONFIG, "prediction_type": prediction}, steps=STEPS)
    ours, theirs = (torch.Generator().manual_seed(7) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    latent = (torch.randn(SHAPE, generator=generator) * sampler.init_noise_sigma).to(dtype)
    with torch_threads(1):
        for step, timestep in enumerate(scheduler.timesteps):
            predicted = torch.randn(SHAPE, generator=generator).to(dtype)
            assert torch.equal(sampler.model_input(latent, step), scheduler.scale_model_input(latent, timestep))
            expected = scheduler.step(predicted, timestep, latent, generator=theirs, return_dict=False)
            made = sampler.step(predicted, step, latent, ours)
            assert all(torch.equal(mine, stock) for mine, stock in zip(made, expected, strict=True))
            latent = expected[0]
    assert torch.equal(ours.get_state(), theirs.get_state())
    assert torch.isfinite(latent).all()
