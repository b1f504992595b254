"""What to do about errors that ControlNets cause, in a person's words."""

from __future__ import annotations

from bottega import errors
from bottega.errors import BottegaError

_BY_CLASS = {
    errors.ControlNetNotFound: "bottega controlnets lists what is served.",
    errors.ControlNetUnusable: "bottega controlnets lists which model each is for; bottega models what is served.",
    errors.ControlNetExists: "Add it under another name; bottega controlnets lists those that are taken.",
    errors.NoControlNet: "bottega controlnets says who hosts what; bottega logs why a server is not there.",
}
_BY_LIMIT = {
    "budget_bytes": "Ask for fewer ControlNets at once, or raise engine.budget_bytes of the servers that host them.",
    "controlnets": "Host it on another ControlNet server.",
}


def advice_for(error: BottegaError) -> str | None:
    """None where the error is about no ControlNet."""
    if isinstance(error, errors.TooLarge):
        return _BY_LIMIT.get(error.metadata.get("limit", ""))
    if isinstance(error, errors.NotFinite) and error.metadata.get("controlnets"):
        return "Try scales nearer to 0 (--control NAME=IMAGE:SCALE), or each ControlNet by itself, or none of them."
    return _BY_CLASS.get(type(error))
