"""The interface between the engine and its add-ons, such as ControlNets, LoRAs, cached latents and edits.

The engine has a list of add-ons and knows none of them by name. For each job that needs it, an add-on creates a
`JobAddOn`, its "part" of the job. The engine calls:

    submitted      EngineAddOn.open            starts loading data; refuses jobs that can never be served
    encoding       JobAddOn.ready              whether the prompt can be encoded
                   JobAddOn.prepare_prompt     computes in pieces what the encoding needs
                   EngineAddOn.before_prompt   prepares the text encoders for the job
    encoded        JobAddOn.attach             gives the job's requests what they need
    before a turn  JobAddOn.update             uses data that has arrived
                   JobAddOn.blocks             whether a request must wait before its next step
                   JobAddOn.decision           a choice that later attempts have to repeat
    each turn      EngineAddOn.before_group, after_forward
                   JobAddOn.after_forward, after_step
    finished       JobAddOn.decode             decodes an image elsewhere
    decoded        JobAddOn.after_decode
    ended          JobAddOn.close, report, finish

In each turn, the engine runs one forward pass of a batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, TypeVar

from torch import Tensor

from bottega.errors import MethodNotServed, Unavailable
from bottega.model.rows import Embeds, Half, Row
from bottega.v1.engine_pb2 import EngineBeat, EngineCount
from bottega.v1.fleet_pb2 import ServiceAddress

if TYPE_CHECKING:
    from transformers import CLIPTokenizer

    from bottega.device.heartbeat import Heartbeat
    from bottega.engine.acceleration.acceleration import Probe
    from bottega.engine.encode import Conditions
    from bottega.engine.engine import Engine
    from bottega.engine.events import EngineRecord
    from bottega.engine.forward import ForwardStrategy, Prediction, ResidualProvider, RowWeights
    from bottega.engine.job import EngineJob, EngineOrder
    from bottega.engine.parallel.remote_rows import OffloadedPart
    from bottega.engine.request import Request
    from bottega.engine.results import ImageDecoding
    from bottega.engine.spans import TracedSpan
    from bottega.model.model import Model
    from bottega.transport import DeviceLinks, LinkCounters, OfferSource


class JobAddOn:
    """The state and hooks of an add-on for one job. Methods that are not overridden do nothing."""

    resumable: bool = True
    """Whether the job may resume from a checkpoint."""
    changes_prompt: bool = False
    """Whether the add-on changed the encoding of the prompt."""
    prepares_prompt: bool = False
    """Whether `prepare_prompt` may pause, with memory in use."""
    offloadable: bool = True
    """Whether the other worker of a pair may compute rows of the job."""
    conditions: Sequence[Conditions] | None = None
    """Conditions of each image if another process encodes the job's prompts; else None. Read once `ready`."""
    tokenizers: tuple[CLIPTokenizer, ...] | None = None
    """Tokenizers that read the job's prompts in place of the model's own; None for these."""
    decision: bytes | None = None
    """A choice that later attempts must repeat to draw the same picture, as a serialized message of this add-on.

    None until the add-on has made it. Later attempts find it in `EngineJob.pinned`.
    """

    def ready(self, now_s: float) -> bool:
        """Return whether the prompt can be encoded or, for a job from `open_remote`, whether rows can be computed.

        Raises:
            BottegaError: They never can.
        """
        return True

    def prepare_prompt(self) -> Generator[None, None, None]:
        """Compute in pieces what `before_prompt` needs for the job. Steps of other jobs may run in between.

        Raises:
            BottegaError: The job can never be served.
        """
        yield from ()

    def attach(self, job: EngineJob, conditions: Conditions, now_s: float) -> None:
        """Prepare a job whose prompt has been encoded and whose requests exist.

        Args:
            conditions: Conditions of its first image. Add-ons that depend on the prompt never get a job of several
                prompts (rules.check_prompts).
            now_s: Monotonic seconds.

        Raises:
            BottegaError: The job can never begin.
        """

    def update(self, now_s: float) -> None:
        """Use data that has arrived, and release data that is no longer needed.

        Raises:
            BottegaError: The job can never go on.
        """

    def blocks(self, request: Request) -> bool:
        """Return whether a request that is not done must wait before its next step."""
        return False

    def after_forward(self, prediction: Prediction) -> float:
        """Handle a forward pass with a step of the job. Return the seconds that it waited for the add-on."""
        return 0.0

    def after_step(self, request: Request) -> None:
        """Handle an evaluation of the network that a request of the job has made, which may end a step."""

    def decode(self, request: Request) -> ImageDecoding | None:
        """Begin to decode a finished image in another process; return None if it is decoded here."""
        return None

    def after_decode(self, index: int, pixels: Tensor) -> bytes | None:
        """Handle a finished image, and return data to store with it; None for nothing.

        Args:
            pixels: uint8 [height, width, 3], which must not be changed.
        """
        return None

    def offload(self) -> OffloadedPart | None:
        """Return data for the other worker of a pair, so that it can compute rows of the job; None if it needs none."""
        return None

    def active_in(self, row: Row) -> int:
        """Return a number in [0, 2^31) that tells `activate` at the other worker what is active in a row."""
        return 0

    def activate(self, row: Row, active: int) -> Row:
        """Return a row of a job from `open_remote` with what is active in it, such as its LoRAs.

        Args:
            active: The result of `active_in` at the other worker.

        Raises:
            ValueError: The number is unknown.
        """
        return row

    def spans(self) -> Iterable[TracedSpan]:
        """Return the spans for the trace of the job, which has ended."""
        return ()

    def report(self, record: EngineRecord) -> None:
        """Add what this add-on knows about the job to its record."""

    def finish(self, record: EngineRecord) -> None:
        """Handle the end of a job that was reported as finished, with its complete record."""

    def close(self) -> None:
        """Release everything. Called at least once at the end of every job."""


