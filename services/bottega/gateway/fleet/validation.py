"""The bounds on registrations and load reports of services. All violations of a message are found at once."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from bottega import kinds, rules
from bottega.adapter_rules import MAX_MODES, MAX_PROFILES, check_residual_profile
from bottega.errors import ConfigError, Violation
from bottega.kinds import is_kind
from bottega.rpc.address import split
from bottega.v1 import fleet_pb2, image_pb2
from bottega.v1.generation_pb2 import Sampler
from bottega.v1.hosted_pb2 import HOSTED_STATE_APPLIED, Hosted, HostedState, LeftOut

MAX_MODELS = 256
"""Upper bound on the models of one service, and on models that are remembered after their last worker left."""

MAX_USED_KINDS = 16
"""Upper bound on the kinds of services whose addresses a service asks for."""

MAX_HOSTED = 1024
"""Upper bound on the items of one kind, such as ControlNets, that one service hosts."""

# Upper bound on the hosted items of all kinds of one service, because the event loop checks a report without a pause.
_MAX_HOSTED_IN_ALL = 4 * MAX_HOSTED

_MAX_CHARACTERS = 128
_MAX_ADDRESS_CHARACTERS = 256
# Least and most characters of a secret that cannot be guessed.
_INSTANCE_CHARACTERS = (16, 64)
# A worker runs a few dozen attempts at once, and measures a few picture sizes with a few batch sizes.
_MAX_ENTRIES = 4096
# Upper bound on the latent sizes, and on the batch sizes, for which a worker reports times of masked rows.
_MAX_MASKED_TIMES = 32
_MAX_MASK_TOKENS = 64
# Upper bound on the measured forward passes of a ControlNet.
_MAX_FORWARD_TIMES = 64
# Upper bound on the entries of a worker's self-check.
_MAX_ACCELERATIONS = 64
# Upper bound on the characters of a stage of starting.
_MAX_STAGE = 64
# Upper bounds on the pools of a scaler, and on the services of each.
_MAX_POOLS = 64
_MAX_POOL_SIZE = 256
_SCALED_KINDS = frozenset({kinds.WORKER, kinds.CONTROLNET, *kinds.STAGES})
_MAX_REASON = rules.MAX_REASON_CHARACTERS
# More than any sampler makes: Heun 2 in a step, and PNDM up to 9 beside one in each.
_MAX_EVALUATIONS_PER_STEP = 4
_MAX_EXTRA_EVALUATIONS = 16
_ACCELERATION = re.compile(r"[a-z0-9_.-]{1,64}")
# A host's name or address, without path and scheme.
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")


def check_registration(registration: fleet_pb2.Registration) -> Iterator[Violation]:
    """Yield the violations in a registration."""
    if not is_kind(registration.kind):
        yield _violation("kind", "must be 1 to 32 characters of [a-z0-9-] and begin with a letter")
    uses = registration.uses
    if len(uses) > MAX_USED_KINDS or len(set(uses)) < len(uses) or not all(map(is_kind, uses)):
        yield _violation("uses", f"must be at most {MAX_USED_KINDS} kinds of services without duplicates")
    if not 0 < len(registration.name) <= _MAX_CHARACTERS:
        yield _violation("name", f"must be 1 to {_MAX_CHARACTERS} characters")
    if not _is_address(registration.address):
        yield _violation("address", "must be host:port")
    if registration.metrics_address and not _is_address(registration.metrics_address):
        yield _violation("metrics_address", "must be host:port, or empty")
    for name in ("version", "device"):
        if len(getattr(registration, name)) > _MAX_CHARACTERS:
            yield _violation(name, f"must be at most {_MAX_CHARACTERS} characters")
    if not _INSTANCE_CHARACTERS[0] <= len(registration.instance) <= _INSTANCE_CHARACTERS[1]:
        least, most = _INSTANCE_CHARACTERS
        yield _violation("instance", f"must be {least} to {most} characters")
    yield from _models(registration)


def check_load(load: fleet_pb2.Load) -> Iterator[Violation]:
    """Yield the violations in a load report. Values that planning cannot use are ignored, not refused."""
    for name in ("running", "step_times"):
        if len(getattr(load, name)) > _MAX_ENTRIES:
            yield Violation(field=f"load.{name}", description=f"must have at most {_MAX_ENTRIES} entries")
    if any(len(running.attempt.job_id) > _MAX_CHARACTERS for running in load.running):
        yield Violation(field="load.running", description=f"job IDs must have at most {_MAX_CHARACTERS} characters")
    if not 0 <= load.fixed_s < math.inf:
        yield Violation(field="load.fixed_s", description="must be a finite number of seconds, not negative")
    if not 0 <= load.start_s <= rules.MAX_START_S:
        yield Violation(field="load.start_s", description=f"must be from 0 to {rules.MAX_START_S:.0f} s")
    times = {time.kind: time.seconds for time in load.switch_times}
    if (
        len(times) < len(load.switch_times)
        or len(times) > MAX_USED_KINDS
        or not all(map(_can_be_switched, times.items()))
    ):
        rule = f"must be finite numbers of seconds, of at most {MAX_USED_KINDS} kinds without duplicates"
        yield Violation(field="load.switch_times", description=rule)
    for name in ("max_rows", "memory_bytes", "queued_rows", "budget_bytes"):
        if getattr(load, name) < 0:
            yield Violation(field=f"load.{name}", description="must not be negative")
    if any(not 0 <= number < math.inf for _, number in load.activity.ListFields()):
        yield Violation(field="load.activity", description="must be numbers that are finite and not negative")
    starting = load.starting
    if load.HasField("starting") and not (
        0 < len(starting.stage) <= _MAX_STAGE and starting.done_bytes >= 0 and starting.total_bytes >= 0
    ):
        rule = f"the stage must have 1 to {_MAX_STAGE} characters, and byte counts must not be negative"
        yield Violation(field="load.starting", description=rule)
    yield from _pools(load)
    yield from _masked(load)
    yield from _accelerations(load)
    yield from _hosted(load)
    if len(load.left_out) > rules.MAX_LEFT_OUT or not all(map(_can_be_left_out, load.left_out)):
        rule = (
            f"must have at most {rules.MAX_LEFT_OUT} entries, each with a kind, a name, "
            f"and a reason of at most {_MAX_REASON} characters"
        )
        yield Violation(field="load.left_out", description=rule)


def _pools(load: fleet_pb2.Load) -> Iterator[Violation]:
    keys = {(pool.kind, pool.model) for pool in load.pools}
    if not len(keys) == len(load.pools) <= _MAX_POOLS or not all(map(_can_be_scaled, load.pools)):
        rule = (
            f"must be at most {_MAX_POOLS} of workers or ControlNet servers, each kind and model once, with a minimum "
            f"of at most the maximum, which is at most {_MAX_POOL_SIZE}, and no more services than that"
        )
        yield Violation(field="load.pools", description=rule)


def _can_be_scaled(pool: fleet_pb2.Pool) -> bool:
    return (
        pool.kind in _SCALED_KINDS
        and 0 < len(pool.model) <= rules.MAX_MODEL_CHARACTERS
        and 0 <= pool.minimum <= pool.maximum <= _MAX_POOL_SIZE
        and min(pool.ready, pool.failed) >= 0
        and pool.ready + pool.failed + len(pool.starting_s) <= pool.maximum
        and all(0 <= age_s < math.inf for age_s in pool.starting_s)
    )


def _masked(load: fleet_pb2.Load) -> Iterator[Violation]:
    if max(len(load.masked_times), *(len(time.planned) for time in load.masked_times), 0) > _MAX_MASKED_TIMES:
        yield Violation(
            field="load.masked_times",
            description=f"must have at most {_MAX_MASKED_TIMES} entries and planned times each",
        )
    tokens = load.mask_tokens
    if not all(0 <= number <= _MAX_MASK_TOKENS for number in (tokens.token_elements, tokens.margin_tokens)):
        yield Violation(field="load.mask_tokens", description=f"must be from 0 to {_MAX_MASK_TOKENS}")


def _accelerations(load: fleet_pb2.Load) -> Iterator[Violation]:
    names = [acceleration.name for acceleration in load.accelerations]
    if len(names) > _MAX_ACCELERATIONS or len(set(names)) < len(names) or not all(map(_ACCELERATION.fullmatch, names)):
        rule = f"must be at most {_MAX_ACCELERATIONS} with unique names of 1 to 64 characters of [a-z0-9_.-]"
        yield Violation(field="load.accelerations", description=rule)
    numbers = [
        number
        for acceleration in load.accelerations
        for number in (acceleration.speedup, acceleration.difference, acceleration.tolerance)
    ]
    if not all(math.isfinite(number) and number >= 0 for number in numbers):
        yield Violation(field="load.accelerations", description="numbers must be finite and not negative")
    if any(len(acceleration.reason) > _MAX_REASON for acceleration in load.accelerations):
        yield Violation(field="load.accelerations", description=f"a reason must have at most {_MAX_REASON} characters")


def _hosted(load: fleet_pb2.Load) -> Iterator[Violation]:
    if len(load.hosted) > _MAX_HOSTED_IN_ALL or len({item.kind for item in load.hosted}) > MAX_USED_KINDS:
        rule = f"must be at most {_MAX_HOSTED_IN_ALL} items of at most {MAX_USED_KINDS} kinds"
        yield Violation(field="load.hosted", description=rule)
        return
    counts = Counter(item.kind for item in load.hosted)
    applied = Counter(item.kind for item in load.hosted if item.state == HOSTED_STATE_APPLIED)
    loadable = [(item.kind, item.name or item.digest) for item in load.hosted if item.state != HOSTED_STATE_APPLIED]
    if len(set(loadable)) < len(loadable) or max(counts.values(), default=0) > MAX_HOSTED:
        yield Violation(field="load.hosted", description=f"must be at most {MAX_HOSTED} of a kind without duplicates")
    elif max(applied.values(), default=0) > rules.MAX_ADAPTERS or not all(map(_can_be_hosted, load.hosted)):
        rule = f"items need a kind and a valid name or digest; at most {rules.MAX_ADAPTERS} may be applied"
        limits = f"hashes and bases of at most {_MAX_CHARACTERS} characters, no negative numbers, known states"
        yield Violation(field="load.hosted", description=f"{rule}; {limits}")
    elif not all(map(_is_profiled_well, load.hosted)):
        rule = f"profiles must be valid in SetProfile, at most {MAX_PROFILES} for a ControlNet"
        yield Violation(field="load.hosted", description=rule)


def _can_be_switched(time: tuple[str, float]) -> bool:
    kind, seconds = time
    return is_kind(kind) and 0 <= seconds < math.inf


def _can_be_hosted(item: Hosted) -> bool:
    return (
        is_kind(item.kind)
        # LoRAs are identified by their digests alone; ControlNets are requested by name.
        and (
            rules.is_adapter_name(item.name)
            if item.name or item.kind == kinds.CONTROLNET
            else rules.is_digest(item.digest)
        )
        and math.isfinite(item.scale)
        and max(len(item.digest), len(item.base)) <= _MAX_CHARACTERS
        and min(item.size_bytes, item.popularity, item.sessions, item.failed_loads) >= 0
        and item.state in HostedState.values()
        and 0 <= item.control_modes <= MAX_MODES
        and 0 <= item.load_s < math.inf
        and len(item.load_error) <= _MAX_REASON
        and len(item.forward_times) <= _MAX_FORWARD_TIMES
        and all(
            time.rows > 0 and 0 < time.seconds < math.inf and min(time.latent_height, time.latent_width) >= 0
            for time in item.forward_times
        )
    )


def _can_be_left_out(item: LeftOut) -> bool:
    name, reason = len(item.name), len(item.reason)
    return is_kind(item.kind) and 0 < name <= rules.MAX_ADAPTER_CHARACTERS and 0 < reason <= _MAX_REASON


def _is_profiled_well(item: Hosted) -> bool:
    return len(item.profiles) <= MAX_PROFILES and not any(
        True for profile in item.profiles for _ in check_residual_profile("profile", profile)
    )


def _models(registration: fleet_pb2.Registration) -> Iterator[Violation]:
    names = {model.name for model in registration.models} - {""}
    if not len(names) == len(registration.models) <= MAX_MODELS:
        yield _violation("models", f"must be at most {MAX_MODELS} with unique names")
    elif not all(_is_bounded(model) for model in registration.models):
        rule = f"names have at most {rules.MAX_MODEL_CHARACTERS} characters, hashes, dtypes and bases {_MAX_CHARACTERS}"
        yield _violation("models", rule)
    elif not all(_can_be_drawn_with(model) for model in registration.models):
        yield _violation("models", "their defaults and limits must be absent or valid in a request")


def _is_bounded(model: image_pb2.Model) -> bool:
    facts = (model.model_hash, model.dtype, model.base)
    return len(model.name) <= rules.MAX_MODEL_CHARACTERS and all(len(fact) <= _MAX_CHARACTERS for fact in facts)


def _can_be_drawn_with(model: image_pb2.Model) -> bool:
    """Return whether a model's defaults are valid. They fill in requests and are not checked again then."""
    sides = (model.default_width, model.default_height, model.size_multiple, model.vae_scale_factor, model.max_side)
    return (
        all(0 <= side <= rules.MAX_SIDE for side in sides)
        and 0 <= model.default_steps <= rules.MAX_STEPS
        and 0 <= model.default_guidance_scale <= rules.MAX_GUIDANCE_SCALE
        and 0 <= model.default_edit_guidance_scale <= rules.MAX_GUIDANCE_SCALE
        and (not model.HasField("default_strength") or 0 < model.default_strength <= 1)
        and (not model.HasField("default_edit_strength") or 0 < model.default_edit_strength <= 1)
        and math.isfinite(model.default_edit_controlnet_scale)
        and model.default_sampler in Sampler.values()
        and model.max_pixels >= 0
        and 0 <= model.max_clip_skip <= rules.MAX_CLIP_SKIP
        and 0 <= model.max_sequence_length <= rules.MAX_SEQUENCE_LENGTH
        and len(model.edits_refused_because) <= _MAX_REASON
        and _are_choices(model.sampler_choices)
    )


