"""Every key of every scheduler's configuration: what it makes of each sampler is stock's, or is refused by name.

Nothing here is drawn by a network: a schedule and its steps show what a key does. `test_scheduler_configs.py` draws
with some of them. A class or a key that Diffusers adds fails here until it is served or refused.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

import diffusers
import pytest
import torch
from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers
from diffusers.utils import logging as diffusers_logging

from bottega import rules
from bottega.model.loading import _scheduler_config
from bottega.model.sampler_choices import CHOICES, ModelSamplers, SamplerChoice
from bottega.model.schedulers import KARRAS, SamplerKind, draws_noise
from bottega.model_files.presets import Preset
from bottega.model_files.scheduler_check import check_scheduler_config, sampler_problems
from bottega.model_files.scheduler_rules import SAMPLER_CLASSES, SCHEDULER_RULES, UNSERVED_CLASSES, takes_karras_sigmas
from bottega.v1.generation_pb2 import SAMPLER_UNSPECIFIED, Sampler
from tests.support.schedulers import PLAIN, SEED, SHAPE, our_latent, stock_latent, stock_scheduler
from tests.support.slow_cases import in_every_run
from tests.support.stock import deviation

# As SDXL's, but for keys that only some classes have.
BASE = {
    "num_train_timesteps": 1000,
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "prediction_type": "epsilon",
    "timestep_spacing": "leading",
    "steps_offset": 1,
}
STEPS = 7
# Models that were not trained with EDM's noise levels draw with these.
PLAIN_CHOICES = [choice for choice in CHOICES if choice.kind in PLAIN]
# By key, values other than every class's default and BASE's; a new key fails until it is here.
VALUES: Mapping[str, tuple[object, ...]] = {
    "algorithm_type": ("sde-dpmsolver++", "dpmsolver", "sde-dpmsolver", "deis", "none"),
    "beta_end": (0.02,),
    "beta_schedule": ("linear", "squaredcos_cap_v2", "sigmoid"),
    "base_image_seq_len": (64,),
    "base_shift": (0.7,),
    "beta_start": (0.0001,),
    "clip_sample": (True, False, None),
    "clip_sample_range": (0.5,),
    "disable_corrector": ([0, 1], "none"),
    "dynamic_thresholding_ratio": (0.8,),
    "euler_at_final": (True,),
    "final_sigmas_type": ("sigma_min", "other"),
    "flow_shift": (3.0, 0),
    "interpolation_type": ("log_linear", "cubic"),
    "lambda_min_clipped": (-2.0, "low"),
    "invert_sigmas": (True,),
    "lower_order_final": (False, True),
    "max_image_seq_len": (128,),
    "max_shift": (2.0,),
    "num_train_timesteps": (200, 4, 0),
    "original_inference_steps": (40, 0),
    "predict_x0": (False,),
    "prediction_type": ("v_prediction", "sample", "original_sample", "flow_prediction", "other"),
    "rescale_betas_zero_snr": (True,),
    "rho": (5.0, 0),
    "sample_max_value": (1.5,),
    "set_alpha_to_one": (True, False),
    "skip_prk_steps": (True,),
    "shift": (3.0, 0),
    "shift_terminal": (0.1,),
    "sigma_data": (0.7, 0),
    "sigma_max": (9.0,),
    "sigma_min": (0.2,),
    "sigma_schedule": ("exponential", "other"),
    "solver_order": (1, 3, 0),
    "solver_p": ("EulerDiscreteScheduler",),
    "solver_type": ("heun", "bh1", "bh2", "logrho", "other"),
    "steps_offset": (0, 3, None),
    "stochastic_sampling": (True,),
    "thresholding": (True,),
    "time_shift_type": ("linear",),
    "timestep_spacing": ("trailing", "linspace", "other"),
    "timestep_scaling": (8.0, 0),
    "timestep_type": ("continuous",),
    "trained_betas": ([0.001 + 0.0001 * (index // 10) for index in range(1000)], [0.1]),
    "use_beta_sigmas": (True,),
    "use_dynamic_shifting": (True,),
    "use_exponential_sigmas": (True,),
    "use_flow_sigmas": (True,),
    "use_karras_sigmas": (True, None),
    "use_lu_lambdas": (True,),
    "variance_type": ("learned", "learned_range", "fixed_small", "fixed_large", "fixed_small_log"),
}
# Other keys with which these do something.
BESIDE: Mapping[str, dict[str, object]] = {
    "base_image_seq_len": {"use_dynamic_shifting": True},
    "base_shift": {"use_dynamic_shifting": True},
    "clip_sample_range": {"clip_sample": True},
    "dynamic_thresholding_ratio": {"thresholding": True, "sample_max_value": 2.0},
    "euler_at_final": {"final_sigmas_type": "sigma_min", "lower_order_final": False},
    "flow_shift": {"use_flow_sigmas": True},
    "lower_order_final": {"solver_order": 3},
    "sample_max_value": {"thresholding": True},
    "sigma_max": {"use_karras_sigmas": True},
    "sigma_min": {"use_exponential_sigmas": True},
    "thresholding": {"sample_max_value": 2.0},
    "timestep_type": {"prediction_type": "v_prediction"},
}
# Diffusers takes a tenth of a second for each schedule of these classes. What keys make of their noise levels is what
# they make of Heun's, and each spacing, prediction and number of steps is drawn with below.
LONG_TO_MAKE = ("KDPM2DiscreteScheduler", "KDPM2AncestralDiscreteScheduler", "LMSDiscreteScheduler")
OF_NOISE = (
    *("beta_start", "beta_end", "beta_schedule", "steps_offset"),
    *("timestep_spacing", "prediction_type", "use_karras_sigmas"),
)
# More than a key's own rule says: such schedules depend on the number of steps.
ONLY_TRIED = (("num_train_timesteps", 4), ("lambda_min_clipped", -2.0))


def keys_of(name: str) -> list[str]:
    """The keys that a class of Diffusers knows."""
    return [key for key in inspect.signature(getattr(diffusers, name).__init__).parameters if key != "self"]


def cases() -> Iterator[Any]:
    """A model's class, a key and a value, where that may change what one of the samplers draws, or is refused."""
    for name in SCHEDULER_RULES:
        for key, values in VALUES.items():
            if key in keys_of(name) or next(choices_of(name, key), None):
                for value in values:
                    marks = [pytest.mark.slow] if is_slow(name, key, value) else []
                    case = f"{name.removesuffix('Scheduler')}-{key}-{str(value)[:16]}"
                    yield pytest.param(name, key, value, id=case, marks=marks)


