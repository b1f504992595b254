"""What the gateway says of recorded activations in its part of an order, and what earlier attempts have decided."""

from __future__ import annotations

import re
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from bottega import kinds, rules
from bottega.diffusion.engine.events import Decisions
from bottega.diffusion.engine.job import EngineOrder
from bottega.errors import InvalidRequest, Violation
from bottega.v1.activations_pb2 import ActivationsOrder, EditDecision

_FIELD = f"addons[{kinds.ACTIVATIONS}]"
_DECISION_FIELD = f"decisions[{kinds.ACTIVATIONS}]"
_MAX_TENANT_CHARACTERS = 128
_RECORDING = re.compile("([0-9a-f]{32})?")
_SOURCE = re.compile("([0-9a-f]{64})?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What an attempt has decided. recording: empty where the edit has a latent and noise of its own. seed: else, the
    one that those of the recording were drawn with.
    """

    recording: str = ""
    seed: int = 0


def read_order(order: EngineOrder) -> ActivationsOrder:
    """What it says; nothing where the gateway says nothing of it. Raises InvalidRequest with all violations."""
    try:
        said = ActivationsOrder.FromString(order.addons.get(kinds.ACTIVATIONS, b""))
    except DecodeError:
        raise InvalidRequest(f"{_FIELD} is no ActivationsOrder") from None
    violations = []
    if len(said.tenant) > _MAX_TENANT_CHARACTERS:
        rule = f"must be at most {_MAX_TENANT_CHARACTERS} characters"
        violations.append(Violation(field=f"{_FIELD}.tenant", description=rule))
    if not _SOURCE.fullmatch(said.source):
        violations.append(Violation(field=f"{_FIELD}.source", description="must be 64 hex digits, or empty"))
    rules.refuse(violations)
    return said


def read_decision(decisions: Decisions) -> Decided | None:
    """What an earlier attempt has decided; None where it has not. Raises InvalidRequest."""
    if kinds.ACTIVATIONS not in decisions:
        return None
    try:
        said = EditDecision.FromString(decisions[kinds.ACTIVATIONS])
    except DecodeError:
        raise InvalidRequest(f"{_DECISION_FIELD} is no EditDecision") from None
    if not _RECORDING.fullmatch(said.recording):
        rules.refuse([Violation(field=f"{_DECISION_FIELD}.recording", description="must be 32 hex digits, or empty")])
    if said.seed > rules.MAX_SEED + rules.MAX_IMAGES:
        rules.refuse([Violation(field=f"{_DECISION_FIELD}.seed", description="must be a seed")])
    return Decided(recording=said.recording, seed=said.seed)
