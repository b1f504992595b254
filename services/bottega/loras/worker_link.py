"""Workers' connections: they receive requests for LoRAs and send LoRAs, oldest first; see `bottega.rpc.file_links`."""

from __future__ import annotations

import os
from concurrent.futures import Future

from bottega import kinds
from bottega.addons.loras.wire import messages
from bottega.addons.loras.wire.canonical import CanonicalLora, parse
from bottega.addons.loras.wire.messages import LoraMessageKind
from bottega.caching.tiered_cache import TieredCache
from bottega.caching.tiers import CacheLease
from bottega.errors import BottegaError, DataLoss
from bottega.rpc.file_links import FileLimits, FileLinkHandler, FileRequest, FileTransfer
from bottega.rpc.link_service import StoreLinks
from bottega.rpc.server_config import LimitedLinksConfig
from bottega.safetensors_header import LENGTH_BYTES, HeaderError, header_bytes
from bottega.transport import (
    Connection,
    Deadline,
    Incoming,
    Limits,
    Link,
    LinkServerSettings,
    WholeMessage,
    kind_of,
    pack_number,
    read_number,
)
from bottega.v1.trace_pb2 import StoreTimes

# 60 s: a worker that has not read a message by then is lost.
_SEND_S = 60.0
# Upper bound on a worker's requests: it runs some tens of jobs with at most eight LoRAs each.
_MOST_OPEN = 512
_FILE_LIMITS = FileLimits(piece_bytes=4 << 20, slots=messages.SLOTS, most_open=_MOST_OPEN, most_at_once=_MOST_OPEN)
# Workers' messages are short. The workers' own limits bound what they receive.
_LIMITS = Limits(slots=8, slot_bytes=1 << 20)


class LoraWorkerLink(FileLinkHandler[FileRequest]):
    """The store's side of one worker's connection.

    Args:
        bytes_per_s: Upper bound on the send rate, also within a host; 0 means none.
    """

    def __init__(self, connection: Connection, *, cache: TieredCache, bytes_per_s: int) -> None:
        super().__init__(connection, what="LoRAs", bytes_per_s=bytes_per_s, limits=_FILE_LIMITS)
        self._cache = cache

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """Handle a worker's request for a LoRA, or its cancellation."""
        layout = incoming.layout
        with incoming:
            views = connection.wait_all(incoming)
            match LoraMessageKind(kind_of(layout)):
                case LoraMessageKind.FETCH:
                    number, digest = messages.read_fetch(layout, views)
                    self._fetch(FileRequest(number=number, digest=digest))
                case LoraMessageKind.CANCEL:
                    self._cancel(read_number(layout, views))
                case kind:
                    raise ValueError(f"a worker must not send a {kind} message")

    def _borrow(self, request: FileRequest) -> Future[CacheLease]:
        return self._cache.borrow(request.digest)

    def _return(self, lease: CacheLease) -> None:
        self._cache.give_back(lease)

    def _transfer(self, request: FileRequest, lease: CacheLease) -> FileTransfer:
        return LoraTransfer(request, lease)

    def _whole_message(self, number: int, times: StoreTimes) -> WholeMessage:
        return messages.whole_message(number, times)

    def _refused_message(self, number: int, error: bytes) -> WholeMessage:
        return messages.refused_message(number, error)


class LoraLinks(StoreLinks[LoraWorkerLink]):
    """The server of all workers' connections. Raises ConfigError if an address cannot be bound."""

    def __init__(self, config: LimitedLinksConfig, *, cache: TieredCache) -> None:
        self._cache = cache
        self._bytes_per_s = config.bytes_per_s
        super().__init__(config, kind=kinds.LORAS, what="the LoRA store", settings=LinkServerSettings(limits=_LIMITS))

    def new_handler(self, connection: Connection) -> LoraWorkerLink:
        """Return the handler of one worker's connection."""
        return LoraWorkerLink(connection, cache=self._cache, bytes_per_s=self._bytes_per_s)


class LoraTransfer(FileTransfer):
    """A LoRA that is being sent in answer to one request, in several messages. Raises DataLoss for a damaged file."""

    def __init__(self, request: FileRequest, lease: CacheLease) -> None:
        super().__init__(request, lease)
        self._request = request
        self._lora = _header(lease)
        self._sent_bytes = 0

    @property
    def done(self) -> bool:
        """Whether all messages have been sent."""
        return self._sent_bytes == self._lora.denoiser_bytes

    def send_head(self, link: Link) -> int:
        """Send the header and the weights of the text encoders, for which the encoding of prompts waits."""
        lora = self._lora
        layout = messages.lora_layout(lora)
        with link.start_message(layout, Deadline.after(_SEND_S)) as outgoing:
            outgoing.views[0][:] = pack_number(self.number)
            outgoing.views[messages.DENOISER_BYTES][:] = pack_number(lora.denoiser_bytes)
            outgoing.views[messages.TIMES][:] = messages.pack_times(self._request.times(self.lease))
            self._fill(outgoing.views[messages.HEADER], 0)
            text = outgoing.views[messages.TEXT]
            text[lora.text_bytes :] = bytes(len(text) - lora.text_bytes)  # one byte if there is no such section
            self._fill(text[: lora.text_bytes], lora.header_bytes)
            outgoing.finish()
        return layout.size_bytes

    def send_piece(self, link: Link, max_bytes: int) -> int:
        """Send the next piece of the denoising network's weights."""
        lora = self._lora
        size_bytes = min(max_bytes, lora.denoiser_bytes - self._sent_bytes)
        with link.start_message(messages.piece_layout(size_bytes), Deadline.after(_SEND_S)) as outgoing:
            outgoing.views[0][:] = pack_number(self.number)
            self._fill(outgoing.views[messages.PIECE], lora.header_bytes + lora.text_bytes + self._sent_bytes)
            outgoing.finish()
        self._sent_bytes += size_bytes
        return size_bytes


def _header(lease: CacheLease) -> CanonicalLora:
    try:
        size = header_bytes(os.pread(lease.descriptor, LENGTH_BYTES, 0))
        return parse(os.pread(lease.descriptor, size, 0), file_bytes=lease.size_bytes)
    except (BottegaError, HeaderError) as error:
        raise DataLoss(f"the LoRA's file is damaged: {error}") from error
