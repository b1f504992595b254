"""The limits that an operator sets for an engine, and the checks that refuse pictures because of them."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch

from bottega import rules
from bottega.adapter_rules import NO_CONTROLNETS, check_union_images
from bottega.engine.prompt_chunks import weighted_chunks
from bottega.engine.spec import ResolvedSpec, undrawable
from bottega.errors import TooLarge, Violation
from bottega.model.model import Model
from bottega.model.sampler_choices import ModelSamplers
from bottega.prompt_syntax import MalformedPrompt

# At a few times the size that it was trained for, a model draws nonsense, and the cost of attention grows with the
# square of the size. One such request would hold up all other turns for minutes.
_OWN_SIZES = 4
_LEAST_MAX_PIXELS = 512 * 512


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """The limits that an operator sets."""

    max_rows: int = 16
    """Largest number of rows in one batch; a guided image has two."""
    fixed_rows: int = 0
    """Number of rows to which every batch is padded, so that images do not depend on each other; 0 is none."""
    max_wait_turns: int = 8
    """Number of its tenant's forward passes in which a request may be passed over."""
    max_pixels: int = 0
    """Largest number of pixels of one image; 0 is four times the model's usual size, and at least 512 x 512."""
    checkpoint_interval_s: float = 2.0
    """Longest time between checkpoints of a running job."""
    progress_interval_s: float = 0.1
    """Shortest time between progress reports."""
    compile_s: float = 300.0
    """How long the first forward pass of a kind may take on a GPU before a silent engine counts as hung."""


def max_pixels(limits: EngineLimits, model: Model) -> int:
    """Return the largest number of pixels of one image: the configured one, or a multiple of the model's usual size."""
    own = model.defaults.width * model.defaults.height
    return limits.max_pixels or max(_OWN_SIZES * own, _LEAST_MAX_PIXELS)