def is_slow(name: str, key: str, value: object) -> bool:
    """Whether a case takes a second and goes the way of another one. One that is refused is quick."""
    slow = name in LONG_TO_MAKE and key in OF_NOISE
    return slow and not list(check_scheduler_config({**BASE, key: value, "_class_name": name}))


def choices_of(name: str, key: str) -> Iterator[SamplerChoice]:
    """The choices to draw with: the model's own class, and for some classes another one, which gets its keys too."""
    others = (
        "EulerDiscreteScheduler",
        "EulerAncestralDiscreteScheduler",
        "DDIMScheduler",
        "DPMSolverMultistepScheduler",
    )
    drawn = (name, others[(others.index(name) + 1) % len(others)]) if name in others else (name,)
    for choice in CHOICES:
        kind = choice.kind.scheduler_class.__name__
        if kind in drawn and key in keys_of(kind):
            yield choice


@pytest.fixture(autouse=True, scope="module")
def quiet() -> Iterator[None]:
    """Diffusers warns of keys that a class does not know."""
    level = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()
    yield
    diffusers_logging.set_verbosity(level)


def overrides(choice: SamplerChoice) -> dict[str, Any]:
    """What a caller of stock sets; Diffusers takes one kind of sigmas, so others than Karras' are switched off."""
    karras = {"use_karras_sigmas": choice.karras} if choice.kind in KARRAS else {}
    if choice.karras:
        karras |= {"use_exponential_sigmas": False, "use_beta_sigmas": False}
    return {**choice.kind.overrides, **karras}


def assert_stocks_or_refused(
    model: Any,
    samplers: ModelSamplers,
    choice: SamplerChoice,
    steps: int,
    *,
    strengths: Sequence[float | None] = (None,),
) -> bool:
    """Whether a choice draws, and then as Diffusers does with the model's scheduler in a pipeline."""
    if samplers.refusal(choice, steps):
        return False
    for strength in strengths:
        theirs = stock_latent(
            stock_scheduler(choice.kind.scheduler_class, model.config, **overrides(choice)), steps, strength=strength
        )
        ours = our_latent(samplers, choice, steps, strength=strength)
        assert torch.isfinite(theirs).all()
        assert deviation(ours, theirs) <= 1e-4, (choice, strength)
    return True


