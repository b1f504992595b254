"""One LoRA that is here or on its way: its layers as tensors, and why it will never come.

The thread that receives fills it, and one that checks may end it; the engine's reads it: what is there is never changed
again. Within a host the layers are views of the store's own memory, sealed (bottega.transport, files), wherever the
model's element type and device let them: then what is hashed and used is no copy, and cannot change in between.
"""

from __future__ import annotations

import hashlib
import math
import time
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from bottega.diffusion.device.loading import load_bytes
from bottega.diffusion.device.pick import open_device
from bottega.diffusion.engine.store_work import StoreWork
from bottega.diffusion.loras import Layers, LoraLayer, LoraRef
from bottega.errors import BadLora, BottegaError, DataLoss, NoLora
from bottega.lora import canonical
from bottega.lora.canonical import BACKBONE, COMPONENTS, CanonicalLora, Module
from bottega.safetensors_header import LENGTH_BYTES, HeaderError, TensorEntry, header_bytes
from bottega.v1.trace_pb2 import StoreTimes

# Of a whole LoRA that is checked: between two of them others get their turn.
_PIECE_BYTES = 4 << 20
# Of the largest items that a LoRA has.
_ALIGNMENT_BYTES = 4
_TORCH = MappingProxyType({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})


class LoraDownload:
    """device, dtype: where, and as what, its layers are wanted. asked_s: on the monotonic clock; requested_s: when
    a store was asked last. work: of the store that has answered. given_up: its last user has gone before it was ready;
    a later request for the same LoRA makes another one.

    size_bytes: of its layers. Shared ones count as its own: the store may have let them go, and then nobody else has
    them.
    """

    def __init__(self, ref: LoraRef, *, device: torch.device, dtype: torch.dtype) -> None:
        self.ref = ref
        self.asked_s = self.requested_s = time.monotonic()
        self.arrived_s: float | None = None
        self.work: StoreWork | None = None
        self.error: BottegaError | None = None
        self.users = 0
        self.given_up = False
        self.size_bytes = 0
        self._device = device
        self._dtype = dtype
        self._hash = hashlib.sha256()
        # While it comes: what its header says, its second section and how much of that is there.
        self._lora: CanonicalLora | None = None
        self._unet = torch.empty(0, dtype=torch.uint8)
        self._filled = 0
        self._layers: dict[str, Layers] = {}
        # Hash of the header and the first section that the layers of the text encoders are of.
        self.beginning = ""

    @property
    def text_ready(self) -> bool:
        """Whether the layers of the text encoders are here."""
        return len(self._layers) >= len(COMPONENTS) - 1

    @property
    def ready(self) -> bool:
        """Whether all of it is here, and is what was asked for."""
        return self.arrived_s is not None

    @property
    def is_idle(self) -> bool:
        """Whether it is complete, and nobody uses it."""
        return self.ready and not self.users

    def layers(self, component: str) -> Layers:
        """What it does to one component."""
        return self._layers[component]

    def restart(self) -> None:
        """What has come of it is not whole, and comes anew. Layers that somebody may be reading stay until then."""
        self._lora = None
        self._unet = torch.empty(0, dtype=torch.uint8)
        self.size_bytes = 0

    def note_answer(self, store: str, times: StoreTimes) -> None:
        """The first of what a store sends is here. times: that it has spent until then."""
        self.work = StoreWork(store=store, times=times, asked_s=self.requested_s, answered_s=time.monotonic())

    def take_head(self, head: bytes, text: memoryview, unet_bytes: int) -> None:
        """The header and the first section are here. unet_bytes: that the second one will have.

        Raises DataLoss where they are no LoRA, or not what their header says.
        """
        self.restart()
        try:
            lora = _parsed(head, len(text), unet_bytes)
        except BadLora as error:
            raise DataLoss(f"the LoRA store sent what is no LoRA: {error.message}") from error
        self._hash = hashlib.sha256(head)
        section = torch.empty(lora.text_bytes, dtype=torch.uint8)
        self._copy(text[: lora.text_bytes], section)
        self._begin(lora, section)
        self._unet, self._filled = torch.empty(unet_bytes, dtype=torch.uint8), 0
        if not unet_bytes:
            self._complete(lora)

    def take_whole(self, file: memoryview) -> None:
        """All of it is here, as the store's own memory; `check` comes next. Raises DataLoss where it is no LoRA."""
        self.restart()
        try:
            head = bytes(file[: header_bytes(bytes(file[:LENGTH_BYTES]))])
            lora = canonical.parse(head, file_bytes=len(file))
        except (BadLora, HeaderError) as error:
            raise DataLoss(f"the LoRA store sent what is no LoRA: {error}") from error
        middle = lora.header_bytes + lora.text_bytes
        section = _shared(file[lora.header_bytes : middle])
        self._hash = hashlib.sha256(head)
        self._hash.update(section.numpy().data)
        self._begin(lora, section)
        self._unet = _shared(file[middle:])

    def check(self) -> None:
        """Ends what `take_whole` began; it takes as long as hashing it does. Raises DataLoss where it is not what was
        asked for."""
        assert self._lora is not None, "a whole one is taken first"
        for first in range(0, len(self._unet), _PIECE_BYTES):
            self._hash.update(self._unet[first : first + _PIECE_BYTES].numpy().data)
        self._complete(self._lora)

    def take_piece(self, piece: memoryview) -> None:
        """The next bytes of the second section are here. Raises DataLoss where it is not what was asked for, and
        ValueError where no more were to come."""
        end = self._filled + len(piece)
        if self._lora is None or end > len(self._unet):
            raise ValueError("a piece of a LoRA that has not begun, or is whole")
        self._copy(piece, self._unet[self._filled : end])
        self._filled = end
        if end == len(self._unet):
            if self.work is not None:
                self.work = replace(self.work, sent_s=time.monotonic())
            self._complete(self._lora)

    def _begin(self, lora: CanonicalLora, text: Tensor) -> None:
        """The first section is here, and hashed."""
        self._layers = self._read(lora, text, [c for c in COMPONENTS if c != BACKBONE])
        self.beginning = self._hash.hexdigest()  # last: a thread that has seen it sees no earlier layers
        self._lora = lora

    def _complete(self, lora: CanonicalLora) -> None:
        if self._hash.hexdigest() != self.ref.digest:
            self.restart()
            raise DataLoss(
                f"what the LoRA store sent for {self.ref.name} has another digest than was asked for",
                metadata={"loras": self.ref.name},
            )
        self._layers = {**self._layers, **self._read(lora, self._unet, [BACKBONE])}
        self._lora, self._unet = None, torch.empty(0, dtype=torch.uint8)
        self.arrived_s = time.monotonic()

    def _copy(self, view: memoryview, section: Tensor) -> None:
        """What is hashed and used is a copy: the sender may still write to a slot that it sent."""
        if len(view):
            section.copy_(torch.frombuffer(view, dtype=torch.uint8))
        self._hash.update(section.numpy().data)

    def _read(self, lora: CanonicalLora, section: Tensor, components: list[str]) -> dict[str, Layers]:
        """The layers of a section."""
        if section.data_ptr() % _ALIGNMENT_BYTES:  # behind an odd number of half-precision items
            section = section.clone()
        there = load_bytes(open_device(self._device), section)
        found: dict[str, dict[str, LoraLayer]] = {component: {} for component in components}
        for module in lora.modules:
            if module.component in found:
                layer = self._layer(module, section, there)
                found[module.component][module.path] = layer
                self.size_bytes += layer.down.nbytes + layer.up.nbytes
        return dict[str, Layers](found)

    def _layer(self, module: Module, section: Tensor, there: Tensor) -> LoraLayer:
        """there: the section where the layers are wanted."""
        scale = float(_tensor(module.scale, section))
        if not math.isfinite(scale):
            raise DataLoss(f"the LoRA store sent a scale that is no number, for {self.ref.name}")
        down, up = (_tensor(entry, there).to(self._dtype) for entry in (module.down, module.up))
        return LoraLayer(down=down, up=up, scale=scale)


