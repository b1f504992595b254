"""LoRAs in the front process of a worker: writes the first step that used them into a picture's parameters."""

from __future__ import annotations

from bottega import kinds
from bottega.addons.interface.front_addon import FrontAddOn
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.lora_pb2 import LoraDecision
from bottega.v1.worker_pb2 import RunAttemptRequest


class LorasFront(FrontAddOn):
    """The FrontAddOn for LoRAs."""

    kind = kinds.LORAS

    def pin(self, spec: GenerationSpec, index: int | None, request: RunAttemptRequest, decision: bytes | None) -> None:
        """Write the first step that used the LoRAs into `spec`."""
        if decision is None:
            return
        for lora in spec.loras:
            lora.from_step = LoraDecision.FromString(decision).step
