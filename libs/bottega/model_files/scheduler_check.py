"""Checks a model's scheduler_config.json, and whether a sampler can draw with it, by the rules of `scheduler_rules`.

`sampler_problems` checks any sampler that a request may choose, and `check_scheduler_config` the model's own. The
engine also tries every choice when it loads a model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bottega.model_files.field_rules import (
    broken_fields,
    shown,
    with_defaults,
)
from bottega.model_files.scheduler_rules import (
    FLOW_MATCHING,
    REQUESTED_SIGMAS,
    SAMPLER_CLASSES,
    SAMPLER_OVERRIDES,
    SCHEDULER_RULES,
    UNSERVED_CLASSES,
)

_NOISE_PREDICTING = ("dpmsolver", "sde-dpmsolver")
_EDM_SAMPLERS = ("edm_euler", "edm_dpmpp_2m")


def check_scheduler_config(config: Mapping[str, object], *, sampler: str = "") -> Iterator[str]:
    """Yield a sentence for the class and for each field of scheduler_config.json that is not served.

    A sentence names the field and says what to do; the caller puts the file's name before it.

    Args:
        config: The content of scheduler_config.json, with the class that model_index.json names as `_class_name`.
        sampler: The sampler that a preset names in place of the model's own; empty without one.
    """
    name = config.get("_class_name")
    own = next((own for own, served in SAMPLER_CLASSES.items() if served == name), "")
    if own:
        yield from sampler_problems(sampler or own, config)
        return
    *others, last = SCHEDULER_RULES
    reason = UNSERVED_CLASSES.get(str(name), "this class is not known")
    yield f"_class_name must be {', '.join(others)} or {last}, not {shown(name)}: {reason}"


def sampler_problems(sampler: str, config: Mapping[str, object]) -> list[str]:
    """Return the reasons why a sampler cannot draw with a model's configuration.

    Args:
        sampler: Name of the requested sampler, which may differ from the model's own.
        config: Contents of the model's scheduler_config.json, with the values of a request.
    """
    table = SCHEDULER_RULES[SAMPLER_CLASSES[sampler]]
    if sampler in _EDM_SAMPLERS and config.get("_class_name") not in {SAMPLER_CLASSES[name] for name in _EDM_SAMPLERS}:
        return ["it is for models that were trained with EDM's noise levels"]
    flows = config.get("_class_name") == FLOW_MATCHING
    if flows != (SAMPLER_CLASSES[sampler] == FLOW_MATCHING):
        what = (
            "predict noise, and this one was trained with flow matching" if flows else "were trained with flow matching"
        )
        return [f"it is for models that {what}"]
    config = {**config, **SAMPLER_OVERRIDES.get(sampler, {})}
    problems = list(broken_fields(table, config))
    # Rules between fields assume valid fields.
    return problems or list(_broken_together(SAMPLER_CLASSES[sampler], with_defaults(table, config)))


def _broken_together(class_name: str, config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each field that does not fit the others. Single fields must be valid."""
    fields = {rule.name for rule in SCHEDULER_RULES[class_name]}
    count, betas = config["num_train_timesteps"], config.get("trained_betas")
    if "trained_betas" in fields and betas is not None and len(betas) != count:
        yield f"trained_betas must have {count} numbers, as num_train_timesteps says, not {len(betas)}"
    if "steps_offset" in fields and config["steps_offset"] >= count:
        yield f"steps_offset must be below {count}, num_train_timesteps, not {config['steps_offset']}"
    if "use_beta_sigmas" in fields:
        yield from _broken_sigmas(config)
    match class_name:
        case "DDIMScheduler" | "DDPMScheduler":
            yield from _broken_zero_snr(config, has_last_timestep=config["timestep_spacing"] != "leading")
        case "LCMScheduler" | "TCDScheduler":
            yield from _broken_zero_snr(config, has_last_timestep=True)
        case "FlowMatchEulerDiscreteScheduler" if config["max_image_seq_len"] <= config["base_image_seq_len"]:
            yield f"max_image_seq_len must be above base_image_seq_len ({config['base_image_seq_len']})"
        case "EulerDiscreteScheduler":
            yield from _broken_continuous(config)
        case "DPMSolverMultistepScheduler" | "DPMSolverSinglestepScheduler":
            yield from _broken_solver(config)
        case "DEISMultistepScheduler":
            yield from _broken_flow(config)
        case "UniPCMultistepScheduler" if config["final_sigmas_type"] == "zero":
            yield from _broken_last_step(config)


def _broken_zero_snr(config: Mapping[str, Any], *, has_last_timestep: bool) -> Iterator[str]:
    """Yield a sentence if the scheduler would divide by the signal of the last training timestep, which is 0.

    Args:
        has_last_timestep: Whether a schedule begins at that timestep.
    """
    divides = config["rescale_betas_zero_snr"] and config["prediction_type"] == "epsilon" and has_last_timestep
    if divides and not config["clip_sample"] and not config["thresholding"]:
        yield (
            'rescale_betas_zero_snr must be false with prediction_type "epsilon" and timestep_spacing '
            f"{shown(config['timestep_spacing'])}: Diffusers divides by zero at the last timestep"
        )


def _broken_last_step(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield a sentence for each field with which UniPC cannot reach a noise level of 0."""
    if config["solver_order"] == 3 and not config["lower_order_final"]:
        yield 'lower_order_final must be true with solver_order 3 and final_sigmas_type "zero"'
    if not config["predict_x0"]:
        yield 'predict_x0 must be true with final_sigmas_type "zero"'
    if config["solver_type"] == "bh1":
        yield 'solver_type must be "bh2" with final_sigmas_type "zero", not "bh1"'


def _broken_sigmas(config: Mapping[str, Any]) -> Iterator[str]:
    chosen = [name for name in REQUESTED_SIGMAS if config[name]]
    if len(chosen) > 1:
        yield f"{chosen[1]} must be false with {chosen[0]}: Diffusers takes one of {', '.join(REQUESTED_SIGMAS)}"


def _broken_continuous(config: Mapping[str, Any]) -> Iterator[str]:
    continuous = config["timestep_type"] == "continuous" and config["prediction_type"] == "v_prediction"
    if (
        continuous
        and config["interpolation_type"] == "log_linear"
        and not any(config[name] for name in REQUESTED_SIGMAS)
    ):
        why = 'with "log_linear" Diffusers makes one step more than asked'
        yield f'interpolation_type must be "linear" with continuous timesteps: {why}'


def _broken_solver(config: Mapping[str, Any]) -> Iterator[str]:
    algorithm = config["algorithm_type"]
    if algorithm in (*_NOISE_PREDICTING, "deis") and config["final_sigmas_type"] == "zero":
        yield f'final_sigmas_type must be "sigma_min" with algorithm_type {shown(algorithm)}, not "zero"'
    if algorithm in _NOISE_PREDICTING and config["prediction_type"] == "flow_prediction":
        yield f'prediction_type must not be "flow_prediction" with algorithm_type {shown(algorithm)}'
    if algorithm == "sde-dpmsolver" and config["solver_order"] == 3:
        yield 'solver_order must be 1 or 2 with algorithm_type "sde-dpmsolver", not 3'
    yield from _broken_flow(config)


def _broken_flow(config: Mapping[str, Any]) -> Iterator[str]:
    converted = [name for name in (*REQUESTED_SIGMAS, "use_lu_lambdas") if config.get(name)]
    if config["use_flow_sigmas"] and converted:
        yield f"use_flow_sigmas must be false with {converted[0]}: there the noise is more than all of a latent"
