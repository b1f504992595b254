"""What to do about each kind of error, in a person's words. Knows the error tree, not the commands."""

from __future__ import annotations

from bottega import errors
from bottega.client.suite.plan import PortTaken
from bottega.errors import BottegaError


def explained(error: BottegaError, address: str) -> tuple[str, str]:
    """What happened, and what to do (perhaps nothing).

    address: of the gateway that was asked.
    """
    match error:
        case errors.InvalidRequest():
            fields = [f"{item.field.removeprefix('spec.')}: {item.description}" for item in error.violations]
            return ("this cannot be drawn", "\n".join(fields)) if fields else (error.message, "")
        case errors.ModelNotFound():
            return error.message, "bottega models lists what is served."
        case errors.NoWorker():
            return error.message, "bottega fleet shows who has joined; bottega logs says why a worker has not."
        case errors.Draining():
            return error.message, "Try again in a moment."
        case errors.WorkerLost():
            return error.message, "Try again; if it happens every time, bottega logs -n 50 says why."
        case errors.Unavailable():
            return (
                f"no gateway answers at {address}",
                "Start one with: bottega up\nOne that runs elsewhere: --address HOST:PORT or BOTTEGA_ADDRESS.",
            )
        case errors.QueueFull():
            return error.message, f"Try again in {error.retry_after_s or 5:.0f} s."
        case errors.DeadlinePassed():
            return error.message, "Allow more time with --timeout SECONDS, or ask for fewer steps."
        case errors.TooLarge():
            return error.message, "Ask for a smaller picture or for fewer at once."
        case errors.InternalError():
            return (
                f"the suite failed: {error.message}",
                "bottega logs -n 50 says more; bottega doctor looks for causes.",
            )
        case PortTaken():
            return error.message, "bottega doctor says by whom; another one: bottega up --port PORT (0: any)."
        case _:
            return error.message, ""


def exit_status(error: BottegaError) -> int:
    """2 when the request was wrong, as for a wrong option; else 1."""
    return 2 if isinstance(error, errors.InvalidRequest | errors.FieldNotServed) else 1
