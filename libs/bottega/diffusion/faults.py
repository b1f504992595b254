"""What a failure of one job is called outside the engine. Knows no job."""

from __future__ import annotations

import logging

import torch

from bottega.errors import BottegaError, InternalError, TooLarge

_log = logging.getLogger(__name__)


def named(error: Exception) -> BottegaError:
    """The error as callers may see it; what they may not is logged here."""
    if isinstance(error, BottegaError):
        return error
    if isinstance(error, torch.OutOfMemoryError):
        _log.error("the device has no memory left for a job", extra={"why": str(error)})
        return TooLarge("the device has not enough memory for this job", metadata={"limit": "device_memory"})
    _log.error("a job failed", exc_info=error)
    return InternalError("the engine failed; its log says more")
