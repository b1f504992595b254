"""The models of the fleet: those that workers have served recently, and one model at several workers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median_high

from bottega import kinds
from bottega.addons.interface.views import Member
from bottega.clocks import Clock
from bottega.errors import ModelMismatch
from bottega.gateway.fleet.validation import MAX_MODELS
from bottega.v1 import fleet_pb2, image_pb2

MAX_START_GRACE_S = 600.0
"""Upper bound in seconds on the grace of slow starters, unless model_grace_s is larger."""

# Multiple of the longest start. The next start may be from a cold disk, the service starts before its engine, and
# it waits for the lease of its name.
_STARTS = 2.0
# Number of start times that are kept for each model, the newest ones.
_MAX_STARTS = 8
# Seconds for which a model counts as asked for after a caller was told to come again: a few retries.
_ASKED_S = 60.0


# Seconds for which, and number of, workers that are listed because they cannot serve their model: operators see why.
_REFUSED_KEPT_S = 600.0
_MAX_REFUSED = 64


@dataclass(slots=True, kw_only=True)
class _SeenModel:
    """A model as it was last registered, and the start times of its workers."""

    model: image_pb2.Model
    at: float
    """Time at which one of its workers last joined or left, on the monotonic clock."""
    starts: dict[str, float] = field(default_factory=dict)
    """Seconds that each worker took to start, by instance."""


class SeenModels:
    """The models that workers have served recently. Beyond MAX_MODELS, the ones seen longest ago are removed.

    While a worker restarts, it is away until its model is loaded: seconds for a small model, minutes for a large one on
    a cold disk. So jobs wait for a missing model for twice the longest start of its recent workers. This class does not
    know which workers are present.

    Args:
        grace_s: Shortest time, in seconds, for which jobs wait for a model without workers.
        clock: Clock of the gateway.
    """

    def __init__(self, *, grace_s: float, clock: Clock) -> None:
        self._grace_s = grace_s
        self._clock = clock
        self._models: dict[str, _SeenModel] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def get(self, name: str) -> image_pb2.Model | None:
        """Return the model as it was last registered, or None. Do not change it."""
        seen = self._models.get(name)
        return seen.model if seen else None

    def note_presence(self, member: Member, now: float) -> None:
        """Note that a member joins or leaves. Does nothing if the member serves no model."""
        for model in member.models:
            before = self._models.get(model.name)
            self._models[model.name] = _SeenModel(model=model, at=now, starts=before.starts if before else {})
        while len(self._models) > MAX_MODELS:
            del self._models[min(self._models, key=lambda name: self._models[name].at)]

    def note_start(self, member: Member) -> None:
        """Record how long a member took to start, once for each instance."""
        for seen in self._of(member):
            starts = seen.starts
            starts.pop(member.instance, None)
            starts[member.instance] = member.load.start_s  # the newest last
            if len(starts) > _MAX_STARTS:
                del starts[next(iter(starts))]

    def is_recent(self, name: str) -> bool:
        """Return whether a worker of the model joined or left within the model's grace period."""
        seen = self._models.get(name)
        return seen is not None and seen.at > self._clock.monotonic() - self._grace_of(seen.starts.values())

    def start_s(self, name: str) -> float:
        """Return the median start time of the model's workers in seconds; 0 if none was measured."""
        seen = self._models.get(name)
        measured = [start_s for start_s in seen.starts.values() if start_s > 0] if seen else []
        return median_high(measured) if measured else 0.0

    def grace_s(self, member: Member) -> float:
        """Return for how many seconds jobs wait for a member that has left, or for items that it no longer hosts."""
        if member.connected:
            return self._grace_s  # the member is present and only dropped an item
        starts = (start for seen in self._of(member) for start in seen.starts.values())
        return self._grace_of([member.load.start_s, *starts])

    def _of(self, member: Member) -> list[_SeenModel]:
        return [self._models[model.name] for model in member.models if model.name in self._models]

    def _grace_of(self, starts: Iterable[float]) -> float:
        return max(self._grace_s, min(_STARTS * max(starts, default=0.0), MAX_START_GRACE_S))


