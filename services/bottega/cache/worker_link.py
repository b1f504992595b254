"""Links of workers: questions about what pictures may start from, and recordings of others.

The receiving thread answers questions and takes recordings. A worker that does not read its answers gets only refusals.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from bottega.cache.config import CacheLinksConfig
from bottega.cache.latent import RecordedLatent, StoreAnswer
from bottega.cache.store.store import LatentStore
from bottega.errors import BottegaError, NoSharedMemory, TooLarge
from bottega.latents import messages
from bottega.latents.messages import CacheMessage, CacheMessageKind
from bottega.rpc.link_service import link_endpoints, tcp_endpoint
from bottega.transport import (
    Connection,
    Incoming,
    Layout,
    Limits,
    Link,
    LinkHandler,
    LinkServer,
    LinkServerSettings,
    default_socket_path,
    kind_of,
)
from bottega.v1.cache_pb2 import CACHE_OUTCOME_UNAVAILABLE, CacheAnswer, CacheQuestion, CacheRecording, CacheStarts

# Maximum number of unsent answers of a worker. It has some tens of jobs and asks once for each; an answer has up to
# eight latents.
_MOST_UNSENT = 64
# A recording has five latents: in float32 at 4096x4096 pixels they take 20 MiB.
_LIMITS = Limits(slots=4, slot_bytes=32 << 20)
# Tensors of a message before its latents: kind, header, embedding, and the picture of a recording.
_EMBEDDING, _PICTURE, _LATENTS = 2, 3, 4
_NOTHING = CacheAnswer(outcome=CACHE_OUTCOME_UNAVAILABLE)


class CacheWorkerLink(LinkHandler):
    """The link of one worker.

    Args:
        store: The link's thread calls its `ask`, `record` and `count_starts`.
    """

    def __init__(self, connection: Connection, *, store: LatentStore) -> None:
        self._connection = connection
        self._store = store
        self._unsent = 0
        self._counting = threading.Lock()

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        """Process a question, a recording, or a report of used latents; all are read from copies."""
        layout = incoming.layout
        with incoming:
            kind = CacheMessageKind(kind_of(layout))
            if kind is CacheMessageKind.ANSWER:
                raise ValueError("a worker sends no answer")
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
        """Do nothing: no thread waits for this link."""

    def _answer(self, layout: Layout, views: Sequence[memoryview]) -> None:
        number, question = messages.read_header(layout, views, CacheQuestion)
        with self._counting:
            self._unsent += 1
            busy = self._unsent > _MOST_UNSENT
        answer = _refusal(number) if busy else _message(number, self._store.ask(question, _embedding(views)))
        if not self._connection.post(lambda link: self._send(link, number, answer)):
            self._sent()

    def _send(self, link: Link, number: int, answer: CacheMessage) -> None:
        try:
            self._connection.send_now(link, answer)
        except (NoSharedMemory, TooLarge):  # nothing was sent, and the link lives
            self._connection.send_now(link, _refusal(number))
        finally:
            self._sent()

    def _sent(self) -> None:
        with self._counting:
            self._unsent -= 1

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


class CacheLinks(LinkServer[CacheWorkerLink]):
    """The server of workers' links. Raises ConfigError if an address cannot be bound."""

    def __init__(self, config: CacheLinksConfig, *, store: LatentStore) -> None:
        self._store = store
        super().__init__(
            link_endpoints(config.listen, _socket(config.socket), seal=config.seal),
            service="the approximate cache",
            settings=LinkServerSettings(limits=_LIMITS),
            advertised=tcp_endpoint(config.advertised),
        )

    def new_handler(self, connection: Connection) -> CacheWorkerLink:
        """Return the handler of one worker's link."""
        return CacheWorkerLink(connection, store=self._store)


def _embedding(views: Sequence[memoryview]) -> np.ndarray:
    return np.frombuffer(bytes(views[_EMBEDDING]), dtype=np.float32)


def _message(number: int, answer: StoreAnswer) -> CacheMessage:
    latents = [
        (messages.latent_spec(index, latent.dtype, latent.shape), memoryview(latent.data))
        for index, latent in enumerate(answer.latents)
    ]
    return messages.answer_message(number, answer.header, latents)


def _refusal(number: int) -> CacheMessage:
    return messages.answer_message(number, _NOTHING, ())


def _socket(configured: str | None) -> str | Path | None:
    return default_socket_path("cache") if configured == "" else configured
