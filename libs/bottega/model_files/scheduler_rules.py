"""Rules for a model's scheduler: which classes are served, and which values of each field of scheduler_config.json.

A request may choose another sampler than the model's. Diffusers then creates that sampler's scheduler from the same
configuration. So the rules depend on the class that draws. `scheduler_check` applies them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from bottega.model_files.field_rules import (
    ANY,
    BOOLEAN,
    FLAG,
    FRACTION,
    NULL,
    OFF,
    POSITIVE,
    FieldRule,
    Values,
    list_of,
    number,
    only,
    whole,
)

FLOW_MATCHING = "FlowMatchEulerDiscreteScheduler"
"""Class of the schedulers of models that were trained with flow matching."""
SAMPLER_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "euler": "EulerDiscreteScheduler",
        "euler_ancestral": "EulerAncestralDiscreteScheduler",
        "ddim": "DDIMScheduler",
        "dpmpp_2m": "DPMSolverMultistepScheduler",
        "dpmpp_2m_sde": "DPMSolverMultistepScheduler",
        "dpmpp_2s": "DPMSolverSinglestepScheduler",
        "ddpm": "DDPMScheduler",
        "deis": "DEISMultistepScheduler",
        "unipc": "UniPCMultistepScheduler",
        "lms": "LMSDiscreteScheduler",
        "lcm": "LCMScheduler",
        "tcd": "TCDScheduler",
        "edm_euler": "EDMEulerScheduler",
        "edm_dpmpp_2m": "EDMDPMSolverMultistepScheduler",
        "pndm": "PNDMScheduler",
        "heun": "HeunDiscreteScheduler",
        "kdpm2": "KDPM2DiscreteScheduler",
        "kdpm2_ancestral": "KDPM2AncestralDiscreteScheduler",
        "flow_match_euler": FLOW_MATCHING,
    }
)
"""The served samplers, as requests name them, with their classes in Diffusers; a class's own sampler comes first."""

SAMPLER_OVERRIDES: Mapping[str, Mapping[str, object]] = MappingProxyType(
    {"dpmpp_2m_sde": {"algorithm_type": "sde-dpmsolver++"}}
)
"""Scheduler configuration that makes a sampler of its class, in place of the model's."""

UNSERVED_CLASSES: Mapping[str, str] = MappingProxyType(
    {
        "CosineDPMSolverMultistepScheduler": "it is for models of sound",
        "DPMSolverSDEScheduler": "it needs torchsde, which is not installed with the suite",
    }
)
"""Classes of Diffusers that are known and not served, each with its reason."""
# Memory for the noise levels of training is bounded; published models have 1000.
_MOST_TRAIN_TIMESTEPS = 100_000
_SPACINGS = only("linspace", "leading", "trailing")
_SHARE = number("a number between 0 and 1", lambda value: 0 < value < 1)
REQUESTED_SIGMAS = ("use_karras_sigmas", "use_exponential_sigmas", "use_beta_sigmas")
"""Fields with which a request chooses another kind of sigmas; at most one of them is true."""
CONVERTED_SIGMAS = (*REQUESTED_SIGMAS, "use_lu_lambdas", "use_flow_sigmas")
"""Fields with which a scheduler computes its own sigmas, one for each step."""


_TRAIN_TIMESTEPS = FieldRule(
    name="num_train_timesteps",
    default=1000,
    values=whole(1, _MOST_TRAIN_TIMESTEPS),
    why="each of them takes memory; published models have 1000",
)


def _betas(start: float, end: float, schedule: str) -> tuple[FieldRule, ...]:
    """Return the rules for the noise of training, with a class's defaults."""
    return (
        _TRAIN_TIMESTEPS,
        FieldRule(name="beta_start", default=start, values=_SHARE),
        FieldRule(name="beta_end", default=end, values=_SHARE),
        FieldRule(name="beta_schedule", default=schedule, values=only("linear", "scaled_linear", "squaredcos_cap_v2")),
        FieldRule(
            name="trained_betas", default=None, values=NULL | list_of(_SHARE, "a list of numbers between 0 and 1")
        ),
    )


_DEFAULT_BETAS = _betas(0.0001, 0.02, "linear")
_LATENT_BETAS = _betas(0.00085, 0.012, "scaled_linear")
_ZERO_SNR = FieldRule(name="rescale_betas_zero_snr", default=False, values=FLAG)


