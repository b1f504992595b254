"""The interface of an add-on: what a job waits for before a step, what it decides, and what the provenance says of it.

The engine has a list of add-ons and names none of them. Each gives a job its own part, when the job needs any:

    submitted      EngineAddOn.open            asks for what takes time; refuses what can never be had
    encoding       JobAddOn.prompt_ready       whether the prompt can be read
                   EngineAddOn.before_prompt   makes the text encoders ready for this job
    encoded        JobAddOn.attach             the job's requests exist: gives them what they need
    before a turn  JobAddOn.update             takes in what has come
                   JobAddOn.blocks             which requests cannot make their next step
                   JobAddOn.decision           what a later attempt has to repeat
    each turn      EngineAddOn.before_group, after_forward or after_masked_forward
                   JobAddOn.after_forward, after_step
    decoded        JobAddOn.after_decode, keep
    ended          JobAddOn.close, report, finish

ControlNets (bottega.diffusion.controlnets.addon), LoRAs (bottega.diffusion.loras.addon) and cached latents
(bottega.diffusion.cached_starts.addon) are some of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch import Tensor

from bottega.diffusion.rows import Embeds, Half, Row
from bottega.errors import Unavailable
from bottega.v1.activations_pb2 import BlockProfile, ListTemplatesResponse
from bottega.v1.fleet_pb2 import ServiceAddress
from bottega.v1.hosted_pb2 import Hosted

if TYPE_CHECKING:
    from bottega.diffusion.engine.encode import Conditions
    from bottega.diffusion.engine.events import EngineRecord
    from bottega.diffusion.engine.forward import Prediction, RowWeights
    from bottega.diffusion.engine.job import EngineJob, EngineOrder
    from bottega.diffusion.engine.request import Request
    from bottega.diffusion.engine.residuals import ResidualProvider
    from bottega.diffusion.engine.spans import TracedSpan
    from bottega.diffusion.parallel.offload import OffloadedPart


class JobAddOn:
    """What one job has of an add-on. What is not overridden does nothing."""

    @property
    def waiting(self) -> bool:
        """Whether something is still to come that the job may have to wait for."""
        return False

    @property
    def resumable(self) -> bool:
        """Whether the job may go on from a checkpoint."""
        return True

    @property
    def changes_prompt(self) -> bool:
        """Whether the prompt was encoded as without it it would not have been."""
        return False

    def prompt_ready(self, now_s: float) -> bool:
        """Whether the prompt can be encoded. Raises the BottegaError for which it never can."""
        return True

    def attach(self, job: EngineJob, conditions: Conditions, now_s: float) -> None:
        """Take over what is needed of the job, whose prompt is encoded and whose requests are made.

        Args:
            job: The job.
            conditions: Those of its first image. Only a job of several prompts has others; add-ons whose part depends
                on the prompt are not open to it (rules.check_prompts).
            now_s: Monotonic seconds.

        Raises:
            BottegaError: The job can never begin.
        """

    def update(self, now_s: float) -> None:
        """Takes in what has come, and gives back what is not needed any more.

        Raises the BottegaError for which the job can never go on.
        """

    def blocks(self, request: Request) -> bool:
        """Whether the request, which is not done, cannot make its next step now."""
        return False

    @property
    def decision(self) -> bytes | None:
        """What a later attempt has to repeat, to draw the same picture, as a message of the add-on's own.

        None as long as it has decided nothing. It is in EngineJob.pinned of later attempts.
        """
        return None

    def after_forward(self, prediction: Prediction) -> float:
        """A step of the job ran in this forward. Returns the seconds of it that the job waited for the add-on."""
        return 0.0

    def after_step(self, request: Request) -> None:
        """A request of the job has made a step."""

    def after_decode(self, index: int, pixels: Tensor) -> None:
        """An image of the job is finished. pixels: uint8 [height, width, 3], not to be written to."""

    def keep(self, index: int) -> bytes | None:
        """What is kept of an image that was handed out, with the job; None for nothing."""
        return None

    def offload(self) -> OffloadedPart | None:
        """What the add-on of the other worker of a pair has to know to compute rows of this job; None for nothing."""
        return None

    @property
    def offloadable(self) -> bool:
        """Whether the other worker of a pair may compute rows of the job."""
        return True

    def active_in(self, row: Row) -> int:
        """What of the offloaded part is active in a row, for RemoteAddOn.activate; from 0 to 2^31."""
        return 0

    def spans(self) -> Iterable[TracedSpan]:
        """What of it took how long, for the trace of a job that ends."""
        return ()

    def report(self, record: EngineRecord) -> EngineRecord:
        """What happened to the job, with this add-on's part in it."""
        return record

    def finish(self, record: EngineRecord) -> None:
        """All images have been handed out, and the job is told of as finished. record: with every part's report."""

    def close(self) -> None:
        """The job is over, or was never begun. Harmless the second time."""


