"""Schedules of requests: the fields with which a request changes the timesteps and noise levels of its sampler.

The fields are those of Diffusers' schedulers: switches of their configuration, as in
`X.from_config(pipe.scheduler.config, timestep_spacing="trailing")`, and the `timesteps` and `sigmas` of its pipelines.
What Diffusers would reject or ignore is refused. `rescale_betas_zero_snr` is no field of a request: it says how a
model was trained, so it belongs to the model's configuration or its preset.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from bottega.errors import Violation
from bottega.model_files.scheduler_rules import (
    CONVERTED_SIGMAS,
    FLOW_MATCHING,
    REQUESTED_SIGMAS,
    SAMPLER_CLASSES,
    SCHEDULER_RULES,
    one_conversion,
    takes_karras_sigmas,
)
from bottega.rules import LAST_SIGMAS, MAX_STEPS, SPACINGS, FinalSigmasTypeName, TimestepSpacingName
from bottega.v1.generation_pb2 import GenerationSpec, Sampler

# More than the training timesteps of any model that is served, and more than the noise of any.
_MAX_TIMESTEP = 99_999
_MAX_SIGMA = 10_000.0
_TRAINED_TIMESTEPS = 1000

_SPACING_NAMES = {number: name for name, number in SPACINGS.items()}
_LAST_SIGMA_NAMES = {number: name for name, number in LAST_SIGMAS.items()}
_SWITCHES = ("use_exponential_sigmas", "use_beta_sigmas", "timestep_spacing", "final_sigmas_type")

# Classes that have a field in their configuration, and do not read it.
_UNREAD: Mapping[str, frozenset[str]] = {
    "LCMScheduler": frozenset({"timestep_spacing"}),
    "TCDScheduler": frozenset({"timestep_spacing"}),
}
# Samplers whose converted sigmas depend on all timesteps of training, not on their spacing.
_SPACING_LOST = frozenset({"dpmpp_2m", "dpmpp_2m_sde", "deis", "unipc"})
# Samplers of two evaluations a step that take timesteps: Diffusers' pipelines count evaluations as steps then.
_COUNTED_TWICE = frozenset({"heun"})
CUSTOM_LISTS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "timesteps": frozenset({"euler", "dpmpp_2m", "dpmpp_2m_sde", "dpmpp_2s", "ddpm", "lcm", "tcd", "heun"}),
        # UniPC takes them for flow matching alone, and EDM's Euler fails with a list.
        "sigmas": frozenset({"euler"}),
    }
)
"""Samplers that take each of the lists, by its field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """The fields of a request that change its sampler's schedule. None and () are as the model is configured."""

    use_exponential_sigmas: bool | None = None
    use_beta_sigmas: bool | None = None
    timestep_spacing: TimestepSpacingName | None = None
    final_sigmas_type: FinalSigmasTypeName | None = None
    timesteps: tuple[int, ...] = ()
    """Timestep of each step."""
    sigmas: tuple[float, ...] = ()
    """Noise level before each step, and after the last one."""
    strength: float | None = None
    """Strength of an image-to-image request that makes all steps (see `keeps_steps`); None for other requests."""

    @property
    def steps(self) -> int | None:
        """Number of steps of the lists; None without one."""
        if self.timesteps:
            return len(self.timesteps)
        return len(self.sigmas) - 1 if self.sigmas else None

    def overrides(self, sampler: str, karras: bool | None) -> dict[str, object]:
        """Return the values that replace those of the model's scheduler configuration.

        Args:
            sampler: Name of the sampler.
            karras: Whether the request has Karras' sigmas; None: as configured. Ignored for samplers that have none.
        """
        values = {name: getattr(self, name) for name in _SWITCHES}
        values["use_karras_sigmas"] = karras if takes_karras_sigmas(sampler) else None
        return one_conversion({name: value for name, value in values.items() if value is not None})

    def problems(self, sampler: str, config: Mapping[str, object], *, from_image: bool = False) -> Iterator[Violation]:
        """Yield why a sampler cannot make this schedule: each field that Diffusers rejects or ignores.

        Args:
            sampler: Name of the sampler.
            config: The scheduler's configuration with the values of the request, as far as it is known.
            from_image: Whether the request starts from an image.
        """
        class_name = SAMPLER_CLASSES[sampler]
        if self.strength is not None and sampler != "lcm":
            yield _broken("sampler", "must be lcm: this model draws from an image with that sampler alone")
        fields = {rule.name for rule in SCHEDULER_RULES[class_name]} - _UNREAD.get(class_name, frozenset())
        for name in _SWITCHES:
            # False changes nothing where the class has no such field.
            if getattr(self, name) and name not in fields:
                yield _broken(name, f"must be absent with the sampler {sampler}: its {class_name} ignores it")
        for name, samplers in CUSTOM_LISTS.items():
            if getattr(self, name) and sampler not in samplers:
                why = "is not served" if class_name == FLOW_MATCHING else f"its {class_name} takes none"
                yield _broken(name, f"must be empty with the sampler {sampler}: {why}")
        converted = next((name for name in CONVERTED_SIGMAS if name in fields and config.get(name)), "")
        if converted and self.timesteps:
            yield _broken("timesteps", f"must be empty where {converted} is true: a schedule has one of the two")
        if converted and self.timestep_spacing and sampler in _SPACING_LOST:
            why = f"the sampler {sampler} ignores it then"
            yield _broken("timestep_spacing", f"must be absent where {converted} is true: {why}")
        if self.timesteps and from_image and sampler in _COUNTED_TWICE:
            why = f"the sampler {sampler} would count each of their steps twice, and skip others"
            yield _broken("timesteps", f"must be empty with image: {why}")
        # The values of a request alone say nothing about the model's training.
        trained = config.get("num_train_timesteps", _TRAINED_TIMESTEPS if "_class_name" in config else None)
        if self.timesteps and isinstance(trained, int) and self.timesteps[0] >= trained:
            yield _broken("timesteps", f"must be below {trained}, the timesteps that the model was trained with")


