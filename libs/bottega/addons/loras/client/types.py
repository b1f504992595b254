"""LoRAs as the SDK describes them: those in the stores, their quarantine, and measurements of them."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

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
    """A measured bound on how late a LoRA may arrive, for requests of one number of steps."""

    num_inference_steps: int
    max_step: int
    """The step at which it must be in the weights; see Lora.max_step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredLora:
    """A LoRA that a store has."""

    name: str
    digest: str
    """SHA-256 of its canonical form, hex."""
    base: str
    """Name of the model that it was made for."""
    rank: int
    """Highest rank of its modules."""
    modules: int
    """Number of modules that it changes."""
    size_bytes: int
    """Bytes of its canonical form."""
    text_bytes: int
    """Bytes of its text encoders' part; 0 if it has none."""
    trigger_words: tuple[str, ...]
    """Words that call its style in a prompt."""
    format: str
    """Format of its files: "Diffusers", "PEFT" or "kohya"; empty if that is not known."""
    bounds: tuple[LoraBound, ...]
    """Its profile, by number of steps; empty if it was not measured."""
    pinned: bool
    """Whether the store keeps it in memory."""
    added: datetime
    readiness: Readiness
    """Where its weights are at the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraInQuarantine:
    """A LoRA whose files a store has, and its catalogue does not list."""

    id: str
    """The ID to restore or discard it by."""
    digest: str
    """SHA-256 of its canonical form, hex."""
    name: str
    """Its name; empty if that is not known."""
    base: str
    """Name of the model that it was made for; empty if that is not known."""
    size_bytes: int | None
    """Bytes of its weights; None if they are missing."""
    since: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreQuarantine:
    """The quarantine of one store."""

    store: str
    """Name of the store."""
    folder: str
    """Folder on the store's machine."""
    loras: tuple[LoraInQuarantine, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreResult:
    """A LoRA that was restored from quarantine."""

    lora: StoredLora
    unknown: tuple[str, ...]
    """Facts that its files do not contain, such as "its trigger words"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraBoundMeasured:
    """A measured bound on how late a LoRA may arrive; see Lora.max_step."""

    digest: str
    """Hash of the version that was measured, hex."""
    num_inference_steps: int
    max_step: int
    """The least bound of the prompts."""
    prompts: tuple[int, ...]
    """The bound of each prompt's own pictures."""


def stored_from(message: lora_pb2.StoredLora) -> StoredLora:
    """Return the LoRA that the wire describes."""
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
    )


def quarantined_from(message: lora_pb2.QuarantinedLora) -> LoraInQuarantine:
    """Return the LoRA in quarantine that the wire describes."""
    return LoraInQuarantine(
        id=message.id,
        digest=message.digest,
        name=message.name,
        base=message.base,
        size_bytes=message.size_bytes if message.HasField("size_bytes") else None,
        since=moment_from(message.since_s),
    )
