"""The interface of add-ons: what a request may have beside its model, such as ControlNets and LoRAs.

A service in the manifest names its own (`ServiceSpec.add_on`): a function that makes one from an AddOnContext.
Admission (api), snapshot (scheduling) and dispatcher go through the list of them and treat all kinds alike. What a kind
has no use for it inherits.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from bottega.clocks import Clock
from bottega.errors import BottegaError, Violation
from bottega.gateway.fleet.members import Member
from bottega.gateway.fleet.registry import Fleet
from bottega.gateway.jobs.job import Job
from bottega.gateway.metrics import GatewayMetrics
from bottega.gateway.tenants.access import Access
from bottega.rpc.channel import Channels
from bottega.v1 import image_pb2, worker_pb2
from bottega.v1.generation_pb2 import GenerationSpec, Provenance
from bottega.v1.image_pb2 import AdapterKind
from bottega.v1.worker_pb2 import AttemptDecisions


@dataclass(frozen=True, slots=True, kw_only=True)
class AddOnContext:
    """What an add-on of a gateway may use. channels: of the gateway's process."""

    fleet: Fleet
    metrics: GatewayMetrics
    clock: Clock
    channels: Channels


PREFETCHED_JOBS = 8
"""The first jobs of a queue, whose needs are loaded ahead: those behind them would drive these out again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequiredModel:
    """The model that something in a request was made for. needed_by: its name."""

    name: str
    needed_by: str


class Resolution:
    """What the names in one request stand for. This one is of a request that names nothing; each kind has its own."""

    @property
    def required_model(self) -> RequiredModel | None:
        """The model of a request that names no model; None where any will do."""
        return None

    def check_model(self, model: image_pb2.Model) -> None:
        """Raises why a request for that model cannot have what it names."""

    def complete(self, full: GenerationSpec) -> None:
        """Fills in the add-on's fields of a spec that is complete otherwise."""


class SecondsByWorker(Mapping[str, float]):
    """Worked out for those workers that are asked about: the scheduler asks about few of many.

    workers: names of those that may need any. seconds: that one of them needs.
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
        """As a mapping's, without its detour over an exception: the scheduler asks dozens of times for each job."""
        return self._seconds(worker) if worker in self._workers else default

    def __iter__(self) -> Iterator[str]:
        return iter(self._workers)

    def __len__(self) -> int:
        return len(self._workers)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerCosts:
    """What a job needs at each worker before its first step.

    load_s: seconds, by worker; a worker that is not named needs none. eligible: the only workers that may have the job;
    None is all of them. shares: of the tokens of its rows, what the job computes there, by worker; share: the same
    at one that is not named.
    """

    load_s: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    share: float = 1.0
    eligible: frozenset[str] | None = None

    def __bool__(self) -> bool:
        """Whether there are any."""
        return bool(self.load_s or self.shares) or self.share < 1.0 or self.eligible is not None


NO_COSTS = WorkerCosts()


class AddOn:
    """One kind of add-on; it overrides what it has a use for. In the event loop; all but `resolve` return at once."""

    # Admission: a request comes in.

    def is_named(self, spec: GenerationSpec) -> bool:
        """Whether a request names any of it, so that it has to be resolved."""
        return False

    def check(self, spec: GenerationSpec) -> Iterator[Violation]:
        """What is wrong with its fields, whatever the model."""
        return iter(())

    def check_steps(self, spec: GenerationSpec, *, steps: int, strength: float | None) -> Iterator[Violation]:
        """What is wrong with its fields for so many steps. strength: of image-to-image."""
        return iter(())

    def may_require_model(self, spec: GenerationSpec) -> bool:
        """Whether what a request names may decide its model, where it names none."""
        return False

    async def resolve(self, spec: GenerationSpec, access: Access) -> Resolution:
        """Finds what a request names. access: of its caller, for whom there is nothing else. Raises what is not there,
        all of it at once; and Unavailable."""
        return Resolution()

    def complete_again(self, full: GenerationSpec, before: GenerationSpec) -> None:
        """Fills in the add-on's fields as they were when the same request was drawn before."""

    def decide_again(self, decisions: AttemptDecisions, before: Job) -> None:
        """Adds what a job that draws the same again keeps to, beside what the attempts at the job before decided."""

    def versions(self, spec: GenerationSpec, model: image_pb2.Model) -> Sequence[str] | None:
        """Hashes of what a complete request for the model names and does not give a hash of itself, in its order.

        None where it is not certain now what the names stand for.
        """
        return ()

    # What callers may name.

    adapter_kind: AdapterKind.ValueType = image_pb2.ADAPTER_KIND_UNSPECIFIED
    """Kind of the adapters that it lists; UNSPECIFIED where it has none."""

    async def adapters(self, access: Access, models: Sequence[image_pb2.Model]) -> Sequence[image_pb2.Adapter]:
        """Return what requests may name now, in any order. Raise Unavailable where that cannot be found out.

        Args:
            access: Access of the caller.
            models: Models that the caller may name.
        """
        return ()

    # Scheduling: a job waits.

    def cost_key(self, job: Job) -> Hashable:
        """Jobs with the same key cost the same; those with None cost nothing."""
        return None

    def worker_costs(self, job: Job, workers: Mapping[str, Member]) -> WorkerCosts:
        """What the job costs at these workers of its model."""
        return NO_COSTS

    def expected_skipped_steps(self, job: Job) -> float:
        """Steps, over all images, that a job without a checkpoint is expected not to make; as measured."""
        return 0.0

    def expected_share(self, job: Job) -> float:
        """Of the tokens of its rows, what a job is expected to compute, above 0 to 1, wherever it runs."""
        return 1.0

    def unavailable(self, job: Job) -> BottegaError | None:
        """Why a job waits in vain."""
        return None

    def job_refused(self, job: Job) -> None:
        """A job is not taken: by what is known it would end after its deadline. Others like it may come."""

    def job_queued(self, job: Job) -> None:
        """A new job lines up."""

    def prefetch(self, jobs: Sequence[Job]) -> None:
        """These are the first of a queue: has loaded what they will need."""

    # Dispatch: an attempt runs.

    def prepare_attempt(self, job: Job, worker: Member, request: worker_pb2.RunAttemptRequest) -> None:
        """Fills in `addons[kind]`: what the add-on of that kind in the worker's engine is told."""

    def end_attempt(self, job: Job) -> None:
        """The attempt is over, however it ended."""

    def pin_parameters(self, provenance: Provenance) -> None:
        """Writes what timing decided into the parameters of a provenance: with them the same image is made again."""

    def job_completed(self, job: Job, provenance: Provenance) -> None:
        """A job has all its images. provenance: what happened to it."""

    def is_final(self, error: BottegaError) -> bool:
        """Whether an attempt that ended so would end so at every worker."""
        return False

    def back_off(self, job: Job, error: BottegaError) -> bool:
        """Whether an attempt was returned because of this add-on; then the service that caused it gets nothing for a
        moment."""
        return False

    # The gateway starts and stops; services come and go.

    def start(self, live_jobs: Callable[[], Iterable[Job]]) -> None:
        """The gateway serves. live_jobs: those that have not ended."""

    def member_changed(self, member: Member) -> None:
        """A service has reported, or has left for now."""

    def member_lost(self, member: Member) -> None:
        """A service is lost."""

    async def close(self) -> None:
        """Ends every call."""