def _prediction(*served: str) -> FieldRule:
    return FieldRule(name="prediction_type", default="epsilon", values=only(*served))


def _timesteps(spacing: str) -> tuple[FieldRule, ...]:
    return (
        FieldRule(name="timestep_spacing", default=spacing, values=_SPACINGS),
        FieldRule(name="steps_offset", default=0, values=whole(0), why="timesteps are those of training"),
    )


def _noise_schedule(spacing: str, *predictions: str) -> tuple[FieldRule, ...]:
    """Return the rules for the fields that most schedulers have."""
    return (*_DEFAULT_BETAS, _prediction(*predictions), *_timesteps(spacing), _ZERO_SNR)


_SIGMA_RULES = tuple(FieldRule(name=name, default=False, values=BOOLEAN) for name in REQUESTED_SIGMAS)
_LAST_SIGMA = FieldRule(name="final_sigmas_type", default="zero", values=only("zero", "sigma_min"))
_THRESHOLDING = (
    FieldRule(name="thresholding", default=False, values=FLAG),
    FieldRule(name="dynamic_thresholding_ratio", default=0.995, values=FRACTION),
    FieldRule(
        name="sample_max_value",
        default=1.0,
        values=POSITIVE,
        why="at 0 every value of the picture would be clipped to 0",
    ),
)


def _clipping(default: bool) -> tuple[FieldRule, ...]:
    return (
        FieldRule(name="clip_sample", default=default, values=FLAG),
        FieldRule(
            name="clip_sample_range",
            default=1.0,
            values=POSITIVE,
            why="at 0 every value of the picture would be clipped to 0",
        ),
    )


def _consistency() -> tuple[FieldRule, ...]:
    """Return the rules for samplers of models that were distilled to consistency models."""
    return (
        *_LATENT_BETAS,
        _prediction("epsilon", "v_prediction", "sample"),
        *_timesteps("leading"),
        _ZERO_SNR,
        FieldRule(name="original_inference_steps", default=50, values=whole(1)),
        FieldRule(name="timestep_scaling", default=10.0, values=POSITIVE),
        FieldRule(name="set_alpha_to_one", default=True, values=FLAG),
        *_clipping(False),
        *_THRESHOLDING,
    )


def _second_order(*predictions: str) -> tuple[FieldRule, ...]:
    """Return the rules for samplers that evaluate the network twice in a step."""
    return (
        *_betas(0.00085, 0.012, "linear"),
        _prediction(*predictions),
        *_timesteps("linspace"),
        *_SIGMA_RULES,
    )


_DYNAMIC_SHIFTING = (
    FieldRule(name="use_dynamic_shifting", default=False, values=FLAG),
    FieldRule(name="time_shift_type", default="exponential", values=ANY),
)
_FLOW_SIGMAS = (
    FieldRule(name="use_flow_sigmas", default=False, values=FLAG),
    FieldRule(name="flow_shift", default=1.0, values=POSITIVE),
)
_FLOW_MATCHING = (
    _TRAIN_TIMESTEPS,
    FieldRule(name="shift", default=1.0, values=POSITIVE),
    FieldRule(name="use_dynamic_shifting", default=False, values=FLAG),
    FieldRule(name="base_shift", default=0.5, values=number("a number")),
    FieldRule(name="max_shift", default=1.15, values=number("a number")),
    FieldRule(name="base_image_seq_len", default=256, values=whole(1)),
    FieldRule(name="max_image_seq_len", default=4096, values=whole(1)),
    FieldRule(name="invert_sigmas", default=False, values=OFF, why="only models of video use it"),
    FieldRule(name="shift_terminal", default=None, values=NULL | _SHARE),
    *_SIGMA_RULES,
    FieldRule(name="time_shift_type", default="exponential", values=only("exponential", "linear")),
    FieldRule(
        name="stochastic_sampling",
        default=False,
        values=OFF,
        why="Diffusers' pipelines draw its noise without the request's seed",
    ),
)
_SOLVER_ORDER = FieldRule(name="solver_order", default=2, values=only(1, 2, 3), why="Diffusers has no other solvers")
_CLIPPED_LAMBDA = FieldRule(
    name="lambda_min_clipped",
    default=-math.inf,
    values=Values(text="a number or -Infinity", accepts=lambda value: value == -math.inf or number("").accepts(value)),
)
_NO_LEARNED_VARIANCE = FieldRule(
    name="variance_type",
    default=None,
    values=Values(text="null", accepts=lambda value: value not in ("learned", "learned_range")),
    why="models that predict a variance beside the noise are not served",
)
# Diffusers takes the names of other solvers for its own one.
_SOLVER_TYPES = ("midpoint", "heun", "logrho", "bh1", "bh2")
_EDM_LEVELS = (
    FieldRule(name="sigma_min", default=0.002, values=POSITIVE),
    FieldRule(name="sigma_max", default=80.0, values=POSITIVE),
    FieldRule(name="sigma_data", default=0.5, values=POSITIVE),
    FieldRule(name="sigma_schedule", default="karras", values=only("karras", "exponential")),
    FieldRule(name="num_train_timesteps", default=1000, values=whole(1)),
    _prediction("epsilon", "v_prediction"),
    FieldRule(name="rho", default=7.0, values=POSITIVE),
    _LAST_SIGMA,
)

