"""What happened and what to do about it, for each kind of error, in a person's words. Add-ons advise on theirs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType

from bottega import errors
from bottega.client.cli.addons import advice_for
from bottega.client.cli.escaping import escaped
from bottega.client.instance import StateFolderUnusable
from bottega.client.suite.plan import PortTaken
from bottega.client.transport.calls import TlsMismatch
from bottega.client.transport.retry import CallTimeout
from bottega.client.types.messages import SIZE_LIMIT
from bottega.errors import BottegaError
from bottega.v1.generation_pb2 import GenerationSpec

_TOO_BUSY = "Try again when less is waiting: bottega fleet shows what is."
_SMALLER_IMAGES = "Make the input images smaller: they become as large as the picture anyway. JPEG is smaller than PNG."
# As the gateway begins its names of them, the SDK, and commands that draw.
_GIVEN_FILES = ("IMAGE", "--alpha", "--box", "--control", "--ellipse", "--mask")
_GENERATION_FIELDS = frozenset({"spec", "lora", *_GIVEN_FILES, *GenerationSpec.DESCRIPTOR.fields_by_name})

# The gateway's listener for services cannot be reached, or what was asked is another one of its ports.
_ABOUT_THE_FLEET = (
    "Say where it is: --fleet-address HOST:PORT or BOTTEGA_FLEET.\n"
    "Unless it was configured otherwise, only the gateway's own machine reaches it, at port 8472."
)
# For those whose message says what happened. The nearest class of an error counts.
_TODO: Mapping[type[BottegaError], str] = MappingProxyType(
    {
        errors.Unauthenticated: "Its operator makes keys: bottega tenants add NAME. Show one with BOTTEGA_API_KEY.",
        errors.Forbidden: "bottega certs issue operator/NAME makes one; BOTTEGA_TLS_CERTIFICATE and _KEY name it.",
        errors.ModelNotFound: "bottega models lists what is served.",
        errors.JobNotFound: "bottega jobs lists those that are remembered.",
        errors.TraceNotFound: "bottega jobs watch ID follows one that runs. Of those that have ended, a gateway has\n"
        "the last ones' traces, in memory: of jobs before its last start it has none.",
        errors.ImageNotFound: "bottega generate with the same seed draws the same picture again.",
        errors.JobNotFinished: "bottega jobs watch ID follows it; bottega jobs cancel ID ends it.",
        errors.JobCancelled: "bottega generate begins another one.",
        errors.NotFinite: "Try another seed, a lower guidance scale or another sampler.",
        errors.NoWorker: "bottega fleet shows who has joined; bottega logs says why a worker has not.",
        errors.LinksFull: "Try again in a moment; bottega logs says who asks for so many links.",
        errors.Draining: "Try again in a moment.",
        errors.WorkerLost: "Try again; if it happens every time, bottega logs -n 50 says why.",
        errors.ReaderStalled: "Try again; it was stopped for long, or what reads its output was.",
        errors.MethodNotServed: "That service is older than this command (bottega --version), or no Bottega at all.",
        errors.Poisoned: "Do not try it as it is; bottega logs -n 50 says how its workers ended.",
        errors.DataLoss: "Asking again does not help; bottega logs gateway -n 50 says what is damaged.",
        errors.DeadlinePassed: "bottega generate begins another one; --timeout SECONDS gives it more time.",
        errors.FleetFull: "Stop a service that is not needed, or raise max_members in the gateway's configuration.",
        errors.TooLarge: "Ask for a smaller picture or for fewer at once.",
        TlsMismatch: "",
        StateFolderUnusable: "Name another one: --state FOLDER or BOTTEGA_STATE.",
        PortTaken: "bottega doctor says by whom; another one: bottega up --port PORT (0: any).",
    }
)

_START_ONE = (
    "Start one with: bottega up; on a server with its units: systemctl start bottega-gateway\n"
    "One that runs elsewhere: --address HOST:PORT or BOTTEGA_ADDRESS."
)

# Causes by how they begin. SQLite does not tell an output error on a full disk from others.
_NO_ROOM = ("ENOSPC", "EDQUOT", "EFBIG", "SQLITE_FULL", "SQLITE_IOERR")
_NO_DESCRIPTOR = ("EMFILE", "ENFILE")
_FORBIDDEN = ("EROFS", "EACCES", "EPERM", "SQLITE_READONLY", "SQLITE_PERM")


def explain(error: BottegaError, address: str, *, timeout_advice: str = "") -> tuple[str, str]:
    """What happened, and what to do (perhaps nothing).

    address: of the gateway that was asked. timeout_advice: of the command, where its own time was too short; empty
    where nobody can give it more.
    """
    if isinstance(error, errors.DeadlineUnmeetable | CallTimeout):
        return error.message, timeout_advice or _TOO_BUSY
    if error.metadata.get("listener") == "fleet":
        return error.message, _ABOUT_THE_FLEET
    if (advice := advice_for(error)) is not None:
        return error.message, advice
    return _about_the_gateway(error, address)


def _about_the_gateway(error: BottegaError, address: str) -> tuple[str, str]:
    if isinstance(error, errors.TooLarge) and error.metadata.get("limit") == SIZE_LIMIT:
        return error.message, _SMALLER_IMAGES if error.metadata.get("images") != "0" else "Ask for less at once."
    for kind in type(error).__mro__:
        if kind in _TODO:
            return error.message, _TODO[kind]
    match error:
        case errors.InvalidRequest():
            return _explain_violations(error)
        case errors.ConfigError():
            what, *wrong = error.message.split("\n")
            return what, "\n".join(escaped(line.strip()) for line in wrong)
        case errors.StorageUnavailable():
            return error.message, storage_advice(error, "gateway")
        case errors.Unavailable():
            return f"no gateway answers at {address}", _START_ONE
        case errors.QueueFull():
            return error.message, f"Try again in {error.retry_after_s or 5:.0f} s."
        case errors.InternalError():
            return (
                f"the suite failed: {error.message}",
                "bottega logs -n 50 says more; bottega doctor looks for causes.",
            )
        case _:
            return error.message, ""


def storage_advice(error: errors.StorageUnavailable, service: str) -> str:
    """What to do where a service cannot store something: only some of the causes are somebody's to remove.

    service: whose disk it is, as people call it.
    """
    cause = error.metadata.get("cause", "")
    if cause.startswith(_NO_ROOM):
        return f"Make room on the {service}'s disk; it goes on by itself then."
    if cause.startswith(_FORBIDDEN):
        return f"Let the {service} write to its folder; it goes on by itself then."
    if cause.startswith(_NO_DESCRIPTOR):
        return f"The {service} goes on by itself when connections end; bottega doctor says how to allow more."
    return f"Try again in {error.retry_after_s or 1:.0f} s; if it stays so, bottega logs -n 50 says why."


def exit_status(error: BottegaError) -> int:
    """2 when the request was wrong, as for a wrong option; else 1."""
    return 2 if isinstance(error, errors.InvalidRequest | errors.FieldNotServed) else 1


def _explain_violations(error: errors.InvalidRequest) -> tuple[str, str]:
    if not error.violations:
        return error.message, ""
    drawing = any(_head(item.field) in _GENERATION_FIELDS for item in error.violations)
    fields = [escaped(f"{item.field.removeprefix('spec.')}: {item.description}") for item in error.violations]
    return "this cannot be drawn" if drawing else "this cannot be asked", "\n".join(fields)


def _head(field: str) -> str:
    return re.split(r"[.\[ ]", field, maxsplit=1)[0]
