"""The interface between the engine and its add-ons, such as ControlNets, LoRAs, cached latents and edits.

The engine has a list of add-ons and names none of them. An add-on gives each job that needs it a part:

    submitted      EngineAddOn.open            starts loading data; refuses jobs that can never be served
    encoding       JobAddOn.prompt_ready       whether the prompt can be encoded
                   EngineAddOn.before_prompt   prepares the text encoders for the job
    encoded        JobAddOn.attach             gives the job's requests what they need
    before a turn  JobAddOn.update             takes what has arrived
                   JobAddOn.blocks             whether a request must wait before its next step
                   JobAddOn.decision           a choice that later attempts have to repeat
    each turn      EngineAddOn.before_group, backbone_for, after_forward
                   JobAddOn.after_forward, after_step
    decoded        JobAddOn.after_decode, keep
    ended          JobAddOn.close, report, finish
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar, Protocol

from torch import Tensor

from bottega.errors import MethodNotServed, Unavailable
from bottega.model.rows import Embeds, Half, Row
from bottega.v1.engine_pb2 import EngineBeat, EngineCount
from bottega.v1.fleet_pb2 import ServiceAddress

if TYPE_CHECKING:
    from bottega.engine.acceleration.acceleration import Probe
    from bottega.engine.encode import Conditions
    from bottega.engine.engine import Engine
    from bottega.engine.events import EngineRecord
    from bottega.engine.forward import Prediction, RowWeights
    from bottega.engine.job import EngineJob, EngineOrder
    from bottega.engine.parallel.offload import OffloadedPart
    from bottega.engine.request import Request
    from bottega.engine.residuals import ResidualProvider
    from bottega.engine.spans import TracedSpan
    from bottega.model.backbone import Backbone
    from bottega.model.model import Model


class JobAddOn:
    """The state and hooks of an add-on for one job. Methods that are not overridden do nothing."""

    @property
    def waiting(self) -> bool:
        """Whether the job may have to wait for data that has not arrived."""
        return False

    @property
    def resumable(self) -> bool:
        """Whether the job may resume from a checkpoint."""
        return True

    @property
    def changes_prompt(self) -> bool:
        """Whether the add-on changed the encoding of the prompt."""
        return False

    def prompt_ready(self, now_s: float) -> bool:
        """Return whether the prompt can be encoded. Raise BottegaError if it never can."""
        return True

    def attach(self, job: EngineJob, conditions: Conditions, now_s: float) -> None:
        """Prepare a job whose prompt has been encoded and whose requests exist.

        Args:
            conditions: Conditions of its first image. Only a job of several prompts has others, and add-ons that depend
                on the prompt do not serve such jobs (rules.check_prompts).
            now_s: Monotonic seconds.

        Raises:
            BottegaError: The job can never begin.
        """

    def update(self, now_s: float) -> None:
        """Take in data that has arrived, and release data that is no longer needed.

        Raises:
            BottegaError: The job can never go on.
        """

    def blocks(self, request: Request) -> bool:
        """Return whether a request that is not done must wait before its next step."""
        return False

    @property
    def decision(self) -> bytes | None:
        """The choice of this add-on that later attempts must repeat to draw the same picture, as a serialized message.

        None until it has decided anything. Later attempts find it in `EngineJob.pinned`.
        """
        return None

    def after_forward(self, prediction: Prediction) -> float:
        """Note that a step of the job ran in this forward. Return the seconds that it waited for the add-on."""
        return 0.0

    def after_step(self, request: Request) -> None:
        """Note that a request of the job has made a step."""

    def after_decode(self, index: int, pixels: Tensor) -> None:
        """Note that an image is finished. `pixels` is uint8 [height, width, 3] and must not be changed."""

    def keep(self, index: int) -> bytes | None:
        """Return data to store with the job for an image that was emitted; None for none."""
        return None

    def offload(self) -> OffloadedPart | None:
        """Return the data that the pair's other worker needs for this add-on to compute rows of the job, or None."""
        return None

    @property
    def offloadable(self) -> bool:
        """Whether the other worker of a pair may compute rows of the job."""
        return True

    def active_in(self, row: Row) -> int:
        """Return a number in [0, 2^31) that tells `RemoteAddOn.activate` which parts are active in a row."""
        return 0

    def spans(self) -> Iterable[TracedSpan]:
        """Return the spans for the trace of the job, which has ended."""
        return ()

    def report(self, record: EngineRecord) -> EngineRecord:
        """Return a copy of the job's record that includes this add-on's facts."""
        return record

    def finish(self, record: EngineRecord) -> None:
        """Note that all images were emitted and the job was reported as finished, with this complete record."""

    def close(self) -> None:
        """Release everything. Called at the end of every job, at least once."""


