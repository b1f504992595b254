"""Errors of LoRAs, ControlNets, the approximate cache and the activation store."""

from __future__ import annotations

from bottega.errors.base import BottegaError, Code
from bottega.errors.requests import InvalidRequest, Unavailable
from bottega.v1 import error_pb2


class BadLora(InvalidRequest, reason=error_pb2.ERROR_REASON_BAD_LORA):
    """A file cannot be used as a LoRA for the base model; the message lists what does not fit."""


class LoraNotFound(BottegaError, code=Code.NOT_FOUND, reason=error_pb2.ERROR_REASON_LORA_NOT_FOUND):
    """No LoRA of that name; metadata["loras"] names the missing ones."""


class LoraExists(BottegaError, code=Code.ALREADY_EXISTS, reason=error_pb2.ERROR_REASON_LORA_EXISTS):
    """Another LoRA has that name: it has other weights, or is for another base model."""


class LoraUnusable(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_LORA_UNUSABLE):
    """The LoRA does not fit the model.

    If it was made for another model, metadata has "lora", "made_for" and "model".
    """


class LoraInUse(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_LORA_IN_USE):
    """The LoRA is being sent to workers, or a job needs it or needed it a moment ago."""


class NoLora(Unavailable, reason=error_pb2.ERROR_REASON_NO_LORA):
    """The LoRA store cannot be reached, or is too slow; metadata["loras"] names the LoRAs that were requested."""


class ControlNetNotFound(BottegaError, code=Code.NOT_FOUND, reason=error_pb2.ERROR_REASON_CONTROLNET_NOT_FOUND):
    """No ControlNet of that name; metadata["served"] lists those that are served."""


class ControlNetExists(BottegaError, code=Code.ALREADY_EXISTS, reason=error_pb2.ERROR_REASON_CONTROLNET_EXISTS):
    """The server's configuration has a ControlNet of that name, which cannot be replaced."""


class ControlNetUnusable(
    BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_CONTROLNET_UNUSABLE
):
    """A ControlNet's files cannot be used, or it does not fit the model; the message says what does not."""


class NoControlNet(Unavailable, reason=error_pb2.ERROR_REASON_NO_CONTROLNET):
    """No service that has the ControlNet can be reached now.

    metadata["controlnets"] lists the ControlNets, and metadata["servers"] the servers that failed, separated by commas.
    """


class CacheEntryNotFound(BottegaError, code=Code.NOT_FOUND, reason=error_pb2.ERROR_REASON_CACHE_ENTRY_NOT_FOUND):
    """The cache has no such entry; metadata["entry"] names it."""


class CacheEntryGone(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_CACHE_ENTRY_GONE):
    """The cached latent that a request names is gone, or belongs to a request of another kind.

    metadata["entry"] is "ENTRY@STEP".
    """


class NoCache(Unavailable, reason=error_pb2.ERROR_REASON_NO_CACHE):
    """No approximate cache can be reached."""


class RecordingNotKept(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_RECORDING_NOT_KEPT):
    """An edit cannot be repeated exactly: the recording that it used is not kept; metadata["recording"] names it."""


class NoActivationStore(Unavailable, reason=error_pb2.ERROR_REASON_NO_ACTIVATION_STORE):
    """No activation store can be reached. Edits are drawn without recordings, and compute everything."""
