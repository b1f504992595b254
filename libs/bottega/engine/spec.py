"""What an engine shall draw: plain values, with all defaults filled in."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from bottega.errors import Violation
from bottega.model.sampler_choices import SamplerChoice
from bottega.model.schedulers import KARRAS, SamplerKind
from bottega.planning import steps_to_run
from bottega.rules import check_steps_left
from bottega.schedules import AS_CONFIGURED, Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlSpec:
    """A ControlNet of a job. Fields have the names and meanings of Diffusers."""

    name: str
    image_digest: str
    """SHA-256 of its control image, hex. A checkpoint is valid only for the same image."""
    digest: str = ""
    """Digest of its version, hex; "" for any. A checkpoint is valid only for the same version."""
    controlnet_conditioning_scale: float = 1.0
    control_guidance_start: float = 0.0
    control_guidance_end: float = 1.0
    guess_mode: bool = False
    control_mode: int | None = None
    """What the control image shows, if the ControlNet is a union; None otherwise."""
    measured: bool = False
    """Whether to measure how similar its residuals are from step to step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSpec:
    """A LoRA of a job."""

    name: str
    digest: str
    """SHA-256 of its canonical file, hex."""
    scale: float = 1.0
    from_step: int | None = None
    """The step at which it is applied; None to apply it when it has arrived."""
    bound: int = 0
    """If `from_step` is None: largest number of steps without it; 0 waits for it, which is exact."""
    measured: bool = False
    """Whether to measure how similar latents with and without it are. The job then waits for it."""
    denoiser_only: bool = False
    """Whether it is known to change no text encoder."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingSpec:
    """A textual inversion embedding of a job."""

    name: str
    digest: str
    """SHA-256 of its canonical file, hex."""
    token: str
    """The text in prompts that its vectors replace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EditSpec:
    """The mask of a job that edits its image. A checkpoint is valid only for the same fields."""

    mask_digest: str
    """SHA-256 of the mask as it was sent, hex."""
    image_digest: str
    """SHA-256 of the image as it was sent, hex."""
    mask_alpha: bool = False
    padding_mask_crop: int | None = None
    masked_blocks: bool = False
    """Whether blocks may be computed only for masked tokens."""
    any_prompt: bool = False
    """Whether blocks may reuse activations of another prompt even if the model follows the prompt there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSpec:
    """A job of `num_images` images. Image i is drawn with seed + i and, if there are `prompts`, with prompts[i].

    Fields have the names and meanings of Diffusers.
    """

    prompt: str
    prompts: tuple[str, ...] = ()
    """Prompt of each image, if they differ; else empty."""
    prompt_2: str | None = None
    negative_prompt: str | None = None
    """None and "" differ: None conditions on zeros if the model's configuration says so."""
    negative_prompt_2: str | None = None
    weighted: bool = False
    """Whether the texts are weighted prompts (`bottega.prompt_syntax`)."""
    clip_skip: int | None = None
    """Number of last layers of the text encoders that are left out, besides those that always are.

    In plain prompts it does not hold for the negative ones, as in Diffusers. In weighted ones it holds for all.
    """
    max_sequence_length: int | None = None
    """Number of tokens of each prompt that T5 or Qwen3 reads; None for the family's default."""
    num_inference_steps: int = 50
    guidance_scale: float = 5.0
    guidance_rescale: float = 0.0
    true_cfg_scale: float = 1.0
    """Scale of classifier-free guidance with a second row in models that embed the guidance scale (`Model`)."""
    cfg_normalization: float = 0.0
    """Largest norm of a guided prediction, relative to the norm of the conditional prediction; 0 for no limit."""
    cfg_truncation: float = 1.0
    """Time after which there is no guidance; 0 is noise and 1 is the picture."""
    width: int = 1024
    height: int = 1024
    seed: int = 0
    num_images: int = 1
    sampler: SamplerKind = SamplerKind.EULER
    use_karras_sigmas: bool = False
    schedule: Schedule = AS_CONFIGURED
    """Its other changes of the sampler's schedule."""
    strength: float | None = None
    """Set for image-to-image, which needs an image; None for text-to-image."""
    controlnets: tuple[ControlSpec, ...] = ()
    """Their residuals are summed in this order."""
    stale_residuals: bool = False
    """Whether residuals may be one step old."""
    loras: tuple[LoraSpec, ...] = ()
    """LoRAs, which are summed and all applied at one step: the smallest `bound` of them holds."""
    embeddings: tuple[EmbeddingSpec, ...] = ()
    """Textual inversion embeddings, in the order in which tokenizers learn their tokens."""
    edit: EditSpec | None = None
    """The mask of an edit, which also needs image and strength; None if the job is no edit."""
    keep_for_editing: bool = False
    """Whether to store the latents of its steps, and to record activations, for later edits of its pictures."""
    step_caching: bool = False
    """Whether steps may reuse blocks of earlier ones (`StepCache`)."""

    @property
    def sampling(self) -> SamplerChoice:
        """The sampler and its schedule."""
        karras = self.use_karras_sigmas and self.sampler in KARRAS
        return SamplerChoice(kind=self.sampler, karras=karras, schedule=self.schedule)

    @property
    def steps(self) -> int:
        """Number of steps of one image."""
        if self.schedule.strength is not None:
            return self.num_inference_steps
        return steps_to_run(self.num_inference_steps, self.strength, flows=self.sampler is SamplerKind.FLOW_MATCH_EULER)

    @property
    def begin_step(self) -> int:
        """The first step that runs; later than 0 for image-to-image."""
        return self.num_inference_steps - self.steps

    @property
    def loras_measured(self) -> bool:
        """Whether to measure how much the LoRAs change the latents."""
        return any(lora.measured for lora in self.loras)

    @property
    def lora_bound(self) -> int:
        """The step that waits for its LoRAs at the latest, if their step is not fixed."""
        least = 0 if self.loras_measured else min((lora.bound for lora in self.loras), default=0)
        return self.begin_step + min(least, self.steps - 1)

    @property
    def lora_step(self) -> int | None:
        """The step at which its LoRAs are applied; None if they are applied when they arrive."""
        return self.loras[0].from_step if self.loras else None


def undrawable(spec: ResolvedSpec, size_multiple: int) -> Iterator[Violation]:
    """Yield why a spec cannot be drawn. A job without work would never end.

    Args:
        spec: The spec.
        size_multiple: Width and height must be multiples of this number of pixels with this model.
    """
    if spec.prompts and len(spec.prompts) != spec.num_images:
        yield Violation(field="spec.prompts", description="must be as many as num_images")
    if spec.num_images < 1:
        yield Violation(field="spec.num_images", description="must be at least 1")
    if spec.schedule.steps not in (None, spec.num_inference_steps):
        what = f"must be {spec.schedule.steps}, the steps of its timesteps or sigmas"
        yield Violation(field="spec.num_inference_steps", description=what)
    if spec.num_inference_steps < 1:
        yield Violation(field="spec.num_inference_steps", description="must be at least 1")
    elif spec.steps < 1:
        yield from check_steps_left(spec.num_inference_steps, spec.strength or 0.0)
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