class DownloadHandle:
    """One for each who asked. open: until it is closed.

    What a prompt is read with comes before the whole can be checked. Where another store had to send it, and sent
    something else, its user has read damaged layers, and hears so.
    """

    def __init__(self, download: LoraDownload) -> None:
        self.download = download
        self.asked_s = time.monotonic()
        self.open = True
        self._used = ""  # the beginning that layers were taken of

    @property
    def text_ready(self) -> bool:
        self._check()
        return self.download.text_ready

    @property
    def ready(self) -> bool:
        self._check()
        return self.download.ready

    @property
    def load_s(self) -> float:
        here_s = self.download.arrived_s
        return max(0.0, (time.monotonic() if here_s is None else here_s) - self.asked_s)

    @property
    def work(self) -> StoreWork | None:
        return self.download.work

    def layers(self, component: str) -> Layers:
        self._check()
        self._used = self._used or self.download.beginning
        return self.download.layers(component)

    def _check(self) -> None:
        if self.download.error is not None:
            raise self.download.error
        if self.download.ready and self._used not in {"", self.download.beginning}:
            # Not the damage itself: it is not lost, and a job that begins now has it whole.
            raise NoLora(
                f"the text encoders' part of {self.download.ref.name} came damaged, and was used before that was seen; "
                "ask again: it is whole now",
                metadata={"loras": self.download.ref.name},
                retry_after_s=0.0,
            )


def _parsed(head: bytes, text_bytes: int, unet_bytes: int) -> CanonicalLora:
    """An empty first section comes as one byte, and none has one byte otherwise."""
    told = text_bytes if text_bytes > 1 else 0
    lora = canonical.parse(head, file_bytes=len(head) + told + unet_bytes)
    if (lora.text_bytes, lora.unet_bytes) != (told, unet_bytes):
        raise BadLora("its sections are not as long as its header says")
    return lora


def _shared(view: memoryview) -> Tensor:
    """Bytes that nobody changes, as they lie there."""
    return torch.frombuffer(view, dtype=torch.uint8) if len(view) else torch.empty(0, dtype=torch.uint8)


def _tensor(entry: TensorEntry, section: Tensor) -> Tensor:
    return section[entry.begin : entry.end].view(_TORCH[entry.dtype]).reshape(entry.shape)
