"""Messages of links as tensors by name: how they are made, and looked at where they came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bottega.transport import DType, Layout, TensorSpec

# Of the header of a message; that of eight sessions has some thousand bytes.
_MAX_HEADER_BYTES = 64 << 10
# Headers are padded to multiples of this, so that most messages of a kind have one layout.
_HEADER_STEP_BYTES = 512

DTYPES = {torch.float32: DType.FLOAT32, torch.float16: DType.FLOAT16, torch.bfloat16: DType.BFLOAT16}
_TORCH = {ours: theirs for theirs, ours in DTYPES.items()} | {DType.UINT8: torch.uint8, DType.INT64: torch.int64}
_OURS = {theirs: ours for ours, theirs in _TORCH.items()}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TensorMessage:
    """A message to send: its layout, and a buffer for each of its tensors."""

    layout: Layout
    tensors: tuple[Tensor, ...]

    @property
    def buffers(self) -> list[memoryview]:
        """The bytes of its tensors."""
        return [tensor.reshape(-1).view(torch.uint8).numpy().data for tensor in self.tensors]


def message_of(parts: Mapping[str, Tensor]) -> TensorMessage:
    """The message of these tensors, by name, in this order."""
    tensors = {name: tensor.cpu().contiguous() for name, tensor in parts.items()}
    specs = [TensorSpec(name=name, dtype=_OURS[t.dtype], shape=tuple(t.shape)) for name, t in tensors.items()]
    return TensorMessage(layout=Layout.of(*specs), tensors=tuple(tensors.values()))


def parts_of(layout: Layout, views: Sequence[memoryview]) -> dict[str, Tensor]:
    """The tensors of a received message by name, where they lie."""
    return {spec.name: tensor_at(layout, views, index) for index, spec in enumerate(layout.specs)}


def packed(data: bytes) -> Tensor:
    """The bytes as a tensor, padded with blanks, which JSON does not mind."""
    size = -(-len(data) // _HEADER_STEP_BYTES) * _HEADER_STEP_BYTES
    return torch.frombuffer(bytearray(data.ljust(size)), dtype=torch.uint8)


def unpacked(header: Tensor) -> bytes:
    """The bytes of such a tensor. Raises ValueError for one that is none, or too long."""
    if header.dtype != torch.uint8 or header.dim() != 1 or len(header) > _MAX_HEADER_BYTES:
        raise ValueError(f"a message's header is not at most {_MAX_HEADER_BYTES} bytes")
    return header.numpy().tobytes()


def tensor_at(layout: Layout, views: Sequence[memoryview], index: int) -> Tensor:
    """One tensor of a message, where it lies."""
    return tensor_of(layout.specs[index], views[index])


def tensor_of(spec: TensorSpec, view: memoryview) -> Tensor:
    """One tensor of a message, where it lies. Received, it is not to be written to."""
    return torch.frombuffer(view, dtype=_TORCH[spec.dtype]).reshape(spec.shape)
