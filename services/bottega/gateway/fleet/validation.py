"""What a service may say of itself when it joins, and later of its load: every bound of the contract.

Knows no fleet. All violations are found at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from bottega import rules
from bottega.errors import ConfigError, Violation
from bottega.kinds import is_kind
from bottega.rpc.address import split
from bottega.v1 import fleet_pb2, image_pb2
from bottega.v1.controlnet_pb2 import HostedControlNet, HostedState
from bottega.v1.generation_pb2 import Sampler

MAX_MODELS = 256
"""Of one service, and names that are remembered after their last worker has left."""

MAX_USED_KINDS = 16
"""Of services, that a service asks to be told of."""

MAX_CONTROLNETS = 1024
"""Of one service."""

MAX_LORAS = 256
"""That a worker says it has at hand."""

_MAX_CHARACTERS = 128
_MAX_ADDRESS_CHARACTERS = 256
# Of what nobody shall guess.
_INSTANCE_CHARACTERS = (16, 64)
# A worker takes a few dozen attempts at once, and measures a few sizes of pictures at a few widths of groups.
_MAX_ENTRIES = 4096
# A name or an address of a host; no path, no scheme.
_HOST = re.compile(r"[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\]")


def check_registration(registration: fleet_pb2.Registration) -> Iterator[Violation]:
    """What is wrong with a newcomer."""
    if not is_kind(registration.kind):
        yield _violation("kind", "must be 1 to 32 characters of [a-z0-9-], the first a letter")
    uses = registration.uses
    if len(uses) > MAX_USED_KINDS or len(set(uses)) < len(uses) or not all(map(is_kind, uses)):
        yield _violation("uses", f"must be kinds of services, at most {MAX_USED_KINDS}, each once")
    if not 0 < len(registration.name) <= _MAX_CHARACTERS:
        yield _violation("name", f"must be 1 to {_MAX_CHARACTERS} characters")
    if not _is_address(registration.address):
        yield _violation("address", "must be host:port")
    for name in ("version", "device"):
        if len(getattr(registration, name)) > _MAX_CHARACTERS:
            yield _violation(name, f"must be at most {_MAX_CHARACTERS} characters")
    if not _INSTANCE_CHARACTERS[0] <= len(registration.instance) <= _INSTANCE_CHARACTERS[1]:
        least, most = _INSTANCE_CHARACTERS
        yield _violation("instance", f"must be {least} to {most} characters")
    yield from _models(registration)


def check_load(load: fleet_pb2.Load) -> Iterator[Violation]:
    """What is wrong with a report. Numbers that are too bad to plan with are none of it: they are not used."""
    for name in ("running", "step_times"):
        if len(getattr(load, name)) > _MAX_ENTRIES:
            yield Violation(field=f"load.{name}", description=f"at most {_MAX_ENTRIES}")
    if any(len(running.attempt.job_id) > _MAX_CHARACTERS for running in load.running):
        yield Violation(field="load.running", description=f"ids of jobs are at most {_MAX_CHARACTERS} characters")
    for name in ("fixed_s", "lora_swap_s"):
        if not 0 <= getattr(load, name) < math.inf:
            yield Violation(field=f"load.{name}", description="must be a number of seconds")
    for name in ("max_rows", "memory_bytes"):
        if getattr(load, name) < 0:
            yield Violation(field=f"load.{name}", description="must not be negative")
    if len(load.loras) > MAX_LORAS or not all(map(rules.is_digest, load.loras)):
        yield Violation(field="load.loras", description=f"must be digests, at most {MAX_LORAS}")
    if len(load.patched_loras) > rules.MAX_ADAPTERS or not all(map(_can_be_patched, load.patched_loras)):
        rule = f"digests, each with a finite scale, at most {rules.MAX_ADAPTERS}"
        yield Violation(field="load.patched_loras", description=f"must be {rule}")
    yield from _controlnets(load)


def _controlnets(load: fleet_pb2.Load) -> Iterator[Violation]:
    names = {net.name for net in load.controlnets}
    if not len(names) == len(load.controlnets) <= MAX_CONTROLNETS:
        rule = f"at most {MAX_CONTROLNETS}, each with a name of its own"
        yield Violation(field="load.controlnets", description=rule)
    elif not all(map(_can_be_hosted, load.controlnets)):
        rule = f"names must be such as a request may have, hashes and bases of {_MAX_CHARACTERS} characters at most"
        yield Violation(field="load.controlnets", description=f"{rule}, numbers not negative, states known")
    elif not all(map(_is_profiled_well, load.controlnets)):
        rule = f"profiles must be such as SetProfile takes, and at most {rules.MAX_PROFILES} of a ControlNet"
        yield Violation(field="load.controlnets", description=rule)


def _can_be_patched(lora: fleet_pb2.PatchedLora) -> bool:
    return rules.is_digest(lora.digest) and math.isfinite(lora.scale)


def _can_be_hosted(net: HostedControlNet) -> bool:
    return (
        rules.is_adapter_name(net.name)
        and max(len(net.digest), len(net.base)) <= _MAX_CHARACTERS
        and min(net.size_bytes, net.popularity, net.sessions) >= 0
        and net.state in HostedState.values()
    )


def _is_profiled_well(net: HostedControlNet) -> bool:
    return len(net.profiles) <= rules.MAX_PROFILES and not any(
        True for profile in net.profiles for _ in rules.check_profile("profile", profile)
    )


def _models(registration: fleet_pb2.Registration) -> Iterator[Violation]:
    names = {model.name for model in registration.models} - {""}
    if not len(names) == len(registration.models) <= MAX_MODELS:
        yield _violation("models", f"at most {MAX_MODELS}, each with a name of its own")
    elif not all(_is_bounded(model) for model in registration.models):
        rule = f"names are at most {rules.MAX_MODEL_CHARACTERS} characters, hashes, dtypes and bases {_MAX_CHARACTERS}"
        yield _violation("models", rule)
    elif not all(_can_be_drawn_with(model) for model in registration.models):
        yield _violation("models", "their defaults and limits must be such as a request may have, or absent")


def _is_bounded(model: image_pb2.Model) -> bool:
    facts = (model.model_hash, model.dtype, model.base)
    return len(model.name) <= rules.MAX_MODEL_CHARACTERS and all(len(fact) <= _MAX_CHARACTERS for fact in facts)


def _can_be_drawn_with(model: image_pb2.Model) -> bool:
    """What a request leaves open is filled in from these, and no rule looks at it again."""
    sides = (model.default_width, model.default_height, model.size_multiple, model.vae_scale_factor)
    return (
        all(0 <= side <= rules.MAX_SIDE for side in sides)
        and 0 <= model.default_steps <= rules.MAX_STEPS
        and 0 <= model.default_guidance_scale <= rules.MAX_GUIDANCE_SCALE
        and model.default_sampler in Sampler.values()
        and model.max_pixels >= 0
    )


def _is_address(address: str) -> bool:
    # The gateway will connect to it: it must not mean anything else to a resolver.
    try:
        host, port = split(address)
    except ConfigError:
        return False
    return len(address) <= _MAX_ADDRESS_CHARACTERS and port > 0 and _HOST.fullmatch(host) is not None


def _violation(name: str, description: str) -> Violation:
    return Violation(field=f"registration.{name}", description=description)
