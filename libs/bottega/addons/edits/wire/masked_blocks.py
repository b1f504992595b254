"""Decides whether an edit may reuse recorded activations, and writes the used recording into its parameters."""

from __future__ import annotations

from bottega.v1.activations_pb2 import EditDecision
from bottega.v1.generation_pb2 import FIDELITY_BALANCED, FIDELITY_FAST, GenerationSpec


def may_mask_blocks(spec: GenerationSpec) -> bool:
    """Return whether an edit may compute only the masked part of blocks; False if the spec is not an edit."""
    if not spec.HasField("keep_unmasked") and not spec.HasField("mask_image"):  # a complete spec has the first alone
        return False
    techniques = spec.techniques
    if techniques.HasField("masked_blocks"):
        return techniques.masked_blocks
    return spec.fidelity in (FIDELITY_BALANCED, FIDELITY_FAST)


def taken_from(decision: EditDecision) -> str:
    """Return the recording or the kept latents that an edit used, as in MaskUse.recording; empty if it used none."""
    return decision.recording or decision.kept_latents


def pin_edit(spec: GenerationSpec, recording: str) -> None:
    """Write the recording that an edit reused into its parameters, so that a repetition is exact or refused.

    An edit that reused nothing is exact, so its repetition must not use recordings. A repetition of an edit that reused
    a recording is refused. The spec of an edit that cannot reuse recordings stays unchanged.

    Args:
        recording: See `taken_from`.
    """
    if not may_mask_blocks(spec):
        return
    if recording:
        spec.techniques.recording = recording
    else:
        spec.techniques.masked_blocks = False
