"""LoRAs as the SDK describes them: those in the stores, those in quarantine, and measurements."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from bottega.client.types.fleet import Readiness
from bottega.client.types.messages import moment_from, value_from
from bottega.v1 import lora_pb2

_READINESS = {
    lora_pb2.LORA_STATE_ON_DISK: Readiness.ON_DISK,
    lora_pb2.LORA_STATE_LOADING: Readiness.LOADING,
    lora_pb2.LORA_STATE_IN_MEMORY: Readiness.LOADED,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraBound:
    """A measured bound on how late a LoRA may be loaded, for requests with one number of steps."""

    num_inference_steps: int
    max_step: int
    """The step from which the LoRA must be in the weights; see Lora.max_step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLora:
    """A LoRA, or a textual inversion embedding, that a store has."""

    name: str
    digest: str
    """SHA-256 of the LoRA in canonical form, hex."""
    base: str
    """Name of the model that the LoRA was made for."""
    rank: int
    """Highest rank among the LoRA's modules; 0 if it has only whole differences, and for an embedding."""
    modules: int
    """Number of the model's modules that the LoRA changes; number of vectors of an embedding."""
    size_bytes: int
    """Bytes of the LoRA in canonical form."""
    text_bytes: int
    """Bytes of the layers for text encoders; 0 if there are none."""
    trigger_words: tuple[str, ...]
    """Words that invoke the LoRA's style when they are in the prompt."""
    format: str
    """Format of the imported files: "Diffusers", "PEFT" or "kohya", or "textual inversion"; empty if it is unknown."""
    bounds: tuple[LoraBound, ...]
    """The LoRA's profile, one bound for each measured number of steps; empty if it was not measured."""
    pinned: bool
    """Whether the store keeps the LoRA in memory."""
    added: datetime
    readiness: Readiness
    """Whether the store has the weights in memory, is loading them, or has them on disk."""
    token: str = ""
    """Token that stands for the vectors of a textual inversion embedding in prompts; empty for a LoRA."""
    ignored: tuple[str, ...] = ()
    """Layers of the LoRA's file that match nothing in the model and are ignored; loras() has the first four. See
    add_lora()."""
    family: str = ""
    """Family of the model, such as SDXL, of a LoRA that was just added; empty for others."""
    note: str = ""
    """A contradiction between the metadata and the layers of a LoRA that was just added; empty without one."""

    @property
    def kind(self) -> Literal["LoRA", "embedding"]:
        """Kind of the item."""
        return "embedding" if self.token else "LoRA"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraInQuarantine:
    """A LoRA whose files a store has, but whose entry in the store's catalogue is missing."""

    id: str
    """ID with which the LoRA is restored or discarded."""
    digest: str
    """SHA-256 of the LoRA in canonical form, hex."""
    name: str
    """Name of the LoRA; empty if that is not known."""
    base: str
    """Name of the model that the LoRA was made for; empty if that is not known."""
    size_bytes: int | None
    """Bytes of the weights; None if they are missing."""
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreQuarantine:
    """The quarantine of one store."""

    store: str
    """Name of the store."""
    folder: str
    """Folder of the quarantine on the store's machine."""
    loras: tuple[LoraInQuarantine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """A LoRA that was restored from quarantine."""

    lora: StoredLora
    unknown: tuple[str, ...]
    """Properties that the files do not contain and that were lost, such as "its trigger words"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraBoundMeasured:
    """A measured bound on how late a LoRA may be loaded; see Lora.max_step."""

    digest: str
    """Hash of the version that was measured, hex."""
    num_inference_steps: int
    max_step: int
    """The lowest bound among the prompts."""
    prompts: tuple[int, ...]
    """The bound of each prompt."""


def stored_from(message: lora_pb2.StoredLora) -> StoredLora:
    """Convert a message to a StoredLora."""
    return StoredLora(
        name=message.name,
        digest=message.digest,
        base=message.base,
        rank=message.rank,
        modules=message.modules,
        size_bytes=message.size_bytes,
        text_bytes=message.text_bytes,
        trigger_words=tuple(message.trigger_words),
        format=message.format,
        bounds=tuple(value_from(bound, LoraBound) for bound in message.bounds),
        pinned=message.pinned,
        added=moment_from(message.added_s),
        readiness=_READINESS.get(message.state, Readiness.UNKNOWN),
        token=message.token,
        ignored=tuple(message.ignored),
        family=message.family,
        note=message.note,
    )


def quarantined_from(message: lora_pb2.QuarantinedLora) -> LoraInQuarantine:
    """Convert a message to a LoraInQuarantine."""
    return LoraInQuarantine(
        id=message.id,
        digest=message.digest,
        name=message.name,
        base=message.base,
        size_bytes=message.size_bytes if message.HasField("size_bytes") else None,
        since=moment_from(message.since_s),
    )