class OfferedModels:
    """The models for which a scaler may start a worker, in alphabetical order. None of their workers need run."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._names: tuple[str, ...] = ()
        self._asked_at: dict[str, float] = {}

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def note(self, scalers: Iterable[Member]) -> None:
        """Replace the models with those that these scalers report."""
        pools = [pool for scaler in scalers for pool in scaler.load.pools if pool.kind == kinds.WORKER]
        self._names = tuple(sorted({pool.model for pool in pools if pool.maximum > pool.failed}))
        self._asked_at = {name: at for name, at in self._asked_at.items() if name in self._names}

    def ask(self, name: str) -> None:
        """Note that a caller asked for a model and was told to come again."""
        self._asked_at[name] = self._clock.monotonic()

    def is_asked(self, name: str) -> bool:
        """Return whether a caller asked for a model lately."""
        at = self._asked_at.get(name)
        return at is not None and at > self._clock.monotonic() - _ASKED_S


class RefusedWorkers:
    """The workers that ended recently because they cannot serve their model."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._workers: dict[str, Member] = {}

    def __iter__(self) -> Iterator[Member]:
        """Iterate over the workers, sorted by name."""
        oldest = self._clock.monotonic() - _REFUSED_KEPT_S
        self._workers = {name: worker for name, worker in self._workers.items() if worker.heard_at > oldest}
        return iter([self._workers[name] for name in sorted(self._workers)])

    def note_left(self, member: Member) -> None:
        """Remember a worker that has left, if it had reported why it serves no model. Ignore other members."""
        if member.is_worker and not member.models and member.load.left_out:
            self._workers[member.name] = member
            for name in list(self._workers)[:-_MAX_REFUSED]:
                del self._workers[name]

    def forget(self, member: Member) -> None:
        """Forget the worker that has joined again."""
        if member.is_worker:
            self._workers.pop(member.name, None)


def check_models(registration: fleet_pb2.Registration, others: Iterable[Member]) -> None:
    """Raise ModelMismatch if workers of a model differ in weights or precision, because jobs move between them."""
    if registration.kind != kinds.WORKER:
        return
    served = {model.name: (model, other) for other in others for model in other.models}
    for model in registration.models:
        known, by = served.get(model.name, (model, None))
        if by is not None and _identity(known) != _identity(model):
            alike = known.model_hash == model.model_hash
            todo = "give both the same engine.dtype" if alike else "give one of them another model_name"
            raise ModelMismatch(
                f"{registration.name} has {model.name} as {_identity(model)}, but {by.name} serves it as"
                f" {_identity(known)}; {todo}, or stop it",
                metadata={"model": model.name, "member": by.name},
            )


def merge_workers(models: list[image_pb2.Model], decoders: Sequence[image_pb2.Model] = ()) -> image_pb2.Model:
    """Merge a model of several workers into one that can do what each of them can.

    Args:
        models: The model as each worker registered it; at least one.
        decoders: The models of workers with the role decode, which limit the size of pictures.
    """
    whole = image_pb2.Model()
    whole.CopyFrom(models[0])
    whole.workers = len(models)
    sizes = [*models, *(model for model in decoders if model.model_hash == whole.model_hash)]
    whole.max_pixels = min((model.max_pixels for model in sizes if model.max_pixels), default=0)
    whole.edits_refused_because = next(filter(None, (model.edits_refused_because for model in models)), "")
    for choice in whole.sampler_choices:
        same = [other for model in models for other in model.sampler_choices if _named(other) == _named(choice)]
        # A library may be missing, or of another version, at one worker alone.
        choice.refused_because = next((other.refused_because for other in same if other.refused_because), "")
        for other in same:
            choice.refused_steps.update(other.refused_steps)
    return whole


def _named(choice: image_pb2.SamplerChoice) -> tuple[int, bool]:
    return choice.sampler, choice.use_karras_sigmas


def _identity(model: image_pb2.Model) -> str:
    """Return the properties that all workers of a model must share, so that a job can resume at any of them."""
    return f"{model.model_hash or 'no hash'} in {model.dtype or 'no dtype'}"
