"""The errors that callers see when a job fails in the engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from bottega.device.memory_plan import MemoryPlan, is_out_of_memory
from bottega.engine.spec import ControlSpec, EmbeddingSpec, LoraSpec, ResolvedSpec
from bottega.errors import BottegaError, InternalError, NotFinite, TooLarge

_log = logging.getLogger(__name__)


def to_job_failure(error: Exception) -> BottegaError:
    """Return an error for callers, and log details that they must not see."""
    if isinstance(error, BottegaError):
        return error
    if is_out_of_memory(error):
        _log.error("the device has no memory left for a job", extra={"why": str(error)})
        return TooLarge("the device does not have enough memory for this job", metadata={"limit": "device_memory"})
    _log.error("a job failed", exc_info=error)
    return InternalError("the engine failed; its log says more")


def not_finite(
    loras: Sequence[LoraSpec], controlnets: Sequence[ControlSpec] = (), embeddings: Sequence[EmbeddingSpec] = ()
) -> NotFinite:
    """Return the error of a job whose latents, or states of its prompts, have NaN or infinity.

    Args:
        loras: LoRAs of the job that affected these values and are a likely cause.
        controlnets: ControlNets, likewise.
        embeddings: Textual inversion embeddings, likewise.
    """
    what = "the model computed values that are not numbers"
    scales = {
        "LoRAs": {lora.name: f" at scale {lora.scale:g}" for lora in loras},
        "ControlNets": {net.name: f" at scale {net.controlnet_conditioning_scale:g}" for net in controlnets},
        "embeddings": {embedding.name: "" for embedding in embeddings},
    }
    causes = {kind: uses for kind, uses in scales.items() if uses}
    if not causes:
        return NotFinite(f"{what}; another seed or more steps may help")
    listed = " or its ".join(
        f"{kind} ({', '.join(name + scale for name, scale in uses.items())})" for kind, uses in causes.items()
    )
    nearer = "scales nearer to 0, or " if loras or controlnets else ""
    return NotFinite(
        f"{what}, most likely because of its {listed}; try {nearer}other {' or '.join(causes)}",
        metadata={kind.lower(): ",".join(uses) for kind, uses in causes.items()},
    )


def vae_not_finite(what: str, dtype: torch.dtype) -> NotFinite:
    """Return the error of a VAE whose output has NaN or infinity although its input has none.

    Args:
        what: "decoded a latent", "encoded the image" or "encoded a control image".
        dtype: Data type in which it ran.
    """
    if dtype == torch.float32:
        advice = "its weights are damaged or it is no VAE for this model; use another one, or download the model again"
    else:
        advice = "a sum was too large, or its weights are damaged; set the worker's engine.vae.dtype to float32"
    name = str(dtype).removeprefix("torch.")
    return NotFinite(f"the VAE {what} to values that are not numbers, in {name}: {advice}", metadata={"part": "vae"})


def prompt_not_finite(dtype: torch.dtype) -> NotFinite:
    """Return the error of text encoders whose output has NaN or infinity."""
    if dtype == torch.float32:
        advice = "their weights are damaged; download the model again"
    else:
        advice = "a sum was too large for that type, or their weights are damaged; set the worker's dtype to float32"
    name = str(dtype).removeprefix("torch.")
    return NotFinite(
        f"the text encoders computed values that are not numbers, in {name}: {advice}",
        metadata={"part": "text_encoder"},
    )


def named_error(error: Exception, spec: ResolvedSpec, memory: MemoryPlan) -> Exception:
    """Return the error; if the device ran out of memory, one that names the picture's size as the reason."""
    if not is_out_of_memory(error):
        return error
    _log.error("the device has no memory left for a job", extra={"why": str(error)})
    return memory.refusal(spec.width, spec.height)
