"""Which edits may take what others have recorded, and what their parameters say of it afterwards."""

from __future__ import annotations

from bottega.v1.activations_pb2 import EditDecision
from bottega.v1.generation_pb2 import FIDELITY_BALANCED, FIDELITY_FAST, GenerationSpec


def may_mask_blocks(spec: GenerationSpec) -> bool:
    """Return whether blocks of a complete spec may be computed for the masked part alone."""
    if not spec.HasField("keep_unmasked"):  # which every edit has
        return False
    techniques = spec.techniques
    if techniques.HasField("masked_blocks"):
        return techniques.masked_blocks
    return spec.fidelity in (FIDELITY_BALANCED, FIDELITY_FAST)


def taken_from(decision: EditDecision) -> str:
    """Return what an edit took from others, as MaskUse.recording names it; empty where it took nothing."""
    return decision.recording or decision.kept_latents


def pin_edit(spec: GenerationSpec, recording: str) -> None:
    """Write into the parameters of an edit what it took from others, so that they are true or refused.

    An edit that took nothing is exact, and asked for again it must not find what has been recorded since. One that took
    something is refused when it is asked for again. A spec whose edit could not take anything stays as it is.

    Args:
        recording: See `taken_from`.
    """
    if not may_mask_blocks(spec):
        return
    if recording:
        spec.techniques.recording = recording
    else:
        spec.techniques.masked_blocks = False
