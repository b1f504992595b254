"""ControlNets and their servers."""

from __future__ import annotations

from bottega.errors.availability import Unavailable
from bottega.errors.base import BottegaError, Code
from bottega.v1 import error_pb2


class ControlNetNotFound(BottegaError, code=Code.NOT_FOUND, reason=error_pb2.ERROR_REASON_CONTROLNET_NOT_FOUND):
    """No ControlNet of that name; metadata["served"] lists those that are."""


class ControlNetExists(BottegaError, code=Code.ALREADY_EXISTS, reason=error_pb2.ERROR_REASON_CONTROLNET_EXISTS):
    """The server's configuration has a ControlNet of that name, which nobody may replace."""


class ControlNetUnusable(
    BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_CONTROLNET_UNUSABLE
):
    """A ControlNet's files cannot be used, or it does not fit the model; the message says what does not."""


class NoControlNet(Unavailable, reason=error_pb2.ERROR_REASON_NO_CONTROLNET):
    """No service has the ControlNet now, or none that has it can be reached.

    metadata["controlnets"] names them; metadata["servers"] those that failed; several with commas between.
    """
