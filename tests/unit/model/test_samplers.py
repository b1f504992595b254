"""What samplers compute in place of Diffusers' schedulers, which would have a GPU's thread wait: to the last bit.

And what tells their steps apart.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import diffusers
import pytest
import torch

from bottega import rules
from bottega.model.sampler_choices import ModelSamplers, SamplerChoice
from bottega.model.samplers import Sampler, same_noise
from bottega.model.schedulers import KARRAS, SamplerKind, make_scheduler
from bottega.model_files.scheduler_rules import FLOW_MATCHING
from tests.support.schedulers import PLAIN, TWICE, stock_scheduler
from tests.support.slow_cases import in_every_run
from tests.support.torch_threads import torch_threads

CONFIG = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "timestep_spacing": "leading",
    "steps_offset": 1,
    "skip_prk_steps": True,
}
STEPS = 6
SHAPE = (1, 4, 12, 20)


def scheduler_of(kind: SamplerKind, **config: object) -> Any:
    scheduler = stock_scheduler(kind.scheduler_class, {**CONFIG, **config})
    scheduler.set_timesteps(STEPS)
    return scheduler


@pytest.mark.parametrize("kind", SamplerKind)
def test_noise_is_added_as_the_scheduler_adds_it(kind: SamplerKind) -> None:
    scheduler, sampler = scheduler_of(kind), Sampler(kind, CONFIG, steps=STEPS)
    for step, dtype in itertools.product((0, STEPS - 1), (torch.float32, torch.float16, torch.bfloat16)):
        generator = torch.Generator().manual_seed(step)
        latent, noise = (torch.randn(SHAPE, generator=generator).to(dtype) for _ in range(2))
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(step)
        expected = scheduler.add_noise(latent, noise, scheduler.timesteps[step].repeat(1))
        made = sampler.add_noise(latent, noise, step)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("algorithm", ["sde-dpmsolver++", "dpmsolver++"])
def test_steps_of_dpm_are_the_schedulers_with_the_generator_that_is_given(algorithm: str, dtype: torch.dtype) -> None:
    kind = SamplerKind.DPMPP_2M
    scheduler = scheduler_of(kind, algorithm_type=algorithm)
    sampler = Sampler(kind, {**CONFIG, "algorithm_type": algorithm}, steps=STEPS)
    ours, theirs = (torch.Generator().manual_seed(7) for _ in range(2))
    generator = torch.Generator().manual_seed(1)
    latent = torch.randn(SHAPE, generator=generator).to(dtype)
    with torch_threads(1):
        for step, timestep in enumerate(scheduler.timesteps):
            predicted = torch.randn(SHAPE, generator=generator).to(dtype)
            (expected,) = scheduler.step(predicted, timestep, latent, generator=theirs, return_dict=False)
            made, _ = sampler.step(predicted, step, latent, ours)
            assert torch.equal(made, expected)
            latent = expected
    assert torch.equal(ours.get_state(), theirs.get_state())


# Samplers that do not follow the configuration's timestep spacing.
_OWN_TIMESTEPS = {
    SamplerKind.DPMPP_2S,
    SamplerKind.LCM,
    SamplerKind.TCD,
}
SPACED = [kind for kind in PLAIN if kind not in _OWN_TIMESTEPS]
ALL = [(kind, karras) for kind in SPACED for karras in ((False, True) if kind in KARRAS else (False,))]


# Samplers with evaluations at one timestep and noise level: before and after they correct a step.
_REPEATING = {SamplerKind.PNDM, SamplerKind.HEUN, SamplerKind.KDPM2_ANCESTRAL}


def evaluations_of(sampler: Sampler) -> list[tuple[float, float]]:
    """Timestep and noise level of each."""
    return [(float(sampler.timestep(index)), sampler.noise_level(index)) for index in range(sampler.evaluations)]


def steps_of(sampler: Sampler) -> list[tuple[float, float]]:
    """Timestep and noise level of the first evaluation of each."""
    evaluations = evaluations_of(sampler)
    return [evaluations[sampler.evaluation_of(step)] for step in range(sampler.steps)]


@pytest.mark.parametrize(
    "counts",
    [
        pytest.param([*range(1, 11), 20, 25, 50, rules.MAX_STEPS], id="some"),
        pytest.param(range(1, rules.MAX_STEPS + 1), id="all", marks=pytest.mark.slow),
    ],
)
def test_no_two_steps_of_other_noise_have_timestep_and_noise_level_in_common(counts: Sequence[int]) -> None:
    """Of any two schedules: what a model is given follows from both, not from the timestep. counts: of steps."""
    noise: dict[tuple[float, float], float] = {}
    equal_timesteps = set()
    for kind, karras in ALL:
        for count in counts:
            sampler = Sampler(kind, CONFIG, steps=count, karras=karras)
            evaluations = evaluations_of(sampler)
            assert kind in _REPEATING or len(set(evaluations)) == len(evaluations)
            if len({timestep for timestep, _ in evaluations}) < len(set(evaluations)):
                equal_timesteps.add((kind, karras))
            for index, key in enumerate(evaluations):
                # Of a latent whose picture and noise are both 1 everywhere: a + s, a^2 + s^2 = 1 once it is scaled.
                signal, deviation = sampler._noise_level(index)
                share = math.atan2(deviation, signal)
                assert math.isclose(noise.setdefault(key, share), share, rel_tol=2e-5)
    rounded = {SamplerKind.DPMPP_2M, SamplerKind.DPMPP_2M_SDE, SamplerKind.DEIS, SamplerKind.UNIPC, *TWICE[1:]}
    assert equal_timesteps == {(kind, True) for kind in rounded}, "else there is nothing to tell apart"


def test_what_samplers_without_karras_sigmas_have_at_one_timestep_is_one_step() -> None:
    """To the last bit, so that one takes what another one has recorded."""
    levels: dict[float, set[float]] = {}
    kinds: dict[float, set[SamplerKind]] = {}
    for kind, count in itertools.product(SPACED, (9, 10, 19, 20, 49, 50)):
        for timestep, level in steps_of(Sampler(kind, CONFIG, steps=count)):
            levels.setdefault(timestep, set()).add(level)
            kinds.setdefault(timestep, set()).add(kind)
    assert all(len(each) == 1 for each in levels.values())
    assert sum(len(each) == len(SPACED) for each in kinds.values()) >= 50


@pytest.mark.parametrize(("kind", "karras"), ALL)
def test_noise_falls_from_step_to_step(kind: SamplerKind, karras: bool) -> None:
    """So that a level names one step of a schedule, with all its evaluations at that level."""
    levels = [level for _, level in steps_of(Sampler(kind, CONFIG, steps=rules.MAX_STEPS, karras=karras))]
    assert all(before > after and not same_noise(before, after) for before, after in itertools.pairwise(levels))


def test_where_nothing_of_the_picture_is_left_the_noise_level_is_a_number() -> None:
    """DDIM alone counts with a signal of 0 there, where others have the least one that float16 has."""
    config = {**CONFIG, "rescale_betas_zero_snr": True, "timestep_spacing": "trailing"}
    levels = {Sampler(kind, config, steps=STEPS).noise_level(0) for kind in (SamplerKind.DDIM, SamplerKind.DPMPP_2M)}
    assert all(level == pytest.approx(2.0**12, rel=1e-3) for level in levels)


@pytest.mark.parametrize("count", in_every_run((1, 2, 50, rules.MAX_STEPS), {50}))
def test_beta_sigmas_are_those_that_diffusers_makes_with_scipy(count: int) -> None:
    config = {**CONFIG, "use_beta_sigmas": True}
    for kind in KARRAS:
        ours, stock = make_scheduler(kind, config, {}), kind.scheduler_class.from_config({**config, **kind.overrides})
        for scheduler in (ours, stock):
            scheduler.set_timesteps(count)
        assert torch.allclose(ours.sigmas, stock.sigmas, rtol=1e-6, atol=0)
        assert torch.allclose(ours.timesteps.double(), stock.timesteps.double(), rtol=1e-6, atol=1e-3)


def test_without_scipy_there_are_beta_sigmas_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in engine processes."""
    monkeypatch.setattr(diffusers.utils.import_utils, "_scipy_available", False)
    for function in ("scipy.stats.beta.ppf", "scipy.integrate.quad"):
        monkeypatch.setattr(function, None)
    noised, flows = CONFIG | {"use_beta_sigmas": True}, {"_class_name": FLOW_MATCHING, "use_beta_sigmas": True}
    for kind in KARRAS:
        samplers = ModelSamplers(noised if kind in PLAIN else flows, steps=5)
        assert not samplers.refusal(SamplerChoice(kind=kind), 5)


def test_lms_that_restarts_weighs_the_steps_that_it_made() -> None:
    """The first step from another picture's latent is Euler's; stock's has weights for earlier steps without any."""
    generator = torch.Generator().manual_seed(2)
    latent, predicted = (torch.randn(SHAPE, generator=generator) for _ in range(2))
    restarted, euler, stock = (
        Sampler(kind, CONFIG, steps=STEPS, begin=3, restarts=restarts)
        for kind, restarts in ((SamplerKind.LMS, True), (SamplerKind.EULER, False), (SamplerKind.LMS, False))
    )
    for sampler in (restarted, euler, stock):
        sampler.model_input(latent, 3)
    expected = euler.step(predicted, 3, latent, None)[0]
    assert torch.allclose(restarted.step(predicted, 3, latent, None)[0], expected, atol=1e-5)
    assert not torch.allclose(stock.step(predicted, 3, latent, None)[0], expected, atol=1e-2)
    resumed = Sampler(SamplerKind.LMS, CONFIG, steps=STEPS)
    resumed.restore(restarted.state(), 4, torch.device("cpu"))
    assert torch.equal(
        *(sampler.step(sampler.model_input(expected, 4), 4, expected, None)[0] for sampler in (restarted, resumed))
    )
