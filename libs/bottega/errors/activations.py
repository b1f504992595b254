"""The activation store."""

from __future__ import annotations

from bottega.errors.availability import Unavailable
from bottega.v1 import error_pb2


class NoActivationStore(Unavailable, reason=error_pb2.ERROR_REASON_NO_ACTIVATION_STORE):
    """No activation store can be reached. Edits are drawn without: what is not recorded is computed."""
