"""What to do about errors that LoRAs or their store cause, in a person's words."""

from __future__ import annotations

from bottega import errors
from bottega.client.cli.error_help import storage_advice
from bottega.client.cli.escaping import escaped
from bottega.errors import BottegaError

_BY_CLASS = {
    errors.LoraNotFound: "bottega loras lists those that there are.",
    errors.LoraUnusable: "bottega loras lists which model each is for; bottega models what is served.",
    errors.NoLora: "bottega fleet shows whether a LoRA store has joined; bottega logs loras why one has not.",
}


def advice_for(error: BottegaError) -> str | None:
    """None where the error is about no LoRA and no store."""
    if error.metadata.get("service") == "loras" and (advice := _of_the_store(error)) is not None:
        return advice
    if names := error.metadata.get("loras"):  # joined by commas; one where it is damaged
        if isinstance(error, errors.DataLoss):
            return f"Bring it again as it was, which replaces it: bottega loras add {escaped(names)} FILE"
        if isinstance(error, errors.NotFinite):
            return "Try scales nearer to 0 (--lora NAME:SCALE), or each LoRA by itself, or none of them."
    return _BY_CLASS.get(type(error))


def _of_the_store(error: BottegaError) -> str | None:
    """What helps with the same errors of the gateway does not help here."""
    match error:
        case errors.StorageUnavailable():
            return storage_advice(error, "LoRA store")
        case errors.DataLoss():
            return "bottega logs loras -n 50 says what is damaged."
        case errors.TooLarge():
            return ""
    return None
