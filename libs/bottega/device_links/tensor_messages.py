"""Messages of links as tensors by name: how they are built, and how received ones are read without a copy.

The first tensors of a message are its header, in host memory; the others may be on a device. Building a message does
not wait for the device. If the link goes through host memory, the thread that sends the message does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.device_links.tensors import DeviceTensor, mark
from bottega.transport import DType, Layout, Part, TensorSpec, in_host_memory

# Maximum size of a header. The header of eight sessions has a few thousand bytes.
_MAX_HEADER_BYTES = 64 << 10
# Headers are padded to multiples of this, so that most messages of one kind have the same layout.
_HEADER_STEP_BYTES = 512

DTYPES = {torch.float32: DType.FLOAT32, torch.float16: DType.FLOAT16, torch.bfloat16: DType.BFLOAT16}
_TORCH = {ours: theirs for theirs, ours in DTYPES.items()} | {DType.UINT8: torch.uint8, DType.INT64: torch.int64}
_OURS = {theirs: ours for ours, theirs in _TORCH.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorMessage:
    """A message to send: its layout, and a buffer for each of its tensors."""

    layout: Layout
    tensors: tuple[Tensor, ...]
    made: torch.cuda.Event | None = None
    """CUDA event after which tensors on a device are ready; None if all are ready."""

    @property
    def buffers(self) -> list[Part]:
        """The bytes of its tensors, in host or device memory."""
        return [self._buffer(tensor.reshape(-1).view(torch.uint8)) for tensor in self.tensors]

    def _buffer(self, flat: Tensor) -> Part:
        if flat.device.type != "cpu":
            return DeviceTensor(flat, self.made)
        view: memoryview = flat.numpy().data
        return view


def message_of(parts: Mapping[str, Tensor], *, headers: int | None = None) -> TensorMessage:
    """Build a message of named tensors, in this order.

    Args:
        parts: The tensors.
        headers: Number of tensors in its header, which is copied to the host; None means all.
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
    """Return the tensors of a received message by name, without copying them.

    Args:
        layout: Layout of the message.
        parts: Its buffers.
        headers: Number of tensors that its header must have at least; None means all.

    Raises:
        ValueError: Its header has fewer tensors.
    """
    if layout.headers < (len(layout.specs) if headers is None else headers):
        raise ValueError(f"a message must have more than {layout.headers} tensors in its header")
    return {spec.name: tensor_at(layout, parts, index) for index, spec in enumerate(layout.specs)}


def packed(data: bytes) -> Tensor:
    """Return bytes as a tensor, padded with blanks, which JSON ignores."""
    size = -(-len(data) // _HEADER_STEP_BYTES) * _HEADER_STEP_BYTES
    return torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8)


def unpacked(header: Tensor) -> bytes:
    """Return the bytes of a tensor from `packed`. Raise ValueError if it is malformed or too long."""
    if header.dtype != torch.uint8 or header.dim() != 1 or len(header) > _MAX_HEADER_BYTES:
        raise ValueError(f"a message's header is malformed, or longer than {_MAX_HEADER_BYTES} bytes")
    return header.numpy().tobytes()


def tensor_at(layout: Layout, parts: Sequence[Part], index: int) -> Tensor:
    """Return one tensor of a message by index, without copying it."""
    return tensor_of(layout.specs[index], parts[index])


def tensor_of(spec: TensorSpec, part: Part) -> Tensor:
    """Return one tensor of a message, without copying it. Received tensors must not be changed."""
    if isinstance(part, DeviceTensor):
        return part.tensor.view(_TORCH[spec.dtype]).reshape(spec.shape)
    return torch.frombuffer(in_host_memory(part), dtype=_TORCH[spec.dtype]).reshape(spec.shape)
