"""Where LoRAs come from, as the engine sees it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bottega.diffusion.engine.store_work import StoreWork
from bottega.diffusion.loras.lora import Layers
from bottega.v1.fleet_pb2 import ServiceAddress


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraRef:
    """Which LoRA. name: in the store, for messages. digest: SHA-256 of its canonical file, hex."""

    name: str
    digest: str


class LoraHandle(Protocol):
    """A LoRA that somebody is waiting for. Its properties raise the BottegaError for which it will never be here."""

    @property
    def text_ready(self) -> bool:
        """Whether the layers of the text encoders are here: they come first."""
        ...

    @property
    def ready(self) -> bool:
        """Whether all of it is here."""
        ...

    @property
    def load_s(self) -> float:
        """Seconds from `begin` until all of it was here; until now, where it is not."""
        ...

    @property
    def work(self) -> StoreWork | None:
        """What a store has done to bring it, perhaps before `begin`, for somebody else; None where none has."""
        ...

    def layers(self, component: str) -> Layers:
        """What it does to one component; those of the UNet once it is ready, others once their part is.

        They may be read until the handle is closed, and are best given on the model's device, in its element type.
        """
        ...


class LoraSource(Protocol):
    """Brings LoRAs. All calls come from the engine's thread, and none but `settle` waits."""

    def set_stores(self, stores: Sequence[ServiceAddress]) -> None:
        """The stores that there are now, the best first. What is asked for while there are none waits for the next."""
        ...

    def begin(self, ref: LoraRef) -> LoraHandle:
        """Asks for a LoRA; what takes time goes on meanwhile. What fails, the handle says."""
        ...

    def settle(self, handles: Sequence[LoraHandle], timeout_s: float) -> None:
        """Returns when more of one of these is here, or it has failed, or after the timeout."""
        ...

    def close(self, handles: Sequence[LoraHandle]) -> None:
        """Nobody needs these any more, ready or not. Harmless the second time."""
        ...
