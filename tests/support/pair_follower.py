"""The other worker of a pair in this process: an engine in a thread of its own, at the end of a real link."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from types import TracebackType

from bottega.engine.engine import Engine
from bottega.errors import BottegaError, Unavailable
from bottega.transport import Endpoints, LinkCounters, ServiceOffer
from bottega.worker.peer import Follower, Leader, PeerLinkSettings
from tests.support.offers import OffersAtOnce
from tests.support.waiting import wait_until

LINK_TIMEOUT_S = 10.0
SILENCE_S = 2.0


class FollowerThread(OffersAtOnce):
    """Runs what is lent to `engine`, as its process would, until the block ends. busy: as if it had jobs of its own.

    pause: called before each forward. forwards: how many there were.
    """

    name = "follower"

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self.engine = engine
        self.busy = False
        self.pause: Callable[[], None] = lambda: None
        self.forwards = 0
        self.refusal: BottegaError | None = None
        self._posts: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._following: Follower | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> FollowerThread:
        self.come()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.go()
        self._posts.put(None)
        self._thread.join(LINK_TIMEOUT_S)

    @property
    def linked(self) -> bool:
        return self._following is not None and self._following.linked

    def come(self) -> None:
        self._following = Follower(
            Endpoints(tcp=("127.0.0.1", 0)),
            remote_jobs=self.engine.remote_jobs,
            counters=LinkCounters(),
            post=self._posts.put,
        )

    def go(self) -> None:
        """Is as good as dead: its link ends, and it takes no other one."""
        following, self._following = self._following, None
        if following is not None:
            following.close()

    def answer(self, address: str, link_id: str) -> ServiceOffer:
        if self.refusal is not None:
            raise self.refusal
        if self._following is None:
            raise Unavailable("the follower is away")
        return ServiceOffer(offer=self._following.offer("leader", link_id, caller=""), service=self.name)

    def _run(self) -> None:
        while True:
            try:
                post = self._posts.get(timeout=0.01)
            except queue.Empty:
                pass
            else:
                if post is None:
                    return
                self.pause()
                self.forwards += 1
                post()
            if self._following is not None:
                self._following.report_busy(busy=self.busy)
                self._following.report_jobs()


def led(follower: FollowerThread) -> Leader:
    """The follower as its leader sees it, linked. Stop it."""
    settings = PeerLinkSettings(silence_s=SILENCE_S)
    leader = Leader("follower:1", terms={}, offers=follower, counters=LinkCounters(), settings=settings)
    leader.start()
    wait_until(lambda: leader.free, "the pair to be linked")
    return leader
