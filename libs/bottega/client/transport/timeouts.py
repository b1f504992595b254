"""What is said when a caller's time runs out: how far the job came, and how its pictures can still be had."""

from __future__ import annotations

from dataclasses import dataclass

from bottega.client.transport.retry import CallTimeout
from bottega.client.types.events import Event, Progress
from bottega.errors import DeadlinePassed

_GOES_ON = "The job goes on: client.job({job_id!r}).stream() follows it, and .result() has its pictures."
_ENDS = "Allow more time (timeout_s), or submit() a job that outlives the call and fetch its pictures later."


@dataclass(slots=True, kw_only=True)
class LastProgress:
    """How far a job came, as its caller was told; no job_id when nothing was told."""

    job_id: str = ""
    steps_done: int = 0
    steps_total: int = 0

    def update(self, event: Event) -> None:
        """Update the job's id and its step counts from an event."""
        self.job_id = getattr(event, "job_id", self.job_id)
        if isinstance(event, Progress):
            self.steps_done, self.steps_total = event.steps_done, event.steps_total


def timeout_error(error: DeadlinePassed, last: LastProgress, *, goes_on: bool) -> DeadlinePassed:
    """The error with what is known of the job; what to do stands in its notes.

    goes_on: the job outlives its caller.
    """
    if not last.job_id:
        return error
    steps = f"{last.steps_done} of {last.steps_total} steps were done" if last.steps_total else "no step was done"
    state = "goes on" if goes_on else "is cancelled"
    error = CallTimeout(
        f"{error.message}: {steps}, and job {last.job_id} {state}",
        metadata={**error.metadata, "job_id": last.job_id, "steps_done": str(last.steps_done)},
    )
    error.add_note(_GOES_ON.format(job_id=last.job_id) if goes_on else _ENDS)
    return error