AS_CONFIGURED = Schedule()
"""The schedule of a request that has none of the fields."""


def keeps_steps(spec: GenerationSpec, model_keeps_steps: bool) -> bool:
    """Return whether a spec's strength sets the noise level of its first step, instead of the steps to skip.

    Source: set_timesteps of Diffusers' LCMScheduler, which skips steps of custom timesteps.

    Args:
        spec: The spec. If its images were removed, its defaults must be filled in.
        model_keeps_steps: `Model.strength_keeps_steps` of the model that draws it.
    """
    starts_from_image = spec.HasField("image") or spec.HasField("strength")
    edits = spec.HasField("mask_image") or spec.HasField("keep_unmasked")
    return model_keeps_steps and starts_from_image and not edits and not spec.timesteps


def schedule_of(spec: GenerationSpec, strength: float | None = None) -> Schedule:
    """Return the schedule of a spec. Unknown values of its enums count as absent.

    Args:
        spec: The spec.
        strength: See `Schedule.strength`.
    """
    return Schedule(
        use_exponential_sigmas=spec.use_exponential_sigmas if spec.HasField("use_exponential_sigmas") else None,
        use_beta_sigmas=spec.use_beta_sigmas if spec.HasField("use_beta_sigmas") else None,
        timestep_spacing=_SPACING_NAMES.get(spec.timestep_spacing),
        final_sigmas_type=_LAST_SIGMA_NAMES.get(spec.final_sigmas_type),
        timesteps=tuple(spec.timesteps[: MAX_STEPS + 1]),
        sigmas=tuple(spec.sigmas[: MAX_STEPS + 2]),
        strength=strength,
    )


def lists_steps(spec: GenerationSpec) -> bool:
    """Return whether a spec lists its own timesteps or sigmas, for which no approximation was measured."""
    return bool(spec.timesteps or spec.sigmas)


def karras_of(spec: GenerationSpec, default: bool) -> bool:
    """Return whether a spec has Karras' sigmas; `default` is the model's, which other sigmas of the spec replace."""
    if spec.HasField("use_karras_sigmas"):
        return spec.use_karras_sigmas
    return default and not (spec.use_exponential_sigmas or spec.use_beta_sigmas or spec.sigmas)


