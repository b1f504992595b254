"""The interface of a source that brings LoRAs to the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bottega.diffusion.engine.store_work import StoreWork
from bottega.diffusion.loras.lora import Layers
from bottega.v1.fleet_pb2 import ServiceAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRef:
    """A reference to a LoRA."""

    name: str
    """Name in the store, for messages."""
    digest: str
    """SHA-256 of its canonical file, in hex."""


class LoraHandle(Protocol):
    """A LoRA that has been requested. Its properties raise the BottegaError of a LoRA that cannot be brought."""

    @property
    def text_ready(self) -> bool:
        """Whether the text encoders' layers have arrived, which come first."""
        ...

    @property
    def ready(self) -> bool:
        """Whether all layers have arrived."""
        ...

    @property
    def load_s(self) -> float:
        """Seconds from `begin` until all layers arrived, or until now."""
        ...

    @property
    def work(self) -> StoreWork | None:
        """A store's work to bring it, perhaps before `begin` for another job; None if no store was needed."""
        ...

    def layers(self, component: str) -> Layers:
        """Return the layers of one component: the UNet's when `ready`, the text encoders' when `text_ready`.

        They may be read until the handle is closed. They should be on the model's device, in its element type.
        """
        ...


class LoraSource(Protocol):
    """A source of LoRAs. All calls come from the engine's thread, and only `settle` waits."""

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        """Set the present stores, best first. Requests wait while there is no store."""
        ...

    def begin(self, ref: LoraRef) -> LoraHandle:
        """Request a LoRA, and bring it in the background. The handle reports failures."""
        ...

    def settle(self, handles: Sequence[LoraHandle], timeout_s: float) -> None:
        """Wait until more of one of these has arrived or one has failed, or until the timeout."""
        ...

    def close(self, handles: Sequence[LoraHandle]) -> None:
        """Release handles, whether or not they are ready. Releasing one twice does nothing."""
        ...
