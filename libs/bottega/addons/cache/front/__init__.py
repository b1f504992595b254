"""Cached latents in the front process of a worker: writes the latent a picture started from into its parameters."""

from __future__ import annotations

from bottega import kinds
from bottega.addons.cache.starts import format_start, pin_start
from bottega.addons.interface.front_addon import FrontAddOn
from bottega.v1.cache_pb2 import CacheDecision, CacheStart
from bottega.v1.generation_pb2 import GenerationSpec
from bottega.v1.worker_pb2 import RunAttemptRequest


class CacheFront(FrontAddOn):
    """The FrontAddOn for cached latents."""

    kind = kinds.CACHE

    def pin(self, spec: GenerationSpec, index: int | None, request: RunAttemptRequest, decision: bytes | None) -> None:
        """Write the cached latent that a picture started from into `spec`, or that it started from noise."""
        if index is None or self.kind not in request.addons:
            return
        starts = CacheDecision.FromString(decision or b"").starts
        start = starts[index] if index < len(starts) else CacheStart()
        pin_start(spec, format_start(start.entry, start.step) if start.entry else "")
