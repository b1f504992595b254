"""The interface of the gateway's add-ons, the features that a request may use, such as ControlNets and LoRAs.

A service in the manifest names a function that makes its add-on from an AddOnContext (`ServiceSpec.add_on`). Admission,
scheduling and dispatch call all add-ons in the same way. An add-on overrides only the hooks that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter

from bottega import kinds
from bottega.addons.interface.access import Access
from bottega.addons.interface.job import AddOnJob
from bottega.addons.interface.member import Member
from bottega.clocks import Clock
from bottega.errors import BottegaError, Violation
from bottega.rpc.channel import Channels
from bottega.v1 import image_pb2, worker_pb2
from bottega.v1.generation_pb2 import GenerationSpec, Provenance
from bottega.v1.image_pb2 import AdapterKind
from bottega.v1.worker_pb2 import AttemptDecisions


class FleetView(Protocol):
    """The operations on a gateway's fleet that add-ons may use."""

    def services(self, kind: str) -> list[Member]:
        """Return the present services of a kind, by name."""

    def last_seen(self, model: str) -> image_pb2.Model:
        """Return the model as it was last registered, or an empty one if it never was. Do not change it."""

    def grace_s(self, member: Member) -> float:
        """Return how many seconds to wait for items that a member hosted, after it has left or dropped them."""

    def back_off(self, name: str, *, kind: str = kinds.WORKER) -> None:
        """Assign no work to a service for a while, because it refused its last work."""


class AddOnMetrics:
    """The metrics that several add-ons of a gateway share.

    Args:
        registry: Registry of the gateway's process, for an add-on's own metrics too.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        self.prefetches = Counter(
            "bottega_prefetches",
            "Requests to services to load what queued jobs will need, by kind of service and by outcome.",
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


PREFETCHED_JOBS = 8
"""Number of jobs at the head of a queue for which things are prefetched. More would evict what the first jobs need."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredModel:
    """A model that an item of a request, such as a LoRA, was made for."""

    name: str
    needed_by: str
    """Name of the item that was made for the model."""


class Resolution:
    """The resolved names of one request, such as its LoRAs. Each add-on has a subclass. This base has no names."""

    @property
    def required_model(self) -> RequiredModel | None:
        """The model of a request that names none; None if any model will do."""
        return None

    def check_model(self, model: image_pb2.Model) -> None:
        """Raise if a request for `model` names items that this model cannot use."""

    def complete(self, full: GenerationSpec) -> None:
        """Fill in the add-on's fields of a spec whose other fields are complete."""


class SecondsByWorker(Mapping[str, float]):
    """A mapping of workers to seconds that computes a value when it is read: the scheduler reads few of many.

    Args:
        workers: Names of the workers, the keys.
        seconds: Returns the seconds of one of them.
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
        """Return a value as `Mapping.get` does, but without raising KeyError inside, for speed."""
        return self._seconds(worker) if worker in self._workers else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCosts:
    """The costs of a job at each worker, in addition to its plain steps."""

    load_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds before its first step, by worker; a worker that is missing needs none."""
    shares: Mapping[str, float] = field(default_factory=dict)
    """Share of its rows' tokens that the job computes, by worker."""
    share: float = 1.0
    """Share of tokens at a worker that is missing in `shares`."""
    eligible: frozenset[str] | None = None
    """The only workers that may have the job; None means all."""

    def __bool__(self) -> bool:
        return bool(self.load_s or self.shares) or self.share < 1.0 or self.eligible is not None


NO_COSTS = WorkerCosts()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectedSavings:
    """Work that a job is expected to avoid on any worker."""

    skipped_steps: float = 0.0
    """Denoising steps that are skipped, over all images."""
    computed_share: float = 1.0
    """Share of its rows' tokens that is computed, above 0 to 1."""


NO_SAVINGS = ExpectedSavings()


