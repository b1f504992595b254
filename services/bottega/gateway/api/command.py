"""What a caller asks for, as it came. Knows no job."""

from __future__ import annotations

from dataclasses import dataclass

from bottega.v1.generation_pb2 import GenerationSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateCommand:
    """What a caller asks for.

    spec: as it came. deadline_s: as it came: seconds from now after which nobody wants it; None is without bound.
    caller_s: seconds until its caller goes, and the job with it; None for one that goes on without. peer: its host.
    preview: whether previews are wanted. log_id: what the log calls the request where it has no request_id.
    """

    spec: GenerationSpec
    request_id: str = ""
    deadline_s: float | None = None
    caller_s: float | None = None
    peer: str = ""
    preview: bool = False
    log_id: str = ""

    def deadline(self, now: float) -> float | None:
        """The moment after which nobody wants it, on the clock that says `now`."""
        return min((now + s for s in (self.deadline_s, self.caller_s) if s is not None), default=None)
