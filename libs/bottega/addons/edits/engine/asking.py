"""A job's query to the source of recordings, with a time-out after which the job computes everything."""

from __future__ import annotations

from concurrent.futures import Future

from bottega.engine.store_work import StoreWork


class PendingAnswer:
    """A response for which a job waits at most `timeout_s`, counted from the first call of `ready`."""

    def __init__(self, asked: Future[StoreWork | None], timeout_s: float) -> None:
        self.asked: Future[StoreWork | None] | None = asked
        """The pending response; None once it has arrived or the job has stopped waiting."""
        self.waited_s = 0.0
        """Seconds from the first call of `ready` to the last."""
        self.work: StoreWork | None = None
        """Time that a store spent on the response; None if no store did."""
        self._timeout_s = timeout_s
        self.since_s: float | None = None
        """Time of the first call of `ready`; None before it."""

    def ready(self, now_s: float) -> bool:
        """Return whether the job may go on: the response has arrived, or the time-out has passed."""
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
