"""The download of a LoRA from a store: its layers as tensors once they have arrived, or the error of the download.

The connection's thread fills it, the checking thread may fail it, and the engine's thread reads it. Layers that have
arrived never change. Within a host they are views of the store's own sealed memory (bottega.transport, files), where
the model's element type and device allow it: then no byte is copied, and the hashed bytes cannot change.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

import torch
from torch import Tensor

from bottega.addons.loras.engine import Layers, LoraLayer, LoraRef, WholeLayer, make_layer
from bottega.addons.loras.wire import canonical
from bottega.addons.loras.wire.canonical import CanonicalLora, Module
from bottega.addons.loras.wire.module_parts import DENOISERS, SCALE, TEXT_ENCODERS, is_low_rank
from bottega.device.device import Device
from bottega.device.devices import open_device
from bottega.engine.spans import StoreWork
from bottega.errors import BadLora, BottegaError, DataLoss, NoLora
from bottega.safetensors_header import LENGTH_BYTES, HeaderError, TensorEntry, header_bytes
from bottega.v1.trace_pb2 import StoreTimes

# Sections are copied in pieces, because torch keeps as much pinned memory as the largest copy needed.
_COPIED_BYTES = 16 << 20
_STREAM = "load"
# A whole LoRA is hashed in pieces of this size, so that other threads run in between.
_PIECE_BYTES = 4 << 20
# Size of the largest element type of a LoRA.
_ALIGNMENT_BYTES = 4
_TORCH = MappingProxyType({"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16})


def load_bytes(device: Device, section: Tensor) -> Tensor:
    """Return a LoRA's section, uint8 [bytes], in device memory.

    A section that is already on the device is returned unchanged. Otherwise the call blocks until it is copied.
    """
    if section.device == device.torch_device:
        return section
    # Allocated in the stream that will use and free it. The copies wait for earlier uses of this memory in that stream.
    copied = torch.empty(section.shape, dtype=section.dtype, device=device.torch_device)
    with device.stream(_STREAM):
        for first in range(0, len(section), _COPIED_BYTES):
            piece = section[first : first + _COPIED_BYTES]
            copied[first : first + len(piece)].copy_(device.to_device(piece), non_blocking=True)
        done = device.record()
    done.wait()
    return copied


class LoraDownload:
    """A download of one LoRA, shared by all jobs that need it.

    Args:
        device: Device of the layers.
        dtype: Element type of the layers.
    """

    def __init__(self, ref: LoraRef, *, device: torch.device, dtype: torch.dtype) -> None:
        self.ref = ref
        self.requested_s = time.monotonic()
        """Time at which a store was asked last, on CLOCK_MONOTONIC."""
        self.arrived_s: float | None = None
        self.work: StoreWork | None = None
        """Time that the store spent on the LoRA; None before it has responded."""
        self.error: BottegaError | None = None
        self.users = 0
        self.given_up = False
        """Whether the last user left before the download was complete. A later request for the LoRA makes a new one."""
        self.size_bytes = 0
        """Bytes of the layers. Shared memory counts, because the store may have freed its own reference to it."""
        self._device = device
        self._dtype = dtype
        self._hash = hashlib.sha256()
        # While it is incomplete: its header, its second section, and how many bytes of that are here.
        self._lora: CanonicalLora | None = None
        self.ignored = 0
        """Number of layers of the LoRA's file that were left out when it was added."""
        self._denoiser = torch.empty(0, dtype=torch.uint8)
        self._filled = 0
        self._layers: dict[str, Layers] = {}
        self.beginning = ""
        """Hash of the header and the first section, which has the layers of the text encoders."""

    @property
    def text_ready(self) -> bool:
        """Whether the layers of the text encoders have arrived."""
        return bool(self._layers)

    @property
    def ready(self) -> bool:
        """Whether all of the LoRA has arrived and has the requested digest."""
        return self.arrived_s is not None

    @property
    def is_idle(self) -> bool:
        """Whether the download is complete and unused."""
        return self.ready and not self.users

    def layers(self, component: str) -> Layers:
        return self._layers[component]

    def restart(self) -> None:
        """Drop the incomplete part, which will be sent again. Layers that the engine may be reading stay until then."""
        self._lora = None
        self._denoiser = torch.empty(0, dtype=torch.uint8)
        self.size_bytes = 0

    def note_answer(self, store: str, times: StoreTimes) -> None:
        """Record that the store has begun to respond.

        Args:
            times: Seconds that the store has spent until then.
        """
        self.work = StoreWork(store=store, times=times, asked_s=self.requested_s, answered_s=time.monotonic())

    def take_head(self, head: bytes, text: memoryview, denoiser_bytes: int) -> None:
        """Read the header and the first section.

        Args:
            denoiser_bytes: Bytes of the second section, which arrives in pieces.

        Raises:
            DataLoss: They are not those of a LoRA, or differ from what the header says.
        """
        self.restart()
        try:
            lora = _parsed(head, len(text), denoiser_bytes)
        except BadLora as error:
            raise DataLoss(f"the LoRA store sent a damaged LoRA: {error.message}") from error
        self._hash = hashlib.sha256(head)
        section = torch.empty(lora.text_bytes, dtype=torch.uint8)
        self._copy(text[: lora.text_bytes], section)
        self._begin(lora, section)
        self._denoiser, self._filled = torch.empty(denoiser_bytes, dtype=torch.uint8), 0
        if not denoiser_bytes:
            self._complete(lora)

    def take_whole(self, file: memoryview) -> None:
        """Use the whole file in the store's own memory. Call `check` next. Raise DataLoss if it is not a LoRA."""
        self.restart()
        try:
            head = bytes(file[: header_bytes(bytes(file[:LENGTH_BYTES]))])
            lora = canonical.parse(head, file_bytes=len(file))
        except (BadLora, HeaderError) as error:
            raise DataLoss(f"the LoRA store sent a damaged LoRA: {error}") from error
        middle = lora.header_bytes + lora.text_bytes
        section = _shared(file[lora.header_bytes : middle])
        self._hash = hashlib.sha256(head)
        self._hash.update(section.numpy().data)
        self._begin(lora, section)
        self._denoiser = _shared(file[middle:])

    def check(self) -> None:
        """Hash the file from `take_whole`, and complete the download. Raise DataLoss for a wrong digest."""
        assert self._lora is not None, "take_whole comes first"
        for first in range(0, len(self._denoiser), _PIECE_BYTES):
            self._hash.update(self._denoiser[first : first + _PIECE_BYTES].numpy().data)
        self._complete(self._lora)

    def take_piece(self, piece: memoryview) -> None:
        """Read the next bytes of the denoiser's layers, which arrive after those of the text encoders.

        Raises:
            DataLoss: The LoRA is complete but does not have the requested digest.
            ValueError: No more bytes were expected.
        """
        end = self._filled + len(piece)
        if self._lora is None or end > len(self._denoiser):
            raise ValueError("a piece arrived of a LoRA that has not begun or is already complete")
        self._copy(piece, self._denoiser[self._filled : end])
        self._filled = end
        if end == len(self._denoiser):
            if self.work is not None:
                self.work = replace(self.work, sent_s=time.monotonic())
            self._complete(self._lora)

    def _begin(self, lora: CanonicalLora, text: Tensor) -> None:
        """Read the layers in the first section, and hash it."""
        self._layers = self._read(lora, text, TEXT_ENCODERS)
        self.beginning = self._hash.hexdigest()  # last: a thread that has seen it sees no earlier layers
        self._lora = lora
        self.ignored = len(lora.ignored)

    def _complete(self, lora: CanonicalLora) -> None:
        if self._hash.hexdigest() != self.ref.digest:
            self.restart()
            raise DataLoss(
                f"the LoRA store sent {self.ref.name} whose digest differs from the requested one",
                metadata={"loras": self.ref.name},
            )
        self._layers = {**self._layers, **self._read(lora, self._denoiser, DENOISERS)}
        self._lora, self._denoiser = None, torch.empty(0, dtype=torch.uint8)
        self.arrived_s = time.monotonic()

    def _copy(self, view: memoryview, section: Tensor) -> None:
        """Copy bytes before they are hashed and used, because the sender may still write to a slot that it sent."""
        if len(view):
            section.copy_(torch.frombuffer(view, dtype=torch.uint8))
        self._hash.update(section.numpy().data)

    def _read(self, lora: CanonicalLora, section: Tensor, components: Sequence[str]) -> dict[str, Layers]:
        if section.data_ptr() % _ALIGNMENT_BYTES:  # behind an odd number of half-precision items
            section = section.clone()
        on_device = load_bytes(open_device(self._device), section)
        found: dict[str, dict[str, LoraLayer | WholeLayer]] = {component: {} for component in components}
        for module in lora.modules:
            if module.component in found:
                parts = self._parts(module, on_device)
                found[module.component][module.path] = make_layer(parts, self._scale(module, section))
                self.size_bytes += sum(tensor.nbytes for tensor in parts.values())
        return dict[str, Layers](found)

    def _parts(self, module: Module, on_device: Tensor) -> dict[str, Tensor]:
        """Return a module's tensors without the scale, from the section on the model's device.

        Only factors that are used as they are get the model's element type.
        """
        dtype = self._dtype if is_low_rank(module.parts) else None
        tensors = {part: _tensor(entry, on_device) for part, entry in module.parts.items() if part != SCALE}
        return {part: tensor.to(dtype) if dtype else tensor for part, tensor in tensors.items()}

    def _scale(self, module: Module, section: Tensor) -> float:
        """Return a module's scale, from the section in host memory. Raise DataLoss if it is not finite."""
        scale = float(_tensor(module.scale, section))
        if not math.isfinite(scale):
            raise DataLoss(f"the LoRA store sent a scale of {self.ref.name} that is not finite")
        return scale


