"""A service that the fleet cannot take in."""

from __future__ import annotations

from bottega.errors.base import BottegaError, Code
from bottega.v1 import error_pb2


class ModelMismatch(BottegaError, code=Code.FAILED_PRECONDITION, reason=error_pb2.ERROR_REASON_MODEL_MISMATCH):
    """Other workers serve a model of that name with another hash or element type."""


class FleetFull(BottegaError, code=Code.RESOURCE_EXHAUSTED, reason=error_pb2.ERROR_REASON_FLEET_FULL):
    """The fleet has as many members as it may have; metadata["max_members"] says how many."""
