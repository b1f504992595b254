"""The transfer of one LoRA's bytes to a worker: first the part that prompts wait for, then the rest in pieces.

Other messages may be sent between the pieces. The file is read straight into the link's slots.
"""

from __future__ import annotations

import os

from bottega.caching import CacheLease
from bottega.errors import BottegaError, DataLoss, InternalError
from bottega.lora import messages
from bottega.lora.canonical import CanonicalLora, parse
from bottega.safetensors_header import LENGTH_BYTES, HeaderError, header_bytes
from bottega.transport import Deadline, Link, PieceSize, RateLimiter, pack_number

# 60 s: a worker that has not received a message by then is lost.
_SEND_S = 60.0
MAX_PIECE_BYTES = 4 << 20


class LoraTransfer:
    """The response to one fetch, in messages.

    Raises DataLoss for a damaged file. Methods raise InternalError if the file has become shorter, and the errors of
    sending.

    Args:
        number: Number of the fetch.
        lease: The LoRA in the cache.
    """

    def __init__(self, number: int, lease: CacheLease) -> None:
        self.number = number
        self.lease = lease
        self._lora = _header(lease)
        self._sent_bytes = 0
        self._piece_size = PieceSize(slots=messages.SLOTS, most_bytes=MAX_PIECE_BYTES)

    @property
    def done(self) -> bool:
        """Whether all pieces have been sent. Call it after `send_head`."""
        return self._sent_bytes == self._lora.unet_bytes

    def send_head(self, link: Link, pace: RateLimiter) -> None:
        """Send the header and the text encoders' section."""
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
        """Send the next piece of the UNet's section, of a size that the link's speed determines."""
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
        """Read bytes of the file into a tensor of a slot."""
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
