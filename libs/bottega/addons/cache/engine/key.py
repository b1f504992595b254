"""The key that two jobs must share for one to start from latents of the other.

The key covers everything about a job except for its prompt, its seeds, the number of its pictures and their encoding.
Jobs with properties that the key cannot describe have none.
"""

from __future__ import annotations

import hashlib
import json

from bottega.engine.spec import ControlSpec, ResolvedSpec


def has_key(spec: ResolvedSpec) -> bool:
    """Return whether a job may exchange latents with others at all.

    It may not if it starts from a picture, has several prompts or a second prompt, which the embedding does not
    represent, uses ControlNets of unknown versions, or measures similarities from step to step.
    """
    return (
        spec.strength is None
        and not spec.prompts
        and not spec.prompt_2
        and not spec.loras_measured
        and all(control.digest and not control.measured for control in spec.controlnets)
    )


def start_key(spec: ResolvedSpec, *, model_hash: str, dtype: str, tenant: str) -> str:
    """Return the key of a job, 64 hex digits.

    Args:
        spec: Spec of the job.
        model_hash: Digest of weights and configuration, hex.
        dtype: Element type of the model.
        tenant: Tenant of the job, whose latents other tenants do not use.
    """
    facts = {
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
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def _control(control: ControlSpec) -> list[str | float | bool]:
    return [
        control.digest,
        control.image_digest,
        float(control.controlnet_conditioning_scale),
        float(control.control_guidance_start),
        float(control.control_guidance_end),
        control.guess_mode,
    ]