def _are_choices(choices: Sequence[image_pb2.SamplerChoice]) -> bool:
    """Return whether samplers are valid: no duplicates, one default, and reasons of bounded length."""
    named = {(choice.sampler, choice.use_karras_sigmas) for choice in choices}
    defaults = [choice.sampler for choice in choices if choice.is_default]
    return (
        len(choices) == len(named)
        and all(choice.sampler and choice.sampler in Sampler.values() for choice in choices)
        and len(defaults) == len(set(defaults)) == len({choice.sampler for choice in choices})
        and all(len(choice.refused_because) <= _MAX_REASON for choice in choices)
        and all(_are_refused_steps(choice.refused_steps) for choice in choices)
        and all(0 <= choice.evaluations_per_step <= _MAX_EVALUATIONS_PER_STEP for choice in choices)
        and all(abs(choice.extra_evaluations) <= _MAX_EXTRA_EVALUATIONS for choice in choices)
    )


def _are_refused_steps(reasons: Mapping[int, str]) -> bool:
    """Return whether every step count is one that a request may have, with a reason of bounded length."""
    return all(1 <= steps <= rules.MAX_STEPS and 0 < len(reason) <= _MAX_REASON for steps, reason in reasons.items())


def _is_address(address: str) -> bool:
    # The gateway or Prometheus connects to it, so every resolver must read it alike.
    try:
        host, port = split(address)
    except ConfigError:
        return False
    return len(address) <= _MAX_ADDRESS_CHARACTERS and port > 0 and _HOST.fullmatch(host) is not None


def _violation(name: str, description: str) -> Violation:
    return Violation(field=f"registration.{name}", description=description)


def without_instance(registration: fleet_pb2.Registration) -> fleet_pb2.Registration:
    """Return a copy of a registration without the secret of its process."""
    public = fleet_pb2.Registration()
    public.CopyFrom(registration)
    public.ClearField("instance")
    return public
