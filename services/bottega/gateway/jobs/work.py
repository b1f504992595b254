"""What a complete spec asks of a worker: rows, steps and the size of its latent. Knows no worker and no times."""

from __future__ import annotations

from bottega.planning import Shape, rows_per_image
from bottega.planning import steps_to_run as steps_with
from bottega.v1 import image_pb2
from bottega.v1.generation_pb2 import GenerationSpec


def steps_to_run(spec: GenerationSpec) -> int:
    """Denoising steps of one image."""
    return steps_with(spec.num_inference_steps, spec.strength if spec.HasField("strength") else None)


def rows(spec: GenerationSpec) -> int:
    """Rows that a request puts into each turn."""
    return spec.num_images * rows_per_image(spec.guidance_scale)


def latent_shape(spec: GenerationSpec, model: image_pb2.Model) -> Shape:
    """Height and width of the latent."""
    factor = max(1, model.vae_scale_factor or model.size_multiple)
    return spec.height // factor, spec.width // factor
