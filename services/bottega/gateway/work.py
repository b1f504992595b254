"""What a complete spec asks of a worker: rows, steps and the size of its latent. Knows no worker and no times."""

from __future__ import annotations

from bottega.planning import Shape
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import GenerationSpec


def steps_to_run(spec: GenerationSpec) -> int:
    """Denoising steps of one image; image-to-image starts later, as in Diffusers."""
    steps = spec.num_inference_steps
    return min(int(steps * spec.strength), steps) if spec.HasField("strength") else steps


def rows(spec: GenerationSpec) -> int:
    """Rows that a request puts into each turn: guidance needs two an image."""
    return spec.num_images * (2 if spec.guidance_scale > 1 else 1)


def latent_shape(spec: GenerationSpec, model: image_pb2.Model) -> Shape:
    """Height and width of the latent."""
    factor = max(1, model.vae_scale_factor or model.size_multiple)
    return spec.height // factor, spec.width // factor
