"""What to draw, as the engine takes it: every default filled in. Plain values; knows no wire and no tensors."""

from __future__ import annotations

from dataclasses import dataclass

from bottega.diffusion.samplers import SamplerKind


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawingSpec:
    """One job: `num_images` images that differ in their seed alone; image i has seed + i.

    Names and meanings are Diffusers'. negative_prompt None and "" differ: None conditions on zeros
    where the model says so. strength is only read when the job comes with an image.
    """

    prompt: str
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
    strength: float = 0.3

    @property
    def guided(self) -> bool:
        """Whether classifier-free guidance takes a second row."""
        return self.guidance_scale > 1.0

    @property
    def rows(self) -> int:
        """Rows that one image puts into a turn."""
        return 2 if self.guided else 1

    def begin_step(self, *, from_image: bool) -> int:
        """The first step that runs: 0, or later for image-to-image, as in Diffusers' get_timesteps."""
        if not from_image:
            return 0
        return max(self.num_inference_steps - int(self.num_inference_steps * self.strength), 0)