class RemoteAddOn(Protocol):
    """An add-on's part of a job of the pair's other worker, for which this engine computes rows."""

    def ready(self, now_s: float) -> bool:
        """Return whether rows can be computed. Raise BottegaError if they never can."""
        ...

    def activate(self, row: Row, active: int) -> Row:
        """Return the row with the parts that the leader's `JobAddOn.active_in` chose.

        Raise ValueError for an unknown number.
        """
        ...

    def close(self) -> None:
        """Release everything."""
        ...


class EngineAddOn:
    """A feature that extends the plain model, such as LoRAs. Methods that are not overridden do nothing."""

    kind: ClassVar[str]
    """Key of its data in orders and decisions; also the kind of the services that it uses."""

    @property
    def row_weights(self) -> RowWeights | None:
        """The object that applies the LoRAs of rows in forwards. At most one add-on has it."""
        return None

    @property
    def residuals(self) -> ResidualProvider | None:
        """The provider of residuals for rows with ControlNets. At most one add-on has it."""
        return None

    def backbone_for(self, rows: Sequence[Row]) -> Backbone | None:
        """Return the add-on's own backbone to run a group, or None to leave the group to others.

        Add-ons are asked in order, and the model's own backbone runs the remaining groups. With fixed rows, none is
        asked.
        """
        return None

    def set_services(self, services: Sequence[ServiceAddress]) -> None:
        """Set the services of its kind that exist now, the best first."""

    def open(self, order: EngineOrder) -> JobAddOn | None:
        """Return the add-on's part of a submitted job, or None if it needs none.

        Raises:
            BottegaError: The job can never be served.
        """
        return None

    def open_remote(self, part: OffloadedPart, halves: Mapping[Half, Embeds]) -> RemoteAddOn:
        """Return the add-on's part of a job of the pair's other worker.

        Args:
            part: What that worker's add-on sent.
            halves: The job's conditions.

        Raises:
            BottegaError: The job can never be served.
            ValueError: The part is malformed.
        """
        raise Unavailable(f"no row with {self.kind} is computed for another worker")

    def before_prompt(self, part: JobAddOn | None) -> None:
        """Prepare for encoding the prompt of a job with this part, if any. Raise BottegaError if that is impossible."""

    def wait(self, parts: Sequence[JobAddOn], timeout_s: float) -> None:
        """Wait until something arrives for one of these parts, which are waiting, or until the timeout."""
        time.sleep(timeout_s)

    def before_group(self, requests: Sequence[Request], step_s: float) -> bool:
        """Prepare for the choice of the next group. Return whether a request's group key has changed.

        Args:
            requests: All requests that may be in the group.
            step_s: Seconds of a step of all of them, 0 if unknown.
        """
        return False

    def after_forward(self, rows: Sequence[Row], seconds: float, plain_s: float | None, *, masked: bool) -> bool:
        """Note the time of a forward. Return whether plain rows would have taken as long.

        Args:
            plain_s: Measured seconds of a forward of the same number of plain rows; None if not measured.
            masked: Whether rows were partly computed, or recorded. The result then has no effect.
        """
        return True

    def warm_up(self, row: Row, predict: Callable[[Sequence[Row]], object]) -> None:
        """Take the measurements that the add-on needs, before the engine serves.

        Args:
            row: A row of the model's usual size.
            predict: Runs a forward of such rows.
        """

    def probes(self, model: Model) -> Mapping[str, Probe]:
        """Return probes that show the gain of accelerations of the add-on's own operations, by name."""
        return {}

    def answer(self, question: bytes, engine: Engine) -> bytes:
        """Answer a query from the add-on's part in the worker's front process. Both are serialized messages.

        Raises:
            BottegaError: The add-on refuses.
        """
        raise MethodNotServed(f"the add-on of kind {self.kind} answers no questions")

    def fill_beat(self, beat: EngineBeat) -> None:
        """Add the add-on's state to the worker's report: data in memory, counts, measured times, open links."""

    def stop(self) -> None:
        """Close all links, because the process ends. May be called from any thread."""


def add_counts(beat: EngineBeat, kind: str, counts: Mapping[str, int]) -> None:
    """Add an add-on's event counts since the start to the report. Names are in snake case."""
    beat.counts.extend(EngineCount(kind=kind, event=event, count=count) for event, count in counts.items())


Parts = Mapping[EngineAddOn, JobAddOn]
"""The parts of a job by add-on, for add-ons that the job needs."""


def open_parts(addons: Sequence[EngineAddOn], order: EngineOrder) -> Parts:
    """Return the parts of a submitted job. Raise the BottegaError of the first add-on that cannot serve it."""
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
    """Close all parts."""
    for part in parts.values():
        part.close()
