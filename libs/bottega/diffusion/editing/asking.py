"""What a job has asked a source of recordings, waited for a bounded moment: without an answer all is computed."""

from __future__ import annotations

from concurrent.futures import Future

from bottega.diffusion.engine.store_work import StoreWork


class PendingAnswer:
    """asked: what the source was asked; None once it has answered, or nobody waits for it any more.

    timeout_s: counted from the first time that somebody looks, since_s. waited_s: that somebody has looked in vain.
    work: what a store has done for the answer.
    """

    def __init__(self, asked: Future[StoreWork | None], timeout_s: float) -> None:
        self.asked: Future[StoreWork | None] | None = asked
        self.waited_s = 0.0
        self.work: StoreWork | None = None
        self._timeout_s = timeout_s
        self.since_s: float | None = None

    def ready(self, now_s: float) -> bool:
        """Whether the job may go on."""
        if self.asked is None:
            return True
        self.since_s = now_s if self.since_s is None else self.since_s
        self.waited_s = now_s - self.since_s
        if not self.asked.done() and self.waited_s < self._timeout_s:
            return False
        self.close()
        return True

    def close(self) -> None:
        """Nobody waits for it any more. Harmless the second time."""
        asked, self.asked = self.asked, None
        if asked is not None and not asked.cancel() and asked.done():
            self.work = asked.result()
