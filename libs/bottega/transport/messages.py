"""What messages of links have in common: a kind, which is the name of the first tensor, and numbers; and pacing.

bottega.device_links.tensor_messages builds messages of torch tensors. Large transfers are sent in pieces that keep to a
rate and let other messages pass in between.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from bottega.transport.channel.backend import Part, SentBuffer, in_host_memory
from bottega.transport.layout import DType, Layout, TensorSpec

# Target duration of a piece: other messages wait for the pieces that are under way.
_PIECE_S = 0.01
_FIRST_BYTES, _LEAST_BYTES = 64 << 10, 4 << 10
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
    """Return the number with which a message begins. Raises ValueError if it begins with something else."""
    spec = layout.specs[0]
    if (spec.dtype, spec.shape) != (DType.INT64, (1,)):
        raise ValueError(f"a {spec.name} message does not begin with a number")
    return int.from_bytes(bytes(in_host_memory(parts[0])), "little", signed=True)


class RateLimiter:
    """Limits the bytes that a link sends per second; 0 means no limit.

    Args:
        max_bytes: Upper bound on the bytes of a piece, whatever the rate.
    """

    def __init__(self, bytes_per_s: int, *, max_bytes: int) -> None:
        self._bytes_per_s = bytes_per_s
        self._max_bytes = max_bytes
        self._until = 0.0

    @property
    def wait_s(self) -> float:
        """Seconds until more may be sent."""
        return max(0.0, self._until - time.monotonic())

    @property
    def max_bytes(self) -> int:
        """Upper bound on the bytes of the next piece."""
        if not self._bytes_per_s:
            return self._max_bytes
        return min(self._max_bytes, max(_LEAST_BYTES, int(self._bytes_per_s * _PIECE_S)))

    def spend(self, size_bytes: int) -> None:
        """Record that bytes were sent."""
        if self._bytes_per_s:
            self._until = max(self._until, time.monotonic()) + size_bytes / self._bytes_per_s


class PieceSize:
    """Chooses the size of the next piece: the bytes that the link moves in _PIECE_S, measured on earlier pieces.

    Args:
        slots: Number of messages that the receiver can hold. The time of slots + 1 pieces is measured, because not all
            of them fit into the receiver, so it shows the speed of the link instead of free buffers.
    """

    def __init__(self, *, slots: int, max_bytes: int) -> None:
        self._measured_pieces = slots + 1
        self._max_bytes = max_bytes
        self._bytes = min(_FIRST_BYTES, max_bytes)
        self._pieces = 0
        self._since_s = 0.0

    def next(self) -> int:
        """Return the bytes of the next piece. Call it before each piece."""
        now_s = time.monotonic()
        if self._pieces == self._measured_pieces:
            took_s = (now_s - self._since_s) / self._measured_pieces
            if took_s < _PIECE_S / 2:
                self._bytes = min(2 * self._bytes, self._max_bytes)
            elif took_s > 2 * _PIECE_S:
                self._bytes = max(self._bytes // 2, _LEAST_BYTES)
            self._pieces = 0
        if not self._pieces:
            self._since_s = now_s
        self._pieces += 1
        return self._bytes
