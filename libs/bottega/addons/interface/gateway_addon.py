"""The interface of the gateway's add-ons: features that a request may use, such as ControlNets and LoRAs.

A service in the manifest names a function that makes its add-on from an AddOnContext (`ServiceSpec.add_on`). Admission,
scheduling and dispatch call all add-ons in the same way. An add-on overrides only the hooks that it needs. An "item" is
anything that a request names and a service hosts, such as one LoRA.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple, Protocol

from prometheus_client import CollectorRegistry, Counter

from bottega import kinds
from bottega.addons.interface.views import Access, AddOnJob, Member
from bottega.clocks import Clock
from bottega.errors import BottegaError, Violation
from bottega.rpc.channel import Channels
from bottega.v1 import image_pb2, worker_pb2
from bottega.v1.generation_pb2 import GenerationSpec, Provenance
from bottega.v1.image_pb2 import AdapterKind
from bottega.v1.worker_pb2 import AttemptDecisions


class FleetView(Protocol):
    """The operations on a gateway's list of connected services that add-ons may use."""

    def services(self, kind: str) -> list[Member]:
        """Return the connected services of a kind, sorted by name."""

    def last_seen(self, model: str) -> image_pb2.Model:
        """Return the newest registration of a model, or an empty message if there was none. Do not change it."""

    def grace_s(self, member: Member) -> float:
        """Return how many seconds a job waits for items of a member that has left or has stopped hosting them."""

    def back_off(self, name: str, *, kind: str = kinds.WORKER) -> None:
        """Assign no work to a service for a while, because it refused the last."""


Release = Callable[[], None]
"""Releases the items that an attempt used."""


class AddOnMetrics:
    """The metrics that several add-ons of a gateway share.

    Args:
        registry: Registry of the gateway's process, for an add-on's own metrics too.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.prefetches = Counter(
            "bottega_prefetches",
            "Requests that ask services to load items for queued jobs, by kind of service and outcome.",
            ("kind", "outcome"),
            registry=registry,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AddOnContext:
    """The parts of a gateway that an add-on may use."""

    fleet: FleetView
    metrics: AddOnMetrics
    clock: Clock
    channels: Channels
    """Channels of the gateway's process."""
    live_jobs: Callable[[], Iterable[AddOnJob]]
    """Returns the jobs that have not ended."""


PREFETCHED_JOBS = 8
"""Number of jobs at the head of a queue whose items are prefetched. More would evict what the first jobs need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredModel:
    """The model that an item of a request, such as a LoRA, was made for."""

    name: str
    needed_by: str
    """Name of that item."""


class Resolution:
    """The items that the names in a request stand for, such as LoRAs. This base class has no items."""

    required_model: RequiredModel | None = None
    """The model to use for a request that names no model; None if its items do not determine one."""

    def check_model(self, model: image_pb2.Model) -> None:
        """Raise an error if the request names items that `model` cannot use."""

    def complete(self, full: GenerationSpec, steps: int) -> None:
        """Fill in the add-on's fields of a spec. The other fields are already complete.

        Args:
            full: The spec.
            steps: Number of its denoising steps that run.
        """


class SecondsByWorker(Mapping[str, float]):
    """A mapping from worker to seconds that computes each value when it is read, because most are never read.

    Args:
        workers: Names of the workers, the keys.
        seconds: Computes the seconds of one worker.
    """

    __slots__ = ("_seconds", "_workers")

    def __init__(self, workers: Collection[str], seconds: Callable[[str], float]) -> None:
        self._workers = workers
        self._seconds = seconds

    def __getitem__(self, worker: str) -> float:
        if worker not in self._workers:
            raise KeyError(worker)
        return self._seconds(worker)

    def get(self, worker: str, default: float = 0.0) -> float:  # type: ignore[override]
        """Return a value as `Mapping.get` does, but without a KeyError inside, because raising one is slow."""
        return self._seconds(worker) if worker in self._workers else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCosts:
    """The costs of one job at each worker, in addition to its denoising steps."""

    load_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds before the job's first step, by worker; 0 for workers that are not in the mapping."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Share of the job's tokens that the worker computes, by worker; an edit may reuse the rest."""
    share: float = 1.0
    """Share of the job's tokens that any worker without an entry in `shares` would compute."""
    eligible: frozenset[str] | None = None
    """The only workers that may run the job; None means all."""

    def __bool__(self) -> bool:
        return bool(self.load_s or self.shares) or self.share < 1.0 or self.eligible is not None


NO_COSTS = WorkerCosts()


class JobCosts(NamedTuple):
    """The costs of a job that are computed only for the first of all jobs with the same key.

    It is a tuple because one is made for each job of a queue in a round.
    """

    key: Hashable
    """Equal for jobs whose costs are equal."""
    at: Callable[[Mapping[str, Member]], WorkerCosts]
    """Returns the costs at these workers, all of the job's model."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedSavings:
    """Work of a job that will probably not be computed, on any worker."""

    skipped_steps: float = 0.0
    """Denoising steps that are skipped, summed over all images."""
    computed_share: float = 1.0
    """Share of the job's tokens that is computed, above 0 to 1."""


