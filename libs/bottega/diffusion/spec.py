"""What to draw, as the engine takes it: every default filled in. Plain values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bottega.diffusion.model.sampler_choices import SamplerChoice
from bottega.diffusion.model.samplers import KARRAS, SamplerKind
from bottega.errors import Violation
from bottega.planning import control_steps, rows_per_image, steps_to_run


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSpec:
    """One ControlNet of a job. Names and meanings are Diffusers'.

    image_digest: SHA-256 of its control image, hex. digest: of the version meant, hex; empty is any. A checkpoint fits
    no other ones. measured: whether to measure how similar its residuals are from step to step.
    """

    name: str
    image_digest: str
    digest: str = ""
    controlnet_conditioning_scale: float = 1.0
    control_guidance_start: float = 0.0
    control_guidance_end: float = 1.0
    guess_mode: bool = False
    measured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """One LoRA of a job. digest: SHA-256 of its canonical file, hex.

    from_step: the denoising step at which it goes in, where that is pinned. Else it goes in when it is there, but
    before the job has made `bound` steps without it; with 0 it is waited for before the first one: exact.
    measured: whether to measure how similar the latents with and without are; then it is waited for as well.
    """

    name: str
    digest: str
    scale: float = 1.0
    from_step: int | None = None
    bound: int = 0
    measured: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class EditSpec:
    """The mask of a job that edits its image.

    mask_digest, image_digest: SHA-256 of mask and image as they were sent, hex. A checkpoint fits no other ones, nor
    ones that were read in another way: mask_alpha, padding_mask_crop.
    masked_blocks: whether blocks may be computed for masked tokens alone. any_prompt: whether they
    may take what was computed with another prompt even where the model's blocks follow it.
    """

    mask_digest: str
    image_digest: str
    mask_alpha: bool = False
    padding_mask_crop: int | None = None
    masked_blocks: bool = False
    any_prompt: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSpec:
    """A job of `num_images` images. Image i is drawn with seed + i and, where there are `prompts`, with prompts[i].

    Names and meanings are Diffusers'. negative_prompt None and "" differ: None conditions on zeros
    where the model says so. strength makes it image-to-image, which needs an image; None is text-to-image.
    controlnets: their residuals are summed in this order. stale_residuals: whether they may be one step old.
    loras: summed; all go in at one step, by the least bound.
    edit: the mask of an edit, which also needs image and strength; None without one. keep_for_editing: whether to keep
    the latents of its steps, and to record what edits of its pictures use again.
    """

    prompt: str
    prompts: tuple[str, ...] = ()
    """Prompt of each image, where they have several; else empty."""
    prompt_2: str | None = None
    negative_prompt: str | None = None
    negative_prompt_2: str | None = None
    num_inference_steps: int = 50
    guidance_scale: float = 5.0
    guidance_rescale: float = 0.0
    width: int = 1024
    height: int = 1024
    seed: int = 0
    num_images: int = 1
    sampler: SamplerKind = SamplerKind.EULER
    use_karras_sigmas: bool = False
    strength: float | None = None
    controlnets: tuple[ControlSpec, ...] = ()
    stale_residuals: bool = False
    loras: tuple[LoraSpec, ...] = ()
    edit: EditSpec | None = None
    keep_for_editing: bool = False

    @property
    def sampling(self) -> SamplerChoice:
        """The sampler, with or without Karras' sigmas."""
        return SamplerChoice(kind=self.sampler, karras=self.use_karras_sigmas and self.sampler in KARRAS)

    @property
    def guided(self) -> bool:
        """Whether classifier-free guidance takes a second row."""
        return self.rows > 1

    @property
    def rows(self) -> int:
        """Rows that one image puts into a turn."""
        return rows_per_image(self.guidance_scale)

    @property
    def steps(self) -> int:
        """Steps of one image."""
        return steps_to_run(self.num_inference_steps, self.strength)

    @property
    def begin_step(self) -> int:
        """The first step that runs: 0, or later for image-to-image."""
        return self.num_inference_steps - self.steps

    @property
    def loras_measured(self) -> bool:
        """Whether to measure what its LoRAs change."""
        return any(lora.measured for lora in self.loras)

    @property
    def lora_bound(self) -> int:
        """The step that does not run without its LoRAs, where none is pinned."""
        least = 0 if self.loras_measured else min((lora.bound for lora in self.loras), default=0)
        return self.begin_step + min(least, self.steps - 1)

    @property
    def lora_step(self) -> int | None:
        """The step at which its LoRAs go in, where that is pinned."""
        return self.loras[0].from_step if self.loras else None

    def control_steps(self, control: ControlSpec) -> tuple[int, int]:
        """The steps [first, last) in which one of its ControlNets is active; its fractions are of those that run."""
        first, last = control_steps(control.control_guidance_start, control.control_guidance_end, self.steps)
        return self.begin_step + first, self.begin_step + last


def undrawable(spec: ResolvedSpec, size_multiple: int) -> Iterator[Violation]:
    """Why nothing can be drawn of it: a job without work would never end.

    size_multiple: the model's, in pixels.
    """
    if spec.prompts and len(spec.prompts) != spec.num_images:
        yield Violation(field="spec.prompts", description="must be as many as num_images")
    if spec.num_images < 1:
        yield Violation(field="spec.num_images", description="must be at least 1")
    if spec.steps < 1:
        yield Violation(field="spec.num_inference_steps", description="leaves no denoising step")
    for index, control in enumerate(spec.controlnets):
        if not 0.0 <= control.control_guidance_start < control.control_guidance_end <= 1.0:
            yield Violation(
                field=f"spec.controlnets[{index}].control_guidance_end",
                description="must be after control_guidance_start, both in 0 to 1",
            )
    yield from _undrawable_loras(spec)
    if spec.loras_measured and spec.controlnets:
        yield Violation(field="spec.controlnets", description="must be none where a LoRA is measured")
    for name, side in (("width", spec.width), ("height", spec.height)):
        if side < 1 or side % size_multiple:
            yield Violation(field=f"spec.{name}", description=f"must be a multiple of {size_multiple} with this model")


def _undrawable_loras(spec: ResolvedSpec) -> Iterator[Violation]:
    for index, lora in enumerate(spec.loras):
        if lora.from_step != spec.loras[0].from_step:
            yield Violation(field=f"spec.loras[{index}].from_step", description="must be the same for all LoRAs")
        if lora.from_step is not None and not 0 <= lora.from_step < spec.num_inference_steps:
            yield Violation(field=f"spec.loras[{index}].from_step", description="must be one of the job's steps")
        elif lora.from_step is not None and spec.loras_measured and lora.from_step > spec.begin_step:
            rule = f"must be at most {spec.begin_step} where a LoRA is measured"
            yield Violation(field=f"spec.loras[{index}].from_step", description=rule)