class EngineAddOn:
    """A feature that extends the plain model, such as LoRAs. Methods that are not overridden do nothing."""

    kind: ClassVar[str]
    """Key of its data in orders and decisions, and kind of the services that it uses."""

    row_weights: RowWeights | None = None
    """Applies LoRAs to rows during a forward pass."""
    residuals: ResidualProvider | None = None
    """Provides ControlNets' residuals during a forward pass."""
    strategy: ForwardStrategy | None = None
    """Runs some batches in its own way. Add-ons are asked in order; with fixed rows, none is asked."""
    probes: Mapping[str, Callable[[Model], Probe]] = MappingProxyType({})
    """Functions, by name, that make probes. They show how much accelerations of the add-on's own operations gain."""

    def set_services(self, services: Sequence[ServiceAddress]) -> None:
        """Set the services of its kind that exist now, the best first.

        When the process ends, another thread calls it with none, so that links are closed.
        """

    def open(self, order: EngineOrder) -> JobAddOn | None:
        """Return the add-on's state for a submitted job, or None if the job does not need the add-on.

        Raises:
            BottegaError: The job can never be served.
        """
        return None

    def open_remote(self, part: OffloadedPart, halves: Mapping[Half, Embeds]) -> JobAddOn:
        """Return the add-on's state for a job of the pair's other worker, for which this engine computes rows.

        The engine calls its `ready`, `activate` and `close`.

        Args:
            part: What that worker's add-on sent.
            halves: The job's conditions.

        Raises:
            BottegaError: The job can never be served.
            ValueError: `part` is malformed.
        """
        raise Unavailable(f"rows with {self.kind} cannot be computed for another worker")

    def before_prompt(self, part: JobAddOn | None) -> None:
        """Prepare to encode a job's prompt; `part` is None if it does not use the add-on. May raise BottegaError."""

    def wait(self, parts: Sequence[JobAddOn], timeout_s: float) -> None:
        """Wait until data arrives for one of these jobs, which cannot go on without it, or until the timeout."""
        time.sleep(timeout_s)

    def before_group(self, requests: Sequence[Request], step_s: float) -> bool:
        """Prepare for the choice of the next batch. Return whether the group key of a request has changed.

        Args:
            requests: All requests that may be in the batch.
            step_s: Seconds of a step of all of them, 0 if unknown.
        """
        return False

    def after_forward(self, rows: Sequence[Row], seconds: float, plain_s: float | None, *, masked: bool) -> bool:
        """Use the measured time of a forward pass. Return whether plain rows would have taken as long.

        Args:
            plain_s: Measured seconds of a forward pass of as many plain rows; None if not measured.
            masked: Whether rows were partly computed, or recorded. The result is then ignored.
        """
        return True

    def warm_up(self, row: Row, predict: Callable[[Sequence[Row]], object]) -> None:
        """Measure what the add-on needs to know, before the engine serves.

        Args:
            row: A row of the model's usual size.
            predict: Runs a forward pass of such rows.
        """

    def answer(self, question: bytes, engine: Engine) -> bytes:
        """Answer a query of the same add-on in the worker's front process. Query and answer are serialized messages.

        Raises:
            BottegaError: The add-on refuses.
        """
        raise MethodNotServed(f"the add-on of kind {self.kind} answers no queries")

    def fill_beat(self, beat: EngineBeat) -> None:
        """Add the add-on's state to the worker's report: data in memory, counts, measured times, open links."""


def add_counts(beat: EngineBeat, kind: str, counts: Mapping[str, int]) -> None:
    """Add an add-on's counts of events since the start to the report. Names are in snake case."""
    beat.counts.extend(EngineCount(kind=kind, event=event, count=count) for event, count in counts.items())


Parts = Mapping[EngineAddOn, JobAddOn]
"""The states of a job's add-ons. An add-on that the job does not use has no entry."""


def open_parts(addons: Sequence[EngineAddOn], order: EngineOrder) -> Parts:
    """Return the add-ons' states for a submitted job. Raise the BottegaError of the first that cannot serve it."""
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
    """Close the states of all add-ons."""
    for part in parts.values():
        part.close()


SectionT = TypeVar("SectionT")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineAddOnContext:
    """The arguments of the function that makes an engine add-on."""

    sections: Sequence[object]
    """The objects that make up the engine's configuration, each of a different class."""
    fixed_rows: int
    """Batch rows to which every forward pass is padded; 0 for no padding."""
    model: Model
    offers: OfferSource
    """Opens tensor connections to services."""
    counters: LinkCounters
    """Metrics of all tensor connections of the process."""
    heartbeat: Heartbeat
    """Shows that the engine is alive while it computes a forward pass."""
    devices: DeviceLinks | None = None
    """Connections between GPUs; None where they are not possible."""

    def section(self, kind: type[SectionT]) -> SectionT:
        """Return the object in `sections` that is of this class."""
        return next(section for section in self.sections if isinstance(section, kind))
