"""What an operator bounds of an engine, and which pictures are refused because of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bottega import rules
from bottega.diffusion.model.model import Model
from bottega.diffusion.model.sampler_choices import ModelSamplers
from bottega.diffusion.spec import ResolvedSpec, undrawable
from bottega.errors import TooLarge, Violation

# Beyond a few times the size that it was made for a model draws nonsense, and attention grows with the square: one
# such request would hold up everybody else's turns for minutes.
_OWN_SIZES = 4
_LEAST_MAX_PIXELS = 512 * 512


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    """What an operator bounds.

    max_rows: of one group. fixed_rows: pads every group to so many rows, for images that are equal byte for
    byte whatever runs beside them; 0 is off. max_wait_turns: turns of its tenant in which a request may be
    passed over.
    max_pixels: of one image; 0 is four times the model's own size, and 512 x 512 at least.
    checkpoint_interval_s: a job that runs has a checkpoint at least so often.
    progress_interval_s: progress is reported at most so often.
    compile_s: that the first forward of a kind may take on a GPU, before a silent engine counts as hung.
    """

    max_rows: int = 16
    fixed_rows: int = 0
    max_wait_turns: int = 8
    max_pixels: int = 0
    checkpoint_interval_s: float = 2.0
    progress_interval_s: float = 0.1
    compile_s: float = 300.0


def max_pixels(limits: EngineLimits, model: Model) -> int:
    """Most pixels of one image: as configured, or what the model is made for and some more."""
    own = model.defaults.width * model.defaults.height
    return limits.max_pixels or max(_OWN_SIZES * own, _LEAST_MAX_PIXELS)


def check_drawable(spec: ResolvedSpec, limits: EngineLimits, model: Model) -> None:
    """Refuse what cannot be drawn.

    Raises:
        InvalidRequest: For what nobody can draw with this model.
        TooLarge: For what is too much for this worker, naming the limit.
    """
    rules.refuse([*undrawable(spec, model.size_multiple), *_undrawable_steps(spec, model.samplers)])
    pixels, most = spec.width * spec.height, max_pixels(limits, model)
    if pixels > most:
        raise TooLarge(
            f"{spec.width}x{spec.height} are {pixels} pixels; this worker draws at most {most} (max_pixels)",
            metadata={"limit": "max_pixels", "max_pixels": str(most)},
        )
    area = (spec.width // model.latent_scale) * (spec.height // model.latent_scale)
    at_once = model.decoded_area(area)
    if spec.strength is not None and model.device.type == "cpu":
        # The source is encoded in one piece. That takes less than decoding it does, and no allocator of a CPU refuses.
        at_once = area
    model.memory.check_picture(spec.width, spec.height, area=area, decoded_area=at_once)


def _undrawable_steps(spec: ResolvedSpec, samplers: ModelSamplers) -> Iterator[Violation]:
    """Yield a violation if the scheduler configuration cannot run this sampler, or this number of steps."""
    if spec.num_inference_steps < 1:
        return  # that is refused already
    if reason := samplers.refusals.get(spec.sampling):
        yield Violation(field="spec.sampler", description=reason)
    elif reason := samplers.refusal(spec.sampling, spec.num_inference_steps):
        yield Violation(field="spec.num_inference_steps", description=reason)


def check_fixed_rows(fixed_rows: int, device: torch.device) -> None:
    """Raises ValueError where so many rows would not make pictures equal byte for byte."""
    if fixed_rows == 1:
        raise ValueError("fixed_rows is 1, but a guided request has two rows; 0 switches it off")
    threads = torch.get_num_threads() if device.type == "cpu" else 1
    if threads > 1 and fixed_rows % (2 * threads):
        # Measured: with 2 threads and 5, 6, 7 or 10 rows the last bit of a row depends on its place; with 4, 8, 12
        # and 16 it does not. A thread's share must be whole and even.
        raise ValueError(
            f"fixed_rows is {fixed_rows}; with {threads} threads it must be a multiple of {2 * threads}, else the last "
            "bits of a picture depend on its place in the group; or set threads to 1"
        )
