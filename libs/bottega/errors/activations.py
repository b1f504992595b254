"""The activation store."""

from __future__ import annotations

from bottega.errors.availability import Unavailable
from bottega.errors.base import BottegaError, Code
from bottega.v1 import error_pb2


class RecordingNotKept(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_RECORDING_NOT_KEPT):
    """A request asks for an edit that took what a recording held at some moment; metadata["recording"] names it."""


class NoActivationStore(Unavailable, reason=error_pb2.ERROR_REASON_NO_ACTIVATION_STORE):
    """No activation store can be reached. Edits are drawn without: what is not recorded is computed."""
