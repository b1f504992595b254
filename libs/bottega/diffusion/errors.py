"""What a failure of one job is called outside the engine."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from bottega.diffusion.device.out_of_memory import is_out_of_memory
from bottega.diffusion.spec import LoraSpec
from bottega.errors import BottegaError, InternalError, NotFinite, TooLarge

_log = logging.getLogger(__name__)


def to_job_failure(error: Exception) -> BottegaError:
    """The error as callers may see it; what they may not is logged here."""
    if isinstance(error, BottegaError):
        return error
    if is_out_of_memory(error):
        _log.error("the device has no memory left for a job", extra={"why": str(error)})
        return TooLarge("the device has not enough memory for this job", metadata={"limit": "device_memory"})
    _log.error("a job failed", exc_info=error)
    return InternalError("the engine failed; its log says more")


def not_finite(loras: Sequence[LoraSpec]) -> NotFinite:
    """That a job came to values that are no numbers. loras: its own, which are the likely cause where it has some."""
    what = "the model computed values that are no numbers"
    if not loras:
        return NotFinite(f"{what}; another seed or more steps may help")
    listed = ", ".join(f"{lora.name} at scale {lora.scale:g}" for lora in loras)
    return NotFinite(
        f"{what}, most likely because of its LoRAs ({listed}); try scales nearer to 0, or other LoRA files",
        metadata={"loras": ",".join(lora.name for lora in loras)},
    )
