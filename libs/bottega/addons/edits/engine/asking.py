"""A job's query to its source of recordings. If the answer is late, the job computes everything."""

from __future__ import annotations

from concurrent.futures import Future

from bottega.engine.store_work import StoreWork


class PendingAnswer:
    """A source's answer that a job waits for, for `timeout_s` from the first call of `ready`."""

    def __init__(self, asked: Future[StoreWork | None], timeout_s: float) -> None:
        self.asked: Future[StoreWork | None] | None = asked
        """The pending answer; None once it has come or the job has stopped waiting."""
        self.waited_s = 0.0
        """Seconds from the first call of `ready` to the last."""
        self.work: StoreWork | None = None
        """The work that a store did for the answer."""
        self._timeout_s = timeout_s
        self.since_s: float | None = None
        """The time of the first call of `ready`."""

    def ready(self, now_s: float) -> bool:
        """Return whether the job may go on: the answer has come, or the timeout has passed."""
        if self.asked is None:
            return True
        self.since_s = now_s if self.since_s is None else self.since_s
        self.waited_s = now_s - self.since_s
        if not self.asked.done() and self.waited_s < self._timeout_s:
            return False
        self.close()
        return True

    def close(self) -> None:
        """Stop waiting. Later calls do nothing."""
        asked, self.asked = self.asked, None
        if asked is not None and not asked.cancel() and asked.done():
            self.work = asked.result()