SCHEDULER_RULES: Mapping[str, Sequence[FieldRule]] = MappingProxyType(
    {
        "EulerDiscreteScheduler": (
            *_noise_schedule("linspace", "epsilon", "v_prediction", "sample", "original_sample"),
            FieldRule(name="interpolation_type", default="linear", values=only("linear", "log_linear")),
            *_SIGMA_RULES,
            FieldRule(name="sigma_min", default=None, values=NULL | POSITIVE),
            FieldRule(name="sigma_max", default=None, values=NULL | POSITIVE),
            FieldRule(
                name="timestep_type",
                default="discrete",
                values=only("discrete", "continuous"),
                why="Diffusers takes all others for discrete",
            ),
            _LAST_SIGMA,
        ),
        "EulerAncestralDiscreteScheduler": _noise_schedule("linspace", "epsilon", "v_prediction"),
        "DDIMScheduler": (
            *_noise_schedule("leading", "epsilon", "v_prediction", "sample"),
            *_clipping(True),
            FieldRule(name="set_alpha_to_one", default=True, values=FLAG),
            *_THRESHOLDING,
        ),
        "DPMSolverMultistepScheduler": (
            *_noise_schedule("linspace", "epsilon", "v_prediction", "sample", "flow_prediction"),
            _SOLVER_ORDER,
            FieldRule(
                name="algorithm_type",
                default="dpmsolver++",
                values=only("dpmsolver++", "sde-dpmsolver++", "dpmsolver", "sde-dpmsolver", "deis"),
            ),
            FieldRule(name="solver_type", default="midpoint", values=only(*_SOLVER_TYPES)),
            FieldRule(name="lower_order_final", default=True, values=FLAG),
            FieldRule(name="euler_at_final", default=False, values=FLAG),
            *_SIGMA_RULES,
            FieldRule(name="use_lu_lambdas", default=False, values=FLAG),
            *_FLOW_SIGMAS,
            _LAST_SIGMA,
            _CLIPPED_LAMBDA,
            _NO_LEARNED_VARIANCE,
            *_THRESHOLDING,
            *_DYNAMIC_SHIFTING,
        ),
        "DPMSolverSinglestepScheduler": (
            *_DEFAULT_BETAS,
            _prediction("epsilon", "v_prediction", "sample", "flow_prediction"),
            _SOLVER_ORDER,
            FieldRule(
                name="algorithm_type",
                default="dpmsolver++",
                values=only("dpmsolver++", "sde-dpmsolver++", "dpmsolver", "deis"),
            ),
            FieldRule(name="solver_type", default="midpoint", values=only(*_SOLVER_TYPES)),
            FieldRule(name="lower_order_final", default=False, values=FLAG),
            *_SIGMA_RULES,
            *_FLOW_SIGMAS,
            _LAST_SIGMA,
            _CLIPPED_LAMBDA,
            _NO_LEARNED_VARIANCE,
            *_THRESHOLDING,
            *_DYNAMIC_SHIFTING,
        ),
        "DDPMScheduler": (
            *_noise_schedule("leading", "epsilon", "v_prediction", "sample"),
            FieldRule(
                name="variance_type",
                default="fixed_small",
                values=only("fixed_small", "fixed_small_log", "fixed_large", "fixed_large_log"),
                why="models that predict a variance beside the noise are not served",
            ),
            *_clipping(True),
            *_THRESHOLDING,
        ),
        "DEISMultistepScheduler": (
            *_DEFAULT_BETAS,
            _prediction("epsilon", "v_prediction", "sample", "flow_prediction"),
            *_timesteps("linspace"),
            _SOLVER_ORDER,
            FieldRule(name="algorithm_type", default="deis", values=only("deis", "dpmsolver", "dpmsolver++")),
            FieldRule(name="solver_type", default="logrho", values=only(*_SOLVER_TYPES)),
            FieldRule(name="lower_order_final", default=True, values=FLAG),
            *_SIGMA_RULES,
            *_FLOW_SIGMAS,
            *_THRESHOLDING,
            *_DYNAMIC_SHIFTING,
        ),
        "UniPCMultistepScheduler": (
            *_noise_schedule("linspace", "epsilon", "v_prediction", "sample", "flow_prediction"),
            _SOLVER_ORDER,
            FieldRule(name="predict_x0", default=True, values=FLAG),
            FieldRule(name="solver_type", default="bh2", values=only(*_SOLVER_TYPES)),
            FieldRule(name="lower_order_final", default=True, values=FLAG),
            FieldRule(
                name="disable_corrector",
                default=[],
                values=only([]) | list_of(whole(0), "a list of whole numbers from 0"),
            ),
            FieldRule(name="solver_p", default=None, values=NULL, why="another solver inside this one is not served"),
            *_SIGMA_RULES,
            *_FLOW_SIGMAS,
            FieldRule(name="shift_terminal", default=None, values=NULL, why="it is for flow matching"),
            FieldRule(name="sigma_min", default=None, values=NULL | POSITIVE),
            FieldRule(name="sigma_max", default=None, values=NULL | POSITIVE),
            _LAST_SIGMA,
            *_THRESHOLDING,
            FieldRule(
                name="use_dynamic_shifting", default=False, values=OFF, why="Diffusers' pipelines do not support it"
            ),
            FieldRule(name="time_shift_type", default="exponential", values=ANY),
        ),
        "LMSDiscreteScheduler": (
            *_DEFAULT_BETAS,
            _prediction("epsilon", "v_prediction", "sample"),
            *_timesteps("linspace"),
            *_SIGMA_RULES,
        ),
        "PNDMScheduler": (
            *_DEFAULT_BETAS,
            _prediction("epsilon", "v_prediction"),
            *_timesteps("leading"),
            FieldRule(name="skip_prk_steps", default=False, values=FLAG),
            FieldRule(name="set_alpha_to_one", default=False, values=FLAG),
        ),
        "HeunDiscreteScheduler": (
            *_second_order("epsilon", "v_prediction", "sample"),
            *_clipping(False),
        ),
        "KDPM2DiscreteScheduler": _second_order("epsilon", "v_prediction"),
        "KDPM2AncestralDiscreteScheduler": _second_order("epsilon", "v_prediction"),
        FLOW_MATCHING: _FLOW_MATCHING,
        "LCMScheduler": _consistency(),
        "TCDScheduler": _consistency(),
        "EDMEulerScheduler": _EDM_LEVELS,
        "EDMDPMSolverMultistepScheduler": (
            *_EDM_LEVELS,
            _SOLVER_ORDER,
            FieldRule(name="algorithm_type", default="dpmsolver++", values=only("dpmsolver++", "sde-dpmsolver++")),
            FieldRule(name="solver_type", default="midpoint", values=only(*_SOLVER_TYPES)),
            FieldRule(name="lower_order_final", default=True, values=FLAG),
            FieldRule(name="euler_at_final", default=False, values=FLAG),
            *_THRESHOLDING,
        ),
    }
)
"""By class, the rules for its fields."""


def takes_karras_sigmas(sampler: str) -> bool:
    """Return whether a sampler has a choice of Karras' sigmas."""
    return any(rule.name == "use_karras_sigmas" for rule in SCHEDULER_RULES[SAMPLER_CLASSES[sampler]])


def one_conversion(values: Mapping[str, object]) -> dict[str, object]:
    """Return changes of a scheduler configuration. One that chooses a kind of sigmas switches the others off."""
    others = dict.fromkeys(REQUESTED_SIGMAS, False) if any(values.get(kind) for kind in REQUESTED_SIGMAS) else {}
    return {**others, **values}