def assert_levels_are_stocks(model: Any, samplers: ModelSamplers, choice: SamplerChoice) -> None:
    """What a latent has of picture and noise before a step, which cached starts and kept latents count with."""
    one, none = torch.ones(1, 1, 1, 1), torch.zeros(1, 1, 1, 1)
    scheduler = stock_scheduler(choice.kind.scheduler_class, model.config, **overrides(choice))
    sampler = samplers.open(choice, steps=STEPS)
    scheduler.set_timesteps(STEPS)
    for evaluation in map(sampler.evaluation_of, (0, 1, STEPS - 1)):
        if hasattr(scheduler, "set_begin_index"):
            scheduler.set_begin_index(evaluation)
        timestep = scheduler.timesteps[evaluation : evaluation + 1]
        picture, noise = (float(scheduler.add_noise(*pair, timestep)) for pair in ((one, none), (none, one)))
        assert sampler.signal(evaluation) == pytest.approx(picture, rel=1e-5, abs=2.0**-12)
        assert sampler._noise_level(evaluation)[1] == pytest.approx(noise, rel=1e-5)
        assert 0 < sampler.noise_level(evaluation) < float("inf")


def assert_draws_from_the_request_alone(samplers: ModelSamplers, choice: SamplerChoice) -> None:
    """Whether steps draw noise is known, and it is the request's: cached starts and resuming count with that."""
    others = torch.random.get_rng_state()
    generator, first = (torch.Generator("cpu").manual_seed(SEED) for _ in range(2))
    our_latent(samplers, choice, STEPS, generator=generator)
    assert torch.equal(torch.random.get_rng_state(), others)
    torch.randn(SHAPE, generator=first)
    draws = draws_noise(choice.kind, samplers.config)
    assert torch.equal(generator.get_state(), first.get_state()) != draws
    if draws:
        samplers.open(choice, steps=STEPS).skip_noise(STEPS, SHAPE, torch.float32, first)
        assert torch.equal(generator.get_state(), first.get_state())


@pytest.mark.parametrize("name", SCHEDULER_RULES)
def test_the_rules_know_every_key_of_a_served_class_and_its_default(name: str) -> None:
    parameters = inspect.signature(getattr(diffusers, name).__init__).parameters
    rules = {rule.name: rule.default for rule in SCHEDULER_RULES[name]}
    assert rules == {key: parameters[key].default for key in keys_of(name)}
    assert set(rules) <= set(VALUES), "give new keys values here"


def test_requests_presets_and_engine_have_the_same_samplers_and_choices_of_karras_sigmas() -> None:
    names = list(get_args(rules.SamplerName))
    assert names == list(SAMPLER_CLASSES) == [kind.value for kind in SamplerKind]
    numbers = {name: Sampler.Value(f"SAMPLER_{name.upper()}") for name in names}
    assert {*numbers.values(), SAMPLER_UNSPECIFIED} == set(Sampler.values())
    karras = {name for name, number in numbers.items() if rules.takes_karras_sigmas(number)}
    assert karras == {name for name in names if takes_karras_sigmas(name)} == {kind.value for kind in KARRAS}


def test_every_scheduler_of_diffusers_is_served_or_refused_by_name() -> None:
    known = {*SAMPLER_CLASSES.values(), *UNSERVED_CLASSES}
    families = ("LCM", "TCD", "EDM")
    there = {name for name in dir(diffusers) if name.endswith("Scheduler")}
    assert {*KarrasDiffusionSchedulers.__members__, *(name for name in there if name.startswith(families))} <= known
    assert known <= there
    for name in there - set(SCHEDULER_RULES):
        (sentence,) = check_scheduler_config({**BASE, "_class_name": name})
        assert name in sentence
        assert all(served in sentence for served in SCHEDULER_RULES)
    assert "torchsde" in next(check_scheduler_config({"_class_name": "DPMSolverSDEScheduler"}))


@pytest.mark.parametrize(("name", "key", "value"), list(cases()))
def test_a_key_does_in_every_sampler_what_it_does_in_stock_or_is_refused(name: str, key: str, value: object) -> None:
    file = {**BASE, **BESIDE.get(key, {}), key: value}
    problems = list(check_scheduler_config({**file, "_class_name": name}))
    if problems:
        assert key in "".join(problems)
        return
    model = stock_scheduler(getattr(diffusers, name), {**file, "_class_name": name})
    samplers = ModelSamplers(_scheduler_config(model, Preset()), steps=STEPS)
    # Keys of the noise alone count at each step alike.
    strengths = (None,) if key in OF_NOISE else (None, 0.6)
    for choice in choices_of(name, key):
        refused = sampler_problems(choice.kind.value, {**samplers.config, **overrides(choice)})
        if assert_stocks_or_refused(model, samplers, choice, STEPS, strengths=strengths):
            assert not refused
            assert_levels_are_stocks(model, samplers, choice)
            assert_draws_from_the_request_alone(samplers, choice)
        else:
            assert refused or (key, value) in ONLY_TRIED, (choice, samplers.refusals[choice])