def steps_of(spec: GenerationSpec, default: int) -> int:
    """Return the denoising steps of a spec, including those that image-to-image skips.

    Args:
        spec: The spec, whose timesteps or sigmas set their number if it has them.
        default: The model's default.
    """
    if spec.HasField("num_inference_steps"):
        return spec.num_inference_steps
    made = schedule_of(spec).steps if lists_steps(spec) else None
    return default if made is None else made


def check_schedule(spec: GenerationSpec) -> Iterator[Violation]:
    """Check the fields of a spec's schedule without its sampler. `rules.check_ranges` checks the enums."""
    kinds = [name for name in REQUESTED_SIGMAS if getattr(spec, name)]
    for name in kinds[1:]:
        yield _broken(name, f"must be absent or false with {kinds[0]}: a schedule has one of them")
    if spec.timesteps and spec.sigmas:
        yield _broken("sigmas", "must be empty with timesteps: a schedule has one of the two")
    for name in ("timesteps", "sigmas"):
        if getattr(spec, name) and spec.timestep_spacing:
            yield _broken("timestep_spacing", f"must be absent with {name}, which take its place")
    if spec.sigmas and kinds:
        yield _broken(kinds[0], "must be absent or false with sigmas, which take its place")
    if spec.sigmas and spec.final_sigmas_type:
        yield _broken("final_sigmas_type", "must be absent with sigmas, whose last one takes its place")
    found = [*_check_timesteps(spec), *_check_sigmas(spec)]
    yield from found
    steps = schedule_of(spec).steps if lists_steps(spec) else None
    if not found and spec.HasField("num_inference_steps") and steps not in (None, spec.num_inference_steps):
        name = "timesteps" if spec.timesteps else "sigmas"
        yield _broken("num_inference_steps", f"must be {steps}, the steps of {name}, or absent")


def check_sampler_schedule(
    spec: GenerationSpec, sampler: Sampler.ValueType, karras: bool, strength: float | None = None
) -> Iterator[Violation]:
    """Check that a sampler can make the schedule of a spec, as far as that does not depend on the model.

    Yields nothing if the sampler is unknown.

    Args:
        spec: The spec.
        sampler: Its sampler, or the model's default.
        karras: Whether it has Karras' sigmas, or the model has them by default.
        strength: See `Schedule.strength`.
    """
    name = _NAMES.get(sampler)
    schedule = schedule_of(spec, strength)
    if name is not None and schedule != AS_CONFIGURED:
        overrides = schedule.overrides(name, karras)
        yield from schedule.problems(name, overrides, from_image=spec.HasField("image"))


def _check_timesteps(spec: GenerationSpec) -> Iterator[Violation]:
    if len(spec.timesteps) > MAX_STEPS:
        yield _broken("timesteps", f"must have at most {MAX_STEPS} numbers")
    elif not all(0 <= timestep <= _MAX_TIMESTEP for timestep in spec.timesteps):
        yield _broken("timesteps", f"must be 0 to {_MAX_TIMESTEP}")
    elif not all(before > after for before, after in itertools.pairwise(spec.timesteps)):
        yield _broken("timesteps", "must fall from each to the next")


def _check_sigmas(spec: GenerationSpec) -> Iterator[Violation]:
    if spec.sigmas and not 2 <= len(spec.sigmas) <= MAX_STEPS + 1:
        yield _broken("sigmas", f"must be 2 to {MAX_STEPS + 1}: one before each step, and one after the last")
    elif not all(math.isfinite(sigma) and 0 <= sigma <= _MAX_SIGMA for sigma in spec.sigmas):
        yield _broken("sigmas", f"must be 0 to {_MAX_SIGMA:g}")
    elif not all(before > after for before, after in itertools.pairwise(spec.sigmas)):
        yield _broken("sigmas", "must fall from each to the next")


def _broken(name: str, description: str) -> Violation:
    return Violation(field=f"spec.{name}", description=description)


_NAMES = {Sampler.Value(f"SAMPLER_{name.upper()}"): name for name in SAMPLER_CLASSES}
