"""An approximate cache at the end of real links whose every answer is the test's."""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass

from bottega.addons.cache import wire
from bottega.addons.cache.wire import CacheMessage, CacheMessageKind
from bottega.errors import BottegaError
from bottega.transport import (
    Connection,
    Endpoints,
    Incoming,
    Layout,
    Limits,
    LinkHandler,
    LinkServer,
    LinkServerSettings,
    kind_of,
)
from bottega.v1.cache_pb2 import CacheQuestion, CacheRecording, CacheStarts
from bottega.v1.fleet_pb2 import ServiceAddress

Reply = Callable[[int, CacheQuestion], CacheMessage | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A recording that came. tensors: after its header, with their layout."""

    header: CacheRecording
    layout: Layout
    tensors: tuple[bytes, ...]


class _Link(LinkHandler):
    def __init__(self, cache: ScriptedCache, connection: Connection) -> None:
        self.connection = connection
        self._cache = cache

    def on_message(self, connection: Connection, incoming: Incoming) -> None:
        layout = incoming.layout
        with incoming:
            views = connection.wait_all(incoming)
            if kind_of(layout) == CacheMessageKind.STARTS:
                self._cache.starts.put(wire.read_header(layout, views, CacheStarts)[1])
                return
            wire.check_embedding(layout)
            if kind_of(layout) == CacheMessageKind.QUESTION:
                number, question = wire.read_header(layout, views, CacheQuestion)
                self._cache.questions.put(question)
                reply = self._cache.reply(number, question)
                if reply is not None:
                    connection.send(reply)
                return
            _, header = wire.read_header(layout, views, CacheRecording)
            wire.check_picture(layout)
            wire.check_latents(layout, 4, len(header.steps))
            recorded = Recorded(header=header, layout=layout, tensors=tuple(bytes(view) for view in views[2:]))
            self._cache.recordings.put(recorded)

    def on_end(self, cause: BottegaError) -> None:
        """Nothing is left of it."""


class ScriptedCache(LinkServer[_Link]):
    """reply: to each question; None says nothing."""

    def __init__(self, name: str, reply: Reply) -> None:
        self.name = name
        self.reply = reply
        self.questions: queue.SimpleQueue[CacheQuestion] = queue.SimpleQueue()
        self.recordings: queue.SimpleQueue[Recorded] = queue.SimpleQueue()
        self.starts: queue.SimpleQueue[CacheStarts] = queue.SimpleQueue()
        super().__init__(
            Endpoints(tcp=("127.0.0.1", 0)),
            service=name,
            settings=LinkServerSettings(limits=Limits(slots=4, slot_bytes=8 << 20)),
        )

    @property
    def address(self) -> ServiceAddress:
        """As the fleet tells of it."""
        return ServiceAddress(name=self.name, address=self.name)

    def say(self, message: CacheMessage) -> None:
        (link,) = self.handlers
        link.connection.send(message)

    def new_handler(self, connection: Connection) -> _Link:
        return _Link(self, connection)
