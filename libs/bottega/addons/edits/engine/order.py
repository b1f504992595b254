"""The gateway's message about activations in an attempt, the decisions of earlier attempts, and a job's query."""

from __future__ import annotations

import re
from concurrent.futures import Future
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from bottega import kinds, rules
from bottega.engine.events import Decisions
from bottega.engine.job import EngineOrder
from bottega.engine.spans import StoreWork
from bottega.errors import InvalidRequest, Violation
from bottega.v1.activations_pb2 import ActivationsOrder, EditDecision

_FIELD = f"addons[{kinds.ACTIVATIONS}]"
_DECISION_FIELD = f"decisions[{kinds.ACTIVATIONS}]"
_MAX_TENANT_CHARACTERS = 128
_RECORDING = re.compile("([0-9a-f]{32})?")
_SOURCE = re.compile("([0-9a-f]{64})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """The decision of an attempt: which recording supplies the image latent and noise outside the mask."""

    recording: str = ""
    """ID of the recording whose image latent and noise are used; empty if the edit draws its own."""
    seed: int = 0
    """The seed with which the recording's image latent and noise were drawn."""


def read_order(order: EngineOrder) -> ActivationsOrder:
    """Return the gateway's ActivationsOrder; an empty one without any. Raise InvalidRequest with all violations."""
    try:
        order_part = ActivationsOrder.FromString(order.addons.get(kinds.ACTIVATIONS, b""))
    except DecodeError:
        raise InvalidRequest(f"{_FIELD} is not an ActivationsOrder") from None
    violations = []
    if len(order_part.tenant) > _MAX_TENANT_CHARACTERS:
        rule = f"must be at most {_MAX_TENANT_CHARACTERS} characters"
        violations.append(Violation(field=f"{_FIELD}.tenant", description=rule))
    if not _SOURCE.fullmatch(order_part.source):
        violations.append(Violation(field=f"{_FIELD}.source", description="must be 64 hex digits, or empty"))
    rules.refuse(violations)
    return order_part


def read_decision(decisions: Decisions) -> Decided | None:
    """Return the decision of an earlier attempt; None if there is none. Raise InvalidRequest if it is malformed."""
    if kinds.ACTIVATIONS not in decisions:
        return None
    try:
        decision = EditDecision.FromString(decisions[kinds.ACTIVATIONS])
    except DecodeError:
        raise InvalidRequest(f"{_DECISION_FIELD} is not an EditDecision") from None
    if not _RECORDING.fullmatch(decision.recording):
        rules.refuse([Violation(field=f"{_DECISION_FIELD}.recording", description="must be 32 hex digits, or empty")])
    if decision.seed > rules.MAX_SEED + rules.MAX_IMAGES:
        rules.refuse([Violation(field=f"{_DECISION_FIELD}.seed", description="must be a seed")])
    return Decided(recording=decision.recording, seed=decision.seed)


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
