"""Connections of workers: questions about latents to start from, and recordings of new pictures.

The receiving thread answers questions and stores recordings. A worker that does not read its answers gets only
refusals.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from bottega import kinds
from bottega.addons.cache.wire import messages
from bottega.addons.cache.wire.messages import CacheMessage, CacheMessageKind
from bottega.cache.latent import RecordedLatent, StoreAnswer
from bottega.cache.store.store import LatentStore
from bottega.errors import BottegaError
from bottega.rpc.server_config import LinksConfig
from bottega.rpc.store_server import StoreLinkHandler, StoreLinks
from bottega.transport import (
    Connection,
    Incoming,
    Layout,
    Limits,
    LinkServerSettings,
    kind_of,
)
from bottega.v1.cache_pb2 import CACHE_OUTCOME_UNAVAILABLE, CacheAnswer, CacheQuestion, CacheRecording, CacheStarts

# Upper bound on a message. The five latents of a recording take 20 MiB in float32 at 4096x4096 pixels.
_LIMITS = Limits(slots=4, slot_bytes=32 << 20)
# Number of tensors of a message before its latents: kind, header, embedding, and the picture of a recording.
_EMBEDDING, _PICTURE, _LATENTS = 2, 3, 4
_NOTHING = CacheAnswer(outcome=CACHE_OUTCOME_UNAVAILABLE)


class CacheWorkerLink(StoreLinkHandler):
    """The connection of one worker.

    Args:
        store: The connection's thread calls its `ask`, `record` and `count_starts`.
    """

    def __init__(self, connection: Connection, *, store: LatentStore) -> None:
        super().__init__(connection)
        self._store = store

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """Process a question, a recording, or a report of used latents. Each is copied before it is read."""
        layout = incoming.layout
        with incoming:
            kind = CacheMessageKind(kind_of(layout))
            if kind is CacheMessageKind.ANSWER:
                raise ValueError("a worker must not send an answer")
            if kind is not CacheMessageKind.STARTS:
                messages.check_embedding(layout)
            views = connection.wait_all(incoming)
            if kind is CacheMessageKind.QUESTION:
                self._answer(layout, views)
            elif kind is CacheMessageKind.RECORDING:
                self._record(layout, views)
            else:
                _, starts = messages.read_header(layout, views, CacheStarts)
                self._store.count_starts(starts)

    def on_end(self, cause: BottegaError) -> None:
        """Return at once, because no thread waits for this connection."""

    def _answer(self, layout: Layout, views: Sequence[memoryview]) -> None:
        number, question = messages.read_header(layout, views, CacheQuestion)
        self._send_answer(
            lambda: _message(number, self._store.ask(question, _embedding(views))),
            refusal=messages.answer_message(number, _NOTHING, ()),
        )

    def _record(self, layout: Layout, views: Sequence[memoryview]) -> None:
        _, recording = messages.read_header(layout, views, CacheRecording)
        messages.check_picture(layout)
        messages.check_latents(layout, _LATENTS, len(recording.steps))
        picture = np.frombuffer(bytes(views[_PICTURE]), dtype=np.uint8).reshape(layout.specs[_PICTURE].shape)
        latents = [
            RecordedLatent(dtype=spec.dtype, shape=spec.shape, data=view)
            for spec, view in zip(layout.specs[_LATENTS:], views[_LATENTS:], strict=True)
        ]
        self._store.record(recording, embedding=_embedding(views), picture=picture, latents=latents)


class CacheLinks(StoreLinks[CacheWorkerLink]):
    """The server of workers' connections. Raises ConfigError if an address cannot be bound."""

    def __init__(self, config: LinksConfig, *, store: LatentStore) -> None:
        self._store = store
        super().__init__(
            config, kind=kinds.CACHE, what="the approximate cache", settings=LinkServerSettings(limits=_LIMITS)
        )

    def new_handler(self, connection: Connection) -> CacheWorkerLink:
        """Return the handler of one worker's connection."""
        return CacheWorkerLink(connection, store=self._store)


def _embedding(views: Sequence[memoryview]) -> np.ndarray:
    return np.frombuffer(bytes(views[_EMBEDDING]), dtype=np.float32)


def _message(number: int, answer: StoreAnswer) -> CacheMessage:
    latents = [
        (messages.latent_spec(index, latent.dtype, latent.shape), memoryview(latent.data))
        for index, latent in enumerate(answer.latents)
    ]
    return messages.answer_message(number, answer.header, latents)