class DownloadHandle:
    """A user's handle on a download.

    The text encoders' layers are used before the whole LoRA can be checked. If another store then sends different
    layers, the user has read damaged ones, and gets an error.
    """

    def __init__(self, download: LoraDownload) -> None:
        self.download = download
        self.asked_s = time.monotonic()
        self.open = True
        """Whether the handle has not been closed."""
        self._used = ""  # `beginning` of the layers that were used

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

    @property
    def ignored(self) -> int:
        return self.download.ignored

    def layers(self, component: str) -> Layers:
        self._check()
        self._used = self._used or self.download.beginning
        return self.download.layers(component)

    def _check(self) -> None:
        if self.download.error is not None:
            raise self.download.error
        if self.download.ready and self._used not in {"", self.download.beginning}:
            # Not DataLoss, because a job that begins now gets undamaged layers.
            raise NoLora(
                f"the text encoders' part of {self.download.ref.name} was damaged on its way and used before that was "
                "noticed; try again: an undamaged copy has arrived",
                metadata={"loras": self.download.ref.name},
                retry_after_s=0.0,
            )


def _parsed(head: bytes, text_bytes: int, denoiser_bytes: int) -> CanonicalLora:
    """Return the parsed header. One byte means an empty first section, because no other section has one byte."""
    section_bytes = text_bytes if text_bytes > 1 else 0
    lora = canonical.parse(head, file_bytes=len(head) + section_bytes + denoiser_bytes)
    if (lora.text_bytes, lora.denoiser_bytes) != (section_bytes, denoiser_bytes):
        raise BadLora("the lengths of the sections differ from those in the header")
    return lora


def _shared(view: memoryview) -> Tensor:
    """Return a tensor view of memory that nothing changes."""
    return torch.frombuffer(view, dtype=torch.uint8) if len(view) else torch.empty(0, dtype=torch.uint8)


def _tensor(entry: TensorEntry, section: Tensor) -> Tensor:
    return section[entry.begin : entry.end].view(_TORCH[entry.dtype]).reshape(entry.shape)
