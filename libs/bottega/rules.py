"""Rules of the contract that the gateway checks for callers, and the worker for itself: ranges and lengths of a spec.

Knows no model, no image and no defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from bottega.errors import InvalidRequest, Violation
from bottega.planning import steps_to_run
from bottega.v1.generation_pb2 import Fidelity, GenerationSpec, ImageFormat, Sampler

MAX_IMAGES = 8
MAX_STEPS = 200
MAX_SIDE = 1 << 14
MAX_GUIDANCE_SCALE = 50
# Seeds of all images stay exactly representable in a JSON number.
MAX_SEED = 2**53 - MAX_IMAGES

MAX_PROMPT_BYTES = 16 << 10

_TEXTS = ("prompt", "prompt_2", "negative_prompt", "negative_prompt_2")
# Lowest and highest value of every number whose range has both ends.
_RANGES: Mapping[str, tuple[int, int]] = MappingProxyType(
    {
        "num_inference_steps": (1, MAX_STEPS),
        "guidance_scale": (0, MAX_GUIDANCE_SCALE),
        "guidance_rescale": (0, 1),
        "width": (1, MAX_SIDE),
        "height": (1, MAX_SIDE),
        "seed": (0, MAX_SEED),
        "num_images": (1, MAX_IMAGES),
        "quality": (1, 100),
    }
)
# Every value of an enum that the contract knows, made once: asking the enum takes longer than the other rules.
_ENUMS: Mapping[str, frozenset[int]] = MappingProxyType(
    {
        "sampler": frozenset(Sampler.values()),
        "fidelity": frozenset(Fidelity.values()),
        "format": frozenset(ImageFormat.values()),
    }
)


def check_texts(spec: GenerationSpec) -> Iterator[Violation]:
    """Which prompts are too long. A tokenizer reads all of a prompt, however little of it counts."""
    for name in _TEXTS:
        # The characters first: a text of some MiB need not be encoded to be too long.
        text = getattr(spec, name)
        size = len(text) if len(text) > MAX_PROMPT_BYTES else len(text.encode())
        if size > MAX_PROMPT_BYTES:
            yield Violation(field=f"spec.{name}", description=f"is over {MAX_PROMPT_BYTES} bytes of UTF-8")


def check_ranges(spec: GenerationSpec) -> Iterator[Violation]:
    """Which of the numbers and names that are there have a value that the contract does not know."""
    # Written so that NaN breaks the rules.
    for name, (low, high) in _RANGES.items():
        if spec.HasField(name) and not low <= getattr(spec, name) <= high:  # type: ignore[arg-type]
            yield Violation(field=f"spec.{name}", description=f"must be {low} to {high}")
    if spec.HasField("strength") and not 0 < spec.strength <= 1:
        yield Violation(field="spec.strength", description="must be above 0 and at most 1")
    for name, known in _ENUMS.items():
        if getattr(spec, name) not in known:
            yield Violation(field=f"spec.{name}", description=f"unknown value {int(getattr(spec, name))}")


def check_steps_left(steps: int, strength: float) -> Iterator[Violation]:
    """Diffusers starts image-to-image at a later step, and refuses when no step would be left.

    Silent where `check_ranges` has something to say about one of the two.
    """
    sensible = 0 < strength <= 1 and 0 < steps <= MAX_STEPS
    if sensible and steps_to_run(steps, strength) < 1:
        rule = f"leaves no denoising step: {steps} steps x {strength:g} is below 1"
        yield Violation(field="spec.strength", description=rule)


def refuse(violations: Sequence[Violation], kind: type[InvalidRequest] = InvalidRequest) -> None:
    """Raises InvalidRequest, or a kind of it, with all of them, if there are any."""
    if violations:
        first = f"{violations[0].field}: {violations[0].description}"
        more = f" (and {len(violations) - 1} more)" if len(violations) > 1 else ""
        raise kind(first + more, violations=violations)