def stock_steps(choice: SamplerChoice, config: Mapping[str, Any], steps: int) -> int:
    """How many steps stock makes where some are asked for; 0 if it makes none."""
    scheduler = stock_scheduler(choice.kind.scheduler_class, config, **overrides(choice))
    try:
        scheduler.set_timesteps(steps)
    except ValueError:
        return 0
    if choice.kind is SamplerKind.PNDM:
        return len(scheduler.timesteps) - 9  # three steps of four evaluations
    return (len(scheduler.timesteps) + int(scheduler.order) - 1) // int(scheduler.order)


# With 61 trailing timesteps of 1000, Diffusers makes one more; samplers of consistency models make at most 50.
@pytest.mark.parametrize(
    ("spacing", "steps"),
    in_every_run(
        itertools.product(("leading", "trailing", "linspace"), (1, 2, 15, 61)),
        {("leading", 2), ("trailing", 61), ("linspace", 1), ("linspace", 15)},
    ),
)
def test_any_number_of_steps_is_stocks_or_refused(spacing: str, steps: int) -> None:
    model = stock_scheduler(diffusers.EulerDiscreteScheduler, {**BASE, "timestep_spacing": spacing})
    samplers = ModelSamplers(_scheduler_config(model, Preset()), steps=STEPS)
    for choice in PLAIN_CHOICES:
        made = stock_steps(choice, model.config, steps)
        assert assert_stocks_or_refused(model, samplers, choice, steps) == (made == steps)
        reason = samplers.refusal(choice, steps)
        if not made and choice.kind is SamplerKind.PNDM:
            assert reason.startswith("PNDM needs at least 4 steps, because skip_prk_steps")
        elif not made:
            assert reason.startswith((f"Diffusers cannot make {steps} steps: ", f"{steps} steps are too many: "))
        elif made == steps:
            assert not reason
        else:
            assert reason == f"the model's timestep spacing makes {made} steps of {steps}: ask for another number"


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
def test_more_steps_than_were_trained_are_stocks_or_refused(spacing: str) -> None:
    model = stock_scheduler(
        diffusers.EulerDiscreteScheduler, {**BASE, "num_train_timesteps": 6, "timestep_spacing": spacing}
    )
    samplers = ModelSamplers(_scheduler_config(model, Preset()), steps=5)
    drawn = {str(choice): assert_stocks_or_refused(model, samplers, choice, 9) for choice in PLAIN_CHOICES}
    assert drawn["euler"]
    assert not drawn["ddim"]
    assert "cannot be larger than" in samplers.refusal(SamplerChoice(kind=SamplerKind.DDIM), 9)


@pytest.mark.parametrize(
    ("name", "strength"),
    in_every_run(
        itertools.product(("EulerDiscreteScheduler", "DDIMScheduler"), (0.2, 0.5, 0.99, 1.0)),
        {("EulerDiscreteScheduler", 0.99), ("DDIMScheduler", 0.5)},
    ),
)
def test_image_to_image_begins_where_stock_does_at_any_strength(name: str, strength: float) -> None:
    model = stock_scheduler(getattr(diffusers, name), {**BASE, "_class_name": name, "use_karras_sigmas": True})
    samplers = ModelSamplers(_scheduler_config(model, Preset()), steps=11)
    for choice in PLAIN_CHOICES:
        theirs = stock_scheduler(choice.kind.scheduler_class, model.config, **overrides(choice))
        assert (
            deviation(our_latent(samplers, choice, 11, strength=strength), stock_latent(theirs, 11, strength=strength))
            <= 1e-4
        )


def test_a_sampler_that_is_not_asked_about_karras_sigmas_is_as_configured() -> None:
    model = stock_scheduler(diffusers.EulerDiscreteScheduler, {**BASE, "use_karras_sigmas": True})
    samplers = ModelSamplers(_scheduler_config(model, Preset()), steps=STEPS)
    for kind in {choice.kind for choice in PLAIN_CHOICES}:
        choice = samplers.default_choice(kind)
        assert choice.karras == (kind in KARRAS)
        theirs = stock_latent(stock_scheduler(kind.scheduler_class, model.config, **kind.overrides), STEPS)
        assert deviation(our_latent(samplers, choice, STEPS), theirs) <= 1e-4
