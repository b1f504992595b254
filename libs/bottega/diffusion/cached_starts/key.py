"""What two jobs have to have in common, to the last digit, for one to start from the other's latents.

That is all of a job but its prompt, its seeds, the number of its pictures and how they are packed. A job that has more
to it than a key can say has none.
"""

from __future__ import annotations

import hashlib
import json

from bottega.diffusion.spec import ControlSpec, ResolvedSpec


def has_key(spec: ResolvedSpec) -> bool:
    """Whether its latents can be exchanged with others' at all.

    Not from a picture, nor with a second prompt, which the embedding does not show; not with several prompts, of which
    it shows one; not with ControlNets whose weights are not known by digest; not where something is measured from step
    to step.
    """
    return (
        spec.strength is None
        and not spec.prompts
        and not spec.prompt_2
        and not spec.loras_measured
        and all(control.digest and not control.measured for control in spec.controlnets)
    )


def start_key(spec: ResolvedSpec, *, model_hash: str, dtype: str, tenant: str) -> str:
    """64 hex digits. model_hash: of weights and configuration, hex. dtype: the model's element type."""
    said = {
        "model_hash": model_hash,
        "dtype": dtype,
        "tenant": tenant,
        "width": spec.width,
        "height": spec.height,
        "sampler": spec.sampler.name,
        "use_karras_sigmas": spec.use_karras_sigmas,
        "num_inference_steps": spec.num_inference_steps,
        "guidance_scale": float(spec.guidance_scale),
        "guidance_rescale": float(spec.guidance_rescale),
        # None and "" condition differently.
        "negative_prompt": spec.negative_prompt,
        "negative_prompt_2": spec.negative_prompt_2,
        "loras": sorted((lora.digest, float(lora.scale)) for lora in spec.loras),
        "controlnets": [_control(control) for control in spec.controlnets],
    }
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


def _control(control: ControlSpec) -> list[str | float | bool]:
    return [
        control.digest,
        control.image_digest,
        float(control.controlnet_conditioning_scale),
        float(control.control_guidance_start),
        float(control.control_guidance_end),
        control.guess_mode,
    ]
