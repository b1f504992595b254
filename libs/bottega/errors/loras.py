"""LoRAs and their store."""

from __future__ import annotations

from bottega.errors.availability import Unavailable
from bottega.errors.base import BottegaError, Code
from bottega.errors.requests import InvalidRequest
from bottega.v1 import error_pb2


class BadLora(InvalidRequest, reason=error_pb2.ERROR_REASON_BAD_LORA):
    """A file cannot be taken as a LoRA for the base model; the message lists what does not fit."""


class LoraNotFound(BottegaError, code=Code.NOT_FOUND, reason=error_pb2.ERROR_REASON_LORA_NOT_FOUND):
    """No LoRA of that name; metadata["loras"] names the missing ones."""


class LoraExists(BottegaError, code=Code.ALREADY_EXISTS, reason=error_pb2.ERROR_REASON_LORA_EXISTS):
    """A LoRA of that name is there, with other weights or for another base model."""


class LoraUnusable(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_LORA_UNUSABLE):
    """The LoRA does not fit the model, or was made for another; then metadata "lora", "made_for" and "model" say so."""


class LoraInUse(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_LORA_IN_USE):
    """The LoRA is being sent to workers, or a job needs it, or did a moment ago."""


class NoLora(Unavailable, reason=error_pb2.ERROR_REASON_NO_LORA):
    """The LoRA store cannot be reached, or is too slow; metadata["loras"] names what was asked for."""
