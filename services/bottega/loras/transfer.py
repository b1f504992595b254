"""One LoRA on its way to a worker in bytes: first what a prompt waits for, then the rest in pieces, between which
others may speak. Reads the file straight into the link's slots.
"""

from __future__ import annotations

import os

from bottega.caching import CacheLease
from bottega.errors import BottegaError, DataLoss, InternalError
from bottega.lora import messages
from bottega.lora.canonical import CanonicalLora, parse
from bottega.safetensors_header import LENGTH_BYTES, HeaderError, header_bytes
from bottega.transport import Deadline, Link, PieceSize, RateLimiter, pack_number

# A message that is not taken in this time never will be.
_SEND_S = 60.0
MOST_BYTES = 4 << 20
"""Of a piece."""


class LoraTransfer:
    """A lease that is being sent as `number`. Raises DataLoss where the file is no LoRA.

    Its calls raise InternalError where the file has become shorter, and what sending does.
    """

    def __init__(self, number: int, lease: CacheLease) -> None:
        self.number = number
        self.lease = lease
        self._lora = _header(lease)
        self._sent_bytes = 0
        self._piece_size = PieceSize(slots=messages.SLOTS, most_bytes=MOST_BYTES)

    @property
    def done(self) -> bool:
        """Whether all of it was sent, the head being."""
        return self._sent_bytes == self._lora.unet_bytes

    def send_head(self, link: Link, pace: RateLimiter) -> None:
        """The header and the text encoders' section."""
        lora = self._lora
        layout = messages.lora_layout(lora)
        with link.start_message(layout, Deadline.after(_SEND_S)) as outgoing:
            outgoing.views[0][:] = pack_number(self.number)
            outgoing.views[messages.UNET_BYTES][:] = pack_number(lora.unet_bytes)
            outgoing.views[messages.TIMES][:] = messages.pack_times(self.lease.times_until_now())
            self._fill(outgoing.views[messages.HEADER], 0, lora.header_bytes)
            self._fill(outgoing.views[messages.TEXT], lora.header_bytes, lora.text_bytes)
            outgoing.finish()
        pace.spend(layout.size_bytes)

    def send_piece(self, link: Link, pace: RateLimiter) -> None:
        """The next piece of the UNet's section, as long as the link carries in a moment."""
        lora = self._lora
        size_bytes = min(self._piece_size.next(), pace.most_bytes, lora.unet_bytes - self._sent_bytes)
        with link.start_message(messages.piece_layout(size_bytes), Deadline.after(_SEND_S)) as outgoing:
            outgoing.views[0][:] = pack_number(self.number)
            place = lora.header_bytes + lora.text_bytes + self._sent_bytes
            self._fill(outgoing.views[messages.PIECE], place, size_bytes)
            outgoing.finish()
        self._sent_bytes += size_bytes
        pace.spend(size_bytes)

    def _fill(self, view: memoryview, place: int, size_bytes: int) -> None:
        """Reads bytes of the file into a tensor of a slot."""
        if not size_bytes:
            view[:] = bytes(len(view))
        done = 0
        while done < size_bytes:
            got = os.preadv(self.lease.descriptor, [view[done:size_bytes]], place + done)
            if not got:
                raise InternalError("the LoRA's file has become shorter while it was sent")
            done += got


def _header(lease: CacheLease) -> CanonicalLora:
    try:
        size = header_bytes(os.pread(lease.descriptor, LENGTH_BYTES, 0))
        return parse(os.pread(lease.descriptor, size, 0), file_bytes=lease.size_bytes)
    except (BottegaError, HeaderError) as error:
        raise DataLoss(f"the LoRA's file is damaged: {error}") from error
