"""What a request with LoRAs leaves open: their scale, and the step at which each goes in at the latest."""

from __future__ import annotations

from collections.abc import Sequence

from bottega.planning import steps_to_run
from bottega.v1 import generation_pb2
from bottega.v1.generation_pb2 import GenerationSpec, Lora
from bottega.v1.lora_pb2 import StoredLora

# Of the steps that are made, that a LoRA without a profile may be late: Katz's bound, 10 of 50.
_LATE_SHARE = 0.2


def complete_loras(full: GenerationSpec, stored: Sequence[StoredLora]) -> None:
    """Complete the LoRAs of a spec that is complete otherwise.

    Args:
        full: The spec, which is changed.
        stored: Each of its LoRAs, as the store has it.
    """
    steps = steps_to_run(full.num_inference_steps, full.strength if full.HasField("strength") else None)
    first = full.num_inference_steps - steps
    some_may_be_late = any(_is_late(lora, first) for lora in full.loras)
    for lora, each in zip(full.loras, stored, strict=True):
        _complete(lora, each, latest_step=_latest_step(each, steps) if _may_be_late(full) else 0)
    if some_may_be_late and not _may_be_late(full):
        # An EXACT that nobody asked for gives way, and what is drawn says so.
        full.techniques.bounded_lora_loading = True


def _complete(lora: Lora, stored: StoredLora, *, latest_step: int) -> None:
    lora.name, lora.digest = stored.name, stored.digest
    if not lora.HasField("scale"):
        lora.scale = 1.0
    if not lora.HasField("max_step"):
        lora.max_step = latest_step


def _is_late(lora: Lora, first: int) -> bool:
    """Whether steps may be made without it by what is said of it alone. first: the first step that is made."""
    return lora.from_step > first if lora.HasField("from_step") else lora.max_step > 0


def _may_be_late(spec: GenerationSpec) -> bool:
    """Whether steps may be made without LoRAs: as the request says, else as its fidelity does."""
    if spec.techniques.HasField("bounded_lora_loading"):
        return spec.techniques.bounded_lora_loading
    return spec.fidelity in (generation_pb2.FIDELITY_BALANCED, generation_pb2.FIDELITY_FAST)


def _latest_step(stored: StoredLora, steps: int) -> int:
    """As its profile says for the number of steps nearest to these, in proportion. steps: that are made."""
    if not stored.bounds:
        return int(steps * _LATE_SHARE)
    nearest = min(stored.bounds, key=lambda bound: abs(bound.num_inference_steps - steps))
    return nearest.max_step * steps // max(1, nearest.num_inference_steps)
