"""What to do about errors of templates, and of the stores that keep them, in a person's words."""

from __future__ import annotations

from bottega import errors, kinds
from bottega.client.cli.error_help import storage_advice
from bottega.errors import BottegaError

_NO_STORE = (
    "bottega fleet shows whether an activation store has joined; bottega logs activations why one has not.\n"
    "Edits are drawn meanwhile: workers use what is in their own memory, and compute the rest."
)
_NOT_KEPT = (
    "--no-masked-blocks computes all with the other parameters: another picture, which can be drawn again.\n"
    "Edits with --fidelity exact, or with --seed and no word of fidelity, can always be."
)
_NOBODY_IDLE = (
    "Try again when one is idle (bottega fleet), or name the worker that shall measure all the same: --worker NAME."
)


def advice_for(error: BottegaError) -> str | None:
    """None where the error is about no store and no template."""
    if isinstance(error, errors.NoActivationStore):
        return _NO_STORE
    if isinstance(error, errors.RecordingNotKept):
        return _NOT_KEPT
    if error.metadata.get("service") != kinds.ACTIVATIONS:
        return None
    match error:
        case errors.NoWorker():
            return _NOBODY_IDLE
        case errors.StorageUnavailable():
            return storage_advice(error, "activation store")
        case errors.DataLoss():
            return "bottega logs activations -n 50 says what is damaged; edits compute what it cannot give."
    return None