def check_drawable(spec: ResolvedSpec, limits: EngineLimits, model: Model) -> None:
    """Refuse a spec that cannot be drawn; `try_steps` finds the rest.

    Raises:
        InvalidRequest: No worker can draw it with this model.
        TooLarge: It is too large for this worker; the error names the limit.
    """
    found = [*undrawable(spec, model.size_multiple), *_undrawable_steps(spec, model.samplers)]
    rules.refuse([*found, *_not_of_family(spec, model), *_unreadable(spec, model)])
    pixels, most = spec.width * spec.height, max_pixels(limits, model)
    if pixels > most:
        raise TooLarge(
            f"{spec.width}x{spec.height} are {pixels} pixels; this worker draws at most {most} (max_pixels)",
            metadata={"limit": "max_pixels", "max_pixels": str(most)},
        )
    area = (spec.width // model.latent_scale) * (spec.height // model.latent_scale)
    at_once = model.decoded_area(area)
    encodes = spec.strength is not None or (bool(spec.controlnets) and model.unet is None)
    if encodes and model.device.type == "cpu":
        # The source, or the control image of a transformer, is encoded in one piece. That takes less memory than
        # decoding, but a CPU's allocator never fails.
        at_once = area
    model.memory.check_picture(spec.width, spec.height, area=area, decoded_area=at_once)


def try_steps(spec: ResolvedSpec, samplers: ModelSamplers) -> Generator[None, None, None]:
    """Try the steps of a spec, and yield after each evaluation. Raise InvalidRequest if they cannot be made."""
    if reason := (yield from samplers.refusal_in_pieces(spec.sampling, spec.num_inference_steps)):
        rules.refuse([Violation(field="spec.num_inference_steps", description=reason)])


def _undrawable_steps(spec: ResolvedSpec, samplers: ModelSamplers) -> Iterator[Violation]:
    """Yield a violation if the scheduler configuration cannot run this sampler, or this number of steps."""
    if spec.num_inference_steps < 1:
        return  # Refused by `undrawable`.
    if found := list(samplers.schedule_problems(spec.sampling, from_image=spec.strength is not None)):
        yield from found
    elif reason := samplers.refusals.get(spec.sampling):
        yield Violation(field="spec.sampler", description=reason)
    elif reason := samplers.refusal_before_trial(spec.sampling, spec.num_inference_steps):
        yield Violation(field="spec.num_inference_steps", description=reason)


def _not_of_family(spec: ResolvedSpec, model: Model) -> Iterator[Violation]:
    """Yield a violation for each field that the model's kind does not have, and for one that it needs."""
    if model.max_side is not None:
        for name in ("width", "height"):
            if getattr(spec, name) > model.max_side:
                yield Violation(field=f"spec.{name}", description=f"must be at most {model.max_side} with this model")
    if spec.weighted and not model.family.weighs_words:
        what = f"must be plain: {model.family.name} reads no weighted prompts"
        yield Violation(field="spec.prompt_syntax", description=what)
    yield from rules.check_true_cfg(
        spec.true_cfg_scale, taken=model.family.takes_true_cfg, has_negative=spec.negative_prompt is not None
    )
    if not model.family.guidance_from_zero:
        yield from rules.refuse_cfg_bounds(spec.cfg_normalization, spec.cfg_truncation)
    if spec.embeddings and not model.family.takes_embeddings:
        names = ", ".join(embedding.name for embedding in spec.embeddings)
        what = f"must have no embedding ({names}): none are served with {model.family.name}; use a LoRA"
        yield Violation(field="spec.loras", description=what)
    yield from _uncontrolled(spec, model)
    if len(model.text_encoders) == 1:
        for name in ("prompt_2", "negative_prompt_2"):
            if getattr(spec, name):
                what = f"must be empty: {model.family.name} has one text encoder"
                yield Violation(field=f"spec.{name}", description=what)
    if model.image_channels and spec.edit is None:
        yield Violation(
            field="spec.mask_image", description="must be set: this is an inpainting model, which only edits pictures"
        )


def _uncontrolled(spec: ResolvedSpec, model: Model) -> Iterator[Violation]:
    """Yield a violation for each use of ControlNets that the model's kind does not have."""
    if not model.family.takes_controlnets and spec.controlnets:
        what = f"must be empty: this kind of model ({model.family.name}) is served without ControlNets"
        yield Violation(field="spec.controlnets", description=what)
    if spec.strength is not None and spec.edit is None and spec.controlnets and model.family.strength_keeps_steps:
        yield Violation(field="spec.controlnets", description=NO_CONTROLNETS)
    if model.unet is not None:
        yield from check_union_images([(net.name, net.control_mode is not None) for net in spec.controlnets], "")
    for index, control in enumerate(spec.controlnets):
        if control.guess_mode and model.unet is None:
            what = f"must be false: there is no guess mode for {model.family.name}"
            yield Violation(field=f"spec.controlnets[{index}].guess_mode", description=what)


def _unreadable(spec: ResolvedSpec, model: Model) -> Iterator[Violation]:
    """Yield a violation for each text that the text encoders cannot read, and for a `clip_skip` beyond their layers."""
    if spec.clip_skip is not None and not 0 <= spec.clip_skip <= model.max_clip_skip:
        yield Violation(field="spec.clip_skip", description=rules.clip_skip_rule(model.max_clip_skip))
    most = model.family.max_sequence_length
    if spec.max_sequence_length is not None and not 1 <= spec.max_sequence_length <= most:
        yield Violation(field="spec.max_sequence_length", description=rules.sequence_rule(most))
    if not (spec.weighted and model.family.weighs_words):
        return
    texts = {f"prompts[{index}]": prompt for index, prompt in enumerate(spec.prompts)} or {"prompt": spec.prompt}
    texts |= {name: getattr(spec, name) or "" for name in ("prompt_2", "negative_prompt", "negative_prompt_2")}
    for name, text in texts.items():
        try:
            for tokenizer in model.tokenizers:
                weighted_chunks(text, tokenizer)
        except MalformedPrompt as error:
            yield Violation(field=f"spec.{name}", description=str(error))


def check_fixed_rows(fixed_rows: int, model: Model) -> None:
    """Raise ValueError if padding to `fixed_rows` rows would not make pictures equal byte for byte."""
    if fixed_rows and model.family.reads_chat:
        raise ValueError(
            f"fixed_rows is {fixed_rows}; with {model.family.name} the last bits of a picture depend on the lengths of "
            "the prompts in its batch; set fixed_rows to 0"
        )
    if fixed_rows == 1:
        raise ValueError("fixed_rows is 1, but a guided request has two rows; 0 is no padding")
    threads = torch.get_num_threads() if model.device.type == "cpu" else 1
    if threads > 1 and fixed_rows % (2 * threads):
        # Measured: with 2 threads and 5, 6, 7 or 10 rows, the last bit of a row depends on its place in the batch; with
        # 4, 8, 12 and 16 it does not. Each thread needs an even number of rows.
        raise ValueError(
            f"fixed_rows is {fixed_rows}; with {threads} threads it must be a multiple of {2 * threads}, else the last "
            "bits of a picture depend on its place in the batch; or set threads to 1"
        )
