"""One LoRA that is here or on its way: its layers as tensors, and why it will never come. Knows no links.

The thread that receives fills it, the engine's reads it: what is there is never changed again.
"""

from __future__ import annotations

import hashlib
import math
import time
from types import MappingProxyType

import torch
from torch import Tensor

from bottega.diffusion.loras import Layers, LoraLayer, LoraRef
from bottega.errors import BadLora, BottegaError, DataLoss
from bottega.lora import canonical
from bottega.lora.canonical import BACKBONE, COMPONENTS, Canonical, Module
from bottega.lora.safetensors_header import TensorEntry

_TORCH = MappingProxyType({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})


class Arrival:
    """device, dtype: where, and as what, its layers are wanted. asked_s: on the monotonic clock."""

    def __init__(self, ref: LoraRef, *, device: torch.device, dtype: torch.dtype) -> None:
        self.ref = ref
        self.asked_s = time.monotonic()
        self.arrived_s: float | None = None
        self.error: BottegaError | None = None
        self.users = 0
        self.size_bytes = 0
        self._device = device
        self._dtype = dtype
        self._hash = hashlib.sha256()
        self._lora: Canonical | None = None
        self._layers: dict[str, Layers] = {}

    @property
    def text_ready(self) -> bool:
        """Whether the layers of the text encoders are here."""
        return len(self._layers) >= len(COMPONENTS) - 1

    @property
    def ready(self) -> bool:
        """Whether all of it is here, and is what was asked for."""
        return self.arrived_s is not None

    def layers(self, component: str) -> Layers:
        """What it does to one component."""
        return self._layers[component]

    def begin_again(self) -> None:
        """What has come of it is not whole, and comes anew. Layers that somebody may be reading stay until then."""
        self._hash = hashlib.sha256()
        self._lora = None
        self.size_bytes = 0

    def take_text(self, head: bytes, text: memoryview, unet_bytes: int) -> None:
        """The header and the first section are here. unet_bytes: that the second one will have.

        Raises DataLoss where they are no LoRA, or not what their header says.
        """
        try:
            lora = self._lora = _parsed(head, len(text), unet_bytes)
        except BadLora as error:
            raise DataLoss(f"the LoRA store sent what is no LoRA: {error.message}") from error
        self._hash.update(head)
        layers = self._read(lora, text[: lora.text_bytes], [c for c in COMPONENTS if c != BACKBONE])
        self._layers = layers

    def take_unet(self, unet: memoryview) -> None:
        """The second section is here: it is whole. Raises DataLoss where it is not what was asked for."""
        assert self._lora is not None, "the header comes first"
        layers = self._read(self._lora, unet[: self._lora.unet_bytes], [BACKBONE])
        if self._hash.hexdigest() != self.ref.digest:
            self.begin_again()
            raise DataLoss(
                f"what the LoRA store sent for {self.ref.name} has another digest than was asked for",
                metadata={"loras": self.ref.name},
            )
        self._layers = {**self._layers, **layers}
        self.arrived_s = time.monotonic()

    def _read(self, lora: Canonical, view: memoryview, components: list[str]) -> dict[str, Layers]:
        """The layers of a section. What is hashed and used is a copy: the sender may still write to what it sent."""
        section = torch.empty(len(view), dtype=torch.uint8)
        if len(view):
            section.copy_(torch.frombuffer(view, dtype=torch.uint8))
        self._hash.update(section.numpy().data)
        found: dict[str, dict[str, LoraLayer]] = {component: {} for component in components}
        for module in lora.modules:
            if module.component in found:
                layer = self._layer(module, section)
                found[module.component][module.path] = layer
                self.size_bytes += layer.down.nbytes + layer.up.nbytes
        return dict[str, Layers](found)

    def _layer(self, module: Module, section: Tensor) -> LoraLayer:
        scale = float(_tensor(module.scale, section))
        if not math.isfinite(scale):
            raise DataLoss(f"the LoRA store sent a scale that is no number, for {self.ref.name}")
        down, up = (_tensor(entry, section).to(self._device, self._dtype) for entry in (module.down, module.up))
        return LoraLayer(down=down, up=up, scale=scale)


class Handle:
    """See LoraHandle. One for each who asked. open: until it is closed."""

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.asked_s = time.monotonic()
        self.open = True

    @property
    def text_ready(self) -> bool:
        """See LoraHandle."""
        self._check()
        return self.arrival.text_ready

    @property
    def ready(self) -> bool:
        """See LoraHandle."""
        self._check()
        return self.arrival.ready

    @property
    def load_s(self) -> float:
        """See LoraHandle."""
        here_s = self.arrival.arrived_s
        return max(0.0, (time.monotonic() if here_s is None else here_s) - self.asked_s)

    def layers(self, component: str) -> Layers:
        """See LoraHandle."""
        self._check()
        return self.arrival.layers(component)

    def _check(self) -> None:
        if self.arrival.error is not None:
            raise self.arrival.error


def _parsed(head: bytes, text_bytes: int, unet_bytes: int) -> Canonical:
    """An empty section comes as one byte, and no section has one byte otherwise."""
    told = sum(size_bytes for size_bytes in (text_bytes, unet_bytes) if size_bytes > 1)
    lora = canonical.parse(head, file_bytes=len(head) + told)
    if (max(1, lora.text_bytes), max(1, lora.unet_bytes)) != (text_bytes, unet_bytes):
        raise BadLora("its sections are not as long as its header says")
    return lora


def _tensor(entry: TensorEntry, section: Tensor) -> Tensor:
    return section[entry.begin : entry.end].view(_TORCH[entry.dtype]).reshape(entry.shape)