class AddOn:
    """The base class of add-ons. Its hooks run in the event loop, and all but the coroutines return at once."""

    # Admission of a request.

    decides_model: bool = False
    """Whether the items that a request names determine its model, if it names no model."""
    adapter_kind: AdapterKind.ValueType = image_pb2.ADAPTER_KIND_UNSPECIFIED
    """Kind of the adapters that it lists; UNSPECIFIED if it lists none."""

    def is_named(self, spec: GenerationSpec) -> bool:
        """Return whether a request names items that have to be resolved."""
        return False

    def check(self, spec: GenerationSpec) -> Iterator[Violation]:
        """Yield the violations in its fields that do not depend on the model."""
        return iter(())

    def check_steps(self, spec: GenerationSpec, *, steps: int, strength: float | None) -> Iterator[Violation]:
        """Yield the violations in its fields for a number of steps.

        Args:
            spec: The request.
            steps: Its number of steps.
            strength: Strength of image-to-image; None for other requests.
        """
        return iter(())

    def computes_part(self, spec: GenerationSpec) -> bool:
        """Return whether a request may compute only a part of its picture, with data of earlier jobs.

        A spec that is not complete yet says so only by what its caller has filled in.
        """
        return False

    async def resolve(self, spec: GenerationSpec, access: Access) -> Resolution:
        """Find the items that a request names. Raises one error for all that are missing, or Unavailable.

        Args:
            spec: The request.
            access: Access of the caller. Items that the caller may not use are treated as missing.
        """
        return Resolution()

    def decide_again(self, decisions: AttemptDecisions, before: AddOnJob) -> None:
        """Add the decisions that a job must follow to draw the same pictures as `before`.

        Args:
            decisions: A copy of the decisions that the attempts at `before` made.
            before: A job of the same request.
        """

    def versions(self, spec: GenerationSpec, model: image_pb2.Model) -> Sequence[str] | None:
        """Return hashes of the items that a complete request names without a hash, in the request's order.

        Returns None if the hashes of the names are not certain now.
        """
        return ()

    async def adapters(self, access: Access, models: Sequence[image_pb2.Model]) -> Sequence[image_pb2.Adapter]:
        """Return the adapters that requests may name now, in any order. Raises Unavailable if they cannot be listed.

        Args:
            access: Access of the caller.
            models: Models that the caller may name.
        """
        return ()

    # Scheduling of a job.

    def job_arrived(self, job: AddOnJob, *, admitted: bool) -> None:
        """Note a new job, before it is queued.

        Args:
            job: The job.
            admitted: False if it is refused because it would miss its deadline. Similar jobs may follow.
        """

    def prefetch(self, jobs: Sequence[AddOnJob]) -> None:
        """Make services load the items that the first jobs of a queue will need."""

    def cost_key(self, job: AddOnJob) -> Hashable:
        """Return a key that is equal for jobs with equal costs; None for a job without costs."""
        return None

    def worker_costs(self, job: AddOnJob, workers: Mapping[str, Member]) -> WorkerCosts:
        """Return a job's costs at workers of its model."""
        return NO_COSTS

    def expected_savings(self, job: AddOnJob) -> ExpectedSavings:
        """Return the steps and tokens that a job without a checkpoint will probably save, measured on similar jobs."""
        return NO_SAVINGS

    def unavailable(self, job: AddOnJob) -> BottegaError | None:
        """Return the error of a waiting job that can never run; None for others."""
        return None

    # Dispatch of an attempt.

    final_errors: tuple[type[BottegaError], ...] = ()
    """Errors of an attempt that would occur at every worker, so that the job is not tried again."""

    def prepare_attempt(self, job: AddOnJob, worker: Member, request: worker_pb2.RunAttemptRequest) -> None:
        """Fill in `request.addons[kind]`, the order for the add-on of that kind in the worker's engine."""

    def end_attempt(self, job: AddOnJob) -> None:
        """Release the items that the job's attempt used, whether it succeeded or failed."""

    def back_off(self, job: AddOnJob, error: BottegaError) -> bool:
        """Return whether a service of this add-on caused the return of an attempt, and back off that service."""
        return False

    def job_completed(self, job: AddOnJob, provenance: Provenance) -> None:
        """Complete the provenance of a job that has all its images, and update estimates by it.

        Decisions that depended on timing are written into the provenance's parameters, so that they draw the same
        image again.
        """

    # Life of the gateway and of the services.

    def start(self, live_jobs: Callable[[], Iterable[AddOnJob]]) -> None:
        """Begin background work. `live_jobs` returns the jobs that have not ended."""

    def member_changed(self, member: Member) -> None:
        """Note that a service has reported, or has disconnected but may still reconnect."""

    def member_lost(self, member: Member) -> None:
        """Forget a service that is lost."""

    async def close(self) -> None:
        """End background work and calls."""
