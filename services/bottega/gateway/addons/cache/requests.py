"""What a request says of the approximate cache: whether it is recorded, and what is wrong with its pin."""

from __future__ import annotations

from collections.abc import Iterator

from bottega.errors import Violation
from bottega.latents import LEAST_WORDS, has_enough_words, is_cacheable, is_switched_off, parse_start, recorded_steps
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import GenerationSpec

_SWITCH = "spec.techniques.approximate_cache"
_PIN = "spec.techniques.cache_entry"


def asks_for_cache(spec: GenerationSpec) -> bool:
    """Whether a caller asks by name for what an exact request never has: cached latents, or one of them."""
    return spec.techniques.approximate_cache or spec.techniques.HasField("cache_entry")


def may_record(spec: GenerationSpec) -> bool:
    """Whether latents of the first picture of a complete spec may be kept: of exact ones too, as nobody sees that."""
    return is_cacheable(spec) and not is_switched_off(spec) and not spec.techniques.cache_entry


def check_cache(spec: GenerationSpec) -> Iterator[Violation]:
    """Yield what contradicts a pinned entry or the switch, in the spec as the caller sent it."""
    # An EXACT that only the seed stands for gives way.
    exact = spec.fidelity == generation_pb2.FIDELITY_EXACT
    if exact and spec.techniques.approximate_cache:
        rule = "must not be true with fidelity EXACT, under which nothing starts from a cached latent"
        yield Violation(field=_SWITCH, description=rule)
    if spec.keep_for_editing and asks_for_cache(spec):
        rule = "must be false where pictures may start from a cached latent: they do not make the steps before it"
        yield Violation(field="spec.keep_for_editing", description=rule)
    if not spec.techniques.HasField("cache_entry"):
        return
    if is_switched_off(spec):
        yield Violation(field=_SWITCH, description="must not be false with techniques.cache_entry")
    if exact:
        rule = "must not be EXACT with techniques.cache_entry: a picture that starts from a cached latent is not"
        yield Violation(field="spec.fidelity", description=rule)
    if spec.num_images > 1 or len(spec.prompts) > 1:
        rule = "must be 1 with techniques.cache_entry: a pin is for one picture; draw each with its own seed"
        yield Violation(field="spec.num_images", description=rule)
    if not has_enough_words(spec.prompt):
        rule = f"must have {LEAST_WORDS} different words with techniques.cache_entry: of fewer, similarity says nothing"
        yield Violation(field="spec.prompt", description=rule)
    for name in ("prompt_2", "image"):
        if spec.HasField(name):
            rule = "must be absent with techniques.cache_entry: such pictures never start from a cached latent"
            yield Violation(field=f"spec.{name}", description=rule)


def check_cached_step(spec: GenerationSpec, steps: int) -> Iterator[Violation]:
    """Whether latents are recorded after the step of a pin, where pictures have so many steps.

    Silent where other rules have something to say about the pin or about the steps.
    """
    try:
        _, step = parse_start(spec.techniques.cache_entry)
    except ValueError:
        return
    recorded = recorded_steps(steps) if steps > 0 else (step,)
    if step not in recorded:
        known = ", ".join(map(str, recorded)) or "none"
        rule = f"no latent is recorded after step {step} of {steps}; those that are: {known}"
        yield Violation(field=_PIN, description=rule)