class RemoteAddOn(Protocol):
    """What this engine has of an add-on for a job of the other worker of its pair, whose rows it computes."""

    def ready(self, now_s: float) -> bool:
        """Whether rows can be computed. Raises the BottegaError for which they never can be."""
        ...

    def activate(self, row: Row, active: int) -> Row:
        """The row, with what is active in it. Raises ValueError where there is no such thing."""
        ...

    def close(self) -> None:
        """The job is over."""
        ...


class EngineAddOn:
    """One kind of thing that jobs may need beside the model. What is not overridden does nothing.

    kind: under which orders and decisions have what is its own: that of the services that it uses.
    """

    kind: ClassVar[str]

    @property
    def row_weights(self) -> RowWeights | None:
        """What forwards enter with the LoRAs of their rows; one add-on has some at most."""
        return None

    @property
    def residuals(self) -> ResidualProvider | None:
        """Where forwards get residuals for the controls of their rows; one add-on has some at most."""
        return None

    def set_services(self, services: Sequence[ServiceAddress]) -> None:
        """The services of its kind that are there now, the best first."""

    def open(self, order: EngineOrder) -> JobAddOn | None:
        """What a submitted job has of it; None where it needs nothing. Raises BottegaError where it can never be."""
        return None

    def open_remote(self, part: OffloadedPart, halves: Mapping[Half, Embeds]) -> RemoteAddOn:
        """What a job of the other worker of the pair has of it. halves: the job's conditions.

        Raises BottegaError where it can never be, ValueError for a part that breaks a rule.
        """
        raise Unavailable(f"no row with {self.kind} is computed for another worker")

    def before_prompt(self, part: JobAddOn | None) -> None:
        """The prompt of a job with this part, or with none, is encoded next. Raises BottegaError where it cannot be."""

    def wait(self, parts: Sequence[JobAddOn], timeout_s: float) -> None:
        """Returns when more has come of what these wait for, or after the timeout. parts: some that are waiting."""
        time.sleep(timeout_s)

    def before_group(self, requests: Sequence[Request], step_s: float) -> bool:
        """A group is chosen next. Whether a request shares groups with others than before: its key has changed.

        requests: all that may be in it. step_s: seconds of a step of all of them, 0 where that is not known.
        """
        return False

    def after_forward(self, rows: Sequence[Row], seconds: float, plain_s: float | None) -> bool:
        """Learns what a forward of these rows took. Whether one of as many plain rows takes as long.

        plain_s: what that is known to take.
        """
        return True

    def after_masked_forward(self, rows: Sequence[Row], seconds: float) -> None:
        """Learns what a forward of these rows took, of which some are computed in part, or recorded."""

    def warm_up(self, row: Row, predict: Callable[[Sequence[Row]], object]) -> None:
        """The engine is about to serve. row: of the model's usual size. predict: runs a forward of such rows."""

    # What operators ask of it.

    def list_templates(self) -> ListTemplatesResponse:
        """The images of which it has recorded activations for edits."""
        return ListTemplatesResponse()

    def drop_templates(self, prefix: str) -> int:
        """Forgets those whose recordings' ids begin so, but for those in use. Returns how many."""
        return 0

    def profile_blocks(self, width: int, height: int, beat: Callable[[], None]) -> BlockProfile | None:
        """Measures what the network's blocks take for edits of pictures of this size; None where that is not its own.

        beat: see Heartbeat. Raises BottegaError where it cannot be measured.
        """
        return None

    # What the worker reports of it.

    def hosted(self) -> Sequence[Hosted]:
        """What this process has at hand itself."""
        return ()

    @property
    def switch_s(self) -> float | None:
        """Seconds that it takes to apply other ones to all that is computed; None where nothing is."""
        return None

    @property
    def open_links(self) -> int:
        """How many links to services there are."""
        return 0

    @property
    def counts(self) -> Mapping[str, int]:
        """How often what has happened since the start, by its name in snake case."""
        return {}

    def stop(self) -> None:
        """The process ends: closes links. From any thread."""


Parts = Mapping[EngineAddOn, JobAddOn]
"""A job's parts, by add-on; of those that it needs."""


def open_parts(addons: Sequence[EngineAddOn], order: EngineOrder) -> Parts:
    """The parts of a job that is submitted. Raises the BottegaError of the first add-on that cannot serve it."""
    parts: dict[EngineAddOn, JobAddOn] = {}
    try:
        for addon in addons:
            part = addon.open(order)
            if part is not None:
                parts[addon] = part
    except Exception:
        close_parts(parts)
        raise
    return parts


def close_parts(parts: Parts) -> None:
    """Closes all of them."""
    for part in parts.values():
        part.close()