NO_SAVINGS = ExpectedSavings()


class PrefetchReason(Enum):
    """Why an add-on may prefetch the items of jobs."""

    ARRIVED = auto()
    """The job has just arrived, and will be queued."""
    REFUSED = auto()
    """The job has just arrived, and is refused because it would miss its deadline. Similar jobs may follow."""
    NEXT = auto()
    """The jobs are the first ones of a queue."""


class AddOn:
    """The base class of the gateway's add-ons. Its hooks run in the event loop and must not block."""

    # Admission of a request.

    model_field: str = ""
    """Field of a request's spec whose items determine its model, if it names no model; "" if there is none."""
    adapter_kind: AdapterKind.ValueType = image_pb2.ADAPTER_KIND_UNSPECIFIED
    """Kind of the adapters that `adapters` returns; UNSPECIFIED if it returns none."""

    def check(self, spec: GenerationSpec) -> Iterator[Violation]:
        """Yield the violations in the add-on's fields of a request that do not depend on the model."""
        return iter(())

    def check_steps(self, spec: GenerationSpec, *, steps: int, strength: float | None) -> Iterator[Violation]:
        """Yield the violations in the add-on's fields that depend on the number of steps.

        Args:
            spec: The request.
            steps: Number of steps of the request or, if it gives none, of the model.
            strength: Strength of image-to-image; None if it skips no step.
        """
        return iter(())

    async def resolve(self, spec: GenerationSpec, access: Access) -> Resolution | None:
        """Find the items of this add-on that a request names; None if it names none. Raise one error for all missing.

        Raises Unavailable if a service that lists items does not answer.

        Args:
            spec: The request.
            access: What the caller may name. Other items are treated as missing.
        """
        return None

    def decide_again(self, decisions: AttemptDecisions, before: AddOnJob) -> None:
        """Add to `decisions` what a repeated job needs to draw the same pictures as `before`.

        Args:
            decisions: A copy of the decisions of the attempts at `before`. Later attempts follow it.
            before: An earlier job of the same request.
        """

    def versions(self, spec: GenerationSpec, model: image_pb2.Model) -> Sequence[str] | None:
        """Return the hashes of the items that a complete request names without a hash, in the request's order.

        Returns None if an item's current hash is not known.
        """
        return ()

    async def adapters(self, access: Access, models: Sequence[image_pb2.Model]) -> Sequence[image_pb2.Adapter]:
        """Return the adapters that a caller may name now, in any order. Raise Unavailable if they cannot be listed.

        Args:
            access: What the caller may name.
            models: Models that the caller may name.
        """
        return ()

    # Scheduling of a job.

    def prefetch(self, jobs: Sequence[AddOnJob], reason: PrefetchReason) -> None:
        """Ask services to load the items that these jobs will need."""

    def costs(self, job: AddOnJob) -> JobCosts | None:
        """Return a job's costs at each worker besides its denoising steps; None for a job without such costs."""
        return None

    def expected_savings(self, job: AddOnJob) -> ExpectedSavings:
        """Return the steps and tokens that a job without a checkpoint will probably save, estimated from others."""
        return NO_SAVINGS

    def unavailable(self, job: AddOnJob) -> BottegaError | None:
        """Return the error with which to fail a queued job that can never run; None if it can."""
        return None

    # Dispatch of an attempt.

    final_errors: tuple[type[BottegaError], ...] = ()
    """Errors that an attempt would meet at every worker. A job is not tried again after one."""

    def prepare_attempt(self, job: AddOnJob, worker: Member, request: worker_pb2.RunAttemptRequest) -> Release | None:
        """Fill in `request.addons[kind]`, the message to the add-on of that kind in the worker's engine.

        Returns:
            A function to call when the attempt has ended, in any way, or None.
        """
        return None

    def back_off(self, job: AddOnJob, error: BottegaError) -> bool:
        """Back off the service of this add-on that made an attempt fail. Return whether there was one."""
        return False

    def job_completed(self, job: AddOnJob, provenance: Provenance) -> None:
        """Complete the provenance of a job that has all its images, and update the add-on's estimates from it.

        Decisions that depended on timing are written into the provenance's parameters, so that those draw the same
        image again.
        """

    # Life of the gateway and of the services.

    def start(self) -> None:
        """Begin background work, because this gateway schedules jobs from now on."""

    def member_changed(self, member: Member, *, lost: bool = False) -> None:
        """Handle a new report of a service, or its disconnection; it may still reconnect.

        Args:
            lost: Whether the service was removed from the fleet, so that all state about it has to be dropped.
        """

    async def close(self) -> None:
        """End background work and pending calls."""
