"""Messages of links as tensors by name: how they are made, and looked at where they came.

The first tensors of a message are its header, in memory of the host; the others may lie on a device. Whoever makes a
message does not wait for the device: the thread that sends it does, where the link goes through memory of the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.device_links import DeviceTensor, mark
from bottega.transport import DType, Layout, Part, TensorSpec, in_host_memory

# Of the header of a message; that of eight sessions has some thousand bytes.
_MAX_HEADER_BYTES = 64 << 10
# Headers are padded to multiples of this, so that most messages of a kind have one layout.
_HEADER_STEP_BYTES = 512

DTYPES = {torch.float32: DType.FLOAT32, torch.float16: DType.FLOAT16, torch.bfloat16: DType.BFLOAT16}
_TORCH = {ours: theirs for theirs, ours in DTYPES.items()} | {DType.UINT8: torch.uint8, DType.INT64: torch.int64}
_OURS = {theirs: ours for ours, theirs in _TORCH.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorMessage:
    """A message to send: its layout, and a buffer for each of its tensors. made: when those of a device are, in the
    stream that was current."""

    layout: Layout
    tensors: tuple[Tensor, ...]
    made: torch.cuda.Event | None = None

    @property
    def buffers(self) -> list[Part]:
        """The bytes of its tensors, where they lie."""
        return [self._buffer(tensor.reshape(-1).view(torch.uint8)) for tensor in self.tensors]

    def _buffer(self, flat: Tensor) -> Part:
        if flat.device.type != "cpu":
            return DeviceTensor(flat, self.made)
        view: memoryview = flat.numpy().data
        return view


def message_of(parts: Mapping[str, Tensor], *, headers: int | None = None) -> TensorMessage:
    """The message of these tensors, by name, in this order.

    headers: how many of them are its header, which are brought to the host; None: all.
    """
    headers = len(parts) if headers is None else headers
    tensors = {
        name: (tensor.cpu() if index < headers else tensor).contiguous()
        for index, (name, tensor) in enumerate(parts.items())
    }
    specs = [TensorSpec(name=name, dtype=_OURS[t.dtype], shape=tuple(t.shape)) for name, t in tensors.items()]
    device = next((tensor.device for tensor in tensors.values() if tensor.device.type != "cpu"), None)
    return TensorMessage(
        layout=Layout.of(*specs, headers=headers),
        tensors=tuple(tensors.values()),
        made=mark(device) if device is not None else None,
    )


def parts_of(layout: Layout, parts: Sequence[Part], *, headers: int | None = None) -> dict[str, Tensor]:
    """The tensors of a received message by name, where they lie.

    headers: how many of them, at least, have to be its header; None: all. Raises ValueError where fewer are.
    """
    if layout.headers < (len(layout.specs) if headers is None else headers):
        raise ValueError(f"a message has {layout.headers} tensors in its header, and others of it are to be read")
    return {spec.name: tensor_at(layout, parts, index) for index, spec in enumerate(layout.specs)}


def packed(data: bytes) -> Tensor:
    """The bytes as a tensor, padded with blanks, which JSON does not mind."""
    size = -(-len(data) // _HEADER_STEP_BYTES) * _HEADER_STEP_BYTES
    return torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8)


def unpacked(header: Tensor) -> bytes:
    """The bytes of such a tensor. Raises ValueError for one that is none, or too long."""
    if header.dtype != torch.uint8 or header.dim() != 1 or len(header) > _MAX_HEADER_BYTES:
        raise ValueError(f"a message's header is not at most {_MAX_HEADER_BYTES} bytes")
    return header.numpy().tobytes()


def tensor_at(layout: Layout, parts: Sequence[Part], index: int) -> Tensor:
    """One tensor of a message, where it lies."""
    return tensor_of(layout.specs[index], parts[index])


def tensor_of(spec: TensorSpec, part: Part) -> Tensor:
    """One tensor of a message, where it lies. Received, it is not to be written to."""
    if isinstance(part, DeviceTensor):
        return part.tensor.view(_TORCH[spec.dtype]).reshape(spec.shape)
    return torch.frombuffer(in_host_memory(part), dtype=_TORCH[spec.dtype]).reshape(spec.shape)
