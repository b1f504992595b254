"""Common parts of link messages: a kind, which is the name of their first tensor, numbers, and plain bytes.

bottega.diffusion.tensor_messages makes messages of torch tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bottega.transport.channel.buffers import Part, SentBuffer, in_host_memory
from bottega.transport.layout import DType, Layout, TensorSpec

_NUMBER_BYTES = 8


class WholeMessage(Protocol):
    """A whole message: its layout, and a buffer for each of its tensors."""

    @property
    def layout(self) -> Layout: ...

    @property
    def buffers(self) -> Sequence[SentBuffer]: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BytesMessage:
    """A message of plain bytes."""

    layout: Layout
    buffers: tuple[bytes, ...]


def kind_of(layout: Layout) -> str:
    """Return the kind of a message with this layout."""
    return layout.specs[0].name


def number_message(kind: str, number: int = 0) -> BytesMessage:
    """Return a message that consists of a kind and a number."""
    return BytesMessage(layout=Layout.of(number_spec(kind), headers=1), buffers=(pack_number(number),))


def number_spec(kind: str) -> TensorSpec:
    """Return the first tensor of a message that begins with a number."""
    return TensorSpec(name=kind, dtype=DType.INT64, shape=(1,))


def pack_number(number: int) -> bytes:
    """Return the bytes of the tensor of `number_spec`."""
    return number.to_bytes(_NUMBER_BYTES, "little", signed=True)


def read_number(layout: Layout, parts: Sequence[Part]) -> int:
    """Return the number that a message begins with. Raises ValueError if it begins with something else."""
    spec = layout.specs[0]
    if (spec.dtype, spec.shape) != (DType.INT64, (1,)):
        raise ValueError(f"a {spec.name} message does not begin with a number")
    return int.from_bytes(bytes(in_host_memory(parts[0])), "little", signed=True)
